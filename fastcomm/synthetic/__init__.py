"""A made-up training job, written in the formats of real profilers: demo, tests, benchmarks."""

from fastcomm.synthetic.files import write
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.rows import Variant
from fastcomm.synthetic.truth import truth

__all__ = ["Job", "Variant", "truth", "write"]
