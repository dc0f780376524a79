"""Writing the traces of a job, one file a rank, each aside and renamed when it is whole."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO, cast

from fastcomm.aside import aside
from fastcomm.import_path import safe_children
from fastcomm.synthetic import envelope, play, rows
from fastcomm.synthetic.filler import Filler
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import RankText
from fastcomm.synthetic.rows import Variant
from fastcomm.synthetic.schedule import EPOCH_NS

try:
    from isal import igzip as gzip
except ImportError:  # no wheel for this machine
    import gzip  # type: ignore[no-redef]

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
    """Write the trace of every rank, or of some; the paths come in the order of the ranks.

    Rows that no metric sees are added until the text of a file has `filler_bytes` bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    chosen = range(job.ranks) if ranks is None else sorted(ranks)
    one = partial(_write_rank, job, directory, variant, compress, filler_bytes)
    if workers == 1:
        return [one(rank) for rank in chosen]
    spawn = get_context("spawn")
    with safe_children(), ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        return list(pool.map(one, chosen))


def text(
    job: Job, rank: int, name: str, variant: Variant, filler_bytes: int
) -> Iterator[bytes]:
    """The bytes of one file, a step at a time."""
    change = rows.compact if variant & Variant.COMPACT else str
    lines = RankText(job, rank, variant)
    head = envelope.head(job, rank, variant) + envelope.labels(lines, EPOCH_NS)
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
    yield change(envelope.tail(EPOCH_NS - 150_000, stop + 500_000, name, variant)).encode()


def _row_ns(step_ns: int, size: int) -> int:
    """So long that a thread's rows do not overlap."""
    return max(1, step_ns * 400 // size * 3 // 4)


def _write_rank(
    job: Job, directory: Path, variant: Variant, compress: bool, filler_bytes: int, rank: int
) -> Path:
    name = f"rank{rank}.pt.trace.json"
    path = directory / (name + ".gz" if compress else name)
    with _aside(path, compress=compress) as file:
        for chunk in text(job, rank, name, variant, filler_bytes):
            file.write(chunk)
    return path


@contextmanager
def _aside(path: Path, *, compress: bool) -> Iterator[BinaryIO]:
    """A file under another name, which gets its own when it is whole, or vanishes."""
    with aside(path) as unfinished, unfinished.open("wb") as raw:
        if compress:
            # No name and no time in the header: the same job gives the same bytes.
            zipped = gzip.GzipFile("", "wb", LEVEL, raw, mtime=0)  # type: ignore[no-untyped-call]
            with zipped as file:
                yield cast("BinaryIO", file)
        else:
            yield raw
