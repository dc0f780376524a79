"""Test ranks in file names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.formats.sources import NAME_PATTERNS, rank_from_name


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json", 3),
        ("rank3_trace.json", 3),
        ("rank-3.json.gz", 3),
        ("rank_3.pt.trace.json", 3),
        ("trace_rank[3].json", 3),
        ("Rank 03.json", 3),
        ("rank12.1694128201545.pt.trace.json.gz", 12),
        ("rank_3.1694128201545.pt.trace.json.gz", 3),
        ("nccl_2rank_rank0.json.gz", 0),
        ("world_size_8_rank_3_of_8.json", 3),
        ("rank3_rank3.json", 3),
        ("iteration_10/rank7_trace.json", 7),
        ("C:\\runs\\rank7_trace.json", 7),
        ("worker3_step.json", 3),
        ("worker_3.1694128201545.pt.trace.json", 3),
        ("worker0_step_12.1694128201545.pt.trace.json.gz", 0),
        ("rank5_worker0.json", 5),
        ("kineto_trace_3.json", 3),
        ("kineto_trace_31.json.gz", 31),
        ("torch_et_3.json", 3),
        ("nsys_3.sqlite", 3),
        ("trace_r3.json", 3),
        ("step5.r3.json.gz", 3),
    ],
)
def test_ranks_are_found_in_file_names(name, rank):
    assert rank_from_name(name) == rank


@pytest.mark.parametrize(
    "name",
    [
        "",
        "trace.json",
        "node17_12345.1694128201545.pt.trace.json",
        "worker3_12345.1694128201545.pt.trace.json.gz",  # torch's default on the host worker3
        "job-worker-3_12345.1694128201545.pt.trace.json.gz",
        "franc3.json",
        "frank3.json",
        "rank.json",
        "ranking_3.json",
        "rank3_rank4.json",
        "local_rank3.json",
        "tp_rank1.json",
        "dp-rank-1.json",
        "rank20240101123456.json",
        "rank3/trace.json",
        "kineto_trace.json",
        "kineto_trace_3/part.json",
        "coworker3.json",
        "r3.json",
        "trace_r3_old.json",
        "rank\u0663.json",
    ],
)
def test_names_without_a_rank_give_none(name):
    assert rank_from_name(name) is None


@pytest.mark.parametrize("pattern", NAME_PATTERNS)
def test_the_patterns_of_messages_are_found(pattern):
    assert rank_from_name(f"x_{pattern.replace('N', '42')}.json".replace("..", ".")) == 42


@given(st.integers(0, 10**7 - 1), st.sampled_from(["rank{}", "rank-{}.pt", "nsys_{}", "a_r{}"]))
def test_every_rank_in_a_known_pattern_is_found(rank, form):
    assert rank_from_name(form.format(rank) + ".json") == rank


@given(st.text())
def test_any_file_name_gives_a_rank_or_none(name):
    rank = rank_from_name(name)
    assert rank is None or rank >= 0
