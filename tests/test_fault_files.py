"""Test missing, special, changing and failing files: an error in one line, and no hang."""

import errno
import gzip
import io
import json
import os
import socket
from contextlib import closing

import pytest
from builders import kineto_text as k
from builders.fault_files import BASE, READERS, beside, ends
from builders.fault_tools import STEP, nobody, refused, run
from builders.nsys_report import SMALL

from fastcomm import files
from fastcomm.formats import stream
from fastcomm.formats.nsys.export import Export
from fastcomm.synthetic.nsys.export import write_nsys


@pytest.fixture
def folder(tmp_path):
    return beside(tmp_path)


@pytest.mark.parametrize(("command", "name"), READERS)
def test_a_pipe_is_refused_at_once(folder, command, name):
    os.mkfifo(folder / name)
    assert "a pipe: expected a regular file" in ends(command, name, folder)


def test_a_device_and_a_socket_are_refused(folder):
    (folder / "rank0.json").symlink_to("/dev/zero")
    assert "rank0.json: is a device: expected a regular file" in refused(
        "metrics", folder / "rank0.json"
    )
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(folder / "rank1.json"))
        assert "rank1.json: " in refused("metrics", folder / "rank1.json")


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    ("name", "code"),
    [
        *[("x.sqlite", 0), ("x.db", 0), ("rank-00009.parquet", 0), ("x.csv", 0), ("x.log", 0)],
        *[("rank9.json", 1), ("rank9.json.gz", 1)],
    ],
)
def test_special_files_among_traces_are_an_error_or_a_warning(folder, kind, name, code):
    (folder / "good.json").rename(folder / "rank0.json")
    path = folder / name
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    for options in ((), ("--workers", "2")):
        actual, said = run("metrics", folder, *options)
        assert actual == code, said
        assert name in said


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="no /proc")
def test_files_of_the_system_are_refused(folder):
    (folder / "rank0.json").symlink_to("/proc/self/mem")
    said = refused("metrics", folder / "rank0.json")
    assert "rank0.json: is a system file: expected a regular file" in said


@pytest.mark.parametrize("name", ["rank0.json", "nsys_0.sqlite", "rank-00000.parquet"])
def test_a_directory_named_like_a_file_is_searched_and_found_empty(folder, name):
    (folder / name).mkdir()
    assert f"{name}: no trace; expected" in refused("metrics", folder / name)


@pytest.mark.parametrize(
    ("command", "name"), [pair for pair in READERS if "none" not in pair[0]]
)
def test_a_file_without_permission_is_refused(public, command, name):
    folder = beside(public)
    (folder / name).write_text("{}")
    run("metrics", folder / "good.json")  # imports modules: others may be unable to read them
    ends(command, name, folder)
    (folder / name).chmod(0)
    folder.chmod(0o777)
    with nobody():
        said = ends(command, name, folder)
    assert "ermission denied" in said or "not readable" in said


def test_a_directory_without_permission_is_an_error_with_its_path(public):
    folder = beside(public)
    locked = folder / "none"
    run("metrics", folder)
    locked.chmod(0)
    with nobody():
        assert f"{locked}: Permission denied" in refused("metrics", folder)
    locked.chmod(0o755)


def test_a_directory_of_thousands_of_levels_is_an_error_in_one_line(folder):
    here = os.open(folder / "none", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    said = refused("metrics", folder)
    assert said.count("\n") == 1
    assert "more than 100 directories in one another" in said
    code, said = run("metrics", folder, "--keep-going")
    assert code == 3, said
    # What removes a directory by its path or by recursion gives up at such a depth.
    top = folder / "none" / "d"
    while (top / "d").exists():
        (top / "d").rename(folder / "next")
        top.rmdir()
        (folder / "next").rename(top)


def test_thousands_of_stray_files_are_one_short_warning(folder):
    for n in range(3000):
        (folder / f"note-{n}.json").write_text('{"a": 1}')
        (folder / f"note-{n}.zip").write_bytes(b"PK\3\4")
    code, said = run("metrics", folder)
    assert code == 0, said
    said = " ".join(said.split())
    assert "note-0.json, note-1.json" in said
    assert "and 2988 more" in said
    assert "not read: 2998 more archives" in said
    assert len(said) < 3_000


def test_a_link_to_itself_is_an_error_that_names_it(folder):
    (folder / "rank5.json").symlink_to("rank5.json")
    said = refused("metrics", folder / "rank5.json")
    assert "no such file" in said or "symbolic links" in said
    (folder / "good.json").rename(folder / "rank0.json")
    assert "rank5.json: cannot be read: " in refused("metrics", folder)
    code, said = run("metrics", folder, "--keep-going")
    assert code == 3
    assert "skipped: rank 5: " in said


def test_a_link_to_a_parent_directory_is_not_followed_again(folder):
    (folder / "good.json").rename(folder / "none" / "rank0.json")
    (folder / "none" / "up").symlink_to("..")
    code, said = run("metrics", folder, "--json")
    assert code == 0, said
    assert json.loads(said)["ranks"] == [0]


class Failing(io.BytesIO):
    """A file whose disk fails behind the first block."""

    def read(self, size=-1):
        if self.tell():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(min(size, 1000) if size > 0 else size)


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz", "inspector.log"])
def test_a_read_error_inside_a_file_is_an_error_with_its_path(folder, name, monkeypatch):
    text = BASE.encode() * 9 if name != "inspector.log" else b'{"coll_perf": 1}\n' * 999
    (folder / name).write_bytes(gzip.compress(text, 0) if name.endswith("gz") else text)
    whole = (folder / name).read_bytes()
    monkeypatch.setattr(stream, "opened", lambda _: Failing(whole))
    assert f"{name}: Input/output error" in refused("metrics", folder / name)


@pytest.mark.parametrize(("command", "name"), READERS)
def test_a_file_that_the_system_cannot_read_is_an_error(folder, command, name):
    # The memory of a process is a file whose first byte nobody can read.
    (folder / name).symlink_to("/proc/self/mem")
    said = ends(command, name, folder)
    assert "Error: " in said


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz"])
def test_a_file_that_is_replaced_while_it_is_read_is_an_error(folder, name, monkeypatch):
    path = folder / name
    k.write(path, STEP)

    def replacing(asked):
        found = files.opened(asked)
        if path.stat().st_size == size:
            k.write(folder / ("other" + name), [*STEP, *STEP])
            (folder / ("other" + name)).replace(path)
        return found

    size = path.stat().st_size
    run("metrics", path)  # what rank it is, is known by now
    monkeypatch.setattr(stream, "opened", replacing)
    assert f"{name}: changed while it was read; wait" in refused("metrics", path)


def test_truncating_a_file_after_reading_has_no_effect(tmp_path):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0], kind="arrowdir")
    rows = Export(path).rows("CUPTI_ACTIVITY_KIND_KERNEL", ("start", "end"))
    file = path / "CUPTI_ACTIVITY_KIND_KERNEL.arrow"
    os.truncate(file, 0)  # a mapped file would end us with SIGBUS from here on
    assert rows.count > 0
    assert (rows["end"] >= rows["start"]).all()
    assert str(file) in refused("metrics", path)
