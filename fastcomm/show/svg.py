"""Parts of inline SVG: elements, texts, marks, legends, and the patterns of looks.

Positions across are percents, so that a chart is as wide as its place and texts keep their
size; `path` elements, which have no percents, are in a nested image of 1000 units. Colors are
properties of the style sheet. Every text is escaped by `element`.
"""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from fastcomm.errors import inert
from fastcomm.trace.parallelisms import LOOKS

_CHARACTER, _CAPITAL = 7.4, 2.2  # pixels of a character, and how much wider a capital is
WIDE = 1000
PATTERNS = {
    **{tag: look.pattern for tag, look in LOOKS.items()},
    "mixed": "M0 4h8M4 0v8",
    "memcpy": "M0 2h8M0 6h8",
    "graph": "M4 0v8",
    "host": "M0 0L8 8",
}
_SHAPES = {
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "square": "M-4-4h8v8h-8z",
    "diamond": "M0-5.5L5.5 0L0 5.5L-5.5 0z",
    "up": "M0-5L5 4H-5z",
    "down": "M0 5L5-4H-5z",
    "cross": "M-1.5-5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
    "bar": "M-1.2-9h2.4v18h-2.4z",
}


def style_of_looks() -> str:
    """Return the style of parallelisms: their colors by theme, and swatches of legends."""
    light = "".join(_colors(tag, look.light) for tag, look in LOOKS.items())
    dark = "".join(_colors(tag, look.dark) for tag, look in LOOKS.items())
    swatches = "".join(
        f'.swatch[data-look="{tag}"] '
        f"{{ --look: {color(tag)}; background-image: {look.hatch}; }}\n"
        for tag, look in LOOKS.items()
    )
    screen = "@media screen and (prefers-color-scheme: dark)"
    return f":root {{{light} }}\n{screen} {{ :root:not([data-paper]) {{{dark} }} }}\n{swatches}"


def _colors(look: str, colors: tuple[str, str]) -> str:
    """Return the properties of a color, and of the text on it."""
    return f" --c-{look}: {colors[0]}; --on-{look}: {colors[1]};"


def patterns() -> Markup:
    """Return the patterns of all looks, which charts of the page refer to."""
    looks = [
        element(
            "pattern",
            element("rect", width=8, height=8, fill=color(look)),
            element("path", d=lines, stroke="var(--pattern)", fill="none", stroke_width=1),
            id=f"fill-{look}", patternUnits="userSpaceOnUse", width=8, height=8,
        )
        for look, lines in PATTERNS.items()
    ]  # fmt: skip
    return element(
        "svg",
        element("defs", *looks),
        class_="patterns",
        width=0,
        height=0,
        aria_hidden="true",
    )


def element(tag: str, *content: Any, **attributes: Any) -> Markup:
    """Return an element; texts among its content and attributes are escaped.

    Attributes that are None or empty are left out; a trailing "_" of a name is dropped, others
    are "-".
    """
    head = [tag]
    for name, value in attributes.items():
        if value is None or value == "":
            continue
        text = f"{value:.6g}" if isinstance(value, float) else inert(str(value))
        head.append(f'{name.rstrip("_").replace("_", "-")}="{escape(text)}"')
    inner = "".join(
        part if isinstance(part, Markup) else str(escape(inert(str(part)))) for part in content
    )
    return Markup(f"<{' '.join(head)}>{inner}</{tag}>")


def join(parts: Sequence[Markup]) -> Markup:
    """Return elements one after another."""
    return Markup("").join(parts)


def color(look: str) -> str:
    """Return the color of a look."""
    return f"var(--c-{look})"


def fill(look: str) -> str:
    """Return the pattern of a look, or its color where it has none."""
    return f"url(#fill-{look})" if look in PATTERNS else color(look)


def percent(value: float, low: float, high: float) -> str:
    """Return the position of a value between two ends, as percent with two digits."""
    return f"{100 * (value - low) / ((high - low) or 1):.2f}%".replace(".00%", "%")


def width(texts: Sequence[str]) -> int:
    """Return about how many pixels wide the longest text is."""
    return round(
        max(
            (_CHARACTER * len(t) + _CAPITAL * sum(map(str.isupper, t)) for t in texts),
            default=0,
        )
    )


def image(
    *parts: Markup,
    height: float,
    before: int = 8,
    right: int = 24,
    below: int = 8,
    above: int = 8,
    **attributes: Any,
) -> Markup:
    """Return the image in a place with room for texts around it, in pixels."""
    drawn = element("svg", *parts, width="100%", height=height, **attributes)
    room = f"padding:{above}px {right}px {below}px {before}px"
    return element("div", drawn, class_="plot", style=room)


def text(content: str, x: Any, y: Any, class_: str = "", **more: Any) -> Markup:
    """Return a text at a position."""
    return element("text", content, x=x, y=y, class_=class_, **more)


def stretched(height: float, *parts: Markup) -> Markup:
    """Return paths of 1000 units across, as wide as the chart."""
    return element(
        "svg", *parts, width="100%", height=height, viewBox=f"0 0 {WIDE} {height:g}",
        preserveAspectRatio="none", overflow="visible",
    )  # fmt: skip


def legend(entries: Sequence[tuple[str, Markup]], class_: str = "legend") -> Markup:
    """Return a list of different names with their signs; empty without a name."""
    items = [element("li", sign, name) for name, sign in dict(entries).items() if name]
    return element("ul", *items, class_=class_, aria_label="Legend") if items else Markup("")


def swatch(look: str) -> Markup:
    """Return a square in the color and pattern of a look."""
    square = element("rect", width=14, height=14, rx=2, fill=fill(look), stroke="var(--line)")
    return element("svg", square, width=14, height=14, aria_hidden="true")


def sign(shape: str, look: str, dashes: str | None = None) -> Markup:
    """Return a mark of a legend, with a piece of its line unless `dashes` is None."""
    parts = [symbol(shape, look, transform="translate(14 7)")] if shape else []
    if dashes is not None:
        line = element(
            "path", d="M0 7h28", stroke=color(look), stroke_width=2, stroke_dasharray=dashes
        )
        parts.insert(0, line)
    return element("svg", *parts, width=28, height=14, aria_hidden="true")


def symbol(symbol: str, look: str, **more: Any) -> Markup:
    """Return a mark; a name that ends with "-open" is hollow."""
    shape, _, is_open = symbol.partition("-")
    fill = "var(--ground)" if is_open else color(look)
    return element(
        "path", d=_SHAPES[shape], fill=fill, stroke=color(look), stroke_width=1.5, **more
    )


def placed(x: str, y: float | str, mark: Markup) -> Markup:
    """Return a mark at a position across in percent."""
    return element("svg", mark, x=x, y=y, overflow="visible", width=1, height=1)
