"""Prepare an analysis: find the traces on the machine that has them, and compile kernels."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from fastcomm.executors.executor import Executor, Local, OpenedRun, ShowProgress, unseen
from fastcomm.files import is_url
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.config import Config
from fastcomm.formats.kineto import reader
from fastcomm.formats.opening import open_run
from fastcomm.metrics.partial import Partial
from fastcomm.options import ReadOptions
from fastcomm.process import temporary_folder
from fastcomm.trace.trace import Trace
from fastcomm_kernels import _jit

_LOG = logging.getLogger("fastcomm")
# One step with one all-reduce: every kernel of the way runs on it once.
_TRACE = """{"schemaVersion": 1, "traceEvents": [
{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "ts": 0, "dur": 9},
{"ph": "X", "cat": "user_annotation", "name": "nccl:all_reduce", "ts": 1, "dur": 3},
{"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": 2, "args": {"correlation": 5}},
{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "tid": 7, "ts": 4, "dur": 2,
 "args": {"correlation": 5}},
{"ph": "X", "cat": "kernel", "name": "gemm", "tid": 8, "ts": 5, "dur": 2}
]}"""


def open_traces(
    paths: Sequence[str | Path],
    options: ReadOptions,
    executor: Executor | None = None,
    *,
    standing: Iterable[str] = (),
    show: ShowProgress = unseen,
) -> OpenedRun:
    """Find the traces of a run, their format and their ranks.

    Parameters
    ----------
    paths
        Directories, files, globs or URLs.
    options
        How the traces are read.
    executor
        Reads the ranks, and its workers search URLs; by default this process does.
    standing
        Names of options that the format may ignore.
    show
        Shows the progress of reading.

    Raises
    ------
    ConfigError
        If an option is invalid, or has no effect on the format.
    FastcommError
        If there is no trace, or a file cannot be opened.

    """
    executor = executor or Local()
    config = Config.of(options, standing=standing)
    look = partial(open_run, *worker_paths(paths, executor), config=config)
    traces = executor.call(look) if any(is_url(path) for path in paths) else look()
    run = OpenedRun.of(traces, executor, show)
    return run if options.ranks is None else run.only(options.ranks)


def worker_paths(paths: Sequence[str | Path], executor: Executor) -> tuple[str | Path, ...]:
    """Return absolute paths if workers run elsewhere, in another working directory."""
    if isinstance(executor, Local):
        return tuple(paths)
    return tuple(path if is_url(path) else str(Path(path).absolute()) for path in paths)


def compile_kernels() -> None:
    """Compile the kernels of metrics unless cached, with a message, as it takes seconds."""
    if _jit.is_compiled():
        return
    _LOG.info("fastcomm: compiling its kernels for this machine (the first run only)")
    run_metric_kernels()
    _jit.mark_compiled()


def compile_critical_path(compat: str | None = None) -> None:
    """Compile the kernels of critical paths and what-ifs that `compile_kernels` leaves out.

    `compat` is the tool by whose rules paths are searched.
    """
    if compat is not None:
        from fastcomm.compat import hta

        compile_for("critical-path-hta", hta.find_path)
        return

    def replayed(trace: Trace) -> None:
        # Not for those who measure: loading it takes time.
        from fastcomm.critical_path.search import analyze
        from fastcomm.critical_path.what_if import Replay
        from fastcomm.options import Window

        path = analyze(trace, Window(annotation=""))
        path.summary()
        Replay(path).step_after([])

    compile_for("critical-path-corrected", replayed)


def compile_for(part: str, analysis: Callable[[Trace], object]) -> None:
    """Compile the kernels of an analysis by running it on a small trace, unless this was done.

    `part` names the group of kernels in the cache.
    """
    if _jit.is_compiled(part):
        return
    _LOG.info("fastcomm: compiling its kernels for this machine (the first run only)")
    analysis(_small_trace(TraceOptions(whole=True)))
    _jit.mark_compiled(part)


def run_metric_kernels() -> Partial:
    """Run every kernel that metrics need once; return the metrics of steps by host marks."""
    return Partial.of(_small_trace(TraceOptions()), by_host=True)


def _small_trace(options: TraceOptions) -> Trace:
    with temporary_folder() as folder:
        path = folder / "rank0.json"
        path.write_text(_TRACE)
        return reader.read(path, options)
