"""Hardware as data: GPUs, links and curves, shipped, a user's own, or measured."""
