"""A result in files: one JSON object, and every table as CSV and Parquet."""

import json
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from fastcomm.metrics.result import Metrics
from fastcomm.report import csv, files


def write(found: Metrics, folder: str | Path) -> list[Path]:
    """Write metrics.json and a CSV and a Parquet file a table; give their paths.

    Each file is written aside and renamed when it is whole.
    """
    text = json.dumps(found.to_dict(), indent=2, allow_nan=False)
    writers = {"metrics.json": files.text(text)}
    for name, table in found.to_arrow().items():
        writers[f"{name}.parquet"] = partial(pq.write_table, table)
        writers[f"{name}.csv"] = partial(csv.write, table)
    return files.write(folder, writers)
