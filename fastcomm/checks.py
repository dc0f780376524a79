"""How values from users are checked: numbers, texts, keys of a configuration.

Ranges are generous: they refuse only values that nobody can intend, and keep sums and products
within int64 and float64.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from reprlib import Repr
from typing import Any, NoReturn
from warnings import catch_warnings

from fastcomm.errors import ConfigError

_LONGEST = 40  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, both included; `is_open` excludes `least`."""

    least: float
    most: float
    is_open: bool = False

    def holds(self, value: object) -> bool:
        """Whether the value is a number within the range. NaN is in no range."""
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        number = plain_number(value)
        return self.least <= number <= self.most and not (self.is_open and number == self.least)

    def check(self, value: object, where: str) -> None:
        """Refuse a value that is out of the range.

        Parameters
        ----------
        value
            The value of a user.
        where
            Name of the value, behind its place where it has one: "job.toml: [link]: bytes".

        Raises
        ------
        ConfigError
            If the range does not hold the value.

        """
        if not self.holds(value):
            raise invalid(where, _shown(value), str(self))

    def __str__(self) -> str:
        ends = self.least, self.most
        least, most = (str(end) if isinstance(end, int) else f"{end:.15g}" for end in ends)
        if self.is_open:
            return f"a number above {least}, at most {most}"
        return f"a number from {least} to {most}"


def invalid(where: str, shown: str, expected: str) -> ConfigError:
    """Return the error for an invalid value.

    Parameters
    ----------
    where
        Name of the value, behind its place where it has one: "job.toml: [parallel]: tp".
    shown
        The value as the message shows it.
    expected
        Description of valid values.

    """
    place, separator, name = where.rpartition(": ")
    return ConfigError(f"{place}{separator}invalid {name} {shown}: expected {expected}")


def invalid_value(where: str, value: object, expected: str) -> ConfigError:
    """Return the error for an invalid value, which the message quotes; see `invalid`."""
    return invalid(where, _shown(value), expected)


def check_type(
    value: object, kinds: type | tuple[type, ...], where: str, expected: str
) -> None:
    """Raise `ConfigError` for a value of another type; True and False are no numbers.

    `where` is the name of the value in the message, and `expected` describes valid values.
    """
    is_flag = isinstance(value, bool) and kinds is not bool
    if is_flag or not isinstance(value, kinds):
        raise invalid_value(where, value, expected)


def check_path(value: object, where: str, example: str) -> None:
    """Raise `ConfigError` unless a value is a path or a URL; `example` is a call with one."""
    if not value or not isinstance(value, str | Path):
        raise invalid_value(where, value, f"a path, as in {example}")


def plain_number(value: Any) -> Any:
    """Return a number of a type such as NumPy's as int or float, and other values unchanged."""
    if isinstance(value, int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def shortened(value: object) -> str:
    """Return the text of a value for a message, cut after 40 characters."""
    try:
        text = str(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


RANKS = Range(1, 1 << 20)  # ranks of a run, or GPUs of a cluster
RANK = Range(0, 1 << 31)  # the number of one
GPUS_PER_NODE = Range(1, 1 << 16)
FACTOR = Range(0, 1e6)
SPEED = Range(1e-6, 1e6)
DURATION_NS = Range(0, 1e15)
BANDWIDTH = Range(1, 1e15)  # bytes per second
PENALTY = Range(0, 1, is_open=True)
IMBALANCE = Range(1, 1e6)
REPLICAS = Range(1, 1e4)  # physical experts by logical ones
DTYPE_BYTES = Range(1, 16)
EFFICIENCY = Range(1e-6, 1)
START_S = Range(0, 1e3)  # start-up of a message
MOST_WORKERS = 1 << 12  # processes or threads of one machine
MOST_LISTED = 1 << 20  # numbers of a list such as 0-7,12
MOST_NUMBER = (1 << 53) - 1  # of a list; of an iteration
WHOLE = Range(0, MOST_NUMBER)
TOKENS = Range(1, MOST_NUMBER)
REPEAT = Range(1, 1 << 16)  # steps of a replay


def regex(name: str, text: str) -> re.Pattern[str]:
    """Compile a regular expression of a user, in the syntax of Python's `re`.

    Parameters
    ----------
    name
        Of the option or key that has it; empty if the message needs none.
    text
        The expression.

    Raises
    ------
    ConfigError
        If it is invalid, or means something else in other tools, as [[:alpha:]] does.

    """
    try:
        with catch_warnings(action="error", category=FutureWarning):
            return re.compile(text)
    except (re.error, RecursionError, OverflowError, FutureWarning) as error:
        reason = r"a [ inside of [...]; write \[, and no classes such as [:alpha:]"
        reason = reason if isinstance(error, FutureWarning) else str(error)
        raise ConfigError(
            f"{name}{': ' if name else ''}invalid regular expression {shortened(text)!r}: "
            f"{reason} (the syntax is that of Python)"
        ) from error


def _shown(value: Any) -> str:
    return repr(shortened(value)) if isinstance(value, str) else shortened(value)


def option_name(name: str) -> str:
    """Return the field of an options class as an option of the command line: "--seq-len"."""
    return f"--{name.replace('_', '-')}"


def non_default(options: Any) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    return [
        option.name
        for option in fields(options)
        if getattr(options, option.name) != option.default
    ]


_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong = 2, 60, 30


def refuse(where: str, key: str, value: object, expected: str) -> NoReturn:
    """Raise `ConfigError` for an invalid value of a table.

    Parameters
    ----------
    where
        File and table: "job.toml: [parallel]".
    key, value
        The key and its value.
    expected
        Description of valid values.

    """
    raise ConfigError(f"{where}: invalid {key} {_SHORT.repr(value)}: expected {expected}")


def choice(table: Mapping[str, Any], key: str, valid: Iterable[str], where: str) -> str | None:
    """Return the value of a key of a table that takes one of the `valid` texts, or None.

    `where` is the file and the table: "job.toml: [parallel]". Raises `ConfigError` for another
    value.
    """
    value = table.get(key)
    names = tuple(valid)
    if value is None or value in names:
        return value
    refuse(where, key, value, f"one of {', '.join(names)}{_hint(value, names)}")


def check_keys(table: Mapping[str, Any], valid: Iterable[str], where: str) -> None:
    """Raise `ConfigError`, which begins with `where`, for a key that is not in `valid`."""
    names = tuple(valid)
    for key in table:
        if key not in names:
            raise ConfigError(
                f"{where}: unknown key {_SHORT.repr(key)}: expected one of"
                f" {', '.join(names)}{_hint(key, names)}"
            )


def _hint(value: object, names: tuple[str, ...]) -> str:
    matches = get_close_matches(value[:40], names, 1) if isinstance(value, str) else ()
    return f"; did you mean {matches[0]!r}?" if matches else ""
