"""Test costs of ranks that are late at different collectives of a step."""

import json

import pytest
from builders.opened import open_run

from fastcomm.metrics.computation import compute_metrics

RANKS, STEPS, LAYERS = 4, 3, 4
COMPUTE_US, TRANSFER_US = 1000, 300


def write_run(folder, more, members=tuple(range(RANKS))):
    """Write ranks that compute and all-reduce in turns, `more(rank, layer)` us longer."""
    events = {rank: [] for rank in range(RANKS)}
    now = dict.fromkeys(range(RANKS), 0)
    for step in range(STEPS):
        for rank in range(RANKS):
            span = {"ts": now[rank], "dur": _step_us(more), "pid": 100, "tid": 100}
            mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}"}
            events[rank].append(mark | span)
        for layer in range(LAYERS):
            for rank in range(RANKS):
                dur = COMPUTE_US + more(rank, layer)
                events[rank].append(_kernel("gemm", now[rank], dur, 7))
                now[rank] += dur
            end = max(now.values()) + TRANSFER_US
            for rank in range(RANKS):
                args = {
                    "Collective name": "allreduce",
                    "Process Group Name": "0",
                    "Process Group Description": "dp",
                    "Process Group Ranks": str(list(members)),
                    "Group size": len(members),
                    "In msg nelems": 1000,
                    "Out msg nelems": 1000,
                    "dtype": "Float",
                }
                name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"
                events[rank].append(_kernel(name, now[rank], end - now[rank], 20, **args))
                now[rank] = end
    for rank, own in events.items():
        info = {"rank": rank, "world_size": RANKS, "backend": "nccl"}
        (folder / f"rank{rank}.json").write_text(
            json.dumps({"distributedInfo": info, "traceEvents": own})
        )


def _step_us(more):
    longest = (max(more(rank, layer) for rank in range(RANKS)) for layer in range(LAYERS))
    return LAYERS * (COMPUTE_US + TRANSFER_US) + sum(longest)


def _kernel(name, start, dur, stream, **args):
    where = {"ph": "X", "cat": "kernel", "pid": 0, "tid": stream, "ts": start, "dur": dur}
    return where | {"name": name, "args": {"device": 0, "stream": stream, **args}}


@pytest.mark.parametrize(
    ("late", "wanted"),
    [
        ({1: (500, 0, 500, 0), 2: (0, 500, 0, 500)}, {(1, 2): 2000}),  # they tie
        ({1: (600, 0, 600, 0), 2: (0, 400, 0, 400)}, {(1,): 1200, (2,): 800}),
        ({1: (600, 0, 600, 0), 2: (400, 0, 400, 0)}, {(1,): 800, (2,): 400}),
        ({1: (600, 0, 600, 0), 2: (400, 0, 0, 400)}, {(1,): 1000, (2,): 600}),
        ({1: (500, 0, 500, 0), 2: (500, 0, 500, 0)}, {(1, 2): 1000}),
    ],
)
def test_costs_add_up_to_the_time_saved_by_all_fixes(tmp_path, late, wanted):
    def more(rank, layer):
        return late[rank][layer] if rank in late else 0

    write_run(tmp_path, more)
    found = compute_metrics(open_run(tmp_path))
    costs = {each.ranks: each.cost_ns / 1000 for each in found.across.causes}
    assert costs == {ranks: pytest.approx(cost) for ranks, cost in wanted.items()}
    gained = _step_us(more) - _step_us(lambda *_: 0)
    assert sum(costs.values()) == pytest.approx(gained)
