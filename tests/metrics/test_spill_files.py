"""Test that results do not depend on how events are divided into batches."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from builders.job_traces import job_partials
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcomm.metrics import spill_files
from fastcomm.metrics.computation import compute
from fastcomm.metrics.partial import merge, spill
from fastcomm.synthetic.job import Job

STREAMS, SIZES, TIMES = (
    st.none() | st.integers(7, 9),
    st.none() | st.integers(1, 2),
    st.integers(0, 9),
)
LABELS = st.none() | st.integers(-(2**63), 2**63 - 1)


@st.composite
def events(draw):
    """Events of some ranks, by rank."""
    rows = draw(
        st.lists(st.tuples(st.integers(0, 3), LABELS, st.sampled_from([0, 3, 4])), max_size=30)
    )
    rank, group, op = (
        zip(*sorted(rows, key=lambda row: row[0]), strict=True) if rows else [()] * 3
    )
    length = {"min_size": len(rank), "max_size": len(rank)}
    return pa.table(
        {
            "rank": pa.array(rank, pa.int64()),
            "group": pa.array(group, pa.int64()),
            "op": pa.array(op, pa.int8()),
            "number": pa.array(range(len(rank)), pa.int64()),
            "stream": pa.array(draw(st.lists(STREAMS, **length)), pa.int64()),
            "group_size": pa.array(draw(st.lists(SIZES, **length)), pa.int64()),
            "start_ns": pa.array(draw(st.lists(st.none() | TIMES, **length)), pa.int64()),
            "duration_ns": pa.array(draw(st.lists(TIMES, **length)), pa.int64()),
        }
    )


def by_ranks(table, later, folder=None):
    """A batch of some of the ranks and one of the others, in memory or in files."""
    first = np.isin(table["rank"].to_numpy(), sorted(later), invert=True)
    parts = [table.filter(pa.array(chosen)) for chosen in (~first, first)]
    if folder is None:
        return [spill_files.cut(part) for part in parts]
    return [spill_files.spill(part, folder / str(n)) for n, part in enumerate(parts)]


@given(
    table=events(),
    later=st.sets(st.integers(0, 3)),
    is_away=st.booleans(),
    first=st.integers(0, 256),
    more=st.integers(1, 256),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cells_have_all_events_of_their_groups_and_no_others(
    tmp_path, table, later, is_away, first, more
):
    cut = by_ranks(table, later, tmp_path if is_away else None)
    names = ["rank", "group", "number"]
    cells = range(first, min(first + more, 257))
    found = spill_files.read(cut, cells, names).to_pylist()
    wanted = [row for row in table.select(names).to_pylist() if cell(row["group"]) in cells]
    # Those of a cell by rank, and in the order of the rank; for the last there is a test below.
    key = [(cell(row["group"]), row["rank"], row["number"]) for row in wanted]
    ordered = sorted(found, key=lambda row: (cell(row["group"]), key_of_last(row)))
    assert ordered == [row for _, row in sorted(zip(key, wanted, strict=True))]
    assert spill_files.all_events(cut, table.column_names).equals(table)
    shared = spill_files.shares(cut)
    assert [each for cells in shared for each in cells] == list(range(256))
    assert sorted({op for batch in cut for op in batch.ops}) == sorted(
        set(table["op"].to_pylist())
    )


def key_of_last(row):
    return (row["rank"], row["number"]) if row["group"] is None else ()


@given(table=events(), later=st.sets(st.integers(0, 3)))
def test_collectives_without_a_group_are_sorted_by_rank_stream_and_end(table, later):
    for batch in by_ranks(table, later):
        found = spill_files.read_ungrouped(batch, table.column_names).to_pylist()
        rows = batch.where.select(table.column_names).to_pylist()
        wanted = [row for row in rows if is_ungrouped(row)]
        assert found == sorted(wanted, key=order_of_stream)
        some = np.arange(len(found))[::2]
        assert spill_files.read_ungrouped(batch, ["number"], some)["number"].to_pylist() == [
            row["number"] for row in found[::2]
        ]


def is_ungrouped(row):
    """A collective, no message, whose time is known and which several ranks may have."""
    return (
        row["group"] is None
        and row["op"] != 4
        and row["start_ns"] is not None
        and row["group_size"] != 1
    )


def order_of_stream(row):
    stream = -1 if row["stream"] is None else row["stream"]
    stop = row["start_ns"] + row["duration_ns"]
    return row["rank"], stream, stop, row["start_ns"], row["number"]


def cell(label):
    """The highest byte of a label, the negative ones first; the last is for no label."""
    return 256 if label is None else (label + 2**63) // 2**56


@pytest.fixture(scope="module")
def partials():
    return job_partials(Job.of(fault="slow_link", steps=2, layers=2))


def test_results_do_not_depend_on_how_ranks_are_spilled(partials, tmp_path, monkeypatch):
    here = told(merge(partials))
    monkeypatch.setattr(spill_files, "_ROWS", 100)
    for number, batches in enumerate(
        ([[0, 5], [1, 2, 3, 4, 7], [6]], [[7], [0, 1, 2, 3, 4, 5, 6]])
    ):
        parts = [
            spill(merge([partials[rank] for rank in ranks]), tmp_path / f"{number}.{n}")
            for n, ranks in enumerate(batches)
        ]
        assert told(merge(parts)) == here
        assert told(merge(parts[::-1])) == here
    # Some in memory, others not.
    assert told(merge([*parts[1:], *[partials[rank] for rank in batches[0]]])) == here


def told(partial):
    """All that is answered, with all tables."""
    found = compute(partial, byte_kind="payload", link=50e9)
    tables = {name: table.to_pylist() for name, table in found.to_arrow().items()}
    lean = compute(partial, byte_kind="payload", link=50e9, with_tables=False)
    assert lean.to_dict() == found.to_dict()
    assert set(tables) - set(lean.to_arrow()) == {"events", "windows", "windows_cdf"}
    return found.to_dict(), tables


def test_rates_of_pieces_equal_rates_of_all_events(partials):
    whole = merge(partials)
    table = whole.events
    cut = [spill_files.cut(part.events) for part in partials]
    size, duration = (table[name].to_numpy() for name in ("bytes", "duration_ns"))
    for tag in np.unique(table["tag"].to_numpy()).tolist():
        own = (table["tag"].to_numpy() == tag) & (duration > 0)
        wanted = np.percentile(size[own] / duration[own] * 1e9, 95)
        assert spill_files.p95(cut, tag) == pytest.approx(wanted, rel=1e-12)
    assert np.isnan(spill_files.p95(cut, 99))


def test_a_piece_without_events_is_a_piece(tmp_path):
    empty = pa.table(
        {"rank": pa.array([], "i8"), "group": pa.array([], "i8"), "op": pa.array([], "i1")}
    )
    for batch in (spill_files.cut(empty), spill_files.spill(empty, tmp_path / "empty")):
        assert (sum(batch.rows), batch.ops) == (0, ())
        assert spill_files.all_events([batch], empty.column_names).equals(empty)
        assert replace(batch) == batch


@pytest.mark.skipif(os.name != "posix", reason="a mapped file cannot be deleted")
def test_all_events_outlive_their_spill_files(tmp_path):
    table = pa.table(
        {
            **{name: pa.array([0] * 6, pa.int64()) for name in spill_files._SORT_COLUMNS},
            "rank": [0, 0, 0, 1, 1, 1],
            "group": [5 << 50, 3 << 60, 5 << 50, None, 3 << 60, 5 << 50],
            "number": list(range(6)),
        }
    )
    folder = tmp_path / "spilled"
    folder.mkdir()
    spilled = [
        spill_files.spill(table.slice(begin, 3), folder / str(begin)) for begin in (3, 0)
    ]
    whole = spill_files.all_events(spilled, ["rank", "number"])
    shutil.rmtree(folder)
    assert whole["number"].to_pylist() == list(range(6))
