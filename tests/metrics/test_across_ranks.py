"""Test metrics across ranks against definitions: skew, waits, clocks, links, heat, outliers."""

from math import isnan
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from builders import kineto_text as k
from builders.across_events import (
    GROUPS,
    ONE,
    STEPS,
    TWO,
    ask,
    by_rank,
    iterations,
    table,
)
from builders.job_traces import measured_job
from builders.same import same
from hypothesis import given
from hypothesis import strategies as st
from oracles import waits as oracle_waits

import fastcomm
from fastcomm.metrics import outliers
from fastcomm.metrics.findings.slow_links import slow_links
from fastcomm.metrics.links import Link, MeasuredLink
from fastcomm.metrics.matched_communication import ExpectedTransfer
from fastcomm.metrics.outliers import SCORE, above_peers
from fastcomm.metrics.rank_arrays import exposed_times
from fastcomm.synthetic.job import Job
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import OPS
from fastcomm_kernels.intervals import alone


@st.composite
def exposed_parts(draw, duration):
    """Exposed time of an event: all of it, before the first gap, and after the last."""
    first, last = (draw(st.integers(0, duration // 2)) for _ in range(2))
    between = draw(st.integers(0, duration - first - last))
    parts = {"exposed_at_start_ns": first, "exposed_at_end_ns": last}
    return {"exposed_ns": first + between + last} | parts


@st.composite
def collectives(draw):
    """Events of some ranks with clocks that agree, each with the collective it belongs to."""
    found = []
    for number in range(draw(st.integers(0, 12))):
        label = draw(st.sampled_from(list(GROUPS)))
        op = draw(st.sampled_from(["AllReduce", "AllGather", "AllToAll"]))
        tag = draw(st.sampled_from(["DP", "TP", "EP"]))
        size = draw(st.none() | st.integers(0, 2000))
        end = draw(st.integers(1000, 10**6)) + number * 10**6
        for rank in GROUPS[label]:
            start = end - draw(st.integers(0, 900))
            seen = {"rank": rank, "group": label, "seq": number, "tag": tag, "op": op}
            seen |= {"start": start, "stop": end, "collective": number, "bytes": size}
            seen |= {"start_ns": start, "duration_ns": end - start}
            seen |= draw(exposed_parts(end - start))
            found.append(seen | {"group_size": len(GROUPS[label]), "bus_bytes": size})
    return draw(st.permutations(found))


@given(collectives())
def test_skew_and_waits_are_what_the_definitions_say(events):
    ranks = list(range(5))
    found, _ = ask(ranks, table(by_rank(events)), "none")
    said = {(each.op, each.tag, each.size_from): each for each in found.skew}
    wanted = oracle_waits.skew(events, STEPS)
    assert set(said) == set(wanted)
    for key, values in wanted.items():
        same({name: getattr(said[key], name) for name in values}, values)
    said = {(each.rank, each.tag): each for each in found.waits}
    wanted = oracle_waits.waits(events, STEPS)
    assert set(said) == set(wanted)
    for key, values in wanted.items():
        same({name: getattr(said[key], name) for name in values}, values)
    assert found.matching.matched == found.matching.events == len(events)
    # Ends coincide, so that clocks are found to agree.
    assert {each.offset_ns for each in found.offsets} <= {0, None}
    joined = {
        rank for each in oracle_waits.matched_collectives(events) for rank in ranks_of(each)
    }
    assert {each.rank for each in found.offsets if each.offset_ns is not None} == joined


@pytest.mark.parametrize(("ends", "transfer"), [((90, 40, 70), 50), ((90, 40), 20)])
def test_a_transfer_ends_at_the_lower_median_of_the_ends(ends, transfer):
    label = {3: TWO, 2: ONE}[len(ends)]
    seen = {"group": label, "seq": 0, "tag": "DP", "op": "AllReduce", "start_ns": 20}
    seen |= {
        "alone_ns": 0,
        "exposed_ns": 0,
        "bytes": 8,
        "bus_bytes": 8,
        "group_size": len(ends),
    }
    events = [{**seen, "rank": rank, "duration_ns": end - 20} for rank, end in enumerate(ends)]
    ranks = list(GROUPS[label])
    found, _ = ask(ranks, table(events), "none")
    assert [each.transfer_mean_ns for each in found.skew] == [transfer]


def test_matching_does_not_depend_on_the_kind_of_bytes():
    seen = {"group": TWO, "tag": "DP", "op": "AllReduce", "duration_ns": 9, "group_size": 3}
    events = [
        # Ranks hand in counts that differ, as "msg" of their own side may; the payload agrees.
        {**seen, "rank": rank, "start_ns": 10 * k, "bytes": rank + 1, "payload_bytes": 8}
        for rank in range(3)
        for k in range(4)
    ]
    found, _ = ask(list(GROUPS[TWO]), table(events), "none")
    assert (found.matching.matched, found.matching.collectives) == (12, 4)
    contradicting = [{**event, "payload_bytes": 1 + event["rank"]} for event in events]
    found, _ = ask(list(GROUPS[TWO]), table(contradicting), "none")
    assert found.matching.matched == 0


def ranks_of(members):
    return {event["rank"] for event in members}


@given(collectives(), st.lists(st.integers(-(10**12), 10**12), min_size=5, max_size=5))
def test_aligned_clocks_give_the_results_of_equal_clocks(events, ahead):
    ranks = list(range(5))
    moved = [{**e, "start_ns": e["start_ns"] + ahead[e["rank"]]} for e in by_rank(events)]
    plain, _ = ask(ranks, table(by_rank(events)), "collectives")
    found, _ = ask(ranks, table(moved), "collectives")
    assert (found.skew, found.waits, found.links) == (plain.skew, plain.waits, plain.links)
    for each in found.offsets:
        if each.offset_ns is not None:
            assert each.offset_ns == ahead[each.rank] - ahead[each.reference]
            assert (each.spread_ns, each.matches > 0) == (0, True)


INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=5,
)


def starts_and_stops(*sides):
    """Starts and stops of each side, as kernels take them."""
    return [
        np.array([each[k] for each in sorted(side)], np.int64) for side in sides for k in (0, 1)
    ]


@given(INTERVALS, INTERVALS)
def test_exposed_time_of_an_event_excludes_compute_and_other_communication(events, compute):
    found = alone(*starts_and_stops(events, compute))
    ordered = sorted(events)
    for place, event in enumerate(ordered):
        others = ordered[:place] + ordered[place + 1 :]
        assert found[place] == oracle_waits.alone(event, others, compute)


@given(INTERVALS, INTERVALS)
def test_each_exposed_moment_counts_for_the_event_that_ends_first(events, compute):
    found = exposed_times(*starts_and_stops(events, compute))
    ordered = sorted(events)
    for place in range(len(ordered)):
        assert tuple(found[place]) == oracle_waits.exposed(place, ordered, compute)


@given(st.lists(st.integers(0, 40).map(float) | st.just(float("nan")), max_size=9))
def test_outliers_follow_the_documented_rule(values):
    found = {index: middle for index, middle, _ in above_peers(np.array(values), 3.0)}
    known = [(place, value) for place, value in enumerate(values) if not isnan(value)]
    for index, (place, _) in enumerate(known):
        if len(known) < 2:
            assert place not in found
            continue
        apart, middle = oracle_waits.outlier([v for _, v in known], index, 3.0, SCORE)
        assert found.get(place) == (middle if apart else None)


def test_heat_has_a_row_a_rank_and_a_column_an_iteration():
    rows = iterations([3, 7]).to_pydict()
    rows |= {"time_ns": [10, 20, 30, None], "exact_compute_ns": [1, None, 3, 4]}
    rows["exact_exposed_DP_ns"] = [5, 6, 7, 8]
    rows["exact_exposed_mixed_ns"] = [1, None, 1, 1]
    rows["iteration"] = [4, 5, 5, 6]
    found = outliers.HeatArrays.of(pa.table(rows)).heat()
    assert (found.ranks, found.iterations) == ((3, 7), (4, 5, 6))
    assert found.time_ns == ((10, 20, None), (None, 30, None))
    assert found.compute_ns == ((1, None, None), (None, 3, 4))
    assert found.exposed_ns == ((6, None, None), (None, 8, 9))


def test_empty_input_has_no_waits_and_unknown_clocks():
    empty = table([])
    found, tables = ask([], empty, "collectives")
    (offset,) = ask([0], empty, "collectives")[0].offsets
    assert (found.skew, found.waits, found.links, found.causes) == ((), (), (), ())
    assert (found.matching.share, found.heat.ranks, found.outliers) == (None, (), ())
    assert offset.offset_ns is None
    assert {"skew", "waits", "links", "heat", "outliers", "clocks"} == set(tables)


def test_a_link_is_slow_only_compared_with_its_peers():
    job = Job.of(fault="slow_link", steps=1)
    found = measured_job(job).across
    slow = [each for each in found.links if each.is_slow]
    assert {each.ranks for each in slow} == {(5, 7)}
    assert {each.tag for each in slow} == {"DP", "EP"}
    assert all(each.ratio < 0.8 and each.excess_ns > 0 for each in slow)
    assert {each.op for each in found.links} <= set(OPS)
    assert {each.tag for each in found.links} <= set(TAGS)


@pytest.mark.parametrize(("spread", "number"), [(0.1, 1), (0.4, 0)])
def test_on_the_host_a_link_is_slow_by_twice_the_spread_of_steps(spread, number):
    link = Link(
        group="pairs", ranks=(0, 1), tag="TP", op="AllReduce", size_from=1024, count=8,
        bus_bw=1e8, peers_bus_bw=3e8, ratio=1 / 3, excess_ns=6e6, is_slow=True,
    )  # fmt: skip
    expected = ExpectedTransfer(
        group=0, tag=1, op=0, power=10, pair=(0, 1), ns=0.0, ns_per_byte=3.0
    )
    exposed = np.array([10e6 * (1 - spread), 10e6, 10e6 * (1 + spread)])
    comparison = SimpleNamespace(
        excess=lambda transfers: [{0: 15e6, 1: 15e6} for _ in transfers],
        clock_error=lambda _: 0.0,
    )
    grid = SimpleNamespace(
        step_ns=50e6, iterations=[1, 2, 3], ranks=np.arange(4), middle=lambda *_: exposed
    )
    measured = [MeasuredLink(link, expected, steps=3)]
    assert len(slow_links(measured, comparison, grid)) == 1
    findings = slow_links(measured, comparison, grid, is_host_run=True)
    assert len(findings) == number
    for finding in findings:
        assert finding.confidence == "low"
        assert finding.text.endswith("On the host, a busy core has the same effect.")


def test_a_wrong_clock_affects_only_raw_times():
    job = Job.of(steps=1)
    plain = measured_job(job).across
    off = {2: 5_000_000, 5: -3_000_000}
    aligned = measured_job(job, off).across
    assert aligned.causes == plain.causes
    assert (aligned.waits, aligned.links) == (plain.waits, plain.links)
    offsets = {each.rank: each.offset_ns for each in aligned.offsets}
    assert offsets == {rank: off.get(rank, 0) for rank in range(8)}
    raw = measured_job(job, off, clock_alignment="none").across
    assert raw.clock_alignment == "none"
    assert raw.waits != plain.waits
    assert raw.offsets == aligned.offsets


GROUP = {"Process_Group_Ranks": "[0, 1]", "Group_size": 2, "Process_Group_Name": "0"}


@pytest.mark.parametrize(
    ("compute", "waited"),
    [
        ([(250, 50)], 350),
        ([(150, 20), (250, 50), (320, 10)], 320),
        ([(250, 50), (550, 30)], None),
    ],
)
def test_exposed_waits_and_transfers_add_up_to_the_exposed_time_of_a_rank(
    tmp_path, compute, waited
):
    for rank, arrival in enumerate((100, 500)):
        events = []
        for step in range(3):
            at = 1000 * step
            events.append(k.mark(f"ProfilerStep#{step}", at, 1000))
            events += [k.kernel("gemm", at + start, ns) for start, ns in compute]
            events.append(k.all_reduce(at + arrival, 600 - arrival, 20, Seq=step, **GROUP))
        k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=2)
    metrics = fastcomm.open(tmp_path).metrics()
    exposed = {row["rank"]: [] for row in metrics.tables["iterations"].to_pylist()}
    for row in metrics.tables["iterations"].to_pylist():
        names = [name for name in row if name.startswith("exact_exposed_")]
        exposed[row["rank"]].append(sum(row[name] for name in names))
    for row in metrics.across.waits:
        assert row.exposed_wait_ns + row.exposed_transfer_ns == sum(exposed[row.rank]) / 3
    if waited is not None:
        assert metrics.across.waits[0].exposed_wait_ns == 1000 * waited
