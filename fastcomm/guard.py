"""Outputs never replace inputs: what a command reads is noted, and writing over it refused."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fastcomm.errors import FastcommError

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
