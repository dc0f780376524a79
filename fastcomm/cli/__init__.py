"""The command line: the main group, options, progress, messages."""
