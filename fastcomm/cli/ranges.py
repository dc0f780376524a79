"""Types of numeric options: each has a least and a most, and takes neither NaN nor infinity."""

import math
from typing import Any

import click

from fastcomm.errors import ConfigError
from fastcomm.ranges import MOST_LISTED, MOST_NUMBER, MOST_WORKERS, RANKS, Range, shortened

_MOST_DIGITS = len(str(MOST_NUMBER))


class Number(click.FloatRange):
    """A finite number of a range, in a unit that is `unit` times that of the range."""

    def __init__(self, within: Range, *, unit: float = 1.0) -> None:
        super().__init__(within.least / unit, within.most / unit, min_open=within.is_open)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; a usage error for NaN, which no comparison refuses."""
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found


class Rate(click.ParamType[str]):
    """A bandwidth with its unit, kept as text."""

    name = "rate"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the text; ConfigError where it is no bandwidth."""
        from fastcomm.units import parse_bandwidth

        parse_bandwidth(value, option_name(param))
        return value


class NumberList(click.ParamType[tuple[int, ...]]):
    """Numbers as in 0-7,12."""

    name = "list"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers; ConfigError where the text is no list of numbers."""
        return numbers(option_name(param), str(value))


def option_name(param: click.Parameter | None) -> str:
    """Return the long name of a parameter as a user writes it."""
    return max(param.opts, key=len) if param else "value"


def whole(text: str) -> int | None:
    """Return the number that digits write; None for other texts, or above 2^53 - 1."""
    is_number = text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) <= MOST_NUMBER
    return int(text) if is_number else None


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the numbers of "0-7,12".

    Raises
    ------
    ConfigError
        If the text is anything else, or names more than 2^20 numbers.

    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        least, most = whole(first), whole(last if dash else first)
        if least is None or most is None or least > most:
            raise ConfigError(
                f"{option}: found {shortened(part)!r} in {shortened(text)!r}, wanted numbers "
                f"from 0 to {MOST_NUMBER}, as in 0-7,12"
            )
        if len(found) + most - least >= MOST_LISTED:
            raise ConfigError(
                f"{option}: {shortened(text)!r} names more than {MOST_LISTED} numbers; wanted "
                "fewer, as in 0-7,12"
            )
        found.extend(range(least, most + 1))
    return tuple(found)


NUMBER = click.IntRange(0, MOST_NUMBER)
COUNT = click.IntRange(1, int(RANKS.most))
RANK = click.IntRange(0, 1 << 31)
WORKERS = click.IntRange(1, MOST_WORKERS)
STEPS = click.IntRange(1, 1 << 16)
BYTES = click.IntRange(1, 1 << 40)
SECONDS = Number(Range(0, 1e6, is_open=True))
