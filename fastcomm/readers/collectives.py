"""Which device work of a Kineto trace is communication, and what the host says it is.

What a collective is stands on its kernel since 2024; before, and where a kernel carries
nothing, in the host's `record_param_comms`, and before that in the range `nccl:all_reduce`
inside of it. A launch leads from the kernel to the host, by correlation.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.communication import Collectives, communication
from fastcomm.readers.events import Events, Ints, Rows
from fastcomm.readers.partners import find_partners
from fastcomm.readers.patterns import Named, Pattern
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.alike import alike
from fastcomm.trace.run import MOST_RANKS
from fastcomm.trace.schema import OP
from fastcomm.trace.tags import Group
from fastcomm_kernels.json_numbers import NULL

# Words of the metadata that name no operation: what the kernel does stands elsewhere.
_NO_OPERATION = ("", "wait", "coalesced", "startCoalescing", "endCoalescing")

_HOST_CALL = "record_param_comms"
_OUTPUT_FIRST = (
    "c10d::alltoall_base_",
    "c10d::_allgather_base_",
    "c10d::_reduce_scatter_base_",
)


def find_collectives(
    events: Events,
    known: Sequence[Group],
    patterns: Sequence[Pattern] = (),
    *,
    partners: bool = False,
) -> Collectives:
    """All communication of a file, with roots and peers if `partners` are wanted.

    `known` are the groups with complete rank lists; `patterns` come before the built-in table.
    """
    rows, name, names = communication(events, patterns)
    host = _Host.of(events, rows)
    group, groups = _groups(host, known)
    op = _operations(host, name, names)
    members = np.array([group_.members or NULL for group_ in groups] + [NULL], np.int64)
    return Collectives(
        row=rows,
        op=op,
        seq=host.metadata("Seq"),
        group=group,
        groups=groups,
        sizes=_sizes(host, op, members[group]),
        named=names,
        name=name,
        partners=find_partners(events, rows, op, group, groups) if partners else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """What the host did about each communication event: rows of events, -1 where unknown."""

    events: Events
    rows: Rows  # the communication itself
    call: Rows  # record_param_comms
    mark: Rows  # the innermost range nccl:...
    operator: Rows  # the innermost c10d::...

    @classmethod
    def of(cls, events: Events, rows: Rows) -> "_Host":
        """Follow the launches, but for kernels that say everything themselves."""
        call, mark, operator = (np.full(len(rows), -1, np.int64) for _ in range(3))
        word = events.by_text(
            events.detail("Collective name", rows), lambda text: int(text not in _NO_OPERATION)
        )
        silent = np.flatnonzero(word != 1)
        launches = events.launch_of(rows[silent])
        for found, prefix in ((call, _HOST_CALL), (mark, "nccl:"), (operator, "c10d::")):
            ranges = events.rows_named(
                lambda name, prefix=prefix: name.startswith(prefix),  # type: ignore[misc]
                "cpu_op",
                "annotation",
            )
            found[silent] = events.enclosing(ranges, launches)
            if found is call:
                found[silent] = _by_external_id(
                    events, ranges, rows[silent], launches, found[silent]
                )
        return cls(events=events, rows=rows, call=call, mark=mark, operator=operator)

    def metadata(self, *names: str) -> Ints:
        """A value of the event's own metadata, else of the host's call, by the first name."""
        value = np.full(len(self.rows), NULL, np.int64)
        for name in names:
            for rows in (self.rows, self.call):
                value = np.where(value == NULL, self.events.detail(name, rows), value)
        return value

    def per_text(self, name: str, answer: Callable[[str], int]) -> Ints:
        """The answer to a text of the metadata."""
        return self.events.by_text(self.metadata(name), answer)


def _by_external_id(
    events: Events, calls: Rows, rows: Rows, launches: Rows, found: Rows
) -> Rows:
    """The call of the same external id, where no call encloses the launch on its own thread.

    Before 2024-02 the id is that of the launch, and names nothing or a stranger: a call counts
    only if the launch lies inside of it.
    """
    ids, start, stop = (events.columns[name] for name in ("External id", "start", "stop"))
    calls = calls[np.argsort(ids[calls], kind="stable")]
    if not len(calls):
        return found
    at = np.minimum(np.searchsorted(ids[calls], ids[rows]), len(calls) - 1)
    call = calls[at]
    fits = (found < 0) & (launches >= 0) & (ids[call] == ids[rows]) & (ids[rows] != NULL)
    fits &= (start[call] <= start[launches]) & (stop[launches] <= stop[call])
    return np.where(fits, call, found)


def _operations(host: _Host, name: Ints, names: Sequence[Named]) -> NDArray[np.int8]:
    """The operation: the metadata's, else that of the host's range, else the name's."""

    def of_word(text: str) -> int:
        op = byte_rules.op_of_collective(text) if text not in _NO_OPERATION else None
        return NULL if op is None else op

    def of_mark(text: str) -> int:
        op = byte_rules.op_of_annotation(text)
        return NULL if op is None else op

    op = host.per_text("Collective name", of_word)
    events = host.events
    mark = np.where(host.mark >= 0, events.columns["name"][host.mark].astype(np.int64), NULL)
    op = np.where(op == NULL, events.by_text(mark, of_mark), op)
    by_name = np.array([OP[said.op] for said in names] + [OP["OTHER"]], np.int64)
    return np.where(op == NULL, by_name[name], op).astype(np.int8)


def _groups(host: _Host, known: Sequence[Group]) -> tuple[NDArray[np.int32], tuple[Group, ...]]:
    """The group of each event, and the groups that differ in anything that is said of them."""
    said = (
        host.metadata("Process Group Name", "Process Group ID"),
        host.metadata("Process Group Description"),
        host.metadata("Process Group Ranks"),
        host.metadata("Group size"),
    )
    first, kind = alike(*said)
    text = host.events.text
    groups: dict[Group | None, int] = {None: -1}
    place = []
    for name, description, ranks, size in np.stack(said, axis=1)[first].tolist():
        group = _group(text(name), text(description), text(ranks), size, known)
        place.append(groups.setdefault(group, len(groups) - 1))
    made = tuple(group for group in groups if group is not None)
    return np.array([*place, -1], np.int32)[kind], made


def _group(
    name: str | None,
    description: str | None,
    ranks: str | None,
    size: int,
    known: Sequence[Group],
) -> Group | None:
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
    return Group(
        name=name or None,
        description=description or None,
        ranks=members,
        size=size if 0 <= size <= MOST_RANKS else None,
    )


def _ranks(text: str | None) -> tuple[int, ...] | None:
    """The ranks of a list such as "[0, 1]"; None where it is cut or empty."""
    try:
        ranks = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    if not isinstance(ranks, list) or not all(map(_is_rank, ranks)):
        return None
    return tuple(sorted(ranks)) or None


def _is_rank(found: object) -> bool:
    return type(found) is int and 0 <= found < MOST_RANKS


def known_groups(info: Mapping[str, Any]) -> tuple[Group, ...]:
    """The groups that `distributedInfo` lists, completely, for this rank."""
    config = info.get("pg_config")
    world = info.get("world_size")
    groups = []
    for entry in config if isinstance(config, list) else ():
        if not isinstance(entry, dict):
            continue
        size = entry.get("pg_size")
        ranks = entry.get("ranks")
        members = _ranks(ranks if isinstance(ranks, str) else json.dumps(ranks))
        size = size if type(size) is int and 0 < size <= MOST_RANKS else None
        if members is None and size is not None and size == world:
            members = tuple(range(size))
        groups.append(
            Group(
                name=str(entry["pg_name"]) if "pg_name" in entry else None,
                description=str(entry["pg_desc"]) if entry.get("pg_desc") else None,
                ranks=members,
                size=size,
            )
        )
    return tuple(groups)


def _sizes(host: _Host, op: NDArray[np.int8], members: Ints) -> byte_rules.Sizes:
    given, got = _of_metadata(host)
    marked_given, marked_got = _of_ranges(host)
    silent = (given == NULL) & (got == NULL) & ~_coalesced(host)
    given = np.where(silent, marked_given, given)
    got = np.where(silent, marked_got, got)
    copied = host.events.columns["bytes"][host.rows]
    copies = host.events.columns["kind"][host.rows] != _KERNEL
    given = np.where(copies, copied, given)
    half = (op == OP["AllToAll"]) & ((given == NULL) | (got == NULL))
    unknown = half | (op == OP["OTHER"])
    given, got = np.where(unknown, NULL, given), np.where(unknown, NULL, got)
    uneven = np.zeros(len(op), np.bool_)
    for name in ("In split size", "Out split size"):
        uneven |= host.per_text(name, _is_uneven) == 1
    return byte_rules.sizes(op, given, got, members, uneven)


_KERNEL = 0


def _coalesced(host: _Host) -> NDArray[np.bool_]:
    """Events of which the host says only that they end a group: their counts mean nothing."""
    says_so: NDArray[np.bool_] = (
        host.per_text("Collective name", lambda text: int(text in _NO_OPERATION)) == 1
    )
    return says_so


def _of_metadata(host: _Host) -> tuple[Ints, Ints]:
    """Bytes in and out by the counts of elements; both NULL where one overflowed."""
    element = host.per_text("dtype", lambda text: byte_rules.element_size(text) or NULL)
    counts = [
        host.metadata("In msg nelems", "In msg size"),
        host.metadata("Out msg nelems", "Out msg size"),
    ]
    broken = _coalesced(host)
    for count in counts:
        broken |= (count < 0) & (count != NULL)
    given, got = (byte_rules.byte_counts(count, element) for count in counts)
    return np.where(broken, NULL, given), np.where(broken, NULL, got)


def _of_ranges(host: _Host) -> tuple[Ints, Ints]:
    """Bytes in and out by the dimensions on the host's ranges, as traces before 2024 have them.

    The range of the library shows the input; the operator shows the output first.
    """
    dims, types = (host.events.detail(name, host.mark) for name in _DIMENSIONS)
    given = _per_pair(host.events, dims, types, _total)
    got = np.full(len(given), NULL, np.int64)
    base = host.operator.copy()
    first = host.events.by_text(
        np.where(base >= 0, host.events.columns["name"][base].astype(np.int64), NULL),
        lambda text: int(text in _OUTPUT_FIRST),
    )
    base[first != 1] = -1
    dims, types = (host.events.detail(name, base) for name in _DIMENSIONS)
    got = _per_pair(host.events, dims, types, lambda tensors: _total(tensors[:1]))
    inner = _per_pair(host.events, dims, types, lambda tensors: _total(tensors[1:2]))
    return np.where(inner == NULL, given, inner), got


_DIMENSIONS = ("Input Dims", "Input type")
_Tensors = Sequence[tuple[Any, str]]


def _per_pair(
    events: Events, dims: Ints, types: Ints, answer: Callable[[_Tensors], int]
) -> Ints:
    """The answer to the dimensions and types of each event's tensors, asked once a pair."""
    first, kind = alike(dims, types)
    pairs = zip(dims[first].tolist(), types[first].tolist(), strict=True)
    answers = [NULL if NULL in pair else answer(_tensors(events, *pair)) for pair in pairs]
    return np.array(answers, np.int64)[kind]


def _tensors(events: Events, dims: int, types: int) -> _Tensors:
    try:
        shapes, names = json.loads(events.texts[dims]), json.loads(events.texts[types])
    except (ValueError, RecursionError):
        return ()
    if not isinstance(shapes, list) or not isinstance(names, list) or len(shapes) != len(names):
        return ()
    return [(shape, str(name)) for shape, name in zip(shapes, names, strict=True)]


def _total(tensors: _Tensors) -> int:
    """Bytes of all tensors; NULL where one is of an unknown type, or there is none."""
    total, any_tensor = 0, False
    for shape, name in tensors:
        if name in ("", "Scalar"):
            continue
        size = byte_rules.element_size(name)
        if size is None or not isinstance(shape, list):
            return NULL
        any_tensor = True
        for one in shape if shape and isinstance(shape[0], list) else [shape]:
            if not all(isinstance(length, int) and length >= 0 for length in one):
                return NULL
            total += size * math.prod(one)
    return total if any_tensor and total < -NULL else NULL


@lru_cache(maxsize=1 << 12)  # ranks say the same
def _is_uneven(text: str) -> int:
    """1 where a list of splits has several values, or is cut so that nobody knows."""
    try:
        splits = json.loads(text)
    except (ValueError, RecursionError):
        return 1
    return int(not isinstance(splits, list) or len(set(map(str, splits))) > 1)
