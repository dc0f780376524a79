"""Measured links and kernels in files: nccl-tests' output, tables of messages or kernels."""

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fastcomm import files
from fastcomm.errors import ConfigError
from fastcomm.hardware import GemmTable

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
_LARGEST = 1 << 26  # bytes of a log or a table
_RANK = re.compile(r"#\s+Rank\s+\d+", re.IGNORECASE)


class TimedMessage(NamedTuple):
    """A timed operation: bytes of its volume, and seconds."""

    op: str
    ranks: int
    volume: float
    seconds: float


def op_of(name: str) -> str | None:
    """Return "all_gather" for "AllGather", "all_gather_perf" and the like; None if unknown."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((ours for word, ours in _OPS.items() if word in plain), None)


def read_measurements(path: Path) -> list[TimedMessage]:
    """Read the timed messages of a file, or of what `fastcomm metrics --output` wrote."""
    path = path / "events.parquet" if path.is_dir() else path
    if path.suffix == ".parquet":
        return _events(path)
    text = files.text(path, most=_LARGEST)
    found = _nccl_tests(text, path) if "#" in text else _table(text, path)
    if not found:
        raise ConfigError(
            f"{path}: no timed message; wanted nccl-tests' output, or a CSV with op, ngpu, "
            "bytes and lat_s, or events.parquet of `fastcomm metrics --output`"
        )
    return found


def _nccl_tests(text: str, path: Path) -> list[TimedMessage]:
    """Return the out-of-place times of each test in a text."""
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

    from fastcomm import arrow_files  # Arrow takes long to load, and few need it

    columns = ["op", "group_size", "bytes", "duration_ns"]
    try:
        rows = arrow_files.read(path, columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return of_events(
        (str(row["op"]), row["group_size"], row["bytes"], row["duration_ns"]) for row in rows
    )


def of_events(
    rows: Iterable[tuple[str, int | None, int | None, int | None]],
) -> list[TimedMessage]:
    """Return complete rows of operation, group size, bytes and ns as timed messages."""
    found = []
    for name, ranks, volume, duration in rows:
        op = op_of(name)
        if op and ranks and ranks > 1 and volume and duration and duration > 0:
            found.append(TimedMessage(op, int(ranks), float(volume), duration * 1e-9))
    return found


# Batch, sequence length, local hidden size -> seconds forward, seconds backward.
AttentionTable = dict[tuple[int, int, int], tuple[float, float]]

_GEMM = ("key_bytesxmacs", "lat_s")
_ATTENTION = ("b", "s", "h_local", "is_fwd", "lat_s")


class ComputeTables(NamedTuple):
    """Measured times of products and of attention."""

    gemm: GemmTable
    attention: AttentionTable


def read_tables(folder: Path, gpu: str) -> ComputeTables:
    """Return the tables `linear_<gpu>.csv` and `fa_<gpu>.csv` of a folder."""
    return ComputeTables(
        read_gemm(folder / f"linear_{gpu}.csv"), read_attention(folder / f"fa_{gpu}.csv")
    )


def read_gemm(path: Path) -> GemmTable:
    """Return the times of products by their FLOPs."""
    rows = _rows(path, _GEMM)
    points = sorted((float(row["key_bytesxmacs"]), float(row["lat_s"])) for row in rows)
    return GemmTable(
        flops=tuple(flops for flops, _ in points), times=tuple(time for _, time in points)
    )


def read_attention(path: Path) -> AttentionTable:
    """Return the times of calls that were measured both ways."""
    ways: dict[bool, dict[tuple[int, int, int], float]] = {True: {}, False: {}}
    for row in _rows(path, _ATTENTION):
        key = (int(row["b"]), int(row["s"]), int(row["h_local"]))
        ways[row["is_fwd"] == "True"][key] = float(row["lat_s"])
    forward, backward = ways[True], ways[False]
    return {key: (forward[key], backward[key]) for key in forward.keys() & backward.keys()}


def _rows(path: Path, wanted: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        reader = csv.DictReader(io.StringIO(files.text(path, most=_LARGEST), newline=""))
        rows = list(reader)
    except csv.Error as error:
        raise ConfigError(f"{path}: {error}") from error
    if missing := [name for name in wanted if name not in (reader.fieldnames or ())]:
        raise ConfigError(f"{path}: no column {', '.join(missing)}; wanted {', '.join(wanted)}")
    for line, row in enumerate(rows, 2):
        try:
            numbers = [float(row[name]) for name in wanted if name != "is_fwd"]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {line}: {error}") from error
        if not all(0 < number < float("inf") for number in numbers):
            raise ConfigError(f"{path}, line {line}: found {numbers}, wanted numbers above 0")
    if not rows:
        raise ConfigError(f"{path}: no rows")
    return rows
