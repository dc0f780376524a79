"""The events of all ranks in a few steps, on one clock."""
