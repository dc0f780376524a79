"""A result in files: one JSON object, and every table as CSV and Parquet."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from fastcomm.errors import FastcommError
from fastcomm.metrics.result import Metrics


def write(found: Metrics, folder: str | Path) -> list[Path]:
    """Write metrics.json and a CSV and a Parquet file a table; give their paths.

    Each file is written aside and renamed when it is whole.
    """
    folder = Path(folder)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found.to_dict(), indent=2, allow_nan=False)
        written.append(_aside(folder / "metrics.json", lambda path: path.write_text(text)))
        for name, table in found.to_arrow().items():
            writers = {
                "parquet": (pq.write_table, table),
                "csv": (pa_csv.write_csv, _plain(table)),
            }
            for suffix, (writer, content) in writers.items():
                written.append(_aside(folder / f"{name}.{suffix}", partial(writer, content)))
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
    return written


def _aside(path: Path, write_to: Callable[[Path], object]) -> Path:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_to(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def _plain(table: pa.Table) -> pa.Table:
    """The table as CSV can hold it: lists and dictionaries become text."""
    for place, column in enumerate(table.schema):
        if pa.types.is_list(column.type):
            words = [
                None if value is None else " ".join(map(str, value))
                for value in table[column.name].to_pylist()
            ]
            table = table.set_column(place, column.name, pa.array(words, pa.string()))
        elif pa.types.is_dictionary(column.type):
            table = table.set_column(place, column.name, table[column.name].cast(pa.string()))
    return table
