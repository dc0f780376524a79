"""Made-up jobs that hang, and others that do not, as dumps of PyTorch's flight recorder."""
