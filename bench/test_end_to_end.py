"""The whole command, as a user runs it, in processes of its own."""

import json
import os
import subprocess
import sys
from time import perf_counter

import pytest
from timing import best_of_processes, of_process, printed

from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

MB = 1_000_000
ROUNDS = 3
COMMAND = [sys.executable, "-m", "fastcomm", "metrics", "--json"]
# The command after its imports. Prints the seconds it takes.
MEASURED = """
import sys
from time import process_time
import pyarrow.compute, fastcomm.metrics.command, fastcomm.cli.run_options
import fastcomm.metrics.computation, fastcomm.preparation, fastcomm.formats.opening
import fastcomm.show.console
begun = process_time()
fastcomm.metrics.command.run([sys.argv[1], "--json"], standalone_mode=False)
print(process_time() - begun)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A rank of 50 MB as text; 8, 32 and its halves of 50 MB, and 16 small ones, compressed."""
    folder = tmp_path_factory.mktemp("runs")
    job = Job.of(ranks=32)
    big = write(job, folder / "32", filler_bytes=50 * MB, workers=2)
    write(job, folder / "one", ranks=[0], filler_bytes=50 * MB, compress=False)
    write(job, folder / "small", ranks=range(16))
    for name, ranks in {"8": big[:8], "half": big[:16], "rest": big[16:]}.items():
        (folder / name).mkdir()
        for path in ranks:
            os.link(path, folder / name / path.name)
    subprocess.run([*COMMAND, folder / "small"], check=True, stdout=subprocess.DEVNULL)
    return folder


def seconds(*words):
    begun = perf_counter()
    subprocess.run([*map(str, words)], check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - begun


def test_one_trace_of_50_mb(runs, quotient):
    (path,) = (runs / "one").iterdir()

    imports = [sys.executable, "-c", "import numba, pyarrow.compute"]

    def measure():
        rounds = [(printed(MEASURED, path), of_process(*imports)) for _ in range(ROUNDS)]
        return map(min, zip(*rounds, strict=True))

    quotient("one_trace", measure)


def test_two_workers(runs, quotient):
    both = [*COMMAND, "--workers", 2, runs / "32"]
    halves = [[*COMMAND, runs / "half"], [*COMMAND, runs / "rest"]]

    def measure():
        rounds = [(at_once(*halves), seconds(*both)) for _ in range(2)]
        return map(min, zip(*rounds, strict=True))

    quotient("two_workers", measure)


def at_once(*commands):
    """Seconds until several commands that run at the same time are all done."""
    begun = perf_counter()
    started = [
        subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
        for command in commands
    ]
    assert [process.wait() for process in started] == [0] * len(commands)
    return perf_counter() - begun


def test_memory_does_not_grow_with_ranks(runs, held):
    held("memory", peak(runs / "32") / peak(runs / "8"))


def peak(folder):
    """Bytes of the largest process of the command, by a process that has no other child."""
    code = (
        "import json, resource, subprocess, sys;"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "print(json.dumps(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMAND, folder], check=True, capture_output=True
    )
    return json.loads(done.stdout)


def test_help(quotient):
    commands = [*COMMAND[:3], "--help"], [sys.executable, "-c", "import click"]
    quotient("help", lambda: best_of_processes(*commands, rounds=5))
