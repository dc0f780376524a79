"""Causes of lost time: ranks and pipeline stages whose own work is longer than their peers'.

Own work is compute time, and time in which the device is idle. Both are durations on one clock;
only `late_rank` needs aligned clocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics import idle
from fastcomm.metrics.findings import (
    LEAST_FINDING,
    CommonWaitCaused,
    Evidence,
    Finding,
    FindingKind,
    Suspect,
    confidence,
    joined_ties,
    median,
    per_step,
    sharing,
    spread,
)
from fastcomm.metrics.outliers import (
    LEAST_SHARE,
    HeatArrays,
    above_peers,
    lower_median,
    peers_of,
)
from fastcomm.metrics.skew import RankWaits
from fastcomm.trace.run import named_ranks, ranges
from fastcomm.units import percent, plural
from fastcomm_kernels.arrays import Floats, Ints

# Minimum share of the step: stages differ anyway, as the first embeds, the last has the head.
LEAST_STAGE = 0.015
# For hot experts: minimum share of additional compute that tokens explain, and of tokens.
_HOT = 1 / 3
_LEAST_HOT = 0.05
# Minimum share of a cost that remains where another stage computes longer.
_LEAST_OF_SLACK = 0.5
# Minimum share of a cost that others wait in collectives; else messages pass the delay on.
_LEAST_CAUSED = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The measurements by which ranks are judged."""

    grid: HeatArrays
    stage: Mapping[int, int]  # pipeline stage by rank
    received: Mapping[int, float]  # by rank: bytes of expert parallelism received per step
    waits: Mapping[int, float]  # by rank: wait time, ns per step
    caused: Mapping[int, float]  # by rank: wait caused, ns per step
    common_wait_caused: CommonWaitCaused
    # by rank: ns per step that its expert all-to-alls are longer than in other groups
    longer: Callable[[int], float | None]
    is_host_run: bool = False  # whether ranks compute and communicate without a device
    idle: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # `idle.by_rank`

    @property
    def step_ns(self) -> float:
        """Mean iteration time in ns; 0 without any."""
        return self.grid.step_ns or 0.0

    def ranks_of(self, rows: NDArray[np.int64]) -> list[int]:
        """Return the ranks of some rows of the grid."""
        ranks: list[int] = self.grid.ranks[rows].tolist()
        return ranks


def own_work(measured: Measurements) -> list[Finding]:
    """Return findings on stragglers, hot experts, late hosts and imbalanced stages."""
    # Idle time needs a larger difference, as it varies with waits between collectives.
    suspects = [
        *_above(measured, "compute_ns", LEAST_FINDING, _compute_kind),
        *_above(measured, "idle_ns", LEAST_SHARE, lambda *_: "jittery_host"),
        *_imbalanced_stages(measured),
    ]
    findings = []
    for suspect in sharing(suspects, measured.common_wait_caused):
        limited = _limited_to_wait(measured, suspect), _without_slack(measured, suspect)
        least = min(limited, key=lambda one: one.share)
        findings.append(_FINDINGS[least.kind](measured, least))
    return findings


def _limited_to_wait(measured: Measurements, of: Suspect) -> Suspect:
    """Limit the cost of a single suspect to the wait that it causes.

    If all ranks vary, the next one is nearly as late, so that a fix gains little more than that
    wait. Delays that are passed on by messages cause no wait in collectives; they keep their
    cost.
    """
    caused = measured.caused.get(of.rank, 0.0)
    is_alone = of.kind in ("straggler", "jittery_host") and not of.tied and of.share == 1
    if not is_alone or not _LEAST_CAUSED * of.cost < caused < of.cost:
        return of
    return replace(of, share=caused / of.cost)


def _without_slack(measured: Measurements, of: Suspect) -> Suspect:
    """Reduce the cost of a single suspect by what its stage computes less than another one.

    Without the fault, the stage that computes the longest would limit the step. At least half
    of the cost remains: the first and the last passes of a step wait for every stage.
    """
    if of.kind == "imbalanced_stage" or of.tied or of.share < 1 or not of.cost:
        return of
    means = measured.grid.mean_by_rank("compute_ns")
    others = [
        lower_median(means[rows])
        for rows in peers_of(measured.grid, measured.stage)
        if not np.isin(of.rows, rows).any() and not np.isnan(means[rows]).all()
    ]
    own = lower_median(means[of.others])
    slack = max([float(stage - own) for stage in others], default=0.0)
    return replace(of, share=min(1.0, max(_LEAST_OF_SLACK, 1 - slack / of.cost)))


def late_rank(measured: Measurements, rank_waits: Sequence[RankWaits]) -> list[Finding]:
    """Return a finding on the rank that others wait for without more compute or idle time.

    The rank has to cause more than half of all waits, and twice as much as any other rank: in a
    group of two, each is last half of the time by chance.

    Parameters
    ----------
    measured
        Measurements of all ranks, on aligned clocks.
    rank_waits
        `skew.over_tags` of all waits.

    """
    if not rank_waits or not measured.step_ns:
        return []
    worst, *others = rank_waits
    others_ns = [row.caused_ns for row in others]
    least = max(LEAST_SHARE * measured.step_ns, sum(others_ns), 2 * max(others_ns, default=0))
    if worst.caused_ns <= least:
        return []
    text = (
        f"Rank {worst.rank} is late: it is the last to arrive at "
        f"{percent(worst.last_share)} of its collectives, and others wait for it "
        f"for {per_step(worst.caused_ns, measured.step_ns)}."
    )
    evidence = Evidence(
        stage=measured.stage.get(worst.rank),
        steps=len(measured.grid.iterations),
        **_waits(measured, worst.rank, [row.rank for row in others]),
    )
    return [finding(measured, "late_rank", (worst.rank,), worst.caused_ns, text, evidence)]


def _imbalanced_stages(measured: Measurements) -> list[Suspect]:
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
        kind="imbalanced_stage",
        rows=rows,
        rank=first,
        tied=tuple(tied),
        others=others,
        mean=float(stages[longest[-1]]),
        middle=float(stages[next_longest]),
        excess=_excess(measured.grid, "compute_ns", rows, others),
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


def _above(
    measured: Measurements,
    measure: str,
    least: float,
    kind_of: Callable[[Measurements, Suspect], FindingKind],
) -> list[Suspect]:
    """Return the awaited ranks that exceed their stage by a share `least` of the step."""
    means, suspects = measured.grid.mean_by_rank(measure), []
    for rows in peers_of(measured.grid, measured.stage):
        for index, middle, _ in above_peers(means[rows], least * measured.step_ns):
            own, others = rows[[index]], np.delete(rows, index)
            suspect = Suspect(
                rows=own,
                rank=int(measured.grid.ranks[rows[index]]),
                others=others,
                mean=float(means[rows[index]]),
                middle=middle,
                excess=_excess(measured.grid, measure, own, others),
            )
            if _is_awaited(measured, suspect):
                suspects.append(replace(suspect, kind=kind_of(measured, suspect)))
    return joined_ties(suspects, measured.common_wait_caused)


def _excess(grid: HeatArrays, measure: str, rows: Ints, others: Ints) -> Floats:
    """Return the ns per step of some ranks' median above others'; 0 if below or unknown."""
    difference = grid.middle(measure, rows) - grid.middle(measure, others)
    return np.maximum(np.nan_to_num(difference), 0)


def _compute_kind(measured: Measurements, of: Suspect) -> FindingKind:
    """Return "hot_expert" if more tokens explain a suspect's compute, else "straggler"."""
    more = _more_tokens(measured, of)
    # Peers may compute nothing: then no share of tokens explains the compute.
    is_hot = more > _LEAST_HOT and more * of.middle > _HOT * of.cost
    return "hot_expert" if is_hot else "straggler"


def _more_tokens(measured: Measurements, of: Suspect) -> float:
    """Return by which share a rank has more expert tokens than the median of its peers.

    0.1 is 10 % more; negative for fewer; 0 if unknown.
    """
    tokens = measured.received.get(of.rank)
    peers = median(measured.received, measured.ranks_of(of.others))
    return tokens / peers - 1 if tokens is not None and peers else 0.0


def _compute_finding(measured: Measurements, of: Suspect) -> Finding:
    """Return the finding on a straggler, or on a rank with hot experts."""
    others = measured.ranks_of(of.others)
    is_hot = of.kind == "hot_expert"
    exchange = measured.longer(of.rank) if is_hot else None
    excess = of.cost + (exchange or 0.0)
    evidence = Evidence(
        stage=_stage(measured, of),
        tag="EP" if is_hot else None,
        compute_ns=of.mean,
        peers_compute_ns=of.middle,
        expert_bytes=measured.received.get(of.rank),
        peers_expert_bytes=median(measured.received, others),
        longer_exchange_ns=exchange,
        **_waits(measured, of.rank, others),
        **_steps(measured, "compute_ns", of),
    )
    cost, count = excess * of.share, len(of.ranks)
    if is_hot:
        work = per_step(cost, measured.step_ns, "compute and all-to-all", excess)
        text = (
            f"{_named(of)} {plural(count, 'has')} hot experts: "
            f"{100 * _more_tokens(measured, of):.0f} % more expert tokens than "
            f"{of.its} peers, +{work}."
        )
        return finding(measured, "hot_expert", of.ranks, cost, text, evidence)
    work = per_step(cost, measured.step_ns, "compute", excess, of.longer)
    verb = "is a straggler" if count == 1 else "are stragglers"
    peers = f"same work as {of.its} peers" if of.middle else f"{of.its} peers compute nothing"
    text = f"{_named(of)} {verb}: {peers}, +{work}."
    return finding(measured, "straggler", of.ranks, cost, text, evidence)


def _idle_finding(measured: Measurements, of: Suspect) -> Finding:
    """Return the finding on ranks that are idle longer, as their hosts launch work late."""
    peers = measured.ranks_of(of.others)
    cause, cause_ns = idle.cause_of_longer(measured.idle, of.rank, peers, of.longer)
    evidence = Evidence(
        stage=_stage(measured, of),
        idle_ns=of.mean,
        peers_idle_ns=of.middle,
        idle_cause=cause,
        idle_cause_ns=cause_ns,
        **_waits(measured, of.rank, peers),
        **_steps(measured, "idle_ns", of),
    )
    cost, ranks = of.cost * of.share, named_ranks(of.ranks)
    if measured.is_host_run:
        verb = "are" if of.tied else "is"
        about = idle.BY_CAUSE
        why = about[cause or "unknown"].on_host or about["unknown"].on_host
        reason = f"{_named(of)} {verb} idle longer than {of.its} peers ({why}): "
    else:
        hosts = f"The hosts of {ranks} launch" if of.tied else f"The host of {ranks} launches"
        why = f" ({idle.BY_CAUSE[cause].text})" if cause not in (None, "unknown") else ""
        reason = f"{hosts} late{why}: the device is idle longer than {of.its} peers, "
    longer = per_step(cost, measured.step_ns, excess=of.cost, per_rank=of.longer)
    text = f"{reason}+{longer}."
    return finding(measured, "jittery_host", of.ranks, cost, text, evidence)


def _stage_finding(measured: Measurements, of: Suspect) -> Finding:
    """Return the finding on pipeline stages with more work than the others."""
    names = sorted({measured.stage.get(rank, 0) for rank in of.ranks})
    count = len(names)
    evidence = Evidence(
        stage=names[0] if count == 1 else None,
        tag="PP",
        compute_ns=of.mean,
        peers_compute_ns=of.middle,
        **_steps(measured, "compute_ns", of),
    )
    cost = of.cost * of.share
    text = (
        f"Pipeline {plural(count, 'stage')} {ranges(names)} {plural(count, 'has')} more work "
        f"than the others, which wait for {'it' if count == 1 else 'them'}: "
        f"+{per_step(cost, measured.step_ns, 'compute', of.cost)}."
    )
    return finding(measured, "imbalanced_stage", of.ranks, cost, text, evidence)


_FINDINGS: dict[FindingKind, Callable[[Measurements, Suspect], Finding]] = {
    "straggler": _compute_finding,
    "hot_expert": _compute_finding,
    "jittery_host": _idle_finding,
    "imbalanced_stage": _stage_finding,
}


def _named(of: Suspect) -> str:
    """Return "Rank 5", or "Ranks 3, 5", to begin a sentence."""
    return named_ranks(of.ranks).capitalize()


def _stage(measured: Measurements, of: Suspect) -> int | None:
    """Return the stage of a suspect's ranks; None if they are of several."""
    stages = {measured.stage.get(rank) for rank in of.ranks}
    return stages.pop() if len(stages) == 1 else None


def finding(
    measured: Measurements,
    kind: FindingKind,
    ranks: tuple[int, ...],
    cost: float,
    text: str,
    evidence: Evidence,
) -> Finding:
    """Return a finding; `cost` is in ns per step, `text` is the sentence that is shown."""
    return Finding(
        kind=kind,
        text=text,
        ranks=ranks,
        cost_ns=cost,
        share=cost / measured.step_ns,
        confidence=confidence(
            cost,
            evidence.spread_ns,
            ranks=len(measured.grid.ranks),
            is_matched=bool(measured.waits),
        ),
        evidence=evidence,
    )


def _steps(measured: Measurements, measure: str, of: Suspect) -> dict[str, Any]:
    """Return `steps` and `spread_ns` of the evidence of a suspect.

    These are the number of steps where `measure` is known of the suspect and its peers, and the
    standard deviation over steps of the difference, or of the excess of ranks found together.
    """
    grid = measured.grid
    difference = grid.middle(measure, of.rows) - grid.middle(measure, of.others)
    is_joined = of.together != 1
    return {
        "steps": int((~np.isnan(difference)).sum()),
        "spread_ns": spread(of.excess if is_joined else difference),
    }


def _is_awaited(measured: Measurements, of: Suspect) -> bool:
    """Whether the others wait for the rank, for at least half of its cost."""
    own = measured.waits.get(of.rank)
    peers = median(measured.waits, measured.ranks_of(of.others))
    return own is not None and peers is not None and peers - own >= of.cost / 2


def _waits(measured: Measurements, rank: int, others: Sequence[int]) -> dict[str, Any]:
    """Return the wait of a rank and the median wait of others as evidence, in ns."""
    return {
        "wait_ns": measured.waits.get(rank),
        "peers_wait_ns": median(measured.waits, others),
    }
