"""Test that the Python API takes what people pass, and returns what commands print."""

import json
import subprocess
import sys
from os import environ

import numpy as np
import pytest
from click.testing import CliRunner

import fastcomm
from fastcomm.cli.main import main
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

PLAN = {"model": "llama3-8b", "gpus": 64, "global_batch": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write(Job.of(ranks=4, steps=2, layers=1, micro_batches=2), folder)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return fastcomm.open(folder)


COMMANDS = [
    (("info",), lambda run: run.info()),
    (("metrics",), lambda run: run.metrics()),
    (("critical-path",), lambda run: run.critical_path()),
    (("what-if",), lambda run: run.critical_path().what_if()),
    (
        ("what-if", "--scale", "comm=0.5"),
        lambda run: run.critical_path().what_if(scale="comm=0.5"),
    ),
    (("kernels",), lambda run: run.kernels()),
]


@pytest.mark.parametrize(
    ("words", "call"),
    COMMANDS,
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_to_dict_is_what_the_command_prints(folder, run, words, call):
    done = CliRunner().invoke(main, [*words, str(folder), "--json"])
    assert json.loads(done.stdout) == call(run).to_dict()


def test_numbers_of_numpy_are_numbers(folder, run):
    rank = np.int64(2)
    assert fastcomm.open(folder, ranks=np.arange(2), tp=np.int32(2)).ranks == (0, 1)
    assert run.read(rank).meta.rank == 2
    path = run.critical_path(rank=rank)
    assert path.to_dict() == run.critical_path(rank=2).to_dict()
    with pytest.raises(fastcomm.FastcommError, match=r"invalid rank 2\.5: expected a whole"):
        run.critical_path(rank=np.float64(2.5))


def test_edits_are_a_dictionary_too(run):
    path = run.critical_path()
    assert (
        path.what_if(scale={"comm": 0.5}).to_dict() == path.what_if(scale="comm=0.5").to_dict()
    )


def test_a_sweep_is_in_the_repr(run):
    text = repr(run.critical_path().what_if(scale="comm=0.5:1:0.5"))
    assert "scale comm" in text
    assert len(text.splitlines()) == 1


def test_the_case_of_a_cluster_has_no_effect():
    expected = fastcomm.plan(**PLAN, cluster="h100")
    assert fastcomm.plan(**PLAN, cluster="H100").to_dict() == expected.to_dict()


def test_a_list_of_one_number_is_the_number():
    asked = {"model": "7B", "seq_len": 4096, "global_batch": "1Mi"}
    expected = fastcomm.search_strategies(**asked, gpus=16)
    assert fastcomm.search_strategies(**asked, gpus=[16]).to_dict() == expected.to_dict()


def test_a_script_without_a_guard_has_workers(folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import fastcomm\n"
        f"run = fastcomm.open({str(folder)!r}, workers=2)\n"
        "print(len(run.metrics().ranks))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environ
    )
    assert (done.stdout, done.stderr) == ("4\n", "")
    assert done.returncode == 0


GUARDED = """
import multiprocessing
import os

import fastcomm
from fastcomm.executors.executor import Local, Task
from fastcomm.formats.opening import open_run


def events(trace):
    return trace.events.num_rows


def finish(merged, skipped, spread):
    return merged


def measured(_):
    try:
        return len(fastcomm.open({folder!r}, workers=2).metrics().ranks)
    except fastcomm.FastcommError as error:
        return str(error)


if __name__ == "__main__":
    task = Task(measure=events, merge=sum, finish=finish, content="all")
    print(Local(workers=2).gather(open_run({folder!r}), task))
    print(measured(0))
    child = os.fork()
    if not child:
        print(measured(0), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.map(measured, [0]))
"""


def test_workers_run_functions_of_a_script_and_a_process_that_can_have_none_says_so(
    folder, run, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text(GUARDED.format(folder=str(folder)))
    done = subprocess.run(
        [sys.executable, "-u", "-W", "ignore::DeprecationWarning", str(script)],  # of fork
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    events, own, forked, pooled = done.stdout.splitlines()
    assert int(events) == sum(run.read(rank).events.num_rows for rank in run.ranks)
    assert (own, done.stderr) == ("4", "")
    assert forked.startswith("workers: this process was forked from one that has workers")
    assert pooled.startswith("workers: this process is a daemon")
