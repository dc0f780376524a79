"""Options of ``fastcomm isp``: a table of them by group."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from cloup import OptionGroup

from fastcomm.checks import IMBALANCE, PENALTY
from fastcomm.cli.commands import COMPAT, OUTPUT, WORKLOAD, option
from fastcomm.cli.results import cluster_option, compat_option, top_option
from fastcomm.cli.values import COUNT, Number

_batch = partial(option, group=OptionGroup("Model and batch"))
_space = partial(option, group=OptionGroup("Search space"))
_cost = partial(option, group=OptionGroup("Cost model"))
_shown = partial(option, group=OUTPUT)
_compat = partial(option, group=COMPAT)

_ONLY = ("--compat",)
_NOT = ("--compat",)
_FACTOR: dict[str, Any] = {"metavar": "FACTOR"}
_TABLE: dict[str, Any] = {
    "type": click.Path(exists=True, dir_okay=False),
    "metavar": "FILE",
    "not_with": ("--compat-tables",),
}


def _choice(*values: str) -> dict[str, Any]:
    """Return the attributes of an option with some values; the default is the first."""
    return {"type": click.Choice(values), "default": values[0]}


def _optional(*values: str) -> dict[str, Any]:
    """Return the attributes of an option with some values, without a default."""
    return {"type": click.Choice(values), "metavar": "NAME", "default": None}


BATCH_OPTIONS: list[Callable[[Any], Any]] = [
    _batch(
        "--model",
        metavar="MODEL",
        is_common=True,
        help="Preset (internlm-7b, deepseek-v3, ...), size (7B), TOML file, or Hugging Face "
        "config.json.",
    ),
    _batch(
        "--world-size",
        "--gpus",
        metavar="LIST",
        is_common=True,
        help="Number of GPUs: 128; 64,128; or 64-256 for all multiples of 8.",
    ),
    option(
        "--seq-len",
        metavar="LIST",
        group=WORKLOAD,
        is_common=True,
        help="Sequence length in tokens. As in 64Ki; several make a sweep.",
    ),
    _batch(
        "--global-batch",
        metavar="N",
        is_common=True,
        help="Tokens per step, as in 4Mi; but for internevo, a number without unit counts "
        "sequences.",
    ),
]
_COMMON = [
    *BATCH_OPTIONS,
    cluster_option("a800"),
    _space(
        "--memory",
        "--max-memory",
        metavar="BYTES",
        is_common=True,
        help="Memory limit per GPU, as in 70GiB. Default: that of the cluster.",
    ),
    _space(
        "--trainer",
        **_optional("megatron", "nemo", "nemo-fsdp", "fsdp", "fsdp2", "deepspeed", "internevo"),
        is_common=True,
        help="Trainer whose strategies are searched. Default: megatron on measured GPUs, "
        "else internevo.",
    ),
    _space(
        "--precision",
        metavar="NAME",
        is_common=True,
        help="Precision of linear layers: fp8, or a recipe such as fp8_block. Default: bf16.",
    ),
    _space(
        "--fix",
        metavar="LIST",
        is_common=True,
        help="Values of all strategies, as in tp=8,pp=4: keys of --strategy of isp price.",
    ),
    _space(
        "--algorithms",
        metavar="LIST",
        help="How sequences and weights are divided: some of isp,msp,fsp,mtp (default: all), "
        "or dsp alone.",
    ),
    _space(
        "--pp-sizes",
        metavar="LIST",
        help="Pipeline-parallel sizes to consider, as in 1,2. Default: all that are possible.",
    ),
    _cost(
        "--calibrate",
        metavar="PATH",
        is_common=True,
        help="Use measured links and GEMMs: traces, output of fastcomm metrics, or of "
        "nccl-tests (links alone).",
    ),
]
_SEARCH = [
    _batch("--vocab", metavar="N", help="Vocabulary size. Default: the model's."),
    _batch(
        "--global-batch-min",
        metavar="N",
        help="Minimum tokens per step, instead of --global-batch.",
    ),
    _batch(
        "--global-batch-max",
        metavar="N",
        help="Maximum tokens per step, instead of --global-batch.",
    ),
    _batch("--micro-bsz", metavar="N", help="Sequences of a micro-batch. Default: any number."),
    _batch("--micro-num", metavar="N", help="Micro-batches per step. Default: any number."),
    _space(
        "--sp-sizes",
        metavar="LIST",
        help="Sequence- or tensor-parallel sizes to consider, as in 1,2. Default: all.",
    ),
    _space(
        "--ep-sizes",
        metavar="LIST",
        not_with=_NOT,
        help="Expert-parallel sizes to consider, as in 1,2. Default: all that are possible.",
    ),
    _space(
        "--interleave",
        metavar="LIST",
        not_with=_NOT,
        help="Pipeline stages per rank; several as in 1,2. Default: all.",
    ),
    _space(
        "--any-schedule",
        is_flag=True,
        not_with=_NOT,
        help="Allow fewer micro-batches than pipeline stages.",
    ),
]
_COSTS = [
    _cost(
        "--flash/--no-flash",
        default=None,
        help="Use FlashAttention, or plain attention. Default: FlashAttention.",
    ),
    _cost(
        "--penalty",
        type=Number(PENALTY),
        **_FACTOR,
        help="Time lost by overlap, a share of the shorter part from 0 to 1. Default: 0.2.",
    ),
    _cost(
        "--overlap-grad",
        is_flag=True,
        not_with=_NOT,
        help="Overlap gradient synchronization with the backward pass.",
    ),
    _cost(
        "--grad-sync",
        **_choice("all_reduce", "reduce_scatter"),
        not_with=_NOT,
        help="Collective that synchronizes gradients.",
    ),
    _cost(
        "--param-sync",
        **_choice("broadcast", "all_gather"),
        not_with=_NOT,
        help="Collective that synchronizes parameters.",
    ),
    _cost(
        "--overlap-weights",
        **_choice("layer", "per_op"),
        not_with=_NOT,
        help="GEMMs that overlap the gathers of weights: all of the layer, or one each.",
    ),
    _cost(
        "--comm-model",
        **_choice("call", "ring", "tree"),
        not_with=_NOT,
        help="Add a startup time per collective call, per ring step, or per tree level.",
    ),
    _cost(
        "--imbalance",
        type=Number(IMBALANCE),
        **_FACTOR,
        not_with=_NOT,
        help="Tokens of the busiest rank's experts divided by the mean. Default: 1.",
    ),
    _cost(
        "--dispatch",
        **_choice("copies", "nodes"),
        not_with=_NOT,
        help="Send a token to each of its experts, or once to each of their nodes.",
    ),
    _cost(
        "--overlap-experts",
        is_flag=True,
        not_with=_NOT,
        help="Overlap the all-to-alls of experts with another micro-batch.",
    ),
    _cost(
        "--p2p",
        **_choice("whole", "scatter"),
        not_with=_NOT,
        help="Activations an mtp rank sends on: all, or its share (scatter).",
    ),
    _cost("--gemm-table", **_TABLE, help="Measured GEMMs: CSV with key_bytesxmacs and lat_s."),
    _cost(
        "--attention-table",
        **_TABLE,
        help="Measured attention: CSV with b, s, h_local, is_fwd and lat_s.",
    ),
    compat_option("isp-2025", "isp-2024", of="the original search of 2025, or of 2024"),
    _compat(
        "--compat-config",
        "config_path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="JSON file with the keys of the original simulator; options override it.",
    ),
    _compat(
        "--compat-tables",
        type=click.Path(exists=True, file_okay=False),
        metavar="DIR",
        help="Measured GEMMs and attention: directory with linear_<gpu>.csv and fa_<gpu>.csv.",
    ),
    _compat(
        "--strict-batch",
        is_flag=True,
        needs=_ONLY,
        help="Try all divisors of the batch, not only sizes up to its root (with --compat).",
    ),
    _compat(
        "--overlap-wdp",
        is_flag=True,
        needs=_ONLY,
        help="Overlap the reduction of gradients with compute (with --compat).",
    ),
]
_SHOWN = [
    top_option(6, not_with=("--explain", "--trainer-args", "--launch")),
    _shown(
        "--explain",
        is_common=True,
        type=COUNT,
        not_with=("--trainer-args",),
        help="Break down the step time of strategy N of the ranking.",
    ),
    _shown(
        "--sensitivity",
        is_flag=True,
        not_with=("--compat", "--explain", "--trainer-args"),
        help="Show what faster links or more memory would change.",
    ),
    _shown(
        "--trainer-args",
        type=click.Choice(["megatron", "internevo"]),
        metavar="NAME",
        help="Print the best strategy of InternEvo's search as arguments of megatron or "
        "internevo.",
    ),
    _shown(
        "--launch",
        is_common=True,
        type=click.Choice(["megatron", "torchtitan"]),
        metavar="NAME",
        not_with=("--explain", "--trainer-args"),
        help="Print the best strategy as arguments that megatron or torchtitan accepts.",
    ),
]

ISP_OPTIONS: list[Callable[[Any], Any]] = [*_COMMON, *_SEARCH, *_COSTS, *_SHOWN]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """What is printed of a search."""

    top: int = 6
    explain: int | None = None
    sensitivity: bool = False
    trainer_args: str | None = None
    launch: str | None = None
