"""Tell whether events of a Kineto trace are device work where their category alone does not.

Some devices have one category for kernels and copies, and the categories of new devices are
unknown.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastcomm.errors import TraceFileError
from fastcomm.readers.kineto.chrome import Scanned, scan_file
from fastcomm.readers.kineto.selection import (
    BY_NAME,
    CATEGORIES,
    NO_WORK,
    UNKNOWN,
    Selection,
)
from fastcomm.readers.kineto.stream import CutShortError, blocks
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import LACKS, SMALL
from fastcomm.units import percent
from fastcomm_kernels.arrays import NULL
from fastcomm_kernels.json_events import KEEP_ALL, KEEP_NONE

_COPY = re.compile(r"dma|memcpy", re.IGNORECASE)
_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{1,80})"')
_OVERLAP = 128  # bytes: no category and its key are longer
_MOST_NAMED = 5
_MOST_SCANNED = 100
_WORK = tuple(KIND[name] for name in ("kernel", "memcpy", "memset"))


class UnknownWork(NamedTuple):
    """Events of unknown categories that look like device work."""

    events: int = 0
    share: float = 0.0  # of the time of all device work, 0 to 1


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
    unsettled_rows = np.flatnonzero(kind >= BY_NAME)
    if not len(unsettled_rows):
        return scanned, UnknownWork()
    is_unknown = kind == UNKNOWN
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
    by_name = scanned.columns["kind"][rows] == BY_NAME
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
    return tuple(sorted(names - NO_WORK))


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
