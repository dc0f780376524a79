"""Nsight Systems exports: SQLite files, parquetdir and arrowdir; each process is a rank.

What the parts of the file mean, and how they differ from version to version, stands in the
modules: `layout` names tables and columns, `export` reads them from any kind of file.
"""

from fastcomm.readers.nsys.find import claims, find
from fastcomm.readers.nsys.project import project
from fastcomm.readers.nsys.read import read

__all__ = ["claims", "find", "project", "read"]
