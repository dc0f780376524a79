"""Find the communication among device work, and the ranks that it communicates with.

The first rule that knows a name decides; `kernel_names` has the last. The host's name of the
operation takes precedence where it is known, since an all-to-all runs as
`ncclDevKernel_SendRecv`.

`DeviceRows` are for inputs without host, launches and annotations; their rows are in any order.
NULL stands for unknown numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm import regexes
from fastcomm.formats.kernel_names import Named, recognize
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.events import Events
from fastcomm.trace.host_names import COLLECTIVE_CALL, HOST_LIBRARIES
from fastcomm.trace.schema import OP, ROOTED
from fastcomm.trace.tags import CHANGED_NOTHING, ProcessGroup
from fastcomm_kernels.arrays import NONE, NULL, Ints

# Tells of a name what it means, or None.
Rule = Callable[[str], Named | None]
# Kernels that communicate: `kernel_names` has the tables.
PATTERNS: tuple[Rule, ...] = (recognize,)
# Libraries that serve every parallelism; the others serve one, or a few.
COLLECTIVE_LIBRARIES = (
    *HOST_LIBRARIES,
    *("NCCL", "RCCL", "oneCCL", "HCCL", "MSCCL++", "torchcomms", "XLA"),
)
# Details of events that `find_partners` reads.
DETAILS = ("Src Rank", "Dst Rank", "Rank")
_TEXTS = ("Collective name", "Process Group Name")
_SEND, _RECEIVE = 0, 1
_SIDES = {"send": _SEND, "recv": _RECEIVE}
_PEERS = ("Dst Rank", "Src Rank")  # by side
_BOUNDS: tuple[Literal["left"], Literal["right"]] = ("left", "right")
Peers = tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A regular expression on names of kernels or copies, and what a match tells."""

    regex: str
    library: str
    op: str = "OTHER"
    tag: str | None = None  # for events whose group is unknown
    fused: bool = False  # whether the kernel does more than communicate

    def __call__(self, name: str) -> Named | None:
        """Return what the pattern tells of a name; None if it does not match."""
        if regexes.is_match(self.regex, name):
            return Named(library=self.library, op=self.op, tag=self.tag, fused=self.fused)
        return None


# Copies from one device to another.
PEER_COPIES: tuple[Rule, ...] = (
    Pattern(regex=r"^Memcpy PtoP", library="peer copy", op="SendRecv"),
)


def match_name(name: str, rules: tuple[Rule, ...]) -> Named | None:
    """Return what the first rule that knows a name tells of it; None: not communication."""
    return matcher(rules)(name)


@lru_cache(maxsize=16)  # the ranks of a run share names and patterns
def matcher(rules: tuple[Rule, ...]) -> Rule:
    """Return `match_name` for these rules, with a cache of names."""

    @lru_cache(maxsize=1 << 14)
    def match(name: str) -> Named | None:
        return next(filter(None, (rule(name) for rule in rules)), None)

    return match


@dataclass(frozen=True, slots=True, kw_only=True)
class Partners:
    """Roots and peers of communication events, as global ranks."""

    root: Ints  # NULL: unknown or none
    sends_to: Sequence[Peers]  # in the order of the calls; None: unknown, or no message
    receives_from: Sequence[Peers]

    @classmethod
    def unknown(cls, count: int) -> Self:
        """Return unknown partners of a number of events."""
        nobody = (None,) * count
        root = np.full(count, NULL, np.int64)
        return cls(root=root, sends_to=nobody, receives_from=nobody)

    def columns(self) -> dict[str, pa.Array]:
        """Return root, send partners and receive partners as columns of `schema.COMM`.

        Unknown is null.
        """
        ranks = pa.list_(pa.int32())
        return {
            "root": pa.array(self.root, mask=self.root == NULL),
            "sends_to": pa.array(self.sends_to, ranks),
            "receives_from": pa.array(self.receives_from, ranks),
        }


def find_partners(
    events: Events,
    rows: Ints,
    op: NDArray[np.int8],
    group: NDArray[np.int32],
    groups: Sequence[ProcessGroup],
) -> Partners:
    """Return roots and peers of the communication of a Kineto trace.

    Parameters
    ----------
    events
        Events of the trace.
    rows
        Rows of the communication, by start.
    op
        Operation of each, an index into OPS.
    group
        Group of each, an index into `groups`, or NONE.
    groups
        Process groups of the trace.

    """
    partners = Partners.unknown(len(rows))
    needs_partners = np.isin(op, (*ROOTED, OP["SendRecv"]))
    if not needs_partners.any():
        return partners
    calls = _Calls.of(events, rows, needs_partners)
    members = [None if place < 0 else groups[place].ranks for place in group.tolist()]
    for k in np.flatnonzero(np.isin(op, ROOTED)).tolist():
        call = int(calls.around[k])
        row = call if call >= 0 else int(rows[k])
        partners.root[k] = member(members[k], calls.detail("Rank", row))
    sends_to, receives_from = list(partners.sends_to), list(partners.receives_from)
    names = [None if place < 0 else groups[place].name for place in group.tolist()]
    messages = np.flatnonzero(op == OP["SendRecv"]).tolist()
    for k, call_rows in calls.messages_of(messages, names).items():
        ends = [calls.message(row, members[k]) for row in call_rows]
        if None not in ends:
            sends_to[k], receives_from[k] = (
                tuple(peer for direction, peer in filter(None, ends) if direction == side)
                for side in (_SEND, _RECEIVE)
            )
    return Partners(root=partners.root, sends_to=sends_to, receives_from=receives_from)


def member(ranks: tuple[int, ...] | None, place: int) -> int:
    """Return the global rank at a place of a group, or NULL."""
    return ranks[place] if ranks is not None and 0 <= place < len(ranks) else NULL


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """The host's calls of collectives, and the communication that they launched."""

    events: Events
    rows: Ints  # rows of the communication
    launch: Ints  # row of the launch of each, or NONE
    around: Ints  # row of the call around the launch, or NONE
    messages: Ints  # rows of calls of messages, sorted by thread and start
    details: dict[int, dict[str, int]]  # details by row and name

    @classmethod
    def of(cls, events: Events, rows: Ints, needs_partners: NDArray[np.bool_]) -> Self:
        """Find the calls for the communication `rows`; only flagged rows get details."""
        launch = events.launch_of(rows)
        calls = events.rows_named(lambda name: name == COLLECTIVE_CALL, "cpu_op", "annotation")
        names = events.detail("Collective name", calls)
        messages = calls[events.by_text(names, lambda text: int(text in _SIDES)) == 1]
        start = events.start
        order = np.lexsort((start[messages], events.lane[messages]))
        around = events.enclosing(calls, launch)
        detail_rows = np.unique(
            np.concatenate(
                [rows[needs_partners], messages, around[needs_partners & (around >= 0)]]
            )
        )
        detail_names = [name for name in (*DETAILS, *_TEXTS) if name in events.details]
        columns = [events.detail(name, detail_rows).tolist() for name in detail_names]
        return cls(
            events=events,
            rows=rows,
            launch=launch,
            around=around,
            messages=messages[order],
            details={
                row: dict(zip(detail_names, values, strict=True))
                for row, *values in zip(detail_rows.tolist(), *columns, strict=True)
            },
        )

    def detail(self, name: str, row: int) -> int:
        """Return a detail of a row, or NULL."""
        return self.details.get(row, {}).get(name, NULL)

    def text(self, name: str, row: int) -> str | None:
        """Return a detail of a row that is a text, or None."""
        return self.events.text(self.detail(name, row))

    def message(self, row: int, ranks: tuple[int, ...] | None) -> tuple[int, int] | None:
        """Return the side of a message and the peer of a call; None if unknown."""
        side = _SIDES.get(self.text("Collective name", row) or "")
        if side is None:
            return None
        peer = self.detail(_PEERS[side], row)
        peer = peer if peer >= 0 else member(ranks, self.detail("Rank", row))
        return None if peer < 0 else (side, peer)

    def messages_of(
        self, indices: Sequence[int], groups: Sequence[str | None]
    ) -> dict[int, list[int]]:
        """Return the rows that state the messages of each communication event.

        That is the call around its launch. Messages that are launched together, after their
        calls, have the calls of their group since the previous launch that launched nothing
        themselves. Else it is the event itself.
        """
        start, lane = self.events.start, self.events.lane
        calls, launching = set(self.messages.tolist()), set(self.around.tolist())
        before: dict[int, int] = {}
        rows_of = {}
        for k in sorted(indices, key=lambda k: int(start[self.launch[k]])):
            launch, around = int(self.launch[k]), int(self.around[k])
            rows_of[k] = [around] if around in calls else [int(self.rows[k])]
            if launch >= 0 and around not in calls:
                batch = self._between(before.get(int(lane[launch]), 0), launch)
                name = groups[k]
                candidates = [
                    row
                    for row in batch
                    if row not in launching
                    and name in (None, self.text("Process Group Name", row))
                ]
                rows_of[k] = candidates or rows_of[k]
            if launch >= 0:
                before[int(lane[launch])] = int(start[launch])
        return rows_of

    def _between(self, since: int, launch: int) -> list[int]:
        """Return the message calls on a launch's thread from a time until the launch."""
        start, stop = self.events.start, self.events.stop
        lane = self.events.lane
        first, last = (np.searchsorted(lane[self.messages], lane[launch], s) for s in _BOUNDS)
        calls = self.messages[first:last]
        first, last = np.searchsorted(start[calls], (since, start[launch]))
        return [row for row in calls[first:last].tolist() if stop[row] <= start[launch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Communication events of a rank, sorted by start; NULL is unknown."""

    row: Ints  # row of the event
    op: NDArray[np.int8]  # index into OPS
    seq: Ints
    group: NDArray[np.int32]  # index into `groups`; NONE is unknown
    groups: tuple[ProcessGroup, ...]
    sizes: byte_rules.Sizes
    named: tuple[Named, ...]  # what kernel names tell
    name: Ints  # index into `named`
    call_id: Ints | None = None  # see `schema.COMM`; None: the format does not tell
    partners: Partners | None = None  # None: the format does not tell
    # Columns `schema.SPLITS`; None: the format does not tell.
    splits: Mapping[str, pa.Array] | None = None
    # Why sizes are unknown, with remedies; None: already reported.
    unsized: tuple[str, ...] | None = ()


def find_communication(
    events: Events, patterns: Sequence[Pattern]
) -> tuple[Ints, Ints, tuple[Named, ...]]:
    """Find the kernels and copies that are communication, by their names.

    Returns
    -------
    ndarray
        Rows of the events, by start.
    ndarray
        For each, an index into the third value.
    tuple of Named
        What the different names tell.

    """
    named: list[Named] = []

    def numberer(table: tuple[Rule, ...]) -> Callable[[str], int]:
        match = matcher(table)

        def number(name: str) -> int:
            if (result := match(name)) is None:
                return NONE
            named.append(result)
            return len(named) - 1

        return number

    kernels: tuple[Rule, ...] = (*patterns, *PATTERNS)
    rows, indices = [], []
    for kind, table in (("kernel", kernels), ("memcpy", PEER_COPIES)):
        kind_rows = events.rows(kind)
        index = events.by_text(events.name[kind_rows], numberer(table))
        rows.append(kind_rows[index >= 0])
        indices.append(index[index >= 0])
    merged = np.concatenate(rows)
    order = np.argsort(merged)
    return merged[order], np.concatenate(indices)[order], tuple(named)


def unused_patterns(events: Events, patterns: Sequence[Pattern]) -> Iterator[str]:
    """Yield a warning for each of a user's patterns that decides for no kernel."""
    if not patterns:
        return
    codes = np.unique(events.name[events.rows("kernel")])
    names = [events.texts[code] for code in codes.tolist() if code != NULL]
    deciding, matching = set(), set()
    for name in names:
        matches = [n for n, pattern in enumerate(patterns) if pattern(name)]
        deciding.update(matches[:1])
        matching.update(matches)
    for n, pattern in enumerate(patterns):
        if n not in deciding:
            reason = "an earlier pattern decides for the same kernels; put it first"
            if n not in matching:
                reason = "no kernel has such a name" if names else "there are no kernels"
            yield f"[[kernels]] pattern = {pattern.regex!r}{CHANGED_NOTHING}{reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Device work in any order; NULL is unknown. Times are ns."""

    start: Ints
    stop: Ints
    kind: NDArray[np.int8]  # index into KINDS
    name: Ints  # index into `texts`
    texts: Sequence[str]
    lane: Ints  # index into `lanes`
    lanes: Sequence[str]  # names of streams, or of other sequences of events
    stream: Ints | None = None  # None: unknown
    offset: Ints | None = None  # byte offset of the row in its file; None: unknown

    def events(self) -> tuple[Events, pa.Table, Ints]:
        """Return the events sorted by start, their lanes, and for each event its row here."""
        order = np.lexsort((self.stop, self.start))
        unknown = np.full(len(order), NULL, np.int64)
        more = {"stream": self.stream, "offset": self.offset}
        lanes = pa.table(
            {
                "process": [""] * len(self.lanes),
                "thread": list(self.lanes),
                "device": pa.nulls(len(self.lanes), pa.int32()),
                "is_device": [True] * len(self.lanes),
            }
        )
        events = Events(
            start=self.start[order],
            stop=self.stop[order],
            kind=self.kind[order],
            name=self.name[order].astype(np.int32),
            lane=self.lane[order].astype(np.int32),
            correlation=unknown,
            texts=self.texts,
            more={key: unknown if v is None else v[order] for key, v in more.items()},
        )
        return events, lanes, order


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationColumns:
    """The communication of `DeviceRows`; `op` is NULL for rows that do not communicate."""

    op: Ints
    seq: Ints
    group: Ints  # index into `groups`; NONE is unknown
    groups: tuple[ProcessGroup, ...]
    message: Ints  # bytes, as passed to the library's call
    name: Ints  # index into `named`
    named: tuple[Named, ...]

    def collectives(self, order: Ints) -> Collectives:
        """Return the communication of sorted events, with its sizes in bytes.

        Parameters
        ----------
        order
            Row in these columns of each event, sorted by start.

        """
        row = np.flatnonzero(self.op[order] != NULL)
        chosen = order[row]
        op, group = self.op[chosen].astype(np.int8), self.group[chosen].astype(np.int32)
        members = [NULL if entry.members is None else entry.members for entry in self.groups]
        size = np.array([*members, NULL], np.int64)[group]
        return Collectives(
            row=row,
            op=op,
            seq=self.seq[chosen],
            group=group,
            groups=self.groups,
            sizes=sizes_of_messages(op, self.message[chosen], size),
            named=self.named,
            name=self.name[chosen],
        )


def sizes_of_messages(op: NDArray[np.int8], message: Ints, size: Ints) -> byte_rules.Sizes:
    """Return the three byte counts from the bytes passed to calls.

    Parameters
    ----------
    op
        Operation of each event, an index into OPS.
    message
        Bytes passed to its call: those to or from one peer for operations with a part per peer.
    size
        Number of ranks of its group. NULL is unknown in `message` and `size`.

    """
    whole = byte_rules.byte_counts(message, size)
    unknown = np.full(len(message), NULL, np.int64)
    bytes_in, bytes_out = message.copy(), message.copy()
    for name, input_bytes, output_bytes in (
        ("AllGather", message, unknown),
        ("ReduceScatter", unknown, message),
        ("AllToAll", whole, whole),
        ("Gather", message, unknown),
        ("Scatter", unknown, message),
    ):
        chosen = op == OP[name]
        bytes_in, bytes_out = (
            np.where(chosen, input_bytes, bytes_in),
            np.where(chosen, output_bytes, bytes_out),
        )
    return byte_rules.sizes(op, bytes_in, bytes_out, size)
