"""Test reading Parquet files, and limits from their metadata."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastcomm import arrow_files
from fastcomm.errors import TraceFileError

PATH = Path("t.parquet")
TABLE = pa.table(
    {
        "text": ["a", None, "b\u00e9", "", "a"] * 40,
        "bytes": pa.array([b"\xff", b"", None, b"x", b"\xff"] * 40),
        "number": np.arange(200),
        "word": pa.array(["x", "y", None, "x", "y"] * 40).dictionary_encode(),
        "list": pa.array([[1, 2], [], None, [3], [4, 5, 6]] * 40),
        "fixed": pa.array([b"abc"] * 200, pa.binary(3)),
        "a.b": np.arange(200.0),
    }
)


def written(table, **how):
    pq.write_table(table, buffer := io.BytesIO(), **how)
    buffer.seek(0)
    return buffer


def metadata(table, **how):
    return pq.ParquetFile(written(table, **how)).metadata


@pytest.mark.parametrize("how", [{}, {"use_dictionary": False}, {"row_group_size": 30}])
def test_a_table_is_read_as_it_was_written_with_codes_as_texts(how):
    file = written(TABLE, **how)
    size = len(file.getvalue())
    for columns in (None, ["text", "number"], ["number"], ["bytes", "a.b"]):
        found = arrow_files.read_open(file, size, PATH, columns)
        assert found.to_pylist() == TABLE.select(columns or TABLE.column_names).to_pylist()
        kinds = [
            pa.string() if each == "word" else TABLE[each].type for each in found.column_names
        ]
        assert found.schema.types == kinds
        found.validate(full=True)


def test_texts_that_are_not_utf8_are_an_error_unless_allowed():
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    file = written(pa.table({"text": bad}))
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        arrow_files.read_open(file, 1000, PATH)
    (chunk,) = arrow_files.read_open(file, 1000, PATH, utf8=False)["text"].chunks
    assert arrow_files.as_bytes(chunk).to_pylist() == [b"\xff"]


def test_a_missing_column_is_named():
    with pytest.raises(
        TraceFileError, match=r"t\.parquet: no column x \(columns present: \['text'"
    ):
        arrow_files.read_open(written(TABLE), 1000, PATH, ["x"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fixed", pa.array([b"x" * 4096], pa.binary(4096)).take(pa.array([0] * (1 << 13)))),
        ("number", pa.array(np.zeros(1 << 22, np.int8))),
    ],
)
def test_numbers_that_expand_are_a_bomb_only_if_read(monkeypatch, name, value):
    monkeypatch.setattr(arrow_files.files, "SMALL", 1 << 20)
    found = metadata(pa.table({name: value, "few": pa.nulls(len(value), pa.bool_())}))
    for columns in (None, [name], [name, "few"]):
        with pytest.raises(TraceFileError, match="possibly a decompression bomb"):
            arrow_files.check(found, 100, PATH, columns)
    arrow_files.check(found, 1 << 20, PATH)
    if name != "number":
        arrow_files.check(found, 200 * 1000, PATH, ["few"])


def test_row_groups_that_are_not_read_do_not_count(monkeypatch):
    monkeypatch.setattr(arrow_files.files, "SMALL", 1 << 10)
    found = metadata(pa.table({"n": np.zeros(1000)}), row_group_size=100)
    arrow_files.check(found, 1, PATH, groups=[3])
    with pytest.raises(TraceFileError, match="possibly a decompression bomb"):
        arrow_files.check(found, 1, PATH, groups=[3, 4])


def test_two_columns_of_one_name_are_an_error(tmp_path):
    path = tmp_path / "twice.parquet"
    pq.write_table(pa.table([["x"], ["y"]], names=["a", "a"]), path)
    with pytest.raises(TraceFileError, match="duplicate column names"):
        arrow_files.read(path)
