"""The grid of a job: which ranks form a group of which parallelism.

An order names the dimensions from the adjacent ranks outward: the stride of one is the product
of the sizes before it, and a group is all ranks whose other coordinates are equal. A grid that
`Grid.of` made is consistent. Dense layers use `tp`, `cp`, `dp`, `pp`; experts use `etp`, `ep`,
`edp`, `pp` over the same ranks. `dp` is `dp_shard` times `dp_replicate`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from math import prod
from typing import Self

from fastcomm.errors import ConfigError
from fastcomm.trace.schema import TAGS

# The orders of public systems, adjacent ranks first.
ORDERS = {
    "megatron": "tp-cp-ep-dp-pp",
    "megatron-tp-pp-dp": "tp-cp-ep-pp-dp",  # with --use-tp-pp-dp-mapping
    "deepspeed": "tp-dp-pp",  # experts: blocks of `ep` neighbours inside a stage
    "torchtitan": "tp-cp-dp_shard-dp_replicate-pp",  # experts as Megatron's; releases differ
    "vllm": "tp-cp-pp-dp",
}
DEFAULT_ORDER = ORDERS["megatron"]

_DATA = ("dp_shard", "dp_replicate")
_DIMENSIONS = ("tp", "cp", "ep", "dp", *_DATA, "pp")
_EXPERT = {"tp": "etp", "ep": "ep", "dp_shard": "edp_shard", "dp_replicate": "edp_replicate"}

# The groups that jobs make, and whose traffic it is.
_TRAFFIC = (
    ("TP", "tp"),
    ("CP", "cp"),
    ("PP", "pp"),
    ("DP", "dp"),
    ("DP", "dp_shard"),  # weights are gathered here, gradients reduced over dp_replicate
    ("DP", "dp_replicate"),
    ("DP", "dp+cp"),  # gradients and sharded weights go over both
    ("DP", "dp_shard+cp"),
)
_EXPERT_TRAFFIC = (
    ("EP", "ep"),
    ("EP", "etp+ep"),  # tokens are dispatched over both
    ("TP", "etp"),
    ("DP", "edp"),
    ("DP", "edp_shard"),
    ("DP", "edp_replicate"),
)
_RINGS = (("PP", "pp"), ("CP", "cp"))

_Axis = tuple[int, int]  # size, stride


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes of the dimensions and their order. `Grid.of` is the door."""

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int
    etp: int
    dp_replicate: int
    order: str

    @classmethod
    def of(  # noqa: PLR0913 - one word a dimension
        cls,
        world_size: int | None = None,
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int | None = None,
        ep: int = 1,
        cp: int = 1,
        order: str = DEFAULT_ORDER,
        etp: int | None = None,
        dp_replicate: int = 1,
    ) -> Self:
        """The grid of these sizes; ConfigError where they contradict each other or the world.

        `order` is dimensions joined by "-", or a name of `ORDERS`. What is left of the world
        is `dp`; `etp` is `tp`, or 1 where experts of that size do not fit the world.
        """
        order = ORDERS.get(order, order)
        sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "dp_replicate": dp_replicate}
        sizes |= {name: size for name, size in (("dp", dp), ("etp", etp)) if size is not None}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name}: found {size!r}, wanted a whole number of 1 or more")
        dp = _data_parallel(world_size, dp, tp=tp, cp=cp, pp=pp)
        if etp is None:
            etp = tp if (tp * cp * dp) % (tp * ep) == 0 else 1
        grid = cls(
            tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, etp=etp, dp_replicate=dp_replicate, order=order
        )
        _check(grid)
        return grid

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Replicas of an expert."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def has_experts(self) -> bool:
        """Whether experts are laid out otherwise than the dense layers."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def is_data_parallel(self) -> bool:
        """Whether gradients are reduced over the whole world."""
        return self.dp * self.cp == self.world

    @property
    def only(self) -> str | None:
        """The tag of the only dimension above 1; None where there are several, or none."""
        sizes = {"TP": self.tp, "CP": self.cp, "DP": self.dp, "PP": self.pp}
        above = [tag for tag, size in sizes.items() if size > 1]
        return above[0] if len(above) == 1 and not self.has_experts else None

    @property
    def is_of_any_order(self) -> bool:
        """Whether the groups are the same in whatever order the dimensions are."""
        parts = (
            _sizes(self, experts=experts).values() for experts in {False, self.has_experts}
        )
        return all(sum(size > 1 for size in part) < 2 for part in parts)  # noqa: PLR2004

    def groups(self, dimensions: str) -> Iterator[tuple[int, ...]]:
        """The groups of a dimension, or of several joined by "+", each sorted."""
        axes = _axes_of(self, dimensions)
        offsets = _offsets(axes)
        for first in range(self.world):
            if _is_first(first, axes):
                yield tuple(first + offset for offset in offsets)

    def candidates(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The tags of all groups that consist of exactly these ranks, in the order of TAGS.

        Two neighbours of a pipeline or of a ring of context ranks count as such too: they
        talk over a communicator of their own.
        """
        members = sorted(set(ranks))
        if len(members) < 2 or members[0] < 0 or members[-1] >= self.world:  # noqa: PLR2004
            return ()
        found = {tag for tag, axes in _patterns(self) if _is_group(members, axes)}
        axes = _axes(self)
        found |= {tag for tag, name in _RINGS if _are_neighbours(members, axes[name])}
        return tuple(tag for tag in TAGS if tag in found)


def _data_parallel(world: int | None, dp: int | None, *, tp: int, cp: int, pp: int) -> int:
    """`dp`, or what is left of the world for it."""
    rest = tp * cp * pp
    said = f"tp * cp * pp = {tp} * {cp} * {pp} = {rest}"
    if dp is None:
        if world is None:
            raise ConfigError("dp: not given, and no world size either; wanted one of the two")
        if world < 1 or world % rest:
            raise ConfigError(f"{said}; wanted a divisor of the world's {world} ranks")
        return world // rest
    if world is not None and dp * rest != world:
        raise ConfigError(
            f"{said}, times dp = {dp} is {dp * rest}; wanted the world's {world} ranks"
        )
    return dp


def _check(grid: Grid) -> None:
    """ConfigError where the order lacks a dimension or the experts do not fit the ranks."""
    if grid.dp % grid.dp_replicate:
        raise ConfigError(
            f"dp_replicate: found {grid.dp_replicate}, wanted a divisor of dp = {grid.dp}"
        )
    dense = _strides(grid.order, _sizes(grid, experts=False))
    if not grid.has_experts:
        return
    stage, share = grid.tp * grid.cp * grid.dp, grid.etp * grid.ep
    if stage % share:
        raise ConfigError(
            f"etp * ep = {grid.etp} * {grid.ep} = {share}; wanted a divisor of the"
            f" {stage} ranks of a pipeline stage"
        )
    if grid.edp % grid.dp_replicate:
        raise ConfigError(
            f"dp_replicate: found {grid.dp_replicate}, wanted a divisor of the"
            f" {grid.edp} replicas of an expert"
        )
    expert = _strides(grid.order, _sizes(grid, experts=True))
    if grid.pp > 1 and dense["pp"] != expert["pp"]:
        raise ConfigError(
            f"order {grid.order!r}: experts (etp {grid.etp}, ep {grid.ep}) would have other"
            f" pipeline stages than the dense layers (tp {grid.tp}, cp {grid.cp});"
            " wanted pp last, or etp * ep = tp * cp"
        )


@lru_cache(maxsize=64)
def dimensions_of(order: str) -> tuple[str, ...]:
    """The dimensions of an order; `dp` is spelled out, and `ep` stands before it if nowhere."""
    names: list[str] = []
    for name in ORDERS.get(order, order).split("-"):
        if name not in _DIMENSIONS:
            near = get_close_matches(name, _DIMENSIONS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"order {order!r}: unknown dimension {name!r}, wanted"
                f" {', '.join(_DIMENSIONS)}, or a name of {', '.join(ORDERS)}{hint}"
            )
        names += _DATA if name == "dp" else (name,)
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"order {order!r}: wanted {', '.join(twice)} once")
    if "ep" not in names:
        place = min((names.index(name) for name in _DATA if name in names), default=len(names))
        names.insert(place, "ep")
    return tuple(names)


def _sizes(grid: Grid, *, experts: bool) -> dict[str, int]:
    """The sizes of the dense dimensions, or those in their places where experts run."""
    own, dp = (
        ({"tp": grid.etp, "ep": grid.ep}, grid.edp)
        if experts
        else ({"tp": grid.tp, "cp": grid.cp}, grid.dp)
    )
    parts = {"dp_shard": dp // grid.dp_replicate, "dp_replicate": grid.dp_replicate}
    return {**own, **parts, "pp": grid.pp}


def _strides(order: str, sizes: dict[str, int]) -> dict[str, _Axis]:
    """Size and stride of each dimension; one that is not in `sizes` has the size 1."""
    names = dimensions_of(order)
    if lost := [name for name, size in sizes.items() if size > 1 and name not in names]:
        raise ConfigError(f"order {order!r}: wanted a place for {', '.join(lost)}")
    axes = {}
    stride = 1
    for name in names:
        axes[name] = sizes.get(name, 1), stride
        stride *= axes[name][0]
    return axes


@lru_cache(maxsize=64)
def _axes(grid: Grid) -> dict[str, _Axis]:
    """Size and stride of every dimension, dense and expert."""
    axes = dict.fromkeys(_DIMENSIONS, (1, 1)) | _strides(
        grid.order, _sizes(grid, experts=False)
    )
    if grid.has_experts:
        expert = dict.fromkeys(_EXPERT, (1, 1)) | _strides(
            grid.order, _sizes(grid, experts=True)
        )
        axes |= {ours: expert[name] for name, ours in _EXPERT.items()}
    return axes


def _axes_of(grid: Grid, dimensions: str) -> tuple[_Axis, ...]:
    """The axes of dimensions joined by "+", inner first."""
    axes = _axes(grid)
    aliases: dict[str, tuple[str, ...]] = {"dp": _DATA, "edp": ("edp_shard", "edp_replicate")}
    if not grid.has_experts:
        aliases |= {"etp": ("tp",), "ep": (), "edp": (*_DATA, "cp")}
    names: list[str] = []
    for name in dimensions.split("+"):
        names += aliases.get(name, (name,))
    dense, expert = {"tp", "cp", *_DATA, "pp"}, {*_EXPERT.values(), "pp"}
    if not set(names) <= dense and not set(names) <= (expert if grid.has_experts else set()):
        raise ConfigError(
            f"dimensions {dimensions!r}: wanted some of tp, cp, dp, dp_shard, dp_replicate, pp,"
            " or some of etp, ep, edp, pp"
        )
    chosen = {axes[name] for name in names if axes[name][0] > 1}
    return tuple(sorted(chosen, key=lambda axis: axis[1]))


def _offsets(axes: Sequence[_Axis]) -> list[int]:
    """Where the members of a group stand relative to its first."""
    offsets = [0]
    for size, stride in axes:
        offsets = [at * stride + offset for at in range(size) for offset in offsets]
    return offsets


@lru_cache(maxsize=64)
def _patterns(grid: Grid) -> tuple[tuple[str, tuple[_Axis, ...]], ...]:
    """Tag and axes of every group that has two members or more."""
    rows = [*_TRAFFIC, *(_EXPERT_TRAFFIC if grid.has_experts else ())]
    groups = dict.fromkeys(
        (tag, _axes_of(grid, dimensions))
        for tag, dimensions in rows
        if tag != "EP" or grid.ep > 1
    )
    return tuple((tag, axes) for tag, axes in groups if axes)


def _is_first(rank: int, axes: Sequence[_Axis]) -> bool:
    return all(rank // stride % size == 0 for size, stride in axes)


def _is_group(members: Sequence[int], axes: Sequence[_Axis]) -> bool:
    """Whether sorted ranks are one group along `axes`; as much work as there are ranks."""
    first = members[0]
    if prod(size for size, _ in axes) != len(members) or not _is_first(first, axes):
        return False
    return list(members) == [first + offset for offset in _offsets(axes)]


def _are_neighbours(members: Sequence[int], axis: _Axis) -> bool:
    """Whether two ranks are one step apart on a ring, all other coordinates equal."""
    size, stride = axis
    steps, rest = divmod(members[-1] - members[0], stride)
    return (
        len(members) == 2  # noqa: PLR2004
        and rest == 0
        and steps in {1, size - 1}
        and members[0] // stride % size + steps < size
    )
