"""Take the screenshots of docs/report.md: the reports of the demo run and of 4096 ranks.

This needs Chromium (the distribution's package `chromium`). Run this file to update all.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))

from builders import html_page

from fastcomm.critical_path.analysis import critical_path
from fastcomm.metrics.computation import compute
from fastcomm.metrics.partial import Partial, merge
from fastcomm.options import ReadOptions
from fastcomm.preparation import open_traces
from fastcomm.report import page
from fastcomm.show import pages
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.timeline.timeline import find_timeline

_LINK = 50e9
_WIDTH = 1240


def update_files() -> None:
    """Write all screenshots."""
    (DOCS / "pictures").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        demo, big = _pages(folder)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        _head(browser, demo, 1160)
        _section(browser, big, "#ranks", "report-4096")
        _timeline(browser, demo)
        browser.close()


def _pages(folder: Path) -> tuple[Path, Path]:
    """Write the reports of the demo run and of a run of 4096 ranks."""
    write(Job.of(ranks=8), folder / "demo")
    run = open_traces((folder / "demo",), ReadOptions())
    parts = [Partial.of(run.read(rank)) for rank in run.ranks]
    path = critical_path(run)
    metrics = compute(merge(parts), byte_kind="payload", link=_LINK)
    timeline = find_timeline(run, metrics, critical=path)
    demo = page.report_page(metrics, ["demo"], critical=path, timeline=timeline)
    write(Job.of(ranks=8, straggler=None), folder / "even")
    run = open_traces((folder / "even",), ReadOptions())
    parts = [Partial.of(run.read(rank)) for rank in run.ranks]
    many = compute(html_page.many_ranks(parts, 512), byte_kind="payload", link=_LINK)
    pages.write(demo, folder / "demo.html")
    pages.write(page.report_page(many, ["traces/"]), folder / "big.html")
    return folder / "demo.html", folder / "big.html"


def _head(browser: Browser, path: Path, height: int) -> None:
    """Write a screenshot of the top of the page."""
    page = browser.new_page(viewport={"width": _WIDTH, "height": height})
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    page.screenshot(path=DOCS / "pictures" / "report-demo.png")


def _timeline(browser: Browser, path: Path) -> None:
    """Write a screenshot of the moment that the first finding links to."""
    page = browser.new_page(viewport={"width": _WIDTH, "height": 1000})
    page.goto(path.as_uri())
    page.wait_for_selector("figure.timeline[data-drawn]", state="attached")
    page.locator("a.show").first.click()
    page.wait_for_timeout(1000)
    page.locator("figure.timeline").screenshot(path=DOCS / "pictures" / "report-timeline.png")


def _section(browser: Browser, path: Path, selector: str, name: str) -> None:
    """Write a screenshot of one section of the page."""
    page = browser.new_page(viewport={"width": _WIDTH, "height": 1400})
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    page.locator(selector).screenshot(path=DOCS / "pictures" / f"{name}.png")


if __name__ == "__main__":
    update_files()
