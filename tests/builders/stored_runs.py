"""Runs that are stored and then measured."""

import json

import pyarrow.parquet as pq
from builders import kineto_text as k
from builders.opened import open_run

from fastcomm.analyses.ingest import ingest, plan
from fastcomm.analyses.measure import compute_metrics
from fastcomm.readers.assembly import TraceOptions
from fastcomm.readers.config import Config
from fastcomm.store import ABOUT, MANIFEST, files, writer

WHOLE = TraceOptions(whole=True)


def plain(table):
    """The table with words where codes stood: two dictionaries of the same words differ."""
    return table.to_pylist()


def stored(trace, path, said=WHOLE):
    writer.write(trace, path, {"reading": files.as_json(said)})
    return path


STEP = [
    k.mark("ProfilerStep#0", 0, 100),
    k.mark("epoch 7", 0, 50),
    k.mark("epoch 8", 50, 50),
    k.launch(5, 3),
    k.all_reduce(20, 10, correlation=3, Process_Group_Ranks="[0, 1]"),
    k.kernel("gemm", 5, 10),
    k.event("aten::mm", "cpu_op", 1, 300, pid=100, tid=1),
]


def measured(path, **options):
    found = compute_metrics(open_run(path, config=Config(**options)))
    return found.to_dict()


def write_run(folder):
    """Write a run of two ranks into a folder, and its store; return the folder."""
    (folder / "traces").mkdir()
    for rank in range(2):
        k.write(folder / "traces" / f"rank{rank}.json", STEP, rank=rank, world=4)
    ingest(plan([folder / "traces"], folder / "store"))
    return folder


def as_first_layout(folder, *, without=()):
    """Write a store as an early version did: other keys, no sizes and hashes of files."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["writer"]
    for entry in manifest["ranks"]:
        del entry["footer"]
        entry["lacks"] = entry.pop("missing_data")
        _with_first_keys(folder / entry["file"], without)
        entry["size"] = (folder / entry["file"]).stat().st_size
    (folder / MANIFEST).write_text(json.dumps({**manifest, "layout": 1}))


def _with_first_keys(path, without):
    with pq.ParquetFile(path) as file:
        groups = [file.read_row_group(n) for n in range(file.num_row_groups)]
        about = json.loads(file.metadata.metadata[ABOUT])
    meta = {name: value for name, value in about["meta"].items() if name not in without}
    meta["lacks"] = meta.pop("missing_data")
    text = json.dumps({**about, "meta": meta, "layout": 1})
    schema = groups[0].schema.with_metadata({ABOUT: text})
    with pq.ParquetWriter(path, schema) as file:
        for group in groups:
            file.write_table(group.replace_schema_metadata(schema.metadata))
