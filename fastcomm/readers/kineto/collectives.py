"""Which device work of a Kineto trace is communication, and what the host says it is.

What a collective is stands on its kernel since 2024; before, and where a kernel carries
nothing, in the host's `record_param_comms`, and before that in the range `nccl:all_reduce`
inside of it. A launch leads from the kernel to the host, by correlation.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.communication import Collectives, communication, find_partners
from fastcomm.readers.kineto.sizes import (
    DIMENSIONS,
    NO_OPERATION,
    OPERATORS,
    only_size,
    reasons,
)
from fastcomm.readers.kineto.sizes import sizes as sizes_of
from fastcomm.readers.patterns import Named, Pattern
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.columns import alike, lookup
from fastcomm.trace.events import Events
from fastcomm.trace.run import MOST_RANKS
from fastcomm.trace.schema import KIND, OP
from fastcomm.trace.tags import ProcessGroup
from fastcomm_kernels.arrays import NULL, Ints

# The host's call; the range of the library in it.
_CALL = "record_param_comms"
_MARKS = ("nccl:", "xccl:", "hccl:")


def find_collectives(
    events: Events,
    known: Sequence[ProcessGroup],
    patterns: Sequence[Pattern] = (),
) -> Collectives:
    """Return all communication of a file.

    `known` are the groups with complete rank lists; `patterns` come before the built-in table.
    """
    rows, name, names = communication(events, patterns)
    host = _Host.of(events, rows)
    said = _Said.of(host, name)
    first, kind = alike(*said.columns.values())
    said = said.only(first)
    group, groups = _groups(said, known)
    op = _operations(said, names)
    members = np.array([each.members or NULL for each in groups] + [NULL], np.int64)[group]
    by_torch = (said.columns["mark"] != NULL) | (said.columns["operator"] != NULL)
    members = np.where((group < 0) & by_torch, only_size(known), members)
    sizes = sizes_of(said, op, members)
    unknown = np.flatnonzero((sizes.payload == NULL)[kind])
    unsized = reasons(said, op, names, rows[unknown], kind[unknown])
    op, group = op[kind], group[kind]
    return Collectives(
        row=rows,
        op=op,
        seq=host.metadata("Seq"),
        group=group,
        groups=groups,
        sizes=byte_rules.Sizes(*(counts[kind] for counts in sizes)),
        named=names,
        name=name,
        partners=find_partners(events, rows, op, group, groups),
        unsized=unsized,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """What the host did about each communication event: rows of events, -1 where unknown."""

    events: Events
    rows: Ints  # the communication itself
    call: Ints  # record_param_comms
    mark: Ints  # the innermost range nccl:...
    operator: Ints  # the innermost c10d::... or other of OPERATORS
    places: tuple[NDArray[np.int32], ...]  # of the details of `rows`, and of `call` if any is

    @classmethod
    def of(cls, events: Events, rows: Ints) -> "_Host":
        """Follow the launches, but for kernels that say everything themselves."""
        call, mark, operator = (np.full(len(rows), -1, np.int64) for _ in range(3))
        own = events.places(rows)
        word = events.by_text(
            events.details["Collective name"][own], lambda text: int(text not in NO_OPERATION)
        )
        silent = np.flatnonzero(word != 1)
        if len(silent):
            launches = events.launch_of(rows[silent])
            calls, marks, operators = (_ranges(events, is_one) for is_one in _RANGES)
            found = events.enclosing(calls, launches)
            call[silent] = _by_external_id(events, calls, rows[silent], launches, found)
            mark[silent] = events.enclosing(marks, launches)
            operator[silent] = events.enclosing(operators, launches)
        return cls(
            events=events,
            rows=rows,
            call=call,
            mark=mark,
            operator=operator,
            places=(own, events.places(call)) if (call >= 0).any() else (own,),
        )

    def metadata(self, *names: str) -> Ints:
        """A value of the event's own metadata, else of the host's call, by the first name."""
        details = self.events.details
        said = (details[name][places] for name in names for places in self.places)
        return reduce(lambda first, other: np.where(first == NULL, other, first), said)


def _ranges(events: Events, is_one: Callable[[str], bool]) -> Ints:
    """The host's ranges whose name is accepted."""
    return events.rows_named(is_one, "cpu_op", "annotation")


# Which ranges are calls, marks and operators, by name.
_RANGES: tuple[Callable[[str], bool], ...] = (
    lambda name: name.startswith(_CALL),
    lambda name: name.startswith(_MARKS),
    lambda name: name.startswith("c10d::") or name in OPERATORS,
)


# What is said of the bytes, the operation and the group: by one name, or by an older one.
_METADATA = {
    name: (name,)
    for name in (
        "Collective name",
        "dtype",
        "In split size",
        "Out split size",
        "Process Group Description",
        "Process Group Ranks",
        "Group size",
    )
} | {
    "In msg nelems": ("In msg nelems", "In msg size"),
    "Out msg nelems": ("Out msg nelems", "Out msg size"),
    "Process Group Name": ("Process Group Name", "Process Group ID"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What is said of communication, in codes and numbers: the rest follows from it.

    Events of which the same is said are one kind, and one entry from `only` on.
    """

    events: Events  # for their texts
    columns: dict[str, Ints]

    @classmethod
    def of(cls, host: _Host, name: Ints) -> "_Said":
        """What each event, its host's call and ranges, and its name say."""
        events = host.events
        columns = {key: host.metadata(*names) for key, names in _METADATA.items()}
        columns["named"] = name
        columns["bytes"] = events.more["bytes"][host.rows]
        columns["kind"] = events.kind[host.rows].astype(np.int64)
        ranges = (("call", host.call), ("mark", host.mark), ("operator", host.operator))
        for range_, rows in ranges:
            codes = events.name[rows].astype(np.int64)
            columns[range_] = np.where(rows >= 0, codes, NULL)
            places = events.places(rows)
            columns |= {f"{range_} {key}": events.details[key][places] for key in DIMENSIONS}
        return cls(events=events, columns=columns)

    def only(self, rows: Ints) -> "_Said":
        """The same of some entries."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return _Said(events=self.events, columns=columns)

    def per_text(self, name: str, answer: Callable[[str], int]) -> Ints:
        """The answer to a text."""
        return self.events.by_text(self.columns[name], answer)


def _by_external_id(
    events: Events, calls: Ints, rows: Ints, launches: Ints, found: Ints
) -> Ints:
    """The call of the same external id, where no call encloses the launch on its own thread.

    Before 2024-02 the id is that of the launch, and names nothing or a stranger: a call counts
    only if the launch lies inside of it.
    """
    ids, start, stop = events.more["External id"], events.start, events.stop
    calls = calls[np.argsort(ids[calls], kind="stable")]
    if not len(calls):
        return found
    place = lookup(ids[calls], ids[rows])
    call = calls[place]
    fits = (found < 0) & (launches >= 0) & (place >= 0)
    fits &= (start[call] <= start[launches]) & (stop[launches] <= stop[call])
    return np.where(fits, call, found)


def _operations(said: _Said, names: Sequence[Named]) -> NDArray[np.int8]:
    """Operations: by the metadata, else by the library's range, the operator or the name."""

    def of_word(text: str) -> int:
        op = byte_rules.op_of_collective(text) if text not in NO_OPERATION else None
        return NULL if op is None else op

    def of_mark(text: str) -> int:
        op = byte_rules.op_of_annotation(text)
        return NULL if op is None else op

    def of_operator(text: str) -> int:
        return OP[OPERATORS[text].op] if text in OPERATORS else NULL

    op = said.per_text("Collective name", of_word)
    op = np.where(op == NULL, said.per_text("mark", of_mark), op)
    by_name = np.array([OP[each.op] for each in names] + [OP["OTHER"]], np.int64)
    by_name = by_name[said.columns["named"]]
    # A message's kernel serves other operations, too; a copy is what it is.
    vague = np.isin(by_name, (OP["OTHER"], OP["SendRecv"]))
    vague &= said.columns["kind"] == KIND["kernel"]
    by_operator = said.per_text("operator", of_operator)
    by_name = np.where(vague & (by_operator != NULL), by_operator, by_name)
    return np.where(op == NULL, by_name, op).astype(np.int8)


def _groups(
    said: _Said, known: Sequence[ProcessGroup]
) -> tuple[NDArray[np.int32], tuple[ProcessGroup, ...]]:
    """The group of each entry, and the groups that differ in anything that is said of them."""
    columns = [said.columns[name] for name in _OF_GROUP]
    first, kind = alike(*columns)
    text = said.events.text
    groups: dict[ProcessGroup | None, int] = {None: -1}
    place = []
    for name, description, ranks, size in np.stack(columns, axis=1)[first].tolist():
        group = _group(text(name), text(description), text(ranks), size, known)
        place.append(groups.setdefault(group, len(groups) - 1))
    made = tuple(group for group in groups if group is not None)
    return np.array(place, np.int32)[kind], made


_OF_GROUP = (
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "Group size",
)


def _group(
    name: str | None,
    description: str | None,
    ranks: str | None,
    size: int,
    known: Sequence[ProcessGroup],
) -> ProcessGroup | None:
    """What is said of a group, its ranks completed from the known ones: a long list is cut."""
    if name is None and description is None and ranks is None and size == NULL:
        return None
    members = _ranks(ranks)
    same = [group for group in known if name is not None and group.name == name]
    if len(same) > 1:
        same = [group for group in same if group.description == description]
    if len(same) == 1:
        members = members or same[0].ranks
        description = description or same[0].description
        size = same[0].size or size if size == NULL else size
    return ProcessGroup(
        name=name or None,
        description=description or None,
        ranks=members,
        size=size if 0 <= size <= MOST_RANKS else None,
    )


def _ranks(text: str | None) -> tuple[int, ...] | None:
    """The ranks of a list such as "[0, 1]"; None where it is cut or empty."""
    try:
        return _members(json.loads(text or ""))
    except (ValueError, RecursionError):
        return None


def _members(ranks: object) -> tuple[int, ...] | None:
    """The ranks of a list, sorted; None where it is none of ranks, or empty."""
    if not isinstance(ranks, list) or set(map(type, ranks)) != {int}:
        return None
    return tuple(sorted(ranks)) if min(ranks) >= 0 and max(ranks) < MOST_RANKS else None


def known_groups(info: Mapping[str, Any]) -> tuple[ProcessGroup, ...]:
    """The groups that `distributedInfo` lists, completely, for this rank."""
    config = info.get("pg_config")
    world = info.get("world_size")
    groups = []
    for entry in config if isinstance(config, list) else ():
        if not isinstance(entry, dict):
            continue
        size = entry.get("pg_size")
        ranks = entry.get("ranks")
        members = _ranks(ranks) if isinstance(ranks, str) else _members(ranks)
        size = size if type(size) is int and 0 < size <= MOST_RANKS else None
        if members is None and size is not None and size == world:
            members = tuple(range(size))
        groups.append(
            ProcessGroup(
                name=str(entry["pg_name"]) if "pg_name" in entry else None,
                description=str(entry["pg_desc"]) if entry.get("pg_desc") else None,
                ranks=members,
                size=size,
            )
        )
    return tuple(groups)
