"""Statistics, replays on devices, and the replay of tables of operations."""

import heapq

import numpy as np
import orjson

from fastcomm.compat.dpro import uniform
from fastcomm.compat.dpro.statistics import statistics
from fastcomm.stragglers import operations
from fastcomm.stragglers.model import JobModel
from fastcomm.stragglers.result import SubsetScenario, rank_scenarios
from fastcomm.synthetic.job import TableJob, write_table
from fastcomm_kernels import grouping, replay

EVENTS = 1_000_000
NODES = 1_000_000
SMALL = 20_000
FILE_EVENTS = 200_000


def test_statistics(bar):
    """A long run: every key once a step."""
    random = np.random.default_rng(0)
    keys = EVENTS // 20
    key = np.tile(random.permutation(keys).astype(np.int32), 20)
    dur = random.integers(1_000, 1_000_000, EVENTS)

    def described():
        return grouping.described(*grouping.grouped(key, dur, np.int64(keys)))

    bar(
        "statistics",
        described,
        lambda: dur[np.lexsort((dur, key))],
        count=EVENTS,
    )


def uniform_text(events):
    """SEND and RECV of 8 ranks, as dPRO writes them."""
    rows = [
        {
            "name": f"Comm.{k // 16 % 1000}.{('SEND', 'RECV')[k // 8 % 2]}",
            "ph": "X",
            "ts": 1_000_000 + k * 1.25,
            "dur": 3 + k % 7,
            "pid": f"host0.rank{k % 8}",
            "tid": f"comm_detail_r{k % 8}_lr{k % 8}",
            "cat": "Comm",
            "args": {
                "name": f"Comm.{k // 16 % 1000}.{('SEND', 'RECV')[k // 8 % 2]}~>0_1_{k % 6}_0",
                "step": k // 16000,
                "loopId": 0,
                "channelId": 1,
                "chunkId": k % 6,
                "sliceId": 0,
                "cnt": k // 16000,
            },
        }
        for k in range(events)
    ]
    return orjson.dumps({"traceEvents": rows, "all_prefix": []})


def test_statistics_of_a_file(bar, tmp_path):
    """From the text of a uniform trace to its statistics."""
    text = uniform_text(FILE_EVENTS)
    path = tmp_path / "all.json"
    path.write_bytes(text)
    bar(
        "statistics_of_a_file",
        lambda: statistics(uniform.scan(path)),
        lambda: orjson.loads(text),
        count=FILE_EVENTS,
    )


def step(nodes, devices):
    """A step of many ranks: chains on each device, and edges between them."""
    random = np.random.default_rng(0)
    device = np.arange(nodes) % devices
    source = np.concatenate((np.arange(nodes - devices), np.arange(nodes - 2 * devices)))
    target = source + np.concatenate(
        (
            np.full(nodes - devices, devices),
            random.integers(1, 2 * devices, nodes - 2 * devices),
        )
    )
    order = np.argsort(source, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(source, minlength=nodes))))
    graph = (
        first.astype(np.int64),
        target[order],
        np.zeros(len(order)),
        np.zeros(len(order), np.int64),
    )
    zeros = np.zeros(nodes, np.int64)
    work = (
        device,
        random.integers(0, 4, nodes),
        random.integers(1, 1000, nodes).astype(np.float64),
        np.zeros(nodes),
        zeros,
        zeros,
    )
    return graph, work, np.zeros(devices, np.int64)


def in_python(graph, work, devices):
    """The same with heapq, without priorities: what one would write first."""
    first, after, _, _ = (column.tolist() for column in graph)
    device, duration = work[0].tolist(), work[2].tolist()
    waits = np.bincount(graph[1], minlength=len(device)).tolist()
    ready, free = [0.0] * len(device), [0.0] * devices
    queue = [(0.0, node) for node, count in enumerate(waits) if not count]
    heapq.heapify(queue)
    while queue:
        begin, node = heapq.heappop(queue)
        end = max(begin, free[device[node]]) + duration[node]
        free[device[node]] = end
        for e in range(first[node], first[node + 1]):
            other = after[e]
            ready[other] = max(ready[other], end)
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(queue, (ready[other], other))
    return max(free)


def replayed(run, nodes, devices):
    graph, work, kind = step(nodes, devices)
    return lambda: run(graph, work, kind, np.zeros(nodes), np.zeros(devices))


def test_replay(bar):
    graph, work, _ = step(SMALL, 64)
    bar(
        "replay",
        replayed(replay.by_time, NODES, 64),
        lambda: in_python(graph, work, 64),
        count=NODES,
        yardstick_count=SMALL,
    )


def test_replay_as_dpro(bar):
    graph, work, _ = step(SMALL, 64)
    bar(
        "replay_as_dpro",
        replayed(replay.by_device, NODES, 64),
        lambda: in_python(graph, work, 64),
        count=NODES,
        yardstick_count=SMALL,
    )


def test_simulate(bar):
    """Operations of a pipeline of 8 stages, on 64 data ranks and 32 steps at once."""
    ops, ranks, steps = 400, 64, 32
    lanes = ranks * steps
    time = np.random.default_rng(0).random((ops, lanes))
    before = np.array([k for i in range(1, ops) for k in {i - 1, max(0, i - 8)}], np.int64)
    count = np.array([0, *(len({i - 1, max(0, i - 8)}) for i in range(1, ops))])
    first = np.concatenate(([0], np.cumsum(count))).astype(np.int64)
    closes = np.full(ops, replay.ALONE, np.int64)
    closes[::4] = np.arange(len(closes[::4]))
    members = np.arange(len(closes[::4]) + 1), np.arange(0, ops, 4), np.ones(ops // 4, np.int64)
    delay, order = np.zeros_like(time), np.arange(ops)

    def numpys():
        """The same maxima and sums, an operation at a time."""
        end = np.zeros_like(time)
        for op in range(ops):
            start = end[before[first[op] : first[op + 1]]].max(axis=0, initial=0) + delay[op]
            if closes[op] >= 0:
                start = np.tile(start.reshape(ranks, steps).max(axis=0), ranks)
            end[op] = start + time[op]
        return end

    bar(
        "simulate",
        lambda: replay.simulate(
            order, (first, before), closes, members, time, delay, np.int64(ranks)
        ),
        numpys,
        count=ops * lanes,
    )


def test_straggler_ranks(bar, tmp_path):
    """A job of 64 data ranks, each alone as measured; a sixteenth of that one by one."""
    table, _ = write_table(TableJob(dp=64), tmp_path)
    model = JobModel.of(operations.read(table))
    few = [SubsetScenario(way="alone", kind="dp_rank", keys=(d,)) for d in range(4)]
    bar(
        "straggler_ranks",
        lambda: [each(model) for each in rank_scenarios(64)],
        lambda: [each(model) for each in few],
        count=64,
        yardstick_count=4,
    )
