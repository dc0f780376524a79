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
    num = record["micro_num"]
    layers, plain = _slowest(record, question)
    each = f"{num} micro-batches x {layers} layers"

    def layer(name: str, words: str, seconds: float) -> Term:
        return Term(name=name, value=num * layers * seconds, words=f"{each}: {words}")

    terms = [
        layer("products", "GEMM forward and backward", record["comp_wp"]),
        layer("attention", "attention forward and backward", record["comp_attn"]),
        layer("weights exposed", _gathers(record), _shown(record)),
        layer("sequence", _SEQUENCE[record["algo_type"]], record["sp_comm_cost"]),
    ]
    if "ep_comm_cost" in record:
        terms.append(layer("experts exposed", _exchange(record), record["ep_exposed"]))
    if "elementwise" in record:
        words = "norms, activations, residuals"
        terms.append(layer("element-wise", words, record["elementwise"]))
        terms += _ends(record, plain)
    return [
        Term(name="step", value=record["total_latency"], words=_rate(record), level=0),
        *terms,
        *_once(record),
    ]


def _slowest(record: Record, question: Question) -> tuple[int, int]:
    """Layers of the slowest stage: the usual ones, and those without experts."""
    pp = record["pp"]
    counts = question.model.counts(record.get("slowest_stage", pp - 1), pp)
    return counts[0], sum(counts[1:])


def _shown(record: Record) -> float:
    return float(record["overlap_latency"] - record["comp_wp"])


def _gathers(record: Record) -> str:
    hidden = max(0.0, record["wp_comm_cost"] - _shown(record))
    return (
        f"gathers and reductions of {_ms(record['wp_comm_cost'])}, {_ms(hidden)} of it hidden"
    )


def _exchange(record: Record) -> str:
    return f"all-to-alls of {_ms(record['ep_comm_cost'])} over {record['ep']} ranks"


def _ends(record: Record, plain: int) -> list[Term]:
    """What a stage has beside its usual layers."""
    num = record["micro_num"]
    words = f"{num} micro-batches: the vocabulary, on the last stage"
    last = record.get("slowest_stage", record["pp"] - 1) == record["pp"] - 1
    found = [Term(name="head", value=num * record["head"] * last, words=words)]
    if "dense_layer" in record:
        words = f"{num} micro-batches x {plain} layers without experts"
        value = num * plain * record["dense_layer"]
        found.append(Term(name="dense layers", value=value, words=words))
    return found


def _once(record: Record) -> list[Term]:
    pp, num = record["pp"], record["micro_num"]
    transfers = 2 * (num + pp - 1) * record.get("interleave", 1) if pp > 1 else 0
    if "bubble" not in record:
        names = {
            "pp_comm_cost": "bubble and transfers",
            "wdp_comm_cost": "reduction of gradients",
            "zp_comm_cost": "broadcast of parameters",
        }
        return [Term(name=n, value=record[n], words=words) for n, words in names.items()]
    return [
        Term(name="bubble", value=record["bubble"], words=_bubble(record)),
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


def _bubble(record: Record) -> str:
    words = f"{record['pp'] - 1} other stages"
    virtual = record.get("interleave", 1)
    return f"{words}, in {virtual} parts" if virtual > 1 else words


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms a layer"


def _rate(record: Record) -> str:
    return f"{record['g_bsz']} tokens, {record['tgs']:.1f} tokens/GPU/s"
