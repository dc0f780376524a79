"""Tell which events of a Kineto trace are device work, and why a trace may have none.

The categories are those of libkineto's `ActivityType` and of the vendors' copies of it. A plain
`kernel` is the work of every device without a category of its own: CUDA, ROCm, XPU, Ascend,
and newer Gaudi. PyTorch counts `hpu_op` and `mtia_ccp_events` as work of the device, and
everything that ends in `_runtime` or `_driver` as calls of the host.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastcomm.errors import TraceFileError
from fastcomm.readers.kineto.chrome import Scanned, Selection, scan_file
from fastcomm.readers.kineto.stream import CutShortError, blocks
from fastcomm.trace.schema import KIND, KINDS
from fastcomm.trace.trace import LACKS, SMALL
from fastcomm.units import percent
from fastcomm_kernels.arrays import NULL
from fastcomm_kernels.json_events import KEEP_ALL, KEEP_NONE

# A kind for the scanner only: `scan` makes it a copy or a kernel, by the event's name.
_BY_NAME = len(KINDS)
# The kind that the scanner gives to an event of any other category, or of none.
_UNKNOWN = _BY_NAME + 1
_COPY = re.compile(r"dma|memcpy", re.IGNORECASE)

# Kernels, copies and fills of the device, by category, in the spellings of today and of 2021.
DEVICE = {
    "kernel": KIND["kernel"],
    "Kernel": KIND["kernel"],
    "gpu_memcpy": KIND["memcpy"],
    "Memcpy": KIND["memcpy"],
    "gpu_memset": KIND["memset"],
    "Memset": KIND["memset"],
    "mtia_ccp_events": _BY_NAME,  # its copies have the name dma_request
    "hpu_op": _BY_NAME,
    "privateuse1": _BY_NAME,
    "PrivateUse1": _BY_NAME,
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
_NO_WORK = frozenset(
    (
        *("Trace", "overhead", "cpu_instant_event", "external_correlation", "collective_comm"),
        *("cuda_profiler_range", "hardware_counters", "gpu_pm_counter", "xpu_scope_profiler"),
        *("mtia_insight", "mtia_counters", "mtia_workloadd", "ac2g", "async_cpu_to_gpu"),
        *("fwdbwd", "async_gpu"),
    )
)
# `CATEGORIES`, and those that the scanner skips without parsing the rest of the event.
SCANNED = CATEGORIES | {name.encode(): KIND["other"] for name in _NO_WORK}
_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{1,80})"')
_OVERLAP = 128  # bytes: no category and its key are longer
_MOST_NAMED = 5
_MOST_SCANNED = 100
_WORK = tuple(KIND[name] for name in ("kernel", "memcpy", "memset"))


class UnknownWork(NamedTuple):
    """Events of unknown categories that look like device work."""

    events: int = 0
    share: float = 0.0  # of the time of all device work, 0 to 1


def keep_scanned(by_kind: list[int], unknown: int) -> list[int]:
    """Return a KEEP_* constant per scanner code: of each kind, kernels again, and `unknown`."""
    return [*by_kind, by_kind[KIND["kernel"]], unknown]


def scan(
    path: Path, selection: Selection, *, allow_truncated: bool = False
) -> tuple[Scanned, UnknownWork]:
    """Scan a trace, and settle the kind of device work that only its name tells.

    Parameters
    ----------
    path
        The trace.
    selection
        Which events and args to keep. Events of unknown categories are kept only if events of
        kind "other" are.
    allow_truncated
        Whether to accept a file that ends early.

    Returns
    -------
    Scanned
        The kept events.
    UnknownWork
        Events of unknown categories that look like device work.

    Raises
    ------
    TraceFileError
        If the file is not a trace, is truncated, or too many events do not parse.

    """
    scanned = scan_file(path, selection, allow_truncated=allow_truncated)
    kind = scanned.columns["kind"]
    unsettled_rows = np.flatnonzero(kind >= _BY_NAME)
    if not len(unsettled_rows):
        return scanned, UnknownWork()
    is_unknown = kind == _UNKNOWN
    kind[unsettled_rows] = _settled(scanned, unsettled_rows)
    unknown_work = _unknown_work(scanned.columns, np.flatnonzero(is_unknown))
    if selection.keep[KIND["other"]] == KEEP_NONE and is_unknown.any():
        columns = {name: column[~is_unknown] for name, column in scanned.columns.items()}
        scanned = replace(scanned, columns=columns)
    return scanned, unknown_work


def _unknown_work(
    columns: dict[str, npt.NDArray[Any]], unknown: npt.NDArray[np.int64]
) -> UnknownWork:
    """Sum up the rows of unknown categories that look like device work."""
    rows = unknown[_looks_like_work(columns, unknown)]
    if not len(rows):
        return UnknownWork()
    is_work = np.isin(columns["kind"], _WORK)
    times = columns["stop"] - columns["start"]
    unknown_time, work_time = (float(times[k].sum(dtype=np.float64)) for k in (rows, is_work))
    share = unknown_time / (unknown_time + work_time) if unknown_time else 0.0
    return UnknownWork(len(rows), share)


def _looks_like_work(
    columns: dict[str, npt.NDArray[Any]], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return which rows have a launch, and a stream or device that they ran on."""
    launched, stream, device = (
        columns[name][rows] != NULL for name in ("correlation", "stream", "device")
    )
    result: npt.NDArray[np.bool_] = launched & (stream | device)
    return result


def _settled(scanned: Scanned, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """Return the kinds of rows whose category alone does not tell."""
    codes, place = np.unique(scanned.columns["name"][rows], return_inverse=True)
    copies = [_COPY.match(scanned.texts[code]) is not None for code in codes.tolist()]
    work = np.where(np.array(copies)[place], KIND["memcpy"], KIND["kernel"])
    by_name = scanned.columns["kind"][rows] == _BY_NAME
    return np.where(by_name, work, KIND["other"]).astype(np.int8)


def unknown_categories(path: Path) -> tuple[str, ...]:
    """Return the unsupported categories of a file's events, sorted.

    The file is read once more, so call this only for traces without device work.
    """
    categories: set[bytes] = set()
    tail = b""
    try:
        for block in blocks(path):
            text = tail + block
            categories.update(_CATEGORY.findall(text))
            tail = text[-_OVERLAP:]
    except (CutShortError, TraceFileError):
        pass  # the categories that could be read are enough for a message
    names = {name.decode(errors="replace") for name in categories if name not in CATEGORIES}
    return tuple(sorted(names - _NO_WORK))


def explain_unknown_work(path: Path, work: UnknownWork) -> tuple[tuple[str, ...], str]:
    """Return keys of `LACKS` that apply to a trace with such work, and a warning.

    The file is read again for the names of the categories.
    """
    categories = _work_categories(path)
    named = ", ".join(f"{name!r} ({count})" for name, count in categories[:_MOST_NAMED])
    more = f" and {len(categories) - _MOST_NAMED} more" if len(categories) > _MOST_NAMED else ""
    of = f" of the categories {named}{more}" if categories else " of a category without a name"
    text = (
        f"{work.events} events that look like device work, {percent(work.share)} of its "
        f"time, are{of}, which are not understood"
    )
    if work.share <= SMALL:
        return (), f"{text}: they count neither as compute nor as communication"
    reason, _, unknown_times = LACKS["device_kinds"].partition(": ")
    return ("device_kinds",), f"{reason}, so that {unknown_times} are n/a: {text}"


def _work_categories(path: Path) -> list[tuple[str, int]]:
    """Return unknown categories whose events look like device work, with numbers of events."""
    names = unknown_categories(path)[:_MOST_SCANNED]
    selection = Selection(
        kinds={name.encode(): number for number, name in enumerate(names)},
        keep=[KEEP_ALL] * len(names) + [KEEP_NONE],
        prefixes=(),
        row_args=("correlation", "stream", "device"),
        detail_args=(),
        detail_texts=(),
    )
    columns = scan_file(path, selection, allow_truncated=True).columns
    work = _looks_like_work(columns, np.arange(len(columns["kind"])))
    counts = np.bincount(columns["kind"][work], minlength=len(names)).tolist()
    categories = [(name, count) for name, count in zip(names, counts, strict=True) if count]
    return sorted(categories, key=lambda category: -category[1])


def explain_no_device_work(
    path: Path, launches: int, *, is_truncated: bool = False
) -> tuple[str, str]:
    """Return the key of `LACKS` for a trace without device work, and the reason with a remedy.

    Parameters
    ----------
    path
        The trace.
    launches
        Number of calls of a device's runtime in the trace.
    is_truncated
        Whether the file ends early.

    """
    if unknown := unknown_categories(path):
        named = ", ".join(map(repr, unknown[:_MOST_NAMED]))
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        key, cause = "device_kinds", f"the categories {named}{more} are not understood"
    elif is_truncated:
        key, cause = "device", "the trace is truncated before any"
    elif launches:
        key, cause = (
            "device",
            (
                f"{launches} calls of the device's runtime are recorded, and none of the work "
                "that they started (is another profiler running, or was only the host to be "
                "recorded?)"
            ),
        )
    else:
        key, cause = (
            "device",
            (
                "only the host is recorded; if the job used an accelerator, record it with "
                "activities=torch.profiler.supported_activities()"
            ),
        )
    reason, _, unknown_times = LACKS[key].partition(": ")
    return key, f"{reason}, so that {unknown_times} are n/a: {cause}"
