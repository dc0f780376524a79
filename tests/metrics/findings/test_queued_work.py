"""Test findings on ranks whose queued work starts late: their hosts are not to blame."""

from builders import kineto_text as k

import fastcomm

GROUP = {"Process_Group_Ranks": "[0, 1]", "Group_size": 2, "Process_Group_Name": "0"}


def rank(folder, number, arrival):
    """Steps in which an all-reduce is launched first, and arrives at some us of the step."""
    events = []
    for step in range(4):
        at, correlation = 10_000 * step, 10 * step + 1
        events += [
            k.mark(f"ProfilerStep#{step}", at, 10_000),
            k.launch(at + 10, correlation),
            k.kernel("gemm", at + 100, 3000, correlation=correlation),
            k.launch(at + 20, correlation + 1),
            k.all_reduce(
                at + arrival, 9000 - arrival, Seq=step, correlation=correlation + 1, **GROUP
            ),
        ]
    k.write(folder / f"rank{number}.json", events, rank=number, world=2)


def test_a_host_that_launched_in_time_is_not_late(tmp_path):
    for number, arrival in enumerate((3200, 8000)):
        rank(tmp_path, number, arrival)
    findings = fastcomm.open(tmp_path).metrics().findings
    (text,) = [entry.text for entry in findings if entry.kind == "jittery_host"]
    assert text.startswith("Rank 1 is idle longer than its peers (late communication): +4.")
    (text,) = [entry.text for entry in findings if entry.kind == "idle"]
    assert "try to find what delays the communication" in text
    assert "pipeline" not in " ".join(entry.text for entry in findings)
