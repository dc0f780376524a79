"""Terms of one strategy's time and memory, and the arguments of trainers for it."""

from typing import Any

from fastcomm.isp.layer import Term
from fastcomm.isp.price import CONTEXT_BYTES
from fastcomm.isp.problem import SearchProblem
from fastcomm.isp.result import Record
from fastcomm.models import Model


def time_terms(record: Record, problem: SearchProblem) -> list[Term]:
    """Return the seconds of a step; the terms of level 1 add up to the first."""
    num = record["micro_num"]
    layers, plain = _slowest(record, problem)
    runs = f"{num} micro-batches x {layers} layers"

    def layer(name: str, text: str, seconds: float) -> Term:
        return Term(name, num * layers * seconds, f"{runs}: {text}")

    terms = [
        layer("GEMM", "forward and backward", record["comp_wp"]),
        layer("attention", "forward and backward", record["comp_attn"]),
        layer("exposed weight gathers", _gathers(record), _exposed(record)),
        layer("sequence exchange", _SEQUENCE[record["algo_type"]], record["sp_comm_cost"]),
    ]
    if "ep_comm_cost" in record:
        terms.append(layer("exposed expert exchange", _exchange(record), record["ep_exposed"]))
    if "elementwise" in record:
        text = "norms, activations, residuals"
        terms.append(layer("element-wise", text, record["elementwise"]))
        terms += _ends(record, plain)
    return [
        Term("step", record["total_latency"], _rate(record), level=0),
        *terms,
        *_once(record),
    ]


def _slowest(record: Record, problem: SearchProblem) -> tuple[int, int]:
    """Return the numbers of layers of the slowest stage: usual ones, and without experts."""
    pp = record["pp"]
    counts = problem.model.counts(record.get("slowest_stage", pp - 1), pp)
    return counts[0], sum(counts[1:])


def _exposed(record: Record) -> float:
    return float(record["overlap_latency"] - record["comp_wp"])


def _gathers(record: Record) -> str:
    """Return a text on the time to gather and reduce weights, and how much is overlapped."""
    overlapped = max(0.0, record["wp_comm_cost"] - _exposed(record))
    return (
        f"gathers and reductions of {_ms(record['wp_comm_cost'])}, {_ms(overlapped)} overlapped"
    )


def _exchange(record: Record) -> str:
    return f"all-to-alls of {_ms(record['ep_comm_cost'])} over {record['ep']} ranks"


def _ends(record: Record, plain: int) -> list[Term]:
    """Return the terms of the step time for the output head, and for layers without experts.

    `record` is a strategy, with times in seconds; `plain` is the number of layers without
    experts.
    """
    num = record["micro_num"]
    text = f"{num} micro-batches: the vocabulary, on the last stage"
    last = record.get("slowest_stage", record["pp"] - 1) == record["pp"] - 1
    terms = [Term("output head", num * record["head"] * last, text)]
    if "dense_layer" in record:
        text = f"{num} micro-batches x {plain} layers without experts"
        terms.append(Term("dense layers", num * plain * record["dense_layer"], text))
    return terms


def _once(record: Record) -> list[Term]:
    """Return the terms that occur once per step: pipeline, synchronization, optimizer."""
    pp, num = record["pp"], record["micro_num"]
    transfers = 2 * (num + pp - 1) * record.get("interleave", 1) if pp > 1 else 0
    if "bubble" not in record:
        names = {
            "bubble and transfers": "pp_comm_cost",
            "reduction of gradients": "wdp_comm_cost",
            "broadcast of parameters": "zp_comm_cost",
        }
        return [Term(name, record[key], key) for name, key in names.items()]
    sent = f"sent once a step to {record['p_os'] // record['p_para']} shards"
    reduced = f"reduced once a step, sharded by {record['p_grads']}"
    return [
        Term("pipeline bubble", record["bubble"], _bubble(record)),
        Term("between stages", record["p2p"], f"{transfers} transfers"),
        Term("gradient reduction", record["grad_sync"], reduced),
        Term("parameter sync", record["param_sync"], sent),
        Term("optimizer step", record["optimizer"], f"states sharded by {record['p_os']}"),
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
    """Return the bytes of the fullest rank while the last micro-batch runs.

    The first term is the memory that the rank needs; the optimizer's step may need more than
    the sum of the others.
    """
    parts = [Term(label, record[name], "") for name, label in _MEMORY.items()]
    if "step_peak" in record:
        parts.append(Term("driver and libraries", CONTEXT_BYTES, ""))
    whole = Term("memory", record["total_mm_cost"], _moment(record), level=0)
    return [whole, *(part for part in parts if part.value)]


def explanation(record: Record, problem: SearchProblem) -> dict[str, Any]:
    """Return the terms of a strategy's step time and memory as JSON objects."""
    return {
        "time": [_in_json(term, "time_ns", 1e9) for term in time_terms(record, problem)],
        "memory": [_in_json(term, "bytes", 1) for term in memory_terms(record)],
    }


def _in_json(term: Term, name: str, unit: float) -> dict[str, Any]:
    """Return a term as a JSON object, with its value times `unit` under `name`."""
    return {
        "name": term.name,
        name: float(term.value) * unit,
        "level": term.level,
        "description": term.text,
    }


def _moment(record: Record) -> str:
    """Return the stage and the moment of the highest memory."""
    if "step_peak" not in record:
        return ""
    moment = "the optimizer's step" if _is_step(record) else "forward and backward"
    stage = f"stage {int(record['stage'])} of {record['pp']}"
    return f"{stage}, {moment}"


def _is_step(record: Record) -> bool:
    """Whether the optimizer's step needs more memory than forward and backward."""
    return bool(record.get("step_peak", 0) >= record["total_mm_cost"])


def _bubble(record: Record) -> str:
    text = f"fill and drain of {record['pp']} stages"
    virtual = record.get("interleave", 1)
    return f"{text}, {virtual} virtual stages per GPU" if virtual > 1 else text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms a layer"


def _rate(record: Record) -> str:
    return f"{record['g_bsz']} tokens, {record['tgs']:.1f} tokens/s/GPU"


def snippet(trainer: str, record: Record, problem: SearchProblem) -> str:
    """Return the text with which a trainer uses a strategy.

    Parameters
    ----------
    trainer
        "megatron" for arguments of Megatron-LM, else the configuration of InternEvo.
    record, problem
        The strategy, and the job that it is for.

    """
    return (_megatron if trainer == "megatron" else _internevo)(record, problem)


def _megatron(record: Record, problem: SearchProblem) -> str:
    """Return the arguments of Megatron-LM for a strategy, on lines joined by backslashes."""
    model = problem.model
    sequences = record["g_bsz"] // record["seq_len"]
    arguments = [
        f"--num-layers {model.layers} --hidden-size {model.hidden}",
        f"--num-attention-heads {model.heads} --ffn-hidden-size {model.ffn}",
        f"--seq-length {record['seq_len']} --max-position-embeddings {record['seq_len']}",
        f"--micro-batch-size {record['micro_bsz']} --global-batch-size {sequences}",
        *_megatron_attention(model),
        *_megatron_parallel(record, model),
        *(_megatron_experts(record, problem) if model.experts else ()),
    ]
    if model.mlp == "swiglu":
        arguments.append("--swiglu")
    if not model.tied:
        arguments.append("--untie-embeddings-and-output-weights")
    if record["activation_ckpt"] == 1:
        arguments.append("--recompute-granularity full --recompute-method uniform")
        arguments.append("--recompute-num-layers 1")
    elif record["activation_ckpt"] == 2:  # noqa: PLR2004 selective, as in a record
        arguments.append("--recompute-granularity selective")
    arguments.append("--use-flash-attn --bf16")
    return " \\\n".join(arguments)


def _megatron_attention(model: Model) -> list[str]:
    """Return Megatron's arguments for latent or grouped-query attention, if any."""
    if latent := model.latent:
        queries = f" --q-lora-rank {latent.q_rank}" if latent.q_rank else ""
        return [
            f"--multi-latent-attention{queries}",
            f"--kv-lora-rank {latent.kv_rank} --qk-head-dim {latent.nope}",
            f"--qk-pos-emb-head-dim {latent.rope} --v-head-dim {latent.value}",
        ]
    arguments = []
    if model.kv_heads != model.heads:
        arguments.append(f"--group-query-attention --num-query-groups {model.kv_heads}")
    if model.head_dim:
        arguments.append(f"--kv-channels {model.head_dim}")
    return arguments


def _megatron_parallel(record: Record, model: Model) -> list[str]:
    """Return Megatron's arguments for the parallel layout of a strategy."""
    tensor, pp = record["algo_type"] != "isp", record["pp"]
    virtual = record.get("interleave", 1)
    arguments = [
        f"--pipeline-model-parallel-size {pp}",
        f"--tensor-model-parallel-size {record['sp'] if tensor else 1}",
    ]
    if virtual > 1:
        layers = model.layers // (pp * virtual)
        arguments.append(f"--num-layers-per-virtual-pipeline-stage {layers}")
    if not tensor and record["sp"] > 1:
        # Megatron's Ulysses is context parallelism by all-to-all.
        arguments.append(f"--context-parallel-size {record['sp']} --cp-comm-type a2a")
    if record["algo_type"] in {"msp", "fsp"} and record["sp"] > 1:
        arguments.append("--sequence-parallel")
    if _shard(record, "p_os", "zp_size") > 1:
        arguments.append("--use-distributed-optimizer")
    if _shard(record, "p_para", "wp_size") > 1:
        arguments.append("--use-torch-fsdp2")
    return arguments


def _megatron_experts(record: Record, problem: SearchProblem) -> list[str]:
    """Return Megatron's arguments for the experts of a model that has some."""
    model, experts = problem.model, problem.model.experts
    assert experts is not None
    arguments = [
        f"--num-experts {experts.number} --moe-router-topk {experts.top_k}",
        f"--moe-ffn-hidden-size {experts.ffn} --moe-grouped-gemm",
        f"--expert-model-parallel-size {record['ep']} --expert-tensor-parallel-size 1",
        "--moe-token-dispatcher-type flex --moe-enable-deepep"
        if problem.dispatch == "nodes"
        else "--moe-token-dispatcher-type alltoall",
    ]
    if experts.shared:
        arguments.append(f"--moe-shared-expert-intermediate-size {experts.shared}")
    if experts.dense_layers:
        with_experts = model.layers - experts.dense_layers
        arguments.append(f"--moe-layer-freq '([0]*{experts.dense_layers}+[1]*{with_experts})'")
    return arguments


def _internevo(record: Record, problem: SearchProblem) -> str:
    """Return the Python configuration of InternEvo for a strategy."""
    mode, model = record["algo_type"], problem.model
    isp = mode == "isp"
    para = _shard(record, "p_para", "wp_size")
    zero = record["p_os"] if "p_os" in record else record["zp_size"] * (para if isp else 1)
    whole = isp or para == 1
    shape = f"checkpoint={record['activation_ckpt'] == 1}, num_layers={model.layers}"
    if record.get("interleave", 1) > 1:
        shape += f", num_chunks={record['interleave']}"
    spread: list[str] = []
    moe: list[str] = []
    if model.experts:
        shape += f", num_experts={model.experts.number}"
        spread = [f"    expert=dict(size={record['ep']}, no_tp=True),"]
        moe = [f"moe = dict(top_k={model.experts.top_k})"]
    return "\n".join(
        [
            "parallel = dict(",
            f"    zero1=dict(size={zero}, fsdp={not whole}),",
            f'    tensor=dict(size={record["sp"]}, mode="{mode}"),',
            f"    pipeline=dict(size={record['pp']}, interleaved_overlap=True),",
            f"    weight=dict(size={para if isp else 1}, overlap={para > 1}),",
            *spread,
            ")",
            "data = dict(",
            f"    seq_len={record['seq_len']},",
            f"    micro_num={record['micro_num']},",
            f"    micro_bsz={record['micro_bsz']},",
            ")",
            f"model = dict({shape})",
            *moe,
        ]
    )


def _shard(record: Record, name: str, original_name: str) -> int:
    """Return the shards of a record of either mode; the original simulator has other names."""
    return int(record[name] if name in record else record[original_name])
