"""All-to-alls of a run: what other schedules, or an even load of ranks, would take.

A run records how many bytes each rank sends to each other one in a call, and not which tokens.
So schedules that send a token once for several experts have no answer. An exchange takes the
shortest duration among its ranks, that of the last to arrive: it waits for nobody. The model
times the direct schedule, as NCCL sends, and another one; the measured time is scaled by their
ratio, so that it has the efficiency of the run. Times are in seconds, sizes in bytes.
"""

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
from fastcomm.hardware.clusters import GpuLinks, load_node
from fastcomm.hardware.gpus import FloatArray
from fastcomm.options import ReadOptions
from fastcomm.result import TableResult
from fastcomm.trace.columns import filled
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run import SkippedRank, Spread
from fastcomm.trace.schema import OP
from fastcomm.trace.trace import Trace
from fastcomm.units import format_s, parse_bandwidth
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NULL, Matrix

_CLUSTER = "dgx-h100"
# Schedules that need nothing but bytes from rank to rank.
BY_BYTES = ("direct", "spreadout", "hierarchical", "fast", "fast-published")
NO_TOKENS = "it sends a token once for several ranks, and a run does not record tokens"
_MOST_SIMULATED = 256  # exchanges; of more, evenly spaced ones
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
    number = filled(comm["seq"])
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
    calls: RecordedCalls, _skipped: Sequence[SkippedRank], _spread: Spread
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

    Seconds are of the mean step and group.
    """

    name: str
    seconds: float
    even_s: float  # if all ranks had equally many bytes: no placement of experts is faster


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
    measured_s: float  # of the mean step and group
    bound_s: float  # lower bound without deduplication, at the efficiency of the run
    fullest: float  # bytes of the fullest rank over the mean, weighted by bytes
    efficiency: float | None  # time of the model's direct schedule over the measured time
    schedules: tuple[RecordedSchedule, ...]  # the fastest first
    unanswered: dict[str, str]
    ranks: tuple[int, ...]
    sent: FloatArray  # bytes per step from rank to rank

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {
            "run": asdict(self.run),
            "measured_ns": self.measured_s * NS,
            "bound_ns": self.bound_s * NS,
            "fullest_rank": self.fullest,
            "efficiency": self.efficiency,
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
                "latency_ns": one.seconds * NS,
                "saved_ns": (self.measured_s - one.seconds) * NS,
                "even_latency_ns": one.even_s * NS,
                "even_saved_ns": (self.measured_s - one.even_s) * NS,
            }
            for one in self.schedules
        ]

    def to_arrow(self) -> pa.Table:
        """Return a row per schedule; times in ns."""
        return pa.Table.from_pylist(self.rows())

    def figures(self) -> dict[str, str]:
        """Return the measured time per step, and that of each schedule, the fastest first."""
        times = {one.name: format_s(one.seconds) for one in self.schedules}
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
    model = _Model.of(whole, per_node, links, network)
    groups = len({exchange.members for exchange in whole})
    measured_s = sum(exchange.seconds for exchange in whole) / (steps * groups)
    direct_s, _ = model.seconds("direct")
    scale = measured_s / direct_s if direct_s else 0.0
    ranks, sent = _between(whole, steps)
    timed = [(name, *model.seconds(name)) for name in names]
    return RunExchange(
        run=RecordedRun(
            path=str(path),
            ranks=calls.ranks,
            steps=len(calls.steps),
            groups=groups,
            exchanges=len(whole),
            incomplete=incomplete,
            without_splits=calls.without_splits,
            gpus_per_node=per_node,
            cluster=str(network.cluster or _CLUSTER),
        ),
        measured_s=measured_s,
        bound_s=model.bound_s() * scale,
        fullest=_fullest(whole),
        efficiency=_efficiency(direct_s, whole),
        schedules=tuple(
            RecordedSchedule(name=name, seconds=seconds * scale, even_s=even_s * scale)
            for name, seconds, even_s in sorted(timed, key=lambda one: one[1])
        ),
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
    unanswered = {name: f"{name}: {NO_TOKENS}" for name in names if name not in BY_BYTES}
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
    per_node, links = load_node(network.cluster or _CLUSTER)
    rates = {"inter": network.bw_inter, "intra": network.bw_intra}
    bandwidths = {
        f"{kind}_bytes_per_s": parse_bandwidth(value, f"bw_{kind}")
        for kind, value in rates.items()
        if value is not None
    }
    return per_node, replace(links, **bandwidths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """Traffic of exchanges, as recorded and even, and the terms of their simulation."""

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
            recorded=tuple(RecordedTraffic.of_matrix(*one) for one in placed),
            even=tuple(RecordedTraffic.of_matrix(*one) for one in evened),
            terms=Terms(
                token_bytes=unit,
                combine_bytes=unit,
                links=links,
                decomposition=network.decomposition,
            ),
        )

    def seconds(self, name: str) -> tuple[float, float]:
        """Return the mean seconds of an exchange under a schedule: as recorded, and even."""
        run = STRATEGIES[name].run
        sums = [
            sum(run(traffic, self.terms).seconds for traffic in kind) / len(kind)
            for kind in (self.recorded, self.even)
        ]
        return sums[0], sums[1]

    def bound_s(self) -> float:
        """Return the mean lower bound of an exchange without deduplication, in seconds."""
        size = self.terms.token_bytes
        limits = [bounds(traffic, self.terms.links, size) for traffic in self.recorded]
        return sum(one.optimal_s for one in limits) / len(limits)


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
    """Return the bytes of the fullest rank over the mean, of all exchanges together."""
    most = sum(
        int(max(one.sent.sum(axis=0).max(), one.sent.sum(axis=1).max())) for one in exchanges
    )
    mean = sum(float(one.sent.sum()) / len(one.members) for one in exchanges)
    return most / mean if mean else 1.0


def _efficiency(direct_s: float, exchanges: Sequence[Exchange]) -> float | None:
    """Return the time of the model over the measured time; None if nothing was measured."""
    measured_s = sum(one.seconds for one in exchanges) / len(exchanges)
    return direct_s / measured_s if measured_s else None
