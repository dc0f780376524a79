"""What nobody can tell of an input that lacks something: nulls in place of the numbers.

The words are those of `trace.LACKS`. Sizes that are lacking are null in the trace itself.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from fastcomm.trace.run import ranges
from fastcomm.trace.trace import LACKS

# Columns of the iterations that need what is lacking, by their beginnings and endings.
_COMPUTE = (("exact_",), ("_overlapped_ns",))
_TIMES = (
    ("iteration", "start_ns", "stop_ns", "time_ns", "spec_", "exact_"),
    ("_union_ns", "_overlapped_ns"),
)


def in_iterations(table: pa.Table, lacks: Sequence[str]) -> pa.Table:
    """The table of iterations with null for what is not known."""
    for word, (begins, ends) in (("compute", _COMPUTE), ("times", _TIMES)):
        if word in lacks:
            names = [n for n in table.column_names if n.startswith(begins) or n.endswith(ends)]
            table = _without(table, names)
    return table


def in_events(table: pa.Table, lacks: Sequence[str]) -> pa.Table:
    """The table of communication events; durations are known in any case."""
    unknown = {"compute": ["alone_ns"], "times": ["iteration", "start_ns", "alone_ns"]}
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
    """What to warn of: which ranks lack what, and what is therefore n/a."""
    return [
        f"the input has {LACKS[word]} are n/a"
        if len(lacking) == ranks
        else f"{len(lacking)} of {ranks} ranks ({ranges(lacking)}) have {LACKS[word]} are "
        "those of the other ranks"
        for word, lacking in lacks.items()
    ]
