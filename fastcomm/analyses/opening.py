"""Open a run where its files can be seen."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fastcomm.executors import Executor
from fastcomm.executors.local import Local
from fastcomm.files import is_url
from fastcomm.options import ReadOptions
from fastcomm.readers.formats import OpenOptions
from fastcomm.readers.runs import open_run
from fastcomm.trace.run import RunTraces


def open_traces(
    paths: Sequence[str | Path],
    options: ReadOptions,
    executor: Executor | None = None,
    *,
    whole: bool = False,
) -> RunTraces:
    """Find the traces of a run; those at URLs are looked for where `executor` reads them.

    With `whole`, every event is read later, not only those that metrics need. Raises as
    `open_run` does.
    """
    executor = executor or Local()
    look = partial(
        open_run, *worker_paths(paths, executor), options=OpenOptions.of(options, whole=whole)
    )
    run = executor.call(look) if any(is_url(path) for path in paths) else look()
    return run.only(options.ranks) if options.ranks else run


def worker_paths(paths: Sequence[str | Path], executor: Executor) -> tuple[str | Path, ...]:
    """Return the paths as every worker understands them: those of a cluster start elsewhere."""
    if isinstance(executor, Local):
        return tuple(paths)
    return tuple(path if is_url(path) else str(Path(path).absolute()) for path in paths)
