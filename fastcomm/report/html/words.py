"""Numbers as a page writes them: as `fastcomm.units` does, with a thin space before the unit.

What is unknown is `NA`; a `Fact` carries the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fastcomm import units
from fastcomm.units import format_bandwidth, format_bytes, format_ns, plural

T = TypeVar("T")

NA = "n/a"
_THIN = "\u202f"
_MINUS = "\u2212"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A number in words, and the key of its definition in the glossary."""

    key: str
    text: str
    label: str = ""
    why: str = ""  # it is unknown


Words = tuple[str | Fact, ...]


def fact(
    key: str,
    value: T | None,
    words: Callable[[T], str],
    *,
    label: str = "",
    why: str = "nothing in the input tells it",
) -> Fact:
    """A number in words; where it is None, n/a and why."""
    if value is None:
        return Fact(key=key, text=NA, label=label, why=why)
    return Fact(key=key, text=words(value), label=label)


def plain(words: Words) -> str:
    """The words as text alone."""
    return "".join(part if isinstance(part, str) else part.text for part in words)


def ns(value: float) -> str:
    """A time: "9.55 ms"."""
    return _short(format_ns(value)).replace("us", "µs")


def size(value: float) -> str:
    """A size, decimal: "307 MB"."""
    return _short(format_bytes(value))


def rate(value: float) -> str:
    """A bandwidth: "48.2 GB/s"."""
    return _short(format_bandwidth(value))


def percent(value: float) -> str:
    """A share: "13.4 %"."""
    return _minus(units.percent(value).replace(" ", _THIN))


def signed_percent(value: float) -> str:
    """A change: "+3.2 %"."""
    text = units.signed_percent(value).replace(" ", _THIN)
    return _minus(text if text.strip("+-0.%" + _THIN) else text[1:])


def times(value: float) -> str:
    """A multiple: "1.24 ×"."""
    return f"{value:.2f}{_THIN}×"


def whole(value: float) -> str:
    """A count, its thousands apart: "12 288"."""
    return _minus(f"{value:,.0f}".replace(",", _THIN))


def many(count: int, noun: str) -> str:
    """A count and its noun: "1 rank", "8 ranks"."""
    return f"{whole(count)} {plural(count, noun)}"


def _short(text: str) -> str:
    return _minus(text.replace(" ", _THIN))


def _minus(text: str) -> str:
    return text.replace("-", _MINUS)


def tick(text: str) -> str:
    """Words of a number without the zeros that it ends with: "10 µs"."""
    figure, gap, unit = text.partition(_THIN)
    return _minus(f"{float(figure.replace(_MINUS, '-')):g}{gap}{unit}")
