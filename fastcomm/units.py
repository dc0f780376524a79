"""Parse and format bandwidths, sizes, times and counts."""

import re
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from math import isfinite
from typing import Any, Self

from fastcomm.checks import BANDWIDTH, DURATION_NS, invalid, invalid_value, shortened
from fastcomm.errors import ConfigError

GIB = 1 << 30  # bytes
TIME_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}  # ns of each
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, **_BINARY}
_RATE = re.compile(
    r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([kKmMgGtT]i?)?(bit|b|B|byte|bytes)(?:/s|ps)\s*"
)


def parse_bandwidth(value: object, where: str = "") -> float:
    """Parse a bandwidth such as "400Gbit/s", "400 Gbps", "50 GB/s" or "46.6GiB/s".

    Parameters
    ----------
    value
        The text of a user.
    where
        Option or key for the message.

    Returns
    -------
    float
        Bytes per second.

    Raises
    ------
    ConfigError
        If the value is no number with a unit, or out of range.

    """
    text = str(value)
    place = f"{where}: " if where else ""
    match = _RATE.fullmatch(text)
    number = _number(match[1]) if match else None
    if not match or number is None or not 0 < number < float("inf"):
        problem = "" if _number(text) is None else "no unit; "
        raise ConfigError(
            f"{place}invalid bandwidth {shortened(text)!r}: {problem}expected a number and a "
            'unit, as in "400Gbit/s" or "50GB/s"'
        )
    per_byte = 1 if match[3] in {"B", "byte", "bytes"} else 8
    rate = number * _PREFIX[(match[2] or "").lower()] / per_byte
    if not BANDWIDTH.holds(rate):
        raise invalid(f"{place}bandwidth", repr(shortened(text)), f"{BANDWIDTH} bytes/s")
    return rate


_DURATION = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(ns|us|ms|s)\s*")


def parse_duration(value: object, where: str = "duration") -> float:
    """Parse a time with a unit (ns, us, ms or s), such as "10us" or "2.5 ms".

    Parameters
    ----------
    value
        The text of a user.
    where
        Option or key for the message.

    Returns
    -------
    float
        Nanoseconds.

    Raises
    ------
    ConfigError
        If the value is no number with a unit, or out of range.

    """
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    number = _number(match[1]) if match else None
    if match and number is not None:
        duration = number * TIME_UNITS[match[2]]
        if DURATION_NS.holds(duration):
            return duration
    most = f"at most {DURATION_NS.most / TIME_UNITS['s']:.15g}s"
    expected = f"a number and a unit (ns, us, ms or s), as in 10us, {most}"
    raise invalid_value(where, value, expected)


class Quantity(float):
    """A number that a user writes with its unit; `text` is how the user wrote it.

    The text of a quantity is its text as a string, too. `where` begins the message of the
    `ConfigError` for a text that is invalid.
    """

    text: str
    parse: Callable[[object, str], float]

    def __new__(cls, text: object, where: str) -> Self:
        """Return the number of a text."""
        quantity = super().__new__(cls, cls.parse(text, where))
        quantity.text = str(text)
        return quantity

    def __repr__(self) -> str:
        return repr(self.text)

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, "")


class Rate(Quantity):
    """A bandwidth in bytes per second, as in "400Gbit/s"."""

    parse = staticmethod(parse_bandwidth)


class Duration(Quantity):
    """A time in nanoseconds, as in "5us"."""

    parse = staticmethod(parse_duration)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


DIGITS = 3  # significant digits of a printed quantity
_THOUSAND = 3  # the decimal exponent from which on the next larger unit is used
_TIMES = tuple((float(size), unit) for unit, size in reversed(TIME_UNITS.items()))
_SIZES = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"))
_BINARY_SIZES = ((1.0, "B"), *((float(_BINARY[k]), k[0].upper() + "iB") for k in _BINARY))
_CONTEXT = Context(prec=400, rounding=ROUND_HALF_UP)
_IRREGULAR = {
    "is": "are",
    "has": "have",
    "needs": "need",
    "lacks": "lack",
    "strategy": "strategies",
}
_HISSING = ("s", "x", "z", "ch", "sh")


def rounded(value: float, decimals: int) -> str:
    """Write a number with `decimals` decimals; halves round away from zero.

    The shortest decimal form of the number is rounded: 29.65, not the binary fraction below it.
    """
    return _shifted(value, 0, decimals)


def _shifted(value: float, places: int, decimals: int) -> str:
    """Write `value` * 10**`places`; shifting decimals avoids the rounding of a product."""
    if not isfinite(value):
        return str(value)
    exact = Decimal(repr(float(value))).scaleb(places, _CONTEXT)
    exact = exact.quantize(Decimal(1).scaleb(-decimals), context=_CONTEXT)
    return f"{exact if exact else abs(exact):f}"


def _exponent(value: float, digits: int) -> int:
    """Return the decimal exponent of a number after rounding to `digits` digits."""
    exact = Decimal(repr(float(value)))
    if not exact or not exact.is_finite():
        return 0
    last = exact.adjusted() - digits + 1
    return exact.quantize(Decimal(1).scaleb(last), context=_CONTEXT).adjusted()


def percent(share: float, decimals: int = 1) -> str:
    """Write a share, 1 for all, as a percentage: "45.8 %"."""
    return f"{_shifted(share, 2, decimals)} %"


def signed_percent(change: float, decimals: int = 1) -> str:
    """Write a relative change, 1 for all, as a percentage with its sign: "+3.2 %"."""
    text = _shifted(change, 2, decimals)
    return f"{text if text.startswith('-') else f'+{text}'} %"


def _scaled(value: float, units: Sequence[tuple[float, str]], digits: int) -> str:
    """Write `value` in the largest unit in which it is at least 1, rounded once.

    The smallest unit has no decimals: measurements are integers of it.
    """
    magnitude = abs(value)
    text, unit = rounded(magnitude, 0), units[0][1]
    for size, unit in units:  # noqa: B007 - the unit after the loop is the largest that is needed
        scaled = magnitude / size
        decimals = 0 if size == units[0][0] else max(0, digits - 1 - _exponent(scaled, digits))
        text = rounded(scaled, decimals)
        if float(text) < 10**_THOUSAND:
            break
    sign = "-" if value < 0 and float(text) else ""
    return f"{sign}{text} {unit}"


def format_ns(ns: float, digits: int = DIGITS) -> str:
    """Write a time in nanoseconds with the unit that fits: "1.24 ms"."""
    return _scaled(ns, _TIMES, digits)


def format_s(seconds: float, digits: int = DIGITS) -> str:
    """Write a time in seconds with the unit that fits: "1.24 ms"."""
    return format_ns(seconds * 1e9, digits)


def format_signed_ns(ns: float, digits: int = DIGITS) -> str:
    """Write a change of a time in nanoseconds, with its sign: "+1.24 ms"."""
    text = format_ns(ns, digits)
    return text if text.startswith("-") else f"+{text}"


def format_bytes(count: float, digits: int = DIGITS) -> str:
    """Write a number of bytes in decimal units: "307 MB"."""
    return _scaled(count, _SIZES, digits)


def format_binary_bytes(count: float, digits: int = DIGITS) -> str:
    """Write a number of bytes in binary units: "80.0 GiB"."""
    return _scaled(count, _BINARY_SIZES, digits)


def format_bandwidth(bytes_per_s: float, digits: int = DIGITS) -> str:
    """Write a bandwidth in bytes per second in decimal units: "48.2 GB/s"."""
    return format_bytes(bytes_per_s, digits) + "/s"


def plural(count: int, noun: str) -> str:
    """Return the noun in the number that fits `count`: "rank" for 1, "ranks" for 2."""
    if count == 1:
        return noun
    return _IRREGULAR.get(noun, f"{noun}es" if noun.endswith(_HISSING) else f"{noun}s")


def enumeration(names: Iterable[str]) -> str:
    """Return names as in a sentence: "A", "A and B", "A, B and C"."""
    *first, last = list(names) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def counted(count: int, noun: str) -> str:
    """Write a count and its noun: "1 rank", "8 ranks"."""
    return f"{count} {plural(count, noun)}"


_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]i?)?([bB]|bytes)?\s*")


_MOST = 1 << 50  # tokens, bytes, or elements


def parse_quantity(text: object, where: str, most: float = _MOST) -> int:
    """Parse a whole number such as "4Mi", "80GiB", "512k" or 4096.

    Parameters
    ----------
    text
        The text or number of a user.
    where
        Name of the quantity, behind its place where it has one: "model.toml: hidden".
    most
        The largest valid number.

    Raises
    ------
    ConfigError
        If the text is no whole number above 0, or above `most`.

    """
    match = _QUANTITY.fullmatch(shortened(text))
    number = float(match[1]) * _PREFIX[(match[2] or "").lower()] if match else 0.0
    if not number or number % 1:
        expected = 'a whole number above 0, as in "4Mi" or "80GiB"'
        raise invalid(where, repr(shortened(text)), expected)
    if number > most:
        raise invalid(where, repr(shortened(text)), f"at most {most}")
    return int(number)


class Count(Quantity):
    """A whole number of tokens, bytes or elements, as in "4Mi", or a number without unit."""

    parse = staticmethod(parse_quantity)


def format_gib(count: float) -> str:
    """Write a number of bytes in GiB: "77.93 GiB"."""
    return f"{count / GIB:.2f} GiB"
