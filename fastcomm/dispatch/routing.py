"""Routing of tokens to experts by a law of popularity, as a pure function of a recipe's seed.

Popularity is a float64 array of one share per expert that adds up to 1.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from fastcomm.dispatch.recipe import Recipe
from fastcomm.errors import ConfigError
from fastcomm_kernels import dispatch as kernels
from fastcomm_kernels.arrays import Ids

Shares = NDArray[np.float64]
_COIN = 2.0**32
# Least probability from which the last distinct expert of a token may be drawn.
_LEAST = 1e-5
_CHUNK = 1 << 16
_HOT_RANKS = 2
_HOT_SHARE = 0.9
_WORD = (1 << 64) - 1
Draw = Callable[[int, np.uint64, Ids], None]


def id_type(experts: int) -> type[np.int16] | type[np.int32]:
    """Return the smallest integer type that holds every expert and GPU."""
    return np.int16 if experts <= np.iinfo(np.int16).max else np.int32


def shares(recipe: Recipe, popularity: Sequence[float] | None = None) -> Shares:
    """Return the probability of each expert in a single draw, by the recipe's law."""
    if recipe.law == "popularity":
        weights = _checked_popularity(recipe, popularity)
    elif recipe.law == "zipf":
        weights = folded_zipf(recipe.zipf_alpha, recipe.experts)
    elif recipe.law in {"bounded", "bimodal"}:
        weights = np.arange(1.0, recipe.experts + 1) ** -recipe.zipf_alpha
    else:
        weights = np.ones(recipe.experts)
    return np.asarray(weights / weights.sum())


def folded_zipf(alpha: float, experts: int) -> Shares:
    """Fold an unbounded Zipf law onto the experts: value v is expert (v - 1) mod experts."""
    from scipy.special import zeta  # slow to import

    place = (np.arange(experts) + 1) / experts
    return np.asarray(experts**-alpha * zeta(alpha, place) / zeta(alpha))


def _checked_popularity(recipe: Recipe, popularity: Sequence[float] | None) -> Shares:
    """Return the weights; raise ConfigError unless there is a valid one for each expert."""
    if popularity is None or len(popularity) != recipe.experts:
        count = "no" if popularity is None else len(popularity)
        raise ConfigError(
            f"popularity has {count} numbers: expected one for each of {recipe.experts} experts"
        )
    weights = np.asarray(popularity, np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum():
        raise ConfigError("invalid popularity: expected numbers from 0, at least one above 0")
    return weights


def _check_distinct(recipe: Recipe, law: Shares) -> None:
    """Raise ConfigError for a law under which drawing distinct experts would not end."""
    remaining = np.sort(law)[: len(law) - recipe.topk + 1].sum()
    if recipe.distinct == "resample" and remaining < _LEAST:
        raise ConfigError(
            f"distinct `resample` would not end: the {recipe.topk - 1} most popular experts "
            f"take all but {remaining:.1e} of the draws; use `uniform`"
        )


def alias_table(law: Shares, dtype: type) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Build Walker's alias table of a law.

    Returns
    -------
    threshold : ndarray
        Of each column, how many of 2**32 draws take the column's own expert.
    alias : ndarray
        Expert of the other draws, with `dtype`.

    """
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


def draw(
    recipe: Recipe,
    *,
    popularity: Sequence[float] | None = None,
    sources: Sequence[int] | None = None,
    threads: int = 1,
) -> Iterator[tuple[Ids, Ids]]:
    """Return the source GPU and the experts of the tokens of each layer of all iterations.

    Parameters
    ----------
    recipe
        Shape and law of the workload.
    popularity
        Weight of each expert, for the law "popularity".
    sources
        Number of tokens of each GPU; by default tokens are spread evenly.
    threads
        Number of threads; it does not change the numbers drawn.

    Returns
    -------
    Iterator
        GPU of each token, and experts of each token, (tokens, top-k), by layer.

    Raises
    ------
    ConfigError
        If popularity, sources or the law do not suit the recipe, or the recipe cannot be drawn.

    """
    if recipe.law == "seed":
        return layers_of_seed(recipe)
    if recipe.law == "table":
        raise ConfigError(
            "invalid law `table`: it stands for routing from a file; choose another to draw"
        )
    src = source_gpus(recipe, sources)
    return _drawn_layers(recipe, src, _draw_function(recipe, src, popularity), threads)


def _drawn_layers(
    recipe: Recipe, src: Ids, draw_: Draw, threads: int
) -> Iterator[tuple[Ids, Ids]]:
    """Yield `src`, and the experts that a function draws for each layer."""
    for iteration in range(recipe.iter_num):
        for number in range(recipe.num_layers):
            expert = np.empty((recipe.tokens, recipe.topk), src.dtype)
            _fill(draw_, layer_key(recipe.seed, iteration, number), expert, threads)
            yield src, expert


def source_gpus(recipe: Recipe, counts: Sequence[int] | None = None) -> Ids:
    """Return the GPU of each token, in order of the GPUs.

    `counts` has the number of tokens of each GPU; by default tokens are spread evenly.
    `ConfigError` if the counts do not suit the recipe.
    """
    dtype = id_type(recipe.experts)
    if counts is None:
        # Token i is on GPU i * gpus // tokens.
        edges = -(-np.arange(recipe.gpus + 1) * recipe.tokens // recipe.gpus)
        return np.repeat(np.arange(recipe.gpus, dtype=dtype), np.diff(edges))
    if len(counts) != recipe.gpus or min(counts) < 0 or sum(counts) != recipe.tokens:
        raise ConfigError(
            f"invalid sources: {len(counts)} counts of {sum(counts)} tokens in total; expected "
            f"{recipe.gpus} counts, one per GPU, of {recipe.tokens} tokens"
        )
    return np.repeat(np.arange(recipe.gpus, dtype=dtype), counts)


def layer_key(seed: int, iteration: int, number: int) -> np.uint64:
    """Return the key of the random numbers of a layer, equal on all machines.

    Parameters
    ----------
    seed
        Any integer; its lowest 64 bits count.
    iteration, number
        Iteration of the workload, and number of the layer.

    """
    key = np.uint64(seed & _WORD)
    with np.errstate(over="ignore"):
        for value in (iteration, number):
            key = kernels.mixed(key ^ np.uint64(0x9E3779B97F4A7C15)) + np.uint64(value)
    return np.uint64(key)


def _fill(draw: Draw, key: np.uint64, expert: Ids, threads: int) -> None:
    """Draw the experts of a layer into `expert`, in chunks on several threads."""
    starts = range(0, len(expert), _CHUNK)
    if threads == 1 or len(starts) == 1:
        draw(0, key, expert)
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(draw, at, key, expert[at : at + _CHUNK]) for at in starts]
        for future in futures:
            future.result()


def _draw_function(recipe: Recipe, src: Ids, popularity: Sequence[float] | None) -> Draw:
    """Return the function that draws the experts of a slice of tokens.

    Its arguments are the number of the first token, the random key of the layer (`layer_key`),
    and the array (tokens, top-k) that it fills. `src` has the GPU of each token. `popularity`
    has the weight of each expert, for the law "popularity" only.
    """
    if recipe.law == "gate":
        equal = np.ones((1, recipe.experts)), np.zeros(len(src), np.int32)
        return _weighted_draw(*equal, recipe.gate, recipe)
    if recipe.law == "bimodal":
        return _weighted_draw(*_bimodal(recipe, src), (1, 1), recipe)
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


def _weighted_draw(
    weight: NDArray[np.float64], law: NDArray[np.int32], gate: tuple[int, int], recipe: Recipe
) -> Draw:
    """Return a function that draws without replacement; `law`: row of `weight` per token."""
    fewest = int((weight > 0).sum(axis=1).min()) * gate[1] // gate[0]
    if fewest < recipe.topk:
        raise ConfigError(
            f"invalid topk {recipe.topk}: under the law `{recipe.law}` a token can reach "
            f"only {fewest} experts"
        )

    def draw(first: int, key: np.uint64, out: Ids) -> None:
        with np.errstate(over="ignore"):
            part = law[first : first + len(out)]
            kernels.raced(first, key, part, weight, gate, out)

    return draw


def _bimodal(recipe: Recipe, src: Ids) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return the weights of remote and of own experts of each node, and the law of each token.

    The first two ranks of a node send 90 % of their tokens to other nodes, the other ranks 10
    %.
    """
    node_of = np.arange(recipe.experts) // (recipe.experts // recipe.num_nodes)
    own = node_of == np.arange(recipe.num_nodes)[:, None]
    remote = np.where(own, 0.0, shares(recipe))
    weight = np.stack([remote, own.astype(np.float64)], axis=1).reshape(-1, recipe.experts)
    node, rank = np.divmod(src.astype(np.int32), recipe.gpus_per_node)
    share = np.where(rank < _HOT_RANKS, _HOT_SHARE, 1 - _HOT_SHARE)
    coin = np.random.default_rng(recipe.seed).random(len(src))
    return weight, (2 * node + (coin >= share)).astype(np.int32)


def layers_of_seed(recipe: Recipe) -> Iterator[tuple[Ids, Ids]]:
    """Yield the layers of the law "seed", which uses NumPy's legacy random stream."""
    stream = np.random.RandomState(recipe.seed)
    per_gpu, remainder = divmod(recipe.tokens, recipe.gpus)
    src = np.repeat(np.arange(recipe.gpus), per_gpu)
    if remainder:
        src = np.concatenate([src, stream.randint(0, recipe.gpus, remainder)])
    src = src.astype(id_type(recipe.experts))
    for _ in range(recipe.iter_num * recipe.num_layers):
        raw = stream.zipf(recipe.zipf_alpha, (recipe.tokens, recipe.topk))
        expert = ((raw - 1) % recipe.experts).astype(src.dtype)
        yield src, _with_distinct(stream, expert, recipe.experts)


def _with_distinct(stream: np.random.RandomState, expert: Ids, experts: int) -> Ids:
    """Return rows of distinct experts; advance the stream by the draws that this takes."""
    size = 2 * expert.size + 1024
    while True:
        # n scalar draws consume as much of the stream as one draw of n.
        state = stream.get_state()
        drawn = stream.randint(0, experts, size)
        stream.set_state(state)
        fixed = expert.copy()
        used = kernels.repair(fixed, experts, drawn)
        if used >= 0:
            stream.randint(0, experts, used)
            return fixed
        size *= 4
