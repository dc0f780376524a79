"""What stands before and after the rows of a rank."""

import json

from fastcomm.synthetic import rows
from fastcomm.synthetic.groups import group_count, groups
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import DEVICES, RankText
from fastcomm.synthetic.play import COMPUTE, COPY, STREAMS
from fastcomm.synthetic.rows import Variant
from fastcomm.synthetic.schedule import BASE_NS

_DEVICE = {
    "name": "NVIDIA H100 80GB HBM3",
    "totalGlobalMem": 84_942_979_072,
    "computeMajor": 9,
    "computeMinor": 0,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiprocessor": 2048,
    "regsPerBlock": 65_536,
    "warpSize": 32,
    "sharedMemPerBlock": 49_152,
    "numSms": 132,
    "regsPerMultiprocessor": 65_536,
    "sharedMemPerBlockOptin": 232_448,
    "sharedMemPerMultiprocessor": 233_472,
}


def head(job: Job, rank: int, variant: Variant) -> str:
    """Everything up to the first row."""
    info = json.dumps(_distributed(job, rank, variant))
    devices = json.dumps([{"id": number, **_DEVICE} for number in range(DEVICES)], indent=4)
    devices = devices.replace("\n", "\n    ")
    base = "" if variant & Variant.BASE_LAST else _base(",")
    trace_id = f"{job.seed * 0x9E3779B97F4A7C15 + rank:032X}"[-32:]
    return f""" {{
    "schemaVersion": 1,
    "deviceProperties": {devices},
    
      "trace_id": "{trace_id}",
      "cupti_version": 26,
      "cuda_runtime_version": 12090,
      "cuda_driver_version": 12090,
      "record_shapes": 1,
      "with_stack": 1,
      "distributedInfo": {info},
      "host_name": "node{rank // DEVICES:04d}",{base}
    "traceEvents": [
    """  # noqa: W293


def tail(start: int, stop: int, name: str, variant: Variant) -> str:
    """The rows of the profiler itself, from `start` to `stop`, and the rest of the object."""
    text = rows.complete(
        "Trace",
        "PyTorch Profiler (0)",
        rows.lane("Spans", "PyTorch Profiler"),
        start,
        stop - start,
        '"Op count": 0',
    )
    text += rows.label("process_sort_index", rows.lane("Spans", 0), start, 536_870_912)
    iteration = rows.lane("Traces", "Trace PyTorch Profiler")
    text += rows.instant("Iteration Start: PyTorch Profiler", iteration, start)
    text += rows.instant("Record Window End", rows.lane("", ""), stop).removesuffix(",")
    last = "," + _base("") if variant & Variant.BASE_LAST else ""
    return f'{text}\n  ],"traceName": "{name}"{last} }}\n'


def labels(text: RankText, start: int) -> str:
    """The names of processes, threads and streams."""
    process, device = text.process, text.device
    host = rows.lane(process, 0)
    found = rows.label("process_name", host, start, "python3")
    found += rows.label("process_labels", host, start, "CPU")
    found += rows.label("process_sort_index", host, start, process)
    gpu = rows.lane(device, 0)
    found += rows.label("process_name", gpu, start, "python3")
    found += rows.label("process_labels", gpu, start, f"GPU {device}")
    found += rows.label("process_sort_index", gpu, start, 5_000_000 + device)
    for backward, where in text.lanes.items():
        name = "pt_autograd_0" if backward else "python3"
        found += rows.label("thread_name", where, start, f"thread ({name})")
    for stream in sorted({COMPUTE, COPY, *STREAMS.values()}):
        found += rows.label(
            "thread_name", rows.lane(device, stream), start, f"stream {stream} "
        )
    return found


def _base(comma: str) -> str:
    return f"""
    "displayTimeUnit": "ms",
    "baseTimeNanoseconds": {BASE_NS}{comma}"""


def _distributed(job: Job, rank: int, variant: Variant) -> dict[str, object]:
    undescribed = bool(variant & Variant.UNDESCRIBED)
    found = groups(job, rank)
    return {
        "backend": "nccl",
        "rank": rank,
        "world_size": job.ranks,
        "pg_count": group_count(job),
        "pg_config": [
            {
                "pg_name": group.name,
                "pg_desc": "undefined" if undescribed else group.description,
                "backend_config": "cuda:nccl",
                "pg_size": group.size,
                "ranks": list(group.ranks),
            }
            for group in sorted(found.values(), key=lambda group: int(group.name))
        ],
        "nccl_version": "2.27.5",
    }
