"""Seconds of the processor, for functions and for whole processes."""

import os
import subprocess
from time import process_time


def best(*runs, rounds):
    """Return the least seconds of each function, called in turn."""
    seconds = [[] for _ in runs]
    for _ in range(rounds):
        for run, taken in zip(runs, seconds, strict=True):
            begun = process_time()
            run()
            taken.append(process_time() - begun)
    return [min(taken) for taken in seconds]


def of_process(*command):
    """Return the seconds of a process and of those that it waited for."""
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return used.ru_utime + used.ru_stime


def best_of_processes(*commands, rounds):
    """Return the least seconds of each command, started in turn."""
    taken = [[of_process(*command) for command in commands] for _ in range(rounds)]
    return [min(seconds) for seconds in zip(*taken, strict=True)]
