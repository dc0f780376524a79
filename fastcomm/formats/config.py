"""What a user states about a job: in options, in TOML, and in a workload card, merged.

A value that is not stated is None, so that another source can state it. Values are checked
here, except whether sizes fit each other and the world, which `Parallel.grid` checks.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcomm import files, regexes
from fastcomm.checks import check_keys, check_path, choice, non_default, refuse
from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.communication import Pattern
from fastcomm.options import ReadOptions, StepBoundary
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.rank_grid import (
    DEFAULT_ORDER,
    ORDERS,
    SIZES,
    Parallel,
    dimensions_of,
)
from fastcomm.trace.run_traces import SkippedRank
from fastcomm.trace.schema import OPS
from fastcomm.trace.tags import RULE_FIELDS, TagRule, TagRules
from fastcomm.units import parse_bandwidth

if TYPE_CHECKING:
    from fastcomm.formats.tables import TableMapping

_TABLES = ("parallel", "tags", "kernels", "iterations", "link", "ranks", "table")
_MOST = 1 << 31  # ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that a user can state. Bandwidths are bytes per second, in one direction."""

    parallel: Parallel = field(default_factory=Parallel)
    tags: tuple[TagRule, ...] = ()
    kernels: tuple[Pattern, ...] = ()
    iterations: str | None = None  # regular expression for iteration marks
    bandwidth: float | None = None  # of the link that reports compare with
    ranks: Mapping[str, int] = field(default_factory=dict)  # see `[ranks]`
    table: "TableMapping | None" = None  # columns of a table of operations
    scale_out: float | None = None  # between nodes
    scale_up: float | None = None  # inside a node
    clock: StepBoundary = "auto"  # of iterations; see `IterationRule`
    guess_tags: bool = False
    allow_truncated: bool = False
    keep_going: bool = False  # whether to skip unreadable files (`RunTraces.skipped`)
    by_beginnings: bool = False  # whether to read no more of files than tells their errors
    # Names of the fields of `ReadOptions` that differ from their defaults, and of those that
    # hold for all runs of the user: it is no error if a format ignores one.
    stated: frozenset[str] = frozenset()
    standing: frozenset[str] = frozenset()
    # The user's sizes and order as options, without those of a workload card; empty: none.
    user_sizes: str | None = field(default=None, compare=False)
    user_order: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, options: ReadOptions, *, standing: Iterable[str] = ()) -> "Config":
        """Return what options state, over the configuration file that they name.

        `standing` are names of options that a format may ignore.
        Raises `ConfigError` if the file is invalid or contradicts the options.
        """
        # Some sizes are no options: only a file states them.
        sizes = {name: getattr(options, name, None) for name in (*SIZES, "order")}
        if options.order is not None:
            dimensions_of(options.order)
        if options.iteration_regex == "":
            raise ConfigError("iteration_regex: an empty text would match every annotation")
        config = cls(
            parallel=Parallel(**sizes),
            iterations=options.iteration_regex,
            clock=options.step_boundary,
            guess_tags=options.guess_tags,
            allow_truncated=options.allow_truncated,
            keep_going=options.keep_going,
            stated=frozenset(non_default(options)),
            standing=frozenset(standing),
        )
        if options.config is None:
            return config
        check_path(options.config, "config", 'config="fastcomm.toml"')
        return config.over(read(files.place(options.config)))

    @property
    def world(self) -> int | None:
        """The number of ranks by the sizes that the user states; None without the size `dp`."""
        return None if self.parallel.dp is None else self.parallel.world

    def reading(self, world: int | None, ranks: Collection[int] = ()) -> TraceOptions:
        """Return the options for reading one rank.

        Parameters
        ----------
        world
            Number of ranks; None if unknown.
        ranks
            The ranks with a trace, for an assumption if the world size is unknown or too small.

        Raises
        ------
        ConfigError
            If the sizes of the parallelism do not fit the world.

        """
        if world is None or max(ranks, default=0) >= world:
            world = self.parallel.assumed_world(ranks)
        try:
            tags = self.tag_rules(world)
        except ConfigError as error:
            raise ConfigError(f"parallelism: {error}") from error
        return TraceOptions(
            allow_truncated=self.allow_truncated,
            iterations=IterationRule(regex=self.iterations, clock=self.clock),
            tags=tags,
            patterns=self.kernels,
        )

    def skipped(
        self, path: Path, error: TraceFileError, rank: int | None = None
    ) -> SkippedRank:
        """Return the record of a file that is skipped because of an error.

        Raises the error unless the run goes on without unreadable files.
        """
        if not self.keep_going:
            raise error
        return SkippedRank(rank=rank, path=str(path), error=str(error))

    def over(self, base: "Config") -> "Config":
        """Return this configuration merged over `base`: its values and rules go first."""
        parallel = replace(base.parallel, **_stated(self.parallel))
        if self.parallel.framework and not self.parallel.order:
            parallel = replace(parallel, order=None)
        return replace(
            base,
            **_stated(self),
            parallel=parallel,
            tags=self.tags + base.tags,
            kernels=self.kernels + base.kernels,
            ranks={**base.ranks, **self.ranks},
        )

    def with_user_sizes(self) -> "Config":
        """Record the sizes as the user's, before those of a workload card are merged."""
        if self.user_sizes is not None:
            return self
        order = self.parallel.order
        return replace(
            self,
            user_sizes=self.parallel.options_text(),
            user_order="" if order is None else f"--order {order}",
        )

    def tag_rules(self, world_size: int | None) -> TagRules:
        """Return the rules that determine the parallelism of a process group.

        `world_size` is the number of ranks of the job, or None.
        """
        return TagRules(
            explicit=self.tags,
            grid=self.parallel.grid(world_size),
            guess=self.guess_tags,
            grid_words=self.user_sizes or "",
            order_words=self.user_order or "",
        )


def _stated(source: Parallel | Config) -> dict[str, Any]:
    """Return the fields that are not None, without those that are merged one by one."""
    values = {field_.name: getattr(source, field_.name) for field_ in fields(source)}
    merged = ("parallel", "tags", "kernels", "ranks")
    return {
        key: value for key, value in values.items() if value is not None and key not in merged
    }


def read(path: Path) -> Config:
    """Read a TOML file.

    Raises `ConfigError`, with path and key, for an unknown key or an invalid value.
    """
    data = files.toml(path)
    check_keys(data, _TABLES, str(path))
    links = _table(data, "link", path, ("bandwidth", "scale_out", "scale_up"))
    speeds: dict[str, Any] = {
        name: parse_bandwidth(links[name], f"{path}: [link] {name}") for name in links
    }
    marks = _table(data, "iterations", path, ("regex",))
    sizes = _table(data, "parallel", path, (*SIZES, "order", "framework"))
    return Config(
        parallel=_parallel(sizes, f"{path}: [parallel]"),
        tags=tuple(tag_rule(row, where) for row, where in _rows(data, "tags", path)),
        kernels=tuple(
            kernel_pattern(row, where) for row, where in _rows(data, "kernels", path)
        ),
        iterations=_regex(marks, "regex", f"{path}: [iterations]"),
        ranks=_ranks(data, path),
        table=_mapping(data, path) if "table" in data else None,
        **speeds,
    )


def integer(table: Mapping[str, Any], key: str, where: str) -> int | None:
    """Return the positive integer under `key`, or None without the key.

    Parameters
    ----------
    table
        Table of a TOML file.
    key
        Name of the value.
    where
        Beginning of the message of an error, such as the path.

    Raises
    ------
    ConfigError
        The value is not a whole number from 1 to 2^31 - 1.

    """
    value = table.get(key)
    if value is not None and not (_is_count(value) and 1 <= value <= _MOST):
        refuse(where, key, value, f"a whole number from 1 to {_MOST}")
    return value


def _table(
    data: Mapping[str, Any], key: str, path: Path, keys: Iterable[str] | None = None
) -> dict[str, Any]:
    """Return a table of the file; empty if it is missing. It has none but `keys`, if given."""
    table = data.get(key, {})
    if not isinstance(table, dict):
        refuse(str(path), key, table, f"a table [{key}]")
    if keys is not None:
        check_keys(table, keys, f"{path}: [{key}]")
    return table


def _mapping(data: Mapping[str, Any], path: Path) -> "TableMapping":
    """Return the mapping of a table of operations."""
    from fastcomm.formats.tables import table_mapping  # slow import; few runs are tables

    return table_mapping(_table(data, "table", path), str(path))


def _ranks(data: Mapping[str, Any], path: Path) -> dict[str, int]:
    """Return the rank of each file ("report.sqlite") or process ("report.sqlite:4711")."""
    table = _table(data, "ranks", path)
    for key, rank in table.items():
        if not _is_count(rank) or not 0 <= rank <= _MOST:
            refuse(f"{path}: [ranks]", key, rank, "a rank, from 0")
    return table


def _rows(data: Mapping[str, Any], key: str, path: Path) -> list[tuple[dict[str, Any], str]]:
    """Return the tables of an array, each with the beginning of its error messages."""
    rows = data.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        refuse(str(path), key, rows, f"tables [[{key}]]")
    return [(row, f"{path}: [[{key}]] number {number}") for number, row in enumerate(rows, 1)]


def _parallel(table: Mapping[str, Any], where: str) -> Parallel:
    """Return the sizes and the order of the grid; `where` names the table in errors."""
    sizes = {name: integer(table, name, where) for name in SIZES}
    order = _text(table, "order", where)
    try:
        dimensions_of(order or DEFAULT_ORDER)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from error
    framework = choice(table, "framework", ORDERS, where)
    return Parallel(**sizes, order=order, framework=framework)


def _text(table: Mapping[str, Any], key: str, where: str) -> str | None:
    """Return the text under `key`, or None without the key."""
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        refuse(where, key, value, "text in quotes")
    return value


def _needed(value: str | None, key: str, where: str) -> str:
    """Return a value that must not be missing."""
    if not value:
        raise ConfigError(f"{where}: missing key {key}")
    return value


def _regex(table: Mapping[str, Any], key: str, where: str) -> str | None:
    """Return the regular expression under `key`, or None without the key."""
    value = _text(table, key, where)
    regexes.check_of_file(f"{where}: {key}", value or "")
    return value


def kernel_pattern(row: Mapping[str, Any], where: str) -> Pattern:
    """Return the kernel name pattern of a row; `where` names the row in errors."""
    check_keys(row, ("pattern", "op", "tag", "library"), where)
    return Pattern(
        regex=_needed(_regex(row, "pattern", where), "pattern", where),
        op=_needed(choice(row, "op", OPS, where), "op", where),
        tag=choice(row, "tag", TAGS, where),
        library=_text(row, "library", where) or "user",
    )


def tag_rule(row: Mapping[str, Any], where: str) -> TagRule:
    """Return the tag rule of a row; `where` names the row in errors."""
    check_keys(row, (*RULE_FIELDS, "tag"), where)
    tag = _needed(choice(row, "tag", TAGS, where), "tag", where)
    names = [name for name in RULE_FIELDS if name in row]
    if len(names) != 1:
        raise ConfigError(
            f"{where}: found {' and '.join(names) or 'only a tag'}, expected exactly one of"
            f" {', '.join(RULE_FIELDS)}"
        )
    return TagRule(field=names[0], value=_rule_value(names[0], row, where), tag=tag)


def _rule_value(name: str, row: Mapping[str, Any], where: str) -> str | int | tuple[int, ...]:
    """Return the value of a tag rule.

    A communicator may be text, since TOML integers are signed.
    """
    value = row[name]
    if name == "communicator" and isinstance(value, str):
        try:
            value = int(value.replace(",", ""), 0)
        except ValueError:
            refuse(where, name, row[name], "a number, as in 123 or '0x8000000000000001'")
    if name in {"name", "description"}:
        is_valid, expected = isinstance(value, str), "text in quotes"
    elif name == "ranks":
        is_valid = isinstance(value, list) and all(map(_is_count, value))
        value, expected = tuple(value) if is_valid else value, "a list of ranks"
    else:
        is_valid, expected = _is_count(value), "a number of 0 or more"
    if not is_valid:
        refuse(where, name, value, expected)
    rule_value: str | int | tuple[int, ...] = value
    return rule_value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 64
