"""Charts of pages, as data; `draw` makes them inline SVG when a page is written.

A chart is a `BarChart`, `LaneChart`, `LineChart`, `HeatChart` or `GraphChart`, given to a
`FigureView`:

    chart = BarChart(
        rows=("rank 0", "rank 1"),
        parts=(Part(name="compute", look="compute", values=(1.0, 2.0)),),
        title="ms per step",
    )
    FigureView(label="All", chart=chart)

`row_bars` makes bars with one value and label each, `linear` and `ticked` make axes,
`row_tips` makes tips. Names and
tips are plain text: drawing escapes them. A tip is shown at the pointer and read out when the
arrow keys move through a chart, so it should be complete: "rank 5, compute: 9.5 ms". Colors
are names of looks ("TP", "compute"), defined in the style sheet for light, dark and print, and
each has a pattern. Give a table with the numbers, too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm.trace.parallelisms import TAGS

THIN = "\u202f"
MINUS = "\u2212"
_SERIES = (*TAGS, "mixed", "open", "memcpy")
_DASHES = ("", "7 4", "2 3", "8 3 2 3", "12 4", "12 3 2 3")
SYMBOLS = ("circle", "square", "diamond", "up", "cross", "down", "bar")
_MOST_PAIRED = 96  # ranks in a row or column of pairs
_MOST_DOWN, _MOST_ACROSS = 24, 12
_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One value of each row of a bar chart; None: the row has none."""

    name: str  # in the legend; "" for none
    look: str
    values: Sequence[float | None]
    labels: Sequence[str] = ()  # texts in or after the bars
    tips: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMarks:
    """One point on each row of a bar chart."""

    name: str
    symbol: str  # of SYMBOLS; "-open" at the end for a hollow one
    values: Sequence[float | None]
    look: str = "open"
    tips: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A dashed line at a value of the axis of values."""

    value: float
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Horizontal bars, the first row at the top; stacked values are 0 or more."""

    rows: Sequence[str]
    title: str  # of the axis
    parts: Sequence[Part] = ()
    marks: Sequence[RowMarks] = ()
    is_stacked: bool = True  # else the parts of a row are below each other
    level: Level | None = None
    most: float | None = None  # end of the axis; None: the largest value
    row_height: int = 26
    has_axis: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Pieces of equal look on a row of `LaneChart`: (start, stop) in the unit of the axis."""

    row: int
    name: str
    look: str
    pieces: Sequence[tuple[float, float]]
    tip: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneChart:
    """Rows with pieces, on an axis from `least` to `most`; `labels` are texts after rows."""

    rows: Sequence[str]
    title: str
    lanes: Sequence[Lane]
    most: float
    least: float = 0.0
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis from `low` to `high`, with positions and texts of its ticks."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """A line or a cloud of points; its number in the chart determines its look."""

    name: str
    points: Sequence[tuple[float, float]]
    tips: Sequence[str] = ()  # of each point
    tip: str = ""  # of the line
    look: str = ""  # "": by its number
    has_line: bool = True
    has_marks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines over two axes. With `chosen`, that line is in color, and all others are gray."""

    lines: Sequence[ChartLine]
    x: Axis
    y: Axis
    level: Level | None = None
    height: int = 240
    chosen: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatChart:
    """A heat map, dark is low; None is unknown. Few cells show their numbers.

    `tip` is a template of `str.format` with the fields row, column and value.
    """

    grid: Sequence[Sequence[float | None]]
    rows: Sequence[str]
    columns: Sequence[str]
    unit: str
    tip: str
    x: str = ""  # titles of the axes
    y: str = ""

    @property
    def is_small(self) -> bool:
        """Whether the cells have room for their numbers."""
        return len(self.columns) <= _MOST_ACROSS and len(self.rows) <= _MOST_DOWN

    @property
    def ends(self) -> tuple[float, float]:
        """Values of the first and the last color, at least 5 % of the median apart.

        A smaller spread would show noise as a difference.
        """
        values = sorted(value for row in self.grid for value in row if value is not None)
        if not values:
            return 0.0, 1.0
        middle = values[len(values) // 2]
        around = abs(middle) * 0.025 or 0.5
        return min(values[0], middle - around), max(values[-1], middle + around)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """A box of a graph: its lines of text, and what it is, by its look in the legend."""

    lines: Sequence[str]  # the first is bold
    name: str  # in the legend
    look: str
    tip: str
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphChart:
    """A directed graph in layers, the first at the top; edges go to another layer.

    An edge is a pair of numbers of nodes, which are counted through all layers.
    """

    layers: Sequence[Sequence[GraphNode]]
    edges: Sequence[tuple[int, int]]


Chart = BarChart | LaneChart | LineChart | HeatChart | GraphChart


def line_look(place: int) -> tuple[str, str, str]:
    """Return the look, the dashes and the symbol of the line with number `place`, from 0."""
    return (
        _SERIES[place % len(_SERIES)],
        _DASHES[place % len(_DASHES)],
        SYMBOLS[place % len(SYMBOLS)],
    )


def row_bars(  # noqa: PLR0913 - one keyword per choice
    rows: Sequence[str],
    values: Sequence[float],
    form: Callable[[float], str],
    title: str,
    unit: float = 1.0,
    *,
    looks: Sequence[str] | str = "compute",
    level: Level | None = None,
    marks: Sequence[RowMarks] = (),
) -> BarChart:
    """Return a chart with one bar a row and its label after it.

    Parameters
    ----------
    rows, values
        Name and value of each bar.
    form
        Formats a value as the label of its bar.
    title, unit
        Title of the axis, and what 1 on it is in values.
    looks
        The look of all bars, or of each.
    level, marks
        A dashed line, and points on the rows.

    """
    by_bar = [looks] * len(rows) if isinstance(looks, str) else looks
    labels = [form(value) for value in values]
    tips = [f"{row}: {label}" for row, label in zip(rows, labels, strict=True)]
    parts = tuple(
        Part(
            name="",
            look=look,
            values=[
                value / unit if bar == look else None
                for value, bar in zip(values, by_bar, strict=True)
            ],
            labels=labels,
            tips=tips,
        )
        for look in dict.fromkeys(by_bar)
    )
    return BarChart(rows=rows, parts=parts, title=title, level=level, marks=marks)


def row_tips(
    rows: Sequence[str], name: str, values: Sequence[float], form: Callable[[float], str]
) -> list[str]:
    """Return the tip of one part or mark of each row: "rank 5, compute: 9.5 ms"."""
    texts = ("n/a" if math.isnan(value) else form(value) for value in values)
    return [f"{row}, {name}: {text}" for row, text in zip(rows, texts, strict=True)]


def coarsened(
    grid: np.ndarray, most: int, outlier: np.ufunc = np.maximum
) -> tuple[np.ndarray, int]:
    """Return a grid with at most `most` rows, and how many rows of `grid` each stands for.

    `outlier` selects the value shown for several rows, such as their maximum.
    """
    share = max(1, -(-len(grid) // most))
    return outlier.reduceat(grid, np.arange(0, len(grid), share), axis=0), share


def pair_chart(
    grid: np.ndarray, ranks: Sequence[int], unit: str, noun: str
) -> tuple[HeatChart, int]:
    """Return a heat map of what ranks send to ranks, and how many ranks a row stands for.

    Parameters
    ----------
    grid
        From each rank (row) to each rank (column).
    ranks
        Numbers of the ranks.
    unit
        Of the values.
    noun
        What a rank is.

    """
    rows, share = coarsened(grid, _MOST_PAIRED)
    cells, _ = coarsened(rows.T, _MOST_PAIRED)
    labels = [str(rank) for rank in ranks[::share]]
    chart = HeatChart(
        grid=cells.T.tolist(),
        rows=labels,
        columns=labels,
        unit=unit,
        tip=f"from {noun} {{row}} to {noun} {{column}}: {{value}}",
        x=f"to {noun}",
        y=f"from {noun}",
    )
    return chart, share


def linear(title: str, values: Sequence[float], *, from_zero: bool = True) -> Axis:
    """Return an axis over all values with about five round ticks, from 0 by default."""
    low = min(0.0, *values) if from_zero else min(values)
    high = max(*values, low)
    if high == low:
        high = low + 1
    step = _round_step((high - low) / _TICKS)
    first, last = math.floor(low / step), math.ceil(high / step)
    digits = max(0, -math.floor(math.log10(step)))
    ticks = [(at * step, _number(at * step, digits)) for at in range(first, last + 1)]
    return Axis(title=title, low=first * step, high=last * step, ticks=ticks)


def ticked(title: str, labels: Sequence[str], most: int = 12) -> Axis:
    """Return an axis of categories at 0, 1, ..., of which about `most` have a text."""
    step = max(1, -(-len(labels) // most))
    ticks = [(float(at), label) for at, label in enumerate(labels) if at % step == 0]
    edge = 0.5 if len(labels) <= most else 0.0
    return Axis(title=title, low=-edge, high=len(labels) - 1 + (edge or 0.5), ticks=ticks)


def _round_step(step: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= step * (1 - 1e-9))


def _number(value: float, digits: int) -> str:
    """Return a number of an axis with so many digits after the point."""
    whole, point, part = f"{abs(value):,.{digits}f}".partition(".")
    sign = MINUS if value < 0 and (whole.strip("0,") or part.strip("0")) else ""
    return sign + whole.replace(",", THIN) + point + part


def shortened(text: str, most: int = 42) -> str:
    """Shorten text in the middle to at most `most` characters."""
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def tick(text: str) -> str:
    """Return a formatted number without trailing zeros: "10 µs"."""
    figure, gap, unit = text.partition(THIN)
    return f"{float(figure.replace(MINUS, '-')):g}{gap}{unit}".replace("-", MINUS)
