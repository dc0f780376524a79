"""Replicate experts and place them on GPUs by their load, as EPLB does, with swaps."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from fastcomm.dispatch.options import ReplicaRule
from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.routing import id_type, layer_key
from fastcomm.dispatch.traffic import LayerTokens
from fastcomm.errors import ConfigError
from fastcomm_kernels import dispatch
from fastcomm_kernels import placement as kernels
from fastcomm_kernels.arrays import Ids

Loads = NDArray[np.float64]
Table = NDArray[np.int64]
RULES: tuple[str, ...] = get_args(ReplicaRule)
# Mixed into the seed, so that placement draws other numbers than the workload.
_OWN_STREAM = 0x504C4143
_SWAPS = 20  # at most, an expert
_CAPS = 8  # fewer replicas of the hottest expert that are tried
_EVEN = 1.01  # heaviest GPU over the least possible, up to which nothing more is tried
_LESS = 1 - 1e-9  # of a load that a swap makes lighter
NEAR = 1.003  # heaviest GPU over the least possible, up to which the search goes on
_WORK = 400_000  # pairs of slots that the search compares at most
_MORE_WORK = 50_000  # the same, of searches from other divisions of experts
_SHARES = 16  # of load that replicas have at most, of all that are tried
_LEAST_SHARE = 0.3  # of the least possible load of the heaviest GPU
_STARTS = 2  # of other divisions that the search goes on from
_RESTART_WORK = 700_000  # the same, of searches from random divisions
_GROUP_WORK = 20_000  # the same, of groups of experts on nodes, of which there are few
_MOST_GPUS = 64  # up to which a search has all of its work


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Placement of replicated experts on GPUs.

    A physical expert is a replica of a logical expert. Physical expert p is on GPU p //
    (replicas / GPUs).
    """

    logical: Table  # logical expert of each physical expert
    experts: int
    gpus: int

    @property
    def replicas(self) -> Table:
        """Number of replicas of each logical expert, shape (experts,)."""
        return np.bincount(self.logical, minlength=self.experts)

    @property
    def physical(self) -> list[list[int]]:
        """Physical experts of each logical expert."""
        return [np.flatnonzero(self.logical == e).tolist() for e in range(self.experts)]

    @property
    def home(self) -> NDArray[np.int32]:
        """GPU of each physical expert, shape (replicas,); GPUs have equally many."""
        per_gpu = len(self.logical) // self.gpus
        return (np.arange(len(self.logical)) // per_gpu).astype(np.int32)

    def to_dict(self) -> dict[str, Any]:
        """Return the placement as a JSON object."""
        return {
            "physical_to_logical": self.logical.tolist(),
            "logical_to_physical": self.physical,
            "replicas": self.replicas.tolist(),
        }


def packed(load: Loads, packs: int) -> tuple[Table, Table]:
    """Pack items of a load into packs of equal size: heaviest first, into the lightest pack.

    Returns
    -------
    pack : ndarray
        Pack of each item.
    place : ndarray
        Position of each item in its pack.

    Raises
    ------
    ConfigError
        If the items do not fill the packs evenly.

    """
    room, remainder = divmod(len(load), packs)
    if remainder:
        raise ConfigError(f"placement: {len(load)} items do not fill {packs} packs evenly")
    if room == 1:
        return np.arange(len(load)), np.zeros(len(load), np.int64)
    order = np.argsort(-load, kind="stable")
    pack = dispatch.packed(load, order, packs)
    return pack, _positions(pack, order)


def _positions(pack: Table, order: Table) -> Table:
    """Return the position of each item in its pack, if packs are filled in an order."""
    by_pack = order[np.argsort(pack[order], kind="stable")]
    room = len(pack) // (int(pack.max(initial=0)) + 1)
    place = np.empty(len(pack), np.int64)
    place[by_pack] = np.arange(len(pack)) % room
    return place


def _balanced(load: Loads, packs: int, floor: float) -> tuple[Table, Table]:
    """Pack items as `packed`, then swap some, until the heaviest pack has at most `floor`."""
    pack, place = packed(load, packs)
    swapped = dispatch.swapped(load, pack, packs, floor, _SWAPS * len(load))
    if (swapped == pack).all():
        return pack, place
    return swapped, _positions(swapped, np.argsort(-load, kind="stable"))


def replicated(load: Loads, total: int, most: int | None = None) -> Table:
    """Return the logical expert of each replica: one of each, then more of the heaviest.

    The heaviest has the most tokens per replica.

    Parameters
    ----------
    load
        Tokens of each logical expert.
    total
        Number of replicas, at least the number of experts.
    most
        The most replicas of an expert, at least total / experts; None is any number.

    """
    count = [1] * len(load)
    logical = list(range(len(load)))
    share = np.array(load, np.float64) if most is None or most > 1 else np.full(len(load), -1.0)
    for _ in range(total - len(load)):
        heaviest = int(share.argmax())
        count[heaviest] += 1
        is_full = most is not None and count[heaviest] >= most
        share[heaviest] = -1.0 if is_full else load[heaviest] / count[heaviest]
        logical.append(heaviest)
    return np.array(logical, np.int64)


def place(load: Loads, replicas: int, groups: int, nodes: int, gpus: int) -> Placement:
    """Place replicas of experts by their load, as EPLB does, then swap some.

    Swaps make the heaviest GPU lighter, and no placement has a heavier one than EPLB's. If
    `nodes` divides `groups`, each group of experts stays in one node, otherwise all GPUs are
    filled together.

    Parameters
    ----------
    load
        Load of each logical expert of one layer, shape (experts,).
    replicas
        Number of physical experts, a multiple of `gpus`.
    groups
        Number of groups of experts, a divisor of the experts.
    nodes, gpus
        Numbers of nodes, and of GPUs of all nodes.

    Raises
    ------
    ConfigError
        If replicas or groups do not suit the cluster and the experts.

    """
    experts = len(load)
    if replicas % gpus or replicas < experts:
        raise ConfigError(
            f"invalid replicas {replicas}: expected a multiple of {gpus} GPUs, at least the "
            f"{experts} experts"
        )
    if groups < 1 or experts % groups:
        raise ConfigError(f"invalid groups {groups}: expected a divisor of {experts} experts")
    load = np.asarray(load, np.float64)
    logical = (
        _place_globally(load, replicas, gpus)
        if groups % nodes
        else _place_by_node(load, replicas, groups, (nodes, gpus))
    )
    return Placement(logical=logical, experts=experts, gpus=gpus)


def _place_globally(load: Loads, replicas: int, gpus: int, bar: float | None = None) -> Table:
    """Return the logical expert of each physical one, placed on all GPUs alike.

    A second replica on a GPU takes no load off it. So no expert has more replicas than there
    are GPUs, and none two of them on one GPU while another has none, unless the heaviest GPU
    would then have more than `bar`; None is the heaviest of EPLB.
    """
    apart: list[tuple[float, Table]] = []
    starts_as_eplb = False  # then swaps only make it lighter
    for own in _capped(load, replicas, gpus):
        placed = _swapped(load, own, gpus)
        if _twins(placed, gpus).any():
            placed = _spread(load, placed, gpus)
        elif not apart:
            starts_as_eplb = int(np.bincount(own).max()) < gpus
        apart.append((heaviest(load, placed, gpus), placed))
        floor = float(max(load.sum() / gpus, _shared(load, own).max(initial=0.0)))
        if apart[-1][0] <= _EVEN * floor:
            break
    weight, best = min(apart, key=itemgetter(0))
    floor = least_load(load, replicas, gpus)
    if weight > _EVEN * floor:
        work = round(_WORK * _effort(gpus))
        best = _divided(load, _lightened(load, best, gpus, floor, work), gpus, floor)
        best = _restarted(load, best, gpus, floor)
    if starts_as_eplb:
        return best
    if bar is None:
        bar = heaviest(load, _eplb(load, replicas, gpus), gpus)
    if heaviest(load, best, gpus) <= bar:
        return best
    together = _swapped(load, replicated(load, replicas), gpus)
    return min(best, together, key=lambda own: heaviest(load, own, gpus))


def _effort(gpus: int) -> float:
    """Return the share of its work that a search on so many GPUs has.

    GPUs of a large cluster have few slots, and their largest replicas leave little choice: more
    work hardly makes the heaviest GPU lighter.
    """
    return 1.0 if gpus <= _MOST_GPUS else 0.4 * (_MOST_GPUS / gpus) ** 2


def _lightened(load: Loads, logical: Table, gpus: int, floor: float, work: int) -> Table:
    """Return a placement after a search for one whose heaviest GPU is lighter.

    `logical` and the result are in the order of GPUs; `floor` is the least load of the heaviest
    GPU, and `work` bounds the search.
    """
    slots = np.ascontiguousarray(logical.reshape(gpus, -1))
    return np.asarray(kernels.lightened(load, slots, NEAR * floor, work, 0.0).ravel())


def _divided(load: Loads, logical: Table, gpus: int, floor: float) -> Table:
    """Return a lighter placement whose replicas have at most a share of load, if there is one.

    Many shares are tried, and searches start from the best. They do not tell the light slots of
    a GPU apart, so that they get further where few experts are hot. `logical` and the result
    are in the order of GPUs; `floor` is the least load of the heaviest GPU.
    """
    most = heaviest(load, logical, gpus)
    if most <= _EVEN * floor:
        return logical
    slots = np.ascontiguousarray(logical.reshape(gpus, -1))
    shares = _least_share(load, len(logical), floor), most
    effort = _effort(gpus)
    weights, packings = kernels.divided(load, slots, shares, max(2, round(_SHARES * effort)))
    best = [at for at in np.argsort(weights)[:_STARTS].tolist() if weights[at] < np.inf]
    work = round(_MORE_WORK * effort)
    lighter = [
        kernels.lightened(load, start, NEAR * floor, work, (NEAR - 1) * floor).ravel()
        for start in (slots, *packings[best])
    ]
    return min([logical, *lighter], key=lambda own: heaviest(load, own, gpus))


def _least_share(load: Loads, replicas: int, floor: float) -> float:
    """Return the smallest share of load that replicas may be bounded by."""
    return float(max(_shared(load, replicated(load, replicas)).max(), _LEAST_SHARE * floor))


def _restarted(load: Loads, logical: Table, gpus: int, floor: float) -> Table:
    """Return a lighter placement from random divisions of the experts, if there is one.

    It has the arguments and the result of `_divided`.
    """
    most = heaviest(load, logical, gpus)
    if most <= _EVEN * floor:
        return logical
    shares = _least_share(load, len(logical), floor), most
    slots = np.ascontiguousarray(logical.reshape(gpus, -1))
    work = round(_RESTART_WORK * _effort(gpus))
    return np.asarray(kernels.restarted(load, slots, shares, NEAR * floor, work).ravel())


def _capped(load: Loads, replicas: int, gpus: int) -> Iterator[Table]:
    """Yield the logical expert of each replica, with fewer and fewer of the hottest.

    Fewer replicas of a hot expert leave GPUs for the experts next to it, and room for more
    replicas of those.
    """
    least = -(-replicas // max(1, len(load)))
    own = replicated(load, replicas, max(gpus, least))
    yield own
    most = int(np.bincount(own).max())
    for cap in range(most - 1, max(least, most - _CAPS) - 1, -1):
        yield replicated(load, replicas, cap)


def _eplb(load: Loads, replicas: int, gpus: int) -> Table:
    """Return the logical expert of each physical one, as EPLB places them on GPUs."""
    logical = replicated(load, replicas)
    return _by_slot(logical, packed(_shared(load, logical), gpus), gpus)


def _shared(load: Loads, logical: Table) -> Loads:
    """Return the load of each physical expert; replicas share that of their expert.

    The last axis of `load` is the logical expert.
    """
    return (load / np.bincount(logical, minlength=load.shape[-1]))[..., logical]


def _by_slot(logical: Table, placed: tuple[Table, Table], gpus: int) -> Table:
    """Return the logical experts in the order of GPUs; `placed` is a pack and place of each."""
    pack, slot = placed
    ordered = np.empty_like(logical)
    ordered[pack * (len(logical) // gpus) + slot] = logical
    return ordered


def _swapped(load: Loads, logical: Table, gpus: int) -> Table:
    """Return the logical experts in the order of GPUs, packed and swapped by load."""
    shared = _shared(load, logical)
    floor = max(load.sum() / gpus, shared.max(initial=0.0))
    return _by_slot(logical, _balanced(shared, gpus, floor), gpus)


def _twins(logical: Table, gpus: int) -> NDArray[np.bool_]:
    """Return whether a physical expert has an earlier replica on its GPU, while others do not.

    Shape (physical experts,); GPUs are in order.
    """
    by_gpu = logical.reshape(gpus, -1)
    order = np.argsort(by_gpu, axis=1, kind="stable")
    ordered = np.take_along_axis(by_gpu, order, axis=1)
    again = np.zeros_like(by_gpu, bool)
    repeated = np.diff(ordered, axis=1, prepend=-1) == 0
    np.put_along_axis(again, order, repeated, axis=1)
    on = np.zeros((int(logical.max()) + 1, gpus), np.bool_)
    on[by_gpu, np.arange(gpus)[:, None]] = True
    everywhere = np.asarray(on.sum(axis=1) == gpus)
    return np.asarray((again & ~everywhere[by_gpu]).ravel())


def _spread(load: Loads, logical: Table, gpus: int) -> Table:
    """Return a placement in which replicas of an expert are apart, with swaps for the load.

    `logical` and the result are in the order of GPUs.
    """
    logical = logical.copy()
    shared, size = _shared(load, logical), len(logical) // gpus
    gpu = np.arange(len(logical)) // size
    on = np.zeros((len(load), gpus), np.int64)
    np.add.at(on, (logical, gpu), 1)
    for _ in range(_SWAPS * len(logical)):
        loads = shared.reshape(gpus, size).sum(axis=1)
        twins = np.flatnonzero(_twins(logical, gpus))
        own = twins[:1] if len(twins) else np.flatnonzero(gpu == int(np.argmax(loads)))
        gain = shared[own][:, None] - shared
        after = np.maximum(loads[gpu[own]][:, None] - gain, loads[gpu] + gain)
        # Neither of the two may get to a GPU that has its expert.
        after[on[logical[own]][:, gpu] > 0] = np.inf
        after[on[logical][:, gpu[own]].T > 0] = np.inf
        one, other = np.unravel_index(int(np.argmin(after)), after.shape)
        better = after[one, other] < (np.inf if len(twins) else loads.max() * _LESS)
        if not better:
            break
        pair = np.array([own[one], other])
        np.subtract.at(on, (logical[pair], gpu[pair]), 1)
        logical[pair], shared[pair] = logical[pair[::-1]], shared[pair[::-1]]
        np.add.at(on, (logical[pair], gpu[pair]), 1)
    return logical


def _place_by_node(load: Loads, replicas: int, groups: int, cluster: tuple[int, int]) -> Table:
    """Return each physical expert's logical one; a group of experts stays in one node.

    `replicas` is the number of physical experts, and `cluster` the numbers of nodes and
    GPUs.
    """
    nodes, gpus = cluster
    size = len(load) // groups
    of_groups = load.reshape(groups, size).sum(axis=1)
    # Nodes of more even loads may have experts that are harder to divide: both are tried.
    choices = packed(of_groups, nodes)[0], _nodes_of_groups(of_groups, nodes)
    per_node, width = replicas // nodes, gpus // nodes
    owns = [
        [np.flatnonzero(np.repeat(node_of, size) == node) for node in range(nodes)]
        for node_of in choices[: 1 if (choices[0] == choices[1]).all() else 2]
    ]
    bar = max(heaviest(load[own], _eplb(load[own], per_node, width), width) for own in owns[0])
    candidates = [
        np.concatenate([own[_place_globally(load[own], per_node, width, bar)] for own in parts])
        for parts in owns
    ]
    return min(candidates, key=lambda logical: heaviest(load, logical, gpus))


def _nodes_of_groups(load: Loads, nodes: int) -> Table:
    """Return the node of each group of experts, so that the heaviest node is light."""
    mean = load.sum() / nodes
    node, _ = _balanced(load, nodes, mean)
    by_node, floor = np.argsort(node, kind="stable"), max(mean, load.max())
    if heaviest(load, by_node, nodes) > _EVEN * floor:
        by_node = _lightened(load, by_node, nodes, floor, _GROUP_WORK)
    node[by_node] = np.repeat(np.arange(nodes), len(load) // nodes)
    return node


def heaviest(load: Loads, logical: Table, gpus: int) -> float:
    """Return the load of the heaviest GPU, if replicas share the load of their expert."""
    return float(heaviest_by_step(load[None], logical, gpus)[0])


def heaviest_by_step(loads: Loads, logical: Table, gpus: int) -> Loads:
    """Return `heaviest` of the loads of several steps, shape (steps, experts)."""
    own = _shared(loads, logical).reshape(len(loads), gpus, -1)
    return np.asarray(own.sum(axis=2).max(axis=1))


def least_load(load: Loads, replicas: int, gpus: int) -> float:
    """Return the mean load of GPUs or the largest replica's: the heaviest has at least that."""
    return float(max(load.sum() / gpus, _shared(load, replicated(load, replicas)).max()))


def at_replicas(
    layers: Iterable[LayerTokens], placements: Sequence[Placement], rule: str, recipe: Recipe
) -> Iterator[LayerTokens]:
    """Yield layers with each token at a replica of its expert.

    Parameters
    ----------
    layers
        Layers of all iterations, with logical experts.
    placements
        The placement of each layer of an iteration.
    rule
        How a token chooses among replicas, one of `RULES`.
    recipe
        Shape and seed of the workload.

    """
    tables = [_tables(placement, recipe) for placement in placements]
    for number, layer in enumerate(layers):
        key = layer_key(recipe.seed ^ _OWN_STREAM, number, 0)
        own = number % len(placements)
        yield replace(
            layer,
            expert=_choose_replicas(layer, tables[own], RULES.index(rule), key),
            home=placements[own].home,
        )


def _tables(placement: Placement, recipe: Recipe) -> tuple[Ids, Ids, Ids]:
    """Return the start of each expert's replicas, the physical experts, and their nodes."""
    order = np.argsort(placement.logical, kind="stable").astype(np.int32)
    start = np.concatenate([[0], np.cumsum(placement.replicas)]).astype(np.int32)
    return start, order, (placement.home[order] // recipe.gpus_per_node).astype(np.int32)


def _choose_replicas(
    layer: LayerTokens, tables: tuple[Ids, Ids, Ids], rule: int, key: np.uint64
) -> Ids:
    """Return the physical experts of each token; `tables` are from `_tables`."""
    out = np.empty(layer.expert.shape, id_type(len(tables[1])))
    src_node = (layer.src // layer.width).astype(layer.src.dtype)
    with np.errstate(over="ignore"):
        dispatch.replicated(0, key, src_node, layer.expert, tables, rule, out)
    return out
