"""Page of `fastcomm stats`: steps, ranks and operations of a run."""

from fastcomm.formats.dpro.statistics import MS
from fastcomm.show import pages
from fastcomm.show.charts import ChartLine, LineChart, linear, row_bars, ticked
from fastcomm.show.pages import Page, Section, figure, table
from fastcomm.stats import tables
from fastcomm.stats.analysis import RunStatistics
from fastcomm.units import counted

_MOST_BARS = 24
_MOST_ROWS = 1000
_BARS = "Bars of time; the table has all numbers."


def page(statistics: RunStatistics, source: str) -> Page:
    """Return the page of the operations of a run; `source` names its traces."""
    time, read = statistics.time, statistics.read
    ranks, operations = len(time.ranks), len(statistics.operations.names)
    return Page(
        title="Operations",
        source=source,
        headline=(
            f"A step of {read or counted(ranks, 'rank')} takes ",
            pages.fact("stats.iteration_time_ns", time.time_ns, pages.ns),
            " on average.",
        ),
        facts=(
            pages.fact("stats.iteration_time_ns", time.time_ns, pages.ns, label="step"),
            pages.fact("stats.ranks", ranks, pages.whole, label="ranks"),
            pages.fact("stats.steps", len(time.steps), pages.whole, label="steps"),
            pages.fact("stats.categories.op_cnt", operations, pages.whole, label="operations"),
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
    title, steps = "Time of each step, mean over the ranks", statistics.time.steps
    labels = [str(step) for step in statistics.steps]
    times = list(zip(labels, steps, strict=True))
    line = ChartLine(
        name="mean over the ranks",
        points=[(at, ns / MS) for at, ns in enumerate(steps)],
        tips=[f"step {label}: {pages.ns(ns)}" for label, ns in times],
    )
    drawn = figure(
        "steps-chart",
        title,
        f"Line of {len(steps)} steps from {pages.ns(min(steps))} to {pages.ns(max(steps))}.",
        LineChart(
            lines=(line,), x=ticked("step", labels), y=linear("ms", [ns / MS for ns in steps])
        ),
        "stats.step_time_ns",
        table=table(
            "steps-table",
            title,
            ["step", ("time", "stats.step_time_ns", pages.ns)],
            times[:_MOST_ROWS],
        ),
    )
    slowest, most = max(times, key=lambda pair: pair[1])
    return Section(
        name="steps",
        title="Are the steps alike?",
        lead=(
            f"Step {statistics.typical_step} is closest to the average; step "
            f"{slowest} is the slowest: ",
            pages.fact("stats.step_time_ns", most, pages.ns),
            ".",
        ),
        blocks=(drawn,),
    )


def _ranks(statistics: RunStatistics) -> Section:
    """Return the section with the mean step of each rank, and its parts."""
    ranks = statistics.time.ranks
    means = {pid: sum(rank.time) / len(rank.time) for pid, rank in ranks.items()}
    order = sorted(means, key=lambda pid: -means[pid])
    slowest, fastest = order[0], order[-1]
    slow = set(order[:_MOST_BARS])
    shown = [pid for pid in means if pid in slow]
    more = len(means) - len(shown)
    left_out = f"The {_MOST_BARS} slowest; {pages.many(more, 'faster rank')} left out."
    drawn = figure(
        "ranks-chart",
        "Mean step of each rank",
        _BARS,
        row_bars(shown, [means[pid] for pid in shown], pages.ns, "ms per step", MS),
        "pages.rank_step",
        chart_note=left_out if more else "",
        table=pages.shown(tables.ranks(statistics.time).top(_MOST_ROWS)),
    )
    return Section(
        name="ranks",
        title="Are the ranks alike?",
        lead=(
            f"{slowest} has the longest step: ",
            pages.fact("pages.rank_step", means[slowest], pages.ns),
            "; the shortest takes ",
            pages.fact("pages.rank_step", means[fastest], pages.ns),
            ".",
        ),
        blocks=(drawn,),
        pitfall="Ranks wait for each other: a step that is longer on one rank may have begun "
        "earlier, and need not be slower work.",
    )


def _categories(statistics: RunStatistics) -> Section:
    """Return the section with the time of each category."""
    shown = tables.categories(statistics.operations)
    names, _, _, sums, *_ = zip(*shown.rows, strict=True)
    drawn = figure(
        "categories-chart",
        "Time by category, of all ranks and steps",
        _BARS,
        row_bars(names, sums, pages.ns, "ms in all", MS),
        "stats.categories.time_ns",
        table=pages.shown(shown),
    )
    return Section(
        name="categories",
        title="What kinds of work are there?",
        lead=(
            f"{names[0]} takes the most: ",
            pages.fact("stats.categories.time_ns", sums[0], pages.ns),
            " in all.",
        ),
        blocks=(drawn,),
    )


def _operations(statistics: RunStatistics) -> Section:
    """Return the section with the operations that take the most time."""
    operations = statistics.operations
    names, total = operations.names, operations.total.tolist()
    order = (-operations.total).argsort(kind="stable").tolist()
    bars, more = order[:_MOST_BARS], len(order) - _MOST_ROWS
    drawn = figure(
        "operations-chart",
        "Operations with the most time, of all steps",
        _BARS,
        row_bars([names[k] for k in bars], [total[k] for k in bars], pages.ns, "ms in all", MS),
        "pages.operation_total",
        note=f"The table leaves out {pages.many(more, 'operation')}." if more > 0 else "",
        table=pages.shown(tables.operations_table(operations, order[:_MOST_ROWS])),
    )
    return Section(
        name="operations",
        title="Which operations take the time?",
        lead=(
            f"{names[order[0]]}: ",
            pages.fact("pages.operation_total", total[order[0]], pages.ns),
            " in all.",
        ),
        blocks=(drawn,),
        pitfall="Operations on different streams overlap: their times may add up to more than "
        "the step.",
    )
