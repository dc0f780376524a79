"""Test HTML pages without a browser: structure, texts and security."""

import base64
import json
import re
import shlex
import zlib
from dataclasses import replace

import click
import pytest
from builders.html_page import (
    HOSTILE,
    LINKS,
    ODD,
    SKEW,
    SLOW,
    WAITS,
    assert_sound,
    charts,
    many_ranks,
    parsed,
    without_scripts,
)
from builders.path_events import call, work
from builders.places import DOCS
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.critical_path import page as path_page
from fastcomm.errors import inert, shell_quoted
from fastcomm.formats.opening import open_run
from fastcomm.metrics import missing_data, tables, waits_page
from fastcomm.metrics import page as metrics_page
from fastcomm.metrics.computation import compute
from fastcomm.metrics.partial import Partial, merge
from fastcomm.report import page as report_page
from fastcomm.show import pages
from fastcomm.show.definitions import definition
from fastcomm.show.pages import html, used_keys
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

LINK = 50e9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("job")
    write(Job.of(ranks=8, steps=2, layers=2, micro_batches=2), made)
    return made


@pytest.fixture(scope="module")
def parts(folder):
    run = open_run(folder)
    return [Partial.of(run.read(rank)) for rank in run.ranks]


@pytest.fixture(scope="module")
def found(parts):
    return compute(merge(parts), byte_kind="payload", link=LINK)


@pytest.fixture(scope="module")
def page(found):
    return report_page.report_page(found, ["traces/"])


@pytest.fixture(scope="module")
def tree(page):
    return parsed(without_scripts(html(page)))


def of_lacking(parts, word):
    """The answer of partials whose input lacks something."""
    silent = [
        replace(
            part,
            notes=tuple(replace(note, missing=(word,)) for note in part.notes),
            iterations=missing_data.in_iterations(part.iterations, (word,)),
            events=missing_data.in_events(part.events, (word,)),
            windows=missing_data.in_windows(part.windows, (word,)),
        )
        for part in parts
    ]
    return compute(merge(silent), byte_kind="payload", link=None)


def test_the_page_has_the_headline_and_the_findings_of_the_terminal_in_their_order(found, page):
    assert pages.plain(page.headline) == found.headline
    assert [pages.plain(each.title) for each in page.findings] == [
        each.text for each in found.findings
    ]
    assert page.findings[0].command == "fastcomm critical-path traces/"
    picture = page.findings[0].picture
    assert "rank 5 has" in picture.alt
    assert [mark.name for mark in picture.chart.marks] == ["other ranks"] * 7 + ["rank 5"]
    assert len(page.facts) == 6
    lead = next(each.lead for each in page.sections if each.name == "ranks")
    assert pages.plain(lead).startswith("Rank 5 computes the most")


def test_the_next_command_of_every_finding_exists(page):
    for each in page.findings:
        program, name, *arguments = shlex.split(each.command)
        assert program == "fastcomm"
        arguments = [word.replace("traces/", str(DOCS)) for word in arguments]
        parent = click.Context(main, **main.context_settings)
        main.get_command(parent, name).make_context(name, arguments, parent)


def test_the_same_run_gives_the_same_bytes(parts):
    pages = [
        html(
            report_page.report_page(compute(merge(some), byte_kind="payload", link=LINK), ["x"])
        )
        for some in (parts, parts[::-1])
    ]
    assert pages[0] == pages[1]
    assert len(pages[0].encode()) < 8_000_000


def test_landmarks_definitions_and_charts_are_valid(tree):
    assert_sound(tree)
    assert next(tree.all("a")).attrs == {"class": "skip", "href": "#main"}
    assert len(list(tree.all(class_="num"))) > 100
    drawn = charts(tree)
    assert {"breakdown", "heat-map", "windows-chart", "sizes-chart"} <= set(drawn)
    stacked = list(drawn["breakdown"][0].all("rect"))
    widths = [float(each.attrs["width"].removesuffix("%")) for each in stacked]
    assert sum(widths) == pytest.approx(100, abs=0.1)
    exposed = [each for each in stacked if "exposed" in each.attrs["data-tip"]]
    assert all(each.attrs["fill"].startswith("url(#fill-") for each in exposed)
    patterns = {f"url(#{each.attrs['id']})" for each in tree.all("pattern")}
    filled = {each.attrs["fill"] for each in tree.all(fill=...)}
    assert {fill for fill in filled if fill.startswith("url")} <= patterns


def test_a_page_loads_no_external_resource(page, tree):
    policy = next(tree.all("meta", http_equiv="Content-Security-Policy")).attrs["content"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not list(tree.all(src=...))
    assert {each.attrs["href"] for each in tree.all("link")} == {"data:,"}
    style = next(tree.all("style")).text
    assert "@import" not in style
    assert "url(" not in style
    assert html(page).count("<script>") == 1


def test_the_heat_map_has_each_rank_and_iteration(found, tree):
    cells = charts(tree)["heat-map"][0].all("rect", class_="cell")
    rows = found.tables["iterations"].to_pylist()
    ms = {(str(r["rank"]), str(r["iteration"])): r["exact_compute_ns"] / 1e6 for r in rows}
    for cell in cells:
        words = re.fullmatch(
            r"rank (\d+), iteration (\d+), compute: (.*) ms", cell.attrs["data-tip"]
        )
        rank, number, value = words.groups()
        assert float(value) == pytest.approx(ms.pop((rank, number)), rel=1e-3)
    assert not ms


@pytest.mark.parametrize("word", ["times", "compute"])
def test_missing_data_is_na_with_the_reason(parts, word):
    page = report_page.report_page(of_lacking(parts, word), ["x"])
    why = f"the input has no {word if word == 'times' else 'compute kernels'}"
    assert why in pages.plain(page.headline)
    tree = parsed(without_scripts(html(page)))
    unknown = list(tree.all(class_="na"))
    assert unknown
    assert all(each.text.startswith("n/a (unknown: ") for each in unknown)
    assert why in next(tree.all(id="unmeasured-table")).text
    assert not list(tree.all(class_="missing"))
    assert_sound(tree)


def test_utilization_without_a_link_bandwidth_is_na_with_the_remedy(parts):
    page = report_page.report_page(compute(merge(parts), byte_kind="bus", link=None), ["x"])
    tree = parsed(without_scripts(html(page)))
    assert "--link-bandwidth" in {
        word for each in tree.all(data_why=...) for word in each.attrs["data-why"].split()
    }


def test_hostile_names_are_plain_text(parts):
    odd = [
        replace(part, groups=_renamed(part.groups), notes=_warned(part.notes)) for part in parts
    ]
    found = compute(merge(odd), byte_kind="payload", link=LINK, warnings=[ODD])
    text = html(report_page.report_page(found, [ODD]))
    assert text.count("<script>") == 1
    tree = parsed(without_scripts(text))
    assert not list(tree.all("img"))
    assert not list(tree.all(onerror=...))
    assert {inert(HOSTILE), inert(ODD)} <= {each.text for each in tree.all("li")}
    assert inert(HOSTILE) in {each.text for each in tree.all("th")}
    command = next(tree.all("div", class_="command")).children[0].text
    assert shell_quoted(ODD) in command


def _renamed(groups):
    place = groups.column_names.index("description")
    return groups.set_column(place, "description", [[HOSTILE] * groups.num_rows])


def _warned(notes):
    return tuple(replace(note, warnings=(HOSTILE,)) for note in notes)


def test_the_page_of_thousands_of_ranks_is_small(parts):
    found = compute(many_ranks(parts, 512), byte_kind="payload", link=LINK)
    page = report_page.report_page(found, ["big"])
    text = without_scripts(html(page))
    assert len(text.encode()) < 600_000
    assert "Rank 1234 computes" in text or "Rank 2047 computes" in text
    tree = parsed(text)
    table = next(tree.all("div", id="ranks-table"))
    listed = [head.text for head in table.all("th", scope="row")]
    assert {f"rank {rank}" for rank in SLOW} <= set(listed)
    assert len(listed) == 48
    image = next(charts(tree)["heat-map"][0].all("image"))
    wide, tall = map(int, image.attrs["data-heat"].split()[:2])
    assert tall == len(json.loads(image.attrs["data-rows"])) <= 96
    levels = zlib.decompress(base64.b64decode(image.attrs["data-levels"]), -15)
    assert len(levels) == wide * tall
    assert max(levels) == 249
    assert "A cell stands for 43 ranks and 1 iteration, and shows the largest" in tree.text
    steps = json.loads(next(tree.all("script", id="spec-quantiles")).text)
    assert len(steps) == 101
    assert int(steps[-1][0].removeprefix("rank ")) in SLOW


def test_the_parts_of_a_rank_add_up_to_its_step(found):
    table = tables.ranks(found.rank_means, "unknown")
    times = {column.label: column for column in table.columns if column.unit == "ns"}
    step = times.pop("iteration")
    assert [*times] == ["compute", "exposed", "copies", "idle"]
    for row in table.rows:
        assert times["copies"].cell(row).value > 0
        parts = sum(column.cell(row).value for column in times.values())
        assert parts == pytest.approx(step.cell(row).value)


def test_every_key_of_a_page_has_a_definition(page):
    assert all(definition(key).meaning for key in used_keys(page))


def test_report_writes_the_page_and_the_tables_beside_it(folder, tmp_path):
    target = tmp_path / "monday.html"
    said = CliRunner().invoke(main, ["report", str(folder), "--html", str(target)])
    assert said.exit_code == 0, said.output
    tree = parsed(without_scripts(target.read_text("utf-8")))
    files = [each.attrs["href"] for each in next(tree.all("ul", class_="files")).all("a")]
    assert "monday-data/events.parquet" in files
    assert all((tmp_path / name).is_file() for name in files)
    assert "path-strip" in charts(tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["monday-data", "monday.html"]


def test_the_strip_of_a_path_names_all_classes_that_take_time(path_of):
    events = [
        call("cudaLaunchKernel", 0, 0.001, 1),
        call("cudaLaunchKernel", 0.001, 0.001, 2),
        work("gemm", 0.001, 0.003, 1),
        work("relu", 0.004, 0.004, 2),  # without a gap
    ]
    strip = path_page.section(path_of(*events)).blocks[0]
    alt = " ".join(strip.alt.split())
    assert alt.endswith(": device: compute 87.5 %, launch delay 12.5 %.")


def test_the_comparison_of_ranks_has_a_section(found):
    """What matched collectives tell is n/a without them."""
    section = waits_page.section(replace(found, across=replace(found.across, waits=())))
    assert pages.plain(section.lead).startswith("Who waits for whom is n/a: no collective")
    seen = replace(found.across, waits=WAITS, skew=(SKEW,), links=LINKS)
    section = waits_page.section(replace(found, across=seen))
    assert pages.plain(section.lead).startswith("Rank 5 causes the most waiting in")
    page = report_page.report_page(replace(found, across=seen), ["x"])
    tree = parsed(without_scripts(html(page)))
    assert_sound(tree)
    assert {"waits-chart", "skew-chart"} <= set(charts(tree))
    assert "links-table" in {each.attrs["id"] for each in tree.all(id=...)}


def test_a_command_in_a_warning_has_its_own_line(found):
    said = replace(
        found, warnings=("no sizes: export again\n    nsys export <x>\nand read it",)
    )
    tree = parsed(without_scripts(html(report_page.report_page(said, ["x"]))))
    assert [each.text for each in tree.all("code", class_="line")] == ["nsys export <x>"]
    whole = next(tree.all("aside")).text
    assert "export again" in whole
    assert "and read it" in whole


def test_idle_time_has_a_section_by_cause_and_rank(found):
    section = metrics_page.idle_section(found, "")
    table, names = section.blocks
    heads = [column.label for column in table.columns]
    rows = [[cell.sort for cell in row[1:]] for row in table.rows]
    assert len(rows) == 1 + len(found.ranks)
    for total, *times in rows:
        assert sum(times) == pytest.approx(total)
    shares = [share for share in found.idle.values() if share]
    assert [ns / found.iteration.mean_ns for ns in rows[0][1:]] == pytest.approx(shares)
    assert "pipeline bubble" in heads
    assert len(names.rows) == len(found.idle_names)


def test_unknown_causes_of_idle_time_say_why(found):
    section = metrics_page.idle_section(
        replace(found, idle=dict.fromkeys(found.idle)), "no work"
    )
    assert pages.plain(section.lead) == "The causes of idle time are n/a: no work."
    busy = metrics_page.idle_section(replace(found, idle=dict.fromkeys(found.idle, 0.0)), "")
    assert pages.plain(busy.lead) == "No device is ever idle."
