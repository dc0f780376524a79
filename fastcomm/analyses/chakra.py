"""Convert a run to Chakra execution traces: one file per rank, and one of all groups."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastcomm.compat import chakra
from fastcomm.compat.chakra import Written
from fastcomm.errors import FastcommError
from fastcomm.executors import Executor, Progress, Task, both
from fastcomm.files import aside, check_no_input
from fastcomm.readers.chakra import GROUPS_FILE
from fastcomm.trace.run import RunTraces, SkippedRank, warnings_of_ranks
from fastcomm.trace.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraFiles:
    """Counts of the files of a conversion."""

    ranks: int
    nodes: int
    replayed: Mapping[str, int]  # communication nodes replayed as measured, by reason
    skipped: Sequence[SkippedRank]
    warnings: Sequence[str]  # of the ranks


def convert(
    run: RunTraces,
    folder: Path,
    executor: Executor,
    *,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> ChakraFiles:
    """Write a run as Chakra execution traces: `trace.<rank>.et` and `trace.groups.json`.

    Parameters
    ----------
    run
        The traces.
    folder
        Directory to write to.
    executor
        Reads and converts the ranks.
    keep_going
        Whether to skip ranks that cannot be read.
    progress
        Called with the source of each finished rank, also of one that was skipped.

    Raises
    ------
    FastcommError
        A rank cannot be read, no rank has work, or a file cannot be written.

    """
    world = run.world_size or max(source.rank for source in run.sources) + 1
    for source in run.sources:
        check_no_input(folder / chakra.file_name(source.rank))
    check_no_input(folder / GROUPS_FILE)
    write = partial(_write, folder=folder, world=world)
    task = Task(measure=write, merge=_joined, finish=both, content="all")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written, skipped = executor.gather(run, task, keep_going=keep_going, progress=progress)
        _refuse_empty(written, run)
        write_groups(written, folder)
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
    replayed: Counter[str] = Counter()
    for file in written:
        replayed.update(file.replayed)
    return ChakraFiles(
        ranks=len(written),
        nodes=sum(file.nodes for file in written),
        replayed=replayed,
        skipped=skipped,
        warnings=warnings_of_ranks(file.meta for file in written),
    )


def write_groups(written: Sequence[Written], folder: Path) -> Path:
    """Write the groups of all ranks for ASTRA-sim's --comm-group-configuration.

    Raises FastcommError if two groups have the same number.
    """
    groups: dict[int, tuple[int, ...]] = {}
    for number, ranks in (pair for rank in written for pair in rank.groups.items()):
        if groups.setdefault(number, ranks) != ranks:
            raise FastcommError(
                f"groups {groups[number]} and {ranks} have the same number, {number}"
            )
    path = folder / GROUPS_FILE
    text = json.dumps({str(number): groups[number] for number in sorted(groups)})
    with aside(path) as unfinished:
        unfinished.write_text(text + "\n", "utf-8")
    return path


def _refuse_empty(written: Sequence[Written], run: RunTraces) -> None:
    """Remove the written files and raise `FastcommError` if none of them has a node."""
    if any(file.nodes for file in written):
        return
    for file in written:
        file.path.unlink(missing_ok=True)
    raise FastcommError(
        f"{run.sources[0].path}: no device work or communication on the device in any rank, so "
        "that there is nothing to convert; `fastcomm info` says what is missing"
    )


def _write(trace: Trace, *, folder: Path, world: int) -> tuple[Written, ...]:
    return (chakra.write(trace, folder, world),)


def _joined(parts: Iterable[tuple[Written, ...]]) -> tuple[Written, ...]:
    return tuple(file for part in parts for file in part)
