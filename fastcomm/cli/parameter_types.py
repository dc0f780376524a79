"""Types of the values of arguments and options: numbers, lists, paths."""

import math
from pathlib import Path
from typing import Any

import click

from fastcomm.checks import (
    MOST_LISTED,
    MOST_NUMBER,
    RANKS,
    Range,
    invalid,
    shortened,
)
from fastcomm.errors import TraceFileError, shell_joined
from fastcomm.units import Quantity

_Param = click.Parameter | None
_Context = click.Context | None

_MOST_DIGITS = len(str(MOST_NUMBER))


class Number(click.FloatRange):
    """A finite number of a range."""

    def __init__(self, within: Range) -> None:
        super().__init__(within.least, within.most, min_open=within.is_open)

    def convert(self, value: Any, param: _Param, ctx: _Context) -> float:
        """Return the number as click's type does; a usage error for NaN.

        No comparison would refuse NaN.
        """
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class QuantityType(click.ParamType[Quantity]):
    """A number with its unit, such as "400Gbit/s"; `name` is shown in the help."""

    def __init__(self, name: str, kind: type[Quantity]) -> None:
        self.name = name
        self._kind = kind

    def convert(self, value: Any, param: _Param, ctx: _Context) -> Quantity:
        """Return the quantity of a text; ConfigError if it is none."""
        return value if isinstance(value, self._kind) else self._kind(value, option_name(param))


class NumberList(click.ParamType[tuple[int, ...]]):
    """Numbers as in 0-7,12."""

    name = "list"

    def convert(self, value: Any, param: _Param, ctx: _Context) -> tuple[int, ...]:
        """Return the numbers of a text such as "0-3,7"; ConfigError if it is no such list."""
        return numbers(option_name(param), str(value))


class InstanceRange(click.ParamType[int | tuple[int, int]]):
    """A number, or an inclusive pair as in 0:3."""

    name = "instance"

    def convert(self, value: Any, param: _Param, ctx: _Context) -> int | tuple[int, int]:
        """Return the number, or the first and last number of "0:3"; ConfigError for others."""
        first, colon, last = str(value).partition(":")
        begin, end = integer_of(first), integer_of(last if colon else first)
        if begin is None or end is None:
            raise invalid("--instance", repr(shortened(value)), "a number, or two as in 0:3")
        return (begin, end) if colon else begin


def long_name(param: click.Parameter) -> str:
    """Return the long name of an option as a user writes it."""
    return max(param.opts, key=len)


def option_name(param: click.Parameter | None) -> str:
    """Return the long name of a parameter, or "value" without one."""
    return long_name(param) if param else "value"


def integer_of(text: str) -> int | None:
    """Return the number that digits write; None for other texts, or above 2^53 - 1."""
    is_number = text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) <= MOST_NUMBER
    return int(text) if is_number else None


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the numbers of a text such as "0-7,12"; errors begin with `name`.

    Raises
    ------
    ConfigError
        If the text is anything else, or names more than 2^20 numbers.

    """
    values: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        least, most = integer_of(first), integer_of(last if dash else first)
        if least is not None and most is not None and least > most:
            expected = f"the smaller number first, as in {most}-{least}"
            raise invalid(name, repr(shortened(part)), expected)
        if least is None or most is None:
            expected = f"numbers from 0 to {MOST_NUMBER}, as in 0-7,12"
            raise invalid(name, repr(shortened(part)), expected)
        if len(values) + most - least >= MOST_LISTED:
            expected = f"at most {MOST_LISTED} numbers, as in 0-7,12"
            raise invalid(name, repr(shortened(text)), expected)
        values.extend(range(least, most + 1))
    return tuple(values)


COUNT = click.IntRange(1, int(RANKS.most))


class FileOrUrl(click.Path):
    """A path that exists, or a URL, of which reading it says whether it does."""

    def convert(self, value: Any, param: _Param, ctx: _Context) -> Any:
        """Return a URL unchanged, or the path of a file that exists."""
        return value if "://" in str(value) else super().convert(value, param, ctx)


class TracePath(click.Path):
    """A trace or a directory that exists, for `command` where another one reads its like."""

    def __init__(self, command: str = "") -> None:
        super().__init__(path_type=Path)
        self._command = command

    def convert(self, value: Any, param: _Param, ctx: _Context) -> Any:
        """Return the path; raise ConfigError for standard input, and if it does not exist."""
        from fastcomm.formats.detection import no_such_path, refuse_standard_input

        refuse_standard_input(value)
        path = super().convert(value, param, ctx)
        if not Path(str(path)).exists():
            raise no_such_path(str(path))
        return path


class RunArgument(TracePath):
    """A trace or a directory of traces; of dPRO trials, the error names `command` of dpro."""

    def convert(self, value: Any, param: _Param, ctx: _Context) -> Any:
        """Return the path; raise TraceFileError for a dPRO trial or a uniform trace."""
        from fastcomm.formats import dpro

        path = super().convert(value, param, ctx)
        if dpro.claims(path):
            raise dpro.trial_error(path, self._command)
        return path


class TrialPath(TracePath):
    """A dPRO trial or a uniform trace; of a run, the error names its command."""

    def convert(self, value: Any, param: _Param, ctx: _Context) -> Any:
        """Return the path; raise TraceFileError for traces of a profiler."""
        from fastcomm.compat.dpro import trial

        path = super().convert(value, param, ctx)
        if trial.is_run(path):
            line = shell_joined(["fastcomm", self._command, str(path)])
            raise TraceFileError(
                f"{path}: neither a dPRO trial (a directory with a directory per host) nor a "
                f"uniform trace. For traces of a profiler: {line}"
            )
        return path


class Output(click.Path):
    """A file or a directory to write to, which need not exist."""

    def convert(self, value: Any, param: _Param, ctx: _Context) -> Any:
        """Return the path; ConfigError for a URL or an empty name, before anything is done."""
        from fastcomm.files import refuse_output

        refuse_output(option_name(param), value)
        return super().convert(value, param, ctx)


class OutputFile(Output):
    """A file to write: no device, FIFO or symbolic link, which writing would replace."""

    def __init__(self, *, dir_okay: bool = False, end: str = "") -> None:
        super().__init__(dir_okay=dir_okay, path_type=Path)
        self.end = end  # of its name, without which nobody reads it

    def convert(self, value: Any, param: _Param, ctx: _Context) -> Any:
        """Return the path; raise FastcommError where it must not be replaced."""
        from fastcomm.files import check_replaceable, note_output

        path = super().convert(value, param, ctx)
        if not path.name.endswith(self.end):
            self.fail(f"{value}: the name must end in {self.end}", param, ctx)
        check_replaceable(path)
        note_output(path)
        return path


class OutputFolder(Output):
    """A directory to write to."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)
