"""``fastcomm critical-path``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastcomm.cli import INCOMPLETE
from fastcomm.cli.options import Output, OutputFile, run_options
from fastcomm.cli.ranges import RANK
from fastcomm.cli.results import print_json, result_options
from fastcomm.cli.windows import window_options

if TYPE_CHECKING:
    from fastcomm.critical_path.classes import Rules
    from fastcomm.critical_path.dependencies import DataDependencies
    from fastcomm.critical_path.ranks import Joined
    from fastcomm.critical_path.result import CriticalPath
    from fastcomm.trace.trace import Trace

_EXAMPLES = """\b
Examples:
  fastcomm critical-path traces/ --rank 3 --iteration 12
  fastcomm critical-path trace.json.gz --annotation ProfilerStep --instance 0:3 --compat hta
  fastcomm critical-path traces/ --overlay path.json.gz --save path --json
"""


@click.command("critical-path", epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--rank", type=RANK, help="Rank to look at; by default the first.")
@click.option(
    "--all-ranks",
    is_flag=True,
    help="One path through all ranks, which collectives join; not with --rank, --compat, "
    "--overlay, --save, --deps.",
)
@window_options
@click.option(
    "--compat",
    type=click.Choice(["hta"]),
    help="Rules of HolisticTraceAnalysis, rounding and all, instead of the corrected ones.",
)
@click.option(
    "--zero-weight-launches",
    is_flag=True,
    help="With --compat hta: its edges of weight 0 from every launch.",
)
@click.option(
    "--deps",
    type=click.Choice(["data"]),
    help="Also: what operators wait for if only data counts, from an execution trace.",
)
@click.option(
    "--execution-trace",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="By default torch_et_RANK.json or pytorch_et_RANK.json beside the trace.",
)
@click.option(
    "--overlay",
    type=OutputFile(),
    metavar="FILE",
    help="Write the trace with the path marked and its edges as arrows (.json, .json.gz).",
)
@click.option("--all-events", is_flag=True, help="In the overlay: keep every event.")
@click.option("--all-edges", is_flag=True, help="In the overlay: draw every edge, keep all.")
@click.option("--save", type=Output(), metavar="DIR", help="Write graph and path to DIR.zip.")
@run_options
@result_options("Write the path edge by edge as CSV and Parquet, and critical_path.json.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    paths: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    **words: Any,
) -> None:
    """Find the chain of work that sets the time of a step.

    PATH is a trace, or a directory of traces. Printed is how much of the path is host, compute,
    communication, launch delay and gaps, and the operators with most time on it.
    """
    if words["all_ranks"]:
        if _join(paths, words, as_json, output):
            ctx.exit(INCOMPLETE)
        return
    from fastcomm.cli.windows import one_rank, wanted_window
    from fastcomm.critical_path.analysis import analyse
    from fastcomm.errors import FastcommError
    from fastcomm.executors import warm
    from fastcomm.report import critical_path as report

    rules: Rules = words["compat"] or "corrected"
    warm.compile_critical_path(rules)
    trace, left_out = one_rank(paths, words)
    found = analyse(
        trace,
        wanted_window(words),
        rules=rules,
        data_load=words["data_load_events"],
        zero_weight_launches=words["zero_weight_launches"],
    )
    if found.path is None:
        raise FastcommError(f"{trace.meta.path}: the graph has a cycle, and no critical path")
    _overlay(trace, found, words)
    if words["save"]:
        found.save(words["save"])
    if words["deps"]:
        found.data = _data(trace, found, words["execution_trace"])
    found.failed = tuple(left_out)
    _page(found, paths, words)
    if output is not None:
        report.write(found, output, xlsx=words["xlsx"])
    if as_json:
        print_json(found)
    else:
        report.show(found)
    if left_out:
        ctx.exit(INCOMPLETE)


def _overlay(trace: "Trace", found: "CriticalPath", words: dict[str, Any]) -> None:
    """Write the trace with the path marked, if it was asked for."""
    if not words["overlay"]:
        return
    from fastcomm.critical_path.overlay import Drawing, write

    every = words["all_events"] or words["all_edges"]
    drawing = Drawing(only_critical=not every, all_edges=words["all_edges"])
    write(trace, found, Path(words["overlay"]), drawing)


def _page(
    found: "CriticalPath | Joined", paths: tuple[str, ...], words: dict[str, Any]
) -> None:
    """Write the page, if one was asked for."""
    if words["html"] is None:
        return
    from fastcomm.cli.options import reading_words
    from fastcomm.cli.windows import window_words
    from fastcomm.critical_path.ranks import Joined
    from fastcomm.report.html import critical, render

    joined = found if isinstance(found, Joined) else None
    path = found.path if isinstance(found, Joined) else found
    options = [*reading_words(words), *window_words(words)]
    if joined is not None and words["keep_going"]:
        options.append("--keep-going")
    render.write(critical.page(path, joined, paths, options), words["html"])


def _data(trace: "Trace", found: "CriticalPath", named: str | None) -> "DataDependencies":
    from pathlib import Path

    from fastcomm.critical_path.data import data_dependencies
    from fastcomm.errors import ConfigError
    from fastcomm.readers import execution_trace

    path = Path(named) if named else execution_trace.find(trace)
    if path is None:
        raise ConfigError(
            f"--deps data: no torch_et_{trace.meta.rank}.json and no pytorch_et_"
            f"{trace.meta.rank}.json beside {trace.meta.path}; name it with --execution-trace"
        )
    return data_dependencies(trace, found, execution_trace.read(path))


_ONE_RANK = ("rank", "compat", "overlay", "save", "deps")


def _join(
    paths: tuple[str, ...], words: dict[str, Any], as_json: bool, output: Path | None
) -> bool:
    """Show the path through all ranks; whether ranks were left out."""
    from fastcomm.cli.windows import joined_run
    from fastcomm.errors import ConfigError
    from fastcomm.report import critical_path as report

    if refused := [name for name in _ONE_RANK if words[name] is not None]:
        raise ConfigError(f"--all-ranks and --{refused[0]} contradict each other; wanted one")
    found, _ = joined_run(paths, words)
    _page(found, paths, words)
    if output is not None:
        report.write(found, output, xlsx=words["xlsx"])
    if as_json:
        print_json(found)
    else:
        report.show_joined(found)
    return bool(found.failed)
