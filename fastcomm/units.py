"""Parse and format bandwidths, sizes, times and counts."""

import re
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from math import isfinite

from fastcomm.checks import BANDWIDTH, shortened
from fastcomm.errors import ConfigError

GIB = 1 << 30  # bytes
_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_RATE = re.compile(
    r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([kKmMgGtT]i?)?(bit|b|B|byte|bytes)(?:/s|ps)\s*"
)


def parse_bandwidth(value: object, where: str = "") -> float:
    """Return the bytes per second of "400Gbit/s", "400 Gbps", "50 GB/s" or "46.6GiB/s".

    Raises
    ------
    ConfigError
        If the value is anything else, such as a number without a unit. The message begins
        with `where`.

    """
    text = str(value)
    subject = f"{where}: bandwidth" if where else "bandwidth"
    found = _RATE.fullmatch(text)
    number = _number(found[1]) if found else None
    if not found or number is None or not 0 < number < float("inf"):
        problem = "" if _number(text) is None else "no unit; "
        raise ConfigError(
            f"{subject} {shortened(text)!r}: {problem}wanted a number and a unit, as in "
            '"400Gbit/s" or "50GB/s"'
        )
    prefix = (found[2] or "").lower()
    scale = _BINARY[prefix] if prefix in _BINARY else _PREFIX[prefix]
    rate = number * scale / (1 if found[3] in {"B", "byte", "bytes"} else 8)
    BANDWIDTH.check(rate, f"{subject} {shortened(text)!r}, in bytes per second")
    return rate


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


DIGITS = 3  # significant digits of a printed quantity
_THOUSAND = 3  # the decimal exponent from which on the next larger unit is used
_TIMES = ((1.0, "ns"), (1e3, "us"), (1e6, "ms"), (1e9, "s"))
_SIZES = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"))
_BINARY_SIZES = ((1.0, "B"), *((float(_BINARY[k]), k[0].upper() + "iB") for k in _BINARY))
_CONTEXT = Context(prec=400, rounding=ROUND_HALF_UP)
_IRREGULAR = {"is": "are", "has": "have", "needs": "need"}
_HISSING = ("s", "x", "z", "ch", "sh")


def rounded(value: float, decimals: int) -> str:
    """Write a number with so many decimals; a half of the last one rounds away from zero.

    The number is taken as its shortest decimal form: 29.65, not the binary fraction below it.
    """
    return _shifted(value, 0, decimals)


def _shifted(value: float, places: int, decimals: int) -> str:
    """Write a number times a power of ten: as decimals, since a product is rounded itself."""
    if not isfinite(value):
        return str(value)
    exact = Decimal(repr(float(value))).scaleb(places, _CONTEXT)
    exact = exact.quantize(Decimal(1).scaleb(-decimals), context=_CONTEXT)
    return f"{exact if exact else abs(exact):f}"


def _exponent(value: float, digits: int) -> int:
    """Return the decimal exponent of a number that is rounded to so many digits."""
    exact = Decimal(repr(float(value)))
    if not exact or not exact.is_finite():
        return 0
    last = exact.adjusted() - digits + 1
    return exact.quantize(Decimal(1).scaleb(last), context=_CONTEXT).adjusted()


def percent(share: float, decimals: int = 1) -> str:
    """Write a share for a person: "45.8 %"."""
    return f"{_shifted(share, 2, decimals)} %"


def signed_percent(change: float, decimals: int = 1) -> str:
    """Write a change for a person: "+3.2 %"."""
    text = _shifted(change, 2, decimals)
    return f"{text if text.startswith('-') else f'+{text}'} %"


def _scaled(value: float, units: Sequence[tuple[float, str]], digits: int) -> str:
    """Write `value` in the largest unit in which it is at least 1, rounded once.

    The smallest unit has no decimals: nothing measured is less than one of it.
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
    """Write a time for a person: "1.24 ms"."""
    return _scaled(ns, _TIMES, digits)


def format_s(seconds: float, digits: int = DIGITS) -> str:
    """Write a time in seconds for a person: "1.24 ms"."""
    return format_ns(seconds * 1e9, digits)


def format_signed_ns(ns: float, digits: int = DIGITS) -> str:
    """Write a change of a time for a person: "+1.24 ms"."""
    text = format_ns(ns, digits)
    return text if text.startswith("-") else f"+{text}"


def format_bytes(count: float, digits: int = DIGITS) -> str:
    """Write a size for a person, in decimal units: "307 MB"."""
    return _scaled(count, _SIZES, digits)


def format_binary_bytes(count: float, digits: int = DIGITS) -> str:
    """Write a size for a person, in binary units: "80.0 GiB"."""
    return _scaled(count, _BINARY_SIZES, digits)


def format_bandwidth(bytes_per_s: float, digits: int = DIGITS) -> str:
    """Write a bandwidth for a person: "48.2 GB/s"."""
    return format_bytes(bytes_per_s, digits) + "/s"


def plural(count: int, noun: str) -> str:
    """Return the noun in the number that fits `count`: "rank" for 1, "ranks" for 2."""
    if count == 1:
        return noun
    return _IRREGULAR.get(noun, f"{noun}es" if noun.endswith(_HISSING) else f"{noun}s")


def counted(count: int, noun: str) -> str:
    """Write a count and its noun: "1 rank", "8 ranks"."""
    return f"{count} {plural(count, noun)}"


_SCALE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SCALE |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]i?)?([bB]|bytes)?\s*")


_MOST = 1 << 50  # tokens, bytes, or elements


def parse_quantity(text: str | int | float, what: str, most: float = _MOST) -> int:
    """Whole number of "4Mi", "80GiB", "512k" or 4096; `ConfigError` for anything else."""
    found = _QUANTITY.fullmatch(shortened(text))
    number = float(found[1]) * _SCALE[(found[2] or "").lower()] if found else 0.0
    if not number or number % 1:
        raise ConfigError(
            f"{what}: found {shortened(text)!r}, wanted a whole number above 0 as in "
            '"4Mi" or "80GiB"'
        )
    if number > most:
        raise ConfigError(f"{what}: found {shortened(text)!r}, wanted at most {most}")
    return int(number)


def format_gib(count: float) -> str:
    """Bytes of memory for a person: "77.93 GiB"."""
    return f"{count / GIB:.2f} GiB"
