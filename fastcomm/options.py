"""Options of all analyses: frozen dataclasses that the command line and the API both build.

A field has the name and the default of the command's option: `--link-bandwidth` is
`link_bandwidth`. Values are checked when an object is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from fastcomm.checks import FACTOR, GPUS_PER_NODE, RANK, RANKS, REPEAT, TOKENS, WHOLE, Range
from fastcomm.errors import ConfigError
from fastcomm.option_fields import (
    COMPAT,
    EDITS,
    LAYOUT,
    MEASUREMENT,
    OUTPUT,
    PREDICTIONS,
    READING,
    RULES,
    WINDOW,
    WORKLOAD,
    CheckedOptions,
    option_field,
)
from fastcomm.units import Duration, Rate

StepBoundary = Literal["auto", "device", "host"]
ClockAlignment = Literal["collectives", "none"]
# How clocks of the hosts of a dPRO trial are aligned.
HostClocks = Literal["auto", "sync", "causality", "variance", "drift", "none"]
ByteKind = Literal["payload", "bus", "msg"]
# Rules by which steps are found in a trace of dPRO.
StepRule = Literal["update", "seed", "operator", "gap", "none"]
# Slowdown from which on it is attributed to ranks, stages and types.
THRESHOLD = 1.03
KernelKey = Literal["name", "category", "operator", "module", "annotation", "stream", "layer"]


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


def _steps(**about: Any) -> Any:
    """Return the field of the numbers of the steps that count."""
    text = "Analyze only these steps, as in 4-6,12."
    return option_field(text, group=WINDOW, limits=WHOLE, is_common=True, **about)


def _gpu(**about: Any) -> Any:
    """Return the field of a GPU whose peaks count."""
    text = "GPU whose peaks FLOPs are compared with (metrics: --flops). Default: by the traces."
    return option_field(text, group=MEASUREMENT, metavar="NAME", **about)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions(CheckedOptions):
    """What is measured of a run.

    Limits of traffic are the bandwidths of the cluster inside and between nodes, which are the
    hosts that the traces name, or with `gpus_per_node` so many ranks in order.
    """

    link_bandwidth: str | Rate | None = option_field(
        "Bandwidth of one GPU's link in one direction, as in 400Gbit/s or 50GB/s.",
        group=MEASUREMENT,
        is_common=True,
    )
    cluster: str | Path | None = cluster_field("none")
    gpus_per_node: int | None = option_field(
        "GPUs per node. Default: by the traces' host names.",
        group=WORKLOAD,
        limits=GPUS_PER_NODE,
    )
    bytes: ByteKind = option_field(
        "Bytes that bandwidth and volume count: as nccl-tests, on links, or per call.",
        "payload",
        group=MEASUREMENT,
    )
    steps: tuple[int, ...] | None = _steps(may_be_empty=False)
    clock_alignment: ClockAlignment = option_field(
        "How clocks are aligned: by collectives, or not.", "collectives", group=READING
    )
    with_tables: bool = option_field(
        "Return the tables with a row per event or window, about 200 bytes an event.",
        True,
        group=None,
    )
    flops: bool = option_field(
        "Count the FLOPs of a step; reads all events of the traces once more.",
        False,
        group=MEASUREMENT,
    )
    gpu: str | None = _gpu(needs=("flops",))
    tokens_per_step: int | None = option_field(
        "Tokens of a step of all ranks, for tokens per second.",
        group=MEASUREMENT,
        limits=TOKENS,
    )


_MOST_STEPS = 16  # more in a timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(MetricsOptions):
    """What the page of a run shows: its metrics, and by default data, path and timeline."""

    no_data: bool = option_field(
        "Do not write the tables.", False, group=OUTPUT, is_common=True
    )
    no_path: bool = option_field(
        "Do not search for the critical path.", False, group=OUTPUT, is_common=True
    )
    no_timeline: bool = option_field(
        "Do not draw the timeline, for which all traces are read again.",
        False,
        group=OUTPUT,
        is_common=True,
    )
    timeline_ranks: tuple[int, ...] | None = option_field(
        "Ranks with all events in the timeline. Default: all, of more than 96 the suspects.",
        group=OUTPUT,
        limits=WHOLE,
        not_with=("no_timeline",),
    )
    timeline_steps: tuple[int, ...] | None = option_field(
        "Further steps of the timeline, which has the slowest, the median and a third one.",
        group=OUTPUT,
        limits=WHOLE,
        not_with=("no_timeline",),
    )

    def __post_init__(self) -> None:
        """Check that there are tables, and not too many steps."""
        MetricsOptions.__post_init__(self)
        if not self.with_tables:
            raise ConfigError("with_tables: a page needs the tables; no_data writes no files")
        if len(self.timeline_steps or ()) > _MOST_STEPS:
            raise ConfigError(f"timeline_steps: at most {_MOST_STEPS} steps fit on a page")


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


# Keys of kernels without names.
_WITHOUT_NAMES = ("by category", "by operator", "by stream", "by layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions(CheckedOptions):
    """Which device work is summed up, and by what."""

    by: KernelKey = option_field(
        "What a row is: name, category, operator, module, annotation, stream or layer.",
        "name",
        group=MEASUREMENT,
        metavar="KEY",
        is_common=True,
    )
    match: str | None = option_field(
        "Count only work of which the kernel's name, or that of the row, matches. "
        "Syntax of Python.",
        group=MEASUREMENT,
        is_regex=True,
        is_common=True,
    )
    full_names: bool = option_field(
        "Keep names as recorded: template arguments, parameters, numbers.",
        False,
        group=MEASUREMENT,
        is_common=True,
        not_with=_WITHOUT_NAMES,
    )
    rank: int | None = option_field(
        "Analyze this rank alone. Default: all ranks.",
        group=WINDOW,
        limits=RANK,
        is_common=True,
    )
    step: int | None = option_field(
        "Number of the step. Default: all steps.",
        group=WINDOW,
        limits=WHOLE,
        is_common=True,
    )
    gpu: str | None = _gpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionTraceOptions(CheckedOptions):
    """Which execution traces a path goes through; see `execution_trace_path`."""

    rank: int | None = None
    alone: bool = False
    keep_going: bool = False


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
        "Make a rank or link as fast as its peers: rank:5, link:3-7.", "WHAT"
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


@dataclass(frozen=True, kw_only=True)  # no slots, as above
class ScenarioOptions(EditOptions):
    """What is replayed besides the step as measured: the step with edits."""

    bottleneck: bool = option_field(
        "Report how much each operation of the critical path costs the step.",
        False,
        group=OUTPUT,
        is_common=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReplayOptions(Window, ScenarioOptions):
    """Which step of a run is replayed, and how besides as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReplayOptions(TrialOptions, ScenarioOptions):
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
class StragglerOptions(EditOptions):
    """What is asked of a job's table of operations; with edits, the job is replayed, too."""

    meta: str | Path | None = option_field(
        "Read the sizes of the job from a YAML file.",
        group=LAYOUT,
        path="file or URL",
        is_common=True,
    )
    steps: tuple[int, ...] | None = _steps()
    threshold: float = option_field(
        "Minimum slowdown to attribute to a rank.",
        THRESHOLD,
        group=MEASUREMENT,
        limits=FACTOR,
        is_common=True,
    )
