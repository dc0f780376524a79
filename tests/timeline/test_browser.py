"""Test the timeline of a page in a headless Chromium."""

import gzip
import json

import pytest

import fastcomm
from fastcomm.errors import inert
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=2>\u202e'\"`${7}"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The report of eight ranks, whose longest kernels have a hostile name."""
    folder = tmp_path_factory.mktemp("job")
    write(Job.of(ranks=8, steps=4, layers=2, micro_batches=2), folder)
    first = folder / "rank0.pt.trace.json.gz"
    document = json.loads(gzip.decompress(first.read_bytes()))
    kernels = [event for event in document["traceEvents"] if event.get("cat") == "kernel"]
    longest = max(
        (each for each in kernels if "nccl" not in each["name"]), key=lambda e: e["dur"]
    )
    longest["name"] = HOSTILE
    first.write_bytes(gzip.compress(json.dumps(document).encode()))
    target = tmp_path_factory.mktemp("page") / "report.html"
    fastcomm.open(folder).report(target, no_data=True)
    return target


@pytest.fixture(scope="module")
def opened(browser, path):
    """The page, with what its console said and what it asked for."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.said, page.asked = [], []
    page.on("console", lambda line: page.said.append(line.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    page.wait_for_selector("figure.timeline[data-drawn]", state="attached")
    yield page
    assert page.said == []


@pytest.fixture
def page(opened):
    """The page, with the whole first step in view and nothing selected."""
    opened.locator(".timeline .views label").first.click()
    opened.locator(".rows canvas").focus()
    for key in ("Escape", "Home"):
        opened.keyboard.press(key)
    settle(opened)
    return opened


def settle(page):
    """Wait until what was asked for is drawn and summed up."""
    page.evaluate("new Promise(next => requestAnimationFrame(() => setTimeout(next, 220)))")


def view(page):
    """The visible times in ms, and the number of the step."""
    canvas = page.locator(".rows canvas")
    return tuple(float(canvas.get_attribute(f"data-{name}")) for name in ("from", "to", "step"))


def now(page):
    return page.locator(".timeline .now").text_content()


def pixels(page):
    """The colors of every tenth pixel of the canvas."""
    return page.locator(".rows canvas").evaluate(
        """canvas => {
          const copy = new OffscreenCanvas(canvas.width, canvas.height);
          const pen = copy.getContext("2d", { willReadFrequently: true });
          pen.drawImage(canvas, 0, 0);
          const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
          return [...new Uint32Array(data.buffer)].filter((_, place) => place % 10 === 0);
        }"""
    )


def spot(page, rank, lane, at):
    """The place on the screen of a time in ms on a rank's lane (0 or 1)."""
    box = page.locator(".rows canvas").bounding_box()
    begin, end, _ = view(page)
    x = box["x"] + 66 + (at - begin) / (end - begin) * (box["width"] - 66)
    return x, box["y"] + 22 + rank * 40 + 4 + 16 * lane + 8


def events(page):
    """The events of the first step, decoded by the page's own data."""
    from oracles.timeline import unpacked

    text = page.locator("#spec-timeline-figure").text_content()
    data = json.loads(text)
    return data, unpacked(data["steps"][0]["events"]), unpacked(data["steps"][0]["instances"])


def test_the_timeline_is_the_first_section_and_is_drawn(page, path):
    sections = page.locator("main > section").evaluate_all("all => all.map(each => each.id)")
    assert sections[:2] == ["findings", "timeline"]
    assert [url for url in page.asked if not url.startswith("data:")] == [path.as_uri()]
    assert len(set(pixels(page))) > 5
    begin, end, _ = view(page)
    assert begin == 0
    assert end == pytest.approx(events(page)[0]["steps"][0]["length"] / 1e6)


def test_the_policy_names_every_script(page):
    policy = page.locator("meta[http-equiv]").get_attribute("content")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.count("sha256-") == 2
    assert page.locator("script:not([type])").count() == 2


def test_the_wheel_zooms_to_the_pointer_and_dragging_moves(page):
    whole = view(page)
    middle = (whole[0] + whole[1]) / 4
    page.mouse.move(*spot(page, 3, 0, middle))
    page.wait_for_timeout(300)
    for _ in range(4):
        page.mouse.wheel(0, -250)
        settle(page)
    begin, end, _ = view(page)
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 16, rel=0.05)
    assert begin < middle < end
    x, y = spot(page, 3, 0, middle)
    page.mouse.down()
    page.mouse.move(x + 200, y, steps=4)
    page.mouse.up()
    settle(page)
    moved = view(page)
    assert moved[0] < begin
    assert moved[1] - moved[0] == pytest.approx(end - begin)


def test_a_wheel_at_the_whole_step_scrolls_the_page(page):
    page.mouse.move(*spot(page, 3, 0, view(page)[1] / 2))
    page.wait_for_timeout(300)
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, 120)
    page.wait_for_function("before => scrollY > before", arg=before)


def test_a_drag_with_shift_selects_and_sums_up(page):
    _, end, _ = view(page)
    x, y = spot(page, 0, 0, end / 4)
    page.keyboard.down("Shift")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(*spot(page, 2, 0, end / 2), steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    settle(page)
    said = page.locator(".timeline .sum").text_content()
    assert said.startswith("Selection: ")
    assert float(said.split()[1].split("\u202f")[0]) == pytest.approx(end / 4, rel=0.02)
    _, columns, _ = events(page)
    inside = sum(
        start < end / 2 * 1e6 and start + duration > end / 4 * 1e6
        for start, duration in zip(columns["start"], columns["duration"], strict=True)
    )
    page.locator(".timeline summary").click()
    table = page.locator("table.kinds tbody tr")
    counts = [
        int(text.replace(",", ""))
        for text in table.locator("td:nth-child(2)").all_text_contents()
        if text
    ]
    assert sum(counts) == pytest.approx(inside, abs=8)
    assert table.locator("th").last.text_content() == "nothing runs"
    assert page.locator("table.longest tbody tr").count() == 20
    page.locator(".timeline summary").click()
    page.locator(".rows canvas").focus()
    page.keyboard.press("Escape")
    settle(page)
    assert page.locator(".timeline .sum").text_content().startswith("View: ")


def longest_wait(page):
    """The row of the collective event that waits the longest, of two lanes or more apart."""
    data, columns, instances = events(page)
    return (
        data,
        columns,
        instances,
        max(range(len(columns["wait"])), key=columns["wait"].__getitem__),
    )


def test_a_click_on_a_collective_marks_its_ranks_and_the_last(page):
    _, columns, instances, row = longest_wait(page)
    at = (columns["start"][row] + columns["duration"][row] / 2) / 1e6
    before = page.locator(".rows canvas").screenshot()
    page.mouse.move(*spot(page, columns["rank"][row], 1, at))
    page.wait_for_selector(".timeline .tip:not([hidden])")
    assert f"rank {columns['rank'][row]}" in page.locator(".timeline .tip").text_content()
    page.mouse.click(*spot(page, columns["rank"][row], 1, at))
    settle(page)
    instance = columns["instance"][row]
    count = instances["members"][instance]
    assert f"{count} ranks, the last is rank {instances['last_rank'][instance]}" in now(page)
    assert f"{count} of {count} are marked, together they wait" in now(page)
    assert page.locator(".rows canvas").screenshot() != before


def test_show_opens_the_moment_of_a_finding(page):
    link = page.locator(".findings a.show").first
    fragment = link.get_attribute("href")
    assert fragment.startswith("#t=")
    link.click()
    settle(page)
    begin, end, step = view(page)
    parts = dict(part.split("=") for part in fragment[1:].split("&"))
    assert begin < float(parts["t"]) < end
    assert end - begin == pytest.approx(float(parts["d"]), rel=0.01)
    assert step == int(parts["step"])
    assert now(page).startswith("rank 5, ")
    assert "the last is rank 5" in now(page)
    assert (
        page.evaluate("document.activeElement.parentElement.parentElement.className") == "rows"
    )
    assert page.locator(".rows canvas").bounding_box()["y"] < 500
    # The same link leads there again, and so does the link to the view.
    page.keyboard.press("Home")
    settle(page)
    assert view(page)[0] == 0
    link.click()
    settle(page)
    assert view(page) == (begin, end, step)
    page.keyboard.press("w")
    settle(page)
    own = page.locator(".timeline .link")
    zoomed, href = view(page), own.get_attribute("href")
    page.keyboard.press("Home")
    settle(page)
    page.evaluate("href => (location.hash = href)", href)
    settle(page)
    assert view(page) == pytest.approx(zoomed, rel=1e-4)


def test_every_control_works_by_keyboard_and_tab_leaves_the_canvas(page):
    whole = view(page)
    page.keyboard.press("w")
    settle(page)
    zoomed = view(page)
    assert zoomed[1] - zoomed[0] == pytest.approx(0.7 * whole[1])
    page.keyboard.press("ArrowRight")
    settle(page)
    assert view(page)[0] > zoomed[0]
    page.keyboard.press("a")
    page.keyboard.press("s")
    settle(page)
    assert view(page)[1] - view(page)[0] == pytest.approx(whole[1])
    page.keyboard.press("ArrowDown")
    first = now(page)
    assert first.startswith("rank 0, ")
    page.keyboard.press("n")
    assert now(page) != first
    page.keyboard.press("p")
    assert now(page) == first
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert "are marked" in now(page) or "rank 0" in now(page)
    page.keyboard.press("m")
    settle(page)
    assert page.locator(".timeline .sum").text_content().startswith("Selection: ")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") != "CANVAS"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.tagName") != "CANVAS"


def test_search_finds_hostile_names_as_text(page):
    search = page.locator(".timeline input[type=search]")
    search.fill("onerror=window")
    settle(page)
    assert now(page).startswith("1 event found") or now(page).startswith("0 events found")
    data = json.loads(page.locator("#spec-timeline-figure").text_content())
    assert inert(HOSTILE) in data["names"]
    for step in range(3):
        page.locator(".timeline .views label").nth(step).click()
        settle(page)
        search.fill("")
        search.fill("onerror=window")
        search.press("Enter")
        settle(page)
        if "rank 0" in now(page):
            break
    assert f"compute: {inert(HOSTILE)}" in now(page)
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 0
    search.fill("")


def test_another_step_is_drawn_with_its_critical_path(page):
    labels = page.locator(".timeline .views label").all_text_contents()
    (place,) = [k for k, label in enumerate(labels) if "critical path" in label]
    page.locator(".timeline .views label").nth(place).click()
    page.wait_for_selector(".timeline .path:not([hidden])")
    settle(page)
    before = page.locator(".rows canvas").screenshot()
    page.locator(".timeline .path input").check()
    settle(page)
    assert page.locator(".rows canvas").screenshot() != before
    page.locator(".timeline .path input").uncheck()


def test_two_fingers_zoom(browser, path):
    context = browser.new_context(
        viewport={"width": 800, "height": 900}, has_touch=True, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("figure.timeline[data-drawn]", state="attached")
    page.locator(".rows canvas").scroll_into_view_if_needed()
    whole = view(page)
    x, y = spot(page, 3, 0, whole[1] / 2)
    session = context.new_cdp_session(page)

    def touch(kind, *apart):
        points = [{"x": x - each, "y": y, "id": k} for k, each in enumerate(apart)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 30)
    touch("touchStart", 30, -30)
    for each in (45, 60, 90, 120):
        touch("touchMove", each, -each)
    touch("touchEnd")
    settle(page)
    zoomed = view(page)
    assert zoomed[1] - zoomed[0] < (whole[1] - whole[0]) / 2
    context.close()


def test_the_minimap_moves_the_view(page):
    for _ in range(4):
        page.keyboard.press("w")
    settle(page)
    before = view(page)
    box = page.locator(".timeline .map").bounding_box()
    page.mouse.click(box["x"] + 100, box["y"] + 20)
    settle(page)
    after = view(page)
    assert after[0] < before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0], rel=1e-3)


def test_dark_mode_and_paper_draw_it_anew(page):
    page.emulate_media(color_scheme="dark")
    settle(page)
    assert pixels(page)[0] == 0xFF1C1611
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme="dark")
    settle(page)
    assert pixels(page)[0] == 0xFFFFFFFF
    assert page.locator(".timeline .tools").is_hidden()
    page.emulate_media(media="screen", color_scheme="light")
    page.evaluate("dispatchEvent(new Event('afterprint'))")


def test_a_narrow_screen_needs_no_horizontal_scrolling_of_the_page(page):
    page.set_viewport_size({"width": 390, "height": 800})
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator(".rows canvas").bounding_box()["width"] <= 390
    page.set_viewport_size({"width": 1280, "height": 900})


def test_axe_finds_no_violation_on_a_page_with_a_timeline(page):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    violations = axe.Axe().run(page).response["violations"]
    assert [
        (each["id"], [node["html"][:200] for node in each["nodes"]]) for each in violations
    ] == []
