"""What lies beside dumps: stacks of Python, NCCL RAS, logs of ranks and of the launcher.

None of it is needed. A rank is in the name of a file, in a head of the debug server, or in a
line of a log. Text of others is read in bounds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastcomm.formats.flight_recorder import DumpedGroup, rank_of
from fastcomm.hang import logs, ras
from fastcomm.hang.calls import DumpedJob
from fastcomm.hang.stacks import PythonStack, is_stack, stacks_of
from fastcomm.hang.texts import FileText, read_text
from fastcomm.trace.run import MOST_RANKS
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL

_TIMES_RANKS = 16  # that a file may name beyond the greatest rank of a dump
_MOST_LINES = 4
_SLACK_S = 2  # between clocks of hosts
_SECOND = 1_000_000_000
_NO_LOGS = {
    *(".md", ".rst", ".html", ".py", ".pyi", ".ipynb", ".sh", ".toml", ".cfg", ".yaml", ".yml")
}


@dataclass(frozen=True, kw_only=True)
class FileEvidence:
    """What files beside the dumps say of ranks."""

    stacks: dict[int, PythonStack] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)  # a sentence each, with its file
    aborted: dict[int, tuple[int, int]] = field(default_factory=dict)  # bytes: came, expected
    broken: dict[int, str] = field(default_factory=dict)  # their connections, a sentence each
    errors: dict[int, str] = field(default_factory=dict)  # last line of a rank's log
    ranks: frozenset[int] = frozenset()  # that any file names
    reports: tuple[ras.RasReport, ...] = ()  # of NCCL RAS
    watchdog: tuple[logs.WatchdogLine, ...] = ()
    hardware: tuple[str, ...] = ()
    lines: logs.DeathLines = field(default_factory=logs.DeathLines)
    deaths: tuple[str, ...] = ()  # of processes that may be ranks, a sentence each
    old: tuple[str, ...] = ()  # stacks that are no evidence, a sentence each

    def of_job(self, job: DumpedJob, titles: Mapping[DumpedGroup, str]) -> "FileEvidence":
        """Return the evidence with what RAS and numbers of processes say of ranks of a job.

        `titles` are the names of its groups for people. Stacks that are older than the last
        calls are none.
        """
        reports = tuple(
            replace(one, communicators=ras.place(one.communicators, job, titles))
            for one in self.reports
        )
        dead = {**self.dead}
        for report in reports:
            for rank, sentence in ras.gone(report.communicators).items():
                dead[rank] = "; ".join(filter(None, (dead.get(rank), sentence)))
        more, deaths = self._ends(job, reports)
        old = {
            rank: sentence
            for rank, stack in self.stacks.items()
            if (sentence := _why_old(rank, stack, job))
        }
        return replace(
            self,
            reports=reports,
            dead=more | dead,
            deaths=tuple(deaths),
            old=tuple(old.values()),
            stacks={rank: one for rank, one in self.stacks.items() if rank not in old},
        )

    def _ends(
        self, job: DumpedJob, reports: Iterable[ras.RasReport]
    ) -> tuple[dict[int, str], list[str]]:
        """Return the ranks whose process or task ended, and ends of what may be a rank."""
        rank_of = {number: {*ranks} for number, ranks in self.lines.rank_of.items()}
        for report in reports:
            for process, rank in ras.processes(report.communicators):
                rank_of.setdefault(process, set()).add(rank)
        dead: dict[int, str] = {}
        deaths: list[str] = []
        for number, sentence in self.lines.processes:
            ranks = rank_of.get(number, set()) if number is not None else set()
            if len(ranks) == 1:
                rank = min(ranks)
                dead.setdefault(rank, f"rank {rank} was process {number}: {sentence}")
            else:
                deaths.append(sentence)
        tasks = self.lines.tasks
        if not self.lines.is_elastic and _are_ranks(tasks.keys(), job):
            for task, sentence in tasks.items():
                dead.setdefault(task, f"rank {task}, if each rank is a task: {sentence}")
        else:
            deaths += [
                f"{sentence}: which ranks the tasks are, nothing tells"
                for sentence in dict.fromkeys(tasks.values())
            ]
        return dead, [*dict.fromkeys(deaths)]

    def is_aborted(self, rank: int) -> bool:
        """Return whether a rank aborted itself, by its log or by its signal."""
        return rank in self.aborted or logs.is_abort(self.dead.get(rank, ""))


def _are_ranks(tasks: Set[int], job: DumpedJob) -> bool:
    """Return whether tasks of srun are ranks, as far as ranks without a dump tell.

    A task that starts several ranks ends with all of them, which are neighbors.
    """
    silent = {*job.silent}
    are_neighbors = any(rank + 1 in silent for rank in silent)
    is_one_of_them = bool(silent & tasks) and not are_neighbors
    return tasks <= {*range(job.world)} and (silent <= tasks or is_one_of_them)


@dataclass(kw_only=True)
class _Gathered:
    """Evidence that is being gathered."""

    stacks: dict[int, PythonStack] = field(default_factory=dict)
    lines: logs.DeathLines = field(default_factory=logs.DeathLines)
    aborted: dict[int, tuple[int, int]] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    reports: list[ras.RasReport] = field(default_factory=list)
    watchdog: list[logs.WatchdogLine] = field(default_factory=list)
    hardware: list[str] = field(default_factory=list)

    def add(self, file: FileText, most: int) -> None:
        """Add what a file says; `most` ends the numbers that are ranks if no name says so."""
        if ras.is_ras(file.text):
            self.reports.append(ras.read(file))
            return
        path = file.plain
        if path.suffix in _NO_LOGS:
            return
        rank = rank_of(path.with_suffix("")) if path.suffix in (".log", ".txt") else None
        if rank is not None and rank >= most and "rank" not in path.name:
            rank = None
        self.lines.add(file, rank)
        for at, stack in stacks_of(file, rank):
            self._add_stack(at, stack)
        if rank is not None and (path.suffix == ".log" or is_stack(file.text)):
            self.ranks.add(rank)
        if rank is not None and path.suffix == ".log" and not is_stack(file.text):
            self._add_log(file, rank)
        self.watchdog += logs.watchdog(file, rank)
        for at, sentence in logs.broken(file, rank if path.suffix == ".log" else None):
            self.broken.setdefault(at, sentence)
        if line := logs.hardware(file):
            self.hardware.append(line)

    def _add_stack(self, rank: int, stack: PythonStack) -> None:
        old = self.stacks.get(rank)
        if old is None or stack.follows(old):
            self.stacks[rank] = stack

    def _add_log(self, file: FileText, rank: int) -> None:
        if line := logs.last_line(file):
            self.errors[rank] = line
        if (sizes := logs.aborted(file)) is not None:
            self.aborted[rank] = sizes


def gather(paths: Iterable[Path], dumped: Iterable[int] = ()) -> FileEvidence:
    """Return what files say that are no dumps; what is none of the known forms is left out.

    `dumped` are the ranks that have a dump: a far greater number in a name is a date or the
    number of a process.
    """
    most = _TIMES_RANKS * (1 + max(dumped, default=0))
    gathered = _Gathered()
    for path in sorted(paths, key=str):
        if (file := read_text(path)) is not None:
            gathered.add(file, most)
    dead = {rank: line for rank, line in gathered.lines.ranks.items() if rank < MOST_RANKS}
    return FileEvidence(
        stacks=gathered.stacks,
        dead=dead,
        aborted=gathered.aborted,
        broken=gathered.broken,
        errors=gathered.errors,
        ranks=frozenset(gathered.ranks | dead.keys()),
        reports=tuple(gathered.reports),
        watchdog=tuple(gathered.watchdog),
        hardware=tuple(gathered.hardware),
        lines=gathered.lines,
    )


def _why_old(rank: int, stack: PythonStack, job: DumpedJob) -> str:
    """Return why a stack does not tell where a rank is now; empty if it may.

    A copy of a file is younger than the file: what is older than calls was written before them.
    """
    own = [job.ranks[rank]] if rank in job.ranks else [*job.ranks.values()]
    latest = [calls.latest for calls in own if calls.latest != NULL]
    if stack.written is None or not latest:
        return ""
    before = min(latest) // _SECOND - stack.written
    if before <= _SLACK_S:
        return ""
    title = f"the last call of rank {rank}" if rank in job.ranks else "the last calls"
    return (
        f"the stack of rank {rank} was written {format_ns(before * _SECOND)} before "
        f"{title}: it does not tell where the rank is ({stack.path})"
    )


def sentences(
    evidence: FileEvidence, job: DumpedJob, culprits: Sequence[int], members: Sequence[int]
) -> Iterator[str]:
    """Yield what files say beyond the culprits' own deaths and stacks.

    Parameters
    ----------
    evidence
        What the files say, of the job.
    job
        The ranks that have a dump.
    culprits, members
        Of the verdict: the ranks that hold the others up, and those of the group.

    """
    both = [rank for rank in sorted(evidence.dead) if rank in job.ranks]
    for rank in both[:_MOST_LINES]:
        yield (
            f"{evidence.dead[rank]}; yet there is a dump of rank {rank} "
            f"({job.ranks[rank].path}), written before"
        )
    named = {*culprits, *both}
    others = [rank for rank in sorted(evidence.dead) if rank not in named]
    for rank in others[:_MOST_LINES]:
        yield evidence.dead[rank]
    yield from evidence.deaths[:_MOST_LINES]
    yield from evidence.old[:_MOST_LINES]
    for report in evidence.reports:
        yield from ras.sentences(report, culprits, members)
    yield from logs.sentences(evidence.watchdog)
    for line in evidence.hardware[:_MOST_LINES]:
        yield f"a log says: {line}"
