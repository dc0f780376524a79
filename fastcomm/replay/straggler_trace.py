"""A replayed table of operations as a Chrome trace: a process a data rank, threads a rank.

Of what waits for others only the transfer is drawn. Steps lie behind one another, each with a
tenth of its length behind it.
"""

from typing import Any

import numpy as np

from fastcomm.replay.model import Floats, Model
from fastcomm.replay.operations import POINT_TO_POINT
from fastcomm_kernels.simulate import ALONE

_US = 1e3
_SPACE = 1.1
_CLASSES = ("compute", "pp-comm", "tp-comm", "dp-comm", "misc")
_MISC = 4
_CLASS = {
    **dict.fromkeys(("forward-compute", "backward-compute"), 0),
    **dict.fromkeys((*POINT_TO_POINT, "embedding-grads-all-reduce"), 1),
    "layernorm-grads-all-reduce": 2,
    **dict.fromkeys(
        ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"), 3
    ),
}


def trace(model: Model, times: Floats) -> dict[str, Any]:
    """All steps, if the operations took `times`."""
    start, end = model.times(times)
    waited = (model.graph.group_of != ALONE)[:, None, None]
    begin = np.where(waited, end - np.maximum(times, 0), start)
    length = end.max(axis=(0, 1)) - start.min(axis=(0, 1))
    offset = np.concatenate(([0.0], np.cumsum(length * _SPACE)[:-1]))
    rows = list(_names(model))
    for step, number in enumerate(model.table.steps):
        ts, dur = begin[:, :, step] + offset[step], (end - begin)[:, :, step]
        rows += [
            {
                "ph": "X",
                "name": op.name,
                "cat": op.optype,
                "ts": float(ts[k, rank]) / _US,
                "dur": float(dur[k, rank]) / _US,
                "pid": rank,
                "tid": _thread(model, rank, op.stage, _CLASS.get(op.optype, _MISC)),
                "args": {"step": number, "stage": op.stage},
            }
            for k, op in enumerate(model.table.ops)
            for rank in range(model.table.ranks)
            if dur[k, rank] > 0
        ]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _thread(model: Model, rank: int, stage: int, kind: int) -> int:
    return int(model.table.rank_of[rank, stage]) * len(_CLASSES) + kind


def _names(model: Model) -> list[dict[str, Any]]:
    """What processes and threads are called."""
    rows: list[dict[str, Any]] = []
    for rank in range(model.table.ranks):
        said: dict[str, Any] = {"ph": "M", "pid": rank}
        rows.append({**said, "name": "process_name", "args": {"name": f"data rank {rank}"}})
        for stage in range(model.table.stages):
            for kind, word in enumerate(_CLASSES):
                name = f"rank {int(model.table.rank_of[rank, stage])} {word}"
                tid = _thread(model, rank, stage, kind)
                rows.append({**said, "name": "thread_name", "tid": tid, "args": {"name": name}})
    return rows
