"""A strategy as the arguments of a trainer."""

from fastcomm.isp.question import Question
from fastcomm.isp.result import Record

TRAINERS = ("megatron", "internevo")


def original(record: Record) -> dict[str, object]:
    """The chosen configuration, in the original's shape."""
    return {
        "algo_type": record["algo_type"],
        "seq_len": record["seq_len"],
        "micro_num": record["micro_num"],
        "micro_bsz": record["micro_bsz"],
        "pp_size": record["pp"],
        "tp_size": record["sp"],
        "wp_size": record["wp_size"],
        "zp_size": record["zp_size"],
        "activation_ckpt": record["activation_ckpt"],
    }


def snippet(trainer: str, record: Record, question: Question) -> str:
    """Arguments for Megatron-LM, or InternEvo's configuration."""
    return (_megatron if trainer == "megatron" else _internevo)(record, question)


def _megatron(record: Record, question: Question) -> str:
    model, tensor = question.model, record["algo_type"] != "isp"
    sequences = record["g_bsz"] // record["seq_len"]
    words = [
        f"--num-layers {model.layers} --hidden-size {model.hidden}",
        f"--num-attention-heads {model.heads} --ffn-hidden-size {model.ffn}",
        f"--seq-length {record['seq_len']} --max-position-embeddings {record['seq_len']}",
        f"--micro-batch-size {record['micro_bsz']} --global-batch-size {sequences}",
        f"--pipeline-model-parallel-size {record['pp']}",
        f"--tensor-model-parallel-size {record['sp'] if tensor else 1}",
    ]
    if model.kv_heads != model.heads:
        words.append(f"--group-query-attention --num-query-groups {model.kv_heads}")
    if model.mlp == "swiglu":
        words.append("--swiglu")
    if not tensor and record["sp"] > 1:
        # Megatron's Ulysses is context parallelism by all-to-all.
        words.append(f"--context-parallel-size {record['sp']} --cp-comm-type a2a")
    if record["algo_type"] in {"msp", "fsp"} and record["sp"] > 1:
        words.append("--sequence-parallel")
    if _shard(record, "p_os", "zp_size") > 1:
        words.append("--use-distributed-optimizer")
    if _shard(record, "p_para", "wp_size") > 1:
        words.append("--use-torch-fsdp2")
    if record["activation_ckpt"] == 1:
        words.append("--recompute-granularity full --recompute-method uniform")
        words.append("--recompute-num-layers 1")
    elif record["activation_ckpt"] == 2:  # noqa: PLR2004 selective, as in a record
        words.append("--recompute-granularity selective")
    words.append("--use-flash-attn --bf16")
    return " \\\n".join(words)


def _internevo(record: Record, question: Question) -> str:
    isp = record["algo_type"] == "isp"
    para = _shard(record, "p_para", "wp_size")
    mode = record["algo_type"]
    zero = record["p_os"] if "p_os" in record else record["zp_size"] * (para if isp else 1)
    whole = isp or para == 1
    overlap = "True" if para > 1 else "False"
    return "\n".join(
        [
            "parallel = dict(",
            f"    zero1=dict(size={zero}, fsdp={not whole}),",
            f'    tensor=dict(size={record["sp"]}, mode="{mode}"),',
            f"    pipeline=dict(size={record['pp']}, interleaved_overlap=True),",
            f"    weight=dict(size={para if isp else 1}, overlap={overlap}),",
            ")",
            "data = dict(",
            f"    seq_len={record['seq_len']},",
            f"    micro_num={record['micro_num']},",
            f"    micro_bsz={record['micro_bsz']},",
            ")",
            f"model = dict(checkpoint={record['activation_ckpt'] == 1}, "
            f"num_layers={question.model.layers})",
        ]
    )


def _shard(record: Record, name: str, original_name: str) -> int:
    """A degree by our name, or in a record of the original by its own."""
    return int(record[name] if name in record else record[original_name])
