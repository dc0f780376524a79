"""Pipeline stages with more work than the others, which wait for them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.findings.finding import Evidence, Finding, Fix, Next, per_step
from fastcomm.metrics.findings.stragglers import COMPARED
from fastcomm.metrics.findings.suspects import (
    Measurements,
    OwnWork,
    Suspect,
    compute_evidence,
    excess,
    finding_of,
    step_evidence,
)
from fastcomm.metrics.outliers import lower_median, peers_of
from fastcomm.options import EditOptions
from fastcomm.trace.run_traces import ranges
from fastcomm.units import plural
from fastcomm_kernels.arrays import Floats

# Minimum share of the step: stages differ anyway, as the first embeds, the last has the head.
LEAST_STAGE = 0.015


def suspects(measured: Measurements) -> list[Suspect]:
    """Return the pipeline stages that compute the longest, if they stand out, as one suspect.

    Without their additional work the longest of the other stages would limit the step, so the
    cost is the difference to that stage.
    """
    means = measured.grid.mean_by_rank("compute_ns")
    is_known = ~np.isnan(means)
    parts = [rows for rows in peers_of(measured.grid, measured.stage) if is_known[rows].any()]
    if len(parts) < 2:  # noqa: PLR2004 - nothing to compare with
        return []
    # The median of each stage, so that one straggler is no imbalance.
    stages = np.array([lower_median(means[rows]) for rows in parts])
    longest, next_longest = _standing_out(stages)
    rows, others = parts[longest[-1]], parts[next_longest]
    first, *tied = measured.ranks_of(
        np.sort(np.concatenate([parts[place] for place in longest]))
    )
    suspect = Suspect(
        work=WORK,
        rows=rows,
        rank=first,
        tied=tuple(tied),
        others=others,
        mean=float(stages[longest[-1]]),
        middle=float(stages[next_longest]),
        excess=excess(measured.grid, "compute_ns", rows, others),
    )
    return [suspect] if suspect.cost > LEAST_STAGE * measured.step_ns else []


def _standing_out(stages: Floats) -> tuple[NDArray[np.int64], int]:
    """Return the indices of the longest stages, and of the longest of the others.

    The widest gap between two stages separates them; at most half of the stages stand out.
    """
    order = np.argsort(-stages, kind="stable")
    gaps = stages[order[:-1]] - stages[order[1:]]
    count = int(np.argmax(gaps[: max(1, len(stages) // 2)])) + 1
    return order[:count], int(order[count])


def describe(measured: Measurements, of: Suspect) -> Finding:
    """Return the finding on pipeline stages with more work than the others."""
    names = sorted({measured.stage.get(rank, 0) for rank in of.ranks})
    count, cost = len(names), of.cost * of.share
    return finding_of(
        measured,
        of.ranks,
        cost,
        [
            Evidence(key="stage", value=names[0] if count == 1 else None),
            Evidence(key="tag", value="PP"),
            *compute_evidence(of),
            *step_evidence(measured, "compute_ns", of),
        ],
        kind=WORK.name,
        text=f"Pipeline {plural(count, 'stage')} {ranges(names)} {plural(count, 'has')} more "
        f"work than the others, which wait for {'it' if count == 1 else 'them'}: "
        f"+{per_step(cost, measured.step_ns, 'compute', of.cost)}.",
        next=Next(command="critical-path", purpose="which stage the path goes through"),
        picture=COMPARED,
        fix=_as_others(names),
    )


def _as_others(stages: Sequence[int]) -> Fix | None:
    """Return the fix that gives stages the work of the others; None for stages far apart."""
    if stages[-1] - stages[0] >= len(stages):
        return None
    edit = EditOptions(heal=(f"stage:{ranges(stages)}",))
    return Fix(
        edit=edit, text=f"With the compute of the other stages in stage {ranges(stages)}"
    )


WORK = OwnWork(
    name="imbalanced_stage",
    describe=describe,
    is_limited_to_wait=False,
    is_limited_by_slack=False,
)
