"""The tables of a result as Parquet, in a folder beside the page that links to them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa

from fastcomm import parquet
from fastcomm.report import files
from fastcomm.report.html.words import many


def write(tables: Mapping[str, pa.Table], page: Path) -> list[tuple[str, str]]:
    """Write the tables to `<page>-data`; the names to link to, and what each has."""
    folder = page.with_name(f"{page.stem}-data")
    names = {f"{name}.parquet": table for name, table in tables.items()}
    files.write(folder, {name: partial(parquet.write, table) for name, table in names.items()})
    return [
        (f"{folder.name}/{name}", many(table.num_rows, "row")) for name, table in names.items()
    ]
