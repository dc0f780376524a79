"""What a run is, told in seconds: of a store all, of other formats the ranks that are read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fastcomm import parquet
from fastcomm.engine.engine import Engine, Progress, Task, both
from fastcomm.engine.local import engine_of
from fastcomm.engine.seen import RankInfo, Seen, kinds, lacks, rank_warnings
from fastcomm.errors import TraceFileError
from fastcomm.readers.runs import missing
from fastcomm.readers.store_layout import MANIFEST
from fastcomm.readers.store_manifest import Manifest, read_manifest
from fastcomm.trace.run import Run, SkippedRank, agreed_size, expected_ranks
from fastcomm.trace.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """What is known of a run. `details` and the tables are of the ranks that were read."""

    stored: bool
    files: int
    size: int  # bytes
    ranks: tuple[int, ...]
    world_size: int | None
    details: tuple[RankInfo, ...]
    groups: pa.Table  # a row a group and rank
    iterations: pa.Table  # a row an iteration and rank, by the host's marks
    warnings: tuple[str, ...]
    failed: tuple[SkippedRank, ...] = ()

    @property
    def expected(self) -> int:
        """The number of ranks that the run should have."""
        return expected_ranks(self.ranks, self.world_size, self.failed)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the world without a trace."""
        known = set(self.ranks)
        return tuple(rank for rank in range(self.world_size or 0) if rank not in known)

    @property
    def lacks(self) -> tuple[str, ...]:
        """What a metric would miss, and how to get it."""
        return tuple(lacks(self.details, self.missing, self.groups))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain objects, for `--json`."""
        return {
            "stored": self.stored,
            "formats": sorted({each.format for each in self.details}),
            "files": self.files,
            "bytes": self.size,
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "missing": list(self.missing),
            "details": [asdict(each) for each in self.details],
            "iterations": self.iterations.to_pylist(),
            "iteration_clock": "host",
            "groups": kinds(self.groups),
            "warnings": [*self.warnings, *rank_warnings(self.details)],
            "lacks": list(self.lacks),
            "failed": [asdict(each) for each in self.failed],
        }


def info(
    run: Run,
    *,
    all_ranks: bool = False,
    anew: bool = False,
    workers: int | Engine = 1,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> Info:
    """Look at a run: at its first rank, or at all; a store has all at hand.

    With `anew` the ranks of a store are read, too: what was said of it later is applied then.
    """
    manifests = _manifests(run)
    if manifests and not anew:
        return _of_store(run, manifests)
    looked_at = run if all_ranks else replace(run, sources=run.sources[:1])
    task = Task(measure=_see, merge=_all, finish=both)
    engine = engine_of(workers)
    seen, left_out = engine.gather(looked_at, task, keep_going=keep_going, progress=progress)
    seen = tuple(sorted(seen, key=lambda each: each.rank.rank))
    # A file that is alone says its rank behind its events, when the run is opened already.
    told = {each.rank.rank for each in seen} if len(run.ranks) == 1 else set(run.ranks)
    return Info(
        stored=bool(manifests),
        **_files(run, [(each.rank.rank, each.world_size) for each in seen]),
        ranks=tuple(sorted(told)),
        details=tuple(each.rank for each in seen),
        groups=pa.concat_tables([each.groups for each in seen]),
        iterations=pa.concat_tables([each.iterations for each in seen]),
        failed=tuple(left_out),
    )


def _see(trace: Trace) -> tuple[Seen, ...]:
    return (Seen.of(trace),)


def _all(parts: Sequence[tuple[Seen, ...]]) -> tuple[Seen, ...]:
    return tuple(chain.from_iterable(parts))


def _files(run: Run, worlds: Sequence[tuple[int, int | None]] = ()) -> dict[str, Any]:
    sizes = {source.path: source.size for source in run.sources}
    absent = missing(run.expected, run.world_size)
    agreed = agreed_size(worlds)
    return {
        "files": len(sizes),
        "size": sum(sizes.values()),
        "world_size": run.world_size or agreed,
        # Of the missing ranks the answer has more to say.
        "warnings": tuple(note for note in run.warnings if note not in absent),
    }


def _manifests(run: Run) -> dict[Path, Manifest]:
    """The manifests of the stores that the run is; none where a rank is in no store."""
    folders = {source.path.parent for source in run.sources}
    if not all((folder / MANIFEST).is_file() for folder in folders):
        return {}
    found = {folder: read_manifest(folder) for folder in sorted(folders)}
    known = {folder / entry.file for folder in found for entry in found[folder].ranks}
    return found if all(source.path in known for source in run.sources) else {}


def _of_store(run: Run, manifests: dict[Path, Manifest]) -> Info:
    entries = [entry for each in manifests.values() for entry in each.ranks]
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
        failed=run.skipped,
    )


def _table(path: Path) -> pa.Table:
    try:
        return parquet.read(path)
    except (OSError, pa.ArrowException) as error:
        raise TraceFileError(f"{path}: {error}; ingest the traces again") from error
