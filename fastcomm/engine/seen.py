"""What one look at a rank tells, and what a run lacks by that."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.readers.store_manifest import ClockNote, Entry
from fastcomm.store.part import group_table, untagged, with_rank, without_bytes
from fastcomm.trace import rank_warnings as rank_warnings_
from fastcomm.trace.run import named_ranks
from fastcomm.trace.tags import without_effect
from fastcomm.trace.trace import LACKS, Trace

# Since when, and how, a profiler tells the sizes of collectives.
_SIZED_BY = {
    "kineto": ": the warnings say why, and what would help",
    "nsys": ": record with NCCL 2.25 or newer and nsys --trace=cuda,nvtx",
}
# Rules that guess, where marks would know.
_GUESSES = ("period of the collectives", "whole trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One rank that was read. Times in ns on its own clock."""

    rank: int
    format: str
    clock: str | None
    events: int
    start: int | None
    stop: int | None
    found_by: str
    iterations: int
    communication: int  # events
    without_bytes: int  # of the communication
    untagged: int  # of the communication: no parallelism is known
    warnings: tuple[str, ...]
    lacks: tuple[str, ...]  # of `trace.LACKS`
    unused: tuple[str, ...] = ()  # rules and options without effect, and why
    clock_note: ClockNote | None = None

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """Return what is known of a stored rank."""
        return cls(**{name: getattr(entry, name) for name in cls.__slots__ if name != "unused"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A rank, its groups and its iterations."""

    rank: RankInfo
    world_size: int | None
    groups: pa.Table
    iterations: pa.Table

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """See one rank's trace."""
        events, meta = trace.events, trace.meta
        return cls(
            rank=RankInfo(
                rank=meta.rank,
                format=meta.format,
                clock=meta.clock,
                events=events.num_rows,
                start=pc.min(events["start"]).as_py(),
                stop=pc.max(events["stop"]).as_py(),
                found_by=meta.found_by,
                iterations=trace.iterations.num_rows,
                communication=trace.comm.num_rows,
                without_bytes=without_bytes(trace),
                untagged=untagged(trace),
                warnings=meta.warnings,
                lacks=meta.lacks,
                unused=meta.unused,
            ),
            world_size=meta.world_size,
            groups=group_table(trace),
            iterations=with_rank(trace.iterations, meta.rank),
        )


def kinds(groups: pa.Table) -> list[dict[str, Any]]:
    """The groups that differ in more than their ranks, the busiest first."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in groups.to_pylist():
        names = ("description", "size", "tag", "tag_source", "candidates")
        kind = found.setdefault(
            tuple(row[name] for name in names),
            {
                **{name: row[name] for name in names},
                "groups": set(),
                "ranks": set(),
                "events": 0,
            },
        )
        kind["groups"].add(tuple(row["ranks"]) if row["ranks"] else row["name"])
        kind["ranks"].add(row["rank"])
        kind["events"] += row["events"]
    counted = [
        {**kind, "groups": len(kind["groups"]), "ranks": len(kind["ranks"])}
        for kind in found.values()
    ]
    return sorted(counted, key=lambda kind: (-kind["events"], str(kind)))


def rank_warnings(details: Iterable[RankInfo]) -> list[str]:
    """Return the warnings of ranks, each once, with the ranks that it is of."""
    details = tuple(details)
    own = rank_warnings_.of_run(
        ((each.rank, each.warnings) for each in details), names_all=True
    )
    return [*without_effect([each.unused for each in details]), *own]


def lacks(
    details: Sequence[RankInfo], missing: Sequence[int], groups: pa.Table
) -> Iterator[str]:
    """Say what a metric would miss, and how to get it."""
    communication, unsized, open_ = (
        sum(getattr(each, name) for each in details)
        for name in ("communication", "without_bytes", "untagged")
    )
    if missing:
        yield (
            f"{named_ranks(missing)}: no trace; put the missing traces "
            "beside the others, or nothing can be compared with them"
        )
    yield from (LACKS[name] for name in LACKS if any(name in each.lacks for each in details))
    if not communication:
        yield (
            "no communication on the device: the job has none, or it runs on the host (gloo, "
            "MPI), or the device was not recorded (nsys needs --trace=cuda,nvtx)"
        )
    if unsized:
        by = " and ".join(sorted({_SIZED_BY.get(each.format, "") for each in details}))
        yield f"{unsized} of {communication} communication events have no size{by}"
    if open_:
        yield (
            f"{open_} of {communication} communication events have no parallelism: say how "
            f"ranks are laid out {_layout(groups)}"
        )
    if any(each.found_by in _GUESSES for each in details):
        yield (
            "no iteration marks: --iteration-regex names annotations that are, if there are "
            'any; next time leave some: prof.step(), or a range "iteration 7"'
        )
    if any(each.clock is None for each in details):
        yield "no absolute time: ranks can only be compared by their collectives"


def _layout(groups: pa.Table) -> str:
    """Return the options that have an effect on traces with these groups."""
    if groups["ranks"].null_count < groups.num_rows:
        return "(--tp, --pp, --dp, --ep, --cp), or [[tags]] in a --config"
    return (
        "if there is one parallelism (--dp, --tp, --pp or --cp alone); for several, [[tags]] "
        "stream = N in a --config, since the traces do not say which ranks form a group"
    )
