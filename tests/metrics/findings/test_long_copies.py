"""Test findings on ranks whose copies take longer, as over a slow PCIe link."""

import pytest
from builders import kineto_text as k

import fastcomm

RANKS, STEP = 4, 10_000  # us
GROUP = {"Process_Group_Ranks": str([*range(RANKS)]), "Process_Group_Name": "0"}


def measure(folder, copies, *, is_hidden=False):
    """Measure ranks that copy for some us, before or under compute, then all-reduce."""
    for rank, copy in enumerate(copies):
        events = []
        for step in range(4):
            at = STEP * step
            compute = at if is_hidden else at + copy
            arrival = compute + 3000
            end = at + 8000
            events += [
                k.mark(f"ProfilerStep#{step}", at, STEP),
                k.event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", at, copy, stream=7),
                k.kernel("gemm", compute, 3000, stream=8),
                k.all_reduce(arrival, end - arrival, Seq=step, **GROUP),
            ]
        k.write(folder / f"rank{rank}.json", events, rank=rank, world=RANKS)
    return fastcomm.open(folder).metrics()


def test_the_rank_with_a_slow_copy_is_named_with_its_cost(tmp_path):
    metrics = measure(tmp_path, (500, 500, 2500, 500))
    (finding,) = metrics.across.causes
    assert (finding.kind, finding.ranks) == ("long_copies", (2,))
    assert finding.cost_ns == pytest.approx(2_000_000)
    assert finding.value("copies_ns") == 2_500_000
    assert finding.value("peers_copies_ns") == 500_000
    assert finding.text == (
        "Memory copies of rank 2 that overlap nothing take longer than those of its peers, "
        "which wait: +2.00 ms per step (20.0 % of the step)."
    )


def test_ranks_that_copy_longer_together_are_one_finding(tmp_path):
    (finding,) = measure(tmp_path, (500, 2500, 2500, 500)).across.causes
    assert (finding.ranks, finding.cost_ns) == ((1, 2), pytest.approx(2_000_000))
    assert finding.text.startswith("Memory copies of ranks 1-2 that overlap nothing take")


@pytest.mark.parametrize(
    ("copies", "is_hidden"),
    [
        ((500, 500, 500, 500), False),
        ((2500, 2500, 2500, 2500), False),  # long on all
        ((500, 500, 2500, 500), True),  # under compute
    ],
)
def test_copies_that_nobody_waits_for_are_no_cause(tmp_path, copies, is_hidden):
    assert measure(tmp_path, copies, is_hidden=is_hidden).across.causes == ()
