"""``fastcomm what-if``."""

from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastcomm.cli import INCOMPLETE
from fastcomm.cli.options import run_options
from fastcomm.cli.ranges import RANK
from fastcomm.cli.results import print_json, result_options
from fastcomm.cli.windows import window_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastcomm.critical_path.result import CriticalPath
    from fastcomm.critical_path.what_if import Edit
    from fastcomm.trace.run import SkippedRank

_EXAMPLES = """\b
Examples:
  fastcomm what-if traces/ --scale comm:DP=0.5
  fastcomm what-if traces/ --scale 'name:flash_fwd=0.8' --remove launches
  fastcomm what-if traces/ --scale comm:DP=0.25:1.0:0.25 --json
  fastcomm what-if traces/ --edits edits.toml
"""


@click.command("what-if", epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--rank", type=RANK, help="Rank to look at; by default the first.")
@click.option("--all-ranks", is_flag=True, help="Replay all ranks, which collectives join.")
@window_options
@click.option(
    "--scale",
    multiple=True,
    metavar="WHAT=FACTOR",
    help="Own time of events times a factor; FROM:TO:STEP tries many. WHAT is comm, compute, "
    "copy or host, comm:TAG, or tag:, op:, stream:, thread: or name: with a value; + joins.",
)
@click.option("--set", "set_", multiple=True, metavar="WHAT=TIME", help="Own time: 10us.")
@click.option(
    "--remove",
    multiple=True,
    type=click.Choice(["launches", "gaps", "host-gaps"]),
    help="Launch delays, gaps between kernels, gaps between operators.",
)
@click.option("--hide", multiple=True, metavar="TAG", help="Communication of TAG is free.")
@click.option("--fuse-below", metavar="TIME", help="Fuse neighbouring kernels below TIME.")
@click.option("--clock", metavar="TIMES", help="Compute kernels are so many times as fast.")
@click.option("--link", metavar="TIMES", help="Communication is so many times as fast.")
@click.option(
    "--edits",
    type=click.Path(exists=True, dir_okay=False),
    help="TOML file with tables [[edit]], which come first.",
)
@run_options
@result_options("Write the new path as CSV and Parquet, what_if.json, and the sweep.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    paths: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    **words: Any,
) -> None:
    """Ask how long a step would take if some of its work were faster.

    The events of the window are replayed with the edits: each begins as soon as what it waited
    for allows. The error of a replay without edits is printed with every answer.
    """
    from dataclasses import replace

    from fastcomm.critical_path.what_if import Replay, sweep
    from fastcomm.report import critical_path as report

    what_if, sweeps = _edits(words)
    found, left_out = _found(paths, words)
    replay = Replay(found)
    answer = replace(
        replay.run(what_if),
        sweeps=tuple(sweep(replay, edit, values, what_if) for edit, values in sweeps),
        failed=tuple(left_out),
    )
    if output is not None:
        report.write_what_if(answer, output, xlsx=words["xlsx"])
    if words["html"] is not None:
        from fastcomm.report.html import critical, render

        render.write(critical.what_if(answer, paths), words["html"])
    if as_json:
        print_json(answer)
    else:
        report.show_what_if(answer)
    if left_out:
        ctx.exit(INCOMPLETE)


def _found(
    paths: tuple[str, ...], words: dict[str, Any]
) -> "tuple[CriticalPath, Sequence[SkippedRank]]":
    """The path that is edited, of one rank or through all, and the ranks that are left out."""
    from fastcomm.cli.windows import joined_run, one_rank, wanted_window
    from fastcomm.critical_path.analysis import analyse
    from fastcomm.executors import warm

    if words["all_ranks"]:
        joined, left_out = joined_run(paths, words)
        return joined.path, left_out
    window, loads = wanted_window(words), words["data_load_events"]
    warm.compile_critical_path()
    trace, left_out = one_rank(paths, words)
    return analyse(trace, window, data_load=loads), left_out


def _edits(words: dict[str, Any]) -> tuple[list["Edit"], list[tuple["Edit", list[float]]]]:
    """The edits, those of the file first, and the sweeps."""
    from pathlib import Path

    from fastcomm.critical_path import what_if
    from fastcomm.errors import ConfigError

    found = what_if.read(Path(words["edits"])) if words["edits"] else []
    sweeps = []
    for text in words["scale"]:
        what, value = _pair("--scale", text)
        parts = value.split(":")
        many = [*map(what_if.factor, parts[:2]), *map(what_if.amount, parts[2:])]
        if len(many) == 1:
            found.append(what_if.Edit(action="scale", what=what, value=many[0]))
            continue
        if len(many) != 3 or many[2] <= 0:  # noqa: PLR2004 - from, to, step
            raise ConfigError(f"--scale {text}: wanted a factor, or FROM:TO:STEP")
        sweeps.append((what_if.Edit(action="scale", what=what), _steps(*many)))
    for text in words["set_"]:
        what, value = _pair("--set", text)
        found.append(what_if.Edit(action="set", what=what, value=what_if.duration_ns(value)))
    tables = [("remove", each) for each in words["remove"]]
    tables += [("hide", each) for each in words["hide"]]
    tables += [
        (key, words[key]) for key in ("fuse_below", "clock", "link") if words[key] is not None
    ]
    found += [what_if.edit_of({key: value}) for key, value in tables]
    return found, sweeps


def _pair(option: str, text: str) -> tuple[str, str]:
    from fastcomm.errors import ConfigError

    what, equals, value = text.rpartition("=")
    if not equals or not what:
        raise ConfigError(f"{option}: found {text!r}, wanted WHAT=VALUE")
    return what, value


_MOST_STEPS = 10_000


def _steps(first: float, last: float, step: float) -> list[float]:
    from fastcomm.errors import ConfigError

    count = (last - first) / step + 1 + 1e-9
    if not 1 <= count < _MOST_STEPS + 1:
        raise ConfigError(
            f"--scale {first:g}:{last:g}:{step:g} has {max(0, count):.0f} values, wanted 1 to "
            f"{_MOST_STEPS}"
        )
    return [round(first + k * step, 12) for k in range(floor(count))]
