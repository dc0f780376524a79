"""Which member of an expert group sends how many rows to which: some experts are liked."""

from fastcomm.synthetic.groups import Group
from fastcomm.synthetic.job import Job

Rows = tuple[int, ...]


def splits(job: Job, group: Group, place: int, seq: int) -> tuple[Rows, Rows]:
    """Rows that a member sends to each and receives from each."""
    rows, limit = -(-job.tokens // job.ep), max(1, job.tokens // job.ep // 8)
    hot = _hot_member(job, group)

    def pair(source: int, target: int) -> int:
        more = rows * job.slowdown // 100 if target == hot else 0
        if source == target:
            return rows + more
        unequal = (source * 7 + target * 13 + source * target * 5 + seq * 11) % (2 * limit + 1)
        return rows + more + unequal - limit

    peers = range(job.ep)
    return tuple(pair(place, peer) for peer in peers), tuple(
        pair(peer, place) for peer in peers
    )


def _hot_member(job: Job, group: Group) -> int | None:
    """The member whose experts get more than their part."""
    if job.fault != "hot_expert" or job.straggler not in group.ranks:
        return None
    return group.ranks.index(job.straggler)
