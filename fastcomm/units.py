"""Bandwidths, sizes and times in words, to and from bytes per second, bytes and nanoseconds.

A small ``b`` is a bit and a large ``B`` a byte; prefixes are decimal (1 GB = 10^9 bytes), and
binary where they say so (1 GiB = 2^30 bytes).
"""

import re

from fastcomm.errors import ConfigError

_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_RATE = re.compile(
    r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([kKmMgGtT]i?)?(bit|b|B|byte|bytes)(?:/s|ps)\s*"
)


def parse_bandwidth(text: str) -> float:
    """Bytes per second of "400Gbit/s", "400 Gbps", "50 GB/s" or "46.6GiB/s".

    Raises `ConfigError` for anything else: a bare number has no unit to trust.
    """
    found = _RATE.fullmatch(text)
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if not found or not 0 < number < float("inf"):
        raise ConfigError(
            f'bandwidth {text!r}: wanted a number and a unit, as in "400Gbit/s" or "50GB/s"'
        )
    prefix = (found[2] or "").lower()
    scale = _BINARY[prefix] if prefix in _BINARY else _PREFIX[prefix]
    return number * scale / (1 if found[3] in {"B", "byte", "bytes"} else 8)


def _scaled(value: float, units: list[tuple[float, str]]) -> str:
    for size, unit in units:
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} {units[-1][1]}"


def format_ns(ns: float) -> str:
    """A time for a person: "1.24 ms"."""
    return _scaled(ns, [(1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns")])


def format_bytes(count: float) -> str:
    """A size for a person, in decimal units: "306.68 MB"."""
    return _scaled(count, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")])


def format_bandwidth(bytes_per_s: float) -> str:
    """A bandwidth for a person: "48.20 GB/s"."""
    return format_bytes(bytes_per_s) + "/s"
