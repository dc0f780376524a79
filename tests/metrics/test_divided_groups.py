"""Test the parallelism of process groups whose ranks do different things: it is one."""

import json

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.opened import open_run

import fastcomm
from fastcomm.convert.perfetto import convert
from fastcomm.metrics.computation import compute_metrics
from fastcomm.timeline.events import KINDS
from fastcomm.timeline.timeline import find_timeline

ALL = {
    "Process_Group_Ranks": "[0, 1]",
    "Group_size": 2,
    "Process_Group_Name": "0",
    "Process_Group_Description": "default_pg",
}
EXPERTS = {**ALL, "Process_Group_Description": "mesh_ep_shard", "Process_Group_Name": "3"}
SIZES = {"In_msg_nelems": 1000, "Out_msg_nelems": 1000, "dtype": "Float"}


def run(folder, computing, stream=(20, 20), exchanging=()):
    """Write two ranks, of which some compute, and some exchange in a group of experts."""
    for rank in range(2):
        events = []
        for step in range(3):
            at = 1000 * step
            events.append(k.mark(f"ProfilerStep#{step}", at, 1000))
            if rank in computing:
                events += [
                    k.launch(at + 5, 10 * step + 1),
                    k.kernel("gemm", at + 10, 300, correlation=10 * step + 1),
                ]
            events.append(k.all_reduce(at + 400, 100, stream[rank], Seq=step, **ALL))
            if exchanging:
                events.append(k.all_reduce(at + 600, 50, 22, Seq=2 * step, **EXPERTS))
            if rank in exchanging:
                exchange = {"Collective_name": "all_to_allv", **SIZES, **EXPERTS}
                events.append(
                    k.kernel(
                        "ncclDevKernel_SendRecv", at + 700, 50, 22, Seq=9 + step, **exchange
                    )
                )
        k.write(folder / f"rank{rank}.json", events, rank=rank, world=2)
    return folder


def divided(warnings):
    return [text for text in warnings if "different parallelisms" in text]


@pytest.mark.parametrize("computing", [(0, 1), (0,), (1,)])
def test_a_group_is_what_the_ranks_say_that_know_it(tmp_path, computing):
    metrics = fastcomm.open(run(tmp_path, computing)).metrics()
    assert not divided(metrics.warnings)
    assert set(metrics.volume) == {"DP"}
    (group,) = metrics.tables["group_tags"].to_pylist()
    assert (group["tag"], group["tag_source"], group["on_ranks"]) == ("DP", "heuristic", 2)


def test_what_no_rank_knows_stays_unknown(tmp_path):
    metrics = fastcomm.open(run(tmp_path, ())).metrics()
    assert set(metrics.volume) == {"OTHER"}
    assert not divided(metrics.warnings)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_exchange_of_one_rank_makes_a_group_that_of_experts(tmp_path, workers):
    opened = fastcomm.open(run(tmp_path, (0, 1), exchanging=(1,)), workers=workers)
    metrics = opened.metrics()
    tags = {
        (row["description"], row["tag"]) for row in metrics.tables["group_tags"].to_pylist()
    }
    assert ("mesh_ep_shard", "EP") in tags
    assert ("mesh_ep_shard", "DP") not in tags
    path = opened.critical_path()
    rows = path.across.collectives.to_pylist()
    assert {row["tag"] for row in rows if row["group"] == "mesh_ep_shard"} == {"EP"}


def test_a_rule_for_one_rank_is_one_for_its_groups(tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[tags]]\nstream = 20\ntag = "TP"\n')
    folder = tmp_path / "run"
    folder.mkdir()
    metrics = fastcomm.open(run(folder, (0, 1), stream=(20, 24)), config=rules).metrics()
    assert set(metrics.volume) == {"TP"}


def test_rules_that_contradict_each_other_are_named(tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[tags]]\nstream = 20\ntag = "TP"\n[[tags]]\nstream = 24\ntag = "CP"\n')
    folder = tmp_path / "run"
    folder.mkdir()
    metrics = fastcomm.open(run(folder, (0, 1), stream=(20, 24)), config=rules).metrics()
    (text,) = divided(metrics.warnings)
    assert "1 process group: CP on rank 1, TP on rank 0;" in text
    assert set(metrics.volume) == {"TP", "CP"}


def test_timelines_draw_the_parallelism_of_the_group(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    opened = open_run(run(folder, (0,)))
    timeline = find_timeline(opened, compute_metrics(opened))
    kinds = {KINDS[kind] for step in timeline.steps for kind in step.events["kind"].tolist()}
    assert kinds == {"compute", "DP"}
    convert(opened, tmp_path / "run.json")
    drawn = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    categories = {event["cat"] for event in drawn if event["ph"] == "X"}
    assert categories == {"compute", "DP", "step"}


@pytest.mark.parametrize("kind", ["traces", "store"])
@pytest.mark.parametrize(("computing", "exchanging"), [((0,), ()), ((0, 1), (1,))])
def test_queries_have_the_parallelism_of_the_metrics(tmp_path, kind, computing, exchanging):
    traces = tmp_path / "traces"
    traces.mkdir()
    run(traces, computing, exchanging=exchanging)
    invoke("ingest", traces, "-o", tmp_path / "store")
    opened = fastcomm.open(tmp_path / kind)
    groups = opened.metrics().tables["group_tags"].to_pylist()
    tags = {row["description"]: row["tag"] for row in groups}
    assert set(tags.values()) == ({"EP", "OTHER"} if exchanging else {"DP"})
    matched = opened.sql("select group_name, tag from collectives").rows()
    assert {row["group_name"]: row["tag"] for row in matched} == tags
    events = opened.sql("select stream, tag from events where op = 'AllReduce'").rows()
    by_stream = {(row["stream"], row["tag"]) for row in events}
    assert by_stream == {(20, tags["default_pg"])} | {
        (22, tags[name]) for name in tags if "ep" in name
    }


def test_a_query_reads_all_ranks_for_what_a_group_is(tmp_path):
    opened = fastcomm.open(run(tmp_path, (0,)))
    (alone,) = opened.sql("select op from events where rank = 1").reads
    assert alone.ranks == (1,)
    result = opened.sql("select distinct tag from events where rank = 1 and op is not null")
    assert result.reads[0].ranks == (0, 1)
    assert result.rows() == [{"tag": "DP"}]
