"""The original simulator's workload, drawn from NumPy's legacy stream as it draws it.

The sources come first, then for each iteration and layer a Zipf sample, whose repeated experts
are replaced by scalar draws. The same seed gives the same experts as the original on 64-bit
Linux and macOS; their order inside a row is not the original's.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.dispatch.recipe import Recipe
from fastcomm_kernels import dispatch

Ids = NDArray[Any]  # int16 or int32


def id_type(recipe: Recipe) -> type[np.int16] | type[np.int32]:
    """The smallest type that holds every expert and GPU."""
    return np.int16 if recipe.experts <= np.iinfo(np.int16).max else np.int32


def layers(recipe: Recipe) -> Iterator[tuple[Ids, Ids]]:
    """Source and experts of the tokens: iteration by iteration, layer by layer."""
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
    """The rows with distinct experts; the stream moves on by exactly what that takes."""
    size = 2 * expert.size + 1024
    while True:
        # n scalar draws take from the stream what one draw of n takes.
        state = stream.get_state()
        drawn = stream.randint(0, experts, size)
        stream.set_state(state)
        fixed = expert.copy()
        used = dispatch.repair(fixed, experts, drawn)
        if used >= 0:
            stream.randint(0, experts, used)
            return fixed
        size *= 4
