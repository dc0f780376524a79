"""Save a critical path with its graph, and load it: Parquet tables and JSON in a zip file."""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fastcomm import arrow_files, files, regexes
from fastcomm.critical_path.path import FoundPath
from fastcomm.critical_path.rules import (
    CORRECTED,
    EVENT,
    PathRules,
    PathSource,
    SavedEvents,
)
from fastcomm.critical_path.window import TimeRange
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.files import aside
from fastcomm.graph.graph import EDGE_KINDS, Graph, LongestPath
from fastcomm.trace.columns import filled
from fastcomm.trace.trace import validate
from fastcomm_kernels.arrays import NONE

VERSION = 2  # also of the numbers of `EDGE_KINDS`, which edges are saved with
_MANIFEST = "manifest.json"
_MAX_TABLE_BYTES = 16 << 30  # in memory
_MAX_MANIFEST_BYTES = 1 << 20

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


def save(path: FoundPath, out_dir: str | Path) -> str:
    """Write a critical path of one rank to ``<out_dir>.zip``; return the name of the file."""
    target = Path(f"{out_dir}.zip")
    with aside(target) as unfinished:
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
            for name, content in _members(path).items():
                # A fixed date, so that equal paths give equal files.
                archive.writestr(zipfile.ZipInfo(name), content)
    return str(target)


def _members(critical: FoundPath) -> dict[str, bytes]:
    """Return the files of the archive by name."""
    path, slack = critical.path, critical.slack
    used, graph = critical.graph.compact()
    columns: dict[str, Mapping[str, Any]] = {
        "nodes": {
            **{name: getattr(graph, name) for name in ("event", "time", "is_end")},
            "on_device": critical.on_device,
        },
        "edges": {
            **{name: getattr(graph, name) for name in ("source", "target", "kind", "weight")},
            "owner": pa.array(graph.owner, mask=graph.owner == NONE),
        },
    }
    if path is not None:
        missing = pa.nulls(len(path.edges), pa.int64())
        columns["path"] = {"edge": path.edges, "slack": missing if slack is None else slack}
    tables = {
        name: pa.table(dict(content)).cast(_SCHEMAS[name]) for name, content in columns.items()
    }
    tables["events"] = critical.events.describe(used)
    last = None if path is None or not len(path.nodes) else int(path.nodes[-1])
    about = {**asdict(critical.about), "rules": critical.about.rules.name}
    manifest = {"version": VERSION, "last": last, "about": about}
    members = {f"{name}.parquet": _parquet(table) for name, table in tables.items()}
    return {_MANIFEST: json.dumps(manifest, indent=1).encode(), **members}


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def load(path: str | Path, known_rules: Sequence[PathRules] = (CORRECTED,)) -> FoundPath:
    """Load a critical path that `save` wrote; the file is unpacked in memory only.

    Parameters
    ----------
    path
        The zip file.
    known_rules
        Rules by which the path may have been found.

    Raises
    ------
    FastcommError
        If the file is no saved path, or one by other rules.

    """
    path = Path(path)
    try:
        with files.opened(path) as file, zipfile.ZipFile(file) as archive:
            return _restored(archive, path, {rules.name: rules for rules in known_rules})
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
        reason = str(error) or "a part of it ends early"
        raise FastcommError(f"{path}: not a saved critical path: {reason}") from error


def _restored(
    archive: zipfile.ZipFile, path: Path, known_rules: Mapping[str, PathRules]
) -> FoundPath:
    """Check the files of an archive, and build the path."""
    _check_files(archive, path)
    manifest = json.loads(archive.read(_MANIFEST))
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        raise FastcommError(f"{path}: {_MANIFEST} does not have version {VERSION}")
    nodes, edges, events = (
        _table(archive, name, path) for name in ("nodes", "edges", "events")
    )
    owner = filled(edges["owner"], NONE).astype(np.int32)
    # Columns are copied, as kernels are compiled anew for those that cannot be written to.
    graph = Graph(
        **{name: np.array(nodes[name]) for name in ("event", "time", "is_end")},
        **{name: np.array(edges[name]) for name in ("source", "target", "kind", "weight")},
        owner=owner,
    )
    _check(graph, events.num_rows, path)
    about = _about(manifest["about"], known_rules)
    forward = (graph.source < graph.target).all() and (np.diff(graph.target) >= 0).all()
    if about.rules.is_exact and not forward:
        raise FastcommError(f"{path}: edges are not in order, or lead backward")
    on_device = np.array(nodes["on_device"])
    longest, slack = None, None
    if "path.parquet" in archive.namelist():
        longest, slack = _path(_table(archive, "path", path), graph, manifest["last"])
    return FoundPath(
        graph=graph,
        events=SavedEvents(events),
        about=about,
        on_device=on_device,
        path=longest,
        slack=slack,
    )


def _check_files(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise FastcommError if an archive has other files, or too large ones."""
    names = [info.filename for info in archive.infolist()]
    expected = {_MANIFEST, *(f"{name}.parquet" for name in _SCHEMAS)}
    if len(names) != len(set(names)) or not set(names) <= expected:
        raise FastcommError(
            f"{path}: not a saved critical path: it has {', '.join(sorted(names))}, expected "
            f"only {', '.join(sorted(expected))}"
        )
    for info in archive.infolist():
        limit = _MAX_MANIFEST_BYTES if info.filename == _MANIFEST else _MAX_TABLE_BYTES
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
            raise FastcommError(
                f"{path}: {info.filename} is compressed or larger than {limit} bytes"
            )


def _path(table: pa.Table, graph: Graph, last: Any) -> tuple[LongestPath, Any]:
    """Return the path that ends at node `last`, and the slack of its edges, or None."""
    edges = table["edge"].to_numpy()
    if len(edges) and not ((edges >= 0) & (edges < len(graph.source))).all():
        raise ValueError("the path has edges that do not exist")
    if last is None:
        return LongestPath(nodes=np.empty(0, np.int32), edges=edges), None
    if type(last) is not int or not 0 <= last < len(graph.event):
        raise ValueError(f"the path ends at node {str(last)[:40]}, of {len(graph.event)}")
    slack = None if table["slack"].null_count else table["slack"].to_numpy()
    return LongestPath.of(edges, graph.source, last), slack


def _table(archive: zipfile.ZipFile, name: str, path: Path) -> pa.Table:
    """Read a table of the archive, and check its size and its schema."""
    content = archive.read(f"{name}.parquet")
    table = arrow_files.read_open(io.BytesIO(content), len(content), path)
    return validate(table, _SCHEMAS[name], f"{path}: {name}")


def _check(graph: Graph, events: int, path: Path) -> None:
    """Raise FastcommError if a number refers to a node, event or kind that does not exist."""
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
            raise FastcommError(f"{path}: invalid {name}: expected 0 to {count - 1}")


def _about(fields: Mapping[str, Any], known_rules: Mapping[str, PathRules]) -> PathSource:
    """Return the source of a path from the manifest; raise ValueError if it is invalid."""
    if fields["rules"] not in known_rules:
        raise ValueError(
            f"unknown rules {str(fields['rules'])[:40]!r}: expected {', '.join(known_rules)}"
        )
    for text in fields["data_load"]:
        try:
            regexes.check_of_file("data_load", text)
        except ConfigError as error:
            raise ValueError(str(error)) from error
    lists = {name: tuple(fields[name]) for name in ("data_load", "notes")}
    window, rules = TimeRange(**fields["window"]), known_rules[fields["rules"]]
    return PathSource(**{**fields, **lists, "window": window, "rules": rules})
