"""Seconds of the processor, for functions and whole processes; and the scan of a text."""

import os
import subprocess
import sys
from pathlib import Path
from time import process_time

import numpy as np

from fastcomm.formats.kineto import envelope
from fastcomm.formats.kineto.categories import METRICS
from fastcomm_kernels import json_scan, string_tables
from fastcomm_kernels._llvm import PADDING

TESTS = Path(__file__).parents[1] / "tests"


def best(*runs, rounds):
    """Return the least seconds of each function, called in turn."""
    seconds = [[] for _ in runs]
    for _ in range(rounds):
        for run, taken in zip(runs, seconds, strict=True):
            begun = process_time()
            run()
            taken.append(process_time() - begun)
    return [min(taken) for taken in seconds]


def environment():
    """Return the environment of processes. They keep compiled modules, as a user's do."""
    return {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }


def of_process(*command):
    """Return the seconds of a process and of those that it waited for."""
    process = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.DEVNULL, env=environment()
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return used.ru_utime + used.ru_stime


def best_of_processes(*commands, rounds):
    """Return the least seconds of each command, started in turn."""
    taken = [[of_process(*command) for command in commands] for _ in range(rounds)]
    return [min(seconds) for seconds in zip(*taken, strict=True)]


def printed(code, *arguments):
    """Return the number that Python code prints last, in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    variables = {**environment(), "PYTHONPATH": path}
    done = subprocess.run(command, check=True, capture_output=True, env=variables)
    return float(done.stdout.splitlines()[-1])


def scan_of(text):
    """A scan of a whole text into rows that are already there."""
    block = np.frombuffer(text + bytes(PADDING), np.uint8)
    rows = np.empty((1 << 17, METRICS.scan_columns.width()), np.int64)
    strings, state = (
        string_tables.no_strings(1 << 16, 1 << 22),
        np.zeros(json_scan.STATE_SIZE, np.int64),
    )
    begin = envelope.events_begin(text, 0)

    def scan():
        state[:] = 0
        state[json_scan.AT], state[json_scan.LAST] = begin, 1
        why = json_scan.scan(block, len(text), state, METRICS.plan, strings, rows)
        assert why == json_scan.DONE

    return scan
