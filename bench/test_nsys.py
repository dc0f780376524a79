"""Nsight Systems: an SQLite export into columns, and the whole reading of a rank."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest
from builders.big_nsys_report import write_nsys_big

from fastcomm.formats.nsys import schema
from fastcomm.formats.nsys.export import Export
from fastcomm.formats.opening import open_run

KERNELS, FEWER, OF_RANK = 500_000, 50_000, 150_000
COLUMNS = ("start", "end", "deviceId", "streamId", "correlationId", "demangledName")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nsys")


def by_hand(path):
    """What everyone does: all rows as tuples, then an array a column; of a tenth of them."""
    words = ", ".join(f'"{name}"' for name in COLUMNS)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        rows = database.execute(f"SELECT {words} FROM {schema.KERNEL} LIMIT {FEWER}").fetchall()
    return [np.array(column, np.int64) for column in zip(*rows, strict=True)]


def in_columns(path):
    rows = Export(path).rows(schema.KERNEL, COLUMNS)
    return [rows[name] for name in COLUMNS]


def test_sqlite(bar, folder):
    export = write_nsys_big(folder / "nsys_0.sqlite", kernels=KERNELS)
    ours, theirs = in_columns(export), by_hand(export)
    assert all(len(column) == KERNELS for column in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert (one[:FEWER] == other).all()
    bar(
        "sqlite",
        lambda: in_columns(export),
        lambda: by_hand(export),
        count=KERNELS,
        yardstick_count=FEWER,
    )


def test_nsys_rank(bar, folder):
    export = write_nsys_big(folder / "nsys_1.sqlite", kernels=OF_RANK)
    source = open_run(export).sources[0]
    trace = source.read()
    assert trace.comm.num_rows == OF_RANK // 50
    assert trace.comm["payload_bytes"].null_count == 0
    bar(
        "nsys_rank",
        source.read,
        lambda: by_hand(export),
        count=2 * OF_RANK,
        yardstick_count=FEWER,
    )
