"""Traces in which one thing is repeated many times: what a file can repeat for free."""

from builders import kineto_text as k

GROUP = {"Process_Group_Ranks": "[0, 1]", "Group_size": 2, "Process_Group_Name": "0"}


def _base():
    yield k.mark("ProfilerStep#0", 0, 400_000)
    yield k.launch(1, 1)
    yield k.kernel("gemm", 5, 30, correlation=1)


def groups(count):
    """As many process groups as collectives."""
    for at in range(count):
        args = {**GROUP, "Process_Group_Name": str(at), "Process_Group_Description": f"g{at}"}
        yield k.all_reduce(10 + 2 * at, 1, Seq=1, **args)


def streams(count):
    """As many streams as kernels."""
    for at in range(count):
        yield k.launch(2 + at, 10 + at)
        yield k.kernel("gemm", 10 + at, 5, stream=20 + at, correlation=10 + at)


def threads(count):
    """As many threads as operators."""
    for at in range(count):
        yield k.event("aten::mm", "cpu_op", 2 + at, 3, pid=100, tid=1000 + at)


def steps(count):
    """Short steps, each with a kernel and a collective."""
    for at in range(count):
        yield k.mark(f"ProfilerStep#{at + 1}", 400_000 + 20 * at, 19)
        yield k.launch(400_001 + 20 * at, 10 + at)
        yield k.kernel("gemm", 400_002 + 20 * at, 5, correlation=10 + at)
        yield k.all_reduce(400_008 + 20 * at, 5, Seq=at, **GROUP)


def nested(count):
    """Ranges inside of ranges."""
    for at in range(count):
        yield k.event(
            f"range{at % 7}", "user_annotation", 2 + at, 3 * count - 2 * at, pid=100, tid=1
        )


def nested_operators(count):
    """Operators inside of operators, the innermost of which launches."""
    for at in range(count):
        yield k.event("aten::mm", "cpu_op", 2 + at, 3 * count - 2 * at, pid=100, tid=1)
    yield k.launch(count + 5, 10)
    yield k.kernel("gemm", 3 * count + 10, 5, correlation=10)


def one_correlation(count):
    """Launches and kernels that all have one correlation id."""
    for at in range(count):
        yield k.launch(2 + 2 * at, 10)
        yield k.kernel("gemm", 10 + 2 * at, 1, correlation=10)


def equal_times(count):
    """Kernels, operators and collectives that begin at once."""
    for at in range(count):
        yield k.event("aten::mm", "cpu_op", 2, 3, pid=100, tid=1)
        yield k.launch(2, 10 + at)
        yield k.kernel("gemm", 10, 5, correlation=10 + at)
        yield k.all_reduce(20, 5, Seq=at, **GROUP)


def names(count):
    """As many names as events."""
    for at in range(count):
        yield k.event(f"operator{at}", "cpu_op", 2 + 2 * at, 1, pid=100, tid=1)
        yield k.launch(2 + 2 * at, 10 + at)
        yield k.kernel(f"kernel{at}", 10 + 2 * at, 1, correlation=10 + at)


def synchronizations(count):
    """Calls that wait for the device, between kernels."""
    for at in range(count):
        yield k.launch(2 + 8 * at, 10 + at)
        yield k.kernel("gemm", 4 + 8 * at, 2, correlation=10 + at)
        row = k.launch(3 + 8 * at, 0, dur=4)
        yield {**row, "name": "cudaDeviceSynchronize", "args": {}}


def one_group(count):
    """Collectives of one group, one after the other."""
    for at in range(count):
        yield k.launch(2 + 3 * at, 10 + at)
        yield k.all_reduce(4 + 3 * at, 2, Seq=at, correlation=10 + at, **GROUP)


def sizes(count):
    """As many sizes as collectives."""
    for at in range(count):
        yield k.all_reduce(4 + 3 * at, 2, nelems=1 + at, Seq=at, **GROUP)


REPEATED = {
    function.__name__: function
    for function in (
        *(groups, streams, threads, steps, nested, nested_operators, one_correlation),
        *(equal_times, names, synchronizations, one_group, sizes),
    )
}


def write(folder, name, count, ranks=2):
    """Write a run whose ranks all repeat one thing `count` times; return its folder."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        k.write(
            folder / f"rank{rank}.json",
            [*_base(), *REPEATED[name](count)],
            rank=rank,
            world=ranks,
        )
    return folder
