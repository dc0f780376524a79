"""What fastcomm raises on purpose."""


class FastcommError(Exception):
    """The user can mend this: the message says where it is, what was found, what was wanted."""


class SchemaError(FastcommError):
    """A table lacks a column, or a column has the wrong type."""


class TraceFileError(FastcommError):
    """One file cannot be read; `--keep-going` leaves its rank out and goes on."""


class ConfigError(FastcommError):
    """An option or a configuration file contradicts itself or the run."""


class ClusterError(FastcommError):
    """The workers, or what they have in common, cannot do the work: no rank is at fault."""
