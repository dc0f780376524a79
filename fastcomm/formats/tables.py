"""Read a user's table: the meaning, unit and type of its columns, and its rows."""

import io
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.dataset as pa_dataset
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fastcomm import arrow_files, files
from fastcomm.checks import check_keys, choice, refuse
from fastcomm.errors import ConfigError, TraceFileError, is_utf8
from fastcomm.formats.stream import CutShortError, blocks
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import OPS
from fastcomm.units import TIME_UNITS
from fastcomm_kernels.arrays import Ints

# Kinds of rows that are not communication, and their kinds of events.
WORK = {"compute": "kernel", "copy": "memcpy", "other": "other"}
_PARQUET = (".parquet", ".pq")
CSV = (".csv", ".csv.gz")
_LARGEST = float(1 << 63)
_COARSE = 10  # ns
_MOST_NAMED = 5  # rows in a message


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
    unit: str = "ns"  # a key of TIME_UNITS
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
        names = [(key, getattr(self, key)) for key in _COLUMNS]
        names += [("kinds, same", name) for name in self.coordinates]
        for key, name in names:
            if name is not None and name not in present:
                raise ConfigError(
                    f"{where}: [table] {key} = {name!r}: no such column; the table has "
                    f"{', '.join(present)}"
                )


_COLUMNS = (
    "rank", "start", "stop", "duration", "kind", "name", "iteration", "stream", "bytes", "group"
)  # fmt: skip
_NEEDED = ("rank", "start", "kind")


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
    unit = choice(data, "unit", TIME_UNITS, where)
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


_MESSAGE = {"op": "SendRecv", "tag": "PP", "same": ["dp_rank"]}
_DATA = {"tag": "DP", "same": ["stage"]}
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
            "forward-send": _MESSAGE,
            "forward-recv": _MESSAGE,
            "backward-send": _MESSAGE,
            "backward-recv": _MESSAGE,
            "params-all-gather": {"op": "AllGather", **_DATA},
            "grads-reduce-scatter": {"op": "ReduceScatter", **_DATA},
            "separate-grads-all-reduce": {"op": "AllReduce", **_DATA},
            "layernorm-grads-all-reduce": {"op": "AllReduce", "tag": "TP"},
            "embedding-grads-all-reduce": {"op": "AllReduce", "tag": "PP"},
            "gc": "other",  # garbage collection on the host
        },
    },
    "StragglerAnalysis",
)
# Further columns by which such a table is recognized.
_FURTHER = ("dp_rank", "stage", "seq_id", "mc", "gmc")


# Tables of kernels of torch_npu (Ascend): kernel_details.csv. Ranks are devices of one host.
_ASCEND = {
    "rank": "Device_id",
    "start": "Start Time(us)",
    "duration": "Duration(us)",
    "unit": "us",
    "kind": "Type",
    "name": "Name",
    "stream": "Stream ID",
    "kinds": {
        "hcom_allReduce*": "AllReduce",
        "hcom_allGather*": "AllGather",
        "hcom_reduceScatter*": "ReduceScatter",
        "hcom_broadcast*": "Broadcast",
        "hcom_all[tT]o[aA]ll*": "AllToAll",
        "hcom_reduce*": "Reduce",
        "hcom_send*": "SendRecv",
        "hcom_receive*": "SendRecv",
        "hcom_batchSendRecv*": "SendRecv",
        "hcom_*": "OTHER",
        "*": "compute",
    },
}
_ASCEND_STEP = "Step Id"  # missing where no steps are marked
_ASCEND_FURTHER = ("Accelerator Core", "Task ID")
ASCEND = tuple(
    table_mapping({**_ASCEND, **steps}, "torch_npu")
    for steps in ({"iteration": _ASCEND_STEP}, {})
)


def preset_of(present: Collection[str]) -> TableMapping | None:
    """Return the mapping of a table that is recognized by its columns, or None."""
    presets = [(STRAGGLER, _FURTHER), *((mapping, _ASCEND_FURTHER) for mapping in ASCEND)]
    return next(
        (mapping for mapping, more in presets if {*mapping.columns, *more} <= set(present)),
        None,
    )


def is_table(path: Path) -> bool:
    """Return whether a file is a table, by its name."""
    return path.name.lower().endswith((*_PARQUET, *CSV)) and path.is_file()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise errors of reading a file as TraceFileError with its path."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{path}: not a readable Parquet or CSV table: {error}") from error


def columns_of(path: Path) -> list[str]:
    """Return the names of the columns; TraceFileError if the file is not a table."""
    with _reading(path):
        if path.name.lower().endswith(_PARQUET):
            return arrow_files.names(path)
        return list(_csv(path, None, ()).schema.names)


def batches(
    path: Path, columns: Sequence[str], texts: Sequence[str] = (), where: pc.Expression = None
) -> Iterator[pa.Table]:
    """Yield the rows of a table as smaller tables.

    Parameters
    ----------
    path
        A Parquet or CSV file.
    columns
        Columns to read.
    texts
        Those that are text, whatever a CSV file suggests.
    where
        Condition on rows; None yields all.

    Raises
    ------
    TraceFileError
        If the file is damaged.

    """
    with _reading(path):
        if path.name.lower().endswith(_PARQUET):
            files.check(path)
            yield from _parquet_rows(path, list(columns), where)
            return
        with _csv(path, columns, texts) as reader:
            for batch in reader:
                table = pa.Table.from_batches([batch])
                yield table if where is None else table.filter(where)


def _parquet_rows(path: Path, columns: list[str], where: pc.Expression) -> Iterator[pa.Table]:
    """Yield the matching rows of a Parquet file as smaller tables."""
    size = path.stat().st_size
    with files.named(path) as source:
        texts = arrow_files.check(pq.read_metadata(source), size, path, columns)
    as_codes = pa_dataset.ParquetFileFormat(dictionary_columns=set(texts))
    place: Any = path
    rows: pa_dataset.Dataset | pa_dataset.Fragment
    if not files.is_local(path):
        rows = pa_dataset.dataset(place.path, format=as_codes, filesystem=place.fs)
    elif is_utf8(str(path)):
        rows = pa_dataset.dataset(path, format=as_codes)
    else:
        rows = as_codes.make_fragment(pa.OSFile(os.fsencode(path)))
    decoder = arrow_files.DictionaryDecoder(size, path, texts)
    for batch in rows.to_batches(columns=columns, filter=where):
        yield decoder.decode(pa.Table.from_batches([batch]))


def _csv(
    path: Path, columns: Sequence[str] | None, texts: Sequence[str]
) -> pa_csv.CSVStreamingReader:
    """Open a CSV file. Without `columns` all are read; those in `texts` are read as text."""
    options = pa_csv.ConvertOptions(
        include_columns=columns, column_types=dict.fromkeys(texts, pa.string())
    )
    return pa_csv.open_csv(pa.PythonFile(_Text(path), "r"), convert_options=options)


class _Text(io.RawIOBase):
    """The decompressed text of a file as a stream, with the limits of `blocks`."""

    def __init__(self, path: Path) -> None:
        self._blocks = blocks(path)
        self._path = path
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes; none at the end."""
        try:
            if not self._block:
                self._block = memoryview(next(self._blocks, b""))
        except CutShortError as error:
            raise EOFError("the compressed file is truncated") from error
        size = len(self._block) if size < 0 else size
        data, self._block = self._block[:size], self._block[size:]
        return bytes(data)


def times(table: pa.Table, mapping: TableMapping, path: Path) -> tuple[Ints, Ints]:
    """Return start and stop of each row in ns.

    A stop from a duration is added in the type of the columns.

    Parameters
    ----------
    table
        Rows of one rank.
    mapping
        Columns of start and of stop or duration, and their unit.
    path
        File of the table, for messages.

    Raises
    ------
    TraceFileError
        There are nulls, values that are not times, negative durations, durations that are all
        0, or stops before starts.

    """
    start = _numbers(table, mapping.start, path)
    end = _numbers(table, mapping.stop or mapping.duration or "", path)
    if mapping.duration is not None:
        if len(bad := np.flatnonzero(~(end >= 0))):
            raise TraceFileError(
                f"{path}: column {mapping.duration}: found {end[bad[0]]} in "
                f"{_rows_of_rank(bad)}, expected 0 or more"
            )
        if len(end) and not end.any():
            raise TraceFileError(
                f"{path}: column {mapping.duration}: all durations of a rank (its rows 0 to "
                f"{len(end) - 1}) are 0"
            )
        end = start + end
    # Columns of times are in ns already.
    scale = 1 if pa.types.is_temporal(table[mapping.start].type) else TIME_UNITS[mapping.unit]
    start_ns = _to_ns(start, scale, mapping.start, path)
    stop_ns = _to_ns(end, scale, mapping.stop or mapping.duration or "", path)
    if len(late := np.flatnonzero(stop_ns < start_ns)):
        first = late[0]
        raise TraceFileError(
            f"{path}: an operation stops at {stop_ns[first]} ns before it starts at "
            f"{start_ns[first]} ns, as {len(late)} do; expected {mapping.start} <= "
            f"{mapping.stop}"
        )
    return start_ns, stop_ns


def _rows_of_rank(rows: Ints) -> str:
    """Return the first rows as text; a table that is read has the rows of one rank."""
    first = ", ".join(map(str, rows[:_MOST_NAMED].tolist()))
    return f"row {first}{', ...' if len(rows) > _MOST_NAMED else ''} of a rank's rows (from 0)"


def _numbers(table: pa.Table, name: str, path: Path) -> NDArray[Any]:
    """Return a column without nulls as numbers, times as ns."""
    column = _without_nulls(table, name, path)
    with _reading(path):
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ns")).cast(pa.int64())
        elif pa.types.is_duration(column.type):
            column = column.cast(pa.duration("ns")).cast(pa.int64())
        elif not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise TraceFileError(
                f"{path}: column {name}: found {column.type}, expected numbers"
            )
    numbers: NDArray[Any] = column.to_numpy()
    return numbers


def _to_ns(numbers: NDArray[Any], scale: int, name: str, path: Path) -> Ints:
    """Return numbers in units of `scale` ns as integer ns, halves rounded to even."""
    exact = numbers.astype(np.float64) * scale
    if len(bad := np.flatnonzero(~(np.abs(exact) < _LARGEST))):
        raise TraceFileError(
            f"{path}: column {name}: {numbers[bad[0]]} is not a valid time in this unit "
            f"({scale} ns), in {_rows_of_rank(bad)}"
        )
    if np.issubdtype(numbers.dtype, np.integer):
        return numbers.astype(np.int64) * scale
    return np.rint(exact).astype(np.int64)


def resolution(table: pa.Table, mapping: TableMapping) -> str | None:
    """Return a warning if times are floats whose neighbors are too far apart, else None.

    The column of starts has the largest time, in `mapping.unit`.
    """
    column = table[mapping.start]
    if not pa.types.is_floating(column.type) or not table.num_rows:
        return None
    largest = np.abs(column.to_numpy()).max()
    step = float(np.spacing(largest)) * TIME_UNITS[mapping.unit]
    if step < _COARSE:
        return None
    return f"times are {column.type.bit_width}-bit floats: up to {step:.0f} ns apart"


def int64_column(table: pa.Table, name: str, path: Path) -> Ints:
    """Return a column of integers as int64.

    Parameters
    ----------
    table, name
        Table, and name of the column.
    path
        File of the table, for messages.

    Raises
    ------
    TraceFileError
        There are nulls, or values that are no whole numbers of 64 bits.

    """
    with _reading(path):
        numbers: Ints = _without_nulls(table, name, path).cast(pa.int64()).to_numpy()
    return numbers


def _without_nulls(table: pa.Table, name: str, path: Path) -> pa.ChunkedArray:
    """Return a column; TraceFileError if it has nulls."""
    column = table[name]
    if column.null_count:
        raise TraceFileError(f"{path}: column {name}: {column.null_count} nulls, expected none")
    return column
