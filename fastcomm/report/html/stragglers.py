"""Page of `fastcomm stragglers`: slowdown by worker, stage and operation."""

import numpy as np

from fastcomm.analyses.stragglers import headline
from fastcomm.report import html
from fastcomm.report.html import (
    Block,
    Fact,
    Figure,
    FigureView,
    Missing,
    Page,
    PageTable,
    Section,
    columns,
    number,
    text,
    unknown_section,
)
from fastcomm.report.html.charts import (
    ChartLine,
    HeatChart,
    LineChart,
    linear,
    row_bars,
    ticked,
)
from fastcomm.stragglers import Stragglers

_MS = 1e6
_MOST_ROWS = 96
_MOST_BARS = 24
_KINDS = (("dp_rank", "Data rank"), ("stage", "Stage"), ("optype", "Operation"))
_LITTLE = "the slowdown is below --threshold, too small to attribute"


def page(result: Stragglers, source: str) -> Page:
    """Return the page of an analysis; `source` names the table of operations."""
    return Page(
        title="Stragglers",
        source=source,
        headline=(headline(result),),
        facts=_facts(result),
        sections=(_workers(result), _parts(result), _steps(result)),
        warnings=result.warnings,
    )


def _facts(result: Stragglers) -> tuple[Fact, ...]:
    """Return the step times, and the slowdown from launches, last stage and worst ranks."""
    worst = None if result.worst is None else result.worst.rem
    launch = result.launch_slowdown - 1
    return (
        html.fact(
            "stragglers.slowdown",
            result.slowdown,
            html.times,
            label="the time of an ideal step",
        ),
        html.fact("stragglers.step_ns", result.step_ns, html.ns, label="per step"),
        html.fact("stragglers.ideal_ns", result.ideal_step_ns, html.ns, label="an ideal step"),
        html.fact("stragglers.launch", launch, html.percent, label="launch delays"),
        html.fact(
            "stragglers.last_stage",
            result.last_stage.rem,
            html.percent,
            label="from the last stage",
            why="there is no slowdown",
        ),
        html.fact(
            "stragglers.worst", worst, html.percent, label="from the worst ranks", why=_LITTLE
        ),
    )


def _workers(result: Stragglers) -> Section:
    """Return the section on the slowdown by data rank (down) and stage (across)."""
    title = "Which workers are slow?"
    workers = result.workers
    if workers is None:
        subject = "Which workers are slow is"
        return unknown_section("workers", title, subject, "Workers", _LITTLE)
    down = max(1, -(-len(workers) // _MOST_ROWS))
    grid = np.maximum.reduceat(workers, np.arange(0, len(workers), down), axis=0)
    firsts = range(0, len(workers), down)
    names = [f"data rank {a}" if down == 1 else f"from {a}" for a in firsts]
    figure = Figure(
        name="workers-chart",
        title="Slowdown of each worker",
        alt=f"Heat map of {len(workers)} data ranks and {grid.shape[1]} stages.",
        views=(
            FigureView(
                label="All",
                chart=HeatChart(
                    grid=grid.tolist(),
                    rows=names,
                    columns=[f"stage {stage}" for stage in range(grid.shape[1])],
                    unit="×",
                    tip="{row}, {column}: {value}",
                ),
                note=f"A cell shows the largest of {down} data ranks." if down > 1 else "",
            ),
        ),
        terms=("stragglers.worker",),
    )
    ranks = ", ".join(map(str, result.worst_ranks))
    worst = f"is rank {ranks}" if len(result.worst_ranks) == 1 else f"are the ranks {ranks}"
    return Section(
        name="workers",
        title=title,
        lead=(f"The worst {worst}.",),
        blocks=(figure,),
        pitfall="The slowdown of a worker is the smaller of the slowdowns of its data rank and "
        "its stage: a worker is bright only if both are slow.",
    )


def _parts(result: Stragglers) -> Section:
    """Return the section on the slowdown that each data rank, stage or operation causes."""
    title = "What causes the slowdown?"
    if result.blocking is None:
        missing = Missing(title="By data rank, stage and operation", why=_LITTLE)
        return Section(name="parts", title=title, lead=(_LITTLE, "."), blocks=(missing,))
    tables: list[Block] = []
    views = []
    for kind, name in _KINDS:
        mean = dict(result.blocking[kind].mean)
        top = list(mean.items())[:_MOST_BARS]
        drawn = row_bars(
            [key if kind == "optype" else f"{name.lower()} {key}" for key, _ in top],
            [value - 1 for _, value in top],
            [html.times(value) for _, value in top],
            "slowdown caused alone, minus 1",
            looks="TP",
        )
        views.append(FigureView(label=name, chart=drawn))
        rows = tuple((text(key), number(value, html.times)) for key, value in mean.items())
        heads = columns(name.lower(), ("slowdown caused alone", "stragglers.alone"))
        tables.append(
            PageTable(
                name=f"{kind}-table", caption=f"By {name.lower()}", columns=heads, rows=rows
            )
        )
    first, value = next(iter(result.blocking["optype"].mean.items()))
    figure = Figure(
        name="parts-chart",
        title="Slowdown caused by each alone",
        alt="Bars of the slowdown by data rank, stage or operation; the tables have all.",
        views=tuple(views),
        terms=("stragglers.alone",),
        choice="By",
    )
    return Section(
        name="parts",
        title=title,
        lead=(
            f"The operation {first} causes the most: alone, it makes a step take ",
            html.fact("stragglers.alone", value, html.times),
            " the ideal time.",
        ),
        blocks=(figure, *tables),
    )


def _steps(result: Stragglers) -> Section:
    """Return the section on the measured and the ideal time of each step."""
    pairs = zip(
        result.chosen, result.nodelay.whole.tolist(), result.ideal.whole.tolist(), strict=True
    )
    rows = tuple(
        (text(step, str(step)), number(ns, html.ns), number(ideal, html.ns))
        for step, ns, ideal in pairs
    )
    heads = columns(
        "step", ("as measured", "stragglers.step_ns"), ("ideal", "stragglers.ideal_ns")
    )
    figure = Figure(
        name="steps-chart",
        title="Time of each step",
        alt="Lines of the recorded, the replayed and the ideal time of each step.",
        views=(FigureView(label="All", chart=_lines(result)),),
        terms=("stragglers.step_ns", "stragglers.ideal_ns"),
        table=PageTable(name="steps-table", caption="Steps", columns=heads, rows=rows),
    )
    return Section(
        name="steps",
        title="Are all steps slow?",
        lead=(f"{html.many(len(result.chosen), 'step')} were replayed.",),
        blocks=(figure,),
    )


def _lines(result: Stragglers) -> LineChart:
    """Return lines of the recorded, the replayed and the ideal time over the steps."""
    lines = [
        ChartLine(
            name=name,
            points=[(float(at), float(ns) / _MS) for at, ns in enumerate(values)],
            tips=[
                f"step {step}, {name}: {html.ns(float(ns))}"
                for step, ns in zip(result.chosen, values, strict=True)
            ],
            look=look,
        )
        for name, values, look in (
            ("recorded", result.base, "gap"),
            ("as measured", result.nodelay.whole, "TP"),
            ("ideal", result.ideal.whole, "DP"),
        )
    ]
    times = [y for line in lines for _, y in line.points]
    return LineChart(
        lines=lines,
        x=ticked("step", [str(step) for step in result.chosen]),
        y=linear("ms", times, from_zero=False),
    )
