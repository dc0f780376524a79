"""The script that records jobs leaves nothing behind when it is ended early."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders.places import TESTS
from builders.processes import is_alive, pids_in

JOBS = TESTS / "jobs"
WAIT_S = 60
# A worker that starts a neighbor, and says that both run.
WORKER = """
import os, pathlib, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({folder!r}, "neighbor" + os.environ["RANK"]).write_text(str(other.pid))
pathlib.Path({folder!r}, os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""
MAIN = """
import pathlib, sys
import record
record._WORKER = pathlib.Path(sys.argv.pop())
record._CONTROL = pathlib.Path("absent")
record.main()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_terminated_recording_ends_its_processes_and_removes_its_files(tmp_path):
    folder, scratch = tmp_path / "pids", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(folder=str(folder)))
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": str(JOBS)}
    words = [sys.executable, "-c", MAIN, str(tmp_path / "out"), "ddp-sleep", str(worker)]
    with subprocess.Popen(words, env=environment) as recording:
        until = time.monotonic() + WAIT_S
        while len(pids := pids_in(folder)) < 8 and time.monotonic() < until:
            time.sleep(0.05)
        recording.send_signal(signal.SIGTERM)
        assert recording.wait(WAIT_S) == 128 + signal.SIGTERM
    assert len(pids) == 8
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)  # a killed process takes a while to end
    assert not [pid for pid in pids if is_alive(pid)]
    assert not list(scratch.iterdir())
