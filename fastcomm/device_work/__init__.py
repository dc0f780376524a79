"""What runs on the devices: kernels by name, operator and module, their FLOPs and bytes."""
