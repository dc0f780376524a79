"""A critical path as one JSON object."""

from typing import Any

from fastcomm.critical_path.data import DataDependencies
from fastcomm.critical_path.device_time import notes
from fastcomm.critical_path.ranks import Joined
from fastcomm.critical_path.result import CriticalPath

_TOP = 10


def document(found: CriticalPath) -> dict[str, Any]:
    """What `fastcomm critical-path --json` prints. Times are ns, shares those of the path."""
    graph, path, about = found.graph, found.found, found.about
    length, counts = found.length_ns, graph.counts()
    guessed = {name: counts.pop(name) for name in ("inferred", "unexplained", "join")}
    if not guessed["join"]:
        del guessed["join"]
    return {
        "rules": about.rules,
        "path_of_trace": about.path,
        "rank": about.rank,
        "window": {"start_ns": about.window.start, "stop_ns": about.window.stop},
        "events": about.clipped,
        "nodes": graph.used,
        "nodes_listed": len(graph.event),
        "edges": counts if about.rules == "hta" else {**counts, **guessed},
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
