"""Critical paths and what-if results on a terminal and in files."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from fastcomm.critical_path import CriticalPath, WhatIf
from fastcomm.critical_path.candidates import Candidate
from fastcomm.critical_path.rules import DataDependencies
from fastcomm.errors import inert
from fastcomm.graph.edits import EditSweep
from fastcomm.report.console import plain_console, say, shortened, shown, table
from fastcomm.report.tables import critical_path as tables
from fastcomm.report.tables.critical_path import label
from fastcomm.trace.run import ranks_words
from fastcomm.units import counted, format_ns, percent

_LONGEST_GROUP = 64  # of a description in a sentence
_NEARLY = 0.95
_TOP = 10


def show(path: CriticalPath, console: Console | None = None) -> None:
    """Print a critical path; plain text if the console is no terminal."""
    console = plain_console(console)
    say(console, _title(path), hanging=2)
    if not len(path.graph.event):
        say(console, "The window has no event that a path could go through.", indent=2)
        return
    say(console, _coverage(path), indent=2, hanging=4)
    for part in (
        tables.classes(path, by_tag=False),
        tables.tags(path),
        tables.names(path, _TOP),
    ):
        if part.rows:
            console.print(shown(part))
    for note in path.notes:
        say(console, f"note: {escape(note)}", hanging=2, style="dim")
    if path.data is not None:
        _show_data(path.data, console)
    if path.is_joined:
        _show_ranks(path, console)


def _show_ranks(path: CriticalPath, console: Console) -> None:
    """Print each rank's time on the path and its waits, and the rank that causes the most wait.

    After the table, print how often the path goes from one rank to another, and how much each
    rank's clock was corrected.
    """
    console.print(shown(tables.ranks(path.by_rank())))
    worst = next(iter(path.waits_caused().slice(0, 1).to_pylist()), None)
    if worst is not None and worst["later_ns"] > 0:
        tag = "" if worst["tag"] == "OTHER" else f"{worst['tag']} "
        group = shortened(inert(worst["group"] or "all ranks"), _LONGEST_GROUP)
        say(
            console,
            f"Rank {worst['rank']} makes its {tag}group ({escape(group)}) wait: "
            f"{format_ns(worst['later_ns'])} more than it waits itself.",
        )
    offsets = {rank: ns for rank, ns in path.across.offsets.items() if ns}
    texts = ", ".join(f"{rank}: {format_ns(ns)}" for rank, ns in offsets.items()) or "none"
    say(
        console,
        f"The path goes from one rank to another {counted(path.crossings, 'time')}. "
        f"Clock corrections: {texts}.",
    )


def _show_data(data: DataDependencies, console: Console) -> None:
    """Print what could start earlier if only data dependencies counted."""
    say(
        console,
        f"[bold]Data dependencies[/]: {data.matched} of the window's {data.in_window} "
        f"operators are in the execution trace, which has {data.traced} (matched by "
        f"{data.joined_by}).",
    )
    say(
        console,
        f"As recorded, the operators take {format_ns(data.span_ns)}; if each waited only for "
        f"its data, {format_ns(data.bound_ns)}.",
        indent=2,
    )
    rows = table("could start earlier", "by", "writers of its inputs")
    for row in data.movable(_TOP).to_pylist():
        name = f"{row['name']} in {row['part_of']}"
        rows.add_row(escape(name), format_ns(row["earlier_ns"]), str(row["producers"]))
    console.print(rows)
    rows = table("shortens the step if reordered", "by")
    for row in data.shortening(_TOP).to_pylist():
        name = f"{row['name']} in {row['part_of']}"
        rows.add_row(escape(name), format_ns(row["shortens_ns"]))
    console.print(rows)
    rows = table(
        "if moved as a whole", "shortens the step by", "starts earlier by", "operators"
    )
    for row in data.movable_subgraphs(_TOP).to_pylist():
        times = (_time(row[name]) for name in ("shortens_ns", "earlier_ns"))
        rows.add_row(escape(row["part_of"]), *times, str(row["operators"]))
    console.print(rows)


def _time(ns: int | None) -> str:
    """Format a time; "n/a" for None."""
    return "n/a" if ns is None else format_ns(ns)


def ranks_of(path: CriticalPath) -> str:
    """Return "all ranks", "7 of 8 ranks", or "rank 5": what a path goes through."""
    if not path.is_joined:
        return f"rank {path.about.rank}"
    present, expected = len(path.ranks), path.across.expected_ranks
    return ranks_words(present, expected) if present < expected else "all ranks"


def subject_of(path: CriticalPath) -> str:
    """Return what a path goes through: "step 12, all ranks", or only the ranks."""
    return ranks_of(path) if path.step is None else f"step {path.step}, {ranks_of(path)}"


def _title(path: CriticalPath) -> str:
    """Return the line on the step, the ranks, the length, and the largest class of time."""
    about, sums = path.about, path.summary_ns()
    rules = "" if about.rules.is_exact else f" by the rules of {about.rules.name.upper()}"
    title = f"[bold]{subject_of(path)}:[/] critical path{rules} of {format_ns(path.length_ns)}"
    most = max(sums, key=lambda name: sums[name], default="")
    total = sum(sums.values())
    return (
        f'{title}, {percent(sums[most] / total)} of it "{label(most, path)}"'
        if total > 0
        else title
    )


def _coverage(path: CriticalPath) -> str:
    """Return the sentence on how much of the time from first to last event the path covers."""
    length, wall = path.length_ns, path.wall_ns
    share = length / wall if wall else 1.0
    text = (
        f"The path covers {percent(share)} of the {format_ns(wall)} from first to last event, "
        f"through {path.event_count} of {counted(path.about.clipped, 'event')}."
    )
    if share < _NEARLY:
        text += f" {format_ns(wall - length)} are on no edge of it."
    return text


_STEP_DIGITS = 4


def show_what_if(what_if: WhatIf, console: Console | None = None) -> None:
    """Print a what-if analysis; plain text if the console is no terminal."""
    console = plain_console(console)
    say(console, f"[bold]{subject_of(what_if.before)}:[/] {_change(what_if)}")
    for edit in what_if.edits:
        say(console, escape(str(edit)), indent=2)
    if what_if.edits:
        say(console, escape(str(what_if.interval)), indent=2, hanging=4)
    say(console, _check(what_if.replay_error_ns), indent=2)
    if what_if.edits:
        console.print(shown(tables.changes(what_if)))
    for sweep in what_if.sweeps:
        console.print(shown(tables.sweep("", sweep, what_if.before_ns)))
        say(console, escape(_widest(sweep)), indent=2, hanging=4)
    if what_if.candidates is not None:
        _show_candidates(what_if.candidates, what_if.before_ns, console)
    for note in what_if.before.notes:
        say(console, f"note: {escape(note)}", hanging=2, style="dim")


def _change(what_if: WhatIf) -> str:
    """Return the step time before and after the edits; the best of sweeps or candidates."""
    faster = f", {what_if.speedup:.3f} times as fast" if what_if.speedup is not None else ""
    before, after = (
        format_ns(ns, _STEP_DIGITS) for ns in (what_if.before_ns, what_if.after_ns)
    )
    change = before
    if what_if.edits and what_if.after is what_if.before:
        change = f"{before}, unchanged: nothing in this step is what the edits change"
    elif what_if.edits:
        change = f"{before} before, {after} after{faster}"
    elif what_if.candidates:
        change = f"{before}; {_best(what_if.candidates[0], what_if.before_ns)}"
    return f"{change}; {_shortest(what_if.sweeps)}" if what_if.sweeps else change


_LONGEST_EDIT = 64  # in a sentence


def _best(candidate: Candidate, before_ns: int) -> str:
    """Return the clause on the edit that shortens the step most."""
    saved = f"{format_ns(candidate.saved_ns)} ({percent(candidate.saved_ns / before_ns)})"
    return f"{escape(shortened(candidate.edit.text, _LONGEST_EDIT))} would save most, {saved}"


def _show_candidates(candidates: Sequence[Candidate], before_ns: int, console: Console) -> None:
    """Print the edits that shorten the step most, each tried alone."""
    if not candidates:
        say(console, "None of the edits that were tried shortens the step.", indent=2)
        return
    console.print(shown(tables.candidates(candidates, before_ns)))


def _widest(sweep: EditSweep) -> str:
    """Return the interval of the value of a sweep whose interval is the widest."""
    bounded = [one for one in sweep.intervals if one.bounds_ns is not None]
    if not bounded:
        return str(sweep.intervals[0])
    widest = max(bounded, key=lambda one: one.width_ns or 0.0)
    return f"Each step time give or take {format_ns(widest.width_ns or 0.0)}: {widest.because}."


def _shortest(sweeps: Sequence[EditSweep]) -> str:
    """Return the value of each sweep with the shortest step."""
    best = []
    for sweep in sweeps:
        place = min(range(len(sweep.edits)), key=lambda at: sweep.span_ns[at])
        span = format_ns(sweep.span_ns[place], _STEP_DIGITS)
        best.append(f"{span} with {escape(sweep.edits[place].text)}")
    return ", ".join(best)


def _check(error_ns: int) -> str:
    """Return the sentence on how far a replay without edits is from the measured times."""
    return (
        f"Check: without edits, the replay differs from the measured times by "
        f"{format_ns(error_ns)} at most."
        if error_ns
        else "Check: without edits, the replay reproduces all measured times exactly."
    )
