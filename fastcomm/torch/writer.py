"""The process that writes and measures the recording of a rank, which `handler` starts.

It reads each `RankRecording` as a line of JSON from standard input, and answers with a line of
errors on standard error. The trace appears under its name when it
is whole; then the rank is measured; and rank 0 waits for the others and reports.
"""

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.markup import escape

from fastcomm.errors import FastcommError, inert
from fastcomm.files import aside, fast_gzip
from fastcomm.metrics.options import MetricsOptions
from fastcomm.metrics.partial_files import RankPartials, write
from fastcomm.option_fields import build, field_infos
from fastcomm.options import ReadOptions
from fastcomm.preparation import compile_kernels
from fastcomm.process import temporary_folder
from fastcomm.torch.handler import DONE, RankRecording
from fastcomm.watch.windows import ProfiledWindow

_LEVEL = 1  # of compression: traces are large, and their text repeats itself
_BLOCK = 1 << 20
_PARTING_S = 5.0  # of waiting for other ranks when the training has ended
_TAIL = 64  # bytes at the end of a file, to tell whether it is whole


def main() -> None:
    """Write the recordings on standard input until an empty line or its end."""
    for line in iter(sys.stdin.readline, ""):
        if not line.strip():
            break
        errors = write_recording(RankRecording(**json.loads(line)))
        sys.stdout.flush()
        with suppress(OSError):  # the training has ended
            sys.stderr.write(f"{DONE}{'; '.join(errors)}\n")
            sys.stderr.flush()


def write_recording(recording: RankRecording) -> list[str]:
    """Write and measure a recording, and report its window; return what went wrong, in lines.

    Parameters
    ----------
    recording
        The trace of a rank. Its raw trace is removed.

    """
    window = ProfiledWindow(folder=recording.folder, step=recording.step)
    errors, has_steps = [], True
    try:
        has_steps = _write(recording, window)
    except (FastcommError, OSError) as error:
        errors.append(inert(str(error)))
    # Where this rank could not even say why it has no result, others cannot either.
    has_word = recording.rank in window.measured.keys() | window.failed.keys()
    if recording.report and has_steps and has_word:
        try:
            _report(recording, window)
        except (FastcommError, OSError) as error:
            errors.append(inert(str(error)))
    return [" ".join(text.split()) for text in errors]


def _options(recording: RankRecording) -> tuple[ReadOptions, MetricsOptions]:
    """Return how traces are read, and what is measured."""
    names = field_infos(ReadOptions)
    own = {name: _tuples(value) for name, value in recording.options.items() if name in names}
    others = {name: _tuples(v) for name, v in recording.options.items() if name not in names}
    return build(ReadOptions, own, "trace_handler"), build(
        MetricsOptions, others, "trace_handler"
    )


def _tuples(value: Any) -> Any:
    """Return a list of JSON as the tuple that it was."""
    return tuple(value) if isinstance(value, list) else value


def _write(recording: RankRecording, window: ProfiledWindow) -> bool:
    """Write the trace and the partial result of a rank, or why there is none.

    Return whether the window has a whole step. One that began when the job ended has none, and
    nothing of it stays.
    """
    if recording.error:
        window.note_failure(recording.rank, recording.error)
        return True
    raw = Path(recording.raw)
    try:
        place = window.place_of(recording.rank)
        _check_whole(raw)
        partials = _results(recording, window, raw)
        _remove_raw(recording)  # before a partial result says that the rank is complete
        if partials is None:
            with suppress(OSError):  # other ranks have files there
                window.partials_folder.rmdir()
                window.folder.rmdir()
            return False
        write(partials, place)
        return True
    except (FastcommError, OSError) as error:
        with suppress(FastcommError, OSError):
            window.note_failure(recording.rank, str(error))
        raise
    finally:
        _remove_raw(recording)


def _remove_raw(recording: RankRecording) -> None:
    """Remove the traces of a recording as PyTorch wrote them."""
    for path in filter(None, (recording.raw, recording.nodes)):
        Path(path).unlink(missing_ok=True)


def _results(
    recording: RankRecording, window: ProfiledWindow, raw: Path
) -> RankPartials | None:
    """Return the partial results of a rank, None without a whole step; compress its trace.

    A trace that cannot be measured is compressed, too.
    """
    has_steps = True
    try:
        partials = _measured(recording, window, raw)
        has_steps = partials is not None
        return partials
    finally:
        if has_steps and recording.keep == "trace":
            _compressed(recording, window)


def _check_whole(raw: Path) -> None:
    """Raise `FastcommError` if PyTorch could not write the whole trace."""
    with raw.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL, 0))
        if not file.read().rstrip().endswith(b"}"):
            raise FastcommError(
                f"{raw}: PyTorch wrote {size} bytes of a trace that is not whole; is the disk "
                "full? The trace is removed"
            )


def _compressed(recording: RankRecording, window: ProfiledWindow) -> None:
    """Write the compressed traces of a rank."""
    names = {recording.raw: f"rank{recording.rank}.{recording.host}.json.gz"}
    if recording.nodes:
        names[recording.nodes] = f"torch_et_{recording.rank}.json.gz"
    for raw, name in names.items():
        _compress(Path(raw), window.folder / name)


def _compress(raw: Path, path: Path) -> None:
    """Write a compressed trace, whole or not at all."""
    with (
        aside(path) as unfinished,
        raw.open("rb") as source,
        fast_gzip().open(unfinished, "wb", compresslevel=_LEVEL) as target,
    ):
        shutil.copyfileobj(source, target, _BLOCK)


def _measured(
    recording: RankRecording, window: ProfiledWindow, raw: Path
) -> RankPartials | None:
    """Return the partial results of a rank; write its Parquet file where it is to be kept.

    Without a whole step, return None.
    """
    compile_kernels()
    partials = window.measure(raw, *_options(recording))
    if partials is not None and recording.keep == "store":
        _store(raw, window)
    return partials


def _store(raw: Path, window: ProfiledWindow) -> None:
    """Write the Parquet file of a rank, with all its events, into the window."""
    from fastcomm.ingest.ingest import ingest, plan

    with temporary_folder(window.partials_folder) as folder:
        stored = ingest(plan([raw], folder / "store"))
        for entry in stored.manifest.ranks:
            (stored.folder / entry.file).replace(window.folder / entry.file)


def _wait(recording: RankRecording, window: ProfiledWindow) -> None:
    """Wait for all ranks; shortly if the training has ended without waiting for its report."""
    until = time.monotonic() + recording.timeout_s
    rest_s = recording.timeout_s
    while rest_s > 0 and not window.wait(recording.world_size, min(rest_s, _PARTING_S)):
        if recording.pid not in (os.getpid(), os.getppid()):
            return
        rest_s = until - time.monotonic()


def _report(recording: RankRecording, window: ProfiledWindow) -> None:
    """Wait for all ranks, print the first screen of the metrics, and write the page."""
    from fastcomm.metrics import tables
    from fastcomm.metrics.findings.suggestions import reading_arguments
    from fastcomm.report.page import report_page
    from fastcomm.show.console import plain_console, say
    from fastcomm.show.pages import write as write_page

    _wait(recording, window)
    reading, options = _options(recording)
    metrics = window.metrics(options, reading)
    page, console = window.folder / "report.html", plain_console()
    say(console, f"fastcomm: {window.run_name}, the window before step {recording.step}")
    tables.show(metrics, console)
    arguments = reading_arguments(reading)
    write_page(report_page(metrics, [str(window.folder)], options=arguments), page)
    say(console, f"fastcomm: the page of this window: {escape(str(page))}")
