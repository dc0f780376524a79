"""Critical paths and what-ifs as tables, on the terminal and in files."""

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
from rich.console import Console
from rich.markup import escape

from fastcomm.critical_path.candidates import SHOWN, Candidate
from fastcomm.critical_path.result import CriticalPath, WhatIf
from fastcomm.critical_path.rules import DataDependencies
from fastcomm.errors import inert
from fastcomm.graph.edits import EditSweep
from fastcomm.show.console import plain_console, say, shortened, shown, table
from fastcomm.show.tables import ResultTable, TableCell, TableColumn
from fastcomm.trace.run_traces import ranks_words
from fastcomm.units import counted, format_ns, percent

_STEP_DIGITS = 4
_COMMUNICATION = "gpu_communication_bound"
LABELS = {
    "cpu_bound": "host: operators and calls",
    "data_loading": "host: data loading",
    "host_gap": "host: between operators",
    "gpu_compute_bound": "device: compute",
    "gpu_graph_bound": "device: whole CUDA graphs",
    "gpu_memory_bound": "device: copies",
    "gpu_communication_bound": "device: communication",
    "gpu_kernel_kernel_overhead": "device: between kernels",
    "gpu_kernel_launch_overhead": "launch delay",
    "sync_wait": "host: return from synchronization",
    "unexplained": "no recorded dependency",
    "": "dependencies",
}
# Of runs without a device, whose collectives stand in its place.
_HOST_LABELS = {
    "gpu_kernel_kernel_overhead": "between collectives",
    "gpu_kernel_launch_overhead": "until a thread takes a collective",
}
_RANKS = (
    TableColumn("rank", lambda row: TableCell(value=row["rank"], text=f"rank {row['rank']}")),
    TableColumn("on the path", "on_path_ns", "ns", "critical-path.ranks.on_path_ns"),
    TableColumn("slack", "arrival_slack_ns", "ns", drop=1, only="terminal"),
    TableColumn("waits", "wait_ns", "ns", "critical-path.ranks.wait_ns"),
    TableColumn("transfers", "transfer_ns", "ns", "critical-path.ranks.transfer_ns", drop=2),
    TableColumn("arrived last", "arrived_last", "count", "critical-path.ranks.arrived_last"),
    TableColumn(
        "wait caused", "wait_caused_ns", "ns", "critical-path.ranks.wait_caused_ns", only="page"
    ),
    TableColumn("wait caused, with messages", "wait_caused_ns", "ns", only="terminal"),
)
_LONGEST_GROUP = 64  # of a description in a sentence
_NEARLY = 0.95
_TOP = 10
_LONGEST_EDIT = 64  # in a sentence


def label(name: str, path: CriticalPath) -> str:
    """Return the label of a class of time on a path; without a device, "device" is left out."""
    text = LABELS.get(name, name)
    if path.about.is_host_run:
        return _HOST_LABELS.get(name, text.removeprefix("device: "))
    return text


def kind_of(name: str, path: CriticalPath) -> str:
    """Return the name of a kind of events; without a device, its work are collectives."""
    return "collective" if path.about.is_host_run and name == "kernel" else name


def classes(path: CriticalPath, *, by_tag: bool) -> ResultTable:
    """Return the time on the path by class, longest first.

    With `by_tag`, each parallelism has a row after that of all communication.
    """
    sums = path.summary_ns()
    total = sum(sums.values()) or 1
    rows = []
    for name, ns in sorted(sums.items(), key=lambda pair: (-pair[1], pair[0])):
        if not ns:
            continue
        rows.append((label(name, path), ns / total, ns))
        if by_tag and name == _COMMUNICATION:
            rows += [(f"{label(name, path)}, {tag}", ns / total, ns) for tag, ns in _tags(path)]
    return ResultTable(
        name="path-classes",
        caption="Time on the path by class",
        heading="time on the path",
        columns=(
            TableColumn("on the path", 0),
            TableColumn("share", _share, "share", "critical-path.summary"),
            TableColumn("", 1, "bar", only="terminal"),
            TableColumn("time", 2, "ns", "critical-path.summary_ns"),
        ),
        rows=rows,
    )


def _share(row: tuple[str, float, int]) -> TableCell:
    """Return the share of a row, with a bar behind it."""
    return TableCell(value=row[1], bar=row[1])


def _tags(path: CriticalPath) -> list[tuple[str, int]]:
    """Return the communication on the path in ns by parallelism, longest first."""
    return sorted(path.by_tag_ns().items(), key=lambda pair: (-pair[1], pair[0]))


def tags(path: CriticalPath) -> ResultTable:
    """Return the communication on the path by parallelism, longest first."""
    return ResultTable(
        name="path-tags",
        caption="Communication on the path",
        columns=(
            TableColumn("communication on the path", 0),
            TableColumn("time", 1, "ns", "critical-path.summary_ns"),
        ),
        rows=_tags(path),
    )


def names(path: CriticalPath, most: int) -> ResultTable:
    """Return the `most` names with the longest own time on the path."""
    rows = path.top("name", most).to_pylist()
    return ResultTable(
        name="path-names",
        caption=f"The {len(rows)} events with the longest own time on the path",
        columns=(
            TableColumn("own time on the path", "name"),
            TableColumn("kind", lambda row: kind_of(row["kind"], path), drop=2),
            TableColumn("edges", "edges", "count", "critical-path.top_operators.edges", drop=1),
            TableColumn("time", "self_ns", "ns", "critical-path.top_operators.self_ns"),
        ),
        rows=rows,
    )


def ranks(by_rank: pa.Table) -> ResultTable:
    """Return the time of ranks on the path, their waits, and those that they cause."""
    return ResultTable(
        name="path-ranks",
        caption="Who waits, and who causes it",
        columns=_RANKS,
        rows=by_rank.to_pylist(),
    )


def changes(what_if: WhatIf) -> ResultTable:
    """Return the time on the path by class before and after the edits, longest first."""
    before, after = what_if.before.summary_ns(), what_if.after.summary_ns()
    times = {name: (before.get(name, 0), after.get(name, 0)) for name in before | after}
    return ResultTable(
        name="before-after",
        caption="Time on the critical path before and after",
        heading="time on the path",
        columns=(
            TableColumn("on the path", 0),
            TableColumn("before", 1, "ns", "what-if.summary_ns"),
            TableColumn("after", 2, "ns", "what-if.summary_ns"),
            TableColumn("change", 3, "ns", "what-if.summary_ns", only="page"),
        ),
        rows=[
            (label(name, what_if.before), old, new, new - old)
            for name, (old, new) in sorted(times.items(), key=lambda pair: -pair[1][0])
            if old or new
        ],
    )


def step_by_rank(what_if: WhatIf) -> ResultTable:
    """Return the step time of each rank before and after the edits, the longest first."""
    order = [("after_ns", "descending"), ("before_ns", "descending"), ("rank", "ascending")]
    return ResultTable(
        name="ranks-before-after",
        caption="The step of each rank, the longest first",
        columns=(
            TableColumn(
                "rank", lambda row: TableCell(value=row["rank"], text=f"rank {row['rank']}")
            ),
            TableColumn("before", "before_ns", "ns", "what-if.by_rank.before_ns"),
            TableColumn("after", "after_ns", "ns", "what-if.by_rank.after_ns"),
        ),
        rows=what_if.by_rank().sort_by(order).to_pylist(),
    )


def bottlenecks(edits: Sequence[Candidate], before_ns: int) -> ResultTable:
    """Return the operations of the path that cost a step of `before_ns` most."""
    costly = candidates_table(edits, before_ns)
    operation = TableColumn("operation", lambda one: one.edit.target)
    return replace(
        costly,
        columns=(operation, *costly.columns[1:]),
        name="bottlenecks",
        caption="Operations of the path that cost the step most",
        heading="if it took no time",
    )


def candidates_table(edits: Sequence[Candidate], before_ns: int) -> ResultTable:
    """Return the edits that shorten a step of `before_ns` most, each tried alone."""
    return ResultTable(
        name="candidates",
        caption="Edits that shorten the step most",
        heading="edit, each alone",
        columns=(
            TableColumn("edit", lambda one: one.edit.text),
            TableColumn("saves", "saved_ns", "ns", "what-if.candidates.saved_ns"),
            TableColumn(
                "of the step", lambda one: one.saved_ns / before_ns, "share", only="terminal"
            ),
            TableColumn(
                *("step", "after_ns", "ns", "what-if.candidates.after_ns"), digits=_STEP_DIGITS
            ),
            TableColumn(
                *("of today", lambda one: one.after_ns / before_ns, "share", "pages.of_today"),
                only="page",
            ),
        ),
        rows=edits[:SHOWN],
    )


def sweep_table(name: str, values: EditSweep, before_ns: int) -> ResultTable:
    """Return the step time for each value of a sweep; `name` is its id on a page.

    `before_ns` is the step time without edits, and the length of a whole bar; where a value
    makes the step longer, the longest step is.
    """
    longest = max(before_ns, *values.span_ns) or 1
    return ResultTable(
        name=name,
        caption=f"The step by {values.name}",
        heading=values.name,
        columns=(
            TableColumn("value", 0),
            TableColumn("step", 1, "ns", "what-if.sweeps.span_ns", digits=_STEP_DIGITS),
            TableColumn("of today", 2, "share", "pages.of_today"),
            TableColumn("", lambda row: row[1] / longest, "bar", only="terminal"),
        ),
        rows=[
            (value, ns, ns / before_ns if before_ns else None)
            for value, ns in zip(values.labels, values.span_ns, strict=True)
        ],
    )


def show(path: CriticalPath, console: Console | None = None) -> None:
    """Print a critical path; plain text if the console is no terminal."""
    console = plain_console(console)
    say(console, _title(path), hanging=2)
    if not len(path.graph.event):
        say(console, "The window has no event that a path could go through.", indent=2)
        return
    say(console, _coverage(path), indent=2, hanging=4)
    for part in (
        classes(path, by_tag=False),
        tags(path),
        names(path, _TOP),
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
    console.print(shown(ranks(path.by_rank())))
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
        console.print(shown(changes(what_if)))
        if what_if.before.is_joined:
            console.print(shown(step_by_rank(what_if).top(_TOP)))
    for sweep in what_if.sweeps:
        console.print(shown(sweep_table("", sweep, what_if.before_ns)))
        say(console, escape(_widest(sweep)), indent=2, hanging=4)
    if what_if.candidates is not None:
        _show_candidates(what_if.candidates, what_if.before_ns, console)
    if what_if.bottlenecks is not None:
        console.print(shown(bottlenecks(what_if.bottlenecks, what_if.before_ns)))
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


def _best(candidate: Candidate, before_ns: int) -> str:
    """Return the clause on the edit that shortens the step most."""
    saved = f"{format_ns(candidate.saved_ns)} ({percent(candidate.saved_ns / before_ns)})"
    return f"{escape(shortened(candidate.edit.text, _LONGEST_EDIT))} would save most, {saved}"


def _show_candidates(candidates: Sequence[Candidate], before_ns: int, console: Console) -> None:
    """Print the edits that shorten the step most, each tried alone."""
    if not candidates:
        say(console, "None of the edits that were tried shortens the step.", indent=2)
        return
    console.print(shown(candidates_table(candidates, before_ns)))


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
