"""Parquet files as they are read, and what their own footer says of them."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastcomm import parquet, thrift
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
        found = parquet.read_open(file, size, PATH, columns)
        assert found.to_pylist() == TABLE.select(columns or TABLE.column_names).to_pylist()
        kinds = [
            pa.string() if each == "word" else TABLE[each].type for each in found.column_names
        ]
        assert found.schema.types == kinds
        found.validate(full=True)


@pytest.mark.parametrize("how", [{}, {"row_group_size": 7}, {"compression": "zstd"}])
def test_the_footer_says_what_arrow_says(how):
    found = metadata(TABLE, **how)
    _, (text,) = found.__reduce__()
    groups = thrift.struct(bytes(text))[4]
    assert len(groups) == found.num_row_groups
    for k, group in enumerate(groups):
        for j, column in enumerate(group[1]):
            wanted = found.row_group(k).column(j)
            assert b".".join(column[3][3]).decode() == wanted.path_in_schema
            assert column[3][5] == wanted.num_values
            assert column[3][7] == wanted.total_compressed_size
    assert sum(group[3] for group in groups) == found.num_rows


def test_texts_that_are_no_utf8_are_an_error_unless_they_may():
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    file = written(pa.table({"text": bad}))
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        parquet.read_open(file, 1000, PATH)
    (chunk,) = parquet.read_open(file, 1000, PATH, utf8=False)["text"].chunks
    assert parquet.as_bytes(chunk).to_pylist() == [b"\xff"]


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(TraceFileError, match=r"t\.parquet: no column x; found \['text'"):
        parquet.read_open(written(TABLE), 1000, PATH, ["x"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("list", pa.array([[1] * (1 << 22)])),
        ("fixed", pa.array([b"x" * 4096], pa.binary(4096)).take(pa.array([0] * (1 << 13)))),
        ("number", pa.array(np.zeros(1 << 22, np.int8))),
    ],
)
def test_numbers_that_become_large_are_a_bomb_where_they_are_wanted(monkeypatch, name, value):
    monkeypatch.setattr(parquet.inputs, "SMALL", 1 << 20)
    found = metadata(pa.table({name: value, "few": pa.nulls(len(value), pa.bool_())}))
    for columns in (None, [name], [name, "few"]):
        with pytest.raises(TraceFileError, match="wanted no bomb"):
            parquet.check(found, 100, PATH, columns)
    parquet.check(found, 1 << 20, PATH)
    if name != "number":
        parquet.check(found, 200 * 1000, PATH, ["few"])


def test_row_groups_that_are_not_read_do_not_count(monkeypatch):
    monkeypatch.setattr(parquet.inputs, "SMALL", 1 << 10)
    found = metadata(pa.table({"n": np.zeros(1000)}), row_group_size=100)
    parquet.check(found, 1, PATH, groups=[3])
    with pytest.raises(TraceFileError, match="wanted no bomb"):
        parquet.check(found, 1, PATH, groups=[3, 4])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"\x15\x06\x00", {1: 3}),
        (b"\x15\x05\x00", {1: -3}),
        (b"\x11\x12\x00", {1: True, 2: False}),
        (b"\x05\x04\x0c\x00", {2: 6}),
        (b"\x18\x02ab\x1c\x11\x00\x00", {1: b"ab", 2: {1: True}}),
        (b"\x19\x25\x02\x04\x00", {1: [1, 2]}),
        (b"\x19\xf3\x11" + b"\x07" * 17 + b"\x00", {1: [7] * 17}),
        (b"\x1a\x12\x01\x00", {1: [1]}),
    ],
)
def test_a_struct_of_thrift_is_its_fields(text, value):
    assert thrift.struct(text) == value


@pytest.mark.parametrize("text", [b"", b"\x15", b"\x1b\x00\x00", b"\x19\xfc\xff\xff\x7f"])
def test_what_is_no_thrift_is_an_error(text):
    with pytest.raises((IndexError, ValueError)):
        thrift.struct(text)
