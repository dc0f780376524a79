"""Page section that compares ranks: waits, arrivals, and slow links.

If no collectives are matched across ranks, the section gives the reason.
"""

from collections.abc import Sequence

from fastcomm.metrics.links import Link
from fastcomm.metrics.result import Metrics
from fastcomm.metrics.skew import RankWaits, Skew
from fastcomm.report import html
from fastcomm.report.html import (
    Block,
    Figure,
    FigureView,
    PageTable,
    Section,
    columns,
    number,
    rank_cell,
    text,
    unknown_section,
)
from fastcomm.report.html.charts import BarChart, Part, RowMarks

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


def _lead(worst: RankWaits) -> html.Sentence:
    """Return the sentence on the rank that causes the most waiting, with its time per step."""
    if worst.caused_ns <= 0:
        return ("No rank causes waits in collectives.",)
    return (
        f"Rank {worst.rank} causes the most waiting in collectives: ",
        html.fact("waits.wait_caused_ns", worst.caused_ns, html.ns),
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
    drawn = BarChart(
        rows=names,
        parts=(
            _part("waits for others", "gap", names, [row.wait_ns for row in shown]),
            _part("wait caused", "TP", names, [row.caused_ns for row in shown]),
        ),
        title="ms per step",
        is_stacked=False,
    )
    return Figure(
        name="waits-chart",
        title="Wait time of each rank, and the wait that it causes",
        alt=f"Pairs of bars of {len(names)} ranks; the table has the numbers.",
        views=(FigureView(label="All", chart=drawn, note=note),),
        terms=("waits.wait_ns", "waits.wait_caused_ns"),
        table=_waits_table(shown),
    )


def _part(name: str, look: str, names: list[str], values: list[float]) -> Part:
    """Return a bar for each row of `names`; `look` names the color, `values` are in ns."""
    return Part(
        name=name,
        look=look,
        values=[ns / _MS for ns in values],
        tips=[f"{row}, {name}: {html.ns(ns)}" for row, ns in zip(names, values, strict=True)],
    )


def _waits_table(ranks: Sequence[RankWaits]) -> PageTable:
    """Return the table of waits and transfers of each rank, in ns per step."""
    rows = tuple(
        (
            rank_cell(row.rank),
            *(number(ns, html.ns) for ns in (row.wait_ns, row.caused_ns, row.later_ns)),
            number(row.transfer_ns, html.ns),
            number(row.last_share, html.percent),
        )
        for row in ranks
    )
    heads = columns(
        "rank",
        ("waits", "waits.wait_ns"),
        ("wait caused", "waits.wait_caused_ns"),
        ("later", "waits.later_ns"),
        ("transfers", "waits.transfer_ns"),
        ("arrives last", "waits.last_share"),
    )
    return PageTable(name="waits-table", caption="Ranks, per step", columns=heads, rows=rows)


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
    marks = tuple(
        RowMarks(
            name=label,
            symbol=symbol,
            look=look,
            values=[getattr(row, key) / _MS for row in top],
            tips=[
                f"{name}, {label}: {html.ns(getattr(row, key))}"
                for name, row in zip(names, top, strict=True)
            ],
        )
        for label, key, symbol, look in _POINTS
    )
    drawn = BarChart(rows=names, marks=marks, title="ms")
    return Figure(
        name="skew-chart",
        title="Arrival skew, and the transfer time after it",
        alt=f"Points of {len(top)} classes of collectives; the table has the numbers.",
        views=(FigureView(label="All", chart=drawn),),
        terms=("skew.skew_ns", "skew.transfer_ns"),
        note="Sorted by wait time.",
        table=_skew_table(classes),
    )


def _skew_table(classes: Sequence[Skew]) -> PageTable:
    """Return the table of skew, transfer and wait time by class of collectives."""
    rows = tuple(
        (
            text(_class(row)),
            number(row.count, html.whole),
            *(number(ns, html.ns) for ns in (row.skew_mean_ns, row.skew_p95_ns)),
            *(number(ns, html.ns) for ns in (row.transfer_mean_ns, row.wait_ns)),
            number(row.wait_share, html.percent),
        )
        for row in classes
    )
    heads = columns(
        "collectives",
        ("count", "skew.count"),
        ("skew", "skew.skew_ns"),
        ("p95", "skew.skew_ns"),
        ("transfer", "skew.transfer_ns"),
        ("wait per step", "skew.wait_ns"),
        ("share", "skew.wait_share"),
    )
    return PageTable(name="skew-table", caption="Collectives", columns=heads, rows=rows)


def _class(row: Skew | Link) -> str:
    """Return the label of a class of collectives: "TP all_reduce, 4.19 MB"."""
    size = row.size_from
    return f"{row.tag} {row.op}, {'any size' if size is None else html.size(size)}"


def _links(links: Sequence[Link]) -> PageTable:
    """Return the table of links, sorted by time lost against their peers."""
    order = sorted(links, key=lambda row: -(row.excess_ns or 0.0))
    no_peers = "there is no other group of this class"
    rows = tuple(
        (
            text(_members(row)),
            text(_class(row)),
            number(row.bus_bw, html.rate, "no transfer took time"),
            number(row.peers_bus_bw, html.rate, no_peers),
            number(row.ratio, html.percent, no_peers),
            number(row.excess_ns, html.ns, no_peers),
        )
        for row in order[:_MOST_LINKS]
    )
    heads = columns(
        "group",
        "collectives",
        ("bus bandwidth", "links.bus_bw"),
        ("peers", "links.peers_bus_bw"),
        ("ratio", "links.ratio"),
        ("lost per step", "links.excess_ns"),
    )
    return PageTable(
        name="links-table",
        caption="Links, by time lost against their peers",
        columns=heads,
        rows=rows,
    )


def _members(link: Link) -> str:
    """Return the name of a group and its first 8 ranks: "tp_0: ranks 0, 1"."""
    ranks = link.ranks
    text_ = "ranks unknown" if not ranks else "ranks " + ", ".join(map(str, ranks[:8]))
    more = "" if not ranks or len(ranks) <= 8 else f" and {len(ranks) - 8} more"  # noqa: PLR2004
    return f"{link.group or 'undefined'}: {text_}{more}"
