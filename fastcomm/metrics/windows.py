"""METRIC 2: the windows between phases of communication of one tag."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.pieces import columns
from fastcomm.metrics.view import View
from fastcomm.trace.schema import TAGS
from fastcomm_kernels import phases


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWindows:
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
            "rank": view.rank[segment],
            "iteration": view.number[segment],
            "from": source,
            "to": target,
            "window_ns": length,
        }
    )


Stock = Sequence[pa.Table | Path]  # windows of some ranks each: in memory, or in a file


def whole(stock: Stock) -> pa.Table:
    """The windows of all ranks, by rank."""
    names = ("rank", "iteration", "from", "to", "window_ns")
    table = pa.concat_tables([columns(each, names) for each in stock]).combine_chunks()
    return table.take(pa.array(np.argsort(table["rank"].to_numpy(), kind="stable")))


def windows_from(stock: Stock, source: int) -> list[PhaseWindows]:
    """The statistics of the windows behind phases of one tag, in the order of TAGS."""
    parts = [_own(columns(each, ("from", "to", "window_ns")), source) for each in stock]
    target, length = (np.concatenate(each) for each in zip(*parts, strict=True))
    return [_statistics(source, to, length[target == to]) for to in np.unique(target).tolist()]


def _own(table: pa.Table, source: int) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    own = table["from"].to_numpy() == source
    return table["to"].to_numpy()[own], table["window_ns"].to_numpy()[own]


def _statistics(source: int, target: int, length: NDArray[np.int64]) -> PhaseWindows:
    return PhaseWindows(
        source=TAGS[source],
        target=TAGS[target],
        count=len(length),
        mean_ns=int(length.sum()) / len(length),
        p50_ns=float(np.percentile(length, 50)),
        p95_ns=float(np.percentile(length, 95)),
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
