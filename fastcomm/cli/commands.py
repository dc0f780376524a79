"""Commands with grouped options: ``--help`` shows the common ones, ``--help-all`` all of them.

An option has one group, one type and one meaning in all commands. The meaning is the first
sentence of its help text; what differs by command, such as the files of --output, follows. An
option of the API, too, is a field of an options class (`fastcomm.option_fields`). An option
that refines another one names it in `needs`; one that others make void names these in
`not_with`. Both are checked for what is typed alone: settings and the environment are standing
defaults.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Any, TypeVar

import click
import cloup
from click.core import ParameterSource
from cloup import OptionGroup
from cloup.formatting import HelpSection

from fastcomm.checks import option_name
from fastcomm.cli.main import SuggestingGroup
from fastcomm.cli.messages import talk
from fastcomm.cli.parameter_types import (
    FileOrUrl,
    InstanceRange,
    Number,
    NumberList,
    Output,
    OutputFolder,
    QuantityType,
    long_name,
)
from fastcomm.option_fields import (
    OUTPUT,
    FieldInfo,
    field_infos,
    field_types,
    is_set,
    literals,
)
from fastcomm.units import Count, Duration, Rate

F = TypeVar("F", bound=Callable[..., Any])
OptionRow = tuple[str, str]  # names and help text, as the help lists them

COMMON = "Common options"  # heading of the options that people use first
# Names of values in the help, where click would write a range or "DIRECTORY".
_METAVARS: dict[type, str] = {click.IntRange: "N", Number: "FACTOR", OutputFolder: "DIR"}
# Types of values by all types of the field, or by one of them.
_TYPES: dict[Any, click.ParamType[Any]] = {
    (tuple[int, ...],): NumberList(),
    (int, tuple[int, ...]): InstanceRange(),
    Rate: QuantityType("rate", Rate),
    Duration: QuantityType("time", Duration),
    Count: QuantityType("number", Count),
}
_PATHS: dict[str, click.ParamType[Any]] = {
    "file": click.Path(exists=True, dir_okay=False),
    "directory": click.Path(exists=True, file_okay=False),
    "file or URL": FileOrUrl(exists=True, dir_okay=False),
    "new": Output(),
    "new directory": OutputFolder(),
}
_COUNTS = "fastcomm.given"  # key of the context: how often each option is given
_INNER = "fastcomm.inner"  # key of the context: the words of an inner command
HELP_ALL = "fastcomm.help_all"  # key of the context: whether every option is shown


class Option(cloup.Option):
    """An option of a group.

    `is_common` lists it in ``--help``. `row` is a row of the help that the option shares with
    others, which have `row=""`. `needs` are options of which one must be given, too, `not_with`
    options with which this one has no effect: "--overlay", or with a value "--compat hta".
    """

    def __init__(
        self,
        *args: Any,
        group: OptionGroup | None = None,
        is_common: bool = False,
        row: OptionRow | None = None,
        needs: tuple[str, ...] = (),
        not_with: tuple[str, ...] = (),
        **attrs: Any,
    ) -> None:
        """Create an option; `attrs` are those of click, whose defaults are shown."""
        attrs.setdefault("show_default", True)
        for kind, metavar in _METAVARS.items():
            if isinstance(attrs.get("type"), kind) and attrs.get("metavar") is None:
                attrs["metavar"] = metavar
        super().__init__(*args, group=group, **attrs)
        self.is_common = is_common
        self.row = row
        self.needs = needs
        self.not_with = not_with

    def problems(self, ctx: click.Context) -> Iterator[str]:
        """Yield why the option has no effect on this command line."""
        if not _is_typed(ctx, self):
            return
        own_name = long_name(self)
        partners = [partner for partner in self.needs if _option(ctx, partner)]
        if partners and not any(_holds(ctx, partner) for partner in partners):
            yield f"{own_name} needs {' or '.join(partners)}."
        if others := [other for other in self.not_with if _holds(ctx, other)]:
            yield f"{own_name} has no effect with {' or '.join(others)}; leave one out."

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return what click shows behind the help text: the default, but no range."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra

    def get_help_record(self, ctx: click.Context) -> OptionRow | None:
        """Return the row of the help, or None where another option shows this one."""
        if self.row is not None:
            return self.row if self.row[0] else None
        return super().get_help_record(ctx)


@cache
def _group(title: str) -> OptionGroup:
    """Return the group with a title."""
    return OptionGroup(title)


def _option(ctx: click.Context, text: str) -> click.Parameter | None:
    """Return the option that a text such as "--compat hta" names; None if there is none."""
    name = text.partition(" ")[0]
    return next((param for param in ctx.command.params if name in param.opts), None)


def _is_given(ctx: click.Context, param: click.Parameter) -> bool:
    """Whether the value of an option differs from its default."""
    if param.name not in ctx.params:  # a flag that acts by itself has no value
        return ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    return is_set(ctx.params[param.name], param.default)


def _holds(ctx: click.Context, text: str) -> bool:
    """Whether an option is given, or with a value, "--compat hta", whether it has that.

    The value "" is written with its quotes: '--annotation ""'.
    """
    param, value = _option(ctx, text), text.partition(" ")[2]
    if param is None:
        return False
    if not value:
        return _is_given(ctx, param)
    current = ctx.params.get(str(param.name))
    return current == "" if value == '""' else value in str(current).split(",")


def typed_options(ctx: click.Context, *kinds: type) -> list[str]:
    """Return the names of the options of dataclasses that the command line gives.

    Values from settings and the environment are standing defaults, and do not count.
    """
    names = {field.name for kind in kinds for field in fields(kind)}
    return [
        long_name(param)
        for param in ctx.command.params
        if param.name in names and _is_typed(ctx, param)
    ]


def _is_typed(ctx: click.Context, param: click.Parameter) -> bool:
    """Whether the command line gives an option a value that is not its default."""
    source = ctx.get_parameter_source(str(param.name))
    return source is ParameterSource.COMMANDLINE and _is_given(ctx, param)


def option(*names: str, group: str, **attrs: Any) -> Callable[[F], F]:
    """Return a decorator that adds an `Option` to a command; `attrs` are those of `Option`."""
    return cloup.option(*names, cls=Option, group=_group(group), **attrs)


def options_of(
    kind: type, *names: str, without: Sequence[str] = ()
) -> list[Callable[[Any], Any]]:
    """Return decorators that add the options of an options class to a command.

    `names` are the fields, by default all that are options of the command line; `without` are
    fields that are left out.
    """
    own = [name for name, info in field_infos(kind).items() if info.group is not None]
    return [option_of(kind, name) for name in names or own if name not in without]


def option_of(kind: type, name: str, **attrs: Any) -> Callable[[F], F]:
    """Return a decorator that adds the option of a field of an options class to a command.

    The field says all about the option; see `FieldInfo`.

    Parameters
    ----------
    kind, name
        The class and its field.
    **attrs
        Attributes of `Option` that differ in this command.

    """
    info = field_infos(kind)[name]
    derived = {**_attributes(kind, name, info), **attrs}
    return option(*(info.spellings or [option_name(name)]), **derived)


def _attributes(kind: type, name: str, info: FieldInfo) -> dict[str, Any]:
    """Return the attributes of `Option` that follow from a field."""
    attributes: dict[str, Any] = {
        "help": info.text,
        "group": info.group,
        "is_common": info.is_common,
        "row": info.row,
        "needs": tuple(map(_as_option, info.needs)),
        "not_with": tuple(map(_as_option, info.not_with)),
        "metavar": info.metavar or ("REGEX" if info.is_regex else None),
    }
    (default,) = (own.default for own in fields(kind) if own.name == name)
    types = tuple(of for of in field_types(kind, name) if of is not NoneType)
    if types == (bool,):
        return {**attributes, "is_flag": True, "default": default}
    if types == (tuple[str, ...],):
        return {**attributes, "multiple": True, "help": f"{info.text} Repeatable."}
    if default not in (None, ()):
        attributes["default"] = default
    if (values := _type(kind, name, types, info)) is not None:
        attributes["type"] = values
    return attributes


def _type(
    kind: type, name: str, types: tuple[Any, ...], info: FieldInfo
) -> click.ParamType[Any] | None:
    """Return the type of the values of an option; None for a text."""
    if texts := literals(kind, name):
        return click.Choice(texts)
    if own := [_TYPES[of] for of in (types, *types) if of in _TYPES]:
        return own[0]
    if info.path is not None:
        return _PATHS[info.path]
    if info.limits is None:
        return None
    is_whole, limits = types == (int,), info.limits
    return click.IntRange(int(limits.least), int(limits.most)) if is_whole else Number(limits)


def _as_option(text: str) -> str:
    """Write an option as on the command line: "compat hta" as "--compat hta"."""
    name, space, value = text.partition(" ")
    return text if name.startswith("--") else f"{option_name(name)}{space}{value}"


class OptionsCommand(cloup.Command):
    """A command with ``--help-all``, options on output, and with `has_tables` ``--wide``."""

    def __init__(
        self, *args: Any, has_tables: bool = False, params: Any = None, **attrs: Any
    ) -> None:
        """Create a command; `has_tables` adds --wide, `attrs` are those of click."""
        settings = cloup.HelpFormatter.settings(col1_max_width=26)
        params = [*(params or []), *([_wide()] if has_tables else []), *_talking(), _help_all()]
        super().__init__(*args, params=params, formatter_settings=settings, **attrs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; a usage error names every option without effect."""
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            near = _nearest(
                error.option_name, [word for own in self.params for word in own.opts]
            )
            hint = f" Did you mean {near!r}?" if near else ""
            raise click.UsageError(
                f"No such option {error.option_name!r}.{hint}", ctx
            ) from error
        own = [param for param in self.params if isinstance(param, Option)]
        problems = [*_repeated(ctx), *(one for param in own for one in param.problems(ctx))]
        if problems and not ctx.resilient_parsing:
            ctx.close()  # its options, such as --wide, lose their effect
            raise click.UsageError(" ".join(problems), ctx)
        return rest

    def make_parser(self, ctx: click.Context) -> Any:
        """Return the parser of click, which also counts how often each option is given."""
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def counted(args: list[str]) -> Any:
            result = parse(args)
            ctx.meta[_COUNTS] = Counter(param for param in result[2])
            return result

        parser.parse_args = counted  # type: ignore[method-assign]
        return parser

    def format_params(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options, and where all are asked for, the others by group."""
        sections = self._sections(ctx)
        if not ctx.meta.get(HELP_ALL) and sections[0].heading == COMMON:
            sections = sections[:1]
        formatter.write_many_sections(sections)  # type: ignore[attr-defined]

    def _sections(self, ctx: click.Context) -> list[HelpSection]:
        """Return all options under their headings."""
        rows: dict[str, list[OptionRow]] = {}
        for option in self.get_params(ctx):
            if (
                isinstance(option, click.Option)
                and (record := option.get_help_record(ctx)) is not None
            ):
                rows.setdefault(_heading(option), []).append(record)
        order = sorted(rows, key=lambda heading: (heading != COMMON, heading == OUTPUT))
        return [HelpSection(heading=name, definitions=rows[name]) for name in order]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, and how to see the options that are not shown."""
        super().format_epilog(ctx, formatter)
        first, *others = self._sections(ctx)
        if ctx.meta.get(HELP_ALL) or first.heading != COMMON or not others:
            return
        count = sum(len(group.definitions) for group in others)
        formatter.write(f"\n{ctx.command_path} --help-all shows {count} more options.\n")


class ParentCommand(OptionsCommand):
    """A command with options of its own that also has commands: ``plan``, ``plan price``."""

    def __init__(self, *args: Any, **attrs: Any) -> None:
        """Create a command without commands; `attrs` are those of `OptionsCommand`."""
        super().__init__(*args, **attrs)
        self.commands: dict[str, click.Command] = {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, or leave them to the command that the first of them names."""
        if args and args[0] in self.commands:
            ctx.meta[_INNER] = list(args)
            return []
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run this command, or the one that the arguments name."""
        arguments = ctx.meta.pop(_INNER, None)
        if arguments is None:
            return super().invoke(ctx)
        name, *rest = arguments
        with self.commands[name].make_context(name, rest, parent=ctx) as inner:
            return inner.command.invoke(inner)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, then the examples."""
        if self.commands:
            with formatter.section("Commands"):
                rows = [
                    (name, command.get_short_help_str(60))
                    for name, command in self.commands.items()
                ]
                formatter.write_dl(rows)
        super().format_epilog(ctx, formatter)


def _repeated(ctx: click.Context) -> Iterator[str]:
    """Yield why an option that takes one value must not be given twice."""
    for param, number in ctx.meta.get(_COUNTS, {}).items():
        is_single = isinstance(param, click.Option) and not param.multiple
        is_harmless = getattr(param, "is_flag", False) and not param.secondary_opts
        if is_single and not is_harmless and number > 1:
            others = [
                name for name in param.opts if name[:2] == "--" and name != long_name(param)
            ]
            also = f" (or {', '.join(others)})" if others else ""
            yield f"{long_name(param)}{also} is given {number} times; give it once."


def _nearest(name: str, options: Sequence[str]) -> str | None:
    """Return the option that was probably meant by a wrong one, or None.

    It is one that begins with the wrong name, or with which that begins, or the most similar.
    """
    long_names = [word for word in options if word.startswith("--")]
    near = [word for word in long_names if word.startswith(name) or name.startswith(word)]
    return next(iter([*near, *get_close_matches(name, long_names, n=1, cutoff=0.7)]), None)


def _heading(param: click.Parameter) -> str:
    """Return the heading under which the help lists an option."""
    return COMMON if getattr(param, "is_common", False) else group_title(param)


def group_title(param: click.Parameter) -> str:
    """Return the title of the group of an option."""
    group = getattr(param, "group", None)
    return str(group.title) if group else OUTPUT


def meaning(param: click.Option) -> str:
    """Return what an option does: the first sentence of its help text, without its period."""
    return re.split(r"\.(?: |$)", param.help or "", maxsplit=1)[0]


class CommandGroup(SuggestingGroup):
    """A group of commands with grouped options."""

    command_class = OptionsCommand

    def __init__(self, *args: Any, **attrs: Any) -> None:
        """Create a group with --help-all; `attrs` are those of click."""
        super().__init__(*args, **attrs)
        self.params.append(_help_all())


def _wide() -> Option:
    """Return the option --wide, which prints every column while the command runs."""

    def widen(ctx: click.Context, _option: click.Parameter, is_wide: bool) -> None:
        if is_wide:
            from fastcomm.show.console import WIDE

            token = WIDE.set(True)
            ctx.call_on_close(lambda: WIDE.reset(token))

    return _flag(
        "--wide",
        "Print every column of every table.",
        callback=widen,
        not_with=("--json", "--format json", "--format csv", "--format markdown"),
    )


def _talking() -> list[Option]:
    """Return the options --quiet and --verbose, which set what is logged to stderr."""

    def level(number: int) -> Callable[[click.Context, click.Parameter, bool], None]:
        return lambda _ctx, _option, is_given: talk(number) if is_given else None

    return [
        _flag("-q", "--quiet", "Print errors alone to stderr.", callback=level(logging.ERROR)),
        _flag(
            "-v",
            "--verbose",
            "Log timings and full tracebacks to stderr.",
            callback=level(logging.DEBUG),
            not_with=("--quiet",),
        ),
    ]


def _helps(command: click.Command, ctx: click.Context) -> Iterator[str]:
    """Yield the help of a command, and of the commands of a group."""
    yield command.get_help(ctx)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _helps(inner, inner.context_class(inner, info_name=name, parent=ctx))


def _help_all() -> Option:
    """Return the option --help-all, which shows all options and exits."""

    def show(ctx: click.Context, _option: click.Parameter, is_given: bool) -> None:
        if is_given and not ctx.resilient_parsing:
            ctx.meta[HELP_ALL] = True
            click.echo("\n\n".join(_helps(ctx.command, ctx)), color=ctx.color)
            ctx.exit()

    return _flag("--help-all", "Show all options and exit.", callback=show, is_eager=True)


def _flag(*names_and_help: str, callback: Callable[..., None], **attrs: Any) -> Option:
    """Return a flag that calls `callback`; the last of `names_and_help` is the help text."""
    *names, text = names_and_help
    return Option(
        names,
        is_flag=True,
        expose_value=False,
        callback=callback,
        help=text,
        group=_group(OUTPUT),
        **attrs,
    )
