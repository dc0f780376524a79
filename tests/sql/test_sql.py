"""Test what a query reads, what it may not do, and how it ends."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.commands import invoke
from builders.places import ROOT
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import fastcomm
from fastcomm.cli.main import main
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.sql import database, events, prompt, run_tables
from fastcomm.sql.database import RunDatabase
from fastcomm.sql.options import SqlOptions
from fastcomm.sql.run_tables import RunTables
from fastcomm.sql.scans import fields_of, possible
from fastcomm.sql.views import BY_NAME, EVENTS, VIEWS
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"
HOSTILE = (
    "select * from read_csv('/etc/passwd')",
    "select * from '/etc/passwd'",
    "select * from read_text('/etc/passwd')",
    "select * from read_blob('/proc/self/environ')",
    "select * from glob('/*')",
    "select * from read_parquet('https://example.com/a.parquet')",
    "select * from read_csv_auto('s3://bucket/a.csv')",
    "copy (select 1) to 'out.csv'",
    "copy ranks to '/elsewhere/out.parquet'",
    "attach 'other.db' as other",
    "install httpfs",
    "load httpfs",
    "force install json from 'https://example.com'",
    "set enable_external_access = true",
    "set lock_configuration = false",
    "reset memory_limit",
    "pragma enable_profiling",
    "pragma database_list",
    "call enable_logging(storage = 'file', storage_path = 'logs')",
    "select * from enable_logging(storage = 'file', storage_path = 'logs')",
    "create table a as select 1",
    "create macro a(x) as x",
    "insert into ranks values (1)",
    "delete from ranks",
    "update ranks set rank = 1",
    "drop view ranks",
    "with gone as (delete from ranks returning *) select * from gone",
    "export database 'out'",
    "import database 'out'",
    "use memory",
    "begin",
    "vacuum",
    "explain analyze create table a as select 1",
    "prepare a as select 1",
    "select * from hidden",
    "select getenv('HOME')",
    "comment on view ranks is 'x'",
    "select * from query('copy ranks to ''out.csv''')",
    "select * from sqlite_scan('a.db', 'a')",
    "select * from duckdb_extensions()",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("sql")
    write(Job.of(ranks=4, steps=2, layers=1), place / "run")
    invoke("ingest", place / "run", "-o", place / "store")
    return place


@pytest.fixture(scope="module")
def run(folder):
    return fastcomm.open(folder / "run")


@pytest.fixture(scope="module")
def store(folder):
    return fastcomm.open(folder / "store")


@pytest.fixture(scope="module")
def everything(run, store):
    """The events of all ranks, of the traces and of the store."""
    sql = "select name, rank, kind, duration_ns from events"
    opened = {"run": run, "store": store}
    return {kind: pa.table(one.sql(sql).to_arrow()) for kind, one in opened.items()}


def rows(run, sql, **options):
    return [tuple(row.values()) for row in run.sql(sql, **options).rows()]


def test_the_list_of_files_answers_without_a_trace(folder, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a trace is read")

    monkeypatch.setattr(run_tables, "compute_metrics", refuse)
    monkeypatch.setattr(run_tables, "sum_kernels", refuse)
    monkeypatch.setattr("fastcomm.trace.run_traces.Source.read", refuse)
    result = fastcomm.open(folder / "run").sql("select count(*), max(file_bytes) from ranks")
    assert result.rows()[0]["count_star()"] == 4
    assert str(result.reads[0]) == "ranks (file_bytes) without a trace"


@pytest.mark.parametrize(
    ("condition", "ranks"),
    [
        ("rank = 3", (3,)),
        ("rank in (0, 2)", (0, 2)),
        ("rank > 1 and kind = 'kernel'", (2, 3)),
        ("rank = 1 or (rank = 2 and duration_ns > 5)", (1, 2)),
        ("rank between 1 and 2", (1, 2)),
        ("kind = 'cpu_op'", (0, 1, 2, 3)),
        ("rank % 2 = 1", (0, 1, 2, 3)),
        ("rank = 7", ()),
    ],
)
@pytest.mark.parametrize("kind", ["run", "store"])
def test_only_the_ranks_of_the_conditions_are_read(request, everything, kind, condition, ranks):
    opened = request.getfixturevalue(kind)
    result = opened.sql(f"select name, rank from events where {condition}")
    assert result.reads[0].ranks == ranks
    (expected,) = rows_of(everything[kind], condition)
    assert result.row_count == expected


def rows_of(events, condition):
    """Number of rows of a table for which a condition holds, by another database."""
    import duckdb

    with duckdb.connect() as connection:
        connection.register("own", events)
        return connection.execute(f"select count(*) from own where {condition}").fetchone()


@pytest.mark.parametrize("kind", ["run", "store"])
def test_columns_of_conditions_are_read_as_well(request, kind):
    sql = "select name from events where duration_ns > 5 and rank = 1"
    (read,) = request.getfixturevalue(kind).sql(sql).reads
    assert {*read.columns} == {"name", "duration_ns", "rank"}


def test_a_limit_ends_the_reading(run, store):
    for opened in (run, store):
        assert opened.sql("select rank from events limit 3").reads[0].ranks == (0,)


def test_a_store_reads_only_the_columns_of_a_query(store, monkeypatch):
    import pyarrow.parquet

    seen = []
    original = pyarrow.parquet.ParquetFile.read_row_groups

    def noting(self, groups, columns=None, **options):
        seen.append((len(groups), columns))
        return original(self, groups, columns=columns, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_groups", noting)
    store.sql("select sum(duration_ns) from events where rank = 2 and kind = 'kernel'")
    assert seen == [(1, ["rank", "start", "stop", "kind"])]
    store.sql("select count(*) from events where rank = 1")
    assert seen[1:] == [(3, ["rank"])]


def test_a_store_and_its_traces_have_equal_events(run, store):
    """In the columns that are read from the files of a store alone."""
    columns = ", ".join(name for name in EVENTS.schema.names if name not in events._DERIVED)
    sql = f"select {columns} from events where kind <> 'python' order by rank, event"
    assert rows(run, sql) == rows(store, sql)


@pytest.mark.parametrize("column", EVENTS.schema.names)
def test_a_store_and_its_traces_have_an_equal_column(run, store, column):
    sql = f"select {column} from events where rank = 2 and kind <> 'python' order by event"
    assert rows(run, sql) == rows(store, sql)


def test_work_alone_is_read_where_it_is_enough(run, monkeypatch):
    rows(run, "select tag from events where rank = 0")  # reads all ranks, once
    contents = []
    original = fastcomm.trace.run_traces.Source.read

    def noting(self, content="work"):
        contents.append(content)
        return original(self, content)

    monkeypatch.setattr("fastcomm.trace.run_traces.Source.read", noting)
    condition = "where rank = 0 and kind in ('kernel', 'memcpy')"
    work = rows(run, f"select start_ns, name, op, tag from events {condition}")
    both = rows(run, f"select start_ns, name, op, tag, event from events {condition}")
    assert contents == ["work", "all"]
    assert work == [row[:4] for row in both]


def test_workers_read_equal_events(folder, run):
    sql = "select rank, operator, sum(duration_ns) as ns from events group by all order by all"
    with_workers = fastcomm.open(folder / "run", workers=2)
    assert rows(with_workers, sql) == rows(run, sql)


def test_options_of_reading_change_what_a_store_answers(folder):
    sql = "select tag, count(*) from events where op is not null group by tag order by tag"
    changed = {"tp": 4, "pp": 1, "dp": 1, "order": "tp-cp-ep-dp-pp"}
    answers = [rows(fastcomm.open(folder / name, **changed), sql) for name in ("run", "store")]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_a_view_has_its_columns_with_their_types(run, view):
    table = run.sql(f"select * from {view.name} limit 2").to_arrow()
    assert table.column_names == view.schema.names
    plain = [
        field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        for field in view.schema
    ]
    assert [str(kind).partition("<")[0] for kind in plain] == [
        str(field.type).partition("<")[0] for field in table.schema
    ]
    shown = invoke("sql", "nowhere", f".schema {view.name}").stdout
    for column in view.columns:
        assert column.name in shown
        assert column.text


def test_collectives_add_up_to_waits(run):
    waits = "select rank, tag, wait_ns * 2, wait_caused_ns * 2 from waits order by all"
    own = """
        select rank, tag, sum(wait)::double as wait_ns,
               sum(case when rank = last_rank then wait_caused_ns else 0 end)::double as caused
        from (select unnest(members) as rank, unnest(waits_ns) as wait, * from collectives)
        group by rank, tag order by all"""
    assert rows(run, own) == rows(run, waits)
    ordered = "select count(*) from collectives where arrivals_ns <> list_sort(arrivals_ns)"
    assert rows(run, ordered) == [(0,)]
    condition = "skew_ns <> last_arrival_ns - first_arrival_ns"
    whole = f"select count(*) from collectives where {condition}"
    assert rows(run, whole) == [(0,)]


@pytest.mark.parametrize("sql", HOSTILE)
def test_a_query_only_reads_the_run(run, tmp_path, monkeypatch, sql):
    hidden = pa.table({"a": [1]})  # no table of a query: a variable of Python
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FastcommError) as caught:
        run.sql(sql)
    assert str(caught.value).startswith("sql: ")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert rows(run, "select count(*) from ranks") == [(4,)]
    assert hidden.num_rows


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("selec 1", 'sql: line 1, column 1: syntax error at or near "selec"'),
        (
            "select rank,\n  clock\nfrom events",
            'sql: line 2, column 3: Referenced column "clock"',
        ),
        ("select 'ä', clock from ranks", 'sql: line 1, column 13: Referenced column "clock"'),
        ("from event", "sql: line 1, column 6: no view 'event'; did you mean events? Views: "),
        ("from zebra", "sql: line 1, column 6: no view 'zebra'. Views: ranks, steps, "),
        ("select 1; select 2", "sql: 2 statements; pass one"),
        ("", "sql: 0 statements; pass one"),
        ("select 1 where", 'sql: line 1, column 10: syntax error at or near "where"'),
        ("drop view ranks", "sql: DROP is refused; only SELECT, FROM, "),
        ("use main", "sql: USE is refused; only SELECT, FROM, "),
        ("pivot kernels on category using count(*)", "sql: PIVOT is refused; only SELECT"),
        ("select 'x'::int", "sql: line 1, column 11: Could not convert string 'x' to INT32"),
        ("from read_csv('a')", "sql: line 1, column 6: a query reads the views of the run"),
        ("from sqlite_scan('a', 'b')", "sql: a query reads the views of the run alone"),
        ("select " + "(" * 3000 + "1" + ")" * 3000, "sql: Max expression depth limit of 1000"),
        ("select '" + "x" * (1 << 20) + "'", "sql: a query of 1048585 letters; at most "),
        ("select '\udcff'", "sql: the query is no valid text"),
        ("select error('a\nb')", "sql: a b"),
    ],
)
def test_an_error_is_one_line_with_its_place(run, sql, message):
    with pytest.raises(FastcommError) as caught:
        run.sql(sql)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_text_is_what_a_query_is(run):
    with pytest.raises(ConfigError, match="sql: invalid query 3"):
        run.sql(3)


def test_the_memory_of_a_query_is_limited(run):
    limit = "64Mi"
    for sql in ("select list(range) from range(100000000)", "select * from range(50000000)"):
        with pytest.raises(FastcommError, match=r"sql: the query needs more than 64\.0 MiB"):
            run.sql(sql, memory_limit=limit)
    assert rows(run, "select count(*) from range(50000000)", memory_limit=limit) == [
        (50000000,)
    ]
    with pytest.raises(ConfigError, match="memory_limit"):
        run.sql("select 1", memory_limit="1")


def test_rows_spill_outside_of_the_working_directory(run, tmp_path, monkeypatch):
    work, spill = tmp_path / "work", tmp_path / "spill"
    work.mkdir()
    spill.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(spill))
    changes = []

    def noted(function):
        """Note when the directory's files were last created or removed, as it has it."""

        def wrapped(*folder):
            changes.extend(path.stat().st_mtime_ns for path in folder)
            made = function(*folder)
            changes.extend(path.stat().st_mtime_ns for path in spill.iterdir())
            return made

        return wrapped

    for name in ("make_folder", "remove_folder"):
        monkeypatch.setattr(database, name, noted(getattr(database, name)))
    sql = """
        select count(*) from (
          select a, b, row_number() over (order by b) as r
          from (select range as a, hash(range) || repeat('a', 60) as b from range({}))
        ) where r % 1000 = 0"""
    for number, has_spilled in ((1000, False), (1_000_000, True)):
        found = rows(run, sql.format(number), memory_limit="64Mi", threads=1)
        assert found == [(number // 1000,)]
        made, removed = changes
        assert (removed > made) == has_spilled
        changes.clear()
    assert list(work.iterdir()) == []
    assert list(spill.iterdir()) == []


@pytest.mark.parametrize(
    "sql", [ENDLESS, "select sum(a.range * b.range) from range(9999999) a, range(9999999) b"]
)
def test_the_time_of_a_query_is_limited(run, sql):
    begin = time.monotonic()
    with pytest.raises(
        FastcommError, match="sql: not done after 200ms; timeout sets the limit"
    ):
        run.sql(sql, timeout="200ms")
    assert time.monotonic() - begin < 2
    assert rows(run, "select 1", timeout="30s") == [(1,)]


def test_the_time_limit_holds_while_a_rank_is_read(folder, monkeypatch):
    opened = fastcomm.open(folder / "run")

    def slow(*_, **__):
        time.sleep(20)

    monkeypatch.setattr("fastcomm.trace.run_traces.Source.read", slow)
    begin = time.monotonic()
    with pytest.raises(FastcommError, match="not done after 300ms"):
        opened.sql("select count(*) from events", timeout="300ms")
    assert time.monotonic() - begin < 2


def test_a_query_in_a_thread_is_answered_and_has_a_time_limit(run):
    answers = []

    def ask():
        answers.append(rows(run, "select count(*) from steps", timeout="30s"))
        try:
            run.sql(ENDLESS, timeout="200ms")
        except FastcommError as error:
            answers.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(60)
    assert answers == [[(8,)], "sql: not done after 200ms; timeout sets the limit"]


def started(*words, environment=None, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "fastcomm", "sql", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
            **(environment or {}),
        },
        **options,
    )


def test_ctrl_c_ends_a_query_at_once(folder):
    """Within a second, or a few where other processes have the cores."""
    process = started(folder / "run", ENDLESS)
    time.sleep(4)
    assert process.poll() is None
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert time.monotonic() - begin < 6
    assert process.returncode == 1
    assert "Traceback" not in said


def test_a_rank_that_cannot_be_read_is_an_error_or_skipped(folder, tmp_path):
    write(Job.of(ranks=4, steps=2, layers=1), tmp_path / "damaged")
    path = tmp_path / "damaged" / "rank3.pt.trace.json.gz"
    path.write_bytes(path.read_bytes()[:999])
    sql = "select count(distinct rank) from events"
    for workers in (1, 2):
        with pytest.raises(FastcommError, match="rank3"):
            fastcomm.open(tmp_path / "damaged", workers=workers).sql(sql)
        result = fastcomm.open(tmp_path / "damaged", workers=workers, keep_going=True).sql(sql)
        assert [tuple(row.values()) for row in result.rows()] == [(3,)]
        assert [rank.rank for rank in result.skipped] == [3]
        assert result.reads[0].ranks == (0, 1, 2)
    invoke("sql", tmp_path / "damaged", sql, "--keep-going", code=3)


def test_without_duckdb_the_message_names_the_extra(run, monkeypatch):
    monkeypatch.setattr("fastcomm.sql.database.find_spec", lambda _: None)
    with pytest.raises(FastcommError, match=r"pip install 'fastcomm\[sql\]'"):
        run.sql("select 1")


def test_a_run_without_ranks_is_one_line(tmp_path):
    result = CliRunner().invoke(main, ["sql", str(tmp_path), "from ranks"])
    assert result.exit_code in (1, 2)
    assert len(result.stderr.splitlines()) == 1


def test_values_of_all_types_have_a_form_in_every_output(folder, tmp_path):
    sql = """select 1 as a, 2 as a, 1.5 as d, sum(rank) as s, null as n, 'x' as t, true as b,
      interval 1 day as i, {'x': 1} as st, map {'k': 1} as m, [1, 2] as l, [[1]] as ll,
      'x'::blob as bl, date '2020-01-02' as dt, time '12:00:00' as ti, 'nan'::double as nan,
      timestamp '2020-01-02 03:04:05' as ts, 12345678901234567890123::hugeint as h,
      'a'::enum('a') as e, uuid() is null as u from ranks"""
    document = json.loads(invoke("sql", folder / "run", sql, "--json").stdout)
    (row,) = document["rows"]
    assert (row["a"], row["a_2"], row["d"], row["s"], row["n"]) == (1, 2, 1.5, 6, None)
    assert (row["st"], row["m"], row["ll"], row["bl"]) == ("{x: 1}", "[[k, 1]]", "[[1]]", "78")
    assert row["i"] == "0 months 1 days 0 ns"
    assert (row["dt"], row["nan"], row["h"]) == ("2020-01-02", None, 1.2345678901234568e22)
    for words in (
        ["--format", "csv"],
        ["--format", "markdown"],
        ["-o", tmp_path / "o", "--xlsx"],
        [],
    ):
        assert invoke("sql", folder / "run", sql, *words).stdout
    assert pq.read_table(tmp_path / "o" / "query.parquet").num_rows == 1


def test_the_rows_that_are_not_printed_are_counted(folder):
    sql = "select name from events where rank = 0"
    count = invoke("sql", folder / "run", sql, "--json")
    total = json.loads(count.stdout)["row_count"]
    shown = invoke("sql", folder / "run", sql)
    assert shown.stdout.splitlines()[-1].startswith(f"{total - 40} more rows; --top N")
    assert "read: events (name, rank) of rank 0 (of 4)" in shown.stderr
    three = json.loads(invoke("sql", folder / "run", sql, "--json", "--top", "3").stdout)
    assert (len(three["rows"]), three["row_count"]) == (3, total)
    text = invoke("sql", folder / "run", sql, "--format", "csv").stdout
    assert len(text.splitlines()) == total + 1


def test_names_in_a_query_have_no_effect_on_a_terminal(folder):
    shown = invoke("sql", folder / "run", "select '\x1b[31m' as \"a\x1b[31m\"").stdout
    assert "\x1b" not in shown


def piped(folder, text, code=0):
    result = CliRunner().invoke(main, ["sql", str(folder / "run")], input=text)
    assert result.exit_code == code, result.output
    return result


def test_standard_input_is_answered_statement_by_statement(folder):
    text = "select 11 as one;\n\n.tables\nselect\n  22 as two;\nselect 33 as three"
    said = piped(folder, text).stdout
    assert [word in said for word in ("11", "22", "33", "collectives")] == [True] * 4
    assert "44" not in piped(folder, ".quit\nselect 44;").stdout
    failed = piped(folder, "select 55 as five;\nselec 1;\nselect 66;", code=2)
    assert "55" in failed.stdout
    assert "66" not in failed.stdout
    assert "no query" in piped(folder, "", code=2).stderr
    assert "no query" in CliRunner().invoke(main, ["sql", str(folder / "run"), " "]).stderr
    assert "no command '.open'" in piped(folder, ".open a.db", code=2).stderr


def test_the_prompt_answers_and_goes_on_after_errors(folder, tmp_path):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    main_end, other_end = pty.openpty()
    environment = {"HOME": str(home), "XDG_STATE_HOME": str(home), "TERM": "dumb"}
    process = started(folder / "run", stdin=other_end, cwd=work, environment=environment)
    os.close(other_end)
    text = "selec 1;\nselect 21 * 2\n as x;\n.schema waits\n.schema none\n.quit\n"
    os.write(main_end, text.encode())
    out, err = process.communicate(timeout=60)
    os.close(main_end)
    assert process.returncode == 0
    assert "42" in out
    assert "exposed_wait_ns" in out
    assert 'syntax error at or near "selec"' in err
    assert "no view 'none'" in err
    assert list(work.iterdir()) == []


def test_the_history_is_never_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert prompt.history_file() == tmp_path / "home/.local/state/fastcomm/sql_history"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert prompt.history_file() == tmp_path / "state/fastcomm/sql_history"
    monkeypatch.chdir(tmp_path)
    assert prompt.history_file() is None
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.chdir("/")
    assert prompt.history_file() is None or Path("/") == Path.home()


@pytest.fixture(scope="module")
def empty():
    with RunDatabase(RunTables(EMPTY), SqlOptions(timeout="2s")) as database:
        yield database


@given(text=st.text(max_size=60))
def test_any_text_is_answered_or_an_error_of_one_line(empty, text):
    said = "sql: "
    try:
        for statement in empty.statements(text):
            empty.query(statement)
    except FastcommError as error:
        said = str(error)
    assert said.startswith("sql: ")
    assert len(said.splitlines()) == 1


WORDS = (
    "select", "from", "ranks", "events", "where", "(", ")", "*", ",", "rank", "=", "1", "'x'",
    "group by", "order by", "limit", "join", "using", "with", "as", ";", "read_csv", "copy",
    "to", "unnest", "[", "]", "{", "}", "::", "int", "not", "null", "is", "in", "like",
    "union all", "having", "over", "count", "kind", ".", "--", "/*", "$1", "?", "set", "@",
)  # fmt: skip


@given(text=st.lists(st.sampled_from(WORDS), max_size=14).map(" ".join))
def test_any_words_of_sql_are_answered_or_an_error_of_one_line(empty, text):
    test_any_text_is_answered_or_an_error_of_one_line.hypothesis.inner_test(empty, text)


EMPTY = fastcomm.executors.executor.OpenedRun.of(
    fastcomm.trace.run_traces.RunTraces(sources=(), world_size=None),
    fastcomm.executors.executor.Local(),
)


def test_conditions_name_their_columns_and_their_possible_values():
    field = pa.compute.field
    condition = (field("rank") == 2) & (field("kind") == "kernel") & (field("start_ns") > 3)
    assert set(fields_of(condition, EVENTS.schema)) == {"rank", "kind", "start_ns"}
    assert fields_of(None, EVENTS.schema) == ()
    assert possible([1, 2, 3], "rank", EVENTS.schema, condition) == [2]
    assert possible(["kernel", "python"], "kind", EVENTS.schema, condition) == ["kernel"]
    assert possible([1, 2], "rank", EVENTS.schema, None) == [1, 2]
    assert possible([1, 2], "rank", EVENTS.schema, field("rank").is_null()) == []


def test_parts_of_the_input_are_commands_and_statements():
    lines = io.StringIO("a\n b;\n.tables \n\n.x\nc\n.d\n;e")
    assert list(prompt.parts(line.rstrip("\n") for line in lines)) == [
        "a\n b;",
        ".tables",
        ".x",
        "c\n.d\n;e",
    ]
    assert set(BY_NAME) == {view.name for view in VIEWS}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("timestamp 'infinity'", "infinity"),
        ("date '-infinity'", "-infinity"),
        ("date '290000-01-01'", "290000-01-01"),
        ("timestamptz '290000-01-01'", "290000-01-01T00:00:00.000000+00:00"),
        ("[date 'infinity']", "[infinity]"),
        ("{'at': timestamp 'infinity', 'n': 1}", "{at: infinity, n: 1}"),
        ("map {'at': timestamp 'infinity'}", "{at: infinity}"),
        ("timestamp '2026-01-01'", "2026-01-01T00:00:00"),
    ],
)
def test_dates_and_times_that_python_does_not_have_are_text(run, value, text):
    result = run.sql(f"select {value} as at, 1 as number union all select null, 2")
    assert {row["at"] for row in result.rows()} == {text, None}


@pytest.mark.parametrize("options", [["--json"], ["--format", "json"]])
@pytest.mark.parametrize("text", ["select 1; select 2", "select 1;\nselect 2;\n"])
@pytest.mark.parametrize("is_input", [False, True])
def test_a_json_document_has_the_rows_of_one_statement(folder, options, text, is_input):
    words = ["sql", str(folder / "run"), *([] if is_input else [text]), *options]
    result = CliRunner().invoke(main, words, input=text if is_input else None)
    assert result.exit_code == 2
    assert "prints one JSON document; pass one statement" in result.stderr
    assert not result.stdout
