"""Measure how near placements of experts are to their bound: `docs/placement-accuracy.md`.

`python docs/placement_accuracy.py` places the same 720 drawn loads on every machine, in five
minutes. The definition of EPLB is that of the tests, which have to be on the path.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracles.dispatch import eplb_heaviest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from fastcomm.dispatch.placement import Loads, heaviest, least_load, place

Places = NDArray[np.int64]  # of variables, or whole numbers

PAGE = Path(__file__).with_name("placement-accuracy.md")
GROUPS = 8  # of experts, which stay in a node
_GPUS = (8, 16, 32, 64)
_SIZES = ((64, 8), (128, 32), (256, 64))  # experts, and the fewest more replicas
_SEEDS = range(3)
_EVEN = 1.01  # over the bound, above which cases are counted
_BAR = 1.05  # over the bound, above which a tighter bound is computed
_HOT = 8  # experts whose replicas the tighter bound counts
_NODES, _GAP = 20_000, 1e-3  # of the search for the tighter bound
_TINY = 1e-9  # relative: rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A load to place."""

    kind: str  # of load
    load: Loads
    replicas: int
    groups: int  # 1 is all GPUs alike
    nodes: int
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The heaviest GPU of a placement over its bound, and whether EPLB's is lighter."""

    case: Case
    ratio: float
    is_worse: bool


def drawn(kind: str, experts: int, random: np.random.Generator) -> Loads:
    """Return tokens of experts, shape (experts,)."""
    law, _, number = kind.partition(" ")
    if law == "uniform":
        share = np.ones(experts)
    elif law == "zipf":
        share = random.permutation(np.arange(1, experts + 1) ** -float(number))
    elif law == "lognormal":
        share = random.lognormal(0, float(number), experts)
    else:
        share = random.uniform(0.5, 1.5, experts)
        share[random.choice(experts, int(number), replace=False)] *= experts / 8
    return random.poisson(share / share.sum() * 1000 * experts).astype(np.float64)


KINDS = (
    "uniform",
    *(f"zipf {exponent}" for exponent in (0.5, 0.8, 1.0, 1.2, 1.5)),
    *(f"lognormal {deviation}" for deviation in (0.5, 1.0)),
    *(f"hot {number}" for number in (1, 4)),
)


def cases() -> Iterator[Case]:
    """Yield the cases: kinds of load, clusters, models, and seeds, globally and by node."""
    for kind, gpus, (experts, spare), seed in product(KINDS, _GPUS, _SIZES, _SEEDS):
        random = np.random.default_rng([KINDS.index(kind), gpus, experts, seed])
        load = drawn(kind, experts, random)
        for groups in (1, GROUPS):
            yield Case(
                kind=kind,
                load=load,
                replicas=experts + -(-spare // gpus) * gpus,
                groups=groups,
                nodes=max(2, gpus // 8),
                gpus=gpus,
            )


def bound(case: Case) -> float:
    """Return the least load of the heaviest GPU: the mean or the largest replica.

    By node, that of the heaviest node, for the best division of groups among nodes.
    """
    if case.groups % case.nodes:
        return least_load(case.load, case.replicas, case.gpus)
    parts = case.load.reshape(case.groups, -1)
    room = case.groups // case.nodes
    own = {
        members: least_load(
            parts[list(members)].ravel(),
            case.replicas // case.nodes,
            case.gpus // case.nodes,
        )
        for members in combinations(range(case.groups), room)
    }
    return min(max(own[node] for node in one) for one in _divisions(range(case.groups), room))


def _divisions(items: Iterable[int], room: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield all divisions of items into parts of `room`."""
    first, *rest = items
    for others in combinations(rest, room - 1):
        part = first, *others
        remaining = [item for item in rest if item not in others]
        if not remaining:
            yield [part]
            continue
        for divided in _divisions(remaining, room):
            yield [part, *divided]


def least(case: Case) -> float:
    """Return a load that the heaviest GPU has in every placement by node: a tighter bound.

    `relaxed` bounds nodes, first those that determine the bound, until none gets heavier.
    """
    room = case.groups // case.nodes
    parts = case.load.reshape(case.groups, -1)
    shape = case.replicas // case.nodes, case.gpus // case.nodes
    nodes = [*combinations(range(case.groups), room)]
    loads = {node: parts[list(node)].ravel() for node in nodes}
    own = {node: least_load(load, *shape) for node, load in loads.items()}
    solved: set[tuple[int, ...]] = set()
    divisions = [*_divisions(range(case.groups), room)]
    while True:
        best = min(divisions, key=lambda one: max(own[node] for node in one))
        heavy = max(best, key=lambda node: own[node])
        if heavy in solved:
            return own[heavy]
        own[heavy] = max(own[heavy], relaxed(loads[heavy], *shape))
        solved.add(heavy)


def relaxed(load: Loads, replicas: int, gpus: int) -> float:
    """Return a lower bound of the heaviest GPU of any placement, by an integer program.

    The hottest experts have whole numbers of replicas on GPUs. Other experts with equally many
    replicas are one amount: a GPU with some of these replicas has at least the load of the
    lightest ones, and at most that of the heaviest. Every placement meets these conditions.
    """
    load, floor = np.sort(load)[::-1], least_load(load, replicas, gpus)
    counts = np.arange(1, replicas - len(load) + 2)  # of replicas of an expert
    program = Program()
    heavy = program.variables((), 1.0, np.inf)
    weights = (
        _hot_replicas(program, load[:_HOT] / floor, counts, (gpus, replicas // gpus), heavy),
        _other_replicas(program, load[_HOT:] / floor, counts, (gpus, replicas // gpus)),
    )
    for gpu in range(gpus):
        slots = [(own[gpu], 1.0) for _, _, own in weights]
        program.require(slots, replicas // gpus, replicas // gpus)
        own = [(places[gpu], factors) for places, factors, _ in weights]
        program.require([*own, (heavy, -1.0)], -np.inf, 0)
    return floor * program.least(heavy)


# Variables of the loads of GPUs and their factors, and variables of their slots.
_Weights = tuple[Places, Any, Places]


def _hot_replicas(
    program: "Program", load: Loads, counts: Places, shape: tuple[int, int], heavy: Places
) -> _Weights:
    """Require whole numbers of replicas; `shape` has the GPUs and the slots of a GPU."""
    gpus, room = shape
    chosen = program.variables((len(load), len(counts)), 0, 1, is_whole=True)
    slots = program.variables((gpus, len(load), len(counts)), 0, room, is_whole=True)
    for e, own in enumerate(load):
        program.require([(chosen[e], 1.0)], 1, 1)
        program.require([(chosen[e], own / counts), (heavy, -1.0)], -np.inf, 0)
        for at, count in enumerate(counts.tolist()):
            program.require([(slots[:, e, at], 1.0), (chosen[e, at], -count)], 0, 0)
            for gpu in range(gpus):
                most = (chosen[e, at], -min(count, room))
                program.require([(slots[gpu, e, at], 1.0), most], -np.inf, 0)
    for one, other in pairwise(slots[:, 0]):
        # GPUs are alike: those with the hottest expert are first.
        program.require([(one, 1.0), (other, -1.0)], 0, np.inf)
    return slots.reshape(gpus, -1), (load[:, None] / counts).ravel(), slots.reshape(gpus, -1)


def _other_replicas(
    program: "Program", load: Loads, counts: Places, shape: tuple[int, int]
) -> _Weights:
    """Require what replicas of sorted loads have in total; arguments as `_hot_replicas`."""
    gpus, room = shape
    experts = program.variables((len(counts),), 0, len(load), is_whole=True)
    slots = program.variables((gpus, len(counts)), 0, room, is_whole=True)
    fluid = program.variables((gpus, len(counts)), 0, np.inf)
    program.require([(experts, 1.0)], len(load), len(load))
    program.require([(fluid, 1.0)], load.sum(), load.sum())
    for at, count in enumerate(counts.tolist()):
        program.require([(slots[:, at], 1.0), (experts[at], -count)], 0, 0)
        for gpu, (slope, start) in product(range(gpus), _sums(load, room, count)):
            own = [(fluid[gpu, at], 1.0), (slots[gpu, at], -slope)]
            program.require(own, -np.inf, start)
        for gpu, (slope, start) in product(range(gpus), _sums(load[::-1], room, count)):
            own = [(fluid[gpu, at], 1.0), (slots[gpu, at], -slope)]
            program.require(own, start, np.inf)
    return fluid, 1.0, slots


def _sums(load: Loads, room: int, count: int) -> list[tuple[float, float]]:
    """Return slope and start of the lines through sums of the first replicas of loads.

    `load` is sorted, and each has `count` replicas.
    """
    shares = np.repeat(load / count, count)[:room]
    sums = np.concatenate([[0.0], np.cumsum(shares)])
    return [(slope, sums[at] - at * slope) for at, slope in enumerate(shares.tolist())]


class Program:
    """A linear program with whole numbers, which is built condition by condition."""

    def __init__(self) -> None:
        self._low: list[float] = []
        self._high: list[float] = []
        self._whole: list[int] = []
        self._entries: list[tuple[int, int, float]] = []
        self._ends: list[tuple[float, float]] = []

    def variables(
        self, shape: tuple[int, ...], low: float, high: float, *, is_whole: bool = False
    ) -> Places:
        """Add variables between two numbers; return their places, an array of a shape."""
        start, number = len(self._low), int(np.prod(shape))
        self._low += [low] * number
        self._high += [high] * number
        self._whole += [int(is_whole)] * number
        return np.arange(start, start + number).reshape(shape)

    def require(
        self, terms: Sequence[tuple[Any, float | Loads]], low: float, high: float
    ) -> None:
        """Add a condition: a sum of terms (places, factors) is between two numbers."""
        row = len(self._ends)
        for places, factors in terms:
            pairs = np.broadcast_arrays(np.ravel(places), factors)
            self._entries += [
                (row, *pair) for pair in zip(*(one.tolist() for one in pairs), strict=True)
            ]
        self._ends.append((low, high))

    def least(self, place: Places) -> float:
        """Return a bound below the least value of a variable, the same on every machine."""
        rows, columns, factors = zip(*self._entries, strict=True)
        shape = len(self._ends), len(self._low)
        solved = milp(
            np.eye(1, shape[1], int(place)).ravel(),
            constraints=LinearConstraint(
                coo_array((factors, (rows, columns)), shape=shape).tocsr(),
                *np.transpose(self._ends),
            ),
            integrality=np.array(self._whole),
            bounds=Bounds(np.array(self._low), np.array(self._high)),
            options={"node_limit": _NODES, "mip_rel_gap": _GAP},
        )
        return float(solved.mip_dual_bound)


def measured(case: Case) -> Outcome:
    """Place a load, beside its bound and EPLB."""
    shape = case.replicas, case.groups, case.nodes, case.gpus
    load = heaviest(case.load, place(case.load, *shape).logical, case.gpus)
    eplb = eplb_heaviest(case.load.tolist(), *shape)
    ratio = load / bound(case)
    return Outcome(case=case, ratio=ratio, is_worse=load > eplb * (1 + _TINY))


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the page of outcomes."""
    rows = {"all": list(outcomes)}
    for groups, title in ((1, "all GPUs alike"), (GROUPS, f"{GROUPS} groups, each in a node")):
        rows[title] = [one for one in outcomes if one.case.groups == groups]
    rows |= {kind: [one for one in outcomes if one.case.kind == kind] for kind in KINDS}
    rows |= {
        f"{gpus} GPUs": [one for one in outcomes if one.case.gpus == gpus] for gpus in _GPUS
    }
    table = [_row(title, own) for title, own in rows.items()]
    heavy = sorted(
        (one for one in outcomes if one.ratio > _BAR), key=lambda one: one.ratio, reverse=True
    )
    return "\n".join([_HEAD.rstrip("\n"), *table, "", _HEAVY, *map(_heavy_row, heavy)]) + "\n"


def _row(title: str, own: Sequence[Outcome]) -> str:
    ratio = np.array([one.ratio for one in own])
    share, worse = float((ratio > _EVEN).mean()), sum(one.is_worse for one in own)
    return (
        f"| {title} | {len(own)} | {ratio.mean():.4f} | {ratio.max():.4f} | {share:.1%} | "
        f"{worse} |"
    ).replace("%", " %")


def _heavy_row(one: Outcome) -> str:
    case = one.case
    provable = least(case) / bound(case)
    return (
        f"| {case.kind} | {len(case.load)}, {case.replicas} | {case.nodes}, {case.gpus} | "
        f"{one.ratio:.4f} | {provable:.4f} | {one.ratio / provable:.4f} |"
    )


_HEAD = """\
# Placement of experts: how near to the bound

How light is the heaviest GPU of `fastcomm dispatch place`? This page is for readers who judge
its placements. `docs/placement_accuracy.py` draws 720 loads, places them, and writes it.

The bound of the heaviest GPU is the mean load of GPUs, or the load of the largest replica if
all further replicas are of the experts with the largest ones. If groups of experts stay in a
node, it is the bound of the heaviest node, for the best division of the groups among nodes.
*heavier than EPLB* counts cases that EPLB places better. Loads are tokens, 1000 per expert on
average. `zipf` has its exponent, `lognormal` its deviation, and `hot` the number of experts
that have an eighth as many times the tokens of others as there are experts. Clusters have 8,
16, 32 and 64 GPUs in nodes of 8, or 2 nodes; 64, 128 and 256 experts have 8, 32 and 64 further
replicas, or as many as fill the GPUs evenly.

| load | cases | mean of the bound | worst | above 1.01 | heavier than EPLB |
| --- | ---: | ---: | ---: | ---: | ---: |
"""
_HEAVY = f"""\
## Where no placement reaches the bound

Cases more than 5 % above the bound are of nodes whose GPUs have few slots: a replica takes one
whole slot, and every expert needs one. *provable* is a load, over the bound, that the heaviest
GPU has in every placement. An integer program computes it: the {_HOT} hottest experts of a node
have whole numbers of replicas on GPUs, the others any replicas with their total.

| load | experts, replicas | nodes, GPUs | of the bound | provable | of the provable |
| --- | ---: | ---: | ---: | ---: | ---: |"""

if __name__ == "__main__":
    PAGE.write_text(page([measured(case) for case in cases()]), "utf-8")
