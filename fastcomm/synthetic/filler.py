"""Rows that change no metric and make a file as big as a real one: operators, Python calls.

A block of rows is formatted once. Every copy of it gets its own times and ids, written as
digits over the old ones by NumPy: that is what makes gigabytes cheap.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fastcomm.synthetic import rows
from fastcomm.synthetic.catalog import KERNELS, host_args
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.rows import Variant
from fastcomm.synthetic.schedule import BASE_NS

ROWS = 512  # of one block
FIRST_ID = 1_000_000_000  # ten digits, and above all ids of rows that count
_IDS = 1_000_000_000  # then they start again, below 2^31
# Places of digits in a row: no name of ours holds such a run of letters.
_TIME, _ID, _NUMBER = "T" * 13 + "." + "T" * 3, "I" * 10, "N" * 10
_PYTHON = (
    "torch/nn/modules/module.py(1773): _wrapped_call_impl",
    "megatron/core/transformer/transformer_layer.py(412): forward",
    "<built-in method linear of type object at 0x7f3c1d4c9a20>",
    "megatron/core/tensor_parallel/mappings.py(71): _reduce",
    "torch/autograd/graph.py(829): _engine_run_backward",
)

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


class Filler:
    """Blocks of rows for one rank, on threads of their own."""

    def __init__(self, job: Job, process: int, row_ns: int, variant: Variant) -> None:
        where = rows.lane(process, process + 113)
        written = [_row(job, number, where, row_ns) for number in range(ROWS)]
        text = "".join(written)
        if variant & Variant.COMPACT:
            text = rows.compact(text)
        self._block: Bytes = np.frombuffer(text.encode(), np.uint8).copy()
        whole, _, _ = _TIME.partition(".")
        self._times = _places(text, _TIME, [*range(len(whole)), *range(14, len(_TIME))])
        self._ids = _places(text, _ID, list(range(10)))
        self._numbers = _places(text, _NUMBER, list(range(10)))
        self._written = 0
        self.size = len(self._block)

    def blocks(self, start: int, stop: int, size: int) -> Iterator[bytes]:
        """Blocks of at least `size` bytes in all, their times spread over [start, stop)."""
        count = -(-size // self.size)
        for number in range(count):
            first = start + (stop - start) * number // count
            last = start + (stop - start) * (number + 1) // count
            yield self._written_over(first, last)

    def _written_over(self, start: int, stop: int) -> bytes:
        block = self._block
        steps = np.arange(ROWS, dtype=np.int64)
        block[self._times] = _digits(start - BASE_NS + (stop - start) * steps // ROWS, 16)
        numbers = FIRST_ID + (self._written + steps) % _IDS
        block[self._ids] = block[self._numbers] = _digits(numbers, 10)
        self._written += ROWS
        return block.tobytes()


def _row(job: Job, number: int, where: str, row_ns: int) -> str:
    kernels = list(KERNELS.values())
    kernel = kernels[number % len(kernels)]
    if number % 3:
        name, cat = kernel.host, "cpu_op"
        said = host_args(job, kernel)
        args = f'"External id": {_ID},"Record function id": 0, {said}, "Ev Idx": {_NUMBER}'
    else:
        name, cat = _PYTHON[number % len(_PYTHON)], "python_function"
        args = f'"Python parent id": {number}, "Python id": {_ID}, "Ev Idx": {_NUMBER}'
    text = rows.complete(cat, name, where, BASE_NS, row_ns, args)
    return text.replace('"ts": 0.000', f'"ts": {_TIME}')


def _places(text: str, run: str, within: list[int]) -> Ints:
    """Where the characters `within` a run stand in `text`, a row for each time it occurs."""
    starts = []
    found = text.find(run)
    while found >= 0:
        starts.append(found)
        found = text.find(run, found + len(run))
    return np.array(starts, dtype=np.int64)[:, None] + np.array(within, dtype=np.int64)


def _digits(values: Ints, width: int) -> Bytes:
    """The decimal digits of each value, as text."""
    text = np.empty((len(values), width), np.uint8)
    for column in reversed(range(width)):
        rest = values // 10
        text[:, column] = values - 10 * rest + ord("0")
        values = rest
    return text
