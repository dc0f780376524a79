"""What communication takes by its size: for each rank and sub-operation time = k size + b.

Neither k nor b is negative. Every tenth group of tensors, by size, is not fitted but predicted.
Sizes are bytes, times float64 ns.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np

from fastcomm.replay.replayer import Replayer

_TENTH = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`slope` ns a byte, `offset` ns."""

    slope: float
    offset: float

    def time(self, size: float) -> float:
        """Nanoseconds that `size` bytes take."""
        return self.slope * size + self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A line by (pid, sub_op); `error` is the mean relative one of what was not fitted."""

    lines: Mapping[tuple[str, str], Line]
    error: float | None

    def time(self, pid: str, sub_op: str, size: float) -> float:
        """Nanoseconds of an operation of a group of `size` bytes; 0 where there was none."""
        line = self.lines.get((pid, sub_op))
        return 0.0 if line is None else line.time(size)


def fitted(points: Iterable[tuple[float, float]]) -> Line:
    """The line through (size, time) with the least squares of all that do not fall."""
    from scipy.optimize import nnls

    pairs = np.array(list(points), np.float64)
    scale = max(float(pairs[:, 0].max()), 1.0)
    system = np.column_stack((pairs[:, 0] / scale, np.ones(len(pairs))))
    slope, offset = nnls(system, pairs[:, 1])[0].tolist()
    return Line(slope=slope / scale, offset=offset)


def cost_model(made: Replayer, bytes_of: Mapping[tuple[int, ...], int]) -> CostModel:
    """Fit what the operations of a replay take; `bytes_of` is by group of tensors."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    held: list[tuple[tuple[str, str], float, float]] = []
    sizes = sorted(bytes_of, key=lambda group: (bytes_of[group], group))
    kept = {group for i, group in enumerate(sizes) if i % _TENTH != _TENTH - 1}
    for name, avg in zip(made.names, made.measured.avg.tolist(), strict=True):
        if name.op_cat != "Comm" or name.tensors not in bytes_of or not name.sub_op:
            continue
        key, size = (name.pid or "", name.sub_op), float(bytes_of[name.tensors])
        if name.tensors in kept:
            points.setdefault(key, []).append((size, avg))
        elif avg > 0:
            held.append((key, size, avg))
    lines = {key: fitted(each) for key, each in points.items()}
    errors = [abs(lines[key].time(size) / avg - 1) for key, size, avg in held if key in lines]
    return CostModel(lines=lines, error=float(np.mean(errors)) if errors else None)


def partitions(size: int, slope: float, offset: float) -> int:
    """Into how many parts to cut a tensor so that sending and what follows overlap best.

    `slope` is what the faster of the two takes a byte, `offset` what the slower takes a part;
    where a part takes nothing, there is one for each byte.
    """
    return max(1, int(sqrt(size * slope / offset)) if offset > 0 else size)


def worth_fusing(end_comm: float, end_comp: float, fused: float, alone: float) -> bool:
    """Whether two groups end sooner as one: the first is still sent when the second is ready.

    `end_comm` is when the first has been sent, `end_comp` when the second is computed, `fused`
    what both take as one, `alone` what the second takes.
    """
    return end_comm > end_comp + fused - alone
