"""What a page consists of: sections of figures and tables, every number with its definition.

A figure is what plotly.js takes: plain data, whose colours are names of the style sheet's
properties ("var(--c-TP)"), so that light, dark and print are one document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastcomm.report.html.words import NA, Fact, Words

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageColumn:
    """A column of a table; `key` is that of its numbers' definition."""

    label: str
    key: str = ""
    is_number: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCell:
    """What a cell shows, and what it is sorted by; None comes last."""

    text: str
    sort: float | str | None = None
    why: str = ""  # it is unknown
    share: float | None = None  # drawn as a bar behind the text


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """Rows that sort and filter."""

    name: str
    caption: str
    columns: tuple[PageColumn, ...]
    rows: tuple[tuple[PageCell, ...], ...]

    @property
    def can_filter(self) -> bool:
        """Whether there are more rows than one sees at a glance."""
        return len(self.rows) > 12  # noqa: PLR2004


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureView:
    """One of several pictures in a figure's place."""

    label: str
    spec: Spec
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart, what it says in words, and its numbers as a table."""

    name: str
    title: str
    alt: str
    views: tuple[FigureView, ...]
    terms: tuple[str, ...] = ()  # keys of the definitions of what is drawn
    note: str = ""
    table: PageTable | None = None
    legend: tuple[tuple[str, str], ...] = ()  # name and label, where the chart has none
    choice: str = "View"  # what one chooses a view by


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A chart that cannot be drawn, and why."""

    title: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """The rank at each percent of the order: what `page.js` shows when one moves the slider."""

    name: str
    title: str
    note: str
    rows: tuple[tuple[str, str], ...]  # label and key of each number
    steps: tuple[tuple[str, tuple[str, ...]], ...]  # who, and its numbers; 101 of them


Block = Figure | PageTable | Missing | Quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A question and what answers it."""

    name: str
    title: str
    lead: Words
    blocks: tuple[Block, ...] = ()
    pitfall: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFinding:
    """What matters, the evidence, and what to do next."""

    title: Words
    evidence: tuple[Fact, ...]
    command: str  # empty where none applies
    then: str  # what the command finds out
    cost_ns: float  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All of it."""

    title: str
    source: str
    headline: Words
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    findings: tuple[PageFinding, ...] = ()
    health: str = ""  # in place of findings, where there are none
    warnings: tuple[str, ...] = ()
    data: tuple[tuple[str, str], ...] = ()  # file beside the page, and what it has


def text(value: object, label: str | None = None) -> PageCell:
    """A cell of words."""
    shown = str(value) if label is None else label
    return PageCell(text=shown, sort=shown.lower())


def number(
    value: float | None, words: Any, why: str = "", share: float | None = None
) -> PageCell:
    """A cell of a number; n/a where that is unknown."""
    if value is None:
        return PageCell(text=NA, why=why or "nothing in the input tells it")
    return PageCell(text=words(value), sort=float(value), share=share)


def rank_cell(rank: int) -> PageCell:
    """Return a cell that names a rank and sorts by its number."""
    return PageCell(text=f"rank {rank}", sort=rank)


def columns(*heads: str | tuple[str, str]) -> tuple[PageColumn, ...]:
    """Return columns of words, by their labels, and of numbers, by label and key."""
    return tuple(
        PageColumn(label=head, is_number=False)
        if isinstance(head, str)
        else PageColumn(label=head[0], key=head[1])
        for head in heads
    )


def unknown_section(name: str, title: str, what: str, chart: str, why: str) -> Section:
    """Return a section whose question has no answer: "`what` n/a: why"."""
    missing = Missing(title=chart, why=why)
    return Section(name=name, title=title, lead=(f"{what} n/a: ", why, "."), blocks=(missing,))


def used_keys(page: Page) -> set[str]:
    """The keys of all definitions that the page refers to."""
    keys = {fact.key for fact in page.facts}
    keys |= _of_words(page.headline)
    for finding in page.findings:
        keys |= _of_words(finding.title) | {fact.key for fact in finding.evidence}
    for section in page.sections:
        keys |= _of_words(section.lead)
        for block in section.blocks:
            keys |= _of_block(block)
    return keys


def _of_words(words: Sequence[str | Fact]) -> set[str]:
    return {part.key for part in words if isinstance(part, Fact)}


def _of_block(block: Block) -> set[str]:
    if isinstance(block, Figure):
        of_table = _of_block(block.table) if block.table is not None else set()
        return set(block.terms) | of_table
    if isinstance(block, PageTable):
        return {column.key for column in block.columns if column.key}
    if isinstance(block, Quantiles):
        return {key for _, key in block.rows}
    return set()
