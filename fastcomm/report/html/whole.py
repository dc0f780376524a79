"""The page of a run as a file, with the critical path and the tables beside it."""

from collections.abc import Sequence
from pathlib import Path

from fastcomm.engine import warm
from fastcomm.engine.longest import search
from fastcomm.errors import FastcommError
from fastcomm.metrics.result import Metrics
from fastcomm.report.html import beside, measured, render
from fastcomm.report.html.page import Page
from fastcomm.trace.run import Run


def write_report(
    found: Metrics,
    output: str | Path = "report.html",
    *,
    run: Run | None = None,
    paths: Sequence[str] = (),
    options: Sequence[str] = (),
    with_data: bool = True,
) -> None:
    """Write the page that `fastcomm report` writes.

    A `run`, opened with `OpenOptions(whole=True)`, brings the critical path. `paths` and
    `options` (command line options that say how to read the run) are repeated in the commands
    that the page suggests.
    `with_data` writes the tables as Parquet to a folder beside the page.
    """
    output, paths = Path(output), paths or _places(run)
    data = beside.write(found.to_arrow(), output) if with_data else []
    page = (
        measured.page(found, paths, options=options, data=data)
        if run is None
        else _with_path(found, run, paths, options, data)
    )
    render.write(page, output)


def _places(run: Run | None) -> tuple[str, ...]:
    """Where the files of a run lie; the word for it in commands where nobody knows."""
    if run is None:
        return ("PATH",)
    return tuple(sorted({str(each.path.parent) for each in run.sources}))


def _with_path(
    found: Metrics,
    run: Run,
    paths: Sequence[str],
    options: Sequence[str],
    data: Sequence[tuple[str, str]],
) -> Page:
    warm.compile_critical_path()
    try:
        path, joined = search(run, measured.busiest(found))
    except FastcommError as error:
        why = f"No critical path: {error}"
        return measured.page(found, paths, options=options, data=data, no_path=why)
    return measured.page(found, paths, options=options, critical=path, joined=joined, data=data)
