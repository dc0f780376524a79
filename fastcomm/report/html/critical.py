"""The pages of `fastcomm critical-path` and `fastcomm what-if`."""

from collections.abc import Sequence

from fastcomm.critical_path import CriticalPath, WhatIf
from fastcomm.critical_path.candidates import Candidate
from fastcomm.errors import shell_joined, shell_quoted
from fastcomm.graph.edits import EditSweep
from fastcomm.report import html
from fastcomm.report.html import Figure, Page, PageFinding, Section, figure
from fastcomm.report.html import path as path_
from fastcomm.report.html.charts import ChartLine, Level, LineChart, linear
from fastcomm.report.tables import critical_path as tables
from fastcomm.report.tables.critical_path import label

_MS = 1e6
_MOST = 3
_GAPS = "gpu_kernel_kernel_overhead"


def page(path: CriticalPath, paths: Sequence[str], options: Sequence[str] = ()) -> Page:
    """Return the page of a critical path.

    Parameters
    ----------
    path
        The path.
    paths, options
        Command line arguments that name the run and the window; suggested commands repeat them.

    """
    sums = path.summary_ns()
    most = max(sums, key=lambda name: sums[name], default="")
    total = sum(sums.values()) or 1
    share = html.fact("path.share", sums.get(most, 0) / total, html.percent)
    covered = path.length_ns / path.wall_ns if path.wall_ns else 1.0
    facts = [
        html.fact("path.length_ns", path.length_ns, html.ns, label="critical path"),
        html.fact("path.coverage", covered, html.percent, label="covered"),
        html.fact("path.edges", len(path.valid_path.edges), html.whole, label="edges"),
    ]
    if path.is_joined:
        crossings = html.fact("path.crossings", path.crossings, html.whole, label="crossings")
        facts.append(crossings)
    return Page(
        title="Critical path",
        source=" ".join(paths),
        headline=(share, f" of the critical path is {label(most, path)}."),
        facts=tuple(facts),
        findings=_findings(path, shell_joined([*paths, *options])),
        sections=(path_.section(path),),
    )


def _findings(path: CriticalPath, run: str) -> tuple[PageFinding, ...]:
    """Return the three largest parts of the path that a what-if can shorten, longest first.

    The parts are the communication of each parallelism, and the gaps between kernels.
    `run` has the command line arguments that name the run.
    """
    arguments = run if path.is_joined else f"{run} --rank {path.about.rank}"
    what_if = f"fastcomm what-if {arguments}"
    total = sum(path.summary_ns().values()) or 1
    parts = [
        (
            f"{tag} communication on the path takes ",
            ns,
            f"{what_if} --scale comm:{shell_quoted(tag)}=0.5",
            "how much shorter the step is if it takes half its time",
        )
        for tag, ns in path.by_tag_ns().items()
    ]
    if gaps := path.summary_ns().get(_GAPS, 0):
        title = f"Gaps between {'collectives' if path.about.is_host_run else 'kernels'} take "
        parts.append((title, gaps, f"{what_if} --remove gaps", "the step without them"))
    return tuple(
        PageFinding(
            title=(title, html.fact("path.time_ns", ns, html.ns)),
            evidence=(html.fact("path.share", ns / total, html.percent, label="of the path"),),
            command=command,
            then=then,
            cost_ns=ns,
        )
        for title, ns, command, then in sorted(parts, key=lambda part: -part[1])[:_MOST]
    )


def what_if(result: WhatIf, paths: Sequence[str]) -> Page:
    """Return the page of a what-if analysis: the step before and after edits, and sweeps."""
    change = html.fact("whatif.speedup", result.speedup, html.times, label="as fast")
    edits = ", ".join(map(str, result.edits))
    sections = [_before_after(result, edits)] if edits else []
    if result.sweeps:
        sections.append(_sweeps(result, result.sweeps))
    if result.candidates:
        sections.append(_candidates(result, result.candidates))
    sections.append(path_.section(result.after))
    return Page(
        title="What if",
        source=" ".join(paths),
        headline=_headline(result, edits),
        facts=(
            *([change] if edits else []),
            html.fact("whatif.error", result.replay_error_ns, html.ns, label="replay error"),
        ),
        sections=tuple(sections),
        warnings=result.before.about.notes,
    )


def _headline(result: WhatIf, edits: str) -> html.Sentence:
    """Return the step time before and after `edits`, a text that is empty without edits."""
    before = html.fact("path.length_ns", result.before_ns, html.ns)
    if not edits:
        return ("The step takes ", before, " without edits.")
    after = html.fact("whatif.span_ns", result.after_ns, html.ns)
    return ("With ", edits, ", the step takes ", after, " instead of ", before, ".")


def _before_after(result: WhatIf, edits: str) -> Section:
    """Return the section on time on the path by class, before and after `edits` (a text)."""
    return Section(
        name="answer",
        title="What changes?",
        lead=(f"The step was replayed with: {edits}.", str(result.interval)),
        blocks=(html.shown(tables.changes(result)),),
        pitfall="Each event starts as soon as its dependencies in the trace allow; in reality "
        "other dependencies may delay it. The path after the edits may be another one.",
    )


def _candidates(result: WhatIf, candidates: Sequence[Candidate]) -> Section:
    """Return the section of the edits that shorten the step most, each tried alone."""
    return Section(
        name="candidates",
        title="What would shorten the step?",
        lead=("Each edit was tried alone; what several save does not add up.",),
        blocks=(html.shown(tables.candidates(candidates, result.before_ns)),),
    )


def _sweeps(result: WhatIf, sweeps: Sequence[EditSweep]) -> Section:
    """Return the section of the sweeps, with a chart of the step time for each."""
    return Section(
        name="sweeps",
        title="How does the step depend on it?",
        lead=("Each point is the step replayed with one value.",),
        blocks=tuple(
            _sweep(place, sweep, result.before_ns) for place, sweep in enumerate(sweeps)
        ),
    )


def _sweep(place: int, sweep: EditSweep, before_ns: int) -> Figure:
    """Return the chart and table of the step time over the values of one sweep.

    `place` numbers the charts of the page from 0; `before_ns` is the step time without edits.
    """
    table = tables.sweep(f"sweep-{place}-table", sweep, before_ns)
    spans = list(zip(sweep.labels, sweep.span_ns, strict=True))
    ends = " to ".join(f"{html.ns(ns)} at {value}" for value, ns in (spans[0], spans[-1]))
    return figure(
        f"sweep-{place}",
        table.caption,
        f"Line from {ends}.",
        _line(sweep, before_ns),
        "whatif.span_ns",
        table=html.shown(table),
    )


def _line(sweep: EditSweep, before_ns: int) -> LineChart:
    """Return the step time by the value of an edit, with a dashed line at `before_ns`."""
    times = [span / _MS for span in sweep.span_ns]
    spans = zip(sweep.labels, sweep.span_ns, strict=True)
    line = ChartLine(
        name=sweep.name,
        points=list(zip(sweep.values, times, strict=True)),
        tips=[f"{value}: {html.ns(ns)}" for value, ns in spans],
    )
    return LineChart(
        lines=(line,),
        x=linear(f"value of {sweep.name}", sweep.values, from_zero=False),
        y=linear("step, ms", [*times, before_ns / _MS], from_zero=False),
        level=Level(value=before_ns / _MS, label="today"),
    )
