"""Small tables and idle times in the metadata of a rank's file.

Their codes are numbers. A file has the names that its numbers stand for, which must be those
of this fastcomm.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.errors import TraceFileError
from fastcomm.idle.causes import CAUSES
from fastcomm.idle.intervals import idle_times
from fastcomm.store import REMEDY
from fastcomm.trace import schema
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.trace import IdleTimes, Trace

_TABLES = {"lanes": schema.LANES, "groups": schema.GROUPS, "iterations": schema.ITERATIONS}
_NAMES = {"tag": TAGS, "tag_source": schema.TAG_SOURCES, "cause": CAUSES}


def of_trace(trace: Trace) -> dict[str, Any]:
    """Return the small tables of a trace and its idle time on each clock, as plain objects."""
    on_device = trace.device_iterations
    return {
        "names": _NAMES,
        **{name: getattr(trace, name).to_pydict() for name in _TABLES},
        "device_steps": None if on_device is None else on_device.to_pydict(),
        "device_notes": trace.device_notes,
        "idle": {
            clock: {"ns": times.ns.tolist(), "evidence": times.evidence.to_pydict()}
            for clock, table in _windows(trace)
            if (times := idle_times(trace, table)) is not None
        },
    }


def _windows(trace: Trace) -> Iterator[tuple[str, pa.Table]]:
    """Yield each clock by which a trace has iterations, and these."""
    yield "host", trace.iterations
    if trace.device_iterations is not None:
        yield "device", trace.device_iterations


def check_names(metadata: Mapping[str, Any], path: Path) -> None:
    """Raise TraceFileError if numbers of a file stand for other names than here."""
    if {name: tuple(texts) for name, texts in metadata["names"].items()} != _NAMES:
        raise TraceFileError(
            f"{path}: stored by a fastcomm with other parallelisms or causes of idle time; "
            f"{REMEDY}"
        )


def tables(metadata: Mapping[str, Any], *, with_lanes: bool) -> dict[str, pa.Table]:
    """Return the small tables of a file, by name.

    Raises errors of Python and Arrow for damaged tables.
    """
    return {
        name: pa.table(metadata[name], table_schema)
        for name, table_schema in _TABLES.items()
        if name != "lanes" or with_lanes
    }


def idle(trace: Trace, metadata: Mapping[str, Any]) -> dict[str, IdleTimes]:
    """Return the stored idle times of a trace by clock.

    Raises ValueError or IndexError if times do not fit the iterations.
    """
    stored = metadata["idle"]
    return {
        clock: _idle_times(stored[clock], len(table))
        for clock, table in _windows(trace)
        if clock in stored
    }


def _idle_times(stored: Mapping[str, Any], steps: int) -> IdleTimes:
    ns = np.array(stored["ns"], np.int64).reshape(-1, len(CAUSES))
    evidence = pa.table(stored["evidence"], schema.IDLE_EVIDENCE)
    has_null = any(column.null_count for column in evidence.columns)
    if len(ns) != steps or (ns < 0).any() or has_null:
        raise ValueError(f"idle times of {len(ns)} steps, of {steps}")
    for name, count in (("step", steps), ("cause", len(CAUSES))):
        places = evidence[name].to_numpy()
        if len(places) and not 0 <= places.min() <= places.max() < count:
            raise IndexError(f"{name} of idle time outside 0 to {count}")
    return IdleTimes(ns=ns, evidence=evidence)
