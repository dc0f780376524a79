"""Which device work is communication, with which ranks, and events of device work alone.

`DeviceRows` are for inputs without host, launches and annotations; their rows come in any
order.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.readers.patterns import PATTERNS, PEER_COPIES, Named, Pattern, namer
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.events import Events
from fastcomm.trace.schema import FROM_ROOT, OP, TO_ROOT, numbers
from fastcomm.trace.tags import CHANGED_NOTHING, ProcessGroup
from fastcomm_kernels.arrays import NULL, Ints

ROOTED = numbers(FROM_ROOT + TO_ROOT)
# The details of events that `find_partners` needs.
DETAILS = ("Src Rank", "Dst Rank", "Rank")

_CALL = "record_param_comms"
_WORDS = ("Collective name", "Process Group Name")
_SEND, _RECEIVE = 0, 1
_SIDES = {"send": _SEND, "recv": _RECEIVE}
_PEERS = ("Dst Rank", "Src Rank")  # by side
_BOUNDS: tuple[Literal["left"], Literal["right"]] = ("left", "right")

Peers = tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Partners:
    """One entry a communication event."""

    root: Ints  # NULL where it is unknown or there is none
    sends_to: Sequence[Peers]  # in the order of the calls; None: unknown, or no message
    receives_from: Sequence[Peers]

    @classmethod
    def unknown(cls, count: int) -> Self:
        """What is known of events that say nothing of it."""
        nobody = (None,) * count
        root = np.full(count, NULL, np.int64)
        return cls(root=root, sends_to=nobody, receives_from=nobody)

    def columns(self) -> dict[str, pa.Array]:
        """The same as columns of `schema.COMM`."""
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
    """The partners of the communication of a Kineto trace; `rows` are events by start."""
    found = Partners.unknown(len(rows))
    asked = np.isin(op, (*ROOTED, OP["SendRecv"]))
    if not asked.any():
        return found
    calls = _Calls.of(events, rows, asked)
    members = [None if place < 0 else groups[place].ranks for place in group.tolist()]
    for k in np.flatnonzero(np.isin(op, ROOTED)).tolist():
        found.root[k] = _member(members[k], calls.said("Rank", int(calls.around[k])))
    sends_to, receives_from = list(found.sends_to), list(found.receives_from)
    names = [None if place < 0 else groups[place].name for place in group.tolist()]
    messages = np.flatnonzero(op == OP["SendRecv"]).tolist()
    for k, texts in calls.of_messages(messages, names).items():
        known = [calls.message(row, members[k]) for row in texts]
        if None not in known:
            sends_to[k], receives_from[k] = (
                tuple(peer for at, peer in filter(None, known) if at == side)
                for side in (_SEND, _RECEIVE)
            )
    return Partners(root=found.root, sends_to=sends_to, receives_from=receives_from)


def _member(ranks: tuple[int, ...] | None, place: int) -> int:
    """The global rank at a place of a group, or NULL."""
    return ranks[place] if ranks is not None and 0 <= place < len(ranks) else NULL


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """The host's calls of collectives, and which of them launched what."""

    events: Events
    rows: Ints  # of the communication
    launch: Ints  # of each of them, or -1
    around: Ints  # the call around the launch, or -1
    messages: Ints  # the calls of messages by thread and start
    details: dict[int, dict[str, int]]  # of these, and of what is asked for, by row

    @classmethod
    def of(cls, events: Events, rows: Ints, asked: NDArray[np.bool_]) -> Self:
        launch = events.launch_of(rows)
        calls = events.rows_named(lambda name: name == _CALL, "cpu_op", "annotation")
        names = events.detail("Collective name", calls)
        messages = calls[events.by_text(names, lambda text: int(text in _SIDES)) == 1]
        start = events.start
        order = np.lexsort((start[messages], events.lane[messages]))
        around = events.enclosing(calls, launch)
        told = np.unique(np.concatenate([rows[asked], messages, around[asked & (around >= 0)]]))
        wanted = [name for name in (*DETAILS, *_WORDS) if name in events.details]
        columns = [events.detail(name, told).tolist() for name in wanted]
        return cls(
            events=events,
            rows=rows,
            launch=launch,
            around=around,
            messages=messages[order],
            details={
                row: dict(zip(wanted, values, strict=True))
                for row, *values in zip(told.tolist(), *columns, strict=True)
            },
        )

    def said(self, name: str, row: int) -> int:
        """A detail of a row, or NULL."""
        return self.details.get(row, {}).get(name, NULL)

    def word(self, name: str, row: int) -> str | None:
        """The same where it is a text."""
        return self.events.text(self.said(name, row))

    def message(self, row: int, ranks: tuple[int, ...] | None) -> tuple[int, int] | None:
        """Which side of a message a row is, and its peer; None where nobody knows."""
        side = _SIDES.get(self.word("Collective name", row) or "")
        if side is None:
            return None
        peer = self.said(_PEERS[side], row)
        peer = peer if peer >= 0 else _member(ranks, self.said("Rank", row))
        return None if peer < 0 else (side, peer)

    def of_messages(
        self, asked: Sequence[int], groups: Sequence[str | None]
    ) -> dict[int, list[int]]:
        """The rows that say what each of these pieces of communication sends and receives.

        That is the call around its launch; where several messages are launched together, which
        is after their calls, the calls of its group since the launch before that launched
        nothing themselves; else the event itself.
        """
        start, lane = self.events.start, self.events.lane
        calls, taken = set(self.messages.tolist()), set(self.around.tolist())
        before: dict[int, int] = {}
        found = {}
        for k in sorted(asked, key=lambda k: int(start[self.launch[k]])):
            launch, around = int(self.launch[k]), int(self.around[k])
            found[k] = [around] if around in calls else [int(self.rows[k])]
            if launch >= 0 and around not in calls:
                batch = self._between(before.get(int(lane[launch]), 0), launch)
                name = groups[k]
                same = [
                    row
                    for row in batch
                    if row not in taken and name in (None, self.word("Process Group Name", row))
                ]
                found[k] = same or found[k]
            if launch >= 0:
                before[int(lane[launch])] = int(start[launch])
        return found

    def _between(self, since: int, launch: int) -> list[int]:
        """The calls of messages on a launch's thread from `since` on that ended before it."""
        start, stop = self.events.start, self.events.stop
        lane = self.events.lane
        first, last = (np.searchsorted(lane[self.messages], lane[launch], s) for s in _BOUNDS)
        calls = self.messages[first:last]
        first, last = np.searchsorted(start[calls], (since, start[launch]))
        return [row for row in calls[first:last].tolist() if stop[row] <= start[launch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Communication events, one entry each, sorted by start; NULL is unknown."""

    row: Ints  # of the event
    op: NDArray[np.int8]
    seq: Ints
    group: NDArray[np.int32]  # index into `groups`, -1 where nothing is known
    groups: tuple[ProcessGroup, ...]
    sizes: byte_rules.Sizes
    named: tuple[Named, ...]  # what names say
    name: Ints  # index into `named`
    partners: Partners | None = None  # where the trace says who they are
    # Why sizes are unknown, and what would help; None where that was reported before.
    unsized: tuple[str, ...] | None = ()


def communication(
    events: Events, patterns: Sequence[Pattern]
) -> tuple[Ints, Ints, tuple[Named, ...]]:
    """Rows of the communication, and what the name says of each."""
    found: list[Named] = []

    def asking(table: tuple[Pattern, ...]) -> Callable[[str], int]:
        said_by = namer(table)

        def ask(name: str) -> int:
            if (said := said_by(name)) is None:
                return -1
            found.append(said)
            return len(found) - 1

        return ask

    rows, answers = [], []
    for kind, table in (("kernel", (*patterns, *PATTERNS)), ("memcpy", PEER_COPIES)):
        asked = events.rows(kind)
        answer = events.by_text(events.name[asked], asking(table))
        said = answer >= 0
        rows.append(asked[said])
        answers.append(answer[said])
    merged = np.concatenate(rows)
    order = np.argsort(merged)
    return merged[order], np.concatenate(answers)[order], tuple(found)


def unmatched(events: Events, patterns: Sequence[Pattern]) -> Iterator[str]:
    """Say of each of a user's patterns that decides for no kernel, why."""
    if not patterns:
        return
    codes = np.unique(events.name[events.rows("kernel")])
    names = [events.texts[code] for code in codes.tolist() if code != NULL]
    deciding, matching = set(), set()
    for name in names:
        fitting = [n for n, each in enumerate(patterns) if re.search(each.regex, name)]
        deciding.update(fitting[:1])
        matching.update(fitting)
    for n, pattern in enumerate(patterns):
        if n not in deciding:
            why = "an earlier pattern decides for the same kernels; put it first"
            if n not in matching:
                why = "no kernel has such a name" if names else "there are no kernels"
            yield f"[[kernels]] pattern = {pattern.regex!r}{CHANGED_NOTHING}{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Device work, a row each; NULL is unknown."""

    start: Ints
    stop: Ints
    kind: NDArray[np.int8]  # index into KINDS
    name: Ints  # index into `texts`
    texts: Sequence[str]
    lane: Ints  # index into `lanes`
    lanes: Sequence[str]  # streams, or whatever events stand one after another on
    stream: Ints
    offset: Ints  # of the row's text in its file

    def events(self) -> tuple[Events, pa.Table, Ints]:
        """The events sorted by start, their lanes, and the row that each event was."""
        order = np.lexsort((self.stop, self.start))
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
            correlation=np.full(len(order), NULL, np.int64),
            texts=self.texts,
            more={"stream": self.stream[order], "offset": self.offset[order]},
        )
        return events, lanes, order


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationColumns:
    """What is known of each row of a `Work` that communicates; others have NULL as `op`."""

    op: Ints
    seq: Ints
    group: Ints  # index into `groups`, -1 where nothing is known
    groups: tuple[ProcessGroup, ...]
    message: Ints  # bytes, as handed to the library's call
    name: Ints  # index into `named`
    named: tuple[Named, ...]

    def collectives(self, order: Ints) -> Collectives:
        """The same of the sorted events, `order` being the row that each was."""
        row = np.flatnonzero(self.op[order] != NULL)
        chosen = order[row]
        op, group = self.op[chosen].astype(np.int8), self.group[chosen].astype(np.int32)
        members = [NULL if each.members is None else each.members for each in self.groups]
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
    """The three counts of bytes, from what was handed to the call and the group's size.

    A message is what goes to, or comes from, one peer where an operation has a part for each.
    """
    whole = byte_rules.byte_counts(message, size)
    unknown = np.full(len(message), NULL, np.int64)
    given, got = message.copy(), message.copy()
    for name, gives, gets in (
        ("AllGather", message, unknown),
        ("ReduceScatter", unknown, message),
        ("AllToAll", whole, whole),
        ("Gather", message, unknown),
        ("Scatter", unknown, message),
    ):
        chosen = op == OP[name]
        given, got = np.where(chosen, gives, given), np.where(chosen, gets, got)
    return byte_rules.sizes(op, given, got, size)
