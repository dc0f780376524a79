"""What fastcomm takes from a Kineto trace, as data."""

from dataclasses import replace

from fastcomm.readers import partners
from fastcomm.readers.chrome import Selection
from fastcomm.readers.kineto_categories import SCANNED, keep
from fastcomm.readers.kineto_operators import PREFIXES
from fastcomm.trace.schema import KIND
from fastcomm_kernels.json_wanted import KEEP_ALL, KEEP_NAMED, KEEP_NONE

# Names of the host's calls into the collective libraries.
COLLECTIVE_CALLS = (b"record_p", b"c10d::", b"nccl:", b"gloo:", *PREFIXES)

_KEEP = {
    "kernel": KEEP_ALL,
    "memcpy": KEEP_ALL,
    "memset": KEEP_ALL,
    "cpu_op": KEEP_NAMED,
    "runtime": KEEP_ALL,
    "annotation": KEEP_ALL,
    "gpu_annotation": KEEP_NONE,
    "sync": KEEP_NONE,
    "python": KEEP_NONE,
    "other": KEEP_NONE,  # known to be no device work
}

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

# For `metrics`: device work, its launches, the marks of the iterations, the collective calls.
METRICS = Selection(
    kinds=SCANNED,
    # Unknown categories may be device work.
    keep=keep([_KEEP[kind] for kind in KIND], KEEP_ALL),
    prefixes=COLLECTIVE_CALLS,
    row_args=("correlation", "External id", "stream", "device", "bytes"),
    detail_args=(
        "In msg nelems",
        "Out msg nelems",
        "In msg size",  # the names of both until 2023-12
        "Out msg size",
        "Group size",
        "Seq",
        *partners.DETAILS,
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

# For whatever else may be asked of a run.
EVERYTHING = replace(
    METRICS,
    keep=keep([KEEP_ALL for _ in KIND], KEEP_ALL),
    positions=True,
    row_args=(*METRICS.row_args, *(name for name in ARG_NAMES if name not in METRICS.row_args)),
)
