"""Search for the fastest way to split a model over a cluster that fits into memory.

There are two searches. The modules `plan*` price every strategy that a trainer could run (a
`Plan`) by times of kernels and collectives that were measured on GPUs. The package `internevo`
searches the strategies of InternEvo by closed formulas, on any cluster. `search` takes the one
that fits the question.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a sum: of the time of a step, or of the memory of a rank."""

    name: str
    value: float
    text: str  # how the value comes about
    level: int = 1  # 0 is the sum, 1 a part of it
