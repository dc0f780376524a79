"""What-if edits as data, and the step time that a replay of the graph with them predicts."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.critical_path.result import CriticalPath
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph.graph import EDGE_KIND, Graph, LongestPath, measured_delays
from fastcomm.inputs import toml
from fastcomm.ranges import DURATION_NS, SPEED, shortened
from fastcomm.result import Result
from fastcomm.trace.run import SkippedRank
from fastcomm.trace.schema import OPS, TAGS
from fastcomm.units import format_ns
from fastcomm_kernels import binding
from fastcomm_kernels.arrays import Flags, Ints
from fastcomm_kernels.graph import NONE, Numbers

Action = Literal["scale", "set", "remove", "fuse"]
DELAYS = ("launches", "gaps", "host-gaps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change to a step."""

    action: Action
    what: str  # a selection; of "remove" one of DELAYS
    value: float = 0.0  # a factor, or ns

    def __post_init__(self) -> None:
        """Check the factor: with a larger one times would no longer fit 64 bits."""
        if self.action == "scale":
            _check_factor(self.value, self.value)

    def __str__(self) -> str:
        if self.action == "remove":
            return f"remove {self.what}"
        if self.action == "fuse":
            return f"fuse kernels below {self.value / 1000:g} us"
        amount = f"{self.value:g}" if self.action == "scale" else f"{self.value / 1000:g} us"
        return f"{self.action} {self.what} = {amount}"


_KINDS = ("comm", "compute", "copy", "host")
_WORDS = ("op", "tag", "stream", "thread", "name")


def selected(events: pa.Table, words: str) -> Flags:
    """Which rows of a table of `rows.EVENT` a selection means."""
    chosen = np.ones(events.num_rows, np.bool_)
    for part in words.split("+"):
        chosen &= _part(events, part.strip(), words)
    return chosen


def _part(events: pa.Table, part: str, words: str) -> Flags:
    key, _, value = part.partition(":")
    if key in _KINDS:
        chosen = _of_kind(events, key)
        return chosen & _equal(events["tag"], _known(value, TAGS, words)) if value else chosen
    if key == "op" and value:
        return _equal(events["op"], _known(value, OPS, words))
    if key == "tag" and value:
        return _equal(events["tag"], _known(value, TAGS, words))
    if key == "stream" and re.fullmatch(r"-?\d+", value):
        return _equal(events["stream"], int(value))
    if key == "thread" and value:
        return _equal(events["thread"], value)
    if key == "name" and value:
        try:
            return _flags(pc.match_substring_regex(events["name"], value))
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{words!r}: {value!r} is no expression: {error}") from error
    raise ConfigError(
        f"{words!r}: found {part!r}, wanted one of {', '.join(_KINDS)}, or one of "
        f"{', '.join(_WORDS)} with a value behind a colon"
    )


def _of_kind(events: pa.Table, kind: str) -> Flags:
    on_device = _flags(events["is_device"])
    is_comm = _flags(pc.is_valid(events["op"]))
    is_kernel = _equal(events["kind"], "kernel")
    return {
        "comm": is_comm,
        "compute": on_device & is_kernel & ~is_comm,
        "copy": on_device & ~is_kernel & ~is_comm,
        "host": ~on_device,
    }[kind]


def _equal(column: pa.ChunkedArray, value: str | int) -> Flags:
    return _flags(pc.equal(column, value))


def _flags(column: pa.ChunkedArray) -> Flags:
    found: Flags = column.fill_null(False).to_numpy(zero_copy_only=False).astype(np.bool_)
    return found


def _known(word: str, words: tuple[str, ...], selection: str) -> str:
    if word not in words:
        raise ConfigError(f"{selection!r}: found {word!r}, wanted one of {', '.join(words)}")
    return word


def duration_ns(text: str) -> float:
    """Nanoseconds of "10us"; ConfigError for anything else."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(ns|us|ms|s)\s*", text)
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    duration = number * {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[found[2] if found else "s"]
    if not DURATION_NS.holds(duration):
        raise ConfigError(
            f"duration {shortened(text)!r}: wanted a number and a unit, as in 10us, at most "
            f"{DURATION_NS.most / 1e9:.15g}s"
        )
    return duration


def factor(text: str) -> float:
    """A factor of the range `SPEED`, or 0 for no time; ConfigError for anything else."""
    number = amount(text)
    _check_factor(number, text)
    return number


def amount(text: str) -> float:
    """A finite number, 0 or more; ConfigError for anything else."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"factor {shortened(text)!r}: wanted {SPEED}, or 0")
    return number


def _check_factor(number: float, text: object) -> None:
    if number != 0 and not SPEED.holds(number):
        raise ConfigError(f"factor {shortened(text)!r}: wanted {SPEED}, or 0")


def speed(kind: str, text: str) -> Edit:
    """Events of a kind by a clock or a link that is so many times as fast."""
    times = factor(text)
    SPEED.check(times, f"{shortened(text)!r} times as fast")
    return Edit(action="scale", what=kind, value=1 / times)


def removal(text: str) -> Edit:
    """The removal of delays of a kind."""
    return Edit(action="remove", what=_known(text, DELAYS, "remove"))


def read(path: Path) -> list[Edit]:
    """The edits in a TOML file: a list of tables ``[[edit]]``, in order."""
    document = toml(path)
    tables = document.get("edit")
    if set(document) != {"edit"} or not isinstance(tables, list):
        raise ConfigError(f"{path}: found {sorted(document)}, wanted tables [[edit]]")
    try:
        return [edit_of(table) for table in tables]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def edit_of(table: Mapping[str, Any]) -> Edit:
    """The edit of one table: scale, set, remove, hide, fuse_below, clock or link."""
    words = {key: str(value) for key, value in table.items()}
    what = words.pop("what", None)
    if len(words) != 1:
        raise ConfigError(f"an edit has {sorted(table)}; wanted one action, and perhaps `what`")
    ((action, value),) = words.items()
    if action in ("scale", "set"):
        if what is None:
            raise ConfigError(f"{action} = {value}: wanted `what` it means")
        amount = factor(value) if action == "scale" else duration_ns(value)
        return Edit(action="scale" if action == "scale" else "set", what=what, value=amount)
    simple = {
        "remove": lambda: removal(value),
        "hide": lambda: Edit(action="scale", what=f"comm:{value}", value=0.0),
        "fuse_below": lambda: Edit(action="fuse", what="compute", value=duration_ns(value)),
        "clock": lambda: speed("compute", value),
        "link": lambda: speed("comm", value),
    }
    if action not in simple or what is not None:
        raise ConfigError(
            f"found the edit {dict(table)}, wanted scale or set with `what`, or one of "
            f"{', '.join(simple)}"
        )
    return simple[action]()


_NEVER = -(1 << 61)  # the weight of a constraint that is no more
_REMOVED = {"launches": "launch", "gaps": "kernel_kernel", "host-gaps": "dependency"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EditSweep:
    """How long a step takes, by the value of one edit."""

    edit: Edit  # its own value means nothing
    values: tuple[float, ...]
    span_ns: tuple[int, ...]

    @property
    def name(self) -> str:
        """What is edited."""
        return f"{self.edit.action} {self.edit.what}"

    def to_arrow(self) -> pa.Table:
        """One row a value."""
        columns = {"value": pa.array(self.values), "span_ns": pa.array(self.span_ns)}
        return pa.table({"edit": [self.name] * len(self.values), **columns})


@dataclass(frozen=True, kw_only=True, repr=False)
class WhatIf(Result):
    """A step before and after its edits."""

    edits: tuple[Edit, ...]
    before_ns: int
    after_ns: int
    replay_error_ns: int  # of the replay without edits, at the worst node
    before: CriticalPath
    after: CriticalPath
    sweeps: tuple[EditSweep, ...] = ()
    failed: tuple[SkippedRank, ...] = ()

    @property
    def speedup(self) -> float | None:
        """How many times as fast; None where nothing is left."""
        return self.before_ns / self.after_ns if self.after_ns else None

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        before, after = self.before, self.after
        return {
            "rank": before.about.rank,
            "edits": [str(edit) for edit in self.edits],
            "before_ns": self.before_ns,
            "after_ns": self.after_ns,
            "speedup": self.speedup,
            "replay_error_ns": self.replay_error_ns,
            "summary_ns": {"before": before.summary_ns(), "after": after.summary_ns()},
            "path": {
                "before": {"event_ids": before.event_ids},
                "after": {"event_ids": after.event_ids},
            },
            "sweeps": [
                {"edit": each.name, "values": list(each.values), "span_ns": list(each.span_ns)}
                for each in self.sweeps
            ],
            "notes": list(before.notes),
            "failed": [asdict(each) for each in self.failed],
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the new path edge by edge, and the sweeps if there are any."""
        sweeps = [each.to_arrow() for each in self.sweeps]
        more = {"sweep": pa.concat_tables(sweeps)} if sweeps else {}
        return {"path_after": self.after.breakdown, **more}

    def figures(self) -> dict[str, str]:
        """Return the step before and after, and the edits."""
        return {
            "before": format_ns(self.before_ns),
            "after": format_ns(self.after_ns),
            "edits": ", ".join(map(str, self.edits)) or "none",
        }


class Replay:
    """A graph of the corrected rules, ready to be edited and run again."""

    def __init__(self, found: CriticalPath) -> None:
        if found.about.rules != "corrected":
            raise FastcommError(
                "a replay needs the constraints of the corrected rules; found those of "
                f"{found.about.rules}"
            )
        graph = found.graph
        self.found = found
        self.first = graph.into[0]
        self.weight = measured_delays(graph, found.on_device)
        self.rows, self.owner = np.unique(graph.owner, return_inverse=True)
        self.events: pa.Table = found.events.describe(self.rows)

    def edited(self, edits: Sequence[Edit]) -> Ints:
        """The weights of all edges after the edits, one after the other."""
        weight = self.weight.copy()
        for edit in edits:
            if edit.action == "remove":
                weight[self.found.graph.kind == EDGE_KIND[_REMOVED[edit.what]]] = 0
            elif edit.action == "fuse":
                self._fuse(weight, edit.value)
            else:
                self._stretch(weight, edit)
        return weight

    def _own(self) -> Flags:
        """The edges that are the own time of an event."""
        graph = self.found.graph
        own: Flags = (graph.kind == EDGE_KIND["operator"]) & (graph.owner != NONE)
        return own

    def _stretch(self, weight: Ints, edit: Edit) -> None:
        chosen = selected(self.events, edit.what)
        if not chosen.any():
            raise ConfigError(f"{edit}: no event of the window is meant by {edit.what!r}")
        edges = np.flatnonzero(self._own() & chosen[self.owner])
        if edit.action == "scale":
            weight[edges] = np.rint(weight[edges] * edit.value).astype(np.int64)
            return
        # An event's own time may be in several pieces: they shrink or grow alike.
        now = np.zeros(len(self.rows), np.float64)
        np.add.at(now, self.owner[edges], weight[edges])
        share = weight[edges] / np.maximum(now[self.owner[edges]], 1)
        weight[edges] = np.rint(share * edit.value).astype(np.int64)

    def _fuse(self, weight: Ints, below_ns: float) -> None:
        """Short kernels become one with the short kernel before them on their stream."""
        graph = self.found.graph
        length = self.events["stop"].to_numpy() - self.events["start"].to_numpy()
        short = selected(self.events, "compute") & (length < below_ns)
        short_rows = self.rows[short]
        follows = np.flatnonzero(graph.kind == EDGE_KIND["kernel_kernel"])
        behind = graph.event[graph.target[follows]]
        joined = np.isin(graph.owner[follows], short_rows) & np.isin(behind, short_rows)
        weight[follows[joined]] = 0
        launches = np.flatnonzero(graph.kind == EDGE_KIND["launch"])
        gone = launches[np.isin(graph.owner[launches], behind[joined])]
        weight[gone] = _NEVER
        calls = np.isin(graph.owner, graph.event[graph.source[gone]])
        weight[calls & self._own()] = 0

    def times(self, weight: Ints) -> tuple[Ints, Numbers]:
        """When each node is reached, from 0 on, and the edge that binds it."""
        return binding.replay(self.first, self.found.graph.source, weight, 0)

    def span(self, edits: Sequence[Edit]) -> int:
        """How long the step takes after the edits."""
        return int(self.times(self.edited(edits))[0].max(initial=0))

    def run(self, edits: Sequence[Edit]) -> WhatIf:
        """The step before and after the edits, with both paths."""
        graph = self.found.graph
        begin = int(graph.time[0]) if len(graph.time) else 0
        measured = graph.time - begin
        plain, _ = self.times(self.weight)
        weight = self.edited(edits)
        time, through = self.times(weight)
        return WhatIf(
            edits=tuple(edits),
            before_ns=int(measured.max(initial=0)),
            after_ns=int(time.max(initial=0)),
            replay_error_ns=int(np.abs(plain - measured).max(initial=0)),
            before=self.found,
            after=self._after(replace(graph, time=time + begin, weight=weight), through),
        )

    def _after(self, graph: Graph, through: Numbers) -> CriticalPath:
        found = CriticalPath(graph, self.found.events, self.found.about, self.found.on_device)
        edges, node = [], int(np.argmax(graph.time)) if len(graph.time) else NONE
        nodes = [node] if node >= 0 else []
        while node >= 0 and through[node] >= 0:
            edges.append(int(through[node]))
            node = int(graph.source[edges[-1]])
            nodes.append(node)
        found.path = LongestPath(
            nodes=np.array(nodes[::-1], np.int32), edges=np.array(edges[::-1], np.int32)
        )
        return found


def sweep(
    replay: Replay, edit: Edit, values: Sequence[float], edits: Sequence[Edit] = ()
) -> EditSweep:
    """The step for each value of `edit`, after `edits`."""
    spans = [replay.span([*edits, replace(edit, value=value)]) for value in values]
    return EditSweep(edit=edit, values=tuple(values), span_ns=tuple(spans))


def what_if(found: CriticalPath, edits: Sequence[Edit]) -> WhatIf:
    """A step before and after edits; the graph itself is not changed."""
    return Replay(found).run(edits)
