"""Test full disks: an error in one line, no incomplete files, existing files unchanged."""

import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders.commands import words_of
from builders.fault_tools import refused, run
from builders.places import TESTS
from builders.replay_data import TRIAL, needed
from builders.writers import NEEDS_TRIAL, WRITERS, write_inputs


@contextmanager
def full(left):
    """A disk on which no file gets longer than so many bytes: writing on is an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def content(folder):
    """The files of a folder, hidden ones and all, with what is in them."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def is_half(name):
    """Whether a name is that of a file that was being written."""
    return "unfinished" in name or Path(name).name.startswith(".")


@pytest.mark.parametrize(
    ("command", "left"),
    [
        *WRITERS,
        *(pytest.param(*each, marks=needed) for each in NEEDS_TRIAL),
    ],
)
def test_a_full_disk_is_one_line_and_keeps_existing_files(inputs, tmp_path, command, left):
    def words(out):
        out.mkdir(exist_ok=True)
        return words_of(command, inputs=inputs, out=out, trial=TRIAL)

    there, empty = tmp_path / "there", tmp_path / "empty"
    code, printed = run(*words(there))  # compiles, too: the cache needs room
    assert code == 0, printed
    if "ingest" in command:
        (there / "store" / "rank-00000.parquet").unlink()  # else nothing is written
    before = content(there)
    for out in (there, empty):
        if "generate" in command and out is there:
            continue  # never overwrites
        with full(left):
            said = refused(*words(out))
        assert "File too large" in said or "disk I/O" in said or "is full" in said
        assert str(out) in said
        assert not [name for name in content(out) if is_half(name)]
    after = content(there)
    assert {name for name in before if after.get(name) != before[name]} <= {
        "store/fastcomm.json"
    }
    assert all(len(each) <= left for each in content(empty).values())


def test_metrics_json_is_written_only_after_every_table(inputs, tmp_path):
    words = ("metrics", inputs / "rank0.json", "--output")
    assert run(*words, tmp_path / "whole")[0] == 0
    left = (tmp_path / "whole" / "metrics.json").stat().st_size
    tables = [*(tmp_path / "whole").glob("*.parquet"), *(tmp_path / "whole").glob("*.csv")]
    assert max(path.stat().st_size for path in tables) > left
    with full(left):
        refused(*words, tmp_path / "half")
    assert not (tmp_path / "half" / "metrics.json").exists()


def test_an_ingest_stopped_by_a_full_disk_can_be_resumed(inputs, tmp_path):
    words = ("ingest", inputs / "rank0.json", "-o", tmp_path / "store")
    with full(900):
        refused(*words)
    assert "a store that is not whole" in refused("metrics", tmp_path / "store")
    assert run(*words)[0] == 0
    assert run("metrics", tmp_path / "store")[0] == 0


def test_a_result_that_cannot_be_written_to_stdout_is_an_error(inputs):
    with Path("/dev/full").open("wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "fastcomm", "metrics", inputs / "rank0.json", "--json"],
            stdout=stdout,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.decode().strip() == "Error: output: No space left on device"


SMALL_DISK = """
import sys
from contextlib import suppress
from pathlib import Path
from builders.fault_tools import refused, run
inputs, disk = map(Path, sys.argv[1:])
(disk / "out").mkdir()
before = run("dpro", "stats", inputs / "trace.json", "--output", disk / "out")
assert before[0] == 0, before
kept = {path: path.read_bytes() for path in (disk / "out").iterdir()}
with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
    filler.write(bytes((3 << 20) - (20 << 10) - sum(each.stat().st_size for each in kept)))
for words in (
    ("ingest", inputs / "rank0.json", "-o", disk / "store"),
    ("dpro", "stats", inputs / "trace.json", "--output", disk / "out"),
    ("metrics", inputs / "rank0.json", "--html", disk / "page.html"),
):
    said = refused(*words)
    assert "No space left on device" in said and str(disk) in said, said
assert {path: path.read_bytes() for path in (disk / "out").iterdir()} == kept
left = [path.name for path in disk.rglob("*") if path.is_file()]
assert not [name for name in left if "unfinished" in name], left
print("held")
"""


def test_a_full_file_system_is_one_line_and_keeps_existing_files(inputs, tmp_path):
    """A real one, of 3 MiB, where a user may mount such."""
    mount = f'mount -t tmpfs -o size=3m none "{tmp_path}" && exec "$0" "$@"'
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
    can = shutil.which("unshare") and not subprocess.call([*namespace, "true"])
    if not can:
        pytest.skip("no mount without a privilege")
    path = os.pathsep.join([*sys.path, str(TESTS)])
    done = subprocess.run(
        [*namespace, sys.executable, "-c", SMALL_DISK, inputs, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout == "held\n", done.stderr
    assert list(tmp_path.iterdir()) == []
