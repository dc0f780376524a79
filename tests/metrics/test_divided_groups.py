"""Test the warning on process groups whose parallelism ranks guess differently."""

import pytest
from builders import kineto_text as k

import fastcomm

ALL = {
    "Process_Group_Ranks": "[0, 1]",
    "Group_size": 2,
    "Process_Group_Name": "0",
    "Process_Group_Description": "default_pg",
}


def run(folder, computing):
    for rank in range(2):
        events = []
        for step in range(3):
            at = 1000 * step
            events.append(k.mark(f"ProfilerStep#{step}", at, 1000))
            if rank in computing:
                events += [
                    k.launch(at + 5, 10 * step + 1),
                    k.kernel("gemm", at + 10, 300, correlation=10 * step + 1),
                ]
            events.append(k.all_reduce(at + 400, 100, Seq=step, **ALL))
        k.write(folder / f"rank{rank}.json", events, rank=rank, world=2)
    return fastcomm.open(folder).metrics()


def test_ranks_that_guess_unlike_are_named(tmp_path):
    metrics = run(tmp_path, computing=(0,))
    (text,) = [text for text in metrics.warnings if "guessed parallelism" in text]
    assert "1 process group: DP on rank 0, OTHER on rank 1;" in text
    assert "--dp" in text


@pytest.mark.parametrize("computing", [(0, 1), ()])
def test_ranks_that_guess_alike_are_not(tmp_path, computing):
    metrics = run(tmp_path, computing)
    assert not [text for text in metrics.warnings if "guessed parallelism" in text]
