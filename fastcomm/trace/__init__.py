"""What a trace is: its tables, its groups and their tags, its iterations, a run of many ranks."""
