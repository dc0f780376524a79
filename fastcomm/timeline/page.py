"""Page section with the timeline: events of all ranks of a step, which `timeline.js` draws.

Columns of integers are packed: bytes of equal significance together, deflated, as base64.
"""

import base64
import zlib
from collections.abc import Mapping

import numpy as np

from fastcomm.errors import inert
from fastcomm.show import pages
from fastcomm.show.pages import PageTimeline, Section, Sentence, Spec, many, unknown_section
from fastcomm.show.svg import PATTERNS
from fastcomm.timeline.events import BIN_KINDS, GRAPH, KINDS, LEVELS
from fastcomm.timeline.timeline import Moment, Timeline, TimelineStep
from fastcomm.trace.run_traces import named_ranks
from fastcomm.trace.schema import OPS
from fastcomm_kernels.arrays import NULL, Ints

NAME, TITLE = "timeline", "What does each rank do, and when?"
_LOOKS = {"copy": "memcpy", GRAPH: "graph"}  # of kinds whose look has another name


def section(timeline: Timeline | str) -> Section:
    """Return the section of a timeline; a text is the reason why there is none."""
    if isinstance(timeline, str):
        return unknown_section(NAME, TITLE, "The timeline is", "The timeline", timeline)
    shown = block(timeline, "timeline-figure", "All ranks of a step")
    return Section(name=NAME, title=TITLE, lead=_lead(timeline), blocks=(shown,))


def block(timeline: Timeline, name: str, title: str) -> PageTimeline:
    """Return the figure of a timeline; `name` is its id on the page."""
    kinds = sorted({kind for step in timeline.steps for kind in _kinds(step)})
    return PageTimeline(
        name=name,
        title=title,
        steps=tuple(
            f"Step {step.number}: {step.label}, {pages.ns(step.length)}"
            for step in timeline.steps
        ),
        data=_data(timeline),
        legend=tuple(
            (_LOOKS.get(name, name), _label(name)) for name in map(BIN_KINDS.__getitem__, kinds)
        ),
        notes=tuple(_notes(timeline)),
    )


def link(moment: Moment | None) -> str:
    """Return the fragment of a link to a moment; "" for None."""
    if moment is None:
        return ""
    at, around = moment.at / 1e6, moment.around / 1e6
    return f"#t={at:.6f}&d={around:.6f}&rank={moment.rank}&step={moment.step}"


def packed(columns: Mapping[str, Ints], deltas: tuple[str, ...] = ()) -> Spec:
    """Pack columns of equal length; NULL becomes -1.

    Returns
    -------
    dict
        `rows`; `columns`, a list of name, bytes per value, least value, and whether values are
        differences from the row before; and `data`: for each column the lowest byte of all
        values minus the least, then the next byte, as raw deflate in base64.

    """
    heads, parts = [], []
    for name, column in columns.items():
        values = np.where(column == NULL, -1, column).astype(np.int64)
        if name in deltas:
            values = np.diff(values, prepend=0)
        least = int(values.min(initial=0))
        above = (values - least).astype("<u8")
        width = (int(above.max(initial=0)).bit_length() + 7) // 8
        heads.append([name, width, least, name in deltas])
        parts.append(above.view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes())
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    data = deflate.compress(b"".join(parts)) + deflate.flush()
    rows = len(next(iter(columns.values())))
    return {"rows": rows, "columns": heads, "data": base64.b64encode(data).decode()}


def _data(timeline: Timeline) -> Spec:
    """Return what `timeline.js` reads."""
    looks = [_LOOKS.get(name, name) for name in BIN_KINDS]
    return {
        "ranks": list(timeline.ranks),
        "detailed": list(timeline.detailed),
        "names": [inert(name) for name in timeline.names],
        "kinds": KINDS,
        "bin_kinds": BIN_KINDS,
        "looks": looks,
        "patterns": [PATTERNS.get(look) for look in looks],
        "ops": OPS,
        "levels": LEVELS,
        "bins": timeline.steps[0].bins.shape[1],
        "steps": [
            {
                "number": step.number,
                "length": step.length,
                "events": packed(step.events, deltas=("rank", "start")),
                "instances": packed(step.instances, deltas=("last_start",)),
                "path": packed(step.path, deltas=("start",)),
                "spans": packed(step.spans),
                "bins": packed({"cell": step.bins.ravel().astype(np.int64)}),
            }
            for step in timeline.steps
        ],
    }


def _kinds(step: TimelineStep) -> set[int]:
    """Return the kinds that a step shows, as indices into BIN_KINDS."""
    idle = BIN_KINDS.index("idle")
    return {*step.events["kind"].tolist(), *(step.bins // LEVELS).ravel().tolist(), idle}


def _label(kind: str) -> str:
    """Return the text of a kind in the legend."""
    return {"mixed": "several at once", GRAPH: "whole CUDA graph"}.get(kind, kind)


def _lead(timeline: Timeline) -> Sentence:
    """Return the sentence on what is drawn."""
    step = timeline.steps[0]
    work = "operators" if timeline.is_host_run else "compute and copies"
    return (
        f"Step {step.number} ({step.label}) of {many(len(timeline.ranks), 'rank')} takes ",
        pages.fact("pages.timeline_length", step.length, pages.ns),
        f". Of each rank, the upper lane is {work}, the lower one communication; its pale part "
        "waits for the last rank. Click a collective to see all its ranks.",
    )


def _notes(timeline: Timeline) -> list[str]:
    """Return what is left out, merged, or not aligned."""
    notes = []
    if others := len(timeline.binned):
        notes.append(
            f"{many(len(timeline.detailed), 'rank')} with events; the other {others} show what "
            "takes most of each part of the step, paler where it is a smaller share. "
            "--timeline-ranks selects others."
        )
    if merged := sum(step.merged for step in timeline.steps):
        resolution = max(step.resolution for step in timeline.steps)
        notes.append(
            f"{pages.count(merged)} events shorter than {pages.ns(resolution)} are drawn as "
            "one with close neighbors of their kind, to keep the page small. They are in no "
            "matched collective here."
        )
    if timeline.unaligned:
        notes.append(
            f"{named_ranks(timeline.unaligned)}: the clock cannot be compared with the others; "
            "the step starts at 0, and waits are unknown."
        )
    if timeline.is_host_run:
        notes.append("The ranks compute on the host: events are its operators.")
    return notes
