"""Read tables of operations: one row an operation, all ranks in one file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.readers import OpenOptions, RankSources, table_mapping
from fastcomm.readers.assembly import TraceOptions, assemble
from fastcomm.readers.communication import CommunicationColumns, DeviceRows
from fastcomm.readers.patterns import Named
from fastcomm.readers.table_mapping import WORK, RowKind, TableMapping, preset_of
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.run import MOST_RANKS, Source
from fastcomm.trace.schema import KIND, OP
from fastcomm.trace.tags import ProcessGroup, TagRule
from fastcomm.trace.trace import Meta, Trace
from fastcomm_kernels.arrays import NULL, Ints

_NOTHING = RowKind(pattern="", work="other")
_NO_GROUP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What the whole table says of one rank."""

    rank: int
    world_size: int | None
    # By the columns in which ranks agree: a label, and the ranks that agree with this one.
    peers: Mapping[tuple[str, ...], tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by the group's label
    # What to add to the times of an iteration, where they count from its begin.
    shifts: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Rows and their kinds; `code` is the place of a row's kind in `values` and `kinds`."""

    table: pa.Table
    mapping: TableMapping
    code: Ints
    values: list[str]
    kinds: list[RowKind]

    @classmethod
    def of(cls, table: pa.Table, mapping: TableMapping) -> Self:
        """Ask what each row is."""
        code, values = _encoded(table[mapping.kind])
        kinds = [mapping.kind_of(value) or _NOTHING for value in values]
        return cls(table=table, mapping=mapping, code=code, values=values, kinds=kinds)

    def notes(self) -> list[str]:
        """What the mapping does not know."""
        strange = [place for place, kind in enumerate(self.kinds) if kind is _NOTHING]
        if not strange:
            return []
        count = int(np.isin(self.code, strange).sum())
        names = ", ".join(sorted(repr(self.values[place]) for place in strange)[:8])
        return [
            f"{count} rows are neither compute nor communication: [table.kinds] does not name "
            f"{names}"
        ]

    def work(self, start: Ints, stop: Ints) -> DeviceRows:
        """The rows as device work."""
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
            offset=np.full(len(start), NULL, np.int64),
        )

    def _lanes(self) -> tuple[Ints, list[str], Ints]:
        """The lane of each row and the lanes: streams, else compute and the tags apart."""
        unknown = np.full(self.table.num_rows, NULL, np.int64)
        if self.mapping.stream is not None:
            column = self.table[self.mapping.stream]
            lane, lanes = _encoded(column.cast(pa.string()))
            if pa.types.is_integer(column.type):
                unknown = column.cast(pa.int64()).fill_null(NULL).to_numpy()
            return lane, lanes, unknown
        words = [kind.work or kind.tag or kind.op or "" for kind in self.kinds]
        lanes = sorted(set(words))
        return np.array([lanes.index(word) for word in words])[self.code], lanes, unknown

    def calls(self, rank: Rank) -> tuple[CommunicationColumns, list[TagRule]]:
        """What each row communicates, and the rules that give its groups their tags."""
        groups: dict[ProcessGroup, int] = {}
        of_kind = [groups.setdefault(group, len(groups)) if group else _NO_GROUP
                   for group in (_group(kind, rank) for kind in self.kinds)]  # fmt: skip
        group = np.array(of_kind, np.int64)[self.code]
        if self.mapping.group is not None:
            place, labels = _encoded(self.table[self.mapping.group])
            known = [
                groups.setdefault(
                    ProcessGroup(name=label, ranks=rank.groups.get(label)), len(groups)
                )
                if label
                else _NO_GROUP
                for label in labels
            ]
            group = np.where(group == _NO_GROUP, np.array(known, np.int64)[place], group)
        op = [NULL if kind.op is None else OP[kind.op] for kind in self.kinds]
        calls = CommunicationColumns(
            op=np.array(op, np.int64)[self.code],
            seq=np.full(len(self.code), NULL, np.int64),
            group=group,
            groups=tuple(groups),
            message=self._bytes(),
            name=self.code,
            named=tuple(
                Named(library="", op=kind.op or "OTHER", tag=kind.tag, fused=False)
                for kind in self.kinds
            ),
        )
        rules = {
            TagRule(field="name", value=tagged.name or "", tag=kind.tag)
            for kind in self.kinds
            if kind.tag is not None and (tagged := _group(kind, rank)) is not None
        }
        return calls, sorted(rules, key=lambda rule: str(rule.value))

    def _bytes(self) -> Ints:
        if self.mapping.bytes is None:
            return np.full(len(self.code), NULL, np.int64)
        column = self.table[self.mapping.bytes]
        if pa.types.is_floating(column.type):
            column = column.cast(pa.int64(), safe=False)
        numbers: Ints = column.cast(pa.int64()).fill_null(NULL).to_numpy()
        return np.where(numbers < 0, NULL, numbers)


def _encoded(column: Any) -> tuple[Ints, list[str]]:
    """Texts as places in a list of the different ones; a null is the empty text."""
    encoded = column.fill_null("").combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _group(kind: RowKind, rank: Rank) -> ProcessGroup | None:
    """The group of a kind's rows, where the mapping says who is in it."""
    if not kind.same:
        return None
    label, ranks = rank.peers[kind.same]
    return ProcessGroup(name=f"{kind.tag or kind.op} {label}", ranks=ranks)


_LAID = "times count from the begin of each iteration: iterations are laid one behind another"


def claims(path: Path) -> bool:
    """Whether the columns of the table are those of a preset."""
    if not table_mapping.is_table(path):
        return False
    try:
        return preset_of(table_mapping.columns_of(path)) is not None
    except TraceFileError:
        return False


def is_damaged(path: Path) -> bool:
    """Whether the file is named like a table and cannot be read as one."""
    if not table_mapping.is_table(path):
        return False
    try:
        table_mapping.columns_of(path)
    except TraceFileError:
        return True
    return False


def find(paths: Sequence[Path], options: OpenOptions) -> RankSources:
    """The ranks in the tables; of those, only the columns that tell ranks and groups are read.

    Raises `ConfigError` where neither the configuration nor a preset says what columns mean.
    """
    owner: dict[int, Path] = {}
    members: list[tuple[Path, Rank, TableMapping]] = []
    for path in paths:
        columns = table_mapping.columns_of(path)
        meaning = options.config.table or preset_of(columns)
        if meaning is None:
            raise ConfigError(
                f"{path}: what do the columns mean? Found {', '.join(columns)}; "
                "a [table] in the configuration says it"
            )
        meaning.check(columns, str(path))
        for each in _ranks(path, meaning, options.world):
            if each.rank in owner:
                raise TraceFileError(
                    f"two files of rank {each.rank}: {owner[each.rank]} and {path}"
                )
            owner[each.rank] = path
            members.append((path, each, meaning))
    sources = []
    for path, each, meaning in members:
        reading = options.reading(each.world_size, owner)
        sources.append(
            Source(
                rank=each.rank,
                path=path,
                size=path.stat().st_size,
                read=partial(read, path, reading, each, meaning),
            )
        )
    world = options.world if options.world and max(owner) < options.world else None
    ordered = sorted(sources, key=lambda source: source.rank)
    return RankSources(sources=tuple(ordered), world_size=world)


def _ranks(path: Path, mapping: TableMapping, world: int | None) -> list[Rank]:
    """What the table says of each of its ranks."""
    keys = [mapping.rank, *mapping.coordinates, *([mapping.group] if mapping.group else [])]
    keys = list(dict.fromkeys(keys))
    columns = [*keys, *(_span_columns(mapping) if mapping.restarts else ())]
    seen: set[tuple[Any, ...]] = set()
    spans: dict[int, tuple[int, int]] = {}
    for table in table_mapping.batches(path, list(dict.fromkeys(columns))):
        distinct = table.select(keys).group_by(keys).aggregate([])
        seen.update(zip(*(distinct[key].to_pylist() for key in keys), strict=True))
        if mapping.restarts:
            _widen(spans, table, mapping, path)
    rows = [dict(zip(keys, values, strict=True)) for values in seen]
    for row in rows:
        number = row[mapping.rank]
        if type(number) is not int or not 0 <= number < MOST_RANKS:
            raise TraceFileError(
                f"{path}: column {mapping.rank}: found {number!r}, wanted ranks from 0"
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


_Seen = Sequence[Mapping[str, Any]]


def _peers(
    rank: int, rows: _Seen, mapping: TableMapping
) -> dict[tuple[str, ...], tuple[str, tuple[int, ...]]]:
    """For each set of columns that makes groups: who has the same values there."""
    own = next(row for row in rows if row[mapping.rank] == rank)
    peers = {}
    for same in {kind.same for kind in mapping.kinds if kind.same}:
        alike = {
            row[mapping.rank] for row in rows if all(row[name] == own[name] for name in same)
        }
        label = " ".join(f"{name}={own[name]}" for name in same)
        peers[same] = label, tuple(sorted(alike))
    return peers


def _labels(rank: int, rows: _Seen, mapping: TableMapping) -> dict[str, tuple[int, ...]]:
    """The ranks of each group that this rank is in, by the column of groups."""
    members: dict[str, set[int]] = {}
    if mapping.group is None:
        return {}
    for row in rows:
        if row[mapping.group] not in {None, ""}:
            members.setdefault(str(row[mapping.group]), set()).add(row[mapping.rank])
    return {name: tuple(sorted(found)) for name, found in members.items() if rank in found}


def _span_columns(mapping: TableMapping) -> list[str]:
    columns = (mapping.iteration, mapping.start, mapping.stop, mapping.duration)
    return [name for name in columns if name is not None]


def _widen(
    spans: dict[int, tuple[int, int]], table: pa.Table, mapping: TableMapping, path: Path
) -> None:
    """Add rows to the first start and last stop of each iteration."""
    start, stop = table_mapping.times(table, mapping, path)
    number = table_mapping.whole_numbers(table, mapping.iteration or "", path)
    for each, low, high in zip(*_extents(number, start, stop), strict=True):
        known = spans.get(each, (low, high))
        spans[each] = min(known[0], low), max(known[1], high)


def _extents(number: Ints, start: Ints, stop: Ints) -> tuple[list[int], list[int], list[int]]:
    """Each number, the first start of its rows, and their last stop."""
    numbers, index = np.unique(number, return_inverse=True)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last = np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(first, index.reshape(-1), start)
    np.maximum.at(last, index.reshape(-1), stop)
    return numbers.tolist(), first.tolist(), last.tolist()


def _shifts(spans: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """What lays the iterations one behind another, in the order of their numbers."""
    shifts, edge = {}, 0
    for number in sorted(spans):
        low, high = spans[number]
        shifts[number] = edge - low
        edge += high - low
    return shifts


def read(path: Path, options: TraceOptions, rank: Rank, mapping: TableMapping) -> Trace:
    """Read the rows of one rank."""
    texts = [name for name in (mapping.kind, mapping.name, mapping.group) if name]
    where = pc.field(mapping.rank) == rank.rank
    parts = table_mapping.batches(path, mapping.columns, texts, where)
    table = pa.concat_tables([_plain(part, texts) for part in parts])
    start, stop = table_mapping.times(table, mapping, path)
    warnings = [note] if (note := table_mapping.resolution(table, mapping)) else []
    found_by = ""
    if mapping.iteration is not None:
        number = table_mapping.whole_numbers(table, mapping.iteration, path)
        if mapping.restarts:
            shift = np.array([rank.shifts[each] for each in number.tolist()], np.int64)
            start, stop = start + shift, stop + shift
            warnings.append(_LAID)
        ranges = tuple(zip(*_extents(number, start, stop), strict=True))
        options = replace(options, iterations=IterationRule(ranges=ranges))
        found_by = f"column {mapping.iteration}"
    rows = TableRows.of(table, mapping)
    events, lanes, order = rows.work(start, stop).events()
    calls, rules = rows.calls(rank)
    of_data = tuple(replace(rule, is_given=False) for rule in rules)
    tags = replace(options.tags, explicit=(*options.tags.explicit, *of_data))
    meta = Meta(
        rank=rank.rank,
        world_size=rank.world_size,
        format="optable",
        path=str(path),
        clock=None,
        warnings=(*warnings, *rows.notes()),
        lacks=_lacks(mapping),
    )
    trace = assemble(events, lanes, calls.collectives(order), replace(options, tags=tags), meta)
    by = found_by or trace.meta.found_by
    return replace(trace, meta=replace(trace.meta, found_by=by))


def _plain(table: pa.Table, texts: Sequence[str]) -> pa.Table:
    """The table with text as text: dictionaries differ from part to part."""
    for name in texts:
        place = table.column_names.index(name)
        table = table.set_column(place, name, table[name].cast(pa.string()))
    return table


def _lacks(mapping: TableMapping) -> tuple[str, ...]:
    has_compute = any(kind.work == "compute" for kind in mapping.kinds)
    return (*(() if has_compute else ("compute",)), *(() if mapping.bytes else ("bytes",)))
