"""How far a long reading is: on stderr, and only if that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fastcomm.engine.local import Outcome
from fastcomm.trace.run import Run


@contextmanager
def progress(run: Run) -> Iterator[Callable[[Outcome[Any]], None]]:
    """A bar of the bytes read; it gives the function that counts one rank done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("reading {task.fields[done]}/{task.fields[ranks]} ranks"),
        BarColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    total = sum(source.size for source in run.sources)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total, done=0, ranks=len(run.sources))

        def advance(outcome: Outcome[Any]) -> None:
            bar.update(task, advance=outcome.source.size, done=bar.tasks[0].fields["done"] + 1)

        yield advance
