"""Read measured links and kernels: output of nccl-tests, tables of messages or kernels."""

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fastcomm import files
from fastcomm.errors import ConfigError
from fastcomm.hardware.curves import GemmTable

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


# (batch, sequence length, local hidden size) -> (seconds forward, seconds backward)
AttentionTable = dict[tuple[int, int, int], tuple[float, float]]

_GEMM = ("key_bytesxmacs", "lat_s")
_ATTENTION = ("b", "s", "h_local", "is_fwd", "lat_s")


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
