"""Options of workloads and of the simulated all-to-all of experts."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from fastcomm.checks import EFFICIENCY, FACTOR, GPUS_PER_NODE, RANKS, REPLICAS, Range
from fastcomm.option_fields import (
    COST,
    LAYOUT,
    NETWORK,
    WORKLOAD,
    CheckedOptions,
    option_field,
)
from fastcomm.options import cluster_field, compat_field, exchange_costs_field, model_field
from fastcomm.units import Duration

Dtype = Literal["float16", "bfloat16", "float32", "float64", "float8"]
Distinct = Literal["uniform", "resample"]
# How popular experts are.
Law = Literal["zipf", "bounded", "uniform", "popularity", "gate", "bimodal"]
# Which replica of an expert a token takes.
ReplicaRule = Literal["random", "round-robin", "local"]
MOST_EXPERTS = 1 << 24
MOST_TOKENS = 1 << 40  # of a layer
MOST_LAYERS = 1 << 20  # of all iterations


def _shape(text: str, least: int, most: int, *, is_common: bool = False) -> Any:
    """Return the field of a size of a workload, whose default is that of `Recipe`."""
    limits = Range(least, most)
    return option_field(text, group=WORKLOAD, limits=limits, is_common=is_common)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions(CheckedOptions):
    """The shape of an expert all-to-all, and how tokens are routed.

    None is the default of `Recipe`.
    """

    num_nodes: int | None = _shape("Number of nodes.", 1, 1 << 16, is_common=True)
    gpus_per_node: int | None = option_field(
        "GPUs per node.", group=WORKLOAD, limits=GPUS_PER_NODE
    )
    experts_per_gpu: int | None = _shape("Experts per GPU.", 1, MOST_EXPERTS)
    seq_len: int | None = _shape("Sequence length in tokens.", 0, MOST_TOKENS, is_common=True)
    batch_size: int | None = _shape("Number of sequences in a layer.", 0, MOST_TOKENS)
    embed_size: int | None = _shape("Elements per token.", 1, 1 << 30)
    topk: int | None = _shape("Experts per token.", 1, 1 << 16)
    num_layers: int | None = _shape("Layers per iteration.", 1, MOST_LAYERS)
    iter_num: int | None = _shape("Number of iterations.", 1, MOST_LAYERS)
    dtype: Dtype | None = option_field(
        f"Type of the elements: {', '.join(get_args(Dtype))}.", group=WORKLOAD, metavar="NAME"
    )
    zipf_alpha: float | None = option_field(
        "Exponent of the Zipf law.",
        group=WORKLOAD,
        limits=Range(0, 100),
        is_common=True,
        not_with=("law uniform", "law popularity", "law gate"),
    )
    seed: int | None = option_field(
        "Random seed. Default: 0.", group=WORKLOAD, limits=Range(0, (1 << 64) - 1)
    )
    compat: Literal["seed"] | None = compat_field(
        "the workload of the original simulator", "seed"
    )
    law: Law | None = option_field(
        f"How popular experts are: {', '.join(get_args(Law))}. Default: zipf.",
        group=WORKLOAD,
        metavar="NAME",
        is_common=True,
        not_with=("compat seed",),
    )
    distinct: Distinct | None = option_field(
        "How a repeated expert of a token is replaced: by any other, or by the law.",
        group=WORKLOAD,
        not_with=("law gate", "law bimodal", "compat seed"),
    )
    shuffle: bool | None = option_field(
        "Randomize which experts are popular.",
        group=WORKLOAD,
        not_with=("law uniform", "law gate", "law bimodal", "compat seed"),
    )

    expert_groups: int | None = option_field(
        "Groups of experts in a row (with --law gate). Default: one per node.",
        group=WORKLOAD,
        limits=Range(0, MOST_EXPERTS),
        needs=("law gate",),
    )
    top_groups: int | None = option_field(
        "Groups that the experts of a token lie in (with --law gate). Default: 4 at most.",
        group=WORKLOAD,
        limits=Range(0, MOST_EXPERTS),
        needs=("law gate",),
    )

    def recipe_values(self) -> dict[str, Any]:
        """Return the fields of a `Recipe` that these options set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["law"] = values.pop("compat") or values["law"]
        return {name: value for name, value in values.items() if value is not None}


def _efficiency(of: str) -> Any:
    """Return the field of the share of a bandwidth that is reached."""
    text = f"Share of --{of} that is reached."
    return option_field(text, 1.0, group=NETWORK, limits=EFFICIENCY)


def _start(place: str) -> Any:
    """Return the field of a startup time."""
    text = f"Startup time of a message {place}, as in 2us."
    return option_field(text, Duration("0us", ""), group=NETWORK)


def _bytes(text: str) -> Any:
    """Return the field of the size of a token."""
    return option_field(text, group=NETWORK, limits=Range(1, 1 << 40), metavar="N")


_COPYING = ("fast", "fast-published", "direct", "spreadout", "hierarchical")  # schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions(CheckedOptions):
    """The network of an expert all-to-all, and what is sent.

    A token is as large as the workload says, unless `token_bytes` and `combine_bytes` say it. A
    bandwidth needs a unit, but for a workload of the original simulator.
    """

    cluster: str | Path | None = cluster_field("none or dgx-h100")
    bw_inter: str | float | None = option_field(
        "NIC bandwidth per GPU, as in 50GB/s or 400Gbit/s. Default: 50GiB/s.",
        group=NETWORK,
        metavar="RATE",
        is_common=True,
    )
    bw_intra: str | float | None = option_field(
        "Bandwidth per GPU inside its node. Default: 400GiB/s.",
        group=NETWORK,
        metavar="RATE",
        is_common=True,
    )
    inter_efficiency: float = _efficiency("bw-inter")
    intra_efficiency: float = _efficiency("bw-intra")
    inter_start: str | Duration = _start("between nodes")
    intra_start: str | Duration = _start("inside a node")
    incast: float = option_field(
        "Slowdown of a receiver per sender beyond the first (with --schedules direct).",
        0.0,
        group=NETWORK,
        limits=FACTOR,
        needs=("--schedules direct",),
    )
    token_bytes: int | None = _bytes("Bytes of a dispatched token.")
    combine_bytes: int | None = _bytes("Bytes of a returned token.")
    demand: Literal["copies", "unique"] = option_field(
        "Send a GPU one copy of a token for each of its experts, or a single one.",
        "copies",
        group=NETWORK,
        needs=tuple(f"--schedules {name}" for name in _COPYING),
    )
    decomposition: Literal["threshold", "incremental", "assignment"] = option_field(
        "How --schedules fast picks its stages: threshold, incremental or assignment.",
        "threshold",
        group=NETWORK,
        metavar="METHOD",
        needs=("--schedules fast",),
    )


_SIZES = ("num-nodes", "gpus-per-node", "experts-per-gpu", "seq-len", "batch-size")
_MORE_SIZES = ("embed-size", "topk", "num-layers", "iter-num", "dtype", "compat")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(CheckedOptions):
    """A model whose experts a cluster's GPUs share, and kernels of its all-to-all."""

    model: str | Path | None = model_field(
        not_with=tuple(f"--{name}" for name in (*_SIZES, *_MORE_SIZES)),
    )
    tokens_per_gpu: int = option_field(
        "Tokens of a GPU (with --model).",
        4096,
        group=WORKLOAD,
        limits=Range(1, 1 << 18),
        is_common=True,
        needs=("--model",),
    )
    ep: int | None = option_field(
        "Expert-parallel size. Here the GPUs that share the experts (with --model).",
        group=LAYOUT,
        limits=RANKS,
        is_common=True,
        needs=("--model",),
    )
    from_run: str | None = option_field(
        "Traces of a run whose all-to-alls are compared, as their bytes are recorded.",
        group=WORKLOAD,
        metavar="PATH",
        is_common=True,
        may_be_empty=False,
        not_with=(
            *("--model", "--law", "--zipf-alpha", "--token-bytes", "--combine-bytes"),
            *(f"--{name}" for name in (*_SIZES, *_MORE_SIZES) if name != "gpus-per-node"),
        ),
    )
    sms: int | None = option_field(
        "SMs of DeepEP's normal kernels (with --model). Default: 20, of V2 24.",
        group=NETWORK,
        limits=Range(1, 1 << 12),
        needs=("--model",),
    )
    dispatch_precision: Literal["bf16", "fp8"] | None = option_field(
        "Precision of dispatched tokens (with --model). Default: that of the kernels.",
        group=NETWORK,
        metavar="NAME",
        needs=("--model",),
    )
    exchange_costs: str | Path | None = exchange_costs_field(
        " Needs --model.", needs=("--model",)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions(CheckedOptions):
    """How experts are replicated and placed, and how many may move."""

    replicas: float = option_field(
        "Physical experts per logical expert.",
        1.5,
        group=WORKLOAD,
        limits=REPLICAS,
        metavar="FACTOR",
        is_common=True,
    )
    groups: int = option_field(
        "Number of expert groups that stay inside a node.",
        1,
        group=WORKLOAD,
        limits=Range(1, 1 << 31),
        is_common=True,
    )
    rule: ReplicaRule = option_field(
        "Which replica a token takes: random, round-robin, or local (its own node first).",
        "local",
        group=WORKLOAD,
        metavar="NAME",
        is_common=True,
    )
    max_moves: int | None = option_field(
        "Most experts of a layer that move to a GPU without them. Default: any number.",
        group=WORKLOAD,
        limits=Range(0, 1 << 30),
        is_common=True,
    )
    expert_bytes: int | None = option_field(
        "Bytes of the weights of an expert, for the time to move it.",
        group=WORKLOAD,
        limits=Range(1, 1 << 40),
        metavar="N",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions(CheckedOptions):
    """The hardware of measured expert all-to-alls."""

    cluster: str | Path | None = cluster_field("dgx-h100", may_be_empty=False)
    calibrate: bool = option_field("Fit the model to measurements.", False, group=COST)
