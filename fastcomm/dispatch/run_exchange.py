"""All-to-alls of a run: what other schedules, or an even load of ranks, would take.

A run records how many bytes each rank sends to each other one in a call, and not which tokens.
So schedules that send a token once for several experts have no answer. An exchange takes the
shortest duration among its ranks, that of the last to arrive: it waits for nobody. The model
times the direct schedule, as NCCL sends, and another one. What a measured time has above its
start is scaled by their ratio, so that it has the efficiency of the run; the start does not
shrink with bytes. Groups wait for the slowest one. Times are in seconds, sizes in bytes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from fastcomm import preparation
from fastcomm.dispatch.options import DispatchOptions
from fastcomm.dispatch.schedules import STRATEGIES, Terms
from fastcomm.dispatch.simulation import NS
from fastcomm.dispatch.traffic import LayerTokens, Traffic, bounds
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.executors.executor import OpenedRun, Task
from fastcomm.hardware.clusters import GpuLinks, load_node, rated_links
from fastcomm.hardware.gpus import FloatArray
from fastcomm.options import ReadOptions
from fastcomm.result import TableResult
from fastcomm.trace.columns import filled
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run_traces import ParallelMap, SkippedRank
from fastcomm.trace.schema import OP
from fastcomm.trace.trace import Trace
from fastcomm.units import format_s, parse_bandwidth, percent
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NULL, Matrix

_CLUSTER = "dgx-h100"
# Schedules that need nothing but bytes from rank to rank.
BY_BYTES = ("direct", "spreadout", "hierarchical", "fast", "fast-published")
NO_TOKENS = "it sends a token once for several ranks, and a run does not record tokens"
NO_EXPERTS = "it sends a message for each expert, and a run does not record experts"
_MOST_SIMULATED = 256  # exchanges; of more, evenly spaced ones
# Share of the links below which starts and hosts determine times, and not bytes.
_LEAST_EFFICIENCY = 0.05
# Standard deviation over the mean of the bytes, from which on a start can be fitted.
_LEAST_VARIATION = 0.05
_START_S = 8e-6  # of an all-to-all without bytes, NCCL on H100, where a run does not tell
_NO_SPLITS = (
    "{}: no all-to-all with recorded splits on all ranks of its group; PyTorch records them "
    "with record_shapes=True, for groups of up to 30 ranks"
)


class RecordedCalls(NamedTuple):
    """All-to-alls of some ranks in steps, as a table, and what was counted beside them."""

    table: pa.Table  # `_SCHEMA`
    steps: frozenset[int]  # numbers
    ranks: int
    without_splits: int  # calls


_SCHEMA = pa.schema(
    [
        pa.field("rank", pa.int64()),
        pa.field("tag", pa.int8()),
        pa.field("members", pa.list_(pa.int32())),
        pa.field("number", pa.int64()),  # of the call in its group
        pa.field("ns", pa.int64()),
        pa.field("sent_bytes", pa.list_(pa.int64())),
    ]
)


def _calls(trace: Trace) -> RecordedCalls:
    """Return the all-to-alls of a rank that begin in a step."""
    trace = trace.on_device_clock()
    comm, steps = trace.comm, trace.iterations
    start, stop = comm["start"].to_numpy(), comm["stop"].to_numpy()
    edges = steps["start"].to_numpy(), steps["stop"].to_numpy()
    is_own = comm["op"].to_numpy() == OP["AllToAll"]
    group = filled(comm["group"])
    number = filled(comm["seq"]).copy()
    for one in np.unique(group[is_own]).tolist():
        own = np.flatnonzero(is_own & (group == one))
        if (number[own] == NULL).any():  # else as the job counts
            number[own] = np.arange(len(own))
    members = trace.groups["ranks"].combine_chunks()
    size = np.append(filled(members.value_lengths(), 0), 0)
    place = np.where(group == NULL, len(size) - 1, group)
    length = filled(comm["sent_bytes"].combine_chunks().value_lengths(), NULL)
    inside = is_own & (intervals.segment_of(start, *edges) >= 0)
    rows = np.flatnonzero(inside & (length == size[place]) & (length > 0))
    chosen = pa.array(rows)
    table = pa.table(
        [
            np.full(len(rows), trace.meta.rank),
            comm["tag"].to_numpy()[rows],
            members.take(pa.array(group[rows])),
            number[rows],
            (stop - start)[rows],
            comm["sent_bytes"].combine_chunks().take(chosen),
        ],
        schema=_SCHEMA,
    )
    numbers = frozenset(steps["number"].to_pylist())
    return RecordedCalls(table, numbers, 1, int(inside.sum()) - len(rows))


def _merged(parts: Sequence[RecordedCalls]) -> RecordedCalls:
    """Return the calls of all ranks, by rank."""
    table = pa.concat_tables([part.table for part in parts])
    return RecordedCalls(
        table.sort_by("rank"),
        frozenset().union(*(part.steps for part in parts)),
        sum(part.ranks for part in parts),
        sum(part.without_splits for part in parts),
    )


def _whole(
    calls: RecordedCalls, _skipped: Sequence[SkippedRank], _parallel_map: ParallelMap
) -> RecordedCalls:
    return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One all-to-all of all ranks of a group."""

    members: tuple[int, ...]
    sent: Matrix  # bytes from member to member
    seconds: float  # of the last rank to arrive


def exchanges_of(table: pa.Table) -> tuple[list[Exchange], int]:
    """Return the exchanges whose ranks were all read, and the number of others.

    `table` has the columns of `RecordedCalls`.
    """
    rows: dict[tuple[tuple[int, ...], int], list[Mapping[str, Any]]] = {}
    for row in table.to_pylist():
        rows.setdefault((tuple(row["members"]), row["number"]), []).append(row)
    whole, others = [], 0
    for (members, _), own in rows.items():
        if len(members) != len(own):
            others += 1
            continue
        by_rank = {row["rank"]: row for row in own}
        if set(by_rank) != set(members):
            others += 1
            continue
        sent = np.array([by_rank[rank]["sent_bytes"] for rank in members], np.int64)
        seconds = min(row["ns"] for row in own) / NS
        whole.append(Exchange(members=members, sent=sent, seconds=seconds))
    return whole, others


@dataclass(frozen=True)
class RecordedTraffic(Traffic):
    """Traffic of which only bytes between ranks are recorded: each is a token of its own."""

    @classmethod
    def of_matrix(cls, sent: Matrix, width: int) -> "RecordedTraffic":
        """Return the traffic of tokens from GPU to GPU, with `width` GPUs per node."""
        gpus = len(sent)
        nodes = gpus // width
        no_tokens = np.empty((0, 1), np.int32)
        home = np.arange(gpus, dtype=np.int32)
        return cls(
            copies=sent,
            unique=sent,
            node_unique=sent.reshape(gpus, nodes, width).sum(axis=2),
            expert_load=sent.sum(axis=0),
            width=width,
            layer=LayerTokens(no_tokens[:, 0], no_tokens, home, nodes, width),
        )

    @cached_property
    def leaving(self) -> Any:
        """Number of tokens of each GPU that go to others, shape (GPUs,)."""
        return self.demand("copies").sum(axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSchedule:
    """Time of the all-to-alls of a step under one schedule, with the load as recorded or even.

    Seconds are of the mean step, and of the slowest group under the schedule. None is unknown.
    """

    name: str
    seconds: float | None
    # If all ranks of a group had equally many bytes: no placement of experts is faster.
    even_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The all-to-alls of a run that are compared."""

    path: str
    ranks: int
    steps: int
    groups: int
    exchanges: int  # whose ranks were all read
    incomplete: int
    without_splits: int  # calls of ranks
    gpus_per_node: int
    cluster: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunExchange(TableResult):
    """What schedules would save of the all-to-alls of a run."""

    has_long_tables: ClassVar[bool] = True

    run: RecordedRun
    slowest: tuple[int, ...]  # ranks of the group with the longest measured time
    measured_s: float  # of the mean step and the slowest group
    # Lower bound without deduplication, at the efficiency of the run; None with `no_savings`.
    bound_s: float | None
    fullest: float  # bytes of its fullest rank over the mean, weighted by bytes
    efficiency: float | None  # time of the model's direct schedule over the measured time
    no_savings: str | None  # why schedules and loads have no time
    schedules: tuple[RecordedSchedule, ...]  # the fastest first
    unanswered: dict[str, str]
    ranks: tuple[int, ...]
    sent: FloatArray  # bytes per step from rank to rank

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {
            "run": asdict(self.run),
            "slowest_group": list(self.slowest),
            "measured_ns": self.measured_s * NS,
            "bound_ns": _ns(self.bound_s),
            "fullest_rank": self.fullest,
            "efficiency": self.efficiency,
            "no_savings": self.no_savings,
            "schedules": self.rows(),
            "unanswered": self.unanswered,
            "ranks": list(self.ranks),
            "rank_pair_bytes": self.sent.tolist(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per schedule, with the keys of JSON and the table."""
        return [
            {
                "schedule": one.name,
                "latency_ns": _ns(one.seconds),
                "saved_ns": self._saved_ns(one.seconds),
                "even_latency_ns": _ns(one.even_s),
                "even_saved_ns": self._saved_ns(one.even_s),
            }
            for one in self.schedules
        ]

    def _saved_ns(self, seconds: float | None) -> float | None:
        """Return what a time saves of the measured one, in ns."""
        return None if seconds is None else (self.measured_s - seconds) * NS

    def to_arrow(self) -> pa.Table:
        """Return a row per schedule; times in ns."""
        return pa.Table.from_pylist(self.rows())

    def figures(self) -> dict[str, str]:
        """Return the measured time per step, and that of each schedule, the fastest first."""
        times = {
            one.name: format_s(one.seconds) for one in self.schedules if one.seconds is not None
        }
        return {"measured": format_s(self.measured_s)} | times


def compare_recorded(
    path: str | Path,
    network: DispatchOptions,
    schedules: Iterable[str] = BY_BYTES,
    gpus_per_node: int | None = None,
) -> RunExchange:
    """Compare schedules for the expert all-to-alls of a run.

    Parameters
    ----------
    path
        Traces of the run; its expert-parallel all-to-alls count, or all if no group is tagged
        so.
    network
        The cluster, and what replaces its links.
    schedules
        Names of schedules.
    gpus_per_node
        GPUs of a node, which ranks fill in order; by default those of the cluster.

    Raises
    ------
    ConfigError
        If a schedule is unknown, or groups do not fill nodes evenly.
    FastcommError
        If the run cannot be read, or has no all-to-all with splits.

    """
    names, unanswered = _answerable(schedules)
    calls = _gathered(preparation.open_traces((path,), ReadOptions()))
    whole, incomplete = exchanges_of(_of_experts(calls.table))
    if not whole:
        raise FastcommError(_NO_SPLITS.format(path))
    cluster_gpus, links = _links(network)
    per_node, steps = gpus_per_node or cluster_gpus, max(1, len(calls.steps))
    by_group: dict[tuple[int, ...], list[Exchange]] = {}
    for exchange in whole:
        by_group.setdefault(exchange.members, []).append(exchange)
    models = [_Model.of(own, per_node, links, network) for own in by_group.values()]
    slowest = max(models, key=lambda model: model.measured_s)
    ranks, sent = _between(whole, steps)
    timed = [_timed(name, models, steps) for name in names]
    order = {name: place for place, name in enumerate(BY_BYTES)}
    timed.sort(
        key=lambda one: (math.inf if one.seconds is None else one.seconds, order[one.name])
    )
    return RunExchange(
        run=RecordedRun(
            path=str(path),
            ranks=calls.ranks,
            steps=len(calls.steps),
            groups=len(by_group),
            exchanges=len(whole),
            incomplete=incomplete,
            without_splits=calls.without_splits,
            gpus_per_node=per_node,
            cluster=str(network.cluster or _CLUSTER),
        ),
        slowest=slowest.members,
        measured_s=slowest.measured_s / steps,
        bound_s=None if slowest.no_savings else slowest.scaled(slowest.bound_s()) / steps,
        fullest=_fullest(by_group[slowest.members]),
        efficiency=slowest.efficiency,
        no_savings=slowest.no_savings,
        schedules=tuple(timed),
        unanswered=unanswered,
        ranks=ranks,
        sent=sent,
    )


def _answerable(schedules: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the schedules with an answer, and why others have none."""
    names = list(schedules)
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise ConfigError(
            f"unknown strategy {', '.join(unknown)}: expected {', '.join(BY_BYTES)}"
        )
    reasons = {name: NO_EXPERTS if name == "deepep-ll" else NO_TOKENS for name in STRATEGIES}
    unanswered = {name: f"{name}: {reasons[name]}" for name in names if name not in BY_BYTES}
    return [name for name in names if name in BY_BYTES], unanswered


def _gathered(run: OpenedRun) -> RecordedCalls:
    """Return the calls of all ranks."""
    run.compile(preparation.compile_kernels)
    return run.gather(Task(measure=_calls, merge=_merged, finish=_whole, content="metrics"))


def _of_experts(table: pa.Table) -> pa.Table:
    """Return the calls of expert parallelism; all calls if there are none."""
    is_expert = table["tag"].to_numpy() == TAGS.index("EP")
    return table.filter(pa.array(is_expert)) if is_expert.any() else table


def _links(network: DispatchOptions) -> tuple[int, GpuLinks]:
    """Return the GPUs of a node, and their links."""
    cluster = network.cluster or _CLUSTER
    per_node, links = load_node(cluster)
    rates = {"inter": network.bw_inter, "intra": network.bw_intra}
    bandwidths = {
        f"{kind}_bytes_per_s": parse_bandwidth(value, f"bw_{kind}")
        for kind, value in rates.items()
        if value is not None
    }
    return per_node, replace(rated_links(cluster, links), **bandwidths)


@dataclass(frozen=True, kw_only=True)
class _Model:
    """Exchanges of a group: traffic as recorded and even, and the terms of their simulation."""

    members: tuple[int, ...]
    measured_s: float  # of all exchanges
    count: int  # of exchanges
    times: FloatArray  # measured seconds of those that are simulated
    recorded: tuple[RecordedTraffic, ...]
    even: tuple[RecordedTraffic, ...]
    terms: Terms

    @classmethod
    def of(
        cls,
        exchanges: Sequence[Exchange],
        per_node: int,
        links: GpuLinks,
        network: DispatchOptions,
    ) -> "_Model":
        """Return the model of at most `_MOST_SIMULATED` exchanges."""
        chosen = exchanges[:: -(-len(exchanges) // _MOST_SIMULATED)]
        # Bytes that all splits are multiples of: those of a row of the tensor, or several.
        unit = int(np.gcd.reduce([np.gcd.reduce(one.sent.ravel()) for one in chosen])) or 1
        placed = [_by_node(one.sent // unit, one.members, per_node) for one in chosen]
        evened = [
            (np.full_like(sent, -(-int(sent.sum()) // sent.size)), width)
            for sent, width in placed
        ]
        return cls(
            members=exchanges[0].members,
            measured_s=sum(one.seconds for one in exchanges),
            count=len(exchanges),
            times=np.array([one.seconds for one in chosen]),
            recorded=tuple(RecordedTraffic.of_matrix(*one) for one in placed),
            even=tuple(RecordedTraffic.of_matrix(*one) for one in evened),
            terms=Terms(
                token_bytes=unit,
                combine_bytes=unit,
                links=links,
                decomposition=network.decomposition,
            ),
        )

    @cached_property
    def direct(self) -> FloatArray:
        """Seconds of the direct schedule by exchange."""
        run = STRATEGIES["direct"].run
        return np.array([run(traffic, self.terms).seconds for traffic in self.recorded])

    @property
    def efficiency(self) -> float | None:
        """Time of the direct schedule over the measured time; None if nothing was measured."""
        measured = float(self.times.mean())
        return float(self.direct.mean()) / measured if measured else None

    @cached_property
    def no_savings(self) -> str | None:
        """Why bytes do not determine the measured times; None if they do."""
        if not self.direct.any():
            return "no bytes go to other ranks"
        efficiency = self.efficiency
        if efficiency is None:
            return "all-to-alls take no time"
        if efficiency < _LEAST_EFFICIENCY:
            return (
                f"all-to-alls reach {percent(efficiency)} of the links, less than "
                f"{percent(_LEAST_EFFICIENCY)}: starts and hosts limit them, and not bytes"
            )
        return None

    @cached_property
    def start_s(self) -> float:
        """Seconds of an exchange that do not shrink with bytes.

        Fitted to exchanges of different sizes, else those of NCCL.
        """
        least, mean = float(self.times.min()), float(self.direct.mean())
        variance = float(self.direct.var())
        if math.sqrt(variance) < _LEAST_VARIATION * mean:
            return min(_START_S, least)
        slope = (
            float(((self.direct - mean) * (self.times - self.times.mean())).mean()) / variance
        )
        return min(max(0.0, float(self.times.mean()) - slope * mean), least)

    def scaled(self, seconds: float) -> float:
        """Return the time of all exchanges, at the efficiency of the run.

        `seconds` is the mean of the model. Where bytes do not limit, it is the measured time.
        """
        if self.no_savings:
            return self.measured_s
        start = self.start_s * self.count
        return start + (self.measured_s - start) * seconds / float(self.direct.mean())

    def seconds(self, name: str) -> tuple[float, float]:
        """Return the seconds of all exchanges under a schedule: as recorded, and even."""
        run = STRATEGIES[name].run
        sums = [
            sum(run(traffic, self.terms).seconds for traffic in kind) / len(kind)
            for kind in (self.recorded, self.even)
        ]
        return self.scaled(sums[0]), self.scaled(sums[1])

    def bound_s(self) -> float:
        """Return the mean lower bound of an exchange without deduplication, in seconds."""
        size = self.terms.token_bytes
        limits = [bounds(traffic, self.terms.links, size) for traffic in self.recorded]
        return sum(one.optimal_s for one in limits) / len(limits)


def _timed(name: str, models: Sequence[_Model], steps: int) -> RecordedSchedule:
    """Return the time of a step under a schedule, for which all groups wait."""
    slowest = max(models, key=lambda model: model.measured_s)
    if slowest.no_savings:
        is_measured = name == "direct" and slowest.measured_s > 0
        seconds = slowest.measured_s / steps if is_measured else None
        return RecordedSchedule(name=name, seconds=seconds, even_s=None)
    times = [model.seconds(name) for model in models]
    return RecordedSchedule(
        name=name,
        seconds=max(seconds for seconds, _ in times) / steps,
        even_s=max(even_s for _, even_s in times) / steps,
    )


def _by_node(sent: Matrix, members: Sequence[int], per_node: int) -> tuple[Matrix, int]:
    """Return what members of a group send, node by node, and how many a node has.

    Raises `ConfigError` if nodes do not have equally many.
    """
    node = np.array(members) // per_node
    counts = np.unique(node, return_counts=True)[1]
    if len(set(counts.tolist())) > 1:
        raise ConfigError(
            f"ranks {members[0]} to {members[-1]} of a group fill nodes of {per_node} GPUs "
            "unevenly; pass --gpus-per-node"
        )
    order = np.argsort(node, kind="stable")
    return np.ascontiguousarray(sent[np.ix_(order, order)]), int(counts[0])


def _between(exchanges: Sequence[Exchange], steps: int) -> tuple[tuple[int, ...], FloatArray]:
    """Return the ranks in order, and the bytes per step from rank to rank."""
    ranks = np.unique(np.concatenate([one.members for one in exchanges]))
    sent = np.zeros((len(ranks), len(ranks)))
    for one in exchanges:
        place = np.searchsorted(ranks, one.members)
        sent[np.ix_(place, place)] += one.sent
    return tuple(ranks.tolist()), sent / steps


def _fullest(exchanges: Sequence[Exchange]) -> float:
    """Return the bytes of the fullest rank of a group over the mean, of all exchanges."""
    most = sum(
        int(max(one.sent.sum(axis=0).max(), one.sent.sum(axis=1).max())) for one in exchanges
    )
    mean = sum(float(one.sent.sum()) / len(one.members) for one in exchanges)
    return most / mean if mean else 1.0


def _ns(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * NS
