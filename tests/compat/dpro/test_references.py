"""Every reference number of the replay, beside the number that fastcomm computes today.

One table: the number, and what it is of. What is compared in bulk, such as all edges or all
events, is held by the test that `HELD` names.
"""

import re
from functools import cache
from itertools import chain

import numpy as np
import pytest
from builders.places import ROOT, TESTS
from builders.replay_data import FOLDER, TRIAL, needed

from fastcomm.compat.dpro import rules, trial
from fastcomm.compat.dpro.predictions import daydream, durations
from fastcomm.compat.dpro.replayed import Options
from fastcomm.compat.dpro.result import session
from fastcomm.compat.dpro.trial import with_steps
from fastcomm.graph.edits import parse_edits
from fastcomm.options import EditOptions
from fastcomm.stragglers import operations, result
from fastcomm.stragglers.model import JobModel
from fastcomm_kernels.arrays import NULL

MATMUL = "host0.rank0->FW.net/dense1/MatMul"
SLICE = "host0.rank0->Comm.2.RECV~>0_0_0_0"
PIDS = ("host0.rank0", "host0.rank1", "host1.rank0", "host1.rank1")


@cache
def read():
    return trial.read(TRIAL)


@cache
def replay(**options):
    return session(read(), Options(rules=rules.RULES, **options))


@cache
def stats():
    return rules.statistics(read().trace, read().topology)


@cache
def op(name):
    return rules.operation(stats(), stats().names.index(name))


def ends(replayed):
    return [each / 1e6 for each in replayed.by_pid().values()]


def changed(**options):
    made = replay().replayed.replayer
    return ends(made.replay(durations(made, parse_edits(EditOptions(**options)).edits)))


def events(kind):
    trace = read().trace
    lanes = {i for i, name in enumerate(trace.lanes) if name.startswith(kind)}
    return int(np.isin(trace.lane, list(lanes)).sum())


def parts(pid):
    rank = rules.step_time(read().trace).ranks[pid]
    return [rank.mean_ns(part) / 1e6 for part in ("fw", "bw", "update")]


def row(cat):
    keys = ("time", "cnt", "op_cnt", "avg", "max_t")
    return [stats().categories[cat][key] for key in keys]


def bare(rule):
    from dataclasses import replace

    trace = replace(read().trace, step=np.full(len(read().trace), NULL))
    return rules.step_time(with_steps(trace, rule)).time_ns / 1e6


def gaps(kind):
    known = replay().replayed.replayer.measured
    return int(((known.samples if kind == "operator" else known.comm_gap) > 0).sum())


def first_waits():
    made = replay().replayed.replayer
    waits = dict(zip(made.graph.nodes, made.measured.comm_gap.tolist(), strict=True))
    return [waits[f"{pid}->Comm.0.Sync"] / 1e3 for pid in PIDS]


def of_group(what):
    graph = replay().replayed.replayer.graph
    own = "host0.rank0->Comm.1."
    if what == "nodes":
        return sum(node.startswith(own) for node in graph.nodes)
    # An edge is of the rank whose SEND, or whose own part of the group, it begins or ends at.
    return sum(".1." in a + b and "Comm" in a + b for a, b in graph.edges) / 4


@cache
def model():
    return JobModel.of(operations.read(FOLDER / "straggler" / "trace-ST.parquet"))


@cache
def blame():
    return result.stragglers(model())


TRIAL_NUMBERS = [
    ("events", lambda: len(read().trace), 1134),
    ("operator events", lambda: events("operator"), 216),
    ("detail events", lambda: events("comm_detail"), 864),
    ("Horovod events", lambda: events("Comm"), 54),
    ("keys", lambda: len(stats().names), 378),
    ("largest step", lambda: int(read().trace.step.max()), 2),
    ("opt_step", lambda: rules.step_time(read().trace).opt_step, 2),
    ("iter_time", lambda: rules.step_time(read().trace).time_ns / 1e6, 11.2541667),
    (
        "steps",
        lambda: [each / 1e6 for each in rules.step_time(read().trace).steps],
        [11.26425, 11.24725, 11.251],
    ),
    ("parts 0.0", lambda: parts(PIDS[0]), [2.430000, 4.078333, 0.167667]),
    ("parts 0.1", lambda: parts(PIDS[1]), [2.426667, 4.085, 0.168333]),
    ("parts 1.0", lambda: parts(PIDS[2]), [2.431667, 4.075, 0.167333]),
    ("parts 1.1", lambda: parts(PIDS[3]), [2.665333, 4.481667, 0.168]),
    ("MatMul time", lambda: op(MATMUL)["time"], [0.6, 0.61, 0.62]),
    ("MatMul avg", lambda: op(MATMUL)["avg"], 0.61),
    ("MatMul median", lambda: op(MATMUL)["median"], 0.61),
    ("MatMul var", lambda: op(MATMUL)["var"] * 1e5, 6.667),
    ("MatMul id", lambda: op(MATMUL)["id"], 0),
    ("MatMul step_ids", lambda: op(MATMUL)["step_ids"], [0, 380, 757]),
    ("RECV time", lambda: op(SLICE)["time"], [0.139, 0.136, 0.138]),
    ("RECV avg, clipped", lambda: op(SLICE)["avg"], 0.1375),
    ("RECV median", lambda: op(SLICE)["median"], 0.138),
    ("FW", lambda: row("operator.FW"), [29.861, 72, 24, 0.414736, 0.89]),
    ("BW", lambda: row("operator.BW"), [50.160, 96, 32, 0.5225, 0.915333]),
    ("UPDATE", lambda: row("operator.UPDATE"), [2.014, 48, 16, 0.041958, 0.052667]),
    ("SEND", lambda: row("Comm.SEND"), [33.696, 432, 144, 0.078, 0.135667]),
    ("RECV", lambda: row("Comm.RECV"), [33.750, 432, 144, 0.078125, 0.137667]),
    ("other", lambda: row("Comm.other"), [41.921, 54, 18, 0.776315, 3.244]),
    ("shift of host1, us", lambda: read().shifts["host1.rank0"] / 1e3, -5000.0),
    ("bytes", lambda: list(read().parameters.bytes_of.values()), [20480, 2097152, 3211264]),
    ("nodes", lambda: len(replay().replayed.replayer.graph.nodes), 712),
    ("edges", lambda: len(replay().replayed.replayer.graph.source), 1288),
    ("nodes of a rank and group", lambda: of_group("nodes"), 52),
    ("edges of a rank and group", lambda: of_group("edges"), 99),
    ("nodes with operatorGAPoperator", lambda: gaps("operator"), 68),
    ("nodes with operatorGAPComm", lambda: gaps("Comm"), 12),
    ("operatorGAPComm, us", first_waits, [482, 510, 498, 180]),
    (
        "events of the replay",
        lambda: int((replay().replayed.duration[replay().replayed.order] > 0).sum()),
        363,
    ),
    ("mean of the replay", lambda: replay().replayed.mean_ns / 1e6, 11.264667),
    ("error of the replay, %", lambda: round(replay().error * 100, 2), 0.09),
    (
        "plain",
        lambda: ends(replay().replayed),
        [11.332, 11.197667, 11.334667, 11.194333],
    ),
    (
        "computation x 1.5",
        lambda: changed(scale=["compute=1.5"]),
        [14.444167, 14.308, 14.444333, 14.307],
    ),
    (
        "communication x 1.5",
        lambda: changed(scale=["comm=1.5"]),
        [14.088333, 13.886667, 14.092833, 13.881333],
    ),
    (
        "everything x 1.1",
        lambda: changed(scale=["all=1.1"]),
        [12.4417, 12.293933, 12.444633, 12.290267],
    ),
    (
        "MatMul + 1 ms",
        lambda: changed(set=[f"name:{MATMUL}=+1ms"]),
        [12.143667, 12.009333, 12.146333, 12.006],
    ),
    (
        "updates unlimited",
        lambda: ends(replay(unlimited_updates=True).replayed),
        [11.327, 11.192667, 11.329667, 11.189333],
    ),
    ("critical path", lambda: replay().path.length_ns / 1e6, 11.143333),
    ("edges of the execution graph", lambda: replay().path.edges, 1920),
    (
        "Daydream",
        lambda: ends(daydream(replay().replayed.replayer, read().parameters.bytes_of)),
        [6.766],
    ),
    ("rule A", lambda: bare("seed"), 11.2541667),
    ("rule A'", lambda: bare("operator"), 11.2541667),
    ("rule B", lambda: bare("update"), 11.2541667),
    ("rule C", lambda: bare("gap"), 34.5625),
    ("rule D", lambda: bare("none"), 34.5625),
]
IDEAL_S = {
    "forward-compute": 0.085282063,
    "backward-compute": 0.158410238,
    "optimizer": 0.040500479,
    "gc": 0.0,
    "layernorm-grads-all-reduce": 0.000037536,
    "forward-send": 0.000546202,
    "forward-recv": 0.000634015,
    "backward-send": 0.000567883,
    "backward-recv": 0.000591636,
    "params-all-gather": 0.024626705,
    "grads-reduce-scatter": 0.050535679,
    "embedding-grads-all-reduce": 0.010492086,
    "optimizer-clip-main-grad": 0.005128980,
}
SLOWDOWNS = {
    "stage": {"0": 0.998045, "1": 0.983056, "2": 0.982493, "3": 1.232256},
    "dp_rank": {"0": 1.173083, "1": 1.177870},
    "optype": {
        "forward-compute": 1.087499,
        "backward-compute": 1.074156,
        "embedding-grads-all-reduce": 1.009550,
        "grads-reduce-scatter": 1.002667,
        "optimizer-clip-main-grad": 1.002351,
        "optimizer": 1.001477,
        "params-all-gather": 1.001131,
        "layernorm-grads-all-reduce": 1.000003,
        "gc": 1.0,
        "backward-pp-comm": 0.999993,
        "forward-pp-comm": 0.999859,
    },
}
HELD = {
    "names and categories": "test_names_are_split_into_parts",
    "all step vectors": "test_steps_by_every_rule_equal_the_reference",
    "name2sta and cat2sta to 1e-9": "test_statistics_equal_those_of_dpro",
    "step times by rank": "test_step_times_equal_those_of_dpro",
    "alignment to the nanosecond": "test_the_last_sync_aligns_the_reference_to_the_nanosecond",
    "node and edge sets": "test_the_graph_equals_dpro",
    "averages and gaps of all nodes": "test_durations_and_gaps_equal_dpro",
    "every event of the replay": "test_every_replayed_event_equals_dpro",
    "the 66 nodes of the critical path": "test_the_critical_path_of_dpro_is_one_of_ours",
    "the default within 1 %": (
        "test_the_default_replay_is_within_a_percent_of_what_was_measured"
    ),
    "op tables, all fields": "test_the_published_result_is_reproduced",
    "M_S and M_W": "test_the_effects_of_last_stage_and_worst_ranks_are_reproduced",
    "what-ifs 1.00125 and 1.03930": "test_the_what_ifs_of_the_notebook_are_reproduced",
    "106 ops, 165 edges, 34 groups": "test_the_graph_equals_the_worked_example",
    "MXNet": "test_any_mxnet_trace_follows_the_documented_rules",
    "fused tensors": (
        "test_fused_tensors_are_one_group_with_the_mean_of_what_each_was_seen_to_take"
    ),
    "size of a ring's graph": "test_a_ring_passes_data_through_every_rank",
    "updates of three tensors": "test_updates_follow_the_specification",
    "speed of a replay": "test_replay",
    "speed of statistics": "test_statistics",
    "speed of the op tables": "test_simulate",
}


@needed
@pytest.mark.parametrize(
    ("found", "wanted"),
    [(found, wanted) for _, found, wanted in TRIAL_NUMBERS],
    ids=[name for name, _, _ in TRIAL_NUMBERS],
)
def test_the_trial_has_its_reference_numbers(found, wanted):
    assert found() == pytest.approx(wanted, abs=6e-7, rel=5e-5 if wanted == 6.667 else 0)


@needed
def test_the_table_of_operations_has_its_reference_numbers():
    found = blame()
    assert model().table.start.size == 6784
    assert len(model().table.steps) == 32
    assert found.slowdown == pytest.approx(1.178702, abs=6e-7)
    assert found.launch_slowdown == pytest.approx(1.019216, abs=6e-7)
    means = (found.base, found.nodelay.whole, found.ideal.optimizer)
    assert [each.mean() / 1e9 for each in means] == pytest.approx(
        [2.214448, 2.172697, 1.843296], abs=6e-7
    )
    effects = (found.last_stage, found.worst)
    assert [each.rem for each in effects] == pytest.approx([1.219356, 0.031404], abs=6e-7)
    assert [model().ideal_ns[name] / 1e9 for name in IDEAL_S] == pytest.approx(
        list(IDEAL_S.values()), abs=6e-10
    )
    for key, wanted in SLOWDOWNS.items():
        assert found.blocking[key].mean == pytest.approx(wanted, abs=6e-7)


def test_every_reference_number_has_a_test():
    files = [*TESTS.rglob("test_*.py"), *(ROOT / "bench").glob("test_*.py")]
    names = (re.findall(r"^def (\w+)", file.read_text("utf-8"), re.M) for file in files)
    assert set(HELD.values()) <= set(chain.from_iterable(names))
