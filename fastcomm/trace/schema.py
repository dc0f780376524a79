"""The tables of a trace, as data: one schema a table, one comment a column.

Times are int64 nanoseconds, intervals half-open ``[start, stop)``, sizes int64 bytes. What is
unknown is null. A table's rows are sorted by `start` where it has one.
"""

from collections.abc import Iterable
from typing import Literal

import pyarrow as pa

# The kinds of event, by number: a column of int8 is what kernels compare.
KINDS = (
    "kernel",  # device work, communication kernels among them
    "memcpy",  # device copies
    "memset",
    "cpu_op",  # an operator on a host thread
    "runtime",  # a call of the CUDA or HIP runtime or driver
    "annotation",  # a range that the user's code marked on a host thread
    "gpu_annotation",  # the same range, projected on a stream: not work
    "sync",  # rows about waiting, on a device or a host lane
    "python",  # a Python function on a host thread
    "other",
    "host_work",  # compute on a host thread, in a run without an accelerator
    "host_comm",  # a collective that the host carries out, in a run with an accelerator
    "host_node",  # a callback of the host in a CUDA graph: a stream waits for it
)
KIND = {name: number for number, name in enumerate(KINDS)}
# The name of a kernel that stands for all work of a CUDA graph: it may compute, communicate
# and copy.
WHOLE_GRAPH = "CUDA graph"

# Where a tag comes from, best evidence first.
TAG_SOURCES = ("explicit", "description", "ranks", "heuristic", "none")

OPS = (
    "AllReduce",
    "AllGather",
    "ReduceScatter",
    "AllToAll",
    "SendRecv",
    "Broadcast",
    "Reduce",
    "Gather",
    "Scatter",
    "Barrier",
    "OTHER",
)
OP = {name: number for number, name in enumerate(OPS)}


def numbers(names: Iterable[str]) -> tuple[int, ...]:
    """Return the index in OPS of each operation, by name."""
    return tuple(OP[name] for name in names)


# Operations that cannot end on any member before all have started, and so end on all at the
# same time. The root of a broadcast, or a sender, may finish before the others have their data.
ENDS_TOGETHER = numbers(("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Barrier"))
# Operations whose size is the same on every member.
EVEN = numbers(("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce"))
# Operations with a root: the members wait for the root, or the root waits for the members.
FROM_ROOT, TO_ROOT = numbers(("Broadcast", "Scatter")), numbers(("Reduce", "Gather"))
ROOTED = FROM_ROOT + TO_ROOT

_NAMES = pa.dictionary(pa.int32(), pa.string())

EVENTS = pa.schema(
    [
        pa.field("start", pa.int64(), nullable=False),  # ns since the epoch of `meta.clock`
        pa.field("stop", pa.int64(), nullable=False),  # >= start
        pa.field("kind", pa.int8(), nullable=False),  # index into KINDS
        pa.field("name", _NAMES, nullable=False),
        pa.field("lane", pa.int32(), nullable=False),  # row of LANES
        pa.field("correlation", pa.int64()),  # joins a launch and its device work
        pa.field("offset", pa.int64()),  # byte offset of the event's text, after decompression
    ]
)

# Rarely used columns of events, parallel to EVENTS; null where an event has none. A reader
# provides those that its format has.
ARGS = pa.schema(
    [
        pa.field("position", pa.int64()),  # of the event in its file, from 0
        pa.field("on_stream", pa.int64()),  # that the event names; a lane's thread may differ
        pa.field("bytes", pa.int64()),  # that a copy moves
        pa.field("external_id", pa.int64()),  # joins an operator and what it launched
        pa.field("sequence", pa.int64()),  # joins an operator and its backward pass
        pa.field("forward_thread", pa.int64()),  # of the operator that a backward one mirrors
        pa.field("record_function", pa.int64()),  # joins the host's execution trace
        pa.field("wait_stream", pa.int64()),  # stream that a synchronization waits for
        pa.field("wait_correlation", pa.int64()),  # of the event record that it waits for
        pa.field("input_shapes", _NAMES),  # of the inputs of an operator: a JSON list
        pa.field("input_types", _NAMES),  # their types: a JSON list
        pa.field("input_values", _NAMES),  # values of those that are no tensors: a JSON list
        # Positions of what a node of a CUDA graph waits for, separated by spaces; null unless
        # its replay has them.
        pa.field("after", _NAMES),
        pa.field("on_lane", pa.int64()),  # 1 where `on_stream` is a lane that tells no order
    ]
)
OPERANDS = ("input_shapes", "input_types", "input_values")
TEXT_ARGS = (*OPERANDS, "after")

LANES = pa.schema(
    [
        pa.field("process", pa.string(), nullable=False),  # host process, or device number
        pa.field("thread", pa.string(), nullable=False),  # host thread, or stream number
        pa.field("device", pa.int32()),  # local device; null on a host lane
        pa.field("is_device", pa.bool_(), nullable=False),
    ]
)

COMM = pa.schema(
    [
        pa.field("op", pa.int8(), nullable=False),  # index into OPS
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("stream", pa.int64()),  # of the device
        pa.field("group", pa.int32()),  # row of GROUPS
        pa.field("seq", pa.int64()),  # number of the collective in its group
        pa.field("call_id", pa.int64()),  # PyTorch's Comms Id, equal on members; as signed
        pa.field("tag", pa.int8(), nullable=False),  # index into TAGS
        pa.field("tag_source", pa.int8(), nullable=False),  # index into TAG_SOURCES
        pa.field("msg_bytes", pa.int64()),  # what the API reports
        pa.field("payload_bytes", pa.int64()),  # nccl-tests' S: the specification's e.bytes
        pa.field("bus_bytes", pa.int64()),  # S times the algorithm's factor
        pa.field("event", pa.int32(), nullable=False),  # row of EVENTS
        pa.field("root", pa.int32()),  # global rank of the root, of a rooted operation
        pa.field("sends_to", pa.list_(pa.int32())),  # global ranks, of messages, in their order
        pa.field("receives_from", pa.list_(pa.int32())),
        pa.field("peer", pa.int32()),  # the other rank of an event that is one message
        pa.field("sends", pa.bool_()),  # whether it sends that message
        # Bytes to and from each rank of the group, of an all-to-all with recorded splits.
        pa.field("sent_bytes", pa.list_(pa.int64())),
        pa.field("received_bytes", pa.list_(pa.int64())),
    ]
)
# Columns of COMM that a reader may leave out; they are then null.
PARTNERS = ("root", "sends_to", "receives_from")
SPLITS = ("sent_bytes", "received_bytes")
# Columns of COMM that are derived from PARTNERS if a reader leaves them out.
OF_ONE = ("peer", "sends")

GROUPS = pa.schema(
    [
        pa.field("name", pa.string()),  # a label: need not be the same on every rank
        pa.field("description", pa.string()),
        pa.field("ranks", pa.list_(pa.int32())),  # sorted global ranks; null where unknown
        pa.field("size", pa.int32()),
        pa.field("tag", pa.int8(), nullable=False),
        pa.field("tag_source", pa.int8(), nullable=False),
        pa.field("candidates", pa.list_(pa.int8())),  # tags that fit equally well
    ]
)

ITERATIONS = pa.schema(
    [
        pa.field("number", pa.int64(), nullable=False),  # as the marks count, or from 0
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
    ]
)

# The largest names behind the idle time of a step, by cause; see `idle.intervals`.
IDLE_EVIDENCE = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),  # index of the iteration of the rank
        pa.field("cause", pa.int8(), nullable=False),  # index into `idle.causes.CAUSES`
        pa.field("name", pa.string(), nullable=False),
        pa.field("ns", pa.int64(), nullable=False),
        pa.field("intervals", pa.int64(), nullable=False),  # number
    ]
)

_MEASURED = ("start", "stop", "kind")
_NOT_MEASURED = ("sends_to", "receives_from")
# Columns that metrics need of a trace.
NARROW = {
    "events": pa.schema([EVENTS.field(name) for name in _MEASURED]),
    "comm": pa.schema([field for field in COMM if field.name not in _NOT_MEASURED]),
}
_NAMED = (*_MEASURED, "name", "lane")
_WHICH = pa.schema(
    [
        COMM.field(name)
        for name in ("op", "start", "stop", "group", "tag", "tag_source", "event")
    ]
)
_LINKS = ("sequence", "forward_thread", *OPERANDS)
# Sets of columns that can be read without the others.
ColumnSet = Literal["all", "metrics", "kernels", "launches"]
COLUMN_SETS: dict[ColumnSet, dict[str, pa.Schema]] = {
    "all": {"events": EVENTS, "comm": COMM, "args": ARGS},
    "metrics": {**NARROW, "args": pa.schema([])},
    "kernels": {
        "events": pa.schema([EVENTS.field(name) for name in _NAMED]),
        "comm": _WHICH,
        "args": pa.schema([]),
    },
    "launches": {
        "events": pa.schema([EVENTS.field(name) for name in (*_NAMED, "correlation")]),
        "comm": _WHICH,
        "args": pa.schema([ARGS.field(name) for name in _LINKS]),
    },
}
