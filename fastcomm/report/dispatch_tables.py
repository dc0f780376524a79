"""A result of `fastcomm dispatch` in files: JSON, and its rows as CSV and Parquet."""

from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from fastcomm.report import files, json_text


class Result(Protocol):
    """What has one JSON object, and one table."""

    def to_dict(self) -> dict[str, Any]:
        """The whole of it."""

    def rows(self) -> list[dict[str, Any]]:
        """The rows of its table."""


def write(found: Result, folder: Path, *, xlsx: bool = False) -> list[Path]:
    """Write dispatch.json, dispatch.csv and dispatch.parquet; give their paths."""
    text = json_text.dumps(found.to_dict())
    tables = {"dispatch": pa.Table.from_pylist(found.rows())}
    book = "dispatch" if xlsx else None
    return files.write_tables(folder, {"dispatch.json": text}, tables, book)
