"""What a trace is: tables, groups and their tags, iterations; and a run of many ranks."""
