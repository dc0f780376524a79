"""Test roots and peers as global ranks in every format."""

from operator import attrgetter

import pyarrow as pa
import pytest
from builders import kineto_text as k
from builders.nsys_report import SMALL
from builders.opened import open_run
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.computation import compute_metrics
from fastcomm.synthetic import play
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.nsys.tables import NsysVariant
from fastcomm.synthetic.traces import write
from fastcomm.trace.schema import NARROW, OPS, PARTNERS
from fastcomm.trace.trace import only_message

GROUP = {"Process_Group_Name": "3", "Process_Group_Ranks": "[4, 6, 9]", "Group_size": 3}


def call(word, ts, dur, **said):
    """What the host says of a collective."""
    args = {"Collective_name": word, **GROUP, **said}
    return k.event("record_param_comms", "cpu_op", ts, dur, pid=100, tid=1, **args)


def message(ts, correlation, **said):
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    return k.kernel(name, ts, 5, 20, device=0, correlation=correlation, **said)


def partners(folder, events):
    path = k.write(folder / "rank4.json", events, rank=4, world=10)
    trace = open_run(path).read(4, "all")
    return [tuple(row[name] for name in PARTNERS) for row in trace.comm.to_pylist()]


def test_a_message_names_the_other_side_as_a_global_rank(tmp_path):
    rows = [
        k.launch(1, 1),
        k.launch(2, 2),
        message(10, 1, Collective_name="send", Dst_Rank=9, **GROUP),
        message(20, 2, Collective_name="recv", Src_Rank=6, **GROUP),
    ]
    assert partners(tmp_path, rows) == [(None, [9], []), (None, [], [6])]


def test_without_a_global_rank_the_place_in_the_group_is_looked_up(tmp_path):
    rows = [
        call("send", 0, 5, Rank=2),
        k.launch(1, 1),
        call("recv", 6, 5, Rank=3),
        k.launch(7, 2),
        message(10, 1, Collective_name="send", **GROUP),
        message(20, 2, Collective_name="recv", **GROUP),
    ]
    assert partners(tmp_path, rows) == [(None, [9], []), (None, None, None)]


def test_the_root_of_a_host_call_is_a_position_in_the_group(tmp_path):
    def broadcast(ts, correlation):
        words = {**GROUP, "Collective_name": "broadcast", "device": 0}
        return k.all_reduce(ts, 5, correlation=correlation, **words)

    rows = [
        call("broadcast", 0, 5, Rank=1),
        k.launch(1, 1),
        call("broadcast", 6, 5),
        k.launch(7, 2),
        broadcast(10, 1),
        broadcast(20, 2),
    ]
    assert partners(tmp_path, rows) == [(6, None, None), (None, None, None)]


def test_messages_since_the_previous_launch_belong_to_one_launch(tmp_path):
    rows = [
        call("send", 0, 5, Dst_Rank=6),
        k.launch(1, 1),
        call("send", 10, 2, Dst_Rank=9),
        call("recv", 13, 2, Src_Rank=6),
        call("send", 15, 2, Dst_Rank=1, Process_Group_Name="8"),
        call("recv", 22, 9, Src_Rank=1),
        k.launch(20, 2),
        message(30, 1, Collective_name="send", Dst_Rank=6, **GROUP),
        # PyTorch links it to the last of them.
        message(40, 2, Collective_name="recv", Src_Rank=6, **GROUP),
        message(50, 3),
    ]
    assert partners(tmp_path, rows)[:2] == [(None, [6], []), (None, [9], [6])]
    assert partners(tmp_path, rows)[2] == (None, None, None)


def test_messages_without_metadata_have_no_peers(tmp_path):
    rows = [k.launch(1, 1), message(10, 1, **GROUP)]
    assert partners(tmp_path, rows) == [(None, None, None)]


def by_definition(rank):
    """Root, sends and receives of each call of the job, in order of time."""
    calls = [
        (work.start, work.stop, work.call)
        for step in play.steps(SMALL, rank)
        for work in step.works
        if work.call
    ]
    for start, stop, each in sorted(calls, key=lambda found: found[0]):
        op = each.operation.op
        sends = receives = None
        if each.peers:
            source, target = each.peers
            sends, receives = ([target], []) if source == rank else ([], [source])
        root = each.group.ranks[0] if op == "Broadcast" else None
        yield start, stop, op, root, sends, receives


def said(trace):
    names = ("start", "stop", "op", *PARTNERS)
    rows = [tuple(row[name] for name in names) for row in trace.comm.to_pylist()]
    return [(start, stop, OPS[op], *rest) for start, stop, op, *rest in rows]


MADE = {
    "kineto": lambda folder: write(SMALL, folder),
    "sqlite": lambda folder: write_nsys(SMALL, folder, per_report=4),
    "ungrouped": lambda folder: write_nsys(
        SMALL, folder, per_report=4, variant=NsysVariant(groups=False)
    ),
    "texts": lambda folder: write_nsys(
        SMALL, folder, per_report=4, variant=NsysVariant(payload="json")
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_every_format_has_the_partners_of_the_synthetic_job(tmp_path, name):
    MADE[name](tmp_path)
    run = open_run(tmp_path)
    for rank in (0, run.ranks[-1]):
        assert said(run.read(rank, "all")) == list(by_definition(rank))


@pytest.fixture
def store(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write(SMALL, source, ranks=[0])
    ingest(plan([source], tmp_path / "store"))
    return source, tmp_path / "store"


def test_a_store_keeps_partners(store):
    source, stored = store
    wanted = open_run(source).read(0, "all").comm
    assert open_run(stored).read(0, "all").comm.equals(wanted)
    event = open_run(stored).sources[0].read("metrics").comm["event"]
    schema = NARROW["comm"]
    place = schema.get_field_index("event")
    narrow = wanted.select(schema.names).set_column(place, schema.field(place), event)
    assert narrow["peer"].null_count < narrow.num_rows
    assert open_run(stored).sources[0].read("metrics").comm.equals(narrow)


@given(st.lists(st.tuples(*[st.none() | st.lists(st.integers(0, 9), max_size=3)] * 2)))
def test_an_event_of_one_message_has_one_peer(rows):
    ranks = pa.list_(pa.int32())
    columns = only_message(*(pa.array([row[side] for row in rows], ranks) for side in (0, 1)))
    found = list(zip(*(column.to_pylist() for column in columns), strict=True))
    for (sent, received), one in zip(rows, found, strict=True):
        peers = [*(sent or ()), *(received or ())]
        assert one == ((peers[0], bool(sent)) if len(peers) == 1 else (None, None))


def waited():
    """By the job's own times: how many of an operation, and ns that ranks wait in them."""
    starts = {}
    for rank in range(SMALL.ranks):
        for step in play.steps(SMALL, rank):
            seen = {}
            for work in sorted(filter(attrgetter("call"), step.works), key=attrgetter("start")):
                op, ranks = work.call.operation.op, work.call.peers or work.call.group.ranks
                if op in ("Broadcast", "SendRecv"):
                    seen[op, ranks] = seen.get((op, ranks), 0) + 1
                    which = op, ranks, step.number, seen[op, ranks]
                    starts.setdefault(which, {})[rank] = work.start
    found = {"Broadcast": (0, 0), "SendRecv": (0, 0)}
    for (op, ranks, *_), by_rank in starts.items():
        until = by_rank[ranks[0]] if op == "Broadcast" else max(by_rank.values())
        waits = [max(0, until - start) for start in by_rank.values()]
        found[op] = found[op][0] + 1, found[op][1] + sum(waits)
    return found


@pytest.mark.parametrize("name", ["kineto", "sqlite"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_who_waits_for_a_root_or_a_message_is_known_from_every_format(
    tmp_path, name, is_stored
):
    MADE[name](tmp_path / "made")
    if is_stored:
        ingest(plan([tmp_path / "made"], tmp_path / "store"))
    run = open_run(tmp_path / ("store" if is_stored else "made"))
    across = compute_metrics(run).across
    wanted = waited()
    assert (across.matching.without_partner, across.matching.share) == (0, 1.0)
    assert across.matching.messages == wanted["SendRecv"][0] > 0
    for op, (count, total) in wanted.items():
        own = [each for each in across.skew if each.op == op]
        assert sum(each.count for each in own) == count > 0
        assert sum(each.wait_ns for each in own) * SMALL.steps == total
