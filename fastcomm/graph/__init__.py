"""Dependency graphs of events, of operations on devices, and edits of their durations."""
