"""``fastcomm isp``."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from fastcomm.checks import invalid, non_default, option_name
from fastcomm.cli.commands import OptionsCommand, option, options_of
from fastcomm.cli.messages import decimal_units, warn
from fastcomm.cli.results import ResultFiles, give, print_json, result_options, top_option
from fastcomm.cli.run_options import builds, with_options
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.isp.options import RankingOptions, SearchOptions
from fastcomm.option_fields import COMPAT, OUTPUT, option_field

if TYPE_CHECKING:
    from fastcomm.isp.calibration import Setting
    from fastcomm.isp.problem import SearchProblem
    from fastcomm.isp.result import SearchResult
    from fastcomm.isp.search import SearchSweep

_ORIGINAL = ("compat_tables", "strict_batch", "overlap_wdp")
_TOKENS = ("seq_len", "global_batch", "global_batch_min", "global_batch_max")
_EXAMPLES = """\b
Examples:
  fastcomm isp --model 7B --world-size 128 --seq-len 64Ki --global-batch 4Mi
  fastcomm isp --model 7B --world-size 64,128,256 --seq-len 4Ki,64Ki \\
    --global-batch 4Mi
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions(RankingOptions):
    """What is printed of a search."""

    sensitivity: bool = option_field(
        "Show what faster links or more memory would change.",
        False,
        group=OUTPUT,
        not_with=("--compat", "explain", "trainer_args"),
    )
    trainer_args: Literal["megatron", "internevo"] | None = option_field(
        "Print the best strategy as arguments of megatron or internevo.",
        group=OUTPUT,
        metavar="NAME",
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
    top_option(ShowOptions().top, not_with=("--explain", "--trainer-args")),
    *options_of(ShowOptions),
]


@click.command("isp", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
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
    """Find the fastest strategy of InternEvo that fits in memory.

    Ranks four kinds of sequence parallelism, with every pipeline, sharding, micro-batch and
    recompute, by tokens/s/GPU from closed formulas. Runs nothing. --model, --world-size,
    --seq-len and a batch are required. `fastcomm plan` searches what other trainers can run.
    """
    if config_path is not None:
        from fastcomm.compat.isp import config_file

        options = options.over(config_file(config_path))
    warn(decimal_units(options, _TOKENS))
    _search(options, showing, files)


def _search(options: SearchOptions, showing: ShowOptions, files: ResultFiles) -> None:
    """Search the strategies, and print and write the result."""
    from fastcomm.isp import problem as isp_question
    from fastcomm.isp.calibration import setting

    lengths = isp_question.numbers(options.seq_len, "sequence length") or (0,)
    if len(lengths) > 1:
        _check_sweep(options, showing)
    problem = isp_question.problem_of(options)
    tables = None
    if options.compat_tables:
        from fastcomm.compat.isp import compat_tables

        tables = compat_tables(options)
    using = setting(options, tables)
    if len(lengths) > 1:
        _sweep(problem, using, lengths, files)
        return
    result = replace(
        _searched(problem, using, options), top=showing.top, calibration=using.calibration
    )
    if showing.sensitivity:
        from fastcomm.isp.search import sensitivity

        best = result.record(0) if result.feasible else None
        changes = sensitivity(problem, using.cluster, best, using.attention)
        result = replace(result, sensitivity=changes)
    if result.feasible:
        result = _explained(result, showing)
    _write_page(result, files)
    give(result, files, "isp", partial(_show, showing=showing), table="strategies")
    if not result.feasible:
        raise FastcommError(result.nearest())


def _check_sweep(options: SearchOptions, showing: ShowOptions) -> None:
    """Raise `ConfigError` for options that apply to a single sequence length."""
    if options.compat:
        raise ConfigError("--compat takes one --seq-len")
    if names := non_default(showing):
        shown = ", ".join(map(option_name, names))
        raise ConfigError(f"{shown}: no effect with several --seq-len; pass one length")


def _searched(
    problem: "SearchProblem", using: "Setting", options: SearchOptions
) -> "SearchResult":
    """Return the result of the search; with --compat by the rules of the original."""
    if options.compat is None:
        from fastcomm.isp.search import search

        return search(problem, using.cluster, attention=using.attention)
    from fastcomm.compat import isp

    return isp.answer(problem, isp.rules_of(options), using)


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
        terms = explanation(result.record(place - 1), result.problem)
        result = replace(result, explanation={"place": place, **terms})
    if trainer is not None:
        arguments = snippet(trainer, result.record(0), result.problem)
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
    problem: "SearchProblem", using: "Setting", lengths: tuple[int, ...], files: ResultFiles
) -> None:
    """Search every length (in tokens) and world size, and print and write the results."""
    from fastcomm.isp import tables as isp_tables
    from fastcomm.isp.search import sweep
    from fastcomm.show.files import write_tables

    result = sweep(problem, using.cluster, lengths, using.attention)
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
