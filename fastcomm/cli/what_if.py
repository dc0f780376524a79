"""``fastcomm what-if``."""

from functools import partial
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from fastcomm.checks import invalid, shortened
from fastcomm.cli import INCOMPLETE
from fastcomm.cli.commands import EDITS, OptionsCommand, option
from fastcomm.cli.options import ExecutionOptions, builds, run_options
from fastcomm.cli.results import ResultFiles, print_json, result_options
from fastcomm.cli.values import Duration
from fastcomm.cli.windows import find_path, path_options
from fastcomm.options import Delay, PathOptions, ReadOptions

if TYPE_CHECKING:
    from fastcomm.graph.edits import Edit

_EXAMPLES = """\b
Examples:
  fastcomm what-if traces/ --scale comm:DP=0.5
  fastcomm what-if traces/ --scale 'name:flash_fwd=0.8' --remove launches
  fastcomm what-if traces/ --scale comm:DP=0.25:1.0:0.25 --json
  fastcomm what-if traces/ --edits edits.toml
"""


_edit = partial(option, group=EDITS)


@click.command("what-if", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@path_options
@_edit(
    "--scale",
    multiple=True,
    is_common=True,
    metavar="WHAT=FACTOR",
    help="Multiply the own time of events by FACTOR, or by each of FROM:TO:STEP.",
)
@_edit(
    "--set",
    "set_",
    multiple=True,
    metavar="WHAT=TIME",
    help="Set the own time of events, as in name:allreduce=10us.",
)
@_edit(
    "--remove",
    multiple=True,
    is_common=True,
    type=click.Choice(get_args(Delay)),
    help="Remove launch delays, gaps between kernels, or gaps between operators.",
)
@_edit(
    "--hide",
    multiple=True,
    metavar="TAG",
    is_common=True,
    help="Make the communication of a parallelism free, as in DP.",
)
@_edit(
    "--fuse-below",
    type=Duration(),
    metavar="TIME",
    help="Fuse neighboring kernels shorter than TIME, as in 5us.",
)
@_edit("--compute-speedup", metavar="FACTOR", help="Divide compute kernel durations by FACTOR.")
@_edit(
    "--comm-speedup",
    metavar="FACTOR",
    is_common=True,
    help="Divide communication durations by FACTOR.",
)
@_edit(
    "--edits",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    is_common=True,
    help="Apply the [[edit]] tables of a TOML file first.",
)
@run_options
@result_options("what_if.json, the new path and sweeps as CSV and Parquet")
@builds(files=ResultFiles)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    paths: tuple[str, ...],
    scale: tuple[str, ...],
    set_: tuple[str, ...],
    remove: tuple[str, ...],
    hide: tuple[str, ...],
    fuse_below: str | None,
    compute_speedup: str | None,
    comm_speedup: str | None,
    edits: Path | None,
    files: ResultFiles,
    path_options: PathOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Predict the step time with some work made faster.

    Replays the events of the window with the edits: each event starts as soon as the events
    that it waited for allow. Edits apply to all ranks, or to that of --rank. WHAT selects
    events: comm, compute, copy or host, comm:TP (a parallelism), or tag:, op:, stream:,
    thread: or name: with a value; + combines them. Prints the error of a replay without edits
    with every result.
    """
    from fastcomm.graph import edits as changes_of
    from fastcomm.report import critical_path as report

    changes = changes_of.read_edits(edits) if edits else []
    scaled, sweeps = _scales(scale)
    changes += [*scaled, *map(_set, set_)]
    tables = [*(("remove", name) for name in remove), *(("hide", name) for name in hide)]
    tables += [
        (key, value)
        for key, value in (
            ("fuse_below", fuse_below),
            ("compute_speedup", compute_speedup),
            ("comm_speedup", comm_speedup),
        )
        if value is not None
    ]
    changes += [changes_of.edit_of({key: value}) for key, value in tables]
    path = find_path(paths, path_options, reading, execution)
    answer = path.what_if(*changes, sweeps=sweeps)
    if files.output is not None:
        report.write_what_if(answer, files.output, xlsx=files.xlsx)
    if files.html is not None:
        from fastcomm.report.html import critical
        from fastcomm.report.html import write as write_page

        write_page(critical.what_if(answer, paths), files.html)
    if files.as_json:
        print_json(answer)
    else:
        report.show_what_if(answer)
    if path.skipped:
        ctx.exit(INCOMPLETE)


def _scales(
    texts: tuple[str, ...],
) -> tuple[list["Edit"], list[tuple["Edit", list[float]]]]:
    """Return the edits of --scale, and for each FROM:TO:STEP an edit and its factors."""
    from fastcomm.graph import edits

    single, sweeps = list[edits.Edit](), []
    for text in texts:
        target, value = _pair("--scale", text)
        parts = value.split(":")
        many = [*map(edits.factor, parts[:2]), *map(edits.amount, parts[2:])]
        if len(many) == 1:
            single.append(edits.Edit(action="scale", target=target, value=many[0]))
            continue
        if len(many) != 3 or many[2] <= 0:  # noqa: PLR2004 - from, to, step
            raise invalid("--scale", repr(text), "WHAT=FACTOR or WHAT=FROM:TO:STEP")
        sweeps.append((edits.Edit(action="scale", target=target), _steps(*many)))
    return single, sweeps


def _set(text: str) -> "Edit":
    """Return the edit of one --set, as in "name:gemm=20us"."""
    from fastcomm.graph import edits
    from fastcomm.units import parse_duration

    target, value = _pair("--set", text)
    return edits.Edit(action="set", target=target, value=parse_duration(value))


def _pair(option: str, text: str) -> tuple[str, str]:
    """Split WHAT=VALUE at the last equals sign; errors begin with the name `option`."""
    target, equals, value = text.rpartition("=")
    if not equals or not target:
        example = {"--scale": "comm:DP=0.5", "--set": "name:gemm=20us"}[option]
        raise invalid(option, repr(shortened(text)), f"WHAT=VALUE, as in {example}")
    return target, value


_MOST_STEPS = 10_000


def _steps(first: float, last: float, step: float) -> list[float]:
    """Return the factors from `first` to `last` inclusive, at intervals of `step`."""
    count = (last - first) / step + 1 + 1e-9
    if not 1 <= count < _MOST_STEPS + 1:
        text = f"{first:g}:{last:g}:{step:g}"
        raise invalid("--scale", text, f"FROM:TO:STEP with 1 to {_MOST_STEPS} values")
    return [round(first + k * step, 12) for k in range(floor(count))]
