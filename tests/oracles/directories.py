"""Directories of a run in any state, written without fastcomm."""

import gzip
import json

GOOD = "good"
MISSING = "missing"
DAMAGES = ("empty", "cut", "text", "binary", "half", "array", "link", "zeros")
UPPER = "upper"  # a good file whose ending is in capitals
# What is named after a rank, and holds no trace that is looked for: its ending.
UNREAD = {"trace": ".trace", "bare": ".gz", "no ending": "", "directory": ".json"}
FOREIGN = {
    "execution_details.json": [{"name": "prefill", "latency": 1.5}, {"name": "decode"}],
    "package.json": {"name": "x", "version": 3},
    "numbers.json": [1, 2, 3],
    "deep.json": {"a": {"b": [{"c": "traceEvents"}]}},
    "nested.json": {"meta": {"traceEvents": []}, "x": 1},
    "execution_details.json.gz": [{"request": 7}],
}


def trace(rank, world, told="before"):
    """The text of a whole trace of one step; rank and world are told before or behind it."""
    kernel = {"stream": 20, "Collective name": "allreduce", "In msg nelems": 8}
    kernel |= {"Out msg nelems": 8, "Group size": world, "dtype": "Float"}
    events = [
        row("ProfilerStep#0", "user_annotation", 100, 1, 0, 100, {}),
        row("gemm", "kernel", 0, 7, 5, 30, {"stream": 7}),
        row("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 0, 20, 40, 20, kernel),
    ]
    info = {"backend": "nccl", "rank": rank, "world_size": world}
    whole = {"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": events}
    if told == "before":
        whole = {"distributedInfo": info, **whole}
    elif told == "behind":
        whole = {**whole, "distributedInfo": info}
    return json.dumps(whole).encode()


def row(name, cat, pid, tid, ts, dur, args):
    """One complete event."""
    times = {"ts": ts, "dur": dur}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def name_of(style, rank):
    """The file of a rank, as tools name it; only some of the names say the rank."""
    return {
        "tensorboard": f"host_{900 + rank}.17000000{rank:02}.pt.trace.json",
        "rank": f"rank{rank}.json",
        "number": f"step7-{rank}.json",
    }[style]


def damaged(text, damage):
    """The bytes of a trace after a mishap; None where there is no such file to open."""
    return {
        "empty": b"",
        "cut": text[:11],
        "text": b"<html>404 Not Found</html>",
        "binary": bytes(range(256)),
        "half": text[: len(text) // 2],
        "array": b"[",
        "link": None,
        "zeros": b"\0" * 40,
    }[damage]


def path_of(folder, style, rank, state, is_gzipped):
    """The file of a rank in some state."""
    if state in UNREAD:
        return folder / f"rank{rank}{UNREAD[state]}"
    name = name_of(style, rank) + (".gz" if is_gzipped else "")
    stem, dot, ending = name.partition(".json")
    return folder / (stem + (dot + ending).upper() if state == UPPER else name)


def write(folder, style, states, is_gzipped, foreign, told="before"):
    """Write files of ranks in some state, and of other programs; give the paths by rank."""
    paths = {}
    for rank, state in enumerate(states):
        if state == MISSING:
            continue
        text = trace(rank, len(states), told)
        data = text if state in (GOOD, UPPER, *UNREAD) else damaged(text, state)
        path = path_of(folder, style, rank, state, is_gzipped)
        paths[rank] = path
        if state == "directory":
            path.mkdir()
        elif data is None:
            path.symlink_to(folder / "nowhere")
        elif is_gzipped and state in ("empty", "cut"):
            path.write_bytes(gzip.compress(text)[: 0 if state == "empty" else 14])
        else:
            path.write_bytes(gzip.compress(data) if is_gzipped else data)
    for name in foreign:
        text = json.dumps(FOREIGN[name]).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return paths
