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


def volume(events: pa.Table, iterations: int | None, ranks: int) -> dict[str, Volume]:
    """The volume of each tag that has events, in so many iterations of so many ranks.

    Those are the iterations and ranks whose times are known: null where none are.
    """
    tags = events["tag"].to_numpy()
    count = events["bytes"].fill_null(UNKNOWN).to_numpy()
    inside = events["iteration"].is_valid().to_numpy()
    return {
        TAGS[tag]: _of_one_tag(count[tags == tag], inside[tags == tag], iterations, ranks)
        for tag in np.unique(tags)
    }


def _of_one_tag(
    count: np.ndarray, inside: np.ndarray, iterations: int | None, ranks: int
) -> Volume:
    total = _total(count)
    # Ranks that know their times and have no event of the tag move nothing of it.
    timed = _total(count[inside]) if inside.any() or total is None else 0
    if not iterations:
        timed = None
    return Volume(
        comm_bytes=total,
        comm_events=len(count),
        bytes_per_iteration=None if timed is None else timed / (iterations or 1),
        bytes_per_step_per_gpu=None if timed is None else timed / ((iterations or 1) * ranks),
    )


def _total(count: np.ndarray) -> int | None:
    known = count[count != UNKNOWN]
    return int(known.sum()) if len(known) else None
