"""A strategy as the arguments of a trainer."""

from fastcomm.isp.model import Model
from fastcomm.isp.question import Question
from fastcomm.isp.result import Record

TRAINERS = ("megatron", "internevo")


def snippet(trainer: str, record: Record, question: Question) -> str:
    """Arguments for Megatron-LM, or InternEvo's configuration."""
    return (_megatron if trainer == "megatron" else _internevo)(record, question)


def _megatron(record: Record, question: Question) -> str:
    model = question.model
    sequences = record["g_bsz"] // record["seq_len"]
    words = [
        f"--num-layers {model.layers} --hidden-size {model.hidden}",
        f"--num-attention-heads {model.heads} --ffn-hidden-size {model.ffn}",
        f"--seq-length {record['seq_len']} --max-position-embeddings {record['seq_len']}",
        f"--micro-batch-size {record['micro_bsz']} --global-batch-size {sequences}",
        *_megatron_attention(model),
        *_megatron_parallel(record, model),
        *(_megatron_experts(record, question) if model.experts else ()),
    ]
    if model.mlp == "swiglu":
        words.append("--swiglu")
    if not model.tied:
        words.append("--untie-embeddings-and-output-weights")
    if record["activation_ckpt"] == 1:
        words.append("--recompute-granularity full --recompute-method uniform")
        words.append("--recompute-num-layers 1")
    elif record["activation_ckpt"] == 2:  # noqa: PLR2004 selective, as in a record
        words.append("--recompute-granularity selective")
    words.append("--use-flash-attn --bf16")
    return " \\\n".join(words)


def _megatron_attention(model: Model) -> list[str]:
    if latent := model.latent:
        return [
            f"--multi-latent-attention --q-lora-rank {latent.q_rank}",
            f"--kv-lora-rank {latent.kv_rank} --qk-head-dim {latent.nope}",
            f"--qk-pos-emb-head-dim {latent.rope} --v-head-dim {latent.value}",
        ]
    words = []
    if model.kv_heads != model.heads:
        words.append(f"--group-query-attention --num-query-groups {model.kv_heads}")
    if model.head_dim:
        words.append(f"--kv-channels {model.head_dim}")
    return words


def _megatron_parallel(record: Record, model: Model) -> list[str]:
    tensor, pp, virtual = (
        record["algo_type"] != "isp",
        record["pp"],
        record.get("interleave", 1),
    )
    words = [
        f"--pipeline-model-parallel-size {pp}",
        f"--tensor-model-parallel-size {record['sp'] if tensor else 1}",
    ]
    if virtual > 1:
        each = model.layers // (pp * virtual)
        words.append(f"--num-layers-per-virtual-pipeline-stage {each}")
    if not tensor and record["sp"] > 1:
        # Megatron's Ulysses is context parallelism by all-to-all.
        words.append(f"--context-parallel-size {record['sp']} --cp-comm-type a2a")
    if record["algo_type"] in {"msp", "fsp"} and record["sp"] > 1:
        words.append("--sequence-parallel")
    if _shard(record, "p_os", "zp_size") > 1:
        words.append("--use-distributed-optimizer")
    if _shard(record, "p_para", "wp_size") > 1:
        words.append("--use-torch-fsdp2")
    return words


def _megatron_experts(record: Record, question: Question) -> list[str]:
    model, experts = question.model, question.model.experts
    assert experts is not None
    words = [
        f"--num-experts {experts.number} --moe-router-topk {experts.top_k}",
        f"--moe-ffn-hidden-size {experts.ffn} --moe-grouped-gemm",
        f"--expert-model-parallel-size {record['ep']} --expert-tensor-parallel-size 1",
        "--moe-token-dispatcher-type flex --moe-enable-deepep"
        if question.dispatch == "nodes"
        else "--moe-token-dispatcher-type alltoall",
    ]
    if experts.shared:
        words.append(f"--moe-shared-expert-intermediate-size {experts.shared}")
    if experts.dense_layers:
        rest = model.layers - experts.dense_layers
        words.append(f"--moe-layer-freq '([0]*{experts.dense_layers}+[1]*{rest})'")
    return words


def _internevo(record: Record, question: Question) -> str:
    isp, model = record["algo_type"] == "isp", question.model
    para = _shard(record, "p_para", "wp_size")
    mode = record["algo_type"]
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
    """A degree by our name, or in a record of the original by its own."""
    return int(record[name] if name in record else record[original_name])
