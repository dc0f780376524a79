"""Options of ``fastcomm isp``: a table of them by group."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from fastcomm.checks import IMBALANCE, PENALTY, option_name
from fastcomm.cli.commands import option, option_of
from fastcomm.cli.parameter_types import COUNT, Number
from fastcomm.cli.results import compat_option, top_option
from fastcomm.cli.shared_options import cluster_option
from fastcomm.option_fields import COMPAT, OUTPUT, WORKLOAD
from fastcomm.planning_options import SearchOptions
from fastcomm.units import parse_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """What is printed of a search."""

    top: int = 6
    explain: int | None = None
    sensitivity: bool = False
    trainer_args: Literal["megatron", "internevo"] | None = None
    launch: Literal["megatron", "torchtitan"] | None = None


_batch = partial(option_of, SearchOptions, group="Model and batch")
_space = partial(option_of, SearchOptions, group="Search space")
_cost = partial(option_of, SearchOptions, group="Cost model")
_compat = partial(option_of, SearchOptions, group=COMPAT)
_shown = partial(option_of, ShowOptions, group=OUTPUT)

_ORIGINAL = ("--compat",)
_FILE = click.Path(exists=True, dir_okay=False)
_TABLE: dict[str, Any] = {"type": _FILE, "not_with": ("--compat-tables",)}

BATCH_OPTIONS: list[Callable[[Any], Any]] = [
    _batch(
        "model",
        "Preset (internlm-7b, deepseek-v3, ...), size (7B), TOML file, or Hugging Face "
        "config.json.",
        metavar="MODEL",
        is_common=True,
    ),
    _batch(
        "world_size",
        "Number of GPUs: 128; 64,128; or 64-256 for all multiples of 8.",
        spellings=("--world-size", "--gpus"),
        metavar="LIST",
        is_common=True,
    ),
    _batch(
        "seq_len",
        "Sequence length in tokens. As in 64Ki; several make a sweep.",
        group=WORKLOAD,
        metavar="LIST",
        is_common=True,
    ),
    _batch(
        "global_batch",
        "Tokens per step, as in 4Mi. A number without unit counts sequences, for internevo "
        "tokens.",
        metavar="N",
        is_common=True,
    ),
]
ISP_OPTIONS: list[Callable[[Any], Any]] = [
    *BATCH_OPTIONS,
    cluster_option("a800"),
    _space(
        "memory",
        "Memory limit per GPU, as in 70GiB. Default: that of the cluster.",
        spellings=("--memory", "--max-memory"),
        metavar="BYTES",
        is_common=True,
    ),
    _space(
        "trainer",
        "Trainer whose strategies are searched. Default: megatron on measured GPUs, else "
        "internevo.",
        metavar="NAME",
        is_common=True,
    ),
    _space(
        "precision",
        "Precision of linear layers: fp8, or a recipe such as fp8_block. Default: bf16.",
        metavar="NAME",
        is_common=True,
    ),
    _space(
        "fix",
        "Values of all strategies, as in tp=8,pp=4: keys of --strategy of isp price.",
        metavar="LIST",
        is_common=True,
    ),
    _space(
        "algorithms",
        "How sequences and weights are divided: some of isp,msp,fsp,mtp (default: all), or dsp "
        "alone.",
        metavar="LIST",
    ),
    _space(
        "pp_sizes",
        "Pipeline-parallel sizes to consider, as in 1,2. Default: all that are possible.",
        metavar="LIST",
    ),
    _cost(
        "calibrate",
        "Use measured links and GEMMs: traces, output of fastcomm metrics, or of nccl-tests "
        "(links alone).",
        metavar="PATH",
        is_common=True,
    ),
    _batch("vocab", "Vocabulary size. Default: the model's.", metavar="N"),
    _batch(
        "global_batch_min", "Minimum tokens per step, instead of --global-batch.", metavar="N"
    ),
    _batch(
        "global_batch_max", "Maximum tokens per step, instead of --global-batch.", metavar="N"
    ),
    _batch("micro_bsz", "Sequences of a micro-batch. Default: any number.", metavar="N"),
    _batch("micro_num", "Micro-batches per step. Default: any number.", metavar="N"),
    _space(
        "sp_sizes",
        "Sequence- or tensor-parallel sizes to consider, as in 1,2. Default: all.",
        metavar="LIST",
    ),
    _space(
        "ep_sizes",
        "Expert-parallel sizes to consider, as in 1,2. Default: all that are possible.",
        metavar="LIST",
        not_with=_ORIGINAL,
    ),
    _space(
        "interleave",
        "Pipeline stages per rank; several as in 1,2. Default: all.",
        metavar="LIST",
        not_with=_ORIGINAL,
    ),
    _space(
        "any_schedule", "Allow fewer micro-batches than pipeline stages.", not_with=_ORIGINAL
    ),
    _cost(
        "flash",
        "Use FlashAttention, or plain attention. Default: FlashAttention.",
        spellings=("--flash/--no-flash",),
    ),
    _cost(
        "penalty",
        "Time lost by overlap, a share of the shorter part from 0 to 1. Default: 0.2.",
        type=Number(PENALTY),
    ),
    _cost(
        "overlap_grad",
        "Overlap gradient synchronization with the backward pass.",
        not_with=_ORIGINAL,
    ),
    _cost("grad_sync", "Collective that synchronizes gradients.", not_with=_ORIGINAL),
    _cost("param_sync", "Collective that synchronizes parameters.", not_with=_ORIGINAL),
    _cost(
        "overlap_weights",
        "GEMMs that overlap the gathers of weights: all of the layer, or one each.",
        not_with=_ORIGINAL,
    ),
    _cost(
        "comm_model",
        "Add a startup time per collective call, per ring step, or per tree level.",
        not_with=_ORIGINAL,
    ),
    _cost(
        "imbalance",
        "Tokens of the busiest rank's experts divided by the mean. Default: 1.",
        type=Number(IMBALANCE),
        not_with=_ORIGINAL,
    ),
    _cost(
        "dispatch",
        "Send a token to each of its experts, or once to each of their nodes.",
        not_with=_ORIGINAL,
    ),
    _cost(
        "overlap_experts",
        "Overlap the all-to-alls of experts with another micro-batch.",
        not_with=_ORIGINAL,
    ),
    _cost(
        "p2p",
        "Activations an mtp rank sends on: all, or its share (scatter).",
        not_with=_ORIGINAL,
    ),
    _cost("gemm_table", "Measured GEMMs: CSV with key_bytesxmacs and lat_s.", **_TABLE),
    _cost(
        "attention_table",
        "Measured attention: CSV with b, s, h_local, is_fwd and lat_s.",
        **_TABLE,
    ),
    compat_option(SearchOptions, "the original search of 2025, or of 2024"),
    option(
        "--compat-config",
        "config_path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        group=COMPAT,
        help="JSON file with the keys of the original simulator; options override it.",
    ),
    _compat(
        "compat_tables",
        "Measured GEMMs and attention: directory with linear_<gpu>.csv and fa_<gpu>.csv.",
        type=click.Path(exists=True, file_okay=False),
        metavar="DIR",
    ),
    _compat(
        "strict_batch",
        "Try all divisors of the batch, not only sizes up to its root (with --compat).",
        needs=_ORIGINAL,
    ),
    _compat(
        "overlap_wdp",
        "Overlap the reduction of gradients with compute (with --compat).",
        needs=_ORIGINAL,
    ),
    top_option(ShowOptions().top, not_with=("--explain", "--trainer-args", "--launch")),
    _shown(
        "explain",
        "Break down the step time of strategy N of the ranking.",
        type=COUNT,
        not_with=("--trainer-args",),
        is_common=True,
    ),
    _shown(
        "sensitivity",
        "Show what faster links or more memory would change.",
        not_with=("--compat", "--explain", "--trainer-args"),
    ),
    _shown(
        "trainer_args",
        "Print the best strategy of InternEvo's search as arguments of megatron or internevo.",
        metavar="NAME",
    ),
    _shown(
        "launch",
        "Print the best strategy as arguments that megatron or torchtitan accepts.",
        not_with=("--explain", "--trainer-args"),
        metavar="NAME",
        is_common=True,
    ),
]

_DECIMAL = re.compile(r"([0-9.]+)\s*([kKmMgGtT])(?:[bB]|bytes)?")
_TOKENS = ("seq_len", "global_batch", "global_batch_min", "global_batch_max")


def decimal_units(options: SearchOptions) -> Iterator[str]:
    """Yield a warning for each decimal unit: "8k" tokens are 8000, and 8Ki is usual."""
    for name in _TOKENS:
        for part in map(str.strip, str(getattr(options, name)).split(",")):
            if not (match := _DECIMAL.fullmatch(part)):
                continue
            binary = f"{match[1]}{match[2].upper()}i"
            tokens = parse_quantity(part, name.replace("_", " "))
            yield (
                f"{option_name(name)} {part} is {tokens} tokens; {binary} is "
                f"{float(match[1]) * parse_quantity(f'1{match[2]}i', name):.0f}"
            )
