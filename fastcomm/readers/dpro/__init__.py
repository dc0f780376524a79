"""Trials of dPRO and BytePS: TensorFlow, MXNet, Horovod, NCCL and BytePS profiles."""
