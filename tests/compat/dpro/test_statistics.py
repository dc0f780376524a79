"""Test uniform traces, trials, steps and statistics."""

import json

import numpy as np
import pytest
from builders.replay_data import FOLDER, TRIAL, assert_same, document, needed
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from oracles import replay as oracle

from fastcomm.cli.main import main
from fastcomm.compat.dpro import rules, trial
from fastcomm.compat.dpro.result import comparison
from fastcomm.compat.dpro.statistics import statistics, step_time
from fastcomm.compat.dpro.trial import RULES, with_steps
from fastcomm.compat.dpro.uniform import Event, Name, category, fused, of_events
from fastcomm.errors import ConfigError, FastcommError
from fastcomm_kernels import grouping
from fastcomm_kernels.arrays import NULL

NAMES = (
    "host0.rank0->FW.net/dense1/MatMul",
    "host0.rank0->Comm.0+1.SEND~>0_1_6_0",
    "Comm.12.Sync",
    "UPDATE_.SGD/update",
    "UPDATE_CAL",
    "host1.rank3->UPDATE_17",
    "OUTPUT0",
    "I/O",
    "I/O_data",
    "END",
    "BW.a.b.c.d",
    "traces_0.rank1->Comm.3.PUSH_REQ~>worker_0::server_1::2",
    "anything at all",
)


@pytest.fixture(scope="module")
def read():
    return trial.read(TRIAL)


def event(name, start, dur=10, pid="host0.rank0", **more):
    more = {"lane": "operator0", "cat": "operator", **more}
    return Event(name=name, pid=pid, start=start * 1000, dur=dur * 1000, **more)


@pytest.mark.parametrize("text", NAMES)
def test_names_survive_splitting_and_joining(text):
    assert str(Name.of(text)) == text


@given(st.text(alphabet="FWBCom._->~+1UPDATE/O ", max_size=30))
def test_any_text_survives_splitting_and_joining(text):
    assert str(Name.of(text)) == text


def test_names_are_split_into_parts():
    name = Name.of("host0.rank0->Comm.0+11.RECV~>0_1_6_0")
    assert (name.pid, name.op_cat, name.sub_op, name.suffix, name.tensors) == (
        "host0.rank0",
        "Comm",
        "RECV",
        "0_1_6_0",
        (0, 11),
    )
    assert Name.of("FW.0+1").tensors == ()


def test_a_fused_operation_is_its_parts_with_the_pid_of_the_first():
    found = fused("host0.rank0->FW.a+b+host0.rank0->FW.c+BW.d")
    assert [str(each) for each in found] == [
        "host0.rank0->FW.a+b",
        "host0.rank0->FW.c",
        "host0.rank0->BW.d",
    ]


@pytest.mark.parametrize(
    ("name", "found", "by_substring"),
    [
        ("Comm.1.SEND", "Comm.SEND", "Comm.SEND"),
        ("Comm.1.Sync", "Comm.other", "Comm.other"),
        ("Comm.1.PUSH_RES", "Comm.PUSH_RES", "Comm.PUSH_RES"),
        ("Comm.1.COPY_FIRST", "ServerOp", "ServerOp"),
        ("FW.Sum_SUM", "operator.FW", "ServerOp"),
        ("BW.FW_grad", "operator.BW", "operator.FW+BW"),
        ("BW.x", "operator.BW", "operator.BW"),
        ("COMP.x", "operator.COMP", "operator.COMP"),
        ("I/O_3", "I/O", "I/O"),
        ("UPDATE_CAL", "operator.UPDATE", "operator.UPDATE"),
        ("OUTPUT1", "operator.OUTPUT", "operator.OUTPUT"),
        ("END", "virtual", "virtual"),
        ("what", "other", "other"),
    ],
)
def test_categories_are_found_by_token_or_by_substring(name, found, by_substring):
    assert (category(name), rules.category(name)) == (found, by_substring)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10**12)), min_size=1, max_size=60))
def test_durations_by_key_agree_with_the_definition(pairs):
    key, value = np.array(pairs, np.int64).T.copy()
    first, values = grouping.grouped(key.astype(np.int32), value, np.int64(6))
    total, least, most, median, variance = grouping.described(first, values)
    for k, wanted in oracle.described(pairs).items():
        assert (total[k], least[k], most[k], median[k]) == wanted[:4]
        assert variance[k] == pytest.approx(wanted[4], rel=1e-9)
        assert values[first[k] : first[k + 1]].tolist() == [v for q, v in pairs if q == k]


@needed
@pytest.mark.parametrize(
    "vector",
    document("steps/vectors.json")["vectors"] if FOLDER.is_dir() else [],
    ids=lambda v: v["name"],
)
def test_steps_by_every_rule_equal_the_reference(vector):
    cats = [category(name) for name in vector["events"]]
    start, dur = [1000 * ts for ts in vector["ts_us"]], [1000 * vector["dur_us"]] * len(cats)
    for letter, rule in {
        "A": "seed",
        "A_operator_cursor": "operator",
        "B": "update",
        "C": "gap",
    }.items():
        assert RULES[rule](cats, start, dur) == vector["expected"][letter], rule
    made = [
        event(name, ts, vector["dur_us"])
        for name, ts in zip(vector["events"], vector["ts_us"], strict=True)
    ]
    assert of_events(made).cnt.tolist() == vector["occurrence"]


def test_a_step_rule_for_a_trace_with_steps_is_an_error():
    known = with_steps(of_events([event("FW.a", 0)]))
    with pytest.raises(ConfigError, match="has steps; leave --step-rule out"):
        with_steps(known, "gap")


def test_an_unknown_step_rule_is_an_error_that_names_the_known():
    with pytest.raises(ConfigError, match="expected one of update, seed"):
        with_steps(of_events([event("FW.a", 0)]), "mine")


@needed
def test_statistics_equal_those_of_dpro(read):
    found = rules.statistics(read.trace, read.topology)
    wanted = document("trial/expected/name2sta.json.gz")
    assert list(found.names) == list(wanted)
    assert_same(rules.operations(found), wanted)
    assert_same(found.categories, document("trial/expected/cat2sta.json"))
    assert found.table().num_rows == len(wanted)


@needed
@pytest.mark.parametrize("compat", [True, False])
def test_step_times_equal_those_of_dpro(read, compat):
    found = (rules.step_time if compat else step_time)(read.trace)
    wanted = document("trial/expected/summary.json")["iteration"]
    assert found.time_ns / 1e6 == pytest.approx(wanted["iter_time_ms"], abs=1e-9)
    assert found.opt_step == wanted["opt_step"]
    assert_same([each / 1e6 for each in found.steps], wanted["per_step_mean_ms"])
    for pid, rank in found.ranks.items():
        assert_same([each / 1e6 for each in rank.time], wanted["per_pid_iteration_ms"][pid])
        for part, value in wanted["per_pid_parts"][pid].items():
            assert rank.mean_ns(part.removesuffix("_ms")) / 1e6 == pytest.approx(
                value, abs=5e-7
            )
    if compat:
        parts = [each / 1e6 for each in found.ranks["host0.rank0"].parts["fw"]]
        assert parts == pytest.approx([3.03, 2.44, 1.82])


@needed
@pytest.mark.parametrize("rule", ["seed", "operator", "update"])
def test_steps_are_found_in_a_trial_without_steps(read, rule):
    from dataclasses import replace

    bare = replace(read.trace, step=np.full(len(read.trace), NULL))
    found = step_time(with_steps(bare, rule))
    assert (len(found.steps), found.time_ns / 1e6) == (3, pytest.approx(11.2541667))
    whole = step_time(with_steps(bare, "gap"))
    assert whole.time_ns / 1e6 == pytest.approx(34.5625)


@needed
def test_by_default_every_step_is_clipped_and_counted(read):
    plain = statistics(read.trace)
    found = statistics(read.trace, read.topology)
    assert found.total.sum() <= plain.total.sum()
    k = found.names.index("host0.rank0->Comm.2.RECV~>0_0_0_0")
    times = rules.operations(found)[found.names[k]]
    assert times["avg"] == pytest.approx(sum(times["time"]) / 3)


def test_a_trace_without_operators_has_no_steps():
    with pytest.raises(FastcommError, match="no operator of any rank"):
        step_time(with_steps(of_events([event("Comm.0.SEND", 0)])))


def test_step_time_takes_the_largest_end_and_counts_ranks_with_fewer_steps():
    first = [event("FW.a", 0, 50, step=0), event("BW.b", 10, 10, step=0)]
    second = [event("FW.a", 100, 10, step=1), event("FW.c", 112, 3, step=1)]
    other = [event("FW.a", 0, 70, pid="host0.rank1", step=0)]
    trace = of_events(first + second + other)
    found = step_time(trace)
    assert found.ranks["host0.rank0"].time == (50_000, 15_000)
    assert found.steps == (60_000.0,)
    # The last step has no backward: dPRO leaves it out, and takes the end of the op begun last.
    assert rules.step_time(trace).ranks["host0.rank0"].time == (20_000,)


def test_a_step_with_a_barrier_begins_at_the_next_forward_op():
    made = [event("FW.input_barrier", 0, 5, step=0), event("FW.a", 20, 10, step=0)]
    assert step_time(of_events(made)).time_ns == 10_000


def test_operations_are_compared_by_name():
    before = statistics(of_events([event("FW.a", 0, 10), event("FW.b", 20, 0)]))
    after = statistics(
        of_events([event("FW.a", 0, 15), event("FW.c", 20), event("FW.b", 40, 1)])
    )
    found = comparison(before, after)
    assert (found.added, found.removed) == (("host0.rank0->FW.c",), ())
    assert [(c.absolute_ns, c.relative) for c in found.changed] == [(5000, 0.5), (1000, None)]


@needed
def test_the_commands_print_and_write_their_results(tmp_path):
    def run(*words):
        return CliRunner().invoke(main, list(map(str, words)))

    said = run("dpro", "stats", TRIAL, "--compat", "dpro", "--json", "--output", tmp_path / "o")
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert (found["opt_step"], len(found["ops"])) == (2, 378)
    assert json.loads((tmp_path / "o" / "stats.json").read_text()) == found
    whole = tmp_path / "whole.json.gz"
    assert "1134 events of 4 ranks" in run("dpro", "convert", TRIAL, whole).stdout
    top = json.loads(run("dpro", "stats", whole, "--sort", "--top", "3", "--json").stdout)
    means = [row["avg_ns"] for row in top["ops"].values()]
    assert len(means) == 3
    assert means == sorted(means, reverse=True)
    text = run("dpro", "stats", whole, "--sort", "--top", "3").stdout
    assert "11.25 ms a step" in text
    assert "375 more operations" in text
    assert "0 added, 0 removed" in run("dpro", "stats", TRIAL, "--against", whole).stdout
    compared = json.loads(run("dpro", "stats", TRIAL, "--against", TRIAL, "--json").stdout)
    nothing = {"added": [], "removed": [], "changed": {}, "warnings": []}
    assert compared == {"schema_version": 1, **nothing}
    assert run("dpro", "convert", whole, whole).exit_code == 1
