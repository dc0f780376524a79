"""``fastcomm isp``."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.checks import invalid, non_default, option_name
from fastcomm.cli.commands import ParentCommand
from fastcomm.cli.isp_options import ISP_OPTIONS, ShowOptions
from fastcomm.cli.isp_plans import evaluate, price
from fastcomm.cli.messages import warn
from fastcomm.cli.options import builds, with_options
from fastcomm.cli.results import ResultFiles, print_json, result_options
from fastcomm.errors import ConfigError
from fastcomm.options import SearchOptions
from fastcomm.units import parse_quantity

if TYPE_CHECKING:
    from fastcomm.isp import Question
    from fastcomm.isp.calibration import Setting
    from fastcomm.isp.plan_search import PlanSearch
    from fastcomm.isp.result import HardwareChange, SearchResult
    from fastcomm.isp.search import SearchSweep

_EXAMPLES = """\b
Examples:
  fastcomm isp --model llama3-70b --gpus 256 --cluster h100 --global-batch 512
  fastcomm isp --model llama3-8b --gpus 64 --cluster b200 --global-batch 4Mi \\
    --trainer fsdp2 --precision fp8 --launch torchtitan
  fastcomm isp --model 7B --world-size 128 --seq-len 64Ki --global-batch 4Mi
  fastcomm isp --model 7B --world-size 64,128,256 --seq-len 4Ki,64Ki \\
    --global-batch 4Mi
"""


@click.command("isp", cls=ParentCommand, has_tables=True, epilog=_EXAMPLES)
@with_options(ISP_OPTIONS)
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

    Estimates every strategy that a trainer can run, and ranks them by tokens/s/GPU: tensor,
    pipeline, context and expert parallelism, sharding, micro-batches, and recompute. Runs
    nothing. On a measured GPU, kernels and links are those measured there. The search of
    InternEvo ranks four kinds of sequence parallelism by closed formulas. --model, --world-size
    and a batch are required, and for InternEvo --seq-len (otherwise 8192 by default).
    """
    from fastcomm.isp.trainers import trainer_of

    if config_path is not None:
        from fastcomm.compat.isp_space import config_file

        _search_sequences(options.over(config_file(config_path)), showing, files)
    elif trainer_of(options) == "internevo":
        _search_sequences(options, showing, files)
    else:
        _search_plans(options, showing, files)


def _search_sequences(options: SearchOptions, showing: ShowOptions, files: ResultFiles) -> None:
    """Search InternEvo's strategies, and print and write the result."""
    from fastcomm import isp
    from fastcomm.isp.calibration import setting

    if showing.launch is not None:
        raise ConfigError("--launch: InternEvo's search has --trainer-args; pass --trainer")
    warn(_decimal_units(options))
    lengths = isp.numbers(options.seq_len, "sequence length") or (0,)
    if len(lengths) > 1:
        _check_sweep(options, showing)
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
    if result.feasible:
        result = _explained(result, showing)
    _write(result, files)
    if files.as_json:
        print_json(result)
    elif result.feasible:
        _show(result, showing)
    if not result.feasible:
        from fastcomm.errors import FastcommError

        raise FastcommError(result.nearest())


run.commands |= {"price": price, "evaluate": evaluate}


def _search_plans(options: SearchOptions, showing: ShowOptions, files: ResultFiles) -> None:
    """Search the strategies of a trainer, and print and write the result."""
    from fastcomm.errors import FastcommError
    from fastcomm.isp import launch
    from fastcomm.isp.plan_search import search_plans
    from fastcomm.report import isp_plans as report

    for name, is_used in (
        ("--sensitivity", showing.sensitivity),
        ("--trainer-args", showing.trainer_args),
        ("--xlsx", files.xlsx),
    ):
        if is_used:
            raise ConfigError(f"{name} has no effect without --trainer internevo")
    warn(_decimal_units(options))
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
        report.explain_plan(result, place - 1)
    else:
        report.show_search(result, showing.top)


def _write_plans(result: "PlanSearch", files: ResultFiles) -> None:
    """Write the page of --html, and of strategies that fit the files of --output."""
    from fastcomm.report import isp_plans as report

    if files.html is not None:
        from fastcomm.report.html import isp_plans as page
        from fastcomm.report.html import write as write_page

        write_page(page.page(result), files.html)
    if result.plans:
        report.write(result, files.output, "isp")


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
                f"{option_name(name)} {part} is {tokens} tokens; {binary} is "
                f"{float(match[1]) * parse_quantity(f'1{match[2]}i', name):.0f}"
            )


def _changes(result: "SearchResult", using: "Setting") -> "tuple[HardwareChange, ...]":
    """Return the best strategy after each hardware change, to compare with the best now."""
    from fastcomm.isp.search import sensitivity

    best = result.record(0) if result.feasible else None
    return sensitivity(result.question, using.cluster, best, using.attention)


def _explained(result: "SearchResult", showing: ShowOptions) -> "SearchResult":
    """Add what --explain and --trainer-args ask for; ConfigError for a place out of range."""
    from fastcomm.isp.strategy import explanation, snippet

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
    """Print --trainer-args or --explain where one is given, otherwise the ranking."""
    from fastcomm.report import isp as report

    if result.trainer_args is not None:
        click.echo(result.trainer_args)
        return
    if showing.explain:
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
