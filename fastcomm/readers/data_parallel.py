"""Recognize plain data parallelism (DDP, FSDP) where nothing names the process groups.

A run is plain if all of this holds; what remains unclear stays `OTHER`:

- Every group is the default group, or no group is named. A group without a description
  (`undefined`, as serving engines make them) has to be the world, and training has to show.
- It does all-reduces, broadcasts, all-gathers and reduce-scatters (and barriers), by a library
  that serves every parallelism (NCCL, RCCL, oneCCL, HCCL). Kernels such as vLLM's custom
  all-reduce belong to tensor parallel layers.
- Without groups, each operation runs on one stream: PyTorch has a stream for each group.
- The device computes, too, and it looks like training. Backward passes, optimizers, DDP and
  FSDP are training. Serving engines, and many equal all-reduces in every step without a sign
  of training, are inference with tensor parallel layers.
- Many equal all-reduces a step are not plain either, unless DDP or FSDP is marked: the buckets
  of DDP differ in size, those of layers do not.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm.readers.communication import Collectives
from fastcomm.readers.patterns import COLLECTIVE_LIBRARIES
from fastcomm.trace.events import Events
from fastcomm.trace.schema import KIND, OP, numbers
from fastcomm.trace.tags import SILENT, WORLD, ProcessGroup
from fastcomm_kernels.arrays import NULL, Ints

_PLAIN = numbers(["AllReduce", "Broadcast", "AllGather", "ReduceScatter"])
_NEUTRAL = numbers(["Barrier", "OTHER"])
# All-reduces of a step from which on they are of layers: 4 layers, forward and backward.
_MANY = 16
# Different sizes that the all-reduces of equal layers have.
_SIZES = 2

# Annotations of wrappers that are data parallel.
_WRAPPERS = re.compile(r"DistributedDataParallel|FSDP::|FullyShardedDataParallel|^DDP\b")
# Names of annotations and kernels in which training shows.
_TRAINING = re.compile(
    r"Optimizer\.|[Bb]ackward|(?<![a-z])bwd|dgrad|wgrad|multi_tensor_apply|[Ff]used_?[Aa]dam"
    r"|(?<![a-z])adamw?_"
)
# Names of serving engines and of their kernels.
_INFERENCE = re.compile(
    r"(?i:vllm|sglang|tensorrt_llm|trtllm|paged_?attention|paged_?kv|reshape_and_cache"
    r"|flashinfer|splitkv|prefill|decode|generate\b)"
)


def is_plain(events: Events, found: Collectives, world: int | None, iterations: int) -> bool:
    """Return whether the communication of a rank looks like plain data parallelism.

    `world` is how many ranks the world has, where the trace says it, and `iterations` in
    how many steps the collectives were counted.
    """
    return (
        len(found.row) > 0
        and _are_plain(found)
        and all(_is_world(group, world) for group in found.groups)
        and _one_stream_each(events, found)
        and _looks_like_it(_Signs.of(events, found), found, iterations)
    )


def _looks_like_it(signs: "_Signs", found: Collectives, iterations: int) -> bool:
    """Return whether the names and the all-reduces of a run speak for training."""
    if signs.wraps:
        return True
    if not signs.trains and (signs.infers or not all(map(_is_default, found.groups))):
        return False
    return signs.computes and not _is_layered(found, iterations, is_training=signs.trains)


def _are_plain(found: Collectives) -> bool:
    """Return whether only operations of DDP and FSDP occur, in kernels for any purpose."""
    named = [found.named[place] for place in np.unique(found.name).tolist()]
    if any(each.tag or each.library not in COLLECTIVE_LIBRARIES for each in named):
        return False
    ops = set(np.unique(found.op).tolist())
    return bool(ops & set(_PLAIN)) and ops <= {*_PLAIN, *_NEUTRAL}


def _is_default(group: ProcessGroup) -> bool:
    return group.description in WORLD or group.is_unnamed


def _is_world(group: ProcessGroup, world: int | None) -> bool:
    """Return whether a group is the world, or one of which nothing is known."""
    if _is_default(group):
        return True
    is_silent = SILENT.fullmatch(group.description or "") is not None
    return is_silent and world is not None and group.members == world


def _one_stream_each(events: Events, found: Collectives) -> bool:
    """Return whether every operation that has no named group is on one stream.

    Operations that are not known have to be on a stream of the others.
    """
    op, stream = found.op, events.more["stream"][found.row]
    of_group = np.array([group.is_unnamed for group in found.groups] + [True], np.bool_)
    unnamed = of_group[found.group]  # -1 is the last
    known = np.isin(op, _PLAIN)
    for each in _PLAIN:
        if len(np.unique(stream[unnamed & (op == each)])) > 1:
            return False
    strange = stream[unnamed & (op == OP["OTHER"])]
    return bool(np.isin(strange, stream[known]).all())


@dataclass(frozen=True, slots=True)
class _Signs:
    """What the names of annotations and kernels tell of the job."""

    wraps: bool  # DDP or FSDP
    trains: bool
    infers: bool
    computes: bool  # there is device work besides communication

    @classmethod
    def of(cls, events: Events, found: Collectives) -> "_Signs":
        """Look at each name once."""
        is_compute = events.kind == KIND["kernel"]
        is_compute[found.row] = False
        marks = _names(events, events.rows("annotation"))
        kernels = _names(events, np.flatnonzero(is_compute))
        names = [*marks, *kernels]
        return cls(
            wraps=_any(_WRAPPERS, marks),
            trains=_any(_TRAINING, names),
            infers=_any(_INFERENCE, names),
            computes=bool(kernels),
        )


def _names(events: Events, rows: Ints) -> Sequence[str]:
    codes = events.name[rows]
    met = np.zeros(len(events.texts), np.bool_)
    met[codes[codes >= 0]] = True
    return [events.texts[code] for code in np.flatnonzero(met).tolist()]


def _any(pattern: re.Pattern[str], names: Iterable[str]) -> bool:
    return any(pattern.search(name) for name in names)


def _is_layered(found: Collectives, iterations: int, *, is_training: bool) -> bool:
    """Return whether there are as many equal all-reduces in a step as only layers do."""
    sizes = found.sizes.payload[found.op == OP["AllReduce"]]
    if len(sizes) < _MANY * max(1, iterations):
        return False
    known = sizes[sizes != NULL]
    if not len(known):
        return not is_training
    return len(np.unique(known)) <= _SIZES
