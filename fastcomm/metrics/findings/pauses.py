"""Long pauses that visit one rank after another, as garbage collection of Python does."""

from collections.abc import Sequence

import numpy as np

from fastcomm.metrics.findings import late_hosts
from fastcomm.metrics.findings.finding import (
    Finding,
    Next,
    per_step,
    spread,
    steps_and_spread,
)
from fastcomm.metrics.findings.late_hosts import COMPARED, idle_evidence
from fastcomm.metrics.findings.suspects import Measurements, finding_of
from fastcomm.metrics.outliers import NORMAL, HeatArrays, lower_median, peers_of
from fastcomm.trace.run_traces import named_ranks
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL, Floats, Ints

KIND = "pauses"

# Minimum length of a pause as a share of the step, and in scaled deviations of usual
# differences.
_LEAST_PAUSE = 0.05
_LEAST_DEVIATIONS = 6.0
_LEAST_COUNT = 3
# If one rank has more than this share of the pauses, it is that rank that is late.
_MOST_OF_ONE = 0.5


def rotating_pauses(measured: Measurements) -> list[Finding]:
    """Return a finding on long pauses that visit one rank after another, or none.

    No rank is slower than the others then. Garbage collection of Python is the usual cause:
    each process collects at its own time, and each time all others wait for it.
    """
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
    return [_finding(measured, ranks, costs, mean, float(others[is_pause].mean()))]


def unexplained(own: Sequence[Finding], paused: Sequence[Finding]) -> list[Finding]:
    """Return the findings on single ranks that pauses in turns do not explain.

    In a few steps, some ranks pause once more than others, and are idle longer on average.
    """
    return [
        suspect
        for suspect in own
        if suspect.kind != late_hosts.WORK.name
        or not any(
            set(suspect.ranks) <= set(pause.ranks) and suspect.cost_ns < pause.cost_ns
            for pause in paused
        )
    ]


def _longer(measured: Measurements, rows: Ints) -> tuple[Floats, Floats]:
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


def _times(grid: HeatArrays, name: str, rows: Ints) -> Floats:
    """Return a measure in ns, shape (ranks, steps); NaN if unknown."""
    values = grid.values[name][rows]
    return np.where(values == NULL, np.nan, values.astype(np.float64))


def _finding(
    measured: Measurements, ranks: tuple[int, ...], costs: Floats, mean: float, peers: float
) -> Finding:
    """Return the finding that ranks pause in turns.

    `costs` is the time lost in each step, `mean` the mean length of a pause beyond the peers,
    and `peers` their idle time, all in ns.
    """
    cost = float(costs.mean())
    does = "runs no operator" if measured.is_host_run else "launches nothing"
    return finding_of(
        measured,
        ranks,
        cost,
        [*idle_evidence(mean + peers, peers), *steps_and_spread(len(costs), spread(costs))],
        kind=KIND,
        text=f"{named_ranks(ranks).capitalize()} pause in turns, in {(costs > 0).sum()} of "
        f"{len(costs)} steps: one of them {does} for {format_ns(mean)} longer than its peers, "
        "which wait for it, as in garbage collection of Python: "
        f"+{per_step(cost, measured.step_ns)}.",
        next=Next(
            command="critical-path",
            purpose="what the host of the first of them does in a step",
            of="first",
        ),
        picture=COMPARED,
    )
