"""The parallelism of the communication of a rank: of each group, and of each event.

Events that no group is known of are asked for stream by stream, as if each stream were a group:
PyTorch has a stream for each process group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.communication import Collectives
from fastcomm.readers.data_parallel import is_plain
from fastcomm.readers.patterns import Named
from fastcomm.trace.columns import alike
from fastcomm.trace.events import Events
from fastcomm.trace.parallel import Grid
from fastcomm.trace.schema import OPS, TAG, TAG_SOURCES
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
    """Tags of a rank."""

    groups: tuple[Tagged, ...]  # one each of `Collectives.groups`
    events: NDArray[np.int8]  # tag and source of each communication event
    unused: tuple[str, ...]  # what the user said that has no effect on this rank
    notes: tuple[str, ...]  # what a user should know of the tags


@dataclass(slots=True)
class _Unit:
    """A group, or a stream whose events are of no known group, and what it was seen to do."""

    group: ProcessGroup
    ops: dict[int, int] = field(default_factory=dict)  # events by operation
    streams: set[int] = field(default_factory=set)
    whole: Tagged = _NO_TAG
    by_op: dict[int, Tagged] = field(default_factory=dict)


_Kind = tuple[int, int, int, int]  # group, operation, name and stream, as numbers


def tag(
    events: Events, found: Collectives, rules: TagRules, world: int | None, iterations: int
) -> Tagging:
    """Tag the communication of one rank.

    `world` is how many ranks there are, where the trace says it, and `iterations` in how many
    steps the events were counted.
    """
    columns = found.group, found.op, found.name, events.more["stream"][found.row]
    first, kind = alike(*columns)
    kinds = list(zip(*(column[first].tolist() for column in columns), strict=True))
    units = _units(found.groups, kinds, np.bincount(kind).tolist())
    for unit in units.values():
        _ask(unit, replace(rules, guess=False), iterations)
    rest = [unit for unit in units.values() if _is_open(unit.whole, unit.group)]
    if rest and rules.grid is None and is_plain(events, found, world, iterations):
        for unit in rest:
            unit.whole, unit.by_op = _PLAIN, {}
    elif rules.guess:
        for unit in rest:
            _ask(unit, rules, iterations)
    tags, notes = _of_kinds(kinds, units, found.named, rules)
    return Tagging(
        groups=tuple(units[place, NULL].whole for place in range(len(found.groups))),
        events=tags[kind],
        unused=tuple(_unused(list(units.values()), rules)),
        notes=notes,
    )


def _of_kinds(
    kinds: Sequence[_Kind],
    units: Mapping[tuple[int, int], _Unit],
    named: Sequence[Named],
    rules: TagRules,
) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    """Return tag and source of each kind of event, and notes on tags by a kernel's name."""
    tags = np.empty((len(kinds), 2), np.int8)
    by_name = set()
    for row, (place, op, name, stream) in enumerate(kinds):
        unit, kernel = units[_key(place, stream)], named[name]
        said = unit.by_op.get(op, unit.whole)
        if kernel.tag and _goes_by_name(said, unit.group, kernel.tag, rules):
            # Without a library it is a column of a table, which a user or a preset explains.
            source = "heuristic" if kernel.library else "explicit"
            said = Tagged(tag=kernel.tag, source=source)
            by_name.add((kernel.library, kernel.tag))
        tags[row] = TAG[said.tag], SOURCE[said.source]
    notes = (
        f"{library} kernels are {tag} by their name alone; [[tags]] or [[kernels]] in a "
        "--config say otherwise"
        for library, tag in sorted(by_name)
        if library
    )
    return tags, tuple(notes)


def _key(place: int, stream: int) -> tuple[int, int]:
    """Return what a unit goes by: the place of its group, else its stream."""
    return (place, NULL) if place >= 0 else (-1, stream)


def _units(
    groups: Sequence[ProcessGroup], kinds: Sequence[_Kind], counts: Sequence[int]
) -> dict[tuple[int, int], _Unit]:
    """Return all groups, and the streams of events without one, with what they do."""
    units = {(place, NULL): _Unit(group) for place, group in enumerate(groups)}
    for (place, op, _, stream), count in zip(kinds, counts, strict=True):
        unit = units.setdefault(_key(place, stream), _Unit(ProcessGroup()))
        unit.ops[op] = unit.ops.get(op, 0) + count
        unit.streams |= {stream} - {NULL}
    for unit in units.values():
        unit.group = replace(unit.group, streams=tuple(sorted(unit.streams)))
    return units


def _ask(unit: _Unit, rules: TagRules, iterations: int) -> None:
    """Tag a unit, each operation alone where its ranks or streams fit several tags.

    One rank set may serve experts by its all-to-alls and gradients by its all-reduces.
    """
    unit.whole = _answer(unit.group, unit.ops, rules, iterations)
    guesses = unit.group.is_unnamed and rules.guess and unit.whole.source == "none"
    if unit.whole.candidates or guesses:
        unit.by_op = {
            op: _answer(unit.group, {op: count}, rules, iterations)
            for op, count in unit.ops.items()
        }


def _answer(
    group: ProcessGroup, ops: Mapping[int, int], rules: TagRules, iterations: int
) -> Tagged:
    """Return the tag of a group; a grid of one dimension decides unless a name says more."""
    counts = {OPS[op]: count for op, count in ops.items()}
    tagged = tag_group(group, Behavior(counts=counts, iterations=iterations), rules)
    only = None if rules.grid is None else rules.grid.only
    if only is None or tagged.source == "explicit":
        return tagged
    is_named = tagged.source == "description" and group.description not in WORLD
    return tagged if is_named and tagged.tag != "OTHER" else Tagged(tag=only, source="ranks")


def _is_open(said: Tagged, group: ProcessGroup) -> bool:
    """Return whether nothing tells the parallelism of a group."""
    return said.source == "none" or (said.tag == "OTHER" and group.description in WORLD)


def _goes_by_name(said: Tagged, group: ProcessGroup, named: str, rules: TagRules) -> bool:
    """Return whether a kernel's name decides: nothing tells more, or it can only be experts."""
    if _is_open(said, group) or (said.source == "heuristic" and not said.candidates):
        return True
    return named == "EP" and rules.grid is not None and said.tag == rules.grid.only


def _unused(units: Sequence[_Unit], rules: TagRules) -> Iterator[str]:
    """Say of each rule and option that has no effect on any of the units, why."""
    decided = [_decides(unit.group, rules.explicit) for unit in units]
    for place, rule in enumerate(rules.explicit):
        if rule.is_given and place not in decided:
            words = f"[[tags]] {rule.field} = {_value(rule)}"
            yield words + CHANGED_NOTHING + _why_no_match(rule, units)
    rest = [unit for unit, by in zip(units, decided, strict=True) if by is None]
    if rules.grid is not None and rules.grid_words and not any(map(_used_grid, rest)):
        yield rules.grid_words + CHANGED_NOTHING + _why_no_grid(rest)
    if rules.order_words and (why := _why_no_order(rules.grid, rest)):
        yield rules.order_words + CHANGED_NOTHING + why
    if rules.guess and not any(map(_was_guessed, rest)):
        yield "--guess-tags" + CHANGED_NOTHING + _why_no_guess(rest)


def _decides(group: ProcessGroup, rules: Sequence[TagRule]) -> int | None:
    return next((place for place, rule in enumerate(rules) if rule.matches(group)), None)


def _value(rule: TagRule) -> str:
    value = rule.value
    return str(list(value)) if isinstance(value, tuple) else repr(value)


_FEW = 8


def _few(words: set[str]) -> str:
    """Return the first of some words, as a sentence lists them."""
    shown = sorted(words, key=lambda word: (len(word), word))
    return ", ".join(shown[:_FEW]) + (", ..." if len(shown) > _FEW else "")


def _why_no_match(rule: TagRule, units: Sequence[_Unit]) -> str:
    """Return why a rule matches no group, and what could."""
    if not units:
        return "there is no communication on the device"
    if any(rule.matches(unit.group) for unit in units):
        return "an earlier rule decides for the same groups; put it first"
    streams = {str(stream) for unit in units for stream in unit.streams}
    by_stream = f"communication is on streams {_few(streams)}" if streams else ""
    if rule.field == "stream":
        return (
            f"no group has all its communication on this stream; {by_stream or 'none is said'}"
        )
    present = {
        str(value)
        for unit in units
        if (value := getattr(unit.group, rule.field)) not in (None, ())
    }
    if present:
        return f"no group has this {rule.field}; the traces have {_few(present)}"
    return (
        f"the traces do not say the {rule.field} of any group; "
        f"use stream = N: {by_stream or 'no stream is said, either'}"
    )


def _used_grid(unit: _Unit) -> bool:
    answers = (unit.whole, *unit.by_op.values())
    is_world = unit.group.description in WORLD
    return is_world or any(each.source == "ranks" or each.candidates for each in answers)


def _was_guessed(unit: _Unit) -> bool:
    answers = (unit.whole, *unit.by_op.values())
    return any(
        each.source == "heuristic" and not each.candidates and each is not _PLAIN
        for each in answers
    )


def _why_no_grid(units: Sequence[_Unit]) -> str:
    """Return why a grid decides nothing."""
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
    """Return why the order of the grid's dimensions decides nothing; None where it may."""
    if grid is None:
        return "no sizes are given; give --dp, --tp, --pp, --ep and --cp with it"
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
    """Return why behavior decides nothing."""
    if not units:
        return "there is no communication on the device whose parallelism is open"
    if not any(_is_open(unit.whole, unit.group) for unit in units):
        return "every process group has its parallelism already"
    return (
        "the traffic fits several parallelisms; --dp, --tp, --pp, --ep and --cp, or [[tags]] "
        "in a --config say more"
    )
