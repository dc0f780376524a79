"""Counting, drawing, FAST's schedule, and a whole workload of 2.6 M tokens."""

import numba
import numpy as np
import pytest

from fastcomm.dispatch import schedules
from fastcomm.dispatch.placement import place
from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.routing import alias_table, folded_zipf
from fastcomm.dispatch.simulation import simulate
from fastcomm.dispatch.workload import Workload
from fastcomm.hardware.clusters import Cost
from fastcomm_kernels import dispatch

TOKENS = 1 << 18
PYTHON_TOKENS = 1 << 11


def a_layer(nodes, each, topk):
    """A layer of `TOKENS` tokens, in its GPUs' order."""
    recipe = Recipe.of(
        num_nodes=nodes,
        experts_per_gpu=each,
        topk=topk,
        seq_len=TOKENS,
        batch_size=1,
        iter_num=1,
        law="uniform",
    )
    return next(Workload.of(recipe).layers())


def counted(layer):
    """Copies by expert, and sets of nodes: the matrices M and P."""
    copies = np.zeros((layer.gpus, len(layer.home)), np.int32)
    sets = np.zeros((layer.gpus, 1 << layer.nodes), np.int32)
    bit = (1 << (layer.home // layer.width)).astype(np.int32)

    def run():
        dispatch.copies(layer.src, layer.expert, copies)
        dispatch.distinct_few(layer.src, layer.expert, bit, sets)

    return run


def in_python(layer):
    """The definition of the same two matrices, on the first tokens."""
    rows = list(
        zip(
            layer.src[:PYTHON_TOKENS].tolist(),
            layer.expert[:PYTHON_TOKENS].tolist(),
            strict=True,
        )
    )
    home = layer.home.tolist()

    def run():
        copies = [[0] * layer.gpus for _ in range(layer.gpus)]
        nodes = [[0] * layer.nodes for _ in range(layer.gpus)]
        for s, experts in rows:
            targets = [home[e] for e in experts]
            for t in targets:
                copies[s][t] += 1
            for n in {t // layer.width for t in targets}:
                nodes[s][n] += 1

    return run


@pytest.mark.parametrize(
    ("name", "nodes", "each", "topk"),
    [("dispatch_count_4x8", 4, 2, 4), ("dispatch_count_8x8", 8, 4, 8)],
)
def test_counting(bar, name, nodes, each, topk):
    layer = a_layer(nodes, each, topk)
    bar(
        name,
        counted(layer),
        in_python(layer),
        count=TOKENS,
        yardstick_count=PYTHON_TOKENS,
    )


def test_drawing(bar):
    """Top 4 of 64 experts; the yardstick is NumPy's own Zipf numbers, repeats and all."""
    law = folded_zipf(1.2, 64)
    threshold, alias = alias_table(law, np.int16)
    out = np.empty((TOKENS, 4), np.int16)
    random = np.random.default_rng(0)
    few = TOKENS // 8
    key = np.uint64(7)
    bar(
        "dispatch_draw",
        lambda: dispatch.routed(0, key, threshold, alias, True, out),
        lambda: random.zipf(1.2, (few, 4)),
        count=TOKENS,
        yardstick_count=few,
    )


@numba.njit
def packed(loads, gpus):
    """The GPU of each expert, the heaviest first on the lightest: the plain loop, compiled."""
    place = np.empty(loads.shape, np.int64)
    for layer in range(len(loads)):
        weight = np.zeros(gpus)
        for expert in np.argsort(-loads[layer]):
            lightest = 0
            for gpu in range(1, gpus):
                if weight[gpu] < weight[lightest]:
                    lightest = gpu
            weight[lightest] += loads[layer, expert]
            place[layer, expert] = lightest
    return place


LOADS = np.random.default_rng(42).lognormal(0, 1, (58, 256))  # DeepSeek-V3


@pytest.mark.parametrize(("name", "nodes"), [("fast_64", 8), ("fast_320", 40)])
def test_the_schedule_of_fast(bar, name, nodes):
    """Everything: balance, stages, redistribution, times."""
    size = nodes * 8
    demand = np.random.default_rng(42).integers(0, 10_000, (size, size))
    inter, intra = Cost(start_s=0.7e-6, unit_s=84e-9), Cost(start_s=0.1e-6, unit_s=2.3e-9)
    bar(
        name,
        lambda: schedules.schedule(demand, 8, inter, intra),
        lambda: packed(LOADS, 32),
        count=1,
        yardstick_count=len(LOADS),
    )


@pytest.mark.parametrize(("name", "gpus"), [("placement", 32), ("placement_144", 144)])
def test_the_placement_of_all_layers(bar, name, gpus):
    """58 layers of 256 experts and 32 more; packed, then swapped."""
    bar(
        name,
        lambda: [place(load, 288, 1, gpus // 8, gpus) for load in LOADS],
        lambda: packed(LOADS, 32),
        count=len(LOADS),
    )


def test_a_whole_workload(bar):
    """Draw 2.6 M tokens and time DeepEP and FAST on them."""
    recipe = Recipe.of(seq_len=1 << 18, batch_size=10, iter_num=1)
    random, few = np.random.default_rng(42), TOKENS // 8
    bar(
        "dispatch_whole",
        lambda: simulate(Workload.of(recipe), ["deepep", "fast"]),
        lambda: random.zipf(1.2, (few, 4)),
        count=recipe.tokens,
        yardstick_count=few,
    )
