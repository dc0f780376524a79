"""Events of ranks whose kernels are known, for tests of `fastcomm kernels`."""

from collections import Counter

from builders import kineto_text as k

from fastcomm.ingest.ingest import ingest, plan


def python(name, ts, dur, tid=1):
    return k.event(f"nn.Module: {name}", "python_function", ts, dur, pid=100, tid=tid)


def op(name, ts, dur, tid=1, **args):
    return k.event(name, "cpu_op", ts, dur, pid=100, tid=tid, **args)


def rank_events(slow=0):
    """Two layers forward on thread 1, the second backward on thread 2; and a collective."""
    backward = "autograd::engine::evaluate_function: MmBackward0"
    return [
        k.mark("ProfilerStep#3", 0, 100),
        k.mark("forward", 1, 40),
        python("Model_0", 1, 40),
        python("Layer_0", 2, 10),
        python("Linear_0", 3, 8),
        op("aten::linear", 4, 6),
        op("aten::mm", 5, 4, Sequence_number=7),
        k.launch(6, 1),
        python("Layer_1", 20, 10),
        python("Linear_1", 21, 8),
        op("aten::mm", 22, 4, Sequence_number=8),
        k.launch(23, 2),
        k.mark("backward", 50, 40),
        op(backward, 60, 10, tid=2, Sequence_number=8, Fwd_thread_id=1),
        op("aten::mm", 61, 5, tid=2),
        k.launch(62, 3, tid=2),
        k.launch(80, 4),
        k.kernel("void gemm<1, 2>(int)", 10, 5, correlation=1),
        k.kernel("void gemm<2, 2>(int)", 25, 5, correlation=2),
        k.kernel("gemm_wgrad", 65, 10 + slow, correlation=3),
        k.all_reduce(85, 10, correlation=4, Process_Group_Ranks="[0, 1]"),
    ]


def write_run(folder):
    """Traces of three ranks, the last of them slower, and a store of them."""
    (folder / "traces").mkdir()
    for rank in range(3):
        events = rank_events(slow=2 * (rank == 2))
        k.write(folder / "traces" / f"rank{rank}.json", events, rank=rank, world=3)
    ingest(plan([folder / "traces"], folder / "store"))
    return folder


def totals(kernels):
    """The total of each name; operators have a row for each shape of their inputs."""
    result = Counter()
    for row in kernels.to_arrow().select(["name", "total_ns"]).to_pylist():
        result[row["name"]] += row["total_ns"]
    return result
