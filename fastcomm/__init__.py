"""Where the time of a distributed training step goes, and why."""

__version__ = "0.1.0"
