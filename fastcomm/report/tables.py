"""The metrics in files: one JSON object, and every table as CSV and Parquet."""

from pathlib import Path

from fastcomm.metrics.result import Metrics
from fastcomm.report import files, json_text


def write(found: Metrics, folder: str | Path, *, xlsx: bool = False) -> list[Path]:
    """Write metrics.json and a CSV and a Parquet file a table; give their paths."""
    text = json_text.text(found.to_dict())
    book = "metrics" if xlsx else None
    return files.write_tables(folder, {"metrics.json": text}, found.to_arrow(), book)
