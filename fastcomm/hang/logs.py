"""Read logs of ranks, launchers and kernels: who died, and what the watchdog of NCCL saw."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from fastcomm.hang.dates import TextDate, second_at
from fastcomm.hang.texts import FileText
from fastcomm.trace.run_traces import named_ranks

_KILLED = re.compile(
    r"\brank (\d{1,7})\b(?:(?!\brank \d)[^\n]){0,80}?"
    r"(?:(?:killed by|exited on|died of|died by) signal (\d{1,4})"
    r"|(?:exited with(?: exit)?(?: code| status)?|exit ?(?:code|status)):? (-?\d{1,9})\b)",
    re.I,
)
# The report of torchrun: a line each for rank, exit code and others, maybe behind a label.
_FAILURE = re.compile(
    r"\brank +: (\d{1,7}) \(local_rank: \d{1,7}\)\n"
    r"[^\n]{0,200}?exitcode +: (-?\d{1,9})(?: \(pid: (\d{1,9})\))?"
)
_LOCAL = re.compile(
    r"failed \(exitcode: (-?\d{1,9})\) local_rank: \d{1,7} \(pid: (\d{1,9})\)[^\n]{0,80}"
)
_TASKS = re.compile(
    r"srun: error: [^\s:]{1,255}: tasks? \[?([\d,-]{1,400})\]?: "
    r"(?:Killed|Out Of Memory|Bus error|Aborted|Segmentation fault"
    r"|Floating point exception|Illegal instruction"
    r"|Exited with exit code (\d{1,9}))",
    re.I,
)
_OUT_OF_MEMORY = re.compile(
    r"out of memory[^\n]{0,40}?Killed process (\d{1,9})[^\n]{0,60}"
    r"|Detected \d{1,9} oom[-_ ]kill events?(?:\(s\))? in [^\s]{1,80}",
    re.I,
)
_ELASTIC = re.compile(r"torch[./]distributed[./]elastic|torchrun|ChildFailedError|local_rank:")
_PROCESS = re.compile(r"Process (\d{1,9}): ")  # the first words of py-spy
_TERMINATED = (-15, 143)  # by a launcher that ends all ranks after the first one's death
_ABORTED = re.compile(r"signal 6\b|code -6\b|exit(?:ed with)? -6\b|: Aborted\b")
# Sentences that say what may happen, and lines that are comments, tell nothing of this job.
_UNSURE = re.compile(
    r"\b(?:if|whether|unless|may|might|could|would|should|possibly|possible|likely|perhaps|maybe"
    r"|e\.g\.|for example|for instance|in case|suppose|assume)\b",
    re.I,
)
_NEGATED = re.compile(r"\b(?:not|never|no)\b|n't\b", re.I)
_COMMENT = ("#", "//", "*", ">", "|", "--")
_ENDS = (". ", "! ", "? ", "; ")  # of sentences
_ABORT = re.compile(
    r"EnforceNotMet|op\.preamble\.length <= op\.nbytes\. (\d{1,18}) vs (\d{1,18})"
)
_BROKEN = re.compile(
    r"Connection (?:was )?(?:closed|reset) by (?:remote )?peer|remote process exited"
    r"|Timed out waiting \d{1,12}ms for|Broken pipe|caught collective operation timeout",
    re.I,
)
_CAUGHT = re.compile(r"caught collective operation timeout", re.I)
_OWN = re.compile(r"\[rank(\d{1,7})\]:")
_QUOTED = 80  # characters behind it
_WATCHDOG = re.compile(
    r"(?:[^\n]{0,200}?\[rank(?P<rank>\d{1,7})\]:)?[^\n]{0,200}?\[PG (?:ID )?(?P<id>\d{1,9})"
    r"(?: PG GUID (?P<guid>[^\s(\]]{1,80}))? ?(?:\((?P<desc>[^)\n]{0,80})\))?"
    r" Rank (?P<inside>\d{1,7})\][^\n]{0,400}?"
    r"last enqueued NCCL work: (?P<enqueued>-?\d{1,18}),"
    r" last completed NCCL work: (?P<completed>-?\d{1,18})",
    re.I,
)
_TIMEOUT = re.compile(
    r"(?:\[rank(?P<rank>\d{1,7})\]:[^\n]{0,200}?)?WorkNCCL\(SeqNum=(?P<number>\d{1,18}), "
    r"OpType=(?P<op>\w{1,40})[^\n]{0,200}?\) ran for (?P<ms>\d{1,15}) milliseconds"
)
_HARDWARE = re.compile(
    r"NVRM: Xid[^\n]{0,120}|IBV_WC_\w+[^\n]{0,80}|CUDA error: [^\n]{0,120}"
    r"|uncorrectable (?:NVLink|ECC) error[^\n]{0,80}|Call to ibv_\w+ failed[^\n]{0,80}",
    re.I,
)
_MOST_LINES = 6
_MOST_MATCHES = 64  # of a file
_LONGEST = 400  # characters of a sentence before and behind what it reports


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogLine:
    """What the watchdog of a rank says of one process group."""

    rank: int | None  # of the job
    inside: int  # rank inside the group
    group: str
    enqueued: int
    completed: int
    timeout: str  # the operation that ran into its timeout; empty without
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """The end of a process, as a log reports it."""

    sentence: str
    second: int | None = None  # by the dates of the log
    is_abort: bool = False  # by its own signal
    is_behind_timeout: bool = False  # reported behind a timeout of a watchdog


@dataclass(kw_only=True)
class DeathLines:
    """Ends of processes that launchers, Slurm and kernels report."""

    ranks: dict[int, ProcessEnd] = field(default_factory=dict)
    # Of srun, first and last: ranks if each is a task.
    tasks: list[tuple[int, int, ProcessEnd]] = field(default_factory=list)
    processes: list[tuple[int | None, ProcessEnd]] = field(default_factory=list)  # by numbers
    rank_of: dict[int, set[int]] = field(default_factory=dict)  # ranks by process
    is_elastic: bool = False  # whether torchrun starts the ranks
    dates: Sequence[TextDate] = ()  # of the text that is read
    timeout_at: int = -1  # place in it where a watchdog reports a timeout first

    @property
    def greatest(self) -> int:
        """The greatest rank or task of which an end is reported; -1 without any."""
        return max([*self.ranks, *(last for _, last, _ in self.tasks)], default=-1)

    def merge(self, other: "DeathLines") -> None:
        """Add the ends of another text."""
        self.ranks |= other.ranks
        self.tasks += other.tasks
        self.processes += other.processes
        for number, ranks in other.rank_of.items():
            self.rank_of.setdefault(number, set()).update(ranks)
        self.is_elastic |= other.is_elastic

    def add(self, file: FileText, rank: int | None) -> None:
        """Add what a file says; `rank` is that of the file, if it has one."""
        text = file.text
        self.is_elastic |= _ELASTIC.search(text) is not None
        caught = _CAUGHT.search(text)
        self.timeout_at = caught.start() if caught else -1
        if rank is not None and (head := _PROCESS.match(text)):
            self.rank_of.setdefault(int(head[1]), set()).add(rank)
        for match in _KILLED.finditer(text):
            is_end = bool(match[2]) or match[3] != "0"
            if is_end and not _NEGATED.search(match[0]) and _is_report(text, match):
                self.ranks[int(match[1])] = self._end(file, match)
        self._add_elastic(file)
        for match in _TASKS.finditer(text):
            if match[2] is None or int(match[2]) not in (0, *_TERMINATED):
                end = self._end(file, match)
                self.tasks += [(first, last, end) for first, last in _ranges_of(match[1])]
        for match in islice(_OUT_OF_MEMORY.finditer(text), _MOST_MATCHES):
            if _is_report(text, match):
                number = int(match[1]) if match[1] else None
                self.processes.append((number, self._end(file, match, "log")))

    def _end(self, file: FileText, match: re.Match[str], who: str = "launcher") -> ProcessEnd:
        return self._dated(f"{who}: {match[0].strip()} ({file.place(match.start())})", match)

    def _dated(self, sentence: str, match: re.Match[str]) -> ProcessEnd:
        return ProcessEnd(
            sentence=sentence,
            second=second_at(self.dates, match.start()),
            is_abort=is_abort(sentence),
            is_behind_timeout=0 <= self.timeout_at < match.start(),
        )

    def _add_elastic(self, file: FileText) -> None:
        """Add what torchrun reports: ranks of the job, or processes of a node."""
        reported = set()
        for match in _FAILURE.finditer(file.text):
            rank, code = int(match[1]), int(match[2])
            if match[3]:
                self.rank_of.setdefault(int(match[3]), set()).add(rank)
                reported.add(int(match[3]))
            if code not in (0, *_TERMINATED):
                by_signal = f"was killed by signal {-code}"
                how = by_signal if code < 0 else f"exited with code {code}"
                place = file.place(match.start())
                sentence = f"launcher: rank {rank} {how} ({place})"
                self.ranks[rank] = self._dated(sentence, match)
        for match in islice(_LOCAL.finditer(file.text), _MOST_MATCHES):
            number = int(match[2])
            if number not in reported and int(match[1]) not in (0, *_TERMINATED):
                self.processes.append((number, self._end(file, match)))


def _is_report(text: str, match: re.Match[str]) -> bool:
    """Return whether the sentence of a match says what happened, not what may."""
    far = max(0, match.start() - _LONGEST)
    line_at = max(far, text.rfind("\n", far, match.start()) + 1)
    last = min(len(text), match.end() + _LONGEST)
    line_end = text.find("\n", match.end(), last)
    line_end = last if line_end < 0 else line_end
    if text[line_at : match.end()].lstrip().startswith(_COMMENT):
        return False
    begin = max(line_at, *(text.rfind(end, line_at, match.start()) + 1 for end in _ENDS))
    ends = [at for end in _ENDS if (at := text.find(end, match.end(), line_end)) >= 0]
    stop = min([*ends, line_end, match.end() + _LONGEST])
    return _UNSURE.search(text, max(begin, match.start() - _LONGEST), stop) is None


def _ranges_of(text: str) -> Iterator[tuple[int, int]]:
    """Yield first and last of the parts of a list as Slurm writes them: 3,8-15."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            yield int(first), int(last or first)


def is_abort(sentence: str) -> bool:
    """Return whether a launcher's sentence says that a rank aborted itself, by its signal."""
    return _ABORTED.search(sentence) is not None


def aborted(file: FileText) -> tuple[int, int] | None:
    """Return the bytes that came and that were expected where gloo aborts a rank, or None."""
    match = _ABORT.search(file.text)
    return None if match is None else (int(match[1] or 0), int(match[2] or 0))


def broken(file: FileText, rank: int | None) -> Iterator[tuple[int, str]]:
    """Yield the ranks whose connection to another rank broke, by their lines, a sentence each.

    `rank` is that of the file, if it has one; lines name their own.
    """
    text = file.text
    for match in islice(_BROKEN.finditer(text), _MOST_MATCHES):
        if not _is_report(text, match):
            continue
        at = match.start()
        begin = text.rfind("\n", 0, at) + 1
        end = text.find("\n", at)
        own = _OWN.search(text, begin, at)
        number = rank if own is None else int(own[1])
        if number is not None:
            last = match.end() + _QUOTED
            quote = text[at : last if end < 0 else min(last, end)].strip()
            yield number, f"the log of rank {number} says: {quote} ({file.place(begin)})"


def is_timeout(sentence: str) -> bool:
    """Return whether a sentence of `broken` is of a watchdog, on a call that did not end."""
    return "operation timeout" in sentence


def last_line(file: FileText) -> str:
    """Return the last line of a log with its place; empty for an empty log."""
    text = file.text.rstrip()
    at = text.rfind("\n") + 1
    return f"{text[at:].strip()} ({file.place(at)})" if text else ""


def watchdog(file: FileText, rank: int | None) -> Iterator[WatchdogLine]:
    """Yield what watchdogs say in a log; `rank` is that of the file, if it has one."""
    if "enqueued NCCL work" not in file.text:
        return
    timeouts = islice(_TIMEOUT.finditer(file.text), _MOST_MATCHES)
    names = {
        (
            match["rank"],
            int(match["number"]),
        ): f"{match['op']} #{match['number']} ran into its timeout after "
        f"{int(match['ms']) / 1000:.0f} s"
        for match in timeouts
    }
    for line_at, line in _lines(file.text, "enqueued NCCL work"):
        match = _WATCHDOG.match(line)
        if match is None:
            continue
        name = match["guid"] or f"number {match['id']} of its process"
        completed = int(match["completed"])
        yield WatchdogLine(
            rank=int(match["rank"]) if match["rank"] else rank,
            inside=int(match["inside"]),
            group=f"{name} ({match['desc']})" if match["desc"] else name,
            enqueued=int(match["enqueued"]),
            completed=completed,
            timeout=names.get((match["rank"], completed + 1), ""),
            place=file.place(line_at),
        )


def _lines(text: str, part: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that have a part, with the place of their begin, some at most."""
    lower = text.lower()
    at = lower.find(part.lower())
    for _ in range(_MOST_MATCHES):
        if at < 0:
            return
        begin = text.rfind("\n", 0, at) + 1
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        yield begin, text[begin:end]
        at = lower.find(part.lower(), end)


def hardware(file: FileText) -> str:
    """Return the first line on a failure of a device or network; empty without any."""
    match = _HARDWARE.search(file.text)
    return "" if match is None else f"{match[0].strip()} ({file.place(match.start())})"


def sentences(lines: Iterable[WatchdogLine]) -> Iterator[str]:
    """Yield what watchdogs say, a sentence for ranks of a group that stand alike."""
    alike: dict[tuple[str, int, int], dict[str, WatchdogLine]] = {}
    for one in lines:
        who = f"rank {one.rank}" if one.rank is not None else f"rank {one.inside} inside it"
        alike.setdefault((one.group, one.enqueued, one.completed), {}).setdefault(who, one)
    for (group, enqueued, completed), own in [*alike.items()][:_MOST_LINES]:
        first = next(iter(own.values()))
        timeout = next((f"; {one.timeout}" for one in own.values() if one.timeout), "")
        yield (
            f"watchdog: {_who(own)} last enqueued {_number(enqueued)} and completed "
            f"{_number(completed)} in group {group}{timeout} ({first.place})"
        )
    if len(alike) > _MOST_LINES:
        yield f"watchdogs say {len(alike) - _MOST_LINES} more such things"


def _who(own: dict[str, WatchdogLine]) -> str:
    numbers = sorted({one.rank for one in own.values() if one.rank is not None})
    return named_ranks(numbers) if len(numbers) == len(own) else _named(list(own))


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def _number(number: int) -> str:
    """Return the number of a call; watchdogs of older releases print memory for "none"."""
    return f"#{number}" if 0 <= number < 1 << 40 else "nothing"
