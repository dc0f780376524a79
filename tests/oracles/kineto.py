"""What a Kineto trace says, by definition: slow, obvious, the standard library alone.

Times are int nanoseconds, bytes are ints, an unknown value is None. Ranges of the host contain
a launch with both ends included; everything else is half-open.
"""

import gzip
import json
import re
from collections import Counter
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from statistics import median

from oracles.sizes import (
    ARGUMENTS,
    bus_bytes,
    items,
    message_and_payload,
    moved_bytes,
    number,
    operation,
    positive,
    size_of_any_group,
)

RUNTIME = {"cuda_runtime", "cuda_driver", "mtia_runtime", "xpu_runtime", "privateuse1_runtime"}
HOST = {"cpu_op", "user_annotation"}


# formats.md 3.4, first match wins: pattern, operation (None: from the name), tag of the table.
NCCL_NAMES = (
    r"^ncclKernel_(\w+?)_",
    r"^ncclDevKernel_([A-Za-z]+)",
    r"ncclDevKernel_(Generic)",
    r"^ncclSymDevKernel_([A-Za-z]+)",
    r"^ncclSymkDevKernel_([A-Za-z]+)",
)
OTHER_LIBRARIES = (
    (
        r"(deep_ep|dpsk::ep)::.*(dispatch|combine)|notify_dispatch|cached_notify",
        "AllToAll",
        "EP",
    ),
    (r"cross_device_reduce_[12]stage|quickreduce::|allreduce_fusion_kernel", "AllReduce", "TP"),
    (r"multimem_(all_reduce|one_shot)|(one|two)_shot_all_reduce", "AllReduce", "TP"),
    (r"userbuffers_fp16_sum_inplace|kuserbuffers_", None, "TP"),
    (r"nvshmem|mscclpp", "OTHER", None),
)


# ---------------------------------------------------------------- reading


def nanoseconds(microseconds):
    """Decimal text in microseconds as an int; a half nanosecond is rounded up."""
    return int((Decimal(str(microseconds)) * 1000).to_integral_value(rounding=ROUND_HALF_UP))


def read(path):
    """Everything the metrics need of one file."""
    path = Path(path)
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    text = raw.decode("utf-8", errors="replace")
    whole = json.loads(text, parse_float=Decimal, parse_int=int, strict=False)
    info = whole.get("distributedInfo") or {}
    base = int(whole.get("baseTimeNanoseconds") or 0)
    rows = whole["traceEvents"]
    return {
        "path": str(path),
        "rank": rank_of(info, path.name),
        "world_size": info.get("world_size"),
        "groups": info.get("pg_config") or [],
        "count": len(rows),
        "phases": Counter((row.get("ph"), row.get("cat")) for row in rows),
        "events": [event_of(row, base) for row in rows if row.get("ph") == "X"],
    }


def event_of(row, base):
    start = nanoseconds(row["ts"]) + base
    return {
        "cat": row.get("cat"),
        "name": row.get("name", ""),
        "pid": row.get("pid"),
        "tid": row.get("tid"),
        "start": start,
        "stop": start + nanoseconds(row.get("dur", 0)),
        "args": row.get("args") or {},
    }


def rank_of(info, name):
    if info.get("rank") is not None:
        return int(info["rank"])
    found = re.search(r"(?:rank[-_]?|worker[-_]?|kineto_trace_)(\d+)", name)
    return int(found[1]) if found else None


# ------------------------------------------------- which events communicate


@cache
def table_row(name):
    """Operation and tag by the table of 3.4 for a kernel's name; None: it is compute."""
    for pattern in NCCL_NAMES:
        if found := re.search(pattern, name):
            return operation(found[1]) or "OTHER", None
    if "get_dispatch_layout" in name:
        return None
    for pattern, op, tag in OTHER_LIBRARIES:
        if re.search(pattern, name):
            return op or userbuffers_operation(name), tag
    return None


def userbuffers_operation(name):
    # Choice: the table says "RS / AG / SendRecv" and not how to tell; the name's own parts do.
    found = re.search(r"_(rs|ag)(?![a-z])|(send|recv)", name)
    if not found:
        return "OTHER"
    return {"rs": "ReduceScatter", "ag": "AllGather"}.get(found[1], "SendRecv")


def is_peer_copy(event):
    return event["cat"] == "gpu_memcpy" and "PtoP" in event["name"]


KERNELS = {"kernel", "xpu_kernel", "hpu_kernel", "privateuse1_kernel"}
COPIES = {"gpu_memcpy", "gpu_memset", "xpu_memcpy", "mlu_memcpy", "privateuse1_memset"}
WORK_BY_NAME = {"mtia_ccp_events", "hpu_op", "privateuse1"}


def device_work(event):
    """Kernel or copy; None for an event that is no work of a device."""
    if event["cat"] in WORK_BY_NAME:
        copies = event["name"].lower().startswith(("dma", "memcpy"))
        return "copy" if copies else "kernel"
    if event["cat"] in KERNELS:
        return "kernel"
    return "copy" if event["cat"] in COPIES else None


def is_communication(event):
    if device_work(event) == "kernel":
        return table_row(event["name"]) is not None
    return is_peer_copy(event)


def is_compute(event):
    return device_work(event) == "kernel" and not is_communication(event)


def is_copy(event):
    return device_work(event) == "copy" and not is_peer_copy(event)


# ------------------------------------------------------ the events themselves


def comm_events(trace):
    """All communication events of one trace, in the order of the file."""
    launches, hosts, by_id = {}, {}, {}
    for event in trace["events"]:
        if event["cat"] in RUNTIME and event["args"].get("correlation", 0) > 0:
            launches.setdefault(event["args"]["correlation"], event)
        elif event["cat"] in HOST:
            hosts.setdefault((event["pid"], event["tid"]), []).append(event)
            if "External id" in event["args"]:
                by_id.setdefault(event["args"]["External id"], event)
    found = []
    for event in trace["events"]:
        if is_peer_copy(event):
            found.append(peer_copy(event))
        elif is_communication(event):
            launch = launches.get(event["args"].get("correlation"))
            stack = enclosing(launch, hosts)
            found.append(kernel(event, stack, linked_call(event, stack, by_id), trace))
    return found


def enclosing(launch, hosts):
    """Host ranges that contain the launch on its own thread, innermost first."""
    if launch is None:
        return []
    ranges = hosts.get((launch["pid"], launch["tid"]), [])
    holding = [r for r in ranges if contains(r, launch)]
    return sorted(holding, key=lambda r: (r["stop"] - r["start"], -r["start"]))


def contains(outer, inner):
    return outer["start"] <= inner["start"] and inner["stop"] <= outer["stop"]


def linked_call(event, stack, by_id):
    """The args of the record_param_comms that launched a kernel."""
    named = by_id.get(event["args"].get("External id"))
    calls = [h for h in stack if h["name"].split(",")[0] == "record_param_comms"]
    calls = [h for h in calls if h["args"].get("Collective name") != "wait"]
    for call in calls:
        if call is named:
            return call["args"]
    return calls[0]["args"] if calls else {}


def peer_copy(event):
    # Choice: a peer copy has its own bytes; the call around it would count them once a copy.
    moved = number(event["args"].get("bytes"))
    return {
        "op": "SendRecv",
        "name": event["name"],
        "start": event["start"],
        "stop": event["stop"],
        "stream": event["args"].get("stream", event["tid"]),
        "group_ranks": None,
        "group_size": None,
        "description": None,
        "sent_bytes": moved,
        "received_bytes": moved,
        "msg_bytes": moved,
        "payload_bytes": moved,
        "bus_bytes": moved,
        "table_tag": "OTHER",
    }


def kernel(event, stack, call, trace):
    op_by_name, table_tag = table_row(event["name"])
    said = {**call, **event["args"]}  # the kernel's own word wins
    annotation = next((h for h in stack if h["name"].startswith("nccl:")), None)
    op = operation(said.get("Collective name"))
    if op is None and annotation:
        op = operation(re.match(r"nccl:(\w*)", annotation["name"])[1])
    operator = next((h for h in stack if h["name"] in ARGUMENTS), None)
    if op is None and operator and op_by_name in {"OTHER", "SendRecv"}:
        op = ARGUMENTS[operator["name"]][0]
    op = op or op_by_name
    group = group_of(said, trace)
    n = group["group_size"]
    by_torch = annotation or operator or any(h["name"].startswith("c10d::") for h in stack)
    if group == NO_GROUP and by_torch:
        n = size_of_any_group(trace)
    sent, received, even = moved_bytes(op, said, annotation, operator)
    msg, payload = message_and_payload(op, sent, received, n, even)
    return {
        "op": op,
        "name": event["name"],
        "start": event["start"],
        "stop": event["stop"],
        "stream": event["args"].get("stream", event["tid"]),
        **group,
        "sent_bytes": sent,
        "received_bytes": received,
        "msg_bytes": msg,
        "payload_bytes": payload,
        "bus_bytes": bus_bytes(op, payload, n),
        "table_tag": table_tag,
    }


# -------------------------------------------------------------------- groups

NO_GROUP = {"group_ranks": None, "group_size": None, "description": None}


def group_of(said, trace):
    """Members, size and description of the group; the world is never assumed."""
    listed = group_entry(said, trace["groups"])
    ranks, complete = items(said.get("Process Group Ranks"))
    if not ranks or not complete:
        ranks = entry_ranks(listed, trace["world_size"])
    size = len(ranks) if ranks else positive(said.get("Group size"))
    if size is None and listed:
        size = positive(listed.get("pg_size"))
    description = said.get("Process Group Description")
    if description is None and listed:
        description = listed.get("pg_desc")
    return {"group_ranks": ranks, "group_size": size, "description": description}


def group_entry(said, groups):
    """The entry of pg_config with this name; of two such, the one with the description."""
    name = said.get("Process Group Name", said.get("Process Group ID"))
    if name is None:
        return None
    same = [g for g in groups if str(g.get("pg_name")) == str(name)]
    if len(same) > 1:
        same = [g for g in same if g.get("pg_desc") == said.get("Process Group Description")]
    return same[0] if len(same) == 1 else None


def entry_ranks(entry, world_size):
    if entry is None:
        return None
    ranks, complete = items(entry.get("ranks"))
    if ranks:
        return ranks if complete else None
    # Choice: an empty list is the whole world only where the size says so.
    if world_size and entry.get("pg_size") == world_size:
        return list(range(world_size))
    return None


# ---------------------------------------------------------------- iterations


def iterations(trace):
    """[{number, start, stop, source}] by the first rule of 2.11 that finds a mark."""
    marks = [e for e in trace["events"] if e["cat"] == "user_annotation"]
    for source, pattern in (
        ("ProfilerStep", r"ProfilerStep#(\d+)"),
        ("pattern", r"(?i:iteration|iter|step)[ _:#-]*(\d+)"),
    ):
        found = [(re.fullmatch(pattern, e["name"]), e) for e in marks]
        steps = [iteration(int(m[1]), e["start"], e["stop"], source) for m, e in found if m]
        if steps:
            steps.sort(key=lambda step: (step["start"], step["stop"]))
            return without_empty_end(steps) if source == "ProfilerStep" else steps
    if not trace["events"]:
        return []
    first = min(e["start"] for e in trace["events"])
    if ends := optimizer_ends(marks):
        starts = [first, *ends[:-1]]
        pairs = enumerate(zip(starts, ends, strict=True))
        return [iteration(n, start, stop, "optimizer") for n, (start, stop) in pairs]
    last = max(e["stop"] for e in trace["events"])
    return [iteration(0, first, last, "whole")]


def without_empty_end(steps):
    """Choice: a last mark below 1 % of the median of the others is the end of the profiler."""
    lengths = [step["stop"] - step["start"] for step in steps]
    if len(steps) > 1 and lengths[-1] < 0.01 * median(lengths[:-1]):
        return steps[:-1]
    return steps


def iteration(number_, start, stop, source):
    return {"number": number_, "start": start, "stop": stop, "source": source}


def optimizer_ends(marks):
    """Choice: one name's marks, the earliest seen (an iteration may have two optimizers)."""
    for prefix in ("Optimizer.step#", "DeepSpeedEngine.step"):
        steps = sorted(
            (e for e in marks if e["name"].startswith(prefix)), key=lambda e: e["start"]
        )
        if steps:
            return sorted({e["stop"] for e in steps if e["name"] == steps[0]["name"]})
    return []
