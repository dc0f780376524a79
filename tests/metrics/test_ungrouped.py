"""Test matching of collectives without process groups: correct or not at all."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from builders import kineto_text
from builders.job_traces import measured, trace
from builders.opened import open_run
from builders.ungrouped_events import MS, US, matched
from hypothesis import given
from hypothesis import strategies as st
from oracles import matching as oracle

from fastcomm.metrics import matched_communication, page, ungrouped
from fastcomm.metrics import tables as report
from fastcomm.metrics.computation import compute, compute_metrics
from fastcomm.metrics.partial import Partial, merge, spill
from fastcomm.show.console import shown
from fastcomm.synthetic.job import Job as MadeJob

BY_ENDS = matched_communication.BY_ENDS


def test_all_ranks_of_a_job_of_2023_are_compared_without_metadata(kineto):
    found = compute_metrics(open_run(kineto / "dlrm_8rank"))
    seen = found.across.matching
    assert (seen.events, seen.matched, seen.share, seen.collectives) == (64, 64, 1.0, 8)
    assert {rule: count for rule, count in seen.by.items() if count} == {BY_ENDS: 64}
    assert seen.ends_agree_ns <= 7 * US
    assert "matched across all ranks by their order" in seen.note
    # Rank 3 has the longest step, rank 1 waits the most; rank 7 is last in 5 of 8.
    assert found.longest.rank == 3
    waits = {each.rank: each for each in found.across.waits}
    assert max(waits, key=lambda rank: waits[rank].wait_ns) == 1
    assert waits[1].wait_ns == pytest.approx(11.1 * MS, abs=0.05 * MS)
    first = found.across.by_wait_caused(1)[0]
    assert (first.rank, first.last, first.collectives) == (7, 5, 8)
    assert [each.rank for each in found.across.by_wait_caused()] == [7, 5, 4]
    assert sum(each.count for each in found.across.skew) == 8
    assert shown(report.culprits(found)).rows[0][0] == "rank 7"
    assert any(seen.note in line for line in report.notes_across(found.across))


def test_two_of_many_ranks_with_other_sequences_are_not_matched(kineto):
    found = compute_metrics(open_run(kineto / "sampled_2of128"))
    seen = found.across.matching
    assert (seen.events, seen.matched, seen.share, seen.ungrouped) == (0, 0, None, 20)
    assert "126 ranks of the job are missing" in seen.note
    assert (found.across.waits, found.across.skew) == ((), ())
    assert found.across.by_wait_caused() == ()
    assert report.culprits(found).rows == []
    assert report.notes_across(found.across) == [seen.note]


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
def test_waits_without_group_metadata_equal_waits_with_it_for_global_groups(ep):
    job = MadeJob.of(ranks=8, tp=1, pp=1, ep=ep, steps=2, layers=2)
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
def test_a_job_with_smaller_groups_is_not_matched_without_group_metadata(sizes, reason):
    named, found = both(MadeJob.of(steps=2, layers=2, **sizes), {1: 10**9})
    assert named.matching.matched > 0
    assert (found.matching.matched, found.waits, found.causes) == (0, (), ())
    assert found.matching.ungrouped > 0
    assert reason in found.matching.note


def test_partly_named_groups_disable_matching_without_groups():
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
    assert seen.by[BY_ENDS] == 0 < seen.by[matched_communication.BY_NUMBER]
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


def test_the_first_ranks_of_nodes_are_not_matched_where_the_other_ranks_are_missing(tmp_path):
    found = first_ranks_of_nodes(tmp_path, world=32)
    assert (found.matching.matched, found.matching.ungrouped) == (0, 160)
    assert (found.waits, found.skew, found.causes, found.by_wait_caused()) == ((), (), (), ())
    assert "28 ranks of the job are missing" in found.matching.note


def test_without_a_recorded_world_size_the_present_ranks_are_all(tmp_path):
    found = first_ranks_of_nodes(tmp_path, world=None)
    assert (found.matching.matched, found.matching.share) == (160, 1.0)


def test_results_do_not_depend_on_how_many_ranks_are_compared_at_once(tmp_path, monkeypatch):
    job = MadeJob.of(ranks=8, tp=1, pp=1, ep=1, steps=2, layers=2)
    parts = [Partial.of(stripped(trace(job, rank, 10**6 * rank))) for rank in range(8)]
    here = compute(merge(parts), byte_kind="payload", link=None).to_dict()
    assert here["matching"]["share"] == 1.0
    monkeypatch.setattr(ungrouped, "_ROWS", 20)
    for n, batches in enumerate(([[0, 5], [1, 2, 3, 4, 7], [6]], [[7], [0, 1, 2, 3, 4, 5, 6]])):
        away = [
            spill(merge([parts[rank] for rank in batch]), tmp_path / f"{n}.{k}")
            for k, batch in enumerate(batches)
        ]
        for order in (away, away[::-1], [*away[1:], *[parts[rank] for rank in batches[0]]]):
            found = compute(merge(order), byte_kind="payload", link=None)
            assert found.to_dict() == here


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


def true_sets(events):
    return sorted(sorted((e.rank, e.stop) for e in each) for each in oracle.sets(events))


@given(sequences())
def test_ranks_that_lost_events_are_matched_correctly_or_not_at_all(events):
    sets, found = matched(events)
    wanted = true_sets(events)
    # Of what the reference rank lost nothing is matched.
    assert all(each in wanted for each in sets)
    assert found.matched >= sum(map(len, sets))
    if not sets:
        assert found.matched == 0 or not wanted


@given(sequences())
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
def test_two_groups_with_equal_operations_are_never_merged(events):
    sets, found = matched(events)
    wanted = true_sets(events)
    assert all(each in wanted for each in sets)
    assert found.matched == 0


def test_two_groups_with_lost_events_are_never_merged():
    """Their clocks cannot be aligned by the few ends that agree, but pairs of ranks agree."""
    rows = [
        (0, 0, 1, 39038199, 40270278),
        (0, 0, 2, 55880981, 57050584),
        (0, 0, 3, 86281986, 87677990),
        (0, 0, 4, 95708435, 96014895),
        (1, 0, 0, 31187961, 31308973),
        (1, 0, 2, 55918224, 57049130),
        (1, 0, 3, 85853458, 87677592),
        (1, 0, 4, 95058075, 96012060),
        (2, 1, 0, 30564688, 30597827),
        (2, 1, 1, 38496993, 40395276),
        (2, 1, 2, 55266077, 57207802),
        (2, 1, 3, 85806111, 87624278),
        (2, 1, 4, 95143940, 95962886),
        (3, 1, 0, 29607921, 30594010),
        (3, 1, 1, 38435120, 40395754),
        (3, 1, 2, 56682103, 57204922),
        (3, 1, 3, 86881257, 87623166),
        (3, 1, 4, 94928973, 95962589),
    ]
    events = [
        SimpleNamespace(
            rank=rank, group=group, op="AllReduce", true=true, size=100, start=start, stop=stop
        )
        for rank, group, true, start, stop in rows
    ]
    _, result = matched(events)
    assert (result.matched, [doubt.why for doubt in result.doubts]) == (0, ["separate"])


@given(sequences(), st.integers(0, 100), st.sampled_from(["AllGather", "AllReduce"]))
def test_a_rank_with_another_sequence_is_never_matched_wrongly(events, at, op):
    changed = events[at % len(events)]
    changed.op, changed.size, changed.true = op, 777, -1
    sets, _ = matched(events)
    wanted = true_sets(events)
    assert all(each in wanted for each in sets)


def test_the_page_names_no_rank_as_slow_by_the_length_of_its_step():
    known = SimpleNamespace(is_known=False)
    across = SimpleNamespace(by_wait_caused=lambda _: ())
    lead = page._ranks_lead(SimpleNamespace(across=across), known, "no compute is recorded")
    assert "".join(lead) == (
        "The compute of ranks is n/a, and step times do not show which rank is slow."
    )
    across.by_wait_caused = lambda _: (SimpleNamespace(rank=7),)
    lead = page._ranks_lead(SimpleNamespace(across=across), known, "")
    assert "".join(lead) == "Rank 7 causes the most waiting in collectives."
