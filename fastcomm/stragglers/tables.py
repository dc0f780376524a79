"""Stragglers of a production job: on the terminal, as JSON, and as the published files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastcomm.show import files
from fastcomm.show.console import (
    TerminalTable,
    plain_console,
    say,
    show_edits,
    shown,
    table,
    what_if_line,
)
from fastcomm.show.tables import ResultTable, TableColumn
from fastcomm.stragglers.analysis import KINDS, StragglerResult, headline
from fastcomm.stragglers.result import Attribution, Effect, Stragglers
from fastcomm.units import format_ns, percent, plural
from fastcomm_kernels.arrays import Floats

# Kinds of parts, and the name of one.
ATTRIBUTED: Final = (("dp_rank", "data rank"), ("stage", "stage"), ("optype", "operation"))
_SECOND = 1e9
_MOST_RANKS = 16
_SHADES = ((1.1, ""), (1.2, "yellow"), (1.35, "red"))


def parts(stragglers: Stragglers) -> list[ResultTable]:
    """Return a table per kind of parts; none where the slowdown is not attributed."""
    if stragglers.blocking is None:
        return []
    return [
        ResultTable(
            name=f"{kind}-table",
            caption=f"By {name}",
            columns=(
                TableColumn(name, lambda pair: pair[0]),
                TableColumn(
                    "slowdown caused alone",
                    lambda pair: pair[1],
                    "factor",
                    f"stragglers.slowdown_by_{kind}",
                    digits=4,
                ),
            ),
            rows=list(stragglers.blocking[kind].mean.items()),
        )
        for kind, name in ATTRIBUTED
    ]


def published(stragglers: Stragglers, meta: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of the study's result file; times in seconds.

    `meta` is the description of the job, which is copied.
    """
    steps = [str(step) for step in stragglers.chosen]

    def by_step(values: Any) -> dict[str, float]:
        return dict(zip(steps, (float(value) for value in values), strict=True))

    def falling(values: Any) -> dict[str, float]:
        return dict(sorted(by_step(values).items(), key=lambda pair: -pair[1]))

    fields = {
        "job_meta": None if meta is None else dict(meta),
        "step_t_base": by_step(stragglers.base / _SECOND),
        "step_t_nodelay": by_step(stragglers.nodelay.whole / _SECOND),
        "step_t_noblk": by_step(stragglers.ideal.whole / _SECOND),
        "launch_slowdown": stragglers.launch_slowdown,
        "blocking_slowdown": stragglers.slowdown,
        "blocking_step_slowdown": falling(
            stragglers.nodelay.whole / stragglers.ideal.optimizer
        ),
        "launch_step_slowdown": falling(stragglers.base / stragglers.nodelay.optimizer),
    }
    for delay, parts in (("blocking", stragglers.blocking), ("launch", stragglers.launch)):
        for kind in KINDS:
            name = f"{delay}_decompose_by_{kind}"
            fields[name] = None if parts is None else dict(parts[kind].mean)
            fields[f"{name}_per_step"] = None if parts is None else _steps(parts[kind], steps)
    return fields


def _steps(part: Attribution, steps: list[str]) -> dict[str, dict[str, float]]:
    """Return the slowdown that each part alone causes, by step."""
    return {step: dict(shares) for step, shares in zip(steps, part.steps, strict=True)}


def effect(effect_: Effect, name: str) -> dict[str, float | None]:
    """Return the fields of the study's files for M_S and M_W; times in seconds.

    `name` is the field of the share of the slowdown that is removed: "Ms" or "Mw".
    """
    return {
        "trem": effect_.removed / _SECOND,
        "tadd": effect_.added / _SECOND,
        "tori": effect_.measured / _SECOND,
        "tideal": effect_.ideal / _SECOND,
        "rem": effect_.rem,
        "add": effect_.add,
        name: effect_.rem,
    }


def write(result: StragglerResult, folder: Path) -> None:
    """Write stragglers.json, and result.json, ms.json, mw.json with the study's fields."""
    stragglers = result.stragglers
    contents = {
        "stragglers": result.to_dict(),
        "result": published(stragglers, result.meta),
        "ms": effect(stragglers.last_stage, "Ms"),
        **({} if stragglers.worst is None else {"mw": effect(stragglers.worst, "Mw")}),
    }
    writers: dict[str, files.Writer] = {
        f"{name}.json": files.text(json.dumps(content, indent=2))
        for name, content in contents.items()
    }
    files.write(folder, writers)


def write_trace(content: Mapping[str, Any], path: Path) -> None:
    """Write a Chrome trace."""
    files.write(path.parent, {path.name: files.text(json.dumps(content))})


def show(result: StragglerResult) -> None:
    """Print the slowdown, its causes, and the heat map of workers."""
    console = plain_console()
    stragglers = result.stragglers
    if result.changed is not None:
        say(console, what_if_line(float(result.changed.whole.mean()), stragglers.step_ns))
        show_edits(console, result.edits, result.interval)
    say(console, f"[bold]{headline(stragglers)}[/]", hanging=2)
    for line in _lines(stragglers):
        say(console, line, hanging=2)
    for part in parts(stragglers):
        console.print(shown(part.top(_MOST_RANKS)))
    if stragglers.workers is not None:
        console.print(_heat(stragglers.workers))


def _lines(stragglers: Stragglers) -> list[str]:
    """Return the lines on the slowdown, the recorded step, the last stage and worst ranks."""
    base, nodelay, ideal = (
        format_ns(float(times.mean()))
        for times in (stragglers.base, stragglers.nodelay.whole, stragglers.ideal.whole)
    )
    last = "n/a" if stragglers.last_stage.rem is None else percent(stragglers.last_stage.rem)
    # Adding 0.0 removes the sign of a negative zero.
    delays = round(stragglers.launch_slowdown - 1, 4) + 0.0
    lines = [
        f"slowdown {stragglers.slowdown:.4f}: a step takes {nodelay}, and would take "
        f"{ideal} if every operation took the average time of its type (ideal)",
        f"recorded step: {base}, of which launch delays are {percent(delays, 2)}",
        f"with an ideal last stage, {last} of the slowdown disappears (M_S of the study)",
    ]
    if stragglers.worst is None or stragglers.worst.rem is None:
        return [*lines, "The slowdown is below --threshold: it is not attributed further."]
    ranks = ", ".join(map(str, stragglers.worst_ranks))
    slowest = f"the slowest {plural(len(stragglers.worst_ranks), 'rank')} {ranks}"
    share = percent(stragglers.worst.rem)
    lines.append(f"with {slowest} ideal, {share} of the slowdown disappears (M_W of the study)")
    return [*lines, *_beyond(stragglers.last_stage.rem, stragglers.worst.rem)]


def _beyond(*shares: float | None) -> list[str]:
    """Return the line that explains shares of the slowdown above 100 % or below 0."""
    if all(share is None or 0 <= share <= 1 for share in shares):
        return []
    return [
        "[dim]Above 100 %: the rest of the job is faster than average. Below 0: these "
        "operations are faster than average.[/]"
    ]


def _heat(workers: Floats) -> TerminalTable:
    """Return slowdowns by data rank (down) and stage (across), colored by size."""
    rows = table("slowdown by worker", *(f"stage {stage}" for stage in range(workers.shape[1])))
    for rank, row in enumerate(workers[:_MOST_RANKS]):
        rows.add_row(f"data rank {rank}", *map(_shaded, row.tolist()))
    return rows


def _shaded(value: float) -> str:
    """Format a slowdown, with a color if it is large."""
    shade = next((shade for limit, shade in reversed(_SHADES) if value >= limit), "")
    return f"[{shade}]{value:.3f}[/]" if shade else f"{value:.3f}"
