"""Find the workers that slow down a production job, from its table of operations."""
