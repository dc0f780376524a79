"""The made-up job as exports of Nsight Systems, in the formats and versions that are about."""

from fastcomm.synthetic.nsys.big import write_nsys_big
from fastcomm.synthetic.nsys.files import write_nsys
from fastcomm.synthetic.nsys.tables import NsysVariant

__all__ = ["NsysVariant", "write_nsys", "write_nsys_big"]
