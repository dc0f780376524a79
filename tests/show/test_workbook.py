"""Test tables as an Excel workbook."""

import sys

import openpyxl
import pyarrow as pa
import pytest
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.errors import FastcommError
from fastcomm.show import files
from fastcomm.show import files as report_files
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

TABLE = pa.table(
    {
        "name": ["=1+1", "http://a.b", None, "plain"],
        "whole": [1, 2**60, None, -7],
        "share": [0.25, float("nan"), float("inf"), None],
        "ranks": [[0, 1], [], None, [3]],
        "tag": pa.array(["TP", "DP", "TP", None]).dictionary_encode(),
        "yes": [True, False, None, True],
    }
)


def rows(path, sheet):
    return [
        list(row) for row in openpyxl.load_workbook(path)[sheet].iter_rows(values_only=True)
    ]


def test_numbers_are_numbers_and_texts_stay_texts(tmp_path):
    report_files.write_workbook({"one": TABLE, "none": TABLE.slice(0, 0)}, tmp_path / "a.xlsx")
    head, *found = rows(tmp_path / "a.xlsx", "one")
    assert head == TABLE.column_names
    assert found == [
        ["=1+1", 1, 0.25, "0 1", "TP", True],
        ["http://a.b", str(2**60), None, "", "DP", False],
        [None, None, None, None, "TP", None],
        ["plain", -7, None, "3", None, True],
    ]
    cell = openpyxl.load_workbook(tmp_path / "a.xlsx")["one"]["A2"]
    assert cell.data_type == "s"
    assert rows(tmp_path / "a.xlsx", "none") == [TABLE.column_names]


def test_the_same_tables_give_the_same_bytes(tmp_path):
    for name in ("a.xlsx", "b.xlsx"):
        report_files.write_workbook({"one": TABLE}, tmp_path / name)
    assert (tmp_path / "a.xlsx").read_bytes() == (tmp_path / "b.xlsx").read_bytes()


def test_tables_too_large_for_a_workbook_are_an_error(tmp_path):
    long = pa.table({"a": pa.nulls(1 << 20, pa.int8())})
    with pytest.raises(FastcommError, match=r"long has 1048576 rows, a sheet holds 1048575"):
        report_files.write_workbook({"long": long}, tmp_path / "a.xlsx")
    assert not list(tmp_path.iterdir())


def test_a_folder_gets_a_workbook_of_all_tables_beside_them(tmp_path):
    paths = files.write_tables(tmp_path / "out", {"a.json": "{}"}, {"one": TABLE}, "book")
    names = ["one.parquet", "one.csv", "book.xlsx", "a.json"]
    assert [path.name for path in paths] == names
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    assert rows(tmp_path / "out/book.xlsx", "one")[0] == TABLE.column_names


def test_a_missing_extra_is_an_error_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    with pytest.raises(FastcommError, match=r"pip install 'fastcomm\[xlsx\]'"):
        report_files.write_workbook({"one": TABLE}, tmp_path / "a.xlsx")


def test_a_missing_extra_is_an_error_before_anything_is_read_or_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    words = ["critical-path", str(tmp_path), "-o", str(tmp_path / "out"), "--xlsx"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert done.stderr == "Error: --xlsx needs XlsxWriter: pip install 'fastcomm[xlsx]'\n"
    assert not list(tmp_path.iterdir())


def test_a_command_writes_the_workbook_beside_its_other_files(tmp_path):
    write(Job.of(2, steps=2, layers=1, micro_batches=1), tmp_path / "traces")

    def call(*words):
        return CliRunner().invoke(main, ["metrics", str(tmp_path / "traces"), *words])

    done = call("--xlsx", "--output", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    found = rows(tmp_path / "out/metrics.xlsx", "ranks")
    assert [row[0] for row in found] == ["rank", 0, 1]
    assert call("--xlsx").exit_code == 2
