"""``fastcomm plan``."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from fastcomm.checks import invalid
from fastcomm.cli.commands import OptionsCommand, ParentCommand, option, options_of
from fastcomm.cli.messages import decimal_units, warn
from fastcomm.cli.results import (
    ResultFiles,
    exit_if_skipped,
    give,
    print_json,
    result_options,
    top_option,
)
from fastcomm.cli.run_options import builds, with_options
from fastcomm.errors import FastcommError, inert
from fastcomm.isp.options import RankingOptions
from fastcomm.option_fields import BATCH, COST, OUTPUT, option_field
from fastcomm.planning.options import PlanOptions, PriceOptions

if TYPE_CHECKING:
    from fastcomm.models import Model
    from fastcomm.planning.constants import Constants
    from fastcomm.planning.measured_runs import RunCalibration
    from fastcomm.planning.search import PlanSearch

_EXAMPLES = """\b
Examples:
  fastcomm plan --model llama3-70b --gpus 256 --cluster h100 --global-batch 512
  fastcomm plan --model llama3-8b --gpus 64 --cluster b200 --global-batch 512 \\
    --trainer fsdp2 --precision fp8 --launch torchtitan
"""
_PRICE_EXAMPLES = """\b
Examples:
  fastcomm plan price --model llama3-70b --gpus 64 --global-batch 128 \\
    --cluster dgx-h100 --strategy tp=4,pp=4,vp=5
  fastcomm plan price --model llama3-8b --gpus 8 --global-batch 128 \\
    --cluster gb200-nvl72 \\
    --strategy sharding=zero3,precision=mxfp8,recompute=selective
"""
_EVALUATE_EXAMPLES = """\b
Examples:
  fastcomm plan evaluate runs.csv
  fastcomm plan evaluate runs.csv --models models.csv --json
  fastcomm plan evaluate runs.csv --calibrate-from runs.csv
"""
_TOKENS = ("seq_len",)  # options that count tokens
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
class LaunchOptions(RankingOptions):
    """What is printed of a search: the ranking, one strategy, or its arguments."""

    launch: Literal["megatron", "torchtitan"] | None = option_field(
        "Print the best strategy as arguments that megatron or torchtitan accepts.",
        group=OUTPUT,
        metavar="NAME",
        is_common=True,
    )


@click.command("plan", cls=ParentCommand, has_tables=True, epilog=_EXAMPLES)
@with_options(options_of(PlanOptions))
@top_option(LaunchOptions().top, not_with=("--explain", "--launch"))
@with_options(options_of(LaunchOptions))
@result_options("plan.json, and every strategy as CSV and Parquet", xlsx=False)
@builds(options=PlanOptions, showing=LaunchOptions)
def run(*, options: PlanOptions, showing: LaunchOptions, files: ResultFiles) -> None:
    """Find the fastest strategy that a trainer can run, and that fits in memory.

    Estimates every strategy of the trainer, and ranks them by tokens/s/GPU: tensor, pipeline,
    context and expert parallelism, sharding, micro-batches, and recompute. Runs nothing.
    Kernels and links are those measured on the GPU. --model, --world-size and --global-batch
    are required.
    """
    from fastcomm.planning import tables
    from fastcomm.planning.search import search_plans

    warn(decimal_units(options, _TOKENS))
    result = replace(search_plans(options), top=showing.top)
    _write_plans(result, files)
    if not result.plans:
        if files.as_json:
            print_json(result)
        raise FastcommError(result.nearest())
    if showing.launch is not None:
        result = result.launched(showing.launch)
        warn([*result.passed_over(), *result.launch_needs()])
    place = showing.explain
    if place is not None and place > len(result.layouts):
        raise invalid("--explain", str(place), f"1 to {len(result.layouts)}, the layouts")
    if files.as_json:
        print_json(result)
    elif result.launch is not None:
        click.echo(result.launch)
    elif place is not None:
        tables.show_price(result.explained(place - 1))
    else:
        tables.show_search(result, showing.top)


def _write_plans(result: "PlanSearch", files: ResultFiles) -> None:
    """Write the page of --html, and of strategies that fit the files of --output."""
    if files.html is not None:
        from fastcomm.planning.page import page
        from fastcomm.show.pages import write

        write(page(result), files.html)
    if files.output is not None and result.plans:
        from fastcomm.show.files import write_result

        write_result(result, files.output, "plan", "strategies")


@click.command("price", cls=OptionsCommand, has_tables=True, epilog=_PRICE_EXAMPLES)
@with_options(options_of(PriceOptions))
@_models
@_calibrate_from
@result_options("price.json, and its terms as CSV and Parquet", xlsx=False, html=False)
@builds(options=PriceOptions)
def price(
    *,
    options: PriceOptions,
    models: Path | None,
    calibrate_from: Path | None,
    files: ResultFiles,
) -> None:
    """Price one strategy: step time and memory, term by term.

    Rejects no strategy for lack of memory. Times of kernels and collectives are measured ones
    where the cluster names a measured GPU (dgx-a100, dgx-h100, dgx-b200, gb200-nvl72), and are
    marked elsewhere (dgx-a100-40, dgx-h200, dgx-h800, dgx-b300, gb300-nvl72). Keys of
    --strategy: tp, pp, vp, cp, ep, etp, dp, micro-batch, sharding (ddp, zero1, zero2, zero3,
    hsdpN), recompute (none, selective, partial, full, parts of a layer), precision, overlap,
    dispatch (alltoall, deepep, hybridep; +overlapped, +capacity), routing (forced, natural),
    graphs, fused-experts, fp8-attention, gradients and moments (bf16, fp32), year, trainer.
    """
    from fastcomm.planning import tables
    from fastcomm.planning.price import price_plan
    from fastcomm.planning.result import PriceResult, plan_of

    warn(decimal_units(options, _TOKENS))
    shapes = _shapes(models)
    plan, note = plan_of(options, shapes)
    constants, calibration = _constants(calibrate_from, shapes)
    priced = price_plan(plan, constants)
    result = PriceResult(price=priced, note=note, calibration=calibration, constants=constants)
    give(result, files, "price", tables.show_price, table="terms")


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
    and seq_len. More columns describe the strategy (docs/plan.md). Micro-batch, virtual
    stages, recompute and sharding that are empty or "unknown" are tried, and the fastest
    strategy that fits counts. With tokens_per_s_per_gpu, the errors are printed by source, GPU,
    precision and kind of model. Rows that are invalid, or that no trainer could run, are
    listed, and the exit code is 3.
    """
    from fastcomm.planning import tables
    from fastcomm.planning.measured_runs import load_runs, price_run
    from fastcomm.planning.result import Evaluation

    shapes = _shapes(models if models is not None else _beside(runs))
    constants, calibration = _constants(calibrate_from, shapes)
    loaded = load_runs(runs, shapes)
    rows = tuple(price_run(run, constants) for run in loaded.runs)
    result = Evaluation(rows=rows, failed=loaded.failed, calibration=calibration, top=top)
    shown = partial(tables.show_evaluation, top=_ROWS if top is None else top)
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
    from fastcomm.planning.constants import Constants

    if path is None:
        return Constants(), None
    from fastcomm.planning.measured_runs import calibrate, load_runs

    models = shapes or _shapes(_beside(path))
    table = load_runs(path, models)
    for row in table.failed:
        click.echo(inert(f"{path}, line {row.line}: not fitted: {row.error}"), err=True)
    calibration = calibrate(table.runs, Constants())
    return calibration.constants, calibration


run.commands |= {"price": price, "evaluate": evaluate}
