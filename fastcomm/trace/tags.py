"""Parallelism of process groups: from the user's rules, descriptions, ranks, or behavior."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

from fastcomm.trace.parallelisms import PARALLELISMS
from fastcomm.trace.rank_grid import Grid

# Descriptions of the group of all ranks, which is DP if gradients are reduced over all of it.
WORLD = ("default_pg", "mesh_default")
# Descriptions that imply no parallelism.
SILENT = re.compile(r"undefined|mesh_dim_\d+|")

# The tag of each pattern of a description of Megatron-LM, without "_GLOO".
DESCRIPTIONS = tuple((text, row.tag) for row in PARALLELISMS for text in row.groups)
# Dimensions of a DeviceMesh; a description is "mesh_" and these joined by "_".
MESH = {name: row.tag for row in PARALLELISMS for name in row.mesh}
# OLMo-core gives this name to the dimension of the experts: with all-to-alls it is EP.
EXCHANGED = ("ep_shard",)


@lru_cache(maxsize=4096)
def tag_of_description(description: str, exchanges: bool = False) -> str | None:
    """Return the tag that a framework's description stands for; None if it implies none.

    Parameters
    ----------
    description
        Of the process group. The group of all ranks (`WORLD`) needs a grid.
    exchanges
        Whether the group does all-to-alls, which decides where frameworks use one name
        differently.

    """
    text = description.replace("_GLOO", "")
    for pattern, tag in DESCRIPTIONS:
        if re.fullmatch(pattern, text):
            return tag
    dimensions = text.removeprefix("mesh_")
    if exchanges and dimensions in EXCHANGED:
        return "EP"
    if text.startswith("mesh_") or dimensions in MESH:
        return _tag_of_mesh(dimensions)
    return None


_MOST_PARTS = max(name.count("_") + 1 for name in MESH)


def _tag_of_mesh(dimensions: str) -> str | None:
    """Return the common tag of joined dimensions, DP for dp with cp, else OTHER."""
    names = _mesh_names(dimensions.split("_"))
    if names is None:
        return None
    tags = {MESH[name] for name in names}
    if tags == {"DP", "CP"}:
        return "DP"
    return tags.pop() if len(tags) == 1 else "OTHER"


def _mesh_names(parts: Sequence[str]) -> set[str] | None:
    """Return the names of dimensions that parts joined by "_" make; None if others are in it.

    Names have "_" in them, too: at each part the longest one counts after which the rest can be
    divided. What the rest allows is determined once for each part, from the last to the first.
    """
    count = len(parts)
    first = [0] * count + [1]  # by part: number of parts of the name there, 0 for none
    for at in range(count - 1, -1, -1):
        for size in range(min(_MOST_PARTS, count - at), 0, -1):
            if first[at + size] and "_".join(parts[at : at + size]) in MESH:
                first[at] = size
                break
    if not first[0]:
        return None
    names, at = set(), 0
    while at < count:
        names.add("_".join(parts[at : at + first[at]]))
        at += first[at]
    return names


__all__ = [
    "CHANGED_NOTHING",
    "DESCRIPTIONS",
    "MESH",
    "RULE_FIELDS",
    "WORLD",
    "Behavior",
    "ProcessGroup",
    "TagRule",
    "TagRules",
    "Tagged",
    "tag_group",
    "tag_of_description",
    "without_effect",
]

# Properties of groups that a user's rule can match.
RULE_FIELDS = ("name", "description", "ranks", "communicator", "stream")

# Separates a rule or option without effect from the reason.
CHANGED_NOTHING = " changed nothing: "

# Operations that tell something about the parallelism of a group.
_BEHAVIOR = {
    "SendRecv": "pairs",
    "AllToAll": "all to all",
    "AllReduce": "sums",
    "ReduceScatter": "sums",
    "AllGather": "gathers",
}
# Reductions per iteration from which neighbors count as tensor parallel: 4 layers, 4 each.
_MANY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """Properties of a process group or communicator in a trace."""

    name: str | None = None
    description: str | None = None
    ranks: tuple[int, ...] | None = None
    size: int | None = None
    communicator: int | None = None
    streams: tuple[int, ...] = ()  # device streams of its events

    @property
    def members(self) -> int | None:
        """Number of ranks; None if unknown."""
        return self.size if self.ranks is None else len(self.ranks)

    @property
    def is_unnamed(self) -> bool:
        """Whether only its operations and streams are known."""
        return self.description is None and self.ranks is None and self.size is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """Operations of a group in a trace."""

    counts: Mapping[str, int] = field(default_factory=dict)  # events by name of OPS
    iterations: int = 1  # number of iterations in which they were counted


@dataclass(frozen=True, slots=True, kw_only=True)
class TagRule:
    """A user's rule: groups whose `field` is `value` have this tag.

    Names and descriptions may be patterns of `fnmatch`; ranks are a set; a stream has to be
    that of all events of the group.
    """

    field: str  # one of RULE_FIELDS
    value: str | int | tuple[int, ...]
    tag: str
    is_given: bool = True  # by the user, not by the traces

    def matches(self, group: ProcessGroup) -> bool:
        """Whether the rule applies to a group."""
        if self.field == "ranks":
            return group.ranks is not None and sorted(group.ranks) == sorted(_ints(self.value))
        if self.field == "stream":
            return group.streams == (self.value,)
        if self.field == "communicator":
            return group.communicator is not None and group.communicator == self.value
        text = group.name if self.field == "name" else group.description
        pattern = str(self.value)
        return text is not None and (text == pattern or fnmatchcase(text, pattern))


@dataclass(frozen=True, slots=True, kw_only=True)
class TagRules:
    """The user's options about parallelism."""

    explicit: tuple[TagRule, ...] = ()
    grid: Grid | None = None
    guess: bool = False  # guess by behavior where nothing else is known
    # Options of the grid as the user wrote them; empty without any.
    grid_words: str = field(default="", compare=False)
    order_words: str = field(default="", compare=False)  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """A group's tag, its source, and the tags that fit its ranks if these are several."""

    tag: str
    source: str
    candidates: tuple[str, ...] = ()


def tag_group(group: ProcessGroup, behavior: Behavior, rules: TagRules) -> Tagged:
    """Determine the parallelism of a process group, and how it is known.

    If the ranks of the group fit several parallelisms, its behavior decides, or the tag is
    OTHER; the result has the candidates in both cases. To separate purposes of one set of
    ranks, call it once per operation, with only that operation as behavior.

    Parameters
    ----------
    group
        The process group.
    behavior
        Number of its calls by operation, and of iterations.
    rules
        Rules of the user, layout, and whether to guess.

    """
    for rule in rules.explicit:
        if rule.matches(group):
            return Tagged(tag=rule.tag, source="explicit")
    if by_description := _described(group, behavior, rules.grid):
        return Tagged(tag=by_description, source="description")
    if rules.grid is not None and (by_ranks := _by_ranks(group, behavior, rules.grid)):
        return by_ranks
    if rules.guess and (by_behavior := _guess(group, behavior, rules.grid)):
        return Tagged(tag=by_behavior, source="heuristic")
    return Tagged(tag="OTHER", source="description" if group.description in WORLD else "none")


def without_effect(unused: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rules and options without effect on any rank, with the reason on the first.

    `unused` has the sentences of each rank.
    """
    by_rank = [{text.partition(CHANGED_NOTHING)[0]: text for text in texts} for texts in unused]
    if not by_rank:
        return []
    return [
        text for rule, text in by_rank[0].items() if all(rule in texts for texts in by_rank)
    ]


def _described(group: ProcessGroup, behavior: Behavior, grid: Grid | None) -> str | None:
    """Return the description's tag; None for the group of all ranks without a grid."""
    if group.description not in WORLD:
        exchanges = behavior.counts.get("AllToAll", 0) > 0
        return tag_of_description(group.description or "", exchanges)
    if grid is None:
        return None
    return "DP" if grid.is_data_parallel else "OTHER"


def _by_ranks(group: ProcessGroup, behavior: Behavior, grid: Grid) -> Tagged | None:
    """Return the tag that the ranks imply; None if they fit none."""
    candidates = grid.candidates(group.ranks or ())
    if not candidates:
        return None
    if len(candidates) == 1:
        return Tagged(tag=candidates[0], source="ranks")
    chosen = _choose(candidates, group, behavior, grid)
    source = "heuristic" if chosen else "none"
    return Tagged(tag=chosen or "OTHER", source=source, candidates=candidates)


def _ints(value: str | int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else ()


def _purpose(behavior: Behavior) -> str | None:
    """Return the purpose that all operations of a group have; None without exactly one.

    Gathers accompany reductions (sharded weights, sequence parallel) and do not count beside
    them.
    """
    purposes = {
        _BEHAVIOR[op] for op, count in behavior.counts.items() if count and op in _BEHAVIOR
    }
    purposes -= {"gathers"} if "sums" in purposes else set()
    return purposes.pop() if len(purposes) == 1 else None


def _exchanges(grid: Grid | None) -> tuple[str, ...]:
    """Return the tags that an all-to-all may have, the likelier first."""
    rings = grid is not None and grid.cp > 1 and grid.ep == 1
    return ("CP", "EP") if rings else ("EP", "CP")


def _choose(
    candidates: tuple[str, ...], group: ProcessGroup, behavior: Behavior, grid: Grid
) -> str | None:
    """Return the candidate that fits the behavior."""
    preferred: tuple[str, ...] = ()
    match _purpose(behavior):
        case "pairs":
            preferred = ("PP", "CP") if group.members == 2 else ("CP",)  # noqa: PLR2004
        case "all to all":
            preferred = _exchanges(grid)
        case "sums" if "TP" not in candidates:
            preferred = ("DP",)
        case "sums" if "DP" not in candidates and _has_many_sums(group, behavior):
            preferred = ("TP",)
    return next((tag for tag in preferred if tag in candidates), None)


def _guess(group: ProcessGroup, behavior: Behavior, grid: Grid | None) -> str | None:
    """Return the likely tag of a group whose ranks imply none."""
    world = group.description in WORLD
    match _purpose(behavior):
        case "pairs" if group.members == 2:  # noqa: PLR2004
            return "PP"
        case "all to all":
            return _exchanges(grid)[0]
        case "sums" if world:
            return "DP"
        case "sums" if _has_many_sums(group, behavior):
            return "TP"
        case "sums" if group.is_unnamed and group.streams and not _are_many(behavior):
            return "DP"
    return None


def _has_many_sums(group: ProcessGroup, behavior: Behavior) -> bool:
    """Whether adjacent ranks do as many reductions per iteration as only layers do."""
    ranks = group.ranks
    if not ranks or len(ranks) < 2 or max(ranks) - min(ranks) + 1 != len(ranks):  # noqa: PLR2004
        return False
    return _are_many(behavior)


def _are_many(behavior: Behavior) -> bool:
    """Whether a group reduces so often per iteration that layers must cause it."""
    sums = (count for op, count in behavior.counts.items() if _BEHAVIOR.get(op) == "sums")
    return sum(sums) >= _MANY * max(1, behavior.iterations)
