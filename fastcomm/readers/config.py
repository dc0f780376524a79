"""What a user says of a job: a TOML file, and how several such sources lie over each other.

A value that nobody said is None, so that another source can say it. What is said is checked
here, except that sizes fit each other and the world: `Parallel.grid` finds that out.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcomm import files
from fastcomm.checks import check_keys, choice, refuse
from fastcomm.errors import ConfigError
from fastcomm.readers.patterns import Pattern
from fastcomm.trace.parallel import DEFAULT_ORDER, ORDERS, Grid, dimensions_of
from fastcomm.trace.schema import OPS, TAGS
from fastcomm.trace.tags import RULE_FIELDS, TagRule, TagRules
from fastcomm.units import parse_bandwidth

if TYPE_CHECKING:
    from fastcomm.readers.table_mapping import TableMapping

_TABLES = ("parallel", "tags", "kernels", "iterations", "link", "ranks", "table")
_SIZES = ("tp", "pp", "dp", "ep", "cp", "etp", "dp_replicate")
_MOST = 1 << 31  # ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The sizes of a job's grid, as far as they are said."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    cp: int | None = None
    etp: int | None = None
    dp_replicate: int | None = None
    order: str | None = None  # dimensions, or a name of ORDERS
    framework: str | None = None  # a name of ORDERS

    def grid(self, world_size: int | None) -> Grid | None:
        """The grid of a world, None where no size is said; ConfigError on a contradiction."""
        said = {name: size for name in _SIZES if (size := getattr(self, name)) is not None}
        order = self.order or ORDERS.get(self.framework or "", DEFAULT_ORDER)
        return Grid.of(world_size, order=order, **said) if said else None

    def words(self) -> str:
        """Return the sizes as options, such as "--tp 2 --dp 4"; empty without any."""
        sizes = [(name, getattr(self, name)) for name in _SIZES]
        return " ".join(f"--{name} {size}" for name, size in sizes if size is not None)

    def assumed_world(self, ranks: Iterable[int]) -> int | None:
        """Return how many ranks there are if no trace says it.

        It is the number of ranks that have a trace, or what the sizes need where that is more.
        None where no size is given.
        """
        if not self.words():
            return None
        least = (self.dp or 1) * (self.tp or 1) * (self.pp or 1) * (self.cp or 1)
        return max(least, max(ranks, default=0) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a user can say. Bandwidths are bytes per second, in one direction."""

    parallel: Parallel = field(default_factory=Parallel)
    tags: tuple[TagRule, ...] = ()
    kernels: tuple[Pattern, ...] = ()
    iterations: str | None = None  # a regular expression for iteration marks
    bandwidth: float | None = None  # of the link that reports compare with
    ranks: Mapping[str, int] = field(default_factory=dict)  # by file, or by file:process
    table: "TableMapping | None" = None  # what the columns of a table of operations mean
    scale_out: float | None = None  # between nodes
    scale_up: float | None = None  # inside a node
    # The sizes that the user gave, as options; those of a workload card are not among them.
    given: str | None = field(default=None, compare=False)
    given_order: str | None = field(default=None, compare=False)  # likewise; empty without one

    def over(self, base: "Config") -> "Config":
        """Lie over `base`: what this says wins, and its rules come before those."""
        parallel = replace(base.parallel, **_said(self.parallel))
        if self.parallel.framework and not self.parallel.order:
            parallel = replace(parallel, order=None)
        return replace(
            base,
            **_said(self),
            parallel=parallel,
            tags=self.tags + base.tags,
            kernels=self.kernels + base.kernels,
            ranks={**base.ranks, **self.ranks},
        )

    def with_given(self) -> "Config":
        """Keep what is given here of the grid, before what a workload card says joins it."""
        if self.given is not None:
            return self
        order = self.parallel.order
        return replace(
            self,
            given=self.parallel.words(),
            given_order="" if order is None else f"--order {order}",
        )

    def tag_rules(self, world_size: int | None, *, guess: bool = False) -> TagRules:
        """Return what decides a group's tag."""
        return TagRules(
            explicit=self.tags,
            grid=self.parallel.grid(world_size),
            guess=guess,
            grid_words=self.given or "",
            order_words=self.given_order or "",
        )


def _said(source: Parallel | Config) -> dict[str, Any]:
    values = {each.name: getattr(source, each.name) for each in fields(source)}
    merged = ("parallel", "tags", "kernels", "ranks")
    return {
        key: value for key, value in values.items() if value is not None and key not in merged
    }


def read(path: Path) -> Config:
    """Read a TOML file; ConfigError with its path, the key, what was found and wanted."""
    data = files.toml(path)
    check_keys(
        data, ("parallel", "tags", "kernels", "iterations", "link", "ranks", "table"), str(path)
    )
    links = _table(data, "link", ("bandwidth", "scale_out", "scale_up"), path)
    speeds: dict[str, Any] = {
        name: parse_bandwidth(links[name], f"{path}: [link] {name}") for name in links
    }
    marks = _table(data, "iterations", ("regex",), path)
    return Config(
        parallel=_parallel(
            _table(data, "parallel", (*_SIZES, "order", "framework"), path), path
        ),
        tags=tuple(_tag_rule(row, at) for row, at in _rows(data, "tags", path)),
        kernels=tuple(_kernel(row, at) for row, at in _rows(data, "kernels", path)),
        iterations=_regex(marks, "regex", f"{path}: [iterations]"),
        ranks=_ranks(data, path),
        table=_mapping(data, path),
        **speeds,
    )


def whole(table: Mapping[str, Any], key: str, where: str) -> int | None:
    """The whole number of 1 or more under `key`; None where there is none."""
    found = table.get(key)
    if found is not None and not (_is_count(found) and 1 <= found <= _MOST):
        refuse(where, key, found, f"a whole number from 1 to {_MOST}")
    return found


def _table(
    data: Mapping[str, Any], key: str, known: Iterable[str], path: Path
) -> dict[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        refuse(f"{path}:", key, table, f"a table [{key}]")
    check_keys(table, known, f"{path}: [{key}]")
    return table


def _mapping(data: Mapping[str, Any], path: Path) -> "TableMapping | None":
    if "table" not in data:
        return None
    from fastcomm.readers.table_mapping import table_mapping  # few runs are tables

    if not isinstance(data["table"], dict):
        refuse(f"{path}:", "table", data["table"], "a table [table]")
    return table_mapping(data["table"], str(path))


def _ranks(data: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The rank of each file, or of each process of a file: "report.sqlite:4711"."""
    table = data.get("ranks", {})
    if not isinstance(table, dict):
        refuse(f"{path}:", "ranks", table, "a table [ranks]")
    for key, rank in table.items():
        if not _is_count(rank) or not 0 <= rank <= _MOST:
            refuse(f"{path}: [ranks]", key, rank, "a rank, from 0")
    return table


def _rows(data: Mapping[str, Any], key: str, path: Path) -> list[tuple[dict[str, Any], str]]:
    """The tables of an array, each with the words that say where it is."""
    rows = data.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        refuse(f"{path}:", key, rows, f"tables [[{key}]]")
    return [(row, f"{path}: [[{key}]] number {number}") for number, row in enumerate(rows, 1)]


def _parallel(table: Mapping[str, Any], path: Path) -> Parallel:
    where = f"{path}: [parallel]"
    sizes = {name: whole(table, name, where) for name in _SIZES}
    order = _text(table, "order", where)
    try:
        dimensions_of(order or DEFAULT_ORDER)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from error
    framework = choice(table, "framework", ORDERS, where)
    return Parallel(**sizes, order=order, framework=framework)


def _text(table: Mapping[str, Any], key: str, where: str) -> str | None:
    found = table.get(key)
    if found is not None and not isinstance(found, str):
        refuse(where, key, found, "text in quotes")
    return found


def _needed(found: str | None, key: str, where: str) -> str:
    if not found:
        raise ConfigError(f"{where}: no key {key}, wanted one")
    return found


def _regex(table: Mapping[str, Any], key: str, where: str) -> str | None:
    found = _text(table, key, where)
    try:
        re.compile(found or "")
    except (re.error, RecursionError, OverflowError) as error:
        refuse(where, key, found, f"a regular expression: {error}")
    return found


def _kernel(row: Mapping[str, Any], where: str) -> Pattern:
    check_keys(row, ("pattern", "op", "tag", "library"), where)
    return Pattern(
        regex=_needed(_regex(row, "pattern", where), "pattern", where),
        op=_needed(choice(row, "op", OPS, where), "op", where),
        tag=choice(row, "tag", TAGS, where),
        library=_text(row, "library", where) or "user",
    )


def _tag_rule(row: Mapping[str, Any], where: str) -> TagRule:
    check_keys(row, (*RULE_FIELDS, "tag"), where)
    tag = _needed(choice(row, "tag", TAGS, where), "tag", where)
    said = [name for name in RULE_FIELDS if name in row]
    if len(said) != 1:
        raise ConfigError(
            f"{where}: found {' and '.join(said) or 'only a tag'}, wanted one of"
            f" {', '.join(RULE_FIELDS)}"
        )
    return TagRule(field=said[0], value=_rule_value(said[0], row, where), tag=tag)


def _rule_value(name: str, row: Mapping[str, Any], where: str) -> str | int | tuple[int, ...]:
    """The value of a tag rule; a communicator may be text, since TOML's integers are signed."""
    found = row[name]
    if name == "communicator" and isinstance(found, str):
        try:
            found = int(found.replace(",", ""), 0)
        except ValueError:
            refuse(where, name, row[name], "a number, as in 123 or '0x8000000000000001'")
    if name in {"name", "description"}:
        kind, wanted = isinstance(found, str), "text in quotes"
    elif name == "ranks":
        kind, wanted = isinstance(found, list) and all(map(_is_count, found)), "a list of ranks"
        found = tuple(found) if kind else found
    else:
        kind, wanted = _is_count(found), "a number of 0 or more"
    if not kind:
        refuse(where, name, found, wanted)
    value: str | int | tuple[int, ...] = found
    return value


def _is_count(found: object) -> bool:
    return type(found) is int and 0 <= found < 1 << 64
