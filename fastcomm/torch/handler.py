"""A handler of finished traces that runs in the training process, and never disturbs it.

The thread that trains only exports the trace, as PyTorch's own handler does. All else is the
work of another process of low priority (`fastcomm.torch.writer`), which a thread starts
and waits for. Nothing is raised into the training: an error is one warning.
"""

import atexit
import json
import logging
import os
import queue
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any, Literal

from fastcomm.errors import ConfigError, FastcommError

if TYPE_CHECKING:
    from fastcomm.metrics.options import MetricsOptions
    from fastcomm.options import ReadOptions

Keep = Literal["trace", "partial", "store"]
KEEPS = ("trace", "partial", "store")

_LOG = logging.getLogger("fastcomm")
_RUN_KEY = "fastcomm/run"  # in the store of the process group
# What tells a job, where no process group does.
_JOB = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "LSB_JOBID", "PBS_JOBID"),
)
# Has a low priority before the imports, which take most of a second. Where sessions share the
# cores, it is that of the session, which users can set ten times a second on a host: it is
# tried twice. The ranks of a host export at once: it lets them finish. On a host without a
# free core it still gets a tenth of one; with the lowest priority, nothing.
_WRITER = """
import contextlib, os, sys, time
if sys.argv[1:] != ["nice"]:
    with contextlib.suppress(OSError):
        os.nice(10)
with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as priority:
    priority.write("10")
time.sleep(0.2)
from fastcomm.torch.writer import main
main()
"""
# Lowers the priority before Python starts, which takes a twentieth of a second of a core.
_LOWERED = '(echo 10 >/proc/self/autogroup) 2>/dev/null; exec nice -n 10 "$0" "$@" nice'
DONE = "fastcomm-done "  # before the errors of a recording, a line on the writer's stderr
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")
# In the name of a host, they would read as a rank.
_LIKE_RANK = re.compile(r"rank|worker|nsys|trace", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecording:
    """A finished trace of a rank, and what becomes of it; all values can be JSON."""

    raw: str  # the trace, as PyTorch exported it; empty if it could not
    error: str  # why it could not
    nodes: str  # the execution trace, empty without one
    directory: str
    run: str  # name of the run, empty until it is known
    step: int
    number: int  # of windows that ended at this step
    rank: int
    world_size: int
    host: str
    keep: Keep
    report: bool
    timeout_s: float
    options: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Directory of the window."""
        suffix = "" if self.number == 1 else f"-{self.number}"
        return Path(self.directory) / self.run / f"step-{self.step:06d}{suffix}"


class _Process:
    """The thread that writes recordings, and facts of this process; a fork gets its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.run = ""
        self.windows: Counter[tuple[str, int]] = Counter()
        self.recordings: queue.SimpleQueue[RankRecording | None] = queue.SimpleQueue()
        self.number = 0
        self.token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.errors: set[str] = set()
        self.thread: threading.Thread | None = None

    def add(self, recording: RankRecording) -> None:
        """Write a recording in the thread, which is started if it is the first one."""
        self.recordings.put(recording)
        if self.thread is None:
            self.thread = threading.Thread(target=self._write_all, name="fastcomm", daemon=True)
            self.thread.start()
            # As rank 0 waits for the others, and then reports.
            atexit.register(self.end, 2 * recording.timeout_s)

    def _write_all(self) -> None:
        writer = WriterProcess()
        while (recording := self.recordings.get()) is not None:
            try:
                self.run = self.run or shared_run_name(recording.world_size)
                writer.write(replace(recording, run=self.run))
            except Exception as error:  # nothing may disturb the training
                if not recording.error:  # else the warning on its export is there
                    self.warn(f"rank {recording.rank}: a window is not whole", error)
            if self.recordings.empty():
                writer.close()  # its memory belongs to the training
        writer.close()

    def end(self, timeout_s: float) -> None:
        """Wait until all recordings are written, at most for some seconds."""
        if self.pid != os.getpid() or self.thread is None:
            return
        self.recordings.put(None)
        self.thread.join(timeout_s)
        if not self.thread.is_alive():
            self.thread = None
            return
        count = self._leave_raw()
        rest = f"; {count} more: their uncompressed traces alone remain" if count else ""
        self.warn(
            f"a window was not written within {timeout_s:g} s; its process goes on{rest}", None
        )

    def _leave_raw(self) -> int:
        """Put the traces of windows that nobody has begun to write in place, uncompressed.

        Return the number of these windows.
        """
        count = 0
        with suppress(queue.Empty):
            while True:
                recording = self.recordings.get_nowait()
                if recording is not None and recording.raw:
                    count += 1
                    with suppress(OSError):  # it stays where PyTorch wrote it
                        _leave(replace(recording, run=self.run))
        self.recordings.put(None)
        return count

    def warn(self, text: str, error: Exception | None) -> None:
        """Log a warning, once for each text."""
        if text not in self.errors:
            self.errors.add(text)
            reason = "" if error is None else f": {type(error).__name__}: {error}"
            _LOG.warning("fastcomm: %s%s", text, reason)


_process = _Process()


def _own_process() -> _Process:
    """Return the state of this process: one that was forked has no thread of its parent."""
    global _process  # noqa: PLW0603 - one for all handlers of a process
    if _process.pid != os.getpid():
        _process = _Process()
    return _process


def trace_handler(
    directory: str | os.PathLike[str],
    report: bool = False,
    keep: Keep = "trace",
    *,
    scratch: str | os.PathLike[str] | None = None,
    timeout_s: float = 120.0,
    **options: Any,
) -> Callable[[Any], None]:
    """Return a handler of finished traces for `torch.profiler.profile(on_trace_ready=...)`.

    Each rank writes its trace to `DIRECTORY/RUN/step-N/rankR.HOST.json.gz`, whole or not at
    all, and beside it a partial result of some kilobytes, from which the run is measured. The
    thread that trains waits for PyTorch's export alone. Another process of low priority
    compresses and measures. No collective is called, and any error is one warning.

    Parameters
    ----------
    directory
        Directory of all runs, which all ranks share. Each run gets a directory of its own.
    report
        Whether rank 0 prints the first screen of `fastcomm metrics` for each window, and writes
        its page, `report.html`, once the partial results of all ranks are there.
    keep
        What remains of a trace: "trace", compressed; "store", the Parquet file of a rank, which
        is read faster; or "partial", no more than the partial result.
    scratch
        Local directory for the trace as PyTorch exports it, uncompressed. Default: `directory`.
    timeout_s
        Seconds that rank 0 waits for other ranks before it reports without them. A process
        waits at its end for what is not yet written, at most twice as long.
    **options
        Fields of `ReadOptions` and `MetricsOptions`, such as `tp=2` or
        `link_bandwidth="400Gbit/s"`; texts and numbers only.

    Raises
    ------
    ConfigError
        If an argument is invalid; later errors are warnings.

    """
    _check(keep, timeout_s, options)
    place = os.path.abspath(os.fspath(directory))  # noqa: PTH100 - the text, links kept
    local = place if scratch is None else os.path.abspath(os.fspath(scratch))  # noqa: PTH100

    def handle(prof: Any) -> None:
        state = _own_process()
        try:
            rank, world_size = ranks_of_job()
            step = int(getattr(prof, "step_num", 0))
            state.windows[place, step] += 1
            raw, error = _exported(prof, local, rank)
            recording = RankRecording(
                raw=raw,
                error=error,
                nodes=_execution_trace(prof),
                directory=place,
                run="",
                step=step,
                number=state.windows[place, step],
                rank=rank,
                world_size=world_size,
                host=_host(),
                keep=keep,
                report=report and rank == 0,
                timeout_s=timeout_s,
                options=options,
            )
            state.add(recording)
        except Exception as error:  # nothing may disturb the training
            state.warn(f"{place}: a trace is not written", error)

    return handle


def _check(keep: str, timeout_s: object, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for invalid arguments of `trace_handler`."""
    if keep not in KEEPS:
        raise ConfigError(
            f"trace_handler: keep {keep!r}: expected one of {', '.join(map(repr, KEEPS))}"
        )
    if not isinstance(timeout_s, int | float) or not 0 <= timeout_s < threading.TIMEOUT_MAX:
        raise ConfigError(
            f"trace_handler: timeout_s {timeout_s!r}: expected seconds, 0 or more"
        )
    _check_options(options)
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"trace_handler: options: {error}; pass texts and numbers") from error


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that are unknown, invalid, or name what is not there."""
    from fastcomm.metrics.options import MetricsOptions
    from fastcomm.option_fields import build, check_names, field_infos
    from fastcomm.options import ReadOptions

    names = [*signature(ReadOptions).parameters, *signature(MetricsOptions).parameters]
    check_names(options, names, "trace_handler")
    own = {name: value for name, value in options.items() if name in field_infos(ReadOptions)}
    others = {name: value for name, value in options.items() if name not in own}
    reading = build(ReadOptions, own, "trace_handler")
    measured = build(MetricsOptions, others, "trace_handler")
    try:
        _check_names_of_files(reading, measured)
    except (FastcommError, OSError) as error:
        raise ConfigError(f"trace_handler: {error}") from error


def _check_names_of_files(reading: "ReadOptions", measured: "MetricsOptions") -> None:
    """Raise `FastcommError` or OSError for a configuration, cluster or GPU that is not there.

    Without them, nothing is imported: training waits.
    """
    if reading.config is not None or reading.order is not None:
        from fastcomm.formats.config import Config

        Config.of(reading)
    if measured.cluster is not None:
        from fastcomm.hardware.clusters import load_node

        load_node(measured.cluster)
    if measured.gpu is not None:
        from fastcomm.hardware.gpus import roof_of

        roof_of(None, measured.gpu)


def ranks_of_job() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, without asking other ranks."""
    if (distributed := _distributed()) is not None:
        return distributed.get_rank(), distributed.get_world_size()
    environment = os.environ
    rank = environment.get("RANK", environment.get("SLURM_PROCID", "0"))
    size = environment.get("WORLD_SIZE", environment.get("SLURM_NTASKS", "1"))
    return int(rank), int(size)


def _distributed() -> Any:
    """Return `torch.distributed` if its default process group exists, else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return None
    return distributed if distributed.is_initialized() else None


def shared_run_name(world_size: int) -> str:
    """Return a name that all ranks of this run have, and no other run.

    The first rank that comes sets it in the store of the process group, which answers at once;
    without a process group the environment of the launcher names the job.
    """
    own = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    if (distributed := _distributed()) is not None and world_size > 1:
        store = distributed.distributed_c10d._get_default_store()  # no public way
        with suppress(Exception):  # a store without this operation
            return str(store.compare_set(_RUN_KEY, "", own).decode())
    if world_size > 1:
        text = "\n".join(os.environ.get(name, "") for name in _JOB)
        return f"job-{blake2b(text.encode(), digest_size=5).hexdigest()}"
    return own


def _exported(prof: Any, folder: str, rank: int) -> tuple[str, str]:
    """Export the trace to a hidden file; return its path, or "" and why there is none."""
    state = _own_process()
    state.number += 1
    path = f"{folder}/.fastcomm-{_host()}-{state.token}-{state.number}.rank{rank}.json"
    try:
        if not os.path.isdir(folder):  # noqa: PTH112 - a Path takes longer, and training waits
            Path(folder).mkdir(parents=True, exist_ok=True)
        prof.export_chrome_trace(path)
        if not os.path.exists(path):  # noqa: PTH110
            raise FileNotFoundError("PyTorch wrote no file; is the disk full?")
    except Exception as error:  # nothing may disturb the training
        for half in (path, f"{path}.tmp"):  # Kineto renames what is whole
            with suppress(OSError):
                Path(half).unlink(missing_ok=True)
        state.warn(f"{folder}: a trace is not written", error)
        return "", f"no trace was written to {folder}: {type(error).__name__}: {error}"
    return path, ""


def _execution_trace(prof: Any) -> str:
    """Return the path of a finished execution trace of `profiler`; empty without one."""
    return str(getattr(getattr(prof, "execution_trace_observer", None), "finished", ""))


@cache
def _host() -> str:
    """Return the name of this host, as it can be in the name of a file of a rank."""
    name = _UNSAFE.sub("-", socket.gethostname().partition(".")[0])[:60]
    return _LIKE_RANK.sub("host", name) or "host"


def _homes() -> list[str]:
    """Return the directories that the packages of fastcomm are imported from."""
    specs = map(find_spec, ("fastcomm", "fastcomm_kernels"))
    return [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]


def _leave(recording: RankRecording) -> None:
    """Put the trace of a recording in its window, uncompressed. Raises OSError."""
    if not recording.run:
        raise FileNotFoundError("the name of the run is not known yet")
    recording.folder.mkdir(parents=True, exist_ok=True)
    name = f"rank{recording.rank}.{recording.host}.json"
    Path(recording.raw).replace(recording.folder / name)
    if recording.nodes:
        Path(recording.nodes).replace(recording.folder / f"torch_et_{recording.rank}.json")


class WriterProcess:
    """A process that writes recordings one after another; the first one starts it.

    Its imports take longer than a small recording.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, recording: RankRecording) -> None:
        """Have a recording written, and wait for it.

        If the process cannot be started, the trace stays uncompressed. Raises OSError with its
        error.
        """
        try:
            process = self._process = self._process or _started()
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(recording)).encode() + b"\n")
            process.stdin.flush()
        except (OSError, ValueError):
            self.close()
            if recording.raw:
                _leave(recording)
            raise
        if error := self._error(process):
            raise OSError(error)

    def _error(self, process: "subprocess.Popen[bytes]") -> str:
        """Wait until a recording is written; return why it is not whole, "" if it is."""
        assert process.stderr is not None
        last = ""
        for line in process.stderr:
            text = line.decode(errors="replace").strip()
            if (text + " ").startswith(DONE):
                return text[len(DONE) :]
            last = text or last
        self.close()
        return last or f"its process ended with {process.returncode}"

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            # A data loader that was forked meanwhile holds its standard input, too.
            with suppress(OSError):
                process.stdin.write(b"\n")
            process.communicate()


def _started() -> "subprocess.Popen[bytes]":
    """Start the process that writes recordings. Raises OSError or ValueError."""
    # The process imports what this one does; PYTHONSAFEPATH adds nothing before it.
    entries = [*filter(None, sys.path), *_homes()]
    path = os.pathsep.join(map(os.path.abspath, entries))
    # No pools of threads: the cores belong to the training.
    limits = dict.fromkeys(("OMP_NUM_THREADS", "ARROW_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    return subprocess.Popen(
        command(_WRITER),
        env={**os.environ, **limits, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        start_new_session=True,  # a Ctrl-C ends the training, and the trace is written
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def command(code: str) -> list[str]:
    """Return the command that runs Python code with a low priority from its start on.

    Without a shell or `nice`, the code itself lowers it.
    """
    python = [sys.executable, "-c", code]
    shell = which("sh")
    if shell is None or which("nice") is None or which(sys.executable) is None:
        return python
    return [shell, "-c", _LOWERED, *python]
