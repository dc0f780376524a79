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
from collections import Counter, deque
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
# tried twice. On a host without a free core it still gets a tenth of one; with the lowest
# priority, nothing.
_WRITER = """
import contextlib, os, sys
if sys.argv[1:] != ["nice"]:
    with contextlib.suppress(OSError):
        os.nice(10)
with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as priority:
    priority.write("10")
from fastcomm.torch.writer import main
main()
"""
# Lowers the priority before Python starts, which takes a twentieth of a second of a core.
_LOWERED = '(echo 10 >/proc/self/autogroup) 2>/dev/null; exec nice -n 10 "$0" "$@" nice'
# From an export to all other work on its trace. The ranks of a host export at once, and wait
# for each other in the next step: on a busy host, the work of one would delay them all.
_DELAY_S = 0.2
_HANDOVER_S = 5.0  # at most, from an export to the process that writes it
PARTIALS = ".partials"  # in the directory of a window; makes it one for all commands
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
    pid: int  # of the training
    options: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Directory of the window."""
        suffix = "" if self.number == 1 else f"-{self.number}"
        return Path(self.directory) / self.run / f"step-{self.step:06d}{suffix}"


class _Process:
    """The threads that hand recordings on, and facts of this process; a fork gets its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.run = ""
        self.windows: Counter[tuple[str, int]] = Counter()
        self.recordings: queue.SimpleQueue[RankRecording | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.unsent = 0  # recordings that no writer has yet
        self.unfinished = 0  # recordings that are not written, and processes that run
        self.number = 0
        self.token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.errors: set[str] = set()
        self.writers: queue.SimpleQueue[WriterProcess] = queue.SimpleQueue()
        self.has_threads = False
        self.is_ending = threading.Event()  # nothing is delayed any more
        self.is_failing = False  # an exception has ended the training

    def add(self, recording: RankRecording, end_s: float) -> None:
        """Have a recording written; the end of this process waits for it so many seconds."""
        self.count(unsent=1, unfinished=1)
        self.recordings.put(recording)
        if not self.has_threads:
            # Both now: from 3.12 on, Python starts no thread while a process ends.
            self.has_threads = True
            for name, work in (
                ("fastcomm", self._send_all),
                ("fastcomm-answers", self._read_all),
            ):
                threading.Thread(target=work, name=name, daemon=True).start()
            atexit.register(self._exit, end_s)

    def count(self, *, unsent: int = 0, unfinished: int = 0) -> None:
        """Count what is still to be done."""
        with self.changed:
            self.unsent += unsent
            self.unfinished += unfinished
            self.changed.notify_all()

    def _send_all(self) -> None:
        """Send each recording to the process that writes, which outlives this one."""
        writer: WriterProcess | None = None
        while True:
            recording = self.recordings.get()
            if recording is None:  # one is written
                if writer is not None and writer.is_idle and self.recordings.empty():
                    writer.close()  # its memory belongs to the training
                    writer = None
                continue
            try:
                self.run = self.run or shared_run_name(recording.world_size)
                self.is_ending.wait(_DELAY_S)
                recording = _placed(replace(recording, run=self.run))
                if writer is None or not writer.send(recording):
                    writer = WriterProcess(self)
                    writer.send(recording)
            except Exception as error:  # nothing may disturb the training
                self.finish(recording, error)
            self.count(unsent=-1)

    def _read_all(self) -> None:
        """Read the answers of each process that writes until it ends."""
        while True:
            self.writers.get().read()

    def finish(self, recording: RankRecording, error: Exception | None) -> None:
        """Count a recording as written, and warn of its error."""
        if error is not None and not recording.error:  # else there is one on its export
            self.warn(f"rank {recording.rank}: a window is not whole", error)
        self.recordings.put(None)
        self.count(unfinished=-1)

    def send_again(self, recording: RankRecording) -> None:
        """Send a recording to another process, as the one that had it has ended."""
        self.count(unsent=1)
        self.recordings.put(recording)

    def _exit(self, timeout_s: float) -> None:
        """Wait at the end of the process; after an exception only for the handover.

        Other ranks may never come, and who restarts the job waits for this process. Which code
        `sys.exit` was called with, nothing tells here.
        """
        if self.pid != os.getpid():
            return
        self.is_ending.set()
        if getattr(sys, "last_value", None) is None and not self.is_failing:
            self.end(timeout_s)
        else:
            with self.changed:
                self.changed.wait_for(lambda: not self.unsent, min(timeout_s, _HANDOVER_S))

    def end(self, timeout_s: float) -> None:
        """Wait until all recordings are written, at most for some seconds."""
        with self.changed:
            limit = min(timeout_s, threading.TIMEOUT_MAX)
            is_done = self.changed.wait_for(lambda: not self.unfinished, limit)
        if not is_done:
            self.warn(
                f"not all windows were written within {timeout_s:g} s; the process that "
                "writes them goes on, and until then their uncompressed traces are there",
                None,
            )

    def warn(self, text: str, error: Exception | None) -> None:
        """Log a warning, once for each text."""
        if text not in self.errors:
            self.errors.add(text)
            reason = "" if error is None else f": {type(error).__name__}: {error}"
            _LOG.warning("fastcomm: %s%s", text, reason)


_process = _Process()


def own_process() -> _Process:
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
        state = own_process()
        try:
            rank, world_size = ranks_of_job()
            step = int(getattr(prof, "step_num", 0))
            state.windows[place, step] += 1
            raw, error = _exported(prof, local, rank, step)
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
                timeout_s=0.0 if is_failure(sys.exc_info()[1]) else timeout_s,
                pid=state.pid,
                options=options,
            )
            state.add(recording, 2 * timeout_s)  # as rank 0 waits for others, and reports
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
    # Of the group itself: functions of `torch.distributed` take a tenth of a millisecond.
    world = getattr(getattr(sys.modules.get("torch.distributed"), "group", None), "WORLD", None)
    if world is not None:
        return world.rank(), world.size()
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


def _exported(prof: Any, folder: str, rank: int, step: int) -> tuple[str, str]:
    """Export the trace to a hidden file; return its path, or "" and why there is none."""
    state = own_process()
    state.number += 1
    name = f".fastcomm-{_host()}-{state.token}-{state.number}.step-{step:06d}.rank{rank}.json"
    path = f"{folder}/{name}"
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


def is_failure(error: BaseException | None) -> bool:
    """Whether the training ends by an error, so that other ranks may never come this far."""
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


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


def _placed(recording: RankRecording) -> RankRecording:
    """Put a trace into its window, uncompressed, where all commands read it.

    So nothing is lost if no process can write it. On another file system it stays where it is.
    """
    raw = nodes = ""
    with suppress(OSError):
        (recording.folder / PARTIALS).mkdir(parents=True, exist_ok=True)
        raw = _moved(recording.raw, f"rank{recording.rank}.{recording.host}.json", recording)
        nodes = _moved(recording.nodes, f"torch_et_{recording.rank}.json", recording)
    return replace(recording, raw=raw or recording.raw, nodes=nodes or recording.nodes)


def _moved(path: str, name: str, recording: RankRecording) -> str:
    """Move a file into the window of a recording; return its new path, "" if it stays."""
    with suppress(OSError):
        return str(Path(path).rename(recording.folder / name)) if path else ""
    return ""


class WriterProcess:
    """A process that writes recordings one after another, also if this process ends.

    Its imports take longer than a small recording. Raises OSError or ValueError if it cannot
    be started.
    """

    def __init__(self, state: _Process) -> None:
        self._state = state
        self._process = _started()
        self._sent: deque[RankRecording] = deque()
        self._lock = threading.Lock()
        self._has_ended = False
        state.count(unfinished=1)
        state.writers.put(self)

    @property
    def is_idle(self) -> bool:
        """Whether all recordings that were sent are written."""
        return not self._sent

    def send(self, recording: RankRecording) -> bool:
        """Send a recording; return False if the process has ended."""
        with self._lock:
            if self._has_ended:
                return False
            self._sent.append(recording)
        # If it ends now, the recording is sent again.
        self._write(json.dumps(asdict(recording)).encode())
        return True

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def read(self) -> None:
        """Read the answer to each recording until the process ends."""
        assert self._process.stderr is not None
        last = ""
        for line in self._process.stderr:
            text = line.decode(errors="replace").strip()
            if (text + " ").startswith(DONE):
                error = text[len(DONE) :]
                self._state.finish(self._sent.popleft(), OSError(error) if error else None)
                last = ""
            last = text or last
        code = self._process.wait()
        self._process.stderr.close()
        self._close_input()
        with self._lock:
            self._has_ended = True
        # What it was writing when it ended is not tried again: it may end the next one, too.
        if self._sent:
            error = last or f"its process ended with {code}"
            self._state.finish(self._sent.popleft(), OSError(error))
        while self._sent:
            self._state.send_again(self._sent.popleft())
        self._state.count(unfinished=-1)

    def close(self) -> None:
        """End the process."""
        # A data loader that was forked meanwhile holds its standard input, too.
        self._write(b"")
        self._close_input()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()


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
