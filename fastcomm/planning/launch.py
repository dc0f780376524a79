"""Arguments of trainers for a plan, and which of them exclude or need each other, as data.

The options are those of Megatron-Core 0.16 and torchtitan 0.2. They have the shape of a model
and the strategy, not how it is trained: scores and losses of the router, learning rates, data.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fastcomm.errors import ConfigError
from fastcomm.hardware.gpus import Gpu
from fastcomm.models import Model
from fastcomm.planning.attention import recomputed_modules
from fastcomm.planning.job import GRADIENTS, Plan, split_of, stage_units
from fastcomm.planning.trainers import DISPATCHES

Arguments = Mapping[str, str]  # values by option; a switch has an empty value
# Values by option, before they are text: an option without value is left out, True is a switch.
_Options = dict[str, int | str | None]
# A rule is "A needs B" or "A excludes B", where A and B are an option, an option and its value,
# or "--option >1" for a number above. These are checks of megatron/training/arguments.py.
MEGATRON_RULES = (
    "--sequence-parallel needs --tensor-model-parallel-size >1",
    "--num-virtual-stages-per-pipeline-rank needs --pipeline-model-parallel-size >1",
    "--decoder-last-pipeline-num-layers needs --pipeline-model-parallel-size >1",
    "--decoder-last-pipeline-num-layers excludes --account-for-embedding-in-pipeline-split",
    "--decoder-last-pipeline-num-layers excludes --account-for-loss-in-pipeline-split",
    "--pipeline-model-parallel-layout excludes --num-virtual-stages-per-pipeline-rank",
    "--overlap-param-gather needs --use-distributed-optimizer",
    "--overlap-param-gather needs --overlap-grad-reduce",
    "--recompute-method needs --recompute-granularity full",
    "--recompute-num-layers needs --recompute-method",
    "--recompute-modules needs --recompute-granularity selective",
    "--recompute-granularity full needs --recompute-method",
    "--cuda-graph-scope needs --cuda-graph-impl",
    "--cuda-graph-impl excludes --recompute-granularity full",
    "--recompute-granularity full excludes --overlap-moe-expert-parallel-comm",
    "--cuda-graph-scope full_iteration needs --no-check-for-nan-in-loss-and-grad",
    "--fp8-recipe needs --fp8-format",
    "--fp8-dot-product-attention needs --fp8-format",
    "--use-transformer-engine-op-fuser needs --fp8-recipe mxfp8",
    "--exp-avg-dtype needs --use-precision-aware-optimizer",
    "--exp-avg-sq-dtype needs --use-precision-aware-optimizer",
    "--use-precision-aware-optimizer needs --use-distributed-optimizer",
    "--fp8-recipe needs --transformer-impl transformer_engine",
    "--fp8-format needs --bf16",
    "--grad-reduce-in-bf16 excludes --accumulate-allreduce-grads-in-fp32",
    "--context-parallel-size needs --transformer-impl transformer_engine",
    "--num-query-groups needs --group-query-attention",
    "--moe-enable-deepep needs --moe-token-dispatcher-type flex",
    "--moe-flex-dispatcher-backend needs --moe-token-dispatcher-type flex",
    "--moe-flex-dispatcher-backend excludes --moe-enable-deepep",
    "--overlap-moe-expert-parallel-comm needs --expert-model-parallel-size >1",
    "--overlap-moe-expert-parallel-comm excludes --moe-shared-expert-overlap",
    "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor",
    "--moe-expert-rank-capacity-factor needs --moe-flex-dispatcher-backend hybridep",
    "--moe-expert-rank-capacity-factor needs --use-transformer-engine-op-fuser",
    "--moe-paged-stash needs --moe-expert-rank-capacity-factor",
    "--multi-latent-attention excludes --group-query-attention",
    "--moe-router-num-groups needs --moe-router-group-topk",
    "--moe-router-group-topk needs --moe-router-num-groups",
    "--window-attn-skip-freq needs --window-size",
    "--activation-func-clamp-value needs --quick-geglu",
    "--quick-geglu excludes --swiglu",
    "--use-megatron-fsdp needs --data-parallel-sharding-strategy",
    "--use-megatron-fsdp excludes --use-torch-fsdp2",
    "--use-megatron-fsdp excludes --num-virtual-stages-per-pipeline-rank",
)
# What core 0.16 has not, and its successors have: an option, or one "with" another.
MEGATRON_NEWER = (
    "--moe-mlp-glu-interleave-size",
    "--use-transformer-engine-op-fuser with --num-experts",
    "--moe-expert-rank-capacity-factor",
    "--moe-paged-stash",
    "--moe-paged-stash-buffer-size-factor-cuda",
    "--moe-paged-stash-buffer-size-factor-cpu",
    "--moe-pad-experts-for-cuda-graph-inference",
    "--cuda-graph-impl local with --overlap-moe-expert-parallel-comm",
)
# Checks of torchtitan's parallel dimensions and trainer.
_PIPELINE = "--parallelism.pipeline_parallel"
TORCHTITAN_RULES = (
    f"{_PIPELINE}_schedule needs {_PIPELINE}_degree >1",
    f"{_PIPELINE}_microbatch_size needs {_PIPELINE}_degree >1",
    f"{_PIPELINE}_layers_per_stage needs {_PIPELINE}_degree >1",
    "--activation_checkpoint.selective_ac_option needs --activation_checkpoint.mode selective",
)


def violations(arguments: Arguments, rules: tuple[str, ...]) -> list[str]:
    """Return what arguments break of the rules of a trainer, a sentence each."""
    broken = []
    for rule in rules:
        subject, verb, other = re.split(" (needs|excludes) ", rule)
        if _holds(arguments, subject) and _holds(arguments, other) != (verb == "needs"):
            broken.append(f"{subject.partition(' ')[0]} {verb} {other}")
    return broken


def _holds(arguments: Arguments, condition: str) -> bool:
    """Whether arguments have what one side of a rule names."""
    option, _, value = condition.partition(" ")
    if option not in arguments:
        return False
    if value == ">1":
        return int(arguments[option]) > 1
    return not value or arguments[option] == value


def needs_environment(text: str, chip: Gpu) -> list[str]:
    """Return which environment variables Megatron's arguments take, a sentence each.

    `text` has the arguments as `launch` returns them.
    """
    arguments = _parsed(text)
    needs = []
    if _holds(arguments, "--use-transformer-engine-op-fuser"):
        needs.append(
            "set NVTE_CUTEDSL_FUSED_GROUPED_MLP=1: without it, Transformer Engine does not "
            "fuse experts"
        )
    sizes = ("--tensor-model-parallel-size", "--context-parallel-size")
    is_divided = any(_holds(arguments, f"{size} >1") for size in sizes)
    if chip.has_mx or not is_divided or "--use-megatron-fsdp" in arguments:
        return needs
    if "--overlap-moe-expert-parallel-comm" in arguments:
        needs.append(
            "set CUDA_DEVICE_MAX_CONNECTIONS=32 to overlap the exchange of experts: tensor and "
            "context parallelism, which take 1, are priced without overlap"
        )
    else:
        needs.append(
            "set CUDA_DEVICE_MAX_CONNECTIONS=1: Megatron refuses tensor and context "
            "parallelism without it before Blackwell"
        )
    return needs


def _parsed(text: str) -> Arguments:
    """Return the arguments of a text as `launch` returns them."""
    lines = (line.removesuffix(" \\").partition(" ") for line in text.split("\n"))
    return {option: value for option, _, value in lines}


def needs_newer(text: str) -> str:
    """Return what of Megatron's arguments takes a newer core than 0.16; empty if nothing.

    `text` has the arguments as `launch` returns them.
    """
    arguments = _parsed(text)
    newer = [
        rule
        for rule in MEGATRON_NEWER
        if all(_holds(arguments, condition) for condition in rule.split(" with "))
    ]
    if not newer:
        return ""
    return f"Megatron-Core 0.16 rejects {', '.join(newer)}: take a core after 0.16"


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
        If the trainer has no arguments for the plan, or cannot run it.

    """
    try:
        return _arguments(name, plan)
    except ConfigError as error:
        raise ConfigError(f"--launch {name}: {error}") from error


def _arguments(trainer: str, plan: Plan) -> str:
    """Return what `launch` does; errors have only the reason."""
    launcher = _LAUNCHERS[trainer]
    if plan.trainer not in launcher.trainers:
        raise ConfigError(
            f"the strategies of {plan.trainer_rules.title} are not {launcher.title}'s; "
            f"add --trainer {launcher.trainers[0]}"
        )
    plan.check_methods()
    options = launcher.options(plan)
    arguments = {
        option: "" if value is True else str(value)
        for option, value in options.items()
        if value
    }
    if broken := violations(arguments, launcher.rules):
        raise ConfigError(broken[0])
    return " \\\n".join(f"{option} {value}".rstrip() for option, value in arguments.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRefusal:
    """Why a trainer takes no arguments for `strategies` faster plans; `plan` is the fastest."""

    plan: Plan
    strategies: int
    reason: str


def launch_fastest(name: str, plans: Iterable[Plan]) -> tuple[str, list[LaunchRefusal]]:
    """Return the arguments of the first plan that has some, and why those before have none.

    Parameters
    ----------
    name
        "megatron" or "torchtitan".
    plans
        Strategies of one job, the fastest first.

    Raises
    ------
    ConfigError
        If no plan has arguments: the reason of the first.

    """
    refusals: dict[str, LaunchRefusal] = {}
    for plan in plans:
        try:
            return _arguments(name, plan), list(refusals.values())
        except ConfigError as error:
            reason = str(error)
        first = refusals.get(reason)
        number = first.strategies + 1 if first else 1
        refusals[reason] = LaunchRefusal(
            plan=first.plan if first else plan, strategies=number, reason=reason
        )
    reasons = list(refusals)
    raise ConfigError(f"--launch {name}: {reasons[0] if reasons else 'no strategy fits'}")


def _megatron(plan: Plan) -> _Options:
    """Return the options of Megatron-LM's pretrain_gpt.py."""
    return {
        **_shape(plan.model, plan.seq_len),
        **_batch_and_precision(plan),
        **_layout(plan),
        **_recompute(plan),
        **_graphs(plan),
        **_experts(plan),
    }


def _graphs(plan: Plan) -> _Options:
    """Return Megatron's options of CUDA graphs."""
    if not plan.graphs:
        return {}
    is_whole = "full" in plan.graph_parts
    if is_whole and _is_sync_free(plan) and not plan.fused_experts:
        raise ConfigError(
            "graphs=full with hybridep takes fused experts, which Megatron-Core has in mxfp8 "
            "only; fix precision=mxfp8, graphs of parts, or capacity in dispatch"
        )
    return {
        "--cuda-graph-impl": "local" if is_whole else "transformer_engine",
        "--cuda-graph-scope": "full_iteration" if is_whole else plan.graphs.replace("+", " "),
        "--te-rng-tracker": True,
        "--no-check-for-nan-in-loss-and-grad": is_whole,
        **(_PAGED_STASH if is_whole and _is_sync_free(plan) else {}),
    }


# Buffers of experts whose rows no host counts, of the sizes of Megatron Bridge's recipes.
_PAGED_STASH: _Options = {
    "--moe-expert-rank-capacity-factor": "1.5",
    "--moe-pad-experts-for-cuda-graph-inference": True,
    "--moe-paged-stash": True,
    "--moe-paged-stash-buffer-size-factor-cuda": "1.2",
    "--moe-paged-stash-buffer-size-factor-cpu": "1.0",
}


def _is_sync_free(plan: Plan) -> bool:
    """Whether experts take all rows, whose counts stay on the GPU."""
    has_experts = plan.model.experts is not None
    return has_experts and "hybridep" in plan.dispatch and not plan.is_padded


def _shape(model: Model, seq_len: int) -> _Options:
    """Return Megatron's options of a model with RMSNorm, RoPE and without biases.

    A GELU model gets LayerNorm and biases, as GPT has them; experts with biases get the gated
    unit of GPT-OSS, whose scale and clamp Megatron-Core's own example has.
    """
    options: _Options = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads,
        "--seq-length": seq_len,
        "--max-position-embeddings": seq_len,
        "--vocab-size": model.vocab,
        "--tokenizer-type": "NullTokenizer",
        "--position-embedding-type": (
            "learned_absolute" if model.has_learned_positions else "rope"
        ),
        "--attention-dropout": "0",
        "--hidden-dropout": "0",
    }
    if latent := model.latent:
        options |= {
            "--multi-latent-attention": True,
            "--q-lora-rank": latent.q_rank,
            "--kv-lora-rank": latent.kv_rank,
            "--qk-head-dim": latent.nope,
            "--qk-pos-emb-head-dim": latent.rope,
            "--v-head-dim": latent.value,
        }
    elif model.kv_heads != model.heads:
        options |= {"--group-query-attention": True, "--num-query-groups": model.kv_heads}
    has_bias = model.experts is not None and model.experts.has_bias
    is_swiglu = model.mlp == "swiglu" and not has_bias
    return options | {
        "--kv-channels": model.head_dim,
        "--normalization": "RMSNorm" if model.mlp == "swiglu" else None,
        "--swiglu": is_swiglu,
        "--disable-bias-linear": is_swiglu,
        "--quick-geglu": has_bias,
        "--glu-linear-offset": "1.0" if has_bias else None,
        "--activation-func-clamp-value": "7.0" if has_bias else None,
        "--qk-layernorm": model.has_qk_norm,
        "--window-size": f"{model.window},0" if model.window else None,
        "--window-attn-skip-freq": 2 if model.window else None,
        "--softmax-type": "learnable" if model.has_sinks else None,
        "--untie-embeddings-and-output-weights": not model.tied,
        "--mtp-num-layers": model.mtp_layers,
    }


# Format and recipe of FP8 by precision.
_RECIPES = {
    "bf16": (None, None),
    "fp16": (None, None),
    "fp8_te": ("hybrid", "delayed"),
    "fp8_cs": ("hybrid", "tensorwise"),
    "fp8_tensor": ("hybrid", "tensorwise"),
    "fp8_block": ("e4m3", "blockwise"),
    "mxfp8": ("e4m3", "mxfp8"),
}


def _batch_and_precision(plan: Plan) -> _Options:
    kind, recipe = _RECIPES[plan.precision]
    moments = plan.moments if plan.moments != "fp32" else None
    return {
        "--micro-batch-size": plan.micro_batch,
        "--global-batch-size": plan.global_batch,
        "--transformer-impl": "transformer_engine",
        "--attention-backend": "auto",
        "--fp16" if plan.precision == "fp16" else "--bf16": True,
        "--fp8-format": kind,
        "--fp8-recipe": recipe,
        "--fp8-dot-product-attention": plan.fp8_attention,
        "--use-precision-aware-optimizer": moments is not None,
        "--exp-avg-dtype": moments,
        "--exp-avg-sq-dtype": moments,
        "--grad-reduce-in-bf16": plan.gradient_bytes == GRADIENTS["bf16"],
    }


def _layout(plan: Plan) -> _Options:
    """Return Megatron's options of parallelism, pipeline split and sharding."""
    options: _Options = {
        "--tensor-model-parallel-size": plan.tp,
        "--pipeline-model-parallel-size": plan.pp,
        "--sequence-parallel": plan.tp > 1,
        "--context-parallel-size": plan.cp if plan.cp > 1 else None,
        **_split(plan),
    }
    if plan.is_fsdp or plan.sharding in {"zero3", "zero2"}:
        kind = "optim_grads" if plan.sharding == "zero2" else "optim_grads_params"
        copies = plan.dp * plan.cp // plan.shards[0]
        options |= {
            "--use-megatron-fsdp": True,
            "--data-parallel-sharding-strategy": kind,
            "--no-gradient-accumulation-fusion": True,
            "--ckpt-format": "fsdp_dtensor",
            "--num-distributed-optimizer-instances": copies if plan.is_hybrid else None,
        }
    is_sharded = plan.sharding != "ddp"
    return options | {
        "--overlap-grad-reduce": plan.overlap,
        "--use-distributed-optimizer": is_sharded,
        "--overlap-param-gather": is_sharded and plan.overlap,
    }


def _split(plan: Plan) -> _Options:
    """Return Megatron's options of virtual stages, and of stages of unequal length."""
    if plan.pp == 1:
        return {}
    virtual = plan.vp if plan.vp > 1 else None
    options: _Options = {"--num-virtual-stages-per-pipeline-rank": virtual}
    ends = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
    splits: dict[str, _Options] = {
        "even": options,
        "loss": options | {ends[1]: True},
        "ends": options | dict.fromkeys(ends, True),
        "last": {"--decoder-last-pipeline-num-layers": plan.last_layers},
        "units": _stage_layout(plan),
    }
    return splits[split_of(plan.model, plan.pp, plan.vp)]


def _stage_layout(plan: Plan) -> _Options:
    """Return the units of each virtual stage: embedding E, layers t, further tokens m, loss L.

    The number of virtual stages follows from it.
    """
    stages = "|".join(stage_units(plan.model, plan.pp, plan.vp))
    return {"--pipeline-model-parallel-layout": f"'{stages}'"}


def _recompute(plan: Plan) -> _Options:
    if plan.recompute == "none":
        return {}
    if modules := recomputed_modules(plan):
        names = " ".join(sorted(modules))
        return {"--recompute-granularity": "selective", "--recompute-modules": names}
    if plan.keeps_attention:
        raise ConfigError(f"recompute {plan.recompute}: Megatron-Core has no such policy")
    method, number = "uniform", 1
    if plan.recompute != "full":
        # Counted for each virtual stage.
        method = "block"
        is_count = plan.recompute.isdecimal()
        layers = int(plan.recompute) if is_count else plan.stage_layers * plan.recomputed
        if layers % plan.vp:
            raise ConfigError(
                f"recompute {plan.recompute}: not equally many layers of each of the "
                f"{plan.vp} virtual stages of a rank"
            )
        number = int(layers) // plan.vp
    return {
        "--recompute-granularity": "full",
        "--recompute-method": method,
        "--recompute-num-layers": number,
    }


def _experts(plan: Plan) -> _Options:
    experts = plan.model.experts
    if not experts:
        return {}
    kind, *ways = plan.dispatch.split()
    if lacking := next((way for way in ways if way.startswith("(")), None):
        raise ConfigError(
            f"Megatron-Core has no {lacking.strip('()')}; fix dispatch without it"
        )
    dense, layers = experts.dense_layers, plan.model.layers
    has_groups = experts.groups > 0 and experts.node_limit > 0
    return {
        "--num-experts": experts.number,
        "--moe-router-topk": experts.top_k,
        "--moe-router-num-groups": experts.groups if has_groups else None,
        "--moe-router-group-topk": experts.node_limit if has_groups else None,
        "--moe-ffn-hidden-size": experts.ffn,
        "--moe-grouped-gemm": True,
        # Kernels that prices take for granted.
        "--moe-permute-fusion": True,
        "--moe-router-fusion": True,
        "--use-transformer-engine-op-fuser": plan.fused_experts,
        "--moe-mlp-glu-interleave-size": 32 if plan.fused_experts else None,
        "--expert-model-parallel-size": plan.ep,
        "--expert-tensor-parallel-size": plan.etp,
        "--moe-token-dispatcher-type": "alltoall" if kind == "alltoall" else "flex",
        "--moe-enable-deepep": kind == "deepep",
        "--moe-flex-dispatcher-backend": kind if kind == "hybridep" else None,
        "--overlap-moe-expert-parallel-comm": "overlapped" in ways,
        "--moe-expert-capacity-factor": "1" if "capacity" in ways else None,
        "--moe-pad-expert-input-to-capacity": "capacity" in ways,
        "--moe-shared-expert-intermediate-size": experts.shared,
        "--moe-layer-freq": f"'([0]*{dense}+[1]*{layers - dense})'" if dense else None,
    }


# Models of torchtitan by preset: name and flavor.
_FLAVORS = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
}
_CONVERTERS = {
    "bf16": None,
    "fp8_titan": "quantize.linear.float8",
    "mxfp8": "quantize.linear.mx",
}


def _torchtitan(plan: Plan) -> _Options:
    """Return the options of torchtitan."""
    _check_torchtitan(plan)
    model, shards = plan.model, plan.shards[0]
    family, flavor = _FLAVORS[model.name]
    is_selective = plan.recompute == "selective"
    backend = plan.dispatch if plan.dispatch != DISPATCHES[0] else None
    return {
        "--model.name": family,
        "--model.flavor": flavor,
        "--training.seq_len": plan.seq_len,
        "--training.global_batch_size": plan.global_batch,
        "--parallelism.data_parallel_replicate_degree": plan.dp * plan.cp // shards,
        "--parallelism.data_parallel_shard_degree": shards // plan.cp,
        "--parallelism.tensor_parallel_degree": plan.tp,
        "--parallelism.context_parallel_degree": plan.cp,
        f"{_PIPELINE}_degree": plan.pp,
        "--activation_checkpoint.mode": plan.recompute,
        **_torchtitan_stages(plan),
        f"{_PIPELINE}_microbatch_size": plan.micro_batch if plan.pp > 1 else None,
        "--training.local_batch_size": plan.micro_batch
        * (plan.micro_batches if plan.pp > 1 else 1),
        "--activation_checkpoint.selective_ac_option": 2 if is_selective else None,
        "--parallelism.expert_parallel_degree": plan.ep if model.experts else None,
        "--parallelism.expert_parallel_comm_backend": backend,
        "--parallelism.expert_tensor_parallel_degree": plan.etp if model.experts else None,
        "--model.converters": _CONVERTERS[plan.precision],
        "--compile.enable": True,
    }


def _torchtitan_stages(plan: Plan) -> _Options:
    """Return torchtitan's options of a pipeline: its schedule, and the layers of a stage.

    Embedding and head count as layers where the layers alone do not divide, as in Megatron.
    """
    if plan.pp == 1:
        return {}
    options: _Options = {f"{_PIPELINE}_schedule": "Interleaved1F1B" if plan.vp > 1 else "1F1B"}
    layers, parts = plan.model.layers, plan.pp * plan.vp
    ends = next((count for count in range(3) if (layers + count) % parts == 0), None)
    if ends is None:
        if plan.vp > 1:
            raise ConfigError(f"{layers} layers do not divide into {parts} stages")
        return options
    return options | {
        f"{_PIPELINE}_layers_per_stage": (layers + ends) // parts,
        f"{_PIPELINE}_first_stage_less_layers": str(ends // 2),
        f"{_PIPELINE}_last_stage_less_layers": str(min(ends, 1)),
    }


def _check_torchtitan(plan: Plan) -> None:
    """Raise `ConfigError` if torchtitan lacks the model, or a method of the plan."""
    if plan.model.name not in _FLAVORS:
        raise ConfigError(
            f"torchtitan has no flavor of {plan.model.name}; it has {', '.join(_FLAVORS)}"
        )
    if plan.recompute not in {"none", "selective", "full"}:
        raise ConfigError(f"no recompute {plan.recompute}; fix none, selective or full")
    if plan.dispatch not in DISPATCHES:
        raise ConfigError(f"no dispatch {plan.dispatch}; fix one of {', '.join(DISPATCHES)}")
    if plan.shards[0] % plan.cp:
        raise ConfigError(f"cp {plan.cp} does not divide {plan.sharding}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    """Options of a trainer for a plan of one of `trainers`, and the rules that they obey."""

    title: str
    trainers: tuple[str, ...]
    options: Callable[[Plan], _Options]
    rules: tuple[str, ...]


_LAUNCHERS = {
    "megatron": _Launcher(
        title="Megatron",
        trainers=("megatron", "nemo", "nemo-fsdp"),
        options=_megatron,
        rules=MEGATRON_RULES,
    ),
    "torchtitan": _Launcher(
        title="torchtitan", trainers=("fsdp2",), options=_torchtitan, rules=TORCHTITAN_RULES
    ),
}
