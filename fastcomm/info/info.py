"""Describe a run: ranks, steps, process groups, and missing data."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from fastcomm import arrow_files, preparation
from fastcomm.errors import ClusterError, FastcommError, TraceFileError
from fastcomm.executors.executor import OpenedRun, Task, by_rank, of_each, skipped_rank
from fastcomm.formats.opening import missing
from fastcomm.formats.store.layout import MANIFEST, ClockNote, Entry, Manifest, read_manifest
from fastcomm.formats.store.writer import group_table, rank_facts, with_rank
from fastcomm.result import Result
from fastcomm.trace.run_traces import (
    RunTraces,
    SkippedRank,
    agreed_size,
    expected_ranks,
    named_ranks,
    warnings_of_ranks,
)
from fastcomm.trace.trace import MISSING_DATA, Trace
from fastcomm.units import format_bytes

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
    missing_data: tuple[str, ...]  # of `trace.MISSING_DATA`
    unused: tuple[str, ...] = ()  # rules and options without effect, and why
    clock_note: ClockNote | None = None

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """Describe a stored rank by its entry in the manifest."""
        return cls(**{name: getattr(entry, name) for name in cls.__slots__ if name != "unused"})

    def to_dict(self) -> dict[str, Any]:
        """Return the rank as a row of the JSON document and of the table of ranks."""
        return {_IN_NS.get(name, name): value for name, value in asdict(self).items()}


_IN_NS = {"start": "start_ns", "stop": "stop_ns"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """The description of a rank, its process groups and its iterations."""

    rank: RankInfo
    world_size: int | None
    groups: pa.Table
    iterations: pa.Table

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Summarize the trace of a rank."""
        meta = trace.meta
        return cls(
            rank=RankInfo(**rank_facts(trace), unused=meta.unused),
            world_size=meta.world_size,
            groups=group_table(trace),
            iterations=with_rank(trace.iterations, meta.rank),
        )


def kinds(groups: pa.Table) -> list[dict[str, Any]]:
    """Merge process groups that differ only in ranks into a row with counts, busiest first."""
    names = ("description", "size", "tag", "tag_source", "candidates")
    by_kind: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in groups.to_pylist():
        by_kind.setdefault(tuple(row[name] for name in names), []).append(row)
    counted = [
        {
            **dict(zip(names, kind, strict=True)),
            "groups": len({tuple(row["ranks"] or [row["name"]]) for row in rows}),
            "ranks": len({row["rank"] for row in rows}),
            "events": sum(row["events"] for row in rows),
        }
        for kind, rows in by_kind.items()
    ]
    return sorted(counted, key=lambda kind: (-kind["events"], str(kind)))


def missing_data(
    details: Sequence[RankInfo], missing: Sequence[int], groups: pa.Table
) -> Iterator[str]:
    """Yield a sentence on each kind of data that the traces lack, and how to record it.

    `details` describe the ranks that were read, `missing` are the numbers of the ranks without
    a trace, and `groups` is the table of process groups.
    """
    communication, unsized, open_ = (
        sum(getattr(detail, name) for detail in details)
        for name in ("communication", "without_bytes", "untagged")
    )
    if missing:
        yield (
            f"{named_ranks(missing)}: no trace; put the missing traces "
            "beside the others, or nothing can be compared with them"
        )
    yield from (
        MISSING_DATA[name]
        for name in MISSING_DATA
        if any(name in detail.missing_data for detail in details)
    )
    if not communication:
        yield (
            "no communication on the device: the job has none, or it runs on the host (gloo, "
            "MPI), or the device was not recorded (nsys needs --trace=cuda,nvtx)"
        )
    if unsized:
        by = " and ".join(sorted({_SIZED_BY.get(detail.format, "") for detail in details}))
        yield f"{unsized} of {communication} communication events have no size{by}"
    if open_:
        yield (
            f"{open_} of {communication} communication events have no parallelism: say how "
            f"ranks are laid out {_layout(groups)}"
        )
    if any(detail.found_by in _GUESSES for detail in details):
        yield (
            "no iteration marks: if other annotations mark steps, name them with "
            "--iteration-regex; next time record marks: prof.step(), or an NVTX range "
            '"iteration 7"'
        )
    if any(detail.clock is None for detail in details):
        yield "no absolute time: ranks can only be compared by their collectives"


def _layout(groups: pa.Table) -> str:
    """Return the options that have an effect on traces with these groups."""
    if groups["ranks"].null_count < groups.num_rows:
        return "(--tp, --pp, --dp, --ep, --cp), or [[tags]] in a --config"
    return (
        "if there is one parallelism (--dp, --tp, --pp or --cp alone); for several, [[tags]] "
        "stream = N in a --config, since the traces do not say which ranks form a group"
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Info(Result):
    """Description of a run; `details` and the tables cover the ranks that were read."""

    stored: bool
    files: int
    size: int  # bytes
    ranks: tuple[int, ...]
    world_size: int | None
    details: tuple[RankInfo, ...]
    groups: pa.Table  # a row a group and rank
    iterations: pa.Table  # a row an iteration and rank, by the host's marks
    warnings: tuple[str, ...]
    skipped: tuple[SkippedRank, ...] = ()
    unselected: tuple[int, ...] = ()  # ranks with a trace that are not asked for

    @property
    def expected(self) -> int:
        """The number of ranks that the run should have."""
        return expected_ranks(self.ranks, self.world_size, self.skipped)

    @property
    def events(self) -> int:
        """The number of events of the ranks that were read."""
        return sum(detail.events for detail in self.details)

    @property
    def step_ns(self) -> float | None:
        """Mean time of a step in ns, by marks on the host; None without steps."""
        time = self.iterations["stop"].to_numpy() - self.iterations["start"].to_numpy()
        return float(time.mean()) if len(time) else None

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the world without a trace."""
        present = {*self.ranks, *self.unselected}
        return tuple(rank for rank in range(self.world_size or 0) if rank not in present)

    @property
    def missing_data(self) -> tuple[str, ...]:
        """Sentences on missing data, with how to record it."""
        return tuple(missing_data(self.details, self.missing, self.groups))

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """Distinct warnings: of the run, then of its ranks."""
        return (*self.warnings, *warnings_of_ranks(self.details, names_all=True))

    def figures(self) -> dict[str, str]:
        """Return the ranks, the formats, the files and the number of warnings."""
        return {
            "ranks": f"{len(self.ranks)} of {self.expected}",
            "formats": ", ".join(sorted({detail.format for detail in self.details})),
            "files": f"{self.files} ({format_bytes(self.size)})",
            "warnings": str(len(self.all_warnings)),
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the tables `ranks`, `groups` and `iterations`; times in ns."""
        names = [_IN_NS.get(name, name) for name in self.iterations.column_names]
        return {
            "ranks": pa.Table.from_pylist([detail.to_dict() for detail in self.details]),
            "groups": self.groups,
            "iterations": self.iterations.rename_columns(names),
        }

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {
            "stored": self.stored,
            "formats": sorted({detail.format for detail in self.details}),
            "files": self.files,
            "bytes": self.size,
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "missing": list(self.missing),
            "details": [detail.to_dict() for detail in self.details],
            "iterations": self.to_arrow()["iterations"].to_pylist(),
            "iteration_clock": "host",
            "groups": kinds(self.groups),
            "warnings": list(self.all_warnings),
            "missing_data": list(self.missing_data),
            "failed": [asdict(detail) for detail in self.skipped],
        }


def info(run: OpenedRun, *, all_ranks: bool = False, anew: bool = False) -> Info:
    """Describe a run: format, ranks, steps, process groups, and missing data.

    Reads the first rank, or with `all_ranks` every one; the tables of a store have all ranks.
    `anew` reads the ranks of a store instead, if options differ from those of its ingest.
    Raises `FastcommError` if a rank cannot be read.
    """
    manifests = _manifests(run)
    if manifests and not anew:
        return _of_store(run, manifests)
    run.compile(preparation.compile_kernels)
    task = of_each(RankSummary.of)
    if all_ranks:
        parts, skipped = run.gather(task)
    elif run.keep_going:
        parts, skipped = _first_readable(run, task)
    else:
        parts, skipped = replace(run, sources=run.sources[:1]).gather(task)
    parts = tuple(sorted(parts, key=lambda part: part.rank.rank))
    # A file that is alone says its rank behind its events, when the run is opened already.
    ranks = {part.rank.rank for part in parts} if len(run.ranks) == 1 else set(run.ranks)
    return Info(
        stored=bool(manifests),
        **_files(run, [(part.rank.rank, part.world_size) for part in parts]),
        ranks=tuple(sorted(ranks)),
        details=tuple(part.rank for part in parts),
        groups=pa.concat_tables([part.groups for part in parts]),
        iterations=pa.concat_tables([part.iterations for part in parts]),
        skipped=tuple(skipped),
    )


_Summaries = tuple[tuple[RankSummary, ...], Sequence[SkippedRank]]


def _first_readable(
    run: OpenedRun, task: Task[tuple[RankSummary, ...], _Summaries]
) -> _Summaries:
    """Return the summary of the first rank that can be read, and the skipped ranks."""
    unread: list[SkippedRank] = []
    for source in run.sources:
        try:
            parts, _ = replace(run, sources=(source,), keep_going=False).gather(task)
        except ClusterError:
            raise
        except FastcommError as error:
            unread.append(skipped_rank(source, error))
        else:
            return parts, by_rank(unread, len(run.sources), run.skipped)
    raise FastcommError(f"no rank could be read: {unread[0].error}")


def _files(run: RunTraces, worlds: Sequence[tuple[int, int | None]] = ()) -> dict[str, Any]:
    sizes = {source.path: source.size for source in run.sources}
    absent = missing(run.expected, run.world_size)
    agreed = agreed_size(worlds)
    return {
        "files": len(sizes),
        "size": sum(sizes.values()),
        "world_size": run.world_size or agreed,
        "unselected": run.unselected,
        # Of the missing ranks the answer has more to say.
        "warnings": tuple(note for note in run.warnings if note not in absent),
    }


def _manifests(run: RunTraces) -> dict[Path, Manifest]:
    """Return the manifests of the stores of a run; empty if a rank is in no store."""
    folders = {source.path.parent for source in run.sources}
    if not all((folder / MANIFEST).is_file() for folder in folders):
        return {}
    manifests = {folder: read_manifest(folder) for folder in sorted(folders)}
    stored = {folder / entry.file for folder in manifests for entry in manifests[folder].ranks}
    return manifests if all(source.path in stored for source in run.sources) else {}


def _of_store(run: RunTraces, manifests: dict[Path, Manifest]) -> Info:
    """Describe a run by the manifests and tables of its stores, without reading events."""
    entries = [entry for manifest in manifests.values() for entry in manifest.ranks]
    ranks = pa.array(run.ranks, pa.int32())
    tables = {
        name: pa.concat_tables([_table(folder / f"{name}.parquet") for folder in manifests])
        for name in ("groups", "iterations")
    }
    return Info(
        stored=True,
        **_files(run),
        ranks=run.ranks,
        details=tuple(
            RankInfo.of(entry)
            for entry in sorted(entries, key=lambda entry: entry.rank)
            if entry.rank in set(run.ranks)
        ),
        **{
            name: table.filter(pc.is_in(table["rank"], ranks)) for name, table in tables.items()
        },
        skipped=run.skipped,
    )


def _table(path: Path) -> pa.Table:
    try:
        return arrow_files.read(path)
    except (OSError, pa.ArrowException) as error:
        raise TraceFileError(f"{path}: {error}; ingest the traces again") from error
