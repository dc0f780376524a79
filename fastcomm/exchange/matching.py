"""Match events of ranks: find those that are one collective.

Events match if their groups have the same members and their sequence numbers are equal. In a
group where some events have no unique number, the sequences of its ranks are aligned instead:
by operation and size, and by their ends, which all members reach at the same time. So missing
events of one rank do not shift all later events.

Operations with a root, and messages in a group of two without a direction, may end at different
times. Each such operation is a sequence of its own. They are matched last, on clocks that are
aligned by the ends of the other collectives.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.exchange import sequences
from fastcomm.exchange.clocks import offset_by_row, offsets_of_matches
from fastcomm.exchange.sequences import edges
from fastcomm.trace.columns import filled
from fastcomm.trace.schema import ENDS_TOGETHER, EVEN, FROM_ROOT, OP, OPS, TO_ROOT, numbers
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints

__all__ = ["NONE", "NULL", "CollectiveCalls", "CommunicationEvents", "Matches", "match"]

ROOTED = numbers(FROM_ROOT + TO_ROOT)
_EVEN = numbers(EVEN)
_RANK_BITS = 40
_ENDS_TOGETHER = numbers(ENDS_TOGETHER)
_ENDS_APART = np.array([name not in ENDS_TOGETHER for name in OPS])
# Groups are hashes; the constant that tells the operations of one group apart is large, too.
_SERIES = 0x632BE59BD9B4E019


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCalls:
    """Events that are one rank's part in a collective, in any order; a row per event.

    Operations of `schema.ENDS_TOGETHER`, operations with a root, and messages in a group of two
    whose direction is unknown.
    """

    rank: Ints
    group: Ints  # the label of its members
    op: Ints  # index into OPS
    seq: Ints  # NULL if unknown
    size: Ints  # bytes, of operations whose members have equal sizes; else NULL
    stop: Ints  # ns, on the rank's clock
    root: Ints | None = None  # global rank; NULL if none; None if all are unknown

    @classmethod
    def of(cls, columns: Mapping[str, Ints], rows: Ints) -> Self:
        """Select rows of columns `rank`, `group`, `op`, `seq`, `payload`, `stop` and `root`.

        Payloads are used only of operations whose members have equal payloads, roots only of
        operations with a root.
        """
        selected = {name: column[rows] for name, column in columns.items()}
        op, payload, root = (selected.pop(name) for name in ("op", "payload", "root"))
        return cls(
            **selected,
            op=op.astype(np.int64),
            size=np.where(np.isin(op, _EVEN), payload, NULL),
            root=np.where(np.isin(op, ROOTED), root, NULL),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """The collective of each row, numbered from 0; NONE where no other rank has it."""

    instance: Ints
    count: int  # of collectives
    dropped: int  # rows of ranks that could not be aligned with their group
    refused: Ints  # as `instance`: collectives left out as sizes or roots of members differ
    numbered: Flags  # per row: matched by its sequence number, not by order and end


def match(calls: CollectiveCalls) -> Matches:
    """Match the collectives that several ranks have; results are per row of `calls`.

    Rows match by sequence number, else by order and end, see the module.
    """
    apart = _ENDS_APART[calls.op]
    series = _series(calls, apart)
    instance, unnumbered = _by_number(series)
    done, dropped = int(instance.max(initial=NONE)) + 1, 0
    numbered = instance != NONE
    for ends_apart in (False, True):
        rows = unnumbered[apart[unnumbered] == ends_apart]
        if ends_apart and len(rows):
            series = replace(series, stop=calls.stop - _ahead(calls, instance, ~apart))
        for own in _groups(series, rows):
            places, skipped = _by_order(series, own, ends_apart=ends_apart)
            dropped += skipped
            instance[own] = np.where(places == NONE, NONE, places + done)
            done += int(places.max(initial=NONE)) + 1
    is_contradictory = _contradictory(calls, instance, done)
    matched, count = _of_several(instance, ~is_contradictory)
    refused = np.broadcast_to(np.int64(NONE), len(instance))
    if is_contradictory.any():
        refused, _ = _of_several(instance, is_contradictory)
    return Matches(
        instance=matched, count=count, dropped=dropped, refused=refused, numbered=numbered
    )


def _series(calls: CollectiveCalls, apart: Flags) -> CollectiveCalls:
    """Return the calls with a separate group per operation with different ends."""
    if not apart.any():
        return calls
    group = calls.group.copy()
    group[apart] ^= calls.op[apart] * _SERIES
    return replace(calls, group=group)


def _by_number(calls: CollectiveCalls) -> tuple[Ints, Ints]:
    """Match rows by sequence number; return their collectives, and the rows left unmatched."""
    # Operation and rank are combined into one sort key.
    member = calls.op << _RANK_BITS | calls.rank
    order = np.lexsort((member, calls.seq, calls.group))
    sorted_ = _Sorted(*(column[order] for column in (calls.group, calls.seq, member)))
    numbered = sorted_.numbered()
    instance = np.full(len(order), NONE, np.int64)
    number = np.cumsum(sorted_.begins_another() & numbered) - 1
    instance[order[numbered]] = number[numbered]
    return instance, order[~numbered]


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Rows sorted by group, number, operation and rank."""

    group: Ints
    seq: Ints
    member: Ints

    def numbered(self) -> Flags:
        """Whether all events of the row's group have a unique number per rank and operation."""
        bad: Flags = self.seq == NULL
        bad[1:] |= ~self._differ(self.group, self.seq, self.member)
        starts = edges(self.group)
        if not len(starts):
            return bad
        has_bad = np.logical_or.reduceat(bad, starts)
        numbered: Flags = ~np.repeat(has_bad, np.diff(np.append(starts, len(bad))))
        return numbered

    def begins_another(self) -> Flags:
        """Whether a row belongs to another collective than the previous row."""
        op = self.member >> _RANK_BITS
        return np.append(
            np.ones(min(1, len(op)), np.bool_), self._differ(self.group, self.seq, op)
        )

    def _differ(self, *columns: Ints) -> Flags:
        """Return whether each row but the first differs from the previous one in a column."""
        differ = np.zeros(max(0, len(self.group) - 1), np.bool_)
        for column in columns:
            differ |= column[1:] != column[:-1]
        return differ


def _groups(calls: CollectiveCalls, rows: Ints) -> Iterator[Ints]:
    """Yield the rows of each group, sorted by rank and end."""
    rows = rows[np.lexsort((calls.stop[rows], calls.rank[rows], calls.group[rows]))]
    yield from np.split(rows, edges(calls.group[rows])[1:]) if len(rows) else ()


def _by_order(calls: CollectiveCalls, rows: Ints, *, ends_apart: bool) -> tuple[Ints, int]:
    """Align the rows of a group, by order if `ends_apart`, else by end.

    Returns the place of each row, and the number of rows without one.
    """
    code, first = _codes(calls, rows), edges(calls.rank[rows])
    align = sequences.align_by_order if ends_apart else sequences.align_by_end
    return align(code, calls.stop[rows], first)


def _codes(calls: CollectiveCalls, rows: Ints) -> Ints:
    """Return a number per pair of operation and size; per operation if a size is unknown."""
    op, size = calls.op[rows], calls.size[rows]
    unsized = np.isin(op, op[size == NULL])
    sizes, code = np.unique(np.where(unsized, NULL, size), return_inverse=True)
    return op * len(sizes) + code


def _ahead(calls: CollectiveCalls, instance: Ints, together: Flags) -> Ints:
    """Return the clock offset of each row's rank, in ns, by matched rows flagged `together`."""
    rows = np.flatnonzero((instance != NONE) & together)
    columns = (calls.rank[rows], calls.group[rows], instance[rows], calls.stop[rows])
    offsets = {offset.rank: offset.offset_ns for offset in offsets_of_matches(*columns)}
    return offset_by_row(calls.rank, offsets)


def _contradictory(calls: CollectiveCalls, instance: Ints, count: int) -> Flags:
    """Return, per collective, whether sizes or roots of its members differ."""
    is_contradictory = np.zeros(count, np.bool_)
    for values in (calls.size, calls.root):
        if values is None:
            continue
        one = np.full(count + 1, NULL)  # one behind the last for NONE
        one[instance] = values
        if (one[instance] == values)[instance != NONE].all():
            continue
        rows = np.flatnonzero((instance != NONE) & (values != NULL))
        number, value = instance[rows], values[rows]
        one[number] = value
        is_contradictory[number[one[number] != value]] = True
    return is_contradictory


def _of_several(instance: Ints, counts: Flags) -> tuple[Ints, int]:
    """Renumber instances: only those that count and that several ranks have."""
    is_matched = instance != NONE
    several = (np.bincount(instance[is_matched], minlength=len(counts)) > 1) & counts
    if several.all():
        return instance, len(several)
    number = np.where(several, np.cumsum(several) - 1, NONE)
    renumbered = np.full(len(instance), NONE, np.int64)
    renumbered[is_matched] = number[instance[is_matched]]
    return renumbered, int(several.sum())


_OPTIONAL = (
    *("rank", "group", "group_size", "seq", "bytes", "payload_bytes", "bus_bytes"),
    *("partner", "stream"),
)


@dataclass(frozen=True, slots=True)
class CommunicationEvents:
    """Communication events of ranks whose times are known, one array per column.

    NULL, or False, stands for null and for columns that the table does not have.
    """

    rank: Ints
    tag: NDArray[np.int8]
    op: NDArray[np.int8]
    group: Ints
    group_size: Ints
    seq: Ints
    bytes: Ints
    payload_bytes: Ints
    bus_bytes: Ints
    partner: Ints
    stream: Ints
    sends: Flags
    start: Ints
    stop: Ints
    alone: Ints
    exposed: Ints

    @classmethod
    def of(cls, table: pa.Table) -> "CommunicationEvents":
        """Convert a table with the columns of `traffic.rows`, or with some of them.

        Rows without a start time are dropped.
        """
        if table["start_ns"].null_count:
            table = table.filter(table["start_ns"].is_valid())
        rows, present = table.num_rows, set(table.column_names)
        nulls, all_false = np.broadcast_to(NULL, rows), np.broadcast_to(False, rows)
        names = {name: name for name in _OPTIONAL} | {
            "alone": "alone_ns",
            "exposed": "exposed_ns",
        }
        start = filled(table["start_ns"])
        return cls(
            tag=table["tag"].to_numpy(),
            op=table["op"].to_numpy(),
            sends=table["sends"].to_numpy() if "sends" in present else all_false,
            start=start,
            stop=start + table["duration_ns"].to_numpy(),
            **{
                name: filled(table[column]) if column in present else nulls
                for name, column in names.items()
            },
        )

    def since_free(self, rows: Ints) -> Ints:
        """Return the time in ns from the end of the event before to the start of some events.

        That is the previous one of the rank, group and stream; without one, the time has no
        bound.
        """
        # One number for rank, group and stream: a sort by each takes twice as long.
        lane = (self.group * _SERIES + self.rank) * _SERIES + self.stream
        order = np.lexsort((self.start, lane))
        is_next = (lane[order[1:]] == lane[order[:-1]]) & (self.stream[order[1:]] != NULL)
        since = np.full(len(order), np.iinfo(np.int64).max)
        before, own = order[:-1][is_next], order[1:][is_next]
        since[own] = np.maximum(self.start[own] - self.stop[before], 0)
        return since[rows]

    @property
    def synchronous(self) -> Ints:
        """Ascending rows of collectives that end on all members at the same time.

        Only of process groups that can be matched across ranks. Point-to-point messages and
        operations with a root are left out.
        """
        return np.flatnonzero(self._is_shared & np.isin(self.op, _ENDS_TOGETHER))

    @property
    def collectives(self) -> Ints:
        """Ascending rows of collectives that can be matched: `synchronous`, or known root."""
        rooted = np.isin(self.op, ROOTED) & (self.partner != NULL)
        return np.flatnonzero(self._is_shared & (rooted | np.isin(self.op, _ENDS_TOGETHER)))

    @property
    def messages(self) -> Ints:
        """Ascending rows of point-to-point messages to or from a known other rank."""
        is_message = (self.op == OP["SendRecv"]) & (self.partner != NULL)
        return np.flatnonzero(self._is_shared & is_message & (self.partner != self.rank))

    @property
    def _is_shared(self) -> Flags:
        is_shared: Flags = (self.group != NULL) & (self.group_size != 1)
        return is_shared
