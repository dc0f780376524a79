"""A result of `fastcomm dispatch` in files: JSON, and its rows as CSV and Parquet."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from fastcomm.errors import FastcommError
from fastcomm.store.aside import aside


class Result(Protocol):
    """What has one JSON object, and one table."""

    def to_dict(self) -> dict[str, Any]:
        """The whole of it."""

    def rows(self) -> list[dict[str, Any]]:
        """The rows of its table."""


def write(found: Result, folder: Path) -> list[Path]:
    """Write dispatch.json, dispatch.csv and dispatch.parquet; give their paths."""
    table = pa.Table.from_pylist(found.rows())
    text = json.dumps(found.to_dict(), indent=2, allow_nan=False)
    writers: dict[str, Callable[[Path], object]] = {
        "json": lambda path: path.write_text(text, "utf-8"),
        "csv": lambda path: pa_csv.write_csv(table, path),
        "parquet": lambda path: pq.write_table(table, path),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_written(folder / f"dispatch.{kind}", each) for kind, each in writers.items()]
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error


def _written(path: Path, writer: Callable[[Path], object]) -> Path:
    with aside(path) as unfinished:
        writer(unfinished)
    return path
