"""A search in files: one JSON object, and every strategy as CSV and Parquet."""

from pathlib import Path

from fastcomm.isp.result import Found
from fastcomm.isp.sweep import Sweep
from fastcomm.report import files, json_text


def write(found: Found, folder: str | Path, top: int, *, xlsx: bool = False) -> list[Path]:
    """Write isp.json, strategies.csv and strategies.parquet; give their paths."""
    text = json_text.dumps(found.to_dict(top))
    tables = {"strategies": found.to_arrow()}
    return files.write_tables(folder, {"isp.json": text}, tables, "isp" if xlsx else None)


def write_sweep(found: Sweep, folder: str | Path, *, xlsx: bool = False) -> list[Path]:
    """Write sweep.csv and sweep.parquet; give their paths."""
    return files.write_tables(folder, {}, {"sweep": found.to_arrow()}, "isp" if xlsx else None)
