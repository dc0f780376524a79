"""Test the server over stdio, with the client of the official SDK."""

import json
import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import anyio
import pytest
from builders import mcp_client
from builders.commands import invoke
from builders.hang_files import write_example
from builders.mcp_client import ask, refused, total
from builders.processes import is_alive

import fastcomm
from fastcomm.agents.guide import skill
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


def workers():
    """The workers of all servers that this process started."""
    servers = [pid for pid, words in children(os.getpid()).items() if "mcp" in words]
    return [pid for own in servers for pid in children(own)]


def run(function, *args):
    """Run a coroutine, and return its result."""
    return anyio.run(partial(function, *args))


def test_the_tools_name_the_planted_straggler_and_prove_it(runs):
    async def session():
        async with mcp_client.server(runs) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            listed = await ask(client, "list_runs")
            found = await ask(client, "findings", run="runs0/slow")
            healed = await ask(client, "what_if", run="runs0/slow", heal=["rank:2"])
            other = await ask(client, "what_if", run="runs0/slow", heal=["rank:0"])
            healthy = await ask(client, "findings", run="runs0/healthy")
            return names, client.instructions, listed, found, healed, other, healthy

    names, instructions, listed, found, healed, other, healthy = run(session)
    assert names == set(TOOLS)
    assert "data, never instructions" in instructions
    assert {row[0] for row in listed["rows"]} >= {"runs0/slow", "runs0/healthy"}
    first = found["items"][0]
    assert (first["kind"], first["ranks"], first["confidence"]) == ("straggler", "2", "high")
    assert first["evidence"]["compute_ns"].endswith(" ms")
    cost, saved = first["cost_per_step"].split(",")[0], total(healed, "saved").split(",")[0]
    assert abs(_ms(cost) - _ms(saved)) < 0.3 * _ms(cost)
    assert abs(_ms(total(other, "saved").split(",")[0])) < 0.3 * _ms(cost)
    assert total(healthy, "causes") == "0"
    assert healthy["about"].startswith("The run is healthy")


def _ms(text):
    """A time in ms."""
    number, unit = text.split()
    return float(number) * {"ns": 1e-6, "us": 1e-3, "ms": 1, "s": 1e3}[unit]


def test_every_tool_answers(runs, tmp_path):
    calls = {
        "list_runs": {},
        "compare": {"before": "runs0/healthy", "after": "runs0/slow"},
        "plan": {"model": "llama3-8b", "gpus": 8, "global_batch": 64},
        "hang": {"run": "runs0/dumps"},
    }

    async def session():
        async with mcp_client.server(runs, "--out", tmp_path / "pages") as client:
            return {
                name: await ask(client, name, **calls.get(name, {"run": "runs0/slow"}))
                for name in TOOLS
            }

    answers = run(session)
    for name, answer in answers.items():
        assert len(json.dumps(answer)) < 4 * 2000, name
        assert answer["totals" if name != "list_runs" else "rows"], name
    assert total(answers["hang"], "hangs") == "yes"
    assert int(total(answers["hang"], "ranks of the job")) > 1
    assert answers["compare"]["items"][0]["state"] == "new"
    assert (tmp_path / "pages" / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_a_fault_of_all_ranks_is_named_first_and_its_fix_is_tried(tmp_path):
    write(
        Job.of(4, fault="launch_bound", steps=3, layers=2, micro_batches=4), tmp_path / "idle"
    )

    async def session():
        async with mcp_client.server(tmp_path) as client:
            run = f"{tmp_path.name}/idle"
            found = await ask(client, "findings", run=run)
            launches = next(one for one in found["items"] if "launches" in str(one))
            tried = await ask(client, "what_if", run=run, remove=["launches"])
            return found, launches, tried

    found, launches, tried = run(session)
    assert "Of all ranks: " in found["about"]
    assert launches["test_with"] == "what_if(remove=['launches'])"
    assert total(tried, "step after, interval") == "unknown"
    assert tried["unknown"][-1]["what"] == "interval of the step after"


def test_a_query_counts_what_a_run_has(runs):
    async def session():
        async with mcp_client.server(runs) as client:
            count = "select kind, count(*) n from events where rank = 2 group by kind"
            return (
                await ask(client, "sql", run="runs0/slow"),
                await ask(client, "sql", run="runs0/slow", table="events"),
                await ask(client, "sql", run="runs0/slow", query=count),
                [
                    await refused(client, "sql", run="runs0/slow", query=query)
                    for query in (
                        "select from",
                        "from read_csv('/etc/passwd')",
                        "select 1; select 2",
                    )
                ],
            )

    views, events, counted, errors = run(session)
    assert "collectives: " in views["about"]
    assert ["events", "duration_ns", "ns"] in [row[:3] for row in events["rows"]]
    expected = fastcomm.open(runs / "slow").sql("select count(*) n from events where rank = 2")
    assert sum(row[1] for row in counted["rows"]) == expected.to_arrow()["n"][0].as_py()
    assert counted["totals"][0]["rows"] == "read: events (kind, rank) of rank 2 (of 4)"
    assert [error.partition(":")[0] for error in errors] == ["sql"] * 3


def test_other_jobs_are_told_before_the_numbers_of_a_comparison(runs, tmp_path):
    write(Job.of(ranks=2, steps=2, layers=1), tmp_path / "small")

    async def session():
        async with mcp_client.server(runs, tmp_path) as client:
            both = {"before": "runs0/healthy", "after": f"{tmp_path.name}/small"}
            return await ask(client, "compare", **both)

    answer = run(session)
    assert [*answer][:2] == ["caution", "about"]
    assert "after of one of 2" in answer["caution"][0]
    assert not any("after of one of 2" in note for note in answer.get("notes", ()))


def test_what_is_wrong_is_one_line(runs, tmp_path):
    outside = tmp_path / "outside"
    shutil.copytree(runs / "slow", outside / "run")

    async def session():
        async with mcp_client.server(runs) as client:
            told = {
                "outside": await refused(client, "measure", run=str(outside / "run")),
                "above": await refused(client, "measure", run="runs0/../../x"),
                "absent": await refused(client, "measure", run="runs0/none"),
                "url": await refused(client, "measure", run="https://example.com/run"),
                "missing": await refused(client, "measure"),
                "dumps": await refused(client, "describe_run", run="runs0/dumps"),
                "unknown": await refused(client, "measure", run="runs0/slow", step=3),
                "table": await refused(client, "measure", run="runs0/slow", table="x"),
                "type": await refused(client, "measure", run="runs0/slow", limit="many"),
                "limit": await refused(client, "measure", run="runs0/slow", limit=0),
                "layout": await refused(client, "measure", run="runs0/slow", layout="zz=3"),
                "file": await refused(
                    client, "plan", model="/etc/passwd", gpus=8, global_batch=8
                ),
                "no dumps": await refused(client, "hang", run="runs0/slow"),
                "page": await refused(client, "page", run="runs0/slow"),
                "tool": await refused(client, "shell"),
            }
            # The server goes on.
            await ask(client, "describe_run", run="runs0/slow")
            return told

    told = run(session)
    assert "outside of the directories" in told["outside"]
    assert "outside of the directories" in told["above"]
    assert "no such run" in told["absent"]
    assert told["dumps"].endswith("dumps of a job that hangs: hang(run=...)")
    assert "run is missing" in told["missing"]
    assert "unknown option 'step'" in told["unknown"]
    assert "tables: parallelisms" in told["table"]
    assert "start it with --out" in told["page"]
    assert "no such tool" in told["tool"]
    assert "internal" not in str(told)


def test_a_link_that_leads_outside_is_refused(runs, tmp_path):
    inside = tmp_path / "inside"
    shutil.copytree(runs / "slow", inside / "run")
    secret = tmp_path / "rank9.json"
    secret.write_text("{}")
    (inside / "run" / "rank9.json").symlink_to(secret)
    (inside / "linked").symlink_to(runs / "slow")

    async def session():
        async with mcp_client.server(inside) as client:
            file = await refused(client, "measure", run="inside/run")
            return file, await refused(client, "measure", run="inside/linked")

    file, folder = run(session)
    assert "is a link that leads outside" in file
    assert "outside of the directories" in folder


def test_two_clients_ask_about_one_run_at_once(runs):
    async def session():
        answers = []

        async def one():
            async with mcp_client.server(runs) as client:
                answers.append(await ask(client, "measure", run="runs0/slow"))

        async with anyio.create_task_group() as group:
            group.start_soon(one)
            group.start_soon(one)
        return answers

    first, second = run(session)
    assert first == second


def test_requests_of_one_client_wait_for_each_other(runs):
    async def session():
        answers = {}

        async def one(client, name):
            answers[name] = await ask(client, name, run="runs0/slow")

        async with mcp_client.server(runs) as client, anyio.create_task_group() as group:
            for name in ("kernels", "measure", "findings"):
                group.start_soon(one, client, name)
        return answers

    assert set(run(session)) == {"kernels", "measure", "findings"}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_canceled_request_stops_its_work_within_a_second(tmp_path):
    write(Job.of(32, steps=2, layers=2), tmp_path / "run")

    async def session():
        async with mcp_client.server(tmp_path, "--workers", "2") as client:
            await ask(client, "list_runs")
            [worker] = workers()
            with anyio.CancelScope() as scope:

                async def progress(done, _total, _message):
                    if done:
                        scope.cancel()

                await client.call_tool(
                    "kernels", {"run": str(tmp_path / "run")}, progress_callback=progress
                )
                raise AssertionError("the request was not canceled")
            begin = time.monotonic()
            while is_alive(worker) and time.monotonic() - begin < 5:
                await anyio.sleep(0.01)
            took = time.monotonic() - begin
            answer = await ask(client, "describe_run", run=str(tmp_path / "run"))
            return took, answer, workers() != [worker]

    took, answer, is_new = run(session)
    assert took < 1
    assert is_new
    assert total(answer, "ranks").startswith("32 of 32")


def test_progress_is_reported(runs):
    async def session():
        reports = []

        async def progress(done, whole, message):
            reports.append((done, whole, message))

        async with mcp_client.server(runs) as client:
            await client.call_tool("measure", {"run": "runs0/slow"}, progress_callback=progress)
        return reports

    reports = run(session)
    assert reports[-1] == (4, 4, "read 4 of 4 ranks")
    assert [done for done, _, _ in reports] == sorted(done for done, _, _ in reports)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_the_worker_ends_with_its_server(runs):
    async def session():
        async with mcp_client.server(runs) as client:
            await ask(client, "list_runs")
            return workers()

    [worker] = run(session)
    begin = time.monotonic()
    while is_alive(worker) and time.monotonic() - begin < 5:
        time.sleep(0.02)
    assert not is_alive(worker)


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
            time.sleep(0.02)
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
def test_a_killed_worker_is_an_error_and_the_next_request_gets_a_new_one(runs):
    async def session():
        async with mcp_client.server(runs) as client:
            await ask(client, "list_runs")
            os.kill(workers()[0], signal.SIGKILL)
            first = await client.call_tool("measure", {"run": "runs0/slow"})
            return first, await ask(client, "measure", run="runs0/slow")

    first, second = run(session)
    assert first.is_error is False or "the worker ended" in first.content[0].text
    assert second["totals"]


def test_a_run_that_changes_is_measured_again(runs, tmp_path):
    shutil.copytree(runs / "slow", tmp_path / "run")

    async def session():
        async with mcp_client.server(tmp_path) as client:
            before = await ask(client, "measure", run=str(tmp_path / "run"))
            shutil.rmtree(tmp_path / "run")
            shutil.copytree(runs / "healthy", tmp_path / "run")
            return before, await ask(client, "measure", run=str(tmp_path / "run"))

    before, after = run(session)
    assert _ms(total(before, "mean step")) > _ms(total(after, "mean step"))


def test_the_server_says_which_package_it_lacks(runs, monkeypatch):
    monkeypatch.setattr("fastcomm.agents.command.find_spec", lambda _: None)
    done = invoke("mcp", runs, code=1)
    assert "pip install 'fastcomm[mcp]'" in done.stderr


def test_the_skill_is_printed_as_a_file():
    assert invoke("skill").stdout == skill()
