"""Parallelism of a process group, from what frameworks call it, and how that is known."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

from fastcomm.trace.parallel import Grid

# Descriptions whose group is the world: DP where gradients cross all of it.
WORLD = ("default_pg", "mesh_default")
# Descriptions that say nothing.
SILENT = re.compile(r"undefined|mesh_dim_\d+|")

_DATA = r"DATA_PARALLEL_GROUP(_WITH_CP|_AG|_WITH_GTP_REMAT)*"

# Descriptions of Megatron-LM without "_GLOO", as a pattern of the whole text, and their tags.
DESCRIPTIONS = (
    (r"TENSOR_MODEL_PARALLEL_GROUP", "TP"),
    (r"EXPERT_TENSOR_PARALLEL_GROUP", "TP"),
    (r"TP_BOOTSTRAP_GROUP_MPI", "TP"),  # Transformer Engine's user buffers
    (rf"(EXPERT_)?{_DATA}", "DP"),
    (rf"INT(RA|ER)_PARTIAL_(EXPERT_)?{_DATA}", "DP"),  # instances of the distributed optimizer
    (rf"HIERARCHICAL_(EXPERT_)?{_DATA}_L\d+", "DP"),  # the same, for experts
    (r"(EXPERT_)?GTP_WEIGHT_REMAT_GROUP", "DP"),  # weights over ranks with different data
    (r"WEIGHT_GRADIENT_COMM_GROUP", "DP"),  # HyperCommGrid: over dp and cp
    (r"PIPELINE_MODEL_PARALLEL_GROUP", "PP"),
    (r"(POSITION_)?EMBEDDING_GROUP", "PP"),  # first and last stage
    (r"CONTEXT_PARALLEL_GROUP", "CP"),
    (r"HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L\d+", "CP"),
    (r"HYBRID_DP_CP_GROUP_\d+", "CP"),
    (r"EXPERT_MODEL_PARALLEL_GROUP", "EP"),
    (r"EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "EP"),  # tokens are dispatched here
    (r"MODEL_PARALLEL_GROUP", "OTHER"),  # norms and flags over TP and PP, and so the rest
    (r"CONTEXT_AND_MODEL_PARALLEL_GROUP", "OTHER"),
    (r"NON_DP_GROUP", "OTHER"),
    (r"TENSOR_AND_DATA_PARALLEL_GROUP(_WITH_CP)?", "OTHER"),
    (r"TENSOR_AND_CONTEXT_PARALLEL_GROUP", "OTHER"),
    (r"EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP(_WITH_EGTP)?", "OTHER"),
    (r"INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "OTHER"),
)

# Dimensions of a DeviceMesh; a description is "mesh_" and these joined by "_".
MESH = {
    # torchtitan, transformers, PyTorch's tutorials
    "dp": "DP",
    "dp_shard": "DP",
    "dp_replicate": "DP",
    "fsdp": "DP",
    "hsdp": "DP",
    "replicate": "DP",
    "shard": "DP",
    "tp": "TP",
    "pp": "PP",
    "cp": "CP",
    "ep": "EP",
    # torchtitan, where experts are sharded
    "dp_shard_mod_ep": "DP",
    "dp_shard_in_ep": "DP",
    "dp_mod_ep": "DP",
    "dp_in_ep": "DP",
    "efsdp": "DP",
    "etp": "TP",
    # torchtitan: data loading, and the loss over all ranks with data of their own
    "batch": "DP",
    "loss_mesh": "DP",
    # Megatron-FSDP
    "outer_fsdp_dp": "DP",
    "dp_outer": "DP",
    "dp_inner": "DP",
    "expert_dp": "DP",
    "expt_dp": "DP",
    "expt_tp": "TP",
    # verl, accelerate
    "ddp": "DP",
    "infer_dp": "DP",
    "infer_tp": "TP",
    "infer_pp": "PP",
    "sp": "CP",  # sequence parallelism of Ulysses
    # NeMo, Lightning, DeepSpeed
    "data_parallel": "DP",
    "tensor_parallel": "TP",
    "pipeline_parallel": "PP",
    "context_parallel": "CP",
    "sequence_parallel": "CP",
    "expert_parallel": "EP",
    # NeMo Automodel shards the weights of experts over it; OLMo-core, see EXCHANGED
    "ep_shard": "DP",
    # OLMo-core
    "ep_replicate": "DP",
    "replicas": "DP",
    "shards": "DP",
}
# OLMo-core gives this name to the dimension of the experts: with all-to-alls it is EP.
EXCHANGED = ("ep_shard",)


@lru_cache(maxsize=4096)
def tag_of_description(description: str, exchanges: bool = False) -> str | None:
    """Return the tag that a framework's description stands for; None where it says nothing.

    Parameters
    ----------
    description
        Of the process group. The world (`WORLD`) says nothing without a grid.
    exchanges
        Whether the group does all-to-alls, which decides where two frameworks use one name.

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


_MESH_NAMES = "|".join(sorted(MESH, key=len, reverse=True))


def _tag_of_mesh(dimensions: str) -> str | None:
    """Return the common tag of joined dimensions, DP for dp with cp, else OTHER."""
    if not re.fullmatch(rf"({_MESH_NAMES})(_({_MESH_NAMES}))*", dimensions):
        return None
    if dimensions in MESH:
        return MESH[dimensions]
    tags = {MESH[name] for name in re.findall(rf"({_MESH_NAMES})(?:_|$)", dimensions)}
    if tags == {"DP", "CP"}:
        return "DP"
    return tags.pop() if len(tags) == 1 else "OTHER"


__all__ = [
    "CHANGED_NOTHING",
    "DESCRIPTIONS",
    "MESH",
    "RULE_FIELDS",
    "WORLD",
    "Behaviour",
    "ProcessGroup",
    "TagRule",
    "TagRules",
    "Tagged",
    "tag_group",
    "tag_of_description",
    "without_effect",
]

# What a user's rule can go by.
RULE_FIELDS = ("name", "description", "ranks", "communicator", "stream")

# Between what a user said that has no effect, and the reason.
CHANGED_NOTHING = " changed nothing: "

# What the operations of a group move: only these tell something of it.
_BEHAVIOUR = {
    "SendRecv": "pairs",
    "AllToAll": "all to all",
    "AllReduce": "sums",
    "ReduceScatter": "sums",
    "AllGather": "gathers",
}
# Sums of an iteration from which neighbours are taken for tensor parallel: 4 layers, 4 each.
_MANY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """What a trace says of one process group or communicator."""

    name: str | None = None
    description: str | None = None
    ranks: tuple[int, ...] | None = None
    size: int | None = None
    communicator: int | None = None
    streams: tuple[int, ...] = ()  # of the device, that its events are on

    @property
    def members(self) -> int | None:
        """How many ranks it has, if that is known."""
        return self.size if self.ranks is None else len(self.ranks)

    @property
    def is_unnamed(self) -> bool:
        """Whether nothing is known of it but what it does, and on which streams."""
        return self.description is None and self.ranks is None and self.size is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What a group was seen to do."""

    counts: Mapping[str, int] = field(default_factory=dict)  # events by name of OPS
    iterations: int = 1  # in which they were counted


@dataclass(frozen=True, slots=True, kw_only=True)
class TagRule:
    """A user's word: groups whose `field` is `value` have this tag.

    A name or a description may be a pattern of `fnmatch`; ranks are a set; a stream is that of
    all events of the group.
    """

    field: str  # one of RULE_FIELDS
    value: str | int | tuple[int, ...]
    tag: str
    is_given: bool = True  # by the user, not by the traces

    def matches(self, group: ProcessGroup) -> bool:
        """Whether the rule is about this group."""
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
    """What the user said about the job."""

    explicit: tuple[TagRule, ...] = ()
    grid: Grid | None = None
    guess: bool = False  # let behaviour answer where nothing else does
    # How the user gave the grid; empty where nobody did, as for a workload card.
    grid_words: str = field(default="", compare=False)
    order_words: str = field(default="", compare=False)  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """A group's tag, where it comes from, and what fits its ranks where that is not one tag."""

    tag: str
    source: str
    candidates: tuple[str, ...] = ()


def tag_group(group: ProcessGroup, behaviour: Behaviour, rules: TagRules) -> Tagged:
    """The tag of a group.

    Where ranks fit several tags, behaviour chooses or the tag is OTHER: the candidates stand in
    the result either way. One rank set that serves two purposes can be told apart by asking
    once an operation, with that operation alone as the behaviour.
    """
    for rule in rules.explicit:
        if rule.matches(group):
            return Tagged(tag=rule.tag, source="explicit")
    if described := _described(group, behaviour, rules.grid):
        return Tagged(tag=described, source="description")
    if rules.grid is not None and (found := _of_ranks(group, behaviour, rules.grid)):
        return found
    if rules.guess and (guessed := _guess(group, behaviour, rules.grid)):
        return Tagged(tag=guessed, source="heuristic")
    return Tagged(tag="OTHER", source="description" if group.description in WORLD else "none")


def without_effect(unused: Sequence[tuple[str, ...]]) -> list[str]:
    """Return what has no effect on any rank, each with the reason on the first.

    `unused` has the sentences of each rank.
    """
    said = [{text.partition(CHANGED_NOTHING)[0]: text for text in each} for each in unused]
    if not said:
        return []
    return [text for what, text in said[0].items() if all(what in each for each in said)]


def _described(group: ProcessGroup, behaviour: Behaviour, grid: Grid | None) -> str | None:
    """Return the description's tag; None for the world where no grid says what it is."""
    if group.description not in WORLD:
        exchanges = behaviour.counts.get("AllToAll", 0) > 0
        return tag_of_description(group.description or "", exchanges)
    if grid is None:
        return None
    return "DP" if grid.is_data_parallel else "OTHER"


def _of_ranks(group: ProcessGroup, behaviour: Behaviour, grid: Grid) -> Tagged | None:
    """The tag that the ranks give; None where they fit nothing."""
    candidates = grid.candidates(group.ranks or ())
    if not candidates:
        return None
    if len(candidates) == 1:
        return Tagged(tag=candidates[0], source="ranks")
    chosen = _choose(candidates, group, behaviour, grid)
    source = "heuristic" if chosen else "none"
    return Tagged(tag=chosen or "OTHER", source=source, candidates=candidates)


def _ints(value: str | int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else ()


def _deed(behaviour: Behaviour) -> str | None:
    """The one thing that a group does; None where it does several, or nothing that tells.

    Gathers go with sums (sharded weights, sequence parallel) and tell nothing alone.
    """
    seen = {
        _BEHAVIOUR[op] for op, count in behaviour.counts.items() if count and op in _BEHAVIOUR
    }
    seen -= {"gathers"} if "sums" in seen else set()
    return seen.pop() if len(seen) == 1 else None


def _exchanges(grid: Grid | None) -> tuple[str, ...]:
    """Whom an all-to-all serves, the likelier first."""
    rings = grid is not None and grid.cp > 1 and grid.ep == 1
    return ("CP", "EP") if rings else ("EP", "CP")


def _choose(
    candidates: tuple[str, ...], group: ProcessGroup, behaviour: Behaviour, grid: Grid
) -> str | None:
    """The candidate that fits what the group does."""
    wanted: tuple[str, ...] = ()
    match _deed(behaviour):
        case "pairs":
            wanted = ("PP", "CP") if group.members == 2 else ("CP",)  # noqa: PLR2004
        case "all to all":
            wanted = _exchanges(grid)
        case "sums" if "TP" not in candidates:
            wanted = ("DP",)
        case "sums" if "DP" not in candidates and _has_many_sums(group, behaviour):
            wanted = ("TP",)
    return next((tag for tag in wanted if tag in candidates), None)


def _guess(group: ProcessGroup, behaviour: Behaviour, grid: Grid | None) -> str | None:
    """What a group whose ranks tell nothing probably serves."""
    world = group.description in WORLD
    match _deed(behaviour):
        case "pairs" if group.members == 2:  # noqa: PLR2004
            return "PP"
        case "all to all":
            return _exchanges(grid)[0]
        case "sums" if world:
            return "DP"
        case "sums" if _has_many_sums(group, behaviour):
            return "TP"
        case "sums" if group.is_unnamed and group.streams and not _are_many(behaviour):
            return "DP"
    return None


def _has_many_sums(group: ProcessGroup, behaviour: Behaviour) -> bool:
    """Whether neighbours sum so often in an iteration as only layers do."""
    ranks = group.ranks
    if not ranks or len(ranks) < 2 or max(ranks) - min(ranks) + 1 != len(ranks):  # noqa: PLR2004
        return False
    return _are_many(behaviour)


def _are_many(behaviour: Behaviour) -> bool:
    """Return whether there are as many sums in an iteration as only layers do."""
    sums = (count for op, count in behaviour.counts.items() if _BEHAVIOUR.get(op) == "sums")
    return sum(sums) >= _MANY * max(1, behaviour.iterations)
