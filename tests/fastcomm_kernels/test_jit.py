"""Test the cache of compiled kernels, and its failures."""

import io
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from builders.fault_tools import in_time, nobody
from numba.core.environment import Environment

from fastcomm_kernels import _jit, temporary

ONE = (
    "import numpy as np; from fastcomm_kernels import _jit, intervals as i;"
    "answer = i.place(np.array([1, 5, 9]), 6); k = i.place;"
    "print(answer, sum(k._cache_hits.values()), sum(k._cache_misses.values()))"
)
# Without bytecode, of which Python itself would leave half files behind.
LIMITED = (
    "import resource, sys; sys.dont_write_bytecode = True;"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
)
HIT, MISSED = "2 1 0", "2 0 1"


def started(folder, code=ONE, **environment):
    words = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder)}
    words |= environment
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={name: value for name, value in words.items() if value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder, code=ONE, **environment):
    """What a process prints of a kernel: answer, hits, misses; and its lines on stderr."""
    process = started(folder, code, **environment)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    return stdout.strip(), stderr.splitlines()


def entries(folder):
    return sorted((folder / "cache").rglob("*.nbc"))


def empty(_):
    return b""


def cut(content):
    return content[: len(content) // 2]


def garbage(content):
    return bytes(len(content))


def flipped(content):
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A folder whose cache a process filled that compiled."""
    folder = tmp_path_factory.mktemp("once")
    assert run(folder) == (MISSED, [])
    return folder


@pytest.fixture
def compiled(once, tmp_path):
    """A copy of that cache in the folder of the test."""
    shutil.copytree(once / "cache", tmp_path / "cache")


@pytest.mark.compiled
@pytest.mark.usefixtures("compiled")
def test_damaged_code_is_compiled_again_with_one_warning(tmp_path):
    assert entries(tmp_path)
    for path in entries(tmp_path):
        path.write_bytes(flipped(path.read_bytes()))
    answer, (warning,) = run(tmp_path)
    assert answer == MISSED
    assert warning.startswith(f"warning: {tmp_path}")
    assert warning.endswith("damaged compiled code; written again")
    assert run(tmp_path) == (HIT, [])


def test_a_link_in_place_of_the_cache_directory_is_refused_with_a_warning(
    folder, tmp_path, caplog
):
    folder.write("a.nbc", b"code")
    (path,) = tmp_path.rglob("a.nbc")
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / "elsewhere")
    assert folder.read("a.nbc") is None
    folder.write("a.nbc", b"mine")
    assert "compiled code is kept in memory" in caplog.text
    assert [file.name for file in (tmp_path / "elsewhere").iterdir()] == ["a.nbc"]


@pytest.mark.compiled
def test_a_full_disk_is_one_warning_and_code_stays_in_memory(tmp_path):
    answer, (warning,) = run(tmp_path, LIMITED + ONE)
    assert answer == MISSED
    assert warning.endswith(
        "File too large; compiled code is kept in memory: set XDG_CACHE_HOME to a folder "
        "that can be written to"
    )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.compiled
@pytest.mark.usefixtures("compiled")
def test_complete_code_that_cannot_be_written_to_is_used(tmp_path):
    assert run(tmp_path, LIMITED + ONE) == (HIT, [])


def spoil_owner(path):
    """Give a file or folder to another user, as who may; else let others write to it."""
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        path.chmod(0o777)


def spoil_mode(path):
    path.chmod(0o777)


@pytest.mark.parametrize("spoil", [spoil_owner, spoil_mode])
@pytest.mark.parametrize("place", ["versions", "version", "file"])
def test_code_that_another_user_may_have_written_is_not_read(
    folder, tmp_path, caplog, spoil, place
):
    folder.write("a.nbc", b"code")
    folder.mark("part")
    (path,) = tmp_path.rglob("a.nbc")
    spoil({"versions": path.parent.parent, "version": path.parent, "file": path}[place])
    assert folder.read("a.nbc") is None
    assert folder.read("a.nbc") is None
    (record,) = caplog.records
    assert "belongs to another user, or others can write to it" in record.message
    assert "remove it, or set XDG_CACHE_HOME" in record.message
    assert folder.has("part") is (place == "file")
    assert (folder.writable is None) is (place != "file")
    folder.write("a.nbc", b"mine")
    assert folder.read("a.nbc") == (b"mine" if place == "file" else None)
    assert (path.read_bytes()[-4:] == b"mine") is (place == "file")


@pytest.mark.compiled
@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_machine_code_of_another_user_is_not_run(tmp_path):
    for path in (tmp_path / "cache").rglob("*"):
        os.chown(path, 65534, 65534)
    answer, (warning,) = run(tmp_path)
    assert answer == MISSED
    assert warning.startswith(f"warning: {tmp_path}/cache/fastcomm: belongs to another user")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can install for others")
def test_code_that_root_installed_is_read_by_others(public):
    folder = _jit.CodeFolder(public / "home", "text")
    folder.write("a.nbc", b"code")
    with nobody():
        assert folder.read("a.nbc") == b"code"


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_anything_but_a_file_in_place_of_code_is_replaced(folder, tmp_path, kind):
    folder.write("a.nbc", b"code")
    (path,) = tmp_path.rglob("a.nbc")
    other = path.rename(tmp_path / "elsewhere")
    os.mkfifo(path) if kind == "fifo" else path.symlink_to(other)
    with in_time(5):
        assert folder.read("a.nbc") is None
    folder.write("a.nbc", b"mine")
    assert folder.read("a.nbc") == b"mine"


def test_code_is_reused_with_any_umask(folder):
    before = os.umask(0)
    try:
        folder.write("a.nbc", b"code")
    finally:
        os.umask(before)
    assert folder.read("a.nbc") == b"code"


@pytest.mark.compiled
def test_processes_that_compile_at_once_leave_code_that_all_can_use(tmp_path):
    processes = [started(tmp_path) for _ in range(2)]
    assert [each.communicate()[0].split()[0] for each in processes] == ["2"] * 2
    assert run(tmp_path) == (HIT, [])
    assert not list((tmp_path / "cache").rglob(".*"))


@pytest.mark.compiled
def test_code_works_on_a_small_disk_and_on_a_read_only_one(once, tmp_path):
    """Real ones, where a user may mount such."""
    mount = 'mount -t tmpfs -o size=$SIZE none "$XDG_CACHE_HOME"; eval "$THEN"; exec "$0" "$@"'
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", mount]
    (tmp_path / "cache").mkdir()
    environment = {**os.environ, "SIZE": "8k", "THEN": "", "TMPDIR": str(tmp_path)}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    can = shutil.which("unshare") and not subprocess.call(
        [*namespace, "true"], env=environment, stderr=subprocess.DEVNULL
    )
    if not can:
        pytest.skip("no mount without a privilege")
    words = [*namespace, sys.executable, "-c", ONE]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == MISSED
    assert "No space left on device; compiled code is kept in memory" in done.stderr
    copied = f'cp -r "{once}/cache" "{tmp_path}"'
    environment["THEN"] = f'{copied} && mount -o remount,ro "$XDG_CACHE_HOME"'
    environment["SIZE"] = "64m"
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (HIT, "")


@pytest.fixture
def folder(tmp_path):
    """The folder of code below a temporary one."""
    return _jit.CodeFolder(tmp_path / "home", "text")


@pytest.mark.parametrize("damage", [empty, cut, garbage, flipped])
def test_written_code_is_read_and_damaged_code_is_not(folder, tmp_path, caplog, damage):
    assert folder.read("a.nbc") is None
    folder.write("a.nbc", b"machine code")
    assert folder.read("a.nbc") == b"machine code"
    (path,) = tmp_path.rglob("a.nbc")
    path.write_bytes(damage(path.read_bytes()))
    assert folder.read("a.nbc") is folder.read("a.nbc") is None
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("home", ["none", "file"])
def test_without_a_writable_directory_code_stays_in_memory(tmp_path, caplog, home):
    (tmp_path / "file").write_text("")
    folder = _jit.CodeFolder(None if home == "none" else tmp_path / "file", "text")
    folder.write("a.nbc", b"code")
    folder.write("a.nbc", b"code")
    assert folder.read("a.nbc") is None
    expected = "no folder for compiled code" if home == "none" else "Not a directory"
    (record,) = caplog.records
    assert f"{expected}; compiled code is kept in memory" in record.message
    assert folder.writable is None
    folder.mark("part")
    assert not folder.has("part")


class Context:
    """What a cache asks of numba's context."""

    def codegen(self):
        return self

    def magic_tuple(self):
        return ("machine",)


def test_code_of_another_key_is_not_used(folder, monkeypatch, caplog):
    offset = 1
    monkeypatch.setattr(_jit, "rtsys", SimpleNamespace(initialize=lambda _: None))

    def function(x):
        return x + offset

    cache = _jit.KernelCache(function, folder)
    assert cache.load_overload("int64", Context()) is None
    library = SimpleNamespace(has_dynamic_globals=False)
    code = SimpleNamespace(
        lifted=(), library=library, codegen=Context(), _reduce=lambda: ("code",)
    )
    cache.save_overload("int64", code)
    monkeypatch.setattr(_jit, "_rebuild", lambda _, payload: payload)
    assert cache.load_overload("int64", Context()) == "code"
    assert cache.load_overload("float64", Context()) is None
    cache.flush()
    assert cache.cache_path == str(folder.writable)
    monkeypatch.setattr(_jit.KernelCache, "_file", lambda *_: "a.nbc")
    cache.save_overload("int64", code)
    assert cache.load_overload("float64", Context()) is None
    assert not caplog.records
    monkeypatch.setattr(_jit, "_rebuild", None)
    assert cache.load_overload("int64", Context()) is None
    assert "a.nbc: TypeError" in caplog.text
    (path,) = folder.writable.glob("a.nbc")
    path.unlink()
    library.has_dynamic_globals = True
    cache.save_overload("int64", code)
    assert not path.exists()


def test_the_mark_of_compiled_kernels_is_kept_with_their_code(folder, monkeypatch):
    monkeypatch.setattr(_jit, "_CODE_FOLDER", folder)
    monkeypatch.setattr(_jit._numba_settings, "DISABLE_JIT", 0)
    assert not _jit.is_compiled()
    folder.write("a.nbc", b"code")
    _jit.mark_compiled()
    assert _jit.is_compiled()


def test_the_cache_is_in_the_home_directory_if_there_is_one(monkeypatch):
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert temporary.cache_home() == Path("/somebody/.cache/fastcomm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert temporary.cache_home() == Path("/cache/fastcomm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert temporary.cache_home() == Path("/somebody/.cache/fastcomm")

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert temporary.cache_home() is None


def test_the_location_and_state_of_the_code_can_be_queried(folder, monkeypatch):
    monkeypatch.setattr(_jit, "_CODE_FOLDER", folder)
    assert _jit.cache_folder() == folder.writable
    for is_off in (0, 1):
        monkeypatch.setattr(_jit._numba_settings, "DISABLE_JIT", is_off)
        assert _jit.has_jit() is not bool(is_off)


@pytest.mark.parametrize(("module", "is_loaded"), [("json", True), ("absent", False)])
def test_the_environment_of_code_is_loaded_without_its_module(module, is_loaded):
    made = Environment({"__name__": module})
    made.consts[:] = [7, "seven"]
    made.env_name = f"of {module}"
    data = pickle.dumps(made)
    loaded = _jit._Unpickler(io.BytesIO(data)).load()
    assert (loaded.env_name, loaded.consts) == (made.env_name, made.consts)
    assert loaded.globals == (vars(json) if is_loaded else {"__name__": "absent"})
    assert pickle.dumps(loaded) == data
    assert _jit._Unpickler(io.BytesIO(data)).load() is loaded


def scaled(value, by, pair, numbers):
    return value * by + pair[0] + len(numbers)


def callers(inner):
    """A function that calls a kernel with constants, narrow integers and mixed pairs."""

    def sums(narrow):
        total = inner(narrow[0], 3, (1, narrow[1]), narrow)
        total += inner(2, narrow[0], (narrow[1], 5), numbers=narrow)
        return total + inner(total, total, (total, total), narrow)

    return sums


def test_a_called_kernel_is_compiled_for_one_type_of_integers(monkeypatch):
    monkeypatch.setattr(_jit, "_CODE_FOLDER", _jit.CodeFolder(None, "text"))
    monkeypatch.setattr(_jit._numba_settings, "DISABLE_JIT", 0)
    inner = _jit.kernel(scaled)
    narrow = np.array([100, 120], np.int8)
    numbers = [int(number) for number in narrow]
    assert _jit.kernel(callers(inner))(narrow) == callers(scaled)(numbers)
    assert len(inner.signatures) == 1
