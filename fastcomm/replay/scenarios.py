"""What if some operations of a table took other times: questions that a model answers.

A scenario pickles, and what it answers is small: it goes to wherever the model is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastcomm.replay.model import Model, Replayed, joined
from fastcomm.replay.operations import Op

Bools = NDArray[np.bool_]
Way = Literal["alone", "without", "launched"]
Kind = Literal["all", "dp_rank", "stage", "optype", "rank"]
Scenario = Callable[[Model], Replayed]

_MOST_RANKS = 64  # in one question: so many are replayed at once
_MERGED = {
    f"{way}-{what}": f"{way}-pp-comm"
    for way in ("forward", "backward")
    for what in ("send", "recv")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Some:
    """Some operations as they were: alone, or all but them, or they alone with launch delays.

    `alone`: they as measured, the others ideal. `without`: they ideal, the others as measured.
    `launched`: all as measured, and they as long after what they waited for as recorded.
    """

    way: Way
    kind: Kind = "all"
    keys: tuple[int | str, ...] = ()

    def __call__(self, model: Model) -> Replayed:
        """What the steps take."""
        return joined(self._replayed(part) for part in model.parts())

    def _replayed(self, model: Model) -> Replayed:
        own = self._chosen(model)
        if self.way == "launched":
            return model.replay(model.measured, np.where(own, model.delays, 0.0))
        pair = (model.measured, model.ideal_times())
        return model.replay(np.where(own, *(pair if self.way == "alone" else pair[::-1])))

    def _chosen(self, model: Model) -> Bools:
        """Which operations are meant, of a shape that broadcasts to that of the times."""
        table = model.table
        stage = np.array([op.stage for op in table.ops])
        if self.kind == "dp_rank":
            return np.isin(np.arange(table.ranks), self.keys)[None, :, None]
        if self.kind == "stage":
            return np.isin(stage, self.keys)[:, None, None]
        if self.kind == "optype":
            names = optypes(table.ops, first_op=self.way == "launched")
            return np.array([name in self.keys for name in names])[:, None, None]
        if self.kind == "rank":
            return np.isin(table.rank_of, self.keys)[:, stage].T[:, :, None]
        return np.ones((1, 1, 1), np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class EachRank:
    """Each data rank of a range alone as measured, the others ideal: a row a rank.

    All that are ideal do the same, so that one of them stands for all: the ranks are replayed
    at once, each in steps of its own, at the cost of two ranks each.
    """

    first: int
    stop: int

    def __call__(self, model: Model) -> Replayed:
        """What the steps take, ranks x steps."""
        own = model.measured[:, self.first : self.stop, :]
        ops, ranks, steps = own.shape
        times = own.reshape(ops, 1, ranks * steps)
        if model.table.ranks > 1:
            ideal = np.broadcast_to(model.ideal_times()[:, :1, :1], times.shape)
            times = np.concatenate([times, ideal], axis=1)
        found = model.replay(times)
        return Replayed(
            whole=found.whole.reshape(ranks, steps),
            optimizer=found.optimizer.reshape(ranks, steps),
        )


def each_rank(ranks: int) -> list[Scenario]:
    """Every data rank alone: few questions, and enough for many workers."""
    most = max(1, min(_MOST_RANKS, ranks // 2))
    return [
        EachRank(first=first, stop=min(first + most, ranks)) for first in range(0, ranks, most)
    ]


def optypes(ops: Sequence[Op], *, first_op: bool = False) -> list[str]:
    """The type of each operation, sends and receives of a pipeline in one.

    With `first_op` what a stage begins with is a type of its own.
    """
    return [
        "first-op"
        if first_op
        and op.seq == 0
        and op.optype == ("forward-recv" if op.stage else "forward-compute")
        else _MERGED.get(op.optype, op.optype)
        for op in ops
    ]
