"""Test the rhythm of calls: the longest repetition, and where a rank leaves it."""

import json

import numpy as np
import pytest
from builders.hang_files import dump_of
from hypothesis import given
from hypothesis import strategies as st
from oracles.repetition import repeats

from fastcomm.formats.flight_recorder import read
from fastcomm.hang.calls import job_of, of_dump
from fastcomm.hang.rhythm import contexts, departure, left_at, next_group
from fastcomm_kernels.repetitions import longest_repetition


@given(st.lists(st.integers(0, 2), max_size=18), st.integers(0, 3))
def test_the_longest_repetition_is_that_of_the_definition(token, shortest):
    got = longest_repetition(np.array(token, np.int64), shortest)
    assert tuple(map(int, got)) == repeats(token, shortest)


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ([1, 2, 3, 4] * 4, None),
        ([1, 2, 3, 4] * 4 + [9], (16, 12)),
        ([1, 2, 3, 4] * 4 + [1, 2, 4, 1], (18, 14)),  # the third is left out
        ([1, 2, 3], None),
        ([], None),
    ],
)
def test_a_rhythm_is_left_where_a_call_differs_from_that_a_period_before(token, expected):
    assert left_at(np.array(token, np.int64)) == expected


def test_contexts_are_equal_for_equal_calls_in_a_row():
    context = contexts(np.array([1, 2, 3, 1, 2, 3, 2, 3]), 2).tolist()
    assert context[1] == context[4]
    assert context[2] == context[5] == context[7]
    assert len({*context}) == 5


def test_a_departure_is_in_the_group_of_the_job_where_its_own_dump_states_no_ranks(tmp_path):
    for rank in (0, 1):
        document = dump_of(rank, 4, 40)
        if rank == 0:  # an older release states no groups
            del document["pg_config"]
            document["entries"][-1]["input_sizes"] = [[65]]
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(document))
    calls = [of_dump(read(tmp_path / f"rank_{rank}.json")).shortened(16) for rank in (0, 1)]
    job = job_of(calls)
    departed = departure(job.ranks[0])
    assert (departed.kind, departed.is_last) == ("mismatch_size", True)
    assert departed.group in job.members
    assert departed.group.ranks == (0, 1, 2, 3)
    assert next_group(job.ranks[1]).ranks == (0, 1, 2, 3)


def test_a_dump_is_read_again_once(tmp_path, monkeypatch):
    (tmp_path / "rank_0.json").write_text(json.dumps(dump_of(0, 4, 40)))
    short = of_dump(read(tmp_path / "rank_0.json")).shortened(16)
    again = []

    def counted(path):
        again.append(path)
        return read(path)

    monkeypatch.setattr("fastcomm.hang.calls.read", counted)
    assert {len(short.whole().row) for _ in range(3)} == {82}
    assert len(again) == 1
