"""How dataclasses of options are checked, and built from keyword arguments."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from fastcomm.errors import ConfigError
from fastcomm.ranges import shortened

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
