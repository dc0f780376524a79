"""Where Python looks for modules: never in the working directory.

Traces lie in directories of other people, and a module among them must not be imported.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from fastcomm.errors import ConfigError

# Under these lie settings, and compiled code. A relative one is invalid.
_HOMES = ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
_SAFE, _PATH = "PYTHONSAFEPATH", "PYTHONPATH"
_HOME = str(Path(__file__).parents[1])  # where fastcomm itself is imported from

_lock = Lock()
_users = 0
_before: dict[str, str | None] = {}


def drop_working_directory() -> None:
    """Remove the working directory from `sys.path`, unless PYTHONPATH names it.

    It leads the path of ``python -m``, and an empty entry of PYTHONPATH stands for it.
    """
    try:
        folder = str(Path.cwd())
    except OSError:  # removed meanwhile
        folder = ""
    if folder not in (_HOME, *os.environ.get(_PATH, "").split(os.pathsep)):
        sys.path[:] = [each for each in sys.path if each not in ("", folder)]


def drop_relative_homes() -> None:
    """Remove what would make the working directory one of settings: ``HOME=.`` and its like."""
    for name in _HOMES:
        if not Path(os.environ.get(name, "/")).is_absolute():
            del os.environ[name]


@contextmanager
def safe_children() -> Iterator[None]:
    """Keep processes that start meanwhile from importing modules of the working directory.

    Raises `ConfigError` where Python was told to ignore the environment, but not to be safe.
    """
    if sys.flags.ignore_environment and not sys.flags.safe_path:
        raise ConfigError(
            "python -E: workers would import modules of the working directory; use python -I, "
            "or add -P"
        )
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _users  # noqa: PLW0603 - one environment for all threads
    with _lock:
        if not _users:
            _before.update({name: os.environ.get(name) for name in (_SAFE, _PATH)})
            os.environ[_SAFE] = "1"
            if (entries := _before[_PATH]) is not None:
                os.environ[_PATH] = os.pathsep.join(filter(None, entries.split(os.pathsep)))
        _users += 1


def _leave() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if _users:
            return
        for name, value in _before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
