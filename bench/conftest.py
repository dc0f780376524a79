"""Benchmarks and their bars: machines differ, ratios hold.

A benchmark measures a kernel and a yardstick in turn, round by round; their ratio is that of
their best rounds. Time is the processor's, not the wall's: waiting for a busy core is not
slowness. The yardstick is something everyone has: NumPy's sum of the same bytes, NumPy's
solution, the definition as a Python loop. For a kernel bound by the core choose a yardstick
that is bound by the core, too: a neighbor on the memory bus slows only a sum.

    def test_union_length(bar):
        bar(
            "union_length",                                # its table in bars.toml
            lambda: intervals.union_length(start, stop),   # what is measured
            lambda: (start.sum(), stop.sum()),             # the yardstick
            count=len(start),                              # how many units the first handles
            yardstick_count=1_000,                         # and the second, if it does fewer
        )

Every bar lives in `bars.toml`. A run prints a table of all it measured; with `--check-bars`
what misses its bar is measured again, twice, each time in a fresh process and with the same
yardstick beside itself, which is the machine's noise; a benchmark that misses three times
fails. `--slower 2` makes what is measured that much slower, which shows which bars would
notice. The timings themselves are pytest-benchmark's, and its options (`--benchmark-json`,
`--benchmark-compare`) work as ever.
"""

import gc
import json
import os
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

import fresh
import numpy as np
import pytest
import timing

# Of kernel and yardstick together; best rounds of that long differ by a few percent.
SECONDS = float(os.environ.get("FASTCOMM_BENCH_SECONDS", "0.5"))
ROUNDS = 5
PROCESSES = 3  # that measure what misses its bar, the first one included
BARS = tomllib.loads(Path(__file__).with_name("bars.toml").read_text("utf-8"))
FOUND = pytest.StashKey[list["Found"]]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a benchmark found, in one process or several.

    `numbers` are ratios to a yardstick, or what else has a limit, one a process. `noises` are
    the times of a yardstick relative to its own, where they were measured. `rate` is in units a
    second.
    """

    name: str
    numbers: tuple[float, ...]
    noises: tuple[float, ...] = ()
    rate: float | None = None

    @property
    def limit(self) -> tuple[str, float]:
        """In which direction the limit is, and where."""
        bar = BARS[self.name]
        if "at_most" in bar:
            return "at most", bar["at_most"]
        return "at least", bar.get("ratio", bar.get("at_least"))

    @property
    def holds(self) -> bool:
        side, limit = self.limit
        if side == "at most":
            return min(self.numbers) <= limit
        return max(self.numbers) >= limit

    def __str__(self) -> str:
        bar, (side, limit) = BARS[self.name], self.limit
        unit = f"of {bar['yardstick']}" if "yardstick" in bar else bar["unit"]
        numbers = ", ".join(f"{number:.3g}" for number in self.numbers)
        noises = ", ".join(f"{noise:.2f}" for noise in self.noises)
        noise = f"; the yardstick beside itself: {noises}" if noises else ""
        return f"{self.name}: {numbers} {unit}, wanted {side} {limit}{noise}"


def pytest_addoption(parser):
    parser.addoption("--check-bars", action="store_true", help="Fail what misses its bar.")
    parser.addoption(
        "--slower",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="Slow down what is measured.",
    )
    parser.addoption("--numbers", metavar="FILE", help="Write what was found as JSON.")
    parser.addoption(
        "--noise", action="store_true", help="Measure each yardstick beside itself, too."
    )


def pytest_configure(config):
    config.stash[FOUND] = []


def pytest_sessionfinish(session):
    if path := session.config.getoption("--numbers"):
        found = {
            each.name: (each.numbers[0], each.noises) for each in session.config.stash[FOUND]
        }
        Path(path).write_text(json.dumps(found))


@pytest.fixture(scope="session", autouse=True)
def _warm_heap():
    """Free one big block: glibc then keeps what is freed, and no round measures page faults."""
    np.empty(30 << 20, np.uint8)


@pytest.fixture(scope="module", autouse=True)
def _fresh_garbage():
    """Take what earlier modules left out of the garbage collector's sight.

    It decides by all that lives how often it looks at everything: plain Python, with objects,
    was twice as fast or half as fast by what had run before.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def settle(request):
    """Say what was found; measure again what misses its bar, and fail what still does."""
    config = request.config

    def again(found):
        """What a fresh process finds, added to what is known."""
        words = "--noise", f"--slower={config.getoption('--slower')}"
        number, noises = fresh.numbers(config.rootpath, request.node.nodeid, *words)[found.name]
        return replace(found, numbers=(*found.numbers, number), noises=(*found.noises, *noises))

    def settled(found):
        if config.getoption("--check-bars"):
            while not found.holds and len(found.numbers) < PROCESSES:
                found = again(found)
        config.stash[FOUND].append(found)
        if config.getoption("--check-bars") and not found.holds:
            pytest.fail(str(found), pytrace=False)

    return settled


@pytest.fixture
def bar(benchmark, request, settle):
    """Measure `run` against `yardstick`, and hold their ratio to the bar of that name."""

    def measure(name, run, yardstick, *, count, yardstick_count=None, least=ROUNDS):
        seconds = []

        def time_yardstick():
            begun = process_time()
            yardstick()
            seconds.append(process_time() - begun)

        run()  # compiles
        run = slowed(run, request.config.getoption("--slower"))
        begun = process_time()
        run()
        time_yardstick()
        rounds = max(least, int(SECONDS / (process_time() - begun)))
        benchmark.pedantic(run, setup=time_yardstick, rounds=rounds)
        rate = count / benchmark.stats["min"]
        ratio = rate * min(seconds) / (yardstick_count or count)
        benchmark.extra_info.update(count=count, rate=rate, ratio=ratio)
        noises = ()
        if request.config.getoption("--noise"):
            one, other = timing.best(yardstick, yardstick, rounds=rounds)
            noises = (max(one, other) / min(one, other),)
        settle(Found(name=name, numbers=(ratio,), noises=noises, rate=rate))

    return measure


def slowed(run, factor):
    """Return a function that does the same and takes `factor` times as long."""
    if factor == 1:
        return run

    def slow():
        begun = process_time()
        run()
        until = begun + factor * (process_time() - begun)
        while process_time() < until:
            pass

    return slow


@pytest.fixture
def held(request, settle):
    """Hold a number that a test measured to the limit of that name."""

    def hold(name, value, noises=()):
        slower = request.config.getoption("--slower")
        number = value * slower if "at_most" in BARS[name] else value / slower
        settle(Found(name=name, numbers=(number,), noises=noises))

    return hold


@pytest.fixture
def quotient(held, request):
    """Hold a quotient of best seconds to the limit of that name.

    `measure` returns the seconds above and below the line.
    """

    def hold(name, measure):
        above, below = measure()
        noises = ()
        if request.config.getoption("--noise"):
            _, again = measure()
            noises = (max(below, again) / min(below, again),)
        held(name, above / below, noises)

    return hold


def pytest_terminal_summary(terminalreporter, config):
    """Print the table: promised and measured rate in millions a second, ratio and its bar."""
    found = config.stash[FOUND]
    terminalreporter.section("bars")
    terminalreporter.line(
        f"{'':<20} {'promised':>8} {'M/s':>8} {'':<10} {'bar':>6} {'ratio':>6}  yardstick"
    )
    for each in found:
        mark = "" if each.holds else "  UNDER ITS BAR"
        bar = BARS[each.name]
        if each.rate is None:
            terminalreporter.line(f"{each}{mark}", red=not each.holds)
            continue
        promised = f"{bar['promised'] / 1e6:.0f}" if "promised" in bar else ""
        terminalreporter.line(
            f"{each.name:<20} {promised:>8} {each.rate / 1e6:8.1f} {bar['unit']:<10} "
            f"{bar['ratio']:6.3g} {each.numbers[-1]:6.3g}  {bar['yardstick']}{mark}",
            red=not each.holds,
        )
    if absent := BARS.keys() - {each.name for each in found}:
        terminalreporter.line(f"not measured: {', '.join(sorted(absent))}")
