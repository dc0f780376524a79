"""The pages of `fastcomm dispatch`: schedules beside their bounds, and the load of GPUs."""

import numpy as np

from fastcomm.dispatch.placement import Placing
from fastcomm.dispatch.schedules import LOAD_NAMES
from fastcomm.dispatch.simulation import NS, DispatchSweep, Simulation, StrategyResult, in_ns
from fastcomm.report import html
from fastcomm.report.html import (
    Figure,
    FigureView,
    Page,
    PageTable,
    Section,
    Spec,
    columns,
    number,
    text,
)
from fastcomm.report.html.drawing import (
    DASHES,
    INK,
    QUIET_LEGEND,
    SYMBOLS,
    axis,
    bars,
    heat,
    rounded,
    series_color,
    spec,
)
from fastcomm.units import counted

_MS = 1e3
_MOST_BINS = 96
_NO_COMBINE = "the original simulator has no way back"
_NO_TIME = "the bound is nothing"


def page(found: Simulation | Placing | DispatchSweep) -> Page:
    """The page of what one of the commands found."""
    if isinstance(found, Simulation):
        return simulation(found)
    return placing(found) if isinstance(found, Placing) else sweep(found)


def simulation(found: Simulation) -> Page:
    """Schedules of one workload."""
    ranked = sorted(found.strategies.values(), key=lambda each: each.total_s)
    return Page(
        title="Expert dispatch",
        source=_source(found),
        headline=_headline(ranked),
        facts=_facts(found, ranked),
        sections=(_times(ranked), _loads(ranked)) if ranked else (),
        warnings=tuple(found.unanswered.values()),
    )


def _source(found: Simulation) -> str:
    recipe = found.recipe
    return (
        f"{counted(recipe.num_nodes, 'node')} of {counted(recipe.gpus_per_node, 'GPU')}, "
        f"{counted(recipe.experts, 'expert')}, top {recipe.topk}, "
        f"{counted(recipe.tokens, 'token')}"
    )


def _headline(ranked: list[StrategyResult]) -> html.Words:
    if not ranked:
        return ("No schedule has an answer.",)
    best = ranked[0]
    return (
        f"{best.name} is the fastest: ",
        html.fact("dispatch.total_s", best.total_s * NS, html.ns),
        ", ",
        html.fact("dispatch.times_optimal", best.times_optimal, html.times, why=_NO_TIME),
        " the best possible.",
    )


def _facts(found: Simulation, ranked: list[StrategyResult]) -> tuple[html.Fact, ...]:
    optimal = ranked[0].optimal_s * NS if ranked else None
    links = found.terms.links
    link = html.fact("link_bandwidth", float(links.inter), html.rate, label="NIC of a GPU")
    return (
        html.fact("dispatch.optimal_s", optimal, html.ns, label="best possible"),
        link,
    )


def _times(ranked: list[StrategyResult]) -> Section:
    figure = Figure(
        name="times-chart",
        title="Dispatch of all layers",
        alt="Bars of the schedules, with their bounds as marks; the table has all.",
        views=(FigureView(label="All", spec=_bars(ranked)),),
        terms=("dispatch.total_s", "dispatch.optimal_s", "dispatch.times_bound"),
    )
    return Section(
        name="times",
        title="How long does each schedule take?",
        lead=(f"{html.many(len(ranked), 'schedule')}, the fastest first, beside the bounds.",),
        blocks=(figure, _times_table(ranked)),
    )


def _bars(ranked: list[StrategyResult]) -> Spec:
    drawn = bars(
        [each.name for each in ranked],
        [each.total_s * _MS for each in ranked],
        [html.ns(each.total_s * NS) for each in ranked],
        "dispatch, ms",
    )
    drawn["data"][0] |= {
        "showlegend": False,
        "textposition": "auto",
        "insidetextanchor": "start",
        "insidetextfont": {"color": "var(--on-compute)"},
    }
    drawn["data"] += [
        _marks(ranked, "best possible", [each.optimal_s for each in ranked], "diamond"),
        _marks(ranked, "bound of its class", [each.bound_s for each in ranked], "line-ns-open"),
    ]
    drawn["layout"] |= {"showlegend": True, "legend": QUIET_LEGEND}
    return drawn


def _times_table(ranked: list[StrategyResult]) -> PageTable:
    rows = tuple(
        (
            text(each.name),
            number(each.total_s * NS, html.ns),
            number(in_ns(each.combine_s), html.ns, _NO_COMBINE),
            number(each.times_optimal, html.times, _NO_TIME),
            number(each.times_bound, html.times, _NO_TIME),
            number(each.inter_bytes, html.size),
        )
        for each in ranked
    )
    heads = columns(
        "schedule",
        ("dispatch", "dispatch.total_s"),
        ("combine", "dispatch.combine_s"),
        ("of the best", "dispatch.times_optimal"),
        ("of its class", "dispatch.times_bound"),
        ("between nodes", "dispatch.inter_bytes"),
    )
    return PageTable(name="times-table", caption="Schedules", columns=heads, rows=rows)


def _marks(ranked: list[StrategyResult], name: str, seconds: list[float], symbol: str) -> Spec:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [rounded(each * _MS) for each in seconds],
        "y": [each.name for each in ranked],
        "marker": {
            "symbol": symbol,
            "size": 12,
            "color": INK,
            "line": {"width": 2.5, "color": INK},
        },
        "hovertemplate": f"%{{y}}, {name}: %{{x:.3f}} ms<extra></extra>",
    }


def _loads(ranked: list[StrategyResult]) -> Section:
    views = tuple(
        FigureView(label=each.name, spec=_load(each), note=_rule(each)) for each in ranked
    )
    rows = tuple(
        (
            text(each.name),
            *(number(_most_by_mean(each, place), html.times, _NO_TIME) for place in range(4)),
        )
        for each in ranked
    )
    heads = columns("schedule", *((link, "dispatch.most_by_mean") for link in LOAD_NAMES))
    return Section(
        name="loads",
        title="Who carries the load?",
        lead=("A schedule is as fast as its most loaded link.",),
        blocks=(
            Figure(
                name="loads-chart",
                title="Tokens of each GPU and link",
                alt="Heat map of GPUs and kinds of links; the table has the most by the mean.",
                views=views,
                terms=("dispatch.load",),
                choice="Schedule",
            ),
            PageTable(
                name="loads-table",
                caption="The most loaded GPU by the mean",
                columns=heads,
                rows=rows,
            ),
        ),
    )


def _most_by_mean(each: StrategyResult, place: int) -> float | None:
    load = each.loads[:, place]
    return float(load.max() / load.mean()) if load.any() else None


def _share(each: StrategyResult) -> int:
    return max(1, -(-each.gpus // _MOST_BINS))


def _rule(each: StrategyResult) -> str:
    share = _share(each)
    return f"A cell shows the largest of {share} GPUs." if share > 1 else ""


def _load(each: StrategyResult) -> Spec:
    share = _share(each)
    grid = np.maximum.reduceat(each.loads, np.arange(0, each.gpus, share), axis=0).T
    drawn = heat(grid.tolist(), LOAD_NAMES, "GPU %{x}, %{y}: %{z} tokens", "tokens")
    drawn["x"] = [str(gpu) for gpu in range(0, each.gpus, share)]
    category = {"type": "category", "showgrid": False}
    return spec(
        [drawn],
        260,
        xaxis=axis("GPU", nticks=24, **category),
        yaxis=axis("", autorange="reversed", **category),
    )


def placing(found: Placing) -> Page:
    """Schedules before and after the experts are placed anew."""
    before, after = found.imbalance
    first = simulation(found.after)
    rows = tuple(
        (
            text(name),
            number(each.total_s * NS, html.ns),
            number(found.after.strategies[name].total_s * NS, html.ns),
            number(_ratio(each.total_s, found.after.strategies[name].total_s), html.times),
        )
        for name, each in found.before.strategies.items()
    )
    heads = columns(
        "schedule",
        ("before", "dispatch.total_s"),
        ("after", "dispatch.after_s"),
        ("speed-up", "dispatch.speedup"),
    )
    section = Section(
        name="placing",
        title="What does the placement change?",
        lead=(
            "The most loaded GPU has ",
            html.fact("dispatch.imbalance", after, html.times),
            " the mean; it had ",
            html.fact("dispatch.imbalance", before, html.times),
            ".",
        ),
        blocks=(
            PageTable(
                name="placing-table", caption="Before and after", columns=heads, rows=rows
            ),
        ),
    )
    return Page(
        title="Placement of experts",
        source=first.source,
        headline=section.lead,
        facts=first.facts,
        sections=(section, *first.sections),
    )


def _ratio(before: float, after: float) -> float | None:
    return before / after if after else None


def sweep(found: DispatchSweep) -> Page:
    """Schedules over a grid of workloads."""
    at = [
        ", ".join(f"{name} {getattr(point.recipe, name)}" for name in found.axes)
        for point in found.points
    ]
    figure = Figure(
        name="sweep-chart",
        title="Dispatch at each point of the grid",
        alt=f"Lines of the schedules over {len(at)} workloads; the table has all.",
        views=(FigureView(label="All", spec=_lines(found, at)),),
        terms=("dispatch.total_s",),
        table=_points(found, at),
    )
    lead = (f"{html.many(len(at), 'workload')} of {' and '.join(found.axes)}.",)
    section = Section(name="sweep", title="How does it scale?", lead=lead, blocks=(figure,))
    return Page(
        title="Expert dispatch",
        source="a sweep",
        headline=(f"Dispatch of {html.many(len(at), 'workload')}, by schedule.",),
        facts=(),
        sections=(section,),
    )


def _lines(found: DispatchSweep, at: list[str]) -> Spec:
    lines = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": at,
            "y": [rounded(point.strategies[name].total_s * _MS) for point in found.points],
            "line": {
                "color": series_color(place),
                "dash": DASHES[place % len(DASHES)],
                "width": 2,
            },
            "marker": {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 9},
            "hovertemplate": f"{name}, %{{x}}: %{{y:.3f}} ms<extra></extra>",
        }
        for place, name in enumerate(found.points[0].strategies)
    ]
    return spec(
        lines,
        380,
        showlegend=True,
        legend=QUIET_LEGEND,
        xaxis=axis("", type="category"),
        yaxis=axis("dispatch, ms", rangemode="tozero"),
    )


def _points(found: DispatchSweep, at: list[str]) -> PageTable:
    rows = tuple(
        (
            text(where),
            text(name),
            number(each.total_s * NS, html.ns),
            number(each.times_optimal, html.times, _NO_TIME),
        )
        for where, point in zip(at, found.points, strict=True)
        for name, each in point.strategies.items()
    )
    heads = columns(
        "schedule", ("dispatch", "dispatch.total_s"), ("of the best", "dispatch.times_optimal")
    )
    return PageTable(
        name="sweep-table",
        caption="All points",
        columns=(*columns("workload"), *heads),
        rows=rows,
    )
