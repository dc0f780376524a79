"""Collectives without a process group: matched by order and ends, correctly or not at all."""

from dataclasses import replace
from types import SimpleNamespace

import kineto_text
import numpy as np
import oracle_matching as oracle
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_traces import measured, trace

from fastcomm.analyses.measure import compute_metrics
from fastcomm.exchange.ungrouped import Sample, Stream, places
from fastcomm.metrics import matching, pieces, ungrouped
from fastcomm.metrics.partial import Partial, merge, put_away
from fastcomm.metrics.result import answer
from fastcomm.metrics.ungrouped import Doubt, ExpectedMembers, Ungrouped, find
from fastcomm.readers.runs import open_run
from fastcomm.report import details as report
from fastcomm.report.html import ranks as page
from fastcomm.spread import one_by_one
from fastcomm.synthetic import Job as MadeJob
from fastcomm.trace.schema import OP

BY_ENDS = matching.BY_ENDS
US, MS = 1_000, 1_000_000


# ------------------------------------------------------------------ real traces


@pytest.mark.compiled
def test_all_ranks_of_a_job_of_2023_are_compared_without_metadata(kineto):
    found = compute_metrics(open_run(kineto / "dlrm_8rank"))
    seen = found.across.matching
    assert (seen.events, seen.matched, seen.share, seen.collectives) == (64, 64, 1.0, 8)
    assert {rule: count for rule, count in seen.by.items() if count} == {BY_ENDS: 64}
    assert seen.ends_agree_ns <= 7 * US
    assert "matched across all ranks by their order" in seen.note
    # Rank 1 has the longest step, and waits the most; rank 7 is last in 5 of 8.
    assert found.longest.rank == 1
    waits = {each.rank: each for each in found.across.waits}
    assert max(waits, key=lambda rank: waits[rank].wait_ns) == 1
    assert waits[1].wait_ns == pytest.approx(11.1 * MS, abs=0.05 * MS)
    first = found.across.by_wait_caused(1)[0]
    assert (first.rank, first.last, first.collectives) == (7, 5, 8)
    assert [each.rank for each in found.across.by_wait_caused()] == [7, 5, 4]
    assert sum(each.count for each in found.across.skew) == 8
    assert report.culprits(found).rows[0][0] == "rank 7"
    assert any(seen.note in line for line in report.notes_across(found.across))


@pytest.mark.compiled
def test_two_of_many_ranks_with_other_sequences_are_not_matched(kineto):
    found = compute_metrics(open_run(kineto / "sampled_2of128"))
    seen = found.across.matching
    assert (seen.events, seen.matched, seen.share, seen.ungrouped) == (0, 0, None, 20)
    assert "126 ranks of the job are missing" in seen.note
    assert (found.across.waits, found.across.skew) == ((), ())
    assert found.across.by_wait_caused() == ()
    assert report.culprits(found).row_count == 0
    assert report.notes_across(found.across) == [seen.note]


# ------------------------------------------------------------------- made-up jobs


def stripped(one):
    """A trace that names no process group, as those of 2023."""
    comm = one.comm
    for name in ("group", "seq", "root", "sends_to", "receives_from", "peer", "sends"):
        field = comm.schema.field(name)
        column = pa.nulls(len(comm), field.type)
        comm = comm.set_column(comm.column_names.index(name), field, column)
    return replace(one, comm=comm, groups=one.groups.slice(0, 0))


def both(job, ahead):
    """The metrics of a job with the metadata of its traces, and without."""
    traces = [trace(job, rank, ahead.get(rank, 0)) for rank in range(job.ranks)]
    return measured(traces).across, measured([stripped(each) for each in traces]).across


@pytest.mark.parametrize("ep", [1, 8])
def test_without_metadata_waits_are_those_with_it_where_all_groups_are_of_all_ranks(ep):
    job = MadeJob.of(ranks=8, tp=1, pp=1, ep=ep, steps=2)
    named, found = both(job, {1: 10**9, 6: -(10**7)})
    assert found.matching.share == named.matching.share == 1.0
    assert {rule for rule, count in found.matching.by.items() if count} == {BY_ENDS}
    assert found.waits == named.waits
    assert found.offsets[1].offset_ns - found.offsets[0].offset_ns == 10**9
    assert [each.kind for each in found.causes] == [each.kind for each in named.causes]
    key = ("op", "tag", "size_from", "count", "skew_mean_ns", "transfer_mean_ns")
    assert [[getattr(each, name) for name in key] for each in found.skew] == [
        [getattr(each, name) for name in key] for each in named.skew
    ]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"ranks": 8}, "messages between ranks"),
        ({"ranks": 4, "tp": 2, "pp": 1, "ep": 1}, "on stream 20"),
        ({"ranks": 16, "tp": 4, "pp": 1, "ep": 1}, "on stream 20"),
        ({"ranks": 8, "tp": 1, "pp": 1, "ep": 4}, "on stream 24"),
    ],
)
def test_a_job_with_smaller_groups_is_not_matched_without_metadata(sizes, reason):
    named, found = both(MadeJob.of(steps=2, **sizes), {1: 10**9})
    assert named.matching.matched > 0
    assert (found.matching.matched, found.waits, found.causes) == (0, (), ())
    assert found.matching.ungrouped > 0
    assert reason in found.matching.note


def test_groups_that_are_named_in_part_forbid_to_guess_the_rest():
    job = MadeJob.of(ranks=4, tp=2, pp=1, ep=1, steps=1)
    traces = [trace(job, rank) for rank in range(4)]
    place = traces[0].comm.column_names.index("group")
    kinds = traces[0].groups["description"].to_pylist()
    mixed = []
    for one in traces:
        group = one.comm["group"].to_pylist()
        known = [each if "TENSOR" in kinds[each] else None for each in group]
        column = pa.array(known, pa.int32())
        comm = one.comm.set_column(place, one.comm.schema.field(place), column)
        mixed.append(replace(one, comm=comm))
    seen = measured(mixed).across.matching
    assert seen.by[BY_ENDS] == 0 < seen.by[matching.BY_NUMBER]
    assert "of groups of fewer ranks" in seen.note


def first_ranks_of_nodes(folder, world):
    """Traces of the first ranks of four nodes of eight, whose groups are inside the nodes."""
    noise = np.random.default_rng(0)
    begins = np.cumsum(noise.integers(700, 1300, 40))
    for rank in (0, 8, 16, 24):
        early = noise.integers(0, 300, 40) + 200 * (rank == 8)
        late = noise.integers(0, 5, 40)
        events = [kineto_text.mark("ProfilerStep#3", 0, int(begins[-1]) + 1000)]
        for begin, before, behind in zip(begins, early, late, strict=True):
            start, stop = int(begin - before), int(begin + 20 + behind)
            events.append(kineto_text.all_reduce(start, stop - start, Group_size=None))
        kineto_text.write(folder / f"rank{rank}.json", events, rank=rank, world=world)
    return compute_metrics(open_run(folder)).across


@pytest.mark.compiled
def test_the_first_ranks_of_nodes_are_not_matched_where_the_other_ranks_are_missing(tmp_path):
    found = first_ranks_of_nodes(tmp_path, world=32)
    assert (found.matching.matched, found.matching.ungrouped) == (0, 160)
    assert (found.waits, found.skew, found.causes, found.by_wait_caused()) == ((), (), (), ())
    assert "28 ranks of the job are missing" in found.matching.note


@pytest.mark.compiled
def test_where_no_trace_says_how_many_ranks_there_are_those_at_hand_are_all(tmp_path):
    found = first_ranks_of_nodes(tmp_path, world=None)
    assert (found.matching.matched, found.matching.share) == (160, 1.0)


@pytest.mark.compiled
def test_the_answer_is_the_same_however_many_are_compared_at_once(tmp_path, monkeypatch):
    job = MadeJob.of(ranks=8, tp=1, pp=1, ep=1, steps=2)
    parts = [Partial.of(stripped(trace(job, rank, 10**6 * rank))) for rank in range(8)]
    here = answer(merge(parts), byte_kind="payload", link=None).to_dict()
    assert here["matching"]["share"] == 1.0
    monkeypatch.setattr(ungrouped, "_ROWS", 20)
    for n, batches in enumerate(([[0, 5], [1, 2, 3, 4, 7], [6]], [[7], [0, 1, 2, 3, 4, 5, 6]])):
        away = [
            put_away(merge([parts[rank] for rank in batch]), tmp_path / f"{n}.{k}")
            for k, batch in enumerate(batches)
        ]
        for order in (away, away[::-1], [*away[1:], *[parts[rank] for rank in batches[0]]]):
            found = answer(merge(order), byte_kind="payload", link=None)
            assert found.to_dict() == here


# ------------------------------------------------------------ ranks of hypothesis

CODES = st.sampled_from([("AllReduce", 100), ("AllReduce", 200), ("AllToAll", None)])


@st.composite
def sequences(draw, groups=1):
    """What ranks saw of sequences of collectives, one sequence a group of ranks."""
    length, each = draw(st.integers(1, 30)), draw(st.integers(2, 4))
    codes = draw(st.lists(CODES, min_size=length, max_size=length))
    noise = np.random.default_rng(draw(st.integers(0, 2**32)))
    usual = np.cumsum(noise.integers(2 * MS, 40 * MS, length))
    found = []
    for group in range(groups):
        # Other groups do the same work, and are some 100 us earlier or later.
        at = np.sort(usual + (noise.integers(-MS, MS, length) if group else 0))
        for rank in range(group * each, group * each + each):
            ahead = draw(st.integers(-(10**12), 10**12))
            lost = draw(st.sets(st.integers(0, length - 1), max_size=min(3, length // 4)))
            for number in sorted(set(range(length)) - lost):
                op, size = codes[number]
                stop = int(at[number]) + ahead + int(noise.integers(0, 5 * US))
                found.append(
                    SimpleNamespace(
                        rank=rank,
                        group=group,
                        op=op,
                        true=number,
                        size=size,
                        start=stop - int(noise.integers(20 * US, 2 * MS)),
                        stop=stop,
                    )
                )
    return found


def cut_up(events):
    """Events as pieces, one for the even ranks and one for the odd."""
    found = []
    for odd in (0, 1):
        own = sorted((e for e in events if e.rank % 2 == odd), key=lambda e: (e.rank, e.start))
        columns = {
            "rank": [e.rank for e in own],
            "group": [None] * len(own),
            "stream": [getattr(e, "stream", 7) for e in own],
            "iteration": [getattr(e, "iteration", 0) for e in own],
            "seq": [None] * len(own),
            "group_size": [None] * len(own),
            "start_ns": [e.start for e in own],
            "duration_ns": [e.stop - e.start for e in own],
            "payload_bytes": [e.size for e in own],
        }
        table = pa.table({name: pa.array(each, pa.int64()) for name, each in columns.items()})
        ops = pa.array([OP[e.op] for e in own], pa.int8())
        found.append((pieces.cut(table.append_column("op", ops)), own))
    return [piece for piece, _ in found]


def matched(events, world_size=None):
    """The sets of events taken to be one collective, (rank, stop) each; and what was found."""
    ranks = sorted({event.rank for event in events})
    parts = cut_up(events)
    found = find(parts, ExpectedMembers(ranks=ranks, world_size=world_size), one_by_one)
    sets = {}
    for span in found.spans():
        table = found.read(parts, span, ["rank", "group", "seq", "start_ns", "duration_ns"])
        for row in table.to_pylist():
            assert row["group"] == ungrouped.GROUP
            stop = row["start_ns"] + row["duration_ns"]
            sets.setdefault(row["seq"], set()).add((row["rank"], stop))
    return sorted(sorted(each) for each in sets.values() if len(each) > 1), found


def true_sets(events):
    return sorted(sorted((e.rank, e.stop) for e in each) for each in oracle.sets(events))


@given(sequences())
@settings(max_examples=60)
def test_ranks_that_lost_events_are_matched_correctly_or_not_at_all(events):
    sets, found = matched(events)
    wanted = true_sets(events)
    # Of what the reference rank lost nothing is matched.
    assert all(each in wanted for each in sets)
    assert found.matched >= sum(map(len, sets))
    if not sets:
        assert found.matched == 0 or not wanted


@given(sequences())
@settings(max_examples=30)
def test_ranks_that_lost_nothing_are_matched_whatever_their_clocks(events):
    numbers = {}
    for event in events:
        numbers.setdefault(event.rank, set()).add(event.true)
    common = set.intersection(*numbers.values())
    whole = [event for event in events if event.true in common]
    sets, found = matched(whole)
    if len(common) >= 3:
        assert sets == true_sets(whole)
        assert (found.matched, found.doubts) == (len(whole), ())
    else:
        assert found.matched == 0
        assert [doubt.why for doubt in found.doubts] in (["few"], [])


@given(sequences(groups=2))
@settings(max_examples=40)
def test_two_groups_that_do_the_same_are_never_one(events):
    sets, found = matched(events)
    wanted = true_sets(events)
    assert all(each in wanted for each in sets)
    assert found.matched == 0


@given(sequences(), st.integers(0, 100), st.sampled_from(["AllGather", "AllReduce"]))
@settings(max_examples=40)
def test_a_rank_with_another_sequence_is_never_matched_wrongly(events, at, op):
    changed = events[at % len(events)]
    changed.op, changed.size, changed.true = op, 777, -1
    sets, _ = matched(events)
    wanted = true_sets(events)
    assert all(each in wanted for each in sets)


# ------------------------------------------------------------------ the rules


def regular(ranks=4, count=8, late=None, skew=MS):
    """Ranks with the same sequence; `late(rank, number)` is what an end is late by."""
    noise = np.random.default_rng(0)
    found = []
    for number in range(count):
        end = number * 10 * MS + int(noise.integers(0, 5 * MS))
        for rank in range(ranks):
            stop = end + (late(rank, number) if late else 0)
            start = end - 30 * US - int(noise.integers(0, skew)) if skew else end - 30 * US
            event = {"rank": rank, "group": 0, "op": "AllReduce", "true": number, "size": 64}
            found.append(SimpleNamespace(**event, start=start, stop=stop))
    return found


def why(events, **words):
    _, found = matched(events, **words)
    return [each.why for each in found.doubts], found.matched


def test_what_agrees_is_matched():
    assert why(regular()) == ([], 32)


def test_where_ranks_are_missing_nothing_is_matched():
    lossy = [e for e in regular() if (e.rank, e.true) != (2, 0)]
    assert why(lossy) == ([], 31)
    assert why(lossy, world_size=4) == ([], 31)
    for events in (regular(), lossy):
        _, found = matched(events, world_size=8)
        assert (found.matched, found.missing, found.doubts) == (0, 4, ())
    assert "4 ranks of the job are missing, and those at hand" in matching.note(found)
    _, found = matched(regular(), world_size=5)
    assert "1 rank of the job is missing" in matching.note(found)


def test_a_step_that_is_shifted_is_not_matched():
    events = regular()
    for event in events:
        event.iteration = event.true // 4 + (event.rank == 1)
    assert why(events) == (["ends"], 0)


def test_ends_that_differ_are_not_matched():
    noise = np.random.default_rng(1)
    assert why(regular(late=lambda *_: int(noise.integers(0, 2 * MS))))[0] == ["ends"]


def test_ends_that_differ_as_much_as_starts_are_not_matched():
    noise = np.random.default_rng(1)
    events = regular(late=lambda *_: int(noise.integers(0, 90 * US)), skew=100 * US)
    for event in events:
        event.start -= MS
    assert why(events) == (["loose"], 0)


def test_a_collective_that_ends_before_a_rank_begins_is_none():
    events = regular()
    events[5].start = events[5].stop
    events[5].stop += 80 * US
    events[5].start += 60 * US
    assert why(events) == (["impossible"], 0)


def test_groups_that_end_separately_are_not_matched():
    noise = np.random.default_rng(1)
    late = noise.integers(0, 60 * US, (2, 40))
    apart = regular(count=40, late=lambda rank, n: int(late[rank // 2, n]), skew=2 * MS)
    assert why(apart) == (["separate"], 0)


def test_a_stream_of_one_rank_leaves_a_doubt_on_all():
    events = regular()
    for event in regular(ranks=2):
        events.append(SimpleNamespace(**{**vars(event), "stream": 9}))
        event.stream = 9
    whys, count = why(events)
    assert (whys, count) == (["absent"], 0)


def test_a_stream_that_the_reference_rank_lacks_leaves_a_doubt_on_all():
    events = regular(count=4)
    one = next(event for event in events if event.rank == 3)
    one.stream = 9
    assert why(events) == (["absent"], 0)


def test_a_stream_of_few_collectives_takes_nothing_from_the_others():
    events = regular()
    for event in regular(count=2):
        event.stream = 9
        events.append(event)
    assert why(events) == (["few"], 32)
    _, found = matched(events)
    assert "32 of 40 collective events" in matching.note(found)
    assert "fewer than 3 on stream 9" in matching.note(found)


def test_a_rank_without_collectives_leaves_a_doubt():
    parts = cut_up(regular(ranks=3))
    found = find(parts, ExpectedMembers(ranks=[0, 1, 2, 3], world_size=4), one_by_one)
    assert found.doubts == (Doubt("absent", ungrouped.NULL, 3),)
    assert "rank 3 has none" in matching.note(found)


def test_one_rank_or_no_collective_has_nobody_to_be_matched_with():
    parts = cut_up(regular(ranks=1))
    found = find(parts, ExpectedMembers(ranks=[0], world_size=1), one_by_one)
    assert (found.events, found.matched, found.spans()) == (8, 0, [])
    assert matching.note(found) is None
    assert find([], ExpectedMembers(ranks=[0, 1], world_size=2), one_by_one).events == 0


def test_many_doubts_are_counted():
    doubts = tuple(Doubt("few", stream) for stream in range(5))
    said = matching.note(Ungrouped(events=9, reference=0, doubts=doubts))
    assert said.count("fewer than 3 on stream") == 2
    assert "likewise 3 more streams" in said


EVER = st.integers(-(2**62), 2**62)
LONG = st.integers(0, 2**40)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), EVER, LONG, st.integers(7, 8)),
        max_size=20,
    )
)
def test_whatever_the_times_are_there_is_an_answer(rows):
    events = [
        SimpleNamespace(
            rank=rank,
            op="AllReduce",
            size=None,
            start=start,
            stop=start + length,
            stream=number,
        )
        for rank, start, length, number in rows
    ]
    _, found = matched(events)
    assert 0 <= found.matched <= len(events)
    assert matching.note(found) is not None or len({e.rank for e in events}) < 2


def stream(rows):
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    return Stream(*columns)


def test_a_reference_of_one_collective_is_too_few():
    one = stream([(0, 1, 0, 0, 10)])
    assert (places(one, one), one.tolerance_ns) == ("few", 20_000)


def test_a_rank_of_which_no_sampled_collective_is_there_is_too_few():
    unknown = np.iinfo(np.int64).min
    stop = np.array([[5, 9, 12], [unknown] * 3])
    assert Sample.of(stop, stop, stop[0]).refusal() == "few"


def test_the_page_names_no_rank_as_slow_by_the_length_of_its_step():
    known = SimpleNamespace(is_known=False)
    across = SimpleNamespace(by_wait_caused=lambda _: ())
    lead = page._lead(SimpleNamespace(across=across), known, "no compute is recorded")
    assert "".join(lead) == (
        "The compute of ranks is n/a, and step times alone do not tell who is slow."
    )
    across.by_wait_caused = lambda _: (SimpleNamespace(rank=7),)
    lead = page._lead(SimpleNamespace(across=across), known, "")
    assert "".join(lead) == "Rank 7 causes the most waiting in collectives."
