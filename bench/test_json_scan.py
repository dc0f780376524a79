"""The scanner beside a parser that everyone has, on a real trace where there is one."""

import gzip
from pathlib import Path

import numpy as np
import orjson
import pytest

from fastcomm.readers import envelope
from fastcomm.readers.kineto_layout import METRICS
from fastcomm.synthetic import Job, write
from fastcomm_kernels import json_scan, words
from fastcomm_kernels._llvm import PADDING

REAL = Path(__file__).parents[2] / "shared/data/kineto/nccl_2rank_rank0.json.gz"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A real trace of a DDP job; where it is absent, a made-up rank of the same size."""
    if REAL.exists():
        return gzip.decompress(REAL.read_bytes())
    folder = tmp_path_factory.mktemp("scan")
    (path,) = write(Job.of(ranks=8), folder, ranks=[0], filler_bytes=10_000_000, compress=False)
    return path.read_bytes()


def test_scan(bar, text):
    block = np.frombuffer(text + bytes(PADDING), np.uint8)
    wanted = METRICS.wanted
    plan, rows = wanted.plan(), np.empty((1 << 17, wanted.width()), np.int64)
    strings, state = (
        words.no_strings(1 << 16, 1 << 22),
        np.zeros(json_scan.STATE_SIZE, np.int64),
    )
    begin = envelope.events_begin(text, 0)

    def scan():
        state[:] = 0
        state[json_scan.AT], state[json_scan.LAST] = begin, 1
        assert json_scan.scan(block, len(text), state, plan, strings, rows) == json_scan.DONE

    bar("scan", scan, lambda: orjson.loads(text), count=len(text))
