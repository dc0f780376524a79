"""Test BytePS trials: pushes to servers, sums and pulls."""

import json
from itertools import pairwise

import pytest
from builders import made_trials as made

from fastcomm.compat.dpro import communication, trial
from fastcomm.compat.dpro.dependency import Servers
from fastcomm.compat.dpro.result import session
from fastcomm.compat.dpro.statistics import statistics
from fastcomm.compat.dpro.uniform import Event, of_events
from fastcomm.errors import TraceFileError

BACKWARD, UPDATE = "BW.gradients/dense/MatMul_grad", "UPDATE_.Momentum/update/Apply"


def chain_of(worker, part):
    there, back = f"worker_{worker}::server_1", f"server_1::worker_{worker}"
    return [
        f"traces_{worker}.rank0->{BACKWARD}",
        f"{there}->Comm.0.PUSH_REQ~>{there}::{part}",
        f"{back}->Comm.0.PUSH_RES~>{back}::{part}",
        f"{there}->Comm.0.PULL_REQ~>{there}::{part}",
        f"{back}->Comm.0.PULL_RES~>{back}::{part}",
        f"traces_{worker}.rank0->{UPDATE}",
    ]


def server_of(part):
    own = f"server_1_t{part}->Comm.0."
    return [
        f"{own}COPY_FIRST~>server_t{part}::~PART{part}",
        f"{own}SUM~>server_t{part}::0::~PART{part}",
        f"{own}COPY_MERGED~>server_t{part}::~PART{part}",
    ]


@pytest.mark.parametrize("late", [0, 1])
def test_tensors_are_pushed_summed_in_the_order_of_arrival_and_pulled_by_all(tmp_path, late):
    made.byteps(tmp_path, late=late)
    found = session(trial.read(tmp_path)).replayed
    graph = found.replayer.graph
    edges = {(a, b) for a, b in graph.edges if "Comm." in a + b}
    wanted = set()
    for part in (0, 1):
        served = server_of(part)
        wanted |= set(pairwise(served))
        for worker in (0, 1):
            chain = chain_of(worker, part)
            wanted |= set(pairwise(chain))
            wanted |= {(chain[1], served[int(worker == late)]), (served[-1], chain[4])}
    assert edges == wanted
    devices = set(found.replayer.devices)
    assert {"worker_0::server_1->Comm", "server_1_t1->ServerOp"} <= devices
    assert list(found.by_pid()) == ["traces_0.rank0", "traces_1.rank0"]


def test_the_replay_uses_measured_times_of_each_link_and_thread(tmp_path):
    made.byteps(tmp_path)
    read = trial.read(tmp_path)
    found = session(read)
    avg = dict(
        zip(
            found.replayed.replayer.graph.nodes,
            found.replayed.replayer.measured.avg.tolist(),
            strict=True,
        )
    )
    assert [avg[node] for node in chain_of(1, 0)[1:5]] == [5000, 1000, 1000, 4000]
    assert [avg[node] for node in server_of(1)] == [1000, 2000, 3000]
    assert found.measured.ranks.keys() == found.replayed.by_pid().keys()
    categories = statistics(read.trace).categories
    assert categories["ServerOp"]["op_cnt"] == 6
    assert categories["Comm.PULL_RES"]["cnt"] == 8


def test_pushes_are_ordered_by_the_mean_of_their_times():
    trace = of_events(
        Event(
            name="Comm.0.PUSH_REQ",
            pid=f"worker_{worker}::server_1",
            suffix=f"worker_{worker}::server_1::0",
            start=start,
            dur=10,
            lane="0",
            cat="Comm",
        )
        for worker, start in [(0, 60), (1, 0), (1, 80)]
    )
    pushed = Servers.of(trace).pushed
    assert pushed == {(0, "0"): (("worker_1", "server_1"), ("worker_0", "server_1"))}


def window(tmp_path, counts, first=10, steps=10):
    rows = [made._process("worker_0 -> server_0", 0)]
    for (tensor, op), count in counts.items():
        for i in range(count):
            rows += [made._b(f"{tensor}.{op}", i, 0), made._e(i + 1, 0)]
    made.write(tmp_path / communication.COMM, rows)
    found = {}
    for event in communication.byteps_events(tmp_path, {}, first, steps):
        found.setdefault(event.name, []).append((event.start // 1000, event.step))
    return found


def test_steps_count_from_the_tenth_pull_and_the_push_behind_it(tmp_path):
    found = window(tmp_path, {("0", "PUSH"): 31, ("0", "PULL"): 30})
    assert found["Comm.0.PULL_REQ"] == [(10 + i, i) for i in range(10)]
    assert found["Comm.0.PUSH_REQ"] == [(11 + i, i) for i in range(10)]


def test_a_short_trace_counts_from_its_beginning(tmp_path):
    found = window(tmp_path, {("0", "PUSH"): 4, ("0", "PULL"): 3})
    assert found["Comm.0.PULL_REQ"] == [(0, 0), (1, 1), (2, 2)]
    assert found["Comm.0.PUSH_REQ"] == [(1, 0), (2, 1), (3, 2)]


def test_links_that_are_far_from_most_do_not_count(tmp_path):
    counts = {("0", "PULL"): 5, ("1", "PULL"): 5, ("2", "PULL"): 6, ("3", "PULL"): 7}
    found = window(tmp_path, counts)
    assert set(found) == {"Comm.0.PULL_REQ", "Comm.1.PULL_REQ", "Comm.2.PULL_REQ"}
    counts = {("0", "PUSH"): 5, ("1", "PUSH"): 5, ("2", "PUSH"): 7, ("3", "PUSH"): 8}
    assert "Comm.2.PUSH_REQ" in window(tmp_path, counts)
    assert "Comm.3.PUSH_REQ" not in window(tmp_path, counts)


def test_non_gradients_and_unmatched_ends_are_ignored(tmp_path):
    assert window(tmp_path, {("broadcast", "PULL"): 3}) == {}
    made.write(tmp_path / communication.COMM, [made._e(3, 0), {"ph": "C"}])
    assert communication.byteps_events(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("process", "name"),
    [
        ("worker_0", "0.PUSH"),
        ("worker_0 -> server_0", "0.SUM"),
        ("server_0_t1", "0.PUSH"),
        ("worker_0 -> server_0", "PUSH"),
    ],
)
def test_events_of_neither_a_link_nor_a_server_are_an_error(tmp_path, process, name):
    rows = [made._process(process, 0), made._b(name, 1, 0), made._e(2, 0)]
    made.write(tmp_path / communication.COMM, rows)
    with pytest.raises(
        TraceFileError, match=r"comm_timeline\.json: .* expected <tensor>\.PUSH"
    ):
        communication.byteps_events(tmp_path, {})


def test_a_damaged_timeline_is_an_error_with_its_path(tmp_path):
    made.byteps(tmp_path)
    (tmp_path / communication.COMM).write_text(json.dumps([{"ph": "B", "pid": 1}]))
    with pytest.raises(TraceFileError, match=r"comm_timeline\.json: invalid event"):
        trial.read(tmp_path)
