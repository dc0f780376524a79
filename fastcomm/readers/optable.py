"""Tables of operations, in Parquet or CSV: a row an operation, of all ranks of a job.

What the columns mean is data: a preset that the columns' names tell, or a user's `[table]`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.readers import table_file
from fastcomm.readers.assembly import ReadOptions, assemble
from fastcomm.readers.formats import Found, OpenOptions
from fastcomm.readers.table_mapping import TableMapping, preset_of
from fastcomm.readers.table_rows import Rank, Rows
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.run import MOST_RANKS, Source
from fastcomm.trace.trace import Meta, Trace

Ints = NDArray[np.int64]


_LAID = "times count from the begin of each iteration: iterations are laid one behind another"


def claims(path: Path) -> bool:
    """Whether the columns of the table are those of a preset."""
    if not table_file.is_table(path):
        return False
    try:
        return preset_of(table_file.columns_of(path)) is not None
    except TraceFileError:
        return False


def is_damaged(path: Path) -> bool:
    """Whether the file is named like a table and cannot be read as one."""
    if not table_file.is_table(path):
        return False
    try:
        table_file.columns_of(path)
    except TraceFileError:
        return True
    return False


def find(paths: Sequence[Path], options: OpenOptions) -> Found:
    """The ranks in the tables; of those, only the columns that tell ranks and groups are read.

    Raises `ConfigError` where neither the configuration nor a preset says what columns mean.
    """
    owner: dict[int, Path] = {}
    members: list[tuple[Path, Rank, TableMapping]] = []
    for path in paths:
        columns = table_file.columns_of(path)
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
    return Found(sources=tuple(ordered), world_size=world)


def _ranks(path: Path, mapping: TableMapping, world: int | None) -> list[Rank]:
    """What the table says of each of its ranks."""
    keys = [mapping.rank, *mapping.coordinates, *([mapping.group] if mapping.group else [])]
    keys = list(dict.fromkeys(keys))
    columns = [*keys, *(_span_columns(mapping) if mapping.restarts else ())]
    seen: set[tuple[Any, ...]] = set()
    spans: dict[int, tuple[int, int]] = {}
    for table in table_file.batches(path, list(dict.fromkeys(columns))):
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
    start, stop = table_file.times(table, mapping, path)
    number = table_file.whole_numbers(table, mapping.iteration or "", path)
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


def read(path: Path, options: ReadOptions, rank: Rank, mapping: TableMapping) -> Trace:
    """Read the rows of one rank."""
    texts = [name for name in (mapping.kind, mapping.name, mapping.group) if name]
    where = pc.field(mapping.rank) == rank.rank
    parts = table_file.batches(path, mapping.columns, texts, where)
    table = pa.concat_tables([_plain(part, texts) for part in parts])
    start, stop = table_file.times(table, mapping, path)
    warnings = [note] if (note := table_file.resolution(table, mapping)) else []
    found_by = ""
    if mapping.iteration is not None:
        number = table_file.whole_numbers(table, mapping.iteration, path)
        if mapping.restarts:
            shift = np.array([rank.shifts[each] for each in number.tolist()], np.int64)
            start, stop = start + shift, stop + shift
            warnings.append(_LAID)
        ranges = tuple(zip(*_extents(number, start, stop), strict=True))
        options = replace(options, iterations=IterationRule(ranges=ranges))
        found_by = f"column {mapping.iteration}"
    rows = Rows.of(table, mapping)
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
