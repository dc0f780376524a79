"""Search which tensors to send together, with a cost model of communication."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log, sqrt

import numpy as np

from fastcomm.errors import FastcommError
from fastcomm.readers.dpro.trial import Trial
from fastcomm.replay import Replayed, Replayer
from fastcomm.replay.dependency import Group, head_of, joined, through_network

_TENTH = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`slope` ns a byte, `offset` ns."""

    slope: float
    offset: float

    def time(self, size: float) -> float:
        """Nanoseconds that `size` bytes take."""
        return self.slope * size + self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A line by (pid, sub_op); `error` is the mean relative one of what was not fitted."""

    lines: Mapping[tuple[str, str], Line]
    error: float | None

    def time(self, pid: str, sub_op: str, size: float) -> float:
        """Nanoseconds of an operation of a group of `size` bytes; 0 where there was none."""
        line = self.lines.get((pid, sub_op))
        return 0.0 if line is None else line.time(size)


def fitted(points: Iterable[tuple[float, float]]) -> Line:
    """The line through (size, time) with the least squares of all that do not fall."""
    from scipy.optimize import nnls

    pairs = np.array(list(points), np.float64)
    scale = max(float(pairs[:, 0].max()), 1.0)
    system = np.column_stack((pairs[:, 0] / scale, np.ones(len(pairs))))
    slope, offset = nnls(system, pairs[:, 1])[0].tolist()
    return Line(slope=slope / scale, offset=offset)


def cost_model(made: Replayer, bytes_of: Mapping[tuple[int, ...], int]) -> CostModel:
    """Fit what the operations of a replay take; `bytes_of` is by group of tensors."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    held: list[tuple[tuple[str, str], float, float]] = []
    sizes = sorted(bytes_of, key=lambda group: (bytes_of[group], group))
    kept = {group for i, group in enumerate(sizes) if i % _TENTH != _TENTH - 1}
    for name, avg in zip(made.names, made.measured.avg.tolist(), strict=True):
        if name.op_cat != "Comm" or name.tensors not in bytes_of or not name.sub_op:
            continue
        key, size = (name.pid or "", name.sub_op), float(bytes_of[name.tensors])
        if name.tensors in kept:
            points.setdefault(key, []).append((size, avg))
        elif avg > 0:
            held.append((key, size, avg))
    lines = {key: fitted(each) for key, each in points.items()}
    errors = [abs(lines[key].time(size) / avg - 1) for key, size, avg in held if key in lines]
    return CostModel(lines=lines, error=float(np.mean(errors)) if errors else None)


def partitions(size: int, slope: float, offset: float) -> int:
    """Into how many parts to cut a tensor so that sending and what follows overlap best.

    `slope` is what the faster of the two takes a byte, `offset` what the slower takes a part;
    where a part takes nothing, there is one for each byte.
    """
    return max(1, int(sqrt(size * slope / offset)) if offset > 0 else size)


def worth_fusing(end_comm: float, end_comp: float, fused: float, alone: float) -> bool:
    """Whether two groups end sooner as one: the first is still sent when the second is ready.

    `end_comm` is when the first has been sent, `end_comp` when the second is computed, `fused`
    what both take as one, `alone` what the second takes.
    """
    return end_comm > end_comp + fused - alone


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
        is_local = [name.op_cat != "Comm" for name in names]
        pairs = zip(graph.nodes, is_local, strict=True)
        measured = known.at(np.array([own.get(n, -1) if local else -1 for n, local in pairs]))
        sizes = {group: trial.parameters.group_bytes(group) or 0 for group in groups}
        for i, name in enumerate(names):
            if name.sub_op == "Sync":
                measured.comm_gap[i] = waits.get(name.pid, 0.0)
            elif not is_local[i]:
                size = sizes[name.tensors]
                measured.avg[i] = self.model.time(name.pid or "", name.sub_op or "", size)
        return Replayer.of(graph, measured, self.made.options).run()

    def _counts(self, group: Group) -> dict[str, int]:
        """Loops, channels, chunks and slices: the most of what its tensors had."""
        counts: dict[str, int] = {}
        for old in self.made.graph.groups:
            if set(old) & set(group):
                for key, number in self.trial.counts.get(head_of(old), {}).items():
                    counts[key] = max(counts.get(key, 0), number)
        return counts


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
        tried = candidates.replay(other.groups)
        longer = (tried.mean_ns - replayed.mean_ns) / _MS
        if longer <= 0 or chance.random() < exp(-_BETA * log(step + 1) * longer):
            state, replayed = other, tried
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
    spans: dict[Group, tuple[float, float]] = {}
    ends = zip(replayed.replayer.names, replayed.end.tolist(), strict=True)
    for name, end in ends:
        if name.op_cat == "Comm":
            ready, sent = spans.get(name.tensors, (0.0, 0.0))
            is_ready = name.sub_op == "Sync"
            spans[name.tensors] = (max(ready, end) if is_ready else ready, max(sent, end))
    return spans
