"""METRIC 4: how many bytes each kind of parallelism moves."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

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


def volume(sums: pa.Table, iterations: int | None, ranks: int) -> dict[str, Volume]:
    """The volume of each tag that has events, from `sums.by_rank`.

    It is that of so many iterations of so many ranks, those whose times are known: null where
    none are.
    """
    tags = sums["tag"].to_numpy()
    return {
        TAGS[tag]: _of_one_tag(sums.filter(pa.array(tags == tag)), iterations, ranks)
        for tag in np.unique(tags)
    }


def _of_one_tag(sums: pa.Table, iterations: int | None, ranks: int) -> Volume:
    total = _total(sums)
    inside = sums.filter(sums["timed"])
    # Ranks that know their times and have no event of the tag move nothing of it.
    timed = _total(inside) if inside.num_rows or total is None else 0
    if not iterations:
        timed = None
    return Volume(
        comm_bytes=total,
        comm_events=int(sums["events"].to_numpy().sum()),
        bytes_per_iteration=None if timed is None else timed / (iterations or 1),
        bytes_per_step_per_gpu=None if timed is None else timed / ((iterations or 1) * ranks),
    )


def _total(sums: pa.Table) -> int | None:
    if not sums["known_events"].to_numpy().sum():
        return None
    # Of many ranks it may need more than 64 bits.
    return sum(map(int, sums["known_bytes"].to_pylist()))
