"""Small steps that tests of what-ifs change."""

from builders import kineto_text as k
from click.testing import CliRunner

import fastcomm
from fastcomm.cli.main import main
from fastcomm.critical_path.search import analyze
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.options import Window

US = 1000
TP = {"Process_Group_Description": "TENSOR_MODEL_PARALLEL_GROUP"}

# The host launches three kernels and waits; the device is busy from 10 to 100 us.
EVENTS = [
    k.event("aten::mm", "cpu_op", 0, 8, pid=100, tid=1),
    k.launch(2, 1),
    k.launch(4, 2),
    k.launch(6, 3),
    k.kernel("gemm", 10, 40, device=0, correlation=1),
    k.all_reduce(52, 28, stream=7, device=0, correlation=2, **TP),
    k.kernel("relu", 82, 18, device=0, correlation=3),
    k.event("cudaDeviceSynchronize", "cuda_runtime", 8, 95, pid=100, tid=1),
]


def found_in(path):
    return analyze(reader.read(path, TraceOptions(whole=True)), Window(annotation=""))


PAIR = {
    "Process_Group_Name": "0",
    "Process_Group_Ranks": "[0, 1]",
    "Process_Group_Description": "TENSOR_MODEL_PARALLEL_GROUP",
    "Group_size": 2,
    "Seq": 4,
}


def two_ranks(folder, gemms, transfer, relus):
    """Both ranks run a gemm from 10 us on, meet, transfer for some time, and run a relu."""
    met = 10 + max(gemms)
    group = {"pg_name": "0", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0, 1]}
    for rank, (gemm, relu) in enumerate(zip(gemms, relus, strict=True)):
        wait = met - 10 - gemm
        events = [
            *(k.launch(2 * n, n + 1) for n in range(3)),
            k.kernel("gemm", 10, gemm, device=0, correlation=1),
            k.all_reduce(10 + gemm, wait + transfer, 7, device=0, correlation=2, **PAIR),
            k.kernel("relu", met + transfer, relu, device=0, correlation=3),
        ]
        k.write(folder / f"rank{rank}.json", events, rank=rank, world=2, groups=[group])
    return fastcomm.open(folder).critical_path(annotation="")


def invoke(*words, code=0):
    done = CliRunner().invoke(main, ["what-if", *map(str, words)])
    assert done.exit_code == code, done.output
    return done
