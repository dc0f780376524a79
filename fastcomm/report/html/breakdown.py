"""Page section: where the time of a step goes, for the job and by rank and iteration."""

from collections.abc import Mapping, Sequence
from math import isnan

from fastcomm.idle import totals
from fastcomm.idle.causes import BY_CAUSE
from fastcomm.metrics.breakdown import EXACT, RankMeans
from fastcomm.metrics.result import Metrics
from fastcomm.report import html
from fastcomm.report.html import (
    Block,
    Figure,
    FigureView,
    Missing,
    PageTable,
    Section,
    number,
    table,
    text,
)
from fastcomm.report.html.charts import BarChart, Part, row_tips

MEASURES = {
    "time": "iteration time",
    "compute": "compute",
    "exposed": "exposed communication",
    "idle": "idle",
}


def label(name: str) -> str:
    """Return the label of a category: "exposed TP"."""
    return name.replace("_", " ")


def kind(name: str) -> str:
    """Return the name of a category's color, such as "TP" for "exposed_TP"."""
    return name.removeprefix("exposed_")


_MS = 1e6
_ENDS = 12  # ranks shown at each end of the order
_MOST_ROWS = 40


def section(metrics: Metrics, ranks: RankMeans, why: str) -> Section:
    """Return the section on where the time of a step goes.

    Parameters
    ----------
    metrics, ranks
        Metrics of the run, and mean times by rank.
    why
        Reason why times are unknown, if they are.

    """
    exact = metrics.breakdown.exact
    title = "Where does the time go?"
    blocks: tuple[Block, ...]
    if exact["idle"] is None:
        lead: html.Sentence = ("The exact partition of a step is n/a: ", why, ".")
        blocks = (
            Missing(title="Time of a step by activity", why=why),
            _table(metrics, why),
        )
    else:
        lead = _lead(metrics)
        blocks = (_figure(metrics, ranks), _table(metrics, why))
    return Section(
        name="time",
        title=title,
        lead=lead,
        blocks=blocks,
        pitfall="Exposed time is an upper bound of what faster communication could save: a "
        "collective that waits for a late rank is exposed, and a faster link would not help. "
        "Time in which several categories run counts once: as compute, else as communication, "
        "else as copies.",
    )


def _lead(metrics: Metrics) -> html.Sentence:
    """Return the sentence on the shares of compute, communication, copies and idle time."""
    parts = metrics.breakdown.parts or {}
    return (
        "Of a step of ",
        html.fact("iteration.mean_ns", metrics.iteration.mean_ns, html.ns),
        ", ",
        html.fact("exact.compute", parts.get("compute"), html.percent),
        " is compute, ",
        html.fact("exact.exposed", parts.get("exposed"), html.percent),
        " exposed communication, ",
        html.fact("exact.memcpy", parts.get("memcpy"), html.percent),
        " copies, and ",
        html.fact("exact.idle", parts.get("idle"), html.percent),
        " idle time.",
    )


def _figure(metrics: Metrics, ranks: RankMeans) -> Figure:
    """Return the stacked bars of a step: of the job, by rank, and by iteration."""
    exact = {name: share for name, share in metrics.breakdown.exact.items() if share}
    spoken = ", ".join(f"{label(name)} {html.percent(share)}" for name, share in exact.items())
    return Figure(
        name="breakdown",
        title="Time of a step by activity",
        alt=f"Stacked bar of the job: {spoken}.",
        views=(
            FigureView(label="Job", chart=_job(exact, metrics.iteration.mean_ns or 0.0)),
            _by_rank(ranks, list(exact)),
            _by_iteration(metrics, list(exact)),
        ),
        terms=tuple(f"exact.{name}" for name in exact),
    )


def _job(exact: dict[str, float], mean_ns: float) -> BarChart:
    """Return one bar of the mean step; `exact` has the share (0 to 1) of each category."""
    parts = tuple(
        Part(
            name=label(name),
            look=kind(name),
            values=(share * 100,),
            labels=(f"{kind(name)} {html.percent(share)}",),
            tips=(
                f"{label(name)}: {html.percent(share)}, {html.ns(share * mean_ns)} per step",
            ),
        )
        for name, share in exact.items()
    )
    return BarChart(
        rows=("",), parts=parts, title="share of the step, %", most=100, row_height=44
    )


def _by_rank(ranks: RankMeans, names: Sequence[str]) -> FigureView:
    """Return a bar of mean times for each rank; `names` are the categories.

    Of many ranks, only the mean and the ranks with the most and the least compute are drawn.
    """
    order = ranks.by_compute[::-1].tolist()
    count = len(order)
    rows: list[str | int] = sorted(order)
    note = ""
    if count > _MOST_ROWS:
        rows = [*order[:_ENDS], f"mean of all {count}", *order[-_ENDS:]]
        note = (
            f"The {_ENDS} ranks that compute the most, the mean of all {count}, and the "
            f"{_ENDS} that compute the least."
        )
    values = {
        name: [float(ns.mean() if isinstance(at, str) else ns[at]) for at in rows]
        for name, ns in ranks.ns.items()
        if name in names
    }
    labels = [at if isinstance(at, str) else f"rank {ranks.ranks[at]}" for at in rows]
    return FigureView(label="Ranks", chart=_rows(labels, values), note=note)


def _by_iteration(metrics: Metrics, names: Sequence[str]) -> FigureView:
    """Return a bar of mean times for each iteration, or for each range of iterations."""
    means = metrics.step_means(_MOST_ROWS)
    rows = [f"iteration {a}" if a == b else f"iterations {a}\u2013{b}" for a, b in means.steps]
    note = "Means over all ranks."
    if means.width > 1:
        note = f"Means over ranks and {means.width} iterations."
    values = {name: means.ns[name].tolist() for name in names}
    return FigureView(label="Iterations", chart=_rows(rows, values), note=note)


def _rows(labels: list[str], values: dict[str, list[float]]) -> BarChart:
    """Return a stacked bar for each label; `values` has times in ns by category and label.

    A label of unknown times (NaN) has no bar.
    """
    parts = [
        Part(
            name=label(name),
            look=kind(name),
            values=[None if isnan(ns) else ns / _MS for ns in lengths],
            tips=row_tips(labels, label(name), lengths, html.ns),
        )
        for name, lengths in values.items()
    ]
    return BarChart(rows=labels, parts=parts, title="ms per step")


def _table(metrics: Metrics, why: str) -> PageTable:
    """Return the table of exact and specification shares; `why` explains unknown numbers."""
    exact, formula = metrics.breakdown.exact, metrics.breakdown.spec
    mean, rows, none = metrics.iteration.mean_ns, [], text("")
    for name in EXACT:
        spec_share = formula.get(name, formula.get(f"comm_{kind(name)}"))
        if not exact[name] and not spec_share and name != "idle":
            continue
        share = exact[name]
        step = None if share is None or mean is None else share * mean
        spec = none if name in ("memcpy", "exposed_mixed") else spec_share
        rows.append((label(name), number(share, html.percent, why, share), step, spec))
    if metrics.host_communication:
        alone = metrics.host_communication.alone_ns_per_step
        share = None if alone is None or not mean else alone / mean
        cell = number(share, html.percent, why, share)
        rows.append(("host's collectives, part of idle", cell, alone, none))
    return table(
        "breakdown-table",
        "Shares of the step",
        [
            "time of a step",
            ("exact", "exact", html.percent, why),
            ("per step", "exact.ns", html.ns, why),
            ("formula", "spec", html.percent, why),
        ],
        rows,
        hidden="specification formulas",
    )


def idle_section(metrics: Metrics, why: str) -> Section:
    """Return the section on the causes of idle time; `why` explains unknown times."""
    place = "rank" if metrics.is_host_run else "device"
    title, shares = f"Why are {place}s idle?", metrics.idle
    if any(share is None for share in shares.values()):
        chart = "Idle time by cause"
        return html.unknown_section("idle", title, "The causes of idle time are", chart, why)
    cause = totals.largest(shares)
    if cause is None:
        return Section(name="idle", title=title, lead=(f"No {place} is ever idle.",))
    mean = metrics.iteration.mean_ns or 0.0
    ns = (shares[cause] or 0.0) * mean
    time = html.fact(f"idle.{cause}", ns, html.ns)
    names, about = totals.explained(cause, ns, metrics.idle_names), BY_CAUSE[cause]
    if metrics.is_host_run:
        before, after = "an operator", f" per step, is {about.text}{names}."
        lead: html.Sentence = ("Most of the idle time, ", time, after)
    else:
        to_try = f"try {about.to_try}."
        before, after = "a launch", f" per step {about.awaited}{names}; {to_try}"
        lead = ("Devices wait ", time, after)
    return Section(
        name="idle",
        title=title,
        lead=lead,
        blocks=(
            _causes(metrics, shares),
            *([_idle_names(metrics)] if metrics.idle_names else []),
        ),
        pitfall=f"A cause is what happened before {before}, not what a fix saves: if the host "
        "did not load data, something else might hold it up.",
    )


def _causes(metrics: Metrics, shares: Mapping[str, float | None]) -> PageTable:
    """Return the idle time by cause of the job and of the ranks that are idle the longest."""
    causes = [name for name, share in shares.items() if share]
    by_rank = metrics.idle_by_rank
    order = sorted(by_rank, key=lambda rank: (-sum(by_rank[rank].values()), rank))
    shown = order if len(order) <= _MOST_ROWS else order[:_ENDS]
    most = (
        "" if len(shown) == len(order) else f", the {_ENDS} of {len(order)} ranks with the most"
    )
    mean = metrics.iteration.mean_ns or 0.0
    job = {name: (share or 0.0) * mean for name, share in shares.items()}
    rows = [(text("all ranks"), job), *((html.rank_cell(r), by_rank[r]) for r in shown)]
    return table(
        "idle-table",
        f"Idle time per step by cause{most}",
        [
            *("rank", ("idle", "exact.idle", html.ns)),
            *((BY_CAUSE[name].text, f"idle.{name}", html.ns) for name in causes),
        ],
        [
            (cell, sum(times.values()), *(times[name] for name in causes))
            for cell, times in rows
        ],
    )


_EVIDENCE = "Evidence: what the host did, or the work that the device waited for"


def _idle_names(metrics: Metrics) -> PageTable:
    """Return the names behind idle time: what hosts did, or the work that was waited for."""
    return table(
        "idle-names-table",
        "Evidence: what ran before" if metrics.is_host_run else _EVIDENCE,
        [
            *("cause", "name"),
            ("per step", "idle.ns", html.ns),
            ("ranks", "idle.ranks", html.whole),
        ],
        [
            (BY_CAUSE[entry.cause].text, entry.name, entry.ns_per_step, entry.ranks)
            for entry in metrics.idle_names
        ],
    )
