"""Options of the search of InternEvo, and those that all searches of strategies have."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from fastcomm.checks import DTYPE_BYTES, IMBALANCE, PENALTY, RANKS, non_default
from fastcomm.errors import ConfigError
from fastcomm.option_fields import (
    BATCH,
    COMPAT,
    COST,
    OUTPUT,
    SPACE,
    WORKLOAD,
    CheckedOptions,
    option_field,
)
from fastcomm.options import cluster_field, compat_field, model_field
from fastcomm.units import Count

# A quantity such as 64Ki, or several: "64,128", (64, 128).
QuantityText = str | float | None
CountText = Count | str | float | None  # a `Count` once the options exist
QuantityTexts = str | float | tuple[int, ...] | None
_ORIGINAL = ("--compat",)
_searched = partial(option_field, group=SPACE, may_be_empty=False)
_count = partial(option_field, metavar="N", group=BATCH, may_be_empty=False)
_cost = partial(option_field, group=COST, may_be_empty=False)
_cost_today = partial(_cost, not_with=_ORIGINAL)


def _table(text: str) -> Any:
    """Return the field of a file of measured times."""
    return _cost(text, path="file", not_with=("--compat-tables",))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(CheckedOptions):
    """The model, the GPUs and the batch of a step.

    Quantities are numbers or texts ("64Ki"). None stands for the default of the model or the
    cluster.
    """

    model: str | Path | None = model_field()
    world_size: QuantityTexts = option_field(
        "Number of GPUs. Also 64,128; or 64-256 for all multiples of 8.",
        group=BATCH,
        spellings=("--world-size", "--gpus"),
        metavar="LIST",
        is_common=True,
        may_be_empty=False,
    )
    seq_len: QuantityTexts = option_field(
        "Sequence length in tokens. As in 64Ki; several make a sweep.",
        group=WORKLOAD,
        metavar="LIST",
        is_common=True,
        may_be_empty=False,
    )
    global_batch: QuantityText = option_field(
        "Global batch of a step. Counts tokens, as in 4Mi.",
        group=BATCH,
        metavar="N",
        is_common=True,
        may_be_empty=False,
    )
    cluster: str | Path | None = cluster_field("a800", may_be_empty=False)
    memory: CountText = _searched(
        "Memory limit per GPU, as in 70GiB. Default: that of the cluster.",
        spellings=("--memory", "--max-memory"),
        metavar="BYTES",
        is_common=True,
    )
    vocab: CountText = _count("Vocabulary size. Default: the model's.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(BatchOptions):
    """What is asked of the search of InternEvo: the batch, the cluster, and what is allowed.

    `model`, `world_size` (GPUs) and `seq_len` (tokens) are required, and the tokens of a step
    as `global_batch`, as a range of it, or as `micro_bsz` and `micro_num`. None stands for
    every value of a size such as `pp_sizes`.
    """

    algorithms: str | None = _searched(
        "How sequences and weights are divided: some of isp,msp,fsp,mtp (default: all), or dsp "
        "alone.",
        metavar="LIST",
    )
    pp_sizes: QuantityTexts = _searched(
        "Pipeline-parallel sizes to consider, as in 1,2. Default: all that are possible.",
        metavar="LIST",
    )
    calibrate: str | Path | None = _cost(
        "Fit the model to measurements. Traces, output of fastcomm metrics, or of nccl-tests "
        "(links alone).",
        metavar="PATH",
        is_common=True,
    )
    global_batch_min: CountText = _count("Minimum tokens per step, instead of --global-batch.")
    global_batch_max: CountText = _count("Maximum tokens per step, instead of --global-batch.")
    micro_bsz: CountText = _count("Sequences of a micro-batch. Default: any number.")
    micro_num: CountText = _count("Micro-batches per step. Default: any number.")
    sp_sizes: QuantityTexts = _searched(
        "Sequence- or tensor-parallel sizes to consider, as in 1,2. Default: all.",
        metavar="LIST",
    )
    ep_sizes: QuantityTexts = _searched(
        "Expert-parallel sizes to consider, as in 1,2. Default: all that are possible.",
        metavar="LIST",
        not_with=_ORIGINAL,
    )
    interleave: QuantityTexts = _searched(
        "Pipeline stages per rank; several as in 1,2. Default: all.",
        metavar="LIST",
        not_with=_ORIGINAL,
    )
    any_schedule: bool = _searched(
        "Allow fewer micro-batches than pipeline stages.", False, not_with=_ORIGINAL
    )
    flash: bool | None = _cost(
        "Use FlashAttention, or plain attention. Default: FlashAttention.",
        spellings=("--flash/--no-flash",),
    )
    penalty: float | None = _cost(
        "Time lost by overlap, a share of the shorter part from 0 to 1. Default: 0.2.",
        limits=PENALTY,
    )
    overlap_grad: bool = _cost_today(
        "Overlap gradient synchronization with the backward pass.", False
    )
    grad_sync: Literal["all_reduce", "reduce_scatter"] = _cost_today(
        "Collective that synchronizes gradients.", "all_reduce"
    )
    param_sync: Literal["broadcast", "all_gather"] = _cost_today(
        "Collective that synchronizes parameters.", "broadcast"
    )
    overlap_weights: Literal["layer", "per_op"] = _cost_today(
        "GEMMs that overlap the gathers of weights: all of the layer, or one each.", "layer"
    )
    comm_model: Literal["call", "ring", "tree"] = _cost_today(
        "Add a startup time per collective call, per ring step, or per tree level.", "call"
    )
    imbalance: float | None = _cost_today(
        "Tokens of the busiest rank's experts divided by the mean. Default: 1.",
        limits=IMBALANCE,
    )
    dispatch: Literal["copies", "nodes"] = _cost_today(
        "Send a token to each of its experts, or once to each of their nodes.", "copies"
    )
    overlap_experts: bool = _cost_today(
        "Overlap the all-to-alls of experts with another micro-batch.", False
    )
    p2p: Literal["whole", "scatter"] = _cost_today(
        "Activations an mtp rank sends on: all, or its share (scatter).", "whole"
    )
    gemm_table: str | Path | None = _table("Measured GEMMs: CSV with key_bytesxmacs and lat_s.")
    attention_table: str | Path | None = _table(
        "Measured attention: CSV with b, s, h_local, is_fwd and lat_s."
    )
    compat: Literal["isp-2025", "isp-2024"] | None = compat_field(
        "the original search of 2025, or of 2024", "isp-2025|isp-2024"
    )
    compat_tables: str | Path | None = option_field(
        "Measured GEMMs and attention: directory with linear_<gpu>.csv and fa_<gpu>.csv.",
        group=COMPAT,
        path="directory",
        metavar="DIR",
        may_be_empty=False,
    )
    strict_batch: bool = option_field(
        "Try all divisors of the batch, not only sizes up to its root (with --compat).",
        False,
        group=COMPAT,
        needs=_ORIGINAL,
    )
    overlap_wdp: bool = option_field(
        "Overlap the reduction of gradients with compute (with --compat).",
        False,
        group=COMPAT,
        needs=_ORIGINAL,
    )
    dtype_size: int | None = option_field(
        "Bytes of a parameter, in a configuration of the original simulator.",
        group=None,
        limits=DTYPE_BYTES,
    )

    def __post_init__(self) -> None:
        """Check the values, and take a list of one item as the item."""
        CheckedOptions.__post_init__(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) == 1:
                object.__setattr__(self, field.name, value[0])

    def over(self, base: Self) -> Self:
        """Return `base` with what differs from the defaults here; a batch replaces a range."""
        user_values: dict[str, Any] = {name: getattr(self, name) for name in non_default(self)}
        if any(name.startswith("global_batch") for name in user_values):
            base = replace(
                base, global_batch=None, global_batch_min=None, global_batch_max=None
            )
        return replace(base, **user_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingOptions:
    """What is printed of a ranking of strategies."""

    top: int = 6
    explain: int | None = option_field(
        "Break down the step time of strategy N of the ranking.",
        group=OUTPUT,
        limits=RANKS,
        is_common=True,
        not_with=("--trainer-args", "--launch"),
    )


def with_gpus(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return keyword arguments with `world_size` in place of `gpus`, its other name.

    `where` is the function that a user called. Raises `ConfigError` if both are given.
    """
    if "gpus" not in options:
        return dict(options)
    if "world_size" in options:
        raise ConfigError(f"{where}: pass gpus or world_size, which are the same")
    others = {name: value for name, value in options.items() if name != "gpus"}
    return {**others, "world_size": options["gpus"]}
