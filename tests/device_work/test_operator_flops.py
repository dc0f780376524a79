"""FLOPs and bytes of operators beside their definitions."""

import json
from contextlib import suppress
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import flops as oracle

from fastcomm.device_work.formulas import RULES, Inputs, UnknownCostError, cost

BF16, FP32 = "c10::BFloat16", "float"


def counted(name, shapes, values=None, dtype=BF16, types=None):
    """The cost of an operator; inputs without a shape are no tensors."""
    types = types or [dtype if shape else "Scalar" for shape in shapes]
    texts = None if values is None else json.dumps(values)
    return cost(name, Inputs.of(json.dumps(shapes), json.dumps(types), texts))


LENGTH = st.integers(1, 5)


@given(LENGTH, LENGTH, LENGTH, LENGTH)
def test_flops_of_products_are_counted_one_by_one(b, m, n, k_):
    assert counted("aten::mm", [[m, k_], [k_, n]]).flops == oracle.matrix_product(
        [m, k_], [k_, n]
    )
    whole = oracle.matrix_product([b, m, k_], [b, k_, n])
    assert counted("aten::bmm", [[b, m, k_], [b, k_, n]]).flops == whole
    assert counted("aten::matmul", [[b, m, k_], [k_, n]]).flops == whole
    added = counted("aten::addmm", [[n], [m, k_], [k_, n], [], []])
    assert added.flops == oracle.matrix_product([m, k_], [k_, n]) + m * n
    layer = counted("aten::linear", [[b, m, k_], [n, k_], []])
    assert layer.flops == whole
    assert counted("aten::linear", [[b, m, k_], [n, k_], [n]]).flops == whole + b * m * n
    assert counted("aten::baddbmm", [[b, m, n], [b, m, k_], [b, k_, n]]).flops == (
        whole + b * m * n
    )


@given(LENGTH, LENGTH, LENGTH, LENGTH)
def test_a_grouped_product_has_the_flops_of_all_rows(groups, m, n, k_):
    rows = groups * m
    whole = oracle.matrix_product([rows, k_], [k_, n])
    shapes = [[rows, k_], [groups, k_, n], [groups]]
    assert counted("aten::_grouped_mm", shapes, types=[BF16, BF16, "int"]).flops == whole
    shapes = [[n, rows], [rows, k_], [groups]]
    gradient = counted("aten::_grouped_mm", shapes, types=[BF16, BF16, "int"])
    assert gradient.flops == oracle.matrix_product([n, rows], [rows, k_])
    # Reads both, and writes a matrix for each group.
    assert gradient.bytes == 2 * (n * rows + rows * k_ + groups * n * k_)


@given(LENGTH, LENGTH, LENGTH, LENGTH, LENGTH, LENGTH, st.booleans())
def test_flops_of_attention_are_counted_pair_by_pair(b, group, heads, s, keys, d, causal):
    keys = s + keys if causal else keys
    sizes = (b, heads * group, s, keys, d, d, causal)
    q, kv = [b, heads * group, s, d], [b, heads, keys, d]  # heads of keys are shared
    values = ["", "", "", "0.", str(causal), "False", ""]
    found = counted(
        "aten::_scaled_dot_product_flash_attention", [q, kv, kv, [], [], [], []], values
    )
    assert found.flops == pytest.approx(oracle.attention(*sizes))
    assert found.bytes == 2 * (2 * prod(q) + 2 * prod(kv))
    swapped = [[shape[0], shape[2], shape[1], shape[3]] for shape in (q, q, kv, kv)]
    backward = counted(
        "flash_attn::_flash_attn_backward",
        [*swapped, *[[]] * 8],
        [*[""] * 11, str(causal)],
    )
    assert backward.flops == pytest.approx(oracle.attention_backward(*sizes))
    assert backward.model_flops == pytest.approx(2 * oracle.attention(*sizes))


@given(LENGTH, LENGTH, LENGTH, LENGTH, LENGTH, st.sampled_from(["", "0", "1", "2"]))
def test_a_mask_of_efficient_attention_starts_at_the_first_or_the_last_key(
    b, heads, s, keys, d, mask
):
    sizes = (b, heads, s, keys, d, d, {"1": "first", "2": "last"}.get(mask))
    q, kv = [b, s, heads, d], [b, keys, heads, d]
    forward = counted(
        "aten::_efficient_attention_forward", [q, kv, kv, *[[]] * 7], [*[""] * 9, mask]
    )
    backward = counted(
        "aten::_efficient_attention_backward", [q, q, kv, kv, *[[]] * 11], [*[""] * 14, mask]
    )
    expected = oracle.attention(*sizes)
    assert (forward.flops, backward.model_flops) == (expected, 2 * expected)
    assert backward.flops == oracle.attention_backward(*sizes)


def test_a_causal_mask_leaves_half():
    shapes = [[16, 16, 559, 64]] * 3
    whole, half = (
        counted(
            "aten::_scaled_dot_product_flash_attention",
            [*shapes, [], [], [], []],
            ["", "", "", "0.", str(causal), "False", ""],
        ).flops
        for causal in (False, True)
    )
    assert 2 * half == whole == 4 * 16 * 16 * 559 * 559 * 64


def test_packed_sequences_are_the_longest_and_others_of_equal_length():
    shapes = [[12, 2, 8], [12, 2, 8], [12, 2, 8], [3], [3], [], [], [], [], []]
    types = [BF16] * 3 + ["int"] * 2 + ["Scalar"] * 5
    values = ["", "", "", "", "", "8", "8", "0.", "0.1", "True"]
    found = counted("flash_attn::_flash_attn_varlen_forward", shapes, values, types=types)
    expected = oracle.attention(1, 2, 8, 8, 8, 8, True) + oracle.attention(
        1, 2, 4, 4, 8, 8, True
    )
    assert found.flops == expected


@given(
    LENGTH,
    LENGTH,
    LENGTH,
    st.lists(st.tuples(st.integers(3, 9), st.integers(1, 3)), min_size=1, max_size=2),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 2),
)
def test_flops_of_convolutions_are_counted_output_by_output(
    batch, inputs, outputs, spatial, stride, padding, dilation
):
    x = [batch, inputs, *(length for length, _ in spatial)]
    weight = [outputs, inputs, *(size for _, size in spatial)]
    count = len(spatial)
    arguments = [[value] * count for value in (stride, padding, dilation)]
    if any(size + (dilation - 1) * (size - 1) > length for length, size in spatial):
        return
    flops, out = oracle.convolution(x, weight, *arguments)
    values = ["", "", "", *map(str, arguments), "False", str([0] * count), "1"]
    found = counted("aten::convolution", [x, weight, *[[]] * 7], values)
    assert found.flops == flops
    assert found.bytes == 2 * (prod(x) + prod(weight) + prod(out))
    for mask, share in (("[True, True, False]", 2), ("[False, True, False]", 1)):
        texts = ["", "", "", "[0]", *map(str, arguments), "False", "[0, 0]", "1", mask]
        backward = counted("aten::convolution_backward", [out, x, weight, *[[]] * 8], texts)
        assert backward.flops == share * flops


def test_a_transposed_convolution_spreads_each_input():
    values = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "True", "[0, 0]", "1"]
    found = counted("aten::convolution", [[1, 3, 4, 4], [3, 5, 2, 2], *[[]] * 7], values)
    assert found.flops == 2 * (3 * 4 * 4) * (5 * 2 * 2)


def test_bytes_of_elementwise_operators_are_inputs_and_output():
    found = counted("aten::add", [[4, 1], [3], []], dtype=FP32)
    assert (found.flops, found.bytes) == (12, 4 * (4 + 3 + 12))
    copy = counted("aten::copy_", [[4], [4], []], types=[BF16, FP32, "Scalar"])
    assert (copy.flops, copy.bytes) == (0, 4 * 2 + 4 * 4)
    norm = counted("aten::native_layer_norm", [[8, 4], [], [4], [4], []], dtype=FP32)
    assert norm.bytes == 4 * (2 * 32 + 8)


HUGE = 1 << 40


ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


SHAPES = st.lists(st.lists(st.integers(-2, 1 << 45), max_size=5), max_size=16)


TYPES = st.lists(st.sampled_from([BF16, FP32, "Scalar", "TensorList", ""]), max_size=16)


VALUES = st.lists(st.sampled_from(["", "True", "[1, 1]", "[0]", "-1", "9" * 400]), max_size=16)


@given(st.sampled_from(sorted(RULES)), st.data())
def test_any_inputs_have_a_cost_or_a_reason(name, data):
    parts = [
        data.draw(st.one_of(likely, ANY, st.text(max_size=9)))
        for likely in (SHAPES, TYPES, VALUES)
    ]
    texts = [part if isinstance(part, str) else json.dumps(part) for part in parts]
    with suppress(UnknownCostError):
        found = cost(name, Inputs.of(*texts))
        assert 0 <= found.flops <= 1 << 62
        assert 0 <= found.bytes <= 1 << 62


@pytest.mark.parametrize(
    ("name", "shapes", "types", "values", "reason"),
    [
        ("aten::mm", "[[1, 2], [3, 4]]", '["float", "float"]', "[]", "do not fit"),
        ("aten::mm", "[[], []]", '["float", "float"]', "[]", "not recorded"),
        ("FlashAttnFunc", "[[], [], []]", '["float", "float", "float"]', "[]", "not recorded"),
        ("aten::mm", "[[1, -2], [2, 4]]", '["float", "float"]', "[]", "no tensor"),
        ("aten::mm", "[[1, 2]]", '["float", "float"]', "[]", "damaged"),
        ("aten::mm", "[" * 9999, '["float"]', "[]", "damaged"),
        ("aten::mm", "[[1, 1e3], [2, 4]]", '["float", "float"]', "[]", "no tensor"),
        ("aten::mm", f"[[{'9' * 9000}, 2], [2, 4]]", '["float", "float"]', "[]", "damaged"),
        ("aten::mm", "[[true, 2], [2, 4]]", '["float", "float"]', "[]", "no tensor"),
        ("aten::mm", "[[1, 2], [2, 4]]", '["float", "odd"]', "[]", "no tensor"),
        ("aten::mm", f"[[{HUGE}, {HUGE}], [{HUGE}, 1]]", '["float", "float"]', "[]", "more"),
        ("aten::nothing", "[]", "[]", "[]", "no formula"),
        ("aten::convolution", "[[1, 1, 4], [1, 1, 2]]", '["float", "float"]', None, "PyTorch"),
    ],
)  # fmt: skip
def test_damaged_inputs_have_a_reason(name, shapes, types, values, reason):
    with pytest.raises(UnknownCostError, match=reason):
        cost(name, Inputs.of(shapes, types, values))
