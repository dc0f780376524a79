"""A synthetic training job in the formats of real profilers, for demo, tests and benchmarks.

This module writes its Kineto files, one per rank.
"""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fastcomm.files import aside, fast_gzip
from fastcomm.process import safe_children
from fastcomm.synthetic import kineto, play
from fastcomm.synthetic.catalog import KERNELS, group_count, groups, host_args
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import DEVICES, RankText, Variant
from fastcomm.synthetic.pipeline import BASE_NS, COMPUTE, COPY, EPOCH_NS, STREAMS
from fastcomm_kernels.arrays import Ints

_DEVICE = {
    "name": "NVIDIA H100 80GB HBM3",
    "totalGlobalMem": 84_942_979_072,
    "computeMajor": 9,
    "computeMinor": 0,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiprocessor": 2048,
    "regsPerBlock": 65_536,
    "warpSize": 32,
    "sharedMemPerBlock": 49_152,
    "numSms": 132,
    "regsPerMultiprocessor": 65_536,
    "sharedMemPerBlockOptin": 232_448,
    "sharedMemPerMultiprocessor": 233_472,
}


def envelope_head(job: Job, rank: int, variant: Variant) -> str:
    """Return the text up to the first row."""
    info = json.dumps(_distributed(job, rank, variant))
    devices = json.dumps([{"id": number, **_DEVICE} for number in range(DEVICES)], indent=4)
    devices = devices.replace("\n", "\n    ")
    base = "" if variant & Variant.BASE_LAST else _base(",")
    trace_id = f"{job.seed * 0x9E3779B97F4A7C15 + rank:032X}"[-32:]
    return f""" {{
    "schemaVersion": 1,
    "deviceProperties": {devices},
    
      "trace_id": "{trace_id}",
      "cupti_version": 26,
      "cuda_runtime_version": 12090,
      "cuda_driver_version": 12090,
      "record_shapes": 1,
      "with_stack": 1,
      "distributedInfo": {info},
      "host_name": "node{rank // DEVICES:04d}",{base}
    "traceEvents": [
    """  # noqa: W293


def tail(start: int, stop: int, name: str, variant: Variant) -> str:
    """Return the JSON text after the last event of a trace.

    It is the profiler's own events and the end of the object. `start` and `stop` are the times
    of the recording in ns; `name` is that of the trace.
    """
    span = "Trace", "PyTorch Profiler (0)", kineto.lane("Spans", "PyTorch Profiler")
    text = kineto.complete(*span, start, stop - start, '"Op count": 0')
    text += kineto.label("process_sort_index", kineto.lane("Spans", 0), start, 536_870_912)
    iteration = kineto.lane("Traces", "Trace PyTorch Profiler")
    text += kineto.instant("Iteration Start: PyTorch Profiler", iteration, start)
    text += kineto.instant("Record Window End", kineto.lane("", ""), stop).removesuffix(",")
    last = "," + _base("") if variant & Variant.BASE_LAST else ""
    return f'{text}\n  ],"traceName": "{name}"{last} }}\n'


def labels(text: RankText, start: int) -> str:
    """Return JSON text of the events that name a trace's processes, threads, streams.

    `start` is the time that they carry, ns.
    """
    process, device = text.process, text.device
    host = kineto.lane(process, 0)
    rows = kineto.label("process_name", host, start, "python3")
    rows += kineto.label("process_labels", host, start, "CPU")
    rows += kineto.label("process_sort_index", host, start, process)
    gpu = kineto.lane(device, 0)
    rows += kineto.label("process_name", gpu, start, "python3")
    rows += kineto.label("process_labels", gpu, start, f"GPU {device}")
    rows += kineto.label("process_sort_index", gpu, start, 5_000_000 + device)
    for backward, where in text.lanes.items():
        name = "pt_autograd_0" if backward else "python3"
        rows += kineto.label("thread_name", where, start, f"thread ({name})")
    for stream in sorted({COMPUTE, COPY, *STREAMS.values()}):
        where = kineto.lane(device, stream)
        rows += kineto.label("thread_name", where, start, f"stream {stream} ")
    return rows


def _base(comma: str) -> str:
    return f"""
    "displayTimeUnit": "ms",
    "baseTimeNanoseconds": {BASE_NS}{comma}"""


def _distributed(job: Job, rank: int, variant: Variant) -> dict[str, object]:
    """Return the `distributedInfo` of a rank's trace, with its process groups."""
    undescribed = bool(variant & Variant.UNDESCRIBED)
    by_kind = groups(job, rank)
    return {
        "backend": "nccl",
        "rank": rank,
        "world_size": job.ranks,
        "pg_count": group_count(job),
        "pg_config": [
            {
                "pg_name": group.name,
                "pg_desc": "undefined" if undescribed else group.description,
                "backend_config": "cuda:nccl",
                "pg_size": group.size,
                "ranks": list(group.ranks),
            }
            for group in sorted(by_kind.values(), key=lambda group: int(group.name))
        ],
        "nccl_version": "2.27.5",
    }


ROWS = 512  # of one block
FIRST_ID = 1_000_000_000  # ten digits, and above all ids of rows that count
_IDS = 1_000_000_000  # then they start again, below 2^31
# Placeholders of digits in a row: no name contains such a run of letters.
_TIME, _ID, _NUMBER = "T" * 13 + "." + "T" * 3, "I" * 10, "N" * 10
_PYTHON = (
    "torch/nn/modules/module.py(1773): _wrapped_call_impl",
    "megatron/core/transformer/transformer_layer.py(412): forward",
    "<built-in method linear of type object at 0x7f3c1d4c9a20>",
    "megatron/core/tensor_parallel/mappings.py(71): _reduce",
    "torch/autograd/graph.py(829): _engine_run_backward",
)
ByteArray = NDArray[np.uint8]


class Filler:
    """Generates blocks of rows on threads of their own, for files of any size."""

    def __init__(self, job: Job, process: int, row_ns: int, variant: Variant) -> None:
        """Write a block of events, with placeholders for what differs between blocks.

        The events are those of a process of the host, `row_ns` apart. `variant` is the form of
        the trace.
        """
        where = kineto.lane(process, process + 113)
        written = [_row(job, number, where, row_ns) for number in range(ROWS)]
        text = "".join(written)
        if variant & Variant.COMPACT:
            text = kineto.compact(text)
        self._block: ByteArray = np.frombuffer(text.encode(), np.uint8).copy()
        whole, _, _ = _TIME.partition(".")
        self._times = _places(text, _TIME, [*range(len(whole)), *range(14, len(_TIME))])
        self._ids = _places(text, _ID, list(range(10)))
        self._numbers = _places(text, _NUMBER, list(range(10)))
        self._written = 0
        self.size = len(self._block)

    def blocks(self, start: int, stop: int, size: int) -> Iterator[bytes]:
        """Yield blocks of at least `size` bytes in total, with times in [start, stop)."""
        count = -(-size // self.size)
        for number in range(count):
            first = start + (stop - start) * number // count
            last = start + (stop - start) * (number + 1) // count
            yield self._rewritten(first, last)

    def _rewritten(self, start: int, stop: int) -> bytes:
        """Return the block with new times in [start, stop) and new ids."""
        block = self._block
        steps = np.arange(ROWS, dtype=np.int64)
        block[self._times] = _digits(start - BASE_NS + (stop - start) * steps // ROWS, 16)
        numbers = FIRST_ID + (self._written + steps) % _IDS
        block[self._ids] = block[self._numbers] = _digits(numbers, 10)
        self._written += ROWS
        return block.tobytes()


def _row(job: Job, number: int, where: str, row_ns: int) -> str:
    """Return a filler row with placeholders for time and ids."""
    kernels = list(KERNELS.values())
    kernel = kernels[number % len(kernels)]
    if number % 3:
        name, cat = kernel.host, "cpu_op"
        inputs = host_args(job, kernel)
        args = f'"External id": {_ID},"Record function id": 0, {inputs}, "Ev Idx": {_NUMBER}'
    else:
        name, cat = _PYTHON[number % len(_PYTHON)], "python_function"
        args = f'"Python parent id": {number}, "Python id": {_ID}, "Ev Idx": {_NUMBER}'
    text = kineto.complete(cat, name, where, BASE_NS, row_ns, args)
    return text.replace('"ts": 0.000', f'"ts": {_TIME}')


def _places(text: str, run: str, within: list[int]) -> Ints:
    """Return the positions of characters `within` each occurrence of a run, a row for each."""
    starts = []
    position = text.find(run)
    while position >= 0:
        starts.append(position)
        position = text.find(run, position + len(run))
    return np.array(starts, dtype=np.int64)[:, None] + np.array(within, dtype=np.int64)


def _digits(values: Ints, width: int) -> ByteArray:
    """Return the decimal digits of values of 0 or more as ASCII codes, shape (values, `width`).

    Zeros are on the left; digits beyond `width` are lost.
    """
    text = np.empty((len(values), width), np.uint8)
    for column in reversed(range(width)):
        quotient = values // 10
        text[:, column] = values - 10 * quotient + ord("0")
        values = quotient
    return text


LEVEL = 1


def write(
    job: Job,
    directory: Path,
    *,
    ranks: Iterable[int] | None = None,
    variant: Variant = Variant.TODAY,
    compress: bool = True,
    filler_bytes: int = 0,
    workers: int = 1,
) -> list[Path]:
    """Write the traces of a job, and return their paths in the order of ranks.

    Parameters
    ----------
    job
        The job.
    directory
        Directory to write to, created if absent.
    ranks
        Ranks to write; by default all.
    variant
        Form of the traces, such as that of an older profiler.
    compress
        Whether files are gzipped.
    filler_bytes
        Minimum size of the text of a file; events without effect on metrics fill it.
    workers
        Number of processes.

    """
    directory.mkdir(parents=True, exist_ok=True)
    chosen = range(job.ranks) if ranks is None else sorted(ranks)
    one = partial(_write_rank, job, directory, variant, compress, filler_bytes)
    if workers == 1:
        return [one(rank) for rank in chosen]
    spawn = get_context("spawn")
    with safe_children(), ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        return list(pool.map(one, chosen))


def trace_names(ranks: Iterable[int], form: str) -> list[str]:
    """Return the names of the files of ranks, in the format "kineto" or "nsys"."""
    name = "nsys_{}.sqlite" if form == "nsys" else "rank{}.pt.trace.json.gz"
    return [name.format(rank) for rank in ranks]


def text(
    job: Job, rank: int, name: str, variant: Variant, filler_bytes: int
) -> Iterator[bytes]:
    """Yield the bytes of the trace of a rank, step by step.

    Parameters
    ----------
    job, rank
        The job, and the rank.
    name
        Name of the trace in its text.
    variant
        Form of the trace, such as that of an older profiler.
    filler_bytes
        Minimum size; events without effect on metrics fill it.

    """
    change = kineto.compact if variant & Variant.COMPACT else str
    lines = RankText(job, rank, variant)
    head = envelope_head(job, rank, variant) + labels(lines, EPOCH_NS)
    written = 0
    filler, stop = None, EPOCH_NS
    for done, step in enumerate(play.steps(job, rank), 1):
        chunk = change(head + "".join(lines.step(step))).encode()
        head, stop = "", step.stop
        written += len(chunk)
        yield chunk
        missing = filler_bytes * done // job.steps - written
        if missing > 0:
            filler = filler or Filler(job, lines.process, _row_ns(step.ns, missing), variant)
            for block in filler.blocks(step.start, step.stop, missing):
                written += len(block)
                yield block
    yield change(tail(EPOCH_NS - 150_000, stop + 500_000, name, variant)).encode()


def _row_ns(step_ns: int, size: int) -> int:
    """Return a duration such that the rows of a thread do not overlap."""
    return max(1, step_ns * 400 // size * 3 // 4)


def _write_rank(
    job: Job, directory: Path, variant: Variant, compress: bool, filler_bytes: int, rank: int
) -> Path:
    """Write the trace of a rank, with `filler_bytes` of other rows; return its path."""
    name = f"rank{rank}.pt.trace.json"
    path = directory / (name + ".gz" if compress else name)
    with _aside(path, compress=compress) as file:
        for chunk in text(job, rank, name, variant, filler_bytes):
            file.write(chunk)
    return path


@contextmanager
def _aside(path: Path, *, compress: bool) -> Iterator[BinaryIO]:
    """Yield a file under a temporary name; rename it when complete, or delete it."""
    with aside(path) as unfinished, unfinished.open("wb") as raw:
        if compress:
            # Neither name nor time in the header: equal jobs give equal bytes.
            zipped = fast_gzip().GzipFile("", "wb", LEVEL, raw, mtime=0)
            with zipped as file:
                yield cast("BinaryIO", file)
        else:
            yield raw
