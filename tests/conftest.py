"""Inputs of many tests, and how often hypothesis tries.

The first call of a kernel compiles it: no deadline.
"""

import gc
import gzip
import logging
import os
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.places import RECORDED
from builders.shared_data import shared
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

# In the gate few examples, always the same ones: red is a change that broke something.
# `--hypothesis-profile=soak` looks for new ones, and makes small what fails.
often = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=300)
settings.register_profile("soak", often)
settings.register_profile(
    "gate", often, max_examples=15, derandomize=True, phases=set(Phase) - {Phase.shrink}
)
settings.load_profile("gate")


def pytest_configure(config):
    """Keep hypothesis in the gate from drawing numbers and texts of the modules of today.

    It would try what the code of modules that happen to be loaded contains: other examples
    with each change, and with each order of the tests. There is no public option for it.
    """
    if config.getoption("hypothesis_profile", None) != "soak":
        providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Stop the garbage collector while tests are collected: what is imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Let the garbage collector look less often at what stays: thousands of tests do."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Escape what is not UTF-8 in captured output: pytest-xdist cannot send it."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode())
        for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session", autouse=True)
def default_terminal() -> None:
    """Commands print to a pipe: no colors, and 110 cells wide. pytest-xdist sets a width."""
    for name in ("COLUMNS", "FORCE_COLOR", "CLICOLOR_FORCE"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def default_interrupt() -> None:
    """Undo what a shell does to background jobs: they ignore SIGINT, and so do commands."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def default_level() -> None:
    """Undo what a command in this process sets: the level of messages that are logged."""
    logging.getLogger("fastcomm").setLevel(logging.NOTSET)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can enter; pytest closes its own when another run begins."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name).resolve()
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="session")
def kineto() -> Path:
    """The folder of real Kineto traces; the test is skipped where it is absent."""
    return shared("kineto")


@pytest.fixture(scope="session")
def real(request):
    """Return the path of a real Kineto trace or run: the project's own, or one beside it."""

    def path(name: str) -> Path:
        own = RECORDED / name
        return own if own.exists() else request.getfixturevalue("kineto") / name

    return path


@pytest.fixture(scope="session")
def nsys(tmp_path_factory) -> Path:
    """A folder with the real Nsight Systems exports, unpacked."""
    source = shared("nsys")
    folder = tmp_path_factory.mktemp("nsys")
    for packed in source.glob("*.sqlite.gz"):
        (folder / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    for packed in source.glob("*.tar.gz"):
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def isp_data() -> Path:
    """The folder of tables, golden files and published measurements of the strategy search."""
    return shared("isp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder that all examples of a module's tests write to."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def path_of(tmp_path):
    """Return a function that finds the critical path of some events."""
    from builders.path_events import finder  # imports the kernels

    return finder(tmp_path)


_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    """A Chromium; the test is skipped, with the reason, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if chromium is None:
        pytest.skip("no chromium on the PATH: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        # A container's root has no namespace for Chromium's own sandbox.
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()
