"""The scanner beside a parser that everyone has, and a whole rank beside its scan."""

import gzip
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from timing import best, scan_of

from fastcomm.readers.assembly import TraceOptions
from fastcomm.readers.kineto import reader
from fastcomm.readers.kineto.stream import blocks, document
from fastcomm.synthetic import Job, write

REAL = Path(__file__).parents[2] / "shared/data/kineto/nccl_2rank_rank0.json.gz"
ROUNDS = 60
# A parser that everyone has, in a process of its own: where many objects live, Python's garbage
# collector looks at new ones less often, and orjson is up to half faster. Prints its seconds.
PARSED = """
import sys
from time import process_time
import orjson
text, seconds = sys.stdin.buffer.read(), []
for _ in range(15):
    begun = process_time()
    orjson.loads(text)
    seconds.append(process_time() - begun)
print(min(seconds))
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A real trace of a DDP job; where it is absent, a made-up rank of the same size."""
    if REAL.exists():
        return gzip.decompress(REAL.read_bytes())
    folder = tmp_path_factory.mktemp("scan")
    (path,) = write(Job.of(ranks=8), folder, ranks=[0], filler_bytes=10_000_000, compress=False)
    return path.read_bytes()


def test_scan(held, text):
    scan = scan_of(text)
    scan()  # compiles
    seconds, parsed = [], []
    for _ in range(4):
        seconds += best(scan, rounds=ROUNDS)
        command = [sys.executable, "-c", PARSED]
        done = subprocess.run(command, input=text, check=True, capture_output=True)
        parsed.append(float(done.stdout))
    held("scan", min(parsed) / min(seconds))


def test_a_rank(held, tmp_path):
    """One of thousands of small ranks: what is around scan and inflate is mostly calls."""
    (path,) = write(Job.of(512, steps=4, micro_batches=6), tmp_path, ranks=[0])
    whole, scan, inflate = best(
        lambda: reader.read(path, TraceOptions()),
        scan_of(document(path)),
        lambda: deque(blocks(path), maxlen=0),
        rounds=ROUNDS,
    )
    held("kineto_rank", whole / (scan + inflate))
