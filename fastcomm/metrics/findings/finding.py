"""A finding: a cause of lost time or a symptom, with all that is shown of it.

The cost of a cause is the time per step beyond that of peers, at most about what its fix saves;
ranks and stages that delay the same steps share that time (`suspects.sharing`). The cost of a
symptom is the time per step that it takes. Costs are ns, as means over steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from fastcomm.options import EditOptions
from fastcomm.trace.run_traces import named_ranks
from fastcomm.units import format_ns, percent
from fastcomm_kernels.arrays import Floats

Confidence = Literal["high", "medium", "low"]
Unit = Literal["ns", "bytes", "bytes/s", "share"]

# Minimum share of the step of a finding, and of a cause of low confidence.
LEAST_FINDING = 0.005
LEAST_UNSURE = 0.01
# From this share of the excess on, a cost is printed as the whole excess.
_WHOLE = 0.99
# Spreads between steps that a cost of medium and of high confidence exceeds: two are the usual
# limit of chance (one case in 20).
_MEDIUM, _HIGH = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A value of the evidence: its key in JSON; with a label and a unit, pages show it."""

    key: str
    value: float | str | None
    label: str = ""
    unit: Unit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """The edit of a what-if that removes a finding, and what it does, as a page says it."""

    edit: EditOptions
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """The command to run next, and what it tells.

    `of` are the ranks that it is about: "all" where it goes through all ranks, "first" the
    first of the finding, else the ranks that communicate for a parallelism.
    """

    command: str
    purpose: str
    options: tuple[str, ...] = ()
    of: Literal["all", "first"] | None = "all"
    tag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEvents:
    """The events of a finding's ranks that show it; the costliest is the moment.

    "late" are collectives in which others wait for the rank, "transfers" what communication
    takes without waiting, of some parallelisms only.
    """

    events: Literal["late", "transfers", "communication", "copies"]
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """What the picture of a finding compares.

    "ranks": a measure of its ranks with that of all others; "rates": facts of the evidence, by
    their keys; "step" and "idle": the parts of the mean step, and of its idle time.
    """

    of: Literal["ranks", "rates", "step", "idle"]
    measure: str = ""
    noun: str = ""
    rates: tuple[tuple[str, str], ...] = ()  # label, and key of the evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of lost time, or one symptom."""

    kind: str
    text: str
    ranks: tuple[int, ...]
    cost_ns: float  # of a step
    share: float  # of the mean step
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    is_symptom: bool = False  # whether it names where time goes, without the cause
    counts_as_cause: bool = False  # a symptom that comes among the causes
    next: Next | None = None
    fix: Fix | None = None
    moment: ShownEvents | None = field(default_factory=lambda: ShownEvents(events="late"))
    picture: Sketch | None = None

    def value(self, key: str) -> Any:
        """Return a value of the evidence; None if it has none of this key."""
        return next((fact.value for fact in self.evidence if fact.key == key), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        names = ("kind", "text", "ranks", "cost_ns", "share", "confidence")
        evidence = {fact.key: fact.value for fact in self.evidence}
        return {**{name: getattr(self, name) for name in names}, "evidence": evidence}


def as_peers(ranks: Sequence[int]) -> Fix | None:
    """Return the fix that makes a rank as fast as its peers; None for several ranks."""
    if len(ranks) != 1:
        return None
    edit = EditOptions(heal=(f"rank:{ranks[0]}",))
    return Fix(edit=edit, text=f"With {named_ranks(ranks)} as fast as its peers")


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings that cost enough: causes before symptoms, each by falling cost."""
    enough = [finding for finding in findings if finding.share >= _least(finding)]
    return tuple(
        sorted(
            enough,
            key=lambda finding: (
                finding.is_symptom and not finding.counts_as_cause,
                -finding.cost_ns,
                finding.kind,
                finding.ranks,
            ),
        )
    )


def _least(finding: Finding) -> float:
    is_unsure = finding.confidence == "low" and not finding.is_symptom
    return LEAST_UNSURE if is_unsure else LEAST_FINDING


def spread(costs: Floats) -> float | None:
    """Return the standard deviation of costs per step, NaN ignored; None for fewer than two."""
    values = costs[~np.isnan(costs)]
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def steps_and_spread(steps: int, spread_ns: float | None) -> tuple[Evidence, ...]:
    """Return the steps that a cost is a mean of, and its spread between them, as evidence."""
    return (
        Evidence(key="steps", value=steps),
        Evidence(key="spread_ns", value=spread_ns, label="spread between steps", unit="ns"),
    )


def confidence(
    cost: float, spread_ns: float | None, *, ranks: int, is_matched: bool
) -> Confidence:
    """Return the confidence in a cost.

    Low: one rank, one step, or a cost within twice the spread between steps. High: matched
    across ranks, and above three times the spread. Medium otherwise.

    Parameters
    ----------
    cost
        Time per step, ns.
    spread_ns
        Spread of the cost between steps; None with one step.
    ranks
        Number of ranks that were measured.
    is_matched
        Whether collectives were matched across ranks.

    """
    if ranks < 2 or spread_ns is None or cost <= _MEDIUM * spread_ns:  # noqa: PLR2004 - one rank
        return "low"
    return "high" if is_matched and cost > _HIGH * spread_ns else "medium"


def median(values: Mapping[int, float], ranks: Sequence[int]) -> float | None:
    """Return the median of the values of some ranks; None where no value is known."""
    present = [values[rank] for rank in ranks if rank in values]
    return float(np.median(present)) if present else None


def per_step(
    cost: float,
    step: float,
    kind: str = "",
    excess: float | None = None,
    per_rank: float | None = None,
) -> str:
    """Return a cost as text: "2.16 ms compute per step (2.7 % of the step)".

    Parameters
    ----------
    cost, step
        Cost and mean step in ns.
    kind
        The kind of time.
    excess
        Additional time of the work in ns, if others share the cost.
    per_rank
        Additional time of each rank in ns, if several are late in turns.

    """
    total = cost if excess is None or cost >= _WHOLE * excess else excess
    unit, possessive = f"{kind and ' '}{kind} per step", "its"
    work = f"{format_ns(total)}{unit}"
    if per_rank is not None and per_rank < _WHOLE * total:
        work, possessive = (
            f"{format_ns(per_rank)}{unit} each, in turns: together {format_ns(total)}",
            "their",
        )
    if total != cost:
        work += f"; others delay the same steps, {possessive} share is {format_ns(cost)}"
    return f"{work} ({percent(cost / step)} of the step)"


def findings_table(findings: Sequence[Finding]) -> pa.Table:
    """Return a row per finding, in order; without findings it has the columns as well."""
    names = [("kind", pa.string()), ("text", pa.string()), ("ranks", pa.list_(pa.int64()))]
    names += [("cost_ns", pa.float64()), ("share", pa.float64()), ("confidence", pa.string())]
    names += [("stage", pa.int64()), ("group", pa.string()), ("tag", pa.string())]
    rows = [{**(row := finding.to_dict()), **row["evidence"]} for finding in findings]
    return pa.Table.from_pylist(rows, schema=pa.schema(names))
