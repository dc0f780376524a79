"""Imported by the server that workers are forked from: they begin with all kernels loaded."""

from fastcomm.engine.warm import run_kernels

run_kernels()
