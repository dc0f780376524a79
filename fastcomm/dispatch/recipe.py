"""What a workload is made of: shape of the cluster, of the model, and how tokens are routed.

GPU = node * gpus_per_node + rank. Expert e of a workload lives on GPU e // experts_per_gpu.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from fastcomm.checks import RANKS, CheckedOptions, Range, build
from fastcomm.errors import ConfigError
from fastcomm.options import Distinct, Dtype, Law, WorkloadOptions

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8": 1}
LAWS: tuple[str, ...] = get_args(Law)
_MOST_EXPERTS = 1 << 24
_MOST_TOKENS = 1 << 40  # of a layer
_MOST_LAYERS = 1 << 20  # of all iterations
_MOST_LEGACY_SEED = (1 << 32) - 1
RANGES = {
    "num_nodes": Range(1, 1 << 16),
    "gpus_per_node": Range(1, 1 << 16),
    "experts_per_gpu": Range(1, _MOST_EXPERTS),
    "seq_len": Range(0, _MOST_TOKENS),
    "batch_size": Range(0, _MOST_TOKENS),
    "embed_size": Range(1, 1 << 30),
    "topk": Range(1, 1 << 16),
    "num_layers": Range(1, 1 << 20),
    "iter_num": Range(1, 1 << 20),
    "zipf_alpha": Range(0, 100),
    "seed": Range(0, (1 << 64) - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(CheckedOptions):
    """The whole configuration of a workload; the defaults are the original simulator's.

    `sampler` says how experts are drawn: "seed" is the original's stream, "table" is a user's
    own routing. `ConfigError` for a value that is none.
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
    sampler: Literal["seed", "table"] | Law = "zipf"
    distinct: Distinct = "uniform"
    shuffle: bool = False

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
        """Tokens of a layer, of the whole cluster."""
        return self.seq_len * self.batch_size

    @property
    def token_bytes(self) -> int:
        """Bytes of a token on the wire."""
        return self.embed_size * DTYPE_BYTES[self.dtype]

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Return the recipe of some values; ConfigError for an unknown name."""
        return build(cls, values, "recipe")

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON has it."""
        return asdict(self)

    def agreed(self, options: WorkloadOptions, where: str) -> Self:
        """Return the recipe; ConfigError where an option contradicts it."""
        for name, value in options.given().items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"{where}: {name} is {getattr(self, name)}, and {value} was asked for; "
                    "the shape of a workload is fixed when it is generated"
                )
        return self


def _check_numbers(recipe: Recipe) -> None:
    for name, within in RANGES.items():
        within.check(getattr(recipe, name), name)
    RANKS.check(recipe.gpus, "GPUs (num_nodes * gpus_per_node)")
    if recipe.tokens > _MOST_TOKENS:
        raise ConfigError(
            f"seq_len * batch_size: {recipe.tokens} tokens a layer; wanted at most "
            f"{_MOST_TOKENS}"
        )
    layers = recipe.iter_num * recipe.num_layers
    if layers > _MOST_LAYERS:
        raise ConfigError(
            f"iter_num * num_layers: {layers} layers; wanted at most {_MOST_LAYERS}"
        )
    if recipe.experts > _MOST_EXPERTS:
        raise ConfigError(f"{recipe.experts} experts; wanted at most {_MOST_EXPERTS}")
    if recipe.topk > recipe.experts:
        raise ConfigError(
            f"topk: found {recipe.topk}, wanted at most the {recipe.experts} experts: "
            "those of a token differ"
        )


def _check_law(recipe: Recipe) -> None:
    if recipe.sampler == "seed" and recipe.seed > _MOST_LEGACY_SEED:
        raise ConfigError(
            f"seed: found {recipe.seed}, wanted at most {_MOST_LEGACY_SEED}: the original's "
            "generator takes no more"
        )
    if recipe.sampler in {"seed", "zipf"} and recipe.zipf_alpha <= 1:
        raise ConfigError(
            f"zipf_alpha: found {recipe.zipf_alpha}, wanted more than 1: an unbounded Zipf law "
            "has no sum below; the law `bounded` takes any exponent from 0"
        )
