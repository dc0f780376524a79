"""What a user has to know of an export before trusting the numbers, and what would mend it."""

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from fastcomm.errors import TraceFileError
from fastcomm.readers.communication import Collectives
from fastcomm.readers.events import Events
from fastcomm.readers.nsys.events import GRAPH_NAME
from fastcomm.readers.nsys.layout import STRINGS
from fastcomm.readers.nsys.nvtx import NcclRanges
from fastcomm.readers.nsys.operations import Matched
from fastcomm.readers.nsys.report import Report
from fastcomm.trace.trace import SMALL
from fastcomm.units import percent
from fastcomm_kernels.json_numbers import NULL


def about(
    events: Events, nccl: NcclRanges, found: Collectives, matched: Matched
) -> Iterator[str]:
    """The warnings about one process."""
    yield from _about_graphs(events)
    if len(found.row):
        yield from _about_payloads(nccl)
    if matched.by_order:
        yield (
            f"{matched.by_order} communication kernels were launched by another thread than "
            "the one that called NCCL: their sizes were matched by order"
        )
    if extra := int(matched.extra.sum()):
        yield (
            f"{extra} communication kernels are more than the operations that launched them: "
            "the first of each has the bytes, these have none"
        )


def unnamed(path: Path, count: int, share: float) -> Iterator[str]:
    """The warning about kernels without names; TraceFileError where no kernel has one."""
    if not count:
        return
    said = (
        f"{count} kernels, {share:.1%} of the kernels' time, have no name, since the table "
        f"{STRINGS} lacks it: whether they compute or communicate is unknown"
    )
    if share == 1:
        raise TraceFileError(f"{path}: {said}; export the report again")
    yield f"{said}, and times are n/a" if share > SMALL else f"{said}; they count as neither"


def _about_payloads(nccl: NcclRanges) -> Iterator[str]:
    is_operation = nccl.is_operation
    if nccl.has_domain and not is_operation.any():
        yield (
            "the domain NCCL has no range of a call that fastcomm knows (was it collected with "
            "`nsys profile --trace=nccl`?): message sizes and groups are unknown. Collect with "
            "`nsys profile -t cuda,nvtx ...`"
        )
    elif not is_operation.any():
        yield (
            "no NCCL range at all: message sizes and groups are unknown. Collect with `nsys "
            "profile -t cuda,nvtx ...`; NCCL_NVTX_DISABLE must not be set; RCCL has no ranges"
        )
    elif (nccl.size[is_operation] != NULL).any() and (
        nccl.communicator[is_operation] == NULL
    ).all():
        yield (
            "sizes but no communicator (NCCL 2.16 to 2.24 sends none): groups are unknown; "
            "tag them by their streams in --config, or give a Kineto trace of the same run"
        )


def without_payloads(report: Report, count: int) -> str:
    """What is wrong with an export without payloads, and the command that mends it."""
    said = report.said
    flags = ("EXPORT_PARAM_INCLUDE_BLOBS", "EXPORT_PARAM_INCLUDE_JSON")
    if any(said.get(flag) == "true" for flag in flags):
        return (
            f"{report.path}: {count} NCCL ranges and no payload on any of them, though the "
            "export asked for payloads: NCCL before 2.16 sends no sizes. Bandwidth and volume "
            "are n/a"
        )
    name = f"{report.path.with_suffix('').name}.nsys-rep"
    original = report.said.get("EXPORT_PARAM_INPUT_FILE") or name
    stem = report.path.with_suffix("")
    return (
        f"{report.path}: {count} NCCL ranges and no payload on any of them "
        "(NVTX_EVENTS.binaryData and jsonText are NULL): this export has no message sizes.\n"
        "Export the report again with its payloads, and give fastcomm the new file:\n"
        f"    nsys export --type=sqlite --include-blobs=true "
        f"--output={quote(f'{stem}.payload.sqlite')} {quote(original)}\n"
        "(an nsys that does not know --include-blobs: --include-json=true.) Times, overlap, "
        "windows and counts are complete; bandwidth and volume are n/a."
    )


def _about_graphs(events: Events) -> Iterator[str]:
    rows = events.rows_named(lambda name: name == GRAPH_NAME, "kernel")
    if not len(rows):
        return
    start, stop = events.columns["start"], events.columns["stop"]
    device = events.rows("kernel", "memcpy", "memset")
    hidden = int((stop[rows] - start[rows]).sum())
    whole = int((stop[device] - start[device]).sum())
    share = percent(hidden / max(whole, 1), 0)
    yield (
        f"{len(rows)} launches of CUDA graphs, {share} of the GPU's time, "
        "are one row each: the kernels inside are invisible, communication among them, and "
        "all of it counts as compute. Collect with: nsys profile --cuda-graph-trace=node ..."
    )
