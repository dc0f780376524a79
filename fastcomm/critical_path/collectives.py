"""Which communication of one rank is which of another.

An instance is one operation of one group. It is known by its sequence number where every event
of that group and operation has one, else by its place among them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastcomm.trace.schema import OP, OPS, TAGS
from fastcomm.trace.trace import Trace

# Operations that end nowhere before all have begun. Of rooted ones nobody says who is the root.
JOINED = frozenset(
    OP[name] for name in ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Barrier")
)
_PAIR = 2
# The amounts of these are the same on every rank.
_EVEN = frozenset(OP[name] for name in ("AllReduce", "AllGather", "ReduceScatter"))

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank's part in an instance; times are those of the rank."""

    rank: int
    row: int  # of the rank's events
    start: int
    stop: int
    payload: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One operation of one group, on all ranks that were read."""

    op: str
    tag: str
    group: str
    size: int | None  # ranks of the group
    members: tuple[Member, ...]

    @property
    def is_whole(self) -> bool:
        """Whether no participant is missing."""
        return self.size is None or len(self.members) == self.size


def instances(
    traces: Mapping[int, Trace], rows: Mapping[int, frozenset[int]]
) -> list[Instance]:
    """The instances of several members, in order of time; `rows` are those that count."""
    found: dict[Key, list[Member]] = defaultdict(list)
    about: dict[Key, tuple[str, str, str, int | None]] = {}
    for rank, trace in traces.items():
        for key, member, words in _members(rank, trace, rows[rank]):
            found[key].append(member)
            about.setdefault(key, words)
    joined = [
        Instance(
            op=about[key][0],
            tag=about[key][1],
            group=about[key][2],
            size=about[key][3],
            members=tuple(members),
        )
        for key, members in found.items()
        if len(members) > 1 and len({member.rank for member in members}) == len(members)
    ]
    return sorted(joined, key=lambda each: min(member.start for member in each.members))


def mismatched(each: Instance) -> bool:
    """Whether the members cannot be one instance: their amounts contradict each other."""
    amounts = {member.payload for member in each.members} - {None}
    return OP[each.op] in _EVEN and len(amounts) > 1


def _members(
    rank: int, trace: Trace, rows: frozenset[int]
) -> list[tuple[Key, Member, tuple[str, str, str, int | None]]]:
    """A rank's parts, each with the key of its instance and what the instance is."""
    groups = trace.groups.to_pylist()
    table = [row for row in trace.comm.to_pylist() if row["event"] in rows]
    numbered = _numbered(table)
    place: dict[Key, int] = defaultdict(int)
    found = []
    for row in table:
        if row["group"] is None:
            continue
        group = groups[row["group"]]
        members = tuple(group["ranks"] or ())
        if row["op"] not in JOINED and not (
            OPS[row["op"]] == "SendRecv" and len(members) == _PAIR
        ):
            continue
        label = group["description"] or group["name"] or str(members)
        series: Key = (members or (group["name"], group["description"]), row["op"])
        order = row["seq"] if numbered[row["group"], row["op"]] else place[series]
        place[series] += 1
        member = Member(
            rank=rank,
            row=row["event"],
            start=row["start"],
            stop=row["stop"],
            payload=row["payload_bytes"],
        )
        words = (OPS[row["op"]], TAGS[row["tag"]], label, group["size"])
        found.append(((*series, order), member, words))
    return found


def _numbered(table: Sequence[Mapping[str, int | None]]) -> dict[tuple[object, object], bool]:
    """By group and operation: whether every event has a sequence number of its own."""
    seen: dict[tuple[object, object], list[object]] = defaultdict(list)
    for row in table:
        seen[row["group"], row["op"]].append(row["seq"])
    return {
        key: None not in numbers and len(set(numbers)) == len(numbers)
        for key, numbers in seen.items()
    }
