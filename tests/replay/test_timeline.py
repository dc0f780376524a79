"""Test the timeline of a replayed step: it has the operations of the schedule."""

import numpy as np
import pytest

import fastcomm
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.timeline import timeline as timelines
from fastcomm.timeline.events import KINDS
from fastcomm.timeline.timeline import replay_timeline


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write(Job.of(4, steps=2, layers=2, micro_batches=2), folder)
    return fastcomm.open(folder).replay(step=11, scale=["comm:TP=0.5"])


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
    for pid, by_category in replayed.by_category().items():
        rank = int(pid.rpartition("rank")[2])
        found[rank] = sum(ns for name, ns in by_category.items() if name.startswith("operator"))
    return found


def test_both_schedules_have_the_time_of_all_operations(session):
    timeline = replay_timeline(session)
    plain, edited = timeline.steps
    assert timeline.ranks == (0, 1, 2, 3)
    for step, replayed in ((plain, session.replayed), (edited, session.changed)):
        assert step.length == round(max(replayed.end))
        found = sums(step)
        for rank, ns in expected(replayed).items():
            assert found[rank, "compute"] == pytest.approx(ns, abs=len(replayed.end))
    tp = {step.label: sum(v for (_, kind), v in sums(step).items() if kind == "TP")
          for step in timeline.steps}  # fmt: skip
    assert tp["with the edits"] < 0.8 * tp["replayed"]
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
    monkeypatch.setattr(timelines, "_MOST_REPLAYED", 400)
    plain, *_ = replay_timeline(session).steps
    assert plain.merged > 0
    assert plain.resolution > 0
    whole = 0
    replayer = session.replayed.replayer
    for name, ns in zip(replayer.categories, session.replayed.duration.tolist(), strict=True):
        whole += name != "host" and ns > 0
    assert int(plain.events["count"].sum()) == pytest.approx(whole, abs=whole * 0.02)


def test_processes_without_a_number_are_counted():
    assert timelines._ranks(["host0.rank3", "host0.rank1"]) == {
        "host0.rank3": 3,
        "host0.rank1": 1,
    }
    assert timelines._ranks(["host0.rank0", "host1.rank0"]) == {
        "host0.rank0": 0,
        "host1.rank0": 1,
    }
    assert timelines._ranks([""]) == {"": 0}
