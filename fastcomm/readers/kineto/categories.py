"""Which events of a Kineto trace are device work, as data, and why a trace may have none.

The categories are those of libkineto's `ActivityType` and of the vendors' copies of it. A plain
`kernel` is the work of every device that has no category of its own: CUDA, ROCm, XPU, Ascend,
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
from fastcomm_kernels.words import KEEP_ALL, KEEP_NONE

# Scanned as a kind of its own; `scan` makes it a copy or a kernel, by the event's name.
_BY_NAME = len(KINDS)
# What the scanner gives an event of any other category, or of none.
_UNKNOWN = _BY_NAME + 1
_COPY = re.compile(r"dma|memcpy", re.IGNORECASE)

# Kernels, copies and fills of the device, by category; today's spelling and that of 2021.
DEVICE = {
    "kernel": KIND["kernel"],
    "Kernel": KIND["kernel"],
    "gpu_memcpy": KIND["memcpy"],
    "Memcpy": KIND["memcpy"],
    "gpu_memset": KIND["memset"],
    "Memset": KIND["memset"],
    "mtia_ccp_events": _BY_NAME,  # its copies are called dma_request
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
_OF_BACKENDS = {
    spelled: kind
    for backend in _BACKENDS
    for role, kind in _ROLES.items()
    for spelled in (f"{backend}_{role}", f"{backend}_{role}".upper())
}
# The kind of each category, as the scanner takes it.
CATEGORIES = {name.encode(): kind for name, kind in (_OF_BACKENDS | DEVICE | _HOST).items()}
# Categories that are known to be no device work, beside those of `CATEGORIES`.
_NO_WORK = frozenset(
    (
        *("Trace", "overhead", "cpu_instant_event", "external_correlation", "collective_comm"),
        *("cuda_profiler_range", "hardware_counters", "gpu_pm_counter", "xpu_scope_profiler"),
        *("mtia_insight", "mtia_counters", "mtia_workloadd", "ac2g", "async_cpu_to_gpu"),
        *("fwdbwd", "async_gpu"),
    )
)
# The same, and those that `metrics` skips without a look at the rest of the event.
SCANNED = CATEGORIES | {name.encode(): KIND["other"] for name in _NO_WORK}
_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{1,80})"')
_OVERLAP = 128  # bytes: no category and its key are longer
_MOST_NAMED = 5
_MOST_SCANNED = 100
_WORK = tuple(KIND[name] for name in ("kernel", "memcpy", "memset"))


class Strange(NamedTuple):
    """Device work of unknown categories."""

    events: int = 0
    share: float = 0.0  # of the time of all device work


def keep(by_kind: list[int], unknown: int) -> list[int]:
    """Return what to keep of each scanned kind, from that of `KINDS` and of unknown ones."""
    return [*by_kind, by_kind[KIND["kernel"]], unknown]


def scan(
    path: Path, selection: Selection, *, allow_truncated: bool = False
) -> tuple[Scanned, Strange]:
    """Scan a trace, and give device work whose name says what it is its kind.

    Events of unknown categories stay only where those of kind "other" are wanted.

    Raises
    ------
    TraceFileError
        As `scan_file` does.

    """
    scanned = scan_file(path, selection, allow_truncated=allow_truncated)
    kind = scanned.columns["kind"]
    unsettled = np.flatnonzero(kind >= _BY_NAME)
    if not len(unsettled):
        return scanned, Strange()
    is_unknown = kind == _UNKNOWN
    kind[unsettled] = _settled(scanned, unsettled)
    strange = _strange(scanned.columns, np.flatnonzero(is_unknown))
    if selection.keep[KIND["other"]] == KEEP_NONE and is_unknown.any():
        columns = {name: each[~is_unknown] for name, each in scanned.columns.items()}
        scanned = replace(scanned, columns=columns)
    return scanned, strange


def _strange(columns: dict[str, npt.NDArray[Any]], unknown: npt.NDArray[np.int64]) -> Strange:
    """Sum up which rows of unknown categories look like device work."""
    rows = unknown[_looks_like_work(columns, unknown)]
    if not len(rows):
        return Strange()
    known = np.isin(columns["kind"], _WORK)
    times = columns["stop"] - columns["start"]
    own, rest = (float(times[which].sum(dtype=np.float64)) for which in (rows, known))
    return Strange(len(rows), own / (own + rest) if own else 0.0)


def _looks_like_work(
    columns: dict[str, npt.NDArray[Any]], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return which rows were launched, and say where on the device they ran."""
    launched, stream, device = (
        columns[name][rows] != NULL for name in ("correlation", "stream", "device")
    )
    looks: npt.NDArray[np.bool_] = launched & (stream | device)
    return looks


def _settled(scanned: Scanned, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """Kinds of the rows whose category alone does not tell."""
    codes, place = np.unique(scanned.columns["name"][rows], return_inverse=True)
    copies = [_COPY.match(scanned.texts[code]) is not None for code in codes.tolist()]
    work = np.where(np.array(copies)[place], KIND["memcpy"], KIND["kernel"])
    by_name = scanned.columns["kind"][rows] == _BY_NAME
    return np.where(by_name, work, KIND["other"]).astype(np.int8)


def unknown_categories(path: Path) -> tuple[str, ...]:
    """Return the categories of a file's events that nothing here knows, sorted.

    The file is read once more: ask only where no device work was found.
    """
    found: set[bytes] = set()
    rest = b""
    try:
        for block in blocks(path):
            text = rest + block
            found.update(_CATEGORY.findall(text))
            rest = text[-_OVERLAP:]
    except (CutShortError, TraceFileError):
        pass  # what can be read was: the reason is as good as that
    names = {name.decode(errors="replace") for name in found if name not in CATEGORIES}
    return tuple(sorted(names - _NO_WORK))


def why_strange(path: Path, strange: Strange) -> tuple[tuple[str, ...], str]:
    """Return the words of `LACKS` for a trace with such work, and a warning.

    The file is read again for the names of the categories.
    """
    found = _strange_categories(path)
    named = ", ".join(f"{name!r} ({count})" for name, count in found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    of = f" of the categories {named}{more}" if found else " of a category without a name"
    what = (
        f"{strange.events} events that look like device work, {percent(strange.share)} of its "
        f"time, are{of}, which are not understood"
    )
    if strange.share <= SMALL:
        return (), f"{what}: they count neither as compute nor as communication"
    reason, _, unknown_times = LACKS["device_kinds"].partition(": ")
    return ("device_kinds",), f"{reason}, so that {unknown_times} are n/a: {what}"


def _strange_categories(path: Path) -> list[tuple[str, int]]:
    """Return the unknown categories of what looks like device work, and how many events."""
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
    found = [(name, count) for name, count in zip(names, counts, strict=True) if count]
    return sorted(found, key=lambda each: -each[1])


def why_no_device_work(
    path: Path, launches: int, *, is_truncated: bool = False
) -> tuple[str, str]:
    """Return the word of `LACKS` for a trace without device work, and the reason with a remedy.

    Parameters
    ----------
    path
        The trace.
    launches
        How many calls of a device's runtime the trace has.
    is_truncated
        Whether the file ends early.

    """
    if unknown := unknown_categories(path):
        named = ", ".join(map(repr, unknown[:_MOST_NAMED]))
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        word, why = "device_kinds", f"the categories {named}{more} are not understood"
    elif is_truncated:
        word, why = "device", "the trace is truncated before any"
    elif launches:
        word, why = (
            "device",
            (
                f"{launches} calls of the device's runtime are recorded, and none of the work "
                "that they started (is another profiler running, or was only the host to be "
                "recorded?)"
            ),
        )
    else:
        word, why = (
            "device",
            (
                "only the host is recorded; if the job used an accelerator, record it with "
                "activities=torch.profiler.supported_activities()"
            ),
        )
    reason, _, unknown_times = LACKS[word].partition(": ")
    return word, f"{reason}, so that {unknown_times} are n/a: {why}"
