"""Writing reports as nsys exports them: one SQLite file, or a directory with a file a table."""

import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fastcomm.aside import check_replaceable
from fastcomm.errors import FastcommError
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.report import report
from fastcomm.synthetic.nsys.tables import Column, Row, Tables, columns, create
from fastcomm.synthetic.nsys.variant import Kind, NsysVariant

_ENDINGS = {"sqlite": ".sqlite", "parquetdir": "_pqtdir", "arrowdir": "_arwdir"}


def write_nsys(
    job: Job,
    directory: Path,
    *,
    ranks: Iterable[int] | None = None,
    kind: Kind = "sqlite",
    per_report: int = 1,
    variant: NsysVariant | None = None,
) -> list[Path]:
    """Write the reports of all ranks, or of some; `per_report` neighbours share one."""
    directory.mkdir(parents=True, exist_ok=True)
    chosen = list(range(job.ranks)) if ranks is None else sorted(ranks)
    found = []
    for number, first in enumerate(range(0, len(chosen), per_report)):
        members = chosen[first : first + per_report]
        tables = report(job, members, number, variant or NsysVariant(), kind)
        path = directory / f"nsys_{members[0]}{_ENDINGS[kind]}"
        _write(tables, path, kind)
        found.append(path)
    return found


def _write(tables: Tables, path: Path, kind: Kind) -> None:
    """Aside, and renamed when whole."""
    check_replaceable(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    _remove(unfinished)
    try:
        if kind == "sqlite":
            _write_sqlite(tables, unfinished)
        else:
            _write_directory(tables, unfinished, kind)
        _remove(path)
        unfinished.rename(path)
    except (OSError, sqlite3.Error) as error:
        raise FastcommError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        _remove(unfinished)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_sqlite(tables: Tables, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN")
        for table, rows in tables.rows.items():
            present = columns(table)
            database.execute(create(table))
            marks = ", ".join("?" * len(present))
            database.executemany(
                f'INSERT INTO "{table}" VALUES ({marks})',
                ([row.get(column.name) for column in present] for row in rows),
            )
        database.execute("COMMIT")


def _write_directory(tables: Tables, folder: Path, kind: Kind) -> None:
    folder.mkdir()
    for name, rows in tables.rows.items():
        table = _table(name, rows)
        if kind == "arrowdir":
            with pa.ipc.new_stream(folder / f"{name}.arrow", table.schema) as stream:
                stream.write_table(table)
            continue
        # The format of Parquet 1 has no uint32: those columns become int64, as in real files.
        pq.write_table(
            table,
            folder / f"{name}.parquet",
            version="1.0",
            compression="NONE",
            store_schema=False,
            row_group_size=max(1, len(rows)),
        )


def _table(name: str, rows: list[Row]) -> pa.Table:
    present = columns(name)
    schema = pa.schema([column.arrow for column in present], metadata={"table_name": name})
    return pa.table([_array(column, rows) for column in present], schema=schema)


def _array(column: Column, rows: list[Row]) -> pa.Array:
    values = [row.get(column.name) for row in rows]
    if column.kind != "b":
        return pa.array(values, type=column.arrow.type)
    # Bytes under the name of text, as nsys writes them: no decoder has seen these.
    packed = pa.array(values, type=pa.binary())
    return pa.Array.from_buffers(pa.string(), len(packed), packed.buffers(), packed.null_count)
