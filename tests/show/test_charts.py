"""Test charts of pages: axes, colors, texts in marks, numbers."""

import json
import re
from pathlib import Path

import pytest
from builders.html_page import (
    HOSTILE,
    ODD,
    parsed,
    tips,
)

from fastcomm.errors import inert
from fastcomm.show import pages
from fastcomm.show.charts import (
    Axis,
    BarChart,
    GraphChart,
    GraphNode,
    HeatChart,
    LaneChart,
    LineChart,
    Part,
    linear,
    tick,
)
from fastcomm.show.draw import draw
from fastcomm.show.pages import json_text
from fastcomm.show.svg import style_of_looks, width
from fastcomm.trace.parallelisms import TAGS


def test_embedded_json_cannot_end_its_script():
    text = str(json_text({"name": HOSTILE}))
    assert text.isascii()
    assert not set("<>&'") & set(text)
    assert json.loads(text) == {"name": HOSTILE}


def test_texts_of_a_chart_are_escaped():
    part = Part(name=HOSTILE, look="TP", values=[1.0, 2.0], tips=[HOSTILE, ODD])
    chart = BarChart(rows=[HOSTILE, "b"], parts=[part], title=HOSTILE)
    tree = parsed(str(draw(chart, HOSTILE)))
    assert not list(tree.all("script"))
    assert not list(tree.all("img"))
    assert tips(tree) == [inert(HOSTILE), inert(ODD)]
    assert next(tree.all("li")).text == inert(HOSTILE)


def test_colors_of_a_heat_map_do_not_show_noise_as_difference():
    noise = HeatChart(grid=[[10.0, 10.01]], rows=["a"], columns=["b", "c"], unit="", tip="")
    assert noise.ends == pytest.approx((9.76, 10.26), abs=0.01)
    wide = HeatChart(
        grid=[[10.0, 20.0, None]], rows=["a"], columns=list("bcd"), unit="", tip=""
    )
    assert wide.ends == (10.0, 20.5)
    assert HeatChart(grid=[[None]], rows=["a"], columns=["b"], unit="", tip="").ends == (0, 1)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([3.0, 9.7], ["0", "2", "4", "6", "8", "10"]),
        ([0.0], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([-250.0, 1200.0], ["\u2212500", "0", "500", "1\u202f000", "1\u202f500"]),
    ],
)
def test_axes_have_round_ticks_that_span_the_values(values, ticks):
    axis = linear("", values)
    assert [label for _, label in axis.ticks] == ticks
    assert axis.low <= min(values) <= max(values) <= axis.high


def test_numbers_are_formatted_for_readers():
    thin = "\u202f"
    assert pages.ns(9_551_234) == f"9.55{thin}ms"
    assert pages.ns(-676_400) == f"\u2212676{thin}µs"
    assert pages.ns(12) == f"12{thin}ns"
    assert tick(pages.ns(10_000)) == f"10{thin}µs"
    assert pages.percent(-0.0171) == f"\u22121.7{thin}%"
    assert pages.signed_percent(-0.0001) == f"0.0{thin}%"
    assert pages.count(12288) == f"12{thin}288"
    assert pages.fact("kernels.ranks", None, pages.count, why="nobody said").text == "n/a"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_labels_in_marks_have_enough_contrast(theme):
    style = (Path(pages.__file__).parent / "templates" / "style.css").read_text()
    blocks = re.findall(r":root([^{]*)\{(.*?)\}", style + style_of_looks(), re.S)
    text = " ".join(block for rule, block in blocks if ("paper" in rule) == (theme == "dark"))
    names = dict(re.findall(r"--([\w-]+): (#\w+)", text))
    looks = [name.removeprefix("on-") for name in names if name.startswith("on-")]
    assert len(looks) > 8
    assert set(TAGS) < set(looks)
    for look in looks:
        assert contrast(names[f"on-{look}"], names[f"c-{look}"]) >= 4.5, look
    for name in ("ink", "muted", "accent"):
        assert contrast(names[name], names["ground"]) >= 4.5, name


def contrast(*colors):
    """The contrast of two colors, as WCAG 2 defines it."""
    levels = []
    for color in colors:
        full = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
        parts = [int(full[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        levels.append(sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(levels) + 0.05) / (min(levels) + 0.05)


ROWS = ["a", "RANK 1000 of node 1000"]


@pytest.mark.parametrize(
    "chart",
    [
        HeatChart(grid=[[1.0], [2.0]], rows=ROWS, columns=["b"], unit="", tip=""),
        BarChart(rows=ROWS, title="", parts=[Part(name="", look="TP", values=[1.0, 2.0])]),
        LaneChart(rows=ROWS, title="", lanes=[], most=1.0),
        LineChart(
            lines=[],
            x=linear("", [1.0]),
            y=Axis(title="", low=0, high=1, ticks=[*enumerate(ROWS)]),
        ),
    ],
    ids=["heat", "bars", "lanes", "lines"],
)
def test_labels_fit_into_the_room_before_a_chart(chart):
    tree = parsed(str(draw(chart, "")))
    (plot,) = tree.all("div", class_="plot")
    before = int(plot.attrs["style"].removesuffix("px").rpartition(" ")[2])
    labels = list(tree.all("text", x="-8"))
    assert [label.text for label in labels] == ROWS
    assert before >= 8 + width(ROWS)


def test_texts_in_nodes_and_bars_have_the_color_for_their_look():
    node = GraphNode(lines=["a", "b"], name="", look="TP", tip="")
    tree = parsed(str(draw(GraphChart(layers=[[node]], edges=[]), "")))
    assert [one.attrs["fill"] for one in tree.all("text")] == ["var(--on-TP, var(--ink))"] * 2
    parts = [Part(name="", look=look, values=[1.0], labels=["a"]) for look in ("TP", "DP")]
    tree = parsed(str(draw(BarChart(rows=["x"], parts=parts, title=""), "")))
    inside = [one.attrs["fill"] for one in tree.all("g", class_="inside")]
    assert inside == ["var(--on-TP)", "var(--on-DP)"]


def test_bars_below_zero_are_drawn_to_the_left_of_it():
    part = Part(name="", look="TP", values=[1.0, -1.0], labels=["a", "b"])
    tree = parsed(str(draw(BarChart(rows=["x", "y"], parts=[part], title=""), "")))
    boxes = [(each.attrs["x"], each.attrs["width"]) for each in tree.all("rect", class_="mark")]
    assert boxes == [("50%", "50%"), ("0%", "50%")]
