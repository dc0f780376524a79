"""Options of critical paths."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastcomm.checks import RANK
from fastcomm.option_fields import (
    COMPAT,
    OUTPUT,
    RULES,
    WINDOW,
    CheckedOptions,
    option_field,
)
from fastcomm.options import EditOptions, Window, compat_field


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions(Window):
    """The window, the ranks and the rules of a critical path.

    With `compat` or `deps` the path is of one rank.
    """

    rank: int | None = option_field(
        "Analyze this rank alone. Default: all ranks, joined by collectives.",
        group=WINDOW,
        limits=RANK,
        is_common=True,
    )
    compat: Literal["hta"] | None = compat_field("HTA, with the first step by default", "hta")
    zero_weight_launches: bool = option_field(
        "Add HTA's edges of weight 0 from every launch (with --compat hta).",
        False,
        group=COMPAT,
        needs=("compat hta",),
    )
    deps: Literal["data"] | None = option_field(
        "Also report operators that could start earlier if they waited only for their data.",
        group=RULES,
        metavar="data",
    )
    execution_trace: str | Path | None = option_field(
        "Execution trace for --deps. Default: torch_et_RANK.json or pytorch_et_RANK.json.",
        group=RULES,
        path="file",
        needs=("deps",),
    )

    @property
    def is_of_one_rank(self) -> bool:
        """Whether the path is of one rank even if the ranks of the run can be joined."""
        return any(value is not None for value in (self.rank, self.compat, self.deps))


@dataclass(frozen=True, kw_only=True)  # no slots, for classes with a second base
class WhatIfOptions(EditOptions):
    """Changes of a step, and what is tried besides."""

    bottleneck: bool = option_field(
        "Report how much each operation of the critical path costs the step.",
        False,
        group=OUTPUT,
        is_common=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionTraceOptions(CheckedOptions):
    """Which execution traces a path goes through; see `execution_trace_path`."""

    rank: int | None = None
    alone: bool = False
    keep_going: bool = False
