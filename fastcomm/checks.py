"""How values from users are checked: numbers, options, keys of a configuration.

Ranges are generous: they refuse only values that nobody can intend, and keep sums and products
within int64 and float64.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from reprlib import Repr
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Literal,
    NoReturn,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from warnings import catch_warnings

from fastcomm.errors import ConfigError, python_names

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


def check_numbers(name: str, numbers: Iterable[int] | None) -> None:
    """Raise `ConfigError` for a number of a step or a rank that is out of range."""
    for number in numbers or ():
        WHOLE.check(number, name)


P = ParamSpec("P")
S = TypeVar("S")
O = TypeVar("O")  # noqa: E741 - options
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_KINDS: dict[type, str] = {bool: "True or False", int: "a whole number", float: "a number"}


class CheckedOptions:
    """Base class of options that checks each value against the type of its field.

    A list for a field of type tuple becomes a tuple, and so does one item without a list. A
    value of another type raises `ConfigError`.
    """

    __slots__ = ()

    unchecked: ClassVar[tuple[str, ...]] = ()  # fields that their users check

    def __post_init__(self) -> None:
        """Check every field."""
        kind: Any = type(self)
        for name, hint in _hints(kind).items():
            if name in self.unchecked:
                continue
            value = getattr(self, name)
            object.__setattr__(self, name, _checked(name, value, hint))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass by name."""
    hints = get_type_hints(kind)
    return {option.name: hints[option.name] for option in fields(kind)}


def _checked(name: str, value: Any, hint: Any) -> Any:
    """Return the value, a list or one item of it as a tuple; `ConfigError` for another type."""
    kinds, value = _union(hint), plain_number(value)
    for kind in kinds:
        if get_origin(kind) is tuple and _is_list(value):
            return tuple(_checked(name, item, get_args(kind)[0]) for item in value)
        if _is_of(value, kind):
            return value
    for kind in kinds:
        if get_args(kind)[1:] == (...,) and _is_of(value, get_args(kind)[0]):
            return (value,)
    raise invalid(name, _shown(value), _described(kinds))


def field_types(kind: Any, name: str) -> tuple[Any, ...]:
    """Return the types of a field of a dataclass: (int, NoneType) for `int | None`."""
    return _union(_hints(kind)[name])


def _union(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def literals(kind: Any, name: str) -> tuple[str, ...]:
    """Return the texts that a field of an options class takes; none for other fields."""
    types = field_types(kind, name)
    return tuple(text for of in types if get_origin(of) is Literal for text in get_args(of))


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _is_of(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(kind, type) and isinstance(value, kind)


def _shown(value: Any) -> str:
    return repr(shortened(value)) if isinstance(value, str) else shortened(value)


def _described(kinds: Iterable[Any]) -> str:
    """Describe the values of the types of an option for an error."""
    descriptions = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            descriptions.append(f"one of {', '.join(get_args(kind))}")
        elif get_origin(kind) is tuple:
            descriptions.append("a list")
        elif kind is not NoneType:
            descriptions.append(_KINDS.get(kind, "a path" if kind is Path else "a text"))
    return " or ".join(dict.fromkeys(descriptions))


def build(kind: Callable[..., O], values: Mapping[str, Any], where: str) -> O:
    """Build a dataclass of options from keyword arguments.

    Parameters
    ----------
    kind
        The dataclass.
    values
        The fields that differ from their defaults, by name.
    where
        Name of the function that a user called; messages begin with it.

    Raises
    ------
    ConfigError
        If a name is no field of the dataclass, or a value is invalid.

    """
    names = list(signature(kind).parameters)
    for name in values:
        if name not in names:
            matches = get_close_matches(name, names, n=1)
            hint = f"did you mean {matches[0]!r}? " if matches else ""
            raise ConfigError(
                f"{where}: unknown option {name!r}; {hint}Options: {', '.join(names)}"
            )
    return kind(**values)


def shows(kind: Callable[..., object]) -> Callable[[F], F]:
    """Return a decorator that shows the fields of a dataclass in place of `**options`."""

    def decorate(function: F) -> F:
        own = signature(function)
        *first, _ = own.parameters.values()
        parameters = [*first, *signature(kind).parameters.values()]
        shown = own.replace(parameters=parameters)
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return decorate


def takes(
    kind: Callable[P, O],
) -> Callable[[Callable[[S, O], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator that lets callers pass options as keyword arguments.

    The decorated function takes a subject and an object of the dataclass `kind`. Callers pass
    the subject, and the fields of `kind` by name.
    """

    def decorate(function: Callable[[S, O], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(function)
        def call(subject: S, /, *unnamed: P.args, **values: P.kwargs) -> R:
            name = function.__name__
            if unnamed:
                option = next(iter(signature(kind).parameters))
                raise TypeError(f"{name}: pass options by name, as in {name}({option}=...)")
            with python_names():
                return function(subject, build(kind, values, name))

        first, *_ = signature(function).parameters.values()
        call.__signature__ = signature(function).replace(  # type: ignore[attr-defined]
            parameters=[
                first.replace(kind=Parameter.POSITIONAL_ONLY),
                *signature(kind).parameters.values(),
            ]
        )
        return call

    return decorate


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
