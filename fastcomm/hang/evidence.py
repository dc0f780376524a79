"""What lies beside dumps: stacks of Python, NCCL RAS, logs of ranks and of the launcher.

None of it is needed. A rank is in the name of a file, in a head of the debug server, or in a
line of a log. Text of others is read in bounds.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastcomm.formats.flight_recorder import DumpedGroup, rank_of
from fastcomm.hang import logs, ras
from fastcomm.hang.calls import DumpedJob, RankCalls
from fastcomm.hang.dates import dates_of, without_old
from fastcomm.hang.stacks import PythonStack, is_stack, stacks_of
from fastcomm.hang.texts import FileText, read_text
from fastcomm.hang.waits import retires
from fastcomm.trace.run_traces import MOST_RANKS
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL

_TIMES_RANKS = 16  # that a file may name beyond the greatest rank of a dump
_MOST_LINES = 4
_SLACK_S = 2  # between clocks of hosts
_SECOND = 1_000_000_000
_START_S = 1_800  # before the first call in which ranks start
_OF_RANK = re.compile(r"rank|stack|spy|worker|trainer|stdout|stderr|std_|\blog|^\W*\d", re.I)
_OF_OTHERS = re.compile(r"node|host|launch|agent|local|slurm|job|attempt", re.I)
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
    old: tuple[str, ...] = ()  # what is of another time or job, a sentence each
    effects: dict[int, str] = field(default_factory=dict)  # ends that the hang caused
    undated: frozenset[int] = frozenset()  # dead ranks by logs that do not tell when

    def of_job(self, job: DumpedJob, titles: Mapping[DumpedGroup, str]) -> "FileEvidence":
        """Return the evidence with what RAS and numbers of processes say of ranks of a job.

        `titles` are the names of its groups for people. Stacks that are older than the last
        calls are none.
        """
        reports = tuple(
            replace(one, communicators=ras.place(one.communicators, job, titles))
            for one in self.reports
        )
        ends, deaths = self._ends(job, reports)
        timeout = _Timeout.of(job)
        effects = {
            rank: f"{end.sentence}; {why}"
            for rank, end in ends.items()
            if (why := timeout.why_effect(end))
        }
        dead = {rank: end.sentence for rank, end in ends.items() if rank not in effects}
        undated = {rank for rank in dead if ends[rank].second is None}
        for report in reports:
            for rank, sentence in ras.gone(report.communicators).items():
                dead[rank] = "; ".join(filter(None, (dead.get(rank), sentence)))
                undated.discard(rank)
        old = {
            rank: sentence
            for rank, stack in self.stacks.items()
            if (sentence := _why_old(rank, stack, job))
        }
        return replace(
            self,
            reports=reports,
            dead=dead,
            deaths=tuple(deaths),
            old=(*self.old, *old.values()),
            effects=effects,
            undated=frozenset(undated),
            stacks={rank: one for rank, one in self.stacks.items() if rank not in old},
        )

    def _ends(
        self, job: DumpedJob, reports: Iterable[ras.RasReport]
    ) -> tuple[dict[int, logs.ProcessEnd], list[str]]:
        """Return the ranks whose process or task ended, and ends of what may be a rank."""
        rank_of = {number: {*ranks} for number, ranks in self.lines.rank_of.items()}
        for report in reports:
            for process, rank in ras.processes(report.communicators):
                rank_of.setdefault(process, set()).add(rank)
        ends: dict[int, logs.ProcessEnd] = {}
        deaths: list[str] = []
        for number, end in self.lines.processes:
            ranks = rank_of.get(number, set()) if number is not None else set()
            if len(ranks) == 1:
                rank = min(ranks)
                sentence = f"rank {rank} was process {number}: {end.sentence}"
                ends.setdefault(rank, replace(end, sentence=sentence))
            else:
                deaths.append(end.sentence)
        tasks = _tasks_of(self.lines.tasks, job)
        is_within = all(last < job.world for _, last, _ in self.lines.tasks)
        if not self.lines.is_elastic and is_within and _are_ranks(tasks.keys(), job):
            for task, end in tasks.items():
                sentence = f"rank {task}, if each rank is a task: {end.sentence}"
                ends.setdefault(task, replace(end, sentence=sentence))
        else:
            sentences = dict.fromkeys(end.sentence for _, _, end in self.lines.tasks)
            deaths += [f"{one}: which ranks the tasks are, nothing tells" for one in sentences]
        own = {rank: end for rank, end in self.lines.ranks.items() if rank < job.world}
        return ends | own, [*dict.fromkeys(deaths)]

    def is_aborted(self, rank: int) -> bool:
        """Return whether a rank aborted itself, by its log or by its signal."""
        return rank in self.aborted or logs.is_abort(self.dead.get(rank, ""))


def _tasks_of(
    tasks: Iterable[tuple[int, int, logs.ProcessEnd]], job: DumpedJob
) -> dict[int, logs.ProcessEnd]:
    """Return the first end of each task that may be a rank, in time linear in the ranges.

    What ends behind ranks that abort while they wait is ended by the launcher.
    """
    free = [*range(job.world + 1)]  # the next task that no range has, by a task
    ends: dict[int, logs.ProcessEnd] = {}
    is_behind = False
    for first, last, end in tasks:
        stop = min(last + 1, job.world)
        at = _next_free(free, min(first, stop))
        own = replace(end, is_behind_timeout=end.is_behind_timeout or is_behind)
        while at < stop:
            ends[at] = own
            is_behind |= end.is_abort and _waits_in_nccl(job, at)
            free[at] = at + 1
            at = _next_free(free, at)
    return ends


def _next_free(free: list[int], at: int) -> int:
    """Return the first task from one on that no range has, and shorten the way to it."""
    while free[at] != at:
        free[at] = free[free[at]]
        at = free[at]
    return at


def _waits_in_nccl(job: DumpedJob, rank: int) -> bool:
    """Return whether a rank stands in a call that a watchdog ends by an abort."""
    calls = job.ranks.get(rank)
    return calls is not None and len(calls.open) > 0 and not retires(calls)


@dataclass(frozen=True, kw_only=True)
class _Timeout:
    """When the first open call was made and ran into its timeout, in seconds."""

    opened: int | None
    expired: int | None
    is_watched: bool  # whether watchdogs end the processes of the job then

    @classmethod
    def of(cls, job: DumpedJob) -> "_Timeout":
        """Return the timeout of a job, as far as its dumps tell."""
        times = [
            (int(calls.calls.created[at]) // _SECOND, int(calls.calls.timeout[at]) // 1000)
            for calls in job.ranks.values()
            for at in calls.open[:1].tolist()
            if calls.calls.created[at] != NULL
        ]
        return cls(
            opened=min((created for created, _ in times), default=None),
            expired=min((sum(one) for one in times if one[1] > 0), default=None),
            is_watched=not all(map(retires, job.ranks.values())),
        )

    def why_effect(self, end: logs.ProcessEnd) -> str:
        """Return why the end of a process is an effect of the hang; empty if it may not be."""
        if end.is_behind_timeout and self.is_watched:
            return (
                "it is reported behind a timeout, or the abort of ranks that waited: an effect"
            )
        if end.second is None or self.expired is None or end.second < self.expired - _SLACK_S:
            return ""
        late = format_ns((end.second - (self.opened or 0)) * _SECOND)
        return f"that was {late} after the first open call, behind its timeout: an effect"


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
    old: list[str] = field(default_factory=list)

    def add(self, file: FileText, most: int) -> None:
        """Add what a file says; `most` ends the numbers that are ranks if no name says so."""
        path = file.plain
        if path.suffix in _NO_LOGS:
            return
        rank = _rank_of_log(file)
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

    def merge(self, other: "_Gathered") -> None:
        """Add what another file says."""
        for rank, stack in other.stacks.items():
            self._add_stack(rank, stack)
        self.lines.merge(other.lines)
        self.aborted |= other.aborted
        self.broken = other.broken | self.broken
        self.errors |= other.errors
        self.ranks |= other.ranks
        self.watchdog += other.watchdog
        self.hardware += other.hardware

    @property
    def says(self) -> str:
        """The first thing that a log says of the job's end; empty without any."""
        ends = (*self.lines.ranks.values(), *(end for *_, end in self.lines.tasks))
        sentences = (
            *(end.sentence for end in ends),
            *(end.sentence for _, end in self.lines.processes),
            *logs.sentences(self.watchdog[:1]),
            *self.broken.values(),
            *(f"a log says: {line}" for line in self.hardware),
            *(f"the log of rank {rank} ends with an abort" for rank in self.aborted),
        )
        return next(iter(sentences), "")

    def _add_stack(self, rank: int, stack: PythonStack) -> None:
        old = self.stacks.get(rank)
        if old is None or stack.follows(old):
            self.stacks[rank] = stack

    def _add_log(self, file: FileText, rank: int) -> None:
        if line := logs.last_line(file):
            self.errors[rank] = line
        if (sizes := logs.aborted(file)) is not None:
            self.aborted[rank] = sizes


def _rank_of_log(file: FileText) -> int | None:
    """Return the rank in the name of a log or stack; None for a number of something else.

    Names say that it is one, or the lines do.
    """
    path = file.plain
    rank = rank_of(path.with_suffix("")) if path.suffix in (".log", ".txt") else None
    if rank is None or (_OF_RANK.search(path.stem) and not _OF_OTHERS.search(path.stem)):
        return rank
    return rank if f"[rank{rank}]:" in file.text else None


@dataclass(frozen=True, kw_only=True)
class _Bounds:
    """The times and ranks of the job that the dumps are of."""

    cut: int | None  # second: what is older is of another job, or attempt
    near: int  # second of the first call
    most: int  # ends the numbers that are ranks
    is_stated: bool  # whether the dumps state how many ranks there are

    @classmethod
    def of(cls, dumps: Mapping[int, Sequence[RankCalls]]) -> "_Bounds":
        """Return the bounds of the newest dumps of a job.

        Where no call is done, a rank may have died before the first one.
        """
        newest = [own[-1] for own in dumps.values() if own]
        times = [one.calls.created[one.calls.created != NULL] for one in newest]
        first = min((int(own.min()) // _SECOND for own in times if len(own)), default=None)
        slack = _SLACK_S if any(one.done.any() for one in newest) else _START_S
        stated = max((one.stated_world for one in newest), default=0)
        greatest = max(dumps, default=0)
        # gloo states the group that was created last.
        is_stated = stated > greatest and not any(map(retires, newest))
        return cls(
            cut=None if first is None else first - slack,
            near=first or 0,
            most=stated if is_stated else _TIMES_RANKS * (1 + greatest),
            is_stated=is_stated,
        )


def gather(
    paths: Iterable[Path], dumps: Mapping[int, Sequence[RankCalls]] | None = None
) -> FileEvidence:
    """Return what files say that are no dumps; files of unknown form are left out.

    `dumps` has the dumps of each rank, the newest last. What is older than their calls, or of
    ranks that they exclude, is of another job, and so is a far greater number in a name.
    """
    bounds = _Bounds.of(dumps or {})
    gathered = _Gathered()
    for path in sorted(paths, key=str):
        if (file := read_text(path)) is None:
            continue
        if ras.is_ras(file.text):
            _add_report(gathered, file, bounds)
        else:
            _add_text(gathered, file, bounds)
    lines = gathered.lines
    dead = {rank for rank in lines.ranks if rank < min(bounds.most, MOST_RANKS)}
    return FileEvidence(
        stacks=gathered.stacks,
        aborted=gathered.aborted,
        broken=gathered.broken,
        errors=gathered.errors,
        ranks=frozenset(rank for rank in gathered.ranks | dead if rank < bounds.most),
        reports=tuple(gathered.reports),
        watchdog=tuple(gathered.watchdog),
        hardware=tuple(gathered.hardware),
        lines=lines,
        old=tuple(gathered.old),
    )


def _add_report(gathered: _Gathered, file: FileText, bounds: _Bounds) -> None:
    """Add a report of RAS, unless it is older than the calls."""
    report = ras.read(file, bounds.near)
    if bounds.cut is None or report.written is None or report.written >= bounds.cut:
        gathered.reports.append(report)
        return
    before = format_ns((bounds.near - report.written) * _SECOND)
    gathered.old.append(
        f"the report of NCCL RAS was written {before} before the first call in the dumps: it "
        f"says nothing of them ({file.path})"
    )


def _add_text(gathered: _Gathered, file: FileText, bounds: _Bounds) -> None:
    """Add a log or stacks, without what is of another time or job."""
    own = _Gathered()
    own.add(file, bounds.most)
    if own.says and bounds.cut is not None:
        recent, before = without_old(file, bounds.cut)
        is_old = bool(before.text.strip())
        dates = dates_of(recent.text, bounds.near)
        if is_old or dates:
            own = _Gathered()
            own.lines.dates = dates
            own.add(recent, bounds.most)
        old = _Gathered()
        if is_old:
            old.add(before, bounds.most)
        if old.says:
            gathered.old.append(
                f"older than the first call in the dumps, or of an earlier attempt, so that it "
                f"says nothing of them: {old.says}"
            )
    if bounds.is_stated and own.lines.greatest >= bounds.most:
        gathered.old.append(
            f"of another job, as the dumps are of one of {bounds.most} ranks: {own.says}"
        )
        own.lines = logs.DeathLines()
    gathered.merge(own)


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
        Of the verdict: the ranks that hold the others up, and the ranks of the group.

    """
    both = [rank for rank in sorted(evidence.dead) if rank in job.ranks]
    for rank in both[:_MOST_LINES]:
        yield (
            f"{evidence.dead[rank]}; yet there is a dump of rank {rank} "
            f"({job.ranks[rank].path}), written before"
        )
    for rank in sorted(evidence.effects)[:_MOST_LINES]:
        yield evidence.effects[rank]
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
