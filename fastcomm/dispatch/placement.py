"""Replicate and place experts (EPLB), and simulate a workload before and after."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.dispatch import Recipe, layer_key
from fastcomm.dispatch.schedules import Terms
from fastcomm.dispatch.simulation import NS, Simulation, simulate
from fastcomm.dispatch.traffic import Ids, LayerTokens
from fastcomm.dispatch.workload import Workload
from fastcomm.errors import ConfigError
from fastcomm.result import TableResult
from fastcomm_kernels import dispatch

Loads = NDArray[np.float64]
Table = NDArray[np.int64]
RULES = ("random", "round-robin", "local")
# Apart from the keys that the workload itself draws from.
_OWN_STREAM = 0x504C4143


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The logical expert of each physical one; physical p lives on GPU p // (R / G)."""

    logical: Table
    experts: int
    gpus: int

    @property
    def replicas(self) -> Table:
        """Number of replicas of each logical expert."""
        return np.bincount(self.logical, minlength=self.experts)

    @property
    def physical(self) -> list[list[int]]:
        """The physical experts of each logical one."""
        return [np.flatnonzero(self.logical == e).tolist() for e in range(self.experts)]

    @property
    def home(self) -> NDArray[np.int32]:
        """The GPU of each physical expert."""
        each = len(self.logical) // self.gpus
        return (np.arange(len(self.logical)) // each).astype(np.int32)

    def gpu_load(self, load: Loads) -> Loads:
        """Return the load of each GPU if the replicas of an expert share it evenly."""
        shared = load / np.maximum(self.replicas, 1)
        found = np.bincount(self.home, weights=shared[self.logical], minlength=self.gpus)
        return np.asarray(found, np.float64)

    def to_dict(self) -> dict[str, Any]:
        """Return the placement as it stands in JSON."""
        return {
            "physical_to_logical": self.logical.tolist(),
            "logical_to_physical": self.physical,
            "replicas": self.replicas.tolist(),
        }


def packed(load: Loads, packs: int) -> tuple[Table, Table]:
    """Pack items into as full packs as there are: the pack of each item, and its place in it.

    The heaviest first, into the lightest pack that has room.
    """
    room, rest = divmod(len(load), packs)
    if rest:
        raise ConfigError(f"placement: {len(load)} items do not fill {packs} packs evenly")
    pack, place = np.zeros(len(load), np.int64), np.zeros(len(load), np.int64)
    if room == 1:
        return np.arange(len(load)), place
    weight, count = np.zeros(packs), np.zeros(packs, np.int64)
    for item in np.argsort(-load, kind="stable"):
        lightest = int(np.argmin(np.where(count < room, weight, np.inf)))
        pack[item], place[item] = lightest, count[lightest]
        weight[lightest] += load[item]
        count[lightest] += 1
    return pack, place


def replicated(load: Loads, total: int) -> Table:
    """Return the logical expert of `total` replicas: one each, then more of the heaviest."""
    count = np.ones(len(load), np.int64)
    logical = list(range(len(load)))
    for _ in range(total - len(load)):
        heaviest = int(np.argmax(load / count))
        count[heaviest] += 1
        logical.append(heaviest)
    return np.array(logical, np.int64)


def place(load: Loads, replicas: int, groups: int, nodes: int, gpus: int) -> Placement:
    """Place `replicas` physical experts: by node if the groups divide evenly, else globally."""
    experts = len(load)
    if replicas % gpus or replicas < experts:
        raise ConfigError(
            f"replicas: found {replicas}, wanted a multiple of {gpus} GPUs and at least the "
            f"{experts} experts"
        )
    if groups < 1 or experts % groups:
        raise ConfigError(f"groups: found {groups}, wanted a divisor of {experts} experts")
    load = np.asarray(load, np.float64)
    logical = (
        _globally(load, replicas, gpus)
        if groups % nodes
        else _by_node(load, replicas, groups, (nodes, gpus))
    )
    return Placement(logical=logical, experts=experts, gpus=gpus)


def _globally(load: Loads, replicas: int, gpus: int) -> Table:
    logical = replicated(load, replicas)
    shared = (load / np.bincount(logical, minlength=len(load)))[logical]
    pack, slot = packed(shared, gpus)
    found = np.empty_like(logical)
    found[pack * (replicas // gpus) + slot] = logical
    return found


def _by_node(load: Loads, replicas: int, groups: int, cluster: tuple[int, int]) -> Table:
    nodes, gpus = cluster
    size = len(load) // groups
    node_of, _ = packed(load.reshape(groups, size).sum(axis=1), nodes)
    found = []
    for node in range(nodes):
        own = np.flatnonzero(np.repeat(node_of, size) == node)
        found.append(own[_globally(load[own], replicas // nodes, gpus // nodes)])
    return np.concatenate(found)


def _placed_layers(
    workload: Workload, placements: Sequence[Placement], rule: str
) -> Iterator[LayerTokens]:
    """Yield the workload's layers, each token at a replica of its experts by `rule`.

    `placements` has one for each layer of an iteration.
    """
    recipe = workload.recipe
    if rule not in RULES:
        raise ConfigError(f"rule: found {rule!r}, wanted one of {', '.join(RULES)}")
    tables = [_tables(placement, recipe) for placement in placements]
    for number, layer in enumerate(workload.layers()):
        key = layer_key(recipe.seed ^ _OWN_STREAM, number, 0)
        place = number % len(placements)
        yield replace(
            layer,
            expert=_chosen(layer, tables[place], RULES.index(rule), key),
            home=placements[place].home,
        )


def _tables(placement: Placement, recipe: Recipe) -> tuple[Ids, Ids, Ids]:
    """Return where the replicas of each expert begin, the physical experts, and their nodes."""
    order = np.argsort(placement.logical, kind="stable").astype(np.int32)
    start = np.concatenate([[0], np.cumsum(placement.replicas)]).astype(np.int32)
    return start, order, (placement.home[order] // recipe.gpus_per_node).astype(np.int32)


def _chosen(layer: LayerTokens, tables: tuple[Ids, Ids, Ids], rule: int, key: np.uint64) -> Ids:
    out = np.empty(layer.expert.shape, np.int32)
    src_node = (layer.src // layer.width).astype(layer.src.dtype)
    with np.errstate(over="ignore"):
        dispatch.replicated(0, key, src_node, layer.expert, tables, rule, out)
    return out


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Placing(TableResult):
    """Simulations before and after, and the placement of each layer."""

    before: Simulation
    after: Simulation
    placements: tuple[Placement, ...]
    rule: str

    @property
    def imbalance(self) -> tuple[float, float]:
        """The most loaded GPU by the mean, in token copies: before and after."""
        before = _per_gpu(self.before)
        after = np.bincount(
            self.placements[0].home,
            weights=self.after.expert_load.sum(axis=0),
            minlength=self.placements[0].gpus,
        )
        return _most_by_mean(before), _most_by_mean(np.asarray(after, np.float64))

    def to_arrow(self) -> pa.Table:
        """Return a row per strategy; times in ns."""
        rows = [
            {
                "strategy": name,
                "before_ns": each.total_s * NS,
                "after_ns": self.after.strategies[name].total_s * NS,
                "before_inter_node_bytes": each.inter_bytes,
                "after_inter_node_bytes": self.after.strategies[name].inter_bytes,
            }
            for name, each in self.before.strategies.items()
        ]
        return pa.Table.from_pylist(rows)

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        before, after = self.imbalance
        return {
            "rule": self.rule,
            "imbalance": {"before": before, "after": after},
            "layers": [placement.to_dict() for placement in self.placements],
            "before": self.before.contents(),
            "after": self.after.contents(),
        }

    def figures(self) -> dict[str, str]:
        """Return the rule, and the imbalance of the GPUs before and after."""
        before, after = self.imbalance
        return {"rule": self.rule, "imbalance": f"{before:.2f} before, {after:.2f} after"}


def placing(
    workload: Workload,
    strategies: Sequence[str],
    terms: Terms,
    *,
    rule: str,
    replicas: int,
    groups: int = 1,
    loads: NDArray[np.float64] | None = None,
) -> Placing:
    """Place the experts of each layer by their load, the workload's own or `loads`."""
    recipe = workload.recipe
    before = simulate(workload, strategies, terms)
    if loads is None:
        loads = before.expert_load.astype(np.float64)
    if loads.shape[1] != recipe.experts or (loads < 0).any():
        raise ConfigError(
            f"load: found {loads.shape[1]} numbers a layer, wanted one from 0 for each of "
            f"{recipe.experts} experts"
        )
    placements = tuple(
        place(each, replicas, groups, recipe.num_nodes, recipe.gpus) for each in loads
    )
    layers = _placed_layers(workload, placements, rule)
    return Placing(
        before=before,
        after=simulate(workload, strategies, terms, layers=layers),
        placements=placements,
        rule=rule,
    )


def _per_gpu(found: Simulation) -> Loads:
    each = found.recipe.experts_per_gpu
    return np.asarray(found.expert_load.sum(axis=0).reshape(-1, each).sum(axis=1), np.float64)


def _most_by_mean(load: Loads) -> float:
    return float(load.max() / load.mean()) if load.sum() else 1.0
