"""The views that a query can use: each column with its type, unit and meaning.

`VIEWS` is the only list of them: the tables of a run are made by it, `.schema` prints it, and
the page of the documentation shows what `.schema` prints. Times are ns, sizes bytes; unknown
values are null.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import pyarrow as pa

from fastcomm.idle.causes import CAUSES
from fastcomm.trace.parallelisms import TAGS

ColumnType = Literal["BIGINT", "DOUBLE", "VARCHAR", "BOOLEAN", "BIGINT[]", "INTEGER[]"]
# Texts that repeat from row to row are dictionaries, as in the files of a store.
_NAMES = pa.dictionary(pa.int32(), pa.string())
_TYPES = {
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "VARCHAR": pa.string(),
    "BOOLEAN": pa.bool_(),
    "BIGINT[]": pa.list_(pa.int64()),
    "INTEGER[]": pa.list_(pa.int32()),
}


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """A column of a view: its name, type in SQL, meaning, and the unit of numbers."""

    name: str
    type: ColumnType
    text: str
    unit: str = ""
    is_listed: bool = False  # whether the list of files has it, so that no trace is read


@dataclass(frozen=True)
class RunView:
    """A view of the run, and where its rows come from."""

    name: str
    text: str
    columns: tuple[ViewColumn, ...]
    has_repeated_texts: bool = False

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns as Arrow has them."""
        texts = _NAMES if self.has_repeated_texts else pa.string()
        types = {**_TYPES, "VARCHAR": texts}
        return pa.schema([(column.name, types[column.type]) for column in self.columns])

    def is_listed(self, names: Sequence[str]) -> bool:
        """Whether the list of files has all of these columns."""
        listed = {column.name for column in self.columns if column.is_listed}
        return listed.issuperset(names)


def _ns(name: str, text: str, *, exact: bool = True) -> ViewColumn:
    """Return a column of times: whole numbers, or means."""
    return ViewColumn(name, "BIGINT" if exact else "DOUBLE", text, "ns")


_RANK = ViewColumn("rank", "BIGINT", "number of the rank")
_TAG = ViewColumn("tag", "VARCHAR", f"parallelism: {', '.join(TAGS)}")
_OP = ViewColumn("op", "VARCHAR", "operation: AllReduce, AllGather, SendRecv, ...")
_STEP = ViewColumn("step", "BIGINT", "number of the step, as the marks of the trace count")

RANKS = RunView(
    "ranks",
    "a row per rank of the run",
    (
        ViewColumn("rank", "BIGINT", "number of the rank", is_listed=True),
        ViewColumn("path", "VARCHAR", "file of its trace", is_listed=True),
        ViewColumn("file_bytes", "BIGINT", "size of that file", "bytes", is_listed=True),
        ViewColumn("node", "BIGINT", "number of its node; null if unknown"),
        ViewColumn("stage", "BIGINT", "pipeline stage, from 0; null without a pipeline"),
        ViewColumn("steps", "BIGINT", "number of its steps"),
        _ns("step_mean_ns", "mean time of its steps", exact=False),
        _ns("step_p99_ns", "99th percentile of the times of its steps", exact=False),
        _ns("step_max_ns", "longest of its steps"),
        _ns("compute_ns", "compute in the mean step", exact=False),
        _ns("exposed_ns", "exposed communication in the mean step", exact=False),
        _ns("idle_ns", "idle time in the mean step", exact=False),
        ViewColumn("collectives", "BIGINT", "matched collectives and messages, of all steps"),
        _ns("wait_ns", "wait for other ranks in them, per step", exact=False),
        _ns("transfer_ns", "transfer time in them, per step", exact=False),
        _ns("wait_caused_ns", "wait caused by arriving last, per step", exact=False),
        ViewColumn("last", "BIGINT", "collectives at which it alone arrived last"),
        _ns("clock_offset_ns", "by how much its clock is ahead of the reference clock"),
        _ns("clock_spread_ns", "scatter of the evidence for that"),
    ),
)

STEPS = RunView(
    "steps",
    "a row per step of a rank",
    (
        _RANK,
        _STEP,
        _ns("start_ns", "start, on the clock of the rank"),
        _ns("stop_ns", "end, on the clock of the rank"),
        _ns("time_ns", "duration"),
        _ns("spec_compute_ns", "compute, by the specification formula"),
        *(_ns(f"spec_comm_{tag}_ns", f"{tag} communication, likewise") for tag in TAGS),
        _ns("spec_idle_ns", "idle time, likewise"),
        _ns("exact_compute_ns", "time with compute, whatever else runs"),
        *(_ns(f"exact_exposed_{tag}_ns", f"exposed communication of {tag}") for tag in TAGS),
        _ns("exact_exposed_mixed_ns", "exposed communication of several parallelisms at once"),
        _ns("exact_memcpy_ns", "copies alone"),
        _ns("exact_idle_ns", "time in which the device is idle"),
        *(_ns(f"idle_{cause}_ns", f"idle time by cause: {cause}") for cause in CAUSES),
        _ns("comm_union_ns", "time with communication"),
        _ns("comm_overlapped_ns", "overlapped by compute"),
        *(
            column
            for tag in TAGS
            for column in (
                _ns(f"{tag}_union_ns", f"time with communication of {tag}"),
                _ns(f"{tag}_overlapped_ns", f"of that, overlapped by compute ({tag})"),
            )
        ),
        ViewColumn(
            "comm_bytes", "BIGINT", "communication; null if one size is unknown", "bytes"
        ),
        ViewColumn("events_without_bytes", "BIGINT", "communication events of unknown size"),
        ViewColumn("host_comm_events", "BIGINT", "collectives of the host beside a device"),
        _ns("host_comm_ns", "time with them"),
        _ns("host_comm_alone_ns", "time with them while the device is idle"),
        ViewColumn("iteration_bw", "DOUBLE", "bytes per time with communication", "bytes/s"),
    ),
)

EVENTS = RunView(
    "events",
    "a row per event of a rank: kernels, copies, operators, calls, annotations",
    (
        _RANK,
        ViewColumn("event", "BIGINT", "index among the events of the rank, by start"),
        ViewColumn(
            "kind",
            "VARCHAR",
            "kernel (host: collectives), host_work, memcpy, memset, cpu_op, annotation, ...",
        ),
        ViewColumn("name", "VARCHAR", "name as recorded"),
        _ns("start_ns", "start, on the clock of the rank"),
        _ns("stop_ns", "end, on the clock of the rank"),
        _ns("duration_ns", "duration"),
        _STEP,
        ViewColumn("process", "VARCHAR", "process of the host; of device work the device"),
        ViewColumn("thread", "VARCHAR", "thread of the host; of device work the stream"),
        ViewColumn("device", "BIGINT", "number of the local device; null on the host"),
        ViewColumn("is_device", "BOOLEAN", "whether it is on a device (runs without: is work)"),
        ViewColumn(
            "stream", "BIGINT", "stream; null on the host (runs without a device: thread)"
        ),
        ViewColumn("correlation", "BIGINT", "joins a launch and its device work"),
        ViewColumn("launch", "BIGINT", "event of the call that launched it, as `event`"),
        ViewColumn("short_name", "VARCHAR", "name as `kernels` lists it; null for no work"),
        ViewColumn("category", "VARCHAR", "category of work: GEMM, attention, ..."),
        ViewColumn("operator", "VARCHAR", "operator that launched the work"),
        ViewColumn("module", "VARCHAR", "class of the module around it"),
        ViewColumn("layer", "VARCHAR", "repeated module around it, with its number"),
        ViewColumn("annotation", "VARCHAR", "innermost range of the user around it"),
        ViewColumn("pass", "VARCHAR", "forward, backward, optimizer, ..."),
        _OP,
        _TAG,
        ViewColumn("tag_source", "VARCHAR", "how the parallelism is known"),
        ViewColumn("group_id", "BIGINT", "process group, a number on this rank"),
        ViewColumn("seq", "BIGINT", "number of the collective in its group"),
        ViewColumn("msg_bytes", "BIGINT", "size that the API reports", "bytes"),
        ViewColumn("payload_bytes", "BIGINT", "size by which nccl-tests count", "bytes"),
        ViewColumn("bus_bytes", "BIGINT", "payload times the factor of the algorithm", "bytes"),
        ViewColumn("root", "BIGINT", "rank of the root of an operation with one"),
        ViewColumn("peer", "BIGINT", "other rank of a message"),
        ViewColumn("sends", "BOOLEAN", "whether it sends that message"),
        ViewColumn("copy_bytes", "BIGINT", "size of a copy", "bytes"),
        ViewColumn("input_shapes", "VARCHAR", "shapes of the inputs of an operator, JSON"),
        ViewColumn("input_types", "VARCHAR", "types of the inputs of an operator, JSON"),
    ),
    has_repeated_texts=True,
)

COLLECTIVES = RunView(
    "collectives",
    "a row per collective or message that is matched across ranks",
    (
        ViewColumn("step", "BIGINT", "number of the step; null unless equal on all ranks"),
        _OP,
        _TAG,
        ViewColumn("group_id", "BIGINT", "process group, equal on all ranks"),
        ViewColumn("group_name", "VARCHAR", "its description or name"),
        ViewColumn("group_size", "BIGINT", "number of its ranks"),
        ViewColumn("seq", "BIGINT", "number in the group, of the first to arrive"),
        ViewColumn("members", "BIGINT[]", "ranks in the order in which they arrived"),
        _ns("first_arrival_ns", "arrival of the first, on the common clock"),
        _ns("last_arrival_ns", "arrival of the last"),
        _ns("skew_ns", "arrival skew: from the first to the last arrival"),
        _ns("transfer_ns", "from the last arrival to the end"),
        _ns("wait_ns", "waits of all members together"),
        ViewColumn("last_rank", "BIGINT", "rank that arrived last"),
        _ns("wait_caused_ns", "wait caused by that rank; 0 for messages, which pass on delays"),
        ViewColumn("arrivals_ns", "BIGINT[]", "arrival of each of `members`", "ns"),
        ViewColumn("waits_ns", "BIGINT[]", "wait of each of `members`", "ns"),
        ViewColumn("payload_bytes", "BIGINT", "payload of the largest member", "bytes"),
        ViewColumn("bus_bytes", "BIGINT", "bus bytes of the largest member", "bytes"),
    ),
)

WAITS = RunView(
    "waits",
    "a row per rank and parallelism: waits in its matched collectives, per step",
    (
        _RANK,
        _TAG,
        ViewColumn("collectives", "BIGINT", "matched, of all steps"),
        _ns("wait_ns", "wait for other ranks", exact=False),
        _ns("transfer_ns", "transfer time", exact=False),
        ViewColumn("last", "BIGINT", "collectives at which it alone arrived last"),
        ViewColumn("last_share", "DOUBLE", "share of its collectives", "share"),
        _ns("wait_caused_ns", "wait caused by arriving last", exact=False),
        _ns("later_ns", "lateness against the median of the others", exact=False),
        _ns("exposed_wait_ns", "exposed time before the last arrival", exact=False),
        _ns("exposed_transfer_ns", "exposed time after the last arrival", exact=False),
    ),
)

FINDINGS = RunView(
    "findings",
    "a row per finding, as `fastcomm metrics` orders them",
    (
        ViewColumn("number", "BIGINT", "place in the order, from 1"),
        ViewColumn("kind", "VARCHAR", "kind of the finding"),
        ViewColumn("is_symptom", "BOOLEAN", "whether it says where time goes, not why"),
        ViewColumn("text", "VARCHAR", "sentence"),
        ViewColumn("ranks", "BIGINT[]", "ranks that it names"),
        _ns("cost_ns", "cost per step", exact=False),
        ViewColumn("share", "DOUBLE", "cost as a share of the step", "share"),
        ViewColumn("confidence", "VARCHAR", "high, medium or low"),
        ViewColumn("stage", "BIGINT", "pipeline stage that it names"),
        ViewColumn("group_name", "VARCHAR", "process group that it names"),
        _TAG,
    ),
)

METRICS = RunView(
    "metrics",
    "a row per number of `fastcomm metrics --json`",
    (
        ViewColumn("name", "VARCHAR", "path of the number, as in breakdown.exact.compute"),
        ViewColumn("value", "DOUBLE", "value, in the unit that the end of its name says"),
    ),
)

KERNELS = RunView(
    "kernels",
    "a row per name of device work of all ranks, as `fastcomm kernels` lists them",
    (
        ViewColumn("name", "VARCHAR", "name without arguments"),
        ViewColumn("category", "VARCHAR", "category that takes most of its time"),
        ViewColumn("count", "BIGINT", "events of all ranks and steps"),
        _ns("total_ns", "their durations together"),
        _ns("mean_ns", "mean duration", exact=False),
        _ns("median_ns", "median duration", exact=False),
        _ns("p95_ns", "95th percentile of the durations", exact=False),
        _ns("min_ns", "shortest"),
        _ns("max_ns", "longest"),
        _ns("per_step_ns", "total in the mean step of a rank", exact=False),
        ViewColumn("share", "DOUBLE", "that as a share of the step", "share"),
        ViewColumn("flops", "DOUBLE", "FLOPs of the events of which they are known"),
        ViewColumn("bytes", "DOUBLE", "bytes that these events move", "bytes"),
        ViewColumn("flops_covered", "DOUBLE", "share of the time of these events", "share"),
        ViewColumn("tflops_per_s", "DOUBLE", "FLOPs per time", "TFLOP/s"),
        ViewColumn("peak_share", "DOUBLE", "that as a share of the peak", "share"),
        ViewColumn("bytes_per_s", "DOUBLE", "bytes per time", "bytes/s"),
        ViewColumn("memory_share", "DOUBLE", "that as a share of the memory's", "share"),
        ViewColumn("bound", "VARCHAR", "bound that it is near: compute, memory or neither"),
        ViewColumn("ranks", "BIGINT", "number of ranks that have it"),
        ViewColumn("slowest_rank", "BIGINT", "rank with the longest total"),
        ViewColumn("slowdown", "DOUBLE", "its mean divided by the median of its peers"),
        _ns("cost_ns", "by how much its steps are longer for that", exact=False),
    ),
)

VIEWS = (RANKS, STEPS, EVENTS, COLLECTIVES, WAITS, FINDINGS, METRICS, KERNELS)
BY_NAME = {view.name: view for view in VIEWS}
