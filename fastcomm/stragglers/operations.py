"""Read the table of operations of a production job: their times by data rank and step.

Times are float64 ns; the files have float32 seconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm import arrow_files, files
from fastcomm.checks import RANKS, shortened
from fastcomm.errors import FastcommError, TraceFileError, shell_quoted
from fastcomm.formats import tables
from fastcomm.formats.detection import no_such_path, refuse_standard_input
from fastcomm.trace.run_traces import ranges
from fastcomm_kernels.arrays import Flags, Floats, Ints

POINT_TO_POINT = ("forward-send", "forward-recv", "backward-send", "backward-recv")
_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
_TIMES = ("start_ts", "duration")
_CHUNKS = ("mc", "gmc")
_SIZES = ("dp_size", "pp_size", "tp_size", "dsp_size", "vpp_size", "world_size")
_NS = 1e9
_KINDS = {
    "optype": ("strings", pa.types.is_string),
    **dict.fromkeys(_TIMES, ("floats", pa.types.is_floating)),
}
_AXES = ("dp_rank", "stage", "seq_id")  # numbers from 0, which size the arrays
_MAX_AXIS = 1 << 20
_LATEST_S = 4e9  # a time stamp of the year 2096
_NAMED = 5  # rows that an error names
_LONGEST = 256  # characters of a type


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of each step, with its times in the step that the graph is built from."""

    optype: str
    seq: int
    stage: int
    start: float
    end: float
    mc: int  # chunk of the model on its stage, or -1
    gmc: int  # chunk of the whole model, or -1

    @property
    def reported_type(self) -> str:
        """The type as results name it: a send and its receive are one."""
        if self.optype in POINT_TO_POINT:
            return f"{self.optype.partition('-')[0]}-pp-comm"
        return self.optype

    @property
    def name(self) -> str:
        """Name in the form of the published study, such as "forward-compute_0_1"."""
        return f"{self.optype}_{self.seq}_{self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTable:
    """Operations of a job that all its steps and data ranks have, and their times."""

    ops: tuple[Op, ...]
    start: Floats  # ops x data ranks x steps, ns
    end: Floats
    duration: Floats  # as recorded
    steps: tuple[int, ...]
    rank_of: Ints  # rank, data rank x stage; -1 without one
    left_out: tuple[int, ...]  # steps in which a data rank has other operations

    @property
    def ranks(self) -> int:
        """Number of data ranks."""
        return int(self.start.shape[1])

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return int(self.rank_of.shape[1])

    def rows(self, key: str, numbers: Sequence[int | str]) -> Flags:
        """Return the operations of some numbers of a key: dp_rank, stage, rank or step.

        The shape broadcasts to (operations, data ranks, steps).
        """
        if key == "dp_rank":
            return np.isin(np.arange(self.ranks), numbers)[None, :, None]
        if key == "step":
            return np.isin(self.steps, numbers)[None, None, :]
        stage = np.array([op.stage for op in self.ops])
        if key == "stage":
            return np.isin(stage, numbers)[:, None, None]
        return np.isin(self.rank_of, numbers)[:, stage].T[:, :, None]


def notes(left_out: Sequence[int]) -> tuple[str, ...]:
    """Return the warnings about steps that the reader left out."""
    if not left_out:
        return ()
    steps = ranges(list(left_out))
    return (f"steps {steps} are left out: a rank lacks operations of other steps",)


def meta(path: Path) -> dict[str, Any]:
    """Read the YAML description of a job.

    Raises TraceFileError if it is not a mapping, or one of its sizes is not a positive integer.
    """
    sizes = files.yaml(path)
    if not isinstance(sizes, dict):
        raise TraceFileError(
            f"{path}: invalid description of a job: expected lines such as dp_size: 4, got "
            f"{shortened(sizes)!r}"
        )
    for name in _SIZES:
        size = sizes.get(name, 1)
        if type(size) is not int or not RANKS.holds(size):
            raise TraceFileError(
                f"{path}: invalid {name} {shortened(size)}: expected a whole number from 1 to "
                f"{RANKS.most}"
            )
    return sizes


def read(path: Path) -> OperationTable:
    """Read a table of operations from a Parquet file, or from a CSV file (.csv, .csv.gz).

    Steps in which a data rank has other operations are left out. Raises ConfigError if there is
    no such file, and TraceFileError if it cannot be read, is a trace, or has missing or invalid
    columns.
    """
    _refuse_traces(path)
    try:
        is_csv = _is_csv(path)
        present = tables.columns_of(path) if is_csv else arrow_files.names(path)
        if missing := [name for name in _COLUMNS if name not in present]:
            raise TraceFileError(
                f"{path}: missing column {', '.join(missing)}; the columns are "
                f"{', '.join(present)}"
            )
        names = [*_COLUMNS, *(name for name in _CHUNKS if name in present)]
        table = _read_csv(path, names) if is_csv else arrow_files.read(path, names)
    except FileNotFoundError as error:
        raise no_such_path(path) from error
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise TraceFileError(f"{path}: {error}") from error
    if not table.num_rows:
        raise TraceFileError(f"{path}: the table has no rows")
    if nulls := [name for name in names if table[name].null_count]:
        raise TraceFileError(f"{path}: column {nulls[0]} has nulls")
    _check_kinds(table, path)
    _check_times(table, path)
    return of_table(table, str(path))


def _is_csv(path: Path) -> bool:
    """Whether a file has a CSV name and is no Parquet. Raises `OSError` if it is unreadable."""
    if not path.name.lower().endswith(tables.CSV):
        return False
    with files.opened(path) as file:
        return file.read(4) != b"PAR1"


def _read_csv(path: Path, names: Sequence[str]) -> pa.Table:
    """Read columns of a CSV file; times become floats, also where the text has integers."""
    batches = list(tables.batches(path, names, ("optype", *_TIMES)))
    if not batches:
        raise TraceFileError(f"{path}: the table has no rows")
    table = pa.concat_tables(batches)
    for name in _TIMES:
        place = table.column_names.index(name)
        table = table.set_column(place, name, table[name].cast(pa.float64()))
    return table


def _refuse_traces(path: Path) -> None:
    """Raise TraceFileError if a path is a trace, a directory, an archive or standard input.

    The error suggests a command that reads the input.
    """
    from fastcomm.formats import detection
    from fastcomm.formats.config import Config
    from fastcomm.formats.sources import packed

    refuse_standard_input(path)
    if remedy := packed(path):
        raise TraceFileError(remedy)
    format_ = detection.format_of(path, Config())
    if format_ in (None, "optable") and not path.is_dir():
        return
    kind = "a directory" if format_ is None else f"a trace ({format_})"
    instead = "stats" if format_ == "dpro" else "metrics"
    raise TraceFileError(
        f"{path}: {kind}; `fastcomm stragglers` reads a table of operations (.parquet, .csv). "
        f"For traces use `fastcomm {instead} {shell_quoted(str(path))}`"
        + ("" if format_ == "dpro" else ", which names the straggler and what it costs")
    )


def _check_kinds(table: pa.Table, path: Path) -> None:
    """Raise TraceFileError if a column has the wrong type, or numbers out of range."""
    for name in table.column_names:
        column = table[name]
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        expected, is_kind = _KINDS.get(name, ("integers", pa.types.is_integer))
        if not is_kind(kind):
            raise TraceFileError(f"{path}: column {name}: expected {expected}, got {kind}")
        if name not in _AXES:
            continue
        least, most = pc.min_max(column).as_py().values()
        if not 0 <= least <= most <= _MAX_AXIS:
            raise TraceFileError(
                f"{path}: column {name}: values from {least} to {most}, expected 0 to "
                f"{_MAX_AXIS}"
            )


def _check_times(table: pa.Table, path: Path) -> None:
    """Raise TraceFileError, with the first rows, if times are invalid or all durations 0."""
    start, duration = (table[name].to_numpy() for name in ("start_ts", "duration"))
    end = start.astype(np.float64) + duration
    for name, column, is_time in (
        ("start_ts", start, np.abs(start) < _LATEST_S),
        ("duration", duration, (duration >= 0) & (np.abs(end) < _LATEST_S)),
    ):
        if len(invalid := np.flatnonzero(~is_time)):
            rows = ", ".join(map(str, invalid[:_NAMED].tolist())) + ", ..." * (
                len(invalid) > _NAMED
            )
            raise TraceFileError(
                f"{path}: column {name}: {len(invalid)} invalid values such as "
                f"{column[invalid[0]]} (rows {rows}, from 0); expected seconds, 0 or more"
            )
    if not duration.any():
        raise TraceFileError(
            f"{path}: column duration: all {len(duration)} rows are 0; expected seconds"
        )


def of_table(table: pa.Table, place: str = "table") -> OperationTable:
    """Convert a table in memory with the columns of the file.

    Parameters
    ----------
    table
        One row per operation, data rank and step, without nulls; times in s.
    place
        Name of the table in errors.

    Raises
    ------
    FastcommError
        If there is no step in which all data ranks have the same operations, no data rank 0, or
        an invalid type of operation.

    """
    columns = {name: table[name].to_numpy() for name in table.column_names if name != "optype"}
    types, kind = _kinds(table["optype"])
    _check_types(types, place)
    stage, dp = columns["stage"].astype(np.int64), columns["dp_rank"].astype(np.int64)
    steps, at = np.unique(columns["step"].astype(np.int64), return_inverse=True)
    size = int(columns["seq_id"].max()) + 1
    code = (kind * (stage.max() + 1) + stage) * size + columns["seq_id"]
    rows = np.flatnonzero((dp == 0) & (at == _template(dp, at)))
    op_codes, row_of = np.unique(code[rows], return_index=True)
    op = np.searchsorted(op_codes, code)
    is_known = (op < len(op_codes)) & (op_codes[np.minimum(op, len(op_codes) - 1)] == code)
    shape = len(op_codes), int(dp.max()) + 1, len(steps)
    complete = _complete(op, is_known, dp, at, shape)
    if not complete.any():
        raise TraceFileError(f"{place}: in no step have all data ranks the same operations")
    used = np.flatnonzero(is_known & complete[at])
    times = _times(columns)
    cubes = np.empty((len(times), *shape))
    cubes[:, op[used], dp[used], at[used]] = times[:, used]
    rank_of = np.full((shape[1], int(stage.max()) + 1), -1, np.int64)
    rank_of[dp, stage] = columns["rank"]
    return OperationTable(
        ops=tuple(_op(columns, times, types[kind[row]], row) for row in rows[row_of]),
        start=cubes[0][:, :, complete],
        end=cubes[1][:, :, complete],
        duration=cubes[2][:, :, complete],
        steps=tuple(steps[complete].tolist()),
        rank_of=rank_of,
        left_out=tuple(steps[~complete].tolist()),
    )


def _kinds(column: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """Return the types, sorted, and for each row the position of its type."""
    encoded = column.combine_chunks().cast(pa.string()).dictionary_encode()
    names = encoded.dictionary.to_pylist()
    types = sorted(names)
    position = {name: number for number, name in enumerate(types)}
    return types, np.array([position[name] for name in names])[encoded.indices.to_numpy()]


def _times(columns: Mapping[str, Any]) -> Floats:
    """Return start, end and duration of every row in ns, 3 x rows."""
    start = columns["start_ts"].astype(np.float32)
    duration = columns["duration"].astype(np.float32)
    # As in the published study, an end is rounded to float32 first.
    return np.array([start, start + duration, duration]).astype(np.float64) * _NS


def _op(columns: Mapping[str, Any], times: Floats, optype: str, row: int) -> Op:
    """Return the operation of one row of the table.

    `columns` are the columns by name, `times` the starts, ends and durations in ns, shape
    (3, rows), and `optype` is the type of the operation.
    """
    mc, gmc = (int(columns[name][row]) if name in columns else -1 for name in _CHUNKS)
    return Op(
        optype=optype,
        seq=int(columns["seq_id"][row]),
        stage=int(columns["stage"][row]),
        start=float(times[0, row]),
        end=float(times[1, row]),
        mc=mc,
        gmc=gmc,
    )


def _check_types(types: Sequence[str], place: str) -> None:
    """Refuse long names, and point-to-point operations for which the graph has no rule."""
    for name in types:
        if len(name) > _LONGEST:
            raise FastcommError(
                f"{place}: an optype has {len(name)} characters, expected at most {_LONGEST}"
            )
        if name.endswith(("-send", "-recv")) and name not in POINT_TO_POINT:
            raise FastcommError(
                f"{place}: unknown optype {name!r}: expected {', '.join(POINT_TO_POINT)}"
            )


def _template(dp: Ints, at: Ints) -> int:
    """Return the first step in which data rank 0 has its most frequent number of operations.

    `dp` has the data rank of each row, `at` the index of its step; the result is such an index.
    Raises FastcommError if the table has no data rank 0.
    """
    own = np.flatnonzero(dp == 0)
    counts = Counter(at[own].tolist())
    if not counts:
        raise FastcommError("the table has no data rank 0; data ranks count from 0")
    usual = Counter(counts.values()).most_common(1)[0][0]
    return int(min(step for step, count in counts.items() if count == usual))


def _complete(
    op: Ints, is_known: Flags, dp: Ints, at: Ints, shape: tuple[int, int, int]
) -> Flags:
    """Return the steps in which every data rank has every operation once, and no other.

    Rows have the operation, whether it is known, the data rank and the step (`at`);
    `shape` has the numbers of operations, data ranks and steps.
    """
    count = np.zeros(shape, np.int64)
    np.add.at(count, (op[is_known], dp[is_known], at[is_known]), 1)
    complete: Flags = (count == 1).all(axis=(0, 1))
    complete[at[~is_known]] = False
    return complete
