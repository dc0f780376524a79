"""Who waits for whom in an instance, and for how long.

Members that wait for the same members meet: nobody of them ends before the last of those has
come. A broadcast is a meeting of each receiver with the root, an all-reduce one of everybody.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

import pyarrow as pa

from fastcomm.critical_path.parts import Instance
from fastcomm_kernels.graph import Column

COLLECTIVES = pa.schema(
    [
        pa.field("instance", pa.int64()),
        pa.field("rank", pa.int64()),
        pa.field("op", pa.string()),
        pa.field("tag", pa.string()),
        pa.field("group", pa.string()),
        pa.field("start", pa.int64()),  # ns, on the first rank's clock
        pa.field("stop", pa.int64()),
        pa.field("arrived", pa.int64()),  # when the last had come that it waits for
        pa.field("wait_ns", pa.int64()),  # until then
        pa.field("transfer_ns", pa.int64()),
        pa.field("held_up_ns", pa.int64()),  # how much later it is than the one before the last
        pa.field("is_last", pa.bool_()),  # of all for whom those wait that wait for it
        pa.field("slack_ns", pa.int64()),  # it could come so much later without a longer step
    ]
)

Meeting = tuple[tuple[int, ...], list[int]]


def meetings(each: Instance) -> list[Meeting]:
    """The members that have to come, and those that wait for them, where several have to."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for member, needed in enumerate(each.waits_for):
        if len(needed) > 1:
            found[needed].append(member)
    return list(found.items())


def table(same: Sequence[Instance], slack: Column) -> pa.Table:
    """A row of COLLECTIVES for each member of each instance; `slack` is that of its start."""
    rows = chain.from_iterable(_rows(number, each) for number, each in enumerate(same))
    columns = [*zip(*rows, strict=True), slack]
    return pa.table(dict(zip(COLLECTIVES.names, columns, strict=True)), COLLECTIVES)


def _rows(number: int, each: Instance) -> Iterator[tuple[object, ...]]:
    held = _held_up(each)
    starts = [part.start for part in each.members]
    latest = {
        needed: max(starts[n] for n in needed) for needed in dict.fromkeys(each.waits_for)
    }
    for n, part in enumerate(each.members):
        arrived = latest[each.waits_for[n]]
        words = (number, part.rank, part.op, part.tag, part.group.label)
        times = (part.start, part.stop, arrived, arrived - part.start)
        held_up = held.get(n)
        yield *words, *times, max(0, part.stop - arrived), held_up or 0, held_up is not None


def _held_up(each: Instance) -> dict[int, int]:
    """How much later than all others those came for whom somebody else waited longest."""
    late: dict[int, int] = {}
    early: set[int] = set()
    for needed, waiting in meetings(each):
        *_, before, last = sorted(each.members[n].start for n in needed)
        for n in needed:
            if waiting == [n]:
                continue  # it waits for others, and nobody for it
            if each.members[n].start == last:
                late[n] = min(late.get(n, last - before), last - before)
            else:
                early.add(n)
    return {n: ns for n, ns in late.items() if n not in early}
