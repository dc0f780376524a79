"""The process: where it looks for modules, its signals, and its temporary directories.

Traces lie in directories of other people, and a module among them must not be imported: the
working directory is no place to look. Ctrl-C and SIGTERM raise one exception that unwinds the
command, and no second while it does. Temporary directories are removed at the latest when the
process ends, even if interrupted.
"""

import atexit
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
_AGAIN_S = 0.02  # until a signal is sent again whose exception was lost

_last_signal_s = -_QUIET_S
_to_send: int | None = None  # signal whose exception was lost
_on_its_way = (0, 0)  # process and identity of the exception that was raised last
_is_ignored = False  # whether an exception that is raised now would be ignored
_deferrals = 0
_deferred: list[int] = []


class _BySignal:
    """An exception of a signal, which sends the signal again where Python or C code drops it.

    Code in C that looks for something, such as an optional module, forgets every exception.
    One that is not forgotten lives until `interruptible` or the command ends.
    """

    number = 0

    def __del__(self) -> None:
        """Send the signal again if this is the exception that is on its way."""
        if (
            _on_its_way == (os.getpid(), id(self))
            and signal.getsignal(self.number) is interrupt
        ):
            _send_again(self.number)


class _Interrupted(_BySignal, KeyboardInterrupt):
    """Ctrl-C."""


class _Terminated(_BySignal, SystemExit):
    """The end by a signal."""


def interrupt(number: int, _frame: FrameType | None) -> None:
    """Handle a signal: raise `KeyboardInterrupt` or `SystemExit`, unless one was just raised.

    Signals to a group of processes come in pairs, and the second must not stop the cleaning up.
    """
    global _last_signal_s, _to_send  # noqa: PLW0603 - signals are of the process
    if _is_ignored:
        return  # it is sent again
    _to_send = None
    if _deferrals:
        _deferred.append(number)
        return
    if monotonic() - _last_signal_s < _QUIET_S:
        return
    _last_signal_s = monotonic()
    raise _exception_of(number)


def _exception_of(number: int) -> _Interrupted | _Terminated:
    """Return the exception of a signal, which is on its way from now on."""
    global _on_its_way  # noqa: PLW0603
    error = _Interrupted() if number == signal.SIGINT else _Terminated(128 + number)
    error.number = number
    _on_its_way = os.getpid(), id(error)
    return error


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
    """Handle signals by `interrupt`, also while a destructor runs."""
    sys.unraisablehook = _print_others
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup or a shell wants it
            signal.signal(number, interrupt)


@contextmanager
def interruptible() -> Iterator[None]:
    """Handle signals by `interrupt` in this block; do nothing outside of the main thread."""
    global _to_send, _on_its_way  # noqa: PLW0603
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    unraisable = sys.unraisablehook
    handle()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = unraisable
        _on_its_way = 0, 0
        if _to_send is not None:
            unhandled, _to_send = _to_send, None
            signal.raise_signal(unhandled)


def _print_others(args: "sys.UnraisableHookArgs") -> None:
    """Print an error that Python cannot raise, unless its signal is sent again."""
    if not isinstance(args.exc_value, _BySignal):
        sys.__unraisablehook__(args)


def _send_again(number: int) -> None:
    """Send a signal again whose exception was lost."""
    global _last_signal_s, _to_send, _is_ignored  # noqa: PLW0603
    _is_ignored = True
    _last_signal_s = -_QUIET_S
    _to_send = number
    threading.Thread(target=_send_until_handled, daemon=True).start()
    _is_ignored = False  # last, as Python looks for signals after calls


def _send_until_handled() -> None:
    """Send the signal whose exception was lost until its handler may raise it."""
    while True:
        sleep(_AGAIN_S)
        number = _to_send
        if number is None:
            return
        os.kill(os.getpid(), number)


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
