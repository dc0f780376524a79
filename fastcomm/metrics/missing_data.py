"""Numbers that are null as the input has no data for them, and the warnings about them.

Some ranks may have fewer complete iterations than others. `missing` has keys of
`trace.MISSING_DATA`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from fastcomm.metrics.breakdown import RankTime
from fastcomm.trace.run_traces import named_ranks, ranges
from fastcomm.trace.trace import MISSING_DATA, NO_DEVICE
from fastcomm.units import enumeration, plural

# Columns of iterations that are null where data is missing, by prefixes and suffixes.
_COMPUTE = (("exact_", "idle_", "host_comm_alone"), ("_overlapped_ns",))
_DEVICE = (
    ("spec_", "exact_", "idle_", "comm_bytes", "host_comm_alone"),
    ("_union_ns", "_overlapped_ns"),
)
_TIMES = (
    ("iteration", "start_ns", "stop_ns", "time_ns", "spec_", "exact_", "idle_", "host_comm_"),
    ("_union_ns", "_overlapped_ns"),
)
_UNKNOWN = {
    **dict.fromkeys(NO_DEVICE, _DEVICE),
    "compute": _COMPUTE,
    "times": _TIMES,
}


def in_iterations(table: pa.Table, missing: Sequence[str]) -> pa.Table:
    """Return the table of iterations with nulls in the columns for which data is missing.

    `missing` has keys of `trace.MISSING_DATA`, such as "compute" or "sizes".
    """
    for key, (prefixes, suffixes) in _UNKNOWN.items():
        if key in missing:
            names = [
                n for n in table.column_names if n.startswith(prefixes) or n.endswith(suffixes)
            ]
            table = _without(table, names)
    return table


def in_events(table: pa.Table, missing: Sequence[str]) -> pa.Table:
    """Return the table of communication events with nulls in columns for which data is missing.

    `missing` has keys of `trace.MISSING_DATA`. Durations are known in any case.
    """
    exposed = ["alone_ns", "exposed_ns"]  # durations are known in any case
    unknown = {
        "compute": exposed,
        "device_kinds": exposed,
        "graphs": exposed,
        "times": ["iteration", "start_ns", *exposed],
    }
    return _without(table, [name for key in missing for name in unknown.get(key, ())])


def in_windows(table: pa.Table, missing: Sequence[str]) -> pa.Table:
    """Return the table of windows, without rows if `missing` has "times"."""
    return table.slice(0, 0) if "times" in missing else table


def _without(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return a table with some columns replaced by nulls."""
    for name in names:
        place, column = table.column_names.index(name), table[name]
        table = table.set_column(place, name, pa.nulls(len(column), column.type))
    return table


def sentences(missing: Mapping[str, Sequence[int]], ranks: int) -> list[str]:
    """Return a warning per kind of missing data: what it is, on which ranks, and what is n/a.

    Missing device work is not among them: the ranks have warnings with more detail.

    Parameters
    ----------
    missing
        Ranks by key of `trace.MISSING_DATA`.
    ranks
        Number of all ranks.

    """
    return [
        f"the input has {MISSING_DATA[key]} are n/a"
        if len(affected) == ranks
        else f"{len(affected)} of {ranks} ranks ({ranges(affected)}) "
        f"{plural(len(affected), 'has')} {MISSING_DATA[key]} are "
        "those of the other ranks"
        for key, affected in missing.items()
        if key not in NO_DEVICE
    ]


def unknown(missing: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return missing data, ranks by key of `MISSING_DATA`, as objects of the JSON document."""
    return [
        {"what": metrics, "reason": reason, "ranks": list(ranks)}
        for key, ranks in missing.items()
        for reason, _, metrics in (MISSING_DATA[key].partition(": "),)
    ]


def reason(missing: Mapping[str, Sequence[int]]) -> str:
    """Return a clause on why times are unknown, from ranks by key of `MISSING_DATA`."""
    reasons = [
        MISSING_DATA[key].partition(":")[0]
        for key in (*NO_DEVICE, "times", "compute")
        if key in missing
    ]
    return f"the input has {enumeration(reasons)}" if reasons else "there is no iteration"


def fewer_steps(times: Sequence[RankTime], ranks: Sequence[int], steps: int) -> list[str]:
    """Return warnings about ranks with fewer complete steps than other ranks.

    Parameters
    ----------
    times
        Measured ranks, with the number of their complete steps; empty gives no warning.
    ranks
        Numbers of all ranks.
    steps
        Number of steps of the run.

    """
    if not times:
        return []
    count = {rank_time.rank: rank_time.iterations for rank_time in times}
    none = [rank for rank in ranks if rank not in count]
    few = [rank for rank in ranks if 0 < count.get(rank, 0) < steps]
    warnings = [f"no step of {named_ranks(none)} counts"] if none else []
    if few:
        counts = sorted({count[rank] for rank in few})
        warnings.append(
            f"{named_ranks(few)} {plural(len(few), 'has')} {' or '.join(map(str, counts))} of "
            f"{steps} steps: times and bytes of a rank are means over its own steps, waits and "
            "transfers over those of them that can be compared with other ranks"
        )
    return warnings
