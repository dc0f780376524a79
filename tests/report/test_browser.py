"""Test HTML pages in a headless Chromium."""

import re
import time
from dataclasses import replace

import pytest
from builders.html_page import many_ranks
from builders.places import RECORDED
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.errors import inert
from fastcomm.formats.opening import open_run
from fastcomm.metrics.computation import compute
from fastcomm.metrics.partial import Partial, merge
from fastcomm.report import page
from fastcomm.show.pages import html
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=2>\u2028'\"`"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write(Job.of(ranks=8, steps=2, layers=2, micro_batches=2), folder)
    run = open_run(folder)
    return [Partial.of(run.read(rank)) for rank in run.ranks]


@pytest.fixture(scope="module")
def small(parts, tmp_path_factory):
    """The page of eight ranks, one of whose groups has a hostile name."""
    groups = parts[0].groups
    place = groups.column_names.index("description")
    odd = groups.set_column(place, "description", [[HOSTILE] * groups.num_rows])
    notes = tuple(replace(note, warnings=(HOSTILE,)) for note in parts[0].notes)
    changed = [replace(parts[0], groups=odd, notes=notes), *parts[1:]]
    found = compute(merge(changed), byte_kind="payload", link=50e9)
    path = tmp_path_factory.mktemp("page") / "small.html"
    path.write_text(html(page.report_page(found, [HOSTILE])), "utf-8")
    return path


@pytest.fixture(scope="module")
def big(parts, tmp_path_factory):
    found = compute(many_ranks(parts, 256), byte_kind="payload", link=50e9)
    path = tmp_path_factory.mktemp("page") / "big.html"
    path.write_text(html(page.report_page(found, ["2048 ranks"])), "utf-8")
    return path


class Opened:
    """A page that is open, what its console said, and what it asked for."""

    def __init__(self, browser, path):
        self.page = browser.new_page(reduced_motion="reduce")
        self.said, self.asked = [], []
        self.page.on("console", lambda line: self.said.append(line.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        start = time.perf_counter()
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached")
        self.seconds = time.perf_counter() - start

    def style(self, where, name):
        return self.page.locator(where).first.evaluate(f"each => getComputedStyle(each).{name}")


def at_rest(page, element):
    """Scroll to an element, and wait until the page knows that it was scrolled."""
    element.scroll_into_view_if_needed()
    page.evaluate("new Promise(next => requestAnimationFrame(() => setTimeout(next, 50)))")


@pytest.fixture(scope="module")
def opened(browser, small):
    return Opened(browser, small)


@pytest.fixture(scope="module")
def crowd(browser, big):
    return Opened(browser, big)


def test_the_page_opens_without_messages_or_requests(opened, small):
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith("data:")] == [small.as_uri()]
    assert opened.seconds < 15  # of a loaded machine: alone it is a second


def test_every_chart_is_drawn(opened):
    page = opened.page
    assert page.locator(".view:not([hidden]) .chart").count() >= 7
    boxes = page.locator(".view:not([hidden]) .plot > svg").evaluate_all(
        "all => all.map(each => [each.clientWidth, each.clientHeight])"
    )
    assert all(width > 300 and height > 30 for width, height in boxes)
    bars = page.locator("#breakdown .view:not([hidden]) rect.mark")
    widths = bars.evaluate_all("all => all.map(each => each.getBBox().width)")
    assert sum(widths) > 500
    assert len(widths) >= 5


def test_hostile_names_have_no_effect(opened):
    assert opened.page.evaluate("window.hit") is None
    assert opened.page.locator("img").count() == 0
    assert inert(HOSTILE) in opened.page.locator("#groups-table tbody th").all_text_contents()


def test_a_click_on_a_column_head_sorts(opened):
    table = opened.page.locator("#ranks-table")
    head = table.locator("thead button", has_text="compute").first
    head.click()
    values = [
        float(cell.get_attribute("data-sort"))
        for cell in table.locator("tbody tr td:nth-child(3)").all()
    ]
    assert values == sorted(values, reverse=True)
    assert table.locator("tbody tr th").first.text_content() == "rank 5"
    assert head.locator("..").get_attribute("aria-sort") == "descending"
    head.press("Enter")
    assert head.locator("..").get_attribute("aria-sort") == "ascending"
    assert table.locator("tbody tr th").last.text_content() == "rank 5"


def test_focus_and_hover_show_what_a_number_means(opened):
    page, tip = opened.page, opened.page.locator("#tip")
    page.locator(".facts .num[data-def='pages.exposed_wait']").focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert "Exposed waiting" in tip.text_content()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    cell = page.locator("#volume-table tbody td").first
    at_rest(page, cell)
    cell.hover()
    page.wait_for_selector("#tip:not([hidden])", timeout=10_000)
    assert "Number of events" in tip.text_content()


def test_choosing_a_view_redraws_the_chart(opened):
    page = opened.page
    page.locator("#breakdown .views label", has_text="Ranks").click()
    assert page.locator("#breakdown .view:visible .row").count() == 8
    assert page.locator("#breakdown .view:visible").count() == 1


def test_charts_are_visible_without_scripts(browser, small):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(small.as_uri())
        assert page.locator("#breakdown .view:visible svg rect.mark").count() >= 5
        box = page.locator("#heat-map .plot:visible > svg").first.bounding_box()
        assert box["width"] > 300
        assert box["height"] > 100


def test_the_arrow_keys_read_the_marks_of_a_chart(opened):
    page, spoken = opened.page, opened.page.locator("#spoken")
    page.locator("#waits-chart .chart").focus()
    page.keyboard.press("ArrowRight")
    first = spoken.text_content()
    assert first == page.locator("#tip").text_content()
    assert "rank 5" in first
    page.keyboard.press("ArrowDown")
    assert spoken.text_content() != first
    page.keyboard.press("ArrowLeft")
    assert spoken.text_content() == first
    page.keyboard.press("Tab")
    assert page.locator(".here").count() == 0
    assert page.locator("#tip").is_hidden() or first not in page.locator("#tip").text_content()


def test_hovering_a_mark_shows_its_numbers(opened):
    mark = opened.page.locator("#volume-chart rect.mark").first
    at_rest(opened.page, mark)
    mark.hover()
    opened.page.wait_for_selector("#tip:not([hidden])")
    assert opened.page.locator("#tip").text_content() == mark.get_attribute("data-tip")


def test_one_line_of_the_distributions_is_in_color(opened):
    chart = opened.page.locator("#windows-chart")
    button = chart.locator("button[aria-pressed=false]").last
    place = button.get_attribute("data-line")
    button.click()
    assert chart.locator(".series.on").evaluate_all("all => all.map(a => a.dataset.line)") == [
        place
    ]
    assert chart.locator("button[aria-pressed=true]").count() == 1


def test_dark_mode_applies_to_page_and_charts(opened):
    opened.page.emulate_media(color_scheme="dark")
    assert opened.style("body", "backgroundColor") == "rgb(17, 22, 28)"
    assert opened.style(".chart .tick", "fill") == "rgb(163, 175, 187)"


def test_the_page_prints_in_light_mode_on_few_sheets(opened):
    page = opened.page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme="dark")
    assert opened.style("body", "backgroundColor") == "rgb(255, 255, 255)"
    assert opened.style(".chart .tick", "fill") == "rgb(85, 97, 110)"
    assert page.locator("nav").is_hidden()
    sheets = re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4"))
    assert 0 < len(sheets) <= 8
    page.emulate_media(media="screen", color_scheme="light")
    page.evaluate("dispatchEvent(new Event('afterprint'))")


def test_the_page_of_a_run_without_devices_prints_on_few_sheets(browser, tmp_path):
    path = tmp_path / "page.html"
    recorded = RECORDED / "gloo_2x2"
    words = ["report", str(recorded), "--html", str(path)]
    assert CliRunner().invoke(main, words).exit_code == 0
    page = browser.new_page()
    page.goto(path.as_uri())
    assert 0 < len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4"))) <= 8


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(opened, scheme):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    opened.page.emulate_media(color_scheme=scheme)
    found = axe.Axe().run(opened.page)
    opened.page.emulate_media(color_scheme="light")
    assert [
        (each["id"], [node["html"][:200] for node in each["nodes"]])
        for each in found.response["violations"]
    ] == []


def test_every_definition_is_reached_by_tab_and_stays(opened):
    page = opened.page
    seen = page.evaluate(
        """() => [...document.querySelectorAll("[data-def]:not(td):not(dd)")]
          .filter(each => each.checkVisibility({ visibilityProperty: true }))
          .map(each => each.dataset.def)"""
    )
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.locator(".skip").focus()
    shown = []
    for _ in range(400):
        page.keyboard.press("Tab")
        key, tip, is_end = page.evaluate(
            """() => new Promise(next => requestAnimationFrame(() => setTimeout(next, 2)))
              .then(() => [document.activeElement.dataset.def,
                           document.getElementById("tip").hidden,
                           document.activeElement === document.body])"""
        )
        if is_end:
            break
        if key:
            assert not tip, key
            shown.append(key)
    assert sorted(shown) == sorted(seen)


def test_a_narrow_screen_needs_no_horizontal_scrolling(opened):
    opened.page.set_viewport_size({"width": 390, "height": 800})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.said == []


def test_the_page_of_thousands_of_ranks_opens_fast(crowd, big):
    assert crowd.said == []
    assert big.stat().st_size < 8_000_000
    assert crowd.seconds < 15


def test_the_slider_selects_ranks(crowd):
    slider = crowd.page.locator("#quantiles input")
    output = crowd.page.locator("#quantiles output")
    slider.fill("100")
    assert output.text_content() in ("100 % rank 1234", "100 % rank 2047")
    slider.press("ArrowLeft")
    assert output.text_content().startswith("99 %")


def test_a_heat_map_of_many_ranks_tells_the_value_of_a_pixel(crowd):
    image = crowd.page.locator("#heat-map .view:not([hidden]) image")
    at_rest(crowd.page, image)
    image.hover(position={"x": 5, "y": 2})
    crowd.page.wait_for_selector("#tip:not([hidden])")
    said = crowd.page.locator("#tip").text_content()
    assert re.fullmatch(r"rank 0\u20132\d, iteration \d+, compute: about [\d.]+ ms", said)


def test_words_filter_the_rows(crowd):
    table = crowd.page.locator("#ranks-table")
    table.locator("input").fill("rank 1234")
    assert table.locator("tbody tr:visible th").all_text_contents() == ["rank 1234"]
    assert table.locator("output").text_content() == "1 of 48 rows"
