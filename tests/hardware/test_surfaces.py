"""Test measured hardware: surfaces against their definition, and errors on shapes held out."""

import tomllib

import numpy as np
import pytest
from builders.shared_data import shared
from hypothesis import given
from hypothesis import strategies as st
from oracles.surfaces import seconds

from docs import hardware_accuracy
from fastcomm.errors import ConfigError
from fastcomm.hardware.clusters import load, load_node
from fastcomm.hardware.gpus import Surface, gpu, gpu_sheet, gpus

SIZE = st.floats(1, 1e6)
AXES = ((1.0, 4.0, 100.0), (2.0, 50.0), (1.0, 10.0, 1000.0, 1e4))


@pytest.fixture(scope="module")
def measurements():
    """The folder of measured tables."""
    return shared("hardware")


@given(st.integers(0, 2**32 - 1), st.tuples(SIZE, SIZE, SIZE))
def test_a_surface_is_linear_between_its_knots_in_logarithms(seed, sizes):
    logs = np.random.default_rng(seed).normal(size=[len(axis) for axis in AXES])
    growth = (1.0, 2.0, 0.0)
    surface = Surface(axes=AXES, logs=logs.ravel(), growth=growth)
    assert float(surface.seconds(*sizes)) == pytest.approx(
        seconds(AXES, logs.tolist(), sizes, growth), rel=1e-9
    )


def test_a_surface_takes_arrays():
    surface = gpu("h100").gemm["bf16"]
    m = np.array([128.0, 4096.0])
    times = surface.seconds(m, 4096, 8192)
    assert times.tolist() == [float(surface.seconds(each, 4096, 8192)) for each in m]


@given(
    st.sampled_from(gpus()),
    st.lists(st.floats(1, 1e5), min_size=3, max_size=3),
    st.integers(0, 2),
    st.floats(1, 8),
)
def test_a_larger_gemm_never_takes_less_time(name, sizes, axis, factor):
    larger = [size * (factor if k == axis else 1) for k, size in enumerate(sizes)]
    for recipe in gpu(name).gemm:
        less, more = (float(gpu(name).matmul(recipe, *each)) for each in (sizes, larger))
        assert less <= more * (1 + 1e-3)  # times in files have four digits


@pytest.mark.parametrize("name", gpus())
def test_no_gemm_exceeds_the_peak(name):
    chip = gpu(name)
    for recipe in chip.gemm:
        peak = chip.peaks["bf16" if recipe == "bf16" else "fp8"]
        for size in (1024, 4096, 8192, 16384):
            assert 2 * size**3 / float(chip.matmul(recipe, size, size, size)) < peak


SEQ = st.integers(10, 22).map(lambda power: 2.0**power)


@given(st.sampled_from(gpus()), SEQ, st.floats(1, 1e4), st.floats(0.05, 1), st.floats(1, 8))
def test_attention_beyond_its_measurements_keeps_its_rate(name, seq, heads, share, factor):
    chip = gpu(name)
    kernel = chip.attention_kernel
    kv = max(1.0, heads * share)
    short, long = (float(chip.flash(kernel, 128, s, heads, kv)) for s in (seq, seq * factor))
    assert 2 * seq**2 * heads * 128 / short <= chip.peaks["bf16"] * (1 + 1e-9)
    if seq >= 2**15:
        assert long == pytest.approx(short * factor**2, rel=1e-9)


LARGE = st.floats(2**9, 2**40)


@given(st.sampled_from(gpus()), st.integers(2, 72), LARGE, st.floats(1, 8))
def test_no_collective_exceeds_its_links(name, ranks, size, factor):
    chip = gpu(name)
    for op in chip.collectives:
        time = float(chip.inside(op, size, ranks))
        sent = 1 if op == "all_reduce" else (ranks - 1) / ranks
        assert sent * size / time <= chip.nvlink * (1 + 1e-9)
        if size >= 2**30:
            more = float(chip.inside(op, size * factor, ranks))
            assert more == pytest.approx(time * factor, rel=1e-9)


@given(
    st.sampled_from(gpus()),
    st.floats(1, 1e8),
    st.integers(1, 1024),
    st.floats(2**16, 2**30),
)
def test_no_layer_of_experts_exceeds_the_peak(name, copies, experts, weights):
    chip = gpu(name)
    for recipe in chip.experts:
        peak = chip.peaks["bf16" if recipe.startswith("bf16") else "fp8"]
        time = float(chip.grouped(recipe, copies, experts, weights, copies))
        assert 6 * copies * weights / time <= peak * (1 + 1e-9)


@pytest.mark.parametrize("name", gpus())
def test_larger_groups_and_messages_take_longer(name):
    chip = gpu(name)
    for op in chip.collectives:
        times = [float(chip.inside(op, 2**28, ranks)) for ranks in (1, 2, 4, 8, 16, 72)]
        assert times[0] == 0
        assert times[3] <= times[4] <= times[5]
        sizes = [float(chip.inside(op, size, 4)) for size in (2**9, 2**16, 2**22, 2**28)]
        assert sizes == sorted(sizes)


def test_a_gpu_without_measurements_says_so():
    assert {name for name in gpus() if gpu(name).derived} == {
        *("a100-40", "b300", "gb300", "h200", "h800")
    }
    slow, fast = (float(gpu(n).inside("all_gather", 2**28, 8)) for n in ("h800", "h100"))
    assert slow / fast == pytest.approx(450 / 200, rel=0.02)


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ConfigError, match="unknown GPU 'v100': expected one of a100, "):
        gpu("v100")


@pytest.mark.parametrize("name", gpus())
def test_the_name_of_a_gpu_is_that_of_its_usual_cluster_in_every_command(name):
    cluster = load(name)
    assert (cluster.gpu, cluster.name) == (name, gpu(name).name)
    assert (cluster.peak, cluster.hbm) == (gpu(name).peaks["bf16"], gpu(name).hbm)
    node, links = load_node(name.upper())
    assert (node, links.intra) == (cluster.gpus_per_node, cluster.bw_intra)
    assert links.inter * node == cluster.bw_node


@pytest.mark.parametrize("name", gpus())
def test_links_of_a_cluster_and_curves_of_its_gpu_are_those_of_its_surfaces(name):
    cluster = load(name)
    bandwidth, start = hardware_accuracy.links(gpu(name))
    assert cluster.bw_intra == pytest.approx(bandwidth, rel=0.01)
    assert cluster.alpha_intra == pytest.approx(start, abs=0.51e-6)
    assert (
        gpu_sheet(name)["curves"]
        == tomllib.loads(hardware_accuracy.curves(gpu(name)))["curves"]
    )


def test_a_cluster_takes_from_its_gpu_what_its_file_lacks(tmp_path):
    path = tmp_path / "mine.toml"
    links = 'gpus_per_node = 4\nbw_intra = "300GB/s"\nbw_node = "100GB/s"\n'
    links += "contention = [[16, 1.0]]\n"
    links += "alpha_us = { intra = 10, inter = 90, rank = 1, from = 16 }\n"
    path.write_text(f'gpu = "h100"\nmemory = "96GiB"\n{links}')
    mine, usual = load(path), load("h100")
    assert (mine.memory, mine.gpus_per_node) == (96 * 2**30, 4)
    assert (mine.name, mine.gemm, mine.hbm) == (usual.name, usual.gemm, usual.hbm)
    path.write_text(f'gpu = "v100"\n{links}')
    with pytest.raises(ConfigError, match=r"mine.toml: unknown GPU 'v100': expected one of"):
        load(path)


def test_median_errors_on_shapes_held_out_are_within_their_bars(measurements):
    bars = {"gemm": 0.10, "attention": 0.15, "experts": 0.15, "collectives": 0.15}
    errors = hardware_accuracy.errors(measurements)
    assert len(errors) == 16
    for (kind, name), parts in errors.items():
        least = {"gemm": 1e9, "collectives": 65536}.get(kind, 0)
        off = np.concatenate([np.abs(each[work >= least]) for work, each in parts])
        assert np.median(off) < bars[kind], (kind, name)


def test_the_page_of_measured_hardware_is_current(measurements):
    assert hardware_accuracy.PAGE.read_text("utf-8") == hardware_accuracy.page(measurements)
