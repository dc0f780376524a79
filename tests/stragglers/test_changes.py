"""Test changes to a table of operations, and its replayed steps as a trace."""

import json
from dataclasses import replace

import numpy as np
import pytest
from builders.replay_data import TABLE, document, needed
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.errors import ConfigError
from fastcomm.graph.edits import parse_edits
from fastcomm.options import EditOptions
from fastcomm.stragglers import model as job_model
from fastcomm.stragglers import operations
from fastcomm.stragglers.model import JobModel
from fastcomm.stragglers.result import stragglers
from fastcomm.synthetic.job import TableJob, write_table


@pytest.mark.parametrize("ranks", [8, 6, 1])
def test_the_slow_rank_of_the_synthetic_table_is_found(tmp_path, ranks):
    job = TableJob.of(ranks)
    table, meta = write_table(job, tmp_path)
    made = JobModel.of(operations.read(table), shards=operations.meta(meta)["dsp_size"])
    found = stragglers(made)
    assert found.base.mean() == pytest.approx(found.nodelay.whole.mean(), rel=1e-6)
    if ranks == 1:
        assert found.slowdown == pytest.approx(1, rel=0.01)  # it is the measure of itself
        return
    assert found.slowdown > 1.08
    assert found.worst_ranks == (job.slow_rank,)
    assert found.worst.rem > 0.9
    scale = [
        f"op:{way}-compute+rank:{job.slow_rank}={1 / (1 + job.slowdown)}"
        for way in ("forward", "backward")
    ]
    even, healed = (
        made.replay(changed(made, **options))
        for options in ({"scale": scale}, {"heal": [f"rank:{job.slow_rank}"]})
    )
    wanted = replace(job, slowdown=0.0)
    other = JobModel.of(operations.read(write_table(wanted, tmp_path / "even")[0]))
    truth = other.replay(other.measured).whole
    assert even.whole == pytest.approx(truth, rel=1e-5)
    assert healed.whole == pytest.approx(truth, rel=0.01)  # the jitter of its peers is another


def test_the_demo_writes_a_table_and_analyses_it(tmp_path):
    words = ["demo", str(tmp_path / "job"), "--format", "table"]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert "the slowest rank 6 ideal, 107.6 % of the slowdown disappears" in done.stdout
    none = CliRunner().invoke(main, [*words, "--fault", "none"], catch_exceptions=False)
    assert "The slowdown is below --threshold" in none.stdout
    refused = CliRunner().invoke(main, [*words, "--fault", "slow-link"])
    assert "expected slow-gpu or none" in refused.stderr


@pytest.fixture(scope="module")
def model():
    return JobModel.of(operations.read(TABLE))


def changed(model, **options):
    return job_model.changed_times(model, parse_edits(EditOptions(**options)).edits)


def run(*words):
    done = CliRunner().invoke(main, ["stragglers", str(TABLE), *map(str, words)])
    return done.stdout if done.exit_code == 0 else done.stderr


@needed
def test_the_what_ifs_of_the_study_can_be_written_as_edits():
    for names, ratio in document("straggler/what-if-ST.json")["ratio"].items():
        known = [name for name in names.split(", ") if name != "separate-grads-all-reduce"]
        words = [word for name in known for word in ("--remove", f"op:{name}")]
        said = json.loads(run(*words, "--json"))
        assert said["what_if"]["speedup"] == pytest.approx(ratio, rel=1e-6)
        assert len(said["what_if"]["step_time_ns"]) == 32
    assert "What if: 2.091 s a step, -3.78 %" in run(*words)


@needed
def test_an_ideal_last_stage_gives_the_m_s_of_the_study():
    said = json.loads(run("--set", "stage:3=ideal", "--json"))
    removed = document("straggler/ms-ST.json")["trem"]
    assert said["what_if"]["step_time_mean_ns"] == pytest.approx(removed * 1e9, rel=1e-6)


@needed
@pytest.mark.parametrize(
    ("key", "count"),
    [
        ("all", 106 * 2 * 32),
        ("op:gc", 4 * 2 * 32),
        ("op:forward-compute_0_2", 2 * 32),
        ("rank:7", 106 // 4 * 32),
        ("dp_rank:1", 106 * 32),
        ("stage:0", 27 * 2 * 32),
        ("op:GC+dp-rank:1+stage:2", 32),
        ("step:STEP", 106 * 2),
    ],
)
def test_a_key_selects_the_operations_that_it_names(model, key, count):
    key = key.replace("STEP", str(model.table.steps[3]))
    found = int((changed(model, set=[f"{key}=+1s"]) != model.measured).sum())
    if key.startswith(("rank", "stage")):
        sizes = [sum(op.stage == stage for op in model.table.ops) for stage in range(4)]
        count = sizes[3] * 32 if key.startswith("rank") else sizes[0] * 64
    assert found == count


@needed
def test_every_type_that_results_name_can_be_changed(model):
    for each in {op.reported_type for op in model.table.ops}:
        found = (changed(model, set=[f"op:{each}=+1s"]) != model.measured).any(axis=(1, 2))
        assert found.tolist() == [op.reported_type == each for op in model.table.ops]
    sent = {op.optype for op in model.table.ops if op.reported_type == "forward-pp-comm"}
    assert sent == {"forward-send", "forward-recv"}


@needed
def test_a_step_waits_for_both_ends_of_a_message(model):
    before = model.replay(model.measured).whole
    slower = changed(model, set=["op:forward-pp-comm=+10ms"])
    assert (model.replay(slower).whole > before).all()
    with pytest.raises(ConfigError, match="changes nothing: operations wait for receives"):
        changed(model, set=["op:backward-send=+10ms"])


@needed
def test_edits_apply_in_order(model):
    found = changed(model, set=["all=ideal"], scale=["op:gc=0", "stage:1=2"])
    gc, second = model.of_type("gc"), np.array([op.stage == 1 for op in model.table.ops])
    assert (found[gc] == 0).all()
    ideal = model.ideal_times()
    assert (found[second & ~gc] == 2 * ideal[second & ~gc]).all()
    assert (found[~second & ~gc] == ideal[~second & ~gc]).all()


def test_a_healed_rank_takes_the_median_of_its_peers(tmp_path):
    table, _ = write_table(TableJob(dp=3, pp=2, micro_batches=1, steps=1), tmp_path)
    made = JobModel.of(operations.read(table))
    found = changed(made, heal=["rank:3"])  # stage 1 of data rank 1
    for op, before, after in zip(made.table.ops, made.measured, found, strict=True):
        one, peer, other = before[:, 0].tolist()
        assert after[0, 0] == one
        assert after[2, 0] == other
        assert after[1, 0] == (pytest.approx((one + other) / 2) if op.stage == 1 else peer)
    with pytest.raises(ConfigError, match="heal: no peers"):
        changed(made, heal=["stage:1"])


@needed
@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("scale", "op:forward-send=2", "changes nothing: operations wait for receives"),
        ("scale", "stage:1+op:forward-send=2", "op:forward-pp-comm"),
        ("scale", "nothing=2", "there is no 'nothing' here; there is .*op:NAME"),
        ("scale", "rank:77=2", "matches nothing: there is rank:0-7"),
        ("scale", "op:=2", "invalid target 'op:'"),
        ("scale", "kernel:/gemm/=2", "there is no 'kernel' here"),
        ("overlap", "DP", "overlap DP: not possible here"),
        ("fuse_below", "5us", "not possible here"),
        ("scale", "rank:0=1:2:1", "tries no FROM:TO:STEP"),
    ],
)
def test_an_invalid_edit_of_a_table_is_an_error(model, option, text, said):
    options = EditOptions(**{option: text if option == "fuse_below" else [text]})
    with pytest.raises(ConfigError, match=said):
        job_model.changed_times(model, parse_edits(options).single("a table of operations"))


@needed
def test_the_trace_has_every_operation_where_the_replay_puts_it(model, tmp_path):
    path = tmp_path / "trace.json"
    run("--trace", path)
    rows = [r for r in json.loads(path.read_text())["traceEvents"] if r["ph"] == "X"]
    assert json.loads(json.dumps(job_model.job_trace(model, model.measured))) == json.loads(
        path.read_text()
    )
    replayed = model.replay(model.measured).whole
    for k, step in enumerate(model.table.steps[:3]):
        own = [row for row in rows if row["args"]["step"] == step]
        end = max(row["ts"] + row["dur"] for row in own)
        begin = sum(replayed[:k].tolist()) * 1.1 / 1e3
        assert end - begin == pytest.approx(replayed[k] / 1e3, rel=1e-9)
    assert {row["tid"] // 5 for row in rows if row["pid"] == 1} == set(
        model.table.rank_of[1].tolist()
    )
