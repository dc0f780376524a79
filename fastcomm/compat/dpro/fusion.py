"""Search for groups of tensors to communicate together, with a cost model of communication."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from typing import Any

import numpy as np

from fastcomm.compat.dpro.dependency import Group, combined, group_name, over_network
from fastcomm.compat.dpro.replayed import Replayed, Replayer
from fastcomm.compat.dpro.trial import Trial
from fastcomm.errors import FastcommError

_TEST_INTERVAL = 10  # every tenth group, by size, tests the model instead of fitting it


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Time of an operation as a linear function of its bytes."""

    slope: float  # ns per byte
    offset: float  # ns

    def time(self, size: float) -> float:
        """Return the time for `size` bytes, in ns."""
        return self.slope * size + self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Times of the operations of communication, by process and sub-operation."""

    lines: Mapping[tuple[str, str], Line]
    error: float | None  # mean relative error for groups that were not fitted

    def time(self, pid: str, sub_op: str, size: float) -> float:
        """Return the ns of sending or receiving bytes; 0 if that was never measured.

        Parameters
        ----------
        pid
            Process of the rank or the link.
        sub_op
            Part of the communication, such as "SEND".
        size
            Bytes.

        """
        line = self.lines.get((pid, sub_op))
        return 0.0 if line is None else line.time(size)


def fitted(points: Iterable[tuple[float, float]]) -> Line:
    """Fit a line to pairs (bytes, ns) by least squares, with slope and offset of 0 or more."""
    from scipy.optimize import nnls

    pairs = np.array(list(points), np.float64)
    scale = max(float(pairs[:, 0].max()), 1.0)
    system = np.column_stack((pairs[:, 0] / scale, np.ones(len(pairs))))
    slope, offset = nnls(system, pairs[:, 1])[0].tolist()
    return Line(slope=slope / scale, offset=offset)


def cost_model(replayer: Replayer, bytes_of: Mapping[tuple[int, ...], int]) -> CostModel:
    """Fit the measured times of communication to the bytes of the groups.

    Parameters
    ----------
    replayer
        Has the measured times.
    bytes_of
        Bytes of each group of tensors. Every tenth group tests the model.

    """
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    tests: list[tuple[tuple[str, str], float, float]] = []
    groups = sorted(bytes_of, key=lambda group: (bytes_of[group], group))
    fit_groups = {
        group for i, group in enumerate(groups) if i % _TEST_INTERVAL != _TEST_INTERVAL - 1
    }
    for name, avg in zip(replayer.names, replayer.measured.avg.tolist(), strict=True):
        if name.op_cat != "Comm" or name.tensors not in bytes_of or not name.sub_op:
            continue
        key, size = (name.pid or "", name.sub_op), float(bytes_of[name.tensors])
        if name.tensors in fit_groups:
            points.setdefault(key, []).append((size, avg))
        elif avg > 0:
            tests.append((key, size, avg))
    lines = {key: fitted(pairs) for key, pairs in points.items()}
    errors = [abs(lines[key].time(size) / avg - 1) for key, size, avg in tests if key in lines]
    return CostModel(lines=lines, error=float(np.mean(errors)) if errors else None)


def worth_fusing(end_comm: float, end_comp: float, fused: float, alone: float) -> bool:
    """Return whether two consecutive groups end sooner if they are communicated together.

    Parameters
    ----------
    end_comm
        End of the communication of the first group, ns.
    end_comp
        End of the computation of the second group, ns.
    fused, alone
        Communication time of both groups together, and of the second one alone, ns.

    """
    return end_comm > end_comp + fused - alone


_BETA = 10.0  # of simulated annealing: how fast worse candidates become unlikely, per ms
_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Best groups of tensors of a search."""

    groups: tuple[Group, ...]
    replayed: Replayed  # with these groups
    before: Replayed  # with the groups of the trial, by the same cost model
    model: CostModel
    tried: int  # candidates

    @property
    def speedup(self) -> float:
        """Ratio of the mean step time before to that with the groups."""
        return self.before.mean_ns / self.replayed.mean_ns

    def to_dict(self) -> dict[str, Any]:
        """Return the part of a replay's JSON document about the groups."""
        return {
            "groups": [list(group) for group in self.groups],
            "mean_step_ns": self.replayed.mean_ns,
            "before_ns": self.before.mean_ns,
            "speedup": self.speedup,
            "tried": self.tried,
            "model_error": self.model.error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """Replays a step of a trial with other groups of tensors."""

    trial: Trial
    replayer: Replayer  # of the groups of the trial
    model: CostModel

    def replay(self, groups: Sequence[Group]) -> Replayed:
        """Replay the step with the given groups; needs the trial's rings or trees."""
        trial, topology = self.trial, self.trial.topology
        if topology is None:
            raise FastcommError(
                "cannot predict other groups of tensors: the trial has no "
                "nccl_rank_graph.json, which dPRO's NCCL writes"
            )
        counts = {group_name(group): self._counts(group) for group in groups}
        slices = over_network(trial.graph, counts, topology)
        graph = combined(trial.trace.pids, trial.graph, groups, slices)
        original = self.replayer.measured
        own = {node: i for i, node in enumerate(self.replayer.graph.nodes)}
        waits = {
            name.pid: gap
            for name, gap in zip(self.replayer.names, original.comm_gap.tolist(), strict=True)
            if name.sub_op == "Sync"
        }
        names = graph.parsed()
        is_local = [name.op_cat != "Comm" for name in names]
        pairs = zip(graph.nodes, is_local, strict=True)
        measured = original.at(
            np.array([own.get(n, -1) if local else -1 for n, local in pairs])
        )
        sizes = {group: trial.parameters.group_bytes(group) or 0 for group in groups}
        for i, name in enumerate(names):
            if name.sub_op == "Sync":
                measured.comm_gap[i] = waits.get(name.pid, 0.0)
            elif not is_local[i]:
                size = sizes[name.tensors]
                measured.avg[i] = self.model.time(name.pid or "", name.sub_op or "", size)
        return Replayer.of(graph, measured, self.replayer.options).replay()

    def _counts(self, group: Group) -> dict[str, int]:
        """Return loops, channels, chunks and slices: the maxima over the group's tensors."""
        counts: dict[str, int] = {}
        for old in self.replayer.graph.groups:
            if set(old) & set(group):
                for key, number in self.trial.counts.get(group_name(old), {}).items():
                    counts[key] = max(counts.get(key, 0), number)
        return counts


def fusion(trial: Trial, replayer: Replayer, steps: int, seed: int = 0) -> Fusion:
    """Search for groups of tensors that shorten a step, by simulated annealing.

    Parameters
    ----------
    trial
        The trial.
    replayer
        Replayer of a step of the trial.
    steps
        Number of candidates.
    seed
        Seed of the random numbers.

    Raises
    ------
    FastcommError
        If the size of a tensor is unknown, or the trial has no rings or trees of NCCL.

    """
    groups = replayer.graph.groups
    sizes = {group: trial.parameters.group_bytes(group) for group in groups}
    if unknown := [group for group, size in sizes.items() if size is None]:
        raise FastcommError(
            f"metadata.json does not have the size of tensor {'+'.join(map(str, unknown[0]))}. "
            "Add its output under its name"
        )
    model = cost_model(
        replayer, {group: size for group, size in sizes.items() if size is not None}
    )
    candidates = _Candidates(trial=trial, replayer=replayer, model=model)
    before = candidates.replay(groups)
    order = _ready(before)
    best = state = _Cut(order=order, starts=frozenset(_greedy(trial, before, order)))
    best_replay = replayed = candidates.replay(state.groups)
    chance = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        if len(order) < 2:  # noqa: PLR2004
            break
        other = state.moved(int(chance.integers(1, len(order))))
        candidate = candidates.replay(other.groups)
        longer_ms = (candidate.mean_ns - replayed.mean_ns) / _MS
        if longer_ms <= 0 or chance.random() < exp(-_BETA * log(step + 1) * longer_ms):
            state, replayed = other, candidate
        if replayed.mean_ns < best_replay.mean_ns:
            best, best_replay = state, replayed
    return Fusion(
        groups=best.groups, replayed=best_replay, before=before, model=model, tried=steps
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A sequence of tensors, cut into groups of consecutive tensors."""

    order: tuple[int, ...]
    starts: frozenset[int]  # positions at which a group begins, besides 0

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups; the tensors of each are sorted."""
        bounds = [0, *sorted(self.starts), len(self.order)]
        return tuple(tuple(sorted(self.order[a:b])) for a, b in pairwise(bounds))

    def moved(self, at: int) -> "_Cut":
        """Add a cut at a position, or remove the cut at it."""
        return _Cut(order=self.order, starts=self.starts ^ {at})


def _ready(replayed: Replayed) -> tuple[int, ...]:
    """Return the tensors in the order in which the last rank has computed them."""
    ready: dict[int, float] = {}
    for name, end in zip(replayed.replayer.names, replayed.end.tolist(), strict=True):
        if name.sub_op == "Sync":
            for tensor in name.tensors:
                ready[tensor] = max(ready.get(tensor, 0.0), end)
    return tuple(sorted(ready, key=lambda tensor: (ready[tensor], tensor)))


def _greedy(trial: Trial, replayed: Replayed, order: Sequence[int]) -> list[int]:
    """Return the starts of groups by one greedy pass over the tensors."""
    spans, size_of = _spans(replayed), trial.parameters.bytes_of
    line = fitted(
        (sum(size_of[tensor] for tensor in group), sent - ready)
        for group, (ready, sent) in spans.items()
    )
    starts: list[int] = []
    size, end = 0, 0.0
    for i, tensor in enumerate(order):
        own = size_of[tensor]
        computed = next(ready for group, (ready, _) in spans.items() if tensor in group)
        fused, alone = line.time(size + own), line.time(own)
        if i and worth_fusing(end, computed, fused, alone):
            size, end = size + own, computed + fused
        else:
            starts += [i] if i else []
            size, end = own, max(end, computed) + alone
    return starts


def _spans(replayed: Replayed) -> dict[Group, tuple[float, float]]:
    """Return when all ranks have computed each group, and when it was communicated, in ns."""
    spans: dict[Group, tuple[float, float]] = {}
    ends = zip(replayed.replayer.names, replayed.end.tolist(), strict=True)
    for name, end in ends:
        if name.op_cat == "Comm":
            ready, sent = spans.get(name.tensors, (0.0, 0.0))
            is_ready = name.sub_op == "Sync"
            spans[name.tensors] = (max(ready, end) if is_ready else ready, max(sent, end))
    return spans
