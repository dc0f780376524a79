"""Small tables and idle times in the metadata of a rank's file.

Their codes are numbers. A file has the names that its numbers stand for, so that a later
fastcomm may add names and reorder them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.idle.causes import CAUSE, CAUSES
from fastcomm.idle.intervals import idle_times
from fastcomm.trace import schema
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.trace import IdleTimes, Trace
from fastcomm_kernels.arrays import NONE, Ints

_TABLES = {"lanes": schema.LANES, "groups": schema.GROUPS, "iterations": schema.ITERATIONS}
_NAMES = {"tag": TAGS, "tag_source": schema.TAG_SOURCES, "cause": CAUSES}
# The names in a file that has none: those of the releases that did not write them.
_FIRST_NAMES = {
    "tag": ("DP", "TP", "PP", "EP", "CP", "OTHER"),
    "tag_source": ("explicit", "description", "ranks", "heuristic", "none"),
    "cause": (
        *("launch_bound", "synchronization", "pipeline_bubble", "data_loading"),
        *("python", "kernel_gaps", "host_work", "unknown"),
    ),
}


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


def _names(metadata: Mapping[str, Any], column: str) -> tuple[str, ...]:
    """Return the names that the numbers of a column stand for in a file."""
    return tuple(metadata.get("names", _FIRST_NAMES)[column])


def _numbers(metadata: Mapping[str, Any], column: str) -> dict[int, int]:
    """Return the number here of each number in a file whose name is known."""
    names = _NAMES[column]
    return {
        number: names.index(name)
        for number, name in enumerate(_names(metadata, column))
        if name in names
    }


def tables(metadata: Mapping[str, Any], *, with_lanes: bool) -> dict[str, pa.Table]:
    """Return the small tables of a file, by name.

    Raises KeyError for tags that this fastcomm does not know, and errors of Python and Arrow
    for damaged tables.
    """
    tag, source = (_numbers(metadata, column) for column in ("tag", "tag_source"))
    groups = dict(metadata["groups"])
    groups["tag"] = [tag[number] for number in groups["tag"]]
    groups["tag_source"] = [source[number] for number in groups["tag_source"]]
    groups["candidates"] = [
        fits and [tag[number] for number in fits] for fits in groups["candidates"]
    ]
    columns = {**metadata, "groups": groups}
    return {
        name: pa.table(columns[name], table_schema)
        for name, table_schema in _TABLES.items()
        if name != "lanes" or with_lanes
    }


def idle(trace: Trace, metadata: Mapping[str, Any]) -> dict[str, IdleTimes]:
    """Return the stored idle times of a trace by clock; {} in files of older releases.

    Time of causes that this fastcomm does not know is of an unknown cause. Causes that the file
    does not know have none.

    Raises ValueError or IndexError if times do not fit the iterations.
    """
    causes = [CAUSE.get(name, NONE) for name in _names(metadata, "cause")]
    stored = metadata.get("idle", {})
    return {
        clock: _idle_times(stored[clock], np.array(causes), len(table))
        for clock, table in _windows(trace)
        if clock in stored
    }


def _idle_times(stored: Mapping[str, Any], causes: Ints, steps: int) -> IdleTimes:
    """Return idle times whose cause with number `k` in the file is `causes[k]` here."""
    own = np.array(stored["ns"], np.int64).reshape(-1, len(causes))
    evidence = pa.table(stored["evidence"], schema.IDLE_EVIDENCE)
    has_null = any(column.null_count for column in evidence.columns)
    if len(own) != steps or (own < 0).any() or has_null:
        raise ValueError(f"idle times of {len(own)} steps, of {steps}")
    for name, count in (("step", steps), ("cause", len(causes))):
        places = evidence[name].to_numpy()
        if len(places) and not 0 <= places.min() <= places.max() < count:
            raise IndexError(f"{name} of idle time outside 0 to {count}")
    ns = np.zeros((steps, len(CAUSES)), np.int64)
    unknown = CAUSE["unknown"]
    np.add.at(ns.T, np.where(causes == NONE, unknown, causes), own.T)
    cause = causes[evidence["cause"].to_numpy()]
    place = evidence.schema.get_field_index("cause")
    evidence = evidence.set_column(place, evidence.field("cause"), [pa.array(cause, pa.int8())])
    return IdleTimes(ns=ns, evidence=evidence.filter(pa.array(cause != NONE)))
