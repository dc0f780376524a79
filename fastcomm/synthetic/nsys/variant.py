"""What may differ between two exports of one job, as versions, flags and captures differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["sqlite", "parquetdir", "arrowdir"]
Payload = Literal["blob", "blob-total", "json", "json-strings", "json-ids", "none"]
Release = Literal["2.22", "2.24", "2.27", "2.28"]
Graph = Literal["none", "graph", "node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NsysVariant:
    """How a report was captured and exported; the default has all that a metric can use."""

    payload: Payload = "blob"  # "blob": the header's last field is 32; "blob-total": 32 + size
    nccl: Release = "2.27"
    init: bool = True  # False: the capture starts after the communicators are made
    schema_rows: bool = True
    session_start: bool = True
    normalized: bool = False  # times are UTC, not since the start of the capture
    clock_skew_ns: Mapping[int, int] = field(default_factory=dict)  # by number of report
    mpi_ranks: bool = False
    domain_rows: bool = True  # False: a file cut out of another has no row of type 75
    graph: Graph = "none"  # how the launches of the second step are recorded
    groups: bool = True  # False: a lone send or receive launches inside its own range
    other_thread: bool = False  # non-blocking communicators launch from a thread of their own
    registered_names: bool = False  # every name of a range is in StringIds
    one_device: bool = False  # a process sees its own GPU alone, and calls it 0

    @property
    def has_blobs(self) -> bool:
        """Whether payloads were exported as binary data."""
        return self.payload in {"blob", "blob-total"}

    @property
    def has_json(self) -> bool:
        """Whether payloads were exported as JSON."""
        return self.payload.startswith("json")
