"""Read measured links and kernels, and fit a cluster's links, GEMMs and attention to them.

Times are in seconds, sizes in bytes, work in FLOPs. A `Line` is the start-up time of a message
and the bandwidth after it, in seconds and bytes per second.
"""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastcomm import files
from fastcomm.errors import ConfigError
from fastcomm.hardware.clusters import Cluster
from fastcomm.hardware.gpus import (
    AttentionCurve,
    FloatArray,
    GemmCurve,
    GemmTable,
    LinkFit,
    bus_factor,
)

_OPS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "all2all": "all_to_all",
    "sendrecv": "p2p",
}
_ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+[a-z]\w*\s")
# Columns of a row: size, count and type, then four numbers per placement.
_COLUMNS = 10
_LARGEST = 1 << 26  # bytes of a log or a table
_RANK = re.compile(r"#\s+Rank\s+\d+", re.IGNORECASE)
# (batch, sequence length, local hidden size) -> (seconds forward, seconds backward)
AttentionTable = dict[tuple[int, int, int], tuple[float, float]]
_GEMM = ("key_bytesxmacs", "lat_s")
_ATTENTION = ("b", "s", "h_local", "is_fwd", "lat_s")
FittedLine = tuple[float, float]
_ROUNDS = 30  # of reweighting
_FLOOR = 0.02  # relative error below which a point's weight no longer grows
_GAIN = 0.8  # two lines are used if they reduce the error of one line by this factor
_SIDE = 3  # sizes on each side of the change between two lines
_FAST = 0.1  # quantile of times that include waiting for other ranks
_SPAN = 4  # ratio of the largest to the smallest size, to fit a start and a bandwidth
# Names of fields in JSON, where they differ.
_NAMES = {"alpha": "start_ns", "bus": "bus_bytes_per_s", "kind": "what", "rate": "flops_per_s"}
_ATTENTION_PASSES = ("attention forward", "attention backward")


class TimedMessage(NamedTuple):
    """Volume in bytes and duration of a collective or a point-to-point message."""

    op: str
    ranks: int
    volume: float
    seconds: float


def operation(name: str) -> str | None:
    """Return "all_gather" for "AllGather", "all_gather_perf" and similar; None if unknown."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((op for text, op in _OPS.items() if text in plain), None)


def read_measurements(path: Path) -> list[TimedMessage]:
    """Read timed messages from a file, or from a folder of `fastcomm metrics --output`.

    Parameters
    ----------
    path
        Output of nccl-tests, a CSV file with the columns op, ngpu, bytes and lat_s, or
        events.parquet of `fastcomm metrics`.

    Raises
    ------
    ConfigError
        If the file cannot be read, or has no timed message.

    """
    path = path / "events.parquet" if path.is_dir() else path
    if path.suffix == ".parquet":
        return _events(path)
    text = files.text(path, most=_LARGEST)
    messages = _nccl_tests(text, path) if "#" in text else _table(text, path)
    if not messages:
        raise ConfigError(
            f"{path}: no timed message; expected output of nccl-tests, a CSV with op, ngpu, "
            "bytes and lat_s, or events.parquet of `fastcomm metrics --output`"
        )
    return messages


def _nccl_tests(text: str, path: Path) -> list[TimedMessage]:
    """Return the out-of-place times of every test in a text."""
    op = operation(path.name)
    ranks = 0
    messages = []
    previous = ""
    for line in text.splitlines():
        if line.startswith("#"):
            op = (operation(line) if "_perf" in line else None) or op
            # A new list of ranks begins a new test.
            ranks = ranks + 1 if _RANK.match(previous) else ranks
            if _RANK.match(line) and not _RANK.match(previous):
                ranks = 0
            previous = line
            continue
        ranks += int(bool(_RANK.match(previous)))
        previous = ""
        columns = line.split()
        if not _ROW.match(line) or len(columns) < _COLUMNS:
            continue
        if op is None or ranks < 1:
            missing = "operation (name the file after it)" if op is None else "list of ranks"
            raise ConfigError(f"{path}: no {missing} before the first row of nccl-tests")
        try:
            volume, microseconds = float(columns[0]), float(columns[-8])
        except ValueError as error:
            raise ConfigError(f"{path}: {line.strip()[:80]!r}: {error}") from error
        if volume and microseconds:
            messages.append(TimedMessage(op, ranks, volume, microseconds * 1e-6))
    return messages


def _table(text: str, path: Path) -> list[TimedMessage]:
    """Return the timed collectives of a CSV text."""
    messages = []
    for line, row in enumerate(csv.DictReader(text.splitlines()), 2):
        try:
            op = operation(row["op"])
            ranks, volume, seconds = (float(row[name]) for name in ("ngpu", "bytes", "lat_s"))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {line}: {type(error).__name__} {error}; expected the columns "
                "op, ngpu, bytes, lat_s"
            ) from error
        if op and ranks > 1 and volume > 0 and seconds > 0:
            messages.append(TimedMessage(op, int(ranks), volume, seconds))
    return messages


def _events(path: Path) -> list[TimedMessage]:
    """Return the timed collectives of events.parquet."""
    import pyarrow as pa

    from fastcomm import arrow_files  # slow to import, rarely needed

    columns = ["op", "group_size", "bytes", "duration_ns"]
    try:
        rows = arrow_files.read(path, columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return messages_of_events(
        (str(row["op"]), row["group_size"], row["bytes"], row["duration_ns"]) for row in rows
    )


def messages_of_events(
    rows: Iterable[tuple[str, int | None, int | None, int | None]],
) -> list[TimedMessage]:
    """Return the timed messages among rows of operation, group size, bytes and nanoseconds.

    Rows with an unknown operation, a missing value, one rank or no duration are left out.
    """
    messages = []
    for name, ranks, volume, duration in rows:
        op = operation(name)
        if op and ranks and ranks > 1 and volume and duration and duration > 0:
            messages.append(TimedMessage(op, int(ranks), float(volume), duration * 1e-9))
    return messages


class ComputeTables(NamedTuple):
    """Measured times of matrix products and of attention."""

    gemm: GemmTable
    attention: AttentionTable


def read_tables(folder: Path, gpu: str) -> ComputeTables:
    """Read `linear_<gpu>.csv` and `fa_<gpu>.csv` of a folder.

    Raises
    ------
    ConfigError
        If a file cannot be read, has no rows, or lacks a column.

    """
    return ComputeTables(
        read_gemm(folder / f"linear_{gpu}.csv"), read_attention(folder / f"fa_{gpu}.csv")
    )


def read_gemm(path: Path) -> GemmTable:
    """Read times of matrix products by FLOPs from CSV; raise ConfigError if it is invalid."""
    rows = _rows(path, _GEMM)
    points = sorted((float(row["key_bytesxmacs"]), float(row["lat_s"])) for row in rows)
    return GemmTable(
        flops=tuple(flops for flops, _ in points), times=tuple(time for _, time in points)
    )


def read_attention(path: Path) -> AttentionTable:
    """Read measured times of attention from a CSV file.

    Its columns are b (batch size), s (sequence length in tokens), h_local (local hidden size),
    is_fwd ("True" is the forward pass, anything else the backward pass) and lat_s (seconds).
    Returns, by (b, s, h_local), the seconds of the forward and the backward pass; shapes
    without both are left out. Raises `ConfigError` if the file is invalid.
    """
    ways: dict[bool, dict[tuple[int, int, int], float]] = {True: {}, False: {}}
    for row in _rows(path, _ATTENTION):
        key = (int(row["b"]), int(row["s"]), int(row["h_local"]))
        ways[row["is_fwd"] == "True"][key] = float(row["lat_s"])
    forward, backward = ways[True], ways[False]
    return {key: (forward[key], backward[key]) for key in forward.keys() & backward.keys()}


def _rows(path: Path, required: tuple[str, ...]) -> list[dict[str, str]]:
    """Read the rows of a CSV file whose required columns are positive numbers or is_fwd."""
    try:
        reader = csv.DictReader(io.StringIO(files.text(path, most=_LARGEST), newline=""))
        rows = list(reader)
    except csv.Error as error:
        raise ConfigError(f"{path}: {error}") from error
    if missing := [name for name in required if name not in (reader.fieldnames or ())]:
        raise ConfigError(
            f"{path}: missing column {', '.join(missing)}; expected {', '.join(required)}"
        )
    for line, row in enumerate(rows, 2):
        try:
            numbers = [float(row[name]) for name in required if name != "is_fwd"]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {line}: {error}") from error
        if not all(0 < number < float("inf") for number in numbers):
            raise ConfigError(f"{path}, line {line}: expected numbers above 0, not {numbers}")
    if not rows:
        raise ConfigError(f"{path}: no rows")
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Line fitted to one operation in one group size, and its relative errors."""

    op: str
    ranks: int
    messages: int
    sizes: int
    alpha: float  # start-up time in seconds
    bus: float  # bus bandwidth in bytes per second
    median_error: float
    worst_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeResidual:
    """Curve fitted to kernels of one kind and size, and its relative errors."""

    kind: str  # "GEMM" or "attention forward" or "attention backward"
    calls: int
    flops: float  # median of the calls
    rate: float  # measured FLOPs per second
    efficiency: float  # `rate` over the rate of the curve before the fit
    median_error: float
    worst_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fitted cluster, the errors of its lines and curves, and what was not fitted."""

    cluster: Cluster
    residuals: tuple[Residual, ...] = ()
    compute: tuple[ComputeResidual, ...] = ()
    skipped: tuple[str, ...] = ()  # one sentence for each thing that was not fitted

    def to_dict(self) -> dict[str, Any]:
        """Return the residuals as they stand in JSON, times in nanoseconds."""
        lines = [replace(line, alpha=line.alpha * 1e9) for line in self.residuals]
        return {
            "calibration": [_named(line) for line in lines],
            "calibration_compute": [_named(curve) for curve in self.compute],
        }


def _named(residual: Residual | ComputeResidual) -> dict[str, Any]:
    return {_NAMES.get(name, name): value for name, value in asdict(residual).items()}


def calibrate(
    cluster: Cluster, messages: list[TimedMessage], *, waits: bool = False
) -> Calibration:
    """Fit start-up time and bandwidth of every operation and group size.

    Parameters
    ----------
    cluster
        Its usual start-up times are used where a single size was measured.
    messages
        Point-to-point messages are ignored.
    waits
        Whether times include waiting for other ranks, as in a trace. Then the fastest tenth of
        messages of equal size is used, otherwise their median.

    Returns
    -------
    Calibration
        The cluster with the fitted lines, and the errors of each line.

    Raises
    ------
    ConfigError
        If no message is a collective.

    """
    grouped: dict[tuple[str, int], list[TimedMessage]] = defaultdict(list)
    for message in messages:
        if message.op != "p2p":
            grouped[message.op, message.ranks].append(message)
    if not grouped:
        raise ConfigError(
            "calibration: no collective has a size, a group and a duration, which a fit of "
            "links needs"
        )
    fits: dict[str, list[LinkFit]] = defaultdict(list)
    residuals, skipped = [], []
    for (op, ranks), group in sorted(grouped.items()):
        moved, time = _by_size(group, waits)
        moved = moved * bus_factor(op, ranks)
        start = _usual_start(cluster, ranks)
        if len(time) == 1 and time[0] < 2 * start:
            duration = f"whose {time[0] * 1e6:.0f} us are mostly start-up time"
            skipped.append(f"{op} on {ranks} ranks: a single size, {duration}")
            continue
        lines = _fit_lines(moved, time, start)
        fits[op].append(_fit(ranks, *lines))
        residuals.append(_residual(op, ranks, len(group), lines, (moved, time)))
    measured = replace(cluster, fits={op: tuple(lines) for op, lines in fits.items()})
    return Calibration(cluster=measured, residuals=tuple(residuals), skipped=tuple(skipped))


def _fit(ranks: int, small: FittedLine, large: FittedLine) -> LinkFit:
    return LinkFit(
        ranks=ranks, alpha=large[0], bus=large[1], small_alpha=small[0], small_bus=small[1]
    )


def _residual(
    op: str,
    ranks: int,
    messages: int,
    lines: tuple[FittedLine, FittedLine],
    measured: tuple[FloatArray, FloatArray],
) -> Residual:
    """Return the relative errors of fitted lines; `measured` has bus bytes and seconds."""
    moved, time = measured
    errors = np.abs(_faster_line(*lines, moved) / time - 1)
    return Residual(
        op=op,
        ranks=ranks,
        messages=messages,
        sizes=len(time),
        alpha=lines[1][0],
        bus=lines[1][1],
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
    )


def _usual_start(cluster: Cluster, ranks: int) -> float:
    """Return the cluster's start-up time in a group of consecutive ranks."""
    return cluster.alpha_intra if ranks <= cluster.gpus_per_node else cluster.alpha_inter


def _by_size(group: list[TimedMessage], waits: bool) -> tuple[FloatArray, FloatArray]:
    """Return the volumes in bytes, and the median time of each; a low quantile if `waits`."""
    sizes: dict[float, list[float]] = defaultdict(list)
    for message in group:
        sizes[message.volume].append(message.seconds)
    volumes = sorted(sizes)
    share = _FAST if waits else 0.5
    if volumes[-1] < _SPAN * volumes[0]:
        # Sizes so close determine one number, not a start and a bandwidth.
        times = [message.seconds for message in group]
        return np.array([np.median(volumes)]), np.array([np.quantile(times, share)])
    return np.array(volumes), np.array([np.quantile(sizes[v], share) for v in volumes])


def _fit_lines(
    moved: FloatArray, time: FloatArray, start: float
) -> tuple[FittedLine, FittedLine]:
    """Fit a line to small messages and one to large; equal if two explain little more.

    `moved` is bus bytes, `time` seconds, and `start` the usual start-up time.
    """
    single = _fit_line(moved, time, start)
    best, pair = _GAIN * _misfit(_faster_line(single, single, moved), time), (single, single)
    for cut in range(_SIDE, len(time) - _SIDE + 1):
        small = _fit_line(moved[:cut], time[:cut], start)
        large = _fit_line(moved[cut:], time[cut:], start)
        misfit = _misfit(_faster_line(small, large, moved), time)
        if small[0] <= large[0] and small[1] <= large[1] and misfit < best:
            best, pair = misfit, (small, large)
    return pair


def _faster_line(small: FittedLine, large: FittedLine, moved: FloatArray) -> FloatArray:
    """Return the smaller of the times of two fits, in seconds.

    A fit is a pair: start-up time in seconds, and bandwidth in bytes per second. `moved` are
    the bus bytes of each message.
    """
    return np.minimum(small[0] + moved / small[1], large[0] + moved / large[1])


def _misfit(predicted: FloatArray, time: FloatArray) -> float:
    """Return the mean relative error of predicted times, as a share of the measured ones."""
    return float(np.abs(predicted / time - 1).mean())


def _fit_line(moved: FloatArray, time: FloatArray, usual_start: float) -> FittedLine:
    """Fit start and bandwidth with the least absolute relative errors."""
    if len(time) == 1:
        # One size determines the bandwidth alone: take the usual start, at most half the time.
        start = min(usual_start, 0.5 * float(time[0]))
        return start, float(moved[0] / (time[0] - start))
    weight = 1 / time
    for _ in range(_ROUNDS):
        system = np.stack([weight, moved * weight], axis=1)
        (start, slope), *_ = np.linalg.lstsq(system, time * weight, rcond=None)
        if start < 0 or slope <= 0:
            start, slope = 0.0, float(np.median(time / moved))
        error = np.abs((start + slope * moved) / time - 1)
        weight = 1 / time / np.sqrt(np.maximum(error, _FLOOR))
    return float(start), float(1 / slope)


class TimedGemm(NamedTuple):
    """FLOPs and duration of a matrix product."""

    flops: float
    seconds: float


class TimedAttention(NamedTuple):
    """Shape and duration of a causal attention call of one rank."""

    backward: bool
    bsz: int
    seq_len: int
    hidden: int  # elements of all heads of the rank
    seconds: float


def fit_gemm(cluster: Cluster, calls: list[TimedGemm]) -> tuple[Cluster, list[ComputeResidual]]:
    """Fit the GEMM curve to the median rate of each octave of FLOPs.

    Outside the measured sizes the curve keeps its shape, scaled by the nearest octave.

    Returns
    -------
    cluster : Cluster
        With the fitted curve; unchanged without calls, or if its curve is a measured table.
    residuals : list of ComputeResidual
        One for each octave.

    """
    curve = cluster.gemm
    if not calls or not isinstance(curve, GemmCurve):
        return cluster, []
    flops, seconds = (np.array(column) for column in zip(*calls, strict=True))
    octave = np.floor(np.log2(flops))
    groups = [octave == value for value in np.unique(octave)]
    middle = np.array([np.median(flops[group]) for group in groups])
    rate = np.array([np.median(flops[group] / seconds[group]) for group in groups])
    ratio = rate * curve.seconds(middle) / middle
    fitted = _curve_through(curve, middle, rate, ratio)
    residuals = [
        ComputeResidual(
            kind="GEMM",
            calls=int(group.sum()),
            flops=float(middle[place]),
            rate=float(rate[place]),
            efficiency=float(ratio[place]),
            **_relative_errors(fitted.seconds(flops[group]), seconds[group]),
        )
        for place, group in enumerate(groups)
    ]
    return replace(cluster, gemm=fitted), residuals


def _curve_through(
    curve: GemmCurve, flops: FloatArray, rate: FloatArray, ratio: FloatArray
) -> GemmCurve:
    """Replace the curve inside the measured FLOPs; scale it by the nearest `ratio` outside."""
    knots = dict(zip(flops.tolist(), rate.tolist(), strict=True))
    for knot, knot_rate in zip(curve.flops, curve.rates, strict=True):
        if not flops[0] <= knot <= flops[-1]:
            knots[knot] = knot_rate * float(ratio[0] if knot < flops[0] else ratio[-1])
    places, rates = sorted(knots), []
    slowest = np.inf
    for place in reversed(places):
        # Smaller work must not take longer than larger work.
        slowest = min(slowest, place / knots[place])
        rates.append(place / slowest)
    return GemmCurve(flops=tuple(places), rates=tuple(reversed(rates)))


def fit_attention(
    cluster: Cluster, calls: list[TimedAttention]
) -> tuple[Cluster, list[ComputeResidual]]:
    """Scale the slopes of the attention curve by the median call, forward and backward apart.

    Returns
    -------
    cluster : Cluster
        With the scaled curve; a pass without calls keeps its curve.
    residuals : list of ComputeResidual
        One for each pass with calls.

    """
    curve, residuals = cluster.attention, []
    for way, kind in enumerate(_ATTENTION_PASSES):
        pass_calls = [call for call in calls if call.backward == bool(way)]
        if not pass_calls:
            continue
        seconds = np.array([call.seconds for call in pass_calls])
        before = _predicted(curve, pass_calls, way)
        start = curve.start[way]
        slower = float(np.median(np.maximum(seconds - start, 0.1 * seconds) / (before - start)))
        curve = _scaled(curve, way, slower)
        factor = 5 if way else 2
        flops = np.array([factor * c.bsz * c.seq_len**2 * float(c.hidden) for c in pass_calls])
        residuals.append(
            ComputeResidual(
                kind=kind,
                calls=len(pass_calls),
                flops=float(np.median(flops)),
                rate=float(np.median(flops / seconds)),
                efficiency=1 / slower,
                **_relative_errors(_predicted(curve, pass_calls, way), seconds),
            )
        )
    return replace(cluster, attention=curve), residuals


def _predicted(curve: AttentionCurve, calls: list[TimedAttention], way: int) -> FloatArray:
    """Return the seconds of attention calls by a curve; `way` 0 is forward, 1 backward."""
    seconds = curve.backward if way else curve.forward
    return np.array([float(seconds(call.bsz, call.seq_len, call.hidden)) for call in calls])


def _scaled(curve: AttentionCurve, way: int, slower: float) -> AttentionCurve:
    """Return the curve with one pass (0 forward, 1 backward) `slower` times as long."""
    element, rate = list(curve.element), list(curve.rate)
    element[way] *= slower
    rate[way] /= slower
    return replace(curve, element=(element[0], element[1]), rate=(rate[0], rate[1]))


def _relative_errors(fitted: FloatArray, seconds: FloatArray) -> dict[str, float]:
    errors = np.abs(fitted / seconds - 1)
    return {"median_error": float(np.median(errors)), "worst_error": float(errors.max())}
