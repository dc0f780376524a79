"""Graphs of events and of operations, and what-if edits of their durations."""
