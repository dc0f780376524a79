"""Map the columns of a user's table to the meaning, unit and type that fastcomm needs."""

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
from fastcomm.readers.kineto.stream import CutShortError, blocks
from fastcomm.trace.schema import OPS, TAGS
from fastcomm_kernels.arrays import Ints

UNITS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
# What is no communication, and the kind of event that it is.
WORK = {"compute": "kernel", "copy": "memcpy", "other": "other"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind:
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
    kinds: tuple[RowKind, ...]  # the first that matches counts
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

    def kind_of(self, value: str) -> RowKind | None:
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


def _kinds(data: Mapping[str, Any], where: str) -> tuple[RowKind, ...]:
    table = data.get("kinds")
    if not isinstance(table, dict) or not table:
        refuse(where, "kinds", table, "a table [table.kinds] with an entry a kind of row")
    return tuple(_kind(pattern, said, f"{where} kinds") for pattern, said in table.items())


def _kind(pattern: str, said: object, where: str) -> RowKind:
    """A word, as in "compute" or "AllReduce", or a table with op, tag and same."""
    if isinstance(said, str):
        word = choice({pattern: said}, pattern, (*WORK, *OPS), where) or ""
        return (
            RowKind(pattern=pattern, work=word)
            if word in WORK
            else RowKind(pattern=pattern, op=word)
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
    return RowKind(
        pattern=pattern, op=op, tag=choice(said, "tag", TAGS, where), same=tuple(same)
    )


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


PARQUET = (".parquet", ".pq")
CSV = (".csv", ".csv.gz")
_LARGEST = float(1 << 63)
_COARSE = 10  # ns
_MOST_NAMED = 5  # rows


def is_table(path: Path) -> bool:
    """Whether a file is a table by its name."""
    return path.name.lower().endswith((*PARQUET, *CSV)) and path.is_file()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{path}: no readable Parquet or CSV table: {error}") from error


def columns_of(path: Path) -> list[str]:
    """The names of the columns; TraceFileError where the file is no table."""
    with _reading(path):
        if path.name.lower().endswith(PARQUET):
            return arrow_files.names(path)
        return list(_csv(path, None, ()).schema.names)


def batches(
    path: Path, columns: Sequence[str], texts: Sequence[str] = (), where: pc.Expression = None
) -> Iterator[pa.Table]:
    """These columns of the rows that fulfil `where`, some at a time; `texts` are text."""
    with _reading(path):
        if path.name.lower().endswith(PARQUET):
            files.check(path)
            yield from _rows(path, list(columns), where)
            return
        with _csv(path, columns, texts) as reader:
            for batch in reader:
                table = pa.Table.from_batches([batch])
                yield table if where is None else table.filter(where)


def _rows(path: Path, columns: list[str], where: pc.Expression) -> Iterator[pa.Table]:
    """The same of a Parquet file."""
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
    spelled = arrow_files.Spelled(size, path, texts)
    for batch in rows.to_batches(columns=columns, filter=where):
        yield spelled.table(pa.Table.from_batches([batch]))


def _csv(
    path: Path, columns: Sequence[str] | None, texts: Sequence[str]
) -> pa_csv.CSVStreamingReader:
    options = pa_csv.ConvertOptions(
        include_columns=columns, column_types=dict.fromkeys(texts, pa.string())
    )
    return pa_csv.open_csv(pa.PythonFile(_Text(path), "r"), convert_options=options)


class _Text(io.RawIOBase):
    """The text of a file, decompressed, with the bounds of `blocks`."""

    def __init__(self, path: Path) -> None:
        self._blocks = blocks(path)
        self._path = path
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """At most so many bytes; none at the end."""
        try:
            if not self._rest:
                self._rest = memoryview(next(self._blocks, b""))
        except CutShortError as error:
            raise EOFError("the compressed file ends before its end") from error
        size = len(self._rest) if size < 0 else size
        found, self._rest = self._rest[:size], self._rest[size:]
        return bytes(found)


def times(table: pa.Table, mapping: TableMapping, path: Path) -> tuple[Ints, Ints]:
    """Start and stop of each row. An end that the table does not have is formed in its type."""
    start = _numbers(table, mapping.start, path)
    end = _numbers(table, mapping.stop or mapping.duration or "", path)
    if mapping.duration is not None:
        if len(strange := np.flatnonzero(~(end >= 0))):
            raise TraceFileError(
                f"{path}: column {mapping.duration}: found {end[strange[0]]} in "
                f"{_rows_of_rank(strange)}, wanted 0 or more"
            )
        if len(end) and not end.any():
            raise TraceFileError(
                f"{path}: column {mapping.duration}: all durations of a rank, its rows 0 to "
                f"{len(end) - 1}, are 0; wanted times"
            )
        end = start + end
    # Columns of times are in ns already.
    scale = 1 if pa.types.is_temporal(table[mapping.start].type) else UNITS[mapping.unit]
    begun = _to_ns(start, scale, mapping.start, path)
    ended = _to_ns(end, scale, mapping.stop or mapping.duration or "", path)
    if len(late := np.flatnonzero(ended < begun)):
        raise TraceFileError(
            f"{path}: an operation stops at {ended[late[0]]} ns before it starts at "
            f"{begun[late[0]]} ns, as {len(late)} do; wanted {mapping.start} <= {mapping.stop}"
        )
    return begun, ended


def _rows_of_rank(rows: Ints) -> str:
    """The first rows in words; what is read at once is the rows of a rank."""
    first = ", ".join(map(str, rows[:_MOST_NAMED].tolist()))
    return f"row {first}{', ...' if len(rows) > _MOST_NAMED else ''} of a rank's rows (from 0)"


def _numbers(table: pa.Table, name: str, path: Path) -> NDArray[Any]:
    """A column without nulls, as numbers; of a column of times, its nanoseconds."""
    column = table[name]
    if column.null_count:
        raise TraceFileError(f"{path}: column {name}: {column.null_count} nulls, wanted none")
    with _reading(path):
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ns")).cast(pa.int64())
        elif pa.types.is_duration(column.type):
            column = column.cast(pa.duration("ns")).cast(pa.int64())
        elif not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise TraceFileError(f"{path}: column {name}: found {column.type}, wanted numbers")
    numbers: NDArray[Any] = column.to_numpy()
    return numbers


def _to_ns(numbers: NDArray[Any], scale: int, name: str, path: Path) -> Ints:
    """Numbers of a unit that is `scale` ns as whole ns, the half rounded to even."""
    exact = numbers.astype(np.float64) * scale
    if len(strange := np.flatnonzero(~(np.abs(exact) < _LARGEST))):
        raise TraceFileError(
            f"{path}: column {name}: a number is no time in this unit ({scale} ns), "
            f"{numbers[strange[0]]} in {_rows_of_rank(strange)}"
        )
    if np.issubdtype(numbers.dtype, np.integer):
        return numbers.astype(np.int64) * scale
    return np.rint(exact).astype(np.int64)


def resolution(table: pa.Table, mapping: TableMapping) -> str | None:
    """What to say of floating-point times that are coarse."""
    column = table[mapping.start]
    if not pa.types.is_floating(column.type) or not table.num_rows:
        return None
    largest = np.abs(column.to_numpy()).max()
    step = float(np.spacing(largest)) * UNITS[mapping.unit]
    if step < _COARSE:
        return None
    return f"times are {column.type.bit_width}-bit floats: up to {step:.0f} ns apart"


def whole_numbers(table: pa.Table, name: str, path: Path) -> Ints:
    """A column of whole numbers without nulls."""
    column = table[name]
    if column.null_count:
        raise TraceFileError(f"{path}: column {name}: {column.null_count} nulls, wanted none")
    with _reading(path):
        numbers: Ints = column.cast(pa.int64()).to_numpy()
    return numbers
