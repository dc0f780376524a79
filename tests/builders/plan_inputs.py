"""A job, a price and tables of runs that tests of strategies share."""

import json

from builders.places import SCHEMAS
from jsonschema import Draft202012Validator

from fastcomm.models import load
from fastcomm.planning.job import Plan
from fastcomm.planning.measured_runs import TrainingRun

PRICE = (
    *("plan", "price", "--model", "llama3-70b", "--world-size", "64"),
    *("--seq-len", "8Ki", "--global-batch", "128"),
)
PLAN = Plan(
    model=load("llama3-8b"),
    gpu="h100",
    gpus=64,
    global_batch=128,
    seq_len=8192,
    node_bytes_per_s=400e9,
    domain=8,
)
HEAD = "model,gpu,gpus,global_batch,seq_len"
GOOD = "llama3-8b,h100,8,64,8192"


def schema(name):
    path = SCHEMAS / f"plan-{name}.json"
    return Draft202012Validator(json.loads(path.read_text("utf-8")))


def table(tmp_path, *rows, head=HEAD):
    """A CSV file of runs."""
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def load_run(*, measured):
    """A run of the plan."""
    return TrainingRun(
        id="1",
        source="own",
        group=("own", "llama3-8b"),
        gpu="h100",
        precision="bf16",
        plans=(PLAN,),
        measured=measured,
        memory_gib=None,
    )
