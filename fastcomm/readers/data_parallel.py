"""Recognize plain data parallelism (DDP, FSDP) if no process group has a name.

A run is plain if all of these hold; otherwise the parallelism stays `OTHER`:

- Every group is the default group, or no group has a name. A group without a description
  (`undefined`, as serving engines create them) has to be the world of a training job.
- Its operations are all-reduces, broadcasts, all-gathers and reduce-scatters (and barriers), by
  a library for every parallelism (NCCL, RCCL, oneCCL, HCCL). Kernels such as vLLM's custom
  all-reduce belong to tensor-parallel layers.
- Without groups, each operation runs on one stream: PyTorch has a stream for each group.
- The device computes as well, and the job looks like training. Backward passes, optimizers, DDP
  and FSDP are training. Serving engines are inference with tensor-parallel layers, and so are
  many equal all-reduces in every step without a sign of training.
- Unless DDP or FSDP is marked, neither many equal all-reduces per step are plain (the buckets
  of DDP differ in size, those of layers do not), nor collectives that DTensor calls.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm import regexes
from fastcomm.readers.communication import Collectives
from fastcomm.readers.patterns import COLLECTIVE_LIBRARIES
from fastcomm.trace.events import Events
from fastcomm.trace.host_names import DTENSOR_PREFIX
from fastcomm.trace.schema import OP, numbers
from fastcomm.trace.tags import SILENT, WORLD, ProcessGroup
from fastcomm_kernels.arrays import NULL, Ints

_PLAIN = numbers(["AllReduce", "Broadcast", "AllGather", "ReduceScatter"])
_NEUTRAL = numbers(["Barrier", "OTHER"])
# Fewest all-reduces per step that imply layers: 4 layers, forward and backward.
_MANY = 16
# Most different sizes of the all-reduces of equal layers.
_SIZES = 2

# Annotations of wrappers that are data parallel.
_WRAPPERS = re.compile(r"DistributedDataParallel|FSDP::|FullyShardedDataParallel|^DDP\b")
# Names of annotations and kernels of training.
_TRAINING = re.compile(
    r"Optimizer\.|[Bb]ackward|(?<![a-z])bwd|dgrad|wgrad|multi_tensor_apply|[Ff]used_?[Aa]dam"
    r"|(?<![a-z])adamw?_"
)
# Names of serving engines and of their kernels.
_INFERENCE = re.compile(
    r"(?i:vllm|sglang|tensorrt_llm|trtllm|paged_?attention|paged_?kv|reshape_and_cache"
    r"|flashinfer|splitkv|prefill|decode|generate\b)"
)


def is_plain(
    events: Events, collectives: Collectives, world: int | None, iterations: int
) -> bool:
    """Return whether the communication of a rank looks like plain data parallelism.

    Parameters
    ----------
    events, collectives
        Events of the rank, and its communication.
    world
        Number of ranks; None if the trace does not state it.
    iterations
        Number of steps in the trace.

    """
    return (
        len(collectives.row) > 0
        and _are_plain(collectives)
        and all(_is_world(group, world) for group in collectives.groups)
        and _one_stream_each(events, collectives)
        and _looks_like_training(_Signs.of(events, collectives), collectives, iterations)
    )


def has_wrapper(events: Events) -> bool:
    """Return whether annotations of a rank name a wrapper for data parallelism."""
    return _any(_WRAPPERS, _names(events, events.rows("annotation")))


def _looks_like_training(signs: "_Signs", collectives: Collectives, iterations: int) -> bool:
    """Return whether the names and all-reduces of a run indicate training."""
    if signs.wraps:
        return True
    if signs.shards_tensors:
        return False
    if not signs.trains and (signs.infers or not all(map(_is_default, collectives.groups))):
        return False
    return signs.computes and not _is_layered(collectives, iterations, is_training=signs.trains)


def _are_plain(collectives: Collectives) -> bool:
    """Return whether all operations are those of DDP and FSDP, by general libraries."""
    named = [collectives.named[place] for place in np.unique(collectives.name).tolist()]
    if any(name.tag or name.library not in COLLECTIVE_LIBRARIES for name in named):
        return False
    ops = set(np.unique(collectives.op).tolist())
    return bool(ops & set(_PLAIN)) and ops <= {*_PLAIN, *_NEUTRAL}


def _is_default(group: ProcessGroup) -> bool:
    return group.description in WORLD or group.is_unnamed


def _is_world(group: ProcessGroup, world: int | None) -> bool:
    """Return whether a group is the world, or nothing is known of it."""
    if _is_default(group):
        return True
    is_silent = SILENT.fullmatch(group.description or "") is not None
    return is_silent and world is not None and group.members == world


def _one_stream_each(events: Events, collectives: Collectives) -> bool:
    """Return whether each operation without a named group runs on one stream.

    Unknown operations have to run on one of these streams.
    """
    op, stream = collectives.op, events.more["stream"][collectives.row]
    group_is_unnamed = np.array(
        [group.is_unnamed for group in collectives.groups] + [True], np.bool_
    )
    unnamed = group_is_unnamed[collectives.group]  # a group of -1 is the last entry
    is_plain_op = np.isin(op, _PLAIN)
    for plain_op in _PLAIN:
        if len(np.unique(stream[unnamed & (op == plain_op)])) > 1:
            return False
    unknown_streams = stream[unnamed & (op == OP["OTHER"])]
    return bool(np.isin(unknown_streams, stream[is_plain_op]).all())


@dataclass(frozen=True, slots=True)
class _Signs:
    """What the names of annotations and kernels tell of the job."""

    wraps: bool  # has annotations of DDP or FSDP
    shards_tensors: bool  # calls collectives as DTensor does, for whatever parallelism
    trains: bool
    infers: bool
    computes: bool  # has device work besides communication

    @classmethod
    def of(cls, events: Events, collectives: Collectives) -> "_Signs":
        """Find annotations of DDP or FSDP, names of training and inference, and device compute.

        Each different name is searched once.
        """
        is_compute = events.of_kind("kernel", "host_work")
        is_compute[collectives.row] = False
        marks = _names(events, events.rows("annotation"))
        kernels = _names(events, np.flatnonzero(is_compute))
        names = [*marks, *kernels]
        return cls(
            wraps=_any(_WRAPPERS, marks),
            shards_tensors=any(text.startswith(DTENSOR_PREFIX) for text in events.texts),
            trains=_any(_TRAINING, names),
            infers=_any(_INFERENCE, names),
            computes=bool(kernels),
        )


def _names(events: Events, rows: Ints) -> Sequence[str]:
    """Return the different names of some events."""
    codes = events.name[rows]
    is_used = np.zeros(len(events.texts), np.bool_)
    is_used[codes[codes >= 0]] = True
    return [events.texts[code] for code in np.flatnonzero(is_used).tolist()]


def _any(pattern: re.Pattern[str], names: Iterable[str]) -> bool:
    return any(regexes.search(pattern, name) for name in names)


def _is_layered(collectives: Collectives, iterations: int, *, is_training: bool) -> bool:
    """Return whether a step has as many equal all-reduces as only layers cause."""
    sizes = collectives.sizes.payload[collectives.op == OP["AllReduce"]]
    if len(sizes) < _MANY * max(1, iterations):
        return False
    known_sizes = sizes[sizes != NULL]
    if not len(known_sizes):
        return not is_training
    return len(np.unique(known_sizes)) <= _SIZES
