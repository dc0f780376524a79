"""Ranks and pipeline stages whose own work takes longer than that of their peers.

Own work is compute, and time in which the device is idle. Both are durations on one clock, so
that only `late_rank` needs aligned clocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.findings import (
    LEAST_FINDING,
    CausedTogether,
    Evidence,
    Finding,
    Kind,
    Rows,
    Suspect,
    confidence,
    joined_ties,
    median,
    sharing,
    spread,
)
from fastcomm.metrics.outliers import LEAST_SHARE, HeatArrays, above_peers, peers_of
from fastcomm.metrics.skew import RankWaits
from fastcomm.trace.run import named_ranks, ranges
from fastcomm.units import format_ns, percent, plural
from fastcomm_kernels.arrays import Floats

# A stage's work differs by itself: the first embeds, the last has the head.
LEAST_STAGE = 0.015
# Of what a rank computes more, the share that it gets more to do for, to be called hot.
_HOT = 1 / 3
_LEAST_HOT = 0.05
# Of a cost, what others wait in collectives: with less, messages hand the delay on.
_LEAST_CAUSED = 0.25
# Of what its work takes longer: a share that is so large is not told apart.
_WHOLE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The measurements that ranks are judged by."""

    grid: HeatArrays
    stage: Mapping[int, int]  # of ranks
    received: Mapping[int, float]  # bytes of expert parallelism that each rank gets, a step
    waits: Mapping[int, float]  # ns that each rank waits for others, a step
    caused: Mapping[int, float]  # ns that others wait for each rank alone, a step
    caused_together: CausedTogether
    # what a rank's exchanges with other experts take longer than those of other groups
    longer: Callable[[int], float | None]

    @property
    def step_ns(self) -> float:
        """The mean iteration time."""
        return self.grid.step_ns or 0.0

    def ranks_of(self, rows: NDArray[np.int64]) -> list[int]:
        """Return the ranks of some rows of the grid."""
        ranks: list[int] = self.grid.ranks[rows].tolist()
        return ranks


def own_work(known: Known) -> list[Finding]:
    """Return the stragglers, hot experts, late hosts and imbalanced stages of a run."""
    # Idle time varies by itself, as ranks wait for others between two collectives.
    suspects = [
        *_above(known, "compute_ns", LEAST_FINDING, _compute_kind),
        *_above(known, "idle_ns", LEAST_SHARE, lambda *_: "jittery_host"),
        *_imbalanced_stages(known),
    ]
    shared = [
        _at_most_awaited(known, each) for each in sharing(suspects, known.caused_together)
    ]
    return [_FINDINGS[each.kind](known, each) for each in shared]


def _at_most_awaited(known: Known, of: Suspect) -> Suspect:
    """Return the suspect with no more of its cost than others wait for it alone.

    Where all ranks vary, the next one is nearly as late: a fix gains little more than that
    wait. Delays that messages hand on are in no collective, and leave the cost as it is.
    """
    caused = known.caused.get(of.rank, 0.0)
    is_alone = of.kind in ("straggler", "jittery_host") and not of.tied and of.share == 1
    if not is_alone or not _LEAST_CAUSED * of.cost < caused < of.cost:
        return of
    return replace(of, share=caused / of.cost)


def late_rank(known: Known, waited: Sequence[RankWaits]) -> list[Finding]:
    """Return the rank that the others wait for, where neither compute nor idle time says why.

    `waited` is `over_tags` of all waits. The rank causes more than half of the wait, and twice
    as much as any other rank: in a group of two, each is last half of the time by chance.
    """
    if not waited or not known.step_ns:
        return []
    worst, *rest = waited
    others_ns = [each.caused_ns for each in rest]
    least = max(LEAST_SHARE * known.step_ns, sum(others_ns), 2 * max(others_ns, default=0))
    if worst.caused_ns <= least:
        return []
    others = [each.rank for each in rest]
    text = (
        f"Rank {worst.rank} is late: it is the last to arrive at "
        f"{percent(worst.last_share)} of its collectives, and others wait for it "
        f"for {_per_step(worst.caused_ns, known.step_ns)}."
    )
    evidence = Evidence(
        stage=known.stage.get(worst.rank),
        steps=len(known.grid.iterations),
        **_waits(known, worst.rank, others),
    )
    return [_finding(known, "late_rank", (worst.rank,), worst.caused_ns, text, evidence)]


def _imbalanced_stages(known: Known) -> list[Suspect]:
    """Return the pipeline stages that compute longest, if they stand out from the others.

    That is one suspect. Without that work the longest of the other stages would limit the step,
    so that the difference between these two is the cost.
    """
    means = known.grid.mean_by_rank("compute_ns")
    is_known = ~np.isnan(means)
    parts = [rows for rows in peers_of(known.grid, known.stage) if is_known[rows].any()]
    if len(parts) < 2:  # noqa: PLR2004 - nothing to compare with
        return []
    # Of a stage its median: one straggler in it is no imbalance.
    stages = np.array([_lower_median(means[rows]) for rows in parts])
    longest, rest = _standing_out(stages)
    rows, others = parts[longest[-1]], parts[rest]
    first, *tied = known.ranks_of(np.sort(np.concatenate([parts[each] for each in longest])))
    suspect = Suspect(
        kind="imbalanced_stage",
        rows=rows,
        rank=first,
        tied=tuple(tied),
        others=others,
        mean=float(stages[longest[-1]]),
        middle=float(stages[rest]),
        excess=_excess(known.grid, "compute_ns", rows, others),
    )
    return [suspect] if suspect.cost > LEAST_STAGE * known.step_ns else []


def _standing_out(stages: Floats) -> tuple[NDArray[np.int64], int]:
    """Return the places of the longest stages, and of the longest of the others.

    The widest gap between two stages divides them; at most half of the stages stand out.
    """
    order = np.argsort(-stages, kind="stable")
    gaps = stages[order[:-1]] - stages[order[1:]]
    count = int(np.argmax(gaps[: max(1, len(stages) // 2)])) + 1
    return order[:count], int(order[count])


def _lower_median(values: Floats) -> float:
    """Return the lower of two middle values, so that one straggler of two is not the stage."""
    known = np.sort(values[~np.isnan(values)])
    return float(known[(len(known) - 1) // 2]) if len(known) else np.nan


def _above(
    known: Known, measure: str, least: float, kind_of: Callable[[Known, Suspect], Kind]
) -> list[Suspect]:
    """Return the ranks whose mean is above their stage's by a share of the step."""
    means, found = known.grid.mean_by_rank(measure), []
    for rows in peers_of(known.grid, known.stage):
        for index, middle, _ in above_peers(means[rows], least * known.step_ns):
            own, others = rows[[index]], np.delete(rows, index)
            suspect = Suspect(
                rows=own,
                rank=int(known.grid.ranks[rows[index]]),
                others=others,
                mean=float(means[rows[index]]),
                middle=middle,
                excess=_excess(known.grid, measure, own, others),
            )
            if _is_awaited(known, suspect):
                found.append(replace(suspect, kind=kind_of(known, suspect)))
    return joined_ties(found, known.caused_together)


def _excess(grid: HeatArrays, measure: str, rows: Rows, others: Rows) -> Floats:
    """Return by how much the median of some ranks is above that of others, in each step."""
    difference = grid.middle(measure, rows) - grid.middle(measure, others)
    return np.maximum(np.nan_to_num(difference), 0)


def _compute_kind(known: Known, of: Suspect) -> Kind:
    """Whether a rank computes longer as it gets more expert tokens, or at the same work."""
    more = _more_tokens(known, of)
    return "hot_expert" if more > max(_LEAST_HOT, _HOT * of.cost / of.middle) else "straggler"


def _more_tokens(known: Known, of: Suspect) -> float:
    """Return by which share a rank gets more expert tokens than its peers; 0 if unknown."""
    tokens = known.received.get(of.rank)
    peers = median(known.received, known.ranks_of(of.others))
    return tokens / peers - 1 if tokens is not None and peers else 0.0


def _compute_finding(known: Known, of: Suspect) -> Finding:
    others = known.ranks_of(of.others)
    is_hot = of.kind == "hot_expert"
    exchange = known.longer(of.rank) if is_hot else None
    excess = of.cost + (exchange or 0.0)
    evidence = Evidence(
        stage=_stage(known, of),
        tag="EP" if is_hot else None,
        compute_ns=of.mean,
        peers_compute_ns=of.middle,
        expert_bytes=known.received.get(of.rank),
        peers_expert_bytes=median(known.received, others),
        longer_exchange_ns=exchange,
        **_waits(known, of.rank, others),
        **_steps(known, "compute_ns", of),
    )
    cost, count = excess * of.share, len(of.ranks)
    if is_hot:
        work = _per_step(cost, known.step_ns, "compute and all-to-all", excess)
        text = (
            f"{_named(of)} {plural(count, 'has')} hot experts: "
            f"{100 * _more_tokens(known, of):.0f} % more expert tokens than "
            f"{_its(of)} peers, +{work}."
        )
        return _finding(known, "hot_expert", of.ranks, cost, text, evidence)
    work = _per_step(cost, known.step_ns, "compute", excess, of.longer)
    what = "is a straggler" if count == 1 else "are stragglers"
    text = f"{_named(of)} {what}: same work as {_its(of)} peers, +{work}."
    return _finding(known, "straggler", of.ranks, cost, text, evidence)


def _idle_finding(known: Known, of: Suspect) -> Finding:
    evidence = Evidence(
        stage=_stage(known, of),
        idle_ns=of.mean,
        peers_idle_ns=of.middle,
        **_waits(known, of.rank, known.ranks_of(of.others)),
        **_steps(known, "idle_ns", of),
    )
    cost, ranks = of.cost * of.share, named_ranks(of.ranks)
    hosts = f"The hosts of {ranks} launch" if of.tied else f"The host of {ranks} launches"
    text = (
        f"{hosts} late: the device is idle longer than {_its(of)} peers, "
        f"+{_per_step(cost, known.step_ns, excess=of.cost, each=of.longer)}."
    )
    return _finding(known, "jittery_host", of.ranks, cost, text, evidence)


def _stage_finding(known: Known, of: Suspect) -> Finding:
    names = sorted({known.stage.get(rank, 0) for rank in of.ranks})
    count = len(names)
    evidence = Evidence(
        stage=names[0] if count == 1 else None,
        tag="PP",
        compute_ns=of.mean,
        peers_compute_ns=of.middle,
        **_steps(known, "compute_ns", of),
    )
    cost = of.cost * of.share
    text = (
        f"Pipeline {plural(count, 'stage')} {ranges(names)} {plural(count, 'has')} more work "
        f"than the others, which wait for {'it' if count == 1 else 'them'}: "
        f"+{_per_step(cost, known.step_ns, 'compute', of.cost)}."
    )
    return _finding(known, "imbalanced_stage", of.ranks, cost, text, evidence)


_FINDINGS: dict[Kind, Callable[[Known, Suspect], Finding]] = {
    "straggler": _compute_finding,
    "hot_expert": _compute_finding,
    "jittery_host": _idle_finding,
    "imbalanced_stage": _stage_finding,
}


def _named(of: Suspect) -> str:
    """Return "Rank 5", or "Ranks 3, 5", to begin a sentence."""
    return named_ranks(of.ranks).capitalize()


def _its(of: Suspect) -> str:
    return "their" if of.tied else "its"


def _stage(known: Known, of: Suspect) -> int | None:
    """Return the stage of the ranks of a suspect; None where they are of several."""
    stages = {known.stage.get(rank) for rank in of.ranks}
    return stages.pop() if len(stages) == 1 else None


def _finding(
    known: Known, kind: Kind, ranks: tuple[int, ...], cost: float, text: str, evidence: Evidence
) -> Finding:
    return Finding(
        kind=kind,
        text=text,
        ranks=ranks,
        cost_ns=cost,
        share=cost / known.step_ns,
        confidence=confidence(
            cost,
            evidence.spread_ns,
            ranks=len(known.grid.ranks),
            is_matched=bool(known.waits),
        ),
        evidence=evidence,
    )


def _per_step(
    cost: float,
    step: float,
    what: str = "",
    excess: float | None = None,
    each: float | None = None,
) -> str:
    """Return a cost in words: "2.16 ms compute per step (2.7 % of the step)".

    `excess` is how much longer the work takes, where others share its cost; `each` how much
    longer that of each rank takes, where several are late in turns.
    """
    total = cost if excess is None or cost >= _WHOLE * excess else excess
    unit, whose = f"{what and ' '}{what} per step", "its"
    work = f"{format_ns(total)}{unit}"
    if each is not None and each < _WHOLE * total:
        work, whose = (
            f"{format_ns(each)}{unit} each, in turns: together {format_ns(total)}",
            "their",
        )
    if total != cost:
        work += f"; others delay the same steps, {whose} share is {format_ns(cost)}"
    return f"{work} ({percent(cost / step)} of the step)"


def _steps(known: Known, measure: str, of: Suspect) -> dict[str, Any]:
    """Return how many steps a difference was measured over, and its spread between them."""
    difference = known.grid.middle(measure, of.rows) - known.grid.middle(measure, of.others)
    is_joined = of.together != 1
    return {
        "steps": int((~np.isnan(difference)).sum()),
        "spread_ns": spread(of.excess if is_joined else difference),
    }


def _is_awaited(known: Known, of: Suspect) -> bool:
    """Whether the others wait for a rank: by half of what it takes longer, or more."""
    own, peers = known.waits.get(of.rank), median(known.waits, known.ranks_of(of.others))
    return own is not None and peers is not None and peers - own >= of.cost / 2


def _waits(known: Known, rank: int, others: Sequence[int]) -> dict[str, Any]:
    return {"wait_ns": known.waits.get(rank), "peers_wait_ns": median(known.waits, others)}
