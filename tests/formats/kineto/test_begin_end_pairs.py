"""Test events that are two in the file: a begin and an end."""

import json

import numpy as np
import pytest
from builders import kineto_text as k
from builders.commands import invoke

from fastcomm.formats.kineto import categories
from fastcomm.formats.kineto.categories import EVERYTHING, METRICS


def halves(event, *, bare):
    """Return the begin and the end of a complete event; a bare end has only its lane."""
    begin = {key: value for key, value in event.items() if key != "dur"} | {"ph": "B"}
    end = {key: event[key] for key in ("pid", "tid")} if bare else {**begin}
    return [begin, {**end, "ph": "E", "ts": event["ts"] + event["dur"]}]


def nested(events, *, bare):
    """Return begins and ends of events in the order of time, ends first; inner ones inside."""
    rows = []
    for event in events:
        if event.get("ph") != "X":
            rows.append(((-1, 0, 0), event))
            continue
        begin, end = halves(event, bare=bare)
        rows.append(((begin["ts"], 1, -event["dur"]), begin))
        rows.append(((end["ts"], 0, -begin["ts"]), end))
    return [row for _, row in sorted(rows, key=lambda row: row[0])]


EVENTS = [
    k.mark("ProfilerStep#1", 0, 100),
    k.mark("ProfilerStep#2", 100, 100),
    *(k.kernel("gemm", 10 + 20 * n, 15) for n in range(9)),
    k.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 190, 8, stream=20),
]


def columns(path, selection=EVERYTHING):
    scanned, _ = categories.scan(path, selection)
    kept = {
        name: column for name, column in scanned.columns.items()
        if name not in ("offset", "position", "name", "detail", "process", "thread")
    }  # fmt: skip
    kept["name"] = np.array([scanned.name(row) for row in range(len(kept["kind"]))])
    order = np.lexsort((kept["stop"], kept["start"], kept["name"]))
    return {name: column[order].tolist() for name, column in kept.items()}


@pytest.mark.parametrize("selection", [METRICS, EVERYTHING])
@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
def test_a_begin_and_an_end_are_an_event(tmp_path, selection, bare, shuffled):
    whole = k.write(tmp_path / "whole.json", EVENTS)
    rows = nested(EVENTS, bare=bare)
    if shuffled:
        rows = rows[::-1]
    split = k.write(tmp_path / "split.json", rows)
    assert columns(split, selection) == columns(whole, selection)


def test_metrics_of_begins_and_ends_are_those_of_whole_events(tmp_path):
    results = []
    for name, events in (("a", EVENTS), ("b", nested(EVENTS, bare=True))):
        path = k.write(tmp_path / f"{name}.json", events)
        data = json.loads(invoke("metrics", path, "--json").stdout)
        results.append([data[key] for key in ("breakdown", "iteration", "volume", "warnings")])
    assert results[0] == results[1]
    assert results[0][0]["exact"]["compute"] > 0


def test_whole_events_and_halves_may_be_in_one_file(tmp_path):
    mixed = [*EVENTS[:5], *nested(EVENTS[5:], bare=False)]
    whole, split = (
        k.write(tmp_path / name, rows) for name, rows in (("a.json", EVENTS), ("b.json", mixed))
    )
    assert columns(split, METRICS) == columns(whole, METRICS)


def test_an_end_closes_the_innermost_event_also_of_those_that_are_not_selected(tmp_path):
    outer, inner = k.kernel("gemm", 10, 80), {**k.kernel("other", 20, 30), "cat": "overhead"}
    path = k.write(tmp_path / "rank0.json", nested([outer, inner], bare=True))
    found = columns(path, METRICS)
    assert (found["name"], found["start"], found["stop"]) == (["gemm"], [10_000], [90_000])


def test_ends_without_a_begin_and_begins_without_an_end_are_reported(tmp_path):
    (begin, end), (open_, _) = (halves(event, bare=True) for event in EVENTS[2:4])
    path = k.write(tmp_path / "rank0.json", [end, begin, end, open_])
    scanned, _ = categories.scan(path, METRICS)
    assert len(scanned.columns["kind"]) == 1
    (warning,) = scanned.warnings
    assert "1 event without an end, and 1 ends without a begin" in warning


def test_names_decide_which_of_the_selected_halves_are_kept(tmp_path):
    rows = [
        {**k.mark("aten::short", 10, 5), "cat": "cpu_op"},
        {**k.mark("aten::long", 20, 50), "cat": "cpu_op"},
        {**k.mark("c10d::allreduce_", 80, 5), "cat": "cpu_op"},
        {**k.mark("f", 90, 60), "cat": "python_function"},
    ]
    whole = k.write(tmp_path / "whole.json", rows)
    split = k.write(tmp_path / "split.json", nested(rows, bare=True))
    assert columns(split, METRICS) == columns(whole, METRICS)
