"""Page of `fastcomm compare`: where the change of the step comes from."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from fastcomm.comparison import tables
from fastcomm.comparison import tables as texts
from fastcomm.comparison.cause_changes import CauseChange
from fastcomm.comparison.kernel_changes import KernelChange
from fastcomm.comparison.result import BreakdownChange, Comparison
from fastcomm.metrics.page import kind
from fastcomm.metrics.tables import part_name
from fastcomm.show import pages
from fastcomm.show.charts import Lane, LaneChart, shortened
from fastcomm.show.pages import (
    Fact,
    Figure,
    FigureView,
    Page,
    Section,
    figure,
    table,
    unknown_section,
)
from fastcomm.timeline import page as timeline_page
from fastcomm.timeline.timeline import Timeline

_MS = 1e6
_MOST_BARS = 20
_MOST_ROWS = 500
_SMALL = 0.01  # of the largest effect
# Name and look of kernels that take more, and less.
_MORE, _LESS = ("more time", "TP"), ("less time", "compute")


def page(
    comparison: Comparison, sources: tuple[str, str], timelines: Sequence[Timeline | str] = ()
) -> Page:
    """Return the page of a comparison.

    Parameters
    ----------
    comparison
        The two runs.
    sources
        Paths of both.
    timelines
        That of each run, or the reason why there is none; nothing leaves the section out.

    """
    return Page(
        title="Comparison",
        source=" and ".join(sources),
        headline=(texts.headline(comparison),),
        facts=_facts(comparison),
        sections=(
            *([_causes(comparison.causes)] if comparison.causes else []),
            _parts(comparison),
            *([_timelines(timelines)] if timelines else []),
            *([_kernels(comparison)] if comparison.kernels else []),
            _values(comparison),
        ),
        cautions=comparison.differences,
        warnings=(*comparison.incomplete, *comparison.other_notes),
    )


def _facts(comparison: Comparison) -> tuple[Fact, ...]:
    step, why = comparison.step, "a run has no step times"
    return (
        pages.fact("compare.step.before", step.before, pages.ns, label="step before", why=why),
        pages.fact("compare.step.after", step.after, pages.ns, label="step after", why=why),
        pages.fact(
            "compare.step.difference", step.difference, pages.change_ns, label="change", why=why
        ),
        pages.fact(
            "compare.step.relative",
            step.relative,
            pages.signed_percent,
            label="of before",
            why=why,
        ),
    )


def _causes(causes: Sequence[CauseChange]) -> Section:
    """Return the section of causes of lost time that are new, gone or changed."""
    first = causes[0]
    heads: list[pages.Head] = [
        "cause",
        ("before", "compare.causes.before_ns", pages.ns, "not found before"),
        ("after", "compare.causes.after_ns", pages.ns, "not found after"),
        ("effect", "compare.causes.effect_ns", pages.change_ns),
        "confidence",
    ]
    rows = [
        (cause.text, cause.before_ns, cause.after_ns, cause.effect_ns, cause.confidence)
        for cause in causes
    ]
    state = (
        "New" if first.before_ns is None else "Gone" if first.after_ns is None else "Changed"
    )
    return Section(
        name="causes",
        title="Which causes are new, gone or changed?",
        lead=(f"{state}: {first.text}",),
        blocks=(table("causes-table", "Causes, the largest effect first", heads, rows),),
    )


def _parts(comparison: Comparison) -> Section:
    """Return the section with the parts of the step, as steps from 0 to the whole change."""
    title = "Where does the change come from?"
    table = tables.parts(comparison)
    parts = table.rows
    if not parts:
        why = "a run has no step times"
        return unknown_section("parts", title, "The change is", "The change of the step", why)
    total = sum(part.effect_ns for part in parts)
    names = [part_name(part.name) for part in parts]
    first = f"{names[0][0].upper()}{names[0][1:]}"
    drawn = figure(
        "parts-chart",
        "The change of the step, part by part",
        "Bars that begin where the one above ends; the last is the whole change.",
        _waterfall(names, parts),
        "compare.parts.effect_ns",
        table=pages.shown(table),
    )
    return Section(
        name="parts",
        title=title,
        lead=(
            f"{first} changes the most: {pages.change_ns(parts[0].effect_ns)} of ",
            pages.fact("compare.step.difference", total, pages.change_ns),
            ". The parts add up to the change of the step.",
        ),
        blocks=(drawn,),
        pitfall="A part that shrinks may have moved: time that was hidden under compute "
        "becomes exposed, and waits end where the late rank catches up.",
    )


def _waterfall(names: Sequence[str], parts: Sequence[BreakdownChange]) -> LaneChart:
    """Return bars of effects in ns, each from where the one before ends, and their sum."""
    effects = [part.effect_ns for part in parts]
    ends = [0.0, *accumulate(effect / _MS for effect in effects)]
    rows = (*names, "change of the step")
    looks = (*(kind(part.name) for part in parts), "open")
    labels = [pages.change_ns(effect) for effect in (*effects, sum(effects))]
    pieces = [*pairwise(ends), (0.0, ends[-1])]
    legend = list(zip(rows, looks, strict=True))
    return _signed_bars(rows, pieces, labels, legend, "ms a step", ends)


def _signed_bars(
    rows: Sequence[str],
    pieces: Sequence[tuple[float, float]],
    labels: Sequence[str],
    legend: Sequence[tuple[str, str]],
    title: str,
    ends: Sequence[float],
) -> LaneChart:
    """Return a bar a row between two values in ms.

    `legend` has the name and look of each bar; the axis, called `title`, covers `ends`.
    """
    tips = (f"{row}: {label}" for row, label in zip(rows, labels, strict=True))
    lanes = [
        Lane(row=row, name=name, look=look, pieces=[(min(piece), max(piece))], tip=tip)
        for row, ((name, look), piece, tip) in enumerate(zip(legend, pieces, tips, strict=True))
    ]
    return LaneChart(
        rows=rows, title=title, lanes=lanes, least=min(ends), most=max(ends), labels=labels
    )


def _timelines(timelines: Sequence[Timeline | str]) -> Section:
    """Return the section with the timelines of both runs, which show the same times."""
    title = "What does each rank do, and when?"
    drawn = [
        timeline_page.block(
            _median_first(one), f"timeline-{when}", f"{when.capitalize()}: a step"
        )
        for when, one in zip(("before", "after"), timelines, strict=True)
        if not isinstance(one, str)
    ]
    why = "; ".join(dict.fromkeys(one for one in timelines if isinstance(one, str)))
    if not drawn:
        return unknown_section("timeline", title, "The timelines are", "The timelines", why)
    missing = f" One is missing: {why}." if why else ""
    return Section(
        name="timeline",
        title=title,
        lead=(
            "Both show the same times from the begin of a step: zoom or move one, and the "
            f"other follows.{missing}",
        ),
        blocks=tuple(drawn),
    )


def _median_first(one: Timeline) -> Timeline:
    """Return a timeline that begins with its median step."""
    steps = sorted(one.steps, key=lambda step: "median" not in step.label)
    return replace(one, steps=tuple(steps))


def _kernels(comparison: Comparison) -> Section:
    """Return the section of kernels, operators and annotations that changed."""
    title = "Which kernels changed?"
    views, blocks = [], []
    for key, changes in (comparison.kernels or {}).items():
        most = max((abs(change.effect_ns) for change in changes), default=0.0)
        shown = [one for one in changes if abs(one.effect_ns) > _SMALL * most][:_MOST_ROWS]
        if not shown:
            continue
        noun = tables.NOUNS[key]
        views.append(FigureView(label=f"{noun}s".capitalize(), chart=_effects(shown)))
        blocks.append(pages.shown(tables.kernels(key, shown)))
    if not views:
        return unknown_section("kernels", title, "They are", "Kernels", "none changed")
    drawn = Figure(
        name="kernels-chart",
        title="Change of the mean step of a rank",
        alt="Bars to the left for less time, to the right for more; tables have the numbers.",
        views=tuple(views),
        terms=("compare.kernels.name.effect_ns",),
        choice="By",
    )
    lead = "Each change is that of the mean step of a rank."
    for first in (comparison.kernels or {}).get("name", ())[:1]:
        change = f"{pages.change_ns(first.effect_ns)} ({first.state})"
        lead = f"{shortened(first.name)} changes the most: {change}."
    return Section(
        name="kernels",
        title=title,
        lead=(lead,),
        blocks=(drawn, *blocks),
        pitfall="Times on different streams overlap: changes do not add up to that of a step.",
    )


def _effects(changes: Sequence[KernelChange]) -> LaneChart:
    """Return bars of effects around 0."""
    shown = changes[:_MOST_BARS]
    effects = [change.effect_ns / _MS for change in shown]
    labels = [
        pages.change_ns(change.effect_ns)
        + ("" if change.state == "changed" else f", {change.state}")
        for change in shown
    ]
    return _signed_bars(
        [change.name for change in shown],
        [(0.0, effect) for effect in effects],
        labels,
        [_MORE if effect > 0 else _LESS for effect in effects],
        "ms a step and rank",
        effects,
    )


def _values(comparison: Comparison) -> Section:
    """Return the section of other metrics that changed."""
    title = "What else changed?"
    values = tables.values(comparison).top(_MOST_ROWS)
    if not values.rows:
        return Section(name="values", title=title, lead=("No other metric changed by 1 %.",))
    return Section(
        name="values",
        title=title,
        lead=(f"The largest relative change is that of {values.rows[0].name}.",),
        blocks=(pages.shown(values),),
    )
