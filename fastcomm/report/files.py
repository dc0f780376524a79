"""A result in files: each is written aside, and gets its name when it is whole."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa

from fastcomm import parquet
from fastcomm.aside import aside, check_replaceable
from fastcomm.errors import FastcommError
from fastcomm.guard import check_no_input
from fastcomm.remote import refuse_output
from fastcomm.report import csv, workbook

Writer = Callable[[Path], object]


def write(folder: str | Path, writers: Mapping[str, Writer]) -> list[Path]:
    """Write files by name into a folder, which is made; FastcommError where that fails."""
    refuse_output("--output", folder)
    folder = Path(folder)
    for name in writers:
        check_replaceable(folder / name)
        check_no_input(folder / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, writer in writers.items():
            with aside(folder / name) as unfinished:
                writer(unfinished)
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
    return [folder / name for name in writers]


def write_tables(
    folder: str | Path,
    texts: Mapping[str, str],
    tables: Mapping[str, pa.Table],
    book: str | None = None,
) -> list[Path]:
    """Write every table as CSV and Parquet, and last the texts; `book` names a workbook.

    A JSON file so says that the tables beside it are whole.
    """
    writers: dict[str, Writer] = {}
    for name, table in tables.items():
        writers[f"{name}.parquet"] = partial(parquet.write, table)
        writers[f"{name}.csv"] = partial(csv.write, table)
    if book is not None:
        writers[f"{book}.xlsx"] = partial(workbook.write, tables)
    writers.update((name, text(content)) for name, content in texts.items())
    return write(folder, writers)


def text(content: str) -> Writer:
    """What writes a text."""
    return partial(Path.write_text, data=content, encoding="utf-8")
