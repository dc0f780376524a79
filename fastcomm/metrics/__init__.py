"""Measure where a step's time goes, by parallelism and by rank."""
