"""Operators of a Kineto file with shapes and the time of their kernels, for calibration."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.kineto.categories import METRICS, scan
from fastcomm.readers.kineto.chrome import Scanned
from fastcomm.readers.kineto.host import json_list
from fastcomm.trace.columns import lookup
from fastcomm.trace.schema import KIND
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
    columns = scanned.columns
    name_codes = [code for code, text in enumerate(scanned.texts) if text in names]
    ops = np.flatnonzero(
        (columns["kind"] == KIND["cpu_op"]) & np.isin(columns["name"], name_codes)
    )
    ops = ops[np.argsort(columns["start"][ops], kind="stable")]
    spent = _spent(columns, ops)
    shaped = (
        _shaped_call(scanned, int(row), float(time) * 1e-9)
        for row, time in zip(ops[spent > 0], spent[spent > 0], strict=True)
    )
    return [call for call in shaped if call]


def _spent(columns: dict[str, NDArray[Any]], ops: Ints) -> Ints:
    """Return the ns of the kernels of each operator; operators are sorted by start."""
    works, launches = (np.flatnonzero(columns["kind"] == KIND[name]) for name in _LINKED)
    launches = launches[np.argsort(columns["correlation"][launches], kind="stable")]
    place = lookup(columns["correlation"][launches], columns["correlation"][works])
    works, launches = works[place >= 0], launches[place[place >= 0]]
    op = _around(columns, ops, launches)
    inside = op >= 0
    duration = columns["stop"][works[inside]] - columns["start"][works[inside]]
    spent = np.zeros(len(ops), np.int64)
    np.add.at(spent, op[inside], duration)
    return spent


_LINKED = ("kernel", "runtime")


def _around(columns: dict[str, NDArray[Any]], ops: Ints, launches: Ints) -> Ints:
    """Return the innermost operator around each launch on its thread, or -1.

    If a launch's thread has no operators, as with ids of another kind, all threads count.
    """
    result = np.full(len(launches), -1, np.int64)
    threads, start = columns["thread"], columns["start"]
    for thread in np.unique(threads[launches]):
        rows = np.flatnonzero(threads[launches] == thread)
        places = np.flatnonzero(threads[ops] == thread)
        places = places if len(places) else np.arange(len(ops))
        if not len(places):
            continue
        when = start[launches[rows]]
        last = np.searchsorted(start[ops[places]], when, side="right") - 1
        place = places[np.maximum(last, 0)]
        inside = (last >= 0) & (when < columns["stop"][ops[place]])
        result[rows[inside]] = place[inside]
    return result


def _shaped_call(scanned: Scanned, row: int, seconds: float) -> ShapedCall | None:
    """Return the call of an event with its input shapes; None if they are not recorded.

    `seconds` is the time of the kernels that it launched.
    """
    args = [json_list(scanned.detail(name, row)) for name in _ARGS]
    if args[0] is None or args[1] is None:
        return None
    dims = tuple(tuple(shape) if _is_shape(shape) else () for shape in args[0])
    types, values = (tuple(str(value) for value in arg or ()) for arg in args[1:])
    return ShapedCall(scanned.name(row), dims, types, values, seconds)


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(length, int) for length in value)
