"""Every command that opens input files, and valid files next to a damaged one."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from builders import kineto_text as k
from builders.commands import words_of
from builders.fault_tools import STEP, run

BASE = json.dumps(k.document(STEP))
OPERATION = {
    "dp_rank": [0],
    "stage": [0],
    "rank": [0],
    "step": [0],
    "optype": ["forward-compute"],
    "start_ts": [0.5],
    "duration": [1.0],
    "seq_id": [0],
}
SEARCH = "isp --world-size 8 --seq-len 4096 --global-batch 4Mi"
TABLE = """
[table]
rank = "rank"
kind = "optype"
start = "start_ts"
duration = "duration"
unit = "s"
kinds = { forward = "compute" }
"""
SHAPE = "--num-nodes 1 --gpus-per-node 8 --experts-per-gpu 1"
# Every command that opens a file of somebody, and what that file is called.
READERS = [
    ("metrics", "rank0.json"),
    ("metrics", "rank0.json.gz"),
    ("metrics", "nsys_0.sqlite"),
    ("metrics", "pipe"),
    ("metrics", "inspector.log"),
    ("metrics", "table.parquet"),
    ("metrics", "table.csv.gz"),
    ("metrics", "rank-00000.parquet"),
    ("info", "rank0.json"),
    ("ingest -o {folder}/store", "rank0.json"),
    ("critical-path", "rank0.json"),
    ("dpro stats", "trace.json"),
    ("dpro convert FILE {folder}/out.json", "trace.json"),
    ("stragglers", "trace.parquet"),
    ("stragglers {folder}/good.parquet --meta", "meta.yaml"),
    (f"dispatch compare {SHAPE}", "w.npz"),
    (f"dispatch compare {SHAPE}", "w.npy"),
    (f"dispatch compare {SHAPE}", "w.parquet"),
    ("dispatch generate -o {folder}/w --law popularity --popularity", "p.txt"),
    (f"dispatch compare {{folder}}/good.npz {SHAPE} --cluster", "c.toml"),
    (f"{SEARCH} --model 7 --cluster", "c.toml"),
    (
        "isp --model 7 --world-size 8 --seq-len 4096 --global-batch 4Mi --calibrate",
        "all_reduce.csv",
    ),
    (f"{SEARCH} --model", "m.toml"),
    ("what-if {folder}/good.json --edits", "e.toml"),
    ("metrics {folder}/good.json --config", "c.toml"),
]


def beside(folder):
    """The folder, with a good file of several formats."""
    (folder / "good.json").write_text(BASE)
    (folder / "t.toml").write_text(TABLE)
    pq.write_table(pa.table(OPERATION), folder / "good.parquet")
    (folder / "none").mkdir()
    one = np.zeros((1, 1), np.int64)
    np.savez(folder / "good.npz", src_gpu=one[0], target_experts=one)
    return folder


def ends(command, name, folder):
    """What is said of a file, unless click refuses the word before we see it."""
    words = words_of(command, folder=folder)
    if "FILE" in words:
        words[words.index("FILE")] = folder / name
    else:
        words.append(folder / name)
    code, said = run(*words)
    assert code in (1, 2), said
    assert "Error: " in said
    return said
