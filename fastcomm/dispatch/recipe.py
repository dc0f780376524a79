"""Recipes of workloads: shape of cluster and model, and how tokens are routed to experts.

Sizes are in bytes. A `Recipe` is a pure function of a seed. GPU = node * gpus_per_node + rank.
Expert e is on GPU e // experts_per_gpu. This module stays light: `fastcomm dispatch --help`
loads it.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from fastcomm.checks import RANKS, non_default
from fastcomm.dispatch.options import (
    MOST_EXPERTS,
    MOST_LAYERS,
    MOST_TOKENS,
    Distinct,
    Dtype,
    Law,
    WorkloadOptions,
)
from fastcomm.errors import ConfigError
from fastcomm.option_fields import CheckedOptions, build, field_infos

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8": 1}
LAWS: tuple[str, ...] = get_args(Law)
_MOST_LEGACY_SEED = (1 << 32) - 1
_TOP_GROUPS = 4  # of DeepSeek-V3
_OF_LAWS = ("zipf_alpha", "distinct", "shuffle", "expert_groups", "top_groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(CheckedOptions):
    """Configuration of a workload; the defaults are those of the original simulator.

    `law` is how popular experts are, "seed" for the random stream of the original simulator, or
    "table" for routing from a file. Raises `ConfigError` for an invalid value.
    """

    num_nodes: int = 4
    gpus_per_node: int = 8
    experts_per_gpu: int = 2
    seq_len: int = 8192
    batch_size: int = 2
    embed_size: int = 5120
    dtype: Dtype = "float16"
    topk: int = 4
    num_layers: int = 1
    iter_num: int = 10
    zipf_alpha: float = 1.2
    seed: int = 0
    law: Literal["seed", "table"] | Law = "zipf"
    distinct: Distinct = "uniform"
    shuffle: bool = False
    expert_groups: int = 0  # of the law "gate"; 0 is one per node
    top_groups: int = 0  # groups of a token, of the law "gate"; 0 is 4, or all of fewer

    def __post_init__(self) -> None:
        """Check the values, each alone and together."""
        CheckedOptions.__post_init__(self)
        _check_numbers(self)
        _check_law(self)

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return self.num_nodes * self.gpus_per_node

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return self.gpus * self.experts_per_gpu

    @property
    def tokens(self) -> int:
        """Tokens of a layer, of all GPUs."""
        return self.seq_len * self.batch_size

    @property
    def gate(self) -> tuple[int, int]:
        """Groups of experts, and those that a token goes to; (1, 1) is no limit."""
        if self.law != "gate":
            return 1, 1
        groups = self.expert_groups or self.num_nodes
        return groups, self.top_groups or min(groups, _TOP_GROUPS)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token as it is sent."""
        return self.embed_size * DTYPE_BYTES[self.dtype]

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Return the recipe with these fields.

        Raises ConfigError for a field that is unknown, invalid, or without effect on the law.
        """
        recipe = build(cls, values, "recipe")
        names = set(_OF_LAWS).intersection(non_default(recipe))
        own: dict[str, Any] = {name: getattr(recipe, name) for name in names}
        if recipe.law != "table":
            own |= {"compat": "seed"} if recipe.law == "seed" else {"law": recipe.law}
            WorkloadOptions(**own)
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as a JSON object."""
        return asdict(self)

    def check_options(self, options: WorkloadOptions, where: str) -> Self:
        """Return this recipe; raise `ConfigError` if an option contradicts it.

        `where` is the path of the workload, and begins the message.
        """
        for name, value in options.recipe_values().items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"{where}: {name} is {getattr(self, name)}, but the option says {value}; "
                    "the shape of a workload is fixed when it is generated"
                )
        return self


def _check_numbers(recipe: Recipe) -> None:
    """Raise `ConfigError` if a number of the recipe is out of range."""
    for name, info in field_infos(WorkloadOptions).items():
        if info.limits is not None:
            info.limits.check(getattr(recipe, name), name)
    RANKS.check(recipe.gpus, "GPUs (num_nodes * gpus_per_node)")
    if recipe.tokens > MOST_TOKENS:
        raise ConfigError(
            f"seq_len * batch_size: {recipe.tokens} tokens per layer, more than the maximum of "
            f"{MOST_TOKENS}"
        )
    layers = recipe.iter_num * recipe.num_layers
    if layers > MOST_LAYERS:
        raise ConfigError(
            f"iter_num * num_layers: {layers} layers, more than the maximum of {MOST_LAYERS}"
        )
    if recipe.experts > MOST_EXPERTS:
        raise ConfigError(f"{recipe.experts} experts, more than the maximum of {MOST_EXPERTS}")
    if recipe.topk > recipe.experts:
        raise ConfigError(
            f"invalid topk {recipe.topk}: a token needs distinct experts, and there are only "
            f"{recipe.experts}"
        )


def _check_law(recipe: Recipe) -> None:
    """Raise `ConfigError` if the law cannot be drawn with the seed or the exponent."""
    if recipe.law == "seed" and recipe.seed > _MOST_LEGACY_SEED:
        raise ConfigError(
            f"invalid seed {recipe.seed}: the law `seed` takes at most {_MOST_LEGACY_SEED}"
        )
    groups, top_groups = recipe.gate
    if recipe.experts % groups:
        raise ConfigError(
            f"invalid expert_groups {groups}: the {recipe.experts} experts cannot be grouped "
            "evenly"
        )
    if top_groups > groups:
        raise ConfigError(f"invalid top_groups {top_groups}: there are {groups} groups")
    if recipe.law in {"seed", "zipf"} and recipe.zipf_alpha <= 1:
        raise ConfigError(
            f"invalid zipf_alpha {recipe.zipf_alpha}: an unbounded Zipf law needs more than 1; "
            "the law `bounded` takes any exponent from 0"
        )
