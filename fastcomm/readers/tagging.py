"""Tag the communication of a rank with its parallelism: each group, and each event.

Events without a known group are tagged stream by stream, as if each stream were a group:
PyTorch has a stream for each process group.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.communication import Collectives
from fastcomm.readers.data_parallel import has_wrapper, is_plain
from fastcomm.readers.kernel_names import Named
from fastcomm.trace.columns import alike
from fastcomm.trace.events import Events
from fastcomm.trace.parallel import Grid
from fastcomm.trace.parallelisms import TAG
from fastcomm.trace.schema import OPS, TAG_SOURCES
from fastcomm.trace.tags import (
    CHANGED_NOTHING,
    WORLD,
    Behavior,
    ProcessGroup,
    Tagged,
    TagRule,
    TagRules,
    tag_group,
)
from fastcomm_kernels.arrays import NULL

SOURCE = {name: number for number, name in enumerate(TAG_SOURCES)}

_NO_TAG = Tagged(tag="OTHER", source="none")
_PLAIN = Tagged(tag="DP", source="heuristic")


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


_Kind = tuple[int, int, int, int]  # group, operation, name, stream


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

    The last only if a wrapper for data parallelism marks the run (`is_wrapped`).
    """
    tags = {"SendRecv": "PP", "AllToAll": "EP"}
    if is_wrapped:
        tags |= dict.fromkeys(("AllReduce", "AllGather", "ReduceScatter", "Broadcast"), "DP")
    unit.by_op = {
        op: Tagged(tag=tags[OPS[op]], source="heuristic") for op in unit.ops if OPS[op] in tags
    }
    if len({tagged.tag for tagged in unit.by_op.values()}) == 1:
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


_FEW = 8


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
