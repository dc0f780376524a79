"""``fastcomm isp price`` and ``fastcomm isp evaluate``: fixed strategies."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from cloup import OptionGroup

from fastcomm.cli.commands import OptionsCommand, option
from fastcomm.cli.isp_options import BATCH_OPTIONS
from fastcomm.cli.options import builds, with_options
from fastcomm.cli.results import (
    ResultFiles,
    cluster_option,
    print_json,
    result_options,
    top_option,
)
from fastcomm.options import PlanOptions

if TYPE_CHECKING:
    from fastcomm.isp.model import Model
    from fastcomm.isp.plan_cost import Constants
    from fastcomm.isp.run_calibration import RunCalibration

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
_strategy = partial(option, group=OptionGroup("Strategy"), is_common=True)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_models = option(
    "--models",
    type=_FILE,
    metavar="FILE",
    group=OptionGroup("Model and batch"),
    is_common=True,
    help="CSV of model shapes, a model a row, besides the presets.",
)
_calibrate_from = option(
    "--calibrate-from",
    type=_FILE,
    metavar="FILE",
    group=OptionGroup("Cost model"),
    is_common=True,
    help="Fit efficiencies, overlap and overheads to the runs of a CSV first.",
)


@click.command("price", cls=OptionsCommand, has_tables=True, epilog=_PRICE_EXAMPLES)
@with_options(BATCH_OPTIONS)
@cluster_option("dgx-h100")
@_strategy(
    "--strategy",
    metavar="LIST",
    help="Sizes and methods, as in tp=8,pp=4,vp=2,sharding=zero1,recompute=full.",
)
@_models
@_calibrate_from
@result_options("price.json, and its terms as CSV and Parquet", xlsx=False, html=False)
@builds(options=PlanOptions, files=ResultFiles)
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
    from fastcomm.isp import evaluation
    from fastcomm.isp.plan_step import price_plan
    from fastcomm.report import isp_plans as report

    shapes = _shapes(models)
    plan, note = evaluation.plan_of(options, shapes)
    constants, calibration = _constants(calibrate_from, shapes)
    result = evaluation.PriceResult(
        price=price_plan(plan, constants),
        note=note,
        calibration=calibration,
    )
    report.write(result, files.output, "price")
    if files.as_json:
        print_json(result)
    else:
        report.show_price(result)


@click.command("evaluate", cls=OptionsCommand, has_tables=True, epilog=_EVALUATE_EXAMPLES)
@click.argument("runs", type=_FILE)
@_models
@_calibrate_from
@top_option(_ROWS, all_in_json=True)
@result_options("evaluation.json, and the runs as CSV and Parquet", xlsx=False, html=False)
@builds(files=ResultFiles)
@click.pass_context
def evaluate(
    ctx: click.Context,
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
    from fastcomm.cli import INCOMPLETE
    from fastcomm.isp import evaluation
    from fastcomm.isp.runs import load_runs, price_run
    from fastcomm.report import isp_plans as report

    shapes = _shapes(models if models is not None else _beside(runs))
    constants, calibration = _constants(calibrate_from, shapes)
    table = load_runs(runs, shapes)
    rows = tuple(price_run(run, constants) for run in table.runs)
    result = evaluation.Evaluation(
        rows=rows, failed=table.failed, calibration=calibration, top=top
    )
    report.write(result, files.output, "evaluation")
    if files.as_json:
        print_json(result)
    else:
        report.show_evaluation(result, _ROWS if top is None else top)
    if result.failed:
        ctx.exit(INCOMPLETE)


def _beside(runs: Path) -> Path | None:
    """Return models.csv beside the runs, if there is one."""
    path = runs.with_name("models.csv")
    return path if path.is_file() and path != runs else None


def _shapes(models: Path | None) -> "dict[str, Model]":
    from fastcomm.isp.tables import load_models

    return load_models(models) if models is not None else {}


def _constants(
    path: Path | None, shapes: "dict[str, Model]"
) -> "tuple[Constants, RunCalibration | None]":
    """Return the shipped constants, or those fitted to the runs of a file, and the fit."""
    from fastcomm.isp.plan_cost import Constants

    if path is None:
        return Constants(), None
    from fastcomm.isp.run_calibration import calibrate
    from fastcomm.isp.runs import load_runs

    models = shapes or _shapes(_beside(path))
    table = load_runs(path, models)
    for row in table.failed:
        click.echo(f"{path}, line {row.line}: not fitted: {row.error}", err=True)
    calibration = calibrate(table.runs, Constants())
    return calibration.constants, calibration
