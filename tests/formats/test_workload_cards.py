"""Test workload cards: reading, warnings and errors."""

import pytest

from fastcomm.errors import ConfigError
from fastcomm.formats.config import Config
from fastcomm.formats.workload_cards import FRAMEWORKS, find_card, read_card
from fastcomm.trace.rank_grid import ORDERS, Parallel

CARD = """
version: 1
description: >
  A made-up run.
workload:
  model: {phase: training, moe: true, iteration: 20}
  hardware:
    network_topo:
      topology: slingshot
      bandwidth_gbps:
        - 200
        - 2400
    xpu_spec: {type: GPU, model: nvidia_a100, total_count: 32, count_per_node: 4}
Model-executor:
  framework:
    name: torchtitan
  model_plan_parallelization:
    dp_replicate: 2
    dp_shard: 4
    tp: 2
    pp: 2
    cp: 1
    ep: 4
    pp_mb: 8
metric_source:
  traces: [json]
"""


@pytest.fixture
def card(tmp_path):
    def write(text):
        path = tmp_path / "card.yaml"
        path.write_text(text)
        return path

    return write


def plan(words, name="megatron"):
    framework = f"framework: {{name: {name}}}"
    return f"Model-executor: {{{framework}, model_plan_parallelization: {{{words}}}}}"


def test_a_full_card_is_read(card):
    found = read_card(card(CARD))
    parallel = Parallel(tp=2, pp=2, cp=1, ep=4, dp=8, dp_replicate=2, framework="torchtitan")
    assert found.config == Config(parallel=parallel, scale_out=25e9, scale_up=300e9)
    assert (found.total_count, found.warnings) == (32, ())
    grid = found.config.parallel.grid(32)
    assert grid is not None
    assert (grid.world, grid.order) == (32, ORDERS["torchtitan"])


@pytest.mark.parametrize("text", ["{}", "workload:", "Model-executor:\n  framework:", "a: 1"])
def test_all_keys_may_be_missing(card, text):
    found = read_card(card(text))
    assert found.config == Config()
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("words", "dp"),
    [
        ("dp_shard: 4", 4),
        ("dp_replicate: 4", 4),
        ("dp_replicate: 2, dp_shard: -1", None),
        ("dp: 8", 8),
        ("dp: null, tp: null", None),
        ("tp: 2", None),
    ],
)
def test_the_data_parallel_size_is_the_product_of_the_given_sizes(card, words, dp):
    assert read_card(card(plan(words))).config.parallel.dp == dp


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("Megatron-LM", "megatron"),
        ("NeMo", "megatron"),
        ("DeepSpeed", "deepspeed"),
        ("torchtitan", "torchtitan"),
        ("vllm-0.19.0", "vllm"),
        ("sglang", "vllm"),
    ],
)
def test_the_framework_chooses_the_order(card, name, framework):
    found = read_card(card(plan("tp: 2", name)))
    assert found.config.parallel.framework == framework
    assert found.warnings == ()


def test_frameworks_have_an_order():
    assert set(FRAMEWORKS.values()) <= set(ORDERS)


def test_serving_splits_experts_over_tensor_ranks(card):
    grid = read_card(card(plan("tp: 4, ep: 4, dp_shard: 1", "vllm"))).config.parallel.grid(4)
    assert grid is not None
    assert (grid.etp, list(grid.groups("ep"))) == (1, [(0, 1, 2, 3)])


def test_contradictory_sizes_of_a_card_are_a_warning(card):
    path = card(
        "workload: {hardware: {xpu_spec: {total_count: 8},"
        " network_topo: {bandwidth_gbps: 2}}}\n" + plan("tp: 2, dp_shard: 2", "torchrun")
    )
    found = read_card(path)
    assert found.config.parallel == Parallel(tp=2, dp=2)
    framework, total, bandwidth = found.warnings
    assert "framework 'torchrun' is not one of" in framework
    assert "total_count is 8, but dp 2 * tp 2 * pp 1 * cp 1 is 4" in total
    assert "bandwidth_gbps is not two numbers" in bandwidth
    assert all(str(path) in warning for warning in found.warnings)


@pytest.mark.parametrize(
    "speeds", ["[1]", "[1, 2, 3]", "[a, 2]", "[.nan, 2]", "[true, 2]", "[0, 1]"]
)
def test_bandwidths_that_are_not_rates_are_ignored(card, speeds):
    found = read_card(
        card(f"workload: {{hardware: {{network_topo: {{bandwidth_gbps: {speeds}}}}}}}")
    )
    assert (found.config.scale_out, found.config.scale_up) == (None, None)
    assert len(found.warnings) == 1


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
MERGES = "m0: &m0 {x: 1}\n" + "".join(
    f"m{level}: &m{level} {{<<: [{', '.join([f'*m{level - 1}'] * 9)}]}}\n"
    for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid card None: expected a mapping"),
        ("- 1\n- 2", "invalid card .*: expected a mapping"),
        ("just words", "expected a mapping"),
        (
            plan("tp: two"),
            "model_plan_parallelization: invalid tp 'two': expected a whole number",
        ),
        (plan("tp: '4'"), "invalid tp '4': expected a whole number"),
        (plan("tp: 0"), "invalid tp 0"),
        (plan("tp: [1, 2]"), "invalid tp"),
        (plan("dp_shard: -2"), "invalid dp_shard -2"),
        ("Model-executor: 3", "invalid Model-executor 3: expected a mapping"),
        ("Model-executor: {framework: vllm}", "invalid framework 'vllm': expected a mapping"),
        ("workload: {hardware: {xpu_spec: {total_count: many}}}", "invalid total_count 'many'"),
        ("a: [1", "not YAML"),
        ("a: 2024-99-99", "not YAML"),
        ("a: !!timestamp x", "not YAML"),
        ("a: !!float ''", "not YAML"),
        ("a: !!bool x", "not YAML"),
        ("a: !!int x", "not YAML"),
        ("a: !!python/object/apply:os.getcwd []", "not YAML"),
        ("a: " + "[" * 500_000, "or 32 levels"),
        ("? [a]\n: 1", "not YAML|wanted a mapping"),
        (BOMB, "more than 16 YAML aliases"),
        (MERGES, "more than 16 YAML aliases"),
        ("x" * (1 << 20) + "x", "larger than"),
        ("a: \x00", "not YAML"),
    ],
)
def test_an_invalid_card_is_an_error_with_path_and_key(card, text, message):
    path = card(text)
    with pytest.raises(ConfigError, match=message) as raised:
        read_card(path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < len(str(path)) + 400


def test_a_few_aliases_are_fine(card):
    assert read_card(card("a: &n 2\n" + plan("tp: *n"))).config.parallel.tp == 2


def test_the_card_of_a_directory_has_its_name_or_is_the_only_one(tmp_path):
    run = tmp_path / "run-1"
    run.mkdir()
    assert find_card(run) is None
    (run / "other.yaml").write_text("{}")
    assert find_card(run) == run / "other.yaml"
    (run / "third.yaml").write_text("{}")
    assert find_card(run) is None
    (run / "run-1.yaml").write_text("{}")
    assert find_card(run) == run / "run-1.yaml"
