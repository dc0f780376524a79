"""The chain of work that determines the time of a step, and what changes of it would save."""
