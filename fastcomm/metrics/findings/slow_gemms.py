"""GEMMs that take longer than they need to, as the FLOPs of kernels tell."""

from collections.abc import Sequence
from typing import Protocol

from fastcomm.metrics.findings.finding import Evidence, Finding, Next

KIND = "slow_gemm"


class Gemms(Protocol):
    """GEMMs of one size, as an analysis of kernels finds them."""

    @property
    def problem(self) -> str:
        """Their size: "4096x1024x512"."""

    @property
    def text(self) -> str:
        """The sentence, without its period."""

    @property
    def share(self) -> float:
        """Their share of the step."""

    @property
    def cost_share(self) -> float:
        """The share of the step that they could save."""

    @property
    def reached(self) -> float:
        """The share of their bound that they reach."""

    @property
    def plausible(self) -> float:
        """The share of their bound that they could reach."""

    @property
    def is_measured(self) -> bool:
        """Whether this share was measured on such a GPU."""


def slow_gemms(gemms: Sequence[Gemms], ranks: tuple[int, ...], step_ns: float) -> list[Finding]:
    """Return a finding per size of GEMMs of some ranks, whose mean step is `step_ns`."""
    return [
        Finding(
            kind=KIND,
            text=f"{one.text}.",
            ranks=ranks,
            cost_ns=one.cost_share * step_ns,
            share=one.cost_share,
            confidence="medium" if one.is_measured else "low",
            evidence=(
                Evidence(key="problem", value=one.problem),
                Evidence(key="gemm_ns", value=one.share * step_ns),
                Evidence(key="reached", value=one.reached),
                Evidence(key="plausible", value=one.plausible),
            ),
            next=Next(
                command="kernels",
                options=("--by", "operator"),
                purpose="which operators launch them",
                of=None,
            ),
        )
        for one in gemms
    ]
