"""``fastcomm isp``."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from cloup import OptionGroup

from fastcomm.checks import IMBALANCE, PENALTY
from fastcomm.cli.commands import (
    COMPAT,
    LAYOUT,
    OUTPUT,
    WORKLOAD,
    OptionsCommand,
    option,
)
from fastcomm.cli.messages import warn
from fastcomm.cli.options import COUNT, Number, builds, with_options
from fastcomm.cli.results import (
    ResultFiles,
    cluster_option,
    compat_option,
    print_json,
    result_options,
    top_option,
)
from fastcomm.errors import ConfigError
from fastcomm.options import SearchOptions
from fastcomm.units import parse_quantity

if TYPE_CHECKING:
    from fastcomm.isp import Question
    from fastcomm.isp.calibration import Setting
    from fastcomm.isp.result import HardwareChange, SearchResult
    from fastcomm.isp.search import SearchSweep

_EXAMPLES = """\b
Examples:
  fastcomm isp --model internlm-7b --world-size 128 --seq-len 64Ki --global-batch 4Mi
  fastcomm isp --model llama3-8b --world-size 64 --seq-len 8Ki --global-batch 4Mi --cluster h100
  fastcomm isp --model 7B --world-size 64,128,256 --seq-len 4Ki,64Ki,256Ki --global-batch 4Mi
"""

_BATCH = OptionGroup("Model and batch")
_SPACE = OptionGroup("Search space")
_COST = OptionGroup("Cost model")
_TABLE = click.Path(exists=True, dir_okay=False)

_COMMON = [
    option(
        "--model",
        metavar="MODEL",
        group=_BATCH,
        is_common=True,
        help="Preset (internlm-7b, deepseek-v3, ...), size (7B), TOML file, or Hugging Face "
        "config.json.",
    ),
    option(
        "--world-size",
        metavar="LIST",
        group=_BATCH,
        is_common=True,
        help="Number of GPUs: 128, 64,128, or 64-256 for all whole nodes between.",
    ),
    option(
        "--seq-len",
        metavar="LIST",
        group=WORKLOAD,
        is_common=True,
        help="Sequence length in tokens, as in 64Ki. Several make a sweep.",
    ),
    option(
        "--global-batch",
        metavar="N",
        group=_BATCH,
        is_common=True,
        help="Tokens per step, as in 4Mi.",
    ),
    cluster_option,
    option(
        "--memory",
        metavar="BYTES",
        group=_SPACE,
        is_common=True,
        help="Memory limit per GPU, as in 70GiB. Default: that of the cluster.",
    ),
    option(
        "--algorithms",
        metavar="LIST",
        group=_SPACE,
        is_common=True,
        help="Consider only these of isp,msp,fsp,mtp; or dsp alone.",
    ),
    option(
        "--pp",
        metavar="LIST",
        group=LAYOUT,
        is_common=True,
        help="Pipeline-parallel size. Default: every possible one; 1,2 are two.",
    ),
    option(
        "--calibrate",
        metavar="PATH",
        group=_COST,
        is_common=True,
        help="Use measured links and GEMMs: traces, output of fastcomm metrics, or of "
        "nccl-tests (links alone).",
    ),
]
_SEARCH = [
    option("--vocab", metavar="N", group=_BATCH, help="Vocabulary size. Default: the model's."),
    option(
        "--global-batch-min",
        metavar="N",
        group=_BATCH,
        help="Minimum tokens per step, instead of --global-batch.",
    ),
    option(
        "--global-batch-max",
        metavar="N",
        group=_BATCH,
        help="Maximum tokens per step, instead of --global-batch.",
    ),
    option("--micro-bsz", metavar="N", group=_BATCH, help="Micro-batch size. Default: any."),
    option(
        "--micro-num", metavar="N", group=_BATCH, help="Micro-batches. Default: any number."
    ),
    option(
        "--sp",
        metavar="LIST",
        group=_SPACE,
        help="Sequence- or tensor-parallel size. Default: every possible one.",
    ),
    option(
        "--ep",
        metavar="LIST",
        group=LAYOUT,
        help="Expert-parallel size. Default: every possible one; 1,2 are two.",
    ),
    option(
        "--interleave",
        metavar="LIST",
        group=_SPACE,
        help="Pipeline stages per rank. Default: every possible number.",
    ),
    option(
        "--any-schedule",
        is_flag=True,
        group=_SPACE,
        help="Allow fewer micro-batches than pipeline stages.",
    ),
]
_COSTS = [
    option(
        "--flash/--no-flash",
        default=None,
        group=_COST,
        help="Use FlashAttention, or plain attention. Default: FlashAttention.",
    ),
    option(
        "--penalty",
        type=Number(PENALTY),
        metavar="FACTOR",
        group=_COST,
        help="Cost of overlap, as a share of the shorter part. Default: 0.2.",
    ),
    option(
        "--overlap-grad",
        is_flag=True,
        group=_COST,
        help="Overlap gradient synchronization with the backward pass.",
    ),
    option(
        "--grad-sync",
        type=click.Choice(["all_reduce", "reduce_scatter"]),
        default="all_reduce",
        group=_COST,
        help="Collective that synchronizes gradients.",
    ),
    option(
        "--param-sync",
        type=click.Choice(["broadcast", "all_gather"]),
        default="broadcast",
        group=_COST,
        help="Collective that synchronizes parameters.",
    ),
    option(
        "--overlap",
        type=click.Choice(["layer", "per_op"]),
        default="layer",
        group=_COST,
        help="What the gathers of a layer overlap with: all its GEMMs, or each its own.",
    ),
    option(
        "--comm-model",
        type=click.Choice(["call", "ring", "tree"]),
        default="call",
        group=_COST,
        help="What pays a startup time: each call, step of a ring, or level of a tree.",
    ),
    option(
        "--imbalance",
        type=Number(IMBALANCE),
        metavar="FACTOR",
        group=_COST,
        help="Tokens of the busiest rank's experts divided by the mean. Default: 1.",
    ),
    option(
        "--dispatch",
        type=click.Choice(["copies", "nodes"]),
        default="copies",
        group=_COST,
        help="Send a token to each of its experts, or once to each of their nodes.",
    ),
    option(
        "--overlap-experts",
        is_flag=True,
        group=_COST,
        help="Overlap the all-to-alls of experts with another micro-batch.",
    ),
    option(
        "--p2p",
        type=click.Choice(["whole", "scatter"]),
        default="whole",
        group=_COST,
        help="What an MTP rank sends to the next stage: everything, or its share.",
    ),
    option(
        "--gemm-table",
        type=_TABLE,
        metavar="FILE",
        group=_COST,
        help="Measured GEMMs: CSV with key_bytesxmacs and lat_s.",
    ),
    option(
        "--attention-table",
        type=_TABLE,
        metavar="FILE",
        group=_COST,
        help="Measured attention: CSV with b, s, h_local, is_fwd and lat_s.",
    ),
    compat_option("isp-2025", "isp-2024"),
    option(
        "--compat-config",
        "config_path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        group=COMPAT,
        help="JSON file with the keys of the original simulator; options override it.",
    ),
    option(
        "--compat-tables",
        type=click.Path(exists=True, file_okay=False),
        metavar="DIR",
        group=COMPAT,
        help="Directory with linear_<gpu>.csv and fa_<gpu>.csv (with --compat).",
    ),
    option(
        "--strict-batch",
        is_flag=True,
        group=COMPAT,
        help="Consider all divisors, not squares alone (with --compat).",
    ),
    option(
        "--overlap-wdp",
        is_flag=True,
        group=COMPAT,
        help="Overlap the reduction of gradients (with --compat).",
    ),
]
_SHOWN = [
    top_option(6),
    option(
        "--explain",
        type=COUNT,
        group=OUTPUT,
        is_common=True,
        help="Explain the cost of strategy N of the ranking.",
    ),
    option(
        "--sensitivity",
        is_flag=True,
        group=OUTPUT,
        is_common=True,
        help="Show what faster links or more memory would change.",
    ),
    option(
        "--trainer-args",
        type=click.Choice(["megatron", "internevo"]),
        metavar="NAME",
        group=OUTPUT,
        is_common=True,
        help="Print the best strategy as arguments of megatron or internevo.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """What is printed of a search."""

    top: int = 6
    explain: int | None = None
    sensitivity: bool = False
    trainer_args: str | None = None


@click.command("isp", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@with_options([*_COMMON, *_SEARCH, *_COSTS, *_SHOWN])
@result_options("isp.json, and every strategy as CSV and Parquet")
@builds(options=SearchOptions, showing=ShowOptions, files=ResultFiles)
def run(
    *,
    options: SearchOptions,
    config_path: Path | None,
    showing: ShowOptions,
    files: ResultFiles,
) -> None:
    """Find the fastest parallel strategy that fits in memory.

    Estimates every possible strategy by closed formulas, and ranks them by tokens/s/GPU: four
    kinds of sequence parallelism, sharding of weights, gradients and optimizer states, pipeline
    stages, micro-batches, and recompute. Runs nothing. --model, --world-size, --seq-len and a
    batch are required.
    """
    from fastcomm import isp
    from fastcomm.isp.calibration import setting

    if config_path is not None:
        from fastcomm.compat.isp_space import config_file

        options = options.over(config_file(config_path))
    warn(_decimal_units(options))
    lengths = isp.numbers(options.seq_len, "sequence length") or (0,)
    if options.compat and showing.sensitivity:
        raise ConfigError("--sensitivity does not apply to --compat; leave one out")
    if options.compat and len(lengths) > 1:
        raise ConfigError("--compat takes one --seq-len")
    question = isp.question_of(options)
    using = setting(options)
    if len(lengths) > 1:
        _sweep(question, using, lengths, files)
        return
    result = replace(
        _searched(question, using, options), top=showing.top, calibration=using.calibration
    )
    if showing.sensitivity:
        result = replace(result, sensitivity=_changes(result, using))
    _write(result, files)
    if files.as_json:
        print_json(result)
    elif result.feasible:
        _show(result, showing)
    if not result.feasible:
        from fastcomm.errors import FastcommError

        raise FastcommError(result.nearest())


def _searched(question: "Question", using: "Setting", options: SearchOptions) -> "SearchResult":
    """Return the result of the search; with --compat by the rules of the original."""
    if options.compat is None:
        from fastcomm.isp.search import search

        return search(question, using.cluster, attention=using.attention)
    from fastcomm.compat import isp

    return isp.answer(question, isp.rules_of(options), using)


def _write(result: "SearchResult | SearchSweep", files: ResultFiles) -> None:
    """Write the files of --output and the page of --html, where these are given."""
    if files.output is not None:
        from fastcomm.report.isp import write_search

        write_search(result, files.output, xlsx=files.xlsx)
    if files.html is not None:
        from fastcomm.report.html import isp as page
        from fastcomm.report.html import write as write_page

        write_page(page.page(result), files.html)


_DECIMAL = re.compile(r"([0-9.]+)\s*([kKmMgGtT])(?:[bB]|bytes)?")
_TOKENS = ("seq_len", "global_batch", "global_batch_min", "global_batch_max")


def _decimal_units(options: SearchOptions) -> Iterator[str]:
    """Yield a warning for each decimal unit: "8k" tokens are 8000, and 8Ki is usual."""
    for name in _TOKENS:
        for part in map(str.strip, str(getattr(options, name)).split(",")):
            if not (match := _DECIMAL.fullmatch(part)):
                continue
            binary = f"{match[1]}{match[2].upper()}i"
            tokens = parse_quantity(part, name.replace("_", " "))
            yield (
                f"--{name.replace('_', '-')} {part} is {tokens} tokens; {binary} is "
                f"{float(match[1]) * parse_quantity(f'1{match[2]}i', name):.0f}"
            )


def _changes(result: "SearchResult", using: "Setting") -> "tuple[HardwareChange, ...]":
    """Return the best strategy after each hardware change, to compare with the best now."""
    from fastcomm.isp.search import sensitivity

    best = result.record(0) if result.feasible else None
    return sensitivity(result.question, using.cluster, best, using.attention)


def _show(result: "SearchResult", showing: ShowOptions) -> None:
    """Print --trainer-args or --explain where one is given, otherwise the ranking."""
    from fastcomm.isp.strategy import snippet
    from fastcomm.report import isp as report

    if showing.trainer_args:
        click.echo(snippet(showing.trainer_args, result.record(0), result.question))
        return
    if showing.explain:
        if showing.explain > result.feasible:
            raise ConfigError(f"--explain: {result.feasible} strategies are feasible")
        report.explain(result, showing.explain - 1)
        return
    report.show(result, result.top)
    if result.calibration:
        report.calibration(result.calibration)
    if result.sensitivity is not None:
        report.changes(result.sensitivity)


def _sweep(
    question: "Question", using: "Setting", lengths: tuple[int, ...], files: ResultFiles
) -> None:
    """Search every length (in tokens) and world size, and print and write the results."""
    from fastcomm.isp.search import sweep
    from fastcomm.report import isp as report

    result = sweep(question, using.cluster, lengths, using.attention)
    _write(result, files)
    if files.as_json:
        print_json(result)
    else:
        report.heat_map(result)
        if using.calibration:
            report.calibration(using.calibration)
