"""Where the machine code of the kernels is kept."""

import os
import subprocess
import sys

from numba.core import config

from fastcomm_kernels import _jit


def test_without_a_folder_for_its_code_a_kernel_still_compiles(tmp_path):
    blocked = tmp_path / "cache"
    blocked.write_text("a file in the place of the folder")
    code = (
        "from fastcomm_kernels import _jit, intervals; import numpy as np;"
        "print(_jit.is_compiled(), intervals.union_length(np.array([1]), np.array([3])))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(blocked)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(bool(config.DISABLE_JIT)), "2"]


def test_the_mark_of_compiled_kernels_is_kept_with_their_code(tmp_path, monkeypatch):
    monkeypatch.setattr(_jit, "_FOLDER", tmp_path)
    monkeypatch.setattr(_jit._numba_settings, "DISABLE_JIT", 0)
    assert not _jit.is_compiled()
    _jit.mark_compiled()
    assert _jit.is_compiled()
    monkeypatch.setattr(_jit, "_FOLDER", None)
    _jit.mark_compiled()
    assert not _jit.is_compiled()


def test_no_folder_can_be_made_below_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _jit._cache_folder() is None


def test_who_asks_hears_where_the_code_is_kept_and_whether_there_is_any(tmp_path, monkeypatch):
    monkeypatch.setattr(_jit, "_FOLDER", tmp_path)
    assert _jit.cache_folder() == tmp_path
    for is_off in (0, 1):
        monkeypatch.setattr(_jit._numba_settings, "DISABLE_JIT", is_off)
        assert _jit.has_jit() is not bool(is_off)
