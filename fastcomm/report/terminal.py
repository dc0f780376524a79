"""The metrics of a run on one screen; `--full` and `--spec` print more tables below it.

From top to bottom: what was measured and which ranks were skipped, the sentences that matter,
warnings, the breakdown, one line for each parallelism, and the ranks that make others wait.
"""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from fastcomm.metrics import gaps
from fastcomm.metrics.result import Metrics
from fastcomm.report import details
from fastcomm.report.console import (
    COMMAND,
    NA,
    TerminalTable,
    na,
    percent,
    plain_console,
    say,
    table,
)
from fastcomm.trace.run import ranks_words
from fastcomm.trace.schema import TAGS
from fastcomm.units import counted, format_bandwidth, format_bytes, format_ns

_BAR = 96
_SMALL_BAR = 24
_EXACT_DIGITS = 4  # of a step, and of what it sends
_MOST_FINDINGS = 3
_MOST_WARNINGS = 4
_MOST_LINES = 3  # of a warning
_SKIPPED, _WARNING = "[red]skipped:[/]", "[yellow]warning:[/]"
_COLORS = {
    "compute": "green",
    "exposed_DP": "blue",
    "exposed_TP": "red",
    "exposed_PP": "magenta",
    "exposed_EP": "yellow",
    "exposed_CP": "cyan",
    "exposed_OTHER": "bright_red",
    "exposed_mixed": "bright_magenta",
    "memcpy": "bright_blue",
    "idle": "bright_black",
}
_EXPOSED = "exposed_"


def show(
    found: Metrics, console: Console | None = None, *, full: bool = False, spec: bool = False
) -> None:
    """Print the report to stdout; plain text where that is no terminal.

    Parameters
    ----------
    found
        The metrics of a run.
    console
        Where to print; stdout by default.
    full
        Print every table and every warning.
    spec
        Print the formulas of the specification and utilization by payload bytes.

    """
    console = plain_console(console)
    say(console, _title(found), hanging=2)
    for line in _skipped(found, console.width, full=full):
        say(console, line, hanging=2)
    for line in _sentences(found, full=full):
        say(console, line, indent=2, hanging=4)
    for line in _first(found.warnings, _WARNING, "warning", console.width, full=full):
        say(console, line, hanging=2)
    if found.breakdown.exact["idle"] is not None and console.is_terminal:
        console.print(_stack(found, min(_BAR, console.width - 4)))
    tables = [_breakdown(found), _parallelisms(found), details.culprits(found)]
    if full:
        tables += details.tables(found)
    if spec:
        tables += details.spec_tables(found)
    for rows in tables:
        if rows.row_count:
            console.print()
            console.print(rows)
    console.print()
    for note in _notes(found, full=full, spec=spec):
        say(console, escape(note), hanging=2, style="dim")


def _sentences(found: Metrics, *, full: bool) -> list[str]:
    """Return the headline, then the findings in order, or a sentence if there are none."""
    shown = found.findings if full else found.findings[:_MOST_FINDINGS]
    lines = [f"[bold]{escape(found.headline)}[/]"]
    for each in shown:
        color = "yellow" if each.is_symptom else "bold red"
        lines.append(f"[{color}]{escape(each.text)}[/] Confidence: {each.confidence}.")
    if more := len(found.findings) - len(shown):
        lines.append(f"{counted(more, 'more finding')} with --full.")
    return lines + ([f"[green]{escape(found.health)}[/]"] if found.health else [])


def _title(found: Metrics) -> str:
    times = found.iteration
    if times.mean_ns is not None and times.p99_ns is not None:
        measured = f"{format_ns(times.mean_ns, _EXACT_DIGITS)} a step"
        if sum(each.iterations for each in found.by_rank) > 1:
            measured += f", {format_ns(times.p99_ns, _EXACT_DIGITS)} p99"
    else:
        measured = "no iteration" if found.iterations is not None else NA
    iterations = (
        f"{NA} iterations"
        if found.iterations is None
        else counted(found.iterations, "iteration")
    )
    clock = f"; {found.iteration_clock} clock" if times.mean_ns is not None else ""
    ranks = ranks_words(len(found.measured_ranks), found.expected_ranks)
    return (
        f"[bold]{ranks}, {iterations}[/] "
        f"({escape(', '.join(found.found_by))}{clock}): {measured}"
    )


def _stack(found: Metrics, width: int) -> Text:
    """The breakdown as one stacked bar of at most `width` cells."""
    bar, edge = Text("  "), 0.0
    for name, share in found.breakdown.exact.items():
        cells = round((edge + (share or 0)) * width) - round(edge * width)
        edge += share or 0
        bar.append("█" * cells if name != "idle" else "░" * cells, style=_COLORS[name])
    return bar


def _breakdown(found: Metrics) -> TerminalTable:
    """Parts of a step that add up to all of it."""
    rows = table("part of a step", "time", "share", "")
    parts = found.breakdown.parts or {}
    for part, name, color in (
        ("compute", "compute", _COLORS["compute"]),
        ("exposed", "exposed communication", "red"),
        ("memcpy", "copies", _COLORS["memcpy"]),
        ("idle", "idle", _COLORS["idle"]),
    ):
        share = parts.get(part)
        bar = Text("█" * round((share or 0) * _SMALL_BAR), style=color)
        rows.add_row(name, _of_step(found, share), percent(share), bar)
    return rows


def _of_step(found: Metrics, share: float | None) -> str:
    mean = found.iteration.mean_ns
    return NA if share is None or mean is None else format_ns(share * mean)


_WAITS = ("wait a step", "transfer a step")


def _parallelisms(found: Metrics) -> TerminalTable:
    """One line for each parallelism; times and bytes of a mean rank and step."""
    split = found.across.mean_waits()
    rows = table(
        "parallelism",
        "exposed a step",
        "of step",
        *(_WAITS if split else ()),
        f"{found.bytes}/step/GPU",
        "bus bandwidth",
        "events",
        drop=("events", *reversed(_WAITS)),
    )
    exact, guessed = found.breakdown.exact, guessed_tags(found)
    for tag in TAGS:
        share = exact[_EXPOSED + tag]
        if tag not in found.volume:
            continue
        waits = split.get(tag, (None, None)) if split else ()
        rows.add_row(
            Text(f"{tag} *" if tag in guessed else tag, style=_COLORS[_EXPOSED + tag]),
            _of_step(found, share),
            percent(share),
            *(na(each, format_ns) for each in waits),
            na(found.volume[tag].bytes_per_step_per_gpu, _exact_bytes),
            na(found.bandwidth[tag].avg_bus_bw, format_bandwidth),
            str(found.volume[tag].comm_events),
        )
    if share := exact[_EXPOSED + "mixed"]:
        rows.add_row("several", _of_step(found, share), percent(share))
    return rows


def _exact_bytes(count: float) -> str:
    return format_bytes(count, _EXACT_DIGITS)


def guessed_tags(found: Metrics) -> set[str]:
    """Return the parallelisms that at least one group has by a heuristic alone."""
    groups = found.tables["group_tags"].to_pylist()
    return {row["tag"] for row in groups if row["tag_source"] == "heuristic"}


def _notes(found: Metrics, *, full: bool, spec: bool) -> Iterator[str]:
    """Explain what a reader might take for something else."""
    if found.volume:
        yield "Exposed: not under compute." + (
            " Wait and transfer count overlapped time, too." if found.across.waits else ""
        )
    if any(not each.is_symptom for each in found.findings):
        yield "Cost: about what a fix gains a step; ranks that are late together share it."
    if details.culprits(found).row_count:
        yield "Wait caused: in all collectives, also where overlapped or passed on."
    if guessed_tags(found):
        yield "* found by a heuristic; --tp, --pp, --dp, --ep, --cp or [[tags]] settle it."
    if (beyond := gaps.outside_sentence(found.outside)) and not gaps.outside_warning(
        found.outside, found.iteration_clock
    ):
        yield f"{beyond}."
    yield from [note] if (note := found.across.matching.note) and not full else []
    if full:
        yield from details.notes(found)
    if spec:
        yield from details.spec_notes(found)
    options = [
        *([] if full else ["--full (all tables)"]),
        *([] if spec else ["--spec (the specification's formulas)"]),
    ]
    if options:
        yield f"More: {', '.join(options)}, --json."


def _skipped(found: Metrics, width: int, *, full: bool) -> Iterator[str]:
    """Ranks that could not be read, and so are in no number below."""
    lines = [str(each) for each in found.failed]
    yield from _first(lines, _SKIPPED, "skipped rank", width, full=full)


def _first(
    texts: Sequence[str], mark: str, noun: str, width: int, *, full: bool
) -> Iterator[str]:
    """The first of some texts behind a mark, each in a few lines."""
    shown = texts if full else texts[:_MOST_WARNINGS]
    room = width * _MOST_LINES - len(Text.from_markup(mark)) - 1
    for text in shown:
        yield f"{mark} {escape(text if full else _brief(text, room))}"
    if more := len(texts) - len(shown):
        yield f"{mark} {counted(more, f'more {noun}')} with --full"


def _brief(text: str, room: int) -> str:
    """Leave out the end of a long text, at a sentence's or a word's end; keep its commands."""
    lines = text.split("\n")
    words = " ".join(line.strip() for line in lines if not line.startswith(COMMAND))
    commands = [line for line in lines if line.startswith(COMMAND)]
    if len(words) <= room:
        return text
    mark = " ... (--full)"
    cut = words[: room - len(mark)]
    place = max(cut.rfind(". "), cut.rfind("; "), cut.rfind(": "))
    if place < room // 2:
        place = cut.rfind(" ")
    return "\n".join([cut[: place + 1].rstrip() + mark, *commands])
