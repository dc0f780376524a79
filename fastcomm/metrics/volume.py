"""METRIC 4: how many bytes each kind of parallelism moves."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.metrics.view import UNKNOWN
from fastcomm.trace.schema import TAGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Of the events of one tag. A collective counts once a rank: this is no traffic on links.

    Bytes are those of the events whose size is known, null where none is.
    """

    comm_bytes: int | None
    comm_events: int
    bytes_per_iteration: float | None
    bytes_per_step_per_gpu: float | None


def volume(events: pa.Table, iterations: int, ranks: int) -> dict[str, Volume]:
    """The volume of each tag that has events, in so many iterations of so many ranks."""
    tags = events["tag"].to_numpy()
    count = events["bytes"].fill_null(UNKNOWN).to_numpy()
    return {
        TAGS[tag]: _of_one_tag(count[tags == tag], iterations, ranks) for tag in np.unique(tags)
    }


def _of_one_tag(count: np.ndarray, iterations: int, ranks: int) -> Volume:
    known = count[count != UNKNOWN]
    total = int(known.sum()) if len(known) else None
    return Volume(
        comm_bytes=total,
        comm_events=len(count),
        bytes_per_iteration=None if total is None else total / iterations,
        bytes_per_step_per_gpu=None if total is None else total / (iterations * ranks),
    )
