"""Causes of idle time: names, rules on what the host does, texts, and what removes them."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from fastcomm.trace import host_names


class NameRule(NamedTuple):
    """Ranges of the host with a meaning: their kinds, and a pattern found in their names."""

    kinds: tuple[str, ...]
    pattern: str


GARBAGE = NameRule(("annotation", "python"), r"(?i)\bgc[._]collect|\bgc\b|garbage.?collect")
# Not in the directories of a Python function's file.
LOADING = NameRule(
    ("annotation", "python", "cpu_op"),
    r"(?i)(data_?loader|data.?load|batch.?generator|data.?iter(ator)?\b|(?<![a-z])load_?data"
    r"|(?<![a-z])(load|fetch|get|next|read|wait_for)_?batch(?!_?norm)|input.?pipeline)(?!.*/)",
)
SYNCHRONIZING = NameRule(("runtime",), host_names.SYNCHRONIZING)
LAUNCHING = NameRule(("runtime",), host_names.LAUNCHING)
WAITING = NameRule(("annotation", "python", "cpu_op"), host_names.WAITING)
# Of a run without an accelerator: operators that wait for a message or collective, and those
# that enqueue one.
WAITING_ON_HOST = NameRule(("cpu_op", "runtime"), host_names.WAITING_ON_HOST)
ENQUEUING_ON_HOST = NameRule(("cpu_op", "runtime"), host_names.DISTRIBUTED_OPERATOR)
# Marks of steps enclose everything, and explain nothing.
STEP_MARK = NameRule(("annotation",), r"ProfilerStep[#*]")


@dataclass(frozen=True, slots=True)
class HostLayer:
    """What a thread of the host does: a name, the cause of idle time, and the rule of it.

    Without a rule, `host_activity` decides by more than names.
    """

    name: str
    cause: str
    rule: NameRule | None = None


# First to last: of several layers that cover an instant, the first counts.
LAYERS = (
    HostLayer("garbage", "python", GARBAGE),
    HostLayer("loading", "data_loading", LOADING),
    HostLayer("synchronizing", "synchronization"),
    HostLayer("launching", "launch_bound"),
    HostLayer("waiting", "late_communication"),
    HostLayer("work", "host_work"),
    HostLayer("functions", "python"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The delays of a what-if that are the idle time of a cause, and the step without them."""

    delays: str  # as `--remove` names them
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCause:
    """What reports say of a cause of idle time, and from which share on it is a finding."""

    text: str  # in tables and sentences
    awaited: str  # what the device waits for
    to_try: str
    # Whether what the host does explains it, or the work without a recorded launch.
    is_named: bool = False
    on_host: str | None = None  # why a rank without a device is idle, in findings
    # Share of the step from which on it is a finding; none for causes that programs cannot
    # usually avoid. Some launches and gaps are always on the critical path.
    least_share: float = inf
    removed: Removal | None = None  # if a what-if can remove it
    # Whether the host launches late; otherwise the work was launched, and waits.
    blames_host: bool = True


# In this order they count; `intervals` has the rules of those that no layer tells.
BY_CAUSE = {
    "launch_bound": IdleCause(
        text="launch-bound",
        awaited="for kernels to be launched",
        to_try="CUDA graphs, torch.compile, or larger batches",
        least_share=0.1,
        removed=Removal(delays="launches", text="Without launch delays"),
    ),
    "synchronization": IdleCause(
        text="synchronization",
        awaited="for the host to launch anew after synchronizing calls",
        to_try="to avoid .item(), .cpu() and other synchronizing calls in a step",
        is_named=True,
        least_share=0.05,
    ),
    "pipeline_bubble": IdleCause(
        text="pipeline bubble",
        awaited="for messages or collectives that are late",
        to_try="more micro-batches or an interleaved schedule if pipeline stages wait; "
        "otherwise look for what delays the communication",
        on_host="it waits for messages or collectives",
        blames_host=False,
    ),
    # The same of a rank without pipeline parallelism.
    "late_communication": IdleCause(
        text="late communication",
        awaited="for messages or collectives that are late",
        to_try="to find what delays the communication, such as a rank that arrives late",
        on_host="it waits for messages or collectives",
        blames_host=False,
    ),
    "data_loading": IdleCause(
        text="data loading",
        awaited="for the data loader",
        to_try="more loader workers, prefetching and pinned memory",
        is_named=True,
        on_host="it loads data",
        least_share=0.05,
    ),
    "python": IdleCause(
        text="Python",
        awaited="for Python code",
        to_try="to collect garbage between steps only, and a profile of the Python code",
        is_named=True,
        on_host="no operator runs: Python, or another program on the core",
        least_share=0.05,
    ),
    "kernel_gaps": IdleCause(
        text="gaps between kernels",
        awaited="between queued kernels",
        to_try="CUDA graphs or fused kernels if gaps are short; long ones wait for other "
        "streams, devices or processes",
        least_share=0.1,
        blames_host=False,
        removed=Removal(delays="gaps", text="Without gaps between kernels"),
    ),
    "graph_callback": IdleCause(
        text="callbacks in CUDA graphs",
        awaited="for callbacks of the host in CUDA graphs",
        to_try="to take them (cudaLaunchHostFunc) out of the captured graph",
        is_named=True,
        blames_host=False,
        least_share=0.05,
    ),
    "host_work": IdleCause(
        text="host work",
        awaited="for work of the host before launches",
        to_try="to move it to another thread, or to launch device work before it",
        is_named=True,
    ),
    "unknown": IdleCause(
        text="unknown",
        awaited="for an unknown reason",
        to_try="a recording with operators and with_stack=True, which shows what the host does",
        is_named=True,
        on_host="no operator runs: Python, data loading, or another program on the core",
    ),
}

CAUSES = tuple(BY_CAUSE)
CAUSE = {name: number for number, name in enumerate(CAUSES)}
