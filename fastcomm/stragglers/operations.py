"""A table of operations of a production job: start and end of each, by data rank and step.

Times are float64 nanoseconds: the table has float32 seconds, and means of them have fractions.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm import arrow_files, files
from fastcomm.checks import RANKS, shortened
from fastcomm.errors import FastcommError, TraceFileError, shell_quoted
from fastcomm.trace.run import ranges
from fastcomm_kernels.arrays import Floats, Ints

POINT_TO_POINT = ("forward-send", "forward-recv", "backward-send", "backward-recv")
_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
_CHUNKS = ("mc", "gmc")
_SIZES = ("dp_size", "pp_size", "tp_size", "dsp_size", "vpp_size", "world_size")
_NS = 1e9
_PLACES = ("dp_rank", "stage", "seq_id")  # that count from 0, and make a cube
_MOST = 1 << 20
_LATEST = 4e9  # s: some 60 years of 1970
_NAMED = 5  # rows
_LONGEST = 256  # letters of a type


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of the graph, with its times in the step that the graph is made of."""

    optype: str
    seq: int
    stage: int
    start: float
    end: float
    mc: int
    gmc: int

    @property
    def reported_type(self) -> str:
        """The type as results name it: a send and its receive are one."""
        if self.optype in POINT_TO_POINT:
            return f"{self.optype.partition('-')[0]}-pp-comm"
        return self.optype

    @property
    def name(self) -> str:
        """As the published study has it."""
        return f"{self.optype}_{self.seq}_{self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTable:
    """Times are ops x data ranks x steps, `duration` as recorded; `rank_of` rank x stage."""

    ops: tuple[Op, ...]
    start: Floats
    end: Floats
    duration: Floats
    steps: tuple[int, ...]
    rank_of: Ints
    left_out: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Data ranks."""
        return int(self.start.shape[1])

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return int(self.rank_of.shape[1])


def notes(left_out: Sequence[int]) -> tuple[str, ...]:
    """Return a warning of steps that reading had to leave out."""
    if not left_out:
        return ()
    steps = ranges(list(left_out))
    return (f"steps {steps} are left out: a rank lacks operations that it has elsewhere",)


def meta(path: Path) -> dict[str, Any]:
    """The description of a job; its sizes are positive."""
    sizes = files.yaml(path)
    if not isinstance(sizes, dict):
        raise TraceFileError(f"{path}: found {sizes!r}, wanted dp_size, pp_size and the rest")
    for name in _SIZES:
        size = sizes.get(name, 1)
        if type(size) is not int or not RANKS.holds(size):
            raise TraceFileError(
                f"{path}: {name}: found {shortened(size)}, wanted a whole number from 1 to "
                f"{RANKS.most}"
            )
    return sizes


def read(path: Path) -> OperationTable:
    """Read a table; steps in which a rank has other operations are left out.

    Raises `TraceFileError` where it cannot be read, or is no table but a trace.
    """
    _refuse_traces(path)
    try:
        present = arrow_files.names(path)
        if missing := [name for name in _COLUMNS if name not in present]:
            raise TraceFileError(f"{path}: no column {', '.join(missing)}; found {present}")
        names = [*_COLUMNS, *(name for name in _CHUNKS if name in present)]
        table = arrow_files.read(path, names)
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


def _refuse_traces(path: Path) -> None:
    """Raise TraceFileError where a path is a trace, a directory, an archive or standard input.

    The error says what to use instead.
    """
    from fastcomm.readers import detection, packed
    from fastcomm.readers import detection as readers_detection
    from fastcomm.readers.config import Config

    readers_detection.refuse_standard_input(path)
    if remedy := packed(path):
        raise TraceFileError(remedy)
    format_ = detection.format_of(path, Config())
    if format_ in (None, "optable") and not path.is_dir():
        return
    what = "a directory" if format_ is None else f"a trace ({format_})"
    instead = "stats" if format_ == "dpro" else "metrics"
    raise TraceFileError(
        f"{path}: {what}; `fastcomm stragglers` reads a table of operations (.parquet). For "
        f"traces use `fastcomm {instead} {shell_quoted(str(path))}`"
        + ("" if format_ == "dpro" else ", which names the straggler and what it costs")
    )


def _check_kinds(table: pa.Table, path: Path) -> None:
    """TraceFileError where a column cannot be what its name says."""
    for name in table.column_names:
        column = table[name]
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        is_kind = {"optype": pa.types.is_string, "start_ts": pa.types.is_floating}
        is_kind["duration"] = pa.types.is_floating
        if not is_kind.get(name, pa.types.is_integer)(kind):
            raise TraceFileError(f"{path}: column {name}: found {kind}, wanted another type")
        ends = pc.min_max(column) if name in _PLACES else None
        if ends is not None and not 0 <= ends["min"].as_py() <= ends["max"].as_py() <= _MOST:
            raise TraceFileError(f"{path}: column {name}: found {ends}, wanted 0 to {_MOST}")


def _check_times(table: pa.Table, path: Path) -> None:
    """TraceFileError, with the first rows, where times cannot be, or all durations are 0."""
    start, duration = (table[name].to_numpy() for name in ("start_ts", "duration"))
    end = start.astype(np.float64) + duration
    for name, column, is_time in (
        ("start_ts", start, np.abs(start) < _LATEST),
        ("duration", duration, (duration >= 0) & (np.abs(end) < _LATEST)),
    ):
        if len(strange := np.flatnonzero(~is_time)):
            rows = ", ".join(map(str, strange[:_NAMED].tolist())) + ", ..." * (
                len(strange) > _NAMED
            )
            raise TraceFileError(
                f"{path}: column {name}: {len(strange)} values are no times, as "
                f"{column[strange[0]]} (rows {rows}, from 0); wanted seconds, 0 or more"
            )
    if not duration.any():
        raise TraceFileError(
            f"{path}: column duration: all {len(duration)} rows (0 to {len(duration) - 1}) are "
            "0; wanted seconds"
        )


def of_table(table: pa.Table, place: str = "table") -> OperationTable:
    """The same from a table in memory."""
    columns = {name: table[name].to_numpy() for name in table.column_names if name != "optype"}
    types, kind = _kinds(table["optype"])
    _known_types(types, place)
    stage, dp = columns["stage"].astype(np.int64), columns["dp_rank"].astype(np.int64)
    steps, at = np.unique(columns["step"].astype(np.int64), return_inverse=True)
    size = int(columns["seq_id"].max()) + 1
    code = (kind * (stage.max() + 1) + stage) * size + columns["seq_id"]
    rows = np.flatnonzero((dp == 0) & (at == _template(dp, at)))
    op_codes, row_of = np.unique(code[rows], return_index=True)
    op = np.searchsorted(op_codes, code)
    known = (op < len(op_codes)) & (op_codes[np.minimum(op, len(op_codes) - 1)] == code)
    shape = len(op_codes), int(dp.max()) + 1, len(steps)
    whole = _whole(op, known, dp, at, shape)
    if not whole.any():
        raise TraceFileError(f"{place}: in no step have all data ranks the same operations")
    kept = np.flatnonzero(known & whole[at])
    times = _times(columns)
    cubes = np.empty((len(times), *shape))
    cubes[:, op[kept], dp[kept], at[kept]] = times[:, kept]
    rank_of = np.full((shape[1], int(stage.max()) + 1), -1, np.int64)
    rank_of[dp, stage] = columns["rank"]
    return OperationTable(
        ops=tuple(_op(columns, times, types[kind[row]], row) for row in rows[row_of]),
        start=cubes[0][:, :, whole],
        end=cubes[1][:, :, whole],
        duration=cubes[2][:, :, whole],
        steps=tuple(steps[whole].tolist()),
        rank_of=rank_of,
        left_out=tuple(steps[~whole].tolist()),
    )


def _kinds(column: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """The types, sorted, and the place of each row's among them."""
    words = column.combine_chunks().cast(pa.string()).dictionary_encode()
    names = words.dictionary.to_pylist()
    types = sorted(names)
    place = {name: number for number, name in enumerate(types)}
    return types, np.array([place[name] for name in names])[words.indices.to_numpy()]


def _times(columns: Mapping[str, Any]) -> Floats:
    """Start, end and duration of every row in ns."""
    start = columns["start_ts"].astype(np.float32)
    duration = columns["duration"].astype(np.float32)
    # The study's own arithmetic: an end is rounded to a float32 before all else.
    return np.array([start, start + duration, duration]).astype(np.float64) * _NS


def _op(columns: Mapping[str, Any], times: Floats, optype: str, row: int) -> Op:
    """The operation of one row."""
    chunk, whole = (int(columns[name][row]) if name in columns else -1 for name in _CHUNKS)
    return Op(
        optype=optype,
        seq=int(columns["seq_id"][row]),
        stage=int(columns["stage"][row]),
        start=float(times[0, row]),
        end=float(times[1, row]),
        mc=chunk,
        gmc=whole,
    )


def _known_types(types: Sequence[str], place: str) -> None:
    """Refuse point-to-point operations that the graph has no rule for."""
    for name in types:
        if len(name) > _LONGEST:
            raise FastcommError(
                f"{place}: an optype of {len(name)} letters, wanted at most {_LONGEST}"
            )
        if name.endswith(("-send", "-recv")) and name not in POINT_TO_POINT:
            raise FastcommError(f"{place}: optype {name!r}: wanted {', '.join(POINT_TO_POINT)}")


def _template(dp: Ints, at: Ints) -> int:
    """The first step in which data rank 0 has as many operations as it mostly has."""
    own = np.flatnonzero(dp == 0)
    counts = Counter(at[own].tolist())
    if not counts:
        raise FastcommError("no data rank 0 in the table")
    usual = Counter(counts.values()).most_common(1)[0][0]
    return int(min(step for step, count in counts.items() if count == usual))


def _whole(
    op: Ints, known: NDArray[np.bool_], dp: Ints, at: Ints, shape: tuple[int, int, int]
) -> NDArray[np.bool_]:
    """The steps in which every data rank has every operation once, and no other."""
    seen = np.zeros(shape, np.int64)
    np.add.at(seen, (op[known], dp[known], at[known]), 1)
    whole: NDArray[np.bool_] = (seen == 1).all(axis=(0, 1))
    whole[at[~known]] = False
    return whole
