"""Read logs of ranks and of the launcher: who died, and what the watchdog of NCCL saw."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from fastcomm.hang.texts import FileText
from fastcomm.trace.run import named_ranks

_KILLED = re.compile(
    r"rank (\d{1,7})\b[^\n]{0,80}?"
    r"(?:killed by signal (\d{1,4})|exit(?:ed with)?(?: code)? (-?\d{1,9})\b)",
    re.I,
)
# The report of torchrun: a line each for rank, exit code and others.
_FAILURE = re.compile(r"rank +: (\d{1,7}) \(local_rank: \d+\)\n *exitcode +: (-?\d{1,9})")
_TERMINATED = -15  # by a launcher that ends all ranks after the first one's death
_ABORTED = re.compile(r"signal 6\b|code -6\b|exit(?:ed with)? -6\b")
_ABORT = re.compile(
    r"EnforceNotMet|op\.preamble\.length <= op\.nbytes\. (\d{1,18}) vs (\d{1,18})"
)
_BROKEN = re.compile(
    r"Connection (?:was )?(?:closed|reset) by (?:remote )?peer|remote process exited"
    r"|Timed out waiting \d{1,12}ms for|Broken pipe|caught collective operation timeout",
    re.I,
)
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


def deaths(file: FileText) -> Iterator[tuple[int, str]]:
    """Yield the ranks that a launcher reports as dead, with a sentence each."""
    for match in _KILLED.finditer(file.text):
        if match[2] or match[3] != "0":
            yield int(match[1]), f"launcher: {match[0]} ({file.place(match.start())})"
    for match in _FAILURE.finditer(file.text):
        code = int(match[2])
        if code not in (0, _TERMINATED):
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            yield (
                int(match[1]),
                f"launcher: rank {match[1]} {how} ({file.place(match.start())})",
            )


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
