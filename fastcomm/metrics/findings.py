"""What is wrong with a run: each with its subject, its evidence and its price.

A cost is what a step takes longer because of it, in ns: what the subject needs more than its
peers, where others wait for it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
class Evidence:
    """The numbers behind a finding; which of them are known depends on its kind."""

    compute_ns: float | None = None  # of the subject, a step
    peers_compute_ns: float | None = None
    idle_ns: float | None = None  # in which nothing runs on the device
    peers_idle_ns: float | None = None
    wait_ns: float | None = None  # for others, in collectives
    peers_wait_ns: float | None = None
    expert_bytes: float | None = None  # of the all-to-alls of expert parallelism
    peers_expert_bytes: float | None = None
    longer_exchange_ns: float | None = None  # than the all-to-alls of other groups
    bus_bw: float | None = None  # bytes per second, of the slowest class of collectives
    peers_bus_bw: float | None = None
    slow_groups: int | None = None  # that have the subject's ranks in common


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: Kind
    subject: Subject
    cost_ns: float  # of a step
    cost_share: float  # of the mean step
    evidence: Evidence
    words: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def in_order(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """The costliest first."""
    return tuple(sorted(found, key=lambda each: (-each.cost_ns, each.kind, each.subject.ranks)))
