"""Measure a training job while it runs: two lines in the script that trains.

This package imports PyTorch only when it is called.
"""

from fastcomm.torch.handler import Keep as Keep
from fastcomm.torch.handler import trace_handler as trace_handler
from fastcomm.torch.schedule import profiler as profiler
