"""Bytes of a rank: the fullest stage, at the fuller of two moments, and what fills it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.isp.block import FULL, NONE, Block
from fastcomm.isp.compute import Stage
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
    for place, layers in _stages(block.pp, question.model.layers):
        terms = _stage(block, question, place, layers)
        if found is None:
            found = terms
            continue
        more = terms["total_mm_cost"] > found["total_mm_cost"]
        found = {name: np.where(more, terms[name], found[name]) for name in terms}
    assert found is not None  # there is a first stage
    return found


def _stages(pp: int, layers: int) -> list[tuple[int, int]]:
    """Place and layers of the stages that can be fullest: first, first of the long, last."""
    least, longer = divmod(layers, pp)
    places = {0, pp - longer if longer else 0, pp - 1}
    return [(place, least + int(place >= pp - longer)) for place in sorted(places)]


def _stage(block: Block, question: Question, place: int, layers: int) -> Bytes:
    pp, d = block.pp, question.dtype_size
    last = place == pp - 1
    stage = Stage.of(block, question, layers, int(place == 0) + int(last))
    states = stage.blocks / block.os + stage.rest / min(2, block.dp)
    weights = d * (stage.blocks / block.para + stage.rest)
    grads = d * (stage.blocks / block.grads + stage.rest)
    kept = _activations(block, question, np.minimum(block.num, pp - place), layers)
    kept |= _last(block, question) if last else dict.fromkeys(_LAST, 0.0)
    activation = sum((np.asarray(each) for each in kept.values()), np.float64(0))
    others = _buffers(block, question, layers)
    fixed = weights + grads + 12 * states
    peak = fixed + TRANSIENT * states
    buffers = sum((np.asarray(each) for each in others.values()), np.float64(0))
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


def _activations(block: Block, question: Question, flying: Array, layers: int) -> Bytes:
    d, seq, model = question.dtype_size, question.seq_len, question.model
    unit = d / 2 * block.bsz * seq * model.hidden
    if question.interleave > 1 and block.pp > 1:
        flying = flying * (1 + (block.pp - 1) / (block.pp * question.interleave))
    scores = 5 * model.heads * seq / (model.hidden * block.sp)
    held = np.where(block.ck == NONE, scores, 0.0) if not question.flash else 0.0
    layer = unit * (block.kept(question) + held)
    live = unit * (block.kept(question) + (0.0 if question.flash else scores))
    full = block.ck == FULL
    inputs = d * block.bsz * seq * model.hidden / block.whole
    return {
        "blocks_activation": np.where(full, live, flying * layers * layer),
        "block_output_activation": np.where(full, flying * layers * inputs, 0.0),
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
    weights = sum(elements * count for elements, count in model.matrices)
    piece = d * block.bsz * question.seq_len * model.hidden / block.whole
    heads = model.hidden // model.heads
    return {
        "mem_pool_mm": np.where(block.para > 1, 4 * d * weights / block.tp, 0.0),
        "rotary_emb_sincos_cache_mm": 2.0 * d * layers * question.seq_len * heads / 2,
        "pp_p2p_buffer": piece if block.pp > 1 else 0.0,
    }
