"""``fastcomm isp``."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.checks import IMBALANCE, PENALTY
from fastcomm.cli.messages import warn
from fastcomm.cli.options import COUNT, Number, builds, with_options
from fastcomm.cli.results import ResultFiles, print_json, result_options
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

_OPTIONS = [
    click.option(
        "--model",
        metavar="MODEL",
        help="Preset (internlm-7b, deepseek-v3, ...), size (7B), TOML file, or Hugging Face "
        "config.json.",
    ),
    click.option("--vocab", metavar="N", help="Another size of the vocabulary."),
    click.option(
        "--world-size",
        metavar="GPUS",
        help="GPUs: 128, several (64,128), or 64-256, every whole node from least to most.",
    ),
    click.option(
        "--seq-len", metavar="TOKENS", help="Sequence length, 64Ki; several make a sweep."
    ),
    click.option("--global-batch", metavar="TOKENS", help="Tokens of a step: 4Mi."),
    click.option("--global-batch-min", metavar="TOKENS", help="A range of batches instead."),
    click.option("--global-batch-max", metavar="TOKENS", help="The most of the range."),
    click.option("--micro-bsz", metavar="N", help="Only this micro-batch size."),
    click.option("--micro-num", metavar="N", help="Only this number of micro-batches."),
    click.option(
        "--cluster",
        metavar="NAME|FILE",
        help="a800 (the default), a100, h100, h800, h200, b200, ascend910b, or a TOML file.",
    ),
    click.option("--memory", metavar="BYTES", help="What a strategy may need: 70GiB."),
    click.option(
        "--compare", metavar="LIST", help="Only these of isp,msp,fsp,mtp; or dsp alone."
    ),
    click.option("--pp", metavar="LIST", help="Only these pipeline sizes."),
    click.option("--sp", metavar="LIST", help="Only these sequence (or tensor) shards."),
    click.option("--flash/--no-flash", default=None, help="FlashAttention, as usual, or none."),
    click.option(
        "--penalty",
        type=Number(PENALTY),
        help="What overlap costs: share of the shorter part.  [default: 0.2]",
    ),
    click.option("--overlap-grad", is_flag=True, help="Hide gradients behind the backward."),
    click.option(
        "--grad-sync", type=click.Choice(["all_reduce", "reduce_scatter"]), default="all_reduce"
    ),
    click.option(
        "--param-sync", type=click.Choice(["broadcast", "all_gather"]), default="broadcast"
    ),
    click.option(
        "--overlap",
        type=click.Choice(["layer", "per_op"]),
        default="layer",
        help="What a layer's gathers hide behind: all its products, or each its own.",
    ),
    click.option(
        "--comm-model",
        type=click.Choice(["call", "ring", "tree"]),
        default="call",
        help="What pays a start: each call, each step of a ring, each level of a tree.",
    ),
    click.option(
        "--interleave", metavar="LIST", help="Only these numbers of pipeline stages a rank."
    ),
    click.option("--ep", metavar="LIST", help="Only these spreads of a layer's experts."),
    click.option(
        "--imbalance",
        type=Number(IMBALANCE),
        help="Tokens of the busiest rank's experts over their mean.  [default: 1]",
    ),
    click.option(
        "--dispatch",
        type=click.Choice(["copies", "nodes"]),
        default="copies",
        help="A token goes to each of its experts, or once to each of their nodes.",
    ),
    click.option(
        "--overlap-experts",
        is_flag=True,
        help="Hide the experts' all-to-alls behind another micro-batch.",
    ),
    click.option(
        "--p2p",
        type=click.Choice(["whole", "scatter"]),
        default="whole",
        help="What an MTP rank sends to the next stage: all of it, or its share.",
    ),
    click.option("--any-schedule", is_flag=True, help="Fewer micro-batches than stages, too."),
    click.option(
        "--gemm-table",
        type=click.Path(exists=True, dir_okay=False),
        help="Measured products: CSV with key_bytesxmacs and lat_s.",
    ),
    click.option(
        "--attention-table",
        type=click.Path(exists=True, dir_okay=False),
        help="Measured attention: CSV with b, s, h_local, is_fwd and lat_s.",
    ),
    click.option(
        "--calibrate",
        metavar="PATH",
        help="Links and products as measured: traces; `fastcomm metrics --output` or "
        "nccl-tests' output for links alone.",
    ),
    click.option(
        "--compat",
        type=click.Choice(["isp-2025", "isp-2024"]),
        help="Space, formulas and numbers of the original simulator.",
    ),
    click.option(
        "--tables",
        type=click.Path(exists=True, file_okay=False),
        help="Folder with linear_<gpu>.csv and fa_<gpu>.csv.",
    ),
    click.option("--strict-batch", is_flag=True, help="compat: all divisors, not squares."),
    click.option("--overlap-wdp", is_flag=True, help="compat: hide the gradients' reduction."),
    click.option(
        "--config",
        "config_path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="JSON with the original's keys; options say more.",
    ),
    click.option("--top", type=COUNT, default=6, show_default=True, help="How many to show."),
    click.option("--explain", type=COUNT, help="Walk through one of the ranking."),
    click.option(
        "--sensitivity", is_flag=True, help="What faster links or more memory would change."
    ),
    click.option(
        "--launch",
        type=click.Choice(["megatron", "internevo"]),
        help="Print the winner as a trainer's arguments.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """What is printed of a search."""

    top: int = 6
    explain: int | None = None
    sensitivity: bool = False
    launch: str | None = None


@click.command("isp", epilog=_EXAMPLES)
@with_options(_OPTIONS)
@result_options("Write isp.json, and every strategy as CSV and Parquet.")
@builds(options=SearchOptions, showing=ShowOptions, files=ResultFiles)
def run(
    *,
    options: SearchOptions,
    config_path: Path | None,
    showing: ShowOptions,
    files: ResultFiles,
) -> None:
    """Find the parallel strategy that trains fastest and fits in memory.

    Sequence parallelism in four flavours, shards of weights, gradients and optimizer states,
    pipeline, micro-batches and checkpoints: all that can exist is priced by closed formulas and
    ranked by tokens a GPU and second. Nothing is run.
    """
    from fastcomm import isp
    from fastcomm.isp.calibration import setting

    if config_path is not None:
        from fastcomm.compat.isp_space import config_file

        options = options.over(config_file(config_path))
    warn(_decimal_units(options))
    lengths = isp.numbers(options.seq_len, "sequence length") or (0,)
    if options.compat and showing.sensitivity:
        raise ConfigError("--sensitivity: asks the default mode, leave --compat out")
    if options.compat and len(lengths) > 1:
        raise ConfigError("--compat: one sequence length at a time")
    asked = isp.question_of(options)
    using = setting(options)
    if len(lengths) > 1:
        _sweep(asked, using, lengths, files)
        return
    found = replace(
        _found(asked, using, options), top=showing.top, calibration=using.calibration
    )
    if showing.sensitivity:
        found = replace(found, sensitivity=_changes(found, using))
    _write(found, files)
    if files.as_json:
        print_json(found)
    elif found.feasible:
        _show(found, showing)
    if not found.feasible:
        from fastcomm.errors import FastcommError

        raise FastcommError(found.nearest())


def _found(asked: "Question", using: "Setting", options: SearchOptions) -> "SearchResult":
    """Search, by the original's rules where they are asked for."""
    if options.compat is None:
        from fastcomm.isp.search import search

        return search(asked, using.cluster, attention=using.attention)
    from fastcomm.compat import isp

    return isp.answer(asked, isp.rules_of(options), using)


def _write(found: "SearchResult | SearchSweep", files: ResultFiles) -> None:
    """Write the tables and the page, if they were asked for."""
    if files.output is not None:
        from fastcomm.report.isp import write_search

        write_search(found, files.output, xlsx=files.xlsx)
    if files.html is not None:
        from fastcomm.report.html import isp as page
        from fastcomm.report.html import write as write_page

        write_page(page.page(found), files.html)


_DECIMAL = re.compile(r"([0-9.]+)\s*([kKmMgGtT])(?:[bB]|bytes)?")
_TOKENS = ("seq_len", "global_batch", "global_batch_min", "global_batch_max")


def _decimal_units(options: SearchOptions) -> Iterator[str]:
    """Warn of "8k" tokens, which are 8000, where 8Ki is what is usually meant."""
    for name in _TOKENS:
        for part in map(str.strip, str(getattr(options, name)).split(",")):
            if not (found := _DECIMAL.fullmatch(part)):
                continue
            binary = f"{found[1]}{found[2].upper()}i"
            tokens = parse_quantity(part, name.replace("_", " "))
            yield (
                f"--{name.replace('_', '-')} {part} is {tokens} tokens; {binary} is "
                f"{float(found[1]) * parse_quantity(f'1{found[2]}i', name):.0f}"
            )


def _changes(found: "SearchResult", using: "Setting") -> "tuple[HardwareChange, ...]":
    from fastcomm.isp.search import sensitivity

    best = found.record(0) if found.feasible else None
    return sensitivity(found.question, using.cluster, best, using.attention)


def _show(found: "SearchResult", showing: ShowOptions) -> None:
    from fastcomm.isp.strategy import snippet
    from fastcomm.report import isp as report

    if showing.launch:
        click.echo(snippet(showing.launch, found.record(0), found.question))
        return
    if showing.explain:
        if showing.explain > found.feasible:
            raise ConfigError(f"--explain: {found.feasible} strategies are feasible")
        report.explain(found, showing.explain - 1)
        return
    report.show(found, found.top)
    if found.calibration:
        report.calibration(found.calibration)
    if found.sensitivity is not None:
        report.changes(found.sensitivity)


def _sweep(
    question: "Question", using: "Setting", lengths: tuple[int, ...], files: ResultFiles
) -> None:
    from fastcomm.isp.search import sweep
    from fastcomm.report import isp as report

    found = sweep(question, using.cluster, lengths, using.attention)
    _write(found, files)
    if files.as_json:
        print_json(found)
    else:
        report.heat_map(found)
        if using.calibration:
            report.calibration(using.calibration)
