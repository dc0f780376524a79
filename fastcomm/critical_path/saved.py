"""A graph and its path in one zip file: Parquet tables and a manifest, nothing that runs."""

import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fastcomm import arrow_files, files
from fastcomm.critical_path import CriticalPath, PathSource
from fastcomm.critical_path.rules import CORRECTED, EVENT, PathRules, SavedEvents
from fastcomm.critical_path.window import TimeRange
from fastcomm.errors import FastcommError
from fastcomm.files import aside
from fastcomm.graph import EDGE_KINDS, Graph
from fastcomm.graph import LongestPath as GraphPath
from fastcomm.trace.columns import filled
from fastcomm.trace.trace import checked
from fastcomm_kernels.graph import NONE

VERSION = 1
_MANIFEST = "manifest.json"
_MOST_BYTES = 16 << 30  # of a table in memory
_MOST_MANIFEST = 1 << 20

_SCHEMAS = {
    "nodes": pa.schema(
        [
            pa.field("event", pa.int32(), nullable=False),  # row of `events`
            pa.field("time", pa.int64(), nullable=False),
            pa.field("is_end", pa.bool_(), nullable=False),
            pa.field("on_device", pa.bool_(), nullable=False),
        ]
    ),
    "edges": pa.schema(
        [
            pa.field("source", pa.int32(), nullable=False),
            pa.field("target", pa.int32(), nullable=False),
            pa.field("kind", pa.int8(), nullable=False),
            pa.field("weight", pa.int64(), nullable=False),
            pa.field("owner", pa.int32()),
        ]
    ),
    "path": pa.schema(
        [pa.field("edge", pa.int32(), nullable=False), pa.field("slack", pa.int64())]
    ),
    "events": EVENT,
}


def save(found: CriticalPath, out_dir: str | Path) -> str:
    """Write ``<out_dir>.zip`` and return its path; FastcommError for several ranks."""
    if found.is_joined:
        raise FastcommError(
            "a path through several ranks cannot be saved; wanted one of a rank"
        )
    target = Path(f"{out_dir}.zip")
    with aside(target) as unfinished:
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
            for name, content in _members(found).items():
                # A fixed date: the same graph gives the same bytes.
                archive.writestr(zipfile.ZipInfo(name), content)
    return str(target)


def _members(found: CriticalPath) -> dict[str, bytes]:
    graph, path, slack = found.graph, found.path, found.slack
    used = np.unique(np.concatenate([graph.event, graph.owner[graph.owner != NONE]]))
    place = np.full(int(used.max(initial=0)) + 2, NONE, np.int32)
    place[used] = np.arange(len(used), dtype=np.int32)
    owner = place[graph.owner]
    columns: dict[str, Mapping[str, Any]] = {
        "nodes": {
            "event": place[graph.event],
            "time": graph.time,
            "is_end": graph.is_end,
            "on_device": found.on_device,
        },
        "edges": {
            **{name: getattr(graph, name) for name in ("source", "target", "kind", "weight")},
            "owner": pa.array(owner, mask=graph.owner == NONE),
        },
    }
    if path is not None:
        missing = pa.nulls(len(path.edges), pa.int64())
        columns["path"] = {"edge": path.edges, "slack": missing if slack is None else slack}
    tables = {
        name: pa.table(dict(content)).cast(_SCHEMAS[name]) for name, content in columns.items()
    }
    tables["events"] = found.events.describe(used)
    last = None if path is None or not len(path.nodes) else int(path.nodes[-1])
    about = {**asdict(found.about), "rules": found.about.rules.name}
    manifest = {"version": VERSION, "last": last, "about": about}
    members = {f"{name}.parquet": _parquet(table) for name, table in tables.items()}
    return {_MANIFEST: json.dumps(manifest, indent=1).encode(), **members}


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def load(path: str | Path, known_rules: Sequence[PathRules] = (CORRECTED,)) -> CriticalPath:
    """Load the graph and path that `save` wrote.

    Raises `FastcommError` where the file is no saved path, or one by rules that are not among
    `known_rules`; nothing is unpacked outside of memory.
    """
    path = Path(path)
    try:
        with files.opened(path) as file, zipfile.ZipFile(file) as archive:
            return _restored(archive, path, {each.name: each for each in known_rules})
    except (
        OSError,
        zipfile.BadZipFile,
        pa.ArrowException,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        RuntimeError,  # encrypted, or of a later version of zip
    ) as error:
        why = str(error) or "a part of it ends early"
        raise FastcommError(f"{path}: no saved critical path: {why}") from error


def _restored(
    archive: zipfile.ZipFile, path: Path, known_rules: Mapping[str, PathRules]
) -> CriticalPath:
    names = [info.filename for info in archive.infolist()]
    known = {_MANIFEST, *(f"{name}.parquet" for name in _SCHEMAS)}
    if len(names) != len(set(names)) or not set(names) <= known:
        raise FastcommError(f"{path}: found {sorted(names)}, wanted only {sorted(known)}")
    for info in archive.infolist():
        limit = _MOST_MANIFEST if info.filename == _MANIFEST else _MOST_BYTES
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
            raise FastcommError(
                f"{path}: {info.filename} is compressed or larger than {limit} bytes"
            )
    manifest = json.loads(archive.read(_MANIFEST))
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        raise FastcommError(f"{path}: {_MANIFEST} has no version {VERSION}")
    nodes, edges, events = (
        _table(archive, name, path) for name in ("nodes", "edges", "events")
    )
    owner = filled(edges["owner"], NONE).astype(np.int32)
    graph = Graph(
        **{name: nodes[name].to_numpy() for name in ("event", "time", "is_end")},
        **{name: edges[name].to_numpy() for name in ("source", "target", "kind", "weight")},
        owner=owner,
    )
    _check(graph, events.num_rows, path)
    about = _about(manifest["about"], known_rules)
    forward = (graph.source < graph.target).all() and (np.diff(graph.target) >= 0).all()
    if about.rules.is_exact and not forward:
        raise FastcommError(f"{path}: edges are not in order, or lead back")
    on_device = nodes["on_device"].to_numpy()
    longest, slack = None, None
    if "path.parquet" in names:
        longest, slack = _path(_table(archive, "path", path), graph, manifest["last"])
    return CriticalPath(graph, SavedEvents(events), about, on_device, longest, slack)


def _path(table: pa.Table, graph: Graph, last: Any) -> tuple[GraphPath, Any]:
    edges = table["edge"].to_numpy()
    if len(edges) and not ((edges >= 0) & (edges < len(graph.source))).all():
        raise ValueError("the path names edges that are not there")
    if last is None:
        return GraphPath(nodes=np.empty(0, np.int32), edges=edges), None
    if type(last) is not int or not 0 <= last < len(graph.event):
        raise ValueError(f"the path ends at node {str(last)[:40]}, of {len(graph.event)}")
    nodes = np.append(graph.source[edges], np.int32(last))
    slack = None if table["slack"].null_count else table["slack"].to_numpy()
    return GraphPath(nodes=nodes, edges=edges), slack


def _table(archive: zipfile.ZipFile, name: str, path: Path) -> pa.Table:
    """A table, once its own words say that it fits into memory."""
    content = archive.read(f"{name}.parquet")
    table = arrow_files.read_open(io.BytesIO(content), len(content), path)
    return checked(table, _SCHEMAS[name], f"{path}: {name}")


def _check(graph: Graph, events: int, path: Path) -> None:
    """Every number leads to something that is there."""
    nodes = len(graph.event)
    for name, least, count in (
        ("event", 0, events),
        ("owner", NONE, events),
        ("source", 0, nodes),
        ("target", 0, nodes),
        ("kind", 0, len(EDGE_KINDS)),
    ):
        column = getattr(graph, name)
        if len(column) and not ((column >= least) & (column < count)).all():
            raise FastcommError(f"{path}: a {name} is not within 0 to {count - 1}")


def _about(words: Mapping[str, Any], known_rules: Mapping[str, PathRules]) -> PathSource:
    if words["rules"] not in known_rules:
        raise ValueError(f"rules {str(words['rules'])[:40]!r}, wanted {', '.join(known_rules)}")
    for text in words["data_load"]:
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"data_load {text[:40]!r}: {error}") from error
    lists = {name: tuple(words[name]) for name in ("data_load", "notes")}
    window, rules = TimeRange(**words["window"]), known_rules[words["rules"]]
    return PathSource(**{**words, **lists, "window": window, "rules": rules})
