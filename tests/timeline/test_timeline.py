"""Test the timeline of a run: its events, what is merged or binned, and its moments."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from builders.opened import open_run
from hypothesis import given
from hypothesis import strategies as st
from oracles import timeline as oracle_timeline

import fastcomm
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.findings.finding import ShownEvents
from fastcomm.report.options import ReportOptions
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.timeline import page as pages
from fastcomm.timeline.events import (
    BIN_KINDS,
    EVENTS,
    FIRST_TAG,
    GRAPH,
    KINDS,
    LEVELS,
    merge_short,
    occupancy,
)
from fastcomm.timeline.timeline import _detailed, find_timeline
from fastcomm_kernels.arrays import NULL

RANKS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("job")
    write(Job.of(ranks=RANKS, steps=4, layers=2, micro_batches=2), made)
    return made


@pytest.fixture(scope="module")
def run(folder):
    return open_run(folder)


@pytest.fixture(scope="module")
def metrics(run):
    return compute_metrics(run)


@pytest.fixture(scope="module")
def timeline(run, metrics):
    return find_timeline(run, metrics)


@pytest.fixture(scope="module")
def paths(folder):
    return [folder / f"rank{rank}.pt.trace.json.gz" for rank in range(RANKS)]


def spans_of(metrics, step):
    rows = metrics.tables["iterations"].to_pylist()
    return {
        row["rank"]: (row["start_ns"], row["stop_ns"])
        for row in rows
        if row["iteration"] == step
    }


def rows_of(columns, names):
    """Unpacked events as the oracle has them."""
    ranks = {}
    for rank, instance in zip(columns["rank"], columns["instance"], strict=True):
        ranks.setdefault(instance, []).append(rank)
    return sorted(
        (
            rank,
            KINDS[kind],
            start,
            duration,
            names[name],
            wait if instance >= 0 else -1,
            tuple(sorted(ranks[instance])) if instance >= 0 else (),
        )
        for rank, kind, start, duration, name, wait, instance in zip(
            *(columns[key] for key in ("rank", "kind", "start", "duration", "name")),
            *(columns[key] for key in ("wait", "instance")),
            strict=True,
        )
    )


def test_the_page_has_every_event_of_its_steps(timeline, metrics, paths):
    data = pages.section(timeline).blocks[0].data
    assert len(data["steps"]) == 3
    for step in data["steps"]:
        columns = oracle_timeline.unpacked(step["events"])
        expected = oracle_timeline.events_of_step(paths, spans_of(metrics, step["number"]))
        assert rows_of(columns, data["names"]) == expected
        assert set(columns["count"]) == {1}
        assert columns["busy"] == columns["duration"]


def test_collectives_know_who_was_last_and_how_long_the_others_waited(timeline):
    step = timeline.steps[0]
    waits = np.zeros(len(step.instances["members"]))
    for row, instance in enumerate(step.events["instance"].tolist()):
        if instance == NULL:
            continue
        waits[instance] += step.events["wait"][row]
        assert step.events["start"][row] <= step.instances["last_start"][instance]
        if step.events["rank"][row] == step.instances["last_rank"][instance]:
            assert step.events["start"][row] == step.instances["last_start"][instance]
            assert step.events["wait"][row] == 0
    assert waits.tolist() == step.instances["waits"].tolist()


def test_slowest_median_and_third_step_are_chosen(timeline, metrics):
    times = metrics.tables["iterations"].group_by("iteration").aggregate([("time_ns", "mean")])
    rising = [
        row["iteration"] for row in sorted(times.to_pylist(), key=lambda x: x["time_ns_mean"])
    ]
    assert [step.number for step in timeline.steps] == [rising[-1], rising[1], rising[0]]
    assert [step.label for step in timeline.steps] == ["slowest", "median", "fastest"]


def test_the_critical_path_lies_in_its_step_on_the_same_clock(folder, run, metrics):
    path = fastcomm.open(folder).critical_path()
    timeline = find_timeline(run, metrics, critical=path)
    (step,) = [step for step in timeline.steps if "critical path" in step.label]
    assert all(not len(other.path["rank"]) for other in timeline.steps if other is not step)
    events = {
        (rank, kind, start, start + duration)
        for rank, kind, start, duration in zip(
            *(step.events[name].tolist() for name in ("rank", "kind", "start", "duration")),
            strict=True,
        )
    }
    edges = list(
        zip(*(step.path[name].tolist() for name in ("rank", "kind", "start")), strict=True)
    )
    assert edges
    computes = [edge for edge in edges if edge[1] == KINDS.index("compute")]
    assert all(
        any(r == rank and k == kind and a <= start < b for r, k, a, b in events)
        for rank, kind, start in computes
    )


def test_ranks_without_detail_show_what_takes_most_of_each_bin(run, metrics, paths):
    timeline = find_timeline(run, metrics, ranks=[5])
    assert timeline.detailed == (5,)
    assert set(timeline.steps[0].events["rank"].tolist()) == {5}
    step = timeline.steps[0]
    every = oracle_timeline.events_of_step(paths, spans_of(metrics, step.number))
    edges = np.arange(401) * step.length // 400
    for row in (0, 6):
        rank = timeline.binned[row]
        own = [event for event in every if event[0] == rank]
        tags = KINDS[FIRST_TAG:]
        for bin_ in range(0, 400, 37):
            begin, stop = edges[bin_ : bin_ + 2].tolist()
            shares = {
                "compute": oracle_timeline.busy_share(own, "compute", begin, stop),
                "copy": oracle_timeline.busy_share(
                    own, "copy", begin, stop, above=("compute", *tags)
                ),
                **{
                    tag: oracle_timeline.busy_share(
                        own, tag, begin, stop, above=("compute", *set(tags).difference([tag]))
                    )
                    for tag in tags
                },
            }
            kind, level = divmod(int(step.bins[row, bin_]), LEVELS)
            name = BIN_KINDS[kind]
            if name in shares:
                assert shares[name] == max(shares.values())
                assert level == min(int(shares[name] * LEVELS), LEVELS - 1)
            else:
                assert max(shares.values()) <= 1 - sum(shares.values()) + 1e-9


def test_a_bin_is_that_of_a_whole_graph_whatever_else_runs():
    kinds = ("compute", GRAPH, "TP", "copy")
    columns = {
        "kind": np.array([KINDS.index(kind) for kind in kinds]),
        "start": np.array([0, 50, 60, 90]),
        "duration": np.array([60, 40, 10, 25]),
    }
    cells = occupancy(columns, np.arange(0, 151, 50)).tolist()
    shares = [("compute", 1), (GRAPH, 40 / 50), ("idle", 35 / 50)]
    assert cells == [
        BIN_KINDS.index(kind) * LEVELS + min(int(share * LEVELS), LEVELS - 1)
        for kind, share in shares
    ]


def test_the_straggler_is_shown_at_a_collective_that_it_joins_last(timeline, metrics):
    (finding, *_) = metrics.findings
    assert (finding.kind, finding.ranks) == ("straggler", (5,))
    moment = timeline.moment(finding)
    step = next(step for step in timeline.steps if step.number == moment.step)
    start, stop = step.events["start"], step.events["start"] + step.events["duration"]
    at = (step.events["rank"] == 5) & (start <= moment.at) & (moment.at < stop)
    (instance,) = {value for value in step.events["instance"][at].tolist() if value != NULL}
    assert step.instances["last_rank"][instance] == 5
    assert step.instances["waits"][instance] > 0
    assert pages.link(moment).startswith(f"#t={moment.at / 1e6:.6f}&d=")


@pytest.mark.parametrize(
    "shown",
    [
        ShownEvents(events="communication"),
        ShownEvents(events="copies"),
        ShownEvents(events="transfers"),
        ShownEvents(events="transfers", tags=("TP",)),
        None,
    ],
)
def test_every_finding_has_a_moment(timeline, metrics, shown):
    moment = timeline.moment(replace(metrics.findings[0], moment=shown))
    assert moment.rank == 5
    assert moment.step in {step.number for step in timeline.steps}


def test_clocks_that_are_apart_are_said_and_their_waits_are_unknown(folder, run, metrics):
    late = metrics.tables["iterations"]
    place = late.column_names.index("start_ns")
    far = np.where(late["rank"].to_numpy() == 3, 10**12, 0)
    for name in ("start_ns", "stop_ns"):
        place = late.column_names.index(name)
        late = late.set_column(place, name, [late[name].to_numpy() + far])
    changed = replace(metrics, tables={**metrics.tables, "iterations": late})
    timeline = find_timeline(run, changed, ranks=[0])
    assert timeline.unaligned == (3,)
    assert "rank 3: the clock cannot be compared" in " ".join(
        pages.section(timeline).blocks[0].notes
    )
    step = timeline.steps[0]
    assert step.length < 10**10
    assert (step.spans["begin"][3], step.spans["stop"][3] < 10**10) == (0, True)


def test_a_rank_that_the_run_lacks_is_refused(run, metrics):
    with pytest.raises(ConfigError, match="timeline_ranks: rank 9: not in the run"):
        find_timeline(run, metrics, ranks=[3, 9])


def test_further_steps_are_added(run, metrics, timeline):
    numbers = {row["iteration"] for row in metrics.tables["iterations"].to_pylist()}
    other = min(numbers - {step.number for step in timeline.steps})
    more = find_timeline(run, metrics, steps=[other, timeline.steps[0].number])
    assert [(step.number, step.label) for step in more.steps] == [
        *((step.number, step.label) for step in timeline.steps),
        (other, "chosen"),
    ]
    with pytest.raises(ConfigError, match="timeline_steps: step 99: not in the run"):
        find_timeline(run, metrics, steps=[99])
    with pytest.raises(ConfigError, match="timeline_steps: at most 16 steps"):
        ReportOptions(timeline_steps=tuple(range(17)))


def test_a_file_that_changed_meanwhile_is_refused(run, metrics):
    events = metrics.tables["events"]
    place = events.column_names.index("start_ns")
    moved = events.set_column(place, "start_ns", [events["start_ns"].to_numpy() + 1])
    changed = replace(metrics, tables={**metrics.tables, "events": moved})
    with pytest.raises(FastcommError, match="rank 0: its file has changed"):
        find_timeline(run, changed)


def test_without_tables_of_events_the_reason_is_given(run, metrics):
    tables = {name: table for name, table in metrics.tables.items() if name != "events"}
    reason = find_timeline(run, replace(metrics, tables=tables))
    assert reason == "the metrics were computed without tables of events"
    section = pages.section(reason)
    assert section.blocks[0].why == reason


def test_of_many_ranks_the_suspects_their_groups_and_the_median_have_detail(metrics):
    groups = {}
    for row in metrics.tables["group_members"].to_pylist():
        groups[row["group"]] = row["ranks"]
    related = {rank for ranks in groups.values() if 5 in ranks for rank in ranks}
    from fastcomm.timeline import timeline as module

    most, module.MOST_DETAILED = module.MOST_DETAILED, 4
    try:
        chosen = _detailed(metrics, None)
    finally:
        module.MOST_DETAILED = most
    assert len(chosen) == 4
    assert 5 in chosen
    assert len(chosen & related) >= 3


def test_contradicting_options_are_refused():
    with pytest.raises(ConfigError, match="timeline_ranks has no effect with no_timeline"):
        ReportOptions(no_timeline=True, timeline_ranks=(1,))
    with pytest.raises(ConfigError, match="timeline_steps has no effect with no_timeline"):
        ReportOptions(no_timeline=True, timeline_steps=(1,))


def test_events_that_are_drawn_with_another_one_are_merged(timeline):
    (step,) = timeline.steps[:1]
    count = np.array([1, 2, 3, 1])
    assert replace(step, events={**step.events, "count": count}).merged == 5


@st.composite
def columns(draw):
    """Events of one rank, and how many may remain."""
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 9)), max_size=30
        )
    )
    kind, start, duration = np.array(rows, np.int64).reshape(-1, 3).T
    length = int((start + duration).max(initial=1))
    made = {"kind": kind, "start": start, "duration": duration, "busy": duration}
    made |= {"name": np.arange(len(kind)), "count": np.ones(len(kind), np.int64)}
    made["instance"] = np.arange(len(kind))
    return made, draw(st.integers(1, 31)), length


@given(columns())
def test_merging_keeps_time_and_count_and_hides_only_short_gaps(case):
    before, most, length = case
    after, width = merge_short(before, most, length)
    assert len(after["start"]) <= max(most, len(set(before["kind"].tolist())))
    for kind in range(3):
        own, merged = (columns["kind"] == kind for columns in (before, after))
        for name in ("busy", "count"):
            assert before[name][own].sum() == after[name][merged].sum()
        spans = list(
            zip(
                after["start"][merged].tolist(),
                (after["start"] + after["duration"])[merged].tolist(),
                strict=True,
            )
        )
        for start, duration in zip(before["start"][own], before["duration"][own], strict=True):
            assert any(a <= start and start + duration <= b for a, b in spans)
        assert all(a <= b for (a, _), (b, _) in pairwise(spans))
    assert (after["duration"][after["count"] == 1] >= 0).all()
    assert (after["instance"][after["count"] > 1] == NULL).all()
    if len(before["start"]) <= most:
        assert width == 0


@given(
    st.lists(st.tuples(st.integers(-1, 1 << 40), st.integers(0, 300), st.just(7)), max_size=20)
)
def test_packed_columns_are_read_back(rows):
    made = np.array(rows, np.int64).reshape(-1, 3).T
    columns = dict(zip(("start", "other", "same"), made, strict=True))
    back = oracle_timeline.unpacked(pages.packed(columns, deltas=("start",)))
    assert back == {name: column.tolist() for name, column in columns.items()}


def test_unknown_values_are_packed_as_minus_one():
    packed = pages.packed({"wait": np.array([NULL, 5])})
    assert oracle_timeline.unpacked(packed) == {"wait": [-1, 5]}
    assert set(EVENTS) > {"wait", "bytes"}
