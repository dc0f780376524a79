"""What charts have in common: colors, patterns, axes, and text that is shown as it is.

Colors are properties of the style sheet, which `page.js` resolves for light, dark and print.
Every color has a pattern, so that no chart depends on color.
"""

from collections.abc import Sequence
from typing import Any

from fastcomm.errors import inert
from fastcomm.report.html import MINUS, THIN, Spec
from fastcomm.trace.schema import TAGS

_MOST_NUMBERS, _MOST_ACROSS = 200, 12
INK, MUTED, LINE, SURFACE, ACCENT = (
    f"var(--{name})" for name in ("ink", "muted", "line", "surface", "accent")
)
# Patterns by category of the breakdown, or by tag.
_PATTERNS = {
    "compute": "",
    "DP": "/",
    "TP": "\\",
    "PP": "x",
    "EP": ".",
    "CP": "-",
    "OTHER": "|",
    "mixed": "+",
    "memcpy": "-",
    "idle": "",
}
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = (
    *("circle", "square", "diamond", "triangle-up", "cross", "x"),
    *("star", "hexagon", "triangle-down", "pentagon"),
)
_SERIES = (*TAGS, "mixed", "compute", "memcpy")


def color(name: str) -> str:
    """Return the color of a category or a tag as CSS, a variable of the page's style sheet."""
    return f"var(--c-{name})"


def series_color(place: int) -> str:
    """Return the color of the line with number `place`, from 0."""
    return color(_SERIES[place % len(_SERIES)])


def fill(name: str) -> dict[str, Any]:
    """Return the marker of a category's bar: its color and pattern."""
    return {
        "color": color(name),
        "line": {"color": SURFACE if name != "idle" else LINE, "width": 1},
        "pattern": {
            "shape": _PATTERNS.get(name, ""),
            "fillmode": "overlay",
            "fgcolor": "var(--pattern)",
            "size": 7,
            "solidity": 0.22,
        },
    }


def shown(text: object) -> str:
    """Escape text for plotly: without tags, entities and line breaks."""
    plain = inert(" ".join(str(text).split()))
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def shortened(text: str, most: int = 42) -> str:
    """Shorten text in the middle to at most `most` characters."""
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def axis(title: str = "", **more: Any) -> Spec:
    """Return an axis with a light grid; `more` are plotly's options."""
    return {
        "title": {"text": title, "font": {"size": 12, "color": MUTED}, "standoff": 12},
        "gridcolor": LINE,
        "zerolinecolor": LINE,
        "linecolor": LINE,
        "tickfont": {"size": 12, "color": MUTED},
        "automargin": True,
        "fixedrange": True,
        **more,
    }


def rows_axis(names: Sequence[str], **more: Any) -> Spec:
    """Return an axis of categories, the first at the top."""
    return axis(
        "",
        type="category",
        categoryorder="array",
        categoryarray=list(names),
        autorange="reversed",
        showgrid=False,
        ticklabelstandoff=6,
        **more,
    )


def spec(data: list[Spec], height: int, **layout: Any) -> Spec:
    """Return a figure for plotly.js; `layout` is more of plotly's layout.

    `data` are its traces, and `height` is in pixels.
    """
    return {
        "data": data,
        "layout": {
            "height": height,
            "margin": {"l": 8, "r": 16, "t": 8, "b": 40},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "var(--sans)", "size": 13, "color": INK},
            "hoverlabel": {
                "bgcolor": "var(--tip)",
                "bordercolor": "var(--tip)",
                "font": {"family": "var(--sans)", "size": 13, "color": "var(--tip-ink)"},
            },
            "showlegend": False,
            "dragmode": False,
            **layout,
        },
    }


QUIET_LEGEND = {
    "orientation": "h",
    "x": 0,
    "xanchor": "left",
    "y": 1.02,
    "yanchor": "bottom",
    "font": {"size": 12, "color": MUTED},
    "bgcolor": "rgba(0,0,0,0)",
}


def rounded(value: float | None, digits: int = 5) -> float | None:
    """Round a number of a chart to significant digits."""
    return None if value is None else float(f"{float(value):.{digits}g}")


def room(most: float) -> list[float]:
    """Return the range of an axis from 0 that leaves space for text after a bar of `most`."""
    return [0, most * 1.2]


def height_of(rows: int, least: int = 120, per_row: int = 26) -> int:
    """Return the height of a chart in pixels.

    Parameters
    ----------
    rows
        Number of rows.
    least, per_row
        Least height, and height of a row, in pixels.

    """
    return max(least, 60 + rows * per_row)


def bars(
    names: Sequence[str],
    values: Sequence[float],
    labels: Sequence[str],
    title: str,
    looks: Sequence[str] | str = "compute",
    **layout: Any,
) -> Spec:
    """Return the plotly specification of a chart of horizontal bars.

    Parameters
    ----------
    names
        Name of each bar.
    values
        Length of each bar, in the unit of the axis.
    labels
        Text after each bar.
    title
        Title of the horizontal axis.
    looks
        Name of the color of all bars, or of each.
    **layout
        Further settings of the layout of plotly.

    """
    bar_looks = [looks] * len(names) if isinstance(looks, str) else looks
    rows = [shown(shortened(name)) for name in names]
    # One trace per look, as plotly has one pattern for all bars of a trace.
    traces: list[Spec] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [row for row, bar in zip(rows, bar_looks, strict=True) if bar == look],
            "x": [rounded(x) for x, bar in zip(values, bar_looks, strict=True) if bar == look],
            "text": [text for text, bar in zip(labels, bar_looks, strict=True) if bar == look],
            "textposition": "outside",
            "cliponaxis": False,
            "marker": fill(look),
            "hovertemplate": "%{y}: %{text}<extra></extra>",
        }
        for look in dict.fromkeys(bar_looks)
    ]
    return spec(
        traces,
        height_of(len(rows), 130, 34),
        bargap=0.3,
        barmode="stack",
        xaxis=axis(title, range=room(max(values, default=1.0))),
        yaxis=rows_axis(rows),
        **layout,
    )


def heat(
    grid: Sequence[Sequence[float | None]], names: Sequence[str], hover: str, unit: str
) -> Spec:
    """Return the trace of a heat map (dark is low); small maps show their numbers.

    Parameters
    ----------
    grid
        A list for each row; None is unknown.
    names
        Labels of the rows.
    hover
        Plotly's template of the text at the pointer.
    unit
        Title of the color bar.

    """
    cells = sum(len(row) for row in grid)
    is_small = has_room(cells, max((len(row) for row in grid), default=0))
    return {
        "type": "heatmap",
        "z": [[rounded(value, 4) for value in row] for row in grid],
        "y": list(names),
        "colorscale": "Cividis",
        "hovertemplate": f"{hover}<extra></extra>",
        "hoverongaps": False,
        "xgap": int(is_small),
        "ygap": int(is_small),
        "texttemplate": "%{z}" if is_small else "",
        "textfont": {"size": 12},
        "colorbar": {
            "title": {"text": unit, "side": "top", "font": {"size": 12, "color": MUTED}},
            "thickness": 10,
            "outlinewidth": 0,
            "tickfont": {"size": 11, "color": MUTED},
        },
    }


def grid_spec(drawn: Spec, height: int, x: str = "", y: str = "", **more: Any) -> Spec:
    """Return the figure of a heat map, its first row at the top.

    Parameters
    ----------
    drawn
        Result of `heat`.
    height
        In pixels.
    x, y
        Titles of the axes.
    **more
        Plotly's options of both axes.

    """
    category = {"type": "category", "showgrid": False, **more}
    return spec(
        [drawn],
        height,
        xaxis=axis(x, **category),
        yaxis=axis(y, autorange="reversed", **category),
    )


def has_room(cells: int, across: int) -> bool:
    """Whether the cells of a heat map with `across` columns can show their numbers."""
    return cells <= _MOST_NUMBERS and across <= _MOST_ACROSS


def tick(text: str) -> str:
    """Return a formatted number without trailing zeros: "10 µs"."""
    figure, gap, unit = text.partition(THIN)
    return f"{float(figure.replace(MINUS, '-')):g}{gap}{unit}".replace("-", MINUS)
