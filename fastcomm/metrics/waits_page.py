"""Page section that compares ranks: waits, arrivals, and slow links.

If no collectives are matched across ranks, the section gives the reason.
"""

from collections.abc import Sequence

from fastcomm.metrics import tables
from fastcomm.metrics.across_ranks import AcrossRanks
from fastcomm.metrics.result import Metrics
from fastcomm.metrics.skew import RankWaits
from fastcomm.show import pages
from fastcomm.show.charts import BarChart, Part, RowMarks, row_tips
from fastcomm.show.pages import (
    Block,
    Figure,
    Section,
    figure,
    unknown_section,
)

_MS = 1e6
_ENDS = 12  # ranks shown at each end of the order
_MOST_CLASSES = 12
_MOST_LINKS = 200
_TITLE = "Who waits for whom?"
_WHY = "no collective was matched across ranks; this needs groups and sizes of several ranks"


def section(metrics: Metrics) -> Section:
    """Return the section on waits, arrivals and links of matched collectives."""
    ranks, note = metrics.across.by_rank, metrics.across.matching.note
    if not ranks:
        why = note.rstrip(".") if note else _WHY
        subject = "Who waits for whom is"
        return unknown_section("across", _TITLE, subject, "Waits and arrivals", why)
    blocks: list[Block] = [_waits_figure(ranks)]
    if metrics.across.skew:
        blocks.append(_skew_figure(metrics.across))
    if metrics.across.links:
        blocks.append(pages.shown(tables.links(metrics.across.links).top(_MOST_LINKS)))
    return Section(
        name="across",
        title=_TITLE,
        lead=_lead(ranks[0]),
        blocks=tuple(blocks),
        pitfall="Wait and transfer are separated on aligned clocks. A rank that often arrives "
        "last is not necessarily slow: it may wait for a rank in another group."
        + (f" {note}" if note else ""),
    )


def _lead(worst: RankWaits) -> pages.Sentence:
    """Return the sentence on the rank that causes the most waiting, with its time per step."""
    if worst.caused_ns <= 0:
        return ("No rank causes waits in collectives.",)
    return (
        f"Rank {worst.rank} causes the most waiting in collectives: ",
        pages.fact("metrics.waits.wait_caused_ns", worst.caused_ns, pages.ns),
        " per step. One delay counts in every collective that it reaches, so this can exceed "
        "the time that the step loses.",
    )


def _waits_figure(ranks: Sequence[RankWaits]) -> Figure:
    """Return bars of the wait time of each rank and the wait that it causes, per step.

    `ranks` are sorted by the wait caused; of many, only the first and the last are drawn.
    """
    shown, note = list(ranks), ""
    if len(ranks) > 3 * _ENDS:
        shown = [*ranks[:_ENDS], *ranks[-_ENDS:]]
        ends = f"The {_ENDS} of {len(ranks)} ranks that cause the most waiting"
        note = f"{ends}, and the {_ENDS} that cause the least."
    names = [f"rank {row.rank}" for row in shown]
    parts = [
        Part(
            name=name,
            look=look,
            values=[ns / _MS for ns in values],
            tips=row_tips(names, name, values, pages.ns),
        )
        for name, look, values in (
            ("waits for others", "gap", [row.wait_ns for row in shown]),
            ("wait caused", "TP", [row.caused_ns for row in shown]),
        )
    ]
    return figure(
        "waits-chart",
        "Wait time of each rank, and the wait that it causes",
        f"Pairs of bars of {len(names)} ranks; the table has the numbers.",
        BarChart(rows=names, parts=parts, title="ms per step", is_stacked=False),
        *("metrics.waits.wait_ns", "metrics.waits.wait_caused_ns"),
        chart_note=note,
        table=pages.shown(tables.waits(shown)),
    )


_POINTS = (
    ("skew, median", "skew_p50_ns", "circle-open", "TP"),
    ("skew, p95", "skew_p95_ns", "circle", "TP"),
    ("transfer, median", "transfer_p50_ns", "diamond-open", "DP"),
    ("transfer, p95", "transfer_p95_ns", "diamond", "DP"),
)


def _skew_figure(across: AcrossRanks) -> Figure:
    """Return points of arrival skew and transfer time by class of collectives.

    They are sorted by wait time; the first are drawn, and the table has all.
    """
    top = across.skew[:_MOST_CLASSES]
    names = [tables.class_name(row) for row in top]
    marks = []
    for label, key, symbol, look in _POINTS:
        times = [getattr(row, key) for row in top]
        values, tips = [ns / _MS for ns in times], row_tips(names, label, times, pages.ns)
        marks.append(RowMarks(name=label, symbol=symbol, look=look, values=values, tips=tips))
    return figure(
        "skew-chart",
        "Arrival skew, and the transfer time after it",
        f"Points of {len(top)} classes of collectives; the table has the numbers.",
        BarChart(rows=names, marks=marks, title="ms"),
        *(f"metrics.skew.{key}" for _, key, _, _ in _POINTS),
        note="Sorted by wait time.",
        table=pages.shown(tables.skew(across)),
    )
