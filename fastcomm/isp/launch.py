"""Arguments of trainers for a plan, and which of them exclude or need each other, as data.

The options are those of Megatron-Core 0.14 and torchtitan 0.2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastcomm.errors import ConfigError
from fastcomm.isp.model import Model
from fastcomm.isp.plan import Plan

Arguments = Mapping[str, str]  # values by option; a switch has an empty value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a trainer asks of its options: `option` needs `needs`, and excludes `excludes`.

    The rule holds where `option` is given, with `value` if there is one. An entry of `needs`
    is an option, "--option value", or "--option >1" for a number above.
    """

    option: str
    value: str = ""
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()


# Checks of megatron/training/arguments.py.
MEGATRON_RULES = (
    Rule(option="--sequence-parallel", needs=("--tensor-model-parallel-size >1",)),
    Rule(
        option="--num-layers-per-virtual-pipeline-stage",
        needs=("--pipeline-model-parallel-size >1",),
        excludes=(
            "--num-virtual-stages-per-pipeline-rank",
            "--decoder-first-pipeline-num-layers",
            "--decoder-last-pipeline-num-layers",
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
        ),
    ),
    Rule(
        option="--num-virtual-stages-per-pipeline-rank",
        needs=("--pipeline-model-parallel-size >1",),
    ),
    Rule(
        option="--decoder-last-pipeline-num-layers",
        needs=("--pipeline-model-parallel-size >1",),
        excludes=(
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
        ),
    ),
    Rule(
        option="--overlap-param-gather",
        needs=("--use-distributed-optimizer", "--overlap-grad-reduce"),
    ),
    Rule(option="--recompute-method", needs=("--recompute-granularity full",)),
    Rule(option="--recompute-num-layers", needs=("--recompute-method",)),
    Rule(option="--recompute-modules", needs=("--recompute-granularity selective",)),
    Rule(
        option="--recompute-granularity",
        value="full",
        needs=("--recompute-method",),
        excludes=("--overlap-moe-expert-parallel-comm",),
    ),
    Rule(
        option="--fp8-recipe", needs=("--fp8-format", "--transformer-impl transformer_engine")
    ),
    Rule(option="--fp8-format", needs=("--bf16",)),
    Rule(option="--grad-reduce-in-bf16", excludes=("--accumulate-allreduce-grads-in-fp32",)),
    Rule(
        option="--context-parallel-size",
        needs=("--transformer-impl transformer_engine",),
    ),
    Rule(option="--num-query-groups", needs=("--group-query-attention",)),
    Rule(option="--moe-enable-deepep", needs=("--moe-token-dispatcher-type flex",)),
    Rule(
        option="--moe-flex-dispatcher-backend",
        needs=("--moe-token-dispatcher-type flex",),
        excludes=("--moe-enable-deepep",),
    ),
    Rule(
        option="--overlap-moe-expert-parallel-comm",
        needs=("--expert-model-parallel-size >1",),
        excludes=("--moe-shared-expert-overlap",),
    ),
    Rule(option="--moe-pad-expert-input-to-capacity", needs=("--moe-expert-capacity-factor",)),
    Rule(option="--multi-latent-attention", excludes=("--group-query-attention",)),
    Rule(
        option="--use-megatron-fsdp",
        needs=("--data-parallel-sharding-strategy",),
        excludes=("--use-torch-fsdp2", "--num-virtual-stages-per-pipeline-rank"),
    ),
)
# Checks of torchtitan's parallel dimensions and trainer.
TORCHTITAN_RULES = (
    Rule(
        option="--parallelism.pipeline_parallel_schedule",
        needs=("--parallelism.pipeline_parallel_degree >1",),
    ),
    Rule(
        option="--parallelism.pipeline_parallel_microbatch_size",
        needs=("--parallelism.pipeline_parallel_degree >1",),
    ),
    Rule(
        option="--activation_checkpoint.selective_ac_option",
        needs=("--activation_checkpoint.mode selective",),
    ),
)


def violations(arguments: Arguments, rules: tuple[Rule, ...]) -> list[str]:
    """Return what arguments break of the rules of a trainer, a sentence each."""
    broken = []
    for rule in rules:
        value = arguments.get(rule.option)
        if value is None or (rule.value and rule.value != value):
            continue
        broken += [
            f"{rule.option} needs {need}" for need in rule.needs if not _holds(arguments, need)
        ]
        broken += [
            f"{rule.option} excludes {other}" for other in rule.excludes if other in arguments
        ]
    return broken


def _holds(arguments: Arguments, need: str) -> bool:
    """Whether arguments have what an entry of `Rule.needs` asks for."""
    option, _, value = need.partition(" ")
    if option not in arguments:
        return False
    if value == ">1":
        return int(arguments[option]) > 1
    return not value or arguments[option] == value


def launch(name: str, plan: Plan) -> str:
    """Return the arguments of a trainer for a plan, on lines joined by backslashes.

    Parameters
    ----------
    name
        "megatron" or "torchtitan".
    plan
        The strategy with its job.

    Raises
    ------
    ConfigError
        If the trainer has no arguments for the plan.

    """
    build, rules = LAUNCHES[name]
    arguments = build(plan)
    if broken := violations(arguments, rules):
        raise ConfigError(f"--launch {name}: {broken[0]}; fix another value with --fix")
    return " \\\n".join(f"{option} {value}".rstrip() for option, value in arguments.items())


def megatron(plan: Plan) -> dict[str, str]:
    """Return the arguments of Megatron-LM's pretrain_gpt.py for a plan.

    Raises ConfigError if Megatron-LM cannot run the plan.
    """
    if plan.trainer not in {"megatron", "nemo", "nemo-fsdp"}:
        raise ConfigError(
            f"--launch megatron: the strategies of {plan.habits.title} are not Megatron's; "
            "add --trainer megatron"
        )
    return {
        **_shape(plan.model, plan.seq_len),
        **_batch_and_precision(plan),
        **_layout(plan),
        **_recompute(plan),
        **(_experts(plan) if plan.model.experts else {}),
    }


def _shape(model: Model, seq_len: int) -> dict[str, str]:
    """Return Megatron's arguments of a model with RMSNorm, RoPE and without biases.

    A GELU model gets LayerNorm and biases, as GPT has them.
    """
    arguments = {
        "--num-layers": str(model.layers),
        "--hidden-size": str(model.hidden),
        "--ffn-hidden-size": str(model.ffn),
        "--num-attention-heads": str(model.heads),
        "--seq-length": str(seq_len),
        "--max-position-embeddings": str(seq_len),
        "--vocab-size": str(model.vocab),
        "--tokenizer-type": "NullTokenizer",
        "--position-embedding-type": "rope",
        "--attention-dropout": "0",
        "--hidden-dropout": "0",
    }
    if latent := model.latent:
        arguments |= {
            "--multi-latent-attention": "",
            "--q-lora-rank": str(latent.q_rank),
            "--kv-lora-rank": str(latent.kv_rank),
            "--qk-head-dim": str(latent.nope),
            "--qk-pos-emb-head-dim": str(latent.rope),
            "--v-head-dim": str(latent.value),
        }
    elif model.kv_heads != model.heads:
        arguments["--group-query-attention"] = ""
        arguments["--num-query-groups"] = str(model.kv_heads)
    if model.head_dim:
        arguments["--kv-channels"] = str(model.head_dim)
    if model.mlp == "swiglu":
        switches = ("--swiglu", "--disable-bias-linear")
        arguments |= {"--normalization": "RMSNorm", **dict.fromkeys(switches, "")}
    if not model.tied:
        arguments["--untie-embeddings-and-output-weights"] = ""
    if model.mtp_layers:
        arguments["--mtp-num-layers"] = str(model.mtp_layers)
    return arguments


_FP8 = {
    "fp8_te": ("hybrid", "delayed"),
    "fp8_cs": ("hybrid", "tensorwise"),
    "fp8_tensor": ("hybrid", "tensorwise"),
    "fp8_block": ("e4m3", "blockwise"),
    "mxfp8": ("e4m3", "mxfp8"),
}


def _batch_and_precision(plan: Plan) -> dict[str, str]:
    arguments = {
        "--micro-batch-size": str(plan.micro_batch),
        "--global-batch-size": str(plan.global_batch),
        "--transformer-impl": "transformer_engine",
        "--attention-backend": "auto",
        "--fp16" if plan.precision == "fp16" else "--bf16": "",
    }
    if plan.precision in _FP8:
        kind, recipe = _FP8[plan.precision]
        arguments |= {"--fp8-format": kind, "--fp8-recipe": recipe}
    elif plan.precision not in {"bf16", "fp16"}:
        raise ConfigError(f"--launch megatron: no recipe for precision {plan.precision}")
    if plan.gradient_bytes == 2:  # noqa: PLR2004 bf16
        arguments["--grad-reduce-in-bf16"] = ""
    return arguments


def _layout(plan: Plan) -> dict[str, str]:
    """Return Megatron's arguments of parallelism, pipeline split and sharding."""
    arguments = {
        "--tensor-model-parallel-size": str(plan.tp),
        "--pipeline-model-parallel-size": str(plan.pp),
    }
    if plan.tp > 1:
        arguments["--sequence-parallel"] = ""
    if plan.cp > 1:
        arguments["--context-parallel-size"] = str(plan.cp)
    arguments |= _split(plan)
    switches = ["--overlap-grad-reduce"] if plan.overlap else []
    if plan.is_fsdp or plan.sharding in {"zero3", "zero2"}:
        kind = {"zero2": "optim_grads"}.get(plan.sharding, "optim_grads_params")
        arguments |= {"--use-megatron-fsdp": "", "--data-parallel-sharding-strategy": kind}
        arguments |= {"--no-gradient-accumulation-fusion": "", "--ckpt-format": "fsdp_dtensor"}
        if plan.sharding.startswith("hsdp"):
            copies = plan.dp * plan.cp // plan.shards[0]
            arguments["--num-distributed-optimizer-instances"] = str(copies)
    if plan.sharding != "ddp":
        switches.append("--use-distributed-optimizer")
        switches += ["--overlap-param-gather"] if plan.overlap else []
    return arguments | dict.fromkeys(switches, "")


def _split(plan: Plan) -> dict[str, str]:
    """Return Megatron's arguments of virtual stages, and of stages of unequal length."""
    if plan.pp == 1:
        return {}
    arguments = {}
    if plan.vp > 1:
        arguments["--num-virtual-stages-per-pipeline-rank"] = str(plan.vp)
    layers, parts = plan.model.layers, plan.pp * plan.vp
    if layers % parts == 0:
        return arguments
    ends = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
    for count in (1, 2):
        if (layers + count) % parts == 0:
            return arguments | dict.fromkeys(ends[2 - count :], "")
    last = layers - (plan.pp - 1) * -(-layers // plan.pp)
    if plan.vp > 1 or last < 1:
        raise ConfigError(
            f"--launch megatron: {parts} virtual stages do not divide {layers} layers, nor "
            "with embedding and head as layers; fix another pp or vp with --fix"
        )
    return arguments | {"--decoder-last-pipeline-num-layers": str(last)}


def _recompute(plan: Plan) -> dict[str, str]:
    if plan.recompute == "none":
        return {}
    if plan.recompute == "selective":
        modules = "layernorm mla_up_proj" if plan.model.latent else "layernorm"
        return {"--recompute-granularity": "selective", "--recompute-modules": modules}
    arguments = {"--recompute-granularity": "full", "--recompute-method": "uniform"}
    number = 1
    if plan.recompute != "full":
        # Counted for each virtual stage.
        arguments["--recompute-method"] = "block"
        number = max(1, round(plan.stage_layers * plan.recomputed / plan.vp))
    return arguments | {"--recompute-num-layers": str(number)}


def _experts(plan: Plan) -> dict[str, str]:
    experts = plan.model.experts
    assert experts is not None
    kind, *ways = plan.dispatch.split()
    arguments = {
        "--num-experts": str(experts.number),
        "--moe-router-topk": str(experts.top_k),
        "--moe-ffn-hidden-size": str(experts.ffn),
        "--moe-grouped-gemm": "",
        "--expert-model-parallel-size": str(plan.ep),
        "--expert-tensor-parallel-size": str(plan.etp),
        "--moe-token-dispatcher-type": "alltoall" if kind == "alltoall" else "flex",
    }
    if kind == "deepep":
        arguments["--moe-enable-deepep"] = ""
    elif kind == "hybridep":
        arguments["--moe-flex-dispatcher-backend"] = "hybridep"
    if "overlapped" in ways:
        arguments["--overlap-moe-expert-parallel-comm"] = ""
    if "capacity" in ways:
        arguments |= {"--moe-expert-capacity-factor": "1"}
        arguments["--moe-pad-expert-input-to-capacity"] = ""
    if experts.shared:
        arguments["--moe-shared-expert-intermediate-size"] = str(experts.shared)
    if experts.dense_layers:
        others = plan.model.layers - experts.dense_layers
        arguments["--moe-layer-freq"] = f"'([0]*{experts.dense_layers}+[1]*{others})'"
    return arguments


# Models of torchtitan by preset: name and flavor.
_FLAVORS = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
}
_MODES = {"none": "none", "selective": "selective", "full": "full"}


def torchtitan(plan: Plan) -> dict[str, str]:
    """Return the arguments of torchtitan for a plan.

    Raises ConfigError if torchtitan cannot run the plan.
    """
    where = "--launch torchtitan"
    if plan.trainer != "fsdp2":
        raise ConfigError(
            f"{where}: the strategies of {plan.habits.title} are not torchtitan's; "
            "add --trainer fsdp2"
        )
    if plan.model.name not in _FLAVORS:
        raise ConfigError(
            f"{where}: torchtitan has no flavor of {plan.model.name}; it has "
            f"{', '.join(_FLAVORS)}"
        )
    if plan.recompute not in _MODES:
        raise ConfigError(
            f"{where}: no recompute {plan.recompute}; fix none, selective or full"
        )
    shards = plan.shards[0]
    if shards % plan.cp:
        raise ConfigError(f"{where}: cp {plan.cp} does not divide {plan.sharding}")
    family, flavor = _FLAVORS[plan.model.name]
    prefix = "--parallelism."
    arguments = {
        "--model.name": family,
        "--model.flavor": flavor,
        "--training.seq_len": str(plan.seq_len),
        "--training.global_batch_size": str(plan.global_batch),
        f"{prefix}data_parallel_replicate_degree": str(plan.dp * plan.cp // shards),
        f"{prefix}data_parallel_shard_degree": str(shards // plan.cp),
        f"{prefix}tensor_parallel_degree": str(plan.tp),
        f"{prefix}context_parallel_degree": str(plan.cp),
        f"{prefix}pipeline_parallel_degree": str(plan.pp),
        "--activation_checkpoint.mode": _MODES[plan.recompute],
    }
    in_turn = 1
    if plan.pp > 1:
        in_turn = plan.micro_batches
        arguments[f"{prefix}pipeline_parallel_schedule"] = "1F1B"
        arguments[f"{prefix}pipeline_parallel_microbatch_size"] = str(plan.micro_batch)
    arguments["--training.local_batch_size"] = str(in_turn * plan.micro_batch)
    if plan.recompute == "selective":
        arguments["--activation_checkpoint.selective_ac_option"] = "2"
    if plan.model.experts:
        arguments[f"{prefix}expert_parallel_degree"] = str(plan.ep)
        arguments[f"{prefix}expert_tensor_parallel_degree"] = str(plan.etp)
    if plan.precision != "bf16":
        if plan.precision not in {"fp8_titan", "mxfp8"}:
            raise ConfigError(
                f"{where}: no converter for precision {plan.precision}; take fp8_titan or mxfp8"
            )
        kind = "mx" if plan.precision == "mxfp8" else "float8"
        arguments["--model.converters"] = f"quantize.linear.{kind}"
    return arguments | {"--compile.enable": ""}


LAUNCHES: dict[str, tuple[Callable[[Plan], dict[str, str]], tuple[Rule, ...]]] = {
    "megatron": (megatron, MEGATRON_RULES),
    "torchtitan": (torchtitan, TORCHTITAN_RULES),
}
