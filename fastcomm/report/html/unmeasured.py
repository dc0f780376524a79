"""Page section on what a run does not tell, and how to record it."""

from collections.abc import Sequence
from dataclasses import replace

from fastcomm.metrics.result import NO_FLOPS, Metrics
from fastcomm.report.html import Block, Missing, PageTable, Section, columns, text
from fastcomm.report.html.speed import NO_LINK

TITLE = "Not measurable here, and how to record it"
_KERNELS = (
    "Record the device: activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] in PyTorch, "
    "nsys profile --trace=cuda,nvtx in Nsight Systems"
)
_SIZES = "Record sizes: PyTorch 2.4 or newer, or record_shapes=True"
_MATCHED = (
    "Record the same steps of all ranks, with names and members of process groups: PyTorch 2.4 "
    "or newer"
)
# By id of a section.
_TO_RECORD = {
    "timeline": _KERNELS,
    "time": _KERNELS,
    "idle": _KERNELS,
    "overlap": _KERNELS,
    "ranks": f"{_KERNELS}; of several ranks",
    "windows": "Record several phases of communication, with their times",
    "bandwidth": _SIZES,
    "volume": _SIZES,
    "across": _MATCHED,
}
_FLOPS = "shapes of operators: record_shapes=True, and pass --flops to fastcomm"


def divided(
    sections: Sequence[Section], metrics: Metrics
) -> tuple[tuple[Section, ...], Section | None]:
    """Return the sections that have an answer, and the section on the others, if any."""
    answered = tuple(
        replace(section, blocks=_answered(section))
        for section in sections
        if not _missing(section) or _answered(section)
    )
    rows = [
        (section.title, _missing(section)[0].why, _TO_RECORD.get(section.name, ""))
        for section in sections
        if _missing(section)
    ]
    if metrics.link_bandwidth is None and metrics.bandwidth:
        remedy = "Pass --link-bandwidth, as in 400Gbit/s"
        rows.append(("Which share of the link is used?", NO_LINK, remedy))
    reasons = [why for why in metrics.flops.unknown.values() if why]
    if reasons and not metrics.is_host_run:
        why = NO_FLOPS if NO_FLOPS in reasons else reasons[0]
        rows.append(("What is the MFU?", why.partition(":")[0], f"Record {_FLOPS}"))
    if not rows:
        return answered, None
    table = PageTable(
        name="unmeasured-table",
        caption="Questions without an answer",
        columns=columns("question", "why not", "to do"),
        rows=tuple(tuple(text(cell) for cell in row) for row in rows),
    )
    lead = ("These questions have no answer in this run.",)
    section = Section(name="unmeasured", title=TITLE, lead=lead, blocks=(table,))
    return answered, section


def _missing(section: Section) -> list[Missing]:
    """Return the charts of a section that cannot be drawn."""
    return [block for block in section.blocks if isinstance(block, Missing)]


def _answered(section: Section) -> tuple[Block, ...]:
    """Return the blocks of a section without missing charts, and without empty tables."""
    return tuple(
        block
        for block in section.blocks
        if not isinstance(block, Missing | PageTable) or _has_numbers(block)
    )


def _has_numbers(block: Missing | PageTable) -> bool:
    """Whether a table has any known number, or only texts."""
    if isinstance(block, Missing):
        return False
    places = [at for at, column in enumerate(block.columns) if column.is_number]
    return not places or any(row[at].sort for row in block.rows for at in places)
