"""The partial result of one rank as a file: kilobytes that are merged without its trace.

A file is a sequence of Arrow streams. The first has no rows, and its metadata has the notes on
the rank; a stream for each table follows. A rank alone cannot know on which clock the steps of
the run are, so that a file has the partial result by either clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Self

import orjson
import pyarrow as pa

from fastcomm import preparation
from fastcomm.errors import TraceFileError
from fastcomm.files import Limits, aside, opened
from fastcomm.metrics.options import ByteKind
from fastcomm.metrics.outside_steps import RankOutside
from fastcomm.metrics.partial import Partial, RankNote
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import OPS
from fastcomm.trace.trace import Trace

_LAYOUT = 2  # a new one says that older files are not read
_KEY = b"fastcomm"
_TABLES = (
    *("iterations", "events", "windows", "groups", "members", "tagged", "idle", "sent"),
    "exchanged",
)
_CLOCKS = ("device", "host")
_DAMAGE = (pa.ArrowException, OSError, KeyError, TypeError, ValueError, AttributeError)
# Columns that are indices into a list.
_INDICES = {"op": len(OPS), "tag": len(TAGS)}
# Fields of a note that are lists of texts.
_TEXTS = ("warnings", "missing", "clock_notes", "unused")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPartials:
    """The partial results of one rank, with steps by the device's clock and by the host's."""

    device: Partial
    host: Partial

    @classmethod
    def of(
        cls,
        trace: Trace,
        byte_kind: ByteKind = "payload",
        only: frozenset[int] | None = None,
    ) -> Self:
        """Measure the trace of a rank, by default all of its steps."""
        return cls(
            device=Partial.of(trace, byte_kind=byte_kind, only=only),
            host=Partial.of(trace, byte_kind=byte_kind, only=only, by_host=True),
        )

    @property
    def steps(self) -> frozenset[int]:
        """Numbers of the steps that were measured."""
        return frozenset(self.device.iterations["iteration"].to_pylist())

    @property
    def note(self) -> RankNote:
        """The note on the rank."""
        return self.device.notes[0]


def write(partials: RankPartials, path: Path) -> None:
    """Write the partial results of a rank, whole or not at all.

    Raises
    ------
    FastcommError
        If the file cannot be written.

    """
    own = {name: getattr(partials, name) for name in _CLOCKS}
    tables = {
        name: [table for table in _TABLES if getattr(part, table) is not None]
        for name, part in own.items()
    }
    notes = {name: asdict(part.notes[0]) for name, part in own.items()}
    about = {"layout": _LAYOUT, "notes": notes, "tables": tables}
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with aside(path) as unfinished, unfinished.open("wb") as file:
        _append(pa.table({}).replace_schema_metadata({_KEY: orjson.dumps(about)}), file)
        for name, part in own.items():
            for table in tables[name]:
                _append(getattr(part, table), file, options)


def _append(
    table: pa.Table, file: BinaryIO, options: pa.ipc.IpcWriteOptions | None = None
) -> None:
    with pa.ipc.new_stream(file, table.schema, options=options) as stream:
        stream.write_table(table.combine_chunks())


def read(path: Path) -> RankPartials:
    """Read the partial results of a rank.

    Raises
    ------
    TraceFileError
        If the file cannot be read, or is damaged.

    """
    try:
        with opened(path) as file:
            Limits.of_environment().check_document(path.stat().st_size, path)
            about = orjson.loads((_next(file).schema.metadata or {})[_KEY])
            if about["layout"] != _LAYOUT:
                raise TraceFileError(
                    f"{path}: written by another version of fastcomm (layout "
                    f"{about['layout']!r}, this one reads {_LAYOUT}); measure the trace again"
                )
            parts = {name: _partial(about, name, file) for name in _CLOCKS}
    except TraceFileError:
        raise
    except _DAMAGE as error:
        raise TraceFileError(
            f"{path}: damaged, or no partial result ({type(error).__name__}: {error}); measure "
            "the trace again"
        ) from error
    return RankPartials(**parts)


def _next(file: BinaryIO) -> pa.Table:
    return pa.ipc.open_stream(file).read_all()


def _partial(about: Mapping[str, Any], clock: str, file: BinaryIO) -> Partial:
    """Read the partial result by a clock; TypeError or ValueError if a table is another."""
    names: Sequence[str] = about["tables"][clock]
    tables = {name: _checked(name, _next(file)) for name in names}
    return Partial(notes=(_note(about["notes"][clock]),), **tables)


def _checked(name: str, table: pa.Table) -> pa.Table:
    """Return a table that has the columns of partial results, and indices in their limits."""
    expected = _schemas()[name]
    if table.schema.names != expected.names or table.schema.types != expected.types:
        raise TypeError(f"table {name} has other columns")
    table.validate(full=True)
    for column, count in _INDICES.items():
        if column in expected.names and pa.types.is_integer(expected.field(column).type):
            codes = table[column].drop_null().to_numpy()
            if len(codes) and not 0 <= codes.min() <= codes.max() < count:
                raise ValueError(f"table {name} has an unknown {column}")
    return table


@cache
def _schemas() -> dict[str, pa.Schema]:
    """Return the schema of each table, which those of any trace have."""
    part = preparation.run_metric_kernels()
    return {name: getattr(part, name).schema for name in _TABLES}


def _note(plain: Mapping[str, Any]) -> RankNote:
    """Return the note of a JSON object. Raises KeyError, TypeError or ValueError."""
    values = dict(plain)
    for name in _TEXTS:
        values[name] = tuple(str(text) for text in values[name])
    outside = values["device_time"]
    if outside is not None:
        values["device_time"] = RankOutside(**{key: int(n) for key, n in outside.items()})
    values["rank"] = int(values["rank"])
    if set(values) != {field.name for field in fields(RankNote)}:
        raise ValueError("the note on the rank has other fields")
    return RankNote(**values)
