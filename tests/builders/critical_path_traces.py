"""Synthetic traces for the critical path: nested, overlapping, simultaneous events."""

from hypothesis import strategies as st

TIMES = st.integers(0, 40)
CALLS = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaMemcpyAsync",
    "cudaHostAlloc",
    "cudaMemcpy",
    "cudaGraphLaunch",
    "cudaEventRecord",
    "cudaStreamWaitEvent",
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "hipDeviceSynchronize",
)
WORKS = ("gemm", "ncclDevKernel_AllReduce", "Memcpy HtoD (Pageable -> Device)", "void a<b>(c)")
OPERATORS = ("aten::add", "autograd::engine", "forward", "data_load", "aten::mul")
SYNCS = ("Stream Wait Event", "Event Sync", "Stream Sync", "Context Sync")
HOST = st.tuples(st.sampled_from([1, 2, 30]), st.sampled_from([100, 101]))
STREAMS = st.sampled_from([7, 20])
DEVICES = st.sampled_from([0, 1])


def row(cat, name, lane, span, **args):
    thread, process = lane
    ts, dur = span
    words = {"ph": "X", "cat": cat, "name": name, "pid": process, "tid": thread}
    return {**words, "ts": ts, "dur": dur, "args": args}


def spans(longest=12, times=TIMES):
    return st.tuples(times, st.integers(0, longest))


@st.composite
def launches(draw, correlation):
    """A call, and the work or the waiting that it caused, none or several."""
    name = draw(st.sampled_from(CALLS))
    rows = [row("cuda_runtime", name, draw(HOST), draw(spans()), correlation=correlation)]
    if name == "cudaEventRecord":
        return rows
    streams = draw(st.lists(STREAMS, max_size=3 if name == "cudaGraphLaunch" else 1))
    for stream in streams:
        args = {"stream": stream, "correlation": correlation, "device": draw(DEVICES)}
        lane = (stream, args["device"])
        if "Wait" in name or "ynchronize" in name:
            args["wait_on_stream"] = draw(STREAMS)
            args["wait_on_cuda_event_record_corr_id"] = draw(st.integers(1, 9))
            sync = draw(st.sampled_from(SYNCS))
            rows.append(row("cuda_sync", sync, lane, draw(spans()), **args))
        else:
            cat = "gpu_memcpy" if "Memcpy" in name else "kernel"
            work = draw(st.sampled_from(WORKS))
            rows.append(row(cat, work, lane, draw(spans()), **args))
    return rows


@st.composite
def documents(draw, fractions=True):
    """A trace of a few threads and streams."""
    count = draw(st.integers(0, 9))
    rows = [each for c in range(1, count + 1) for each in draw(launches(c))]
    for _ in range(draw(st.integers(0, 8))):
        name = draw(st.sampled_from(OPERATORS))
        cat = draw(st.sampled_from(["cpu_op", "cpu_op", "user_annotation", "python_function"]))
        rows.append(row(cat, name, draw(HOST), draw(spans(30))))
    for step in range(draw(st.integers(0, 3))):
        span = draw(spans(30))
        rows.append(row("user_annotation", f"ProfilerStep#{step}", (1, 100), span))
    rows = draw(st.permutations(rows))
    rows.insert(0, {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0})
    if fractions and draw(st.booleans()):
        for each in rows[1:]:
            each["ts"] += draw(st.integers(0, 999)) / 1000
            each["dur"] += draw(st.integers(0, 999)) / 1000
    return {"schemaVersion": 1, "traceEvents": rows}
