"""Read files as traces: a module or a package a format, and what formats share."""
