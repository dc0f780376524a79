"""How popular each expert is: a share for each, and its alias table."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastcomm.dispatch.recipe import Recipe
from fastcomm.errors import ConfigError

Shares = NDArray[np.float64]
_COIN = 2.0**32
# What is left for the last expert of a token to be drawn from, at least.
_LEAST = 1e-5


def shares(recipe: Recipe, popularity: Sequence[float] | None = None) -> Shares:
    """The share of each expert in single draws, by the recipe's law."""
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


def check_distinct(recipe: Recipe, law: Shares) -> None:
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
