"""Hardware as data: GPUs, links and curves, shipped as TOML files, a user's own, or measured."""
