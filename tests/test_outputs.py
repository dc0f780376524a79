"""Outputs replace regular files alone: no device, no FIFO, no symbolic link."""

import os
import stat
from pathlib import Path

import pytest
from fault_tools import refused, run
from test_full_disks import NEEDS_TRIAL, TRIAL, WRITERS, inputs  # noqa: F401 - a fixture

from fastcomm.aside import aside
from fastcomm.errors import FastcommError

pytestmark = pytest.mark.compiled

MORE = [
    "metrics {inputs}/rank0.json --html {out}/page.html",
    "report {inputs}/rank0.json -o {out}/report.html --no-data",
    "convert {inputs}/rank0.json --to chakra -o {out}/chakra",
    "demo {out}/demo --ranks 1 --format table",
    "isp --model 7 --world-size 8 --seq-len 4096 --global-batch 4Mi --html {out}/page.html",
]
COMMANDS = [*(words for words, _ in WRITERS), *MORE]
if TRIAL.is_dir():
    COMMANDS += [words for words, _ in NEEDS_TRIAL]


def words_of(command, inputs, out):  # noqa: F811
    return command.format(inputs=inputs, out=out, trial=TRIAL).split()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_replaces_what_is_no_regular_file(inputs, tmp_path, command):  # noqa: F811
    out = tmp_path / "out"
    out.mkdir()
    run(*words_of(command, inputs, out))
    names = [each.relative_to(out) for each in out.rglob("*") if each.is_file()]
    assert names
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for place, (name, how) in enumerate(
        (name, how) for name in names for how in ("link", "fifo")
    ):
        other = tmp_path / str(place)
        path = other / name
        path.parent.mkdir(parents=True)
        path.symlink_to(precious) if how == "link" else os.mkfifo(path)
        said = refused(*words_of(command, inputs, other))
        assert len(said.splitlines()) == 1
        assert path.is_symlink() if how == "link" else stat.S_ISFIFO(path.lstat().st_mode)
        assert precious.read_text() == "precious"
        assert not list(other.rglob("*unfinished*"))


@pytest.fixture
def device(tmp_path):
    """A device of its own like /dev/null or /dev/full, where they can be made."""

    def make(minor):
        path = tmp_path / f"device{minor}"
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, minor))
        except OSError:
            pytest.skip("no device can be made here")
        return path

    return make


@pytest.mark.parametrize("minor", [3, 7])
def test_a_device_stays(inputs, device, minor):  # noqa: F811
    path = device(minor)
    before = path.lstat()
    for words in ("convert {i}/trace.json -o", "metrics {i}/rank0.json --html"):
        said = refused(*words.format(i=inputs).split(), path)
        assert "not written, it is no regular file; name another file" in said
    assert path.lstat() == before


def test_what_takes_the_name_meanwhile_stays(tmp_path):
    path = tmp_path / "page.html"

    def write():
        with aside(path) as unfinished:
            unfinished.write_text("page")
            path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(FastcommError, match=r"is a symbolic link to .*elsewhere"):
        write()
    assert path.is_symlink()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_below_a_linked_directory_is_written(tmp_path):
    """Where a directory is, is for the user to say."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with aside(tmp_path / "link" / "page.html") as new:
        new.write_text("page")
    assert Path(tmp_path / "real" / "page.html").read_text() == "page"
