"""Synthetic training jobs: number, layout, size and speed of their ranks.

Ranks of a `Job` are laid out as in Megatron, tensor parallelism first:
``tp + TP * (dp + DP * pp)``. Expert parallelism takes blocks of neighbors from the data
dimension. Times are int ns.

A `TableJob` is a table of operations with one slow rank, data and pipeline parallel: all
micro-batches forward, then all backward, then gradients and the optimizer. Every operation
starts as early as possible, so steps have no launch delays. Its times are in seconds, as usual
in such tables.
"""

from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from random import Random
from typing import Any, Literal, Self, get_args

import pyarrow as pa

from fastcomm import arrow_files
from fastcomm.errors import ConfigError
from fastcomm.files import aside

GAP = 900  # between two kernels of one stream

# Faults of a rank, its link or its stage; and faults of the program, thus of every rank, which
# are causes of idle time.
RankFault = Literal["slow_gpu", "slow_link", "jittery_host", "imbalanced_stage", "hot_expert"]
IdleFault = Literal[
    "launch_bound", "synchronization", "data_loading", "garbage_collection", "kernel_gaps"
]
Fault = RankFault | IdleFault
FAULTS: tuple[RankFault, ...] = get_args(RankFault)
IDLE_FAULTS: tuple[IdleFault, ...] = get_args(IdleFault)
# Default slowdown in percent by fault: a slow link has half its speed.
_SLOWDOWN = {
    "slow_link": 100,
    "hot_expert": 60,
    "launch_bound": 2_200,
    "synchronization": 2_000,
    "data_loading": 1_500,
    "garbage_collection": 1_500,
    "kernel_gaps": 3_000,
}
_SMALL_LAYER_NS = 300_000  # of a job whose host launches slower than its device computes

# Maximum of tensor and of pipeline parallelism, by the largest number of ranks.
_WIDEST = {32: 2, 128: 4}
_DEEPEST = {7: 1, 64: 2, 512: 4}

_FORWARD, _BACKWARD, _MESSAGE = 0.020, 0.040, 0.0005
_GATHER, _SCATTER, _NORMS = 0.010, 0.020, 0.001
_EMBEDDING, _CLIP, _OPTIMIZER = 0.005, 0.002, 0.010
_JITTER = 0.01

_SCHEMA = pa.schema(
    [
        *[("dp_rank", pa.int8()), ("stage", pa.int8()), ("rank", pa.int16())],
        *[("step", pa.int64()), ("optype", pa.string())],
        *[("start_ts", pa.float32()), ("duration", pa.float32()), ("seq_id", pa.int32())],
        *[("mc", pa.int8()), ("gmc", pa.int16())],
    ]
)
_OF_CHUNKS = ("compute", "params-all-gather", "grads-reduce-scatter")


def _largest(ranks: int, table: dict[int, int]) -> int:
    return next((limit for most, limit in table.items() if ranks <= most), 8)


def _power_of_two(number: int, limit: int) -> int:
    """Return the largest power of two that divides `number`, at most `limit`."""
    return max(1, min(number & -number, limit))


@dataclass(frozen=True, kw_only=True)
class Job:
    """All inputs of a synthetic job: equal jobs give equal bytes."""

    ranks: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1  # within dp
    steps: int = 4
    first_step: int = 10  # the number of the first step that is profiled
    micro_batches: int = 4
    layers: int = 4  # of one stage; every second one has experts
    hidden: int = 2048
    tokens: int = 2048  # of one micro-batch
    bucket: int = 10_000_000  # gradient elements that one layer hands to data parallelism
    layer_ns: int = 900_000  # compute of a layer's forward pass; the backward pass takes twice
    link_speed: int = 44 * 10**9  # bytes per second that a collective reaches
    latency_ns: int = 9_000  # of the smallest collective
    skew_ns: int = 5_000  # how far ranks drift apart between two collectives, at most
    straggler: int | None = None  # rank with the fault, or any if all have it; None is no fault
    fault: Fault = "slow_gpu"
    slowdown: int = 15  # percent by which the fault makes its part longer or larger
    seed: int = 0
    # Factors of durations, by "compute", "comm" or "comm:TAG"; factors of one event multiply.
    factors: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        sizes = self.tp, self.pp, self.dp
        if self.ranks != self.tp * self.pp * self.dp or min(sizes) < 1:
            raise ConfigError(
                f"invalid job of {self.ranks} ranks: expected tp * pp * dp, not "
                f"{self.tp} * {self.pp} * {self.dp}"
            )
        if self.ep < 1 or self.dp % self.ep:
            raise ConfigError(f"invalid ep {self.ep}: expected a divisor of dp {self.dp}")
        if self.straggler is not None and not 0 <= self.straggler < self.ranks:
            raise ConfigError(
                f"invalid straggler {self.straggler}: expected 0 to {self.ranks - 1}"
            )
        self._check_fault()
        self._check_sizes()

    def _check_fault(self) -> None:
        """Raise `ConfigError` if the fault is unknown, or impossible in this layout."""
        if self.fault not in (*FAULTS, *IDLE_FAULTS):
            raise ConfigError(
                f"invalid fault {self.fault!r}: expected one of "
                f"{', '.join((*FAULTS, *IDLE_FAULTS))}"
            )
        needs = {"slow_link": "dp", "imbalanced_stage": "pp", "hot_expert": "ep"}
        name = needs.get(self.fault)
        if name and self.straggler is not None and getattr(self, name) == 1:
            raise ConfigError(f"fault {self.fault} needs {name} of 2 or more, not 1")
        if self.fault == "hot_expert" and self.layers == 1:
            raise ConfigError("fault hot_expert needs 2 layers or more, not 1")

    def _check_sizes(self) -> None:
        """Raise `ConfigError` if a size is below its minimum."""
        least = dict.fromkeys(("steps", "micro_batches", "layers", "hidden"), 1)
        least |= {"tokens": 8, "bucket": 1, "layer_ns": 300_000, "link_speed": 10**6}
        least |= {"latency_ns": 5_000, "first_step": 0, "skew_ns": 0, "slowdown": 0, "seed": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ConfigError(
                    f"invalid {name} {getattr(self, name)}: expected {minimum} or more"
                )
        for event, factor in self.factors:
            if event.partition(":")[0] not in ("compute", "comm") or not 0 < factor < inf:
                raise ConfigError(
                    f"invalid factor {factor:g} of {event!r}: expected a positive factor of "
                    "compute, comm or comm:TAG"
                )

    @classmethod
    def of(cls, ranks: int = 8, **changes: Any) -> Self:
        """Return a job of any size; values not in `changes` follow from the number of ranks."""
        tp = changes.get("tp") or _power_of_two(ranks, _largest(ranks, _WIDEST))
        pp = changes.get("pp") or _power_of_two(max(1, ranks // tp), _largest(ranks, _DEEPEST))
        dp = changes.get("dp") or max(1, ranks // (tp * pp))
        fault = changes.get("fault", "")
        chosen = {
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "ep": _power_of_two(dp, min(8, max(2, dp // 2))),
            "micro_batches": max(4, 2 * pp),
            "straggler": ranks * 5 // 8 if ranks > 1 or fault in IDLE_FAULTS else None,
            "slowdown": _SLOWDOWN.get(fault, 15),
        }
        if fault == "launch_bound":
            chosen["layer_ns"] = _SMALL_LAYER_NS
        return cls(ranks=ranks, **{**chosen, **changes})

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return the coordinates (tp, dp, pp) of a rank."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    def factor(self, event: str) -> float:
        """Return the factor of the duration of events: "compute", or "comm:TAG"."""
        names = {event, event.partition(":")[0]}
        return prod(factor for name, factor in self.factors if name in names)

    @property
    def expert_data(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.dp // self.ep


@dataclass(frozen=True, slots=True, kw_only=True)
class TableJob:
    """Sizes of a job, and the share by which the computation of one rank is slower."""

    dp: int = 2
    pp: int = 4
    micro_batches: int = 6
    steps: int = 8
    slow_dp: int = 1
    slow_stage: int = 2
    slowdown: float = 0.3
    seed: int = 0

    @classmethod
    def of(cls, ranks: int, slowdown: float = 0.3) -> "TableJob":
        """Return a job of any size: up to four stages, the slow rank in the last data rank."""
        pp = next(size for size in (4, 2, 1) if ranks % size == 0)
        dp = ranks // pp
        return cls(dp=dp, pp=pp, slow_dp=dp - 1, slow_stage=pp // 2, slowdown=slowdown)

    @property
    def slow_rank(self) -> int:
        """Number of the slow rank."""
        return self.slow_dp * self.pp + self.slow_stage


def table(job: TableJob) -> pa.Table:
    """Return the operations of all steps."""
    random = Random(job.seed)
    rows = [row for step in range(job.steps) for row in _Step(job, step, random).rows()]
    columns = zip(*rows, strict=True)
    return pa.table(dict(zip(_SCHEMA.names, columns, strict=True)), _SCHEMA)


TABLE_NAMES = ("table.parquet", "meta.yaml")


def write_table(job: TableJob, folder: Path) -> tuple[Path, Path]:
    """Write `table.parquet` and `meta.yaml`, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / TABLE_NAMES[0], folder / TABLE_NAMES[1]
    with aside(paths[0]) as unfinished:
        arrow_files.write(table(job), unfinished)
    sizes = {"dp": job.dp, "pp": job.pp, "tp": 1, "dsp": 1, "vpp": 1}
    lines = [f"{name}_size: {size}" for name, size in sizes.items()]
    lines = ["trial_name: demo", "run_id: 0", *lines, f"world_size: {job.dp * job.pp}", ""]
    with aside(paths[1]) as unfinished:
        unfinished.write_text("\n".join(lines), "utf-8")
    return paths


JobPlace = tuple[int, int]  # data rank, stage


class _Step:
    """Collects the rows of one step."""

    def __init__(self, job: TableJob, step: int, random: Random) -> None:
        """Start at time 0 on all places; a place is (data rank, stage)."""
        self.job, self.step, self.random = job, step, random
        self.places = [(d, s) for d in range(job.dp) for s in range(job.pp)]
        self.operations: list[tuple[object, ...]] = []
        self.count: dict[tuple[JobPlace, str], int] = {}
        self.clock = dict.fromkeys(self.places, 0.0)  # end of the last computation

    def rows(self) -> list[tuple[object, ...]]:
        """Return the operations of all ranks."""
        self._joined("params-all-gather", _GATHER, self._by_stage())
        for way in ("forward", "backward"):
            for d in range(self.job.dp):
                self._pass(way, d)
        for place in self.places:
            self._alone(place, "gc", 0.0)
            self._alone(place, "layernorm-grads-all-reduce", _NORMS)
        ends = [[(d, s) for s in sorted({0, self.job.pp - 1})] for d in range(self.job.dp)]
        self._joined("embedding-grads-all-reduce", _EMBEDDING, ends)
        self._joined("grads-reduce-scatter", _SCATTER, self._by_stage())
        self._joined("optimizer-clip-main-grad", _CLIP, [self.places])
        for place in self.places:
            self._alone(place, "optimizer", _OPTIMIZER)
        return self.operations

    def _by_stage(self) -> list[list[JobPlace]]:
        """Return the data-parallel groups; none with one data rank."""
        if self.job.dp == 1:
            return []
        return [[(d, s) for d in range(self.job.dp)] for s in range(self.job.pp)]

    def _pass(self, way: str, d: int) -> None:
        """Run all micro-batches of one data rank through the pipeline, in one direction."""
        stages = range(self.job.pp) if way == "forward" else range(self.job.pp - 1, -1, -1)
        sent: dict[int, float] = {}  # by stage: the end of its last message
        posted = {s: self.clock[d, s] for s in stages}
        for _ in range(self.job.micro_batches):
            before: int | None = None
            for s in stages:
                if before is not None:
                    self._message(way, (d, before), (d, s), sent, posted)
                self._alone((d, s), f"{way}-compute", self._compute(way, (d, s)))
                posted[s] = self.clock[d, s]
                before = s

    def _message(
        self,
        way: str,
        source: JobPlace,
        target: JobPlace,
        sent: dict[int, float],
        posted: dict[int, float],
    ) -> None:
        """Send a message to a stage; it transfers once both sides have arrived.

        `sent` and `posted` are, by stage, when the last send ends and when a receive
        began.
        """
        begin = max(self.clock[source], sent.get(source[1], 0.0))
        wait = posted[target[1]]
        end = max(begin, wait) + self._about(_MESSAGE)
        self._add(source, f"{way}-send", begin, end)
        self._add(target, f"{way}-recv", wait, end)
        sent[source[1]] = end
        self.clock[target] = max(self.clock[target], end)

    def _compute(self, way: str, place: JobPlace) -> float:
        time = self._about(_FORWARD if way == "forward" else _BACKWARD)
        slow = place == (self.job.slow_dp, self.job.slow_stage)
        return time * (1 + self.job.slowdown) if slow else time

    def _about(self, time: float) -> float:
        """Return a time with jitter."""
        return time * (1 + self.random.uniform(-_JITTER, _JITTER))

    def _alone(self, place: JobPlace, optype: str, time: float) -> None:
        """Add an operation that starts when the previous one of its rank ends.

        `place` is (data rank, stage), `time` its duration in s.
        """
        begin = self.clock[place]
        self.clock[place] = begin + time
        self._add(place, optype, begin, self.clock[place])

    def _joined(self, optype: str, time: float, groups: list[list[JobPlace]]) -> None:
        """Add an operation that all ranks of a group end together, after the last has begun."""
        for group in groups:
            end = max(self.clock[place] for place in group) + self._about(time)
            for place in group:
                self._add(place, optype, self.clock[place], end)
                self.clock[place] = end

    def _add(self, place: JobPlace, optype: str, begin: float, end: float) -> None:
        """Append an operation of a place, numbered by type; times in s since the step began."""
        number = self.count.get((place, optype), 0)
        self.count[place, optype] = number + 1
        d, s = place
        chunk = 0 if optype.endswith(_OF_CHUNKS) else -1
        rank = d * self.job.pp + s
        row = (d, s, rank, self.step, optype, begin, end - begin, number)
        self.operations.append((*row, chunk, s if chunk == 0 else -1))
