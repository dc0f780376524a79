"""How values from users are checked: numbers, options, keys of a configuration.

A range is generous: it holds all that could be meant, and keeps sums and products of numbers
within what int64 and float64 hold.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
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

from fastcomm.errors import ConfigError

_LONGEST = 40  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, with both unless `is_open` leaves out the least."""

    least: float
    most: float
    is_open: bool = False

    def holds(self, value: object) -> bool:
        """Whether the value is a number of the range; NaN is in none."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return self.least <= value <= self.most and not (self.is_open and value == self.least)

    def check(self, value: object, where: str) -> None:
        """Raise `ConfigError`, which begins with `where`, for a value out of the range."""
        if not self.holds(value):
            text = shortened(value)
            found = repr(text) if isinstance(value, str) else text
            raise ConfigError(f"{where}: found {found}, wanted {self}")

    def __str__(self) -> str:
        if self.is_open:
            return f"a number above {self.least:.15g}, at most {self.most:.15g}"
        return f"a number from {self.least:.15g} to {self.most:.15g}"


def shortened(value: object) -> str:
    """Return a value as a message shows it: a number of thousands of digits is cut."""
    try:
        text = str(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


RANKS = Range(1, 1 << 20)  # ranks of a run, or GPUs of a cluster
FACTOR = Range(0, 1e6)
SPEED = Range(1e-6, 1e6)
DURATION_NS = Range(0, 1e15)
DELAY_MS = Range(-1e9, 1e9)
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


P = ParamSpec("P")
S = TypeVar("S")
O = TypeVar("O")  # noqa: E741 - options
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_KINDS: dict[type, str] = {bool: "True or False", int: "a whole number", float: "a number"}


class CheckedOptions:
    """Base of the options: every value has the type of its field, or `ConfigError` is raised.

    Lists of a tuple field become tuples.
    """

    __slots__ = ()

    unchecked: ClassVar[tuple[str, ...]] = ()  # fields that whoever uses them checks

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
    """Return the types of the fields of a dataclass by name."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _checked(name: str, value: Any, hint: Any) -> Any:
    """Return a value as its type has it; ConfigError for a value of another type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        if get_origin(kind) is tuple and _is_list(value):
            return tuple(_checked(name, each, get_args(kind)[0]) for each in value)
        if _is_of(value, kind):
            return value
    raise ConfigError(f"{name}: found {_shown(value)}, wanted {_wanted(kinds)}")


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


def _wanted(kinds: Iterable[Any]) -> str:
    """Return the values that an option takes, as an error lists them."""
    said = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            said.append(f"one of {', '.join(get_args(kind))}")
        elif get_origin(kind) is tuple:
            said.append("a list")
        elif kind is not NoneType:
            said.append(_KINDS.get(kind, "a path" if kind is Path else "a text"))
    return " or ".join(dict.fromkeys(said))


def build(kind: Callable[..., O], values: Mapping[str, Any], where: str) -> O:
    """Return the options of a dataclass from keyword arguments.

    Raises
    ------
    ConfigError
        If a keyword argument is unknown; `where` is named in the message.

    """
    known = list(signature(kind).parameters)
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{where}: unknown option {name!r}; {hint}Options: {', '.join(known)}"
            )
    return kind(**values)


def shows(kind: Callable[..., object]) -> Callable[[F], F]:
    """Show the fields of a dataclass in a signature, in place of `**options`."""

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
    """Let callers of a function give its options as keyword arguments.

    The function takes something and options; callers give the fields of the options.
    """

    def decorate(function: Callable[[S, O], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(function)
        def call(subject: S, /, *_: P.args, **values: P.kwargs) -> R:
            return function(subject, build(kind, values, function.__name__))

        first, *_ = signature(function).parameters.values()
        call.__signature__ = signature(function).replace(  # type: ignore[attr-defined]
            parameters=[
                first.replace(kind=Parameter.POSITIONAL_ONLY),
                *signature(kind).parameters.values(),
            ]
        )
        return call

    return decorate


def non_default(options: Any) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    return [
        each.name for each in fields(options) if getattr(options, each.name) != each.default
    ]


_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong = 2, 60, 30


def refuse(where: str, key: str, found: object, wanted: str) -> NoReturn:
    """Raise a ConfigError for a value of a wrong kind."""
    raise ConfigError(f"{where} {key}: found {_SHORT.repr(found)}, wanted {wanted}")


def choice(table: Mapping[str, Any], key: str, wanted: Iterable[str], where: str) -> str | None:
    """The word under `key`, one of `wanted`; None where there is none."""
    found = table.get(key)
    names = tuple(wanted)
    if found is None or found in names:
        return found
    refuse(where, key, found, f"one of {', '.join(names)}{_hint(found, names)}")


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """ConfigError for the first key that is not known."""
    names = tuple(known)
    for key in table:
        if key not in names:
            raise ConfigError(
                f"{where}: unknown key {_SHORT.repr(key)}, wanted one of"
                f" {', '.join(names)}{_hint(key, names)}"
            )


def _hint(found: object, names: tuple[str, ...]) -> str:
    near = get_close_matches(found[:40], names, 1) if isinstance(found, str) else ()
    return f"; did you mean {near[0]!r}?" if near else ""
