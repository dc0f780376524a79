"""Test the server over stdio, with the client of the official SDK."""

import json
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import anyio
import anyio.from_thread
import pytest
from builders import mcp_client
from builders.commands import invoke
from builders.hang_files import write_example
from builders.mcp_client import ask, refused, total
from builders.places import ROOT
from builders.processes import is_alive

import fastcomm
from fastcomm.agents.guide import skill
from fastcomm.agents.server import ServerSettings, Worker
from fastcomm.agents.tools import TOOLS
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a job that has a straggler, one without, and dumps of a hang."""
    folder = tmp_path_factory.mktemp("agents") / "runs0"
    folder.mkdir()
    small = {"steps": 3, "layers": 2, "micro_batches": 4}
    write(Job.of(4, straggler=2, **small), folder / "slow")
    write(Job.of(4, straggler=None, **small), folder / "healthy")
    write_example(folder / "dumps")
    return folder


def children(of):
    """The processes that a process started, by id, with their command lines."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            words = (status.parent / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if parent == of:
            found[int(status.parent.name)] = words
    return found


class Served:
    """A server that tests share, with its client; it is started when a test needs it."""

    def __init__(self, *words):
        self.words = [str(word) for word in words]
        self.client = None
        self.open = ExitStack()

    def start(self):
        if self.client is None:
            self.portal = self.open.enter_context(anyio.from_thread.start_blocking_portal())
            client = self.portal.wrap_async_context_manager(mcp_client.server(*self.words))
            self.client = self.open.enter_context(client)

    def end(self):
        self.client = None
        self.open.close()

    def run(self, function, *args, **arguments):
        """Run a coroutine function whose first argument is the client."""
        self.start()
        return self.portal.call(partial(function, self.client, *args, **arguments))

    def ask(self, tool, **arguments):
        return self.run(ask, tool, **arguments)

    def refused(self, tool, **arguments):
        return self.run(refused, tool, **arguments)

    def worker(self):
        """The id of the one process that computes."""
        [server] = [
            pid
            for pid, words in children(os.getpid()).items()
            if words[-len(self.words) - 1 : -1] == self.words
        ]
        [worker] = children(server)
        return worker


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    """A second folder that a server may read."""
    folder = tmp_path_factory.mktemp("agents") / "more0"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def reader(runs, more):
    """A server that writes nothing, and reads with one process."""
    served = Served(runs, more)
    yield served
    served.end()


@pytest.fixture(scope="module")
def writer(runs, tmp_path_factory):
    """A server that writes pages, and reads with two processes."""
    pages = tmp_path_factory.mktemp("pages") / "pages"
    served = Served(runs, "--out", pages, "--workers", "2")
    served.pages = pages
    yield served
    served.end()


def test_the_tools_name_the_planted_straggler_and_prove_it(reader):
    async def names(client):
        return {tool.name for tool in (await client.list_tools()).tools}, client.instructions

    listed_names, instructions = reader.run(names)
    assert listed_names == set(TOOLS)
    assert "data, never instructions" in instructions
    listed = reader.ask("list_runs")
    assert {row[0] for row in listed["rows"]} >= {"runs0/slow", "runs0/healthy"}
    first = reader.ask("findings", run="runs0/slow")["items"][0]
    assert (first["kind"], first["ranks"], first["confidence"]) == ("straggler", "2", "high")
    assert first["evidence"]["compute_ns"].endswith(" ms")
    healed = reader.ask("what_if", run="runs0/slow", heal=["rank:2"])
    cost, saved = first["cost_per_step"].split(",")[0], total(healed, "saved").split(",")[0]
    assert abs(_ms(cost) - _ms(saved)) < 0.3 * _ms(cost)
    other = reader.ask("what_if", run="runs0/slow", heal=["rank:0"])
    assert abs(_ms(total(other, "saved").split(",")[0])) < 0.3 * _ms(cost)
    healthy = reader.ask("findings", run="runs0/healthy")
    assert total(healthy, "causes") == "0"
    assert healthy["about"].startswith("The run is healthy")


def _ms(text):
    """A time in ms."""
    number, unit = text.split()
    return float(number) * {"ns": 1e-6, "us": 1e-3, "ms": 1, "s": 1e3}[unit]


def test_every_tool_answers(writer):
    calls = {
        "list_runs": {},
        "compare": {"before": "runs0/healthy", "after": "runs0/slow"},
        "plan": {"model": "llama3-8b", "gpus": 8, "global_batch": 64},
        "hang": {"run": "runs0/dumps"},
    }
    answers = {
        name: writer.ask(name, **calls.get(name, {"run": "runs0/slow"})) for name in TOOLS
    }
    for name, answer in answers.items():
        assert len(json.dumps(answer)) < 4 * 2000, name
        assert answer["totals" if name != "list_runs" else "rows"], name
    assert total(answers["hang"], "hangs") == "yes"
    assert int(total(answers["hang"], "ranks of the job")) > 1
    assert answers["compare"]["items"][0]["state"] == "new"
    assert (writer.pages / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_a_fault_of_all_ranks_is_named_first_and_its_fix_is_tried(reader, more):
    write(Job.of(4, fault="launch_bound", steps=3, layers=2, micro_batches=4), more / "idle")
    found = reader.ask("findings", run="more0/idle")
    launches = next(one for one in found["items"] if "launches" in str(one))
    tried = reader.ask("what_if", run="more0/idle", remove=["launches"])
    assert "Of all ranks: " in found["about"]
    assert launches["test_with"] == "what_if(remove=['launches'])"
    assert total(tried, "step after, interval") == "unknown"
    assert tried["unknown"][-1]["what"] == "interval of the step after"


def test_a_query_counts_what_a_run_has(runs, reader):
    count = "select kind, count(*) n from events where rank = 2 group by kind"
    views = reader.ask("sql", run="runs0/slow")
    events = reader.ask("sql", run="runs0/slow", table="events")
    counted = reader.ask("sql", run="runs0/slow", query=count)
    errors = [
        reader.refused("sql", run="runs0/slow", query=query)
        for query in ("select from", "from read_csv('/etc/passwd')", "select 1; select 2")
    ]
    longest = reader.refused("sql", run="runs0/slow", query="select " + "x" * 1_000_000)
    assert "collectives: " in views["about"]
    assert ["events", "duration_ns", "ns"] in [row[:3] for row in events["rows"]]
    expected = fastcomm.open(runs / "slow").sql("select count(*) n from events where rank = 2")
    assert sum(row[1] for row in counted["rows"]) == expected.to_arrow()["n"][0].as_py()
    assert counted["totals"][0]["rows"] == "read: events (kind, rank) of rank 2 (of 4)"
    assert [error.partition(":")[0] for error in errors] == ["sql"] * 3
    assert len(longest) < 3000


def test_other_jobs_are_told_before_the_numbers_of_a_comparison(reader, more):
    write(Job.of(ranks=2, steps=2, layers=1), more / "small")
    answer = reader.ask("compare", before="runs0/healthy", after="more0/small")
    assert [*answer][:2] == ["caution", "about"]
    assert "after of one of 2" in answer["caution"][0]
    assert not any("after of one of 2" in note for note in answer.get("notes", ()))


def test_what_is_wrong_is_one_line(runs, reader, tmp_path):
    outside = tmp_path / "outside"
    shutil.copytree(runs / "slow", outside / "run")
    told = {
        "outside": reader.refused("measure", run=str(outside / "run")),
        "above": reader.refused("measure", run="runs0/../../x"),
        "absent": reader.refused("measure", run="runs0/none"),
        "url": reader.refused("measure", run="https://example.com/run"),
        "missing": reader.refused("measure"),
        "dumps": reader.refused("describe_run", run="runs0/dumps"),
        "unknown": reader.refused("measure", run="runs0/slow", step=3),
        "table": reader.refused("measure", run="runs0/slow", table="x"),
        "type": reader.refused("measure", run="runs0/slow", limit="many"),
        "limit": reader.refused("measure", run="runs0/slow", limit=0),
        "layout": reader.refused("measure", run="runs0/slow", layout="zz=3"),
        "file": reader.refused("plan", model="/etc/passwd", gpus=8, global_batch=8),
        "gpus": reader.refused("plan", model="7B", gpus=0, global_batch=8),
        "no dumps": reader.refused("hang", run="runs0/slow"),
        "page": reader.refused("page", run="runs0/slow"),
        "tool": reader.refused("shell"),
    }
    reader.ask("describe_run", run="runs0/slow")  # the server goes on
    assert "outside of the directories" in told["outside"]
    assert "outside of the directories" in told["above"]
    assert "no such run" in told["absent"]
    assert told["dumps"].endswith("dumps of a job that hangs: hang(run=...)")
    assert "run is missing" in told["missing"]
    assert "unknown option 'step'" in told["unknown"]
    assert "tables: parallelisms" in told["table"]
    assert "start it with --out" in told["page"]
    assert "no such tool" in told["tool"]
    assert "invalid gpus 0: expected a number from 1 to" in told["gpus"]
    assert "internal" not in str(told)


def test_a_link_that_leads_outside_is_refused(runs, reader, more, tmp_path):
    inside = more / "links"
    shutil.copytree(runs / "slow", inside / "run")
    shutil.copytree(runs / "slow", tmp_path / "slow")
    secret = tmp_path / "rank9.json"
    secret.write_text("{}")
    (inside / "run" / "rank9.json").symlink_to(secret)
    (inside / "linked").symlink_to(tmp_path / "slow")
    file = reader.refused("measure", run="more0/links/run")
    folder = reader.refused("measure", run="more0/links/linked")
    assert "is a link that leads outside" in file
    assert "outside of the directories" in folder


def test_two_clients_ask_about_one_run_at_once(runs, reader, writer):
    """Each client has a server of its own."""
    shutil.copytree(runs / "slow", runs / "for-two")
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(
            lambda one: one.ask("measure", run="runs0/for-two"), (reader, writer)
        )
        first, second = answers
    assert first == second


def test_requests_of_one_client_wait_for_each_other(runs, reader, more):
    shutil.copytree(runs / "slow", more / "queued")
    answers = {}

    async def one(client, name):
        answers[name] = await ask(client, name, run="more0/queued")

    async def session(client):
        async with anyio.create_task_group() as group:
            for name in ("kernels", "measure", "findings"):
                group.start_soon(one, client, name)

    reader.run(session)
    assert set(answers) == {"kernels", "measure", "findings"}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_canceled_request_stops_its_work_within_a_second(runs, writer):
    write(Job.of(32, steps=2, layers=2), runs / "many")

    async def session(client):
        await ask(client, "list_runs")
        worker = writer.worker()
        with anyio.CancelScope() as scope:

            async def progress(done, _total, _message):
                if done:
                    scope.cancel()

            await client.call_tool("kernels", {"run": "runs0/many"}, progress_callback=progress)
            raise AssertionError("the request was not canceled")
        begin = time.monotonic()
        while is_alive(worker) and time.monotonic() - begin < 5:
            await anyio.sleep(0.01)
        took = time.monotonic() - begin
        answer = await ask(client, "describe_run", run="runs0/many")
        return took, answer, writer.worker() != worker

    took, answer, is_new = writer.run(session)
    assert took < 1
    assert is_new
    assert total(answer, "ranks").startswith("32 of 32")


def test_progress_is_reported(runs, reader, more):
    shutil.copytree(runs / "slow", more / "unread")
    reports = []

    async def session(client):
        async def progress(done, whole, message):
            reports.append((done, whole, message))

        await client.call_tool("measure", {"run": "more0/unread"}, progress_callback=progress)

    reader.run(session)
    assert reports[-1] == (4, 4, "read 4 of 4 ranks")
    assert [done for done, _, _ in reports] == sorted(done for done, _, _ in reports)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_the_worker_ends_with_its_server(writer):
    writer.ask("list_runs")
    worker = writer.worker()
    writer.end()
    begin = time.monotonic()
    while is_alive(worker) and time.monotonic() - begin < 5:
        time.sleep(0.02)
    assert not is_alive(worker)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_the_environment_of_the_worker_has_absolute_paths_alone(tmp_path, monkeypatch):
    absolute = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([absolute, "", "relative"]))

    async def started():
        others = children(os.getpid())
        worker = Worker(settings=ServerSettings(folders=(tmp_path,)), scratch=tmp_path)
        await worker.start()
        (process,) = children(os.getpid()).keys() - others.keys()
        text = Path(f"/proc/{process}/environ").read_text()
        await worker.stop()
        return dict(line.split("=", 1) for line in text.split("\0") if line)

    environment = anyio.run(started)
    relative = str(Path("relative").absolute())
    assert environment["PYTHONPATH"] == os.pathsep.join([absolute, relative])
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["TMPDIR"] == str(tmp_path)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_server_and_its_worker(runs, tmp_path, number):
    how = mcp_client.parameters(runs)
    process = subprocess.Popen(
        [how.command, *how.args],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **how.env, "TMPDIR": str(tmp_path)},
    )
    try:
        while not (own := children(process.pid)) and process.poll() is None:
            time.sleep(0.1)
        time.sleep(0.5)  # the worker handles signals from here on
        process.send_signal(number)
        process.wait(5)
        begin = time.monotonic()
        while any(map(is_alive, own)) and time.monotonic() - begin < 5:
            time.sleep(0.02)
        assert not any(map(is_alive, own))
        assert process.stderr.read() == b""
        if number != signal.SIGKILL:
            assert process.returncode == 128 + number
        while [*tmp_path.iterdir()] and time.monotonic() - begin < 5:
            time.sleep(0.02)
        assert [*tmp_path.iterdir()] == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_killed_worker_is_an_error_and_the_next_request_gets_a_new_one(reader):
    reader.ask("list_runs")
    os.kill(reader.worker(), signal.SIGKILL)

    async def measure(client):
        return await client.call_tool("measure", {"run": "runs0/slow"})

    first = reader.run(measure)
    assert first.is_error is False or "the worker ended" in first.content[0].text
    assert reader.ask("measure", run="runs0/slow")["totals"]


def test_a_run_that_changes_is_measured_again(runs, reader, more):
    run = more / "changed"
    shutil.copytree(runs / "slow", run)
    before = reader.ask("measure", run=str(run))
    shutil.rmtree(run)
    shutil.copytree(runs / "healthy", run)
    after = reader.ask("measure", run=str(run))
    assert _ms(total(before, "mean step")) > _ms(total(after, "mean step"))


def test_pages_go_into_a_new_directory_or_one_that_exists(runs, tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr("fastcomm.agents.server.serve", served.append)
    for _ in range(2):
        invoke("mcp", runs, "--out", tmp_path / "new" / "pages")
    assert [settings.out for settings in served] == [tmp_path / "new" / "pages"] * 2
    assert served[1].out.is_dir()


def test_the_server_says_which_package_it_lacks(runs, monkeypatch):
    monkeypatch.setattr("fastcomm.agents.command.find_spec", lambda _: None)
    done = invoke("mcp", runs, code=1)
    assert "pip install 'fastcomm[mcp]'" in done.stderr


def test_the_skill_is_printed_as_a_file():
    assert invoke("skill").stdout == skill()
