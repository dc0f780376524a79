"""The page without a browser: its structure, its words, and what it lets nobody do."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import click
import plotly.graph_objects as go
import pytest
from click.testing import CliRunner
from html_page import SLOW, many_ranks, parsed, specs, without_scripts

import fastcomm
from fastcomm.cli import main
from fastcomm.inert import inert
from fastcomm.metrics import lacks
from fastcomm.metrics.partial import Partial, merge
from fastcomm.metrics.result import answer
from fastcomm.report.html import measured, words
from fastcomm.report.html.drawing import shown
from fastcomm.report.html.glossary import GLOSSARY
from fastcomm.report.html.page import used_keys
from fastcomm.report.html.render import html, json_text
from fastcomm.synthetic import Job, write

DOCS = Path(__file__).parents[1] / "docs"
HOSTILE = (
    "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\u2028${7}\ud800"
)
LINK = 50e9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("job")
    write(Job.of(ranks=8, steps=2, layers=2, micro_batches=2), made)
    return made


@pytest.fixture(scope="module")
def parts(folder):
    run = fastcomm.open_run(folder)
    return [Partial.of(run.read(rank)) for rank in run.ranks]


@pytest.fixture(scope="module")
def found(parts):
    return answer(merge(parts), byte_kind="payload", link=LINK)


@pytest.fixture(scope="module")
def page(found):
    return measured.page(found, ["traces/"])


@pytest.fixture(scope="module")
def tree(page):
    return parsed(without_scripts(html(page)))


def light(value):
    """A chart with colours in place of the style sheet's properties."""
    if isinstance(value, str):
        return re.sub(r"var\(--[\w-]+\)", "#123456", value)
    if isinstance(value, list):
        return [light(each) for each in value]
    if isinstance(value, dict):
        return {key: light(each) for key, each in value.items()}
    return value


def of_lacking(parts, word):
    """The answer of partials whose input lacks something."""
    silent = [
        replace(
            part,
            notes=tuple(replace(note, lacks=(word,)) for note in part.notes),
            iterations=lacks.in_iterations(part.iterations, (word,)),
            events=lacks.in_events(part.events, (word,)),
            windows=lacks.in_windows(part.windows, (word,)),
        )
        for part in parts
    ]
    return answer(merge(silent), byte_kind="payload", link=None)


@pytest.mark.compiled
def test_the_page_says_how_much_is_exposed_and_who_is_slow(found, page):
    exposed = sum(
        share for name, share in found.breakdown.exact.items() if name.startswith("exposed")
    )
    assert words.plain(page.headline).startswith(words.percent(exposed))
    assert len(page.findings) == 3
    costs = [each.cost_ns for each in page.findings]
    assert costs == sorted(costs, reverse=True)
    lead = next(each.lead for each in page.sections if each.name == "ranks")
    assert words.plain(lead).startswith("Rank 5 computes the most")


@pytest.mark.compiled
def test_the_next_command_of_every_finding_exists(page):
    for each in page.findings:
        program, name, *arguments = shlex.split(each.command)
        assert program == "fastcomm"
        arguments = [word.replace("traces/", str(DOCS)) for word in arguments]
        parent = click.Context(main, **main.context_settings)
        main.get_command(parent, name).make_context(name, arguments, parent)


@pytest.mark.compiled
def test_the_same_run_gives_the_same_bytes(parts):
    pages = [
        html(measured.page(answer(merge(some), byte_kind="payload", link=LINK), ["x"]))
        for some in (parts, parts[::-1])
    ]
    assert pages[0] == pages[1]
    assert len(pages[0].encode()) < 8_000_000


@pytest.mark.compiled
def test_landmarks_and_headings_are_there_and_links_lead_somewhere(tree):
    for tag in ("h1", "main", "nav", "header", "footer", "title"):
        assert len(list(tree.all(tag))) == 1, tag
    ids = [each.attrs["id"] for each in tree.all(id=...)]
    assert len(ids) == len(set(ids))
    assert next(tree.all("a")).attrs == {"class": "skip", "href": "#main"}
    for name in ("aria-describedby", "aria-labelledby", "for"):
        for each in tree.all(**{name: ...}):
            assert each.attrs[name] in ids, each.attrs
    for link in tree.all("a", href=...):
        assert link.attrs["href"].removeprefix("#") in ids
    for section in tree.all("section"):
        assert next(section.all("h2")).text.strip()
    for chart in tree.all("div", role="img"):
        assert chart.attrs["aria-label"]
    for head in tree.all("th", scope="col"):
        assert head.attrs["aria-sort"] == "none"


@pytest.mark.compiled
def test_nothing_comes_from_elsewhere(page, tree):
    policy = next(tree.all("meta", http_equiv="Content-Security-Policy")).attrs["content"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not list(tree.all(src=...))
    assert {each.attrs["href"] for each in tree.all("link")} == {"data:,"}
    style = next(tree.all("style")).text
    assert "@import" not in style
    assert "url(" not in style
    assert html(page).count("<script>") == 2


@pytest.mark.compiled
def test_every_number_has_its_definition(tree):
    defined = {each.attrs["id"].removeprefix("def-") for each in tree.all(id=...)}
    numbers = list(tree.all(class_="num"))
    assert len(numbers) > 100
    for number in numbers:
        key = number.attrs.get("data-def")
        if number.tag == "td":
            place = [c for c in number.parent.children if not isinstance(c, str)].index(number)
            table = number.parent.parent.parent
            key = list(table.all("th", scope="col"))[place].children[0].attrs["data-def"]
        assert key in defined, number.text
        assert key in GLOSSARY


@pytest.mark.compiled
def test_charts_are_what_plotly_takes_and_have_words_beside_them(tree):
    charts = specs(tree)
    assert {"breakdown", "heat-map", "windows-chart", "sizes-chart"} <= set(charts)
    for views in charts.values():
        for view in views:
            assert go.Figure(light(view)).data
    stacked = charts["breakdown"][0]["data"]
    assert sum(bar["x"][0] for bar in stacked) == pytest.approx(100)
    assert all(bar["marker"]["pattern"]["shape"] for bar in stacked if "exposed" in bar["name"])


@pytest.mark.compiled
def test_the_heat_map_has_each_rank_and_iteration(found, tree):
    views = specs(tree)["heat-map"]
    grid = views[0]["data"][0]
    rows = found.tables["iterations"].to_pylist()
    ms = {(str(r["rank"]), str(r["iteration"])): r["exact_compute_ns"] / 1e6 for r in rows}
    for rank, row in zip(grid["y"], grid["z"], strict=True):
        for number, value in zip(grid["x"], row, strict=True):
            assert value == pytest.approx(ms.pop((rank, number)), rel=1e-3)
    assert not ms


@pytest.mark.compiled
@pytest.mark.parametrize("word", ["times", "compute"])
def test_what_the_input_lacks_is_na_with_the_reason(parts, word):
    page = measured.page(of_lacking(parts, word), ["x"])
    why = f"the input has no {word if word == 'times' else 'compute kernels'}"
    assert why in words.plain(page.headline)
    tree = parsed(without_scripts(html(page)))
    unknown = list(tree.all(class_="na"))
    assert unknown
    assert all(each.text.startswith("n/a (unknown: ") for each in unknown)
    assert why in "".join(each.text for each in tree.all(class_="missing"))
    for views in specs(tree).values():
        assert all(go.Figure(light(view)) for view in views)


@pytest.mark.compiled
def test_without_a_link_utilisation_is_na_and_says_how_to_get_it(parts):
    page = measured.page(answer(merge(parts), byte_kind="bus", link=None), ["x"])
    tree = parsed(without_scripts(html(page)))
    assert "--link-bandwidth" in {
        word for each in tree.all(data_why=...) for word in each.attrs["data-why"].split()
    }


@pytest.mark.compiled
def test_hostile_names_are_only_text(parts):
    odd = [
        replace(part, groups=_renamed(part.groups), notes=_warned(part.notes)) for part in parts
    ]
    found = answer(merge(odd), byte_kind="payload", link=LINK, warnings=[HOSTILE])
    text = html(measured.page(found, [HOSTILE]))
    assert text.count("<script>") == 2
    tree = parsed(without_scripts(text))
    assert not list(tree.all("img"))
    assert not list(tree.all(onerror=...))
    assert inert(HOSTILE) in {each.text for each in tree.all("li")}
    assert inert(HOSTILE) in {each.text for each in tree.all("th")}
    command = next(tree.all("div", class_="command")).children[0].text
    assert inert(HOSTILE) in shlex.split(command)


def _renamed(groups):
    place = groups.column_names.index("description")
    return groups.set_column(place, "description", [[HOSTILE] * groups.num_rows])


def _warned(notes):
    return tuple(replace(note, warnings=(HOSTILE,)) for note in notes)


def test_json_cannot_end_its_script_nor_a_line():
    text = str(json_text({"name": HOSTILE}))
    assert text.isascii()
    assert not set("<>&'") & set(text)
    assert json.loads(text) == {"name": HOSTILE}


def test_text_for_a_chart_has_no_tags():
    assert shown("<b>a</b> &amp;\n b") == "&lt;b&gt;a&lt;/b&gt; &amp;amp; b"


@pytest.mark.compiled
def test_thousands_of_ranks_stay_a_small_page(parts):
    found = answer(many_ranks(parts, 512), byte_kind="payload", link=LINK)
    page = measured.page(found, ["big"])
    text = without_scripts(html(page))
    assert len(text.encode()) < 600_000
    assert "Rank 1234 computes" in text or "Rank 2047 computes" in text
    tree = parsed(text)
    listed = [head.text for head in tree.all("th", scope="row")]
    assert {f"rank {rank}" for rank in SLOW} <= set(listed)
    assert sum(text.startswith("rank ") for text in listed) == 48
    charts = specs(tree)
    cells = charts["heat-map"][0]["data"][0]["z"]
    assert len(cells) <= 96
    assert "A cell is 43 ranks and 1 iteration, and shows the largest" in tree.text
    steps = charts["quantiles"]
    assert len(steps) == 101
    assert int(steps[-1][0].removeprefix("rank ")) in SLOW


def test_definitions_agree_with_the_page_of_metrics():
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|$", (DOCS / "metrics.md").read_text(), re.M)
    said = {}
    for keys, meaning in rows:
        plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", meaning).replace("`", "")
        for key in re.findall(r"`(\w+)`", keys):
            said.setdefault(key, set()).add(plain.strip())
    compared = 0
    for key, each in GLOSSARY.items():
        meanings = said.get(key.rpartition(".")[2], ())
        if meanings and key.partition(".")[0] in DEFINED_THERE:
            assert any(meaning in each.says for meaning in meanings), (key, meanings)
            compared += 1
    assert compared > 30


DEFINED_THERE = {
    *("ranks", "iterations", "link_bandwidth", "iteration", "exact", "windows"),
    *("bandwidth", "collectives", "volume", "overlap", "groups"),
}


@pytest.mark.compiled
def test_every_key_of_a_page_is_in_the_glossary(page):
    assert used_keys(page) <= set(GLOSSARY)


@pytest.mark.compiled
def test_report_writes_the_page_and_the_tables_beside_it(folder, tmp_path):
    target = tmp_path / "monday.html"
    said = CliRunner().invoke(main, ["report", str(folder), "-o", str(target)])
    assert said.exit_code == 0, said.output
    tree = parsed(without_scripts(target.read_text("utf-8")))
    files = [each.attrs["href"] for each in next(tree.all("ul", class_="files")).all("a")]
    assert "monday-data/events.parquet" in files
    assert all((tmp_path / name).is_file() for name in files)
    assert "path-strip" in specs(tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["monday-data", "monday.html"]


@pytest.mark.compiled
def test_numbers_read_as_a_person_writes_them():
    thin = "\u202f"
    assert words.ns(9_551_234) == f"9.55{thin}ms"
    assert words.ns(-676_400) == f"\u2212676{thin}µs"
    assert words.ns(12) == f"12{thin}ns"
    assert words.tick(words.ns(10_000)) == f"10{thin}µs"
    assert words.percent(-0.0171) == f"\u22121.7{thin}%"
    assert words.signed_percent(-0.0001) == f"0.0{thin}%"
    assert words.whole(12288) == f"12{thin}288"
    assert words.fact("ranks", None, words.whole, why="nobody said").text == "n/a"
