"""Test what schedules would save of the all-to-alls of a run."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.dispatch.options import DispatchOptions
from fastcomm.dispatch.run_exchange import (
    BY_BYTES,
    Exchange,
    RecordedTraffic,
    _Model,
    compare_recorded,
)
from fastcomm.dispatch.schedules import STRATEGIES, Terms
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.hardware.clusters import GpuLinks
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

RECORDED = Path(__file__).parents[1] / "jobs" / "recorded" / "ep-experts"
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


@pytest.mark.parametrize("load", ["clean", "faulty"])
def test_starts_that_do_not_shrink_with_bytes_are_not_saved(load):
    """The same job took as long with an even load: bytes are few, and links hardly used."""
    result = compare_recorded(
        RECORDED / load, DispatchOptions(cluster="dgx-h100"), gpus_per_node=4
    )
    assert "reach 0.0 % of the links" in result.no_savings
    assert by_name(result)["direct"].seconds == result.measured_s
    assert {one.seconds for one in result.schedules} == {result.measured_s, None}
    assert {one.even_s for one in result.schedules} == {result.bound_s} == {None}


def exchanges(sent, seconds, members=(0, 1, 2, 3)):
    return [
        Exchange(members=members, sent=np.array(matrix), seconds=time)
        for matrix, time in zip(sent, seconds, strict=True)
    ]


LINKS = GpuLinks(inter_bytes_per_s=50e9, intra_bytes_per_s=450e9)


def test_a_start_is_fitted_to_exchanges_of_different_sizes():
    sizes = np.array([1, 2, 4, 8]) * 10**6
    sent = [size * (1 - np.eye(4, dtype=np.int64)) for size in sizes]
    own = exchanges([one.astype(np.int64) for one in sent], 30e-6 + sizes * 3 / 100e9)
    model = _Model.of(own, 4, LINKS, DispatchOptions())
    assert model.start_s == pytest.approx(30e-6, rel=0.01)
    assert model.scaled(0.0) == pytest.approx(4 * 30e-6, rel=0.01)
    assert model.scaled(float(model.direct.mean())) == pytest.approx(model.measured_s)


def test_without_bytes_nothing_is_saved():
    model = _Model.of(
        exchanges([np.eye(4, dtype=np.int64) * 100], [1e-3]), 4, LINKS, DispatchOptions()
    )
    assert model.no_savings == "no bytes go to other ranks"
    assert model.scaled(0.0) == model.measured_s


def test_the_slowest_group_counts(tmp_path):
    job = Job.of(
        **{**JOB, "ep": 4}, micro_batches=1, fault="hot_expert", straggler=3, slowdown=100
    )
    write(job, tmp_path / "run")
    result = recorded(tmp_path / "run")
    assert result.run.groups == 2
    assert 3 in result.slowest
    assert result.fullest > 1.5
    direct = by_name(result)["direct"]
    assert direct.seconds == pytest.approx(result.measured_s)
    # Expert 3 of its group has twice the load of others: an even load takes that off.
    assert 0.5 < direct.even_s / direct.seconds < 0.8


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


def test_calls_without_numbers_count_in_order(folder, tmp_path):
    for path in folder.iterdir():
        is_packed = path.suffix == ".gz"
        data = gzip.decompress(path.read_bytes()) if is_packed else path.read_bytes()
        trace = json.loads(data)
        for event in trace["traceEvents"]:
            event.get("args", {}).pop("Seq", None)
        text = json.dumps(trace).encode()
        (tmp_path / path.name).write_bytes(gzip.compress(text) if is_packed else text)
    numbered, counted = recorded(folder), recorded(tmp_path)
    assert counted.measured_s == numbered.measured_s
    assert (counted.sent == numbered.sent).all()


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
    copies = recorded(folder, schedules=("deepep-ll",)).unanswered["deepep-ll"]
    assert (
        copies
        == "deepep-ll: it sends a message for each expert, and a run does not record experts"
    )
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


def test_schedules_without_a_time_save_nothing_that_is_known(folder):
    words = ["dispatch", "compare", "--from-run", str(folder), "--schedules", "deepep"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    first = " ".join(done.stdout.split()).partition(")")[0]
    assert first.endswith("of a step; savings: n/a (no schedule has a time")
