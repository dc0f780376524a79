"""FLOPs of operators by their definitions: every multiplication and addition is counted.

Slow, and without fastcomm. Shapes are lists of lengths.
"""

import json
from itertools import product
from math import prod

# Innermost ranges whose FLOPs are known, by name: arguments, and whether they are matrices.
PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::matmul": (0, 1),
}


def matrix_product(left, right):
    """The FLOPs of left @ right, by each element of the output."""
    batch = broadcast(left[:-2], right[:-2])
    flops = 0
    for _ in product(*map(range, batch)):
        for _row, _column in product(range(left[-2]), range(right[-1])):
            for _inner in range(left[-1]):
                flops += 2
    return flops


def broadcast(first, second):
    """The common shape of two."""
    size = max(len(first), len(second))
    first, second = ([1] * (size - len(shape)) + list(shape) for shape in (first, second))
    return [max(a, b) if 0 not in (a, b) else 0 for a, b in zip(first, second, strict=True)]


def attention(batch, heads, queries, keys, width, value_width, mask):
    """The FLOPs of QK and PV, by each pair of a query and a key that counts.

    A pair on the diagonal counts half, so that a square mask leaves half of all pairs. The
    last query sees the last key, and queries before the first key see none; with the `mask`
    "first", the first query sees the first key.
    """
    pairs, ahead = 0.0, 0 if mask == "first" else keys - queries
    for query, key in product(range(queries), range(keys)):
        place = query + ahead  # of the query among the keys
        if not mask or key < place:
            pairs += 1
        elif key == place:
            pairs += 0.5
    return batch * heads * pairs * (2 * width + 2 * value_width)


def attention_backward(batch, heads, queries, keys, width, value_width, mask):
    """Gradients of V and P, then of Q and K; the scores QK are computed again."""
    scores = attention(batch, heads, queries, keys, width, 0, mask)
    values = attention(batch, heads, queries, keys, 0, value_width, mask)
    return 3 * scores + 2 * values


def convolution(x, weight, stride, padding, dilation):
    """The FLOPs of a convolution: for every output, every weight of its filter."""
    outputs = [
        len(
            [
                start
                for start in range(-pad, length + pad)
                if (start + pad) % step == 0 and start + reach * (size - 1) < length + pad
            ]
        )
        for length, size, step, pad, reach in zip(
            x[2:], weight[2:], stride, padding, dilation, strict=True
        )
    ]
    flops = 0
    for _ in product(range(x[0]), range(weight[0]), *map(range, outputs)):
        flops += 2 * prod(weight[1:])
    return flops, [x[0], weight[0], *outputs]


def of_trace(document):
    """FLOPs of matrix products of a Kineto document by the kernels that they launched.

    A dictionary: name of the operator and its shapes -> sum of the FLOPs of operators that
    launched at least one kernel.
    """
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    kernels = {e["args"]["correlation"] for e in events if e.get("cat") == "kernel"}
    calls = [
        e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and e["args"].get("correlation") in kernels
    ]
    operators = [
        e
        for e in events
        if e.get("cat") == "cpu_op" and e["name"] in PRODUCTS and "Input Dims" in e["args"]
    ]
    chosen = {}
    for call in calls:
        around = [
            e
            for e in operators
            if e["tid"] == call["tid"]
            and e["ts"] <= call["ts"]
            and call["ts"] + call["dur"] <= e["ts"] + e["dur"]
        ]
        if around:
            inner = max(around, key=lambda e: e["ts"])
            chosen[id(inner)] = inner
    found = {}
    for operator in chosen.values():
        dims = operator["args"]["Input Dims"]
        left, right = (dims[place] for place in PRODUCTS[operator["name"]])
        key = operator["name"], json.dumps(dims)
        batch = prod(broadcast(left[:-2], right[:-2]))
        flops = 2 * batch * left[-2] * left[-1] * right[-1]
        if operator["name"] == "aten::addmm":
            flops += left[-2] * right[-1]  # the addition of the bias
        found[key] = found.get(key, 0) + flops
    return found
