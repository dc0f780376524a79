"""Page of `fastcomm compare`: where the change of the step comes from."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from fastcomm.analyses.changes import CauseChange, KernelChange
from fastcomm.analyses.compare import Comparison
from fastcomm.analyses.timeline import Timeline
from fastcomm.report import comparison as texts
from fastcomm.report import html
from fastcomm.report.details import part_name
from fastcomm.report.html import (
    Fact,
    Figure,
    FigureView,
    Page,
    PageCell,
    PageTable,
    Section,
    columns,
    number,
    text,
    timeline,
    unknown_section,
)
from fastcomm.report.html.breakdown import kind
from fastcomm.report.html.charts import Lane, LaneChart, shortened

_MS = 1e6
_MOST_BARS = 20
_MOST_ROWS = 500
_SMALL = 0.01  # of the largest effect
_MORE, _LESS = "TP", "compute"  # looks of kernels that take more, and less


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
        warnings=(*comparison.incomplete, *comparison.notes),
    )


def _signed(ns: float) -> str:
    """Format a change of ns with its sign."""
    return f"+{html.ns(ns)}" if ns > 0 else html.ns(ns)


def _facts(comparison: Comparison) -> tuple[Fact, ...]:
    step, why = comparison.step, "a run has no step times"
    return (
        html.fact("iteration.mean_ns", step.before, html.ns, label="step before", why=why),
        html.fact("iteration.mean_ns", step.after, html.ns, label="step after", why=why),
        html.fact("compare.effect", step.difference, _signed, label="change", why=why),
        html.fact(
            "compare.effect", step.relative, html.signed_percent, label="of before", why=why
        ),
    )


def _causes(causes: Sequence[CauseChange]) -> Section:
    """Return the section of causes of lost time that are new, gone or changed."""
    first = causes[0]
    rows = tuple(
        (
            text(cause.text),
            number(cause.before_ns, html.ns, "not found before"),
            number(cause.after_ns, html.ns, "not found after"),
            number(cause.effect_ns, _signed),
            text(cause.confidence),
        )
        for cause in causes
    )
    table = PageTable(
        name="causes-table",
        caption="Causes, the largest effect first",
        columns=columns(
            "cause",
            ("before", "compare.cost"),
            ("after", "compare.cost"),
            ("effect", "compare.effect"),
            "confidence",
        ),
        rows=rows,
    )
    state = (
        "New" if first.before_ns is None else "Gone" if first.after_ns is None else "Changed"
    )
    return Section(
        name="causes",
        title="Which causes are new, gone or changed?",
        lead=(f"{state}: {first.text}",),
        blocks=(table,),
    )


def _parts(comparison: Comparison) -> Section:
    """Return the section with the parts of the step, as steps from 0 to the whole change."""
    title = "Where does the change come from?"
    parts = [part for part in comparison.parts if part.before_ns or part.after_ns]
    if not parts:
        why = "a run has no step times"
        return unknown_section("parts", title, "The change is", "The change of the step", why)
    total = sum(part.effect_ns for part in parts)
    names = [part_name(part.name) for part in parts]
    first = f"{names[0][0].upper()}{names[0][1:]}"
    figure = Figure(
        name="parts-chart",
        title="The change of the step, part by part",
        alt="Bars that begin where the one above ends; the last is the whole change.",
        views=(
            FigureView(
                label="All",
                chart=_waterfall(
                    names,
                    [part.effect_ns for part in parts],
                    [kind(part.name) for part in parts],
                ),
            ),
        ),
        terms=("compare.effect",),
        table=PageTable(
            name="parts-table",
            caption="Parts of the step, the largest effect first",
            columns=columns(
                "part of the step",
                ("before", "compare.part"),
                ("after", "compare.part"),
                ("effect", "compare.effect"),
                "what else changed",
            ),
            rows=tuple(
                (
                    text(name),
                    number(part.before_ns, html.ns),
                    number(part.after_ns, html.ns),
                    number(part.effect_ns, _signed),
                    text(texts.reasons(part)),
                )
                for name, part in zip(names, parts, strict=True)
            ),
        ),
    )
    return Section(
        name="parts",
        title=title,
        lead=(
            f"{first} changes the most: {_signed(parts[0].effect_ns)} of ",
            html.fact("compare.effect", total, _signed),
            ". The parts add up to the change of the step.",
        ),
        blocks=(figure,),
        pitfall="A part that shrinks may have moved: time that was hidden under compute "
        "becomes exposed, and waits end where the late rank catches up.",
    )


def _waterfall(
    names: Sequence[str], effects: Sequence[float], looks: Sequence[str]
) -> LaneChart:
    """Return bars of effects in ns, each from where the one before ends, and their sum."""
    ends = [0.0, *accumulate(effect / _MS for effect in effects)]
    pairs = [*pairwise(ends), (0.0, ends[-1])]
    labels = [_signed(effect) for effect in (*effects, sum(effects))]
    rows = (*names, "change of the step")
    lanes = tuple(
        Lane(
            row=row,
            name=name,
            look=look,
            pieces=[(min(pair), max(pair))],
            tip=f"{name}: {label}",
        )
        for row, (name, look, pair, label) in enumerate(
            zip(rows, (*looks, "open"), pairs, labels, strict=True)
        )
    )
    return LaneChart(
        rows=rows,
        title="ms a step",
        lanes=lanes,
        least=min(ends),
        most=max(ends),
        labels=labels,
    )


def _timelines(timelines: Sequence[Timeline | str]) -> Section:
    """Return the section with the timelines of both runs, which show the same times."""
    title = "What does each rank do, and when?"
    drawn = [
        timeline.block(_median_first(one), f"timeline-{when}", f"{when.capitalize()}: a step")
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
        noun = texts.NOUNS[key]
        views.append(FigureView(label=f"{noun}s".capitalize(), chart=_effects(shown)))
        blocks.append(_changes_table(noun, shown))
    if not views:
        return unknown_section("kernels", title, "They are", "Kernels", "none changed")
    by_name = (comparison.kernels or {}).get("name", ())
    first = next(iter(by_name), None)
    figure = Figure(
        name="kernels-chart",
        title="Change of the mean step of a rank",
        alt="Bars to the left for less time, to the right for more; tables have the numbers.",
        views=tuple(views),
        terms=("compare.effect",),
        choice="By",
    )
    lead = "Each change is that of the mean step of a rank."
    if first is not None:
        change = f"{_signed(first.effect_ns)} ({first.state})"
        lead = f"{shortened(first.name)} changes the most: {change}."
    return Section(
        name="kernels",
        title=title,
        lead=(lead,),
        blocks=(figure, *blocks),
        pitfall="Times on different streams overlap: changes do not add up to that of a step.",
    )


def _effects(changes: Sequence[KernelChange]) -> LaneChart:
    """Return bars of effects around 0."""
    shown = changes[:_MOST_BARS]
    effects = [change.effect_ns / _MS for change in shown]
    states = ("" if one.state == "changed" else f", {one.state}" for one in shown)
    labels = [
        f"{_signed(change.effect_ns)}{state}"
        for change, state in zip(shown, states, strict=True)
    ]
    lanes = tuple(
        Lane(
            row=row,
            name="more time" if effect > 0 else "less time",
            look=_MORE if effect > 0 else _LESS,
            pieces=[(min(effect, 0.0), max(effect, 0.0))],
            tip=f"{change.name}: {label}",
        )
        for row, (change, effect, label) in enumerate(zip(shown, effects, labels, strict=True))
    )
    return LaneChart(
        rows=[change.name for change in shown],
        title="ms a step and rank",
        lanes=lanes,
        least=min(effects),
        most=max(effects),
        labels=labels,
    )


def _changes_table(noun: str, changes: Sequence[KernelChange]) -> PageTable:
    """Return the table of the changes of kernels, operators or annotations."""

    def cell(value: float | None, form: Callable[[float], str]) -> PageCell:
        return number(value, form, "absent from this run")

    return PageTable(
        name=f"{noun}s-table",
        caption=f"{noun.capitalize()}s whose time changed, the largest effect first",
        columns=columns(
            noun,
            "category",
            ("before", "compare.kernel"),
            ("after", "compare.kernel"),
            ("effect", "compare.effect"),
            ("calls", "compare.calls"),
        ),
        rows=tuple(
            (
                text(change.name),
                text(change.category),
                cell(change.before_ns, html.ns),
                cell(change.after_ns, html.ns),
                number(change.effect_ns, _signed),
                PageCell(text=texts.calls(change), sort=change.after_count),
            )
            for change in changes
        ),
    )


def _values(comparison: Comparison) -> Section:
    """Return the section of other metrics that changed."""
    title = "What else changed?"
    values = texts.other_changes(comparison)
    if not values:
        return Section(name="values", title=title, lead=("No other metric changed by 1 %.",))
    table = PageTable(
        name="values-table",
        caption="Windows, bandwidth, volume and overlap that changed by 1 % or more",
        columns=columns(
            "metric",
            ("before", "compare.value"),
            ("after", "compare.value"),
            ("change", "compare.effect"),
        ),
        rows=tuple(
            (
                text(value.name),
                *(
                    PageCell(text=texts.in_unit(value.name, metric), sort=metric)
                    for metric in (value.before, value.after)
                ),
                number(value.relative, html.signed_percent),
            )
            for value in values[:_MOST_ROWS]
        ),
    )
    return Section(
        name="values",
        title=title,
        lead=(f"The largest relative change is that of {values[0].name}.",),
        blocks=(table,),
    )
