"""Which events of a Kineto trace are device work, as data, and why a trace may have none.

The categories are those of libkineto's `ActivityType` and of the vendors' copies of it. A plain
`kernel` is the work of every device that has no category of its own: CUDA, ROCm, XPU, Ascend,
and newer Gaudi. PyTorch counts `hpu_op` and `mtia_ccp_events` as work of the device, and
everything that ends in `_runtime` or `_driver` as calls of the host.
"""

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastcomm.errors import TraceFileError
from fastcomm.readers.blocks import CutShortError, blocks
from fastcomm.readers.chrome import Scanned, Selection, scan_file
from fastcomm.trace.schema import KIND, KINDS
from fastcomm.trace.trace import LACKS

# Scanned as a kind of its own; `scan` makes it a copy or a kernel, by the event's name.
_BY_NAME = len(KINDS)
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
_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{1,80})"')
_OVERLAP = 128  # bytes: no category and its key are longer
_MOST_NAMED = 5


def keep(by_kind: list[int], unknown: int) -> list[int]:
    """Return what to keep of each scanned kind, from that of `KINDS` and of unknown ones."""
    return [*by_kind, by_kind[KIND["kernel"]], unknown]


def scan(path: Path, selection: Selection, *, allow_truncated: bool = False) -> Scanned:
    """Scan a trace, and give device work whose name says what it is its kind.

    Raises
    ------
    TraceFileError
        As `scan_file` does.

    """
    scanned = scan_file(path, selection, allow_truncated=allow_truncated)
    kind = scanned.columns["kind"]
    unsettled = np.flatnonzero(kind >= _BY_NAME)
    if len(unsettled):
        kind[unsettled] = _settled(scanned, unsettled)
    return scanned


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


def why_no_device_work(path: Path, launches: int) -> tuple[str, str]:
    """Return the word of `LACKS` for a trace without device work, and the reason with a remedy.

    Parameters
    ----------
    path
        The trace.
    launches
        How many calls of a device's runtime the trace has.

    """
    if unknown := unknown_categories(path):
        named = ", ".join(map(repr, unknown[:_MOST_NAMED]))
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        word, why = "device_kinds", f"the categories {named}{more} are not understood"
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
