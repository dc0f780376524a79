"""Watch the profiled windows of running jobs: what each costs, and what changed."""
