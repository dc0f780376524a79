"""Which tensors to send as one: a search whose every candidate is replayed.

Candidates are runs of tensors in the order in which the backward pass gives them. What their
communication takes is of the cost model, what a rank computes is as measured. The search begins
with what pays by itself and goes on by chance (Metropolis): a change that makes a step longer
is taken with the probability exp(beta ln(step + 1) (old - new)), times in ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

import numpy as np

from fastcomm.errors import FastcommError
from fastcomm.replay.cost_model import CostModel, cost_model, fitted, worth_fusing
from fastcomm.replay.dependency import Group, head_of, joined, through_network
from fastcomm.replay.gaps import Measured
from fastcomm.replay.replayer import Replayed, Replayer
from fastcomm.replay.trial import Trial

_BETA = 10.0
_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """The groups found, and the mean step by the cost model with them and as it was."""

    groups: tuple[Group, ...]
    replayed: Replayed
    before: Replayed
    model: CostModel
    tried: int

    @property
    def speedup(self) -> float:
        """How many times as fast a step is."""
        return self.before.mean_ns / self.replayed.mean_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """What the replay of a candidate needs."""

    trial: Trial
    made: Replayer
    model: CostModel

    def replay(self, groups: Sequence[Group]) -> Replayed:
        """Replay the step with other groups of tensors."""
        trial, topology = self.trial, self.trial.topology
        if topology is None:
            raise FastcommError("no nccl_rank_graph.json: what a group would take is not known")
        counts = {head_of(group): self._counts(group) for group in groups}
        graph = joined(
            trial.trace.pids,
            trial.graph,
            groups,
            lambda pid, group: through_network(pid, group, trial.graph, counts, topology),
        )
        known, own = self.made.measured, {n: i for i, n in enumerate(self.made.graph.nodes)}
        waits = {
            name.pid: gap
            for name, gap in zip(self.made.names, known.comm_gap.tolist(), strict=True)
            if name.sub_op == "Sync"
        }
        names = graph.parsed()
        at = [own.get(node, -1) for node in graph.nodes]
        local = np.array([name.op_cat != "Comm" for name in names])
        avg = np.where(local, known.avg[at], 0.0)
        comm_gap = np.zeros(len(names))
        sizes = {group: self.trial.parameters.group_bytes(group) or 0 for group in groups}
        for i, name in enumerate(names):
            if name.sub_op == "Sync":
                comm_gap[i] = waits.get(name.pid, 0.0)
            elif not local[i]:
                avg[i] = self.model.time(name.pid or "", name.sub_op or "", sizes[name.tensors])
        measured = Measured(
            avg=avg,
            gap=np.where(local, known.gap[at], 0.0),
            samples=np.where(local, known.samples[at], 0),
            comm_gap=comm_gap,
        )
        return Replayer.of(graph, measured, self.made.options).run()

    def _counts(self, group: Group) -> dict[str, int]:
        """Loops, channels, chunks and slices: the most of what its tensors had."""
        found: dict[str, int] = {}
        for old in self.made.graph.groups:
            if set(old) & set(group):
                for key, number in self.trial.counts.get(head_of(old), {}).items():
                    found[key] = max(found.get(key, 0), number)
        return found


def fusion(trial: Trial, made: Replayer, steps: int, seed: int = 0) -> Fusion:
    """Search `steps` candidates for groups of tensors with which a step is shorter."""
    groups = made.graph.groups
    sizes = {group: trial.parameters.group_bytes(group) for group in groups}
    if unknown := [group for group, size in sizes.items() if size is None]:
        raise FastcommError(
            f"the size of tensor {'+'.join(map(str, unknown[0]))} is not known: wanted its "
            "output, under its name, in metadata.json"
        )
    model = cost_model(made, {group: size for group, size in sizes.items() if size is not None})
    candidates = _Candidates(trial=trial, made=made, model=model)
    before = candidates.replay(groups)
    order = _ready(before)
    best = state = _Cut(order=order, starts=frozenset(_greedy(trial, before, order)))
    best_replay = replayed = candidates.replay(state.groups)
    chance = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        if len(order) < 2:  # noqa: PLR2004
            break
        other = state.moved(int(chance.integers(1, len(order))))
        found = candidates.replay(other.groups)
        longer = (found.mean_ns - replayed.mean_ns) / _MS
        if longer <= 0 or chance.random() < exp(-_BETA * log(step + 1) * longer):
            state, replayed = other, found
        if replayed.mean_ns < best_replay.mean_ns:
            best, best_replay = state, replayed
    return Fusion(
        groups=best.groups, replayed=best_replay, before=before, model=model, tried=steps
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Tensors in order, cut into runs that begin at `starts`; the first always begins one."""

    order: tuple[int, ...]
    starts: frozenset[int]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The runs; a group's tensors are in the order of their ids."""
        bounds = [0, *sorted(self.starts), len(self.order)]
        return tuple(tuple(sorted(self.order[a:b])) for a, b in pairwise(bounds))

    def moved(self, at: int) -> "_Cut":
        """Cut at a place, or join what is cut there."""
        return _Cut(order=self.order, starts=self.starts ^ {at})


def _ready(replayed: Replayed) -> tuple[int, ...]:
    """Tensors in the order in which the last rank has them."""
    ready: dict[int, float] = {}
    for name, end in zip(replayed.replayer.names, replayed.end.tolist(), strict=True):
        if name.sub_op == "Sync":
            for tensor in name.tensors:
                ready[tensor] = max(ready.get(tensor, 0.0), end)
    return tuple(sorted(ready, key=lambda tensor: (ready[tensor], tensor)))


def _greedy(trial: Trial, replayed: Replayed, order: Sequence[int]) -> list[int]:
    """Where to begin a new group, going once over the tensors."""
    spans, size_of = _spans(replayed), trial.parameters.bytes_of
    whole = fitted(
        (sum(size_of[tensor] for tensor in group), sent - ready)
        for group, (ready, sent) in spans.items()
    )
    starts: list[int] = []
    size, end = 0, 0.0
    for i, tensor in enumerate(order):
        own = size_of[tensor]
        computed = next(ready for group, (ready, _) in spans.items() if tensor in group)
        fused, alone = whole.time(size + own), whole.time(own)
        if i and worth_fusing(end, computed, fused, alone):
            size, end = size + own, computed + fused
        else:
            starts += [i] if i else []
            size, end = own, max(end, computed) + alone
    return starts


def _spans(replayed: Replayed) -> dict[Group, tuple[float, float]]:
    """When all ranks have the tensors of a group, and when they have been sent."""
    found: dict[Group, tuple[float, float]] = {}
    ends = zip(replayed.replayer.names, replayed.end.tolist(), strict=True)
    for name, end in ends:
        if name.op_cat == "Comm":
            ready, sent = found.get(name.tensors, (0.0, 0.0))
            is_ready = name.sub_op == "Sync"
            found[name.tensors] = (max(ready, end) if is_ready else ready, max(sent, end))
    return found
