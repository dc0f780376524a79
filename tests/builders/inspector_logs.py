"""Logs of NCCL Inspector."""

import json

WORLD, PAIR = "0x7f8c496ae9f661", "0x9e7a479f95a66c"
NOW = 1_748_030_377_748_202  # us


def record(coll="AllReduce", sn=0, size=1 << 20, us=100, *, rank=0, n=4, comm=WORLD, **more):
    """One line; `begun` (us) makes it a verbose one, `name` one of NCCL 2.30."""
    kind = "p2p" if coll in {"Send", "Recv"} else "coll"
    perf = {
        kind: coll,
        f"{kind}_sn": sn,
        f"{kind}_msg_size_bytes": size,
        f"{kind}_exec_time_us": us,
        f"{kind}_timing_source": "kernel_gpu",
        f"{kind}_algobw_gbs": 1.0,
        f"{kind}_busbw_gbs": 1.5,
    }
    if "begun" in more:
        begun = more["begun"]
        perf["event_trace_sn"] = {f"{kind}_start_sn": 1}
        perf["event_trace_ts"] = {
            f"{kind}_start_ts": begun - 7,
            f"{kind}_stop_ts": begun - 5,
            "kernel_events": [
                {"channel_id": 0, "kernel_start_ts": begun + 3, "kernel_stop_ts": begun + us},
                {"channel_id": 1, "kernel_start_ts": begun, "kernel_stop_ts": begun + us},
                {"channel_id": 2, "kernel_start_ts": 0, "kernel_stop_ts": 0},
            ],
        }
    header = {"id": comm, "rank": rank, "n_ranks": n, "nnodes": 1}
    if "name" in more:
        header["comm_name"] = more["name"]
    about = {
        "inspector_output_format_version": more.get("version", "v4.0"),
        "git_rev": "",
        "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": more.get("dumped", NOW + sn * 1000),
        "hostname": "host",
        "pid": 100 + rank,
    }
    return {"header": header, "metadata": about, f"{kind}_perf": perf}


def write(path, *records):
    text = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in records)
    path.write_text(text)
    return path


def job(folder, *, ranks=4, **more):
    """Ranks with an all-reduce in the world and a reduce-scatter in pairs (0, 2) and (1, 3)."""
    for rank in range(ranks):
        write(
            folder / f"host-pid{100 - rank}.log",
            record("AllReduce", 0, rank=rank, **more),
            record("ReduceScatter", 0, rank=rank // 2, n=2, comm=f"{PAIR}{rank % 2}", **more),
        )
    return folder
