"""Test the timeline of a replayed step: it has the operations of the schedule."""

import numpy as np
import pytest
from builders import made_trials

import fastcomm
from fastcomm.compat.dpro import schedule
from fastcomm.compat.dpro.schedule import replay_timeline
from fastcomm.timeline.events import KINDS


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial")
    made_trials.tensorflow1(folder)
    return fastcomm.replay_trial(folder, scale=["comm=0.5"])


def sums(step):
    """Time of each rank by kind, in ns."""
    events = step.events
    found = {}
    for rank, kind, busy in zip(
        *(events[name].tolist() for name in ("rank", "kind", "busy")), strict=True
    ):
        found[rank, KINDS[kind]] = found.get((rank, KINDS[kind]), 0) + busy
    return found


def expected(replayed):
    found = {}
    for rank, by_category in enumerate(replayed.by_category().values()):
        found[rank] = sum(ns for name, ns in by_category.items() if name.startswith("operator"))
    return found


def test_both_schedules_have_the_time_of_all_operations(session):
    timeline = replay_timeline(session)
    plain, edited = timeline.steps
    assert timeline.ranks == (0, 1)
    for step, replayed in ((plain, session.replayed), (edited, session.changed)):
        assert step.length == round(max(replayed.end))
        found = sums(step)
        for rank, ns in expected(replayed).items():
            assert found[rank, "compute"] == pytest.approx(ns, abs=len(replayed.end))
    comm = {step.label: sum(v for (_, kind), v in sums(step).items() if kind == "OTHER")
          for step in timeline.steps}  # fmt: skip
    assert 0 < comm["with the edits"] < 0.8 * comm["replayed"]
    assert edited.length < plain.length


def test_the_path_leads_to_the_end(session):
    path = replay_timeline(session).steps[0].path
    assert len(path["start"])
    stops = path["start"] + path["duration"]
    replayed = session.replayed
    last = replayed.end[replayed.end > replayed.start].max()
    assert int(stops.max()) == pytest.approx(last, rel=0.01)
    assert (np.diff(np.sort(path["start"])) >= 0).all()


def test_many_events_are_merged_and_counted(session, monkeypatch):
    monkeypatch.setattr(schedule, "_MOST_REPLAYED", 16)
    plain, *_ = replay_timeline(session).steps
    assert plain.merged > 0
    assert plain.resolution > 0
    whole = 0
    replayer = session.replayed.replayer
    for name, ns in zip(replayer.categories, session.replayed.duration.tolist(), strict=True):
        whole += name != "host" and ns > 0
    assert int(plain.events["count"].sum()) == pytest.approx(whole, abs=whole * 0.02)


def test_processes_without_a_number_are_counted():
    assert schedule._ranks(["host0.rank3", "host0.rank1"]) == {
        "host0.rank3": 3,
        "host0.rank1": 1,
    }
    assert schedule._ranks(["host0.rank0", "host1.rank0"]) == {
        "host0.rank0": 0,
        "host1.rank0": 1,
    }
    assert schedule._ranks([""]) == {"": 0}
