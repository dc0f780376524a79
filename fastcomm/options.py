"""Options of all analyses: frozen dataclasses that the command line and the API both build.

A field has the name and the default of the command's option: `--link-bandwidth` is
`link_bandwidth`. Values are checked when an object is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from fastcomm.checks import FACTOR, RANKS, REPEAT, TOKENS, WHOLE, Range, check_numbers, regex
from fastcomm.errors import ConfigError
from fastcomm.option_fields import LAYOUT, READING, WINDOW, CheckedOptions, option
from fastcomm.units import parse_bandwidth

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
# A text with a unit, "400Gbit/s"; a number is an error that says so.
BandwidthText = str | float | None


def _size(parallelism: str, row: tuple[str, str] = ("", "")) -> Any:
    """Return the field of a size; the help has one row for all sizes."""
    text = f"{parallelism} size."
    return option(text, group=LAYOUT, limits=RANKS, is_common=True, row=row)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(CheckedOptions):
    """How the traces of a run are found and read."""

    ranks: tuple[int, ...] | None = option(
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
    order: str | None = option(
        "Rank order: megatron (default), deepspeed, torchtitan, vllm, or as in tp-cp-ep-dp-pp.",
        group=LAYOUT,
        metavar="ORDER",
    )
    config: str | Path | None = option(
        "Read settings of the run (parallelism, tags, kernels, link) from a TOML file.",
        group=LAYOUT,
        path="file or URL",
    )
    guess_tags: bool = option(
        "Guess the parallelism of untagged process groups from their traffic.",
        False,
        group=LAYOUT,
    )
    iteration_regex: str | None = option(
        "Names of the events that mark steps. The first group is the step number.",
        group=READING,
        is_regex=True,
    )
    step_boundary: StepBoundary = option(
        "Where a step begins and ends: at its first GPU work, or its mark on the host.",
        "auto",
        group=WINDOW,
    )
    allow_truncated: bool = option(
        "Read truncated traces up to the last complete event.", False, group=READING
    )
    keep_going: bool = option(
        "Skip ranks that cannot be read, list them, and exit with code 3.",
        False,
        group=READING,
    )

    @property
    def is_plain(self) -> bool:
        """Whether ranks are read without any rule of the user."""
        return replace(self, ranks=None, keep_going=False) == ReadOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions(CheckedOptions):
    """What is measured of a run.

    `link_bandwidth` is the bandwidth of one GPU's link in one direction, with its unit
    ("400Gbit/s"); by default what the configuration says. `bytes` are the bytes that bandwidth
    and volume count, `steps` the numbers of the steps that count. `cluster` is a TOML file or a
    shipped cluster, whose bandwidths inside and between nodes are the limits of traffic by
    level. By default, nodes are the hosts that the traces name; with `gpus_per_node`, ranks
    fill nodes of so many GPUs in order.
    `clock_alignment` is how the clocks of ranks are aligned: by their collectives, or not.
    Without `with_tables`, the tables with a row per event or window, about 200 bytes an event,
    are left out. `flops` reads all events of the traces once more, for the FLOPs of a step;
    `gpu` is the GPU whose peaks they are compared with, by default that of the traces.
    `tokens_per_step`, the tokens of a step of all ranks, gives tokens per second.
    """

    link_bandwidth: BandwidthText = None
    cluster: str | Path | None = None
    gpus_per_node: int | None = None
    bytes: ByteKind = "payload"
    steps: tuple[int, ...] | None = None
    clock_alignment: ClockAlignment = "collectives"
    with_tables: bool = True
    flops: bool = False
    gpu: str | None = None
    tokens_per_step: int | None = None

    def __post_init__(self) -> None:
        """Check that the bandwidth and the numbers are in their ranges."""
        CheckedOptions.__post_init__(self)
        _ = self.link_bytes_per_s
        if self.steps == ():
            raise ConfigError("missing value of steps")
        check_numbers("steps", self.steps)
        if self.tokens_per_step is not None:
            TOKENS.check(self.tokens_per_step, "tokens_per_step")
        if self.gpu is not None and not self.flops:
            raise ConfigError("gpu needs flops")
        if self.gpus_per_node is not None:
            RANKS.check(self.gpus_per_node, "gpus_per_node")

    @property
    def link_bytes_per_s(self) -> float | None:
        """The bandwidth of the link in bytes per second."""
        link = self.link_bandwidth
        return None if link is None else parse_bandwidth(link, "link_bandwidth")


_MOST_STEPS = 16  # more in a timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(MetricsOptions):
    """What the page of a run shows: its metrics, and by default data, path and timeline.

    `timeline_ranks` are the ranks whose events the timeline has, `timeline_steps` the numbers
    of steps that it has besides the slowest, the median and a third one.
    """

    no_data: bool = False
    no_path: bool = False
    no_timeline: bool = False
    timeline_ranks: tuple[int, ...] | None = None
    timeline_steps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check that the numbers are in their ranges."""
        MetricsOptions.__post_init__(self)
        if not self.with_tables:
            raise ConfigError("with_tables: a page needs the tables; no_data writes no files")
        check_numbers("timeline_ranks", self.timeline_ranks)
        check_numbers("timeline_steps", self.timeline_steps)
        if len(self.timeline_steps or ()) > _MOST_STEPS:
            raise ConfigError(f"timeline_steps: at most {_MOST_STEPS} steps fit on a page")
        for name in ("timeline_ranks", "timeline_steps"):
            if self.no_timeline and getattr(self, name):
                raise ConfigError(f"{name} has no effect with no_timeline; leave one out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(CheckedOptions):
    """The part of a trace that is looked at; by default the second step, or the only one.

    `step` is the number of a step. `annotation` is a text in the names of the events that are
    the window, or with `exact` the whole name; "" is the whole trace. `instance` is which of
    these events, from 0 on, or an inclusive pair. `data_load_events` are regular expressions
    for the names of events that load data, instead of the usual names.
    """

    unchecked: ClassVar[tuple[str, ...]] = ("instance",)

    step: int | None = None
    annotation: str | None = None
    instance: int | tuple[int, ...] | None = None
    exact: bool = False
    data_load_events: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that at most one part is named."""
        CheckedOptions.__post_init__(self)
        check_numbers("step", [] if self.step is None else [self.step])
        for text in self.data_load_events:
            regex("data_load_events", text)
        if self.step is not None and self.annotation is not None:
            raise ConfigError("step and annotation contradict each other; give one of them")
        if self.instance is not None and self.annotation is None:
            raise ConfigError("instance needs annotation")
        if self.exact and self.annotation is None:
            raise ConfigError("exact needs annotation")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions(Window):
    """The window, the ranks and the rules of a critical path.

    `rank` is the one rank whose path is searched; by default it goes through all ranks.
    `compat` searches by the rules of another tool; `zero_weight_launches` are a part of HTA's.
    `deps` also finds operators that could start earlier if they waited only for their data;
    `execution_trace` is the path of the file that records them, by default one beside the
    trace. With `compat` or `deps` the path is of one rank.
    """

    rank: int | None = None
    compat: Literal["hta"] | None = None
    zero_weight_launches: bool = False
    deps: Literal["data"] | None = None
    execution_trace: str | Path | None = None

    def __post_init__(self) -> None:
        """Check that the rank is in its range, and that no option lacks the one it is for."""
        Window.__post_init__(self)
        check_numbers("rank", [] if self.rank is None else [self.rank])
        if self.zero_weight_launches and self.compat is None:
            raise ConfigError("zero_weight_launches needs compat")
        if self.execution_trace is not None and self.deps is None:
            raise ConfigError("execution_trace needs deps")

    @property
    def is_of_one_rank(self) -> bool:
        """Whether the path is of one rank even if the ranks of the run can be joined."""
        return any(value is not None for value in (self.rank, self.compat, self.deps))


WITHOUT_NAMES = ("category", "operator", "stream", "layer")  # keys of kernels without names


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions(CheckedOptions):
    """Which device work is summed up, and by what.

    `by` is what a row of the result is; `rank` and `step` the one rank and step that count, by
    default all. `match` is a regular expression for the names of kernels, or of rows.
    `full_names` keeps the names as the profiler recorded them. `gpu` is the GPU whose peaks
    FLOPs are compared with, by default the one that the traces name.
    """

    by: KernelKey = "name"
    rank: int | None = None
    step: int | None = None
    match: str | None = None
    full_names: bool = False
    gpu: str | None = None

    def __post_init__(self) -> None:
        """Check that numbers are in their ranges, and that `match` is a regular expression."""
        CheckedOptions.__post_init__(self)
        for name in ("rank", "step"):
            number = getattr(self, name)
            check_numbers(name, [] if number is None else [number])
        if self.match is not None:
            regex("match", self.match)
        if self.full_names and self.by in WITHOUT_NAMES:
            raise ConfigError(f"full_names has no effect with by {self.by!r}; leave one out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionTraceOptions(CheckedOptions):
    """Which execution traces a path goes through; see `execution_trace_path`."""

    rank: int | None = None
    alone: bool = False
    keep_going: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions(CheckedOptions):
    """How a dPRO trial is read.

    `host_clocks` is how host clocks are aligned, `nccl_algorithm` how NCCL sends: by
    default along its rings, where the trial has them. `clip_updates` starts each update after
    the previous one, `barrier` starts updates after all communication.
    """

    host_clocks: HostClocks = "auto"
    nccl_algorithm: Literal["ring", "tree", "none"] | None = None
    clip_updates: bool = False
    barrier: bool = False


@dataclass(frozen=True, kw_only=True)  # no slots, for classes with a second base
class EditOptions(CheckedOptions):
    """Changes of a step whose effect is predicted, in texts as `fastcomm.graph.edits` has them.

    `scale` are texts such as "comm:TP=0.5", `set` such as "link:TP=800Gbit/s", both also as a
    dictionary, {"comm:TP": 0.5}; `heal` are texts such as "rank:5", `remove` such as
    "op:Broadcast", and `overlap` parallelisms. Neighboring kernels
    shorter than `fuse_below`, a time with its unit, are fused. `edits` is the path or URL of a
    TOML file with these keys.
    """

    scale: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    heal: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    overlap: tuple[str, ...] = ()
    fuse_below: str | None = None
    edits: str | Path | None = None

    def __post_init__(self) -> None:
        """Write dictionaries as texts, and check the type of each value."""
        for name in ("scale", "set"):
            if isinstance(value := getattr(self, name), Mapping):
                texts = tuple(f"{target}={number}" for target, number in value.items())
                object.__setattr__(self, name, texts)
        CheckedOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)  # no slots, as above
class ScenarioOptions(EditOptions):
    """What is replayed besides the step as measured: the step with edits.

    With `bottleneck`, the step is also replayed without each operation of the critical path.
    """

    bottleneck: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReplayOptions(Window, ScenarioOptions):
    """Which step of a run is replayed, and how besides as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReplayOptions(TrialOptions, ScenarioOptions):
    """How a dPRO trial is read and replayed, and what is predicted of its step.

    `compat` replays by dPRO's rules, `repeat` is the number of steps, `unlimited_updates` runs
    all updates at once, and `tensors` adds a replay of their communication alone. Predictions
    are `daydream` (one rank alone, by bytes and bandwidth), the step on so many `hosts`, and
    the best of so many ways to `fuse` tensors.
    """

    compat: Literal["dpro"] | None = None
    repeat: int = 1
    unlimited_updates: bool = False
    tensors: tuple[int, ...] | None = None
    daydream: bool = False
    hosts: int | None = None
    fuse: int | None = None

    def __post_init__(self) -> None:
        """Check that numbers are in their ranges."""
        EditOptions.__post_init__(self)
        REPEAT.check(self.repeat, "repeat")
        if self.tensors == ():
            raise ConfigError("missing value of tensors")
        check_numbers("tensors", self.tensors)
        for name, least in (("hosts", 2), ("fuse", 1)):
            if (number := getattr(self, name)) is not None:
                Range(least, RANKS.most).check(number, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerOptions(EditOptions):
    """What is asked of a job's table of operations; with edits, the job is replayed with them.

    `meta` is the path of the job's sizes, `steps` the numbers of the steps that count.
    A slowdown of `threshold` or more is attributed to ranks, stages and types.
    """

    meta: str | Path | None = None
    steps: tuple[int, ...] | None = None
    threshold: float = THRESHOLD

    def __post_init__(self) -> None:
        """Check that numbers are in their ranges."""
        EditOptions.__post_init__(self)
        FACTOR.check(self.threshold, "threshold")
        check_numbers("steps", self.steps)
