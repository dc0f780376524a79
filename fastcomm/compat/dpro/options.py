"""Options of lists of operations and of replays of dPRO trials."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastcomm.checks import RANKS, REPEAT, WHOLE, Range
from fastcomm.critical_path.options import WhatIfOptions
from fastcomm.option_fields import OUTPUT, PREDICTIONS, READING, CheckedOptions, option_field
from fastcomm.options import compat_field

# How clocks of the hosts of a dPRO trial are aligned.
HostClocks = Literal["auto", "sync", "causality", "variance", "drift", "none"]
# Rules by which steps are found in a trace of dPRO.
StepRule = Literal["update", "seed", "operator", "gap", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions(CheckedOptions):
    """How a dPRO trial is read."""

    host_clocks: HostClocks = option_field(
        "Alignment of host clocks: auto, sync, causality, variance, drift or none.",
        "auto",
        group=READING,
        metavar="METHOD",
        is_common=True,
    )
    nccl_algorithm: Literal["ring", "tree", "none"] | None = option_field(
        "How NCCL sends a tensor: by rings (default, if known), trees, or as one operation per "
        "rank.",
        group=READING,
    )
    clip_updates: bool = option_field(
        "Start each update after the previous one.", False, group=READING
    )
    barrier: bool = option_field("Start updates after all communication.", False, group=READING)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReplayOptions(TrialOptions, WhatIfOptions):
    """How a dPRO trial is read and replayed, and what is predicted of its step."""

    compat: Literal["dpro"] | None = compat_field("dPRO", "dpro")
    repeat: int = option_field(
        "Number of times that the step is replayed, one after the other.",
        1,
        group=OUTPUT,
        limits=REPEAT,
        is_common=True,
    )
    unlimited_updates: bool = option_field(
        "Run all updates of a rank at once.", False, group=PREDICTIONS
    )
    tensors: tuple[int, ...] | None = option_field(
        "Replay the communication of these tensors alone, as in 0-7,12.",
        group=PREDICTIONS,
        limits=WHOLE,
        may_be_empty=False,
    )
    daydream: bool = option_field(
        "Also predict as Daydream does: one rank alone, tensors take bytes / bandwidth.",
        False,
        group=PREDICTIONS,
    )
    hosts: int | None = option_field(
        "Also predict the step on N hosts with one GPU each.",
        group=PREDICTIONS,
        limits=Range(2, RANKS.most),
    )
    fuse: int | None = option_field(
        "Try N ways of sending several tensors at once, and predict the best.",
        group=PREDICTIONS,
        limits=RANKS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """Which operations are printed, and the path of a trial to compare with."""

    sort: bool = option_field(
        "Sort operations by mean duration, longest first.",
        False,
        group=OUTPUT,
        is_common=True,
        not_with=("against",),
    )
    top: int | None = None
    against: Path | None = option_field(
        "Compare with OTHER: operations added, removed, faster or slower.",
        group=OUTPUT,
        metavar="OTHER",
        is_common=True,
    )
