"""Test the page of a comparison: its parts add up, and its timelines move together."""

import json

import pytest
from builders import kineto_text as k
from builders.html_page import assert_sound, charts, parsed, without_scripts
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.comparison import page as pages
from fastcomm.comparison.analysis import compare
from fastcomm.comparison.metrics_documents import saved_metrics
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write


def run(*words):
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same job without and with a slow rank."""
    folder = tmp_path_factory.mktemp("runs")
    for name, straggler in (("before", None), ("after", 2)):
        job = Job.of(4, steps=2, layers=2, micro_batches=2, straggler=straggler)
        write(job, folder / name)
    return folder


@pytest.fixture(scope="module")
def path(runs):
    run("compare", runs / "before", runs / "after", "--html", runs / "page.html")
    return runs / "page.html"


@pytest.fixture(scope="module")
def found(runs):
    for name in ("before", "after"):
        run("metrics", runs / name, "--output", runs / f"saved-{name}")
    return compare(*(saved_metrics(runs / f"saved-{name}") for name in ("before", "after")))


def test_the_page_has_causes_parts_timelines_and_kernels(path):
    tree = parsed(without_scripts(path.read_text("utf-8")))
    assert_sound(tree)
    assert {"parts-chart", "kernels-chart"} <= set(charts(tree))
    ids = {each.attrs["id"] for each in tree.all(id=...)}
    assert {"timeline-before", "timeline-after", "causes-table", "values-table"} <= ids
    assert "straggler" in next(tree.all("section", id="causes")).text


def test_each_part_begins_where_the_one_before_ends(found):
    sections = {each.name: each for each in pages.page(found, ("a", "b")).sections}
    chart = sections["parts"].blocks[0].views[0].chart
    effects = [part.effect_ns for part in found.parts if part.before_ns or part.after_ns]
    at = 0.0
    for lane, effect in zip(chart.lanes, effects, strict=False):
        ((start, stop),) = lane.pieces
        after = at + effect / 1e6
        assert (start, stop) == pytest.approx((min(at, after), max(at, after)))
        at = after
    ((start, stop),) = chart.lanes[-1].pieces
    total = found.step.difference / 1e6
    assert (start, stop) == pytest.approx((min(total, 0), max(total, 0)))
    assert len(chart.lanes) == len(effects) + 1
    assert chart.least <= start <= stop <= chart.most


def test_saved_metrics_have_no_timelines(runs, found, tmp_path):
    assert found.parts
    target = tmp_path / "page.html"
    run("compare", runs / "saved-before", runs / "saved-after", "--html", target)
    tree = parsed(without_scripts(target.read_text("utf-8")))
    assert_sound(tree)
    assert "saved metrics have no events" in next(tree.all("section", id="timeline")).text


def test_equal_runs_and_runs_without_steps_have_a_page(runs, tmp_path):
    target = tmp_path / "page.html"
    run("compare", runs / "before", runs / "before", "--html", target)
    assert_sound(parsed(without_scripts(target.read_text("utf-8"))))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        k.write(tmp_path / name / "rank0.json", [k.kernel("gemm", 10, 40, device=0)])
    run("compare", tmp_path / "one", tmp_path / "two", "--html", target)
    assert "n/a" in target.read_text("utf-8")


@pytest.fixture(scope="module")
def opened(browser, path):
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    said, asked = [], []
    page.on("console", lambda line: said.append(line.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function("document.querySelectorAll('figure[data-drawn]').length === 2")
    yield page
    assert said == []
    assert asked == [path.as_uri()]


def views(page):
    """The visible times of both timelines in ms."""
    page.evaluate("new Promise(next => requestAnimationFrame(() => setTimeout(next, 60)))")
    canvases = page.locator(".rows canvas").all()
    return [
        tuple(float(each.get_attribute(f"data-{end}")) for end in ("from", "to"))
        for each in canvases
    ]


def lengths(page):
    texts = page.locator("figure.timeline script").all_text_contents()
    return [json.loads(text)["steps"][0]["length"] / 1e6 for text in texts]


def test_both_timelines_show_the_same_times(opened):
    first, second = views(opened)
    assert first == second == (0, pytest.approx(max(lengths(opened)), abs=1e-3))
    opened.locator("#timeline-after .in").click()
    first, second = views(opened)
    assert first == second
    assert first[1] - first[0] < 0.6 * max(lengths(opened))
    opened.locator("#timeline-before .all").click()
    first, second = views(opened)
    assert first == second == (0, pytest.approx(max(lengths(opened)), abs=1e-3))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(opened, scheme):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    opened.emulate_media(color_scheme=scheme)
    found = axe.Axe().run(opened)
    opened.emulate_media(color_scheme="light")
    assert [each["id"] for each in found.response["violations"]] == []


def test_a_narrow_screen_needs_no_horizontal_scrolling(opened):
    opened.set_viewport_size({"width": 390, "height": 800})
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    opened.set_viewport_size({"width": 1280, "height": 900})
