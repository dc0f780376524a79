"""The version of fastcomm; the package's metadata and its pages take it from here."""

__version__ = "0.1.0"
