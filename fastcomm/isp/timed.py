"""What the calls of a trace tell of a GPU: products and attention, by their work."""

from collections import Counter
from typing import NamedTuple

from fastcomm.cluster.compute_fit import Attended, Product
from fastcomm.readers.kineto_shapes import Call

_HALF = ("c10::BFloat16", "c10::Half")
# Where an operator has its two factors.
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}


class _Attention(NamedTuple):
    backward: bool
    # Where the queries are, and whether it is causal; the place of the sequence in a shape.
    query: int
    causal: int
    sequence: int


_ATTENTION = {
    "aten::_flash_attention_forward": _Attention(False, 0, 8, 1),
    "aten::_flash_attention_backward": _Attention(True, 1, 11, 1),
    "aten::_scaled_dot_product_cudnn_attention": _Attention(False, 0, 6, 2),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Attention(True, 1, 14, 2),
    "flash_attn::_flash_attn_forward": _Attention(False, 0, 5, 1),
    "flash_attn::_flash_attn_backward": _Attention(True, 1, 11, 1),
}
NAMES = (*_PRODUCTS, *_ATTENTION)


class Timed(NamedTuple):
    """Timed work, and why calls were left out."""

    products: list[Product]
    attention: list[Attended]
    left_out: Counter[str]


def timed(calls: list[Call]) -> Timed:
    """The work of calls in half precision, which is what a curve is of."""
    found = Timed([], [], Counter())
    for call in calls:
        work = product(call) if call.name in _PRODUCTS else attention(call)
        if isinstance(work, str):
            found.left_out[work] += 1
        elif isinstance(work, Product):
            found.products.append(work)
        else:
            found.attention.append(work)
    return found


def product(call: Call) -> Product | str:
    """A product of two matrices, or of a batch of them."""
    first = _PRODUCTS[call.name]
    if len(call.dims) < first + 2 or not call.types[first : first + 1]:
        return "no shapes"
    if call.types[first] not in _HALF:
        return f"products of {call.types[first]}"
    left, right = call.dims[first : first + 2]
    if len(left) < 2 or len(left) != len(right) or left[-1] != right[-2]:  # noqa: PLR2004
        return "shapes that are no product"
    flops = 2.0 * right[-1]
    for each in left:
        flops *= each
    return Product(flops, call.seconds) if flops else "products of nothing"


def attention(call: Call) -> Attended | str:
    """Causal attention of whole sequences with themselves."""
    how = _ATTENTION[call.name]
    if len(call.dims) < how.query + 2 or len(call.types) <= how.query:
        return "no shapes"
    query, key = call.dims[how.query : how.query + 2]
    if len(query) != 4 or len(key) != 4:  # noqa: PLR2004 batch, sequence, heads, width
        return "attention of packed sequences"
    if call.types[how.query] not in _HALF:
        return f"attention of {call.types[how.query]}"
    if query[how.sequence] != key[how.sequence]:
        return "attention of two lengths"
    if call.values[how.causal : how.causal + 1] != ("True",):
        return "attention that is not causal, or does not say so"
    heads = query[3 - how.sequence]
    hidden = heads * query[3]
    return Attended(how.backward, query[0], query[how.sequence], hidden, call.seconds)
