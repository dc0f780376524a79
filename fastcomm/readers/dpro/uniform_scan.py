"""A uniform trace in a file, read at the speed of its text: what statistics need of it.

Categories, and arguments that say neither name nor step (`input0` and the like), stay in the
file; `uniform.read` has them. Files that hold more than complete events are read by that, too.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro import uniform
from fastcomm.readers.dpro.uniform import Codes, Columns, UniformTrace
from fastcomm.readers.kineto.chrome import Scanned, Selection, scan_file
from fastcomm_kernels.arrays import NULL, Ints
from fastcomm_kernels.json_scan import WORD
from fastcomm_kernels.json_wanted import KEEP_ALL

_IDS = ("loopId", "channelId", "chunkId", "sliceId")
_DEBUG = 0
_WANTED = Selection(
    kinds={b"debug": _DEBUG},
    keep=[KEEP_ALL, KEEP_ALL],
    prefixes=(),
    row_args=("step", *_IDS),
    detail_args=(),
    detail_texts=("name",),
)


def read(path: Path) -> UniformTrace:
    """Read names, times and steps of every event."""
    try:
        scanned = scan_file(path, _WANTED)
    except TraceFileError:
        return uniform.read(path)  # whose message is about this format
    columns = scanned.columns
    whole = scanned.seen == len(columns["start"]) and not scanned.warnings
    if not whole or any((columns[each] == NULL).any() for each in ("name", "process")):
        return uniform.read(path)
    return uniform.of_columns(_columns(scanned))


def _columns(scanned: Scanned) -> Columns:
    columns, texts = scanned.columns, scanned.texts
    name, names = _used(columns["name"])
    pid, pids = _used(columns["process"])
    lane, lanes = _used(columns["thread"])
    suffix, suffixes = _suffixes(scanned)
    return Columns(
        names=tuple(texts[code] for code in names),
        name=name,
        pids=tuple(_word(value, texts) for value in pids),
        pid=pid,
        lanes=tuple(_word(value, texts) for value in lanes),
        lane=lane,
        cats=("debug", ""),
        cat=columns["kind"],
        suffixes=suffixes,
        suffix=suffix,
        start=columns["start"],
        dur=columns["stop"] - columns["start"],
        step=columns["step"],
    )


def _used(column: NDArray[Any]) -> tuple[Codes, list[int]]:
    """Small codes in order of first use, and what they stand for."""
    encoded = pa.array(column).dictionary_encode()
    return encoded.indices.to_numpy(), encoded.dictionary.to_pylist()


def _word(value: int, texts: list[str]) -> str:
    """The text of a process or thread."""
    if value == NULL:
        return ""
    return texts[WORD - value] if value <= WORD else str(value)


def _suffixes(scanned: Scanned) -> tuple[Ints, tuple[str, ...]]:
    """The part of the argument `name` behind ~>, or the four ids of NCCL."""
    detail, said = scanned.columns["detail"], scanned.details["name"]
    named = np.full(len(detail), -1, np.int64)
    own = np.flatnonzero(detail >= 0)
    named[own] = np.maximum(said[detail[own]], -1)  # no text, no suffix
    numbers: dict[str, int] = {}
    of_text = np.full(len(scanned.texts) + 1, -1, np.int64)
    for code in np.unique(named[named >= 0]).tolist():
        _, tilde, suffix = scanned.texts[code].partition("~>")
        if tilde:
            of_text[code] = numbers.setdefault(suffix, len(numbers))
    found: Ints = of_text[named]
    _from_ids(scanned, found, numbers)
    return found, tuple(numbers)


def _from_ids(scanned: Scanned, found: Ints, numbers: dict[str, int]) -> None:
    """Fill in suffixes that only the ids tell; writes into both."""
    ids: NDArray[np.int64] = np.stack([scanned.columns[name] for name in _IDS])
    rows = np.flatnonzero((found < 0) & (ids != NULL).all(axis=0))
    for row in rows.tolist():
        suffix = "_".join(map(str, ids[:, row].tolist()))
        found[row] = numbers.setdefault(suffix, len(numbers))
