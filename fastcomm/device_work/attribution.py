"""Which operator, module, layer, annotation, stream or pass the work of a rank belongs to.

Work belongs to the innermost range around its launch, on the thread of the launch. Work that
autograd launches belongs to the module whose forward operator has the same sequence number; a
forward pass recomputed inside of a backward pass belongs to the module around it there.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.device_work.names import WAITING, categories, short_label, short_name
from fastcomm.device_work.options import KernelKey
from fastcomm.trace.columns import filled, first_seen
from fastcomm.trace.events import EventRows, enclosing
from fastcomm.trace.passes import PASSES, passes
from fastcomm.trace.schema import KIND, OPERANDS
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints, Numbers

_MODULE = re.compile(r"nn\.Module: (.+?)_(\d+)$")
BACKWARD = "autograd::engine::evaluate_function"
# Keys that need only the device work, and not what the host did.
DEVICE_KEYS: tuple[KernelKey, ...] = ("name", "category")
# Between the name of an operator, and the shapes and types of its inputs.
INPUTS = "\x1f"
_LONGEST = 1 << 12  # letters of the shapes of an operator
Labels = tuple[Numbers, Sequence[str]]  # index of each row's label, and the labels


@dataclass(frozen=True)
class Work:
    """The device work of a rank; of a host run, its operators and communication.

    Columns have an element per row of `rows`, which are sorted by start.
    """

    trace: Trace

    @cached_property
    def is_comm(self) -> Flags:
        """Whether each event of the trace communicates."""
        flags = np.zeros(self.trace.events.num_rows, np.bool_)
        flags[self.trace.comm["event"].to_numpy()] = True
        return flags

    @cached_property
    def rows(self) -> Ints:
        """The rows of the table of events that are work."""
        kind = self.trace.events["kind"].to_numpy()
        is_work = self.is_comm.copy()
        for name in ("kernel", "memcpy", "memset", "host_work"):
            is_work |= kind == KIND[name]
        rows: Ints = np.flatnonzero(is_work)
        return rows

    @cached_property
    def names(self) -> tuple[Numbers, pa.Array]:
        """The name of each row as an index, and all names."""
        names = self.trace.events["name"].combine_chunks()
        return names.indices.to_numpy()[self.rows], names.dictionary

    @cached_property
    def events(self) -> EventRows:
        """The events of the rank."""
        return EventRows.of(self.trace)

    @cached_property
    def launch(self) -> Ints:
        """The row at which each work was launched: its call, on the host itself; or NONE."""
        is_host = self.events.kind[self.rows] == KIND["host_work"]
        return np.where(is_host, self.rows, self.events.launch_of(self.rows))

    def labels(self, by: KernelKey, *, full_names: bool, with_inputs: bool = False) -> Labels:
        """Return the label of each row; `full_names` keeps recorded names as they are.

        With `with_inputs`, operators with other shapes or types of inputs have other labels:
        the name, shapes and types, with `INPUTS` between them.
        """
        if by == "operator" and with_inputs:
            return self._operators_by_inputs()
        if by == "category":
            return self.categories
        if by in ("name", "annotation", "module"):
            label = {"name": self._by_name, "module": self._modules}
            return label.get(by, self._annotations)(full_names)
        label_of = {"stream": self._streams, "operator": self._operators, "pass": self._passes}
        return label_of.get(by, self._layers)()

    @cached_property
    def categories(self) -> Labels:
        """The category of each row."""
        code, names = self.names
        kind = self.trace.events["kind"].to_numpy()[self.rows]
        return categories(kind, code, self.is_comm[self.rows], names)

    def _by_name(self, full_names: bool) -> Labels:
        code, names = self.names
        used, place = _renumbered(code, len(names))
        texts = names.take(pa.array(used)).to_pylist()
        if not full_names and not self.trace.meta.is_host_run:
            texts = [short_name(text) for text in texts]
        return place, texts

    def _streams(self) -> Labels:
        lanes = self.trace.lanes
        devices = lanes["device"].drop_null().unique()
        noun = "thread" if self.trace.meta.is_host_run else "stream"
        texts = [
            f"{f'device {device} ' if len(devices) > 1 else ''}{noun} {thread}"
            for device, thread in zip(
                lanes["device"].to_pylist(), lanes["thread"].to_pylist(), strict=True
            )
        ]
        return self.trace.events["lane"].to_numpy()[self.rows], texts

    def _passes(self) -> Labels:
        """Label compute and copies by their pass; others have their category."""
        call = np.where(self.launch >= 0, self.launch, self.rows)
        is_host = self.events.kind[call] == KIND["host_work"]
        call[is_host] = self._operators_of(call[is_host])
        code = passes(self.events, self.rows, call)
        category, labels = self.categories
        for place, label in enumerate(WAITING, len(PASSES)):
            code[category == labels.index(label)] = place
        return code.astype(np.int32), (*PASSES, *WAITING)

    def _operators_of(self, rows: Ints) -> Ints:
        """Return the rows of the operators around work of the host, or else its own rows.

        Such work is on a lane of its own, beside that of the thread that it is part of.
        """
        events, ranges = self.events, self.events.rows("cpu_op")
        lanes = (self.trace.lanes[name].to_pylist() for name in ("process", "thread"))
        number: dict[tuple[str, str], int] = {}
        of_lane = np.array(
            [number.setdefault(key, len(number)) for key in zip(*lanes, strict=True)], np.int32
        )
        spans = [
            (of_lane[events.lane[own]], events.start[own], events.stop[own])
            for own in (ranges, rows)
        ]
        place = enclosing(spans[0], spans[1])
        return np.where(place >= 0, ranges[place] if len(ranges) else rows, rows)

    def _operators(self) -> Labels:
        return self._named(self._operator_rows, "operator", str)

    @cached_property
    def _operator_rows(self) -> Ints:
        """The row of the operator of each work, or NONE."""
        events = self.events
        row = events.enclosing(events.rows("cpu_op"), self.launch)
        is_host = events.kind[self.rows] == KIND["host_work"]
        return np.where(is_host, self.rows, row)

    def _operators_by_inputs(self) -> Labels:
        columns = [TextColumn.of(self.trace, name) for name in OPERANDS[:2]]
        row = self._operator_rows
        names = np.where(row >= 0, self.events.name[row], NONE)
        codes = [np.where(row >= 0, column.codes[row], NONE) for column in columns]
        first, place = first_seen(names, *codes)
        texts = []
        for name, own in zip(names[first].tolist(), row[first].tolist(), strict=True):
            inputs = [(column.text(own) or "")[:_LONGEST] for column in columns]
            label = self.events.texts[name].replace(INPUTS, " ")
            texts.append(
                INPUTS.join([label, *inputs]) if name >= 0 else absent_name("operator")
            )
        return place.astype(np.int32), texts

    def _annotations(self, full_names: bool) -> Labels:
        """Label work by annotations: of its launch's thread, or else of the process."""
        events, ranges = self.events, self.events.rows("annotation")
        row = events.enclosing(ranges, self.launch)
        missing = np.flatnonzero((row < 0) & (self.launch >= 0))
        process = self.trace.lanes["process"].combine_chunks().dictionary_encode()
        of_lane = process.indices.to_numpy()[events.lane]
        spans = [
            (of_lane[rows], events.start[rows], events.stop[rows])
            for rows in (ranges, self.launch[missing])
        ]
        place = enclosing(spans[0], spans[1])
        row[missing] = np.where(place >= 0, ranges[place] if len(ranges) else NONE, NONE)
        return self._named(row, "annotation", str if full_names else short_label)

    @cached_property
    def _module_rows(self) -> Ints:
        """The rows of the forward passes of modules."""
        flags = pc.match_substring_regex(self.events.names, r"^nn\.Module: .+_[0-9]+$")
        return np.flatnonzero(self.events.by_name(flags) & self.events.of_kind("python"))

    @cached_property
    def _forward(self) -> Ints:
        """The row of the launch of each work, or in a backward pass of its forward operator."""
        events, launch = self.events, self.launch.copy()
        args = self.trace.arguments
        if "sequence" not in args.column_names:
            return launch
        sequence = filled(args["sequence"])
        is_backward = events.by_name(pc.starts_with(events.names, BACKWARD))
        ops = np.flatnonzero(events.of_kind("cpu_op") & (sequence != NULL) & (sequence >= 0))
        backward, forward = ops[is_backward[ops]], ops[~is_backward[ops]]
        thread = np.full(len(events), NULL, np.int64)
        if "forward_thread" in args.column_names:
            thread = filled(args["forward_thread"])
            forward = forward[(thread[forward] == NULL) | (thread[forward] == 0)]
        around = events.enclosing(backward, launch)
        module = events.enclosing(self._module_rows, launch)
        is_recomputed = (module >= 0) & (events.start[module] >= events.start[around])
        inside = np.flatnonzero((around >= 0) & ~is_recomputed)
        row = around[inside]
        launch[inside] = _forward_of(row, forward, sequence, thread, events.lane)
        return launch

    def _modules(self, full_names: bool) -> Labels:
        row = self.events.enclosing(self._module_rows, self._forward)
        return self._named(row, "module", _instance if full_names else _class)

    def _layers(self) -> Labels:
        """Label work by the outermost module around it whose class has several instances."""
        events, rows = self.events, self._module_rows
        names = {code: events.texts[code] for code in np.unique(events.name[rows]).tolist()}
        count = Counter(map(_class, names.values()))
        repeated = [code for code, name in names.items() if count[_class(name)] > 1]
        rows = events.outermost(rows[np.isin(events.name[rows], repeated)])
        return self._named(events.enclosing(rows, self._forward), "layer", _instance)

    def _named(self, row: Ints, noun: str, label: Callable[[str], str]) -> Labels:
        """Return labels from the names of some rows; those of NONE are "(no `noun`)"."""
        none = len(self.events.texts)
        used, place = _renumbered(np.where(row >= 0, self.events.name[row], none), none + 1)
        texts = [absent_name(noun) if k == none else label(self.events.texts[k]) for k in used]
        return place, texts


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column of texts of the events of a trace."""

    codes: Ints  # NONE: null
    texts: pa.Array

    @classmethod
    def of(cls, trace: Trace, name: str) -> Self:
        """Return a column of the arguments; null if the trace lacks it."""
        if name not in trace.arguments.column_names:
            return cls(
                np.full(trace.events.num_rows, NONE, np.int64), pa.array([], pa.string())
            )
        column = trace.arguments[name].combine_chunks()
        return cls(filled(column.indices, NONE), column.dictionary)

    def text(self, row: int) -> str | None:
        """Return the text of a row."""
        code = int(self.codes[row])
        return None if code < 0 else str(self.texts[code].as_py())


def _renumbered(code: NDArray[np.integer], size: int) -> tuple[Ints, Numbers]:
    """Return the codes below `size` that occur, and their index for each element."""
    is_used = np.zeros(size, np.bool_)
    is_used[code] = True
    place = np.cumsum(is_used, dtype=np.int32) - np.int32(1)
    return np.flatnonzero(is_used), place[code]


def absent_name(noun: str) -> str:
    """Return the label of work that has no operator, module, layer or annotation."""
    return f"(no {noun})"


def _forward_of(
    backward: Ints, forward: Ints, sequence: Ints, thread: Ints, lane: NDArray[np.int32]
) -> Ints:
    """Return the row of the forward operator of each backward pass, or NONE.

    Every thread has sequence numbers of its own. Traces number the thread of a forward pass
    otherwise than its events: it is the one that has most of the sequence numbers, and of equal
    ones not that of the backward pass.
    """
    result = np.full(len(backward), NONE, np.int64)
    lanes = np.unique(lane[forward])
    for own in np.unique(thread[backward]):
        places = np.flatnonzero(thread[backward] == own)
        rows = backward[places]
        elsewhere_first = sorted(lanes, key=lambda one: np.count_nonzero(lane[rows] == one))
        matches = [
            _with_sequence(sequence, forward[lane[forward] == one], sequence[rows])
            for one in elsewhere_first
        ]
        if matches:
            result[places] = max(matches, key=lambda match: np.count_nonzero(match >= 0))
    return result


def _with_sequence(sequence: Ints, forward: Ints, needed: Ints) -> Ints:
    """Return the last of the rows `forward` with each sequence number, or NONE."""
    order = np.argsort(sequence[forward], kind="stable")
    numbers = sequence[forward][order]
    place = np.searchsorted(numbers, needed, side="right") - 1
    if not len(numbers):
        return np.full(len(needed), NONE, np.int64)
    is_equal = (place >= 0) & (numbers[place] == needed)
    return np.where(is_equal, forward[order[place]], NONE)


def _instance(name: str) -> str:
    """Return the name of a module with its number: "Linear_3"."""
    return name.removeprefix("nn.Module: ")


def _class(name: str) -> str:
    """Return the class of a module."""
    match = _MODULE.match(name)
    return match[1] if match else name


def split_labels(labels: Sequence[str]) -> dict[str, pa.Array]:
    """Return `name`, `shapes` and `dtypes` of labels; without inputs, the last two are null."""
    parts = [label.split(INPUTS, 2) for label in labels]
    texts = pa.list_(pa.string())
    return {
        "name": pa.array([part[0] for part in parts], pa.string()),
        "shapes": pa.array([_inputs(part[1:2]) for part in parts], texts),
        "dtypes": pa.array([_inputs(part[2:3]) for part in parts], texts),
    }


def _inputs(texts: Sequence[str]) -> list[str] | None:
    """Return the entries of a JSON list as texts; None if there is no such list."""
    try:
        values = json.loads(texts[0]) if texts else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, list):
        return None
    return [value if isinstance(value, str) else json.dumps(value) for value in values]
