"""Test the default strategy search against the definition, and its properties."""

from dataclasses import replace

import numpy as np
import pytest
from builders.examples import fewer
from builders.isp_cases import A800, ALGOS, block_of, cases, ours, problem
from hypothesis import given
from hypothesis import strategies as st
from oracles import isp as oracle

from fastcomm.errors import ConfigError
from fastcomm.isp.layer import cluster_collective
from fastcomm.isp.price import evaluate
from fastcomm.isp.problem import MicroBatchRule
from fastcomm.isp.search import search
from fastcomm.isp.space import StrategyGrid
from fastcomm.units import format_s

CHECKED = (
    "total_latency",
    "tgs",
    "total_mm_cost",
    "grad_sync",
    "param_sync",
    "optimizer",
    "p2p",
)
CHECKED += ("comp_wp", "comp_attn", "wp_comm_cost", "sp_comm_cost", "head", "elementwise")


def same(found, wanted, names):
    assert {name: found[name] for name in names} == pytest.approx(
        {name: wanted[name] for name in names}, rel=1e-9
    )


@given(cases())
def test_the_cost_of_a_strategy_agrees_with_the_definition(made):
    model, case, flash = made
    found = evaluate(block_of(case), problem(ours(model), case[2], flash=flash), A800)
    same(found, oracle.step(oracle.A800, model, *case, flash=flash), CHECKED)


@given(cases(sparse=True), st.sampled_from([1.0, 1.3]), st.booleans(), st.booleans())
def test_the_cost_of_an_expert_strategy_agrees_with_the_definition(
    made, imbalance, nodes, hide
):
    model, case, flash = made
    options = {"flash": flash, "imbalance": imbalance}
    dispatch = "nodes" if nodes else "copies"
    asked = problem(ours(model), case[2], **options, dispatch=dispatch, overlap_experts=hide)
    found = evaluate(block_of(case), asked, A800)
    wanted = oracle.step(oracle.A800, model, *case, **options, nodes=nodes, hide=hide)
    same(found, wanted, (*CHECKED, "ep_comm_cost"))


@given(cases())
def test_a_stage_may_send_shares_of_what_mtp_repeats(made):
    model, case, flash = made
    asked = problem(ours(model), case[2], flash=flash, p2p="scatter")
    wanted = oracle.step(oracle.A800, model, *case, flash=flash, scatter=True)
    same(evaluate(block_of(case), asked, A800), wanted, CHECKED)


SMALL = {
    "dense": oracle.model(1024, 8, 6),
    "experts": oracle.model(1024, 8, 6, experts=(6, 2, 512, 0, 1, 0)),
}


@pytest.mark.parametrize(("world", "name"), [(4, "dense"), (12, "dense"), (6, "experts")])
def test_the_search_finds_every_feasible_strategy_ordered_by_throughput(world, name):
    model = SMALL[name]
    tokens = 24 * 2048
    found = search(
        problem(
            ours(model), 2048, world, MicroBatchRule(least=tokens, most=tokens), memory=12e9
        ),
        A800,
    )
    wanted = {}
    for case in oracle.strategies(model, world, 2048, tokens):
        cost = oracle.step(oracle.A800, model, *case)
        if cost["total_mm_cost"] <= 12e9:
            wanted[case] = cost["tgs"]
    rows = [
        (
            *(row[name] for name in ("algo_type", "world_size", "seq_len", "pp", "sp")),
            *(row[name] for name in ("micro_bsz", "micro_num", "activation_ckpt")),
            (row["p_para"], row["p_grads"], row["p_os"]),
            *(row[name] for name in ("ep", "interleave")),
        )
        for row in found.best(found.feasible)
    ]
    assert set(rows) == set(wanted)
    assert len(rows) == len(wanted) > 100
    assert [wanted[row] for row in rows] == pytest.approx(found.columns["tgs"].tolist())
    assert np.all(np.diff(found.columns["tgs"]) <= 0)
    best, figures = found.record(0), found.figures()
    assert figures["best"].startswith(f"{best['algo_type'].upper()} (pp {best['pp']}, ")
    assert figures["step"] == format_s(best["total_latency"])
    assert found.candidates == found.feasible + sum(found.rejected.values())


@given(cases(), st.sampled_from(["bw_intra", "bw_node", "hbm"]), st.floats(1.01, 8))
def test_more_bandwidth_is_never_slower(made, link, times):
    model, case, flash = made
    asked = problem(ours(model), case[2], flash=flash)
    faster = replace(A800, **{link: getattr(A800, link) * times})
    before = evaluate(block_of(case), asked, A800)["total_latency"]
    assert evaluate(block_of(case), asked, faster)["total_latency"] <= before * (1 + 1e-12)


@given(cases(), st.floats(1.01, 8))
def test_a_longer_start_is_never_faster(made, times):
    model, case, flash = made
    asked = problem(ours(model), case[2], flash=flash)
    later = replace(
        A800, alpha_intra=A800.alpha_intra * times, alpha_inter=A800.alpha_inter * times
    )
    before = evaluate(block_of(case), asked, A800)["total_latency"]
    assert evaluate(block_of(case), asked, later)["total_latency"] >= before * (1 - 1e-12)


@given(cases())
def test_memory_never_grows_with_the_shards_of_gradients_and_states(made):
    model, case, flash = made
    asked = problem(ours(model), case[2], flash=flash)
    *rest, (para, grads, os), ep, stages = case
    used = [
        evaluate(block_of((*rest, (para, g, o), ep, stages)), asked, A800)["total_mm_cost"]
        for g in (para, grads)
        for o in (g, os)
    ]
    assert used[0] >= used[1] >= used[3]
    assert used[0] >= used[2] >= used[3]


@given(cases())
def test_checkpoints_never_take_more_memory_where_two_layers_are_in_flight(made):
    model, (*rest, _, shards, ep, _), flash = made
    asked = problem(ours(model), rest[2], flash=flash)
    with_it, without = (
        evaluate(block_of((*rest, ck, shards, ep, 1)), asked, A800) for ck in (1, 0)
    )
    # In flight on the stage that is fullest: on the last one it is a single micro-batch.
    pp, place = rest[3], int(with_it["stage"])
    layers = model["L"] // pp + (place >= pp - model["L"] % pp)
    if layers * min(rest[6], pp - place) < 2 or rest[0] == "mtp":
        return
    assert with_it["total_mm_cost"] <= without["total_mm_cost"]


@given(st.sampled_from(ALGOS), st.integers(1, 4), st.sampled_from([1024, 32768]))
def test_one_gpu_does_not_communicate(algo, bsz, seq_len):
    found = evaluate(
        StrategyGrid.one(world=1, algo=algo, bsz=bsz), problem(seq_len=seq_len), A800
    )
    names = ("wp_comm_cost", "sp_comm_cost", "grad_sync", "param_sync", "p2p", "bubble")
    assert {name: found[name] for name in names} == dict.fromkeys(names, 0)


def test_without_a_sequence_shard_all_algorithms_have_one_layer_time():
    times = {
        evaluate(StrategyGrid.one(world=8, algo=algo, num=2), problem(), A800)["fwd_bwd_cost"]
        for algo in ("isp", "msp", "fsp")
    }
    assert len(times) == 1


def test_without_a_start_mtp_communicates_as_long_as_msp():
    bare = replace(A800, alpha_intra=0.0, alpha_inter=0.0, alpha_rank=0.0)
    mtp, msp = (
        evaluate(StrategyGrid.one(world=64, algo=algo, sp=16), problem(world=64), bare)[
            "sp_comm_cost"
        ]
        for algo in ("mtp", "msp")
    )
    assert mtp == pytest.approx(msp)


@fewer(2)
@given(st.integers(26, 76), st.integers(26, 76))
def test_a_larger_limit_never_lowers_the_best_rate(one, two):
    least, most = sorted((one, two))
    batch = MicroBatchRule(least=1 << 20, most=1 << 20)
    small, large = (
        search(problem(world=8, batch=batch, memory=limit * 2**30), A800)
        for limit in (least, most)
    )
    if small.feasible:
        assert large.best(1)[0]["tgs"] >= small.best(1)[0]["tgs"]
    assert set(small.columns) <= set(large.columns) or not small.feasible


@given(st.sampled_from([2, 8, 16, 512]), st.floats(1e3, 1e10), st.floats(1, 1.5))
def test_a_larger_message_is_never_faster(ranks, volume, times):
    for op in ("all_gather", "all_reduce", "all_to_all", "broadcast"):
        pair = cluster_collective(A800, op, [volume, volume * times], ranks, 1)
        assert pair[0] <= pair[1]


@pytest.mark.parametrize("knot", A800.gemm.flops)
def test_cost_is_continuous_across_the_knots_of_a_curve(knot):
    around = A800.gemm.seconds([knot * (1 - 1e-9), knot, knot * (1 + 1e-9)])
    assert np.ptp(around) < 1e-6 * around[1]


def test_invalid_values_are_errors_that_suggest_valid_ones():
    with pytest.raises(ConfigError, match="nearest smaller degree is 32"):
        problem(sp=(48,)).check()
    with pytest.raises(ConfigError, match="try 4096 or 8192"):
        problem(batch=MicroBatchRule(least=5000, most=5000)).check()
    with pytest.raises(ConfigError, match="above the maximum"):
        problem(batch=MicroBatchRule(least=2, most=1)).check()
    with pytest.raises(ConfigError, match="32 layers"):
        problem(pp=(64,)).check()
    with pytest.raises(ConfigError, match=r"unknown algorithm .xsp.: expected isp"):
        problem(algos=("xsp",)).check()
