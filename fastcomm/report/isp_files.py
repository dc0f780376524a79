"""A search in files: one JSON object, and every strategy as CSV and Parquet."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from fastcomm.errors import FastcommError
from fastcomm.isp.result import Found
from fastcomm.isp.sweep import Sweep


def write(found: Found, folder: str | Path, top: int) -> list[Path]:
    """Write isp.json, strategies.csv and strategies.parquet; give their paths."""
    text = json.dumps(found.to_dict(top), indent=2, allow_nan=False)
    return _write(Path(folder), "strategies", found.to_arrow(), text)


def write_sweep(found: Sweep, folder: str | Path) -> list[Path]:
    """Write sweep.csv and sweep.parquet; give their paths."""
    return _write(Path(folder), "sweep", found.to_arrow(), None)


def _write(folder: Path, name: str, table: pa.Table, text: str | None) -> list[Path]:
    plain = table
    if pa.types.is_dictionary(table.schema.field("algo_type").type):
        words = table["algo_type"].cast(pa.string())
        plain = table.set_column(table.schema.get_field_index("algo_type"), "algo_type", words)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [
            _aside(folder / f"{name}.parquet", lambda path: pq.write_table(table, path)),
            _aside(folder / f"{name}.csv", lambda path: pa_csv.write_csv(plain, path)),
        ]
        if text is not None:
            written.append(_aside(folder / "isp.json", lambda path: path.write_text(text)))
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
    return written


def _aside(path: Path, write_to: Callable[[Path], object]) -> Path:
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        write_to(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
