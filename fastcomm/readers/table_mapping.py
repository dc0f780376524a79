"""Map the columns of a user's table to meaning, unit and type, and read them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from fastcomm.checks import check_keys, choice, refuse
from fastcomm.errors import ConfigError
from fastcomm.trace.schema import OPS, TAGS

UNITS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
# Kinds of rows that are not communication, and their kinds of events.
WORK = {"compute": "kernel", "copy": "memcpy", "other": "other"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind:
    """What rows with a value in the column of kinds are."""

    pattern: str  # pattern of `fnmatch` for the value
    work: str | None = None  # a key of WORK; None: communication
    op: str | None = None
    tag: str | None = None
    same: tuple[str, ...] = ()  # columns; ranks with equal values in them are the group


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMapping:
    """The names of a table's columns, by their meaning."""

    rank: str
    start: str
    stop: str | None = None  # either this or `duration`
    duration: str | None = None
    kind: str
    kinds: tuple[RowKind, ...]  # the first that matches decides
    unit: str = "ns"  # a key of UNITS
    name: str | None = None  # default: the column `kind`
    iteration: str | None = None
    restarts: bool = False  # whether times count from the begin of each iteration
    stream: str | None = None
    bytes: str | None = None
    group: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns, without repetition."""
        names = [getattr(self, name) for name in _COLUMNS]
        return tuple(dict.fromkeys([*filter(None, names), *self.coordinates]))

    @property
    def coordinates(self) -> tuple[str, ...]:
        """The columns that define groups."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in kind.same))

    def kind_of(self, value: str) -> RowKind | None:
        """Return the kind of rows with a value; None if no pattern matches."""
        return next((kind for kind in self.kinds if fnmatchcase(value, kind.pattern)), None)

    def check(self, present: Collection[str], where: str) -> None:
        """Raise ConfigError if the table lacks a column; `where` begins the message."""
        for key in _COLUMNS:
            if (name := getattr(self, key)) is not None and name not in present:
                _no_column(key, name, present, where)
        for name in self.coordinates:
            if name not in present:
                _no_column("kinds, same", name, present, where)


_COLUMNS = (
    "rank", "start", "stop", "duration", "kind", "name", "iteration", "stream", "bytes", "group"
)  # fmt: skip
_NEEDED = ("rank", "start", "kind")


def _no_column(key: str, name: str, present: Collection[str], where: str) -> None:
    raise ConfigError(
        f"{where}: [table] {key} = {name!r}: no such column; the table has {', '.join(present)}"
    )


def table_mapping(data: Mapping[str, Any], where: str) -> TableMapping:
    """Return the mapping in the table `[table]` of a configuration.

    Raises `ConfigError`, with `where` and the key, for missing or invalid entries.
    """
    where = f"{where}: [table]"
    check_keys(data, (field.name for field in fields(TableMapping)), where)
    columns = {key: _column(data, key, where) for key in _COLUMNS if key in data}
    for key in _NEEDED:
        if key not in columns:
            raise ConfigError(f"{where}: missing key {key}: the name of a column")
    if ("stop" in columns) == ("duration" in columns):
        present = "both" if "stop" in columns else "neither"
        raise ConfigError(f"{where}: found {present} of stop and duration, expected one")
    restarts = data.get("restarts", False)
    if not isinstance(restarts, bool):
        refuse(where, "restarts", restarts, "true or false")
    if restarts and "iteration" not in columns:
        raise ConfigError(
            f"{where}: restarts needs the key iteration: the column of iterations"
        )
    unit = choice(data, "unit", UNITS, where)
    return TableMapping(
        **columns, kinds=_kinds(data, where), restarts=restarts, unit=unit or "ns"
    )


def _column(data: Mapping[str, Any], key: str, where: str) -> str:
    """Return the column name of a key; `where` names the section in errors."""
    name = data[key]
    if not isinstance(name, str) or not name:
        refuse(where, key, name, "the name of a column, in quotes")
    return name


def _kinds(data: Mapping[str, Any], where: str) -> tuple[RowKind, ...]:
    """Return the kinds of rows in [table.kinds]; `where` names the section in errors."""
    table = data.get("kinds")
    if not isinstance(table, dict) or not table:
        refuse(where, "kinds", table, "a table [table.kinds] with an entry a kind of row")
    return tuple(_kind(pattern, entry, f"{where} kinds") for pattern, entry in table.items())


def _kind(pattern: str, entry: object, where: str) -> RowKind:
    """Return a kind from text, such as "compute" or "AllReduce", or from a table."""
    if isinstance(entry, str):
        name = choice({pattern: entry}, pattern, (*WORK, *OPS), where) or ""
        return (
            RowKind(pattern=pattern, work=name)
            if name in WORK
            else RowKind(pattern=pattern, op=name)
        )
    if not isinstance(entry, dict):
        expected = f"one of {', '.join((*WORK, *OPS))}, or a table with op, tag, same"
        refuse(where, pattern, entry, expected)
    where = f"{where} {pattern}:"
    check_keys(entry, ("op", "tag", "same"), where)
    op = choice(entry, "op", OPS, where)
    if op is None:
        raise ConfigError(f"{where} missing key op, one of {', '.join(OPS)}")
    same = entry.get("same", [])
    if not isinstance(same, list) or not all(isinstance(name, str) for name in same):
        refuse(where, "same", same, "a list of names of columns")
    return RowKind(
        pattern=pattern, op=op, tag=choice(entry, "tag", TAGS, where), same=tuple(same)
    )


def _pairs(op: str, tag: str, *same: str) -> dict[str, Any]:
    """Return a kind of communication among ranks that agree in some columns."""
    return {"op": op, "tag": tag, "same": list(same)}


_PIPE, _DATA = ("SendRecv", "PP", "dp_rank"), ("DP", "stage")

# Tables of StragglerAnalysis. One rank stands for its tensor-parallel peers.
STRAGGLER = table_mapping(
    {
        "rank": "rank",
        "start": "start_ts",
        "duration": "duration",
        "unit": "s",
        "kind": "optype",
        "iteration": "step",
        "restarts": True,
        "kinds": {
            "*-compute": "compute",
            # The norm of the gradients, for which all ranks of the model wait for each other.
            "optimizer-clip-main-grad": {"op": "AllReduce", "tag": "OTHER"},
            "optimizer*": "compute",
            "forward-send": _pairs(*_PIPE),
            "forward-recv": _pairs(*_PIPE),
            "backward-send": _pairs(*_PIPE),
            "backward-recv": _pairs(*_PIPE),
            "params-all-gather": _pairs("AllGather", *_DATA),
            "grads-reduce-scatter": _pairs("ReduceScatter", *_DATA),
            "separate-grads-all-reduce": _pairs("AllReduce", *_DATA),
            "layernorm-grads-all-reduce": {"op": "AllReduce", "tag": "TP"},
            "embedding-grads-all-reduce": {"op": "AllReduce", "tag": "PP"},
            "gc": "other",  # garbage collection on the host
        },
    },
    "StragglerAnalysis",
)

# Mappings of tables that are recognized by their columns.
PRESETS = {"straggler": (STRAGGLER, ("dp_rank", "stage", "seq_id", "mc", "gmc"))}


def preset_of(present: Collection[str]) -> TableMapping | None:
    """Return the mapping of a table that is recognized by its columns, or None."""
    for mapping, further in PRESETS.values():
        if {*mapping.columns, *further} <= set(present):
            return mapping
    return None
