"""The events of a rank as a table with the columns and rows that a query touches.

Columns that a store has are read from it alone; others follow from the whole trace.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.device_work.attribution import Work, absent_name
from fastcomm.device_work.options import KernelKey
from fastcomm.formats.store.writer import stored_rows
from fastcomm.ranks.group_tags import GroupTags, with_tags
from fastcomm.sql.views import EVENTS
from fastcomm.trace.run_traces import Content, Source
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NONE, NULL, Ints

# Columns with another name than in a store, and the stored columns that each follows from.
_STORED: Mapping[str, tuple[str, ...]] = {
    "start_ns": ("start",),
    "stop_ns": ("stop",),
    "duration_ns": ("start", "stop"),
    "stream": ("thread", "is_device"),
    "copy_bytes": ("bytes",),
}
_LABELS: Mapping[str, KernelKey] = {
    "short_name": "name",
    "category": "category",
    "operator": "operator",
    "module": "module",
    "layer": "layer",
    "annotation": "annotation",
    "pass": "pass",
}
_TAGS = frozenset(("tag", "tag_source"))
_DERIVED = frozenset(("step", "launch", *_LABELS))
# Columns that a trace has only if all of its events are read.
_OF_ALL = _DERIVED | {"event", "copy_bytes", "input_shapes", "input_types"}
_WORK = frozenset(("kernel", "memcpy", "memset"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EventScan:
    """What a query touches of the events of each rank."""

    columns: tuple[str, ...]  # of the result, in this order
    needed: tuple[str, ...]  # these, and those of the condition
    condition: Any | None = None  # an expression of pyarrow
    kinds: frozenset[str] = frozenset(KIND)  # of events that may meet the condition
    group_tags: GroupTags = field(default_factory=dict)  # where a rank alone would differ

    @property
    def has_tags(self) -> bool:
        """Whether the query touches parallelisms, on which all ranks of a group agree."""
        return not _TAGS.isdisjoint(self.needed)

    @property
    def content(self) -> Content:
        """The part of a trace that the query needs."""
        is_work = self.kinds <= _WORK and _OF_ALL.isdisjoint(self.needed)
        return "work" if is_work else "all"

    @property
    def schema(self) -> pa.Schema:
        """The columns of the result."""
        return pa.schema([EVENTS.schema.field(name) for name in self.columns])

    def stored(self, source: Source) -> pa.Table | None:
        """Return the rows of a stored rank; None if they follow from its whole trace.

        Raises `FastcommError` if the file cannot be read.
        """
        if (
            source.column_reader is None
            or self.group_tags
            or not _DERIVED.isdisjoint(self.needed)
        ):
            return None
        names = [stored for name in self.needed for stored in _STORED.get(name, (name,))]
        kinds: Collection[str] | None = self.kinds if self.kinds < frozenset(KIND) else None
        rows = source.column_reader([*dict.fromkeys(["rank", *names])], kinds)
        return None if rows is None else self._chosen(rows, {})

    def of_trace(self, trace: Trace) -> pa.Table:
        """Return the rows of a trace. Raises `SchemaError` if it contradicts itself."""
        trace = with_tags(trace, self.group_tags)
        return self._chosen(stored_rows(trace), _derived(trace, self.needed))

    def _chosen(self, rows: pa.Table, derived: Mapping[str, pa.Array]) -> pa.Table:
        """Return the rows that meet the condition, with the columns of the result."""
        fields = [EVENTS.schema.field(name) for name in self.needed]
        columns = [_column(rows, field.name, derived).cast(field.type) for field in fields]
        table = pa.table(columns, schema=pa.schema(fields))
        if self.condition is not None:
            table = table.filter(self.condition)
        return table.select(self.columns)


def _column(rows: pa.Table, name: str, derived: Mapping[str, pa.Array]) -> Any:
    """Return a column of the view from stored columns; nulls where no event has it."""
    if name in derived:
        return derived[name]
    if name == "duration_ns":
        return pc.subtract(rows["stop"], rows["start"])
    if name == "stream":
        return _streams(rows)
    stored, *_ = _STORED.get(name, (name,))
    if stored in rows.column_names:
        return rows[stored]
    return pa.nulls(rows.num_rows, EVENTS.schema.field(name).type)


def _streams(rows: pa.Table) -> pa.Array:
    """Return the number of the stream of device work; null on the host."""
    thread = rows["thread"].unify_dictionaries().combine_chunks()
    is_device = rows["is_device"].combine_chunks()
    numbers = [
        int(text) if text is not None and text.lstrip("-").isdecimal() else None
        for text in thread.dictionary.to_pylist()
    ]
    return pc.if_else(is_device, pa.array(numbers, pa.int64()).take(thread.indices), None)


def _derived(trace: Trace, names: Collection[str]) -> dict[str, pa.Array]:
    """Return the columns among `names` that no store has, with a value per event."""
    columns = {}
    if "step" in names:
        columns["step"] = _steps(trace)
    if _DERIVED.isdisjoint(set(names) - {"step"}):
        return columns
    work = Work(trace)
    if "launch" in names:
        is_host = work.events.kind[work.rows] == KIND["host_work"]
        launch = np.where(is_host, NONE, work.launch)
        columns["launch"] = _of_all_events(trace, work.rows, launch)
    for name in _LABELS.keys() & set(names):
        columns[name] = _labels(trace, work, name)
    return columns


def _steps(trace: Trace) -> pa.Array:
    """Return the number of the step in which each event starts, as kernels are counted."""
    steps = trace.on_device_clock().iterations
    number, begin, stop = (steps[name].to_numpy() for name in ("number", "start", "stop"))
    place = intervals.segment_of(trace.events["start"].to_numpy(), begin, stop)
    return pa.array(np.append(number, NULL)[place], mask=place < 0)


def _of_all_events(trace: Trace, rows: Ints, values: Ints) -> pa.Array:
    """Return values of some events as a column of all; null for others and for NONE."""
    column = np.full(trace.events.num_rows, NONE, np.int64)
    column[rows] = values
    return pa.array(column, mask=column == NONE)


def _labels(trace: Trace, work: Work, name: str) -> pa.Array:
    """Return the labels of work as a column of all events."""
    key = _LABELS[name]
    place, texts = work.labels(key, full_names=False)
    distinct = [text for text in dict.fromkeys(texts) if text != absent_name(key)]
    code = {text: number for number, text in enumerate(distinct)}
    codes = np.array([code.get(text, NONE) for text in texts], np.int64)
    own = np.append(codes, NONE)[place]
    column = _of_all_events(trace, work.rows, own).cast(pa.int32())
    return pa.DictionaryArray.from_arrays(column, pa.array(distinct, pa.string()))
