"""A search in files: one JSON object, and every strategy as CSV and Parquet."""

import json
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fastcomm.isp.result import Found
from fastcomm.isp.sweep import Sweep
from fastcomm.report import csv, files


def write(found: Found, folder: str | Path, top: int) -> list[Path]:
    """Write isp.json, strategies.csv and strategies.parquet; give their paths."""
    text = json.dumps(found.to_dict(top), indent=2, allow_nan=False)
    return _write(Path(folder), "strategies", found.to_arrow(), text)


def write_sweep(found: Sweep, folder: str | Path) -> list[Path]:
    """Write sweep.csv and sweep.parquet; give their paths."""
    return _write(Path(folder), "sweep", found.to_arrow(), None)


def _write(folder: Path, name: str, table: pa.Table, text: str | None) -> list[Path]:
    writers: dict[str, files.Writer] = {
        f"{name}.parquet": partial(pq.write_table, table),
        f"{name}.csv": partial(csv.write, table),
    }
    if text is not None:
        writers["isp.json"] = files.text(text)
    return files.write(folder, writers)
