"""``fastcomm critical-path``."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.cli import INCOMPLETE
from fastcomm.cli.commands import COMPAT, OUTPUT, RULES, OptionsCommand, option
from fastcomm.cli.messages import warn
from fastcomm.cli.options import ExecutionOptions, builds, run_options
from fastcomm.cli.results import ResultFiles, compat_option, print_json, result_options
from fastcomm.cli.values import Output, OutputFile
from fastcomm.cli.windows import find_path, one_rank, path_options
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.options import PathOptions, ReadOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastcomm.critical_path import CriticalPath
    from fastcomm.critical_path.overlay import Drawing
    from fastcomm.critical_path.rules import DataDependencies
    from fastcomm.trace.trace import Trace

_EXAMPLES = """\b
Examples:
  fastcomm critical-path traces/ --step 12
  fastcomm critical-path traces/ --rank 3
  fastcomm critical-path trace.json.gz --annotation ProfilerStep --compat hta
  fastcomm critical-path traces/ --rank 3 --overlay path.json.gz --save path
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRankOptions:
    """Analyses and outputs that read one rank: HTA's rules, overlay, graph, dependencies."""

    compat: str | None = None
    zero_weight_launches: bool = False
    deps: str | None = None
    execution_trace: str | None = None
    overlay: Path | None = None
    all_events: bool = False
    all_edges: bool = False
    save: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether any option needs the trace of one rank."""
        return any((self.compat, self.deps, self.overlay, self.save))


@click.command("critical-path", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@path_options
@option(
    "--overlay",
    type=OutputFile(),
    metavar="FILE",
    group=OUTPUT,
    is_common=True,
    help="Write the trace with the path marked and its edges as arrows (.json, .json.gz).",
)
@option(
    "--all-events",
    is_flag=True,
    group=OUTPUT,
    needs=("--overlay",),
    help="Keep every event in the file of --overlay.",
)
@option(
    "--all-edges",
    is_flag=True,
    group=OUTPUT,
    needs=("--overlay",),
    help="Draw every edge in the file of --overlay.",
)
@option(
    "--save",
    type=Output(),
    metavar="DIR",
    group=OUTPUT,
    help="Write the graph and its path to DIR.zip.",
)
@option(
    "--deps",
    type=click.Choice(["data"]),
    metavar="data",
    group=RULES,
    help="Also report operators that could start earlier if they waited only for their data.",
)
@option(
    "--execution-trace",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    group=RULES,
    needs=("--deps",),
    help="Execution trace for --deps. Default: torch_et_RANK.json or pytorch_et_RANK.json.",
)
@compat_option("hta", of="HTA, with the first step by default")
@option(
    "--zero-weight-launches",
    is_flag=True,
    group=COMPAT,
    needs=("--compat hta",),
    help="Add HTA's edges of weight 0 from every launch (with --compat hta).",
)
@run_options
@result_options("critical_path.json, and the path edge by edge as CSV and Parquet")
@builds(files=ResultFiles, one_rank_options=OneRankOptions)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    paths: tuple[str, ...],
    one_rank_options: OneRankOptions,
    files: ResultFiles,
    path_options: PathOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Find the chain of work that determines the step time.

    PATH is a trace, or a directory of traces. The path goes through all ranks, joined by their
    collectives, or through the first rank where they cannot be joined. Prints the time on the
    path by class (host, compute, communication, launch delay, gaps) and the operators with the
    most time on it. --compat, --overlay, --save and --deps analyze one rank, by default the
    first.
    """
    if one_rank_options.is_given:
        trace, skipped = one_rank(paths, path_options.rank, reading)
        critical = _path_of(trace, path_options, one_rank_options)
        critical.failed = tuple(skipped)
    else:
        critical = find_path(paths, path_options, reading, execution)
    if files.html is not None:
        _write_page(critical, paths, path_options, reading, files.html)
    _show(critical, files)
    if critical.failed:
        ctx.exit(INCOMPLETE)


def _path_of(trace: "Trace", window: PathOptions, options: OneRankOptions) -> "CriticalPath":
    """Find the critical path of one rank, and write the files that the options ask for.

    `window` selects the part of the trace; `options` have the rules, the overlay, the saved
    graph and the analysis of data dependencies.

    Raises `FastcommError` if the graph has a cycle.
    """
    from fastcomm.trace.run import warnings_of_ranks

    find, drawing_type = _rules(options)
    critical = find(trace, window)
    if critical.path is None:
        raise FastcommError(f"{trace.meta.path}: the graph has a cycle, and no critical path")
    warn(warnings_of_ranks([trace.meta]))
    if options.overlay:
        from fastcomm.critical_path.overlay import write

        only = not (options.all_events or options.all_edges)
        drawing = drawing_type(only_critical=only, all_edges=options.all_edges)
        write(trace, critical, options.overlay, drawing)
    if options.save:
        critical.save(options.save)
    if options.deps:
        critical.data = _data(trace, critical, options.execution_trace)
    return critical


def _rules(
    options: OneRankOptions,
) -> "tuple[Callable[[Trace, PathOptions], CriticalPath], type[Drawing]]":
    """Return the compiled analysis by the rules of --compat, and how to draw its path."""
    from fastcomm.analyses import preparation

    if options.compat:
        from fastcomm.compat import hta

        preparation.compile_for("critical-path-hta", hta.find_path)
        zero = options.zero_weight_launches
        return partial(hta.find_path, zero_weight_launches=zero), hta.HtaDrawing
    from fastcomm.critical_path.analysis import analyze
    from fastcomm.critical_path.overlay import Drawing

    preparation.compile_critical_path()
    return analyze, Drawing


def _data(trace: "Trace", critical: "CriticalPath", named: str | None) -> "DataDependencies":
    """Return the operators that could start earlier if they waited only for their data.

    `named` is the path of the execution trace; None searches for it beside the trace.
    """
    from fastcomm.critical_path.data import data_dependencies
    from fastcomm.readers import execution_trace

    path = Path(named) if named else execution_trace.find(trace)
    if path is None:
        raise ConfigError(
            f"--deps data: no torch_et_{trace.meta.rank}.json and no pytorch_et_"
            f"{trace.meta.rank}.json beside {trace.meta.path}; name it with --execution-trace"
        )
    return data_dependencies(trace, critical, execution_trace.read(path))


def _write_page(
    critical: "CriticalPath",
    paths: tuple[str, ...],
    window: PathOptions,
    reading: ReadOptions,
    html: Path,
) -> None:
    """Write the page of a path to `html`; its commands repeat the options of this one."""
    from fastcomm.report.commands import reading_arguments, window_arguments
    from fastcomm.report.html import critical as pages
    from fastcomm.report.html import write as write_page

    options = [*reading_arguments(reading), *window_arguments(window)]
    if critical.is_joined and reading.keep_going:
        options.append("--keep-going")
    write_page(pages.page(critical, paths, options), html)


def _show(path: "CriticalPath", files: ResultFiles) -> None:
    """Print the path, and write its files if --output names a directory."""
    from fastcomm.report import critical_path as report

    if files.output is not None:
        report.write(path, files.output, xlsx=files.xlsx)
    if files.as_json:
        print_json(path)
    else:
        report.show(path)
