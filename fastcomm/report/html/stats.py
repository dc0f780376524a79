"""Page of `fastcomm stats`: steps, ranks and operations of a run."""

from fastcomm.analyses.stats import RunStatistics
from fastcomm.readers.dpro.statistics import MS
from fastcomm.report import html
from fastcomm.report.html import (
    Figure,
    FigureView,
    Page,
    PageTable,
    Section,
    columns,
    number,
    text,
)
from fastcomm.report.html.charts import ChartLine, LineChart, linear, row_bars, ticked
from fastcomm.units import counted

_MOST_BARS = 24
_MOST_ROWS = 1000
_PARTS = {"fw": "forward", "bw": "backward", "update": "update"}


def page(statistics: RunStatistics, source: str) -> Page:
    """Return the page of the operations of a run; `source` names its traces."""
    time, read = statistics.time, statistics.read
    ranks = len(time.ranks)
    return Page(
        title="Operations",
        source=source,
        headline=(
            f"A step of {read or counted(ranks, 'rank')} takes ",
            html.fact("stats.step", time.time_ns, html.ns),
            " on average.",
        ),
        facts=(
            html.fact("stats.step", time.time_ns, html.ns, label="step"),
            html.fact("ranks", ranks, html.whole, label="ranks"),
            html.fact("stats.steps", len(time.steps), html.whole, label="steps"),
            html.fact(
                "stats.operations",
                len(statistics.operations.names),
                html.whole,
                label="operations",
            ),
        ),
        sections=(
            _steps(statistics),
            _ranks(statistics),
            _categories(statistics),
            _operations(statistics),
        ),
    )


def _steps(statistics: RunStatistics) -> Section:
    """Return the section with the time of each step."""
    numbers, steps = statistics.steps, statistics.time.steps
    labels = [str(step) for step in numbers]
    line = ChartLine(
        name="mean over the ranks",
        points=[(at, ns / MS) for at, ns in enumerate(steps)],
        tips=[f"step {label}: {html.ns(ns)}" for label, ns in zip(labels, steps, strict=True)],
    )
    figure = Figure(
        name="steps-chart",
        title="Time of each step, mean over the ranks",
        alt=f"Line of {len(steps)} steps from {html.ns(min(steps))} to {html.ns(max(steps))}.",
        views=(
            FigureView(
                label="All",
                chart=LineChart(
                    lines=(line,),
                    x=ticked("step", labels),
                    y=linear("ms", [ns / MS for ns in steps]),
                ),
            ),
        ),
        terms=("stats.step",),
        table=PageTable(
            name="steps-table",
            caption="Time of each step, mean over the ranks",
            columns=columns("step", ("time", "stats.step")),
            rows=tuple(
                (text(label), number(ns, html.ns))
                for label, ns in zip(labels[:_MOST_ROWS], steps, strict=False)
            ),
        ),
    )
    slowest = max(range(len(steps)), key=steps.__getitem__)
    return Section(
        name="steps",
        title="Are the steps alike?",
        lead=(
            f"Step {statistics.typical_step} is closest to the average; step "
            f"{labels[slowest]} is the slowest: ",
            html.fact("stats.step", steps[slowest], html.ns),
            ".",
        ),
        blocks=(figure,),
    )


def _ranks(statistics: RunStatistics) -> Section:
    """Return the section with the mean step of each rank, and its parts."""
    ranks = statistics.time.ranks
    means = {pid: sum(rank.time) / len(rank.time) for pid, rank in ranks.items()}
    slowest = sorted(means, key=lambda pid: -means[pid])
    shown = [pid for pid in means if pid in set(slowest[:_MOST_BARS])]
    more = len(means) - len(shown)
    figure = Figure(
        name="ranks-chart",
        title="Mean step of each rank",
        alt="Bars of time; the table has all numbers.",
        views=(
            FigureView(
                label="All",
                chart=row_bars(
                    shown,
                    [means[pid] / MS for pid in shown],
                    [html.ns(means[pid]) for pid in shown],
                    "ms per step",
                ),
                note=f"The {_MOST_BARS} slowest; {html.many(more, 'faster rank')} left out."
                if more
                else "",
            ),
        ),
        terms=("stats.rank",),
        table=PageTable(
            name="ranks-table",
            caption="Mean step of each rank, and the sums of its operators",
            columns=columns(
                "rank",
                ("step", "stats.rank"),
                *((name, "stats.part") for name in _PARTS.values()),
            ),
            rows=tuple(
                (
                    text(pid),
                    number(means[pid], html.ns),
                    *(number(ranks[pid].mean_ns(part), html.ns) for part in _PARTS),
                )
                for pid in list(means)[:_MOST_ROWS]
            ),
        ),
    )
    return Section(
        name="ranks",
        title="Are the ranks alike?",
        lead=(
            f"{slowest[0]} has the longest step: ",
            html.fact("stats.rank", means[slowest[0]], html.ns),
            "; the shortest takes ",
            html.fact("stats.rank", means[slowest[-1]], html.ns),
            ".",
        ),
        blocks=(figure,),
        pitfall="Ranks wait for each other: a step that is longer on one rank may have begun "
        "earlier, and need not be slower work.",
    )


def _categories(statistics: RunStatistics) -> Section:
    """Return the section with the time of each category."""
    categories = statistics.operations.categories
    names = sorted(categories, key=lambda name: -categories[name]["time"])
    sums = {name: categories[name]["time"] * MS for name in names}
    figure = Figure(
        name="categories-chart",
        title="Time by category, of all ranks and steps",
        alt="Bars of time; the table has all numbers.",
        views=(
            FigureView(
                label="All",
                chart=row_bars(
                    names,
                    [sums[name] / MS for name in names],
                    [html.ns(sums[name]) for name in names],
                    "ms in all",
                ),
            ),
        ),
        terms=("stats.total",),
        table=PageTable(
            name="categories-table",
            caption="Categories, the longest first",
            columns=columns(
                "category",
                ("operations", "stats.operations"),
                ("events", "stats.count"),
                ("time", "stats.total"),
                ("mean", "stats.mean"),
                ("longest operation", "stats.longest"),
            ),
            rows=tuple(
                (
                    text(name),
                    number(categories[name]["op_cnt"], html.whole),
                    number(categories[name]["cnt"], html.whole),
                    number(sums[name], html.ns),
                    number(categories[name]["avg"] * MS, html.ns),
                    number(categories[name]["max_t"] * MS, html.ns),
                )
                for name in names
            ),
        ),
    )
    return Section(
        name="categories",
        title="What kinds of work are there?",
        lead=(
            f"{names[0]} takes the most: ",
            html.fact("stats.total", sums[names[0]], html.ns),
            " in all.",
        ),
        blocks=(figure,),
    )


def _operations(statistics: RunStatistics) -> Section:
    """Return the section with the operations that take the most time."""
    operations = statistics.operations
    order = (-operations.total).argsort(kind="stable").tolist()
    bars = order[:_MOST_BARS]
    figure = Figure(
        name="operations-chart",
        title="Operations with the most time, of all steps",
        alt="Bars of time; the table has all numbers.",
        views=(
            FigureView(
                label="All",
                chart=row_bars(
                    [operations.names[k] for k in bars],
                    [int(operations.total[k]) / MS for k in bars],
                    [html.ns(int(operations.total[k])) for k in bars],
                    "ms in all",
                ),
            ),
        ),
        terms=("stats.total",),
        table=PageTable(
            name="operations-table",
            caption="Operations, the most time first",
            columns=columns(
                "operation",
                "category",
                ("events", "stats.count"),
                ("total", "stats.total"),
                ("mean", "stats.mean"),
                ("median", "stats.median"),
                ("shortest", "stats.shortest"),
                ("longest", "stats.longest_event"),
                ("deviation", "stats.deviation"),
            ),
            rows=tuple(
                (
                    text(operations.names[k]),
                    text(operations.category[k]),
                    number(int(operations.count[k]), html.whole),
                    number(int(operations.total[k]), html.ns),
                    number(float(operations.avg[k]), html.ns),
                    number(float(operations.median[k]), html.ns),
                    number(int(operations.least[k]), html.ns),
                    number(int(operations.most[k]), html.ns),
                    number(float(operations.variance[k]) ** 0.5, html.ns),
                )
                for k in order[:_MOST_ROWS]
            ),
        ),
        note=f"The table leaves out {html.many(len(order) - _MOST_ROWS, 'operation')}."
        if len(order) > _MOST_ROWS
        else "",
    )
    return Section(
        name="operations",
        title="Which operations take the time?",
        lead=(
            f"{operations.names[order[0]]}: ",
            html.fact("stats.total", int(operations.total[order[0]]), html.ns),
            " in all.",
        ),
        blocks=(figure,),
        pitfall="Operations on different streams overlap: their times may add up to more than "
        "the step.",
    )
