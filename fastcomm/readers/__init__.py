"""From a file to a `Trace`: one module a format; `runs.open_run` finds format and ranks."""
