"""The original's formulas: what it says a strategy costs, floors and slips included.

`/` is a real quotient; `//` floors exactly where the original does.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.cluster.cluster import Cluster
from fastcomm.isp.compat import CompatBlock, CompatRules
from fastcomm.isp.question import Question
from fastcomm.isp.tables import AttentionTable

Array = NDArray[Any]
Costs = dict[str, Any]

_INTRA = 150 * 2**30
_NODE = 100 * 2**30
_RANKS = 8
_BUCKET = 2**29
_FACTOR = {"gather": 1.0, "reduce": 2.0}


def _moved(volume: ArrayLike, n: ArrayLike, stride: ArrayLike, kind: str = "gather") -> Array:
    """Seconds of a ring or an all-to-all in a group of n ranks, `stride` apart."""
    n, stride = np.maximum(np.asarray(n, np.float64), 1), np.asarray(stride, np.float64)
    inside = (n <= _RANKS) & ((n - 1) * stride <= _RANKS - 1)
    slow = np.array([1, 1.1, 1.2, 1.3, 1.4, 1.5])[np.searchsorted([16, 32, 64, 256, 512], n)]
    bandwidth = np.where(inside, _INTRA, _NODE / slow)
    share = np.where(inside, 1, np.minimum(stride, _RANKS))
    if kind == "alltoall":
        beyond = 8 / n * (n - 8 / n)
        moved = np.where(n <= _RANKS, (n - 1) / n, beyond)
    else:
        moved = _FACTOR[kind] * (n - 1) / n
    return np.asarray(np.where(n > 1, moved * volume * share / bandwidth, 0.0))


def memory(block: CompatBlock, question: Question) -> Costs:
    """Bytes of a rank, by the original's names; `total_mm_cost` is the peak."""
    model, d, pp, sp = question.model, question.dtype_size, block.pp, block.sp
    seq, h, layers = question.seq_len, model.hidden, model.layers
    isp = block.algo == "isp"
    b, full = block.bsz, block.ck > 0
    head = (2 if pp == 1 else 1) * model.embedding / sp
    stage = layers // pp * model.layer_parameters
    weights = stage / block.wp + head if isp else stage / sp + head + 0 * block.zp
    halves = 1 if block.dp <= 1 else 2
    states = stage / (block.wp * block.zp) + head / halves if isp else weights / block.zp
    os, p_g = d * max(1, 4 // d) * 3 * states, 2.0 * d * weights
    unit = (d // 2) * b * seq * h
    kept = (4 + 106 / 3 / sp) if block.algo == "msp" else 118 / 3 / sp
    scores = 0 if question.flash else 5 * model.heads * seq / h / sp
    blocks = np.where(full, 0.0, layers * unit * (kept + scores))
    norm = 4.0 * b * seq * h // sp
    one = d * b * seq * h // sp
    head_input = 0.0 * one if block.algo == "msp" else 1.0 * one
    head_output = 1.0 * (d * b * seq * model.vocab // sp)
    saved = np.where(full, layers // pp * pp * one, 0.0)
    peak = 2.0 * d * seq * b * h + 2.0 * d * seq * b * h / sp + d * h * model.vocab / sp
    activation = blocks + norm + head_input + head_output + saved + peak
    pool = 4.0 * d * (4 * h**2 + 3 * h * model.ffn) if isp else 0.0
    rotary = 2.0 * d * (layers // pp) * seq * (h // model.heads) // 2
    buffer = 1.0 * d * (seq // sp) * b * h if pp > 1 else 0.0
    return {
        "total_mm_cost": np.maximum(
            p_g + os + activation + pool + rotary + buffer, p_g + os * 5 / 3
        ),
        "os_mm_cost": os,
        "p_g_mm_cost": p_g,
        "mem_pool_mm": pool,
        "rotary_emb_sincos_cache_mm": rotary,
        "pp_p2p_buffer": buffer,
        "activation": activation,
        "blocks_activation": blocks,
        "norm_activation": norm,
        "head_input_activation": head_input,
        "head_output_activation": head_output,
        "block_output_activation": saved,
        "backward_mem_peak": peak,
    }


def attention(block: CompatBlock, question: Question, cluster: Cluster) -> Array:
    """Seconds of a layer's attention, by the closed form."""
    local = question.model.hidden // block.sp
    forward = cluster.attention.forward(block.bsz, question.seq_len, local)
    backward = cluster.attention.backward(block.bsz, question.seq_len, local)
    return np.asarray((1 + block.ck) * forward + backward)


def measured_attention(
    block: CompatBlock, question: Question, table: AttentionTable
) -> tuple[Array, NDArray[np.bool_]]:
    """The same, looked up; and for which rows the table has an entry."""
    local = question.model.hidden // block.sp
    keys = [(int(b), question.seq_len, local) for b in block.bsz[:, 0]]
    found = [table.get(key, (np.nan, np.nan)) for key in keys]
    forward, backward = np.array(found, np.float64).T[:, :, None]
    return np.asarray((1 + block.ck) * forward + backward), np.isfinite(forward)


def times(
    block: CompatBlock,
    question: Question,
    rules: CompatRules,
    cluster: Cluster,
    comp_attn: Array,
) -> Costs:
    """Seconds of a step and its parts; tokens a GPU and second."""
    model, d, pp, sp, wp = question.model, question.dtype_size, block.pp, block.sp, block.wp
    seq, h, b, m, ck = question.seq_len, model.hidden, block.bsz, block.num, block.ck
    linear = sum(
        cluster.gemm.seconds(d * b * float(seq) * h * out / sp)
        for out in (3 * h, h, model.ffn, model.ffn, model.ffn)
    )
    comp_wp = (3 + ck) * linear
    isp = block.algo == "isp"
    weights = 4.0 * h * h + 3.0 * h * model.ffn
    comm_wp = 3 * _moved(d * weights, wp, 1) if isp else np.zeros(1)
    if isp:
        sp_comm = _moved(d * b * (seq / sp) * h, sp, 1, "alltoall") * (8 + 4 * ck)
    else:
        calls = (8 if block.algo == "msp" else 10) + 4 * ck
        sp_comm = _moved(d * b * float(seq) * h, sp, 1) * calls
    both = np.maximum(comp_wp, comm_wp) + question.penalty * np.minimum(comp_wp, comm_wp)
    overlap = np.where(wp > 1, both, comp_wp)
    layer = overlap + sp_comm + comp_attn
    most = -(-model.layers // pp)
    one = (model.layers if pp == 1 else most) * layer
    wdp, zp_cost = _synchronise(block, question, rules)
    piece = d * (seq // sp) * b * float(h)
    p2p = _p2p(block, piece) * (2 * np.minimum(pp, m) + m - 1)
    pipe = p2p + (pp - 1) * one if pp > 1 else 0.0 * one
    total = m * one + pipe + wdp + zp_cost
    tokens = b * m * seq * block.dp
    return {
        "tgs": tokens / (block.world * total),
        "total_latency": total,
        "fwd_bwd_cost": one,
        "all_fwd_bwd_cost": m * one,
        "overlap_latency": overlap,
        "comp_wp": comp_wp,
        "comp_attn": comp_attn,
        "pp_comm_cost": pipe,
        "zp_comm_cost": zp_cost,
        "wp_comm_cost": comm_wp,
        "sp_comm_cost": sp_comm,
        "wdp_comm_cost": wdp,
        "g_bsz": tokens,
    }


def _p2p(block: CompatBlock, volume: Array) -> Array:
    stride = block.world / block.pp
    inside = block.pp <= _RANKS and (block.pp - 1) * stride <= _RANKS - 1
    return volume / _INTRA if inside else volume * min(stride, _RANKS) / _NODE


def _synchronise(
    block: CompatBlock, question: Question, rules: CompatRules
) -> tuple[Array, Array]:
    """Seconds of the gradients' reduction, and of the parameters' broadcast."""
    model, d, sp, wp, zp, dp = (
        question.model,
        question.dtype_size,
        *(block.sp, block.wp, block.zp, block.dp),
    )
    head = (2 if block.pp == 1 else 1) * model.embedding / sp
    stage = model.layers // block.pp * model.layer_parameters
    if block.algo != "isp":
        elements = stage / sp + head
        wdp = _moved(d * elements, dp, sp, "reduce")
        wdp = 0 * wdp if rules.first and rules.overlap_wdp else wdp
        return wdp, zp * _moved(d * elements / zp, zp, sp)
    cut = stage / wp
    blocks, rest = (
        (cut % _BUCKET, head % _BUCKET) if rules.overlap_wdp else (cut, np.float64(head))
    )
    reduced = _moved(d * blocks, block.world // block.pp // wp, wp, "reduce")
    wdp = reduced + _moved(d * rest, dp, sp, "reduce")
    wdp = 0 * wdp if rules.first and rules.overlap_wdp else wdp
    sent = (1 if rules.first else 2) * _moved(d * head, dp, sp)
    return wdp, np.maximum(zp * _moved(d * cut / zp, zp, wp), sent)
