"""Test that the documentation agrees with the program."""

import json
import re
import tomllib
from dataclasses import fields
from xml.etree import ElementTree

import pytest
from builders import inspector_logs
from builders.opened import open_run
from builders.places import ROOT

from docs import drawings, pages
from fastcomm import files
from fastcomm.cli.main import COMMANDS, main
from fastcomm.critical_path.options import PathOptions
from fastcomm.formats import config
from fastcomm.formats.config import Config
from fastcomm.formats.sources import NAME_PATTERNS
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.options import ReadOptions
from fastcomm.stragglers.options import StragglerOptions
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.traces import write
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.rank_grid import ORDERS, Parallel
from fastcomm.trace.schema import KIND, OPS
from fastcomm.trace.tags import RULE_FIELDS

REFRESH = "`make pages` updates it"
WITH_SESSIONS = [page for page in pages.PAGES if pages.has_sessions(page.read_text("utf-8"))]
ALL = (*pages.PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")


def text_of(name):
    return (ROOT / name).read_text("utf-8")


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def words(text):
    """What stands in backquotes; `<tag>` stands for every tag."""
    found = set(re.findall(r"`([^`\n]+)`", text))
    return found | {word.replace("<tag>", tag) for word in found for tag in TAGS}


@pytest.fixture(scope="module")
def demo_folder():
    with pages.demo_folder() as folder:
        yield folder


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_a_heading(name):
    assert main.get_command(None, name).help
    assert f"## `fastcomm {name}`\n" in text_of("docs/cli.md")


def test_the_page_of_commands_is_current():
    # A release of click may break its lines elsewhere.
    assert text_of("docs/cli.md").split() == pages.cli_page().split(), REFRESH


@pytest.mark.parametrize("page", WITH_SESSIONS, ids=lambda page: page.name)
def test_a_page_shows_the_current_output_of_its_commands(page, demo_folder):
    text = page.read_text("utf-8")
    assert pages.update(text, demo_folder) == text, REFRESH


def test_failing_python_and_changed_outputs_are_detected(tmp_path):
    page = "```pycon\n>>> 1 + 1\n3\n>>> for each in (1, 2):\n...     print(each)\n```\n"
    assert pages.update_python(page, tmp_path) == (
        "```pycon\n>>> 1 + 1\n2\n>>> for each in (1, 2):\n...     print(each)\n1\n2\n```\n"
    )
    with pytest.raises(ZeroDivisionError):
        pages.update_python("```pycon\n>>> 1 / 0\n```\n", tmp_path)
    expected = "```pycon\n>>> 1 / 0\nTraceback (most recent call last):\n    ...\n{}\n```\n"
    right = expected.format("ZeroDivisionError: division by zero")
    assert pages.update_python(right, tmp_path) == right
    with pytest.raises(ZeroDivisionError):
        pages.update_python(expected.format("ValueError: another"), tmp_path)


@pytest.mark.parametrize("draw", drawings.DRAWINGS, ids=lambda draw: draw.__name__)
def test_a_drawing_is_current_and_has_a_description(draw):
    path = drawings.FOLDER / f"metric-{draw.__name__}.svg"
    assert path.read_text("utf-8") == draw().svg(), "`python docs/drawings.py` updates it"
    words = [each.text for each in ElementTree.parse(path).iter() if each.text]
    assert {"title", "desc"} <= {
        each.tag.rpartition("}")[2] for each in ElementTree.parse(path).iter()
    }
    assert len(words) > 5


def test_every_example_configuration_is_valid(tmp_path):
    examples = [each for page in ALL for each in blocks(page.read_text("utf-8"), "toml")]
    for example in examples:
        path = tmp_path / "fastcomm.toml"
        path.write_text(example)
        assert config.read(path) != config.Config()
    tables = {key for example in examples for key in tomllib.loads(example)}
    assert tables == {"parallel", "tags", "kernels", "iterations", "link", "ranks", "table"}


def test_the_configuration_page_lists_every_key():
    keys = {
        *Parallel.__slots__,
        *RULE_FIELDS,
        *("pattern", "op", "tag", "library", "regex", "bandwidth", "scale_out", "scale_up"),
    }
    assert keys | {*OPS, *TAGS, *ORDERS} <= words(text_of("docs/configuration.md"))


def test_the_python_page_lists_every_table_and_column(tmp_path):
    write(Job.of(ranks=2, steps=1, layers=1), tmp_path)
    found = compute_metrics(open_run(tmp_path))
    rows = dict(
        re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", text_of("docs/python.md"), re.M)
    )
    for name, table in found.to_arrow().items():
        assert set(table.column_names) <= words(rows[name]), name


def test_the_python_page_lists_every_option():
    known = words(text_of("docs/python.md"))
    for kind in (ReadOptions, MetricsOptions, PathOptions, StragglerOptions):
        assert {each.name for each in fields(kind)} - {
            "rank",
            "with_tables",
        } <= known


def test_the_glossary_has_every_parallelism_part_of_a_step_and_kind_of_finding():
    known = words(text_of("docs/glossary.md"))
    schema = json.loads(text_of("fastcomm/schemas/metrics.json"))
    kinds = schema["$defs"]["finding"]["properties"]["kind"]["enum"]
    assert {*TAGS, *kinds} - {"OTHER"} <= known
    assert {"exposed_mixed", "memcpy", "idle", "payload", "bus", "msg"} <= known


def test_every_name_in_the_glossary_is_a_key_a_column_an_option_or_in_the_code():
    pages_of_names = ("docs/cli.md", "docs/python.md", "docs/store.md")
    files = (*(ROOT / "fastcomm/schemas").glob("*.json"), *(ROOT / "fastcomm").rglob("*.py"))
    names = "".join(text_of(path) for path in (*pages_of_names, *files))
    columns = re.findall(r"^\|[^|]*\|[^|]*\|([^|]*)\|$", text_of("docs/glossary.md"), re.M)
    listed = {name for column in columns for name in re.findall(r"`([^`]+)`", column)}
    assert len(listed) > 150
    assert {name for name in listed if name.split()[0] not in names} == set()


def pages_of_metrics():
    return "\n".join(
        page.read_text("utf-8") for page in ALL if "metrics" in (page.stem, page.parent.name)
    )


def test_the_metrics_pages_list_every_key():
    def keys(schema):
        if isinstance(schema, dict):
            yield from schema.get("properties", ())
            for inner in schema.values():
                yield from keys(inner)

    schema = json.loads(text_of("fastcomm/schemas/metrics.json"))
    assert set(keys(schema)) - words(pages_of_metrics()) == set()


def test_the_pages_of_tags_and_traces_list_every_order_and_name():
    known = words(text_of("docs/tags.md"))
    assert {*ORDERS, *ORDERS.values()} <= known
    assert {name.replace("N", "3") for name in NAME_PATTERNS} <= words(
        text_of("docs/traces.md")
    )


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_no_merge_is_half_done(page):
    assert not re.search(r"^(?:<{7}|={7}|>{7})(?: |$)", page.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_links_lead_to_files_and_commands_exist(page):
    text = page.read_text("utf-8")
    for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert (page.parent / link).exists(), link
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets


ROWS_OF_TRACES = {
    "sizes": lambda trace: trace.comm["payload_bytes"].null_count < len(trace.comm),
    "members of groups": lambda trace: trace.groups["ranks"].null_count < len(trace.groups),
    "what groups are for": lambda trace: (
        trace.groups["description"].null_count < len(trace.groups)
    ),
    "number of a collective in its group": lambda trace: (
        trace.comm["seq"].null_count < len(trace.comm)
    ),
    "roots and peers": lambda trace: trace.comm["root"].null_count < len(trace.comm),
    "compute": lambda trace: "compute" not in trace.meta.missing_data,
    "times": lambda trace: "times" not in trace.meta.missing_data,
    "calls and launches": lambda trace: KIND["runtime"] in trace.events["kind"].to_pylist(),
    "operators of the host": lambda trace: KIND["cpu_op"] in trace.events["kind"].to_pylist(),
    "Python functions": lambda trace: KIND["python"] in trace.events["kind"].to_pylist(),
}
TABLE = """[table]
rank = "rank"
start = "start"
stop = "stop"
unit = "ns"
kind = "kind"
group = "group"
[table.kinds]
gemm = "compute"
allreduce = "AllReduce"
"""


def written(folder, format_):
    """A small run of a format; what it takes to open it."""
    job = Job.of(ranks=2, steps=1, layers=1)
    if format_ == "kineto":
        write(job, folder)
    elif format_ == "nsys":
        write_nsys(job, folder)
    elif format_ == "inspector":
        inspector_logs.job(folder)
    else:
        rows = ("rank,start,stop,kind,group", "0,0,9,gemm,", "0,9,12,allreduce,w")
        rows += ("1,0,9,gemm,", "1,9,12,allreduce,w")
        (folder / "table.csv").write_text("\n".join(rows) + "\n")
        (folder / "table.toml").write_text(TABLE)
        return [folder / "table.csv"], config.read(folder / "table.toml")
    return [folder], Config()


@pytest.mark.parametrize(
    ("column", "format_"), tuple(enumerate(("kineto", "nsys", "inspector", "optable")))
)
def test_the_table_of_formats_agrees_with_the_readers(column, format_, tmp_path):
    rows = re.findall(r"^\| ([^|`]+) \| (.*) \|$", text_of("docs/traces.md"), re.MULTILINE)
    said = {name: cells.split(" | ")[column] for name, cells in rows if cells.count(" | ") == 3}
    assert said["format"] == format_
    paths, options = written(tmp_path, format_)
    trace = open_run(*paths, config=options).read(0, "all")
    assert trace.meta.format == format_
    has = {name: "yes" if look(trace) else "no" for name, look in ROWS_OF_TRACES.items()}
    assert has == {name: re.match(r"yes|no", said[name])[0] for name in has}


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_python_on_a_page_compiles(page):
    for block in blocks(page.read_text("utf-8"), "python"):
        compile(block, str(page), "exec")


def test_the_design_page_lists_every_kernel_and_benchmark():
    page = text_of("docs/design.md")
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \| (`[^|]+`) \|$", page, re.MULTILINE)
    modules = {path.stem for path in (ROOT / "kernels" / "fastcomm_kernels").glob("[a-z]*.py")}
    assert {name for row in rows for name in words(row[0])} == modules - {"arrays", "temporary"}
    bars = tomllib.loads(text_of("bench/bars.toml"))
    assert {name for row in rows for name in words(row[1])} <= set(bars)


MOST_FILES = 4  # of a change, beside its test, the changelog and a page
ON_SHELVES = ("analysis.py", "command.py", "options.py", "page.py", "result.py", "tables.py")


def changes():
    """The rows of the table of changes, each with the files that it names."""
    section = text_of("docs/design.md").partition("## Where a change goes")[2]
    rows = re.findall(r"^\| ([^|`]+) \| (.*) \|$", section.partition("\n## ")[0], re.M)
    file = re.compile(r"`([\w./-]+(?:/|\.(?:py|json|toml|css|js|j2)))`")
    return {change: list(dict.fromkeys(file.findall(text))) for change, text in rows[2:]}


@pytest.mark.parametrize("change", changes())
def test_a_change_touches_few_files_and_they_exist(change):
    named = changes()[change]
    assert len([file for file in named if not file.startswith("docs/")]) <= MOST_FILES
    for file in named:
        places = (ROOT / file, ROOT / "fastcomm" / file)
        is_shelf = file in ON_SHELVES and any((ROOT / "fastcomm").glob(f"*/{file}"))
        assert is_shelf or any(place.exists() for place in places), file


def test_the_table_of_changes_has_a_row_for_each_concept():
    rows = changes()
    assert len(rows) > 30
    assert all(rows.values())


def test_the_performance_page_lists_every_bar_and_exceeds_it():
    page = text_of("docs/benchmarks.md")
    bars = tomllib.loads(text_of("bench/bars.toml"))
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| ([\d.]+) \u00d7 [^|]+ \| ([\d.]+) \|$", page, re.M
    )
    ratios = {name: (float(ratio), float(bar)) for name, ratio, bar in rows}
    assert set(ratios) == {name for name, bar in bars.items() if "ratio" in bar} - {
        "sqlite",
        "nsys_rank",
    }
    assert all(bar == bars[name]["ratio"] <= ratio for name, (ratio, bar) in ratios.items())


def test_every_fault_of_the_table_has_a_test_that_exists():
    rows = re.findall(r"^\| .* \| .* \| (`test_.*`) \|$", text_of("docs/reliability.md"), re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+\.py)::(\w+)`", row)]
    assert len(named) > 50
    for file, name in named:
        assert f"\ndef {name}(" in text_of(f"tests/{file}"), name


def test_the_page_lists_the_limits_of_the_program():
    page = text_of("docs/reliability.md")
    rows = dict(re.findall(r"^\| `(FASTCOMM_\w+)` \| (\d+) \|", page, re.M))
    assert {name: int(value) for name, value in rows.items()} == files.USUAL
