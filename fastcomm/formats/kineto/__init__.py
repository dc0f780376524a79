"""Read traces of the PyTorch profiler."""
