"""Replay a job with changed operations, and write the result as a Chrome trace."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastcomm.errors import ConfigError
from fastcomm.graph.edits import DurationChange
from fastcomm.stragglers.model import JobModel
from fastcomm.stragglers.operations import POINT_TO_POINT
from fastcomm_kernels.arrays import Flags, Floats
from fastcomm_kernels.simulate import ALONE

_NUMBERS = ("rank", "dp_rank", "stage", "step")


def times(model: JobModel, changes: Mapping[str, DurationChange]) -> Floats:
    """The measured times with all changes; one that means no operation is an error."""
    out, ideal = model.measured.copy(), model.ideal_times()
    for key, change in changes.items():
        chosen = _selected(model, key)
        if not chosen.any():
            raise ConfigError(f"{key!r} means no operation of the table")
        base = np.where(chosen & change.is_ideal, ideal, out)
        out = np.where(chosen, change.applied(base), out)
    return out


def _selected(model: JobModel, key: str) -> Flags:
    """Which operations a key means: ops x data ranks x steps."""
    chosen = np.ones(model.measured.shape, bool)
    for part in key.split("+"):
        chosen &= _part(model, part.strip(), key)
    return chosen


def _part(model: JobModel, part: str, key: str) -> Flags:
    table = model.table
    word, colon, value = part.partition(":")
    if part == "all":
        return np.ones((1, 1, 1), bool)
    types = {op.optype for op in model.table.ops}
    if not colon and part in types:
        return model.of_type(part)[:, None, None]
    if word == "op" and value:
        return np.array([op.name == value for op in table.ops])[:, None, None]
    if word in _NUMBERS and value.isdecimal():
        return _numbered(model, word, int(value))
    known = ", ".join(sorted(types))
    raise ConfigError(
        f"{key!r}: found {part!r}, wanted all, a type ({known}), "
        "op:NAME, or rank:, dp_rank:, stage:, step: and a number"
    )


def _numbered(model: JobModel, word: str, number: int) -> Flags:
    """The operations of a rank, a data rank, a stage or a step."""
    table = model.table
    stage = np.array([op.stage for op in table.ops])
    found: Flags
    if word == "rank":
        found = (table.rank_of[:, stage] == number).T[:, :, None]
    elif word == "stage":
        found = (stage == number)[:, None, None]
    elif word == "dp_rank":
        found = (np.arange(table.ranks) == number)[None, :, None]
    else:
        found = (np.array(table.steps) == number)[None, None, :]
    return found


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


def trace(model: JobModel, times: Floats) -> dict[str, Any]:
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


def _thread(model: JobModel, rank: int, stage: int, kind: int) -> int:
    return int(model.table.rank_of[rank, stage]) * len(_CLASSES) + kind


def _names(model: JobModel) -> list[dict[str, Any]]:
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
