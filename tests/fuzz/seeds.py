"""What is changed: a small file or folder of every format, and what reads it."""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from builders.perfetto_trace import a_rank
from builders.shared_data import path_of

import fastcomm
from fastcomm import models
from fastcomm.compat.dpro import rules
from fastcomm.compat.dpro import trial as dpro_trial
from fastcomm.compat.dpro.statistics import statistics, step_time
from fastcomm.compat.isp import config_file
from fastcomm.convert.chakra import convert
from fastcomm.critical_path.analysis import execution_trace_path
from fastcomm.critical_path.saved import load, save
from fastcomm.critical_path.search import analyze
from fastcomm.dispatch import workload
from fastcomm.dispatch.expert_files import read_loads, read_placements
from fastcomm.dispatch.options import WorkloadOptions
from fastcomm.dispatch.recipe import Recipe
from fastcomm.executors.executor import Local, OpenedRun
from fastcomm.formats import config, execution_traces
from fastcomm.formats.config import Config
from fastcomm.formats.opening import open_run
from fastcomm.formats.tables import RowKind, TableMapping
from fastcomm.formats.workload_cards import read_card
from fastcomm.graph import edits
from fastcomm.hardware import calibration, clusters
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.computation import compute_metrics
from fastcomm.options import EditOptions, Window
from fastcomm.stragglers import operations
from fastcomm.stragglers.model import JobModel
from fastcomm.stragglers.result import stragglers
from fastcomm.synthetic.job import Job, TableJob, write_table
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.traces import write
from fuzz import dumps, own
from fuzz import options as options_
from fuzz.mutate import documents, mutated, unpacked

_DATA = path_of("replay")
_HANGS = path_of("hangs")
_RECORDED = ("dead_ddp_0", "debug_server_stuck_0", "running_fsdp_0", "torchcomms_not_arrived")
_LOADS = "step,layer,expert,tokens\n0,0,0,5\n0,1,3,7\n9,0,1,2\n9,1,2,3\n"
_PLACED = json.dumps({"layers": [{"physical_to_logical": [0, 1, 2, 3]}] * 2})
SHAPE = {"num_nodes": 1, "gpus_per_node": 8, "experts_per_gpu": 1}
_JOB = Job.of(ranks=2, steps=1, layers=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """A format: what makes its files at a path, and what reads them from there."""

    name: str  # of the file or folder
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    change: Callable[[Path, Random], object] = mutated


def metrics(path: Path) -> None:
    """As `fastcomm metrics`."""
    fastcomm.open(path).metrics().to_dict()


def whole(path: Path) -> None:
    """As `fastcomm metrics`, `critical-path` and `ingest`, one after the other."""
    metrics(path)
    run = open_run(path)
    for rank in run.ranks:
        analyze(run.read(rank, "all"), Window(annotation="")).summary()
    target = path.with_name(f"{path.name}.store")
    ingest(plan([path], target))
    metrics(target)


def _stored(path: Path) -> None:
    """As `fastcomm metrics`, which reads a part of the columns, and then all of them."""
    own.agree(path)
    metrics(path)
    run = open_run(path)
    for rank in run.ranks:
        run.read(rank, "all")


_COLUMNS = TableMapping(
    rank="rank",
    start="start_ts",
    duration="duration",
    unit="s",
    kind="optype",
    kinds=(RowKind(pattern="*-compute", work="compute"), RowKind(pattern="*", op="AllReduce")),
    iteration="step",
)


def _table(path: Path) -> None:
    run = open_run(path, config=Config(table=_COLUMNS))
    compute_metrics(OpenedRun.of(run, Local())).to_dict()


def _stats(path: Path, *, whole: bool = True) -> None:
    trial = dpro_trial.read_input(path, whole=whole)
    rules.operations(statistics(trial.trace, trial.topology))
    if whole:
        step_time(trial.trace)


def _stragglers(path: Path) -> None:
    stragglers(JobModel.of(operations.read(path)))


def _meta(path: Path) -> None:
    json.dumps(operations.meta(path))


def _loads(path: Path) -> None:
    read_loads(path, 2, 4)


def _load_table(path: Path) -> None:
    columns = {"layer": [0, 0, 1, 1], "expert": [0, 3, 1, 2], "tokens": [1, 2, 3, 4]}
    pq.write_table(pa.table(columns), path)


def _placed(path: Path) -> None:
    read_placements(path, 2, 4, 2)


def _workload(path: Path) -> None:
    for _ in workload.open_workload(path, WorkloadOptions(**SHAPE)).layers():
        pass


def _trace(path: Path) -> None:
    made = write(_JOB, path.parent / "made", ranks=[0], compress=path.suffix == ".gz")[0]
    shutil.move(made, path)


def _perfetto(path: Path) -> None:
    text = a_rank(0, 2)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def _nsys(kind: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        made = write_nsys(_JOB, path.parent / "made", ranks=[0], kind=kind)[0]
        shutil.move(made, path)

    return make


def _store(path: Path) -> None:
    traces = path.parent / "traces"
    write(_JOB, traces)
    ingest(plan([traces], path))
    shutil.rmtree(traces)


def _saved(path: Path) -> None:
    trace = path.parent / "rank0.json"
    _trace(trace)
    run = open_run(trace)
    save(analyze(run.read(run.ranks[0], "all"), Window(annotation="")), path.with_suffix(""))
    trace.unlink()


def _inspector(path: Path) -> None:
    line = {
        "header": {"id": "0x5", "rank": 0, "n_ranks": 2, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": 1_748_030_377_748_202,
            "hostname": "host",
            "pid": 1639,
        },
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": 0,
            "coll_msg_size_bytes": 17_179_869_184,
            "coll_exec_time_us": 61_974,
            "coll_algobw_gbs": 277.2,
            "coll_busbw_gbs": 485.1,
        },
    }
    stats = {"coll_records": 10, "coll_dropped_total": 3, "p2p_records": 0}
    dump = {"header": line["header"], "metadata": line["metadata"], "dump_stats": stats}
    rows = [json.dumps(dump)]
    for number in range(20):
        line["coll_perf"]["coll_sn"] = number
        line["metadata"]["dump_timestamp_us"] += 100_000
        # The first ones inherit header and metadata, as since v4.3.
        own = {"coll_perf": line["coll_perf"]} if number < stats["coll_records"] else line
        rows.append(json.dumps(own))
    path.write_text("\n".join(rows) + "\n")


def _operations() -> pa.Table:
    kinds = ("forward-compute", "backward-compute", "grads-sync")
    rows = [
        {
            "dp_rank": dp,
            "stage": stage,
            "rank": 2 * dp + stage,
            "step": step,
            "optype": kind,
            "start_ts": 1.0 + step * 9.0 + n,
            "duration": 0.5,
            "seq_id": 0,
            "mc": 0,
            "gmc": 0,
        }
        for dp in range(2)
        for stage in range(2)
        for step in range(3)
        for n, kind in enumerate(kinds)
    ]
    return pa.Table.from_pylist(rows)


def _routing(path: Path) -> None:
    rng = np.random.default_rng(5)
    src, expert = rng.integers(0, 8, 50), rng.integers(0, 8, (50, 2))
    if path.suffix == ".npy":
        np.save(path, expert)
    elif path.suffix == ".npz":
        np.savez_compressed(path, src_gpu=src, target_experts=expert)
    else:
        columns = {"src": src, "expert": pa.array(expert.tolist(), pa.list_(pa.int64()))}
        pq.write_table(pa.table(columns), path)


def _generated(path: Path) -> None:
    recipe = Recipe.of(**SHAPE, seq_len=32, num_layers=2, iter_num=1, topk=2)
    workload.write(recipe, path)


def _chakra(path: Path) -> None:
    folder = path.with_name("chakra_of_job")
    write(_JOB, folder / "traces")
    convert(OpenedRun.of(open_run(folder / "traces"), Local()), folder / "et")
    (folder / "et" / "trace.0.et").rename(path)
    shutil.rmtree(folder)


_CHAKRA = """{"workload_graph": [
 {"Id": 1, "Name": "a", "NodeType": 4, "runtime": 10, "is_cpu_op": true},
 {"Id": 2, "Name": "b", "NodeType": 7, "data_deps": [1], "runtime": 5, "comm_type": 0},
 {"Id": 3, "Name": "c", "NodeType": 5, "ctrlDeps": [2], "comm_dst": 1, "comm_tag": 3}
]}"""


def _execution(path: Path) -> None:
    tensor = [3, 7, 0, 64, 4, "cuda:0"]
    nodes = [
        {
            "id": n,
            "name": "aten::add_",
            "ctrl_deps": 1,
            "inputs": {"values": [tensor, [tensor, 5]], "shapes": [[8, 8], []]},
            "outputs": {"values": [tensor], "shapes": [[8, 8]]},
            "attrs": [
                {"name": "rf_id", "type": "uint64", "value": n},
                {"name": "op_schema", "type": "string", "value": "a(Tensor(a!) x) -> Tensor"},
            ],
        }
        for n in range(1, 12)
    ]
    path.write_text(json.dumps({"schema": "1.1.0-chakra.0.0.4", "nodes": nodes}))


_UNIFORM = json.dumps(
    {
        "traceEvents": [
            {
                "name": f"{part}.op{n}",
                "pid": "host0.rank0",
                "tid": "1",
                "ph": "X",
                "ts": 1000 * n + at + 0.5,
                "dur": 3,
                "cat": "operator",
                "args": {"name": f"{part}.op{n}~>0_1", "step": n, "cnt": 0},
            }
            for n in range(4)
            for at, part in enumerate(("FW", "BW", "Comm", "UPDATE_"))
        ]
    }
)
_CONFIG = """
[parallel]
tp = 2
pp = 1
order = "tp-cp-ep-dp-pp"
[[tags]]
description = "x"
tag = "TP"
[[kernels]]
pattern = "nccl.*"
op = "AllReduce"
tag = "DP"
[iterations]
regex = "step ([0-9]+)"
[link]
bandwidth = "400Gbit/s"
[ranks]
"a.log" = 3
[table]
rank = "rank"
kind = "op"
start = "s"
stop = "e"
kinds = { gemm = "compute", "a*" = { op = "AllReduce", tag = "DP" } }
"""
_CARD = """
workload:
  hardware:
    xpu_spec: {type: h100, total_count: 8}
    network_topo: {bandwidth_gbps: [400, 900]}
Model-executor:
  framework: {name: megatron-lm}
  model_plan_parallelization: {dp_replicate: 1, dp_shard: 2, tp: 2, pp: 2, cp: 1, ep: 1}
"""
_MODEL = """
hidden = 4096
heads = 32
layers = 32
vocab = 32000
"""
_HF = json.dumps(
    {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "hidden_act": "silu",
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
)
_EDITS = """
set = ["name:gemm=10us", "link:TP=100:400:100GB/s"]
scale = ["comm:DP=0.5"]
heal = ["rank:3"]
remove = ["launches", "op:Broadcast"]
overlap = ["DP"]
fuse_below = "1us"
"""


def _edits(path: Path) -> object:
    return edits.parse_edits(EditOptions(edits=path))


_NCCL = """# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor)
# Using devices
#  Rank  0 Group  0 Pid 1 on host device  0 [0x1b] NVIDIA H100
#  Rank  1 Group  0 Pid 2 on host device  1 [0x43] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw #wrong
     1048576        262144     float   sum   -1   41.56   25.23   44.15   0 41.5 25.2 44.2 0
     2097152        524288     float   sum   -1   61.56   35.23   64.15   0 61.5 35.2 64.2 0
"""
_GEMM = "key_bytesxmacs,lat_s\n1000000,0.1\n2000000,0.2\n4000000,0.4\n"


def _text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def _cluster(path: Path) -> None:
    shutil.copy(Path(clusters.__file__).parent / "data" / "dgx-h100.toml", path)


def _study(path: Path) -> None:
    table = pq.read_table(_DATA / "straggler" / "trace-ST.parquet")
    step = table["step"].to_pylist()
    pq.write_table(table.filter(pa.array([each <= min(step) + 1 for each in step])), path)


def _job(path: Path) -> None:
    job = TableJob(dp=2, pp=2, micro_batches=1, steps=2, slow_stage=1)
    made, _ = write_table(job, path.parent / "made")
    shutil.move(made, path)


def _trial(path: Path) -> None:
    shutil.copytree(_DATA / "trial" / "trace", path)
    for file in [path, *path.rglob("*")]:
        file.chmod(0o755 if file.is_dir() else 0o644)


_SEEDS = (
    Seed(name="rank0.json", make=_trace, read=whole),
    Seed(name="rank0.json.gz", make=_trace, read=metrics),
    Seed(name="documents.json", make=_trace, read=whole, change=documents),
    Seed(name="documents.json.gz", make=_trace, read=metrics, change=documents),
    Seed(name="rank0.pftrace", make=_perfetto, read=whole),
    Seed(name="rank0.pftrace.gz", make=_perfetto, read=metrics, change=unpacked),
    Seed(name="nsys_0.sqlite", make=_nsys("sqlite"), read=whole),
    Seed(name="nsys_pqtdir", make=_nsys("parquetdir"), read=metrics),
    Seed(name="nsys_arwdir", make=_nsys("arrowdir"), read=metrics),
    Seed(name="store", make=_store, read=_stored),
    Seed(name="path.zip", make=_saved, read=lambda path: load(path).summary()),
    Seed(name="inspector.log", make=_inspector, read=whole),
    Seed(name="table.parquet", make=lambda p: pq.write_table(_operations(), p), read=_table),
    Seed(name="table.csv", make=lambda p: pa_csv.write_csv(_operations(), p), read=_table),
    Seed(name="study.parquet", make=_study, read=_stragglers),
    Seed(name="job.parquet", make=_job, read=_stragglers),
    Seed(name="meta.yaml", make=_text("dp_size: 2\npp_size: 2\nvpp_size: 1\n"), read=_meta),
    Seed(name="uniform.json", make=_text(_UNIFORM), read=_stats),
    Seed(name="scanned.json", make=_text(_UNIFORM), read=partial(_stats, whole=False)),
    Seed(name="trace.0.et", make=_chakra, read=execution_trace_path),
    Seed(name="chakra.0.json", make=_text(_CHAKRA), read=execution_trace_path),
    Seed(name="et.json", make=_execution, read=execution_traces.read_operators),
    Seed(name="config.toml", make=_text(_CONFIG), read=config.read),
    Seed(name="card.yaml", make=_text(_CARD), read=read_card),
    Seed(name="hardware.toml", make=_cluster, read=clusters.load),
    Seed(name="links.toml", make=_cluster, read=lambda p: clusters.load_links(p, 8)),
    Seed(name="model.toml", make=_text(_MODEL), read=models.load),
    Seed(name="config.json", make=_text(_HF), read=models.load),
    Seed(name="compat.json", make=_text('{"seq_len": 4096}'), read=config_file),
    Seed(name="edits.toml", make=_text(_EDITS), read=_edits),
    Seed(name="all_reduce.log", make=_text(_NCCL), read=calibration.read_measurements),
    Seed(name="linear_x.csv", make=_text(_GEMM), read=calibration.read_gemm),
    Seed(name="w.npz", make=_routing, read=_workload),
    Seed(name="w.npy", make=_routing, read=_workload),
    Seed(name="w.parquet", make=_routing, read=_workload),
    Seed(name="workload", make=_generated, read=_workload),
    Seed(name="load.txt", make=_text("1 2 3 4\n5 6 7 8\n"), read=_loads),
    Seed(name="load.csv", make=_text(_LOADS), read=_loads),
    Seed(name="load.json", make=_text('{"logical_count": [[1,2,3,4],[5,6,7,8]]}'), read=_loads),
    Seed(name="load.parquet", make=_load_table, read=_loads),
    Seed(name="before.json", make=_text(_PLACED), read=_placed),
    Seed(name="trial", make=_trial, read=_stats),
    Seed(
        name="options",
        make=options_.write_line,
        read=options_.read_line,
        change=options_.write_line,
    ),
    Seed(name="two_writers", make=own.two_runs, read=own.two_writers),
    Seed(name="cache", make=own.run_kernel, read=own.run_kernel),
    Seed(name="rank_0.json", make=dumps.as_json, read=dumps.one_dump),
    Seed(name="rank_0.pickle", make=dumps.pickled, read=dumps.one_dump, change=dumps.harmed),
    Seed(name="rank_0.pickle.gz", make=dumps.pickled, read=dumps.one_dump, change=unpacked),
    Seed(name="hung_job", make=dumps.job, read=dumps.hang, change=dumps.harmed),
    *(
        Seed(
            name=case, make=dumps.recorded(_HANGS / case), read=dumps.hang, change=dumps.harmed
        )
        for case in _RECORDED
        if _HANGS.is_dir()
    ),
    Seed(name="printed.txt", make=_text("a line of output\n" * 1000), read=own.print_text),
)
# Two are cut out of published data, which are not everywhere.
SEEDS = {
    seed.name: seed
    for seed in _SEEDS
    if seed.name not in ("trial", "study.parquet") or _DATA.is_dir()
}
