"""Measure mean durations of nodes, and mean gaps between them, for a replay.

Times are float64 ns.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from fastcomm.compat.dpro.dependency import Dependencies
from fastcomm.compat.dpro.statistics import Statistics
from fastcomm.compat.dpro.uniform import (
    COARSE,
    REQUESTS,
    STAGES,
    Name,
    UniformTrace,
    category,
    coarse,
)
from fastcomm_kernels.arrays import NULL, Floats, Ints

_SHORT_NS = 10_000  # counts instead of a gap that is longer than the operator before it
_IDS = 4  # loop, channel, chunk, slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured times of each node of a dependency graph."""

    avg: Floats  # mean duration
    gap: Floats  # mean gap to the next operator
    samples: Ints  # number of gaps
    comm_gap: Floats  # gap before the communication that follows the node

    def at(self, nodes: Ints) -> "Measured":
        """Return the values of some nodes, by number; zeros for a number of -1."""
        exists = nodes >= 0
        columns = {own.name: getattr(self, own.name)[nodes] for own in fields(self)}
        return Measured(**{name: np.where(exists, one, 0) for name, one in columns.items()})


def gap_counts(before: str, after: str, forward: str = "FW") -> bool:
    """Return whether the gap between two operators is a property of the first.

    Gaps at the end of a step do not count.

    Parameters
    ----------
    before, after
        Names of the operators, such as "BW.layer1".
    forward
        Text in the name of a forward operator, before which a gap after an update does not
        count.

    """
    return not (
        "UPDATE_CAL" in (before, after)
        or (before.startswith("BW") and after.startswith("UPDATE_"))
        or (before.startswith("UPDATE_") and forward in after)
        or "local_num_masks" in before
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GapRules:
    """How durations and gaps are measured."""

    counts: Callable[[str, str], bool] = gap_counts
    skips_overlapping: bool = False  # ignore operators that overlap the one before
    one_step: bool = False  # measure gaps before communication in one step instead of all
    joins_ranks: bool = True  # communication as one node takes the mean of all ranks


def measured(
    graph: Dependencies,
    statistics: Statistics,
    trace: UniformTrace,
    step: int,
    rules: GapRules | None = None,
) -> Measured:
    """Measure durations and gaps of the nodes of a graph.

    Parameters
    ----------
    graph
        The dependency graph.
    statistics
        Mean durations by name.
    trace
        Gives the gaps. Its durations are not clipped.
    step
        Step in which gaps before communication are measured if the rules say one step.
    rules
        By default those of fastcomm.

    """
    rules = rules or GapRules()
    number = {name: i for i, name in enumerate(graph.nodes)}
    avg = _averages(graph, statistics, joins_ranks=rules.joins_ranks)
    gap, samples = _operator_gaps(graph, trace, number, rules)
    steps = np.unique(trace.step[trace.counts & (trace.step != NULL)]).tolist()
    waits = _comm_gaps(graph, trace, avg, [step] if rules.one_step else steps)
    comm_gap = np.zeros(len(avg))
    for i, node in enumerate(graph.nodes):
        if node.endswith(".Sync"):
            comm_gap[i] = _mean_wait(waits, node.partition("->")[0])
    for a, owner in _pushed(graph):
        comm_gap[a] = min(_SHORT_NS, _mean_wait(waits, owner))
    return Measured(avg=avg, gap=gap, samples=samples, comm_gap=comm_gap)


def _mean_wait(waits: list[dict[str, int]], owner: str) -> float:
    """Return the mean over the steps in which an owner waited; 0 if it never did."""
    values = [step[owner] for step in waits if owner in step]
    return float(np.mean(values)) if values else 0.0


def _pushed(graph: Dependencies) -> list[tuple[int, str]]:
    """Return the backward operations whose tensor is pushed to a server, and the worker."""
    parsed = graph.parsed()
    pairs = zip(graph.source.tolist(), graph.target.tolist(), strict=True)
    return [
        (a, _owner(parsed[b].pid))
        for a, b in pairs
        if parsed[b].sub_op == REQUESTS[0] and parsed[a].op_cat == "BW"
    ]


def _owner(pid: str | None) -> str:
    """Return the process of a rank, or of the sender if `pid` is a link; "" for None."""
    return (pid or "").partition("::")[0]


def _averages(graph: Dependencies, statistics: Statistics, *, joins_ranks: bool) -> Floats:
    """Return the mean duration of each node.

    A Sync takes no time; a fused buffer takes the mean over its tensors. Communication as one
    node that joins ranks waits by its edges; ranks that do not log it take the mean of all
    ranks that do.
    """
    mean = dict(zip(statistics.names, statistics.avg.tolist(), strict=True))
    logged: dict[str, list[float]] = {}
    for key, avg_ns in mean.items():
        logged.setdefault(key.partition("->")[2], []).append(avg_ns)
    avg = np.zeros(len(graph.nodes))
    for i, name in enumerate(graph.parsed()):
        if name.sub_op in STAGES and name.op_cat == "Comm":
            own = (f"{name.pid}->Comm.{tensor}.{name.sub_op}" for tensor in name.tensors)
            avg[i] = sum(mean.get(one, 0.0) for one in own) / len(name.tensors)
        elif name.sub_op == COARSE[1] and joins_ranks:
            avg[i] = np.mean(logged.get(name.standard, [0.0]))
        elif name.sub_op != "Sync" and not (name.sub_op == COARSE[0] and joins_ranks):
            avg[i] = mean.get(graph.nodes[i], mean.get(_traced(graph.nodes[i]), 0.0))
    return avg


def _traced(node: str) -> str:
    """Return the name of a slice in NCCL's trace, which has no source and target in trees."""
    head, arrow, suffix = node.partition("~>")
    return head + arrow + "_".join(suffix.split("_")[:_IDS])


def _by_pid(trace: UniformTrace) -> dict[str, Ints]:
    """Return the rows of the operators of each process, by time."""
    operator = np.array([coarse(category(name)) == "operator" for name in trace.names], bool)
    pids = {pid: i for i, pid in enumerate(trace.pids)}
    own = np.array([pids[pid] for pid in trace.key_pid], np.int64)[trace.key]
    rows = np.flatnonzero(operator[trace.key] & trace.counts)
    return {pid: rows[own[rows] == i] for pid, i in pids.items()}


def _operator_gaps(
    graph: Dependencies, trace: UniformTrace, number: dict[str, int], rules: GapRules
) -> tuple[Floats, Ints]:
    """Return by node the mean gap to the next operator of its rank in ns, and the count."""
    total, samples = np.zeros(len(graph.nodes)), np.zeros(len(graph.nodes), np.int64)
    names = [trace.names[key] for key in trace.key.tolist()]
    for rows in _by_pid(trace).values():
        before = -1
        for row in rows.tolist():
            if before >= 0 and rules.counts(names[before], names[row]):
                node = number.get(trace.keys[trace.key[before]])
                dur = int(trace.dur[before])
                gap = int(trace.start[row] - trace.start[before]) - dur
                if node is not None and gap >= 0:
                    total[node] += _SHORT_NS if gap > dur else gap
                    samples[node] += 1
                elif rules.skips_overlapping:
                    continue
            before = row
    return np.divide(total, samples, out=total, where=samples > 0), samples


def _comm_gaps(
    graph: Dependencies, trace: UniformTrace, avg: Floats, steps: list[int]
) -> list[dict[str, int]]:
    """Return for each step the gap before the first communication of each owner.

    The gap begins at the end of the last backward operation that the communication waits for.
    """
    before: dict[int, list[int]] = {}
    for a, b in zip(graph.source.tolist(), graph.target.tolist(), strict=True):
        before.setdefault(b, []).append(a)
    parsed, number = graph.parsed(), {name: i for i, name in enumerate(graph.nodes)}
    node = np.array([number.get(key, -1) for key in trace.keys], np.int64)
    opens = {name: _opens(Name.of(name)) for name in set(trace.names)}
    first = np.array([opens[name] for name in trace.names], bool) & (node >= 0)
    awaited: dict[int, list[int]] = {}  # backward operations by node
    by_step = []
    for step in steps:
        rows = np.flatnonzero((trace.step == step) & trace.counts)
        ends = np.full(len(graph.nodes) + 1, NULL)
        ends[node[trace.key[rows]]] = trace.start[rows] + trace.dur[rows]
        gaps: dict[str, int] = {}
        for row in rows[first[trace.key[rows]]].tolist():
            at = int(node[trace.key[row]])
            pid = _owner(parsed[at].pid)
            if pid in gaps:
                continue
            if at not in awaited:
                awaited[at] = _backward(at, before, parsed, avg)
            last = ends[awaited[at]].max(initial=NULL)
            if last != NULL:
                gaps[pid] = max(0, int(trace.start[row]) - int(last))
        by_step.append(gaps)
    return by_step


def _opens(name: Name) -> bool:
    """Return whether communication may begin with an operation, as with all but a Sync."""
    return name.op_cat == "Comm" and name.sub_op != "Sync"


def _backward(
    node: int, before: dict[int, list[int]], parsed: list[Name], avg: Floats
) -> list[int]:
    """Return the nearest backward operations before a node, on each path that leads to it."""
    nodes, visited, pending = [], {node}, [node]
    while pending:
        for source in before.get(pending.pop(), ()):
            is_backward = parsed[source].op_cat == "BW"
            if source in visited or not (is_backward or parsed[source].pid == parsed[node].pid):
                continue
            visited.add(source)
            if is_backward and avg[source] > 0:
                nodes.append(source)
            else:
                pending.append(source)
    return nodes
