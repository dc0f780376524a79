"""Build HTML reports: one self-contained file per page that needs no network.

A page consists of sections of figures and tables; `definitions` defines each number. A module
`page` of a question builds its sections. `charts` are plain data, which `draw` draws. Their
colors are properties of the style sheet, so that one page has light, dark and print modes.

Numbers are formatted by `fastcomm.units`, with a thin space before the unit. Unknown values are
`NA`; a `Fact` gives the reason.

Equal pages have equal bytes. The template escapes all text; a content security policy allows no
network, and only the scripts of the page.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import jinja2
import numpy as np
from markupsafe import Markup

from fastcomm import units
from fastcomm.errors import FastcommError, inert
from fastcomm.show import files
from fastcomm.show.charts import MINUS, THIN, Chart, pair_chart
from fastcomm.show.definitions import Definition, definition
from fastcomm.show.draw import draw
from fastcomm.show.svg import patterns, style_of_looks
from fastcomm.show.tables import NA, ColumnUnit, ResultTable, TableColumn
from fastcomm.units import format_bandwidth, format_bytes, format_ns, plural
from fastcomm.version import __version__

T = TypeVar("T")
Spec = dict[str, Any]
Form = Callable[[Any], str]
# Of a column: its label, and of numbers the key of the definition, the format, and the
# reason for an unknown one.
Head = str | tuple[str, str, Form] | tuple[str, str, Form, str]
_PERCENT = re.compile(r"(?<=\d) (?=%)")
# What would end a script element inside of JSON.
_INERT = {ord(c): f"\\u{ord(c):04x}" for c in "<>&'\x7f"}
# Words of a device, and those of a run without one; longer ones first.
_HOST = (
    ("a compute kernel runs", "an operator runs"),
    ("no compute kernel does", "no operator does"),
    ("no compute kernel", "no operator"),
    ("nothing runs on the device", "no operator and no communication runs"),
    ("GPU's link", "rank's link"),
    ("step and GPU", "step and rank"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A formatted number, and the key of its definition."""

    key: str
    text: str
    label: str = ""
    why: str = ""  # reason why it is unknown


Sentence = tuple[str | Fact, ...]


def fact(
    key: str,
    value: T | None,
    form: Callable[[T], str],
    *,
    label: str = "",
    why: str = "the input does not have it",
) -> Fact:
    """Return a number to show; "n/a" with the reason `why` if the value is None.

    `key` names its definition, `form` formats it, and `label` is its caption.
    """
    if value is None:
        return Fact(key=key, text=NA, label=label, why=why)
    return Fact(key=key, text=form(value), label=label)


def plain(parts: Sentence) -> str:
    """Return a sentence as plain text, without links to definitions."""
    return "".join(part if isinstance(part, str) else part.text for part in parts)


def ns(value: float) -> str:
    """Format a time in ns: "9.55 ms"."""
    return _short(format_ns(value)).replace("us", "µs")


def size(value: float) -> str:
    """Format a number of bytes, decimal: "307 MB"."""
    return _short(format_bytes(value))


def rate(value: float) -> str:
    """Format bytes per second: "48.2 GB/s"."""
    return _short(format_bandwidth(value))


def percent(value: float) -> str:
    """Format a share: "13.4 %"."""
    return _short(units.percent(value))


def signed_percent(value: float) -> str:
    """Format a relative change: "+3.2 %"."""
    text = _short(units.signed_percent(value))
    return text if text.strip(f"+{MINUS}0.%{THIN}") else text[1:]


def times(value: float) -> str:
    """Format a multiple: "1.24 ×"."""
    return f"{value:.2f}{THIN}×"


def count(value: float) -> str:
    """Format a count with separated thousands: "12 288"."""
    return _short(f"{value:,.0f}".replace(",", " "))


def change_ns(value: float) -> str:
    """Format a change of a time in ns: "+1.24 ms"."""
    return f"+{ns(value)}" if value > 0 else ns(value)


_FORMS: dict[ColumnUnit, Form] = {
    "count": count,
    "number": "{:.3g}".format,
    "decimal": "{:.1f}".format,
    "factor": times,
    "multiple": times,
    "ns": ns,
    "change_ns": change_ns,
    "bytes": size,
    "bytes_per_s": rate,
    "share": percent,
    "change": signed_percent,
}


def many(number: int, noun: str) -> str:
    """Format a count and its noun: "1 rank", "8 ranks"."""
    return f"{count(number)} {plural(number, noun)}"


def _short(text: str) -> str:
    """Return a number and its unit with a narrow space and a typographic minus."""
    return text.replace(" ", THIN).replace("-", MINUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageColumn:
    """A column of a table; `key` names the definition of its numbers."""

    label: str
    key: str = ""
    is_number: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCell:
    """A cell: its text, and the value by which it is sorted; None comes last."""

    text: str
    sort: float | str | None = None
    why: str = ""  # reason why it is unknown
    share: float | None = None  # drawn as a bar behind the text


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table that can be sorted and filtered."""

    name: str
    caption: str
    columns: tuple[PageColumn, ...]
    rows: tuple[tuple[PageCell, ...], ...]
    hidden: str = ""  # what the last column has, which a switch shows

    @property
    def can_filter(self) -> bool:
        """Whether the table is long enough for a filter."""
        return len(self.rows) > 12  # noqa: PLR2004


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureView:
    """One of several charts of a figure; the reader selects one."""

    label: str
    chart: Chart
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart, its description, and its numbers as a table."""

    name: str
    title: str
    alt: str
    views: tuple[FigureView, ...]
    terms: tuple[str, ...] = ()  # keys of the definitions of what is drawn
    note: str = ""
    table: PageTable | None = None
    choice: str = "View"  # label of the selection of views


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A chart that cannot be drawn, and the reason."""

    title: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """The rank at each percent of an order: what `page.js` shows beside a slider."""

    name: str
    title: str
    note: str
    rows: tuple[tuple[str, str], ...]  # label and key of each number
    steps: tuple[tuple[str, tuple[str, ...]], ...]  # who, and its numbers; 101 of them


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTimeline:
    """Events of all ranks in some steps, which `timeline.js` draws."""

    name: str
    title: str
    steps: tuple[str, ...]  # their labels
    data: Spec
    legend: tuple[tuple[str, str], ...]  # name and label
    notes: tuple[str, ...] = ()


Block = Figure | PageTable | Missing | Quantiles | PageTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A question, its answer, and the charts and tables behind it."""

    name: str
    title: str
    lead: Sentence
    blocks: tuple[Block, ...] = ()
    pitfall: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A small chart without a title."""

    chart: Chart
    alt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFinding:
    """A finding, its evidence, and the command to run next."""

    title: Sentence
    evidence: tuple[Fact, ...]
    command: str  # empty where none applies
    then: str  # what the command finds out
    cost_ns: float  # of a step
    moment: str = ""  # fragment of a link to a moment of the timeline
    picture: Picture | None = None
    answer: Sentence = ()  # what a fix saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The content of a whole page."""

    title: str
    source: str
    headline: Sentence
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    findings: tuple[PageFinding, ...] = ()
    health: str = ""  # in place of findings, where there are none
    cautions: tuple[str, ...] = ()  # that hold for all numbers, and stand above them
    warnings: tuple[str, ...] = ()
    data: tuple[tuple[str, str], ...] = ()  # file beside the page, and what it has
    is_host_run: bool = False  # whether definitions are of a run without a device


def text(value: object, label: str | None = None) -> PageCell:
    """Return a cell that shows `label`, or the value where `label` is None."""
    shown = str(value) if label is None else label
    return PageCell(text=shown, sort=shown.lower())


def number(
    value: float | None, form: Form, why: str = "", share: float | None = None
) -> PageCell:
    """Return a cell of a number, formatted by `form`; "n/a" with a reason for None.

    `share` (0 to 1) is the length of a bar behind the number; None draws no bar.
    """
    if value is None:
        return PageCell(text=NA, why=why or "the input does not have it")
    return PageCell(text=form(value), sort=float(value), share=share)


def rank_cell(rank: int) -> PageCell:
    """Return a cell that names a rank and sorts by its number."""
    return PageCell(text=f"rank {rank}", sort=rank)


def table(
    name: str,
    caption: str,
    heads: Sequence[Head],
    rows: Iterable[Sequence[object]],
    *,
    hidden: str = "",
) -> PageTable:
    """Return a table.

    Parameters
    ----------
    name, caption
        Its id on the page, and the text above it.
    heads
        A label for each column of text; for a column of numbers its label, the key of its
        definition, the function that formats it, and optionally why a number is unknown.
    rows
        Values of each row, None for an unknown number; a `PageCell` is shown as it is.
    hidden
        What the last column has, if it is hidden at first.

    """
    return PageTable(
        name=name,
        caption=caption,
        columns=tuple(
            PageColumn(label=head, is_number=False)
            if isinstance(head, str)
            else PageColumn(label=head[0], key=head[1])
            for head in heads
        ),
        rows=tuple(
            tuple(_cell(head, value) for head, value in zip(heads, row, strict=True))
            for row in rows
        ),
        hidden=hidden,
    )


def _cell(head: Head, value: Any) -> PageCell:
    """Return the cell of a value in a column."""
    if isinstance(value, PageCell):
        return value
    return text(value) if isinstance(head, str) else number(value, *head[2:])


def shown(table: ResultTable) -> PageTable:
    """Return a table of a result for a page."""
    own = table.on("page")
    return PageTable(
        name=own.name,
        caption=own.caption,
        columns=tuple(
            PageColumn(label=column.label, key=column.key, is_number=column.unit != "text")
            for column in own.columns
        ),
        rows=tuple(
            tuple(_shown_cell(column, row) for column in own.columns) for row in own.rows
        ),
    )


def _shown_cell(column: TableColumn, row: Any) -> PageCell:
    """Return the cell of a row in a column."""
    cell = column.cell(row)
    if cell.text is not None:
        text_ = _PERCENT.sub(THIN, cell.text)
        return PageCell(text=text_, sort=cell.value, why=cell.why, share=cell.bar)
    if column.unit == "text":
        return text(cell.value)
    value = None if cell.value is None else float(cell.value)
    return number(value, _FORMS[cell.unit or column.unit], cell.why, cell.bar)


def figure(
    name: str,
    title: str,
    alt: str,
    chart: Chart,
    *terms: str,
    note: str = "",
    chart_note: str = "",
    table: PageTable | None = None,
) -> Figure:
    """Return a figure of one chart.

    `terms` are keys of the definitions of what is drawn, `note` is below the figure and
    `chart_note` below the chart; `Figure` has the others.
    """
    view = FigureView(label="All", chart=chart, note=chart_note)
    return Figure(
        name=name, title=title, alt=alt, views=(view,), terms=terms, note=note, table=table
    )


def pairs_figure(
    amounts: np.ndarray,
    ranks: Sequence[int],
    *,
    unit: str,
    noun: str,
    title: str,
    term: str,
    note: str = "",
) -> Figure:
    """Return the heat map of what ranks send to ranks.

    Parameters
    ----------
    amounts
        From each rank (row) to each rank (column).
    ranks
        Numbers of the ranks.
    unit
        Of the amounts.
    noun
        What a rank is.
    title
        Title of the figure.
    term
        Key of the amounts' definition.
    note
        What the figure leaves out.

    """
    chart, share = pair_chart(amounts, ranks, unit, noun)
    coarse = f"A cell shows the largest of {share} by {share} {noun}s." if share > 1 else ""
    view = FigureView(label=unit, chart=chart, note=" ".join(filter(None, (coarse, note))))
    return Figure(
        name="pairs-chart",
        title=title,
        alt=f"Heat map of sending {noun}s (down) and receiving {noun}s (across), {unit}.",
        views=(view,),
        terms=(term,),
    )


def unknown_section(name: str, title: str, subject: str, chart: str, why: str) -> Section:
    """Return a section without an answer: "`subject` n/a: `why`".

    `name` is its id on the page, `chart` the title of the chart that is missing.
    """
    missing = Missing(title=chart, why=why)
    return Section(
        name=name, title=title, lead=(f"{subject} n/a: ", why, "."), blocks=(missing,)
    )


def definitions(keys: Iterable[str], *, is_host_run: bool) -> dict[str, Definition]:
    """Return the definitions of some keys, in their order."""
    chosen = {key: definition(key) for key in keys}
    return {key: _of_host(own) for key, own in chosen.items()} if is_host_run else chosen


def _of_host(own: Definition) -> Definition:
    """Return a definition in words of a run without a device."""
    name, meaning = own.name, own.meaning
    for device, host in _HOST:
        name, meaning = name.replace(device, host), meaning.replace(device, host)
    return replace(own, name=name, meaning=meaning)


def used_keys(page: Page) -> list[str]:
    """Return the keys of all definitions that the page refers to, in the order of their use."""
    keys = [*_of_words(page.headline), *_of_words(page.facts)]
    for finding in page.findings:
        keys += _of_words((*finding.title, *finding.evidence, *finding.answer))
    for section in page.sections:
        keys += _of_words(section.lead)
        for block in section.blocks:
            keys += _of_block(block)
    return list(dict.fromkeys(keys))


def _of_words(parts: Sequence[str | Fact]) -> list[str]:
    """Return the keys of the definitions that a text refers to."""
    return [part.key for part in parts if isinstance(part, Fact)]


def _of_block(block: Block) -> list[str]:
    """Return the keys of the definitions that a chart or table refers to."""
    if isinstance(block, Figure):
        return [*block.terms, *(_of_block(block.table) if block.table is not None else ())]
    if isinstance(block, PageTable):
        return [column.key for column in block.columns if column.key]
    if isinstance(block, Quantiles):
        return [key for _, key in block.rows]
    return []


def html(page: Page) -> str:
    """Return the whole document; equal pages have equal bytes."""
    blocks = [block for section in page.sections for block in section.blocks]
    has_timeline = any(isinstance(block, PageTimeline) for block in blocks)
    scripts = [_text("page.js"), *([_text("timeline.js")] if has_timeline else [])]
    template = _environment().get_template("page.html.j2")
    return template.render(
        page=page,
        scripts=[Markup(script) for script in scripts],
        style=Markup(_text("style.css") + style_of_looks()),
        patterns=patterns(),
        policy=_policy(scripts),
        definitions=definitions(used_keys(page), is_host_run=page.is_host_run),
        version=__version__,
    )


def write(page: Page, path: str | Path) -> None:
    """Write the page to a file, which appears when it is complete. Raises FastcommError."""
    path = Path(path)
    if path.is_dir():
        raise FastcommError(f"{path}: is a directory. Name a file, such as report.html")
    files.write(path.parent, {path.name: files.text(html(page))})


def json_text(value: Any) -> Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_INERT))


@cache
def _environment() -> jinja2.Environment:
    """Return the template environment, which escapes all text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fastcomm.show"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_inert,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "json": json_text,
        "plain": plain,
        "drawn": draw,
        "url": lambda name: quote(os.fsencode(name)),
    }
    environment.tests |= {
        "fact": lambda part: isinstance(part, Fact),
        "figure": lambda block: isinstance(block, Figure),
        "table": lambda block: isinstance(block, PageTable),
        "missing": lambda block: isinstance(block, Missing),
        "quantiles": lambda block: isinstance(block, Quantiles),
        "timeline": lambda block: isinstance(block, PageTimeline),
    }
    return environment


def _inert(value: Any) -> Any:
    """Make text of traces harmless: spell out characters that hide or reorder letters."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return inert(value) if is_text else value


@cache
def _text(name: str) -> str:
    """Return the content of a file of the templates."""
    return (resources("fastcomm.show") / "templates" / name).read_text("utf-8")


def _policy(scripts: list[str]) -> str:
    """Return the content security policy: no network, and only these scripts, by hash."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
