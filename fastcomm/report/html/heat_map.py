"""Draw heat maps: cells with numbers if they are few, else an image with a pixel a cell."""

import base64
import json
import math
import struct
import zlib
from collections.abc import Sequence

from markupsafe import Markup

from fastcomm.errors import inert
from fastcomm.report.html.charts import HeatChart, shortened
from fastcomm.report.html.svg import element, image, join, text, width

# Cividis, from low to high.
_CIVIDIS = (
    *((0, 32, 76), (0, 42, 102), (0, 52, 110), (39, 63, 108), (60, 74, 107), (76, 85, 107)),
    *((91, 95, 109), (104, 106, 112), (117, 117, 117), (131, 129, 120), (146, 140, 120)),
    *((161, 152, 118), (176, 165, 114), (192, 177, 109), (209, 191, 102), (225, 204, 92)),
    *((243, 219, 79), (255, 233, 69)),
)
_NARROW = 5  # columns whose numbers have room on a phone
_TALL = 20  # pixels of a text
_ACROSS = 72  # characters of all texts below a heat map
_LEVELS = 250
_UNKNOWN = 255


def heat_map(chart: HeatChart) -> tuple[Markup, Markup]:
    """Return a heat map with its scale."""
    count = len(chart.rows)
    height = 30 * count if chart.is_small else min(max(4 * count, 120), 460)
    low, high = chart.ends
    cells = _cells(chart, height) if chart.is_small else _pixels(chart, height)
    scale = element(
        "p",
        element("span", f"{low:.3g}"),
        element("span", class_="ramp", style=f"background:linear-gradient(90deg,{_ramp()})"),
        element("span", f"{high:.3g} {chart.unit}"),
        element("span", "gray: unknown") if _has_gaps(chart) else "",
        class_="scale",
    )
    rows = [shortened(row, 24) for row in chart.rows]
    return scale, image(
        cells, *_heat_ticks(chart, rows, height),
        height=height, before=16 + width(rows), below=48,
        above=24 if chart.y else 8,
    )  # fmt: skip


def _has_gaps(chart: HeatChart) -> bool:
    """Whether a cell is unknown."""
    return any(value is None for row in chart.grid for value in row)


def _heat_ticks(chart: HeatChart, rows: Sequence[str], height: float) -> list[Markup]:
    """Return the labels of rows and columns, of many only some."""
    tall, wide = height / len(rows), 100 / len(chart.columns)
    down = math.ceil(_TALL / tall)
    across = math.ceil(len(chart.columns) * max(map(len, chart.columns)) / _ACROSS)
    parts = [
        text(row, -8, tall * (at + 0.5), "row", text_anchor="end", dominant_baseline="central")
        for at, row in enumerate(rows)
        if at % down == 0
    ]
    parts += [
        text(label, f"{wide * (at + 0.5):.2f}%", height + 16, "tick", text_anchor="middle")
        for at, label in enumerate(chart.columns)
        if at % across == 0
    ]
    parts.append(text(chart.x, "50%", height + 34, "title", text_anchor="middle"))
    if chart.y:
        parts.append(text(chart.y, 0, -8, "title", dx=-width(rows) - 8))
    return parts


def _cells(chart: HeatChart, height: float) -> Markup:
    """Return cells with their numbers."""
    tall, wide = height / len(chart.rows), 100 / len(chart.columns)
    low, high = chart.ends
    parts = []
    for down, row in enumerate(chart.grid):
        for across, value in enumerate(row):
            x, y = wide * across, tall * down
            fill, ink = "var(--quiet)", "var(--ink)"
            if value is not None:
                place = (value - low) / (high - low)
                fill, ink = _rgb(place), _ink(place)
            parts.append(
                element(
                    "rect", x=f"{x:.2f}%", y=y, width=f"{wide:.2f}%", height=tall, fill=fill,
                    class_="mark cell", data_tip=_tip(chart, down, across),
                )
            )  # fmt: skip
            if value is not None:
                parts.append(
                    text(
                        _figures(value), f"{x + wide / 2:.2f}%", y + tall / 2,
                        text_anchor="middle", dominant_baseline="central", fill=ink,
                        class_="number" if len(chart.columns) <= _NARROW else "number wide",
                    )
                )  # fmt: skip
    return join(parts)


def _tip(chart: HeatChart, down: int, across: int) -> str:
    """Return the text of a cell."""
    value = chart.grid[down][across]
    figure = "unknown" if value is None else f"{_figures(value)} {chart.unit}"
    named = chart.tip.replace("{value}", figure).replace("{column}", chart.columns[across])
    return named.replace("{row}", chart.rows[down])


def _figures(value: float) -> str:
    """Return a number with four significant digits, and none after a point above 1000."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"  # noqa: PLR2004


def _pixels(chart: HeatChart, height: float) -> Markup:
    """Return an image with a pixel a cell; the script of the page reads its values back."""
    low, high = chart.ends
    levels = bytes(
        _UNKNOWN if value is None else round((value - low) / (high - low) * (_LEVELS - 1))
        for row in chart.grid
        for value in row
    )
    wide, tall = len(chart.columns), len(chart.rows)
    data = base64.b64encode(_png(levels, wide, tall)).decode()
    return element(
        "image", href=f"data:image/png;base64,{data}", width="100%", height=height,
        preserveAspectRatio="none", class_="pixels",
        data_levels=base64.b64encode(zlib.compress(levels, 9)[2:-4]).decode(),
        data_heat=f"{wide} {tall} {low:.6g} {high:.6g} {_LEVELS - 1}",
        data_rows=json.dumps([inert(row) for row in chart.rows]),
        data_columns=json.dumps([inert(column) for column in chart.columns]),
        data_words=chart.tip.replace("{value}", f"about {{value}} {chart.unit}"),
    )  # fmt: skip


def _png(levels: bytes, wide: int, tall: int) -> bytes:
    """Return an image whose pixels are indices of a palette."""
    palette = b"".join(bytes(_shade(at / (_LEVELS - 1))) for at in range(_LEVELS))
    lines = b"".join(b"\0" + levels[at * wide : (at + 1) * wide] for at in range(tall))
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", wide, tall, 8, 3, 0, 0, 0)),
        (b"PLTE", palette + bytes(3) * (256 - _LEVELS)),
        (b"tRNS", b"\xff" * _UNKNOWN + b"\0"),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def _shade(place: float) -> tuple[int, int, int]:
    """Return the color at a place between 0 (low) and 1 (high)."""
    at = min(max(place, 0.0), 1.0) * (len(_CIVIDIS) - 1)
    first = min(int(at), len(_CIVIDIS) - 2)
    red, green, blue = (
        round(a + (b - a) * (at - first))
        for a, b in zip(_CIVIDIS[first], _CIVIDIS[first + 1], strict=True)
    )
    return red, green, blue


def _rgb(place: float) -> str:
    """Return the color at a place between 0 and 1 as CSS."""
    return "#{:02x}{:02x}{:02x}".format(*_shade(place))


def _ink(place: float) -> str:
    """Return black or white, whichever has more contrast with the color at a place.

    It is at least 4.5:1, as defined by WCAG 2.
    """
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4  # noqa: PLR2004
        for part in (value / 255 for value in _shade(place))
    ]
    luminance = sum(w * part for w, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#fff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000"


def _ramp() -> str:
    """Return all colors of the scale as CSS."""
    return ",".join(_rgb(at / 8) for at in range(9))
