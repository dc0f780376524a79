"""``fastcomm critical-path``."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.cli import INCOMPLETE
from fastcomm.cli.messages import warn
from fastcomm.cli.options import ExecutionOptions, Output, OutputFile, run_options
from fastcomm.cli.results import print_json, result_options
from fastcomm.cli.windows import joined_run, one_rank, rank_options, window_options
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.options import PathOptions, ReadOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastcomm.critical_path.dependencies import DataDependencies
    from fastcomm.critical_path.overlay import Drawing
    from fastcomm.critical_path.ranks import Joined
    from fastcomm.critical_path.result import CriticalPath
    from fastcomm.trace.trace import Trace

_EXAMPLES = """\b
Examples:
  fastcomm critical-path traces/ --rank 3 --step 12
  fastcomm critical-path trace.json.gz --annotation ProfilerStep --instance 0:3 --compat hta
  fastcomm critical-path traces/ --overlay path.json.gz --save path --json
"""


@click.command("critical-path", epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@window_options
@rank_options(
    "One path through all ranks, which collectives join; not with --rank, --compat, "
    "--overlay, --save, --deps."
)
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
    *,
    paths: tuple[str, ...],
    compat: str | None,
    zero_weight_launches: bool,
    deps: str | None,
    execution_trace: str | None,
    overlay: Path | None,
    all_events: bool,
    all_edges: bool,
    save: str | None,
    as_json: bool,
    output: Path | None,
    xlsx: bool,
    html: Path | None,
    path_options: PathOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Find the chain of work that sets the time of a step.

    PATH is a trace, or a directory of traces. Printed is how much of the path is host, compute,
    communication, launch delay and gaps, and the operators with most time on it.
    """
    files = PathFiles(as_json=as_json, output=output, xlsx=xlsx, html=html)
    if path_options.all_ranks:
        given = {"compat": compat, "overlay": overlay, "save": save, "deps": deps}
        if refused := [name for name, value in given.items() if value is not None]:
            raise ConfigError(
                f"--all-ranks and --{refused[0]} contradict each other; wanted one"
            )
        joined, left_out = joined_run(paths, path_options, reading, execution)
        _page(joined, paths, path_options, reading, html)
        _show(joined, files)
    else:
        find, drawing_type = _rules(compat, zero_weight_launches=zero_weight_launches)
        trace, left_out = one_rank(paths, path_options.rank, reading, execution)
        found = find(trace, path_options, data_load=path_options.data_load_events)
        if found.path is None:
            raise FastcommError(
                f"{trace.meta.path}: the graph has a cycle, and no critical path"
            )
        warn(trace.meta.warnings)
        if overlay:
            from fastcomm.critical_path.overlay import write

            only = not (all_events or all_edges)
            drawing = drawing_type(only_critical=only, all_edges=all_edges)
            write(trace, found, overlay, drawing)
        if save:
            found.save(save)
        if deps:
            found.data = _data(trace, found, execution_trace)
        found.failed = tuple(left_out)
        _page(found, paths, path_options, reading, html)
        _show(found, files)
    if left_out:
        ctx.exit(INCOMPLETE)


def _rules(
    compat: str | None, *, zero_weight_launches: bool
) -> "tuple[Callable[..., CriticalPath], type[Drawing]]":
    """Return the analysis by the rules that were asked for, compiled, and how to draw it."""
    from fastcomm.executors import warm

    if compat:
        from fastcomm.compat import hta

        warm.compile_for("critical-path-hta", hta.find_path)
        return partial(hta.find_path, zero_weight_launches=zero_weight_launches), hta.HtaDrawing
    from fastcomm.critical_path.analysis import analyse
    from fastcomm.critical_path.overlay import Drawing

    warm.compile_critical_path()
    return analyse, Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFiles:
    """Where the result goes."""

    as_json: bool
    output: Path | None
    xlsx: bool
    html: Path | None


def _page(
    found: "CriticalPath | Joined",
    paths: tuple[str, ...],
    window: PathOptions,
    reading: ReadOptions,
    html: Path | None,
) -> None:
    """Write the page, if one was asked for."""
    if html is None:
        return
    from fastcomm.critical_path.ranks import Joined
    from fastcomm.report.commands import reading_arguments, window_arguments
    from fastcomm.report.html import critical, render

    joined = found if isinstance(found, Joined) else None
    path = found.path if isinstance(found, Joined) else found
    options = [*reading_arguments(reading), *window_arguments(window)]
    if joined is not None and reading.keep_going:
        options.append("--keep-going")
    render.write(critical.page(path, joined, paths, options), html)


def _data(trace: "Trace", found: "CriticalPath", named: str | None) -> "DataDependencies":
    from fastcomm.critical_path.data import data_dependencies
    from fastcomm.readers import execution_trace

    path = Path(named) if named else execution_trace.find(trace)
    if path is None:
        raise ConfigError(
            f"--deps data: no torch_et_{trace.meta.rank}.json and no pytorch_et_"
            f"{trace.meta.rank}.json beside {trace.meta.path}; name it with --execution-trace"
        )
    return data_dependencies(trace, found, execution_trace.read(path))


def _show(found: "CriticalPath | Joined", files: PathFiles) -> None:
    from fastcomm.critical_path.ranks import Joined
    from fastcomm.report import critical_path as report

    if files.output is not None:
        report.write(found, files.output, xlsx=files.xlsx)
    if files.as_json:
        print_json(found)
    elif isinstance(found, Joined):
        report.show_joined(found)
    else:
        report.show(found)
