"""Test worker processes of this machine: failures, signals and cleanup."""

import os
import signal
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest
from builders import dask_cluster as c
from builders import kineto_text as k
from builders.processes import is_alive

from fastcomm.errors import FastcommError
from fastcomm.executors.executor import WIDTH, Local

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at /proc")

TWO = Local(workers=2, preload="fastcomm.executors.executor")


def test_a_killed_worker_loses_only_its_rank(tmp_path):
    reads = [c.fine] * 12
    reads[3] = c.deadly
    reads[8] = partial(c.deadly_once, tmp_path / "killed")
    seen = []
    merged, lost = TWO.gather(c.going_on(c.run_of(*reads)), c.COUNT, progress=seen.append)
    assert merged == dict.fromkeys(sorted({*range(12)} - {3}), 1)
    assert [each.rank for each in lost] == [3]
    assert "rank3.json: the worker that read rank 3 was killed" in lost[0].error
    assert sorted(source.rank for source in seen) == list(range(12))
    with pytest.raises(FastcommError, match=r"rank1\.json: the worker"):
        TWO.gather(c.run_of(c.fine, c.deadly), c.COUNT)


def test_an_error_ends_the_workers_at_once():
    run = c.run_of(partial(slow_bad), *[partial(c.slow, seconds=60)] * 3)
    begun = monotonic()
    with pytest.raises(FastcommError, match=r"rank0\.json: damaged"):
        TWO.gather(run, c.COUNT)
    assert monotonic() - begun < 30


def slow_bad(rank):
    sleep(0.1)
    c.bad(rank)


def test_a_bug_is_raised_as_it_is_with_the_rank():
    for executor in (Local(workers=1), TWO):
        with pytest.raises(ZeroDivisionError, match="a bug") as raised:
            executor.gather(c.going_on(c.run_of(c.fine, c.buggy)), c.COUNT)
        assert raised.value.__notes__ == ["rank 1: rank1.json"]


def below(process):
    """The processes that descend from one, by /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ProcessLookupError):
            continue
    found, more = set(), {process}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - found
        found |= more
    return found


def all_end(processes, seconds=20):
    until = monotonic() + seconds
    while any(map(is_alive, processes)) and monotonic() < until:
        sleep(0.05)
    return not any(map(is_alive, processes))


def linked(folder, ranks, kernels=15_000):
    """One trace as that of each rank."""
    step = [k.mark("ProfilerStep#0", 0, 100_000)]
    step += [k.kernel("gemm", 5 * n, 3) for n in range(kernels)]
    step.append(k.all_reduce(90_000, 5))
    k.write(folder / "rank0.json", step, rank=None, world=None)
    for rank in range(1, ranks):
        os.link(folder / "rank0.json", folder / f"rank{rank}.json")
    return folder


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Traces that take two processes some seconds."""
    return linked(tmp_path_factory.mktemp("many"), WIDTH + 6)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """Traces that no machine measures before a signal of these tests."""
    return linked(tmp_path_factory.mktemp("endless"), 12 * WIDTH)


@pytest.mark.parametrize(
    ("command", "whom"),
    [("metrics", "group"), ("ingest", "group"), ("ingest", "alone")],
)
def test_ctrl_c_leaves_no_incomplete_file_and_no_process(many, tmp_path, command, whom):
    """Of the terminal, which sends it to all processes, and of a script, to the first alone."""
    output = tmp_path / "out"
    words = [command, many, "--workers", "2", "--output", output]
    started = subprocess.Popen(
        [sys.executable, "-m", "fastcomm", *map(str, words)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    if command == "ingest":  # a first rank is being written
        while started.poll() is None and not list(output.glob("*rank-*")):
            sleep(0.005)
    else:  # there are the server, the tracker of resources and both workers
        while started.poll() is None and len(below(started.pid)) < 4:
            sleep(0.05)
    processes = below(started.pid)
    (os.killpg if whom == "group" else os.kill)(started.pid, signal.SIGINT)
    stdout, stderr = started.communicate(timeout=30)
    assert started.returncode == 1
    assert (stdout, stderr.strip()) == ("", "Aborted!")
    assert all_end(processes)
    assert not list(output.glob(".*"))
    if command == "metrics":
        assert not output.exists()


def test_sigterm_leaves_no_files_or_processes(many, tmp_path):
    """By SIGTERM, while events of a first batch of ranks lie in the folder for such."""
    words = ["metrics", many, "--workers", "2"]
    started = subprocess.Popen(
        [sys.executable, "-m", "fastcomm", *map(str, words)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    processes = []
    while started.poll() is None and not list(tmp_path.glob("fastcomm-*/*")):
        processes = below(started.pid)
        sleep(0.05)
    started.terminate()
    assert started.wait(timeout=30) == 128 + signal.SIGTERM
    assert all_end(processes)
    assert not list(tmp_path.glob("fastcomm-*"))


def test_sigterm_ends_the_server_that_compiles_kernels(many, tmp_path):
    """On a machine without compiled code, which takes the server half a minute to compile."""
    started = subprocess.Popen(
        [sys.executable, "-m", "fastcomm", "metrics", str(many), "--workers", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            "TMPDIR": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
    )
    compiled = tmp_path / "cache" / "fastcomm"
    while started.poll() is None and not list(compiled.glob("*/*.nbc")):
        sleep(0.05)
    processes = below(started.pid)
    started.terminate()
    assert started.wait(timeout=30) == 128 + signal.SIGTERM
    assert all_end(processes, seconds=10)
    assert not list(tmp_path.glob("fastcomm-*"))


_MOMENTS = [
    ((signal.SIGINT,), 0.2),
    ((signal.SIGTERM, signal.SIGINT), 0.6),
]
_EVERY_MOMENT = product(
    ((signal.SIGINT,), (signal.SIGTERM, signal.SIGINT)),
    np.arange(0.1, 3.1, 0.1),
)


@pytest.mark.parametrize(
    ("numbers", "seconds"),
    [*_MOMENTS, *(pytest.param(*each, marks=pytest.mark.soak) for each in _EVERY_MOMENT)],
)
def test_signals_at_any_moment_leave_no_files_or_processes(endless, tmp_path, numbers, seconds):
    """To the group of processes, while they start and work."""
    temporary, output = tmp_path / "tmp", tmp_path / "out"
    temporary.mkdir()
    words = ["metrics", endless, "--workers", "2", "--output", output]
    started = subprocess.Popen(
        [sys.executable, "-m", "fastcomm", *map(str, words)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    sleep(seconds)
    processes = below(started.pid)
    for number in numbers:
        os.killpg(started.pid, number)
    _, stderr = started.communicate(timeout=30)
    assert started.returncode != 0
    # Before the program begins, Python handles signals, and prints where it was.
    is_before = stderr.endswith("KeyboardInterrupt\n") and "__main__.py" not in stderr
    assert stderr.strip() in {"", "Aborted!"} or is_before
    assert all_end(processes)
    assert list(temporary.iterdir()) == []
    assert not output.exists()


_ENDLESS = """
from builders import dask_cluster as c
from fastcomm.executors.executor import Local
from fastcomm.process import interruptible

if __name__ == "__main__":
    with interruptible():
        Local(workers=2).gather(c.run_of(c.endless, c.endless), c.COUNT)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_workers_in_calls_that_never_end(tmp_path, number):
    script = tmp_path / "endless.py"
    script.write_text(_ENDLESS)
    started = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert started.stdout.readline() == b"begun\n"
    sleep(0.2)
    processes = below(started.pid)
    begun = monotonic()
    started.send_signal(number)
    started.wait(timeout=20)
    started.stdout.close()
    assert monotonic() - begun < 10
    assert all_end(processes)


def test_workers_start_with_a_long_temporary_path(tmp_path):
    temporary, traces = tmp_path / ("long" * 30), tmp_path / "traces"
    temporary.mkdir()
    traces.mkdir()
    linked(traces, WIDTH + 6, kernels=3)
    done = subprocess.run(
        [sys.executable, "-m", "fastcomm", "metrics", traces, "--workers", "2"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(temporary.iterdir()) == []


_PRELOADED = """
import once
from fastcomm.executors.processes import Processes

with Processes(2, preload="once") as processes:
    print(*processes.spread(once.is_importer, range(8)))
"""
_ONCE = """
import os

importer = os.getpid()


def is_importer(_):
    return importer == os.getpid()
"""


def test_workers_are_forked_from_the_process_that_imported_a_module_for_them(tmp_path):
    (tmp_path / "once.py").write_text(_ONCE)
    done = subprocess.run(
        [sys.executable, "-c", _PRELOADED],
        check=False,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        },
    )
    assert done.stdout.split() == ["False"] * 8, done.stderr


def test_workers_end_with_a_killed_command(many, tmp_path):
    words = ["ingest", many, "--workers", "2", "--output", tmp_path / "out"]
    started = subprocess.Popen([sys.executable, "-m", "fastcomm", *map(str, words)])
    while started.poll() is None and len(below(started.pid)) < 4:
        sleep(0.05)
    processes = below(started.pid)
    started.kill()
    started.wait()
    assert all_end(processes)
