"""Test which rank of two that both receive is named: one that left out a message, or both."""

import gzip
import json

import pytest
from builders.hang_files import dump_of

from fastcomm.hang.analysis import diagnose_hang

START = 1_700_000_000
USUAL = (("send", "send", "recv", "recv"), ("recv", "recv", "send", "send"))


def calls_of(rank, steps, done):
    """The calls of a rank: messages to the other one, and a collective a step."""
    like = dump_of(0, 4, 1)["entries"][0]
    count = {"send": 0, "recv": 0}
    sides = [(step, op) for step, own in enumerate(steps) for op in (*own, None)]
    for record, (step, op) in enumerate(sides):
        is_done = record < done
        call = {
            **like, "record_id": record, "time_created_ns": (START + record) * 1_000_000_000,
            "state": "completed" if is_done else "scheduled", "retired": is_done,
        }  # fmt: skip
        if op is None:
            yield {**call, "process_group": ["0", "default_pg"], "collective_seq_id": step + 1}
            continue
        count[op] += 1
        arrow = "->" if op == "send" else "<-"
        yield {
            **call, "process_group": ["9", "mesh_pp"], "is_p2p": True,
            "profiling_name": f"nccl:{op} {rank}{arrow}{1 - rank}", "p2p_seq_id": count[op],
        }  # fmt: skip


def verdict(folder, last, done):
    """What is made of two ranks whose last step is another one, and that have done so much."""
    folder.mkdir()
    for rank in range(2):
        steps = [*[USUAL[rank]] * 5, last[rank]]
        config = {
            name: {"name": name, "desc": desc, "ranks": "[0, 1]"}
            for name, desc in (("0", "default_pg"), ("9", "mesh_pp"))
        }
        entries = [*calls_of(rank, steps, done[rank])]
        text = json.dumps({"version": "2.10", "pg_config": config, "entries": entries})
        packed = gzip.compress(text.encode(), mtime=START + 650)
        (folder / f"rank_{rank}.json.gz").write_bytes(packed)
    hang = diagnose_hang(folder)
    return hang.kind, hang.culprits, hang.confidence


@pytest.mark.parametrize(
    ("last", "kind", "culprits"),
    [
        (("send", "recv", "recv"), "p2p_unmatched", (0,)),
        (("send", "recv", "send", "recv"), "p2p_order", (0, 1)),
    ],
    ids=["left out", "swapped"],
)
def test_a_rank_that_leaves_out_a_message_is_named_alone(tmp_path, last, kind, culprits):
    # Each has done the first message of the last step.
    answer = verdict(tmp_path / "job", (last, USUAL[1]), (26, 26))
    assert answer == (kind, culprits, "low")
