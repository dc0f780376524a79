"""A synthetic training job in the formats of real profilers, for demo, tests and benchmarks."""

from fastcomm.synthetic.files import write
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import Variant
from fastcomm.synthetic.nsys import NsysVariant, write_nsys, write_nsys_big
from fastcomm.synthetic.table import TableJob, write_table
from fastcomm.synthetic.truth import planted, truth

__all__ = [
    "Job",
    "NsysVariant",
    "TableJob",
    "Variant",
    "planted",
    "truth",
    "write",
    "write_nsys",
    "write_nsys_big",
    "write_table",
]
