"""Test that incompletely written standard output is an error."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.fault_tools import STEP

LIMIT = 512  # bytes of a file: less than any of the outputs
PRICE = "plan price --model 7B --gpus 8 --seq-len 4Ki --global-batch 256 --strategy tp=1"
WORDS = [(*PRICE.split(), "--json"), (*PRICE.split(),), ("plan", "--help")]
BUFFERS = [{}, {"PYTHONUNBUFFERED": "1"}]


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
def test_incompletely_written_output_is_an_error(tmp_path, words, buffers):
    with (tmp_path / "out").open("w") as stdout:
        ended = command(tmp_path, words, environment=buffers, stdout=stdout, preexec_fn=limited)
    assert ended == (1, "Error: output: File too large\n")
    assert (tmp_path / "out").stat().st_size == LIMIT


@pytest.mark.parametrize("buffers", BUFFERS, ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_closed_stdout_ends_a_command_silently(tmp_path, words, buffers):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        assert command(tmp_path, words, environment=buffers, stdout=stdout) == (141, "")


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_full_output_device_is_an_error_in_one_line(tmp_path, words):
    with Path("/dev/full").open("w") as stdout:
        ended = command(tmp_path, words, stdout=stdout)
    assert ended == (1, "Error: output: No space left on device\n")


def test_output_to_a_closed_descriptor_is_an_error(tmp_path):
    k.write(tmp_path / "rank0.json", STEP)
    invoke("metrics", tmp_path / "rank0.json")  # compiles
    words = ("metrics", "rank0.json", "--json")
    ended = command(tmp_path, words, preexec_fn=lambda: os.close(1))
    assert ended == (1, "Error: output: Bad file descriptor\n")
