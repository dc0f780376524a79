"""Pauses that visit one rank after another, so that no rank is slower than the others.

Garbage collection of Python is the usual cause: each process collects at its own time, and
each time all others wait for it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.findings import Evidence, Finding, per_step, spread
from fastcomm.metrics.outliers import NORMAL, HeatArrays, lower_median, peers_of
from fastcomm.metrics.suspects import Measurements, finding
from fastcomm.trace.run import named_ranks
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL, Floats

# Minimum length as a share of the step, and in scaled deviations of what ranks differ anyway.
_LEAST_PAUSE = 0.05
_LEAST_DEVIATIONS = 6.0
_LEAST_COUNT = 3
# If one rank has more than this share of the pauses, it is that rank that is late.
_MOST_OF_ONE = 0.5


def rotating_pauses(measured: Measurements) -> list[Finding]:
    """Return a finding on long pauses, if they visit several ranks."""
    grid = measured.grid
    longer, others = (np.full(grid.values["idle_ns"].shape, np.nan) for _ in range(2))
    for rows in peers_of(grid, measured.stage):
        if len(rows) > 1:
            longer[rows], others[rows] = _longer(measured, rows)
    is_pause = longer > 0
    counts = is_pause.sum(axis=1)
    if counts.sum() < _LEAST_COUNT or counts.max() > _MOST_OF_ONE * counts.sum():
        return []
    # Pauses of one step are not added: all wait for the longest.
    costs = np.where(is_pause, longer, 0).max(axis=0)
    ranks = tuple(grid.ranks[counts > 0].tolist())
    mean = float(longer[is_pause].mean())
    evidence = Evidence(
        steps=len(costs),
        spread_ns=spread(costs),
        idle_ns=mean + float(others[is_pause].mean()),
        peers_idle_ns=float(others[is_pause].mean()),
    )
    return [_finding(measured, ranks, costs, mean, evidence)]


def unexplained(own: Sequence[Finding], paused: Sequence[Finding]) -> list[Finding]:
    """Return the findings on single ranks that pauses in turns do not explain.

    In a few steps, some ranks pause once more than others, and are idle longer on average.
    """
    return [
        suspect
        for suspect in own
        if suspect.kind != "jittery_host"
        or not any(
            set(suspect.ranks) <= set(pause.ranks) and suspect.cost_ns < pause.cost_ns
            for pause in paused
        )
    ]


def _longer(measured: Measurements, rows: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return by how long ranks pause per step, 0 if they do not, and the idle time of peers.

    `rows` are the ranks of one stage. A pause counts if others wait for at least half of it.
    """
    idle, exposed = (_times(measured.grid, name, rows) for name in ("idle_ns", "exposed_ns"))
    peers = lower_median(idle)
    longer = idle - peers
    finite = longer[~np.isnan(longer)]
    typical = NORMAL * float(np.median(np.abs(finite))) if len(finite) else 0.0
    least = max(_LEAST_PAUSE * measured.step_ns, _LEAST_DEVIATIONS * typical)
    is_awaited = lower_median(exposed) - exposed >= longer / 2
    is_pause = (longer > least) & is_awaited
    return np.where(is_pause, longer, 0), np.broadcast_to(peers, longer.shape)


def _times(grid: HeatArrays, name: str, rows: NDArray[np.int64]) -> Floats:
    """Return a measure in ns, shape (ranks, steps); NaN if unknown."""
    values = grid.values[name][rows]
    return np.where(values == NULL, np.nan, values.astype(np.float64))


def _finding(
    measured: Measurements,
    ranks: Sequence[int],
    costs: Floats,
    mean: float,
    evidence: Evidence,
) -> Finding:
    """Return the finding that ranks pause in turns.

    `costs` is the time lost in each step, `mean` the mean length of a pause beyond the peers,
    both in ns.
    """
    cost = float(costs.mean())
    does = "runs no operator" if measured.is_host_run else "launches nothing"
    text = (
        f"{named_ranks(ranks).capitalize()} pause in turns, in {(costs > 0).sum()} of "
        f"{len(costs)} steps: one of them {does} for {format_ns(mean)} longer than its peers, "
        "which wait for it, as in garbage collection of Python: "
        f"+{per_step(cost, measured.step_ns)}."
    )
    return finding(measured, "pauses", tuple(ranks), cost, text, evidence)
