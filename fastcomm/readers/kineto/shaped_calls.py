"""Operators of a Kineto file with shapes and the time of their kernels, for calibration."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastcomm.readers.kineto.categories import METRICS, scan
from fastcomm.readers.kineto.host import json_list
from fastcomm.readers.kineto.reader import events_of
from fastcomm.trace.columns import sums
from fastcomm.trace.events import Events
from fastcomm_kernels.arrays import Ints

# The first eight bytes of names of GEMMs and attention.
_NAMES = (b"aten::mm", b"aten::ad", b"aten::bm", b"aten::_f", b"aten::_s", b"flash_at")
_ARGS = ("Input Dims", "Input type", "Concrete Inputs")
_SHAPES = replace(METRICS, prefixes=_NAMES, detail_args=(), detail_texts=_ARGS)


class ShapedCall(NamedTuple):
    """One operator: shapes and types of its inputs, and the values of scalars."""

    name: str
    dims: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[str, ...]
    seconds: float  # of the kernels that it launched


def calls(path: Path, names: tuple[str, ...]) -> list[ShapedCall]:
    """Return the operators with the given names that have shapes and launched kernels.

    Raises `TraceFileError` if the file is not a trace.
    """
    scanned, _ = scan(path, _SHAPES)
    events = events_of(scanned)[0]
    ops = events.rows_named(names.__contains__, "cpu_op")
    spent = _spent(events, ops)
    ops, spent = ops[spent > 0], spent[spent > 0]
    texts = (map(events.text, events.detail(name, ops).tolist()) for name in _ARGS)
    args = zip(*texts, strict=True)
    shaped = map(_shaped_call, events.names(ops), args, (spent * 1e-9).tolist())
    return [call for call in shaped if call]


def _spent(events: Events, ops: Ints) -> Ints:
    """Return the ns of the kernels of each operator: the innermost around their launches.

    If a launch's thread has no operators, as with ids of another kind, all threads count.
    """
    kernels = events.rows("kernel")
    launches = events.launch_of(kernels)
    op = events.enclosing(ops, launches)
    is_elsewhere = (launches >= 0) & ~np.isin(events.lane[launches], events.lane[ops])
    on_one_lane = replace(events, lane=np.zeros_like(events.lane))
    op[is_elsewhere] = on_one_lane.enclosing(ops, launches[is_elsewhere])
    duration = events.stop[kernels] - events.start[kernels]
    return sums(op, duration, len(events) + 1)[ops]  # kernels of no operator are at NONE


def _shaped_call(name: str, texts: tuple[str | None, ...], seconds: float) -> ShapedCall | None:
    """Return a call, from the texts of its args; None if they have no shapes or types.

    `seconds` is the time of the kernels that it launched.
    """
    args = [json_list(text or "") for text in texts]
    if args[0] is None or args[1] is None:
        return None
    dims = tuple(tuple(shape) if _is_shape(shape) else () for shape in args[0])
    types, values = (tuple(str(value) for value in arg or ()) for arg in args[1:])
    return ShapedCall(name, dims, types, values, seconds)


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(length, int) for length in value)
