"""Answers of the tools: small JSON texts whose numbers have units, totals first.

A text of an answer is bounded in tokens. Tokenizers of models differ, so `tokens_of` counts
rather too many. What does not fit is counted, and `further` says how to ask for it. Names of
traces are data: control characters are escaped, and long names are cut.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.errors import inert, utf8
from fastcomm.trace.run_traces import ranges
from fastcomm.units import format_bandwidth, format_bytes, format_ns, percent

# A word of few letters, a number of few digits, or any other character. Tables of numbers have
# less than two characters a token, sentences four.
_TOKEN = re.compile(r"[A-Za-z]{1,6}|[0-9]{1,3}|[^\sA-Za-z0-9]")
_MOST_TEXT = 700  # characters of a sentence
_MOST_NAME = 110  # characters of a name in a row
_DIGITS = 4
# Of the tokens, before rows are added.
_ABOUT_SHARE, _CAUTIONS_SHARE, _TOTALS_SHARE, _FIXED_SHARE = 0.4, 0.3, 0.45, 0.75
_HEADINGS_SHARE = 0.85
_TAIL = 40  # tokens behind a list: what is left out, and which rows are shown
_NS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
# Ends of column names, and the units that they stand for.
_UNITS = (
    (("_ns", "ns"), "ns"),
    (("_bw", "bandwidth", "bytes_per_s"), "bytes_per_s"),
    (("share", "util", "utilization", "ratio", "relative", "error"), "share"),
    (("bytes", "_bytes", "bytes_per_step_per_gpu", "bytes_per_step"), "bytes"),
)
_WIDER = {"start_ns", "stop_ns"}  # moments, of which all digits count
_RANKS = {"ranks", "members", "waits_for"}  # columns of lists of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """A number or fact of an answer, as text with its unit, and the rows that it is from."""

    name: str
    value: str
    rows: str

    def to_dict(self) -> dict[str, str]:
        """Return the JSON object."""
        return {"what": self.name, "value": self.value, "rows": self.rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPage:
    """Which rows of which table an answer shows, and how long it may be."""

    table: str | None = None
    ranks: tuple[int, ...] | None = None
    offset: int = 0
    limit: int = 10
    tokens: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a tool answers.

    `items` are objects that take the place of a table, such as findings. `unknown` are pairs of
    what is unknown and why. `table` names the table that is shown by default; None shows none.
    `is_exact` is whether cells of tables have all digits, in the units of their columns.
    """

    about: str
    cautions: tuple[str, ...] = ()  # that hold for all numbers, and come before them
    totals: tuple[Total, ...] = ()
    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    table: str | None = None
    is_exact: bool = False
    items: tuple[Mapping[str, Any], ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    further: tuple[str, ...] = ()


def tokens_of(text: str) -> int:
    """Return about how many tokens a text has, rather too many than too few."""
    return len(_TOKEN.findall(text)) + len(text.encode("utf-8", "replace")) - len(text)


def unit_of(name: str) -> str:
    """Return the unit that the name of a column or value implies; "" without one."""
    return next((unit for ends, unit in _UNITS if name.endswith(ends)), "")


def quantity(name: str, value: Any) -> str:
    """Format a value with the unit that its name implies: "47.1 ms"; "unknown" for None."""
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return "unknown"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return shown(value)
    forms = {
        "ns": format_ns,
        "bytes_per_s": format_bandwidth,
        "share": percent,
        "bytes": format_bytes,
    }
    form = forms.get(unit_of(name))
    return f"{value:.{_DIGITS}g}" if form is None else str(form(value))


def shown(value: Any, most: int = _MOST_NAME) -> str:
    """Return a value as a text without control characters, cut to `most` characters."""
    text = inert(utf8(str(value)))
    if len(text) <= most:
        return text
    cut = len(text) - most
    return f"{text[: most * 2 // 3]}...[{cut} characters cut]...{text[-most // 3 :]}"


def rendered(answer: Answer, page: RowsPage) -> str:
    """Return the JSON text of an answer, at most `page.tokens` tokens long.

    Raises
    ------
    KeyError
        If the answer has no table of the name in `page.table`.

    """
    most = page.tokens
    text = _Document(most)
    text.add_items("caution", [*answer.cautions], _CAUTIONS_SHARE * most)
    about, share = shown(answer.about, _MOST_TEXT), int(_ABOUT_SHARE * most)
    text.add("about", about if tokens_of(about) <= share else shown(about, share))
    # Who asks for more rows has seen the totals.
    totals = answer.totals if page.table is None and page.offset == 0 else answer.totals[:1]
    text.add_items("totals", [total.to_dict() for total in totals], _TOTALS_SHARE * most)
    unknown = [{"what": name, "why": why} for name, why in answer.unknown]
    text.add_items("unknown", unknown, _FIXED_SHARE * most)
    text.add_items("further", [*_ways(answer, page)], _FIXED_SHARE * most)
    text.add_items("notes", [*answer.notes], _FIXED_SHARE * most)
    name = page.table or answer.table
    if page.table is None and answer.items:
        text.add_page("items", answer.items, page, len(answer.items))
    elif name is not None:
        text.add_table(name, answer.tables[name], page, is_exact=answer.is_exact)
    return text.close()


def _ways(answer: Answer, page: RowsPage) -> list[str]:
    """Return the ways to ask further: own ones of the answer, then its other tables."""
    other = [
        f"{name} ({table.num_rows} rows)"
        for name, table in answer.tables.items()
        if name != (page.table or answer.table)
    ]
    tables = [f"table= one of: {', '.join(other)}"] if other else []
    return [*answer.further, *tables]


class _Document:
    """A JSON object that is written line by line while it fits."""

    def __init__(self, most: int) -> None:
        """Create an empty object of at most `most` tokens."""
        self._most = most
        self._parts: list[str] = []
        self._size = 2

    def add(self, key: str, value: Any) -> None:
        """Add a value, whether or not it fits."""
        self._write(f"{json.dumps(key)}:{_json(value)}")

    def _write(self, part: str) -> None:
        self._parts.append(part)
        self._size += tokens_of(part) + 1

    def add_items(self, key: str, items: Sequence[Any], most: float) -> None:
        """Add a list with the first items that fit below `most` tokens."""
        if not items:
            return
        lines = self._fitting([_json(_cut(item)) for item in items], min(most, self._most))
        if left_out := len(items) - len(lines):
            lines.append(_json(f"{left_out} more left out; ask with a larger max_tokens"))
        self._write(f"{json.dumps(key)}:{_listed(lines)}")

    def add_page(self, key: str, items: Sequence[Any], page: RowsPage, count: int) -> None:
        """Add the items of a page that fit, and how many there are."""
        chosen = items[page.offset : page.offset + page.limit]
        lines = self._fitting([_json(_cut(item)) for item in chosen], self._most - _TAIL)
        self._write(f"{json.dumps(key)}:{_listed(lines)}")
        self.add("shown", _of(page.offset, len(lines), count))

    def add_table(
        self, name: str, table: pa.Table, page: RowsPage, *, is_exact: bool = False
    ) -> None:
        """Add the rows of a page that fit; units are in the headings."""
        if page.ranks is not None and "rank" in table.column_names:
            table = table.filter(pc.is_in(table["rank"], pa.array(page.ranks, pa.int64())))
        chosen = table.slice(page.offset, page.limit)
        column = _exact_column if is_exact else _column
        columns = [column(field_, chosen[field_]) for field_ in chosen.column_names]
        self.add("table", name)
        names = [_json(heading) for heading, _ in columns]
        fitting = self._fitting(names, _HEADINGS_SHARE * self._most)
        self._write(f'"columns":[{",".join(fitting)}]')
        if left_out := len(names) - len(fitting):
            self.add("columns_left_out", f"{left_out} more; ask for fewer, as by sql")
        cells = (own for _, own in columns[: len(fitting)])
        rows = [_json(list(row)) for row in zip(*cells, strict=True)]
        lines = self._fitting(rows, self._most - _TAIL)
        self._write(f'"rows":{_listed(lines)}')
        self.add("shown", _of(page.offset, len(lines), table.num_rows))
        if page.ranks is not None and "rank" not in table.column_names:
            self.add("caution_on_ranks", "no effect: the rows of this table are not of ranks")
        elif page.ranks is not None and not table.num_rows:
            self.add("none", f"the table has no row of rank {ranges(page.ranks)}")

    def _fitting(self, lines: Sequence[str], most: float) -> list[str]:
        """Return the first lines that fit below `most` tokens of the whole document."""
        size, fitting = self._size + _TAIL, []
        for line in lines:
            size += tokens_of(line) + 1
            if size > most:
                break
            fitting.append(line)
        return fitting

    def close(self) -> str:
        """Return the text of the object."""
        return "{" + ",\n".join(self._parts) + "}"


def _listed(lines: Sequence[str]) -> str:
    """Return a JSON list with a line for each item."""
    inside = ",\n".join(lines)
    return f"[\n{inside}]"


def _of(offset: int, count: int, total: int) -> str:
    """Return which rows are shown, and the offset of the next."""
    if not total:
        return "0 rows"
    if offset >= total:
        return f"no row: offset={offset}, and the table has {total}"
    if not count:
        return f"no row: that at offset={offset} is too long; try a larger max_tokens"
    last = offset + count
    more = f"; next: offset={last}" if last < total else ""
    return f"rows {offset} to {last - 1} of {total}{more}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _cut(item: Any) -> Any:
    """Return an item of a list with its texts cut and safe."""
    if isinstance(item, str):
        return shown(item, _MOST_TEXT)
    if isinstance(item, Mapping):
        return {str(key): _cut(value) for key, value in item.items()}
    return [_cut(one) for one in item] if isinstance(item, list | tuple) else item


def _column(name: str, values: pa.ChunkedArray) -> tuple[str, list[Any]]:
    """Return the heading of a column with its unit, and its cells in that unit."""
    cells, unit = values.to_pylist(), unit_of(name)
    if pa.types.is_list(values.type):
        return name, [None if cell is None else _list(name, cell) for cell in cells]
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        texts = [
            cell if cell is None or isinstance(cell, bool) else shown(cell) for cell in cells
        ]
        return name, texts
    if name in _WIDER:
        return f"{name} [ns]", cells
    finite = (abs(cell) for cell in cells if cell is not None and isfinite(cell))
    largest = max(finite, default=0)
    factor, label = _scale(unit, largest)
    heading = f"{name.removesuffix('_ns')} [{label}]" if label else name
    return heading, [_short(cell, factor) for cell in cells]


def _scale(unit: str, largest: float) -> tuple[float, str]:
    """Return the factor of a unit that suits the largest value, and its name."""
    if unit == "share":
        return 0.01, "%"
    steps = {"ns": _NS, "bytes": _BYTES, "bytes_per_s": _BYTES}.get(unit)
    if steps is None:
        return 1, ""
    factor, label = next(((f, name) for f, name in steps if largest >= f), steps[-1])
    return factor, f"{label}/s" if unit == "bytes_per_s" else label


def _short(cell: float | None, factor: float) -> float | int | None:
    """Return a number in its unit, with four digits; None if it is unknown."""
    if cell is None or (isinstance(cell, float) and not isfinite(cell)):
        return None
    if factor == 1 and isinstance(cell, int):
        return cell
    return float(f"{cell / factor:.{_DIGITS}g}")


def _exact_column(name: str, values: pa.ChunkedArray) -> tuple[str, list[Any]]:
    """Return the heading of a column, and its cells with all digits."""
    cells = [_exact(name, cell) for cell in values.to_pylist()]
    return (f"{name} [ns]" if unit_of(name) == "ns" else name), cells


def _exact(name: str, cell: Any) -> Any:
    """Return a value as JSON has it, with all digits."""
    if isinstance(cell, list):
        return _list(name, cell)
    if isinstance(cell, float) and not isfinite(cell):
        return None
    return cell if cell is None or isinstance(cell, int | float) else shown(cell)


def _list(name: str, cell: Sequence[Any]) -> str:
    """Return a list in a cell: ascending ranks as ranges, other values with commas."""
    if name in _RANKS and None not in cell and list(cell) == sorted(set(cell)):
        return shown(ranges(cell))
    return shown(", ".join(map(str, cell)))
