"""Options of analyses that need no traces: strategies of a job, and the all-to-all of experts.

As in `options`, a field has the name and the default of the command's option.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from fastcomm.checks import DTYPE_BYTES, IMBALANCE, PENALTY, non_default
from fastcomm.errors import ConfigError
from fastcomm.option_fields import CheckedOptions
from fastcomm.options import BandwidthText

Dtype = Literal["float16", "bfloat16", "float32", "float64", "float8"]
Distinct = Literal["uniform", "resample"]
# How popular experts are.
Law = Literal["zipf", "bounded", "uniform", "popularity", "gate", "bimodal"]
# Which replica of an expert a token takes.
ReplicaRule = Literal["random", "round-robin", "local"]
# A quantity such as 64Ki, or several: "64,128", (64, 128).
Quantity = str | float | None
Quantities = str | float | tuple[int, ...] | None

# The laws, and the original simulator, under which an option of a workload has no effect.
_WITHOUT_EFFECT = {
    "zipf_alpha": ("law uniform", "law popularity", "law gate"),
    "distinct": ("law gate", "law bimodal", "compat seed"),
    "shuffle": ("law uniform", "law gate", "law bimodal", "compat seed"),
    "law": ("compat seed",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions(CheckedOptions):
    """The shape of an expert all-to-all, and how tokens are routed; None is `Recipe`'s default.

    `law` is how popular experts are. `compat` draws what the original simulator draws.
    """

    num_nodes: int | None = None
    gpus_per_node: int | None = None
    experts_per_gpu: int | None = None
    seq_len: int | None = None
    batch_size: int | None = None
    embed_size: int | None = None
    topk: int | None = None
    num_layers: int | None = None
    iter_num: int | None = None
    dtype: Dtype | None = None
    zipf_alpha: float | None = None
    seed: int | None = None
    distinct: Distinct | None = None
    shuffle: bool | None = None
    law: Law | None = None
    compat: Literal["seed"] | None = None

    def __post_init__(self) -> None:
        """Check that no option is given that the law, or the original, does not use."""
        CheckedOptions.__post_init__(self)
        for name, rules in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            for rule in () if value is None or value is False else rules:
                option, _, choice = rule.partition(" ")
                if getattr(self, option) == choice:
                    raise ConfigError(f"{name} has no effect with {rule}; leave one out")

    def recipe_values(self) -> dict[str, Any]:
        """Return the fields of a `Recipe` that these options set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["law"] = values.pop("compat") or values["law"]
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions(CheckedOptions):
    """The network of an expert all-to-all, and what is sent.

    `cluster` is a TOML file or a shipped cluster, `bw_inter` and `bw_intra` the bandwidths of a
    GPU between nodes and inside its node, with their units ("50GB/s"). `inter_start` and
    `intra_start` are startup times with their units ("2us"); `incast` is the share by which
    each sender beyond the first slows a receiver down. A token is as large as the workload
    says, unless `token_bytes` and `combine_bytes` say it.
    """

    cluster: str | Path | None = None
    bw_inter: BandwidthText = None
    bw_intra: BandwidthText = None
    inter_efficiency: float = 1.0
    intra_efficiency: float = 1.0
    inter_start: str | float = "0us"
    intra_start: str | float = "0us"
    incast: float = 0.0
    token_bytes: int | None = None
    combine_bytes: int | None = None
    demand: Literal["copies", "unique"] = "copies"
    decomposition: Literal["threshold", "incremental", "assignment"] = "threshold"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(CheckedOptions):
    """What a search for strategies asks: model, GPUs, batch, cluster, and what is allowed.

    Quantities are numbers or texts ("64Ki"). `model`, `world_size` (GPUs) and `seq_len`
    (tokens) are required, and the tokens of a step as `global_batch`, as a range of it, or as
    `micro_bsz` and `micro_num`. None stands for the default of the model or the cluster, and
    for every value of a size such as `pp_sizes`.
    """

    model: str | Path | None = None
    vocab: Quantity = None
    world_size: Quantities = None
    seq_len: Quantities = None
    global_batch: Quantity = None
    global_batch_min: Quantity = None
    global_batch_max: Quantity = None
    micro_bsz: Quantity = None
    micro_num: Quantity = None
    cluster: str | Path | None = None
    memory: Quantity = None
    trainer: (
        Literal["megatron", "nemo", "nemo-fsdp", "fsdp", "fsdp2", "deepspeed", "internevo"]
        | None
    ) = None
    precision: str | None = None
    fix: str | None = None
    algorithms: str | None = None
    pp_sizes: Quantities = None
    sp_sizes: Quantities = None
    flash: bool | None = None
    penalty: float | None = None
    overlap_grad: bool = False
    grad_sync: Literal["all_reduce", "reduce_scatter"] = "all_reduce"
    param_sync: Literal["broadcast", "all_gather"] = "broadcast"
    overlap_weights: Literal["layer", "per_op"] = "layer"
    comm_model: Literal["call", "ring", "tree"] = "call"
    interleave: Quantities = None
    ep_sizes: Quantities = None
    imbalance: float | None = None
    dispatch: Literal["copies", "nodes"] = "copies"
    overlap_experts: bool = False
    p2p: Literal["whole", "scatter"] = "whole"
    any_schedule: bool = False
    gemm_table: str | Path | None = None
    attention_table: str | Path | None = None
    calibrate: str | Path | None = None
    compat: Literal["isp-2025", "isp-2024"] | None = None
    compat_tables: str | Path | None = None
    strict_batch: bool = False
    overlap_wdp: bool = False
    dtype_size: int | None = None

    def __post_init__(self) -> None:
        """Check that no text is empty and that numbers are in their ranges."""
        CheckedOptions.__post_init__(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if value in ("", ()):
                raise ConfigError(f"missing value of {field.name}")
            if isinstance(value, tuple) and len(value) == 1:
                object.__setattr__(self, field.name, value[0])
        for name, within in (
            ("penalty", PENALTY),
            ("imbalance", IMBALANCE),
            ("dtype_size", DTYPE_BYTES),
        ):
            if (value := getattr(self, name)) is not None:
                within.check(value, name.replace("_", " "))

    def over(self, base: Self) -> Self:
        """Return `base` with what differs from the defaults here; a batch replaces a range."""
        user_values: dict[str, Any] = {name: getattr(self, name) for name in non_default(self)}
        if any(name.startswith("global_batch") for name in user_values):
            base = replace(
                base, global_batch=None, global_batch_min=None, global_batch_max=None
            )
        return replace(base, **user_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(CheckedOptions):
    """What is asked of one strategy: model, GPUs, batch (tokens), cluster, and the strategy."""

    model: str | Path | None = None
    world_size: Quantities = None
    seq_len: Quantities = None
    global_batch: Quantity = None
    cluster: str | Path | None = None
    strategy: str | None = None
