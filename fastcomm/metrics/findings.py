"""What is wrong with a run: each with its subject, its evidence and its price.

A cost is what a step takes longer because of it, in ns: what the subject needs more than its
peers, where others wait for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["slow_gpu", "slow_link", "jittery_host", "imbalanced_stage", "hot_expert"]
KINDS: tuple[Kind, ...] = (
    "slow_gpu",
    "slow_link",
    "jittery_host",
    "imbalanced_stage",
    "hot_expert",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whom a finding is about; what does not apply is null."""

    ranks: tuple[int, ...]
    stage: int | None = None  # of the pipeline
    group: str | None = None  # description of the group whose link it is
    tag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: Kind
    subject: Subject
    cost_ns: float  # of a step
    cost_share: float  # of the mean step
    evidence: Mapping[str, float | None] = field(default_factory=dict)
    words: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def in_order(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """The costliest first."""
    return tuple(sorted(found, key=lambda each: (-each.cost_ns, each.kind, each.subject.ranks)))
