"""Numbers in words: "4Mi" tokens, "80GiB", from a command line or a file."""

import re

from fastcomm.errors import ConfigError
from fastcomm.ranges import shortened

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
    return f"{count / 2**30:.2f} GiB"
