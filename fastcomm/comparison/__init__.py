"""Compare two runs: what changed, and what it costs."""
