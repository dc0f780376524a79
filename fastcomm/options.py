"""Options that several questions share: how traces are read, which window, what changes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from fastcomm.checks import RANKS, WHOLE
from fastcomm.errors import ConfigError
from fastcomm.option_fields import (
    BATCH,
    COMPAT,
    COST,
    EDITS,
    LAYOUT,
    MEASUREMENT,
    READING,
    WINDOW,
    CheckedOptions,
    option_field,
)
from fastcomm.units import Duration

StepBoundary = Literal["auto", "device", "host"]


def _size(parallelism: str, row: tuple[str, str] = ("", "")) -> Any:
    """Return the field of a size; the help has one row for all sizes."""
    text = f"{parallelism} size."
    return option_field(text, group=LAYOUT, limits=RANKS, is_common=True, row=row)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(CheckedOptions):
    """How the traces of a run are found and read."""

    ranks: tuple[int, ...] | None = option_field(
        "Read only these ranks, as in 0-7,12.", group=LAYOUT, limits=WHOLE, is_common=True
    )
    tp: int | None = _size(
        "Tensor-parallel",
        (
            "--tp, --pp, --dp, --ep, --cp N",
            "Sizes of the parallelisms, where traces do not name their process groups.",
        ),
    )
    pp: int | None = _size("Pipeline-parallel")
    dp: int | None = _size("Data-parallel")
    ep: int | None = _size("Expert-parallel")
    cp: int | None = _size("Context-parallel")
    order: str | None = option_field(
        "Rank order: megatron (default), deepspeed, torchtitan, vllm, or as in tp-cp-ep-dp-pp.",
        group=LAYOUT,
        metavar="ORDER",
    )
    config: str | Path | None = option_field(
        "Read settings of the run (parallelism, tags, kernels, link) from a TOML file.",
        group=LAYOUT,
        path="file or URL",
    )
    guess_tags: bool = option_field(
        "Guess the parallelism of untagged process groups from their traffic.",
        False,
        group=LAYOUT,
    )
    iteration_regex: str | None = option_field(
        "Names of the events that mark steps. The first group is the step number.",
        group=READING,
        is_regex=True,
    )
    step_boundary: StepBoundary = option_field(
        "Where a step begins and ends: at its first GPU work, or its mark on the host.",
        "auto",
        group=WINDOW,
    )
    allow_truncated: bool = option_field(
        "Read truncated traces up to the last complete event.", False, group=READING
    )
    keep_going: bool = option_field(
        "Skip ranks that cannot be read, list them, and exit with code 3.",
        False,
        group=READING,
    )

    @property
    def is_plain(self) -> bool:
        """Whether ranks are read without any rule of the user."""
        return replace(self, ranks=None, keep_going=False) == ReadOptions()


def steps_field(**about: Any) -> Any:
    """Return the field of the numbers of the steps that count."""
    text = "Analyze only these steps, as in 4-6,12."
    return option_field(text, group=WINDOW, limits=WHOLE, is_common=True, **about)


def gpu_field(**about: Any) -> Any:
    """Return the field of a GPU whose peaks count."""
    text = "GPU whose peaks FLOPs are compared with (metrics: --flops). Default: by the traces."
    return option_field(text, group=MEASUREMENT, metavar="NAME", **about)


def model_field(**about: Any) -> Any:
    """Return the field of a transformer model."""
    text = (
        "Preset (internlm-7b, deepseek-v3, ...), size (7B), TOML file, or Hugging Face "
        "config.json."
    )
    return option_field(
        text, group=BATCH, metavar="MODEL", is_common=True, may_be_empty=False, **about
    )


def compat_field(tool: str, metavar: str) -> Any:
    """Return the field of another tool whose results are reproduced."""
    text = f"Reproduce the results of another tool exactly. It is {tool}."
    return option_field(text, group=COMPAT, metavar=metavar)


def cluster_field(default: str, **about: Any) -> Any:
    """Return the field of a cluster; `default` is what holds without it."""
    text = "Cluster: a800, dgx-h100 (or h100), gb200-nvl72, ..., or a TOML file. Default: "
    return option_field(
        f"{text}{default}.", group=MEASUREMENT, metavar="NAME|FILE", is_common=True, **about
    )


def exchange_costs_field(more: str = "", **about: Any) -> Any:
    """Return the field of fitted constants of expert all-to-alls; `more` ends its help."""
    return option_field(
        f"Constants that dispatch evaluate --calibrate --json has written.{more}",
        group=COST,
        path="file",
        metavar="FILE",
        **about,
    )


_OF_EVENTS: dict[str, Any] = {"needs": ("annotation",), "not_with": ('--annotation ""',)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(CheckedOptions):
    """The part of a trace that is looked at; by default the second step, or the only one."""

    unchecked: ClassVar[tuple[str, ...]] = ("instance",)

    step: int | None = option_field(
        "Number of the step. Default: the second, or the only one.",
        group=WINDOW,
        limits=WHOLE,
        is_common=True,
    )
    annotation: str | None = option_field(
        'Use the events with TEXT in their name as window; "" is the whole trace.',
        group=WINDOW,
        is_common=True,
    )
    instance: int | tuple[int, ...] | None = option_field(
        "Which of the --annotation events, from 0; I:J spans I to J inclusive.",
        group=WINDOW,
        metavar="I[:J]",
        **_OF_EVENTS,
    )
    exact: bool = option_field(
        "Match the whole name with --annotation.", False, group=WINDOW, **_OF_EVENTS
    )
    data_load_events: tuple[str, ...] = option_field(
        "Names of events that load data, instead of the usual ones.",
        (),
        group=WINDOW,
        is_regex=True,
    )

    def __post_init__(self) -> None:
        """Check that at most one part is named."""
        CheckedOptions.__post_init__(self)
        if self.step is not None and self.annotation is not None:
            raise ConfigError("step and annotation contradict each other; give one of them")


def _edit(text: str, metavar: str) -> Any:
    """Return the field of a list of edits."""
    return option_field(text, (), group=EDITS, metavar=metavar, is_common=True)


@dataclass(frozen=True, kw_only=True)  # no slots, for classes with a second base
class EditOptions(CheckedOptions):
    """Changes of a step whose effect is predicted, in texts as `fastcomm.graph.edits` has them.

    `scale` and `set` are also taken as a dictionary: {"comm:TP": 0.5}.
    """

    scale: tuple[str, ...] = _edit(
        "Multiply durations, as in comm:TP=0.5 or kernel:/gemm/=0.8.", "WHAT=FACTOR"
    )
    set: tuple[str, ...] = _edit(
        "Set durations or the bandwidth of a link, as in link:TP=800Gbit/s.", "WHAT=VALUE"
    )
    heal: tuple[str, ...] = _edit(
        "Make a rank, stage or link as fast as its peers: rank:5, stage:2, link:3-7.", "WHAT"
    )
    remove: tuple[str, ...] = _edit(
        "Remove work or delays: op:Broadcast, wait:TP, launches, gaps.", "WHAT"
    )
    overlap: tuple[str, ...] = _edit(
        "Hide the communication of a parallelism under compute.", "TAG"
    )
    fuse_below: str | Duration | None = option_field(
        "Fuse neighboring kernels shorter than TIME, as in 5us.", group=EDITS
    )
    edits: str | Path | None = option_field(
        'Apply the edits of a TOML file first: scale = ["comm:TP=0.5"].',
        group=EDITS,
        path="file or URL",
    )

    def __post_init__(self) -> None:
        """Write dictionaries as texts, and check the type of each value."""
        for name in ("scale", "set"):
            if isinstance(value := getattr(self, name), Mapping):
                texts = tuple(f"{target}={number}" for target, number in value.items())
                object.__setattr__(self, name, texts)
        CheckedOptions.__post_init__(self)
