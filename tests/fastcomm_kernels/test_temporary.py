"""Test where temporary files and compiled code lie: never in a directory of other people."""

import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import fastcomm
import fastcomm_kernels
from fastcomm.executors.processes import Processes
from fastcomm.process import temporary_folder
from fastcomm_kernels import temporary

COMPILE = (
    "import numpy as np; from fastcomm_kernels import intervals as i;"
    "print(i.union_length(np.array([1]), np.array([3])))"
)


@pytest.fixture
def choose(monkeypatch):
    """Set TMPDIR, and name the other directories to try."""

    def choose(name, *others):
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(temporary, "_SYSTEM", tuple(map(str, others)))
        monkeypatch.setattr(temporary, "_warned", set())
        monkeypatch.setenv("TMPDIR", str(name))

    return choose


def folder_of(path, mode=0o700):
    path.mkdir()
    path.chmod(mode)
    return path


def test_the_directory_that_the_user_sets_is_used(choose, tmp_path, caplog):
    mine = folder_of(tmp_path / "mine")
    choose(mine)
    assert temporary.root() == mine
    with temporary_folder() as folder:
        assert folder.parent == mine
    assert not caplog.records


@pytest.mark.parametrize("name", [".", "tmp", "../run"])
def test_a_relative_directory_is_not_used(choose, tmp_path, monkeypatch, caplog, name):
    run, system = folder_of(tmp_path / "run"), folder_of(tmp_path / "system")
    folder_of(run / "tmp")
    monkeypatch.chdir(run)
    choose(name, system)
    assert temporary.root() == system
    assert temporary.root() == system
    (record,) = caplog.records
    assert f"TMPDIR {name}: is a relative path; not used" in record.message


@pytest.mark.parametrize("place", ["", "below"])
def test_the_working_directory_is_not_used(choose, tmp_path, monkeypatch, caplog, place):
    run, system = folder_of(tmp_path / "run"), folder_of(tmp_path / "system")
    folder_of(run / "below")
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    for start in (run, tmp_path / "link"):
        choose(start / place, system)
        assert temporary.root() == system
    assert "lies in the working directory; not used" in caplog.text


def test_a_directory_that_others_can_change_is_not_used(choose, tmp_path):
    shared, system = folder_of(tmp_path / "shared", 0o777), folder_of(tmp_path / "system")
    choose(shared, system)
    assert temporary.root() == system
    shared.chmod(0o1777)  # as /tmp: nobody can rename what others own
    assert temporary.root() == shared


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_a_directory_of_another_user_is_not_used(choose, tmp_path):
    theirs, system = folder_of(tmp_path / "theirs"), folder_of(tmp_path / "system")
    os.chown(theirs, 65534, 65534)
    (tmp_path / "link").symlink_to(theirs)
    for name in (theirs, tmp_path / "link"):
        choose(name, system)
        assert temporary.root() == system


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such a directory")
def test_a_directory_is_not_used_in_which_not_even_root_can_write(choose, tmp_path):
    system = folder_of(tmp_path / "system")
    choose("/sys", system)
    assert temporary.root() == system
    assert list(system.iterdir()) == []


def test_without_any_directory_there_is_an_error(choose, tmp_path):
    (tmp_path / "file").write_text("")
    choose(tmp_path / "none", tmp_path / "file")
    with pytest.raises(OSError, match="no directory for temporary files: TMPDIR, /tmp"):
        temporary.root()
    with pytest.raises(OSError, match="no directory"), Processes(2) as processes:
        processes.submit(int, "1")


def test_libraries_use_the_same_directory(choose, tmp_path, monkeypatch):
    system = folder_of(tmp_path / "system")
    monkeypatch.chdir(folder_of(tmp_path / "run"))
    choose(".", system)
    with temporary.used_by_libraries():
        assert tempfile.gettempdir() == str(system)
    assert tempfile.tempdir is None


def test_a_path_that_is_too_long_for_a_socket_is_not_used(choose, tmp_path):
    choose(tmp_path, folder_of(tmp_path / "longer"))
    length = len(os.fsencode(tmp_path))
    assert temporary.root(length) == tmp_path
    with pytest.raises(OSError, match="no directory"):
        temporary.root(length - 1)


def test_a_working_directory_that_was_removed_contains_nothing(choose, tmp_path, monkeypatch):
    gone = folder_of(tmp_path / "gone")
    monkeypatch.chdir(gone)
    gone.rmdir()
    choose(tmp_path)
    assert temporary.root() == tmp_path


def test_workers_use_the_directory_of_their_parent_and_warn_of_no_other(
    choose, tmp_path, monkeypatch, caplog
):
    choose("relative", tmp_path)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert temporary.root() == tmp_path
    assert not caplog.records
    mine = folder_of(tmp_path / "mine")
    temporary.use(mine)
    assert temporary.root() == mine


@pytest.mark.compiled
def test_no_code_lies_in_a_working_directory_that_is_named_by_tmpdir(tmp_path):
    variables = {**os.environ, "XDG_CACHE_HOME": "/proc/none", "TMPDIR": "."}
    variables["PYTHONPATH"] = os.pathsep.join(
        str(Path(package.__file__).parents[1]) for package in (fastcomm, fastcomm_kernels)
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "2\n"
    (line,) = done.stderr.splitlines()
    assert "compiled code is kept in memory" in line
    assert not list(tmp_path.iterdir())


ASKS = re.compile(
    r"gettempdir|mkdtemp|mkstemp|TemporaryDirectory|TemporaryFile|tempfile|TMPDIR\W.*environ"
)


def test_one_module_asks_for_the_directory_of_temporary_files():
    packages = [Path(package.__file__).parent for package in (fastcomm, fastcomm_kernels)]
    sources = [path for package in packages for path in package.rglob("*.py")]
    assert len(sources) > 200
    asking = {path.name for path in sources if ASKS.search(path.read_text("utf-8"))}
    assert asking == {"temporary.py"}
