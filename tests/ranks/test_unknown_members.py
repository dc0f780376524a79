"""Test groups of which only a name is known: ends show whether they are one group."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from builders.commands import invoke
from builders.nsys_report import NVTX

import fastcomm
from fastcomm.metrics import spill_files
from fastcomm.ranks.matching import CollectiveCalls, match
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm_kernels.arrays import NONE, NULL

GAP, LATE, TRANSFER = 500_000, 150_000, 100_000  # ns
PAIRS = ((0, 1), (2, 3))


def calls(members, *, count=60, jitter=0.05, group=0, seed=3, known=False, drift=0.0):
    """Calls of ranks, which the trace says to be one group, but are several."""
    random = np.random.default_rng(seed)
    columns = []
    for ranks in members:
        base = np.arange(count) * GAP + jitter * GAP * random.uniform(-1, 1, count)
        start = base + random.integers(0, LATE, (len(ranks), count))
        stop = start.max(axis=0) + TRANSFER
        for rank, own in zip(ranks, start, strict=True):
            clock = 1 + drift * rank
            columns.append((np.full(count, rank), own * clock, stop * clock))
    rank, start, stop = (
        np.concatenate(column).astype(np.int64) for column in zip(*columns, strict=True)
    )
    return CollectiveCalls(
        rank=rank,
        group=np.full_like(rank, group),
        op=np.zeros_like(rank),
        seq=np.full_like(rank, NULL),
        size=np.full_like(rank, NULL),
        stop=stop,
        step=np.full_like(rank, NULL),
        start=None if known else start,
    )


def joined(*parts):
    names = [name for name in parts[0].__slots__ if getattr(parts[0], name) is not None]
    columns = {name: np.concatenate([getattr(of, name) for of in parts]) for name in names}
    return CollectiveCalls(**columns)


def test_pairs_on_one_stream_are_not_matched_as_one_group():
    matches = match(calls(PAIRS))
    assert (matches.count, matches.has_loose) == (0, True)
    assert (matches.instance == NONE).all()
    assert matches.loose > 200


@pytest.mark.parametrize("drift", [0, 1e-5])
def test_one_group_is_matched(drift):
    matches = match(calls([(0, 1, 2, 3)], drift=drift))
    assert (matches.count, matches.loose, matches.has_loose) == (60, 0, False)


def test_known_members_need_no_proof():
    assert match(calls(PAIRS, known=True)).count
    one = calls(PAIRS)
    numbered = replace(one, seq=np.tile(np.arange(60), 4))
    assert match(numbered).count == 60


def test_a_group_that_is_several_leaves_the_others_in_doubt():
    whole = calls([(0, 1, 2, 3)], group=1, seed=4)
    assert match(whole).count == 60
    assert match(whole, has_loose=True).count == 0
    matches = match(joined(whole, calls(PAIRS)))
    assert (matches.count, matches.has_loose) == (0, True)


def test_too_few_collectives_prove_nothing_and_disprove_nothing():
    few, whole = calls([(0, 1, 2, 3)], count=2), calls([(0, 1, 2, 3)], group=1, seed=4)
    matches = match(joined(few, whole))
    assert (matches.count, matches.loose, matches.has_loose) == (60, 8, False)


def test_a_rank_alone_is_not_in_doubt():
    matches = match(calls([(0,)]))
    assert (matches.count, matches.loose, matches.has_loose) == (0, 0, False)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Reports of ranks with smaller groups, without any range of NCCL."""
    folder = tmp_path_factory.mktemp("nsys")
    for path in write_nsys(Job.of(8, steps=2, micro_batches=2, layers=1), folder):
        with closing(sqlite3.connect(path)) as database:
            database.execute(
                f"DELETE FROM {NVTX} WHERE eventType = 75 OR "
                "textId IN (SELECT id FROM StringIds WHERE value GLOB 'nccl[A-Z]*')"
            )
            database.commit()
    return folder


@pytest.mark.parametrize("rows", [1, 1 << 18])
def test_reports_without_groups_match_nothing_and_say_why(report, rows, monkeypatch):
    monkeypatch.setattr(spill_files, "_ROWS", rows)  # with one, each group is read alone
    document = json.loads(invoke("metrics", report, "--json").stdout)
    assert (document["matching"]["collectives"], document["skew"]) == (0, [])
    assert "the members of their groups are unknown" in document["matching"]["note"]
    assert {of["offset_ns"] for of in document["clocks"]["offsets"]} == {None}


def test_no_path_goes_through_them(report):
    path = fastcomm.open(report).critical_path()
    assert not path.is_joined
    assert "have communication of one group" in path.notes[0]
