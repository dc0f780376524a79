"""METRIC 2: the windows between phases of communication of one tag."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.view import View
from fastcomm.trace.schema import TAGS
from fastcomm_kernels import phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Windows from phases of one tag to phases of another, in ns; negative: they overlap."""

    source: str
    target: str
    count: int
    mean_ns: float
    p50_ns: float
    p95_ns: float


def rows(view: View) -> pa.Table:
    """One row a window: rank, iteration, tags as indices into TAGS, length."""
    comm = view.comm
    found = phases.phases(comm.start, comm.stop, comm.tag, comm.iteration)
    length, source, target, segment = phases.windows(*found)
    return pa.table(
        {
            "rank": np.full(len(length), view.rank),
            "iteration": view.number[segment],
            "from": source,
            "to": target,
            "window_ns": length,
        }
    )


def windows(table: pa.Table) -> tuple[Window, ...]:
    """The statistics of each pair of tags that follow each other, in the order of TAGS."""
    return tuple(
        Window(
            source=TAGS[source],
            target=TAGS[target],
            count=len(length),
            mean_ns=int(length.sum()) / len(length),
            p50_ns=float(np.percentile(length, 50)),
            p95_ns=float(np.percentile(length, 95)),
        )
        for (source, target), length in _by_pair(table)
    )


def cdf(table: pa.Table) -> pa.Table:
    """The cumulative distribution of each pair's windows: the share that is no longer."""
    parts = [
        pa.table(
            {
                "from": pa.array([TAGS[source]] * len(length)),
                "to": pa.array([TAGS[target]] * len(length)),
                "window_ns": np.sort(length),
                "share": np.arange(1, len(length) + 1) / len(length),
            }
        )
        for (source, target), length in _by_pair(table)
    ]
    empty = pa.schema(
        [("from", pa.string()), ("to", pa.string()), ("window_ns", "i8"), ("share", "f8")]
    )
    return pa.concat_tables([empty.empty_table(), *parts])


Pair = tuple[int, int]


def _by_pair(table: pa.Table) -> list[tuple[Pair, NDArray[np.int64]]]:
    source, target, length = (table[name].to_numpy() for name in ("from", "to", "window_ns"))
    key = source.astype(np.int64) * len(TAGS) + target
    return [(divmod(int(pair), len(TAGS)), length[key == pair]) for pair in np.unique(key)]
