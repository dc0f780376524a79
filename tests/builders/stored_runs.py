"""Runs that are stored and then measured."""

from builders import kineto_text as k
from builders.opened import open_run

from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.config import Config
from fastcomm.formats.store import files, writer
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.computation import compute_metrics

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
