"""Dates in the lines of logs: which parts of a text are older than the calls of the dumps.

A line without a date is of the time of the last line before it that has one. Dates without a
time zone are in the zone of this machine.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise

from fastcomm.hang.texts import FileText

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TIME = r"(?P<{0}h>\d\d):(?P<{0}m>\d\d):(?P<{0}s>\d\d)"
_ISO = (
    r"(?P<y>\d{4})[-/](?P<mo>\d\d)[-/](?P<d>\d\d)[T _]"
    + _TIME.format("i")
    + r"(?:[.,]\d{1,9})?"
    r" ?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_GLOG = r"[IWEF](?P<gmo>\d\d)(?P<gd>\d\d) " + _TIME.format("g")
_SYSLOG = (
    rf"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?(?P<name>{'|'.join(_MONTHS)}) {{1,2}}(?P<sd>\d\d?) "
    + _TIME.format("s")
    + r"(?: (?P<sy>\d{4}))?"
)
# Behind labels of the launcher, of the rank, or of the field of a report.
_DATE = re.compile(
    r"^[ \t]{0,8}(?:\[?[\w.-]{1,40}\]?[ \t]{0,12}:[ \t]{0,4}){0,3}[\[(<]?"
    rf"(?:{_ISO}|{_GLOG}|{_SYSLOG})",
    re.M,
)
_RESTART = re.compile(r"^[^\n]{0,400}?attempts? left; will restart worker group[^\n]*", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDate:
    """A date that begins a line of a text."""

    at: int  # place of the line
    second: int


def dates_of(text: str, near: int) -> list[TextDate]:
    """Return the dates of the lines of a text; those without a year are near some second."""
    return [
        TextDate(at=match.start(), second=second)
        for match in _DATE.finditer(text)
        if (second := _second(match, near)) is not None
    ]


def second_at(dates: Sequence[TextDate], at: int) -> int | None:
    """Return the second of the last date at or before a place; None without one."""
    place = bisect_right(dates, at, key=lambda date: date.at)
    return dates[place - 1].second if place else None


def first_second(text: str, near: int) -> int | None:
    """Return the second of a date that a text begins with; None without one."""
    match = _DATE.match(text)
    return None if match is None else _second(match, near)


def _second(match: re.Match[str], near: int) -> int | None:
    """Return the second of a date; None for one that no calendar has."""
    with suppress(ValueError, OverflowError):
        if match["y"]:
            text = "{y}-{mo}-{d}T{ih}:{im}:{is}".format_map(match.groupdict())
            return int(datetime.fromisoformat(text + (match["zone"] or "")).timestamp())
        if match["gmo"]:
            month, day, prefix = int(match["gmo"]), int(match["gd"]), "g"
        else:
            month, day, prefix = 1 + _MONTHS.index(match["name"]), int(match["sd"]), "s"
        hour, minute, second = (int(match[prefix + part]) for part in "hms")
        if match["sy"]:
            year = int(match["sy"])
            return int(datetime(year, month, day, hour, minute, second).timestamp())
        times = _in_years(near, month, day, (hour, minute, second))
        return min(times, key=lambda second: abs(second - near))
    return None


def _in_years(near: int, month: int, day: int, time: tuple[int, int, int]) -> Iterator[int]:
    """Yield the seconds of a date in the years about that of a second."""
    year = datetime.fromtimestamp(near).year
    for one in (year - 1, year, year + 1):
        with suppress(ValueError):  # February 29
            yield int(datetime(one, month, day, *time, tzinfo=None).timestamp())


def without_old(file: FileText, cut: int) -> tuple[FileText, FileText]:
    """Return a text without what is older than a second, and that part alone.

    Places and lines stay where they are. Older is what is dated so; all of a file that is
    older; and what stands before a launcher's restart of the ranks, unless its dates tell
    otherwise.
    """
    text = file.text
    if file.written is not None and file.written < cut:
        return replace(file, text=_blank(text)), file
    new, old = [], []
    for part, is_old in _parts(text, cut):
        new.append(_blank(part) if is_old else part)
        old.append(part if is_old else _blank(part))
    return replace(file, text="".join(new)), replace(file, text="".join(old))


def _parts(text: str, cut: int) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text, each of one date, and whether it is older than a second."""
    dates = dates_of(text, cut)
    bounds = [0, *(date.at for date in dates[1:]), len(text)]
    are_old = [date.second < cut for date in dates] or [False]
    restart = 0
    for match in _RESTART.finditer(text):
        second = second_at(dates, match.start())
        if second is None or second < cut:
            restart = match.end()
    for (at, end), is_old in zip(pairwise(bounds), are_old, strict=True):
        middle = min(max(restart, at), end)
        yield text[at:middle], True
        yield text[middle:end], is_old


def _blank(text: str) -> str:
    return "\n".join(" " * len(line) for line in text.split("\n"))
