"""Explain why sizes of communication in a Kineto trace are unknown."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.kineto.sizes import OPERATORS, Metadata, is_no_operation, overflowed
from fastcomm.readers.patterns import Named
from fastcomm.trace.events import Events
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL, Flags, Ints

# Absolute times tell the version: PyTorch 2.4 was released in July 2024.
_SINCE_2_4 = 1_721_800_000 * 10**9
_ABSOLUTE = 1_600_000_000 * 10**9
_REASONS = {
    "graph": "a CUDA graph replays them, and its kernels are recorded without sizes: profile "
    "without graphs to have them",
    "coalesced": "they end a group of coalesced operations, whose sizes no setting records",
    "overflowed": "their counts overflowed 32 bits: record with a newer PyTorch",
    "device": "their operator takes the sizes from the device, and no setting records them",
    "group": "how many ranks took part is unknown",
    "group_old": "how many ranks took part is unknown: record with PyTorch 2.4 or newer",
    "shapes": "the trace has no shapes of their operators: record with record_shapes=True",
    "shapes_old": "the trace has no shapes of their operators: record with "
    "record_shapes=True, or with PyTorch 2.4 or newer",
    "arguments": "the metadata of their operators is not understood",
    "launches": "the launches that lead to their operators are not recorded: record with "
    "ProfilerActivity.CPU, too",
    "launch": "their launch is not recorded (was it before the recording began?)",
    "old": "the host's events have no metadata of them: record with PyTorch 2.4 or newer, with "
    "ProfilerActivity.CPU and record_shapes=True",
    "library": "the library that launched them reports no sizes to the profiler, and no "
    "setting records them",
}


def reasons(
    metadata: Metadata,
    op: NDArray[np.int8],
    named: Sequence[Named],
    rows: Ints,
    kind: Ints,
) -> tuple[str, ...]:
    """Return why sizes are unknown, the most frequent reason first.

    Parameters
    ----------
    metadata, op
        Metadata of each kind of event, and its operation.
    named
        Kernel names, indexed by the column "named" of the metadata.
    rows
        Rows of the events of unknown size.
    kind
        The kind of each of these events.

    Returns
    -------
    tuple of str
        Sentences; several begin with the number of their events.

    """
    if not len(rows):
        return ()
    by_kind = _by_kind(metadata, op)
    launch = metadata.events.launch_of(rows)
    by_launch = _by_launch(metadata.events, launch, _is_nccl(metadata, named)[kind])
    key = np.array(by_kind, np.str_)[kind]
    key = np.where(key != "", key, by_launch)
    key = np.where(_in_graph(metadata.events, launch), "graph", key)
    names, counts = np.unique(key, return_counts=True)
    order = np.lexsort((names, -counts))
    texts = [_REASONS[str(names[place])] for place in order]
    if len(texts) == 1:
        return (texts[0],)
    return tuple(f"{counts[place]}: {text}" for place, text in zip(order, texts, strict=True))


def _by_kind(metadata: Metadata, op: NDArray[np.int8]) -> list[str]:
    """Return the key of `_REASONS` for each kind of event; "" without any metadata."""
    columns = metadata.columns
    is_unnamed = metadata.per_text("Collective name", is_no_operation)
    is_range = (columns["call"] != NULL) | (columns["mark"] != NULL)
    is_range |= columns["operator"] != NULL
    on_device = metadata.per_text("operator", _is_on_device) == 1
    dims = [columns[f"{range_} Input Dims"] for range_ in ("call", "mark", "operator")]
    no_shapes = np.all([column == NULL for column in dims], axis=0)
    counted = (columns["In msg nelems"] != NULL) | (columns["Out msg nelems"] != NULL)
    needs_group = np.isin(op, [OP[name] for name in ("AllGather", "ReduceScatter")])
    age = "_old" if is_old(metadata.events) else ""
    return [
        str(word)
        for word in np.select(
            [
                is_unnamed == 1,
                overflowed(metadata),
                on_device,
                is_range & no_shapes & ~counted,
                needs_group & (is_range | counted),
                is_range | (is_unnamed == 0),
            ],
            ["coalesced", "overflowed", "device", f"shapes{age}", f"group{age}", "arguments"],
            "",
        )
    ]


def _is_on_device(name: str) -> int:
    return int(name in OPERATORS and OPERATORS[name].input is None)


def _is_nccl(metadata: Metadata, named: Sequence[Named]) -> Flags:
    return np.array([kernel.library == "NCCL" for kernel in named], np.bool_)[
        metadata.columns["named"]
    ]


def _by_launch(events: Events, launch: Ints, is_nccl: Flags) -> NDArray[np.str_]:
    """Return the key of `_REASONS` for each event without metadata."""
    if not len(events.rows("runtime")):
        return np.full(len(launch), "launches")
    old = is_nccl & is_old(events)
    return np.select([launch < 0, old], ["launch", "old"], "library")


def _in_graph(events: Events, launch: Ints) -> Flags:
    """Return which events a graph's launch started."""
    codes = np.where(launch >= 0, events.name[launch].astype(np.int64), NULL)
    in_graph: Flags = events.by_text(codes, lambda name: int("GraphLaunch" in name)) == 1
    return in_graph


def is_old(events: Events) -> bool:
    """Return whether the times of a trace allow a PyTorch before 2.4."""
    start = events.start
    return not len(start) or not int(start[0]) >= _ABSOLUTE or int(start[0]) < _SINCE_2_4
