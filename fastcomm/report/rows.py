"""Tables of a report on a terminal, and what stands in a cell."""

from collections.abc import Callable
from typing import TypeVar

from rich.table import Table

T = TypeVar("T")

NA = "n/a"


def table(first: str, *others: str) -> Table:
    """A table of words on the left and numbers on the right."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=None)
    found.add_column(first, style="bold", header_style="underline", no_wrap=True)
    for name in others:
        found.add_column(
            name, justify="right" if name else "left", header_style="dim", no_wrap=True
        )
    return found


def percent(value: float | None) -> str:
    """A share in percent."""
    return NA if value is None else f"{value:.1%}"


def group_name(description: str | None, size: int | None) -> str:
    """Return what a process group is called; the traces may not name any."""
    return description or ("not named" if size is None else "undefined")


def na(value: T | None, words: Callable[[T], str]) -> str:
    """A value in words, or that there is none."""
    return NA if value is None else words(value)
