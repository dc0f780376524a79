"""``fastcomm isp``."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from fastcomm.checks import RANKS, invalid, non_default, option_name
from fastcomm.cli.commands import OptionsCommand, ParentCommand, option, options_of
from fastcomm.cli.messages import warn
from fastcomm.cli.results import (
    ResultFiles,
    exit_if_skipped,
    give,
    print_json,
    result_options,
    top_option,
)
from fastcomm.cli.runs import builds, with_options
from fastcomm.errors import ConfigError, FastcommError, inert
from fastcomm.option_fields import BATCH, COMPAT, COST, OUTPUT, option_field
from fastcomm.planning.options import PlanOptions, SearchOptions
from fastcomm.units import parse_quantity

if TYPE_CHECKING:
    from fastcomm.isp.calibration import Setting
    from fastcomm.isp.question import Question
    from fastcomm.isp.result import SearchResult
    from fastcomm.isp.search import SearchSweep
    from fastcomm.models import Model
    from fastcomm.planning.price import Constants
    from fastcomm.planning.runs import RunCalibration
    from fastcomm.planning.search import PlanSearch

_ORIGINAL = ("compat_tables", "strict_batch", "overlap_wdp")
_DECIMAL = re.compile(r"([0-9.]+)\s*([kKmMgGtT])(?:[bB]|bytes)?")
_TOKENS = ("seq_len", "global_batch", "global_batch_min", "global_batch_max")
_EXAMPLES = """\b
Examples:
  fastcomm isp --model llama3-70b --gpus 256 --cluster h100 --global-batch 512
  fastcomm isp --model llama3-8b --gpus 64 --cluster b200 --global-batch 4Mi \\
    --trainer fsdp2 --precision fp8 --launch torchtitan
  fastcomm isp --model 7B --world-size 128 --seq-len 64Ki --global-batch 4Mi
  fastcomm isp --model 7B --world-size 64,128,256 --seq-len 4Ki,64Ki \\
    --global-batch 4Mi
"""
_PRICE_EXAMPLES = """\b
Examples:
  fastcomm isp price --model llama3-70b --world-size 64 --seq-len 8Ki \\
    --global-batch 1Mi --cluster dgx-h100 --strategy tp=4,pp=4,vp=5
  fastcomm isp price --model llama3-8b --world-size 8 --seq-len 8Ki \\
    --global-batch 1Mi --cluster gb200-nvl72 \\
    --strategy sharding=zero3,precision=mxfp8,recompute=selective
"""
_EVALUATE_EXAMPLES = """\b
Examples:
  fastcomm isp evaluate runs.csv
  fastcomm isp evaluate runs.csv --models models.csv --json
  fastcomm isp evaluate runs.csv --calibrate-from runs.csv
"""
_ROWS = 10
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_models = option(
    "--models",
    type=_FILE,
    metavar="FILE",
    group=BATCH,
    is_common=True,
    help="CSV of model shapes, a model a row, besides the presets.",
)
_calibrate_from = option(
    "--calibrate-from",
    type=_FILE,
    metavar="FILE",
    group=COST,
    is_common=True,
    help="Fit efficiencies, overlap and overheads to the runs of a CSV first.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """What is printed of a search."""

    top: int = 6
    explain: int | None = option_field(
        "Break down the step time of strategy N of the ranking.",
        group=OUTPUT,
        limits=RANKS,
        is_common=True,
        not_with=("trainer_args",),
    )
    sensitivity: bool = option_field(
        "Show what faster links or more memory would change.",
        False,
        group=OUTPUT,
        not_with=("--compat", "explain", "trainer_args"),
    )
    trainer_args: Literal["megatron", "internevo"] | None = option_field(
        "Print the best strategy of InternEvo's search as arguments of megatron or internevo.",
        group=OUTPUT,
        metavar="NAME",
    )
    launch: Literal["megatron", "torchtitan"] | None = option_field(
        "Print the best strategy as arguments that megatron or torchtitan accepts.",
        group=OUTPUT,
        metavar="NAME",
        is_common=True,
        not_with=("explain", "trainer_args"),
    )


ISP_OPTIONS: list[Callable[[Any], Any]] = [
    *options_of(SearchOptions, without=_ORIGINAL),
    option(
        "--compat-config",
        "config_path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        group=COMPAT,
        help="JSON file with the keys of the original simulator; options override it.",
    ),
    *options_of(SearchOptions, *_ORIGINAL),
    top_option(ShowOptions().top, not_with=("--explain", "--trainer-args", "--launch")),
    *options_of(ShowOptions),
]


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


@click.command("isp", cls=ParentCommand, has_tables=True, epilog=_EXAMPLES)
@with_options(ISP_OPTIONS)
@result_options("isp.json, and every strategy as CSV and Parquet")
@builds(options=SearchOptions, showing=ShowOptions)
def run(
    *,
    options: SearchOptions,
    config_path: Path | None,
    showing: ShowOptions,
    files: ResultFiles,
) -> None:
    """Find the fastest parallel strategy that fits in memory.

    Estimates every strategy that a trainer can run, and ranks them by tokens/s/GPU: tensor,
    pipeline, context and expert parallelism, sharding, micro-batches, and recompute. Runs
    nothing. On a measured GPU, kernels and links are those measured there. The search of
    InternEvo ranks four kinds of sequence parallelism by closed formulas. --model, --world-size
    and a batch are required, and for InternEvo --seq-len (otherwise 8192 by default).
    """
    from fastcomm.trainers import trainer_of

    if config_path is not None:
        from fastcomm.compat.isp import config_file

        _search_sequences(options.over(config_file(config_path)), showing, files)
    elif trainer_of(options) == "internevo":
        _search_sequences(options, showing, files)
    else:
        _search_plans(options, showing, files)


def _search_sequences(options: SearchOptions, showing: ShowOptions, files: ResultFiles) -> None:
    """Search InternEvo's strategies, and print and write the result."""
    from fastcomm.isp import question as isp_question
    from fastcomm.isp.calibration import setting

    if showing.launch is not None:
        raise ConfigError("--launch: InternEvo's search has --trainer-args; pass --trainer")
    warn(decimal_units(options))
    lengths = isp_question.numbers(options.seq_len, "sequence length") or (0,)
    if len(lengths) > 1:
        _check_sweep(options, showing)
    question = isp_question.question_of(options)
    tables = None
    if options.compat_tables:
        from fastcomm.compat.isp import compat_tables

        tables = compat_tables(options)
    using = setting(options, tables)
    if len(lengths) > 1:
        _sweep(question, using, lengths, files)
        return
    result = replace(
        _searched(question, using, options), top=showing.top, calibration=using.calibration
    )
    if showing.sensitivity:
        from fastcomm.isp.search import sensitivity

        best = result.record(0) if result.feasible else None
        changes = sensitivity(question, using.cluster, best, using.attention)
        result = replace(result, sensitivity=changes)
    if result.feasible:
        result = _explained(result, showing)
    _write_page(result, files)
    give(result, files, "isp", partial(_show, showing=showing), table="strategies")
    if not result.feasible:
        raise FastcommError(result.nearest())


def _search_plans(options: SearchOptions, showing: ShowOptions, files: ResultFiles) -> None:
    """Search the strategies of a trainer, and print and write the result."""
    from fastcomm.planning import launch
    from fastcomm.planning import tables as planning_tables
    from fastcomm.planning.search import search_plans

    for name, is_used in (
        ("--sensitivity", showing.sensitivity),
        ("--trainer-args", showing.trainer_args),
        ("--xlsx", files.xlsx),
    ):
        if is_used:
            raise ConfigError(f"{name} has no effect without --trainer internevo")
    warn(decimal_units(options))
    result = replace(search_plans(options), top=showing.top)
    _write_plans(result, files)
    if not result.plans:
        if files.as_json:
            print_json(result)
        raise FastcommError(result.nearest())
    if showing.launch is not None:
        result = replace(result, launch=launch.launch(showing.launch, result.plans[0].plan))
    place = showing.explain
    if place is not None and place > len(result.layouts):
        raise invalid("--explain", str(place), f"1 to {len(result.layouts)}, the layouts")
    if files.as_json:
        print_json(result)
    elif result.launch is not None:
        click.echo(result.launch)
    elif place is not None:
        planning_tables.show_price(result.explained(place - 1))
    else:
        planning_tables.show_search(result, showing.top)


def _write_plans(result: "PlanSearch", files: ResultFiles) -> None:
    """Write the page of --html, and of strategies that fit the files of --output."""
    if files.html is not None:
        from fastcomm.planning import page as planning_page
        from fastcomm.show.pages import write as write_page

        write_page(planning_page.page(result), files.html)
    if files.output is not None and result.plans:
        from fastcomm.show.files import write_result

        write_result(result, files.output, "isp", "strategies")


def _check_sweep(options: SearchOptions, showing: ShowOptions) -> None:
    """Raise `ConfigError` for options that apply to a single sequence length."""
    if options.compat:
        raise ConfigError("--compat takes one --seq-len")
    if names := non_default(showing):
        shown = ", ".join(map(option_name, names))
        raise ConfigError(f"{shown}: no effect with several --seq-len; pass one length")


def _searched(question: "Question", using: "Setting", options: SearchOptions) -> "SearchResult":
    """Return the result of the search; with --compat by the rules of the original."""
    if options.compat is None:
        from fastcomm.isp.search import search

        return search(question, using.cluster, attention=using.attention)
    from fastcomm.compat import isp

    return isp.answer(question, isp.rules_of(options), using)


def _write_page(result: "SearchResult | SearchSweep", files: ResultFiles) -> None:
    """Write the page of --html, where it is given."""
    if files.html is not None:
        from fastcomm.isp import page as isp_page
        from fastcomm.show.pages import write as write_page

        write_page(isp_page.page(result), files.html)


def _explained(result: "SearchResult", showing: ShowOptions) -> "SearchResult":
    """Add what --explain and --trainer-args ask for; ConfigError for a place out of range."""
    from fastcomm.isp.explanation import explanation, snippet

    place, trainer = showing.explain, showing.trainer_args
    if place is not None:
        if place > result.feasible:
            expected = f"1 to {result.feasible}, the number of feasible strategies"
            raise invalid("--explain", str(place), expected)
        terms = explanation(result.record(place - 1), result.question)
        result = replace(result, explanation={"place": place, **terms})
    if trainer is not None:
        arguments = snippet(trainer, result.record(0), result.question)
        result = replace(result, trainer_args=arguments)
    return result


def _show(result: "SearchResult", showing: ShowOptions) -> None:
    """Print --trainer-args or --explain where one is given, otherwise the ranking.

    Without a feasible strategy, there is nothing to print.
    """
    from fastcomm.isp import tables as isp_tables

    if not result.feasible:
        return
    if result.trainer_args is not None:
        click.echo(result.trainer_args)
        return
    if showing.explain:
        isp_tables.explain(result, showing.explain - 1)
        return
    isp_tables.show(result, result.top)
    if result.calibration:
        isp_tables.calibration(result.calibration)
    if result.sensitivity is not None:
        isp_tables.changes(result.sensitivity)


def _sweep(
    question: "Question", using: "Setting", lengths: tuple[int, ...], files: ResultFiles
) -> None:
    """Search every length (in tokens) and world size, and print and write the results."""
    from fastcomm.isp import tables as isp_tables
    from fastcomm.isp.search import sweep
    from fastcomm.show.files import write_tables

    result = sweep(question, using.cluster, lengths, using.attention)
    _write_page(result, files)
    if files.output is not None:
        book = "isp" if files.xlsx else None
        write_tables(files.output, {}, {"sweep": result.to_arrow()}, book)
    if files.as_json:
        print_json(result)
    else:
        isp_tables.heat_map(result)
        if using.calibration:
            isp_tables.calibration(using.calibration)


@click.command("price", cls=OptionsCommand, has_tables=True, epilog=_PRICE_EXAMPLES)
@with_options(options_of(PlanOptions))
@_models
@_calibrate_from
@result_options("price.json, and its terms as CSV and Parquet", xlsx=False, html=False)
@builds(options=PlanOptions)
def price(
    *,
    options: PlanOptions,
    models: Path | None,
    calibrate_from: Path | None,
    files: ResultFiles,
) -> None:
    """Price one strategy: step time and memory, term by term.

    Rejects no strategy for lack of memory. Times of kernels and collectives are measured ones
    where the cluster names a measured GPU (dgx-a100, dgx-h100, dgx-b200, gb200-nvl72), and are
    marked elsewhere (dgx-a100-40, dgx-h200, dgx-h800, dgx-b300, gb300-nvl72). Keys of
    --strategy: tp, pp, vp, cp, ep, etp, dp, micro-batch, sharding (ddp, zero1, zero2, zero3,
    hsdpN), recompute (none, selective, partial, full), precision, overlap, dispatch,
    gradients (bf16, fp32), year.
    """
    from fastcomm.planning import result as plan_result
    from fastcomm.planning import tables as planning_tables
    from fastcomm.planning.price import price_plan

    shapes = _shapes(models)
    plan, note = plan_result.plan_of(options, shapes)
    constants, calibration = _constants(calibrate_from, shapes)
    result = plan_result.PriceResult(
        price=price_plan(plan, constants), note=note, calibration=calibration
    )
    give(result, files, "price", planning_tables.show_price, table="terms")


@click.command("evaluate", cls=OptionsCommand, has_tables=True, epilog=_EVALUATE_EXAMPLES)
@click.argument("runs", type=_FILE)
@_models
@_calibrate_from
@top_option(_ROWS, all_in_json=True)
@result_options("evaluation.json, and the runs as CSV and Parquet", xlsx=False, html=False)
def evaluate(
    *,
    runs: Path,
    models: Path | None,
    calibrate_from: Path | None,
    top: int | None,
    files: ResultFiles,
) -> None:
    """Compare measured training runs with predictions.

    RUNS is a CSV, one run a row, with the columns model, gpu, gpus, global_batch (sequences)
    and seq_len. More columns describe the strategy (docs/isp-plans.md). Micro-batch, virtual
    stages, recompute and sharding that are empty or "unknown" are tried, and the fastest
    strategy that fits counts. With tokens_per_s_per_gpu, the errors are printed by source, GPU,
    precision and kind of model. Rows that are invalid, or that no trainer could run, are
    listed, and the exit code is 3.
    """
    from fastcomm.planning import result as plan_result
    from fastcomm.planning import tables as planning_tables
    from fastcomm.planning.runs import load_runs, price_run

    shapes = _shapes(models if models is not None else _beside(runs))
    constants, calibration = _constants(calibrate_from, shapes)
    table = load_runs(runs, shapes)
    rows = tuple(price_run(run, constants) for run in table.runs)
    result = plan_result.Evaluation(
        rows=rows, failed=table.failed, calibration=calibration, top=top
    )
    shown = partial(planning_tables.show_evaluation, top=_ROWS if top is None else top)
    give(result, files, "evaluation", shown, table="runs")
    exit_if_skipped(result.failed)


def _beside(runs: Path) -> Path | None:
    """Return models.csv beside the runs, if there is one."""
    path = runs.with_name("models.csv")
    return path if path.is_file() and path != runs else None


def _shapes(models: Path | None) -> "dict[str, Model]":
    from fastcomm.models import load_models

    return load_models(models) if models is not None else {}


def _constants(
    path: Path | None, shapes: "dict[str, Model]"
) -> "tuple[Constants, RunCalibration | None]":
    """Return the shipped constants, or those fitted to the runs of a file, and the fit."""
    from fastcomm.planning.price import Constants

    if path is None:
        return Constants(), None
    from fastcomm.planning.runs import calibrate, load_runs

    models = shapes or _shapes(_beside(path))
    table = load_runs(path, models)
    for row in table.failed:
        click.echo(inert(f"{path}, line {row.line}: not fitted: {row.error}"), err=True)
    calibration = calibrate(table.runs, Constants())
    return calibration.constants, calibration


run.commands |= {"price": price, "evaluate": evaluate}
