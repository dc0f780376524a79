"""The pages of `fastcomm critical-path` and `fastcomm what-if`."""

from collections.abc import Sequence

from fastcomm.critical_path import CriticalPath
from fastcomm.critical_path.what_if import EditSweep, WhatIf
from fastcomm.errors import shell_joined, shell_quoted
from fastcomm.report import html
from fastcomm.report.critical_path import WORDS
from fastcomm.report.html import (
    Figure,
    FigureView,
    Page,
    PageFinding,
    PageTable,
    Section,
    Spec,
    columns,
    number,
    text,
)
from fastcomm.report.html import path as path_
from fastcomm.report.html.drawing import ACCENT, MUTED, axis, rounded, shown, spec

_MS = 1e6
_MOST = 3
_GAPS = "gpu_kernel_kernel_overhead"


def page(found: CriticalPath, paths: Sequence[str], options: Sequence[str] = ()) -> Page:
    """Return the page of a critical path.

    `paths` and `options` are the words of the user for the run and the window, which suggested
    commands repeat.
    """
    sums = found.summary_ns()
    most = max(sums, key=lambda name: sums[name], default="")
    total = sum(sums.values()) or 1
    share = html.fact("path.share", sums.get(most, 0) / total, html.percent)
    length, wall = found.length_ns, found.wall_ns
    facts = [
        html.fact("path.length_ns", length, html.ns, label="critical path"),
        html.fact(
            "path.coverage", length / wall if wall else 1.0, html.percent, label="covered"
        ),
        html.fact("path.edges", len(found.found.edges), html.whole, label="edges"),
    ]
    if found.is_joined:
        crossings = html.fact("path.crossings", found.crossings, html.whole, label="crossings")
        facts.append(crossings)
    return Page(
        title="Critical path",
        source=" ".join(paths),
        headline=(share, f" of the critical path is {WORDS.get(most, most)}."),
        facts=tuple(facts),
        findings=_findings(found, shell_joined([*paths, *options])),
        sections=(path_.section(found),),
    )


def _findings(found: CriticalPath, run: str) -> tuple[PageFinding, ...]:
    where = run if found.is_joined else f"{run} --rank {found.about.rank}"
    made = [
        _finding(
            f"{tag} communication on the path takes ",
            ns,
            found,
            f"fastcomm what-if {where} --scale comm:{shell_quoted(tag)}=0.5",
            "how much shorter the step is if it takes half its time",
        )
        for tag, ns in found.by_tag_ns().items()
    ]
    gaps = found.summary_ns().get(_GAPS, 0)
    if gaps:
        command = f"fastcomm what-if {where} --remove gaps"
        made.append(
            _finding(
                "Gaps between kernels take ", gaps, found, command, "the step without them"
            )
        )
    return tuple(sorted(made, key=lambda each: -each.cost_ns)[:_MOST])


def _finding(title: str, ns: int, found: CriticalPath, command: str, then: str) -> PageFinding:
    total = sum(found.summary_ns().values()) or 1
    return PageFinding(
        title=(title, html.fact("path.time_ns", ns, html.ns)),
        evidence=(html.fact("path.share", ns / total, html.percent, label="of the path"),),
        command=command,
        then=then,
        cost_ns=ns,
    )


def what_if(found: WhatIf, paths: Sequence[str]) -> Page:
    """A step before and after its edits, and sweeps of one."""
    change = html.fact("whatif.speedup", found.speedup, html.times, label="as fast")
    edits = ", ".join(map(str, found.edits))
    sections = [_before_after(found, edits)] if edits else []
    if found.sweeps:
        sections.append(_sweeps(found, found.sweeps))
    sections.append(path_.section(found.after))
    return Page(
        title="What if",
        source=" ".join(paths),
        headline=_headline(found, edits),
        facts=(
            *([change] if edits else []),
            html.fact("whatif.error", found.replay_error_ns, html.ns, label="replay error"),
        ),
        sections=tuple(sections),
        warnings=found.before.about.notes,
    )


def _headline(found: WhatIf, edits: str) -> html.Words:
    before = html.fact("path.length_ns", found.before_ns, html.ns)
    if not edits:
        return ("The step takes ", before, " without edits.")
    after = html.fact("whatif.span_ns", found.after_ns, html.ns)
    return ("With ", edits, ", the step takes ", after, " instead of ", before, ".")


def _before_after(found: WhatIf, edits: str) -> Section:
    before, after = found.before.summary_ns(), found.after.summary_ns()
    rows = tuple(
        (
            text(WORDS.get(name, name)),
            number(before.get(name, 0), html.ns),
            number(after.get(name, 0), html.ns),
            number(after.get(name, 0) - before.get(name, 0), html.ns),
        )
        for name in sorted(before | after, key=lambda name: -before.get(name, 0))
    )
    table = PageTable(
        name="before-after",
        caption="Time on the critical path before and after",
        columns=columns(
            "on the path",
            ("before", "path.time_ns"),
            ("after", "path.time_ns"),
            ("change", "path.time_ns"),
        ),
        rows=rows,
    )
    return Section(
        name="answer",
        title="What changes?",
        lead=(f"The step was replayed with: {edits}.",),
        blocks=(table,),
        pitfall="Each event begins as soon as what it waited for allows; what it did not wait "
        "for in the trace may bind it in reality. The path after the edits is another one.",
    )


def _sweeps(found: WhatIf, sweeps: Sequence[EditSweep]) -> Section:
    return Section(
        name="sweeps",
        title="How does the step depend on it?",
        lead=("Each point is the step replayed with one value of the factor.",),
        blocks=tuple(_sweep(place, each, found.before_ns) for place, each in enumerate(sweeps)),
    )


def _sweep(place: int, each: EditSweep, before_ns: int) -> Figure:
    name = f"{each.edit.action} {each.edit.what}"
    rows = tuple(
        (
            text(f"{value:g}"),
            number(span, html.ns),
            number(span / before_ns if before_ns else None, html.percent),
        )
        for value, span in zip(each.values, each.span_ns, strict=True)
    )
    ends = [html.ns(each.span_ns[at]) for at in (0, -1)]
    return Figure(
        name=f"sweep-{place}",
        title=f"The step by {name}",
        alt=f"Line from {ends[0]} at {each.values[0]:g} to {ends[1]} at {each.values[-1]:g}.",
        views=(FigureView(label="All", spec=_line(each, name, before_ns)),),
        terms=("whatif.span_ns",),
        table=PageTable(
            name=f"sweep-{place}-table",
            caption=f"The step by {name}",
            columns=columns("factor", ("step", "whatif.span_ns"), ("of today", "whatif.share")),
            rows=rows,
        ),
    )


def _line(each: EditSweep, name: str, before_ns: int) -> Spec:
    today: Spec = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": before_ns / _MS,
        "y1": before_ns / _MS,
        "line": {"color": MUTED, "dash": "dash", "width": 1.5},
    }
    line: Spec = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(each.values),
        "y": [rounded(span / _MS, 6) for span in each.span_ns],
        "line": {"color": ACCENT, "width": 2.5},
        "marker": {"size": 8},
        "hovertemplate": "%{x}: %{y:.3f} ms<extra></extra>",
    }
    return spec(
        [line],
        320,
        xaxis=axis(f"factor of {shown(name)}"),
        yaxis=axis("step, ms"),
        shapes=[today],
    )
