"""Test alignment of host clocks by Sync and by SEND and RECV."""

from itertools import product

import numpy as np
import pytest
from builders import made_trials as made
from builders.replay_data import TRIAL, needed
from hypothesis import given
from hypothesis import strategies as st
from oracles import trials as oracle

from fastcomm.compat.dpro import alignment, trial
from fastcomm.compat.dpro.alignment import Pairs
from fastcomm.errors import ConfigError

LEAST = {
    "causality": lambda shift: sum(each**2 for each in shift),
    "drift": lambda shift: sum(abs(a - b) for a, b in zip(shift, [*shift[1:], 0], strict=True)),
}


def pairs_of(bounds):
    """One pair of a SEND of no length and a RECV for each bound, in us."""
    hosts = np.array(list(bounds), np.int64).reshape(-1, 2)
    most = np.array(list(bounds.values()), np.float64) * 1000
    zero = np.zeros(len(most))
    return Pairs(
        send_host=hosts[:, 0],
        receive_host=hosts[:, 1],
        send=np.array([zero, zero]),
        receive=np.array([most - 10, most]),
    )


BOUNDS = st.dictionaries(
    st.tuples(st.integers(0, 2), st.integers(0, 2)).filter(lambda pair: pair[0] != pair[1]),
    st.integers(-4, 4),
    min_size=1,
)


@given(BOUNDS, st.sampled_from(sorted(LEAST)))
def test_causality_chooses_the_smallest_shifts(bounds, mode):
    shift, violated = alignment.solve(pairs_of(bounds), 3, mode)
    shift = (shift / 1000).tolist()
    assert shift[0] == 0
    grid = [
        (0, a, b)
        for a, b in product(range(-9, 10), repeat=2)
        if oracle.feasible((0, a, b), bounds)
    ]
    relaxed = {pair: most + violated / 1000 for pair, most in bounds.items()}
    assert oracle.feasible(shift, relaxed)
    assert bool(grid) == (violated < 1e-3)
    if grid:
        assert LEAST[mode](shift) <= min(map(LEAST[mode], grid)) + 1e-6


def test_unsatisfiable_causality_is_violated_minimally():
    # Round trips of 0 us that take -6 us in all: each of the two bounds gives 3.
    shift, violated = alignment.solve(pairs_of({(0, 1): -4, (1, 0): -2}), 2, "causality")
    assert violated == pytest.approx(3000)
    assert shift.tolist() == pytest.approx([0, 1000])


def test_variance_equalizes_long_receives():
    # The RECVs of 20 and 30 us wait for SENDs that begin 20 us and 10 us before they end: with
    # any shift of host 1 against host 0 they differ by 10, until the shorter is whole.
    found = Pairs(
        send_host=np.zeros(5, np.int64),
        receive_host=np.ones(5, np.int64),
        send=np.array([[10, 40, 0, 0, 0], [11, 41, 1, 1, 1]]) * 1e3,
        receive=np.array([[10, 20, 9, 9, 9], [30, 50, 10, 10, 10]]) * 1e3,
    )
    smallest, _ = alignment.solve(found, 2, "causality")
    shift, _ = alignment.solve(found, 2, "variance")
    clipped = [np.clip([20 + s / 1e3, 10 + s / 1e3], 0, [20, 30]) for s in (0, shift[1])]
    assert smallest.tolist() == [0, 0]
    assert np.var(clipped[1]) < np.var(clipped[0]) / 100


def test_without_long_receives_variance_is_the_smallest_shift():
    found = pairs_of({(0, 1): -3})
    assert alignment.solve(found, 2, "variance")[0].tolist() == pytest.approx([0, 3000])


@needed
def test_the_last_sync_aligns_the_reference_to_the_nanosecond():
    read = trial.read(TRIAL, align="sync")
    assert {pid: shift for pid, shift in read.shifts.items() if shift} == {
        "host1.rank0": -5_000_000,
        "host1.rank1": -5_000_000,
    }


@needed
@pytest.mark.parametrize("mode", ["causality", "variance", "drift"])
def test_with_causality_no_receive_ends_before_its_send(mode):
    read = trial.read(TRIAL, align=mode)
    hosts = {pid: pid.partition(".")[0] for pid in read.trace.pids}
    found = alignment.pairs_of(read.trace, read.topology, hosts)
    assert len(found.send_host)
    assert (found.receive[1] - found.send[1]).min() >= -1
    assert read.warnings == ()
    # The clock of host1 runs 5 ms ahead, and a slice takes less than a tenth of that.
    assert read.shifts["host1.rank0"] == pytest.approx(-5_000_000, abs=500_000)


def test_without_sync_messages_align_clocks_with_a_warning(tmp_path):
    made.mxnet(tmp_path, ahead=3000)
    for host in range(2):
        path = tmp_path / f"host{host}" / "0" / "comm.json"
        path.write_text(path.read_text().replace('"Sync"', '"horovod.none"'))
    read = trial.read(tmp_path)
    assert read.shifts == {"host0.rank0": 0, "host1.rank0": -3_000_000}
    assert read.warnings == (
        "not every comm.json has a Sync; clocks are aligned by SEND and RECV",
    )
    by_sync = trial.read(tmp_path, align="sync")
    assert "host0.rank0: no Sync in comm.json" in by_sync.warnings[0]
    assert by_sync.shifts == {}
    assert trial.read(tmp_path, align="none").warnings == ()


def test_clocks_without_evidence_stay_unchanged_with_a_warning(tmp_path):
    made.tensorflow1(tmp_path, network="none")
    found = trial.read(tmp_path, align="causality")
    assert found.shifts == {}
    assert "clocks are not aligned" in found.warnings[0]


def test_clocks_that_contradict_each_other_are_aligned_as_well_as_they_can(tmp_path):
    made.mxnet(tmp_path, steps=2)
    path = tmp_path / "host1" / "0" / "comm_detail.json"
    # A SEND that ends late contradicts the next step, where the same slice was received early.
    path.write_text(path.read_text().replace('"dur": 1', '"dur": 9', 1))
    found = trial.read(tmp_path, align="causality")
    assert any("before its SEND, however clocks" in each for each in found.warnings)


def test_one_host_has_one_clock(tmp_path):
    made.mxnet(tmp_path, shape=(1, 2))
    assert trial.read(tmp_path, align="causality").shifts == {}


def test_an_unknown_alignment_is_an_error(tmp_path):
    made.mxnet(tmp_path)
    with pytest.raises(ConfigError, match="invalid alignment 'x': expected one of auto, sync"):
        trial.read(tmp_path, align="x")
