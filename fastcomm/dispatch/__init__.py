"""How long the all-to-all of a mixture of experts takes by schedule, and how far from the best.

Sizes are bytes, times are seconds as float64: a simulated time is no measurement. A `Recipe`
says what a workload is made of: shape of cluster and model, and made-up routing of its tokens,
a pure function of a seed. GPU = node * gpus_per_node + rank. Expert e of a workload lives on
GPU e // experts_per_gpu.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from fastcomm.checks import RANKS, CheckedOptions, Range, build
from fastcomm.dispatch.traffic import Ids
from fastcomm.errors import ConfigError
from fastcomm.options import Distinct, Dtype, Law, WorkloadOptions
from fastcomm_kernels import dispatch as kernels

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

Shares = NDArray[np.float64]
_COIN = 2.0**32
# What is left for the last expert of a token to be drawn from, at least.
_LEAST = 1e-5


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


def id_type(recipe: Recipe) -> type[np.int16] | type[np.int32]:
    """Return the smallest type that holds every expert and GPU."""
    return np.int16 if recipe.experts <= np.iinfo(np.int16).max else np.int32


def shares(recipe: Recipe, popularity: Sequence[float] | None = None) -> Shares:
    """Return the share of each expert in single draws, by the recipe's law."""
    if recipe.sampler == "popularity":
        found = _given(recipe, popularity)
    elif recipe.sampler == "zipf":
        found = folded_zipf(recipe.zipf_alpha, recipe.experts)
    elif recipe.sampler in {"bounded", "bimodal"}:
        found = np.arange(1.0, recipe.experts + 1) ** -recipe.zipf_alpha
    else:
        found = np.ones(recipe.experts)
    return np.asarray(found / found.sum())


def folded_zipf(alpha: float, experts: int) -> Shares:
    """An unbounded Zipf law folded onto the experts: value v is expert (v - 1) mod experts."""
    from scipy.special import zeta  # takes a while to load

    place = (np.arange(experts) + 1) / experts
    return np.asarray(experts**-alpha * zeta(alpha, place) / zeta(alpha))


def _given(recipe: Recipe, popularity: Sequence[float] | None) -> Shares:
    if popularity is None or len(popularity) != recipe.experts:
        found = "none" if popularity is None else len(popularity)
        raise ConfigError(
            f"popularity: found {found}, wanted one number for each of {recipe.experts} experts"
        )
    given = np.asarray(popularity, np.float64)
    if not np.isfinite(given).all() or (given < 0).any() or not given.sum():
        raise ConfigError("popularity: wanted numbers from 0, and one above")
    return given


def _check_distinct(recipe: Recipe, law: Shares) -> None:
    """Refuse a law under which distinct experts take for ever to draw."""
    left = np.sort(law)[: len(law) - recipe.topk + 1].sum()
    if recipe.distinct == "resample" and left < _LEAST:
        raise ConfigError(
            f"distinct: by this law the {recipe.topk - 1} hottest experts take all but "
            f"{left:.1e} of the draws, so that resampling would not end; wanted `uniform`"
        )


def alias_table(law: Shares, dtype: type) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """For each column how often of 2^32 it is itself, and which expert it is otherwise."""
    size = len(law)
    scaled = (law * size).tolist()
    keep, alias = [1.0] * size, list(range(size))
    small = [e for e in range(size) if scaled[e] < 1]
    large = [e for e in range(size) if scaled[e] >= 1]
    while small and large:
        low, high = small.pop(), large[-1]
        keep[low], alias[low] = scaled[low], high
        scaled[high] -= 1 - scaled[low]
        if scaled[high] < 1:
            small.append(large.pop())
    threshold = np.round(np.array(keep) * _COIN).astype(np.uint64)
    return threshold, np.array(alias, dtype)


_CHUNK = 1 << 16
_GATE_NODES = 4
_HOT_RANKS = 2
_HOT_SHARE = 0.9
_WORD = (1 << 64) - 1

Draw = Callable[[int, np.uint64, Ids], None]


def layers(
    recipe: Recipe,
    *,
    popularity: Sequence[float] | None = None,
    sources: Sequence[int] | None = None,
    threads: int = 1,
) -> Iterator[tuple[Ids, Ids]]:
    """Yield source and experts of the tokens: iteration by iteration, layer by layer.

    `popularity` has a weight for each expert, `sources` the tokens of each GPU.
    """
    src = source_gpus(recipe, sources)
    draw = _drawing(recipe, src, popularity)
    for iteration in range(recipe.iter_num):
        for number in range(recipe.num_layers):
            expert = np.empty((recipe.tokens, recipe.topk), src.dtype)
            _fill(draw, layer_key(recipe.seed, iteration, number), expert, threads)
            yield src, expert


def source_gpus(recipe: Recipe, counts: Sequence[int] | None = None) -> Ids:
    """Return the GPU of each token, in order: evenly, or by `counts`."""
    dtype = id_type(recipe)
    if counts is None:
        # Token i lies on GPU i * gpus // tokens.
        edges = -(-np.arange(recipe.gpus + 1) * recipe.tokens // recipe.gpus)
        return np.repeat(np.arange(recipe.gpus, dtype=dtype), np.diff(edges))
    if len(counts) != recipe.gpus or min(counts) < 0 or sum(counts) != recipe.tokens:
        raise ConfigError(
            f"sources: found {len(counts)} counts of {sum(counts)} tokens, wanted one for each "
            f"of {recipe.gpus} GPUs, {recipe.tokens} tokens in all"
        )
    return np.repeat(np.arange(recipe.gpus, dtype=dtype), counts)


def layer_key(seed: int, iteration: int, number: int) -> np.uint64:
    """Return the key from which the random numbers of a layer are drawn."""
    key = np.uint64(seed & _WORD)
    with np.errstate(over="ignore"):
        for word in (iteration, number):
            key = kernels.mixed(key ^ np.uint64(0x9E3779B97F4A7C15)) + np.uint64(word)
    return np.uint64(key)


def _fill(draw: Draw, key: np.uint64, expert: Ids, threads: int) -> None:
    starts = range(0, len(expert), _CHUNK)
    if threads == 1 or len(starts) == 1:
        draw(0, key, expert)
        return
    with ThreadPoolExecutor(threads) as pool:
        done = [pool.submit(draw, at, key, expert[at : at + _CHUNK]) for at in starts]
        for each in done:
            each.result()


def _drawing(recipe: Recipe, src: Ids, popularity: Sequence[float] | None) -> Draw:
    if recipe.sampler == "gate":
        nodes = recipe.num_nodes
        return _racing(
            np.ones((1, recipe.experts)),
            np.zeros(len(src), np.int32),
            (nodes, min(nodes, _GATE_NODES)),
            recipe,
        )
    if recipe.sampler == "bimodal":
        return _racing(*_bimodal(recipe, src), (1, 1), recipe)
    law = shares(recipe, popularity)
    if recipe.shuffle:
        law = law[np.random.default_rng(recipe.seed).permutation(len(law))]
    _check_distinct(recipe, law)
    threshold, alias = alias_table(law, src.dtype.type)
    uniform = recipe.distinct == "uniform"

    def draw(first: int, key: np.uint64, out: Ids) -> None:
        with np.errstate(over="ignore"):
            kernels.routed(first, key, threshold, alias, uniform, out)

    return draw


def _racing(
    weight: NDArray[np.float64], law: NDArray[np.int32], gate: tuple[int, int], recipe: Recipe
) -> Draw:
    """Draw without replacement; each token by the law of its number."""
    fewest = int((weight > 0).sum(axis=1).min()) * gate[1] // gate[0]
    if fewest < recipe.topk:
        raise ConfigError(
            f"topk: found {recipe.topk}, wanted at most {fewest}: so many experts are left to "
            f"a token by the law `{recipe.sampler}`"
        )

    def draw(first: int, key: np.uint64, out: Ids) -> None:
        with np.errstate(over="ignore"):
            part = law[first : first + len(out)]
            kernels.raced(first, key, part, weight, gate, out)

    return draw


def _bimodal(recipe: Recipe, src: Ids) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Laws, remote and own of each node, and which one each token follows.

    Two ranks of a node send nine tokens of ten away, the others one.
    """
    node_of = np.arange(recipe.experts) // (recipe.experts // recipe.num_nodes)
    own = node_of == np.arange(recipe.num_nodes)[:, None]
    away = np.where(own, 0.0, shares(recipe))
    weight = np.stack([away, own.astype(np.float64)], axis=1).reshape(-1, recipe.experts)
    node, rank = np.divmod(src.astype(np.int32), recipe.gpus_per_node)
    share = np.where(rank < _HOT_RANKS, _HOT_SHARE, 1 - _HOT_SHARE)
    coin = np.random.default_rng(recipe.seed).random(len(src))
    return weight, (2 * node + (coin >= share)).astype(np.int32)


def layers_of_seed(recipe: Recipe) -> Iterator[tuple[Ids, Ids]]:
    """Draw source and experts of each layer by the sampler "seed": NumPy's legacy stream."""
    stream = np.random.RandomState(recipe.seed)
    each, rest = divmod(recipe.tokens, recipe.gpus)
    src = np.repeat(np.arange(recipe.gpus), each)
    if rest:
        src = np.concatenate([src, stream.randint(0, recipe.gpus, rest)])
    src = src.astype(id_type(recipe))
    for _ in range(recipe.iter_num * recipe.num_layers):
        raw = stream.zipf(recipe.zipf_alpha, (recipe.tokens, recipe.topk))
        expert = ((raw - 1) % recipe.experts).astype(src.dtype)
        yield src, _repaired(stream, expert, recipe.experts)


def _repaired(stream: np.random.RandomState, expert: Ids, experts: int) -> Ids:
    """Return rows with distinct experts; the stream moves on by exactly what that takes."""
    size = 2 * expert.size + 1024
    while True:
        # n scalar draws take from the stream what one draw of n takes.
        state = stream.get_state()
        drawn = stream.randint(0, experts, size)
        stream.set_state(state)
        fixed = expert.copy()
        used = kernels.repair(fixed, experts, drawn)
        if used >= 0:
            stream.randint(0, experts, used)
            return fixed
        size *= 4
