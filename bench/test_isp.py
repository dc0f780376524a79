"""The search of InternEvo: its space priced and ranked, and the whole command."""

import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
from timing import best_of_processes

from fastcomm.compat import isp as original
from fastcomm.compat.isp import OriginalRules
from fastcomm.hardware.clusters import load
from fastcomm.isp.problem import MicroBatchRule, SearchProblem
from fastcomm.isp.result import Records
from fastcomm.isp.search import search
from fastcomm.models import internlm

A800 = load("a800")
SCALAR = 400
PIECES, LENGTH = 100, 2_000
COMMAND = (
    *("isp", "--model", "internlm-7b", "--world-size", "128"),
    *("--seq-len", "64Ki", "--global-batch", "4Mi"),
)


def asked(least, algos=("isp", "msp", "fsp", "mtp"), world=1024):
    return SearchProblem(
        model=internlm(7),
        world_sizes=(world,),
        seq_len=4096,
        batch=MicroBatchRule(least=least, most=4 << 20),
        algos=algos,
    )


def passes():
    """Make a hundred passes over numbers, a piece at a time: half of it is calls of NumPy."""
    some = np.random.default_rng(0).random(LENGTH)
    other, place = some[::-1].copy(), np.arange(LENGTH) * 7 % LENGTH
    for _ in range(PIECES * 20):
        product = some * other
        total = product + some
        larger = np.maximum(product, total)
        np.where(larger > total, other[place], product)


def test_evaluate(bar):
    problem = asked(3 << 20, world=256)
    bar(
        "isp_evaluate",
        lambda: search(problem, A800),
        passes,
        count=search(problem, A800).feasible,
        yardstick_count=PIECES * LENGTH,
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


def test_original_space(bar):
    problem = asked(4 << 20, ("isp", "msp", "fsp"))

    def searched():
        return original.search(problem, OriginalRules(overlap_wdp=True), A800).candidates

    assert searched() == 239526
    bar("isp_original", searched, passes, count=239526, yardstick_count=PIECES * LENGTH)


def test_default_space(bar):
    problem = asked(4 << 20)
    candidates = search(problem, A800).candidates
    bar(
        "isp_search",
        lambda: search(problem, A800),
        passes,
        count=candidates,
        yardstick_count=PIECES * LENGTH,
    )


def test_command(quotient):
    whole = [sys.executable, "-m", "fastcomm", *COMMAND]
    imports = [sys.executable, "-c", "import numba"]
    quotient("isp_command", lambda: best_of_processes(whole, imports, rounds=3))
