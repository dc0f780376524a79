"""Test predicted steps on other hosts and with fused tensors."""

import json
from itertools import product

import pytest
from builders import made_trials as made
from builders.replay_data import TRIAL, document, needed
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.cli.main import main
from fastcomm.compat.dpro import fusion, rules, trial
from fastcomm.compat.dpro import fusion as replay_fusion
from fastcomm.compat.dpro.predictions import bottlenecks, daydream, on_hosts
from fastcomm.compat.dpro.replayed import RULES, Options
from fastcomm.compat.dpro.result import session
from fastcomm.errors import ConfigError, FastcommError


def written(folder, **how):
    made.mxnet(folder, **{"slice_us": 12, **how})
    read = trial.read(folder)
    return read, session(read).replayed


@needed
@pytest.mark.parametrize("compat", [True, False])
def test_the_baseline_equals_the_reference(compat):
    read = trial.read(TRIAL)
    made_of = session(read, Options(rules=rules.RULES if compat else RULES)).replayed.replayer
    found = daydream(made_of, read.parameters.bytes_of)
    ends = {pid: round(end / 1e6, 3) for pid, end in found.by_pid().items()}
    assert ends == document("trial/expected/summary.json")["replay"]["daydream_step_end"]


def test_the_baseline_sends_each_tensor_at_its_bytes_over_the_bandwidth(tmp_path):
    read, replayed = written(tmp_path)
    found = daydream(replayed.replayer, read.parameters.bytes_of, bandwidth=8e6)
    spans = dict(zip(found.replayer.graph.nodes, found.duration.tolist(), strict=True))
    assert spans["host0.rank0->Comm.0"] == 48 / 8e6 * 1e9
    with pytest.raises(FastcommError, match="does not have the size of tensor 1"):
        daydream(replayed.replayer, {0: 3, 2: 3})


def test_predicting_the_same_number_of_hosts_gives_the_measured_time(tmp_path):
    read, replayed = written(tmp_path, shape=(3, 1))
    assert on_hosts(read, replayed.replayer, 3).mean_ns == pytest.approx(replayed.mean_ns)


@pytest.mark.parametrize(("hosts", "larger"), [(2, 2.0), (5, 0.5)])
def test_chunks_are_as_much_longer_as_hosts_are_fewer(tmp_path, hosts, larger):
    read, replayed = written(tmp_path, shape=(3, 1))
    found = on_hosts(read, replayed.replayer, hosts)
    taken = zip(found.replayer.names, found.duration.tolist(), strict=True)
    slices = [each for name, each in taken if name.sub_op in {"SEND", "RECV"}]
    assert set(slices) == {12_000 * larger}
    assert len(slices) == 3 * 2 * hosts * 2 * (hosts - 1)
    assert len(found.by_pid()) == hosts


def test_other_hosts_need_a_ring_of_two_or_more(tmp_path):
    read, replayed = written(tmp_path / "ring")
    with pytest.raises(ConfigError, match="a ring of 1 hosts: expected 2 or more"):
        on_hosts(read, replayed.replayer, 1)
    read, replayed = written(tmp_path / "tree", network="tree")
    with pytest.raises(FastcommError, match="no rings of NCCL"):
        on_hosts(read, replayed.replayer, 2)


@given(st.floats(0, 5), st.floats(0, 1e6), st.lists(st.integers(1, 10**9), min_size=2))
def test_a_line_is_recovered_from_its_points(slope, offset, sizes):
    found = replay_fusion.fitted([(size, slope * size + offset) for size in sizes])
    for size in sizes:
        assert found.time(size) == pytest.approx(slope * size + offset, rel=1e-6, abs=1e-3)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1))
def test_no_line_of_small_whole_numbers_is_closer_than_the_one_found(points):
    def squares(slope, offset):
        return sum((slope * size + offset - time) ** 2 for size, time in points)

    found = replay_fusion.fitted(points)
    assert found.slope >= 0
    assert found.offset >= 0
    best = min(squares(k / 2, b) for k, b in product(range(8), range(0, 100, 7)))
    assert squares(found.slope, found.offset) <= best + 1e-6


def test_a_tenth_of_the_groups_is_held_out_of_the_fit(tmp_path):
    _, replayed = written(tmp_path)
    few = replay_fusion.cost_model(replayed.replayer, {(0,): 48, (1,): 8, (2,): 32})
    assert few.error is None
    assert few.time("host0.rank0", "SEND", 99) == pytest.approx(12_000)
    assert few.time("nobody", "SEND", 99) == 0
    # With nine smaller groups that were never sent, tensor 0 is the tenth.
    more = {(i + 10,): i for i in range(7)} | {(0,): 48, (1,): 8, (2,): 32}
    assert replay_fusion.cost_model(replayed.replayer, more).error == pytest.approx(0)


def test_fusing_pays_while_the_first_tensor_is_still_sent():
    assert replay_fusion.worth_fusing(end_comm=100, end_comp=50, fused=70, alone=40)
    assert not replay_fusion.worth_fusing(end_comm=70, end_comp=50, fused=70, alone=40)


def test_the_search_finds_the_best_of_all_groups(tmp_path):
    read, replayed = written(tmp_path, shape=(3, 1))
    found = fusion.fusion(read, replayed.replayer, 30)
    order = fusion._ready(found.before)
    candidates = fusion._Candidates(trial=read, replayer=replayed.replayer, model=found.model)
    every = [
        candidates.replay(fusion._Cut(order=order, starts=frozenset(starts)).groups).mean_ns
        for starts in ((), (1,), (2,), (1, 2))
    ]
    assert found.replayed.mean_ns == pytest.approx(min(every))
    # A slice takes the same whatever its size: one group beats three.
    assert found.groups == ((0, 1, 2),)
    assert found.speedup > 1.2
    again = fusion.fusion(read, replayed.replayer, 30)
    assert again.replayed.mean_ns == found.replayed.mean_ns


def test_the_search_changes_nothing_without_candidates_or_sizes(tmp_path):
    made.tensorflow1(tmp_path / "one")
    one = trial.read(tmp_path / "one")
    found = fusion.fusion(one, session(one).replayed.replayer, 5)
    assert (found.groups, found.speedup) == (((0,),), 1.0)
    (tmp_path / "one" / "host0" / "0" / "metadata.json").write_text("{}")
    unknown = trial.read(tmp_path / "one")
    with pytest.raises(FastcommError, match="does not have the size of tensor 0"):
        fusion.fusion(unknown, session(unknown).replayed.replayer, 5)
    made.mxnet(tmp_path / "none", network="none")
    none = trial.read(tmp_path / "none")
    with pytest.raises(FastcommError, match="no nccl_rank_graph"):
        fusion.fusion(none, session(none).replayed.replayer, 5)


def test_the_command_prints_the_requested_predictions(tmp_path):
    made.mxnet(tmp_path / "trial", shape=(3, 1), slice_us=12)

    def run(*words):
        done = CliRunner().invoke(main, ["dpro", "replay", str(tmp_path / "trial"), *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    words = ("--daydream", "--hosts", "2", "--fuse", "9", "--barrier", "--clip-updates")
    said = json.loads(run(*words, "--json"))
    assert list(said["daydream"]["step_end_ns"]) == ["host0.rank0"]
    assert said["other_hosts"]["hosts"] == 2
    assert said["fusion"]["groups"] == [[0, 1, 2]]
    assert said["fusion"]["before_ns"] > said["fusion"]["mean_step_ns"]
    text = run(*words, "--host-clocks", "causality")
    assert "Daydream's method" in text
    assert "on 2 hosts with one GPU each: " in text
    assert "tensors sent together as 0+1+2: " in text
    assert "daydream" not in json.loads(run("--json"))


@needed
def test_tensors_alone_take_less_than_all():
    whole = session(trial.read(TRIAL)).replayed
    one = whole.replayer.only([2])
    both = whole.replayer.only([1, 2])
    assert one.replayer.graph.groups == ((2,),)
    categories = {name.op_cat for name in one.replayer.names}
    assert categories == {"BW", "Comm", "UPDATE_"}
    assert 0 < one.end.max() < both.end.max() < whole.end.max()
    for tensors in ([9], [1, 9]):
        with pytest.raises(FastcommError, match="tensor 9; the step has 0-"):
            whole.replayer.only(tensors)


@needed
@pytest.mark.parametrize("workers", [1, 3])
def test_bottlenecks_are_sorted_by_saved_time(workers):
    found = session(trial.read(TRIAL))
    removed = bottlenecks(found.replayed, found.path, workers=workers)
    saved = [each.saved_ns for each in removed]
    assert saved == sorted(saved, reverse=True)
    assert removed[0].node.startswith("host1.rank1->")  # the rank that computes slower
