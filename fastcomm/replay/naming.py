"""What the events of a trace are called as operations: `FW.aten::mm`, `Comm.TP-5-0.AllGather`.

Device work has the name of the innermost operator that launched it, or its own. It is of the
update inside of a mark that names an optimizer; of the backward pass inside of one that says
so, inside of what autograd evaluates, or on its engine's thread; else of the forward pass,
which so holds everything of a trace without marks. The innermost mark decides.
"""

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.trace.schema import KIND, OPS, TAGS
from fastcomm.trace.trace import Trace
from fastcomm_kernels import attribution, segments
from fastcomm_kernels.json_numbers import NULL

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

FORWARD, BACKWARD, UPDATE = range(3)
OP_CATS = ("FW", "BW", "UPDATE_")

_FORWARD = re.compile(r"(?i)forward|(?<![a-z])fwd")
_BACKWARD = re.compile(r"(?i)backward|(?<![a-z])bwd|^autograd::engine")
_UPDATE = re.compile(r"(?i)optimizer")
_ENGINE = "autograd::engine"
_STEP = re.compile(r"^ProfilerStep#|(?i:optimizer)")
_WORK = ("kernel", "memcpy", "memset")


@dataclass(frozen=True)
class Naming:
    """The operations of one rank's trace; all by row of its events."""

    trace: Trace

    @cached_property
    def kind(self) -> Ints:
        """The kind of each event."""
        return self._column("kind")

    @cached_property
    def lane(self) -> NDArray[np.int32]:
        """The lane of each event."""
        found: NDArray[np.int32] = self.trace.events["lane"].to_numpy()
        return found

    @cached_property
    def start(self) -> Ints:
        """When each begins."""
        return self._column("start")

    @cached_property
    def stop(self) -> Ints:
        """When each ends."""
        return self._column("stop")

    def _column(self, name: str) -> Ints:
        found: Ints = self.trace.events[name].to_numpy().astype(np.int64)
        return found

    @cached_property
    def words(self) -> list[str]:
        """Names by code."""
        found: list[str] = self._names.dictionary.to_pylist()
        return found

    @cached_property
    def code(self) -> Ints:
        """The code of each event's name."""
        found: Ints = self._names.indices.to_numpy().astype(np.int64)
        return found

    @property
    def _names(self) -> pa.DictionaryArray:
        return self.trace.events["name"].combine_chunks()

    @cached_property
    def is_work(self) -> Flags:
        """Which events are work of a device."""
        return np.isin(self.kind, [KIND[name] for name in _WORK])

    @cached_property
    def at(self) -> Ints:
        """The call that launched each piece of work; of all else, and where unknown, itself."""
        found = np.arange(len(self.kind))
        calls = np.flatnonzero(self.kind == KIND["runtime"])
        number = self.trace.events["correlation"].fill_null(NULL).to_numpy()
        calls = calls[np.argsort(number[calls], kind="stable")]
        work = np.flatnonzero(self.is_work & (number != NULL))
        if not len(calls):
            return found
        place = np.searchsorted(number[calls], number[work], side="right") - 1
        known = (place >= 0) & (number[calls[place]] == number[work])
        found[work[known]] = calls[place[known]]
        return found

    @cached_property
    def operator(self) -> Ints:
        """The innermost operator around each event's call, an operator's own row; or -1."""
        return self._around(np.flatnonzero(self.kind == KIND["cpu_op"]))

    def _around(self, ranges: Ints) -> Ints:
        """The innermost of `ranges` around each event's call, or -1."""
        found = np.full(len(self.kind), -1, np.int64)
        points = self.at
        order = np.lexsort((self.start[points], self.lane[points]))
        ranges = ranges[np.lexsort((-self.stop[ranges], self.start[ranges], self.lane[ranges]))]
        if len(ranges):
            lanes = (
                (self.lane[k], self.start[k], self.stop[k]) for k in (ranges, points[order])
            )
            inner = attribution.enclosing(*next(lanes), *next(lanes))
            found[order] = np.where(inner >= 0, ranges[inner], -1)
        return found

    @cached_property
    def op_cat(self) -> Ints:
        """FORWARD, BACKWARD or UPDATE."""
        said = np.array([_class(word) for word in self.words], np.int64)[self.code]
        is_op = self.kind == KIND["cpu_op"]
        is_mark = is_op & (said == BACKWARD)
        is_mark |= (self.kind == KIND["annotation"]) & (said >= 0)
        mark = self._around(np.flatnonzero(is_mark))
        return np.where(mark >= 0, said[mark], self._of_thread[self.lane[self.at]])

    @cached_property
    def _of_thread(self) -> Ints:
        """By lane: BACKWARD on a thread of autograd's engine, unless it takes steps as well."""
        engine = np.array([word.startswith(_ENGINE) for word in self.words], bool)[self.code]
        steps = np.array([bool(_STEP.search(word)) for word in self.words], bool)[self.code]
        found = np.full(self.trace.lanes.num_rows, FORWARD, np.int64)
        found[self.lane[engine]] = BACKWARD
        found[self.lane[steps]] = FORWARD
        return found

    @cached_property
    def step(self) -> Ints:
        """The iteration in which each was called, from 0 on; -1 outside of all."""
        table = self.trace.iterations
        if not table.num_rows:
            return np.zeros(len(self.kind), np.int64)
        begin = self.start[self.at]
        order = np.argsort(begin, kind="stable")
        found = np.empty(len(begin), np.int64)
        found[order] = segments.segment_of(
            begin[order], table["start"].to_numpy(), table["stop"].to_numpy()
        )
        return found

    @cached_property
    def communication(self) -> dict[int, str]:
        """Standard names of communication by row: tag, group, place in the step, operation."""
        comm, groups = self.trace.comm, self.trace.groups["name"].to_pylist()
        count: dict[tuple[object, ...], int] = {}
        found = {}
        columns = (comm[name].to_pylist() for name in ("event", "op", "tag", "group"))
        for row, op, tag, group in zip(*columns, strict=True):
            key = (op, group, int(self.step[row]))
            place = count[key] = count.get(key, -1) + 1
            label = "none" if group is None else groups[group] or f"group{group}"
            found[row] = f"Comm.{TAGS[tag]}-{plain(label)}-{place}.{OPS[op]}"
        return found

    def standard(self, row: int) -> str:
        """The standard name of an operation."""
        if row in self.communication:
            return self.communication[row]
        source = row if self.operator[row] < 0 else int(self.operator[row])
        return f"{OP_CATS[self.op_cat[row]]}.{plain(self.words[self.code[source]])}"

    @cached_property
    def outermost(self) -> Flags:
        """Which operators no other of their thread encloses."""
        ops = np.flatnonzero(self.kind == KIND["cpu_op"])
        ops = ops[np.lexsort((-self.stop[ops], self.start[ops], self.lane[ops]))]
        found = np.zeros(len(self.kind), bool)
        for lane in np.unique(self.lane[ops]).tolist():
            own = ops[self.lane[ops] == lane]
            before = np.maximum.accumulate(self.stop[own])
            found[own] = self.start[own] >= np.append(self.start[own[:1]], before[:-1])
        return found


def _class(word: str) -> int:
    """What a mark's name says; -1 for nothing, or for two things."""
    rules = ((_UPDATE, UPDATE), (_BACKWARD, BACKWARD), (_FORWARD, FORWARD))
    said = [number for rule, number in rules if rule.search(word)]
    return said[0] if len(said) == 1 else -1


@lru_cache(maxsize=1 << 16)
def plain(text: str) -> str:
    """A text as part of a name: without what separates names."""
    return re.sub(r"~>|->|\.", "_", text)
