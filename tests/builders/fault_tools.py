"""Run commands with a time limit, and check that errors are short and clear."""

import json
import os
import signal
from contextlib import contextmanager

from builders import kineto_text as k
from click.testing import CliRunner

from fastcomm.cli.main import main

LONGEST = 60  # seconds

STEP = [
    k.mark("ProfilerStep#3", 0, 100),
    k.launch(2, 9),
    k.kernel("gemm", 5, 30, correlation=9),
    k.all_reduce(20, 40, Process_Group_Ranks="[0, 1]"),
]


class HangError(BaseException):
    """What was called has not come back."""


@contextmanager
def in_time(seconds=LONGEST):
    """An end with HangError for what waits for something that never comes."""

    def ring(*_):
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(*words):
    """The exit code and all that was printed; what is no exit is raised."""
    with in_time():
        result = CliRunner().invoke(main, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout + result.stderr


def refused(*words):
    """The one line of a user's error."""
    code, said = run(*words)
    assert code in (1, 2), said
    assert said.startswith("Error: "), said
    assert "Traceback" not in said
    return said


@contextmanager
def nobody():
    """Another user, for whom permissions count, where we are root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def agree(folder):
    """Make the manifest of a store state the sizes that its files have now."""
    path = folder / "fastcomm.json"
    said = json.loads(path.read_text())
    for entry in said["ranks"]:
        entry["size"] = (folder / entry["file"]).stat().st_size
    path.write_text(json.dumps(said))
