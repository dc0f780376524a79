"""Test times of expert all-to-alls: by definition, and on shapes held out of the fit."""

from dataclasses import replace

import numpy as np
import pytest
from builders.shared_data import shared
from hypothesis import given
from hypothesis import strategies as st
from oracles import exchange as oracle

from docs import exchange_accuracy
from fastcomm.errors import ConfigError
from fastcomm.hardware.exchange_calibration import (
    MeasuredExchange,
    calibrated_costs,
    exchange_groups,
    fit_costs,
    read_exchanges,
    relative_errors,
    scaled_costs,
)
from fastcomm.hardware.expert_exchange import (
    FAMILIES,
    PHASES,
    ExchangeCosts,
    ExchangeShape,
    exchange_time,
    hit_share,
    phase_time,
    shipped_costs,
    shipped_ranges,
    token_bytes,
)
from fastcomm.hardware.gpus import gpus

SHAPE = ExchangeShape(tokens=4096, hidden=7168, topk=8, experts=256, ranks=8, domain=8)
NIC = 50e9
COST = st.floats(0.01, 100)


@pytest.fixture(scope="module")
def measurements():
    """The folder of measured tables."""
    return shared("hardware")


@given(st.data())
def test_the_share_of_hits_is_that_of_all_draws(data):
    total = data.draw(st.integers(1, 9))
    own, draws = (data.draw(st.integers(1, total)) for _ in range(2))
    assert float(hit_share(total, own, draws)) == pytest.approx(
        oracle.hit_share(total, own, draws)
    )


@pytest.mark.parametrize(("ranks", "domain"), [(4, 4), (6, 2), (6, 3), (12, 2)])
@pytest.mark.parametrize("topk", [1, 2, 4])
def test_a_token_goes_to_as_many_ranks_and_domains_as_on_average(ranks, domain, topk):
    shape = ExchangeShape(tokens=1, hidden=1, topk=topk, experts=12, ranks=ranks, domain=domain)
    assert float(shape.ranks_of_token()) == pytest.approx(oracle.distinct(12, ranks, topk))
    assert float(shape.domains_of_token()) == pytest.approx(
        oracle.distinct(12, ranks // domain, topk)
    )


def test_groups_bound_the_domains_of_a_token():
    shape = replace(SHAPE, ranks=64, groups=8, top_groups=4)
    assert 3.9 < float(shape.domains_of_token()) < 4
    # Of 8 groups in pairs on 4 nodes, 4 are chosen: 4 (1 - C(6, 4) / C(8, 4)) nodes have one.
    pairs = replace(SHAPE, ranks=32, groups=8, top_groups=4)
    assert float(pairs.domains_of_token()) == pytest.approx(4 * (1 - 15 / 70), rel=0.01)
    of_all = ExchangeShape(
        **{name: np.array([getattr(one, name) for one in (shape, pairs, SHAPE)])
           for name in ("tokens", "hidden", "topk", "experts", "ranks", "domain", "groups",
                        "top_groups")}
    )  # fmt: skip
    assert of_all.domains_of_token().tolist() == [
        float(one.domains_of_token()) for one in (shape, pairs, SHAPE)
    ]


CONSTANTS = (
    *("start_us", "doubling_us", "pass_ns", "fill_us", "token_ns", "far_rows"),
    *("token_byte_ns", "row_ns", "row_byte_ns", "nvlink_share", "nic_share"),
)


@given(
    st.fixed_dictionaries(dict.fromkeys(CONSTANTS, COST)),
    st.integers(1, 1 << 16),
    st.sampled_from([(8, 8), (16, 8), (64, 8), (8, 4)]),
    st.integers(1, 32),
)
def test_the_time_of_a_phase_is_its_formula(costs, tokens, place, sms):
    ranks, domain = place
    shape = replace(SHAPE, tokens=tokens, ranks=ranks, domain=domain, sms=sms)
    size, links = 14336.0, (450e9, 50e9)
    count = ranks / domain
    rows = float(shape.ranks_of_token())
    far = float(shape.domains_of_token()) * (1 - 1 / count)
    expected = oracle.phase_us(costs, (tokens, size, sms), (rows, far), (ranks, domain), links)
    time = phase_time(ExchangeCosts(**costs), "deepep", shape, size, links)
    assert float(time.seconds) == pytest.approx(expected * 1e-6, rel=1e-9)


def times(name, family, shape, **about):
    time = exchange_time(name, family, shape, nic=NIC, **about)
    return [float(each.total_s) for each in (time.dispatch, time.combine)]


@pytest.mark.parametrize("name", gpus())
@pytest.mark.parametrize("family", FAMILIES)
def test_more_work_never_takes_less_time(name, family):
    try:
        usual = times(name, family, SHAPE)
    except ConfigError:
        assert family == "trtllm" or (family, "inside") not in {
            (key[0], key[2]) for key in shipped_costs()
        }
        return
    for more in ({"tokens": 5000}, {"hidden": 8192}, {"fullest": 1.5}):
        assert all(np.array(times(name, family, replace(SHAPE, **more))) > usual)
    assert all(np.array(times(name, family, replace(SHAPE, sms=64))) <= usual)


def test_fp8_tokens_have_half_the_bytes_and_their_scales():
    assert float(token_bytes(7168, "bf16")) == 14336
    assert float(token_bytes(7168, "fp8")) == 7392
    fp8, bf16 = (times("h100", "deepep", SHAPE, precision=kind) for kind in ("fp8", "bf16"))
    assert fp8[0] < bf16[0]
    assert fp8[1] == bf16[1]


def test_ranks_wait_for_the_fullest():
    even, hot = (times("h100", "nccl", replace(SHAPE, fullest=share)) for share in (1.0, 2.0))
    start = shipped_costs()["nccl", "h100", "inside", "dispatch"].start_us * 1e-6
    assert hot[0] - start == pytest.approx(2 * (even[0] - start))


def test_a_nic_does_not_wait_for_tokens_that_a_node_receives_once():
    shape = replace(SHAPE, ranks=64, groups=8, top_groups=4)
    far = float(shape.domains_of_token()) * 7 / 8
    assert float(shape.busiest_far_copies(copies=False)) == pytest.approx(far)
    hot = replace(shape, fullest=14.9)
    assert float(hot.busiest_far_copies(copies=False)) == pytest.approx(7)  # other domains
    assert float(hot.busiest_far_copies(copies=True)) == pytest.approx(14.9 * 8 * 7 / 8)
    measured = replace(hot, busiest_nic=1.2)
    assert float(measured.busiest_far_copies(copies=False)) == pytest.approx(1.2 * far)


@pytest.mark.parametrize("name", gpus())
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"trtllm"}))
@pytest.mark.parametrize("tokens", [16, 4096])
@pytest.mark.parametrize("domain", [8, 64])
def test_crossing_domains_is_never_faster(name, family, tokens, domain):
    inside = replace(SHAPE, tokens=tokens, ranks=domain, domain=domain)
    try:
        before = times(name, family, inside)
    except ConfigError:
        assert name not in {"h100", "b200", "gb200"}
        return
    for ranks in (2 * domain, 4 * domain):
        after = times(name, family, replace(inside, ranks=ranks))
        assert all(np.array(after) >= before)
        before = after


def test_h200_has_the_constants_of_h100():
    time = exchange_time("h200", "deepep", SHAPE, nic=NIC)
    assert time.measured_on == "h100"


def test_kernels_without_measurements_are_errors():
    with pytest.raises(ConfigError, match="unknown kernel family 'mpi': expected deepep"):
        exchange_time("h100", "mpi", SHAPE, nic=NIC)
    with pytest.raises(
        ConfigError, match="trtllm: no measured constants across NVLink domains"
    ):
        exchange_time("gb200", "trtllm", replace(SHAPE, ranks=16), nic=NIC)


def planted(costs, phase):
    """Rows whose times are those of the constants, and their only group."""
    rows = [
        MeasuredExchange(
            family="deepep",
            gpu=None,
            precision="fp8",
            tokens=tokens,
            hidden=hidden,
            topk=topk,
            experts=256,
            ranks=8,
            nodes=1,
            sms=sms,
            seconds={},
            notify_s={},
        )
        for tokens in (1, 16, 256, 4096, 65536)
        for hidden in (2048, 7168)
        for topk in (2, 8)
        for sms in (4, 24)
    ]
    (group,) = exchange_groups(rows, "h100", 8, NIC)
    return group, group.time(costs, phase).seconds


@pytest.mark.parametrize("phase", PHASES)
def test_a_fit_recovers_planted_constants(phase):
    shipped = shipped_costs()["deepep", "h100", "inside", phase]
    costs = replace(shipped, start_us=50.0, row_byte_ns=0.06, nvlink_share=0.5)
    names = ("start_us", "row_byte_ns", "nvlink_share")
    fitted = fit_costs([planted(costs, phase)], phase, shipped, names)
    assert [getattr(fitted, name) for name in names] == pytest.approx(
        [getattr(costs, name) for name in names], rel=1e-3
    )


FITTED = (
    *("start_us", "pass_ns", "fill_us", "token_ns", "token_byte_ns"),
    *("row_ns", "row_byte_ns", "nvlink_share"),
)


@pytest.mark.parametrize("phase", PHASES)
def test_a_slower_machine_has_all_constants_scaled(phase):
    shipped = shipped_costs()["deepep", "h100", "inside", phase]
    group, seconds = planted(shipped, phase)
    fitted = calibrated_costs([(group, 1.2 * seconds)], phase, shipped, FITTED)
    assert group.time(fitted, phase).seconds == pytest.approx(1.2 * seconds)
    assert fitted.start_us == pytest.approx(1.2 * shipped.start_us)
    assert fitted.pass_ns == pytest.approx(1.2 * shipped.pass_ns)
    assert fitted.nvlink_share == pytest.approx(shipped.nvlink_share / 1.2)
    assert fitted.notify_share == shipped.notify_share


@pytest.mark.parametrize("phase", PHASES)
def test_a_constant_that_rows_determine_moves_by_itself(phase):
    shipped = shipped_costs()["deepep", "h100", "inside", phase]
    costs = replace(shipped, row_byte_ns=2 * shipped.row_byte_ns)
    group, seconds = planted(costs, phase)
    names = [name for name in FITTED if getattr(shipped, name)]
    fitted = calibrated_costs([(group, seconds)], phase, shipped, names)
    assert fitted.row_byte_ns == pytest.approx(costs.row_byte_ns, rel=0.15)
    off = np.abs(group.time(fitted, phase).seconds / seconds - 1)
    assert np.median(off) < 0.02


@given(st.integers(0, 10_000), st.floats(0.01, 2))
def test_a_fit_is_never_worse_than_scaled_constants(seed, spread):
    shipped = shipped_costs()["deepep", "h100", "inside", "combine"]
    group, seconds = planted(shipped, "combine")
    noise = np.exp(np.random.default_rng(seed).normal(0, spread, len(seconds)))
    parts = [(group, seconds * noise)]
    fitted = calibrated_costs(parts, "combine", shipped, FITTED)
    scaled = scaled_costs(shipped, float(np.median(noise)))
    off, other = (
        np.abs(relative_errors(parts, "combine", costs)) for costs in (fitted, scaled)
    )
    for share in (50, 90):
        assert np.percentile(off, share) <= np.percentile(other, share) + 1e-6


HEAD = "mode,nodes,ranks,hidden,topk,experts,tokens,sms,dispatch_us"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEAD}\n", "no rows"),
        ("mode,nodes\nnormal,1\n", "row 1: no tokens, hidden, topk, ranks"),
        (f"{HEAD}\nfast,1,8,7168,8,256,1,24,5\n", "row 1: unknown kernels; expected a column"),
        (f"{HEAD}\nnormal,1,8,7168,9,8,1,24,5\n", "row 1: topk is 9 of 8 experts"),
        (f"{HEAD}\nnormal,1,8,7168,8,256,0,24,5\n", "row 1: invalid tokens 0.0"),
        (f"{HEAD}\nnormal,1,8,7168,8,256,1.5,24,5\n", "invalid tokens 1.5: expected a whole"),
        (f"{HEAD}\nnormal,1,8,7168,8,256,1,24,-5\n", "row 1: invalid dispatch_us -5.0"),
        (f"{HEAD}\nnormal,1,8,7168,8,256,x,24,5\n", "row 1: tokens: could not convert"),
        (f"{HEAD}\nnormal,3,8,7168,8,256,1,24,5\n", "row 1: 8 ranks cannot be spread evenly"),
        (f"{HEAD}\nnormal,100,8,7168,8,256,1,24,5\n", "row 1: 8 ranks cannot be spread"),
        (f"{HEAD}\nnormal,1,8,7168,8,256,1,24,0\n", "row 1: invalid dispatch_us 0: expected"),
        (f"{HEAD}\nnormal,1,8,7168,8,256,1,24\n", "row 1: 8 values for 9 columns"),
        (f"{HEAD}\nnormal,1,8,7168,8,256,1,24,5,6\n", "row 1: 10 values for 9 columns"),
        (f"{HEAD},sms\nnormal,1,8,7168,8,256,1,24,5,24\n", "column sms is there twice"),
        (f"{HEAD[:-2]}ns\nnormal,1,8,7168,8,256,1,24,5\n", "dispatch_ns: expected times in us"),
        (f"dtype,{HEAD}\nfp4,normal,1,8,7168,8,256,1,24,5\n", "invalid dtype 'fp4'"),
    ],
)
def test_an_invalid_table_is_an_error_with_its_row(tmp_path, text, message):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_exchanges(path)


def test_published_bandwidths_become_times(tmp_path):
    path = tmp_path / "published.csv"
    path.write_text(
        "version,arch,kernel,ranks,nodes,tokens,hidden,topk,experts,phase,dtype,link,"
        "bandwidth_GBps,latency_us\n"
        "V1,H800,normal,16,2,4096,7168,8,256,combine,bf16,RDMA,43,\n"
        "V1,H800,low_latency,8,1,128,7168,8,,dispatch,fp8,RDMA,98,77\n"
    )
    normal, small = read_exchanges(path)
    nodes = oracle.distinct(16, 2, 8)  # about that of 256 experts
    assert normal.gpu == "h800"
    assert normal.seconds["combine"] == pytest.approx(4096 * nodes * 14336 / 43e9, rel=0.01)
    assert small.seconds == {"dispatch": pytest.approx(77e-6)}


def test_median_errors_on_shapes_held_out_are_within_their_bar(measurements):
    errors = list(exchange_accuracy.errors(measurements))
    assert len(errors) > 20
    for title, phase, off, is_held_out in errors:
        is_congested = title[1:2] == ("DeepEP V1, normal",) and title[-1] == "8"
        if not is_congested and is_held_out.any():
            assert np.median(np.abs(off[is_held_out])) < 0.12, (title, phase)


def test_published_bandwidths_are_within_a_tenth(measurements):
    rows = read_exchanges(measurements / "deepep_published.csv")
    for (family, name, scope), groups in exchange_accuracy.groups_of(rows, "h800"):
        for group in groups:
            own = {
                phase: exchange_accuracy.shipped_of((family, name, scope), phase)
                for phase in PHASES
            }
            for phase, costs in own.items():
                measured = np.array([rows[n].seconds.get(phase, np.nan) for n in group.places])
                off = measured / group.time(costs, phase).seconds - 1
                assert np.nanmax(np.abs(off), initial=0.0) < 0.1


def test_published_times_are_within_a_tenth_but_for_one():
    errors = {}
    for name, rows in exchange_accuracy.table_rows().items():
        for (family, _, scope), groups in exchange_accuracy.groups_of(rows, name):
            for phase in PHASES:
                costs = exchange_accuracy.shipped_of((family, name, scope), phase)
                for group in groups:
                    times = group.time(costs, phase).seconds
                    for place, seconds in zip(group.places, times, strict=True):
                        off = seconds / rows[place].seconds[phase] - 1
                        errors[family, name, rows[place].ranks, phase] = off
    assert len(errors) == 32
    outside = {key for key, off in errors.items() if abs(off) >= 0.1}
    assert outside == {("nccl", "gb200", 64, "dispatch")}


def test_the_measured_ranges_are_those_of_the_tables(measurements):
    assert exchange_accuracy.ranges_of(measurements) == shipped_ranges()


def test_nodes_of_a_rack_with_nvlink_are_one_domain(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(f"{HEAD}\nnormal,2,8,7168,8,256,1,24,\nnormal,1,128,7168,8,256,1,24,\n")
    rows = read_exchanges(path)
    rack = exchange_groups(rows, "gb200", 72, NIC)
    assert [group.scope for group in rack] == ["inside", "across"]
    assert [group.scope for group in exchange_groups(rows, "h100", 8, NIC)] == ["across"]


def test_the_page_of_measured_exchanges_is_current(measurements):
    page = exchange_accuracy.page(measurements)
    assert exchange_accuracy.PAGE.read_text("utf-8") == page
