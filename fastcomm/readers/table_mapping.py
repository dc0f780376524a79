"""Which column of a table of operations means what: the `[table]` of a configuration."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from fastcomm.errors import ConfigError
from fastcomm.readers.config import check_keys, choice, refuse
from fastcomm.trace.schema import OPS, TAGS

UNITS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
# What is no communication, and the kind of event that it is.
WORK = {"compute": "kernel", "copy": "memcpy", "other": "other"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What rows with one value of the column `kind` are."""

    pattern: str  # of `fnmatch`
    work: str | None = None  # of WORK; None: it communicates
    op: str | None = None
    tag: str | None = None
    same: tuple[str, ...] = ()  # the ranks that agree in these columns are the group


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMapping:
    """The columns of a table of operations."""

    rank: str
    start: str
    stop: str | None = None  # this, or `duration`
    duration: str | None = None
    kind: str
    kinds: tuple[Kind, ...]  # the first that matches counts
    unit: str = "ns"
    name: str | None = None  # by default that of the kind
    iteration: str | None = None
    restarts: bool = False  # times count from the begin of each iteration
    stream: str | None = None
    bytes: str | None = None
    group: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that it names, once each."""
        said = [getattr(self, name) for name in _COLUMNS]
        return tuple(dict.fromkeys([*filter(None, said), *self.coordinates]))

    @property
    def coordinates(self) -> tuple[str, ...]:
        """The columns in which the ranks of a group agree."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in kind.same))

    def kind_of(self, value: str) -> Kind | None:
        """What rows with this value are; None where nothing is said of it."""
        return next((kind for kind in self.kinds if fnmatchcase(value, kind.pattern)), None)

    def check(self, present: Collection[str], where: str) -> None:
        """ConfigError where the table lacks a column that is named here."""
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
    """The `[table]` of a configuration; ConfigError with key, found and wanted."""
    where = f"{where}: [table]"
    check_keys(data, (each.name for each in fields(TableMapping)), where)
    columns = {key: _column(data, key, where) for key in _COLUMNS if key in data}
    for key in _NEEDED:
        if key not in columns:
            raise ConfigError(f"{where}: no key {key}, wanted the name of a column")
    if ("stop" in columns) == ("duration" in columns):
        found = "both" if "stop" in columns else "neither"
        raise ConfigError(f"{where}: found {found} of stop and duration, wanted one")
    restarts = data.get("restarts", False)
    if not isinstance(restarts, bool):
        refuse(where, "restarts", restarts, "true or false")
    if restarts and "iteration" not in columns:
        raise ConfigError(
            f"{where}: restarts without iteration, wanted the column of iterations"
        )
    unit = choice(data, "unit", UNITS, where)
    return TableMapping(
        **columns, kinds=_kinds(data, where), restarts=restarts, unit=unit or "ns"
    )


def _column(data: Mapping[str, Any], key: str, where: str) -> str:
    name = data[key]
    if not isinstance(name, str) or not name:
        refuse(where, key, name, "the name of a column, in quotes")
    return name


def _kinds(data: Mapping[str, Any], where: str) -> tuple[Kind, ...]:
    table = data.get("kinds")
    if not isinstance(table, dict) or not table:
        refuse(where, "kinds", table, "a table [table.kinds] with an entry a kind of row")
    return tuple(_kind(pattern, said, f"{where} kinds") for pattern, said in table.items())


def _kind(pattern: str, said: object, where: str) -> Kind:
    """A word, as in "compute" or "AllReduce", or a table with op, tag and same."""
    if isinstance(said, str):
        word = choice({pattern: said}, pattern, (*WORK, *OPS), where) or ""
        return (
            Kind(pattern=pattern, work=word) if word in WORK else Kind(pattern=pattern, op=word)
        )
    if not isinstance(said, dict):
        wanted = f"one of {', '.join((*WORK, *OPS))}, or a table with op, tag, same"
        refuse(where, pattern, said, wanted)
    where = f"{where} {pattern}:"
    check_keys(said, ("op", "tag", "same"), where)
    op = choice(said, "op", OPS, where)
    if op is None:
        raise ConfigError(f"{where} no key op, wanted one of {', '.join(OPS)}")
    same = said.get("same", [])
    if not isinstance(same, list) or not all(isinstance(each, str) for each in same):
        refuse(where, "same", same, "a list of names of columns")
    return Kind(pattern=pattern, op=op, tag=choice(said, "tag", TAGS, where), same=tuple(same))


def _pairs(op: str, tag: str, *same: str) -> dict[str, Any]:
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
            "optimizer*": "compute",  # the norm of the gradients and the update
            "forward-send": _pairs(*_PIPE),
            "forward-recv": _pairs(*_PIPE),
            "backward-send": _pairs(*_PIPE),
            "backward-recv": _pairs(*_PIPE),
            "params-all-gather": _pairs("AllGather", *_DATA),
            "grads-reduce-scatter": _pairs("ReduceScatter", *_DATA),
            "separate-grads-all-reduce": _pairs("AllReduce", *_DATA),
            "layernorm-grads-all-reduce": {"op": "AllReduce", "tag": "TP"},
            "embedding-grads-all-reduce": {"op": "AllReduce", "tag": "PP"},
            "gc": "other",  # of the host
        },
    },
    "StragglerAnalysis",
)

# Tables whose columns alone tell what they are.
PRESETS = {"straggler": (STRAGGLER, ("dp_rank", "stage", "seq_id", "mc", "gmc"))}


def preset_of(present: Collection[str]) -> TableMapping | None:
    """The mapping of a table that is known by its columns."""
    for mapping, further in PRESETS.values():
        if {*mapping.columns, *further} <= set(present):
            return mapping
    return None
