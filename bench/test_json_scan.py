"""The scanner beside a parser that everyone has, and a whole rank beside its scan."""

import gzip
import re
from collections import deque
from pathlib import Path

import pytest
from timing import best, scan_of

from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.formats.stream import blocks, document
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

REAL = Path(__file__).parents[2] / "shared/data/kineto/nccl_2rank_rank0.json.gz"
ROUNDS = 15


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A real trace of a DDP job; where it is absent, a made-up rank of the same size."""
    if REAL.exists():
        return gzip.decompress(REAL.read_bytes())
    folder = tmp_path_factory.mktemp("scan")
    (path,) = write(Job.of(ranks=8), folder, ranks=[0], filler_bytes=10_000_000, compress=False)
    return path.read_bytes()


def test_scan(quotient, text):
    """Beside plain C that looks at each character, and makes no objects."""
    scan = scan_of(text)
    scan()  # compiles
    between_quotes = re.compile(rb'(?:[^"]*"[^"]*")*')
    quotient("scan", lambda: best(lambda: between_quotes.match(text), scan, rounds=ROUNDS))


def test_a_rank(quotient, tmp_path):
    """One of thousands of small ranks: what is around scan and inflate is mostly calls."""
    (path,) = write(Job.of(512, steps=4, micro_batches=6), tmp_path, ranks=[0])
    runs = (
        lambda: reader.read(path, TraceOptions()),
        scan_of(document(path)),
        lambda: deque(blocks(path), maxlen=0),
    )

    def measure():
        whole, scan, inflate = best(*runs, rounds=ROUNDS)
        return whole, scan + inflate

    quotient("kineto_rank", measure)
