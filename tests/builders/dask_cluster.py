"""A Dask cluster of real processes that tests can kill, and ranks that kill workers."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import sleep

from builders.places import TESTS
from builders.processes import is_alive

from fastcomm.errors import TraceFileError
from fastcomm.executors.executor import Task, both
from fastcomm.trace.run_traces import RunTraces, Source

# Dask looks after dead processes at once, and waits for nothing; a nanny forks its workers.
# It takes no samples of what a worker does, which cost a fiftieth of a core.
SETTINGS = {
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__GIL__ENABLED": "False",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver",
}


# Imports Dask and what workers read traces with once, and forks schedulers and workers.
_FORKS = """
import json, os, signal, sys
from distributed.cli import dask_scheduler, dask_worker
from fastcomm.executors import dask
from fastcomm.formats import opening
from fastcomm.metrics import computation
programs = {"scheduler": dask_scheduler.main, "worker": dask_worker.main}
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
for line in sys.stdin:
    child = os.fork()
    if not child:
        break
    print(child, flush=True)
else:
    sys.exit()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
for file in range(3):
    os.dup2(os.open(os.devnull, os.O_RDWR), file)
what, *words = json.loads(line)
programs[what](words)
"""


class Cluster:
    """A scheduler, and workers without a nanny: what is killed stays dead."""

    def __init__(self, folder):
        self.folder = folder
        self.file = folder / "scheduler.json"
        self.pids = {}
        self.forks = self.python("-c", _FORKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.start("scheduler", "--port", "0", "--host", "127.0.0.1")

    @property
    def address(self):
        return f"file:{self.file}"

    def python(self, *words, environment=None, **streams):
        """Start a process of Python with the settings of the cluster."""
        path = os.pathsep.join([*sys.path, str(TESTS)])
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, **SETTINGS, **(environment or {})},
            text=True,
            **streams,
        )

    def start(self, what, *words, name=None):
        call = [what, *words, "--no-dashboard", "--scheduler-file", str(self.file)]
        print(json.dumps(call), file=self.forks.stdin, flush=True)
        self.pids[name or what] = int(self.forks.stdout.readline())

    def worker(self, name, *words):
        words = words or ("--no-nanny",)
        common = ["--nthreads", "1", "--local-directory", str(self.folder)]
        self.start("worker", *words, *common, name=name)

    def nanny(self, name, *words):
        """Start a worker with a nanny that starts it again when it was killed."""
        self.worker(name, "--nanny", "--memory-limit", "450MB", *words)

    def kill(self, name):
        pid = self.pids.pop(name)
        with suppress(ProcessLookupError):  # killed itself
            os.kill(pid, signal.SIGKILL)
        while is_alive(pid):
            sleep(0.01)

    def kill_once(self, name):
        if name in self.pids:
            self.kill(name)

    def close(self):
        for name in list(self.pids):
            self.kill(name)
        self.forks.communicate()


def wait_for_nanny(client):
    """Wait until the nanny of the only worker knows that its worker runs.

    A worker takes tasks a moment before its nanny hears of it; a nanny whose worker dies in
    between counts that as a failed start, and gives up.
    """
    client.wait_for_workers(1, timeout=30)
    for _ in range(600):
        if set(client.run(_status, nanny=True).values()) == {"running"}:
            return
        sleep(0.05)
    raise AssertionError("the nanny does not run after 30 s")


def _status(dask_worker):
    """The status of the nanny that runs this function."""
    return dask_worker.status.name


# A nanny that does not hear in time that its worker started, and so does not restart it.
LATE_NANNY = """
import distributed.nanny
distributed.nanny.WorkerProcess._init_msg_interval = 3600
"""


def _read(read, rank, _content):
    return read(rank)


def going_on(run):
    """Return the run as one that is read without its unreadable ranks."""
    return replace(run, keep_going=True)


def run_of(*reads):
    """A run of ranks that are read by these functions."""
    return RunTraces(
        sources=tuple(
            Source(
                rank=rank,
                path=Path(f"rank{rank}.json"),
                size=1,
                reader=partial(_read, read, rank),
            )
            for rank, read in enumerate(reads)
        ),
        world_size=len(reads),
    )


def fine(rank):
    return {rank: 1}


def slow(rank, seconds=0.05):
    sleep(seconds)
    return {rank: 1}


def endless(rank):
    """Search for years; a worker holds the lock of Python meanwhile."""
    os.write(1, b"begun\n")
    re.search("(.|.)*!$", "a" * 60)
    return {rank: 1}


def deadly(rank):
    """Kill the process that reads it."""
    os.kill(os.getpid(), signal.SIGKILL)


def deadly_once(marker, rank):
    """Kill the first process that reads it."""
    if not marker.exists():
        marker.touch()
        deadly(rank)
    return {rank: 1}


def hungry(rank):
    """Need more memory than a worker of 450 MB may take, and stop where nobody stops it."""
    found = []
    for _ in range(100):
        found.append(bytearray(b"x") * (8 << 20))
        sleep(0.01)
    raise AssertionError(f"rank {rank} took {len(found) * 8} MiB, and nobody stopped it")


def bad(rank):
    raise TraceFileError(f"rank{rank}.json: damaged")


def buggy(rank):
    raise ZeroDivisionError("a bug")


def too_large(rank):
    raise MemoryError


def merge(parts):
    """How often each rank is in the parts."""
    found = {}
    for part in parts:
        for rank, times in part.items():
            found[rank] = found.get(rank, 0) + times
    return found


def itself(trace):
    return trace


COUNT = Task(measure=itself, merge=merge, finish=both)
