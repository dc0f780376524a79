"""The grid of a job: which ranks form a process group of which parallelism.

An order lists the dimensions from adjacent ranks outward: the stride of one is the product of
the sizes before it, and a group is all ranks whose other coordinates are equal. Dense layers
use `tp`, `cp`, `dp`, `pp`; experts use `etp`, `ep`, `edp`, `pp` over the same ranks. `dp` is
`dp_shard` times `dp_replicate`. A grid from `Grid.of` is consistent.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from math import prod
from typing import Self

from fastcomm.errors import ConfigError
from fastcomm.trace.parallelisms import PARALLELISMS, TAGS

# The orders of public systems, adjacent ranks first.
ORDERS = {
    "megatron": "tp-cp-ep-dp-pp",
    "megatron-tp-pp-dp": "tp-cp-ep-pp-dp",  # with --use-tp-pp-dp-mapping
    "deepspeed": "tp-dp-pp",  # experts: blocks of `ep` neighbors inside a stage
    "torchtitan": "tp-cp-dp_shard-dp_replicate-pp",  # experts as Megatron's; releases differ
    "vllm": "tp-cp-pp-dp",
}
DEFAULT_ORDER = ORDERS["megatron"]

_DATA = ("dp_shard", "dp_replicate")
_DIMENSIONS = ("tp", "cp", "ep", "dp", *_DATA, "pp")
_EXPERT = {"tp": "etp", "ep": "ep", "dp_shard": "edp_shard", "dp_replicate": "edp_replicate"}

_RINGS = (("PP", "pp"), ("CP", "cp"))
SIZES = ("tp", "pp", "dp", "ep", "cp", "etp", "dp_replicate")  # that users can state
_DIVIDING = ("dp", "tp", "pp", "cp")  # sizes whose product is the number of ranks

_Axis = tuple[int, int]  # size, stride


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes of the dimensions, and their order. Build it with `Grid.of`, which validates."""

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int
    etp: int
    dp_replicate: int
    order: str

    @classmethod
    def of(  # noqa: PLR0913 - one keyword per dimension
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
        """Build a grid.

        Parameters
        ----------
        world_size
            Number of ranks; None: the product of the sizes.
        tp, pp, dp, ep, cp, etp, dp_replicate
            Sizes. `dp` defaults to the remaining factor of the world; `etp` to `tp`, or to 1 if
            experts of that size do not fit the world.
        order
            Dimensions joined by "-", or a name of `ORDERS`.

        Raises
        ------
        ConfigError
            If sizes contradict each other or the world.

        """
        order = ORDERS.get(order, order)
        sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "dp_replicate": dp_replicate}
        sizes |= {name: size for name, size in (("dp", dp), ("etp", etp)) if size is not None}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"invalid {name} {size!r}: expected an integer of 1 or more")
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
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Number of replicas of an expert."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def has_experts(self) -> bool:
        """Whether the layout of experts differs from that of the dense layers."""
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
        """Whether the groups do not depend on the order of dimensions."""
        parts = (
            _sizes(self, experts=experts).values() for experts in {False, self.has_experts}
        )
        return all(sum(size > 1 for size in part) < 2 for part in parts)  # noqa: PLR2004

    def groups(self, dimensions: str) -> Iterator[tuple[int, ...]]:
        """Yield the groups of a dimension, or of several joined by "+", such as "dp+cp".

        A group is its ranks, sorted.
        """
        axes = _axes_of(self, dimensions)
        offsets = _offsets(axes)
        for first in range(self.world):
            if _is_first(first, axes):
                yield tuple(first + offset for offset in offsets)

    def candidates(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the tags of all groups of exactly these ranks, in the order of TAGS.

        Two neighbors of a pipeline, or of a ring of context ranks, count as such a group as
        well: they have their own communicator.
        """
        members = sorted(set(ranks))
        if len(members) < 2 or members[0] < 0 or members[-1] >= self.world:  # noqa: PLR2004
            return ()
        fitting = {tag for tag, axes in _patterns(self) if _is_group(members, axes)}
        axes = _axes(self)
        fitting |= {tag for tag, name in _RINGS if _are_neighbors(members, axes[name])}
        return tuple(tag for tag in TAGS if tag in fitting)


def _data_parallel(world: int | None, dp: int | None, *, tp: int, cp: int, pp: int) -> int:
    """Return `dp`, by default the remaining factor of the world."""
    product = tp * cp * pp
    product_text = f"tp * cp * pp = {tp} * {cp} * {pp} = {product}"
    if dp is None:
        if world is None:
            raise ConfigError("neither dp nor the world size is known: pass one of them")
        if world < 1 or world % product:
            raise ConfigError(f"{product_text} does not divide the world size {world}")
        return world // product
    if world is not None and dp * product != world:
        raise ConfigError(
            f"{product_text}, times dp = {dp}, is {dp * product}: "
            f"expected the world size {world}"
        )
    return dp


def _check(grid: Grid) -> None:
    """Raise ConfigError if dp_replicate, the order or the experts do not fit the ranks."""
    if grid.dp % grid.dp_replicate:
        raise ConfigError(
            f"invalid dp_replicate {grid.dp_replicate}: it does not divide dp = {grid.dp}"
        )
    dense = _strides(grid.order, _sizes(grid, experts=False))
    if not grid.has_experts:
        return
    stage, share = grid.tp * grid.cp * grid.dp, grid.etp * grid.ep
    if stage % share:
        raise ConfigError(
            f"etp * ep = {grid.etp} * {grid.ep} = {share} does not divide the"
            f" {stage} ranks of a pipeline stage"
        )
    if grid.edp % grid.dp_replicate:
        raise ConfigError(
            f"invalid dp_replicate {grid.dp_replicate}: it does not divide the"
            f" {grid.edp} replicas of an expert"
        )
    expert = _strides(grid.order, _sizes(grid, experts=True))
    if grid.pp > 1 and dense["pp"] != expert["pp"]:
        raise ConfigError(
            f"order {grid.order!r}: experts (etp {grid.etp}, ep {grid.ep}) would have other"
            f" pipeline stages than the dense layers (tp {grid.tp}, cp {grid.cp});"
            " put pp last, or choose etp * ep = tp * cp"
        )


@lru_cache(maxsize=64)
def dimensions_of(order: str) -> tuple[str, ...]:
    """Return the dimensions of an order.

    `dp` is replaced by its parts; a missing `ep` is inserted before it.

    Raises
    ------
    ConfigError
        If a dimension is unknown, or occurs twice.

    """
    names: list[str] = []
    for name in ORDERS.get(order, order).split("-"):
        if name not in _DIMENSIONS:
            near = get_close_matches(name, _DIMENSIONS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"order {order!r}: unknown dimension {name!r}, expected"
                f" {', '.join(_DIMENSIONS)}, or a name of {', '.join(ORDERS)}{hint}"
            )
        names += _DATA if name == "dp" else (name,)
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"order {order!r}: {', '.join(twice)} must occur only once")
    if "ep" not in names:
        place = min((names.index(name) for name in _DATA if name in names), default=len(names))
        names.insert(place, "ep")
    return tuple(names)


def _sizes(grid: Grid, *, experts: bool) -> dict[str, int]:
    """Return the sizes of the dense dimensions, or of the expert dimensions."""
    own, dp = (
        ({"tp": grid.etp, "ep": grid.ep}, grid.edp)
        if experts
        else ({"tp": grid.tp, "cp": grid.cp}, grid.dp)
    )
    parts = {"dp_shard": dp // grid.dp_replicate, "dp_replicate": grid.dp_replicate}
    return {**own, **parts, "pp": grid.pp}


def _strides(order: str, sizes: dict[str, int]) -> dict[str, _Axis]:
    """Return size and stride of each dimension; the size is 1 for those not in `sizes`."""
    names = dimensions_of(order)
    if missing := [name for name, size in sizes.items() if size > 1 and name not in names]:
        raise ConfigError(f"order {order!r} does not have {', '.join(missing)}")
    axes = {}
    stride = 1
    for name in names:
        axes[name] = sizes.get(name, 1), stride
        stride *= axes[name][0]
    return axes


@lru_cache(maxsize=64)
def _axes(grid: Grid) -> dict[str, _Axis]:
    """Return size and stride of every dimension, dense and expert."""
    axes = dict.fromkeys(_DIMENSIONS, (1, 1)) | _strides(
        grid.order, _sizes(grid, experts=False)
    )
    if grid.has_experts:
        expert = dict.fromkeys(_EXPERT, (1, 1)) | _strides(
            grid.order, _sizes(grid, experts=True)
        )
        axes |= {expert_name: expert[name] for name, expert_name in _EXPERT.items()}
    return axes


def _axes_of(grid: Grid, dimensions: str) -> tuple[_Axis, ...]:
    """Return size and stride of dimensions joined by "+", inner first, without those of size 1.

    Raises `ConfigError` for unknown names, and for dense and expert dimensions together.
    """
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
            f"dimensions {dimensions!r}: expected some of tp, cp, dp, dp_shard, dp_replicate,"
            " pp, or some of etp, ep, edp, pp"
        )
    chosen = {axes[name] for name in names if axes[name][0] > 1}
    return tuple(sorted(chosen, key=lambda axis: axis[1]))


def _offsets(axes: Sequence[_Axis]) -> list[int]:
    """Return the offsets of a group's ranks from its first rank, ascending.

    `axes` are sorted by stride, the smallest first.
    """
    offsets = [0]
    for size, stride in axes:
        offsets = [at * stride + offset for at in range(size) for offset in offsets]
    return offsets


@lru_cache(maxsize=64)
def _patterns(grid: Grid) -> tuple[tuple[str, tuple[_Axis, ...]], ...]:
    """Return tag and axes of every group with at least two members."""
    rows = [(row.tag, axes) for row in PARALLELISMS for axes in row.axes]
    if grid.has_experts:
        rows += [(row.tag, axes) for row in PARALLELISMS for axes in row.expert_axes]
    groups = dict.fromkeys(
        (tag, _axes_of(grid, dimensions))
        for tag, dimensions in rows
        if tag != "EP" or grid.ep > 1
    )
    return tuple((tag, axes) for tag, axes in groups if axes)


def _is_first(rank: int, axes: Sequence[_Axis]) -> bool:
    return all(rank // stride % size == 0 for size, stride in axes)


def _is_group(members: Sequence[int], axes: Sequence[_Axis]) -> bool:
    """Whether sorted ranks are one group along `axes`; linear in the number of ranks."""
    first = members[0]
    if prod(size for size, _ in axes) != len(members) or not _is_first(first, axes):
        return False
    return list(members) == [first + offset for offset in _offsets(axes)]


def _are_neighbors(members: Sequence[int], axis: _Axis) -> bool:
    """Whether two ranks are one step apart on a ring, all other coordinates equal."""
    size, stride = axis
    steps, remainder = divmod(members[-1] - members[0], stride)
    return (
        len(members) == 2  # noqa: PLR2004
        and remainder == 0
        and steps in {1, size - 1}
        and members[0] // stride % size + steps < size
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The stated sizes of a job's grid of ranks."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    cp: int | None = None
    etp: int | None = None
    dp_replicate: int | None = None
    order: str | None = None  # dimensions such as "tp-dp-pp", or a key of ORDERS
    framework: str | None = None  # a key of ORDERS

    @property
    def world(self) -> int:
        """The number of ranks; a size that is not stated counts as 1."""
        return prod(getattr(self, name) or 1 for name in _DIVIDING)

    def grid(self, world_size: int | None) -> Grid | None:
        """Return the grid of a world; None without any size.

        Raises `ConfigError` if the sizes contradict each other or the world size.
        """
        sizes = {name: size for name in SIZES if (size := getattr(self, name)) is not None}
        order = self.order or ORDERS.get(self.framework or "", DEFAULT_ORDER)
        return Grid.of(world_size, order=order, **sizes) if sizes else None

    def options_text(self) -> str:
        """Return the sizes as options, such as "--tp 2 --dp 4"; empty without any."""
        sizes = [(name, getattr(self, name)) for name in SIZES]
        return " ".join(f"--{name} {size}" for name, size in sizes if size is not None)

    def assumed_world(self, ranks: Iterable[int]) -> int | None:
        """Return the number of ranks to assume if no trace states it.

        This is the highest rank + 1, or the product of the sizes if that is larger; None if no
        size is set.
        """
        if not self.options_text():
            return None
        return max(self.world, max(ranks, default=0) + 1)
