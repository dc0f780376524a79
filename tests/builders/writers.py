"""Every command that writes."""

import json

import numpy as np
from builders import kineto_text as k
from builders.fault_tools import STEP

EVENTS = [
    *STEP,
    *(k.kernel(f"a kernel named {n} of many {n * n}", 60 + n / 1000, 1) for n in range(900)),
]
UNIFORM = [
    {
        "name": f"FW.op{n}",
        "pid": "host0.rank0",
        "ts": n,
        "dur": 1,
        "ph": "X",
        "cat": "operator",
        "args": {"step": 0},
    }
    for n in range(900)
]
SHAPE = "--num-nodes 1 --gpus-per-node 8 --experts-per-gpu 1"
SEARCH = "isp --model 7 --world-size 8 --seq-len 4096 --global-batch 4Mi"
# Every command that writes, what it writes to, and how many bytes are too few for it.
WRITERS = [
    ("ingest {inputs}/rank0.json -o {out}/store", 900),
    ("metrics {inputs}/rank0.json --output {out}/report", 900),
    ("metrics {inputs}/rank0.json --prometheus {out}/job.prom", 900),
    ("critical-path {inputs}/rank0.json --output {out}/report", 900),
    ("critical-path {inputs}/rank0.json --overlay {out}/overlay.json", 9000),
    ("critical-path {inputs}/rank0.json --overlay {out}/overlay.json.gz", 900),
    ("critical-path {inputs}/rank0.json --save {out}/saved", 900),
    ("what-if {inputs}/rank0.json --scale compute=0.5 --output {out}/report", 900),
    ("dpro stats {inputs}/trace.json --output {out}/report", 900),
    ("dpro stats {inputs}/trace.json --output {out}/report", 900),
    ("dpro convert {inputs}/trace.json {out}/uniform.json", 900),
    ("dpro convert {inputs}/trace.json {out}/uniform.json.gz", 900),
    ("dispatch generate --num-nodes 1 --seq-len 512 --iter-num 2 -o {out}/workload", 900),
    (f"dispatch compare {{inputs}}/w.npz {SHAPE} --output {{out}}/report", 900),
    (f"{SEARCH} --output {{out}}/report", 900),
    ("demo {out}/demo --num-ranks 1", 900),
    ("demo {out}/demo --num-ranks 1 --format nsys", 9000),
]
NEEDS_TRIAL = [
    ("dpro replay {trial} --output {out}/report", 900),
    ("dpro replay {trial} --trace {out}/replayed.json", 900),
]


def write_inputs(folder):
    """Write what the commands read; return the folder."""
    k.write(folder / "rank0.json", EVENTS)
    (folder / "trace.json").write_text(json.dumps({"traceEvents": UNIFORM}))
    routing = np.random.default_rng(1).integers(0, 8, (500, 1))
    np.savez(folder / "w.npz", src_gpu=routing[:, 0], target_experts=routing)
    return folder
