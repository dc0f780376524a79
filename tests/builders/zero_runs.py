"""Small runs of which any quantity is zero or absent, on some ranks or on all."""

import json

from builders import kineto_text as k
from hypothesis import strategies as st

QUANTITIES = (
    *("compute", "communication", "copies", "launches", "steps", "sizes"),
    *("groups", "sequence", "clock", "operators", "device"),
)
ZERO, ABSENT = "zero", "absent"
STEP_US = 1000
# Of each operation: its tag's description, the name of its kernel, and of its metadata.
OPERATIONS = {
    "DP": ("DATA_PARALLEL_GROUP", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "allreduce"),
    "EP": ("EXPERT_MODEL_PARALLEL_GROUP", "ncclDevKernel_SendRecv", "all_to_allv"),
    "PP": ("PIPELINE_MODEL_PARALLEL_GROUP", "ncclDevKernel_SendRecv", "send"),
    "TP": ("TENSOR_MODEL_PARALLEL_GROUP", "ncclDevKernel_AllGather_RING_LL", "all_gather"),
}
# The ranks of an operation's group, of a rank and the number of ranks.
MEMBERS = {
    "DP": lambda _, ranks: list(range(ranks)),
    "EP": lambda rank, ranks: [other for other in range(ranks) if other // 2 == rank // 2],
    "PP": lambda rank, ranks: [other for other in range(ranks) if other % 2 == rank % 2],
    "TP": lambda rank, _: [rank],
}


@st.composite
def runs(draw):
    """A plan of a run: ranks, steps, operations; by quantity, "zero" or "absent" and ranks."""
    ranks = draw(st.integers(1, 4))
    some = st.sets(st.sampled_from(range(ranks)), min_size=1)
    faults = draw(
        st.dictionaries(
            st.sampled_from(QUANTITIES), st.tuples(st.sampled_from([ZERO, ABSENT]), some)
        )
    )
    return {
        "ranks": ranks,
        "steps": draw(st.integers(1, 3)),
        "operations": draw(st.sets(st.sampled_from(sorted(OPERATIONS)))),
        "slow": draw(st.integers(-1, ranks - 1)),
        "faults": faults,
    }


def write(plan, folder):
    """Write a file for each rank of a plan."""
    folder.mkdir(exist_ok=True)
    for rank in range(plan["ranks"]):
        text = json.dumps(_document(plan, rank))
        (folder / f"rank{rank}.json").write_text(text)
    return folder


def _document(plan, rank):
    state = {
        quantity: kind for quantity, (kind, ranks) in plan["faults"].items() if rank in ranks
    }
    members = list(range(plan["ranks"]))
    groups = [
        {"pg_name": name, "pg_desc": OPERATIONS[name][0], "pg_size": len(members)}
        for name in sorted(plan["operations"])
    ]
    events = [
        event
        for step in range(plan["steps"])
        for event in _step(plan, rank, step * STEP_US, step, state)
    ]
    document = k.document(events, rank, plan["ranks"], () if "groups" in state else groups)
    document["deviceProperties"] = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    document["baseTimeNanoseconds"] = 1_700_000_000_000_000_000 + rank * 1_000_000
    if state.get("clock") == ZERO:
        document["baseTimeNanoseconds"] = 0
    if state.get("clock") == ABSENT:
        del document["baseTimeNanoseconds"]
    if state.get("device") == ZERO:
        document["deviceProperties"] = []
    if state.get("device") == ABSENT:
        del document["deviceProperties"]
    return document


def _step(plan, rank, at, step, state):
    if state.get("steps") != ABSENT:
        yield k.mark(f"ProfilerStep#{step}", at, _length(state, "steps", STEP_US - 100))
    number = 100 * step + 1  # 0 stands for none
    slow = 2 if rank == plan["slow"] else 1
    work = [("compute", "gemm", 300 * slow, {})]
    work += [("copies", "Memcpy HtoD (Pinned -> Device)", 20, {"bytes": 4096})]
    for place, (quantity, name, dur, args) in enumerate(work):
        if state.get(quantity) == ABSENT:
            continue
        begin = at + 10 + 5 * place
        yield from _launched(state, begin, number + place)
        row = k.kernel(name, begin + 5, _length(state, quantity, dur), **args)
        if quantity == "copies":
            row["cat"] = "gpu_memcpy"
        row["args"]["correlation"] = number + place
        yield row
    if state.get("communication") == ABSENT:
        return
    own_us = 0 if "compute" in state else 300 * slow
    for place, name in enumerate(sorted(plan["operations"])):
        # Ranks begin when their own compute ends, and all end at once.
        begin, end = at + 60 + own_us + 3 * place, at + 750 + 50 * place
        yield from _launched(state, at + 40 + 5 * place, number + 10 + place)
        yield _communication(plan, state, name, rank, (begin, end), number + 10 + place)


def _launched(state, at, correlation):
    if state.get("operators") != ABSENT:
        dur = _length(state, "operators", 4)
        yield k.event("aten::mm", "cpu_op", at - 1, dur, pid=100, tid=1)
    if state.get("launches") != ABSENT:
        yield k.launch(at, correlation, _length(state, "launches", 2))


def _communication(plan, state, name, rank, span, correlation):
    description, kernel, operation = OPERATIONS[name]
    members = MEMBERS[name](rank, plan["ranks"])
    args = {
        "Collective name": operation,
        "dtype": "BFloat16",
        "Process Group Name": name,
        "Process Group Description": description,
        "Process Group Ranks": str(members),
        "Group size": len(members),
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "Seq": correlation,
        "correlation": correlation,
    }
    _damage(args, state, "sizes", ("In msg nelems", "Out msg nelems"), 0)
    _damage(args, state, "sequence", ("Seq",), 0)
    _damage(args, state, "groups", ("Group size",), 0)
    _damage(args, state, "groups", ("Process Group Ranks",), "[]")
    _damage(args, state, "groups", ("Process Group Name", "Process Group Description"), "")
    begin, end = span
    row = k.kernel(kernel, begin, _length(state, "communication", end - begin), 20)
    row["args"].update(args)
    return row


def _damage(args, state, quantity, keys, zero):
    for key in keys:
        if state.get(quantity) == ZERO:
            args[key] = zero
        elif state.get(quantity) == ABSENT:
            del args[key]


def _length(state, quantity, usual):
    return 0 if state.get(quantity) == ZERO else usual
