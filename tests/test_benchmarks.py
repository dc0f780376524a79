"""Test how benchmarks are judged and compared: a bar that is missed three times fails."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

from builders.places import ROOT

# One that takes milliseconds a round.
QUICK = "bench/test_attribution.py"
WAIT_S = 60
# In place of `bench/fresh.py`: a benchmark that does not end.
ENDLESS = """
import pathlib, time
def numbers(root, *_, environment):
    pathlib.Path(root, "begun").touch()
    time.sleep(600)
"""


def run(*words):
    # A worker of pytest-xdist takes no times; other plugins take long to import.
    environment = {key: each for key, each in os.environ.items() if "XDIST" not in key}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["PYTEST_PLUGINS"] = "pytest_benchmark.plugin"
    environment["FASTCOMM_BENCH_SECONDS"] = "0.05"
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", QUICK, "-o", "addopts=--strict-markers", "-q"),
            *("--benchmark-timer=time.process_time", "-p", "no:cacheprovider", *words),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_bar_that_is_missed_three_times_fails_with_its_name_and_numbers():
    done = run("--check-bars", "--slower", "8")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("enclosing: ")]
    yardstick = " of numpy.searchsorted of the starts, "
    numbers, rest = line.removeprefix("enclosing: ").split(yardstick)
    assert len(numbers.split(", ")) == 3
    limit, noises = rest.split("; the yardstick beside itself: ")
    assert limit.startswith("wanted at least ")
    assert all(1 <= float(noise) < 3 for noise in noises.split(", "))


def test_numbers_are_written_for_a_comparison(tmp_path):
    done = run(f"--numbers={tmp_path / 'numbers'}")
    assert done.returncode == 0
    ((name, (number, noises)),) = json.loads((tmp_path / "numbers").read_text()).items()
    assert (name, noises) == ("enclosing", [])
    assert number > 0


def test_a_terminated_comparison_removes_its_worktree(tmp_path):
    checkout, scratch = tmp_path / "checkout", tmp_path / "scratch"
    for folder in (scratch, checkout / "bench", checkout / "tests"):
        folder.mkdir(parents=True)
    for name in ("compare.py", "bars.toml"):
        shutil.copy(ROOT / "bench" / name, checkout / "bench")
    (checkout / "bench" / "fresh.py").write_text(ENDLESS)
    (checkout / "bench" / "test_endless.py").touch()
    environment = {key: each for key, each in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"TMPDIR": str(scratch), "GIT_CONFIG_GLOBAL": os.devnull}

    def git(*arguments):
        arguments = ["git", "-c", "user.name=x", "-c", "user.email=x", *arguments]
        return subprocess.check_output(arguments, cwd=checkout, env=environment, text=True)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    command = [sys.executable, checkout / "bench" / "compare.py", "HEAD"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as comparison:
        until = time.monotonic() + WAIT_S
        while not (checkout / "begun").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert len(git("worktree", "list").splitlines()) == 2
        comparison.send_signal(signal.SIGTERM)
        assert comparison.wait(WAIT_S) == 128 + signal.SIGTERM
    assert len(git("worktree", "list").splitlines()) == 1
    assert not list(scratch.iterdir())
