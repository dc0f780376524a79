"""Fit link latency and bandwidth to timed messages: nccl-tests output, tables, or traces."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm import inputs
from fastcomm.errors import ConfigError
from fastcomm.hardware.cluster import Cluster, LinkFit

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
# Size, count and type, then four numbers a placement.
_WORDS = 10
_LARGEST = 1 << 26  # bytes of a log
_RANK = re.compile(r"#\s+Rank\s+\d+", re.IGNORECASE)


class TimedMessage(NamedTuple):
    """One operation as it was timed."""

    op: str
    ranks: int
    volume: float
    seconds: float


def op_of(name: str) -> str | None:
    """Our name of an operation: "AllGather", "all_gather_perf", "all-gather"."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((ours for word, ours in _OPS.items() if word in plain), None)


def read_measurements(path: Path) -> list[TimedMessage]:
    """Timed messages of a file, or of a folder that `fastcomm metrics --output` wrote."""
    path = path / "events.parquet" if path.is_dir() else path
    if path.suffix == ".parquet":
        return _events(path)
    text = inputs.text(path, most=_LARGEST)
    found = nccl_tests(text, path) if "#" in text else _table(text, path)
    if not found:
        raise ConfigError(
            f"{path}: no timed message; wanted nccl-tests' output, or a CSV with op, ngpu, "
            "bytes and lat_s, or events.parquet of `fastcomm metrics --output`"
        )
    return found


def nccl_tests(text: str, path: Path) -> list[TimedMessage]:
    """The out-of-place times of each test that a text holds."""
    op = op_of(path.name)
    ranks = 0
    found = []
    before = ""
    for line in text.splitlines():
        if line.startswith("#"):
            op = (op_of(line) if "_perf" in line else None) or op
            # A new list of ranks begins a new test.
            ranks = ranks + 1 if _RANK.match(before) else ranks
            if _RANK.match(line) and not _RANK.match(before):
                ranks = 0
            before = line
            continue
        ranks += int(bool(_RANK.match(before)))
        before = ""
        words = line.split()
        if not _ROW.match(line) or len(words) < _WORDS:
            continue
        if op is None or ranks < 1:
            missing = "operation (name the file after it)" if op is None else "list of ranks"
            raise ConfigError(f"{path}: a row of nccl-tests, but no {missing} before it")
        try:
            volume, microseconds = float(words[0]), float(words[-8])
        except ValueError as error:
            raise ConfigError(f"{path}: {line.strip()[:80]!r}: {error}") from error
        if volume and microseconds:
            found.append(TimedMessage(op, ranks, volume, microseconds * 1e-6))
    return found


def _table(text: str, path: Path) -> list[TimedMessage]:
    import csv

    found = []
    for line, row in enumerate(csv.DictReader(text.splitlines()), 2):
        try:
            op = op_of(row["op"])
            ranks, volume, seconds = (float(row[name]) for name in ("ngpu", "bytes", "lat_s"))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {line}: {type(error).__name__} {error}; wanted columns op, "
                "ngpu, bytes, lat_s"
            ) from error
        if op and ranks > 1 and volume > 0 and seconds > 0:
            found.append(TimedMessage(op, int(ranks), volume, seconds))
    return found


def _events(path: Path) -> list[TimedMessage]:
    import pyarrow as pa

    from fastcomm import parquet  # Arrow takes long to load, and few need it

    columns = ["op", "group_size", "bytes", "duration_ns"]
    try:
        rows = parquet.read(path, columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return of_events(
        (str(row["op"]), row["group_size"], row["bytes"], row["duration_ns"]) for row in rows
    )


def of_events(
    rows: Iterable[tuple[str, int | None, int | None, int | None]],
) -> list[TimedMessage]:
    """Timed messages of operation, group size, bytes, ns; what lacks one is left out."""
    found = []
    for name, ranks, volume, duration in rows:
        op = op_of(name)
        if op and ranks and ranks > 1 and volume and duration and duration > 0:
            found.append(TimedMessage(op, int(ranks), float(volume), duration * 1e-9))
    return found


Array = NDArray[np.float64]
Line = tuple[float, float]

_ROUNDS = 30
_FLOOR = 0.02
# A second line has to explain this much more, and needs so many sizes on each side.
_GAIN = 0.8
_SIDE = 3
_FAST = 0.1
# Sizes have to be this far apart.
_SPAN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """How well one operation in one group size is described."""

    op: str
    ranks: int
    messages: int
    sizes: int
    alpha: float
    bus: float
    median_error: float
    worst_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A cluster with what was measured, and how far its lines are from the measurements."""

    cluster: Cluster
    residuals: tuple[Residual, ...]
    # What was measured and tells nothing, in words.
    skipped: tuple[str, ...] = ()


def calibrate(
    cluster: Cluster, messages: list[TimedMessage], *, waits: bool = False
) -> Calibration:
    """Fit every operation and group size; `waits` says that times hold waiting, too."""
    grouped: dict[tuple[str, int], list[TimedMessage]] = defaultdict(list)
    for message in messages:
        if message.op != "p2p":
            grouped[message.op, message.ranks].append(message)
    if not grouped:
        raise ConfigError("calibration: no collective with a size, a group and a time")
    fits: dict[str, list[LinkFit]] = defaultdict(list)
    residuals, skipped = [], []
    for (op, ranks), group in sorted(grouped.items()):
        moved, time = _by_size(group, waits)
        moved = moved * bus_factor(op, ranks)
        usual = _usual_start(cluster, ranks)
        if len(time) == 1 and time[0] < 2 * usual:
            spent = f"{time[0] * 1e6:.0f} us"
            skipped.append(f"{op} on {ranks}: one size in {spent}, mostly its start")
            continue
        lines = _lines(moved, time, usual)
        fits[op].append(_fit(ranks, *lines))
        residuals.append(_residual(op, ranks, len(group), lines, (moved, time)))
    measured = replace(cluster, fits={op: tuple(lines) for op, lines in fits.items()})
    return Calibration(cluster=measured, residuals=tuple(residuals), skipped=tuple(skipped))


def _fit(ranks: int, small: Line, large: Line) -> LinkFit:
    return LinkFit(
        ranks=ranks, alpha=large[0], bus=large[1], small_alpha=small[0], small_bus=small[1]
    )


def _residual(
    op: str, ranks: int, messages: int, lines: tuple[Line, Line], measured: tuple[Array, Array]
) -> Residual:
    moved, time = measured
    errors = np.abs(_faster(*lines, moved) / time - 1)
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


def bus_factor(op: str, ranks: int) -> float:
    """Bytes that a rank sends, as a share of the volume."""
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


def _usual_start(cluster: Cluster, ranks: int) -> float:
    return cluster.alpha_intra if ranks <= cluster.gpus_per_node else cluster.alpha_inter


def _by_size(group: list[TimedMessage], waits: bool) -> tuple[Array, Array]:
    sizes: dict[float, list[float]] = defaultdict(list)
    for message in group:
        sizes[message.volume].append(message.seconds)
    volumes = sorted(sizes)
    share = _FAST if waits else 0.5
    if volumes[-1] < _SPAN * volumes[0]:
        # So close to one another they tell one number, not a start and a bandwidth.
        times = [message.seconds for message in group]
        return np.array([np.median(volumes)]), np.array([np.quantile(times, share)])
    return np.array(volumes), np.array([np.quantile(sizes[v], share) for v in volumes])


def _lines(moved: Array, time: Array, usual: float) -> tuple[Line, Line]:
    """The lines of small and large messages; one line twice where a second explains little."""
    whole = _line(moved, time, usual)
    best, pair = _GAIN * _misfit(_faster(whole, whole, moved), time), (whole, whole)
    for cut in range(_SIDE, len(time) - _SIDE + 1):
        small = _line(moved[:cut], time[:cut], usual)
        large = _line(moved[cut:], time[cut:], usual)
        misfit = _misfit(_faster(small, large, moved), time)
        if small[0] <= large[0] and small[1] <= large[1] and misfit < best:
            best, pair = misfit, (small, large)
    return pair


def _faster(small: Line, large: Line, moved: Array) -> Array:
    return np.minimum(small[0] + moved / small[1], large[0] + moved / large[1])


def _misfit(found: Array, time: Array) -> float:
    return float(np.abs(found / time - 1).mean())


def _line(moved: Array, time: Array, usual: float) -> Line:
    """Start and bandwidth with the least relative errors, each counted once, not squared."""
    if len(time) == 1:
        # One size tells one number: the start is the usual one, or all there is.
        start = min(usual, 0.5 * float(time[0]))
        return start, float(moved[0] / (time[0] - start))
    weight = 1 / time
    for _ in range(_ROUNDS):
        system = np.stack([weight, moved * weight], axis=1)
        (start, slope), *_ = np.linalg.lstsq(system, time * weight, rcond=None)
        if start < 0:
            start, slope = 0.0, float(np.median(time / moved))
        if slope <= 0:
            start, slope = 0.0, float(np.median(time / moved))
        error = np.abs((start + slope * moved) / time - 1)
        weight = 1 / time / np.sqrt(np.maximum(error, _FLOOR))
    return float(start), float(1 / slope)
