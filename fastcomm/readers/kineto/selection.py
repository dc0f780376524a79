"""Which events and args of a Kineto trace are read, by categories.

The categories are those of libkineto's `ActivityType` and of the vendors' copies of it. A plain
`kernel` is the work of every device without a category of its own: CUDA, ROCm, XPU, Ascend,
and newer Gaudi. PyTorch counts `hpu_op` and `mtia_ccp_events` as work of the device, and
everything that ends in `_runtime` or `_driver` as calls of the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fastcomm.readers import communication
from fastcomm.readers.kineto.sizes import PREFIXES
from fastcomm.trace.schema import KIND, KINDS
from fastcomm_kernels import json_events
from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.json_events import KEEP_ALL, KEEP_LONG, KEEP_NONE

# A kind for the scanner only: `categories.scan` makes it a copy or a kernel, by its name.
BY_NAME = len(KINDS)
# The kind that the scanner gives to an event of any other category, or of none.
UNKNOWN = BY_NAME + 1

# Kernels, copies and fills of the device, by category, in the spellings of today and of 2021.
DEVICE = {
    "kernel": KIND["kernel"],
    "Kernel": KIND["kernel"],
    "gpu_memcpy": KIND["memcpy"],
    "Memcpy": KIND["memcpy"],
    "gpu_memset": KIND["memset"],
    "Memset": KIND["memset"],
    "mtia_ccp_events": BY_NAME,  # its copies have the name dma_request
    "hpu_op": BY_NAME,
    "privateuse1": BY_NAME,
    "PrivateUse1": BY_NAME,
}
# Devices whose categories are named after them: privateuse1_runtime, mlu_memcpy, XPU_MEMSET.
_BACKENDS = ("xpu", "hpu", "mtia", "privateuse1", "npu", "mlu", "musa", "gcu", "supa")
_ROLES = {
    "kernel": KIND["kernel"],
    "memcpy": KIND["memcpy"],
    "memset": KIND["memset"],
    "runtime": KIND["runtime"],
    "driver": KIND["runtime"],
    "user_annotation": KIND["gpu_annotation"],
    "sync": KIND["sync"],
}
_HOST = {
    "cpu_op": KIND["cpu_op"],
    "Operator": KIND["cpu_op"],
    "cuda_runtime": KIND["runtime"],
    "cuda_driver": KIND["runtime"],
    "Runtime": KIND["runtime"],
    "runtime": KIND["runtime"],
    "driver": KIND["runtime"],
    "glow_runtime": KIND["runtime"],
    "user_annotation": KIND["annotation"],
    "gpu_user_annotation": KIND["gpu_annotation"],
    "cuda_sync": KIND["sync"],
    "cuda_event": KIND["sync"],
    "python_function": KIND["python"],
}
_BACKEND_CATEGORIES = {
    category: kind
    for backend in _BACKENDS
    for role, kind in _ROLES.items()
    for category in (f"{backend}_{role}", f"{backend}_{role}".upper())
}
# The kind of each category, by the bytes of its name.
CATEGORIES = {
    name.encode(): kind for name, kind in (_BACKEND_CATEGORIES | DEVICE | _HOST).items()
}
# Further categories that are not device work.
NO_WORK = frozenset(
    (
        *("Trace", "overhead", "cpu_instant_event", "external_correlation", "collective_comm"),
        *("cuda_profiler_range", "hardware_counters", "gpu_pm_counter", "xpu_scope_profiler"),
        *("mtia_insight", "mtia_counters", "mtia_workloadd", "ac2g", "async_cpu_to_gpu"),
        *("fwdbwd", "async_gpu"),
    )
)
# `CATEGORIES`, and those that the scanner skips without parsing the rest of the event.
SCANNED = CATEGORIES | {name.encode(): KIND["other"] for name in NO_WORK}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which events of a trace and which of their args to keep."""

    kinds: dict[bytes, int]  # value of `cat` -> number of the kind
    keep: Sequence[int]  # a KEEP_* constant by kind; the last is for unknown kinds
    prefixes: Sequence[bytes]  # of names, at most eight bytes each; see `json_events.keeps`
    row_args: Sequence[str]  # args that are integers, a column each
    detail_args: Sequence[str]  # args that are integers and that few events have
    detail_texts: Sequence[str]  # args that are texts and that few events have
    positions: bool = False  # whether to keep the index of each event among all in the file

    @cached_property
    def scan_columns(self) -> json_events.ScanColumns:
        """The selection as the scanner takes it."""
        return json_events.ScanColumns(
            kinds=self.kinds,
            keep=list(self.keep),
            prefixes=list(self.prefixes),
            numbers=[name.encode() for name in self.row_args],
            detail_numbers=[name.encode() for name in self.detail_args],
            detail_texts=[name.encode() for name in self.detail_texts],
        )

    @cached_property
    def plan(self) -> Ints:
        """The selection as one array for the kernel, built once for all files."""
        return self.scan_columns.plan()


# Names of the host's calls into the collective libraries.
_COLLECTIVE_CALLS = (b"record_p", b"c10d::", b"nccl:", b"gloo:", *PREFIXES)

_KEEP = {
    "kernel": KEEP_ALL,
    "memcpy": KEEP_ALL,
    "memset": KEEP_ALL,
    "cpu_op": KEEP_LONG,  # for idle time
    "runtime": KEEP_ALL,
    "annotation": KEEP_ALL,
    "gpu_annotation": KEEP_NONE,
    "sync": KEEP_NONE,
    "python": KEEP_LONG,
    "other": KEEP_NONE,  # not device work
    "host_work": KEEP_NONE,  # this and the next: of this reader, not of a file
    "host_comm": KEEP_NONE,
}


def _keep(by_kind: Mapping[str, int]) -> list[int]:
    """Return a KEEP_* constant per code of the scanner, given those by kind."""
    # Unknown categories may be device work.
    return [*(by_kind[kind] for kind in KIND), by_kind["kernel"], KEEP_ALL]


# The args of `schema.ARGS`, by their names in a trace.
ARG_NAMES = {
    "External id": "external_id",
    "stream": "on_stream",
    "bytes": "bytes",
    "wait_on_stream": "wait_stream",
    "wait_on_cuda_event_record_corr_id": "wait_correlation",
    "Sequence number": "sequence",
    "Fwd thread id": "forward_thread",
    "Record function id": "record_function",
}

# The texts of operators among them.
OPERAND_NAMES = {
    "Input Dims": "input_shapes",
    "Input type": "input_types",
    "Concrete Inputs": "input_values",
}

# For metrics: device work, its launches, marks of iterations, calls of collectives, and long
# operators and functions, which tell why a device is idle.
METRICS = Selection(
    kinds=SCANNED,
    keep=_keep(_KEEP),
    prefixes=_COLLECTIVE_CALLS,
    row_args=("correlation", "External id", "stream", "device", "bytes"),
    detail_args=(
        "In msg nelems",
        "Out msg nelems",
        "In msg size",  # the names of both until 2023-12
        "Out msg size",
        "Group size",
        "Seq",
        *communication.DETAILS,
    ),
    detail_texts=(
        "Collective name",
        "dtype",
        "In split size",
        "Out split size",
        "Process Group Name",
        "Process Group ID",  # its name until 2024-04
        "Process Group Description",
        "Process Group Ranks",
        "Input Dims",
        "Input type",
    ),
)

# For all other analyses.
EVERYTHING = replace(
    METRICS,
    keep=_keep(dict.fromkeys(KIND, KEEP_ALL)),
    positions=True,
    row_args=(*METRICS.row_args, *(name for name in ARG_NAMES if name not in METRICS.row_args)),
    detail_texts=(*METRICS.detail_texts, "Concrete Inputs"),
)

# For runs without an accelerator: all operators, and what links them to annotations.
ON_HOST = replace(
    METRICS,
    keep=_keep(_KEEP | {"cpu_op": KEEP_ALL}),
    row_args=(*METRICS.row_args, "Record function id"),
    detail_texts=(*METRICS.detail_texts, "Concrete Inputs"),
)
EVERYTHING_ON_HOST = replace(EVERYTHING, detail_texts=ON_HOST.detail_texts)
