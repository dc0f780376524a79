"""Fields of options classes: what each means, how its value is checked, who takes it.

An options class is a frozen dataclass on `CheckedOptions`, and `option_field` makes its fields.
The command line, the docstrings of functions that take the options, and the pages of options
and commands are made from them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from pathlib import Path
from textwrap import fill
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

from fastcomm.checks import Range, invalid_value, plain_number, regex
from fastcomm.errors import ConfigError, as_python, python_names
from fastcomm.units import Quantity

# Groups of options, as the help and the page of options call them.
WINDOW = "Window"
EDITS = "Edits"
MEASUREMENT = "Measurement"
LAYOUT = "Run layout"
READING = "Reading"
WORKLOAD = "Workload"
RULES = "Dependencies"
COMPAT = "Compatibility"
PREDICTIONS = "Predictions"
NETWORK = "Network"
BATCH = "Model and batch"
SPACE = "Search space"
COST = "Cost model"
STRATEGY = "Strategy"
QUERY = "Query"
OUTPUT = "Output"

_INFO = "fastcomm"  # key of the metadata of a field
_WIDTH = 96

P = ParamSpec("P")
S = TypeVar("S")
O = TypeVar("O")  # noqa: E741 - options
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldInfo:
    """What an option is, besides its name, type and default.

    Attributes
    ----------
    text
        What the option does, for the help; its first sentence is its meaning.
    group
        The heading that lists it in the help; None without an option of the command line.
    limits
        The valid numbers, or items of a list.
    path
        What the path names, which must exist unless it is new: "file", "directory", "file or
        URL", "new", "new directory"; None for other texts.
    may_be_empty
        Whether an empty text or list is a value.
    is_regex
        Whether the text, or every text of a list, is a regular expression.
    metavar
        Name of the value in the help, where the type does not tell it.
    is_common
        Whether `--help` lists the option, not only `--help-all`.
    row
        A row of the help that the option shares with others, which have `("", "")`.
    spellings
        Names of the option on the command line, where there are others than its own.
    needs
        Options of which one must be set, too: "flops", or with a value "compat hta". One with
        dashes, "--overlay", is an option of commands, and checked on the command line alone.
    not_with
        Options with which this one has no effect, written as in `needs`.

    """

    text: str
    group: str | None
    limits: Range | None = None
    path: Literal["file", "directory", "file or URL", "new", "new directory"] | None = None
    may_be_empty: bool = True
    is_regex: bool = False
    metavar: str | None = None
    is_common: bool = False
    row: tuple[str, str] | None = None
    spellings: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    not_with: tuple[str, ...] = ()


def option_field(text: str, default: Any = None, *, group: str | None, **about: Any) -> Any:
    """Return a field of an options class; `about` are attributes of `FieldInfo`."""
    return field(default=default, metadata={_INFO: FieldInfo(text=text, group=group, **about)})


@cache
def field_infos(kind: Any) -> Mapping[str, FieldInfo]:
    """Return the facts about the fields of an options class, by name."""
    return {own.name: own.metadata[_INFO] for own in fields(kind) if _INFO in own.metadata}


_KINDS: dict[type, str] = {bool: "True or False", int: "a whole number", float: "a number"}


class CheckedOptions:
    """Base class of options that checks each value against the type and limits of its field.

    A list for a field of type tuple becomes a tuple, and so does one item without a list. The
    text of a quantity ("400Gbit/s") becomes its number, of the type of the field (`Rate`). A
    value that is invalid, or that has no effect beside the others, raises `ConfigError`.
    """

    __slots__ = ()

    unchecked: ClassVar[tuple[str, ...]] = ()  # fields that their users check

    def __post_init__(self) -> None:
        """Check every field."""
        kind: Any = type(self)
        infos = field_infos(kind)
        for name, hint in _hints(kind).items():
            if name in self.unchecked:
                continue
            value = getattr(self, name)
            if name in infos:
                _refuse_empty(name, value, infos[name])
            object.__setattr__(self, name, _checked(name, value, hint))
        for name, info in infos.items():
            _check_value(name, getattr(self, name), info)
        for name, info in infos.items():
            if _is_set(self, name):
                _check_partners(self, name, info)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass by name."""
    hints = get_type_hints(kind)
    return {option.name: hints[option.name] for option in fields(kind)}


def _checked(name: str, value: Any, hint: Any) -> Any:
    """Return the value, a list or one item of it as a tuple; `ConfigError` for another type."""
    kinds, value = _union(hint), plain_number(value)
    for kind in filter(_is_quantity, kinds):
        return value if value is None or isinstance(value, kind) else kind(value, name)
    for kind in kinds:
        if get_origin(kind) is tuple and _is_list(value):
            return tuple(_checked(name, item, get_args(kind)[0]) for item in value)
        if _is_of(value, kind):
            return value
    for kind in kinds:
        if get_args(kind)[1:] == (...,) and _is_of(value, get_args(kind)[0]):
            return (value,)
    raise invalid_value(name, value, _described(kinds))


def _refuse_empty(name: str, value: Any, info: FieldInfo) -> None:
    """Raise `ConfigError` for an empty text or list, which no quantity or number is made of."""
    if isinstance(value, str | tuple | list) and not value and not info.may_be_empty:
        raise ConfigError(f"missing value of {name}")


def _check_value(name: str, value: Any, info: FieldInfo) -> None:
    """Raise `ConfigError` for a value, or an item of a list, that the field does not allow."""
    _refuse_empty(name, value, info)
    for item in value if isinstance(value, tuple) else (value,):
        if info.limits is not None and item is not None:
            info.limits.check(item, name)
        if info.is_regex and item is not None:
            regex(name, item)


def _check_partners(options: Any, name: str, info: FieldInfo) -> None:
    """Raise `ConfigError` if a set option lacks one that it needs, or has no effect."""
    needs = [text for text in info.needs if not text.startswith("--")]
    if needs and not any(_holds(options, text) for text in needs):
        raise ConfigError(f"{name} needs {' or '.join(needs)}")
    for text in info.not_with:
        if not text.startswith("--") and _holds(options, text):
            raise ConfigError(f"{name} has no effect with {text}; leave one out")


def _holds(options: Any, text: str) -> bool:
    """Whether an option is set, "flops", or with a value, "compat hta", whether it has that."""
    name, _, value = text.partition(" ")
    return str(getattr(options, name)) == value if value else _is_set(options, name)


def is_set(value: Any, default: Any) -> bool:
    """Whether the value of an option says more than its default, or than none."""
    return not (value is None or value is False or value in ((), default))


def _is_set(options: Any, name: str) -> bool:
    """Whether an option differs from its default."""
    return is_set(getattr(options, name), options.__dataclass_fields__[name].default)


def field_types(kind: Any, name: str) -> tuple[Any, ...]:
    """Return the types of a field of a dataclass: (int, NoneType) for `int | None`."""
    return _union(_hints(kind)[name])


def _union(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def literals(kind: Any, name: str) -> tuple[str, ...]:
    """Return the texts that a field of an options class takes; none for other fields."""
    types = field_types(kind, name)
    return tuple(text for of in types if get_origin(of) is Literal for text in get_args(of))


def _is_quantity(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Quantity)


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
    check_names(values, list(signature(kind).parameters), where)
    return kind(**values)


def check_names(values: Iterable[str], names: Sequence[str], where: str) -> None:
    """Raise `ConfigError` for a name of `values` that is none of the options."""
    for name in values:
        if name not in names:
            matches = get_close_matches(name, names, n=1)
            hint = f"did you mean {matches[0]!r}? " if matches else ""
            raise ConfigError(
                f"{where}: unknown option {name!r}; {hint}Options: {', '.join(names)}"
            )


def shows(kind: Callable[..., object]) -> Callable[[F], F]:
    """Return a decorator that shows the fields of a dataclass in place of `**options`.

    The docstring of the function gets a list of them behind its paragraph "Fields of `Kind`".
    """

    def decorate(function: F) -> F:
        own = signature(function)
        *first, _ = own.parameters.values()
        parameters = [*first, *signature(kind).parameters.values()]
        shown = own.replace(parameters=parameters)
        function.__signature__ = shown  # type: ignore[attr-defined]
        function.__doc__ = _with_fields(function.__doc__, kind)
        return function

    return decorate


def takes(
    kind: Callable[P, O],
) -> Callable[[Callable[[S, O], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator that lets callers pass options as keyword arguments.

    The decorated function takes a subject and an object of the dataclass `kind`. Callers pass
    the subject, and the fields of `kind` by name. The docstring of the function gets a list of
    them behind its paragraph "Fields of `Kind`".
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
        call.__doc__ = _with_fields(function.__doc__, kind)
        return call

    return decorate


def _with_fields(docstring: str | None, kind: Any) -> str | None:
    """Return a docstring with the fields of a class behind the paragraph that names it."""
    lines = (docstring or "").splitlines()
    begin = next((i for i, line in enumerate(lines) if _names(line, kind)), None)
    if begin is None:
        return docstring
    end = next(i for i in range(begin, len(lines)) if not lines[i].strip())
    indent = lines[begin].partition("Fields")[0]
    return "\n".join([*lines[:end], "", *_listed(kind, indent), *lines[end:]])


def _names(line: str, kind: Any) -> bool:
    return f"Fields of `{kind.__name__}`" in line


def _listed(kind: Any, indent: str) -> list[str]:
    """Return a line or more for each field of an options class: its name and what it does."""
    return [
        fill(
            f"- `{name}`: {as_python(info.text)}",
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_on_hyphens=False,
        )
        for name, info in field_infos(kind).items()
    ]
