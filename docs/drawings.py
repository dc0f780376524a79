"""Draw the figures of docs/metrics as SVG: rows of bars over a time axis from 0 to 100.

Text is kept as SVG text. The background follows the system's light or dark mode, and every bar
has a label or a hatch, so that figures can be read without color. Run this file to write all
figures to docs/pictures.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"

_LEFT, _SCALE, _RIGHT = 118, 5.9, 16
_ROW, _BAR, _TOP = 34, 24, 14
_WIDTH = _LEFT + 100 * _SCALE + _RIGHT
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1b1f24; }
.clear { paint-order: stroke; stroke: #ffffff; stroke-width: 5px; }
.ground { fill: #ffffff; stroke: #c9ced6; }
.compute { fill: #bcd6f2; } .tp { fill: #f7cf9e; } .dp { fill: #bfe3b4; } .pp { fill: #dccbf0; }
.copy { fill: #d9dce1; } .mixed { fill: #f3d1d1; } .moved { fill: #f7cf9e; }
.idle { fill: none; stroke-dasharray: 3 3; }
.wait { fill: url(#hatch); }
.bar { stroke: #4a5260; } .line { stroke: #4a5260; fill: none; }
.cut { stroke: #8b93a0; stroke-dasharray: 2 4; }
@media (prefers-color-scheme: dark) {
  text { fill: #eceff3; }
  .clear { stroke: #16191d; }
  .ground { fill: #16191d; stroke: #414955; }
  .compute { fill: #24486e; } .tp { fill: #74480f; } .dp { fill: #2b5a22; }
  .pp { fill: #513a72; }
  .copy { fill: #454b55; } .mixed { fill: #6e2f2f; } .moved { fill: #74480f; }
  .bar { stroke: #aab3c0; } .line { stroke: #aab3c0; } .cut { stroke: #6d7683; }
}
"""
_HATCH = (
    '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="line" d="M0 0V7"/></pattern>'
)


class Drawing:
    """A figure built from top to bottom: `row` begins a row, the other methods draw in it."""

    def __init__(self, title: str, description: str) -> None:
        self._title = title
        self._description = description
        self._guides: list[str] = []
        self._marks: list[str] = []
        self._rows = 0

    def row(self, label: str) -> None:
        """Begin a row with a label on the left."""
        self._rows += 1
        self._marks.append(_text(12, self._y + 17, label))

    def bar(self, kind: str, start: float, stop: float, label: str = "") -> None:
        """Draw a labeled bar of a CSS class in the current row."""
        box = f'x="{_x(start):.1f}" y="{self._y}" width="{_x(stop) - _x(start):.1f}"'
        self._marks.append(f'<rect class="bar {kind}" {box} height="{_BAR}" rx="2"/>')
        self.label(start, stop, label, is_outlined=kind == "wait")

    def span(self, start: float, stop: float, label: str) -> None:
        """Draw a dimension line in the current row, with its label below."""
        left, right, middle = _x(start), _x(stop), self._y + 5
        shape = f"M{left:.1f} {middle - 4}v8M{left:.1f} {middle}H{right:.1f}m0 -4v8"
        self._marks.append(f'<path class="line" d="{shape}"/>')
        self.label(start, stop, label, shift=4)

    def label(
        self,
        start: float,
        stop: float,
        text: str,
        *,
        shift: int = 0,
        is_outlined: bool = False,
    ) -> None:
        """Center text between two times in the current row, shifted down by some pixels."""
        middle, baseline = (_x(start) + _x(stop)) / 2, self._y + 17 + shift
        kind = "clear" if is_outlined else ""
        self._marks.append(_text(middle, baseline, text, "middle", kind))

    def guide(self, time: float, rows: int) -> None:
        """Draw a dashed vertical line through the last rows."""
        top = self._y - (rows - 1) * _ROW
        shape = f"M{_x(time):.1f} {top - 4}V{self._y + _BAR + 4}"
        self._guides.append(f'<path class="cut" d="{shape}"/>')

    def svg(self) -> str:
        """Return the SVG file."""
        height = _TOP + self._rows * _ROW + 4
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height}" '
            f'width="{_WIDTH:.0f}" height="{height}" role="img" aria-labelledby="title says">'
        )
        texts = f'<title id="title">{escape(self._title)}</title>'
        texts += f'<desc id="says">{escape(self._description)}</desc>'
        background = f'<rect class="ground" x=".5" y=".5" width="{_WIDTH - 1:.0f}" '
        background += f'height="{height - 1}" rx="6"/>'
        parts = [
            head,
            texts,
            f"<style>\n{_STYLE}</style>",
            f"<defs>{_HATCH}</defs>",
            background,
        ]
        return "\n".join([*parts, *self._guides, *self._marks, "</svg>\n"])

    @property
    def _y(self) -> int:
        """Top of the current row, in pixels."""
        return _TOP + (self._rows - 1) * _ROW


def _x(time: float) -> float:
    return _LEFT + time * _SCALE


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    attributes = f'class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}"'
    return f"<text {attributes}>{escape(text)}</text>"


def iterations() -> Drawing:
    """Draw steps on the host's clock and on the device's clock."""
    drawing = Drawing(
        "An iteration on two clocks",
        "The host's marks begin before the GPU's work of the same step; both last as long.",
    )
    drawing.row("host's marks")
    for number, start, stop in ((10, 2, 40), (11, 40, 73), (12, 73, 98)):
        drawing.bar("copy", start, stop, f"ProfilerStep#{number}")
    drawing.row("GPU")
    drawing.bar("compute", 14, 53, "work of step 10")
    drawing.bar("compute", 53, 86, "work of step 11")
    drawing.row("time of 10")
    drawing.span(2, 40, "clock of the host")
    drawing.row("time of 10")
    drawing.span(14, 53, "clock of the device")
    return drawing


def breakdown() -> Drawing:
    """Draw the exact partition below the events that it divides."""
    drawing = Drawing(
        "The exact partition of an iteration",
        "Compute takes the time in which it runs; of the rest communication of one tag, of "
        "several, copies, and idle time each take theirs.",
    )
    drawing.row("compute")
    drawing.bar("compute", 6, 32, "kernels")
    drawing.bar("compute", 56, 74, "kernels")
    drawing.row("TP")
    drawing.bar("tp", 24, 48, "all-gather")
    drawing.row("DP")
    drawing.bar("dp", 40, 66, "reduce-scatter")
    drawing.row("copies")
    drawing.bar("copy", 70, 84, "memcpy")
    drawing.row("exact")
    parts = (
        *(("idle", 0, 6, "idle"), ("compute", 6, 32, "compute"), ("tp", 32, 40, "TP")),
        *(("mixed", 40, 48, "mixed"), ("dp", 48, 56, "DP"), ("compute", 56, 74, "compute")),
        *(("copy", 74, 84, "memcpy"), ("idle", 84, 100, "idle")),
    )
    for part in parts:
        drawing.bar(*part)
    for time in (6, 32, 40, 48, 56, 74, 84):
        drawing.guide(time, 5)
    return drawing


def windows() -> Drawing:
    """Draw events, phases, and a positive and a negative window."""
    drawing = Drawing(
        "Phases and windows",
        "Two TP events are one phase. From its end to the begin of PP is a window above zero; "
        "DP begins before PP ends, a window below zero.",
    )
    drawing.row("stream 7")
    drawing.bar("tp", 4, 16, "TP")
    drawing.bar("tp", 20, 34, "TP")
    drawing.bar("pp", 50, 66, "PP")
    drawing.row("stream 21")
    drawing.bar("dp", 58, 92, "DP")
    drawing.row("phases")
    drawing.span(4, 34, "TP")
    drawing.span(58, 92, "DP")
    drawing.row("")
    drawing.span(50, 66, "PP")
    drawing.row("windows")
    drawing.span(34, 50, "TP to PP > 0")
    drawing.span(58, 66, "PP to DP < 0")
    for time in (34, 50, 58, 66):
        drawing.guide(time, 5)
    return drawing


def bandwidth() -> Drawing:
    """Draw an event whose duration includes waiting for another rank."""
    drawing = Drawing(
        "Why a low bandwidth is a slow link or a late rank",
        "Rank 0 starts its all-reduce early and waits for rank 1. Its duration is the wait and "
        "the transfer; bandwidth divides by both.",
    )
    drawing.row("rank 0")
    drawing.bar("wait", 6, 46, "waits for rank 1")
    drawing.bar("moved", 46, 92, "all-reduce: bytes move")
    drawing.row("rank 1")
    drawing.bar("compute", 6, 46, "still computes")
    drawing.bar("moved", 46, 92, "all-reduce")
    drawing.row("of rank 0")
    drawing.span(6, 92, "duration: what bw divides by")
    drawing.row("of the link")
    drawing.span(46, 92, "transfer: what links are judged by")
    return drawing


def volume() -> Drawing:
    """Draw the message, payload and bus bytes of an all-gather."""
    drawing = Drawing(
        "msg, payload and bus bytes of an all-gather of four ranks",
        "msg is the block that a rank gives, payload all four blocks, bus the three that come "
        "over its link.",
    )
    drawing.row("msg")
    drawing.bar("moved", 0, 18, "own")
    drawing.row("payload")
    for number, label in enumerate(("own", "rank 1", "rank 2", "rank 3")):
        drawing.bar("moved", number * 20, number * 20 + 18, label)
    drawing.row("bus")
    drawing.bar("idle", 0, 18, "stays")
    for number in (1, 2, 3):
        drawing.bar("moved", number * 20, number * 20 + 18, f"rank {number}")
    return drawing


def overlap() -> Drawing:
    """Draw the overlap ratio of communication and compute."""
    drawing = Drawing(
        "The overlap ratio",
        "Communication covers 60 units of time, compute runs during 35 of these: 58 percent.",
    )
    drawing.row("communication")
    drawing.bar("tp", 10, 35, "25")
    drawing.bar("tp", 45, 80, "35")
    drawing.row("compute")
    for start, stop in ((0, 20), (30, 55), (70, 95)):
        drawing.bar("compute", start, stop)
    drawing.row("both")
    for start, stop in ((10, 20), (30, 35), (45, 55), (70, 80)):
        drawing.bar("mixed", start, stop, str(stop - start))
    drawing.row("ratio")
    drawing.label(0, 90, "(10 + 5 + 10 + 10) / (25 + 35) = 58 %")
    return drawing


def ranks() -> Drawing:
    """Draw the arrivals of three ranks at a collective."""
    drawing = Drawing(
        "Arrivals at a collective",
        "Ranks arrive one after the other and wait for the last; from there on bytes move.",
    )
    arrivals = (8, 34, 62)
    for rank, arrival in enumerate(arrivals):
        drawing.row(f"rank {rank}")
        if arrival < arrivals[-1]:
            drawing.bar("wait", arrival, arrivals[-1], "waits")
        drawing.bar("moved", arrivals[-1], 94, "transfer")
    drawing.row("skew")
    drawing.span(8, 62, "from the first arrival to the last")
    drawing.row("wait caused")
    drawing.span(34, 62, "by rank 2, alone")
    for time in (8, 34, 62):
        drawing.guide(time, 5)
    return drawing


DRAWINGS: tuple[Callable[[], Drawing], ...] = (
    *(iterations, breakdown, windows, bandwidth, volume, overlap, ranks),
)


def write_all() -> None:
    """Write every drawing to docs/pictures."""
    for draw in DRAWINGS:
        (FOLDER / f"metric-{draw.__name__}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    write_all()
