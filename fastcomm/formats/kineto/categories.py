"""Select the events of a Kineto trace by category, and tell what unknown ones are.

The categories are those of libkineto's `ActivityType` and of the vendors' copies of it. A plain
`kernel` is the work of every device without a category of its own: CUDA, ROCm, XPU, Ascend,
and newer Gaudi. PyTorch counts `hpu_op` and `mtia_ccp_events` as work of the device, and
everything that ends in `_runtime` or `_driver` as calls of the host. Some devices have one
category for kernels and copies, and the categories of new devices are unknown.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastcomm import regexes
from fastcomm.errors import TraceFileError
from fastcomm.formats import communication
from fastcomm.formats.kineto import envelope
from fastcomm.formats.kineto.begin_end_pairs import scan_file
from fastcomm.formats.kineto.chrome import Scanned, Selection
from fastcomm.formats.kineto.graph_nodes import NODE_ARGS, waits_by_arrows, with_order
from fastcomm.formats.kineto.launches import ArrowEnds, flow_events, join_launches
from fastcomm.formats.kineto.sizes import PREFIXES
from fastcomm.formats.stream import CutShortError, blocks
from fastcomm.trace.host_names import COLLECTIVE_PREFIXES
from fastcomm.trace.iterations import mark_patterns
from fastcomm.trace.schema import KIND, KINDS
from fastcomm.trace.trace import MISSING_DATA, SMALL
from fastcomm.units import percent
from fastcomm_kernels.arrays import NULL
from fastcomm_kernels.json_events import KEEP_ALL, KEEP_LONG, KEEP_NONE
from fastcomm_kernels.string_tables import LONGEST

# Kinds for the scanner only: `scan` makes the first a copy or a kernel, by its name; the second
# is that of an event of any other category, or of none.
_BY_NAME = len(KINDS)
_UNKNOWN = _BY_NAME + 1
# The categories of each kind, in the spellings of today and of 2021.
_KINETO = {
    "kernel": ("kernel", "Kernel"),
    "memcpy": ("gpu_memcpy", "Memcpy"),
    "memset": ("gpu_memset", "Memset"),
    "cpu_op": ("cpu_op", "Operator"),
    "runtime": ("cuda_runtime", "cuda_driver", "Runtime", "runtime", "driver", "glow_runtime"),
    "annotation": ("user_annotation",),
    "gpu_annotation": ("gpu_user_annotation",),
    "sync": ("cuda_sync", "cuda_event"),
    "python": ("python_function",),
    "host_node": ("graph_host_node",),
}
# Devices whose categories are named after them: privateuse1_runtime, mlu_memcpy, XPU_MEMSET.
_BACKENDS = ("xpu", "hpu", "mtia", "privateuse1", "npu", "mlu", "musa", "gcu", "supa")
_ROLES = {
    **{kind: kind for kind in ("kernel", "memcpy", "memset", "runtime", "sync")},
    "driver": "runtime",
    "user_annotation": "gpu_annotation",
}
# Categories of kernels and copies; the copies of MTIA have the name dma_request.
_KERNELS_AND_COPIES = ("mtia_ccp_events", "hpu_op", "privateuse1", "PrivateUse1")
# The kind of each category, by the bytes of its name.
CATEGORIES = {
    **{
        category.encode(): KIND[kind]
        for backend in _BACKENDS
        for role, kind in _ROLES.items()
        for category in (f"{backend}_{role}", f"{backend}_{role}".upper())
    },
    **{name.encode(): KIND[kind] for kind, names in _KINETO.items() for name in names},
    **{name.encode(): _BY_NAME for name in _KERNELS_AND_COPIES},
}
# Further categories that are not device work.
_NO_WORK = (
    *(b"Trace", b"overhead", b"cpu_instant_event", b"external_correlation", b"collective_comm"),
    *(b"cuda_profiler_range", b"hardware_counters", b"gpu_pm_counter", b"xpu_scope_profiler"),
    *(b"mtia_insight", b"mtia_counters", b"mtia_workloadd", b"ac2g", b"async_cpu_to_gpu"),
    *(b"fwdbwd", b"async_gpu"),
    b"graph_event_node",  # an event that is recorded inside a replay of a CUDA graph
)
# `CATEGORIES`, and those that the scanner skips without parsing the rest of the event.
_SCANNED = CATEGORIES | dict.fromkeys(_NO_WORK, KIND["other"])
_COPY = re.compile(r"dma|memcpy", re.IGNORECASE)
_OF_RUNTIME = "__amd_rocclr_"
_COPY_KERNELS = {
    "memcpy": re.compile(f"{_OF_RUNTIME}copy(?:Buffer|Image)"),
    "memset": re.compile(f"{_OF_RUNTIME}fill(?:Buffer|Image)"),
}
_BARE_COPY = re.compile("Memcpy")
_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{1,80})"')
_OVERLAP = 128  # bytes: no category and its key are longer
_MOST_NAMED = 5
_MOST_SCANNED = 100
_WORK = tuple(KIND[name] for name in ("kernel", "memcpy", "memset"))
_KEEP = {
    **dict.fromkeys(KIND, KEEP_NONE),
    **dict.fromkeys(("kernel", "memcpy", "memset", "runtime", "annotation"), KEEP_ALL),
    "host_node": KEEP_ALL,  # for idle time
    **dict.fromkeys(("cpu_op", "python"), KEEP_LONG),  # for idle time
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
    kinds=_SCANNED,
    keep=_keep(_KEEP),
    prefixes=(*(name.encode()[:8] for name in COLLECTIVE_PREFIXES), *PREFIXES),
    row_args=("correlation", "External id", "stream", "device", "bytes"),
    detail_args=(
        "In msg nelems",
        "Out msg nelems",
        "In msg size",  # the names of both until 2023-12
        "Out msg size",
        "Group size",
        "Seq",
        "count",  # of NCCL's profiler plug-in
        "original_stream",  # of an event that is drawn on another lane
        *communication.DETAILS,
    ),
    detail_texts=(
        "Collective name",
        "Comms Id",
        "dtype",
        "In split size",
        "Out split size",
        "Process Group Name",
        "Process Group ID",  # its name until 2024-04
        "Process Group Description",
        "Process Group Ranks",
        "Input Dims",
        "Input type",
        "copy kind",  # of copies that have it not in their name
        "func",  # and what follows, of NCCL's profiler plug-in
        "datatype",
        "algo",
        "proto",
    ),
)
# For all other analyses.
EVERYTHING = replace(
    METRICS,
    keep=_keep(dict.fromkeys(KIND, KEEP_ALL)),
    positions=True,
    row_args=(*METRICS.row_args, *(name for name in ARG_NAMES if name not in METRICS.row_args)),
    detail_args=(*METRICS.detail_args, *NODE_ARGS),
    detail_texts=(*METRICS.detail_texts, "Concrete Inputs"),
)
# For runs without an accelerator: all operators, and what links them to annotations.
ON_HOST = replace(
    METRICS,
    keep=_keep(_KEEP | {"cpu_op": KEEP_ALL}),
    row_args=(*METRICS.row_args, "Record function id"),
    detail_texts=(*METRICS.detail_texts, "Concrete Inputs"),
)


class UnknownWork(NamedTuple):
    """Events of unknown categories that look like device work."""

    events: int = 0
    share: float = 0.0  # of the time of all device work, 0 to 1


# The name of an operator, which is no range of `record_function`.
_OPERATOR = re.compile(r"\w+(::\w+)+(\.\w+)?")


def scan(
    path: Path,
    selection: Selection,
    *,
    allow_truncated: bool = False,
    marks: str | None = None,
) -> tuple[Scanned, UnknownWork]:
    """Scan a trace, and settle the kind of events that only their name tells.

    These are device work of some devices, and marks of iterations: until PyTorch 1.11 ranges
    of `record_function` had the category of operators.

    Parameters
    ----------
    path
        The trace.
    selection
        Which events and args to keep. Events of unknown categories are kept only if events of
        kind "other" are.
    allow_truncated
        Whether to accept a file that ends early.
    marks
        The regular expression of the user for marks of iterations, if any.

    Returns
    -------
    Scanned
        The kept events.
    UnknownWork
        Events of unknown categories that look like device work.

    Raises
    ------
    TraceFileError
        If the file is not a trace, is truncated, is of another program, or too many events do
        not parse.

    """
    scanned = scan_file(path, selection, allow_truncated=allow_truncated)
    if selection.positions:
        scanned = with_order(scanned, partial(waits_by_arrows, path, scanned))
    is_strange = (scanned.columns["kind"] >= _BY_NAME).any()
    arrows = partial(flow_events, path, scanned)
    scanned, unknown_work = settled(scanned, selection, marks, arrows)
    if is_strange and not np.isin(scanned.columns["kind"], _WORK).any():
        envelope.refuse(path)
    return scanned, unknown_work


def settled(
    scanned: Scanned,
    selection: Selection,
    marks: str | None,
    arrows: Callable[[], ArrowEnds | None] = lambda: None,
) -> tuple[Scanned, UnknownWork]:
    """Settle what only names and numbers tell, as `scan` does: kinds, launches, streams.

    Columns are written in place. `arrows` returns flow events from calls to device work.
    """
    kind = scanned.columns["kind"]
    kind[_marks_among_operators(scanned, marks)] = KIND["annotation"]
    join_launches(scanned.columns, KIND["runtime"], (*_WORK, _BY_NAME), arrows)
    _restore_streams(scanned)
    _settle_copy_kernels(scanned)
    _name_copies(scanned)
    _name_choices(scanned)
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


def _marks_among_operators(scanned: Scanned, marks: str | None) -> npt.NDArray[np.int64]:
    """Return the rows of operators that mark iterations, by the first pattern that has any.

    Operators are no marks if annotations match the pattern or an earlier one.
    """
    patterns = mark_patterns(marks)
    kind, name = scanned.columns["kind"], scanned.columns["name"]
    annotations = _names(scanned, np.flatnonzero(kind == KIND["annotation"]))
    if _match(annotations, patterns[0]):
        return np.empty(0, np.int64)
    operators = np.flatnonzero(kind == KIND["cpu_op"])
    others = {
        code: text
        for code, text in _names(scanned, operators).items()
        if not _OPERATOR.fullmatch(text)
    }
    for pattern in patterns:
        if _match(annotations, pattern):
            break
        if codes := _match(others, pattern):
            return operators[np.isin(name[operators], codes)]
    return operators[:0]


def _match(names: Mapping[int, str], regex: str) -> list[int]:
    """Return the codes of the names in which a regular expression is found."""
    flags = regexes.matches(pa.array(list(names.values()), pa.string()), regex)
    return [code for code, flag in zip(names, flags.to_pylist(), strict=True) if flag]


def _restore_streams(scanned: Scanned) -> None:
    """Put events that are drawn on a lane of a CUDA graph on their streams."""
    columns = scanned.columns
    original = scanned.details.get("original_stream")
    if original is None or (original == NULL).all():
        return
    stream = original[columns["detail"]]
    moved = np.flatnonzero(stream != NULL)
    for name in ("stream", "thread"):
        columns[name][moved] = stream[moved]


def _settle_copy_kernels(scanned: Scanned) -> None:
    """Make copies and memsets of the kernels that HIP's runtime does them with."""
    if not any(text.startswith(_OF_RUNTIME) for text in scanned.texts):
        return
    kind = scanned.columns["kind"]
    rows = np.flatnonzero(kind == KIND["kernel"])
    for name, regex in _COPY_KERNELS.items():
        kind[rows[scanned.are_named(rows, regex.match)]] = KIND[name]


def _name_copies(scanned: Scanned) -> None:
    """Add the direction to the names of copies that have it apart: "Memcpy PtoP"."""
    columns, texts = scanned.columns, scanned.texts
    directions = scanned.details.get("copy kind")
    if directions is None or (directions == NULL).all():
        return
    rows = np.flatnonzero(columns["kind"] == KIND["memcpy"])
    kinds = directions[columns["detail"][rows]]
    for code in np.unique(kinds[kinds != NULL]).tolist():
        own = rows[kinds == code]
        own = own[scanned.are_named(own, _BARE_COPY.fullmatch)]
        columns["name"][own] = len(texts)
        texts.append(f"Memcpy {texts[code]}")


def _name_choices(scanned: Scanned) -> None:
    """Add the algorithm and protocol that NCCL chose to the names of its kernels.

    A kernel's own name tells those that it is compiled for: it runs others, too. Its parameters
    are left out.
    """
    columns, texts, details = scanned.columns, scanned.texts, scanned.details
    choices = [details[key] for key in ("algo", "proto") if key in details]
    if not choices or any((choice == NULL).all() for choice in choices):
        return
    named = [columns["name"], *(choice[columns["detail"]] for choice in choices)]
    rows = np.flatnonzero(np.all([codes != NULL for codes in named], axis=0))
    rows = rows[np.isin(columns["kind"][rows], (KIND["kernel"], _BY_NAME))]
    keys, key = np.unique([codes[rows] for codes in named], axis=1, return_inverse=True)
    columns["name"][rows] = len(texts) + key.ravel()
    for name, *choice in keys.T.tolist():
        how = " ".join(texts[code] for code in choice)
        texts.append(f"{texts[name].partition('(')[0]} [{how}]")


def _names(scanned: Scanned, rows: npt.NDArray[np.int64]) -> dict[int, str]:
    """Return the names of some events by their code."""
    codes = np.flatnonzero(np.bincount(scanned.columns["name"][rows]))
    return {code: scanned.texts[code] for code in codes.tolist()}


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
    work = np.where(scanned.are_named(rows, _COPY.match), KIND["memcpy"], KIND["kernel"])
    by_name = scanned.columns["kind"][rows] == _BY_NAME
    return np.where(by_name, work, KIND["other"]).astype(np.int8)


def has_device_work(path: Path) -> bool:
    """Return whether a file has events of a device, or calls that launch them."""
    launched = (*_WORK, KIND["runtime"], _BY_NAME)
    work = {name for name, kind in CATEGORIES.items() if kind in launched}
    return any(not work.isdisjoint(names) for names in _categories(path))


def _categories(path: Path) -> Iterator[set[bytes]]:
    """Yield the categories of the events in each part of a file, as far as it is readable."""
    end = b""
    try:
        for block in blocks(path):
            text = end + block
            yield set(_CATEGORY.findall(text))
            end = text[-_OVERLAP:]
    except (CutShortError, TraceFileError):
        return


def unknown_categories(path: Path) -> tuple[str, ...]:
    """Return the unsupported categories of a file's events, sorted.

    The file is read once more, so call this only for traces without device work.
    """
    unknown = set[bytes]().union(*_categories(path)) - _SCANNED.keys()
    return tuple(sorted(name.decode(errors="replace") for name in unknown))


def explain_unknown_work(
    work: UnknownWork, categories: Sequence[tuple[str, int]]
) -> tuple[tuple[str, ...], str]:
    """Return keys of `MISSING_DATA` that apply to a trace with such work, and a warning.

    `categories` are those of the work, with numbers of events.
    """
    named = _listed([f"{name!r} ({count})" for name, count in categories])
    no_name = " of a category without a name, or with a very long one"
    of = f" of the categories {named}" if categories else no_name
    text = (
        f"{work.events} events that look like device work, {percent(work.share)} of its "
        f"time, are{of}, which are not understood"
    )
    if work.share <= SMALL:
        return (), f"{text}: they count neither as compute nor as communication"
    return ("device_kinds",), _not_available("device_kinds", text)


def _listed(names: Sequence[str]) -> str:
    """Return the first of some names as text, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _not_available(key: str, cause: str) -> str:
    """Return the warning about missing data, a key of `MISSING_DATA`, with its cause."""
    reason, _, unknown_times = MISSING_DATA[key].partition(": ")
    return f"{reason}, so that {unknown_times} are n/a: {cause}"


def work_categories(path: Path) -> list[tuple[str, int]]:
    """Return unknown categories whose events look like device work, with numbers of events.

    The file is read again. Names too long for a category are left out.
    """
    names = [name for name in unknown_categories(path) if len(name.encode()) <= LONGEST]
    del names[_MOST_SCANNED:]
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
    unknown: Sequence[str], launches: int, *, is_truncated: bool = False
) -> tuple[str, str]:
    """Return the key of `MISSING_DATA` for a trace without device work, and why, with a remedy.

    Parameters
    ----------
    unknown
        Categories of the trace that are not understood.
    launches
        Number of calls of a device's runtime in the trace.
    is_truncated
        Whether the file ends early.

    """
    key = "device"
    if unknown:
        key = "device_kinds"
        cause = f"the categories {_listed([repr(name) for name in unknown])} are not understood"
    elif is_truncated:
        cause = "the trace is truncated before any"
    elif launches:
        cause = (
            f"{launches} calls of the device's runtime are recorded, and none of the work that "
            "they started (is another profiler running, or was only the host to be recorded?)"
        )
    else:
        cause = (
            "only the host is recorded; if the job used an accelerator, record it with "
            "activities=torch.profiler.supported_activities()"
        )
    return key, _not_available(key, cause)
