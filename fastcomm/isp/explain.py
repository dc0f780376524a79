"""One strategy's numbers, term by term: what a step is made of, and what fills a GPU."""

from dataclasses import dataclass

from fastcomm.isp.question import Question
from fastcomm.isp.result import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A part of a sum; `level` 0 is a sum, 1 its parts."""

    name: str
    value: float
    words: str
    level: int = 1


def time_terms(record: Record, question: Question) -> list[Term]:
    """Seconds of a step; the parts of level 1 add up to the whole."""
    layers = -(-question.model.layers // record["pp"])
    num = record["micro_num"]
    each = f"{num} micro-batches x {layers} layers"

    def layer(name: str, words: str, field: str) -> Term:
        return Term(name=name, value=num * layers * record[field], words=f"{each}: {words}")

    hidden = record["comp_wp"] + record["wp_comm_cost"] - record["overlap_latency"]
    exposed = record["overlap_latency"] - record["comp_wp"]
    terms = [
        layer("products", "GEMM forward and backward", "comp_wp"),
        layer("attention", "attention forward and backward", "comp_attn"),
        Term(
            name="weights exposed",
            value=num * layers * exposed,
            words=f"{each}: gathers and reductions of {_ms(record['wp_comm_cost'])}, "
            f"{_ms(max(0.0, hidden))} of it hidden",
        ),
        layer("sequence", _SEQUENCE[record["algo_type"]], "sp_comm_cost"),
    ]
    if "elementwise" in record:
        terms.append(layer("element-wise", "norms, activations, residuals", "elementwise"))
        terms.append(
            Term(
                name="head",
                value=num * record["head"],
                words=f"{num} micro-batches: the vocabulary, on the last stage",
            )
        )
    return [
        Term(name="step", value=record["total_latency"], words=_rate(record), level=0),
        *terms,
        *_once(record),
    ]


def _once(record: Record) -> list[Term]:
    pp, num = record["pp"], record["micro_num"]
    transfers = 2 * (num + pp - 1) if pp > 1 else 0
    if "bubble" not in record:
        names = {
            "pp_comm_cost": "bubble and transfers",
            "wdp_comm_cost": "reduction of gradients",
            "zp_comm_cost": "broadcast of parameters",
        }
        return [Term(name=n, value=record[n], words=words) for n, words in names.items()]
    return [
        Term(name="bubble", value=record["bubble"], words=f"{pp - 1} other stages"),
        Term(name="p2p", value=record["p2p"], words=f"{transfers} transfers"),
        Term(
            name="gradients",
            value=record["grad_sync"],
            words=f"reduced once a step, sharded by {record['p_grads']}",
        ),
        Term(
            name="parameters",
            value=record["param_sync"],
            words=f"sent once a step to {record['p_os'] // record['p_para']} shards",
        ),
        Term(
            name="optimizer",
            value=record["optimizer"],
            words=f"states sharded by {record['p_os']}",
        ),
    ]


_SEQUENCE = {
    "isp": "all-to-alls around attention",
    "msp": "gathers and scatters of activations",
    "fsp": "gathers and scatters of activations, twice more backward",
    "mtp": "all-reduces of activations",
}

_MEMORY = {
    "p_g_mm_cost": "parameters and gradients",
    "os_mm_cost": "optimizer states",
    "blocks_activation": "activations of the layers",
    "block_output_activation": "checkpoints",
    "norm_activation": "last norm",
    "head_input_activation": "input of the head",
    "head_output_activation": "logits",
    "backward_mem_peak": "backward of the head",
    "mem_pool_mm": "gathered weights",
    "rotary_emb_sincos_cache_mm": "rotary tables",
    "pp_p2p_buffer": "pipeline buffer",
}


def memory_terms(record: Record) -> list[Term]:
    """Bytes of the fullest rank while the last micro-batch runs; the step may need more."""
    parts = [Term(name=words, value=record[name], words="") for name, words in _MEMORY.items()]
    whole = Term(name="memory", value=record["total_mm_cost"], words=_moment(record), level=0)
    return [whole, *(part for part in parts if part.value)]


def _moment(record: Record) -> str:
    if "step_peak" not in record:
        return ""
    moment = "the optimizer's step" if is_step(record) else "forward and backward"
    return f"stage {int(record['stage'])} of {record['pp']}, {moment}; 1.5 GB are the context"


def is_step(record: Record) -> bool:
    """Whether the optimizer's step needs more than forward and backward do."""
    return bool(record.get("step_peak", 0) >= record["total_mm_cost"])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms a layer"


def _rate(record: Record) -> str:
    return f"{record['g_bsz']} tokens, {record['tgs']:.1f} tokens/GPU/s"
