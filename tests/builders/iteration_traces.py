"""Traces with marks of steps."""

from builders import kineto_text as k

WORK = [k.kernel("gemm", 0, 5), k.kernel("gemm", 90, 10)]


STEPS = [k.mark("ProfilerStep#1", 0, 10), k.mark("ProfilerStep#2", 10, 10)]
