"""Test that the original search is reproduced: its strategies and numbers."""

from dataclasses import replace

import numpy as np
import pytest
from builders.isp_golden import GOLDEN, ask, asked, golden_rows

from fastcomm.compat.isp import OriginalRules, search, search_strategies
from fastcomm.errors import ConfigError
from fastcomm.hardware import calibration
from fastcomm.hardware.clusters import load
from fastcomm.isp.problem import ALGOS, MicroBatchRule
from fastcomm.isp.result import FeasibleCells, Records
from fastcomm.isp.search import search as default_search

KEY = ("pp", "sp", "wp_size", "zp_size", "micro_bsz", "micro_num", "activation_ckpt")
A800 = load("a800")
S25 = OriginalRules(overlap_wdp=True)


def key(row):
    return row["algo_type"], *(int(float(row[name])) for name in KEY)


def keys(found):
    algos = [ALGOS[number] for number in found.columns["algo"]]
    return list(zip(algos, *(found.columns[name].tolist() for name in KEY), strict=True))


@pytest.fixture(scope="session")
def isp_tables(isp_data):
    return calibration.read_tables(isp_data, "a800")


@pytest.mark.parametrize("name", GOLDEN)
def test_strategies_and_numbers_equal_the_original(isp_data, isp_tables, name):
    found = search(*asked(name), A800, isp_tables)
    rows = golden_rows(isp_data, name)
    ranked = {each: place for place, each in enumerate(keys(found))}
    assert found.candidates == GOLDEN[name]
    assert ranked.keys() == {key(row) for row in rows}
    order = [ranked[key(row)] for row in rows]
    numbers = [column for column in rows[0] if column not in {"algo_type", *KEY}]
    assert len(numbers) == 26
    for column in numbers:
        mine = found.columns[column][order].tolist()
        assert mine == pytest.approx([float(row[column]) for row in rows], rel=1e-9), column


# Model, world, thousands of tokens: TGS, strategy, candidates, feasible; best of MSP and FSP.
RUNS = {
    (7, 64, 4): (5184.2, (1, 1, 1, 32, 2, 8, 0), 28202, 4216, 5080.5, 5080.5),
    (7, 64, 16): (3918.2, (1, 2, 1, 16, 1, 8, 0), 20154, 3265, 3781.8, 3738.2),
    (7, 64, 32): (3012.1, (1, 4, 1, 8, 1, 8, 0), 16130, 2616, 2748.6, 2678.0),
    (7, 64, 64): (2070.7, (1, 8, 1, 8, 1, 8, 0), 12106, 1933, 1767.3, 1701.9),
    (7, 64, 128): (1083.2, (1, 16, 1, 8, 1, 8, 0), 8082, 1265, 1009.9, 1006.5),
    (7, 64, 256): (645.2, (1, 32, 1, 16, 1, 8, 0), 5102, 370, 556.7, 553.7),
    (7, 128, 4): (5124.9, (1, 1, 1, 32, 2, 4, 0), 52026, 6241, 4905.2, 4905.2),
    (7, 128, 16): (3882.0, (1, 2, 1, 16, 1, 4, 0), 34930, 4584, 3699.0, 3659.6),
    (7, 128, 32): (2997.0, (1, 4, 1, 8, 1, 4, 0), 26382, 3506, 2710.3, 2642.9),
    (7, 128, 64): (2064.0, (1, 8, 1, 8, 1, 4, 0), 17834, 2370, 1751.2, 1689.9),
    (7, 128, 128): (1081.6, (1, 16, 1, 8, 1, 4, 0), 11418, 1443, 981.8, 972.5),
    (7, 128, 256): (644.4, (1, 32, 1, 16, 1, 4, 0), 6630, 436, 535.7, 529.3),
    (13, 64, 4): (2593.2, (1, 1, 64, 1, 2, 8, 0), 19218, 2745, 2520.6, 2520.6),
    (13, 64, 16): (2093.2, (1, 2, 8, 8, 1, 8, 0), 13070, 1896, 1913.1, 1944.8),
    (13, 64, 32): (1672.9, (1, 4, 8, 4, 1, 8, 0), 9996, 1424, 1431.0, 1528.2),
    (13, 64, 64): (1199.5, (1, 8, 8, 4, 1, 8, 0), 6922, 955, 981.1, 1011.9),
    (13, 64, 128): (627.3, (1, 2, 64, 1, 1, 1, 1), 3848, 521, 618.3, 616.2),
    (13, 64, 256): (356.6, (1, 4, 64, 1, 1, 1, 1), 1818, 168, 347.6, 345.5),
}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_reference_runs_are_reproduced_in_order(isp_tables, run):
    tgs, strategy, candidates, feasible, msp, fsp = RUNS[run]
    found = search(ask(run[0], run[1], run[2] * 1024), S25, A800, isp_tables)
    best = found.best_by_algo()
    assert (found.candidates, found.feasible) == (candidates, feasible)
    assert key(found.best(1)[0]) == ("isp", *strategy)
    rates = [round(best[algo]["tgs"], 1) for algo in ("isp", "msp", "fsp")]
    assert rates == [tgs, msp, fsp]


def test_1024_ranks_have_as_many_candidates_as_the_original(isp_tables):
    found = search(ask(7, 1024, 4096), S25, A800, isp_tables)
    assert (found.candidates, found.feasible) == (239526, 11270)
    assert found.candidates == found.feasible + sum(found.rejected.values())


def test_one_algorithm_alone_has_its_own_counts(isp_tables):
    alone = [
        search(replace(ask(7, 64, 4096), algos=(algo,)), S25, A800, isp_tables)
        for algo in ("isp", "msp", "fsp")
    ]
    assert sum(found.candidates for found in alone) == 28202
    assert sum(found.feasible for found in alone) == 4216
    for found in alone:
        assert found.candidates == found.feasible + sum(found.rejected.values())
    with pytest.raises(ConfigError, match="searches all of them"):
        search(replace(ask(7, 64, 4096), pp=(2,)), S25, A800)


def test_several_worlds_are_ranked_together(isp_tables):
    both = search(replace(ask(7, 64, 4096), world_sizes=(64, 128)), S25, A800, isp_tables)
    assert (both.candidates, both.feasible) == (28202 + 52026, 4216 + 6241)
    rates = {world: round(best["tgs"], 1) for world, best in both.best_by_world().items()}
    assert rates == {64: 5184.2, 128: 5124.9}


def test_without_tables_formulas_are_used_with_a_note():
    found = search(ask(7, 64, 4096), OriginalRules(variant="isp-2024"), A800)
    assert found.feasible > 3802
    assert "by formulas" in found.notes[0]


@pytest.mark.parametrize(
    ("problem", "rules", "words"),
    [
        (ask(0.25, 8, 4096), OriginalRules(variant="isp-2024"), "InternLM sizes"),
        (ask(7, 8, 4096, 3 << 20), OriginalRules(), None),
    ],
)
def test_searches_that_the_original_lacks_are_errors(problem, rules, words):
    if words is None:
        assert search(problem, rules, A800).candidates > 0
        return
    with pytest.raises(ConfigError, match=words):
        search(problem, rules, A800)


def test_a_fixed_pair_skips_the_batch(isp_tables):
    pair = MicroBatchRule(least=1, most=1 << 40, micro_bsz=1, micro_num=4)
    rules = OriginalRules(strict_batch=False)
    found = search(replace(ask(7, 64, 4096), batch=pair), rules, A800, isp_tables)
    assert set(found.columns["micro_num"]) == {4}
    assert len(set(found.columns["g_bsz"])) > 1
    with pytest.raises(ConfigError, match="batch is one number"):
        search(replace(ask(7, 64, 4096), batch=pair), S25, A800, isp_tables)


def test_a_table_with_a_hole_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "linear_x.csv"
    path.write_text("key_bytesxmacs,lat_s\n10,1\n20,zero\n")
    with pytest.raises(ConfigError, match="line 3"):
        calibration.read_gemm(path)
    path.write_text("key,lat_s\n10,1\n")
    with pytest.raises(ConfigError, match="missing column key_bytesxmacs"):
        calibration.read_gemm(path)
    with pytest.raises(ConfigError, match="No such file"):
        calibration.read_gemm(tmp_path / "absent.csv")


@pytest.mark.parametrize("seq_len", [4096, 65536])
def test_every_power_of_two_strategy_of_the_original_is_a_candidate(seq_len):
    asked = replace(ask(7, 16, seq_len, 1 << 20), memory=1e15)
    theirs, ours = search(asked, S25, A800), default_search(asked, A800)
    names = ("pp", "sp", "micro_bsz", "micro_num", "activation_ckpt")

    def rows(found, *shards):
        columns = [found.columns[name].tolist() for name in ("algo", *names)]
        zipped = zip(*columns, *(shard.tolist() for shard in shards), strict=True)
        # Without sequence shards, MSP and FSP are one strategy here.
        return {(min(algo, 1) if sp == 1 else algo, pp, sp, *o) for algo, pp, sp, *o in zipped}

    mine = rows(ours, *(ours.columns[f"p_{name}"] for name in ("para", "grads", "os")))
    wp, zp = theirs.columns["wp_size"], theirs.columns["zp_size"]
    wanted = rows(theirs, wp, wp, wp * zp)
    powers = {row for row in wanted if all(value & (value - 1) == 0 for value in row[1:3])}
    # The original also takes shards that divide the world, but not the ranks of a stage.
    fits = {
        row for row in powers if (16 // row[1] // (1 if row[0] == 0 else row[2])) % row[8] == 0
    }
    assert len(fits) > 500
    assert fits <= mine


def test_the_pareto_front_has_exactly_the_undominated_strategies(isp_tables):
    found = search(ask(7, 64, 65536), S25, A800, isp_tables)
    rate, memory = found.columns["tgs"], found.columns["total_mm_cost"]
    front = {(row["tgs"], row["total_mm_cost"]) for row in found.pareto()}
    pairs = set(zip(rate.tolist(), memory.tolist(), strict=True))
    wanted = {
        pair
        for pair in pairs
        if not (
            (rate >= pair[0]) & (memory <= pair[1]) & ((rate > pair[0]) | (memory < pair[1]))
        ).any()
    }
    assert wanted == front


def test_equal_rates_are_ranked_in_the_order_of_the_original():
    rates = {"tgs": np.array([[2.0, 1.0, 2.0]]), "order": np.array([[3, 1, 2]])}
    more = {"tgs": np.array([[2.0, 2.0]]), "order": np.array([[0, 4]])}
    parts = [
        FeasibleCells.of(part["tgs"].shape, part["tgs"] > 0, part) for part in (rates, more)
    ]
    assert Records.of(parts).ranking.tolist() == [3, 2, 0, 4, 1]


def test_python_and_command_line_give_equal_searches():
    words = {"model": "7B", "world_size": 8, "seq_len": 4096, "global_batch": 1 << 20}
    found = search_strategies(**words, compat="isp-2024")
    assert found.mode == "isp-2024"
    assert set(found.best_by_algo()) == {"isp", "msp", "fsp"}
    with pytest.raises(ConfigError, match="mtp: the original searches isp, msp and fsp"):
        search_strategies(**words, algorithms="mtp")
