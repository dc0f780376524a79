"""Why the sizes of some communication of a Kineto trace are unknown, and what would help."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.events import Events, Ints, Rows
from fastcomm.readers.kineto_operators import OPERATORS
from fastcomm.readers.kineto_sizes import Said, is_no_operation, overflowed
from fastcomm.readers.patterns import Named
from fastcomm.trace.schema import OP
from fastcomm_kernels.json_numbers import NULL

Flags = NDArray[np.bool_]

# By the time of the events, where that is absolute: PyTorch 2.4 was released in July 2024.
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
    "arguments": "what the trace says of them is not understood",
    "launches": "no launches are recorded, which lead to their operators: record with "
    "ProfilerActivity.CPU, too",
    "launch": "their launch is not recorded (was it before the recording began?)",
    "old": "nothing on the host tells of them: record with PyTorch 2.4 or newer, with "
    "ProfilerActivity.CPU and record_shapes=True",
    "library": "the library that launched them tells the profiler no sizes, and no setting "
    "records them",
}


def reasons(
    said: Said,
    op: NDArray[np.int8],
    named: Sequence[Named],
    rows: Rows,
    kind: Ints,
) -> tuple[str, ...]:
    """Return why sizes are unknown, the most frequent reason first.

    Parameters
    ----------
    said, op
        What is said of each kind of event, and its operation.
    named
        What names say of communication; the column `named` of `said` leads here.
    rows
        The rows of the events of unknown size.
    kind
        The kind of each of these events.

    """
    if not len(rows):
        return ()
    by_kind = _by_kind(said, op)
    launch = said.events.launch_of(rows)
    found = _by_launch(said.events, launch, _is_nccl(said, named)[kind])
    told = np.array(by_kind, np.str_)[kind]
    words = np.where(told != "", told, found)
    words = np.where(_in_graph(said.events, launch), "graph", words)
    names, counts = np.unique(words, return_counts=True)
    order = np.lexsort((names, -counts))
    texts = [_REASONS[str(names[place])] for place in order]
    if len(texts) == 1:
        return (texts[0],)
    return tuple(f"{counts[place]}: {text}" for place, text in zip(order, texts, strict=True))


def _by_kind(said: Said, op: NDArray[np.int8]) -> list[str]:
    """The reason for each kind of event by what is said of it; "" where nothing is said."""
    columns = said.columns
    silent = said.per_text("Collective name", is_no_operation)
    is_range = (columns["call"] != NULL) | (columns["mark"] != NULL)
    is_range |= columns["operator"] != NULL
    on_device = said.per_text("operator", _is_on_device) == 1
    dims = [columns[f"{range_} Input Dims"] for range_ in ("call", "mark", "operator")]
    no_shapes = np.all([column == NULL for column in dims], axis=0)
    counted = (columns["In msg nelems"] != NULL) | (columns["Out msg nelems"] != NULL)
    needs_group = np.isin(op, [OP[name] for name in ("AllGather", "ReduceScatter")])
    age = "_old" if is_old(said.events) else ""
    return [
        str(word)
        for word in np.select(
            [
                silent == 1,
                overflowed(said),
                on_device,
                is_range & no_shapes & ~counted,
                needs_group & (is_range | counted),
                is_range | (silent == 0),
            ],
            ["coalesced", "overflowed", "device", f"shapes{age}", f"group{age}", "arguments"],
            "",
        )
    ]


def _is_on_device(name: str) -> int:
    return int(name in OPERATORS and OPERATORS[name].given is None)


def _is_nccl(said: Said, named: Sequence[Named]) -> Flags:
    return np.array([each.library == "NCCL" for each in named], np.bool_)[said.columns["named"]]


def _by_launch(events: Events, launch: Rows, is_nccl: Flags) -> NDArray[np.str_]:
    """The reason for each event around whose launch nothing is said."""
    if not len(events.rows("runtime")):
        return np.full(len(launch), "launches")
    old = is_nccl & is_old(events)
    return np.select([launch < 0, old], ["launch", "old"], "library")


def _in_graph(events: Events, launch: Rows) -> Flags:
    """Events that a graph's launch started."""
    codes = np.where(launch >= 0, events.columns["name"][launch].astype(np.int64), NULL)
    in_graph: Flags = events.by_text(codes, lambda name: int("GraphLaunch" in name)) == 1
    return in_graph


def is_old(events: Events) -> bool:
    """Return whether a trace may be of a PyTorch before 2.4, as far as its times tell."""
    start = events.columns["start"]
    return not len(start) or not int(start[0]) >= _ABSOLUTE or int(start[0]) < _SINCE_2_4
