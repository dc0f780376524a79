"""Test what differs between machines: network, home directory, and runs beside this one."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from builders.places import ROOT
from builders.stored_runs import write_run

# A network of its own with nothing but 127.0.0.1: no IPv6, no internet.
PLAIN = (
    "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 && ip link set lo up"
    ' && ! ip -6 addr | grep . && exec "$@"'
)
# What two runs on one machine would share.
SHARED = re.compile(
    r"""["'](/tmp|/var/tmp|/dev/shm)\b|\bport\w*["']?\s*[=:,]\s*["']?[1-9]\d{3}"""
)


def run(*words, without=()):
    environment = {name: value for name, value in os.environ.items() if name not in without}
    return subprocess.run(
        words, check=False, env=environment, capture_output=True, text=True, timeout=60
    )


def test_a_command_works_without_ipv6_and_without_a_home_directory(tmp_path):
    plain = ("unshare", "--net", "sh", "-c", PLAIN, "sh")
    if shutil.which("unshare") is None or run(*plain, "true").returncode:
        pytest.skip("no network of its own can be made here")
    traces = write_run(tmp_path) / "traces"
    words = (sys.executable, "-m", "fastcomm", "metrics", traces, "--workers", "2", "--json")
    done = run(*plain, *words, without=("HOME",))
    assert (done.returncode, done.stderr) == (0, "")
    assert '"ranks"' in done.stdout


def test_no_path_or_port_is_the_same_in_two_runs():
    shared = [
        (path.name, found)
        for folder in ("tests", "bench", "docs")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "test_machines.py"
        for found in SHARED.findall(path.read_text())
    ]
    assert shared == []
