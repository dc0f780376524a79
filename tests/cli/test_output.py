"""Test that incompletely written standard output is an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.fault_tools import STEP
from builders.forked import ForkServer

LIMIT = 512  # bytes of a file: less than any of the outputs
PRICE = "plan price --model 7B --gpus 8 --seq-len 4Ki --global-batch 256 --strategy tp=1"
WORDS = [(*PRICE.split(), "--json"), (*PRICE.split(),), ("plan", "--help")]
BUFFERS = {"buffered": "", "unbuffered": "1"}


@pytest.fixture(scope="module", params=BUFFERS)
def server(request):
    """Runs commands in forks of a process whose stdout is buffered, or is not."""
    made = ForkServer(WORDS, PYTHONUNBUFFERED=BUFFERS[request.param])
    yield made
    made.close()


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_incompletely_written_output_is_an_error(server, tmp_path, words):
    with (tmp_path / "out").open("w") as stdout:
        ended = server.run(words, tmp_path, stdout, limit=LIMIT)
    assert ended == (1, "Error: output: File too large\n")
    assert (tmp_path / "out").stat().st_size == LIMIT


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_closed_stdout_ends_a_command_silently(server, tmp_path, words):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        assert server.run(words, tmp_path, stdout) == (141, "")


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_full_output_device_is_an_error_in_one_line(server, tmp_path, words):
    with Path("/dev/full").open("w") as stdout:
        ended = server.run(words, tmp_path, stdout)
    assert ended == (1, "Error: output: No space left on device\n")


def test_output_to_a_closed_descriptor_is_an_error(tmp_path):
    k.write(tmp_path / "rank0.json", STEP)
    invoke("metrics", tmp_path / "rank0.json")  # compiles
    done = subprocess.run(
        [sys.executable, "-m", "fastcomm", "metrics", "rank0.json", "--json"],
        cwd=tmp_path,
        preexec_fn=lambda: os.close(1),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "Error: output: Bad file descriptor\n")
