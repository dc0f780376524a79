"""A result in files: one JSON object, and every table as CSV and Parquet."""

import json
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from fastcomm.metrics.result import Metrics
from fastcomm.report import files


def write(found: Metrics, folder: str | Path) -> list[Path]:
    """Write metrics.json and a CSV and a Parquet file a table; give their paths.

    Each file is written aside and renamed when it is whole.
    """
    text = json.dumps(found.to_dict(), indent=2, allow_nan=False)
    writers = {"metrics.json": files.text(text)}
    for name, table in found.to_arrow().items():
        writers[f"{name}.parquet"] = partial(pq.write_table, table)
        writers[f"{name}.csv"] = partial(pa_csv.write_csv, _plain(table))
    return files.write(folder, writers)


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
