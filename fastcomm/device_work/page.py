"""Page of `fastcomm kernels`: what takes the time of the step, and which rank is slower."""

import numpy as np

from fastcomm.device_work import tables
from fastcomm.device_work.result import Kernels
from fastcomm.show import pages
from fastcomm.show.charts import Chart, HeatChart, coarsened, row_bars, shortened
from fastcomm.show.pages import Fact, Figure, FigureView, Page, Section, figure, unknown_section

_MOST_BARS = 24
_MOST_RANKS = 96  # columns of the heat map
_MOST_CATEGORIES = 8
_MOST_ROWS = 1000  # of the table
_ONE = "only one rank was read"


def page(kernels: Kernels, source: str) -> Page:
    """Return the page of the kernels of a run; `source` names its traces."""
    sentences = (*(f"{finding.text}." for finding in kernels.findings), *kernels.notes)
    return Page(
        title="Kernels",
        source=source,
        headline=(kernels.headline,),
        facts=_facts(kernels),
        sections=(_rows(kernels), _ranks(kernels)),
        warnings=(*kernels.warnings, *sentences),
        is_host_run=kernels.is_host_run,
    )


def _facts(kernels: Kernels) -> tuple[Fact, ...]:
    """Return the length of the step, the utilization, and what is counted."""
    flops, step, no_steps = kernels.flops, kernels.step_ns, "the traces have no steps"
    whys = {name: flops.unknown.get(name) or "not counted" for name in ("mfu", "hfu")}
    return (
        pages.fact("kernels.step_ns", step, pages.ns, label="per step", why=no_steps),
        pages.fact("kernels.ranks", len(kernels.read.ranks), pages.count, label="ranks"),
        pages.fact("kernels.flops.mfu", flops.mfu, pages.percent, label="MFU", why=whys["mfu"]),
        pages.fact("kernels.flops.hfu", flops.hfu, pages.percent, label="HFU", why=whys["hfu"]),
    )


def _rows(kernels: Kernels) -> Section:
    """Return the section with the bars of categories and rows, and the table of rows."""
    title = "What takes the time?"
    table = tables.rows(kernels, _MOST_ROWS)
    rows = table.rows
    if not rows:
        return unknown_section("rows", title, "What takes the time is", "Work", "there is none")
    running = kernels.running_ns
    by_category = _bars(kernels, [(name, running[name]) for name in kernels.by_category])
    by_row = _bars(kernels, [(row["name"], row["total_ns"]) for row in rows[:_MOST_BARS]])
    more = kernels.table.num_rows - len(rows)
    drawn = Figure(
        name="kernels-chart",
        title="Time by category, and of the longest rows",
        alt="Bars of time; the table has all numbers.",
        views=(
            FigureView(label="Category", chart=by_category),
            FigureView(label=kernels.by.capitalize(), chart=by_row),
        ),
        terms=("kernels.rows.share", "kernels.rows.total_ns"),
        choice="By",
        table=pages.shown(table.without_unknown()),
        note=f"The table leaves out {pages.many(more, 'shorter row')}." if more > 0 else "",
    )
    first = rows[0]
    return Section(
        name="rows",
        title=title,
        lead=(
            f"{shortened(first['name'])} takes the most: ",
            pages.fact("kernels.rows.total_ns", first["total_ns"], pages.ns),
            " in all.",
        ),
        blocks=(drawn,),
        pitfall="Times on different streams overlap: shares may add up to more than 100 %. The "
        "time of a category is that in which at least one of its events runs.",
    )


def _bars(kernels: Kernels, totals: list[tuple[str, int]]) -> Chart:
    """Return bars of time: in the mean step of a rank, or without steps in all."""
    steps = kernels.steps or 1

    def label(ns: float) -> str:
        share = kernels.share(int(ns))
        return pages.ns(ns / steps) + ("" if share is None else f", {pages.percent(share)}")

    title = "ms per step and rank" if kernels.steps else "ms in all"
    names, values = [name for name, _ in totals], [ns for _, ns in totals]
    return row_bars(names, values, label, title, 1e6 * steps)


def _ranks(kernels: Kernels) -> Section:
    """Return the section with the time of each rank in each category, beside the median."""
    title = "Is a rank slower than its peers?"
    names, grid = _grid(kernels)
    if len(grid) < 2 or not names:  # noqa: PLR2004
        why = _ONE if len(grid) < 2 else "all work is communication"  # noqa: PLR2004
        return unknown_section("ranks", title, "Whether a rank is slower is", "By rank", why)
    ranks = [rank.rank for rank in kernels.ranks]
    cells, share = coarsened(grid, _MOST_RANKS)
    row, place = np.unravel_index(int(np.argmax(grid)), grid.shape)
    label = "rank {}" if share == 1 else "from rank {}"
    chart = HeatChart(
        grid=cells.T.tolist(),
        rows=names,
        columns=[label.format(rank) for rank in ranks[::share]],
        unit="×",
        tip="{row}, {column}: {value}",
    )
    drawn = figure(
        "ranks-chart",
        "Time of each rank, divided by the median of all",
        f"Heat map of {len(grid)} ranks and {len(names)} categories.",
        chart,
        "pages.rank_of_median",
        chart_note=f"A cell shows the slowest of {share} ranks." if share > 1 else "",
    )
    return Section(
        name="ranks",
        title=title,
        lead=(
            f"The largest difference is that of rank {ranks[row]} in {names[place]}: ",
            pages.fact("pages.rank_of_median", float(grid[row, place]), pages.times),
            " the median.",
        ),
        blocks=(drawn,),
        pitfall="Ranks of different stages do different work: only ranks with equally many "
        "kernels of a row are compared in its slowest rank.",
    )


def _grid(kernels: Kernels) -> tuple[list[str], np.ndarray[tuple[int, int], np.dtype]]:
    """Return the largest categories but communication, and ranks by their times.

    The array has a row per rank and a column per category: the time a step, divided by the
    median of all ranks.
    """
    times = kernels.times_of_median()
    names = list(times)[:_MOST_CATEGORIES]
    if not names:
        return [], np.ones((len(kernels.ranks), 0))
    return names, np.stack([times[name] for name in names], axis=1)
