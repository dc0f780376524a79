"""Write a synthetic job as exports of Nsight Systems, in common formats and versions."""

from fastcomm.synthetic.nsys.big import write_nsys_big
from fastcomm.synthetic.nsys.files import write_nsys
from fastcomm.synthetic.nsys.tables import NsysVariant

__all__ = ["NsysVariant", "write_nsys", "write_nsys_big"]
