"""The critical path through several ranks by its definition: slow and obvious.

A job is a list of ranks, a rank a list of rows in order of time on one stream: SimpleNamespaces
of `start`, `stop`, and of communication `op`, `group` (global ranks), `root`, `sends`,
`receives`. A row starts after the one before it, and cannot end before all that it needs have
started.
"""

from functools import cache

TOGETHER = {"AllReduce", "AllGather", "AllToAll"}


def same_place(job, rank, k):
    """Where the other members of the group do what row k of a rank does."""
    row = job[rank][k]
    series = [
        n for n, each in enumerate(job[rank]) if (each.op, each.group) == (row.op, row.group)
    ]
    number = series.index(k)
    for other in row.group:
        theirs = [
            n
            for n, each in enumerate(job[other])
            if (each.op, each.group) == (row.op, row.group)
        ]
        yield other, theirs[number]


def messages(job, rank, group, kind, peer):
    """The rows of a rank's messages of one kind with one peer, one entry a message."""
    return [
        k
        for k, row in enumerate(job[rank])
        if row.op == "SendRecv" and row.group == group
        for who in getattr(row, kind)
        if who == peer
    ]


def partners(job, rank, k, kind):
    """Where the messages of one kind of a row are at the other end."""
    row, other_kind = job[rank][k], {"sends": "receives", "receives": "sends"}[kind]
    for peer in set(getattr(row, kind)):
        ours = messages(job, rank, row.group, kind, peer)
        theirs = messages(job, peer, row.group, other_kind, rank)
        for number, mine in enumerate(ours):
            if mine == k:
                yield peer, theirs[number]


def needed(job, rank, k):
    """The rows, this one among them, before whose starts it cannot end."""
    row = job[rank][k]
    found = {(rank, k)}
    if row.op in TOGETHER:
        found |= set(same_place(job, rank, k))
    elif row.op == "Broadcast":
        found |= {each for each in same_place(job, rank, k) if each[0] == row.root}
    elif row.op == "Reduce" and rank == row.root:
        found |= set(same_place(job, rank, k))
    elif row.op == "SendRecv":
        found |= set(partners(job, rank, k, "receives"))
        # Who sends so little that a buffer holds it, is gone before it is received.
        found |= {
            each
            for each in partners(job, rank, k, "sends")
            if job[each[0]][each[1]].start <= row.stop
        }
    return found


def arrived(job, rank, k):
    return max(job[r][n].start for r, n in needed(job, rank, k))


def path(job):
    """Steps (rank, from, to) from the first moment to the last end; none of no length."""
    rank, k = max(
        ((rank, len(rows) - 1) for rank, rows in enumerate(job)),
        key=lambda each: (job[each[0]][each[1]].stop, each[0]),
    )
    steps = []
    while True:
        steps.append((rank, arrived(job, rank, k), job[rank][k].stop))
        rank, k = max(needed(job, rank, k), key=lambda each: job[each[0]][each[1]].start)
        if k == 0:
            return [step for step in reversed(steps) if step[1] < step[2]]
        steps.append((rank, job[rank][k - 1].stop, job[rank][k].start))
        k -= 1


def slack(job):
    """By (rank, row): how much later it could start without a later end of all."""
    end = max(rows[-1].stop for rows in job)
    waiting = {(rank, k): set() for rank, rows in enumerate(job) for k in range(len(rows))}
    for rank, rows in enumerate(job):
        for k in range(len(rows)):
            for each in needed(job, rank, k):
                waiting[each].add((rank, k))

    @cache
    def latest_end(rank, k):
        if k + 1 == len(job[rank]):
            return end
        gap = job[rank][k + 1].start - job[rank][k].stop
        return latest_start(rank, k + 1) - gap

    @cache
    def latest_start(rank, k):
        return min(
            latest_end(r, n) - (job[r][n].stop - arrived(job, r, n))
            for r, n in waiting[rank, k]
        )

    return {(rank, k): latest_start(rank, k) - job[rank][k].start for rank, k in waiting}
