"""Measured compute tables of a user: products of matrices, and FlashAttention calls."""

import csv
import io
from pathlib import Path
from typing import NamedTuple

from fastcomm import inputs
from fastcomm.errors import ConfigError
from fastcomm.hardware.cluster import GemmTable

# Batch, sequence length, local hidden size -> seconds forward, seconds backward.
AttentionTable = dict[tuple[int, int, int], tuple[float, float]]

_LARGEST = 1 << 26  # bytes
_GEMM = ("key_bytesxmacs", "lat_s")
_ATTENTION = ("b", "s", "h_local", "is_fwd", "lat_s")


class ComputeTables(NamedTuple):
    """What was measured of products and of attention."""

    gemm: GemmTable
    attention: AttentionTable


def find(folder: Path, gpu: str) -> ComputeTables:
    """The tables `linear_<gpu>.csv` and `fa_<gpu>.csv` of a folder."""
    return ComputeTables(
        gemm(folder / f"linear_{gpu}.csv"), attention(folder / f"fa_{gpu}.csv")
    )


def gemm(path: Path) -> GemmTable:
    """Times of products by their FLOPs."""
    rows = _rows(path, _GEMM)
    points = sorted((float(row["key_bytesxmacs"]), float(row["lat_s"])) for row in rows)
    return GemmTable(
        flops=tuple(flops for flops, _ in points), times=tuple(time for _, time in points)
    )


def attention(path: Path) -> AttentionTable:
    """Times of calls that were measured both ways."""
    ways: dict[bool, dict[tuple[int, int, int], float]] = {True: {}, False: {}}
    for row in _rows(path, _ATTENTION):
        key = (int(row["b"]), int(row["s"]), int(row["h_local"]))
        ways[row["is_fwd"] == "True"][key] = float(row["lat_s"])
    forward, backward = ways[True], ways[False]
    return {key: (forward[key], backward[key]) for key in forward.keys() & backward.keys()}


def _rows(path: Path, wanted: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        reader = csv.DictReader(io.StringIO(inputs.text(path, most=_LARGEST), newline=""))
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
