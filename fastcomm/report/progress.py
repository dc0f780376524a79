"""How far a long reading is: on stderr, and only if that is a terminal."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fastcomm.engine.engine import Progress as Advance
from fastcomm.trace.run import Run, Source

_LOG = logging.getLogger("fastcomm")


@contextmanager
def progress(run: Run) -> Iterator[Advance | None]:
    """A bar of the bytes read; it gives the function that counts one rank done."""
    if not sys.stderr.isatty() or not _LOG.isEnabledFor(logging.INFO):
        yield None
        return

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("reading {task.fields[done]}/{task.fields[ranks]} ranks"),
        BarColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    total = sum(source.size for source in run.sources)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, done=0, ranks=len(run.sources))

        def advance(source: Source) -> None:
            done = bar.tasks[0].fields["done"] + 1
            bar.update(task, advance=source.size, done=done)

        yield advance
