"""Test that incompletely written standard output is an error."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from builders import kineto_text as k
from builders.fault_tools import STEP

LIMIT = 512  # bytes of a file: less than any of the outputs
WORDS = [("metrics", "rank0.json", "--json"), ("metrics", "rank0.json"), ("isp", "--help")]
BUFFERS = [{}, {"PYTHONUNBUFFERED": "1"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    k.write(folder / "rank0.json", STEP)
    command(folder, WORDS[0], stdout=subprocess.DEVNULL)  # compiles
    return folder


def command(folder, words, *, environment=(), **options):
    done = subprocess.run(
        [sys.executable, "-m", "fastcomm", *words],
        cwd=folder,
        # Python itself would leave half files of bytecode behind, where files are limited.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **dict(environment)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        **options,
    )
    return done.returncode, done.stderr


def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))


@pytest.mark.parametrize("buffers", BUFFERS, ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_incompletely_written_output_is_an_error(folder, tmp_path, words, buffers):
    with (tmp_path / "out").open("w") as stdout:
        ended = command(folder, words, environment=buffers, stdout=stdout, preexec_fn=limited)
    assert ended == (1, "Error: output: File too large\n")
    assert (tmp_path / "out").stat().st_size == LIMIT


@pytest.mark.parametrize("buffers", BUFFERS, ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_closed_stdout_ends_a_command_silently(folder, words, buffers):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        assert command(folder, words, environment=buffers, stdout=stdout) == (141, "")


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_full_output_device_is_an_error_in_one_line(folder, words):
    with Path("/dev/full").open("w") as stdout:
        ended = command(folder, words, stdout=stdout)
    assert ended == (1, "Error: output: No space left on device\n")


def test_output_to_a_closed_descriptor_is_an_error(folder):
    ended = command(folder, WORDS[0], preexec_fn=lambda: os.close(1))
    assert ended == (1, "Error: output: Bad file descriptor\n")
