"""FLOPs and bytes of the device work of a rank: of its operators, divided among their kernels.

Work belongs to the innermost operator around its launch whose cost is known. The FLOPs of an
operator are those of its main kernels, in proportion to their time: of a GEMM, the kernels of
GEMMs among those that it launched; without any such, all of them.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.device_work.attribution import BACKWARD, TextColumn, Work
from fastcomm.device_work.formulas import (
    MATRIX,
    RULES,
    Inputs,
    OperatorCost,
    UnknownCostError,
    cost,
)
from fastcomm.hardware.gpus import Roof
from fastcomm.trace.columns import filled, first_seen
from fastcomm.trace.schema import OPERANDS
from fastcomm_kernels.arrays import NONE, NULL, Flags, Floats, Ints

NO_SHAPES = (
    "the traces have no shapes of operators: record them with "
    "torch.profiler.profile(record_shapes=True)"
)
ON_HOST = "a run without a device: FLOPs are not counted"
_COMPILED = "CompiledFunctionBackward"
_NO_SEQUENCE = "the trace has no sequence numbers, which tell recomputation apart"
_IS_COMPILED = "recomputation in compiled backward passes cannot be told apart"


def why_unknown(work: Work) -> str | None:
    """Return why no FLOPs of a rank are known; None if some may be."""
    if work.trace.meta.is_host_run:
        return ON_HOST
    args = work.trace.arguments
    return NO_SHAPES if OPERANDS[0] not in args.column_names else None


@dataclass(frozen=True)
class CountedOperators:
    """The operators of a rank whose cost is known; arrays have an element for each."""

    row: Ints  # in the table of events
    costs: tuple[OperatorCost, ...]
    cost: Ints  # index into `costs`
    reasons: dict[str, int]  # why costs of operators with a formula are unknown: of how many

    @classmethod
    def of(cls, work: Work) -> Self:
        """Count the operators of a rank that have shapes; equal ones are counted once."""
        events = work.events
        has_rule = events.by_name(pc.is_in(events.names, value_set=pa.array(sorted(RULES))))
        texts = [TextColumn.of(work.trace, name) for name in OPERANDS]
        rows = np.flatnonzero(has_rule & events.of_kind("cpu_op") & (texts[0].codes >= 0))
        if not len(rows):
            return cls(rows, (), rows, {})
        first, kind = first_seen(events.name[rows], *(column.codes[rows] for column in texts))
        number = np.bincount(kind)
        place, costs, reasons = np.full(len(first), NONE, np.int64), [], Counter[str]()
        for index, row in enumerate(rows[first].tolist()):
            shapes, types, values = (column.text(row) for column in texts)
            try:
                inputs = Inputs.of(shapes or "", types, values)
                costs.append(cost(events.texts[events.name[row]], inputs))
                place[index] = len(costs) - 1
            except UnknownCostError as error:
                reasons[str(error)] += int(number[index])
        is_known = place[kind] >= 0
        return cls(rows[is_known], tuple(costs), place[kind][is_known], dict(reasons))

    def take(self, places: Ints) -> Self:
        """Return some of the operators."""
        return replace(self, row=self.row[places], cost=self.cost[places])

    def column(self, name: str) -> Floats:
        """Return a number of the cost of each operator."""
        values = np.array([getattr(one, name) for one in self.costs], np.float64)
        by_row: Floats = self._by_row(values)
        return by_row

    @cached_property
    def is_matrix(self) -> Flags:
        """Whether the FLOPs of each operator count for the step."""
        flags: Flags = self._by_row(
            np.array([one.kind in MATRIX for one in self.costs], np.bool_)
        )
        return flags

    def peak_ns(self, roof: Roof) -> Floats:
        """Return the time of each operator at the peak; NaN where it or the peak is unknown."""
        peaks = [
            roof.peaks.get(one.precision, np.nan) if one.kind in MATRIX else np.nan
            for one in self.costs
        ]
        by_row: Floats = self.column("flops") / self._by_row(np.array(peaks, np.float64)) * 1e9
        return by_row

    def _by_row(self, values: NDArray[Any]) -> Any:
        return values[self.cost] if len(values) else values


@dataclass(frozen=True, kw_only=True)
class WorkCosts:
    """FLOPs and bytes of the work of a rank; arrays have an element per row of `Work.rows`."""

    operators: CountedOperators  # that launched work
    operator: Ints  # index into these, or NONE
    share: Floats  # of the operator's FLOPs; 0 for work beside its main kernels
    roof: Roof | None
    is_recomputed: Flags | str  # by operator; a text says why it is unknown

    @classmethod
    def of(cls, work: Work, roof: Roof | None) -> Self:
        """Divide the FLOPs of the operators of a rank among its work.

        Parameters
        ----------
        work
            The work.
        roof
            The peaks of the rank's device; None if unknown.

        """
        candidates, events = CountedOperators.of(work), work.events
        is_compute = np.where(work.is_comm[work.rows], NONE, work.launch)
        row = events.enclosing(candidates.row, is_compute)
        place = np.full(len(events) + 1, NONE, np.int64)
        place[candidates.row] = np.arange(len(candidates.row))
        operator = place[row]
        used = np.unique(operator[operator >= 0])
        used = used[~_is_outer(work, candidates.take(used))]
        place = np.full(len(candidates.row) + 1, NONE, np.int64)
        place[used] = np.arange(len(used))
        operator, operators = place[operator], candidates.take(used)
        return cls(
            operators=operators,
            operator=operator,
            share=_shares(work, operators, operator),
            roof=roof,
            is_recomputed=_recomputed(work, operators),
        )

    @cached_property
    def peak_ns(self) -> Floats:
        """Time of the FLOPs of each operator at the peak; NaN where unknown."""
        if self.roof is None:
            return np.full(len(self.operators.row), np.nan)
        return self.operators.peak_ns(self.roof)

    @cached_property
    def memory_ns(self) -> Floats:
        """Time of the bytes of each operator at the memory's bandwidth; NaN where unknown."""
        rate = np.nan if self.roof is None else self.roof.memory
        return self.operators.column("bytes") / rate * 1e9

    @cached_property
    def is_memory_bound(self) -> Flags:
        """Whether the operator of each row needs the memory for longer than the cores."""
        is_longer = ~self.operators.is_matrix | (self.memory_ns > self.peak_ns)
        return np.append(is_longer, False)[self.operator]

    @cached_property
    def model_flops(self) -> Floats | str:
        """FLOPs of each operator without recomputation; a text says why they are unknown."""
        if isinstance(self.is_recomputed, str):
            return self.is_recomputed
        return np.where(self.is_recomputed, 0, self.operators.column("model_flops"))


def _is_outer(work: Work, operators: CountedOperators) -> Flags:
    """Return whether an operator has another one inside that has the same FLOPs."""
    result = np.zeros(len(operators.row), np.bool_)
    own, events = np.flatnonzero(operators.is_matrix), work.events
    row = operators.row[own]
    order = np.lexsort((-events.stop[row], events.start[row], events.lane[row]))
    own, row = own[order], row[order]
    lane, start, stop = events.lane[row], events.start[row], events.stop[row]
    result[own[:-1]] = (lane[1:] == lane[:-1]) & (stop[1:] <= stop[:-1])
    # Ranges that do not overlap are no more than neighbors.
    result[own[:-1]] &= start[1:] < stop[:-1]
    return result


def _shares(work: Work, operators: CountedOperators, operator: Ints) -> Floats:
    """Return the share of each row in the FLOPs of its operator."""
    code, labels = work.categories
    inside = np.flatnonzero(operator >= 0)
    number, count = operator[inside], len(operators.row)
    is_matrix_kernel = np.isin(code[inside], [labels.index(label) for label in MATRIX])
    is_main = is_matrix_kernel & operators.is_matrix[number]
    has_main = np.bincount(number[is_main], minlength=count) > 0
    is_main |= ~has_main[number]
    # A nanosecond more, for work that takes no time.
    row = work.rows[inside]
    weight = np.where(is_main, work.events.stop[row] - work.events.start[row] + 1.0, 0.0)
    total = np.bincount(number, weights=weight, minlength=count)
    shares = np.zeros(len(operator))
    shares[inside] = weight / total[number]
    return shares


def _recomputed(work: Work, operators: CountedOperators) -> Flags | str:
    """Return whether each operator is a forward one inside of a backward pass.

    Autograd numbers the operators of a forward pass, those of a recomputed one too, and not
    those that it calls for gradients. A text says why that is unknown.
    """
    events, row = work.events, operators.row
    is_backward = events.by_name(pc.starts_with(events.names, BACKWARD))
    ranges = np.flatnonzero(is_backward & events.of_kind("cpu_op"))
    around = events.enclosing(ranges, row)
    inside = around >= 0
    if not inside.any():
        return inside
    if events.by_name(pc.match_substring(events.names, _COMPILED))[around[inside]].any():
        return _IS_COMPILED
    args = work.trace.arguments
    if not {"sequence", "forward_thread"} <= set(args.column_names):
        return _NO_SEQUENCE
    sequence, thread = (filled(args[name]) for name in ("sequence", "forward_thread"))
    if not (sequence >= 0).any():
        return _NO_SEQUENCE
    is_forward = (sequence != NULL) & (sequence >= 0) & ((thread == NULL) | (thread == 0))
    forward = np.flatnonzero(is_forward & ~is_backward & events.of_kind("cpu_op"))
    caller = events.enclosing(forward, row)
    start = events.start
    return inside & (caller >= 0) & (start[caller] >= start[around])
