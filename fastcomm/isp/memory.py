"""Bytes of a rank: the fullest stage, at the fuller of two moments, and what fills it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.isp.block import FULL, NONE, Block, Stage, experts_of, places
from fastcomm.isp.question import Question

Array = NDArray[Any]
Bytes = dict[str, Any]

# CUDA context, NCCL buffers, the allocator's waste.
CONTEXT = 1.5e9
# Bytes a parameter that the step needs for a moment: an fp32 gradient, flat buffers.
TRANSIENT = 16


def memory(block: Block, question: Question) -> Bytes:
    """The terms of the fullest stage; `total_mm_cost` is what has to fit."""
    found: Bytes | None = None
    for place in places(block.pp, question.model):
        terms = _stage(block, question, place)
        if found is None:
            found = terms
            continue
        more = terms["total_mm_cost"] > found["total_mm_cost"]
        found = {name: np.where(more, terms[name], found[name]) for name in terms}
    assert found is not None  # there is a first stage
    return found


def _stage(block: Block, question: Question, place: int) -> Bytes:
    pp, d = block.pp, question.dtype_size
    last = place == pp - 1
    counts = question.model.counts(place, pp)
    stage = Stage.of(block, question, counts, int(place == 0) + int(last))
    states = stage.states(block)
    weights = d * (sum(each.elements / each.para for each in stage.pieces) + stage.rest)
    grads = d * (sum(each.elements / each.grads for each in stage.pieces) + stage.rest)
    kept = _activations(block, question, np.minimum(block.num, pp - place), counts)
    kept |= _last(block, question) if last else dict.fromkeys(_LAST, 0.0)
    others = _buffers(block, question, sum(counts))
    activation, buffers = (
        sum((np.asarray(each) for each in terms.values()), np.float64(0))
        for terms in (kept, others)
    )
    fixed = weights + grads + 12 * states
    peak = fixed + TRANSIENT * states
    return {
        "total_mm_cost": CONTEXT + np.maximum(fixed + activation + buffers, peak),
        "os_mm_cost": 12 * states,
        "p_g_mm_cost": weights + grads,
        "step_peak": CONTEXT + peak,
        "activation": activation,
        "stage": np.float64(place),
        **kept,
        **others,
    }


def _activations(
    block: Block, question: Question, flying: Array, counts: tuple[int, ...]
) -> Bytes:
    d, seq, model = question.dtype_size, question.seq_len, question.model
    unit = d / 2 * block.bsz * seq * model.hidden
    virtual = block.pp * block.interleave
    flying = np.where(
        block.interleave > np.int64(1), flying * (1 + (block.pp - 1) / virtual), flying
    )
    scores = 0.0 if question.flash else 5 * model.heads * seq / (model.hidden * block.sp)
    held = np.where(block.ck == NONE, scores, 0.0)
    kinds = [
        (count, block.kept(question, kind))
        for count, kind in zip(counts, model.kinds, strict=True)
        if count
    ]
    full = block.ck == FULL
    live = unit * (max(kept for _, kept in kinds) + scores)
    inputs = d * block.bsz * seq * model.hidden / block.whole
    layers = sum(flying * count * (unit * (kept + held)) for count, kept in kinds)
    return {
        "blocks_activation": np.where(full, live, layers),
        "block_output_activation": np.where(full, flying * sum(counts) * inputs, 0.0),
    }


_LAST = (
    *("norm_activation", "head_input_activation", "head_output_activation"),
    "backward_mem_peak",
)


def _last(block: Block, question: Question) -> Bytes:
    model, d, sp = question.model, question.dtype_size, block.sp
    tokens = 1.0 * block.bsz * question.seq_len
    return {
        "norm_activation": 4 * tokens * model.hidden / block.whole,
        "head_input_activation": d * tokens * model.hidden / block.whole,
        "head_output_activation": (d + 4) * tokens * model.vocab / sp,
        "backward_mem_peak": 2 * d * tokens * model.hidden * (1 + 1 / sp)
        + d * model.embedding / sp,
    }


def _buffers(block: Block, question: Question, layers: int) -> Bytes:
    model, d = question.model, question.dtype_size
    kind = model.kinds[0]
    weights = sum(elements * count for elements, count in kind.matrices)
    pool = np.where(block.para > 1, 4 * d * weights / block.tp, 0.0)
    if kind.experts:
        routed = 4 * d * model.expert_parameters / block.ep
        pool = pool + np.where(experts_of(block, routed).para > 1, routed, 0.0)
    piece = d * block.bsz * question.seq_len * model.hidden / block.whole
    return {
        "mem_pool_mm": pool,
        "rotary_emb_sincos_cache_mm": 2.0 * d * layers * question.seq_len * model.rotary / 2,
        "pp_p2p_buffer": piece if block.pp > 1 else 0.0,
    }
