"""Test that results with one table support Arrow's PyCapsule interface."""

import pyarrow as pa
import pytest

from fastcomm.critical_path.search import analyze, joined
from fastcomm.formats.opening import open_run
from fastcomm.isp.analysis import search_strategies
from fastcomm.isp.search import SearchSweep, SweepPoint
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write(Job.of(ranks=2, steps=2, layers=1), folder)
    return open_run(folder)


def test_a_path_is_its_table_of_edges(run):
    path = analyze(run.read(0, "all"))
    assert path.breakdown.num_rows > 10
    assert pa.table(path).equals(path.breakdown)


def test_a_joined_path_is_its_table_of_edges_with_ranks(run):
    path = joined({rank: run.read(rank, "all") for rank in run.ranks})
    assert "rank" in path.breakdown.column_names
    assert pa.table(path).equals(path.breakdown)


def test_a_search_is_its_table_of_strategies():
    asked = {"model": "7B", "world_size": 8, "seq_len": 4096, "global_batch": 4096 * 64}
    found = search_strategies(**asked, cluster="a800")
    assert found.feasible > 0
    assert pa.table(found).equals(found.to_arrow())


def test_a_sweep_is_its_table_of_searches():
    cell = SweepPoint(
        world_size=8, seq_len=4096, candidates=9, feasible=0, best=None, why="memory"
    )
    sweep = SearchSweep(cells=(cell,))
    assert pa.table(sweep).equals(sweep.to_arrow())
    assert pa.table(sweep)["candidates"].to_pylist() == [9]
