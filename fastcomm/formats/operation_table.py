"""Read tables of operations: one row per operation, all ranks in one file. Times are ns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.formats import tables
from fastcomm.formats.assembly import TraceOptions, assemble
from fastcomm.formats.communication import CommunicationColumns, DeviceRows
from fastcomm.formats.config import Config
from fastcomm.formats.kernel_names import Named
from fastcomm.formats.sources import RankReader, RankSources, add_rank
from fastcomm.formats.tables import ASCEND, WORK, RowKind, TableMapping, preset_of
from fastcomm.trace.columns import filled
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.run_traces import MOST_RANKS
from fastcomm.trace.schema import KIND, OP
from fastcomm.trace.tags import ProcessGroup, TagRule
from fastcomm.trace.trace import Meta, Trace
from fastcomm_kernels.arrays import NULL, Ints

_NOTHING = RowKind(pattern="", work="other")
_NO_GROUP = -1
_LAID = "times restart in each iteration: iterations are placed one after another"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What the whole table states about one rank."""

    rank: int
    world_size: int | None
    # By columns: a label, and the ranks that have the values of this rank in these columns.
    peers: Mapping[tuple[str, ...], tuple[str, tuple[int, ...]]]
    groups: Mapping[str, tuple[int, ...]]  # members by the group's label
    # ns to add to times of an iteration that count from its begin.
    shifts: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Rows of one rank and their kinds; row i is of the kind `kinds[code[i]]`."""

    table: pa.Table
    mapping: TableMapping
    code: Ints
    values: list[str]  # the different values of the column of kinds
    kinds: list[RowKind]  # the kind of each value

    @classmethod
    def of(cls, table: pa.Table, mapping: TableMapping) -> Self:
        """Return the rows with the kind of each, by its text in the column of kinds."""
        code, values = _encoded(table[mapping.kind])
        kinds = [mapping.kind_of(value) or _NOTHING for value in values]
        return cls(table=table, mapping=mapping, code=code, values=values, kinds=kinds)

    def notes(self) -> list[str]:
        """Return a warning about rows that the mapping does not explain."""
        unknown = [place for place, kind in enumerate(self.kinds) if kind is _NOTHING]
        if not unknown:
            return []
        count = int(np.isin(self.code, unknown).sum())
        names = ", ".join(sorted(repr(self.values[place]) for place in unknown)[:8])
        return [
            f"{count} rows are neither compute nor communication: [table.kinds] does not name "
            f"{names}"
        ]

    def work(self, start: Ints, stop: Ints) -> DeviceRows:
        """Return the rows as device work from `start` to `stop`, ns by row."""
        name, texts = _encoded(self.table[self.mapping.name or self.mapping.kind])
        lane, lanes, stream = self._lanes()
        kinds = [KIND[WORK[kind.work] if kind.work else "kernel"] for kind in self.kinds]
        return DeviceRows(
            start=start,
            stop=stop,
            kind=np.array(kinds, np.int8)[self.code],
            name=name,
            texts=texts,
            lane=lane,
            lanes=lanes,
            stream=stream,
        )

    def _lanes(self) -> tuple[Ints, list[str], Ints | None]:
        """Return the lane of each row, the lanes, and the stream of each row, if known.

        Without streams, compute and each tag have lanes of their own.
        """
        if self.mapping.stream is not None:
            column = self.table[self.mapping.stream]
            is_number = pa.types.is_integer(column.type)
            stream = filled(column) if is_number else None
            return *_encoded(column.cast(pa.string())), stream
        labels = [kind.work or kind.tag or kind.op or "" for kind in self.kinds]
        lanes = sorted(set(labels))
        return np.array([lanes.index(label) for label in labels])[self.code], lanes, None

    def calls(self, rank: Rank) -> tuple[CommunicationColumns, list[TagRule]]:
        """Return the communication of each row, and the rules that tag its groups."""
        groups: dict[ProcessGroup, int] = {}

        def number(group: ProcessGroup | None) -> int:
            return _NO_GROUP if group is None else groups.setdefault(group, len(groups))

        of_kind = [_group(kind, rank) for kind in self.kinds]
        group = np.array([number(entry) for entry in of_kind], np.int64)[self.code]
        if self.mapping.group is not None:
            place, labels = _encoded(self.table[self.mapping.group])
            labeled = [
                ProcessGroup(name=label, ranks=rank.groups.get(label)) if label else None
                for label in labels
            ]
            by_label = np.array([number(entry) for entry in labeled], np.int64)
            group = np.where(group == _NO_GROUP, by_label[place], group)
        op = [NULL if kind.op is None else OP[kind.op] for kind in self.kinds]
        calls = CommunicationColumns(
            op=np.array(op, np.int64)[self.code],
            seq=np.full(len(self.code), NULL, np.int64),
            group=group,
            groups=tuple(groups),
            message=self._bytes(),
            name=self.code,
            named=tuple(
                Named(library="", op=kind.op or "OTHER", tag=kind.tag) for kind in self.kinds
            ),
        )
        rules = {
            TagRule(field="name", value=entry.name or "", tag=kind.tag, is_given=False)
            for kind, entry in zip(self.kinds, of_kind, strict=True)
            if kind.tag is not None and entry is not None
        }
        return calls, sorted(rules, key=lambda rule: str(rule.value))

    def _bytes(self) -> Ints:
        """Return the bytes of each row, or NULL."""
        if self.mapping.bytes is None:
            return np.full(len(self.code), NULL, np.int64)
        column = self.table[self.mapping.bytes]
        if pa.types.is_floating(column.type):
            column = column.cast(pa.int64(), safe=False)
        numbers = filled(column)
        return np.where(numbers < 0, NULL, numbers)


def _encoded(column: Any) -> tuple[Ints, list[str]]:
    """Return texts as codes and the list of different texts; null is an empty text."""
    encoded = column.fill_null("").combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _group(kind: RowKind, rank: Rank) -> ProcessGroup | None:
    """Return the group of the rows of a kind, or None if the mapping does not tell it."""
    if not kind.same:
        return None
    label, ranks = rank.peers[kind.same]
    return ProcessGroup(name=f"{kind.tag or kind.op} {label}", ranks=ranks)


def claims(path: Path) -> bool:
    """Return whether a file is a table with the columns of a preset."""
    columns = _columns(path)
    return columns is not None and preset_of(columns) is not None


def is_damaged(path: Path) -> bool:
    """Return whether a file is named like a table and cannot be read as one."""
    return tables.is_table(path) and _columns(path) is None


def _columns(path: Path) -> list[str] | None:
    """Return the names of a table's columns; None if it is no table, or a damaged one."""
    try:
        return tables.columns_of(path) if tables.is_table(path) else None
    except TraceFileError:
        return None


def find(paths: Sequence[Path], config: Config) -> RankSources:
    """Find the ranks in tables, reading only the columns that tell ranks and groups.

    Raises `ConfigError` if neither the configuration nor a preset explains the columns, and
    `TraceFileError` for damaged files and ranks that occur twice; it names the lowest.
    """
    owner: dict[int, Path] = {}
    members: list[tuple[Path, Rank, TableMapping]] = []
    for path in paths:
        columns = tables.columns_of(path)
        mapping = config.table or preset_of(columns)
        if mapping is None:
            raise ConfigError(
                f"{path}: the meaning of the columns {', '.join(columns)} is unknown. State it "
                "in a [table] of the configuration"
            )
        mapping.check(columns, str(path))
        for rank in _ranks(path, mapping, config.world):
            add_rank(owner, rank.rank, path)
            members.append((path, rank, mapping))
    reading = config.reading(config.world, owner)
    members.sort(key=lambda member: member[1].rank)
    return RankSources(
        sources=tuple(
            RankReader(read, path, reading, (rank, mapping)).source(rank.rank)
            for path, rank, mapping in members
        ),
        world_size=config.world if config.world and max(owner) < config.world else None,
    )


def _ranks(path: Path, mapping: TableMapping, world: int | None) -> list[Rank]:
    """Read the ranks of a table, with the groups and the times that it states for each.

    `world` is the number of ranks that the user states, or None.
    """
    names = [mapping.rank, *mapping.coordinates, mapping.group]
    keys = list(dict.fromkeys(filter(None, names)))
    times = [mapping.iteration, mapping.start, mapping.stop, mapping.duration]
    columns = dict.fromkeys([*keys, *filter(None, times if mapping.restarts else ())])
    distinct_rows: set[tuple[Any, ...]] = set()
    spans: dict[int, tuple[int, int]] = {}
    for table in tables.batches(path, list(columns)):
        distinct = table.select(keys).group_by(keys).aggregate([])
        distinct_rows.update(zip(*(distinct[key].to_pylist() for key in keys), strict=True))
        if mapping.restarts:
            _widen(spans, table, mapping, path)
    rows = [dict(zip(keys, values, strict=True)) for values in distinct_rows]
    for row in rows:
        number = row[mapping.rank]
        if type(number) is not int or not 0 <= number < MOST_RANKS:
            raise TraceFileError(
                f"{path}: column {mapping.rank}: found {number!r}, expected ranks from 0"
            )
    if not rows:
        raise TraceFileError(f"{path}: the table has no rows")
    shifts = _shifts(spans)
    return [
        Rank(
            rank=rank,
            world_size=world,
            peers=_peers(rank, rows, mapping),
            groups=_labels(rank, rows, mapping),
            shifts=shifts,
        )
        for rank in sorted({row[mapping.rank] for row in rows})
    ]


_Rows = Sequence[Mapping[str, Any]]


def _peers(
    rank: int, rows: _Rows, mapping: TableMapping
) -> dict[tuple[str, ...], tuple[str, tuple[int, ...]]]:
    """Return, for each set of columns that forms groups, a label and the ranks that agree."""
    own = next(row for row in rows if row[mapping.rank] == rank)
    peers = {}
    for same in {kind.same for kind in mapping.kinds if kind.same}:
        members = {
            row[mapping.rank] for row in rows if all(row[name] == own[name] for name in same)
        }
        label = " ".join(f"{name}={own[name]}" for name in same)
        peers[same] = label, tuple(sorted(members))
    return peers


def _labels(rank: int, rows: _Rows, mapping: TableMapping) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group of this rank, by the column of groups."""
    members: dict[str, set[int]] = {}
    if mapping.group is None:
        return {}
    for row in rows:
        if row[mapping.group] not in {None, ""}:
            members.setdefault(str(row[mapping.group]), set()).add(row[mapping.rank])
    return {name: tuple(sorted(ranks)) for name, ranks in members.items() if rank in ranks}


def _widen(
    spans: dict[int, tuple[int, int]], table: pa.Table, mapping: TableMapping, path: Path
) -> None:
    """Widen the first start and last stop of each iteration by some rows."""
    start, stop = tables.times(table, mapping, path)
    number = tables.int64_column(table, mapping.iteration or "", path)
    for iteration, low, high in zip(*_extents(number, start, stop), strict=True):
        first, last = spans.get(iteration, (low, high))
        spans[iteration] = min(first, low), max(last, high)


def _extents(number: Ints, start: Ints, stop: Ints) -> tuple[list[int], list[int], list[int]]:
    """Return the different numbers, and first start and last stop of the rows of each."""
    numbers, index = np.unique(number, return_inverse=True)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last = np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(first, index.reshape(-1), start)
    np.maximum.at(last, index.reshape(-1), stop)
    return numbers.tolist(), first.tolist(), last.tolist()


def _shifts(spans: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return the ns to add to each iteration to place them one after another."""
    shifts, edge = {}, 0
    for number in sorted(spans):
        low, high = spans[number]
        shifts[number] = edge - low
        edge += high - low
    return shifts


def read(path: Path, options: TraceOptions, rank: Rank, mapping: TableMapping) -> Trace:
    """Read the rows of one rank as a trace.

    Parameters
    ----------
    path
        The table.
    options
        Rules for iterations and tags.
    rank
        The rank, with its groups.
    mapping
        The meaning of the columns.

    Raises
    ------
    TraceFileError
        If a column has nulls, no numbers, or impossible times.

    """
    texts = [name for name in (mapping.kind, mapping.name, mapping.group) if name]
    where = pc.field(mapping.rank) == rank.rank
    parts = tables.batches(path, mapping.columns, texts, where)
    table = pa.concat_tables([_plain(part, texts) for part in parts])
    start, stop = tables.times(table, mapping, path)
    warnings = [note] if (note := tables.resolution(table, mapping)) else []
    found_by = ""
    if mapping.iteration is not None:
        is_inside = np.ones(len(start), np.bool_)
        if mapping in ASCEND:  # rows without a number are outside of all iterations
            is_inside = table[mapping.iteration].is_valid().to_numpy()
        inside = table.filter(pa.array(is_inside))
        number = tables.int64_column(inside, mapping.iteration, path)
        if mapping.restarts:
            shift = np.array([rank.shifts[k] for k in number.tolist()], np.int64)
            start, stop = start + shift, stop + shift
            warnings.append(_LAID)
        extents = _extents(number, start[is_inside], stop[is_inside])
        ranges = tuple(zip(*extents, strict=True))
        options = replace(options, iterations=IterationRule(ranges=ranges))
        found_by = f"column {mapping.iteration}"
    rows = TableRows.of(table, mapping)
    events, lanes, order = rows.work(start, stop).events()
    calls, rules = rows.calls(rank)
    tags = replace(options.tags, explicit=(*options.tags.explicit, *rules))
    meta = Meta(
        rank=rank.rank,
        world_size=rank.world_size,
        format="optable",
        path=str(path),
        clock=None,
        warnings=(*warnings, *rows.notes()),
        missing_data=_missing(mapping),
    )
    trace = assemble(events, lanes, calls.collectives(order), replace(options, tags=tags), meta)
    return replace(trace, meta=replace(trace.meta, found_by=found_by or trace.meta.found_by))


def _plain(table: pa.Table, texts: Sequence[str]) -> pa.Table:
    """Return the table with plain text columns: dictionaries differ from part to part."""
    for name in texts:
        place = table.column_names.index(name)
        table = table.set_column(place, name, table[name].cast(pa.string()))
    return table


def _missing(mapping: TableMapping) -> tuple[str, ...]:
    """Return keys of `MISSING_DATA` that apply to tables with this mapping."""
    has_compute = any(kind.work == "compute" for kind in mapping.kinds)
    return (*(() if has_compute else ("compute",)), *(() if mapping.bytes else ("bytes",)))
