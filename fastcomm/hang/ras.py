"""Read what NCCL's RAS says of a job: which processes answer, and what each rank launched.

RAS knows communicators and ranks inside them, not the groups of PyTorch. `place` maps them, by
size, by processes of other communicators, and by what the ranks launched.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import orjson

from fastcomm.formats.flight_recorder import DumpedGroup
from fastcomm.hang.calls import DumpedJob
from fastcomm.hang.dates import first_second
from fastcomm.hang.texts import FileText
from fastcomm.trace.run_traces import MOST_RANKS, named_ranks

Process = tuple[str, int, int]  # host, number of the process, device

# Results of NCCL by their number; 0 and 7 (in progress) are none.
_ERRORS = {
    1: "unhandled CUDA error",
    2: "system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process error",
}
_FINE = (0, 7)
_DEAD, _SILENT = "considered dead", "unresponsive"
_ABSENT = "no member any more"
_STAMP = re.compile(r'"timestamp":\s*"([^"\n]{1,40})"')
_HEAD = 65_536
_MOST_COMMUNICATORS = 4096
_MOST_CANDIDATES = 64
_MOST_PASSES = 8
_MOST_LINES = 8
_MOST_NAMED = 4  # ranks of a communicator that get a sentence each


@dataclass(frozen=True, slots=True, kw_only=True)
class RasRank:
    """A rank of a communicator, by its number in there."""

    number: int
    process: Process | None = None
    counts: Mapping[str, int] = field(default_factory=dict)  # launched operations by function
    problem: str = ""  # empty for a rank that answers without an error
    place: str = ""  # file and line

    @property
    def is_gone(self) -> bool:
        """Whether its process is dead or does not answer."""
        return self.problem in (_DEAD, _SILENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RasCommunicator:
    """A communicator: its ranks, all of them or those that differ from the others."""

    name: str  # hash of NCCL
    size: int
    ranks: tuple[RasRank, ...]
    usual: Mapping[str, int]  # what most ranks have launched, by function
    place: str
    is_complete: bool = True  # whether ranks that are not in `ranks` are unknown
    # Function, ranks and what they have launched, of ranks that a text counts without names.
    unnamed: tuple[tuple[str, int, int], ...] = ()
    members: tuple[int, ...] = ()  # ranks of the job by their numbers; empty if unknown
    title: str = ""  # of the group
    choices: int = 0  # groups that it may be

    @property
    def ahead(self) -> dict[str, int]:
        """What the ranks that have launched most have launched, by function."""
        ahead = {**self.usual}
        for function, _, value in self.unnamed:
            ahead[function] = max(ahead[function], value)
        for function, usual in self.usual.items():
            for rank in self.ranks:
                ahead[function] = max(ahead[function], rank.counts.get(function, usual))
        return ahead

    def arrived(self, number: int) -> set[int]:
        """Return the ranks of the job that answer and are not behind, `number` calls at least.

        None where ranks have launched less: the report is older, or counts otherwise. Where a
        text counts ranks without names, only those that it names.
        """
        ahead = self.ahead
        if not self.members or not ahead or sum(ahead.values()) < number:
            return set()
        odd = {
            rank.number
            for rank in self.ranks
            if rank.problem or any(rank.counts.get(f, self.usual[f]) < ahead[f] for f in ahead)
        }
        if self.is_complete or self.unnamed:
            odd |= {*range(self.size)} - {rank.number for rank in self.ranks}
        elif self.usual != ahead:
            return set()
        return {rank for at, rank in enumerate(self.members) if at not in odd}

    def named(self, rank: RasRank) -> str:
        """Return what a rank is called: by its number in the job if that is known."""
        if self.members:
            return f"rank {self.members[rank.number]}"
        return f"rank {rank.number} inside communicator {self.name}"

    @property
    def subject(self) -> str:
        """What the communicator is called: its group if that is known."""
        name = f"communicator {self.name} of {self.size} ranks"
        if self.title:
            return f"{self.title} ({name})"
        many = f"which may be any of {self.choices} groups" if self.choices else "of no group"
        return f"{name}, {many}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RasReport:
    """What RAS says of a job."""

    communicators: tuple[RasCommunicator, ...] = ()
    gone: tuple[tuple[str, str], ...] = ()  # processes that no communicator names, with place
    problem: str = ""
    fine: Mapping[int, str] = field(default_factory=dict)  # places by size: all is well there
    written: int | None = None  # second of the file, of a copy a later one


def is_ras(text: str) -> bool:
    """Return whether a text begins as JSON or text of RAS."""
    head = text[:4096]
    if head.lstrip()[:1] == "{":
        return '"communicators"' in head and '"nccl_version"' in head
    return "Communicators..." in text[:65536] and "Job summary" in head


def read(file: FileText, near: int = 0) -> RasReport:
    """Return what a file of RAS says, JSON or text; `problem` for one that is damaged.

    It is of the time that it states, or of an earlier one of the file; `near` is a second.
    """
    stamp = _STAMP.search(file.text[:_HEAD])
    stated = None if stamp is None else first_second(stamp[1], near)
    times = [second for second in (stated, file.written) if second is not None]
    return replace(_read(file), written=min(times, default=None))


def _read(file: FileText) -> RasReport:
    if file.text.lstrip()[:1] != "{":
        return _of_text(file)
    # NCCL 2.28 leaves out a comma there.
    text = re.sub(r'("nvml_dev":\s*-?\d+)(\s*"status")', r"\1,\2", file.text)
    try:
        top = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return RasReport(problem=f"{file.path}: damaged JSON of NCCL RAS: {error}")
    listed = top.get("communicators") if isinstance(top, dict) else None
    communicators, at = [], 0
    for row in listed[:_MOST_COMMUNICATORS] if isinstance(listed, list) else ():
        name = str(row.get("hash", "")) if isinstance(row, dict) else ""
        at = max(at, file.text.find(f'"{name}"', at))
        if (own := _communicator(row, name, file, at)) is not None:
            communicators.append(own)
    return RasReport(communicators=tuple(communicators))


def _communicator(row: Any, name: str, file: FileText, at: int) -> RasCommunicator | None:
    """Return a communicator of the JSON, which begins at `at`; None for another form."""
    size = row.get("size") if isinstance(row, dict) else None
    if not isinstance(size, int) or not 0 < size <= MOST_RANKS:
        return None
    present = (_rank(one, file.place(at)) for one in _rows(row, "ranks"))
    absent = (_absent(one, file, at) for one in _rows(row, "missing_ranks"))
    ranks = tuple(one for one in (*present, *absent) if one is not None and one.number < size)
    functions = dict.fromkeys(key for one in ranks for key in one.counts)
    usual = {
        key: Counter(one.counts[key] for one in ranks if key in one.counts).most_common(1)[0][0]
        for key in functions
    }
    return RasCommunicator(name=name, size=size, ranks=ranks, usual=usual, place=file.place(at))


def _rows(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
    rows = row.get(key)
    return [one for one in rows if isinstance(one, dict)] if isinstance(rows, list) else []


def _rank(row: dict[str, Any], place: str) -> RasRank | None:
    """Return a rank that answered."""
    number = row.get("rank")
    if not _is_count(number):
        return None
    status = row.get("status")
    counts = row.get("collective_counts")
    return RasRank(
        number=number,
        process=_process(row),
        counts={str(key): own for key, own in counts.items() if _is_count(own)}
        if isinstance(counts, dict)
        else {},
        problem=_problem(status) if isinstance(status, dict) else "",
        place=place,
    )


def _problem(status: dict[str, Any]) -> str:
    """Return what the status of a rank that answered says; empty if all is well."""
    for key, when in (("async_error", ""), ("init_state", " at the start")):
        error = status.get(key, 0)
        if isinstance(error, int) and error not in _FINE:
            return f"{_ERRORS.get(error, f'error {error}')}{when}"
    return "aborted" if status.get("abort_flag") is True else ""


def _absent(row: dict[str, Any], file: FileText, begin: int) -> RasRank | None:
    """Return a rank that RAS has no data of; `begin` is where its communicator begins."""
    number, status = row.get("rank"), row.get("status")
    if not _is_count(number):
        return None
    status = status if isinstance(status, dict) else {}
    problem = _SILENT if status.get("unresponsive") is True else _ABSENT
    problem = _DEAD if status.get("considered_dead") is True else problem
    section = max(begin, file.text.find('"missing_ranks"', begin))
    at = file.text.find(f'"rank": {number},', section)
    return RasRank(
        number=number,
        process=_process(row),
        problem=problem,
        place=file.place(at if at >= 0 else section),
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _process(row: dict[str, Any]) -> Process | None:
    """Return the process and device of a rank; None where RAS could not find them."""
    host, pid, device = row.get("host"), row.get("pid"), row.get("cuda_dev")
    if isinstance(host, str) and _is_count(pid) and _is_count(device):
        return host, pid, device
    return None


# The text form

_NUMBER = r"(\d{1,9})"
_GROUP = re.compile(
    rf"\s*{_NUMBER}\s+\d+\s+\d+\s+[\d-]+\s+{_NUMBER}\s+\d+\s+([A-Z]+)(?:\s+([A-Z,]+))?"
)
_SECTION = re.compile(
    rf"#{_NUMBER}-{_NUMBER} \(([0-9a-f]{{1,32}})\) (INCOMPLETE|ERROR|MISMATCH)"
)
_WHO = re.compile(rf"\s+Rank {_NUMBER}\b(.*)")
_WHERE = re.compile(
    rf"GPU {_NUMBER}.{{0,40}} managed by process {_NUMBER} on node (\S{{1,255}})"
)
_MISSING = re.compile(r"\s+The missing ranks?: ([\d, ]{1,100000})")
_GONE = re.compile(r"\s+Process \d{1,9} on node \S{1,255} managing GPUs? [^\n]{1,200}")
_FUNCTION = re.compile(r"\s+Communicator ranks have different (\w{1,40}) operation counts")
_LAUNCHED = re.compile(r"has launched up to operation (\d{1,18})|has not launched any")
_MANY = re.compile(
    r"\s+(\d{1,9}) ranks have (?:launched up to operation (\d{1,18})|not launched)"
)
_REPORTED = re.compile(r"reported ([\w ]{1,60}?) --|(\d{1,9}) ranks reported ([\w ]{1,60})")


@dataclass(kw_only=True)
class _Section:
    """A section of the text that is being read."""

    name: str = ""
    group: int = -1
    kind: str = ""
    place: str = ""
    function: str = ""
    value: int = 0  # what the ranks of the lines that follow have launched
    error: str = ""
    most: dict[str, tuple[int, int]] = field(default_factory=dict)  # ranks and value
    many: dict[tuple[str, int], int] = field(default_factory=dict)  # ranks by function, value
    ranks: dict[int, RasRank] = field(default_factory=dict)

    @property
    def unnamed(self) -> Iterator[tuple[str, int, int]]:
        """Function, ranks and what they have launched, of those without names beside most."""
        for (function, value), count in self.many.items():
            counts = (rank.counts.get(function) for rank in self.ranks.values())
            more = count - sum(own == value for own in counts)
            if more > 0 and value != self.most[function][1]:
                yield function, more, value


def _of_text(file: FileText) -> RasReport:
    """Return what RAS prints for people: ranks that differ from most others."""
    sizes: dict[int, int] = {}
    fine: dict[int, str] = {}  # place of a line that says so, empty where another does not
    sections: dict[str, _Section] = {}
    gone: list[tuple[str, str]] = []
    kind = ""
    section: _Section | None = None
    for number, line in enumerate(file.text.split("\n")):
        place = file.line(number)
        if match := _GROUP.match(line):
            size = sizes[int(match[1])] = int(match[2])
            is_fine = match[3] == "RUNNING" and match[4] == "OK"
            fine[size] = fine.get(size, place) if is_fine else ""
        elif match := _SECTION.match(line):
            section = sections.setdefault(match[3], _Section(name=match[3], place=place))
            section.group, section.kind = int(match[1]), match[4]
        elif line[:1].isalpha():
            section, kind = None, line.strip()
        elif section is not None:
            _add_line(section, line, place)
        elif kind in ("DEAD", "INCOMPLETE") and _GONE.match(line):
            state = _DEAD if kind == "DEAD" else _SILENT
            gone.append((f"{line.strip()} is {state}".replace("Process", "process", 1), place))
    communicators = (
        RasCommunicator(
            name=one.name,
            size=size,
            ranks=tuple(
                _settled(rank, gone) for rank in one.ranks.values() if rank.number < size
            ),
            usual={key: value for key, (_, value) in one.most.items()},
            unnamed=tuple(one.unnamed),
            place=one.place,
            is_complete=False,
        )
        for one in sections.values()
        if 0 < (size := sizes.get(one.group, 0)) <= MOST_RANKS
    )
    return RasReport(
        communicators=tuple(communicators),
        gone=tuple(gone),
        fine={size: place for size, place in fine.items() if place and not gone},
    )


def _add_line(section: _Section, line: str, place: str) -> None:
    """Add what a line of a section says."""
    if match := _FUNCTION.match(line):
        section.function = match[1]
    elif match := _MANY.match(line):
        section.value, count = int(match[2] or 0), int(match[1])
        most = section.most.get(section.function, (0, 0))
        section.most[section.function] = max(most, (count, section.value))
        section.many[section.function, section.value] = count
    elif match := _MISSING.match(line):
        for number in re.findall(_NUMBER, match[1]):
            _add(section, int(number), place, problem=_SILENT)
    elif match := _WHO.match(line):
        where = _WHERE.search(match[2])
        process = (where[3], int(where[2]), int(where[1])) if where else None
        _add(section, int(match[1]), place, process=process, **_details(section, match[2]))
    elif match := _REPORTED.search(line):
        section.error = match[3] or ""


def _details(section: _Section, rest: str) -> dict[str, Any]:
    """Return what a line on one rank says of it."""
    if section.kind == "INCOMPLETE":
        return {"problem": _SILENT}
    if section.kind == "ERROR":
        match = _REPORTED.search(rest)
        error = match[1] if match and match[1] else section.error
        return {"problem": (error or "error").lower()}
    if section.function:
        match = _LAUNCHED.search(rest)
        value = int(match[1] or 0) if match else section.value
        return {"counts": {section.function: value}}
    return {}


def _add(section: _Section, number: int, place: str, **details: Any) -> None:
    """Add what a line says of a rank to what others said."""
    rank = section.ranks.setdefault(number, RasRank(number=number, place=place))
    counts = {**rank.counts, **details.pop("counts", {})}
    details = {key: value for key, value in details.items() if value}
    section.ranks[number] = replace(rank, counts=counts, **details)


def _settled(rank: RasRank, gone: Iterable[tuple[str, str]]) -> RasRank:
    """Return a missing rank as dead if its process is among the dead."""
    if rank.problem != _SILENT or rank.process is None:
        return rank
    begin = f"process {rank.process[1]} on node {rank.process[0]} "
    is_dead = any(text.startswith(begin) and text.endswith(_DEAD) for text, _ in gone)
    return replace(rank, problem=_DEAD) if is_dead else rank


# Communicators and groups


def place(
    communicators: Iterable[RasCommunicator], job: DumpedJob, titles: Mapping[DumpedGroup, str]
) -> tuple[RasCommunicator, ...]:
    """Return communicators with their members, where only one group can be meant.

    Groups of the job are candidates by their size. Processes of communicators whose ranks are
    certain leave some of them out; where these do not tell, the numbers of calls in the dumps.
    """
    places = _Places(job=job, titles=titles)
    placed = [*communicators]
    by_counts = False
    for _ in range(_MOST_PASSES):
        count = len(places.ranks_of)
        placed = [places.placed(own, by_counts=by_counts) for own in placed]
        if len(places.ranks_of) > count:
            by_counts = False
        elif by_counts:
            break
        else:
            by_counts = True
    return tuple(placed)


@dataclass(kw_only=True)
class _Places:
    """The groups of a job as candidates, and the ranks of processes that are certain."""

    job: DumpedJob
    titles: Mapping[DumpedGroup, str]
    ranks_of: dict[Process, int] = field(default_factory=dict)
    groups: dict[tuple[int, ...], list[DumpedGroup]] = field(default_factory=dict)
    by_size: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    by_rank: dict[tuple[int, int, int], list[tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Sort the groups by their size, and by the ranks at each place of them."""
        for key, members in self.job.members.items():
            self.groups.setdefault(key.ranks or members, []).append(key)
        self.groups.setdefault(tuple(range(self.job.world)), [])
        for ranks in self.groups:
            self.by_size.setdefault(len(ranks), []).append(ranks)
            for at, rank in enumerate(ranks):
                self.by_rank.setdefault((len(ranks), at, rank), []).append(ranks)

    def placed(self, own: RasCommunicator, *, by_counts: bool) -> RasCommunicator:
        """Return a communicator with its members if one group is left, else their number."""
        if own.members:
            return own
        choices = self._choices(own)
        if by_counts and 1 < len(choices) <= _MOST_CANDIDATES:
            choices = [ranks for ranks in choices if self._counts_fit(own, ranks)] or choices
        if len(choices) != 1:
            return replace(own, choices=len(choices))
        (ranks,) = choices
        keys = self.groups[ranks]
        title = self.titles.get(keys[0], "") if keys else "all ranks of the job"
        placed = replace(own, members=ranks, title=title)
        self.ranks_of.update(_processes(placed))
        return placed

    def _choices(self, own: RasCommunicator) -> Sequence[tuple[int, ...]]:
        """Return the groups of its size that no process contradicts."""
        for rank in own.ranks:
            if rank.process is not None and rank.process in self.ranks_of:
                at = own.size, rank.number, self.ranks_of[rank.process]
                return [ranks for ranks in self.by_rank.get(at, ()) if self._fits(own, ranks)]
        choices = self.by_size.get(own.size, [])
        many = len(choices) > _MOST_CANDIDATES
        return choices if many else [ranks for ranks in choices if self._fits(own, ranks)]

    def _fits(self, own: RasCommunicator, ranks: Sequence[int]) -> bool:
        """Return whether no process contradicts that a communicator is a group."""
        return all(
            rank.process is None
            or self.ranks_of.get(rank.process, ranks[rank.number]) == ranks[rank.number]
            for rank in own.ranks
        )

    def _counts_fit(self, own: RasCommunicator, ranks: tuple[int, ...]) -> bool:
        """Return whether the ranks have launched as much as their dumps have in the group."""
        for rank in own.ranks:
            calls = self.job.ranks.get(ranks[rank.number])
            if calls is None or not rank.counts:
                continue
            total = sum(rank.counts.values())
            if all(calls.last.get(key) != total for key in self.groups[ranks]):
                return False
        return True


def _processes(own: RasCommunicator) -> Iterator[tuple[Process, int]]:
    for rank in own.ranks:
        if rank.process is not None:
            yield rank.process, own.members[rank.number]


def processes(communicators: Iterable[RasCommunicator]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of processes with their ranks of the job, where these are certain."""
    for own in communicators:
        for process, rank in _processes(own) if own.members else ():
            yield process[1], rank


def gone(communicators: Iterable[RasCommunicator]) -> dict[int, str]:
    """Return the ranks of the job whose process is dead or silent, with a sentence each."""
    ranks: dict[int, str] = {}
    for own in communicators:
        for rank in own.ranks if own.members else ():
            if rank.is_gone:
                ranks.setdefault(own.members[rank.number], _sentence(own, rank))
    return ranks


def arrived(
    reports: Iterable[RasReport], members: Sequence[int], number: int
) -> Mapping[int, str]:
    """Return the members of a group that have launched a call of some number, with a place."""
    ranks: dict[int, str] = {}
    for report in reports:
        for own in report.communicators:
            if {*own.members} == {*members}:
                ranks |= dict.fromkeys(own.arrived(number), f"{own.subject}, {own.place}")
        if place := report.fine.get(len(members)):
            ranks |= dict.fromkeys(members, f"all communicators of this size, {place}")
    return ranks


def _sentence(own: RasCommunicator, rank: RasRank) -> str:
    """Return a sentence on a rank with a problem."""
    process = "" if rank.process is None else ", process {1} on {0}".format(*rank.process)
    verb = "is" if rank.problem in (_DEAD, _SILENT, _ABSENT) else "reports"
    return (
        f"NCCL RAS: {own.named(rank)}{process}, {verb} {rank.problem}; it is rank "
        f"{rank.number} of {own.subject} ({rank.place})"
    )


def sentences(
    report: RasReport, culprits: Sequence[int], members: Sequence[int]
) -> Iterator[str]:
    """Yield what RAS says that is no death of a rank whose number is certain.

    Parameters
    ----------
    report
        What RAS says, with communicators that are placed.
    culprits, members
        Of the verdict: the ranks that hold the others up, and those of the group.

    """
    lines: list[str] = []
    if report.problem:
        lines.append(report.problem)
    for own in report.communicators:
        odd = [
            rank for rank in own.ranks if rank.problem and not (rank.is_gone and own.members)
        ]
        lines += [_sentence(own, rank) for rank in odd[:_MOST_NAMED]]
        if len(odd) > _MOST_NAMED:
            more = len(odd) - _MOST_NAMED
            lines.append(f"NCCL RAS: {more} more such ranks of {own.subject} ({own.place})")
        lines += _of_counts(own, culprits, is_whole=set(own.members) == set(members))
    if not any(rank.is_gone for own in report.communicators for rank in own.ranks):
        lines += [f"NCCL RAS: {text} ({where})" for text, where in report.gone]
    yield from lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        yield f"NCCL RAS says {len(lines) - _MOST_LINES} more such things"


def _of_counts(
    own: RasCommunicator, culprits: Sequence[int], *, is_whole: bool
) -> Iterator[str]:
    """Yield who has launched less or more than most; that nobody has, of the whole group."""
    is_equal = True
    for function, usual in own.usual.items():
        odd: dict[int, list[RasRank]] = {}
        for rank in own.ranks:
            value = rank.counts.get(function, usual)
            if value != usual:
                odd.setdefault(value, []).append(rank)
        is_equal &= not odd
        for value, ranks in sorted(odd.items())[:2]:
            numbers = sorted(own.members[one.number] for one in ranks) if own.members else []
            who = named_ranks(numbers) if numbers else f"{own.named(ranks[0])}"
            if not numbers and len(ranks) > 1:
                who += f" and {len(ranks) - 1} more"
            view = _view(value < usual, numbers, culprits)
            verb = "has" if len(ranks) == 1 else "have"
            yield (
                f"NCCL RAS: {who} {verb} launched {value} {function}, most ranks {usual}, in "
                f"{own.subject} ({ranks[0].place or own.place}){view}"
            )
    for function, count, value in own.unnamed:
        have = "rank has" if count == 1 else "ranks have"
        yield (
            f"NCCL RAS: {count} {have} launched {value} {function}, most "
            f"{own.usual[function]}, in {own.subject} ({own.place}); it does not name them: a "
            "report with -v does"
        )
    is_fine = is_equal and not any(rank.problem for rank in own.ranks)
    if is_fine and is_whole and own.usual and own.is_complete and len(own.ranks) == own.size:
        yield (
            f"NCCL RAS: all ranks of {own.subject} have launched as many operations, and none "
            f"reports an error: none of them is behind ({own.place})"
        )


def _view(is_behind: bool, numbers: Sequence[int], culprits: Sequence[int]) -> str:
    """Return how unequal counts and the culprits by the dumps agree."""
    if not numbers or not culprits:
        return ""
    if set(numbers) <= set(culprits):
        return ", as the dumps say" if is_behind else ""
    return "" if set(numbers) & set(culprits) else "; by the dumps, others hold the job up"
