"""Test how benchmarks are judged: what misses its bar three times fails, in one line."""

import json
import os
import subprocess
import sys

from builders.places import ROOT

# One that takes milliseconds a round.
QUICK = "bench/test_attribution.py"


def run(*words):
    # A worker of pytest-xdist takes no times; other plugins take long to import.
    environment = {key: each for key, each in os.environ.items() if "XDIST" not in key}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["PYTEST_PLUGINS"] = "pytest_benchmark.plugin"
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
