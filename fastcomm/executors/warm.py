"""Load, and the first time ever compile, all that reading and measuring a trace needs."""

import logging
from typing import TYPE_CHECKING

from fastcomm.metrics.partial import Partial
from fastcomm.readers.assembly import TraceOptions
from fastcomm.readers.kineto import reader
from fastcomm.temporary import temporary_folder
from fastcomm_kernels import _jit

if TYPE_CHECKING:
    from fastcomm.critical_path.classes import Rules

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


def compile_kernels() -> None:
    """Compile what is not compiled yet, and say so on stderr: it takes seconds."""
    if _jit.is_compiled():
        return
    _LOG.info("fastcomm: compiling its kernels for this machine (the first run only)")
    run_kernels()
    _jit.mark_compiled()


def compile_critical_path(rules: "Rules" = "corrected") -> None:
    """The same for all that the critical path and a what-if need besides, by some rules."""
    part = f"critical-path-{rules}"
    if _jit.is_compiled(part):
        return
    # Not for those who measure: loading it takes time.
    from fastcomm.critical_path.analysis import analyse
    from fastcomm.critical_path.what_if import Replay
    from fastcomm.options import Window

    _LOG.info("fastcomm: compiling its kernels for this machine (the first run only)")
    with temporary_folder() as folder:
        path = folder / "rank0.json"
        path.write_text(_TRACE)
        trace = reader.read(path, TraceOptions(whole=True))
        everything = Window(annotation="")
        found = analyse(trace, everything, rules=rules)
        found.summary()
        if rules == "corrected":
            Replay(found).run([])
    _jit.mark_compiled(part)


def run_kernels() -> Partial:
    """Run every kernel that metrics need once, and return what is measured by host marks."""
    with temporary_folder() as folder:
        path = folder / "rank0.json"
        path.write_text(_TRACE)
        return Partial.of(reader.read(path, TraceOptions()), by_host=True)
