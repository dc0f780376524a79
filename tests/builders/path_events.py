"""Events of small traces for critical paths."""

from builders import kineto_text as k

from fastcomm.critical_path.search import analyze
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.options import Window

WHOLE = Window(annotation="")


US = 1000


def read(path):
    return reader.read(path, TraceOptions(whole=True))


def op(name, ts, dur, tid=1, **args):
    return k.event(name, "cpu_op", ts, dur, pid=100, tid=tid, **args)


def call(name, ts, dur, correlation=None, tid=1):
    args = {} if correlation is None else {"correlation": correlation}
    return k.event(name, "cuda_runtime", ts, dur, pid=100, tid=tid, **args)


def work(name, ts, dur, correlation, stream=7, device=0, cat="kernel"):
    args = {"stream": stream, "correlation": correlation, "device": device}
    return k.event(name, cat, ts, dur, pid=device, tid=stream, **args)


def sync(name, ts, dur, correlation, stream=7, **args):
    row = k.event(name, "cuda_sync", ts, dur, pid=0, tid=stream, stream=stream, device=0)
    row["args"] |= {"correlation": correlation, **args}
    return row


def steps(found):
    """The path as (class, us, whose time)."""
    rows = found.breakdown.to_pylist()
    return [(r["bound_by"], r["duration_ns"] / US, r["name"]) for r in rows if r["duration_ns"]]


def finder(folder):
    """Return a function that finds the path of some events, written into a folder."""

    def find(*events, by=analyze, **words):
        path = k.write(folder / "rank0.json", list(events))
        return by(read(path), words.pop("wanted", WHOLE), **words)

    return find
