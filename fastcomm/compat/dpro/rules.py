"""Reproduce dPRO's statistics, step times and replay of a trial exactly."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.compat.dpro import statistics as measures
from fastcomm.compat.dpro.gaps import GapRules, gap_counts
from fastcomm.compat.dpro.job import Topology
from fastcomm.compat.dpro.replayed import Replayed, ReplayRules
from fastcomm.compat.dpro.statistics import MS, RankSteps, Statistics, StepOperators, StepTime
from fastcomm.compat.dpro.uniform import OTHER, REQUESTS, SERVER, UniformTrace
from fastcomm.graph.graph import DeviceSchedule
from fastcomm_kernels.arrays import Floats, Ints


def category(standard: str) -> str:  # noqa: C901, PLR0911
    """Return the fine category of a standard name, by the first matching substring."""
    if any(sub_op in standard for sub_op in SERVER):
        return "ServerOp"
    for sub_op in REQUESTS:
        if sub_op in standard:
            return f"Comm.{sub_op}"
    if "Comm" in standard:
        kinds = (sub_op for sub_op in ("SEND", "RECV") if sub_op in standard)
        return f"Comm.{next(kinds, OTHER)}"
    if "BW" in standard and "FW" in standard:
        return "operator.FW+BW"
    for op_cat in ("BW", "FW", "COMM", "COMP"):
        if op_cat in standard:
            return f"operator.{op_cat}"
    for part, fine in (("I/O", "I/O"), ("UPDATE_", "operator.UPDATE")):
        if part in standard:
            return fine
    if "OUTPUT" in standard:
        return "operator.OUTPUT"
    return "virtual" if standard == "END" else OTHER


def statistics(trace: UniformTrace, topology: Topology | None = None) -> Statistics:
    """Measure the operations of a trace by long name.

    With a topology, mean and variance of RECV are those of all steps but the last, in which it
    counts from the start of its SEND. All other values are those of the unchanged trace.
    """
    described = measures.describe(trace, category)
    if topology is None:
        return described
    pairs = measures.send_receive(trace, topology)
    clipped = measures.clip_receives(trace, measures.step_ids(trace)[:, :-1], pairs)
    avg, variance = described.avg.copy(), described.variance.copy()
    row = {name: k for k, name in enumerate(described.names)}
    for key in pairs[1].tolist():
        k = row[clipped.keys[key]]
        events = described.step_ids[k, :-1]
        durations = clipped.dur[events[events >= 0]]
        if len(durations):
            avg[k], variance[k] = durations.mean(), durations.var()
    categories = {name: dict(values) for name, values in described.categories.items()}
    cut = int((trace.dur - clipped.dur).sum())
    if cut and "Comm.RECV" in categories:
        receive = categories["Comm.RECV"]
        receive["time"] -= cut / MS
        receive["avg"] = receive["time"] / receive["cnt"]
    return replace(described, avg=avg, variance=variance, categories=categories, trace=clipped)


def operations(measured: Statistics) -> dict[str, dict[str, Any]]:
    """Return all operations by long name, as dicts with dPRO's keys, in ms."""
    return {name: operation(measured, k) for k, name in enumerate(measured.names)}


def operation(measured: Statistics, k: int) -> dict[str, Any]:
    """Return the operation of row `k` as a dict with dPRO's keys, in ms."""
    times = measured.times[measured.first[k] : measured.first[k + 1]]
    return {
        "avg": float(measured.avg[k]) / MS,
        "cnt": int(measured.count[k]),
        "time": [time / MS for time in times.tolist()],
        "min_t": int(measured.least[k]) / MS,
        "max_t": int(measured.most[k]) / MS,
        "median": int(measured.median[k]) / MS,
        "var": float(measured.variance[k]) / MS**2,
        "id": k,
        "step_ids": [None if i < 0 else i for i in measured.step_ids[k].tolist()],
        "cat": measured.category[k],
    }


def step_time(trace: UniformTrace) -> StepTime:
    """Measure the steps that all ranks have.

    Raises FastcommError if no rank has an operator.
    """
    return measures.step_time(trace, category, _rank_steps)


def _rank_steps(operators: StepOperators) -> RankSteps:
    """Measure steps until the end of the operator that starts last.

    The first operator of a step counts as part of the step before.
    """
    bounds, step = operators.bounds, operators.step
    step[bounds[1:-1]] -= 1
    measured = operators.rank_steps(operators.stop[bounds[1:] - 1], step)
    if _is_cut(operators.category, bounds):
        return replace(measured, time=measured.time[:-1])
    return measured


def _is_cut(categories: NDArray[np.str_], bounds: Ints) -> bool:
    """Return whether the last step is incomplete, as dPRO decides.

    It is if it is not one of the first two steps, and has no backward operator except perhaps
    its first operator. `categories` are those of all operators, `bounds` the indices at which
    steps begin.
    """
    inner = np.ones(len(categories), bool)
    inner[bounds[:-1]] = False
    forward = inner & (categories == "operator.FW")
    backward = inner & (categories == "operator.BW")
    last = backward[bounds[-2] :].any()
    return len(bounds) > 2 and not (forward.any() and backward.any() and last)  # noqa: PLR2004


def _edge_costs(replayed: Replayed) -> Floats:
    """Return the length of each edge in ns: its source, and the gap to its target."""
    replayer = replayed.replayer
    source, target, measured = replayer.graph.source, replayer.graph.target, replayer.measured
    is_operator, is_comm = replayer.operators, replayer.is_of("Comm")
    between = is_operator[source] & is_operator[target]
    gap = np.where(between, measured.gap[source], 0.0)
    gap += np.where(is_operator[source] & is_comm[target], measured.comm_gap[source], 0.0)
    return np.asarray(replayed.duration[source] + gap)


def _step_ends(pid: Ints, schedule: DeviceSchedule, pids: int) -> Floats:
    """Return when each process ended: the end of its last operation in the schedule, in ns.

    `pid` has the number of the process of each operation.
    """
    ends = np.zeros(pids)
    ends[pid[schedule.order]] = schedule.end[schedule.order]
    return ends


RULES = ReplayRules(
    statistics=statistics,
    step_time=step_time,
    gaps=GapRules(
        counts=partial(gap_counts, forward="FW_"),
        skips_overlapping=True,
        one_step=True,
        joins_ranks=False,
    ),
    has_duplex_links=False,
    by_device=True,
    step_ends=_step_ends,
    edge_costs=_edge_costs,
)
