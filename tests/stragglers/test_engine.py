"""Test that stragglers found on a cluster equal those of one process."""

import os
import signal
from functools import partial

import numpy as np
import pytest
from builders import dask_cluster as c
from click.testing import CliRunner

from fastcomm import arrow_files
from fastcomm.cli.main import main
from fastcomm.errors import ClusterError, FastcommError, TraceFileError
from fastcomm.executors import dask
from fastcomm.executors.executor import Local
from fastcomm.stragglers import model as model_
from fastcomm.stragglers import operations
from fastcomm.stragglers.analysis import analyse_stragglers
from fastcomm.stragglers.model import JobModel
from fastcomm.stragglers.options import StragglerOptions
from fastcomm.stragglers.result import RankScenarios, SubsetScenario, rank_scenarios
from fastcomm.synthetic.job import TableJob, write_table


def invoke(*words, code=0):
    result = CliRunner().invoke(main, ["stragglers", *map(str, words)])
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write_table(TableJob(dp=5, pp=2, micro_batches=2, steps=4, slow_stage=1), folder)
    (folder / "w.toml").write_text('set = ["stage:1=ideal"]')
    return folder


@pytest.fixture(scope="module")
def model(job):
    return JobModel.of(operations.read(job / "table.parquet"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = c.Cluster(tmp_path_factory.mktemp("cluster"))
    for name in ("first", "second", "third"):
        made.worker(name)
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(cluster):
    with dask.connected(cluster.address, wait_s=30) as found:
        found.client.wait_for_workers(3, timeout=30)
        yield found


def asked_for(job, target, table, *words):
    """The command with all that it can be asked for, and what it wrote."""
    words = (*words, "--meta", job / "meta.yaml", "--edits", job / "w.toml")
    words = (*words, "--threshold", 1, "--output", target, "--trace", target / "trace")
    said = invoke(table, "--json", *words).stdout
    return said, {each.name: each.read_bytes() for each in sorted(target.iterdir())}


def test_the_result_is_that_of_one_process_and_the_client_reads_nothing(
    job, engine, cluster, tmp_path, monkeypatch
):
    table = job / "table.parquet"
    here = asked_for(job, tmp_path / "here", table)

    def refuse(*_):
        raise AssertionError("the client reads the table")

    monkeypatch.setattr(arrow_files, "read", refuse)
    there = asked_for(job, tmp_path / "there", f"file://{table}", "--dask", cluster.address)
    assert there == here
    steps = ("--steps", "1,3", "--dask", cluster.address)
    assert '"steps": [\n    1,\n    3\n  ]' in invoke(table, "--json", *steps).stdout


def test_the_result_is_that_of_one_process_with_any_number_of_workers(job, tmp_path):
    table = job / "table.parquet"
    here = asked_for(job, tmp_path / "here", table)
    assert asked_for(job, tmp_path / "two", table, "--workers", 2) == here
    assert "no such file" in invoke(tmp_path / "a.csv", "--workers", 2, code=2).stderr


def test_an_object_is_made_once_in_each_process(tmp_path):
    held = Local(workers=2, preload="fastcomm.executors.executor").hold(
        partial(made_and_listed, tmp_path)
    )
    processes = held.apply([os_process] * 20)
    assert sorted({str(process) for process in processes} | {str(os.getpid())}) == sorted(
        path.name for path in tmp_path.iterdir()
    )
    assert all(path.read_text() == "made\n" for path in tmp_path.iterdir())
    assert held.apply([os_process]) == [os.getpid()]
    with pytest.raises(FastcommError, match="a worker was killed"):
        held.apply([fatal_question] * 2)
    held.close()


def made_and_listed(folder):
    """Add a line to a file that is named after the process."""
    with (folder / str(os.getpid())).open("a") as file:
        file.write("made\n")


def os_process(_):
    return os.getpid()


def test_errors_of_a_table_are_equal_on_a_cluster(job, engine, cluster, tmp_path):
    there = ("--dask", cluster.address)
    absent = tmp_path / "absent.parquet"
    for words in ((), there):
        assert f"{absent}: no such file" in invoke(absent, *words, code=2).stderr
    with pytest.raises(FastcommError, match="step 9 is not in the table"):
        analyse_stragglers(job / "table.parquet", StragglerOptions(steps=[9]), executor=engine)
    (tmp_path / "t.parquet").write_text("no table")
    with pytest.raises(TraceFileError, match=r"t\.parquet: Parquet magic bytes"):
        analyse_stragglers(tmp_path / "t.parquet", StragglerOptions(), executor=engine)


def made_once(marker):
    """What kills the first worker that makes it."""
    return c.deadly_once(marker, 7)


def times(factor, made):
    return made[7] * factor


def fatal_question(_made):
    os.kill(os.getpid(), signal.SIGKILL)


def test_scenarios_of_a_killed_worker_are_repeated_once(engine, tmp_path):
    held = engine.hold(partial(made_once, tmp_path / "made"))
    assert held.apply([partial(times, n) for n in range(9)]) == list(range(9))
    assert (tmp_path / "made").exists()
    with pytest.raises(ClusterError, match="a worker was killed, also in a second attempt"):
        held.apply([fatal_question])
    held.close()


def test_replaying_all_ranks_at_once_equals_replaying_each_alone(model, monkeypatch):
    wanted = [SubsetScenario(way="alone", kind="dp_rank", keys=(d,))(model) for d in range(5)]
    assert [each.stop for each in rank_scenarios(5)] == [2, 4, 5]
    assert len(rank_scenarios(1000)) == 16
    for asked in (rank_scenarios(5), [RankScenarios(first=0, stop=5)]):
        got = [each(model) for each in asked]
        for name in ("whole", "optimizer"):
            rows = np.vstack([getattr(each, name) for each in got])
            assert np.array_equal(rows, [getattr(each, name) for each in wanted])


def test_a_job_of_one_data_rank_is_replayed(tmp_path):
    table, _ = write_table(TableJob(dp=1, pp=2, micro_batches=2, slow_dp=0), tmp_path)
    alone = JobModel.of(operations.read(table))
    assert (rank_scenarios(1)[0](alone).whole[0] == alone.replay(alone.measured).whole).all()


@pytest.mark.parametrize("width", [1, 10**9])
@pytest.mark.parametrize("way", ["alone", "without", "launched"])
def test_replaying_steps_in_parts_equals_replaying_all(model, monkeypatch, width, way):
    scenario = SubsetScenario(way=way, kind="stage", keys=(1,))
    usual = scenario(model)
    monkeypatch.setattr(model_, "_BATCH", width)
    again = scenario(model)
    assert np.array_equal(again.whole, usual.whole)
    assert np.array_equal(again.optimizer, usual.optimizer)
    assert len(list(model.parts())) == (4 if width == 1 else 1)
