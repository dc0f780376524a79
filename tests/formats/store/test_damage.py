"""Test that damaged, missing and foreign files of a store are errors with their path."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import kineto_text as k
from builders.fault_tools import agree
from builders.opened import open_run
from builders.stored_runs import STEP, WHOLE, measured, plain, stored, write_run

from fastcomm.errors import TraceFileError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.formats.store import layout as store_layout
from fastcomm.formats.store import reader as store_reader
from fastcomm.formats.store.layout import ABOUT, LAYOUT, MANIFEST
from fastcomm.metrics.computation import compute_metrics


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path)


def rewrite(path, change=lambda table: table, **said):
    """The device work of a rank's file as another program might have written it."""
    with pq.ParquetFile(path) as file:
        table, about = file.read_row_group(0), json.loads(file.metadata.metadata[ABOUT])
    text = json.dumps({**about, **said})
    pq.write_table(change(table).replace_schema_metadata({ABOUT: text}), path)


def test_a_file_with_partners_says_so(tmp_path):
    trace = reader.read(k.write(tmp_path / "rank0.json", STEP), WHOLE)
    place, partners = trace.comm.column_names.index("sends_to"), pa.list_(pa.int32())
    comm = trace.comm.set_column(place, "sends_to", pa.array([[1]], partners))
    path = stored(replace(trace, comm=comm), tmp_path / "rank-00000.parquet")
    assert store_reader.about(path)["partners"] is True
    assert store_reader.read(path, TraceOptions()).comm["sends_to"].to_pylist() == [[1]]


def with_column(name, values):
    return lambda table: table.set_column(table.column_names.index(name), name, values(table))


def test_an_unknown_code_is_damage(run):
    path = run / "store" / "rank-00000.parquet"
    rewrite(path, with_column("kind", lambda table: pa.array(["unheard"] * len(table))))
    with pytest.raises(TraceFileError, match="KeyError: 'unheard'"):
        store_reader.read(path, TraceOptions(), 0)


@pytest.mark.parametrize(
    ("name", "place", "entries"),
    [("lane", 3, 3), ("lane", -1, 3), ("group_id", 1, 1), ("group_id", -1, 1)],
)
def test_an_index_outside_of_its_table_is_damage(run, name, place, entries):
    path = run / "store" / "rank-00000.parquet"
    rewrite(path, with_column(name, lambda table: pa.array([place] * len(table), pa.int32())))
    with pytest.raises(TraceFileError, match=f" {place} to {place}, of {entries}"):
        store_reader.read(path, TraceOptions(), 0)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_manifest_holds_finite_numbers(run, value):
    path = run / "store" / MANIFEST
    text = path.read_text()
    path.write_text(text.replace('"link_bandwidth": null', f'"link_bandwidth": {value}'))
    assert path.read_text() != text
    with pytest.raises(TraceFileError, match=f"damaged, .*found {value}, expected a finite"):
        store_layout.read_manifest(run / "store")


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64()], ids=str)
def test_a_column_of_another_type_is_cast(run, kind):
    path = run / "store" / "rank-00000.parquet"
    wanted = store_reader.read(path, TraceOptions(), 0)
    rewrite(path, with_column("correlation", lambda table: table["correlation"].cast(kind)))
    assert plain(store_reader.read(path, TraceOptions(), 0).events) == plain(wanted.events)


def test_a_column_that_cannot_be_cast_or_has_nulls_is_damage(run):
    path = run / "store" / "rank-00000.parquet"
    rewrite(path, with_column("start", lambda table: pa.array([1.5] * len(table))))
    with pytest.raises(TraceFileError, match="damaged"):
        store_reader.read(path, TraceOptions(), 0)
    rewrite(path, with_column("start", lambda table: pa.nulls(len(table), pa.int64())))
    with pytest.raises(TraceFileError, match=r"events.start: 2 nulls, none allowed"):
        store_reader.read(path, TraceOptions(), 0)


def test_a_file_of_a_store_is_a_run_of_one_rank(run):
    found = measured(run / "store" / "rank-00001.parquet")
    assert found["ranks"] == [1]
    assert any("3 of 4 ranks have no trace here" in note for note in found["warnings"])


def test_a_missing_rank_is_an_error_or_skipped(run):
    (run / "store" / "rank-00001.parquet").unlink()
    opened = open_run(run / "store")
    assert opened.ranks == (0, 1)
    with pytest.raises(TraceFileError, match=r"rank-00001.parquet: no such file, though"):
        compute_metrics(opened)
    found = compute_metrics(replace(opened, keep_going=True))
    assert found.ranks == (0,)
    assert [each.rank for each in found.skipped] == [1]


def break_at(path, place):
    text = bytearray(path.read_bytes())
    text[place] ^= 0xFF
    path.write_bytes(text)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def other_rank(path):
    path.write_bytes(path.with_name("rank-00000.parquet").read_bytes())


def other_parquet(path):
    pq.write_table(pa.table({"x": [1]}), path)


def with_about(**changes):
    def change(path):
        file = pq.ParquetFile(path)
        said = json.loads(file.metadata.metadata[ABOUT])
        table = file.read().replace_schema_metadata()
        text = json.dumps({**said, **changes})
        pq.write_table(table.replace_schema_metadata({ABOUT: text}), path)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b""), "damaged, or no file of a store"),
        (lambda path: path.write_text("PAR1"), "damaged, or no file of a store"),
        (cut, "damaged, or no file of a store"),
        (other_parquet, "damaged, or no file of a store"),
        (other_rank, "the file says rank 0, the store rank 1"),
        (
            with_about(layout=99),
            f"a store of layout 99, this fastcomm reads layout {LAYOUT}; remove",
        ),
        (with_about(layout=True), "a store of layout True"),
        (with_about(names={"tag": ["DP"]}), "with other parallelisms or causes of idle time"),
        (with_about(reading={}), r"damaged, or no file of a store \(KeyError"),
        (with_about(lanes={"process": []}), r"rank-00001.parquet: damaged|lanes: no column"),
        (with_about(iterations={"number": [1], "start": [5], "stop": [1]}), "stops before"),
        (with_about(row_groups=[7]), "damaged, or no file of a store"),
        (with_about(meta={"rank": 1, "warnings": []}), "damaged, or no file of a store"),
    ],
)
def test_a_damaged_rank_is_an_error_with_its_path(run, damage, message):
    path = run / "store" / "rank-00001.parquet"
    damage(path)
    agree(run / "store")
    with pytest.raises(TraceFileError, match=message) as raised:
        open_run(run / "store").read(1)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("whole", [True, False])
def test_a_flipped_byte_is_detected_or_harmless(run, whole):
    path = run / "store" / "rank-00001.parquet"
    text = path.read_bytes()
    options = replace(WHOLE, whole=whole)
    wanted = store_reader.read(path, options, 1)
    rng = np.random.default_rng(0)
    for place in rng.choice(len(text), 150, replace=False).tolist():
        break_at(path, place)
        try:
            found = store_reader.read(path, options, 1)
        except TraceFileError:
            pass
        else:
            assert plain(found.events.drop("name")) == plain(wanted.events.drop("name"))
            assert plain(found.comm) == plain(wanted.comm)
        path.write_bytes(text)


def test_reading_all_events_of_a_reduced_store_is_an_error(tmp_path):
    trace = reader.read(k.write(tmp_path / "rank0.json", STEP), TraceOptions())
    path = stored(trace, tmp_path / "rank-00000.parquet")
    assert store_reader.read(path, TraceOptions()).comm.num_rows == 1
    with pytest.raises(TraceFileError, match="holds only what metrics need"):
        store_reader.read(path, WHOLE)
