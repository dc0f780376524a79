"""What a replay needs to know of each node: its mean duration, and the gaps that follow it.

Times are float64 nanoseconds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastcomm.readers.dpro import (
    COARSE,
    REQUESTS,
    STAGES,
    Name,
    UniformTrace,
    category,
    coarse,
)
from fastcomm.readers.dpro.statistics import Statistics
from fastcomm.replay.dependency import Dependencies
from fastcomm_kernels.arrays import NULL, Floats, Ints

_SHORT_NS = 10_000
# loop, channel, chunk, slice
_IDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of each node: mean duration, mean gap behind it, and gap before communication (Sync)."""

    avg: Floats
    gap: Floats
    samples: Ints
    comm_gap: Floats

    def at(self, nodes: Ints) -> "Measured":
        """Return what is known of nodes by number; nothing, as zeros, of -1."""
        known = nodes >= 0
        return Measured(
            avg=np.where(known, self.avg[nodes], 0.0),
            gap=np.where(known, self.gap[nodes], 0.0),
            samples=np.where(known, self.samples[nodes], 0),
            comm_gap=np.where(known, self.comm_gap[nodes], 0.0),
        )


def gap_counts(before: str, after: str, forward: str = "FW") -> bool:
    """Whether a gap between two operators, by name, says something of the first.

    A gap in front of the next step does not: from an update to a name with `forward` in it.
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
    skips_overlapping: bool = False  # an operator's gap goes on behind one that overlaps it
    one_step: bool = False  # gaps before communication are those of one step, else of all
    joins_ranks: bool = True  # communication that is one node takes the mean of all ranks


def measured(
    graph: Dependencies,
    statistics: Statistics,
    trace: UniformTrace,
    step: int,
    rules: GapRules | None = None,
) -> Measured:
    """Measure durations by the statistics, gaps by the trace as it was before clipping."""
    rules = rules or GapRules()
    number = {name: i for i, name in enumerate(graph.nodes)}
    avg = _averages(graph, statistics, joins_ranks=rules.joins_ranks)
    gap, samples = _operator_gaps(graph, trace, number, rules)
    known = np.unique(trace.step[trace.counts & (trace.step != NULL)]).tolist()
    waits = _comm_gaps(graph, trace, avg, [step] if rules.one_step else known)
    comm_gap = np.zeros(len(avg))
    for i, node in enumerate(graph.nodes):
        if node.endswith(".Sync"):
            of_pid = [each[pid] for each in waits if (pid := node.partition("->")[0]) in each]
            comm_gap[i] = np.mean(of_pid) if of_pid else 0.0
    for a, owner in _pushed(graph):
        of_worker = [each[owner] for each in waits if owner in each]
        comm_gap[a] = min(_SHORT_NS, float(np.mean(of_worker)) if of_worker else 0.0)
    return Measured(avg=avg, gap=gap, samples=samples, comm_gap=comm_gap)


def _pushed(graph: Dependencies) -> list[tuple[int, str]]:
    """Backward operations whose tensor is pushed to a server, and the worker that does."""
    parsed = graph.parsed()
    pairs = zip(graph.source.tolist(), graph.target.tolist(), strict=True)
    return [
        (a, _owner(parsed[b].pid))
        for a, b in pairs
        if parsed[b].sub_op == REQUESTS[0] and parsed[a].op_cat == "BW"
    ]


def _owner(pid: str | None) -> str:
    """Who communicates: a rank, or the worker at the begin of a link."""
    return (pid or "").partition("::")[0]


def _averages(graph: Dependencies, statistics: Statistics, *, joins_ranks: bool) -> Floats:
    """Means by node; a Sync takes no time of its own, a fused buffer that of its tensors.

    Where communication is one node that joins ranks, the wait for the others is in the graph,
    and ranks that do not log it take the mean of those that do.
    """
    mean = dict(zip(statistics.names, statistics.avg.tolist(), strict=True))
    logged: dict[str, list[float]] = {}
    for key, each in mean.items():
        logged.setdefault(key.partition("->")[2], []).append(each)
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
    """How NCCL's trace names a slice: in a tree without the ranks that send and receive it."""
    head, arrow, suffix = node.partition("~>")
    return head + arrow + "_".join(suffix.split("_")[:_IDS])


def _by_pid(trace: UniformTrace) -> dict[str, Ints]:
    """Positions of the operators of each pid, in time order."""
    operator = np.array([coarse(category(name)) == "operator" for name in trace.names], bool)
    pids = {pid: i for i, pid in enumerate(trace.pids)}
    own = np.array([pids[pid] for pid in trace.key_pid], np.int64)[trace.key]
    rows = np.flatnonzero(operator[trace.key] & trace.counts)
    return {pid: rows[own[rows] == i] for pid, i in pids.items()}


def _operator_gaps(
    graph: Dependencies, trace: UniformTrace, number: dict[str, int], rules: GapRules
) -> tuple[Floats, Ints]:
    """Mean gap from each operator to the next of its rank, over all steps."""
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
    """By step and owner: from the backward op that it waits for to the first communication."""
    before: dict[int, list[int]] = {}
    for a, b in zip(graph.source.tolist(), graph.target.tolist(), strict=True):
        before.setdefault(b, []).append(a)
    parsed, number = graph.parsed(), {name: i for i, name in enumerate(graph.nodes)}
    node = np.array([number.get(key, -1) for key in trace.keys], np.int64)
    opens = {name: _opens(Name.of(name)) for name in set(trace.names)}
    first = np.array([opens[name] for name in trace.names], bool) & (node >= 0)
    known: dict[int, list[int]] = {}
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
            if at not in known:
                known[at] = _backward(at, before, parsed, avg)
            last = ends[known[at]].max(initial=NULL)
            if last != NULL:
                gaps[pid] = max(0, int(trace.start[row]) - int(last))
        by_step.append(gaps)
    return by_step


def _opens(name: Name) -> bool:
    """Whether communication may begin with it: with everything but a Sync."""
    return name.op_cat == "Comm" and name.sub_op != "Sync"


def _backward(
    node: int, before: dict[int, list[int]], parsed: list[Name], avg: Floats
) -> list[int]:
    """Backward ops of the same rank that a node waits for, the nearest on each way."""
    nodes, seen, waiting = [], {node}, [node]
    while waiting:
        for each in before.get(waiting.pop(), ()):
            backward = parsed[each].op_cat == "BW"
            if each in seen or not (backward or parsed[each].pid == parsed[node].pid):
                continue
            seen.add(each)
            if backward and avg[each] > 0:
                nodes.append(each)
            else:
                waiting.append(each)
    return nodes
