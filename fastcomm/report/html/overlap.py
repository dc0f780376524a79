"""How much communication hides behind compute, by parallelism."""

import numpy as np

from fastcomm.metrics.result import Metrics
from fastcomm.report.html import words
from fastcomm.report.html.drawing import axis, fill, height_of, rows_axis, spec
from fastcomm.report.html.page import (
    Figure,
    Missing,
    Section,
    Spec,
    Table,
    View,
    columns,
    number,
    text,
)

_MS = 1e6
_TITLE = "Communication under compute and beside it"


def section(found: Metrics, why: str) -> Section:
    """Hidden and open communication of each tag, in a step of a rank."""
    ratio = found.overlap.average_overlap_ratio
    title = "How much communication hides behind compute?"
    if ratio is None:
        why = why if found.volume else "there is no communication"
        lead: words.Words = ("How much hides is n/a: ", why, ".")
        return Section(
            name="overlap", title=title, lead=lead, blocks=(Missing(title=_TITLE, why=why),)
        )
    lead = (
        words.fact("overlap.average_overlap_ratio", ratio, words.percent),
        " of the communication runs under compute",
        *_least(found),
        ".",
    )
    return Section(
        name="overlap",
        title=title,
        lead=lead,
        blocks=(_figure(found),),
        pitfall="A mean of ratios: an iteration with little communication weighs as much as "
        "one with a lot. Communication of one tag under that of another is not hidden.",
    )


def _least(found: Metrics) -> words.Words:
    """The tag of which the least is hidden, where there are several."""
    known = {tag: share for tag, share in found.overlap.by_tag.items() if share is not None}
    if len(known) == 1:
        return ()
    worst = min(known, key=lambda tag: known[tag])
    least = words.fact("overlap.by_tag", known[worst], words.percent)
    return ("; of ", worst, " only ", least)


def _figure(found: Metrics) -> Figure:
    tags = [tag for tag, share in found.overlap.by_tag.items() if share is not None]
    hidden, open_ = zip(*(_lengths(found, tag) for tag in tags), strict=True)
    rows = tuple(
        (
            text(tag),
            number(found.overlap.by_tag[tag], words.percent, share=found.overlap.by_tag[tag]),
            number(under, words.ns),
            number(beside, words.ns),
        )
        for tag, under, beside in zip(tags, hidden, open_, strict=True)
    )
    heads = columns(
        "by parallelism",
        ("overlap", "overlap.by_tag"),
        ("hidden", "overlap.hidden_ns"),
        ("not hidden", "overlap.open_ns"),
    )
    spoken = ", ".join(f"{tag} {row[1].text}" for tag, row in zip(tags, rows, strict=True))
    return Figure(
        name="overlap-chart",
        title=_TITLE,
        alt=f"Bars of hidden and open communication. Hidden share: {spoken}.",
        views=(View(label="All", spec=_spec(tags, hidden, open_)),),
        terms=("overlap.hidden_ns", "overlap.open_ns"),
        legend=(("compute", "hidden behind compute"), ("open", "not hidden")),
        table=Table(
            name="overlap-table", caption="Overlap by parallelism", columns=heads, rows=rows
        ),
    )


def _lengths(found: Metrics, tag: str) -> tuple[float, float]:
    """Mean of an iteration and rank: ns under compute, and without."""
    table = found.tables["iterations"]
    known = table.filter(table[f"{tag}_overlapped_ns"].is_valid())
    under = known[f"{tag}_overlapped_ns"].to_numpy()
    union = known[f"{tag}_union_ns"].to_numpy()
    return float(np.mean(under)), float(np.mean(union - under))


def _spec(tags: list[str], hidden: tuple[float, ...], open_: tuple[float, ...]) -> Spec:
    bars: list[Spec] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": tags,
            "x": [round(ns / _MS, 4) for ns in lengths],
            "text": [words.ns(ns) for ns in lengths],
            "textposition": "auto",
            "textangle": 0,
            "insidetextfont": {"color": f"var(--on-{look})"},
            "marker": fill(look),
            "hovertemplate": f"%{{y}}, {name}: %{{x:.3f}} ms<extra></extra>",
        }
        for name, look, lengths in (
            ("hidden behind compute", "compute", hidden),
            ("not hidden", "open", open_),
        )
    ]
    return spec(
        bars,
        height_of(len(tags), 150, 34),
        barmode="stack",
        bargap=0.3,
        xaxis=axis("ms of a step and rank", rangemode="tozero"),
        yaxis=rows_axis(tags),
    )
