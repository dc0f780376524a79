"""Tag the communication of a rank with its parallelism: each group, and each event.

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

Events without a known group are tagged stream by stream, as if each stream were a group:
PyTorch has a stream for each process group.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fastcomm import regexes
from fastcomm.formats.communication import COLLECTIVE_LIBRARIES, Collectives
from fastcomm.formats.kernel_names import Named
from fastcomm.trace.columns import alike
from fastcomm.trace.events import Events
from fastcomm.trace.host_names import COLLECTIVE_CALL, DISTRIBUTED_OPERATOR, DTENSOR_PREFIX
from fastcomm.trace.parallelisms import TAG
from fastcomm.trace.rank_grid import Grid
from fastcomm.trace.schema import OP, OPS, TAG_SOURCES, numbers
from fastcomm.trace.tags import (
    CHANGED_NOTHING,
    SILENT,
    WORLD,
    Behavior,
    ProcessGroup,
    Tagged,
    TagRule,
    TagRules,
    tag_group,
)
from fastcomm_kernels.arrays import NONE, NULL, Ints

_PLAIN_OPS = numbers(["AllReduce", "Broadcast", "AllGather", "ReduceScatter"])
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
_CALL = re.compile(rf"{DISTRIBUTED_OPERATOR}|^{COLLECTIVE_CALL}$")
SOURCE = {name: number for number, name in enumerate(TAG_SOURCES)}
_NO_TAG = Tagged(tag="OTHER", source="none")
_PLAIN = Tagged(tag="DP", source="heuristic")
_Kind = tuple[int, int, int, int]  # group, operation, name, stream
_FEW = 8


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
    return _any(_WRAPPERS, _names(events, _marks(events)))


def _marks(events: Events) -> Ints:
    """Return the rows of annotations, without names of calls of torch.distributed.

    Users name calls with `torch.distributed.record_comm`, in a wrapper, for example.
    """
    marks = events.rows("annotation")
    calls = events.rows_named(lambda name: _CALL.match(name) is not None, "cpu_op")
    result: Ints = marks[events.enclosing(calls, marks) == NONE]
    return result


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
    """Return whether DDP or FSDP calls all of the operations, by general libraries."""
    named = [collectives.named[place] for place in np.unique(collectives.name).tolist()]
    if any(name.tag or name.library not in COLLECTIVE_LIBRARIES for name in named):
        return False
    ops = set(np.unique(collectives.op).tolist())
    return bool(ops & set(_PLAIN_OPS)) and ops <= {*_PLAIN_OPS, *_NEUTRAL}


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
    is_plain_op = np.isin(op, _PLAIN_OPS)
    for plain_op in _PLAIN_OPS:
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
        marks = _names(events, _marks(events))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagging:
    """The tags of a rank, and what to report about them."""

    groups: tuple[Tagged, ...]  # the tag of each of `Collectives.groups`
    events: NDArray[np.int8]  # shape (communication events, 2): tag and source
    unused: tuple[str, ...]  # rules and options of the user without an effect on this rank
    notes: tuple[str, ...]  # warnings


@dataclass(slots=True)
class _Unit:
    """A group, or a stream of events without a known group, with its traffic."""

    group: ProcessGroup
    ops: dict[int, int] = field(default_factory=dict)  # events by operation
    streams: set[int] = field(default_factory=set)
    whole: Tagged = _NO_TAG
    by_op: dict[int, Tagged] = field(default_factory=dict)


def tag(
    events: Events,
    collectives: Collectives,
    rules: TagRules,
    world: int | None,
    iterations: int,
    *,
    is_host_run: bool = False,
) -> Tagging:
    """Tag the communication of one rank.

    Parameters
    ----------
    events, collectives
        Events of the rank, and its communication.
    rules
        The user's rules, sizes, and whether to guess.
    world
        Number of ranks; None if the trace does not state it.
    iterations
        Number of steps in the trace.
    is_host_run
        Whether the collectives ran on the host. Small jobs do all of their communication in the
        group of all ranks; then each operation tells the parallelism.

    """
    columns = (
        collectives.group,
        collectives.op,
        collectives.name,
        events.more["stream"][collectives.row],
    )
    first, kind = alike(*columns)
    kinds = list(zip(*(column[first].tolist() for column in columns), strict=True))
    units = _units(collectives.groups, kinds, np.bincount(kind).tolist())
    for unit in units.values():
        _tag_unit(unit, replace(rules, guess=False), iterations)
    open_units = [unit for unit in units.values() if _is_open(unit.whole, unit.group)]
    if open_units and rules.grid is None and is_plain(events, collectives, world, iterations):
        for unit in open_units:
            unit.whole, unit.by_op = _PLAIN, {}
    elif rules.guess:
        for unit in open_units:
            _tag_unit(unit, rules, iterations)
    elif is_host_run and rules.grid is None:
        for unit in open_units:
            _tag_by_operation(unit, has_wrapper(events))
    tags, notes = _tag_kinds(kinds, units, collectives.named, rules)
    return Tagging(
        groups=tuple(units[place, NULL].whole for place in range(len(collectives.groups))),
        events=tags[kind],
        unused=tuple(_unused(list(units.values()), rules)),
        notes=notes,
    )


def _tag_kinds(
    kinds: Sequence[_Kind],
    units: Mapping[tuple[int, int], _Unit],
    named: Sequence[Named],
    rules: TagRules,
) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    """Return tag and source of each kind of event, and notes on tags from kernel names."""
    tags = np.empty((len(kinds), 2), np.int8)
    by_name = set()
    for row, (place, op, name, stream) in enumerate(kinds):
        unit, kernel = units[_key(place, stream)], named[name]
        tagged = unit.by_op.get(op, unit.whole)
        if kernel.tag and _name_decides(tagged, unit.group, kernel.tag, rules):
            # Without a library, the name is from a table whose mapping states the tag.
            source = "heuristic" if kernel.library else "explicit"
            tagged = Tagged(tag=kernel.tag, source=source)
            by_name.add((kernel.library, kernel.tag))
        tags[row] = TAG[tagged.tag], SOURCE[tagged.source]
    notes = (
        f"{library} kernels are {tag} by their name alone; override this with [[tags]] or "
        "[[kernels]] in a --config"
        for library, tag in sorted(by_name)
        if library
    )
    return tags, tuple(notes)


def _key(place: int, stream: int) -> tuple[int, int]:
    """Return the key of a unit: the index of its group, or its stream if `place` is -1."""
    return (place, NULL) if place >= 0 else (-1, stream)


def _units(
    groups: Sequence[ProcessGroup], kinds: Sequence[_Kind], counts: Sequence[int]
) -> dict[tuple[int, int], _Unit]:
    """Return all groups, and the streams of events without one, with their traffic."""
    units = {(place, NULL): _Unit(group) for place, group in enumerate(groups)}
    for (place, op, _, stream), count in zip(kinds, counts, strict=True):
        unit = units.setdefault(_key(place, stream), _Unit(ProcessGroup()))
        unit.ops[op] = unit.ops.get(op, 0) + count
        unit.streams |= {stream} - {NULL}
    for unit in units.values():
        unit.group = replace(unit.group, streams=tuple(sorted(unit.streams)))
    return units


def _tag_unit(unit: _Unit, rules: TagRules, iterations: int) -> None:
    """Tag a unit; each operation separately if its ranks or streams fit several tags.

    The ranks of one group may serve experts by all-to-alls and gradients by all-reduces.
    """
    unit.whole = _tag_operations(unit.group, unit.ops, rules, iterations)
    may_guess = unit.group.is_unnamed and rules.guess and unit.whole.source == "none"
    if unit.whole.candidates or may_guess:
        unit.by_op = {
            op: _tag_operations(unit.group, {op: count}, rules, iterations)
            for op, count in unit.ops.items()
        }


def _tag_by_operation(unit: _Unit, is_wrapped: bool) -> None:
    """Tag each operation of a unit: messages PP, exchanges EP, and sums and gathers DP.

    The last only if a wrapper for data parallelism marks the run (`is_wrapped`); else their
    parallelism is unknown, whatever else the unit does.
    """
    tags = {"SendRecv": "PP", "AllToAll": "EP"}
    if is_wrapped:
        tags |= dict.fromkeys(("AllReduce", "AllGather", "ReduceScatter", "Broadcast"), "DP")
    unit.by_op = {
        op: Tagged(tag=tags[OPS[op]], source="heuristic") for op in unit.ops if OPS[op] in tags
    }
    is_told = set(unit.ops) <= {*unit.by_op, *_NEUTRAL}
    if is_told and len({tagged.tag for tagged in unit.by_op.values()}) == 1:
        unit.whole = next(iter(unit.by_op.values()))


def _tag_operations(
    group: ProcessGroup, ops: Mapping[int, int], rules: TagRules, iterations: int
) -> Tagged:
    """Return the parallelism of a group, and what it is known by.

    A layout of one dimension decides unless the group's name tells more.

    Parameters
    ----------
    group
        The process group.
    ops
        Number of its calls by operation, an index of `OPS`.
    rules
        Rules and layout of the run.
    iterations
        Number of iterations in which the calls were counted.

    """
    counts = {OPS[op]: count for op, count in ops.items()}
    tagged = tag_group(group, Behavior(counts=counts, iterations=iterations), rules)
    only_tag = None if rules.grid is None else rules.grid.only
    if only_tag is None or tagged.source == "explicit":
        return tagged
    is_named = tagged.source == "description" and group.description not in WORLD
    return (
        tagged if is_named and tagged.tag != "OTHER" else Tagged(tag=only_tag, source="ranks")
    )


def _is_open(tagged: Tagged, group: ProcessGroup) -> bool:
    """Return whether the parallelism of a group is unknown."""
    return tagged.source == "none" or (tagged.tag == "OTHER" and group.description in WORLD)


def _name_decides(
    tagged: Tagged, group: ProcessGroup, kernel_tag: str, rules: TagRules
) -> bool:
    """Return whether a kernel's name decides: other evidence is weak, or it must be experts."""
    if _is_open(tagged, group) or (tagged.source == "heuristic" and not tagged.candidates):
        return True
    return kernel_tag == "EP" and rules.grid is not None and tagged.tag == rules.grid.only


def _unused(units: Sequence[_Unit], rules: TagRules) -> Iterator[str]:
    """Yield why rules and options of the user have no effect on any unit."""
    decided = [_decides(unit.group, rules.explicit) for unit in units]
    for place, rule in enumerate(rules.explicit):
        if rule.is_given and place not in decided:
            rule_text = f"[[tags]] {rule.field} = {_value(rule)}"
            yield rule_text + CHANGED_NOTHING + _why_no_match(rule, units)
    undecided = [unit for unit, index in zip(units, decided, strict=True) if index is None]
    if rules.grid is not None and rules.grid_words and not any(map(_used_grid, undecided)):
        clash = _contradiction(units, rules.grid_words)
        yield rules.grid_words + CHANGED_NOTHING + (clash or _why_no_grid(undecided))
    if rules.order_words and (reason := _why_no_order(rules.grid, undecided)):
        yield rules.order_words + CHANGED_NOTHING + reason
    if rules.guess and not any(map(_was_guessed, undecided)):
        yield "--guess-tags" + CHANGED_NOTHING + _why_no_guess(undecided)


def _decides(group: ProcessGroup, rules: Sequence[TagRule]) -> int | None:
    """Return the index of the first rule that matches a group, or None."""
    return next((place for place, rule in enumerate(rules) if rule.matches(group)), None)


def _value(rule: TagRule) -> str:
    """Return the value of a rule as in TOML."""
    value = rule.value
    return str(list(value)) if isinstance(value, tuple) else repr(value)


def _few(values: set[str]) -> str:
    """Return a list of the first values as text."""
    shown = sorted(values, key=lambda value: (len(value), value))
    return ", ".join(shown[:_FEW]) + (", ..." if len(shown) > _FEW else "")


def _why_no_match(rule: TagRule, units: Sequence[_Unit]) -> str:
    """Return why a rule matches no group, and which rule could."""
    if not units:
        return "there is no communication on the device"
    if any(rule.matches(unit.group) for unit in units):
        return "an earlier rule decides for the same groups; put it first"
    streams = {str(stream) for unit in units for stream in unit.streams}
    by_stream = f"communication is on streams {_few(streams)}" if streams else ""
    if rule.field == "stream":
        streams_text = by_stream or "no stream is recorded"
        return f"no group has all its communication on this stream; {streams_text}"
    present = {
        str(value)
        for unit in units
        if (value := getattr(unit.group, rule.field)) not in (None, ())
    }
    if present:
        return f"no group has this {rule.field}; the traces have {_few(present)}"
    return (
        f"the traces do not say the {rule.field} of any group; "
        f"use stream = N: {by_stream or 'no stream is recorded, either'}"
    )


def _used_grid(unit: _Unit) -> bool:
    """Return whether the grid decided a tag of a unit."""
    tags = (unit.whole, *unit.by_op.values())
    is_world = unit.group.description in WORLD
    return is_world or any(tagged.source == "ranks" or tagged.candidates for tagged in tags)


def _was_guessed(unit: _Unit) -> bool:
    """Return whether a tag of a unit was guessed."""
    tags = (unit.whole, *unit.by_op.values())
    return any(
        tagged.source == "heuristic" and not tagged.candidates and tagged is not _PLAIN
        for tagged in tags
    )


def _contradiction(units: Sequence[_Unit], grid_words: str) -> str | None:
    """Return how the given sizes contradict the groups that the traces describe, or None.

    Groups of DP and PP may be parts of their dimension, those of TP, CP and EP are whole.
    """
    for name, size in re.findall(r"\b(tp|cp|ep)\b\D*(\d+)", grid_words):
        described = {
            len(unit.group.ranks)
            for unit in units
            if unit.group.ranks
            and unit.whole.source == "description"
            and unit.whole.tag == name.upper()
        }
        if described and int(size) not in described:
            numbers = " or ".join(map(str, sorted(described)))
            return (
                f"the traces describe {name.upper()} groups of {numbers} ranks, not {size}, "
                "and decide; [[tags]] in a --config override descriptions"
            )
    return None


def _why_no_grid(units: Sequence[_Unit]) -> str:
    """Return why the grid decides nothing."""
    if not units:
        return "there is no communication on the device whose parallelism is open"
    if all(unit.whole.source == "description" for unit in units):
        return (
            "the framework describes every process group; [[tags]] in a --config override "
            "descriptions"
        )
    if all(unit.group.ranks is None for unit in units if unit.whole.source == "none"):
        return (
            "the traces do not say which ranks form a process group, and several dimensions "
            "are above 1; [[tags]] stream = N in a --config names groups by their stream"
        )
    return (
        "no process group consists of the ranks along one dimension of this grid; check the "
        "sizes and --order"
    )


def _why_no_order(grid: Grid | None, units: Sequence[_Unit]) -> str | None:
    """Return why the order of the grid's dimensions decides nothing, or None."""
    if grid is None:
        return "no sizes are given; pass --dp, --tp, --pp, --ep and --cp with it"
    if grid.is_of_any_order:
        return "the groups of these sizes are the same in any order"
    is_described = [unit.whole.source == "description" for unit in units]
    if any(
        unit.group.ranks and not described
        for unit, described in zip(units, is_described, strict=True)
    ):
        return None
    return _why_no_grid(units)


def _why_no_guess(units: Sequence[_Unit]) -> str:
    """Return why the traffic decides nothing."""
    if not units:
        return "there is no communication on the device whose parallelism is open"
    if not any(_is_open(unit.whole, unit.group) for unit in units):
        return "every process group has its parallelism already"
    return (
        "the traffic fits several parallelisms; pass --dp, --tp, --pp, --ep and --cp, or "
        "[[tags]] in a --config"
    )
