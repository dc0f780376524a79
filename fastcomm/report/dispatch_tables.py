"""A result of `fastcomm dispatch` in files: JSON, and its rows as CSV and Parquet."""

import json
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from fastcomm.report import csv, files


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
    writers: dict[str, files.Writer] = {
        "dispatch.json": files.text(text),
        "dispatch.csv": partial(csv.write, table),
        "dispatch.parquet": partial(pq.write_table, table),
    }
    return files.write(folder, writers)
