"""The strategy search: its space priced and ranked, and the whole command."""

import subprocess
import sys
from dataclasses import replace
from time import perf_counter

import oracle_isp as oracle
import pyarrow as pa

from fastcomm.cluster.load import load
from fastcomm.isp import compat_search
from fastcomm.isp.columns import Records
from fastcomm.isp.compat import CompatRules
from fastcomm.isp.presets import of_size
from fastcomm.isp.question import Batch, Question
from fastcomm.isp.search import search

A800 = load("a800")
SCALAR = 400
COMMAND = (
    *("isp", "--model", "internlm-7b", "--world-size", "128"),
    *("--seq-len", "64Ki", "--global-batch", "4Mi"),
)


def asked(least, algos=("isp", "msp", "fsp", "mtp"), world=1024):
    return Question(
        model=of_size(7),
        world_sizes=(world,),
        seq_len=4096,
        batch=Batch(least=least, most=4 << 20),
        algos=algos,
    )


def test_evaluate(bar):
    question = asked(3 << 20, world=256)
    model = oracle.model(4096, 32, 32)
    strategy = ("isp", 256, 4096, 2, 4, 1, 16, 0, (2, 8, 32))
    bar(
        "isp_evaluate",
        lambda: search(question, A800),
        lambda: [oracle.step(oracle.A800, model, *strategy) for _ in range(SCALAR)],
        count=search(question, A800).feasible,
        yardstick_count=SCALAR,
    )


def test_arrow(bar):
    found = search(asked(4 << 20, world=256), A800)

    def arrow():
        fresh = Records(found.columns.parts, found.columns.ranking)
        return replace(found, columns=fresh).to_arrow()

    bar(
        "isp_arrow",
        arrow,
        lambda: pa.Table.from_pylist([found.record(place) for place in range(SCALAR)]),
        count=found.feasible,
        yardstick_count=SCALAR,
    )


def test_original_space(held):
    question = asked(4 << 20, ("isp", "msp", "fsp"))
    seconds = []
    for _ in range(5):
        begun = perf_counter()
        found = compat_search.search(question, CompatRules(overlap_wdp=True), A800)
        seconds.append(perf_counter() - begun)
    assert found.candidates == 239526
    held("isp_original", min(seconds))


def test_default_space(held):
    seconds = []
    for _ in range(5):
        begun = perf_counter()
        search(asked(4 << 20), A800)
        seconds.append(perf_counter() - begun)
    held("isp_search", min(seconds))


def test_command(held):
    seconds = []
    for _ in range(3):
        begun = perf_counter()
        command = [sys.executable, "-m", "fastcomm.cli", *COMMAND]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(perf_counter() - begun)
    held("isp_command", min(seconds))
