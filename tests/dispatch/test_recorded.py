"""Test what schedules would save of the all-to-alls of a run."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.dispatch.options import DispatchOptions
from fastcomm.dispatch.recorded import BY_BYTES, RecordedTraffic, compare_recorded
from fastcomm.dispatch.schedules import STRATEGIES, Terms
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

JOB = {"ranks": 8, "tp": 1, "pp": 1, "dp": 8, "ep": 8, "steps": 2, "layers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("recorded") / "run"
    write(Job.of(**JOB, micro_batches=1), made)
    return made


@pytest.fixture(scope="module")
def hot(tmp_path_factory):
    made = tmp_path_factory.mktemp("recorded") / "hot"
    job = Job.of(**JOB, micro_batches=1, fault="hot_expert", straggler=3, slowdown=100)
    write(job, made)
    return made


def recorded(folder, **more):
    return compare_recorded(folder, DispatchOptions(cluster="dgx-h100"), **more)


def by_name(result):
    return {one.name: one for one in result.schedules}


def test_the_direct_schedule_takes_what_was_measured(folder):
    result = recorded(folder, gpus_per_node=4)
    assert by_name(result)["direct"].seconds == pytest.approx(result.measured_s)
    assert [one.seconds for one in result.schedules] == sorted(
        one.seconds for one in result.schedules
    )
    assert result.run.groups == 1
    assert result.run.steps == 2
    assert result.run.incomplete == result.run.without_splits == 0
    assert 0 < result.bound_s <= min(one.seconds for one in result.schedules)


def test_an_even_load_saves_what_a_hot_rank_costs(folder, hot):
    even, skewed = recorded(folder), recorded(hot)
    assert skewed.fullest > 1.5
    assert even.fullest < 1.1
    direct = by_name(skewed)["direct"]
    assert direct.even_s == pytest.approx(direct.seconds / skewed.fullest, rel=0.1)
    other = by_name(even)["direct"]
    assert other.even_s > 0.9 * other.seconds


def test_other_schedules_save_where_a_nic_is_hot(hot):
    result = by_name(recorded(hot, gpus_per_node=4))
    assert result["fast"].seconds < 0.9 * result["direct"].seconds


def test_bytes_between_ranks_are_those_of_the_splits(folder):
    result = recorded(folder)
    metrics = json.loads(CliRunner().invoke(main, ["metrics", str(folder), "--json"]).stdout)[
        "rank_pairs"
    ]
    pairs = {(pair["source"], pair["target"]): pair["bytes"] / 2 for pair in metrics["pairs"]}
    assert result.ranks == tuple(range(8))
    for (source, target), size in pairs.items():
        assert result.sent[source, target] == size


def test_traffic_of_bytes_is_that_of_tokens_with_one_expert():
    random = np.random.default_rng(0)
    sent = random.integers(0, 50, (8, 8))
    traffic = RecordedTraffic.of_matrix(sent, 4)
    assert traffic.nodes == 2
    assert (traffic.remote_node_unique == np.where(
        np.arange(8)[:, None] // 4 == [0, 1], 0, sent.reshape(8, 2, 4).sum(axis=2)
    )).all()  # fmt: skip
    assert (traffic.leaving == sent.sum(axis=1) - sent.diagonal()).all()
    terms = Terms(token_bytes=1000, combine_bytes=1000)
    for name in BY_BYTES:
        assert STRATEGIES[name].run(traffic, terms).seconds > 0


def test_schedules_that_need_tokens_have_a_reason(folder):
    result = recorded(folder, schedules=("deepep", "direct"))
    assert list(by_name(result)) == ["direct"]
    assert "does not record tokens" in result.unanswered["deepep"]
    with pytest.raises(ConfigError, match="unknown strategy nothing"):
        recorded(folder, schedules=("nothing",))


def test_ranks_that_fill_nodes_unevenly_are_an_error(folder):
    with pytest.raises(ConfigError, match="fill nodes of 3 GPUs unevenly"):
        recorded(folder, gpus_per_node=3)


def test_exchanges_with_a_missing_rank_are_left_out(folder, tmp_path):
    for path in sorted(folder.iterdir())[:4]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(FastcommError, match="no all-to-all with recorded splits"):
        recorded(tmp_path)


def test_a_run_without_all_to_alls_is_an_error(tmp_path):
    write(Job.of(ranks=2, steps=1, layers=1), tmp_path / "run")
    with pytest.raises(FastcommError, match="no all-to-all with recorded splits"):
        recorded(tmp_path / "run")


def test_the_command_prints_and_writes_the_comparison(hot, tmp_path):
    words = ["dispatch", "compare", "--from-run", str(hot), "--gpus-per-node", "4"]
    done = CliRunner().invoke(main, [*words, "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("All-to-alls take ")
    assert "would save" in done.stdout
    document = json.loads((tmp_path / "dispatch.json").read_text())
    assert [row["schedule"] for row in document["schedules"]][-1] == "spreadout"
    done = CliRunner().invoke(main, [*words, "--model", "deepseek-v3"])
    assert done.exit_code == 2
