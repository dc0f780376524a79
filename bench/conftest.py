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
a benchmark under its bar fails. `--slower 2` makes what is measured that much slower, which
shows which bars would notice. The timings themselves are pytest-benchmark's, and its options
(`--benchmark-json`, `--benchmark-compare`) work as ever.
"""

import gc
import tomllib
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import numpy as np
import pytest
import timing

# Long enough to see both at their best on a machine that others use, too.
SECONDS = 2.5
ROUNDS = 15
# How often what misses its bar is measured again: the best rounds of all count.
LOOKS = 4
BARS = tomllib.loads(Path(__file__).with_name("bars.toml").read_text("utf-8"))
MEASURED = pytest.StashKey[list["Measured"]]()
HELD = pytest.StashKey[list["Held"]]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The best round of a kernel, and of its yardstick."""

    name: str
    rate: float
    yardstick_rate: float

    @classmethod
    def of(cls, name, counts, seconds, yardstick_seconds):
        return cls(
            name=name, rate=counts[0] / seconds, yardstick_rate=counts[1] / yardstick_seconds
        )

    @property
    def ratio(self) -> float:
        return self.rate / self.yardstick_rate

    @property
    def holds(self) -> bool:
        return self.ratio >= BARS[self.name]["ratio"]

    def __str__(self) -> str:
        bar = BARS[self.name]
        return (
            f"{self.name}: {self.ratio:.3g} of the yardstick ({bar['yardstick']}), "
            f"the bar is {bar['ratio']:.3g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A number with a limit of its own: seconds or a quotient of whole processes."""

    name: str
    value: float

    @classmethod
    def of(cls, name, value, slower):
        """A number as it would be if what is measured took `slower` times as long."""
        return cls(
            name=name, value=value * slower if "at_most" in BARS[name] else value / slower
        )

    @property
    def holds(self) -> bool:
        bar = BARS[self.name]
        return (
            self.value <= bar["at_most"] if "at_most" in bar else self.value >= bar["at_least"]
        )

    @property
    def limit(self) -> str:
        bar = BARS[self.name]
        return (
            f"at most {bar['at_most']}" if "at_most" in bar else f"at least {bar['at_least']}"
        )

    def __str__(self) -> str:
        return f"{self.name}: {self.value:.3f} {BARS[self.name]['unit']}, wanted {self.limit}"


def pytest_addoption(parser):
    parser.addoption("--check-bars", action="store_true", help="Fail what is under its bar.")
    parser.addoption(
        "--slower",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="Slow down what is measured.",
    )


def pytest_configure(config):
    config.stash[MEASURED] = []
    config.stash[HELD] = []


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
def bar(benchmark, request):
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
        counts = count, yardstick_count or count
        best = (benchmark.stats["min"], min(seconds))
        found = Measured.of(name, counts, *best)
        for _ in range(LOOKS):
            if found.holds:
                break
            # Who shares the caches and the memory may have slowed all rounds of one of the two.
            best = tuple(map(min, best, timing.best(run, yardstick, rounds=rounds)))
            found = Measured.of(name, counts, *best)
        benchmark.extra_info.update(count=count, rate=found.rate, ratio=found.ratio)
        request.config.stash[MEASURED].append(found)
        if request.config.getoption("--check-bars"):
            assert found.holds, str(found)

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
def held(request):
    """Hold a number that a test measured to the limit of that name."""

    def hold(name, value):
        found = Held.of(name, value, request.config.getoption("--slower"))
        request.config.stash[HELD].append(found)
        if request.config.getoption("--check-bars"):
            assert found.holds, str(found)

    return hold


@pytest.fixture
def quotient(held, request):
    """Hold a quotient of best seconds to the limit of that name; measure again what misses it.

    `measure` returns the seconds above and below the line. As for bars, who shares the caches
    and the memory may have slowed all rounds of one of the two.
    """

    def hold(name, measure):
        best = tuple(measure())
        for _ in range(LOOKS):
            if Held.of(name, best[0] / best[1], request.config.getoption("--slower")).holds:
                break
            best = tuple(map(min, best, measure()))
        held(name, best[0] / best[1])

    return hold


def pytest_terminal_summary(terminalreporter, config):
    """Print the table: promised and measured rate in millions a second, ratio and its bar."""
    measured = config.stash[MEASURED]
    terminalreporter.section("bars")
    terminalreporter.line(
        f"{'':<20} {'promised':>8} {'M/s':>8} {'':<10} {'bar':>6} {'ratio':>6}  yardstick"
    )
    for found in measured:
        bar = BARS[found.name]
        promised = f"{bar['promised'] / 1e6:.0f}" if "promised" in bar else ""
        terminalreporter.line(
            f"{found.name:<20} {promised:>8} {found.rate / 1e6:8.1f} {bar['unit']:<10} "
            f"{bar['ratio']:6.3g} {found.ratio:6.3g}  {bar['yardstick']}"
            f"{'' if found.holds else '  UNDER ITS BAR'}",
            red=not found.holds,
        )
    for found in config.stash[HELD]:
        mark = "" if found.holds else "  UNDER ITS BAR"
        terminalreporter.line(f"{found}{mark}", red=not found.holds)
    named = {found.name for found in (*measured, *config.stash[HELD])}
    if absent := BARS.keys() - named:
        terminalreporter.line(f"not measured: {', '.join(sorted(absent))}")
