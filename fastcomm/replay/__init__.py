"""Replay: statistics and dependency graphs of a distributed step, and who holds it up."""
