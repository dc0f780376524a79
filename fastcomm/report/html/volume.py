"""How much communication moves, by parallelism."""

from fastcomm.metrics.result import Metrics
from fastcomm.report.html import words
from fastcomm.report.html.drawing import bars
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

_MB = 1e6
_TITLE = "Bytes a step and GPU"


def section(found: Metrics) -> Section:
    """Bytes of each tag that has events."""
    known = {
        tag: each.bytes_per_step_per_gpu
        for tag, each in found.volume.items()
        if each.bytes_per_step_per_gpu is not None
    }
    title = "How much is moved?"
    if not known:
        why = "no event tells its size" if found.volume else "there is no communication"
        return Section(
            name="volume",
            title=title,
            lead=("How much is moved is n/a: ", why, "."),
            blocks=(Missing(title=_TITLE, why=why), *([_table(found)] if found.volume else [])),
        )
    most = max(known, key=lambda tag: known[tag])
    lead: words.Words = (
        most,
        " moves the most: ",
        words.fact("volume.bytes_per_step_per_gpu", known[most], words.size),
        f" of {found.bytes} bytes a step and GPU.",
    )
    figure = Figure(
        name="volume-chart",
        title=_TITLE,
        alt="Bars: "
        + ", ".join(f"{tag} {words.size(each)}" for tag, each in known.items())
        + ".",
        views=(View(label="All", spec=_spec(known)),),
        terms=("volume.bytes_per_step_per_gpu",),
    )
    return Section(
        name="volume",
        title=title,
        lead=lead,
        blocks=(figure, _table(found)),
        pitfall="A collective counts on each rank that takes part, and a transfer between two "
        "ranks on both: this is what ranks hand to the library, not what links carry.",
    )


def _spec(known: dict[str, float]) -> Spec:
    values = [known[tag] / _MB for tag in known]
    said = [words.size(each) for each in known.values()]
    return bars(list(known), values, said, "MB a step and GPU", looks=list(known))


def _table(found: Metrics) -> Table:
    rows = []
    for tag, each in found.volume.items():
        silent = found.bandwidth[tag].events_without_bytes
        why = f"{words.many(silent, 'event')} of unknown size"
        rows.append(
            (
                text(tag),
                number(each.comm_events, words.whole),
                number(silent, words.whole),
                number(each.comm_bytes, words.size, why),
                number(each.bytes_per_iteration, words.size, why),
                number(each.bytes_per_step_per_gpu, words.size, why),
            )
        )
    return Table(
        name="volume-table",
        caption=f"Volume by parallelism, in {found.bytes} bytes",
        columns=columns(
            "by parallelism",
            ("events", "volume.comm_events"),
            ("unknown size", "bandwidth.events_without_bytes"),
            ("bytes", "volume.comm_bytes"),
            ("an iteration", "volume.bytes_per_iteration"),
            ("a step and GPU", "volume.bytes_per_step_per_gpu"),
        ),
        rows=tuple(rows),
    )
