"""Files that a command writes: whole or not at all, and never over one that it reads."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fastcomm.errors import FastcommError

# What a killed process leaves behind: hidden, and never taken for a part of a store.
_MARK = "unfinished"


def check_replaceable(path: Path) -> None:
    """Raise `FastcommError` where a file of this name must not be replaced.

    A device, a FIFO or a socket would be gone, and so would a symbolic link; following one
    would write to a place that whoever made it has chosen.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:  # not there; or writing to it fails, and says why
        return
    if stat.S_ISLNK(mode):
        raise FastcommError(
            f"{path}: not written, it is a symbolic link to {path.readlink()}; name that file, "
            "or remove the link"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise FastcommError(f"{path}: not written, it is no regular file; name another file")


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path to write to: renamed to `path` at the end, removed where that is not reached.

    Raises `FastcommError` where the system refuses, as a full disk does, and where `path` is
    no regular file, or an input of the command.
    """
    check_replaceable(path)
    check_no_input(path)
    # Of another machine that writes the same, the number of the process may be the same.
    name = f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.{_MARK}"
    unfinished = path.with_name(name)
    try:
        yield unfinished
        check_replaceable(path)
        unfinished.replace(path)
    except OSError as error:
        raise FastcommError(f"{path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def left_behind(folder: Path) -> list[Path]:
    """What killed processes left in a folder."""
    return sorted(folder.glob(f".*.{_MARK}"))


_Identity = tuple[int, int]  # device and inode: links to a file have that of the file


@dataclass(slots=True)
class _Guard:
    """Files of the command that runs in this process."""

    inputs: dict[Path, None] = field(default_factory=dict)  # in order
    outputs: list[Path] = field(default_factory=list)


_guards: list[_Guard] = []  # the last one counts; a library call outside of a command has none


@contextmanager
def guarded() -> Iterator[None]:
    """Note inputs and outputs of one command; forget them at its end."""
    _guards.append(_Guard())
    try:
        yield
    finally:
        _guards.pop()


@contextmanager
def unguarded() -> Iterator[None]:
    """Note nothing, for what reads its own files and writes them again."""
    noted = _guards.copy()
    _guards.clear()
    try:
        yield
    finally:
        _guards[:] = noted


def note_inputs(paths: Iterable[Path]) -> None:
    """Note files that a command reads; FastcommError where one of its outputs is among them."""
    if not _guards:
        return
    guard, new = _guards[-1], list(paths)
    guard.inputs.update(dict.fromkeys(new))
    for output in guard.outputs:
        refuse_inputs(output, new)


def note_output(path: Path) -> None:
    """Note a file that a command will write; FastcommError where it is one of its inputs."""
    if _guards:
        _guards[-1].outputs.append(path)
        check_no_input(path)


def check_no_input(path: Path) -> None:
    """Raise `FastcommError` where a file is an input of the command, or lies in one."""
    if _guards:
        refuse_inputs(path, _guards[-1].inputs)


def refuse_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Raise `FastcommError` where `output` is one of the inputs, or lies in one."""
    place = output.parent.resolve() / output.name
    folders = {*output.absolute().parents, *place.parents}
    same = _identity(output)  # without a file of that name, only a folder can be an input
    for each in inputs:
        if each.absolute() in folders or (same is not None and _identity(each) == same):
            raise FastcommError(
                f"{output}: not written, this command reads {each}; name another output"
            )


def _identity(path: Path) -> _Identity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
