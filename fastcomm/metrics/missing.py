"""Replace numbers by null where the input lacks what they need, and say why."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from fastcomm.trace.run import ranges
from fastcomm.trace.trace import LACKS, NO_DEVICE
from fastcomm.units import plural

# Columns of the iterations that need what is lacking, by their beginnings and endings.
_COMPUTE = (("exact_",), ("_overlapped_ns",))
_DEVICE = (("spec_", "exact_", "comm_bytes"), ("_union_ns", "_overlapped_ns"))
_TIMES = (
    ("iteration", "start_ns", "stop_ns", "time_ns", "spec_", "exact_"),
    ("_union_ns", "_overlapped_ns"),
)
_UNKNOWN = {
    **dict.fromkeys(NO_DEVICE, _DEVICE),
    "compute": _COMPUTE,
    "times": _TIMES,
}


def in_iterations(table: pa.Table, lacks: Sequence[str]) -> pa.Table:
    """Return the table of iterations with null for what is unknown."""
    for word, (begins, ends) in _UNKNOWN.items():
        if word in lacks:
            names = [n for n in table.column_names if n.startswith(begins) or n.endswith(ends)]
            table = _without(table, names)
    return table


def in_events(table: pa.Table, lacks: Sequence[str]) -> pa.Table:
    """The table of communication events; durations are known in any case."""
    alone = ["alone_ns"]
    unknown = {
        "compute": alone,
        "device_kinds": alone,
        "times": ["iteration", "start_ns", *alone],
    }
    return _without(table, [name for word in lacks for name in unknown.get(word, ())])


def in_windows(table: pa.Table, lacks: Sequence[str]) -> pa.Table:
    """The table of windows: none where times are not known."""
    return table.slice(0, 0) if "times" in lacks else table


def _without(table: pa.Table, names: Sequence[str]) -> pa.Table:
    for name in names:
        place, column = table.column_names.index(name), table[name]
        table = table.set_column(place, name, pa.nulls(len(column), column.type))
    return table


def sentences(lacks: Mapping[str, Sequence[int]], ranks: int) -> list[str]:
    """Return warnings: which of the `ranks` ranks lack what, and what is therefore n/a.

    That a rank has no device work is a warning of the rank, which knows more about it.
    """
    return [
        f"the input has {LACKS[word]} are n/a"
        if len(lacking) == ranks
        else f"{len(lacking)} of {ranks} ranks ({ranges(lacking)}) "
        f"{plural(len(lacking), 'has')} {LACKS[word]} are "
        "those of the other ranks"
        for word, lacking in lacks.items()
        if word not in NO_DEVICE
    ]


def unknown(lacks: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return what is unknown, for which ranks and for what reason, as `--json` prints it."""
    return [
        {"what": what, "reason": reason, "ranks": list(ranks)}
        for word, ranks in lacks.items()
        for reason, _, what in (LACKS[word].partition(": "),)
    ]


def reason(lacks: Mapping[str, Sequence[int]]) -> str:
    """Return why the times of a run are unknown, as a clause."""
    reasons = [
        LACKS[word].partition(":")[0]
        for word in (*NO_DEVICE, "times", "compute")
        if word in lacks
    ]
    return f"the input has {' and '.join(reasons)}" if reasons else "there is no iteration"
