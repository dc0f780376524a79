"""Why devices are idle: shares of the causes, and the names behind them.

Sums of the idle times of all ranks over their steps.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.idle.causes import BY_CAUSE, CAUSES
from fastcomm.idle.intervals import idle_times
from fastcomm.trace.columns import nullable
from fastcomm.trace.trace import IdleTimes, Trace
from fastcomm.units import percent
from fastcomm_kernels.arrays import Flags, Ints

_MOST_ROWS = 24  # of the evidence in a document
EVIDENCE = pa.schema(
    [
        pa.field("rank", pa.int64()),
        pa.field("cause", pa.string()),
        pa.field("name", pa.string()),
        pa.field("ns", pa.int64()),  # in all measured steps
        pa.field("intervals", pa.int64()),  # number
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleName:
    """A name behind idle time: an operator, range or call, or the work that was launched."""

    cause: str
    name: str
    ns_per_step: float  # mean over the steps of all ranks
    ranks: int  # number of ranks with it


def of_trace(trace: Trace, *, by_host: bool) -> IdleTimes | None:
    """Return the idle time of a rank by step and cause; None if unknown.

    `by_host` divides time by the host's marks even where iterations on the device's clock are
    known.
    """
    on_device = trace.device_iterations is not None and not by_host
    clock = "device" if on_device else "host"
    if clock in trace.stored_idle:
        return trace.stored_idle[clock]
    return idle_times(trace, trace.device_iterations if on_device else trace.iterations)


def iteration_columns(idle: Ints) -> dict[str, pa.Array]:
    """Return the idle time of each iteration and cause, in ns, as a column per cause."""
    columns = zip(CAUSES, idle.T, strict=True)
    return {f"idle_{cause}_ns": nullable(ns) for cause, ns in columns}


def evidence(
    traces: Sequence[Trace], idle: Sequence[IdleTimes | None], only: Collection[int] | None
) -> pa.Table:
    """Return the largest names by rank and cause, `EVIDENCE`; `only` selects iterations."""
    rows: list[_EvidenceRow] = []
    for trace, times in zip(traces, idle, strict=True):
        if times is not None:
            rows += _of_rank(trace, times, only)
    columns = zip(*rows, strict=True) if rows else ([] for _ in EVIDENCE)
    arrays = [
        pa.array(column, field.type) for column, field in zip(columns, EVIDENCE, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=EVIDENCE)


_EvidenceRow = tuple[int, str, str, int, int]  # columns of EVIDENCE


def _of_rank(
    trace: Trace, times: IdleTimes, only: Collection[int] | None
) -> list[_EvidenceRow]:
    """Return the names of a rank's idle time by falling time, summed over its steps.

    `trace` has the measured iterations. In NumPy, as for the few rows of a rank, grouping in
    Arrow takes longer than all else that is done for idle time.
    """
    rows = times.evidence
    if only is not None:
        numbers = trace.iterations["number"].to_numpy()[rows["step"].to_numpy()]
        rows = rows.filter(pa.array(np.isin(numbers, list(only))))
    name = rows["name"].combine_chunks().dictionary_encode()
    texts, cause = name.dictionary.to_pylist(), rows["cause"].to_numpy().astype(np.int64)
    keys, at = np.unique(cause * len(texts) + name.indices.to_numpy(), return_inverse=True)
    sums = np.zeros((2, len(keys)), np.int64)
    for place, column in enumerate(("ns", "intervals")):
        np.add.at(sums[place], at, rows[column].to_numpy())
    evidence = [
        (trace.meta.rank, CAUSES[key // len(texts)], texts[key % len(texts)], ns, number)
        for key, ns, number in zip(keys.tolist(), *sums.tolist(), strict=True)
    ]
    return sorted(evidence, key=lambda row: (-row[3], row[1], row[2]))


def _measured(iterations: pa.Table) -> Flags:
    """Return which iterations have a breakdown."""
    flags: Flags = iterations["exact_idle_ns"].is_valid().to_numpy()
    return flags


def shares(iterations: pa.Table) -> dict[str, float | None]:
    """Return the idle time by cause as fractions of the iteration time.

    They are null if the idle time of a measured iteration is not divided, or none is measured.
    """
    timed = iterations.filter(pa.array(_measured(iterations)))
    total = int(timed["time_ns"].to_numpy().sum()) if len(timed) else 0
    columns = {cause: timed[f"idle_{cause}_ns"] for cause in CAUSES}
    if not total or any(column.null_count for column in columns.values()):
        return dict.fromkeys(CAUSES)
    return {cause: int(ns.to_numpy().sum()) / total for cause, ns in columns.items()}


def names(table: pa.Table, iterations: pa.Table) -> tuple[IdleName, ...]:
    """Return the largest names over all ranks, by falling time."""
    steps = int(_measured(iterations).sum())
    sums = table.group_by(["cause", "name"], use_threads=False).aggregate(
        [("ns", "sum"), ("rank", "count_distinct")]
    )
    order = [("ns_sum", "descending"), ("cause", "ascending"), ("name", "ascending")]
    return tuple(
        IdleName(
            cause=row["cause"],
            name=row["name"],
            ns_per_step=row["ns_sum"] / max(steps, 1),
            ranks=row["rank_count_distinct"],
        )
        for row in sums.sort_by(order).slice(0, _MOST_ROWS).to_pylist()
    )


def by_rank(iterations: pa.Table) -> dict[int, dict[str, float]]:
    """Return the mean idle time per step of each rank by cause, in ns.

    Steps whose idle time is not divided by cause do not count; ranks with only such steps are
    left out. "unknown" is a cause like the others.
    """
    columns = [f"idle_{cause}_ns" for cause in CAUSES]
    divided = iterations.filter(iterations[columns[0]].is_valid()).select(["rank", *columns])
    means = divided.group_by("rank", use_threads=False).aggregate(
        [(column, "mean") for column in columns]
    )
    return {
        row["rank"]: {
            cause: row[f"{column}_mean"] for cause, column in zip(CAUSES, columns, strict=True)
        }
        for row in means.to_pylist()
    }


def largest(idle: Mapping[str, float | None]) -> str | None:
    """Return the cause with the largest share or time; None if unknown, or nothing is idle."""
    present = {cause: share for cause, share in idle.items() if share}
    return max(present, key=lambda cause: present[cause], default=None)


def cause_of_longer(
    by_rank_: Mapping[int, Mapping[str, float]], rank: int, peers: Sequence[int], longer: float
) -> tuple[str | None, float | None]:
    """Return the cause of most of a rank's longer idle time, and its ns per step.

    Parameters
    ----------
    by_rank_
        The idle time of ranks, from `by_rank`.
    rank, peers
        The rank, and those that it is compared with.
    longer
        Time in ns per step by which it is idle longer than the median of its peers.

    """
    own = by_rank_.get(rank, {})
    others = [by_rank_[peer] for peer in peers if peer in by_rank_]
    if not own or not others:
        return None, None
    more = {
        cause: ns - float(np.median([peer[cause] for peer in others]))
        for cause, ns in own.items()
    }
    cause = max(more, key=lambda name: more[name])
    return (cause, own[cause]) if more[cause] >= longer / 2 else (None, None)


_LONGEST_NAME = 64  # in sentences


def explained(cause: str, ns: float, names_: Sequence[IdleName], mostly: str = "") -> str:
    """Return what is behind a cause in parentheses, or an empty text.

    This is the largest name of the host, shortened, after the word `mostly`. Of an unknown
    cause, of `ns` per step, it is the work whose launches are not recorded, if this is the
    reason for at least half of the time.
    """
    entries = [entry for entry in names_ if entry.cause == cause]
    if not entries or not BY_CAUSE[cause].is_named:
        return ""
    name = entries[0].name
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
    if cause != "unknown":
        return f" ({mostly}{name})"
    is_reason = sum(entry.ns_per_step for entry in entries) >= ns / 2
    return f" (launches of {name} are not recorded)" if is_reason else ""


def sentence(
    idle: Mapping[str, float | None], names_: Sequence[IdleName], step_ns: float | None
) -> str | None:
    """Return the shares of the step by cause as one line; None if nothing is known or idle.

    Only the largest cause is explained, and very small ones are left out.
    """
    parts: list[str] = []
    for cause, share in sorted(idle.items(), key=lambda item: -(item[1] or 0.0)):
        if share is None or share < _LEAST_SHOWN:
            continue
        why = "" if parts else explained(cause, share * (step_ns or 0.0), names_)
        parts.append(f"{BY_CAUSE[cause].text} {percent(share)}{why}")
    return f"Idle: {', '.join(parts)}." if parts else None


_LEAST_SHOWN = 0.01  # of the step
