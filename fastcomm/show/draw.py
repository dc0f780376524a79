"""Draw charts and heat maps as inline SVG."""

import base64
import json
import math
import struct
import zlib
from collections.abc import Sequence

from markupsafe import Markup

from fastcomm.errors import inert
from fastcomm.show.charts import (
    Axis,
    BarChart,
    Chart,
    ChartLine,
    GraphChart,
    HeatChart,
    LaneChart,
    LineChart,
    Part,
    RowMarks,
    line_look,
    linear,
    shortened,
)
from fastcomm.show.svg import (
    WIDE,
    color,
    element,
    fill,
    image,
    join,
    legend,
    percent,
    placed,
    sign,
    stretched,
    swatch,
    symbol,
    text,
    width,
)

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
_BOX, _GAP = 44, 40  # height of a node of a graph and of the space below it
_LONGEST = 26  # characters of a label beside its row; longer ones are above it


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


def draw(chart: Chart, alt: str) -> Markup:
    """Return the legend and the image of a chart; `alt` describes it."""
    if isinstance(chart, BarChart):
        head, drawn = _bars(chart)
    elif isinstance(chart, LaneChart):
        head, drawn = _lanes(chart)
    elif isinstance(chart, LineChart):
        head, drawn = _lines(chart)
    elif isinstance(chart, GraphChart):
        head, drawn = _graph(chart)
    else:
        head, drawn = heat_map(chart)
    place = element("div", drawn, class_="chart", tabindex=0, role="img", aria_label=alt)
    return head + place


def _is_long(rows: Sequence[str]) -> bool:
    """Whether labels of rows are above their rows, because they are long."""
    return max(map(len, rows), default=0) > _LONGEST


def _row_labels(rows: Sequence[str], height: int) -> list[Markup]:
    """Return the labels of rows of a height in pixels."""
    if _is_long(rows):
        return [
            text(shortened(row, 60), 0, height * at + 13, "row") for at, row in enumerate(rows)
        ]
    return [
        text(
            row, -8, height * (at + 0.5), "row", text_anchor="end", dominant_baseline="central"
        )
        for at, row in enumerate(rows)
    ]


def _across(axis: Axis, height: float) -> list[Markup]:
    """Return the grid lines, texts and title of an axis below a chart."""
    parts = []
    for value, label in axis.ticks:
        at = percent(value, axis.low, axis.high)
        parts.append(element("line", x1=at, x2=at, y1=0, y2=height, class_="grid"))
        parts.append(text(label, at, height + 16, "tick", text_anchor="middle"))
    parts.append(text(axis.title, "50%", height + 34, "title", text_anchor="middle"))
    return parts


def _bars(chart: BarChart) -> tuple[Markup, Markup]:
    """Return a chart of horizontal bars."""
    is_long = _is_long(chart.rows)
    row = chart.row_height + (18 if is_long else 0)
    if not chart.is_stacked:
        row = max(row, 13 * len(chart.parts) + 8)
    height = row * len(chart.rows)
    axis = _bars_axis(chart)
    after = _labels_after(chart)
    grid = _across(axis, height) if chart.has_axis else []
    names = [] if chart.rows == ("",) else _row_labels(chart.rows, row)
    top = 18 if is_long else 0
    bodies = [
        _bar(chart, axis, place, at, top + row * at, row - top)
        for at in range(len(chart.rows))
        for place in range(len(chart.parts))
    ]
    points = [mark for marks in chart.marks for mark in _marks(marks, axis, top, row)]
    level = _level(chart, axis, height)
    names_ = legend(
        [
            *((part.name, swatch(part.look)) for part in chart.parts),
            *((marks.name, sign(marks.symbol, marks.look)) for marks in chart.marks),
        ]
    )
    return names_, image(
        *grid, *bodies, *points, *level, *names,
        height=height,
        before=16 if is_long or chart.rows == ("",) else 16 + width(chart.rows),
        right=24 + (width(after) if after else 0),
        below=44 if chart.has_axis else 4,
        above=22 if chart.level else 6,
    )  # fmt: skip


def _bars_axis(chart: BarChart) -> Axis:
    """Return the axis of values: from 0 if there are bars."""
    rows = zip(*(part.values for part in chart.parts), strict=True)
    join = sum if chart.is_stacked else max
    ends = [
        *(join(value or 0.0 for value in row) for row in rows),
        *(value for marks in chart.marks for value in marks.values if value is not None),
        *([chart.level.value] if chart.level else []),
    ]
    values = [chart.most] if chart.most else ends or [1.0]
    return linear(chart.title, values, from_zero=bool(chart.parts))


def _labels_after(chart: BarChart) -> Sequence[str]:
    """Return the texts behind bars: those of a chart whose rows have one bar each."""
    is_one = all(sum(part.values[at] is not None for part in chart.parts) <= 1
                 for at in range(len(chart.rows)))  # fmt: skip
    return [text for part in chart.parts for text in part.labels] if is_one else []


def _bar(chart: BarChart, axis: Axis, place: int, at: int, y: float, room: float) -> Markup:
    """Return the bar of the part with number `place` on row `at`, which begins at `y` px."""
    part = chart.parts[place]
    value = part.values[at]
    if value is None:
        return Markup("")
    before = sum(other.values[at] or 0 for other in chart.parts[:place])
    start = before if chart.is_stacked else 0.0
    thick = room * 0.72 if chart.is_stacked else (room - 6) / len(chart.parts)
    top = y + room * 0.14 if chart.is_stacked else y + 3 + thick * place
    x = percent(min(start, start + value), axis.low, axis.high)
    box = element(
        "rect", x=x, y=top, width=percent(abs(value), 0, axis.high - axis.low), height=thick,
        fill=fill(part.look), class_="mark", data_tip=part.tips[at] if part.tips else None,
    )  # fmt: skip
    return box + _bar_label(chart, part, axis, at, start, top + thick / 2)


def _bar_label(
    chart: BarChart, part: Part, axis: Axis, at: int, start: float, y: float
) -> Markup:
    """Return the text of a bar: after it, or inside of it where several parts are in a row."""
    value = part.values[at] or 0.0
    if not part.labels or not part.labels[at]:
        return Markup("")
    label = part.labels[at]
    if _labels_after(chart):
        x = percent(max(start, start + value), axis.low, axis.high)
        return text(label, x, y, "after", dx=6, dominant_baseline="central")
    need = (width([label]) + 10) / ((value / (axis.high - axis.low)) or 1e-9)
    if need > 900:  # noqa: PLR2004 - pixels of the widest chart
        return Markup("")
    x = percent(start + value / 2, axis.low, axis.high)
    return element(
        "g",
        text(label, x, y, text_anchor="middle", dominant_baseline="central"),
        class_="inside" if need <= 290 else "inside wide",  # noqa: PLR2004 - of a phone
        fill=f"var(--on-{part.look})",
        style=f"--back:{color(part.look)}",
    )


def _marks(marks: RowMarks, axis: Axis, top: float, row: float) -> list[Markup]:
    """Return one mark for each row."""
    return [
        placed(
            percent(value, axis.low, axis.high),
            row * at + top + (row - top) / 2,
            symbol(
                marks.symbol,
                marks.look,
                class_="mark",
                data_tip=marks.tips[at] if marks.tips else None,
            ),
        )
        for at, value in enumerate(marks.values)
        if value is not None
    ]


def _level(chart: BarChart, axis: Axis, height: float) -> list[Markup]:
    """Return the dashed line across all rows, with its label above."""
    if chart.level is None:
        return []
    x = percent(chart.level.value, axis.low, axis.high)
    return [
        element("line", x1=x, x2=x, y1=-4, y2=height, class_="level"),
        text(chart.level.label, x, -9, "tick", text_anchor="end"),
    ]


def _lanes(chart: LaneChart) -> tuple[Markup, Markup]:
    """Return rows with pieces of time."""
    is_long = _is_long(chart.rows)
    row, top = (42, 18) if is_long else (28, 0)
    height = row * len(chart.rows)
    axis = linear(chart.title, [chart.least, chart.most])
    scale = WIDE / (axis.high - axis.low)
    paths = []
    for lane in chart.lanes:
        y, thick = row * lane.row + top + 3, row - top - 6
        pieces = "".join(
            f"M{a:.1f} {y}h{max(b - a, 0.3):.1f}v{thick}H{a:.1f}z"
            for a, b in (
                ((start - axis.low) * scale, (stop - axis.low) * scale)
                for start, stop in lane.pieces
            )
        )
        paths.append(
            element("path", d=pieces, fill=fill(lane.look), data_tip=lane.tip, class_="mark")
        )
    looks = dict.fromkeys((lane.name, lane.look) for lane in chart.lanes)
    labels = [
        text(
            label, "100%", row * at + (row + top) / 2, "bar", dx=8, dominant_baseline="central"
        )
        for at, label in enumerate(chart.labels)
    ]
    return legend([(name, swatch(look)) for name, look in looks]), image(
        *_across(axis, height), stretched(height, *paths), *_row_labels(chart.rows, row),
        *labels,
        height=height,
        before=16 if is_long else 16 + width(chart.rows),
        right=16 + width(chart.labels) if chart.labels else 0,
        below=44,
    )  # fmt: skip


def _lines(chart: LineChart) -> tuple[Markup, Markup]:
    """Return lines over two axes."""
    x, y, height = chart.x, chart.y, chart.height
    parts = [*_across(x, height)]
    for value, label in y.ticks:
        at = percent(y.high - value, 0, y.high - y.low)
        parts.append(element("line", x1=0, x2="100%", y1=at, y2=at, class_="grid"))
        parts.append(
            text(label, -8, at, "tick", text_anchor="end", dominant_baseline="central")
        )
    parts.append(text(y.title, 0, -12, "title", dx=-width([t for _, t in y.ticks]) - 8))
    if chart.level:
        at = percent(y.high - chart.level.value, 0, y.high - y.low)
        parts.append(element("line", x1=0, x2="100%", y1=at, y2=at, class_="level"))
        parts.append(text(chart.level.label, "100%", at, "tick", dy=-5, text_anchor="end"))
    parts += [_line(chart, place, line) for place, line in enumerate(chart.lines)]
    drawn = image(
        *parts, height=height, before=16 + width([t for _, t in y.ticks]), right=24, below=44,
        above=28, class_="choice" if chart.chosen is not None else None,
    )  # fmt: skip
    return _lines_legend(chart), drawn


def _lines_legend(chart: LineChart) -> Markup:
    """Return the legend of lines; where one is chosen, its entries are buttons."""
    entries = []
    for place, line in enumerate(chart.lines):
        look, dashes, shape = line_look(place)
        mark = sign(
            (shape if line.has_line else f"{shape}-open") if line.has_marks else "",
            line.look or look,
            dashes if line.has_line else None,
        )
        entries.append((line.name, mark))
    if chart.chosen is None:
        return legend(entries) if len(entries) > 1 else Markup("")
    buttons = [
        element(
            "li",
            element(
                "button", mark, name, type="button", data_line=place,
                aria_pressed="true" if place == chart.chosen else "false",
            ),
        )
        for place, (name, mark) in enumerate(entries)
    ]  # fmt: skip
    return element("ul", *buttons, class_="legend lines", aria_label="Highlighted line")


def _line(chart: LineChart, place: int, line: ChartLine) -> Markup:
    """Return one line and its marks; `place` is its number."""
    look, dashes, shape = line_look(place)
    look = line.look or look
    x, y = chart.x, chart.y
    across, up = WIDE / (x.high - x.low), chart.height / (y.high - y.low)
    at = [((a - x.low) * across, (y.high - b) * up) for a, b in line.points]
    parts = []
    if line.has_line and at:
        d = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in at)
        path = element(
            "path", d=d, fill="none", stroke=color(look), stroke_width=2, class_="line",
            stroke_dasharray=dashes, vector_effect="non-scaling-stroke", data_tip=line.tip,
        )  # fmt: skip
        parts.append(stretched(chart.height, path))
    if not line.has_line:
        shape += "-open"
    if line.has_marks:
        tips = line.tips or [""] * len(at)
        parts += [
            placed(
                f"{a / 10:.2f}%",
                round(b, 1),
                symbol(shape, look, class_="mark", data_tip=tip),
            )
            for (a, b), tip in zip(at, tips, strict=True)
        ]
    chosen = " on" if place == chart.chosen else ""
    return element("g", *parts, class_=f"series{chosen}", data_line=place)


def _graph(chart: GraphChart) -> tuple[Markup, Markup]:
    """Return a graph: boxes in layers, and curves with arrows between them."""
    centers: list[tuple[float, int]] = []  # across as a share, and the layer
    boxes = []
    for down, layer in enumerate(chart.layers):
        wide = 100 / len(layer)
        for at, node in enumerate(layer):
            centers.append(((at + 0.5) / len(layer), down))
            top = down * (_BOX + _GAP)
            boxes.append(
                element(
                    "rect", x=f"{wide * at + 1:.2f}%", width=f"{wide - 2:.2f}%", y=top,
                    height=_BOX, rx=6, fill=color(node.look), class_="mark box",
                    stroke_dasharray="5 4" if node.is_dashed else None, data_tip=node.tip,
                )
            )  # fmt: skip
            middle = f"{wide * (at + 0.5):.2f}%"
            for number, line in enumerate(node.lines[:2]):
                boxes.append(
                    text(
                        line, middle, top + 18 + 16 * number, "" if number else "strong",
                        text_anchor="middle", fill=f"var(--on-{node.look}, var(--ink))",
                    )
                )  # fmt: skip
    height = len(chart.layers) * (_BOX + _GAP) - _GAP
    curves = [_edge(centers[one], centers[other]) for one, other in chart.edges]
    heads = [
        placed(
            f"{100 * _shifted(centers[one], centers[other])[1]:.2f}%",
            _top(centers[other][1], from_below=centers[one][1] > centers[other][1]),
            symbol("up" if centers[one][1] > centers[other][1] else "down", "open"),
        )
        for one, other in chart.edges
    ]
    nodes = [node for layer in chart.layers for node in layer]
    drawn = image(
        stretched(height, *curves), *boxes, *heads, height=height, before=8, right=8, above=10
    )
    names = legend([(node.name, swatch(node.look)) for node in nodes])
    return names, element("div", drawn, class_="graph")


def _shifted(one: tuple[float, int], other: tuple[float, int]) -> tuple[float, float]:
    """Return where an edge begins and ends across: a bit towards the other node."""
    slope = max(-0.05, min(0.05, 0.2 * (other[0] - one[0])))
    # Two nodes may wait for each other: both edges are visible beside one another.
    aside = 0.015 if one[1] > other[1] else 0.0
    return one[0] + slope + aside, other[0] - slope + aside


def _top(layer: int, *, from_below: bool) -> int:
    """Return where the head of an arrow lies."""
    return layer * (_BOX + _GAP) + (_BOX + 5 if from_below else -5)


def _edge(one: tuple[float, int], other: tuple[float, int]) -> Markup:
    """Return the curve from a node to one of another layer."""
    is_up = one[1] > other[1]
    begin, end = (WIDE * x for x in _shifted(one, other))
    y = one[1] * (_BOX + _GAP) + (0 if is_up else _BOX)
    target = _top(other[1], from_below=is_up)
    bend = _GAP * 0.6 * (-1 if is_up else 1)
    d = (
        f"M{begin:.1f} {y}C{begin:.1f} {y + bend:.1f} {end:.1f} {target - bend:.1f} "
        f"{end:.1f} {target}"
    )
    return element(
        "path", d=d, fill="none", stroke=color("open"), stroke_width=1.5,
        vector_effect="non-scaling-stroke",
    )  # fmt: skip
