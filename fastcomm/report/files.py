"""A result in files: each is written aside, and gets its name when it is whole."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from fastcomm.aside import aside
from fastcomm.errors import FastcommError

Writer = Callable[[Path], object]


def write(folder: str | Path, writers: Mapping[str, Writer]) -> list[Path]:
    """Write files by name into a folder, which is made; FastcommError where that fails."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, writer in writers.items():
            with aside(folder / name) as unfinished:
                writer(unfinished)
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
    return [folder / name for name in writers]


def text(content: str) -> Writer:
    """What writes a text."""
    return partial(Path.write_text, data=content, encoding="utf-8")
