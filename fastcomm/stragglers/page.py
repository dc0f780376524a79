"""Page of `fastcomm stragglers`: slowdown by worker, stage and operation."""

from fastcomm.show import pages
from fastcomm.show.charts import (
    ChartLine,
    HeatChart,
    LineChart,
    coarsened,
    linear,
    row_bars,
    ticked,
)
from fastcomm.show.pages import (
    Fact,
    Figure,
    FigureView,
    Missing,
    Page,
    Section,
    figure,
    table,
    unknown_section,
)
from fastcomm.stragglers import tables
from fastcomm.stragglers.analysis import headline
from fastcomm.stragglers.result import Stragglers

_MS = 1e6
_MOST_ROWS = 96
_MOST_BARS = 24
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
    last, step, ideal = result.last_stage.rem, result.step_ns, result.ideal_step_ns
    slowdown, launch = result.slowdown, result.launch_slowdown - 1
    last_why, last_label = "there is no slowdown", "from the last stage"
    return (
        pages.fact(
            "stragglers.slowdown", slowdown, pages.times, label="the time of an ideal step"
        ),
        pages.fact("stragglers.step_time_mean_ns.nodelay", step, pages.ns, label="per step"),
        pages.fact(
            "stragglers.step_time_mean_ns.ideal", ideal, pages.ns, label="an ideal step"
        ),
        pages.fact("pages.launch_delays", launch, pages.percent, label="launch delays"),
        pages.fact("stragglers.m_s", last, pages.percent, label=last_label, why=last_why),
        pages.fact(
            "stragglers.m_w", worst, pages.percent, label="from the worst ranks", why=_LITTLE
        ),
    )


def _workers(result: Stragglers) -> Section:
    """Return the section on the slowdown by data rank (down) and stage (across)."""
    title = "Which workers are slow?"
    workers = result.workers
    if workers is None:
        subject = "Which workers are slow is"
        return unknown_section("workers", title, subject, "Workers", _LITTLE)
    grid, share = coarsened(workers, _MOST_ROWS)
    label = "data rank {}" if share == 1 else "from {}"
    chart = HeatChart(
        grid=grid.tolist(),
        rows=[label.format(first) for first in range(0, len(workers), share)],
        columns=[f"stage {stage}" for stage in range(grid.shape[1])],
        unit="×",
        tip="{row}, {column}: {value}",
    )
    drawn = figure(
        "workers-chart",
        "Slowdown of each worker",
        f"Heat map of {len(workers)} data ranks and {grid.shape[1]} stages.",
        chart,
        "stragglers.worker_slowdown",
        chart_note=f"A cell shows the largest of {share} data ranks." if share > 1 else "",
    )
    ranks = ", ".join(map(str, result.worst_ranks))
    worst = f"is rank {ranks}" if len(result.worst_ranks) == 1 else f"are the ranks {ranks}"
    return Section(
        name="workers",
        title=title,
        lead=(f"The worst {worst}.",),
        blocks=(drawn,),
        pitfall="The slowdown of a worker is the smaller of the slowdowns of its data rank and "
        "its stage: a worker is bright only if both are slow.",
    )


def _parts(result: Stragglers) -> Section:
    """Return the section on the slowdown that each data rank, stage or operation causes."""
    title = "What causes the slowdown?"
    if result.blocking is None:
        missing = Missing(title="By data rank, stage and operation", why=_LITTLE)
        return Section(name="parts", title=title, lead=(_LITTLE, "."), blocks=(missing,))
    views = []
    for kind, name in tables.ATTRIBUTED:
        mean = dict(result.blocking[kind].mean)
        top = list(mean.items())[:_MOST_BARS]
        rows = [key if kind == "optype" else f"{name} {key}" for key, _ in top]
        above = [value - 1 for _, value in top]
        title_ = "slowdown caused alone, minus 1"
        bars = row_bars(rows, above, lambda value: pages.times(value + 1), title_, looks="TP")
        views.append(FigureView(label=name.capitalize(), chart=bars))
    first, value = next(iter(result.blocking["optype"].mean.items()))
    drawn = Figure(
        name="parts-chart",
        title="Slowdown caused by each alone",
        alt="Bars of the slowdown by data rank, stage or operation; the tables have all.",
        views=tuple(views),
        terms=tuple(f"stragglers.slowdown_by_{kind}" for kind, _ in tables.ATTRIBUTED),
        choice="By",
    )
    return Section(
        name="parts",
        title=title,
        lead=(
            f"The operation {first} causes the most: alone, it makes a step take ",
            pages.fact("stragglers.slowdown_by_optype", value, pages.times),
            " the ideal time.",
        ),
        blocks=(drawn, *map(pages.shown, tables.parts(result))),
    )


def _steps(result: Stragglers) -> Section:
    """Return the section on the measured and the ideal time of each step."""
    times = (result.nodelay.whole.tolist(), result.ideal.whole.tolist())
    heads: list[pages.Head] = [
        "step",
        ("as measured", "stragglers.step_time_mean_ns.nodelay", pages.ns),
        ("ideal", "stragglers.step_time_mean_ns.ideal", pages.ns),
    ]
    drawn = figure(
        "steps-chart",
        "Time of each step",
        "Lines of the recorded, the replayed and the ideal time of each step.",
        _lines(result),
        *("stragglers.step_time_mean_ns.nodelay", "stragglers.step_time_mean_ns.ideal"),
        table=table("steps-table", "Steps", heads, zip(result.chosen, *times, strict=True)),
    )
    return Section(
        name="steps",
        title="Are all steps slow?",
        lead=(f"{pages.many(len(result.chosen), 'step')} were replayed.",),
        blocks=(drawn,),
    )


def _lines(result: Stragglers) -> LineChart:
    """Return lines of the recorded, the replayed and the ideal time over the steps."""
    lines = [
        ChartLine(
            name=name,
            points=[(float(at), float(ns) / _MS) for at, ns in enumerate(values)],
            tips=[
                f"step {step}, {name}: {pages.ns(float(ns))}"
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
