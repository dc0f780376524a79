"""Align the clocks of hosts: shifts in ns to add to the times of each host.

Mode `sync` shifts hosts so that the last Sync of Horovod ends at the same time everywhere. The
other modes use that no RECV ends before its SEND, which bounds the difference of the shifts of
two hosts. Of all shifts within the bounds, `causality` chooses the least sum of squares,
`variance` the least variance of long RECVs, counted from their SEND, and `drift` the least
differences between neighbors in the ring of hosts. `auto` is sync, or causality if a rank has
no Sync.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, get_args

import numpy as np

from fastcomm.compat.dpro.job import Topology
from fastcomm.compat.dpro.options import HostClocks
from fastcomm.compat.dpro.statistics import paired_rows, send_receive, step_ids
from fastcomm.compat.dpro.uniform import UniformTrace
from fastcomm.errors import ConfigError
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import Floats, Ints

MODES: tuple[str, ...] = get_args(HostClocks)
_LONG = 1.5  # a long RECV, in medians
_US = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifts:
    """Result of an alignment; without shifts the clocks are not aligned."""

    by_pid: Mapping[str, int]  # ns to add
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """SEND and RECV of slices between two hosts, one value per pair."""

    send_host: Ints  # number of the host
    receive_host: Ints
    send: Floats  # start and end, 2 x pairs, ns
    receive: Floats

    def bounds(self, hosts: int) -> Floats:
        """Return by how much a sender's shift may exceed a receiver's, hosts x hosts, ns.

        inf for hosts without pairs.
        """
        most = np.full((hosts, hosts), np.inf)
        gap = self.receive[1] - self.send[1]
        np.minimum.at(most, (self.send_host, self.receive_host), gap)
        return most


def by_sync(
    mode: str, hosts: Mapping[str, str], syncs: Mapping[str, int | None]
) -> Shifts | None:
    """Align clocks by Syncs alone.

    Parameters
    ----------
    mode
        One of `MODES`.
    hosts
        Host by pid, in the order of the ranks.
    syncs
        End of the last Sync by pid, ns; None for ranks without a Sync.

    Returns
    -------
    Shifts or None
        None if the mode needs SEND and RECV.

    Raises
    ------
    ConfigError
        If the mode is unknown.

    """
    if mode not in MODES:
        raise ConfigError(f"invalid alignment {mode!r}: expected one of {', '.join(MODES)}")
    if mode == "none" or len(set(hosts.values())) == 1:
        return Shifts(by_pid={})
    missing = next((pid for pid in hosts if syncs[pid] is None), None)
    if mode not in {"auto", "sync"} or (mode == "auto" and missing):
        return None
    if missing:
        return Shifts(
            by_pid={}, warnings=(f"{missing}: no Sync in comm.json; clocks are not aligned",)
        )
    ends: dict[str, list[int]] = {}
    for pid, host in hosts.items():
        ends.setdefault(host, []).append(syncs[pid] or 0)
    base = next(iter(ends.values()))
    # One quotient of integers: float64 would round means of times near 2^61.
    shift = {
        host: round((sum(base) * len(own) - sum(own) * len(base)) / (len(base) * len(own)))
        for host, own in ends.items()
    }
    return Shifts(by_pid={pid: shift[host] for pid, host in hosts.items()})


def by_causality(
    mode: str, trace: UniformTrace, topology: Topology | None, hosts: Mapping[str, str]
) -> Shifts:
    """Align clocks by SEND and RECV between hosts; the first host keeps its clock.

    Parameters
    ----------
    mode
        One of `MODES`; "auto" is causality.
    trace
        The trial, with steps.
    topology
        Rings of NCCL; without them the clocks are not aligned.
    hosts
        Host by pid, in the order of the ranks.

    """
    pairs = None if topology is None else pairs_of(trace, topology, hosts)
    if pairs is None or not len(pairs.send_host):
        return Shifts(
            by_pid={},
            warnings=("no Sync, and no SEND and RECV between hosts; clocks are not aligned",),
        )
    names = list(dict.fromkeys(hosts.values()))
    is_auto = mode == "auto"
    shift, violated = solve(pairs, len(names), "causality" if is_auto else mode)
    by_host = dict(zip(names, np.rint(shift).astype(np.int64).tolist(), strict=True))
    warnings = []
    if is_auto:
        warnings.append("not every comm.json has a Sync; clocks are aligned by SEND and RECV")
    if violated >= 1:
        warnings.append(
            f"a RECV ends {format_ns(violated)} before its SEND, however clocks are aligned"
        )
    return Shifts(
        by_pid={pid: by_host[host] for pid, host in hosts.items()}, warnings=tuple(warnings)
    )


def pairs_of(trace: UniformTrace, topology: Topology, hosts: Mapping[str, str]) -> Pairs:
    """Return all pairs of SEND and RECV between two hosts, in every step.

    Parameters
    ----------
    trace
        Events of all ranks.
    topology
        Rings of NCCL, which tell the receiver of a SEND.
    hosts
        Host by pid. Hosts are numbered in order of first appearance in it.

    Returns
    -------
    Pairs
        Times in ns since the first event.

    """
    sends, receives = send_receive(trace, topology)
    number = {host: i for i, host in enumerate(dict.fromkeys(hosts.values()))}
    host = np.array([number[hosts[pid]] for pid in trace.key_pid], np.int64)
    other = host[sends] != host[receives]
    send, receive = paired_rows(step_ids(trace), (sends[other], receives[other]))
    zero = int(trace.start.min()) if len(trace) else 0

    def times(rows: Ints) -> Floats:
        start = trace.start[rows] - zero
        return np.array([start, start + trace.dur[rows]], np.float64)

    return Pairs(
        send_host=host[trace.key[send]],
        receive_host=host[trace.key[receive]],
        send=times(send),
        receive=times(receive),
    )


def solve(pairs: Pairs, hosts: int, mode: str) -> tuple[Floats, float]:
    """Compute shifts of hosts from pairs of SEND and RECV.

    Parameters
    ----------
    pairs
        At least one.
    hosts
        Number of hosts.
    mode
        "causality", "variance" or "drift".

    Returns
    -------
    tuple
        Shift of each host in ns, 0 for the first, and by how many ns a RECV still ends before
        its SEND.

    """
    bounds = pairs.bounds(hosts) / _US
    sender, receiver = np.nonzero(np.isfinite(bounds))
    most = bounds[sender, receiver]
    unit = np.eye(hosts)
    sides = (unit[sender] - unit[receiver])[:, 1:]
    violated = _violated(sides, most)
    most = most + violated
    shift = _drift(sides, most, hosts) if mode == "drift" else _smallest(sides, most)
    if mode == "variance":
        shift = _least_variance(pairs, sides, most, shift)
    return np.concatenate(([0.0], shift)) * _US, violated * _US


def _violated(sides: Floats, most: Floats) -> float:
    """Return the least increase of all bounds `most` with which sides @ shift <= most."""
    from scipy.optimize import linprog

    cost = np.append(np.zeros(sides.shape[1]), 1.0)
    rows = np.column_stack((sides, np.full(len(most), -1.0)))
    free = [(None, None)] * sides.shape[1]
    return float(linprog(cost, A_ub=rows, b_ub=most, bounds=[*free, (0, None)]).x[-1])


def _smallest(sides: Floats, most: Floats) -> Floats:
    """Return the shifts with ``sides @ shift <= most`` and the least sum of squares.

    Least distance programming, as the residual of a non-negative least squares problem:
    C. Lawson and R. Hanson, Solving Least Squares Problems, chapter 23.
    """
    from scipy.optimize import nnls

    if (most >= 0).all():
        return np.zeros(sides.shape[1])
    scale = float(np.abs(most).max())
    target = np.append(np.zeros(sides.shape[1]), 1.0)
    system = np.vstack((-sides.T, -most / scale))
    residual = system @ nnls(system, target)[0] - target
    shift: Floats = -residual[:-1] / residual[-1] * scale
    return shift


def _drift(sides: Floats, most: Floats, hosts: int) -> Floats:
    """Return shifts with sides @ shift <= most that differ least between ring neighbors."""
    from scipy.optimize import linprog

    unit = np.eye(hosts)
    ring = (np.roll(unit, 1, axis=1) - unit)[:, 1:]  # differences of neighbors
    rows = np.block([[sides, np.zeros((len(most), hosts))], [ring, -unit], [-ring, -unit]])
    high = np.concatenate((most, np.zeros(2 * hosts)))
    cost = np.append(np.zeros(hosts - 1), np.ones(hosts))
    limits = [(None, None)] * (hosts - 1) + [(0, None)] * hosts
    shift: Floats = linprog(cost, A_ub=rows, b_ub=high, bounds=limits).x[: hosts - 1]
    return shift


def _least_variance(pairs: Pairs, sides: Floats, most: Floats, begin: Floats) -> Floats:
    """Return shifts, sides @ shift <= most, with the least variance of long RECVs."""
    from scipy.optimize import minimize

    dur = (pairs.receive[1] - pairs.receive[0]) / _US
    long = dur > _LONG * median(dur.tolist())
    if not long.any():
        return begin
    reach = (pairs.receive[1] - pairs.send[0])[long] / _US
    sender, receiver, dur = pairs.send_host[long], pairs.receive_host[long], dur[long]

    def variance(shift: Floats) -> float:
        by_host = np.concatenate(([0.0], shift))
        clipped = np.clip(reach + by_host[receiver] - by_host[sender], 0, dur)
        return float(clipped.var())

    within: dict[str, Any] = {"type": "ineq", "fun": lambda shift: most - sides @ shift}
    end = minimize(variance, begin, method="SLSQP", constraints=[within]).x
    fits = (sides @ end <= most + 1e-6).all()
    better: Floats = end if fits and variance(end) < variance(begin) else begin
    return better
