"""A critical path as one JSON object, with what the device does along the path."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.critical_path.data import DataDependencies
from fastcomm.critical_path.descriptions import TraceEvents
from fastcomm.critical_path.ranks import Joined
from fastcomm.critical_path.result import CriticalPath
from fastcomm.trace.schema import KIND
from fastcomm.units import format_ns, percent
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Ints

_WORK = [KIND[name] for name in ("kernel", "memcpy", "memset")]
_ON_DEVICE = ("gpu_compute_bound", "gpu_memory_bound", "gpu_communication_bound")
_WORTH_SAYING = 0.1  # of the path
_BUSY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """Times in ns along the path of one rank."""

    path_ns: int
    elsewhere_ns: int  # of the path, on no device work
    busy_ns: int  # the device does anything
    earlier_ns: int  # of `elsewhere_ns`, it does work that the window did not launch

    @classmethod
    def of(cls, found: CriticalPath) -> Self | None:
        """Measure a path; None for a path through several ranks, or where there is none."""
        if not isinstance(found.events, TraceEvents) or found.path is None:
            return None
        table, events = found.breakdown, found.events.trace.events
        edges, times = (table["start_ns"], table["stop_ns"]), (events["start"], events["stop"])
        is_gap = ~np.isin(table["bound_by"].to_pylist(), _ON_DEVICE)
        path, gaps = _merged(*edges, np.ones_like(is_gap)), _merged(*edges, is_gap)
        is_work = np.isin(events["kind"].to_numpy(), _WORK)
        is_own = np.zeros(events.num_rows, np.bool_)
        is_own[found.graph.event] = True
        work, earlier = _merged(*times, is_work), _merged(*times, is_work & ~is_own)
        return cls(
            path_ns=int((path[1] - path[0]).sum()),
            elsewhere_ns=int((gaps[1] - gaps[0]).sum()),
            busy_ns=int(intervals.overlap_length(*path, *work)),
            earlier_ns=int(intervals.overlap_length(*gaps, *earlier)),
        )

    def note(self) -> str | None:
        """Return a sentence that reconciles the path with a busy device, if one is due."""
        least = _WORTH_SAYING * self.path_ns
        is_behind = self.earlier_ns >= max(least, 1)
        if not is_behind and (self.elsewhere_ns < least or self.busy_ns < _BUSY * self.path_ns):
            return None
        elsewhere, busy, earlier = (
            percent(ns / max(self.path_ns, 1))
            for ns in (self.elsewhere_ns, self.busy_ns, self.earlier_ns)
        )
        behind = (
            f" (it runs behind the host: {earlier} with work launched outside of the window, "
            "which the path does not have)"
        )
        return (
            f"{elsewhere} of the path is host time, gaps and delays, but the device is busy "
            f"for {busy} of the path{behind if is_behind else ''}; a faster host saves little "
            "more than the rest"
        )


def _merged(start: object, stop: object, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """The union of the chosen intervals."""
    first, last = (np.asarray(column)[chosen] for column in (start, stop))
    order = np.argsort(first, kind="stable")
    merged: tuple[Ints, Ints] = intervals.merge(first[order], last[order])
    return merged


def notes(found: CriticalPath) -> tuple[str, ...]:
    """Return the notes of a path, and what reconciles it with a busy device."""
    if not found.about.rules.is_exact:
        return found.about.notes
    measured = DeviceTime.of(found)
    more = (measured.note() if measured else None, _two_clocks(found))
    return (*found.about.notes, *(note for note in more if note))


def _two_clocks(found: CriticalPath) -> str | None:
    """Return a sentence that reconciles the window with the step on the device's clock."""
    if not isinstance(found.events, TraceEvents) or found.path is None:
        return None
    trace, window = found.events.trace, found.about.window
    if trace.device_iterations is None:
        return None
    number = {row["stop"]: row["number"] for row in trace.iterations.to_pylist()}
    steps = {row["number"]: row for row in trace.device_iterations.to_pylist()}
    step, wall = steps.get(number.get(window.stop)), found.wall_ns
    on_device = step["stop"] - step["start"] if step else wall
    if abs(wall - on_device) < _WORTH_SAYING * on_device:
        return None
    return (
        f"the window is the host's step of {format_ns(window.stop - window.start)}, which with "
        f"the device work that it launched lasts {format_ns(wall)}; on the device's clock, as "
        f"in `fastcomm metrics`, this step takes {format_ns(on_device)}"
    )


_TOP = 10


def document(found: CriticalPath) -> dict[str, Any]:
    """What `fastcomm critical-path --json` prints. Times are ns, shares those of the path."""
    graph, path, about = found.graph, found.found, found.about
    length, counts = found.length_ns, graph.counts()
    edges = {name: counts[name] for name in about.rules.edge_kinds}
    if not edges.get("join"):
        edges.pop("join", None)
    return {
        "rules": about.rules.name,
        "path_of_trace": about.path,
        "rank": about.rank,
        "window": {"start_ns": about.window.start, "stop_ns": about.window.stop},
        "events": about.clipped,
        "nodes": graph.used,
        "nodes_listed": len(graph.event),
        "edges": edges,
        "path": {
            "nodes": len(path.nodes),
            "events": found.event_count,
            "length_ns": length,
            "wall_ns": found.wall_ns,
            "coverage": length / found.wall_ns if found.wall_ns else None,
            "event_ids": found.event_ids,
        },
        "summary": _shares(found.summary_ns()),
        "summary_ns": found.summary_ns(),
        "summary_by_tag": _shares(found.by_tag_ns(), sum(found.summary_ns().values())),
        "top_events": found.top("event", _TOP).to_pylist(),
        "top_operators": found.top("name", _TOP).to_pylist(),
        "notes": list(notes(found)),
    }


def joined_document(found: Joined) -> dict[str, Any]:
    """What `fastcomm critical-path --all-ranks --json` prints.

    An event's id is unique on its rank alone: they are left out, `--output` has them per step.
    """
    one = document(found.path)
    del one["path"]["event_ids"], one["rank"]
    return {
        **one,
        "expected_ranks": found.expected_ranks,
        "ranks": found.by_rank().to_pylist(),
        "hold_ups": found.hold_ups().to_pylist(),
        "classes_by_rank": found.by_rank_and_class()
        .rename_columns(["rank", "bound_by", "on_path_ns"])
        .to_pylist(),
        "crossings": found.crossings,
        "collectives": len(set(found.collectives["instance"].to_pylist())),
        "violations": found.violations,
    }


def data_document(found: DataDependencies) -> dict[str, Any]:
    """What `--deps data` adds to that object, under `data`."""
    return {
        "joined": {
            "by": found.joined_by,
            "operators": found.known,
            "of_window": found.asked,
            "of_execution_trace": found.traced,
        },
        "span_ns": found.span_ns,
        "bound_ns": found.bound_ns,
        "operators": found.movable(_TOP).to_pylist(),
        "shortening": found.shortening(_TOP).to_pylist(),
        "subgraphs": found.movable_subgraphs(_TOP).to_pylist(),
    }


def _shares(sums: dict[str, int], whole: int | None = None) -> dict[str, float]:
    total = sum(sums.values()) if whole is None else whole
    return {name: ns / total if total else 0.0 for name, ns in sums.items()}
