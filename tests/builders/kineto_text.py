"""Small Kineto files, written by hand."""

import gzip
import json


def event(name, cat, ts, dur, pid=0, tid=7, **args):
    row = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
    return {**row, "args": {key.replace("_", " "): value for key, value in args.items()}}


def mark(name, ts, dur, tid=1):
    return event(name, "user_annotation", ts, dur, pid=100, tid=tid)


def launch(ts, correlation, dur=1, tid=1):
    return event(
        "cudaLaunchKernel", "cuda_runtime", ts, dur, pid=100, tid=tid, correlation=correlation
    )


def kernel(name, ts, dur, stream=7, **args):
    return event(name, "kernel", ts, dur, tid=stream, stream=stream, **args)


def all_reduce(ts, dur, stream=20, nelems=1000, **args):
    said = {
        "Collective_name": "allreduce",
        "In_msg_nelems": nelems,
        "Out_msg_nelems": nelems,
        "Group_size": 4,
        "dtype": "Float",
    }
    return kernel(
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL", ts, dur, stream, **{**said, **args}
    )


def document(events, rank=0, world=1, groups=(), **envelope):
    info = {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": list(groups)}
    return {
        "schemaVersion": 1,
        "distributedInfo": info,
        "baseTimeNanoseconds": 0,
        **envelope,
        "traceEvents": events,
    }


def write(path, events, **words):
    text = json.dumps(document(events, **words))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
