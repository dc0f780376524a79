"""Page section that compares ranks: waits, arrivals, and slow links.

If no collectives are matched across ranks, the section gives the reason.
"""

from collections.abc import Sequence

from fastcomm.metrics.links import Link
from fastcomm.metrics.result import Metrics
from fastcomm.metrics.skew import RankWaits, Skew
from fastcomm.show import pages
from fastcomm.show.charts import BarChart, Part, RowMarks, row_tips
from fastcomm.show.pages import (
    Block,
    Figure,
    PageTable,
    Section,
    figure,
    rank_cell,
    table,
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
        blocks.append(_skew_figure(metrics.across.skew))
    if metrics.across.links:
        blocks.append(_links(metrics.across.links))
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
        table=_waits_table(shown),
    )


def _waits_table(ranks: Sequence[RankWaits]) -> PageTable:
    """Return the table of waits and transfers of each rank, in ns per step."""
    return table(
        "waits-table",
        "Ranks, per step",
        [
            "rank",
            ("waits", "metrics.waits.wait_ns", pages.ns),
            ("wait caused", "metrics.waits.wait_caused_ns", pages.ns),
            ("later", "metrics.waits.later_ns", pages.ns),
            ("transfers", "metrics.waits.transfer_ns", pages.ns),
            ("arrives last", "metrics.waits.last_share", pages.percent),
        ],
        [
            (
                *(rank_cell(row.rank), row.wait_ns, row.caused_ns, row.later_ns),
                *(row.transfer_ns, row.last_share),
            )
            for row in ranks
        ],
    )


_POINTS = (
    ("skew, median", "skew_p50_ns", "circle-open", "TP"),
    ("skew, p95", "skew_p95_ns", "circle", "TP"),
    ("transfer, median", "transfer_p50_ns", "diamond-open", "DP"),
    ("transfer, p95", "transfer_p95_ns", "diamond", "DP"),
)


def _skew_figure(classes: Sequence[Skew]) -> Figure:
    """Return points of arrival skew and transfer time by class of collectives.

    `classes` are sorted by wait time; the first are drawn, and the table has all.
    """
    top = classes[:_MOST_CLASSES]
    names = [_class(row) for row in top]
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
        table=_skew_table(classes),
    )


def _skew_table(classes: Sequence[Skew]) -> PageTable:
    """Return the table of skew, transfer and wait time by class of collectives."""
    return table(
        "skew-table",
        "Collectives",
        [
            "collectives",
            ("count", "metrics.skew.count", pages.whole),
            ("skew", "metrics.skew.skew_mean_ns", pages.ns),
            ("p95", "metrics.skew.skew_p95_ns", pages.ns),
            ("transfer", "metrics.skew.transfer_mean_ns", pages.ns),
            ("wait per step", "metrics.skew.wait_ns", pages.ns),
            ("share", "metrics.skew.wait_share", pages.percent),
        ],
        [
            (
                *(_class(row), row.count, row.skew_mean_ns, row.skew_p95_ns),
                *(row.transfer_mean_ns, row.wait_ns, row.wait_share),
            )
            for row in classes
        ],
    )


def _class(row: Skew | Link) -> str:
    """Return the label of a class of collectives: "TP all_reduce, 4.19 MB"."""
    size = row.size_from
    return f"{row.tag} {row.op}, {'any size' if size is None else pages.size(size)}"


def _links(links: Sequence[Link]) -> PageTable:
    """Return the table of links, sorted by time lost against their peers."""
    order = sorted(links, key=lambda row: -(row.excess_ns or 0.0))
    no_peers = "there is no other group of this class"
    return table(
        "links-table",
        "Links, by time lost against their peers",
        [
            *("group", "collectives"),
            ("bus bandwidth", "metrics.links.bus_bw", pages.rate, "no transfer took time"),
            ("peers", "metrics.links.peers_bus_bw", pages.rate, no_peers),
            ("ratio", "metrics.links.ratio", pages.percent, no_peers),
            ("lost per step", "metrics.links.excess_ns", pages.ns, no_peers),
        ],
        [
            (
                *(_members(row), _class(row), row.bus_bw, row.peers_bus_bw),
                *(row.ratio, row.excess_ns),
            )
            for row in order[:_MOST_LINKS]
        ],
    )


def _members(link: Link) -> str:
    """Return the name of a group and its first 8 ranks: "tp_0: ranks 0, 1"."""
    ranks = link.ranks
    text_ = "ranks unknown" if not ranks else "ranks " + ", ".join(map(str, ranks[:8]))
    more = "" if not ranks or len(ranks) <= 8 else f" and {len(ranks) - 8} more"  # noqa: PLR2004
    return f"{link.group or 'undefined'}: {text_}{more}"
