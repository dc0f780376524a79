"""The process: where it looks for modules, its signals, and its temporary directories.

Traces lie in directories of other people, and a module among them must not be imported: the
working directory is no place to look. Ctrl-C and SIGTERM raise one exception that unwinds the
command, and no second while it does. Temporary directories are removed at the latest when the
process ends, even if interrupted.
"""

import _thread
import atexit
import gc
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from time import monotonic, sleep
from types import FrameType

from fastcomm.errors import ConfigError
from fastcomm_kernels import temporary

# Under these lie settings, and compiled code. A relative one is invalid.
_HOMES = ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
_SAFE, _PATH = "PYTHONSAFEPATH", "PYTHONPATH"
_HOME = str(Path(__file__).parents[1])  # where fastcomm itself is imported from

# New objects, less deleted ones, between two searches for cycles. Python's default is 700 to
# 2000, by its version.
_OBJECTS = 50_000

_safe_lock = Lock()
_safe_users = 0
_unsafe_values: dict[str, str | None] = {}


def drop_working_directory() -> None:
    """Remove the working directory from `sys.path`, unless PYTHONPATH names it.

    It leads the path of ``python -m``, and an empty entry of PYTHONPATH stands for it.
    """
    try:
        folder = str(Path.cwd())
    except OSError:  # removed meanwhile
        folder = ""
    if folder not in (_HOME, *os.environ.get(_PATH, "").split(os.pathsep)):
        sys.path[:] = [entry for entry in sys.path if entry not in ("", folder)]


def drop_relative_homes() -> None:
    """Remove relative homes from the environment: ``HOME=.`` is the working directory."""
    for name in _HOMES:
        if not Path(os.environ.get(name, "/")).is_absolute():
            del os.environ[name]


class _NoPandas:
    """A finder of modules that says there is no pandas."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Raise ModuleNotFoundError for pandas; leave other modules to the next finder."""
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)


def leave_out_pandas() -> None:
    """Keep pyarrow from importing pandas, a quarter of a second that nothing here needs.

    For its first array it does, to know a Series when it sees one. Only for processes of
    fastcomm: elsewhere somebody may need both.
    """
    sys.meta_path.insert(0, _NoPandas)


def collect_rarely() -> None:
    """Search for reference cycles less often: imports and tables make many objects, no cycles.

    Only for processes of fastcomm, where that takes a twentieth of a short command's time.
    """
    gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])


@contextmanager
def safe_children() -> Iterator[None]:
    """Keep processes started in this block from importing modules of the working directory.

    Raises
    ------
    ConfigError
        If Python ignores the environment (``-E``), but not the working directory (``-P``).

    """
    if sys.flags.ignore_environment and not sys.flags.safe_path:
        raise ConfigError(
            "python -E: workers would import modules of the working directory; use python -I, "
            "or add -P"
        )
    _make_safe()
    try:
        yield
    finally:
        _restore()


def _make_safe() -> None:
    global _safe_users  # noqa: PLW0603 - one environment for all threads
    with _safe_lock:
        if not _safe_users:
            _unsafe_values.update({name: os.environ.get(name) for name in (_SAFE, _PATH)})
            os.environ[_SAFE] = "1"
            if (entries := _unsafe_values[_PATH]) is not None:
                os.environ[_PATH] = os.pathsep.join(filter(None, entries.split(os.pathsep)))
        _safe_users += 1


def _restore() -> None:
    global _safe_users  # noqa: PLW0603
    with _safe_lock:
        _safe_users -= 1
        if _safe_users:
            return
        for name, value in _unsafe_values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


SIGNALS = (signal.SIGINT, signal.SIGTERM)
_QUIET_S = 3.0  # long enough to clean up; after it, a signal interrupts again
_IMPORT = "<frozen importlib._bootstrap>"  # the file of its frames
_LONGEST_IMPORT_S = 2.0  # that a signal waits for
_PAUSE_S = 0.02

_last_signal_s = -_QUIET_S
_import_deadline_s: float | None = None  # of a signal that waits for an import
_is_postponed = False  # whether a thread is about to send that signal again
_deferrals = 0
_deferred: list[int] = []


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise `KeyboardInterrupt` or `SystemExit`, unless one was just raised.

    Signals to a group of processes come in pairs, and the second must not stop the cleaning up.
    """
    global _last_signal_s  # noqa: PLW0603 - signals are of the process
    if _deferrals:
        _deferred.append(number)
        return
    if monotonic() - _last_signal_s < _QUIET_S or _waits_for_import(number, frame):
        return
    _last_signal_s = monotonic()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _waits_for_import(number: int, frame: FrameType | None) -> bool:
    """Whether a signal comes again later, as C code of imports may swallow its exception."""
    global _import_deadline_s, _is_postponed  # noqa: PLW0603
    if _is_postponed:
        return True
    now = monotonic()
    if _import_deadline_s is None:
        _import_deadline_s = now + _LONGEST_IMPORT_S
    if not _is_importing(frame) or now >= _import_deadline_s:
        _import_deadline_s = None
        return False
    _is_postponed = True
    try:
        _thread.start_new_thread(_repeat, (number, threading.get_ident()))  # takes no lock
    except RuntimeError:  # the process ends, and newer Pythons start no thread then
        _is_postponed = False
        return False
    return True


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a frame or one below it is of an import."""
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    return frame is not None


def _repeat(number: int, thread: int) -> None:
    """Send a signal again to a thread."""
    global _is_postponed  # noqa: PLW0603
    sleep(_PAUSE_S)
    _is_postponed = False
    # That thread may sleep, and a signal to another one does not wake it.
    signal.pthread_kill(thread, number)


@contextmanager
def deferred() -> Iterator[None]:
    """Handle the signals of this block at its end; only the main thread handles signals."""
    global _deferrals  # noqa: PLW0603
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _deferrals += 1
    try:
        yield
    finally:
        _deferrals -= 1
        if _deferred and not _deferrals:
            number = _deferred[0]
            _deferred.clear()
            signal.raise_signal(number)


def handle() -> None:
    """Handle signals by `interrupt`."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup or a shell wants it
            signal.signal(number, interrupt)


@contextmanager
def interruptible() -> Iterator[None]:
    """Handle signals by `interrupt` in this block; do nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handle()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_folders: dict[Path, int] = {}  # the process that made each: a fork must not remove them


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new directory that only this user can read, and remove it. Raises `OSError`.

    It is in `parent`, by default in `temporary.root`.
    """
    path = make_folder(parent)
    try:
        yield path
    finally:
        remove_folder(path)


def make_folder(parent: Path | None = None) -> Path:
    """Make a temporary directory for `remove_folder`. Raises `OSError`."""
    import secrets  # with hashes, a sixth of the start of every command

    name = f"fastcomm-{secrets.token_hex(8)}"
    path = (temporary.root() if parent is None else parent.absolute()) / name
    # Noted first: a signal may come as soon as it exists.
    _folders[path] = os.getpid()
    path.mkdir(mode=0o700)
    return path


def remove_folder(path: Path) -> None:
    """Remove a directory of `make_folder` with everything in it; errors are ignored."""
    with deferred():  # interrupted, rmtree closes a descriptor twice, and raises that error
        shutil.rmtree(path, ignore_errors=True)
    _folders.pop(path, None)


@atexit.register
def remove_all() -> None:
    """Remove the temporary directories of this process."""
    for path, maker in list(_folders.items()):
        if maker == os.getpid():
            remove_folder(path)
