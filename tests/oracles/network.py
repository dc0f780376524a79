"""Traffic by level of the network, by following every byte of every event."""

from fractions import Fraction
from math import lcm

RINGS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce")


def receivers(event, groups, node_of):
    """Receiving node -> share of what the rank sends; None if unknown."""
    members = groups.get(event["group"], ())
    is_known = event["rank"] in members and all(rank in node_of for rank in members)
    if event["op"] == "SendRecv":
        if event["partner"] in node_of:
            return {node_of[event["partner"]]: Fraction(1)}
        return of_some_member(event["rank"], members, node_of) if is_known else None
    if is_known and event["op"] == "AllToAll":
        return to_all_others(event["rank"], members, node_of)
    if is_known and event["op"] in RINGS:
        return in_rings(event["rank"], members, node_of)
    return None


def of_some_member(rank, members, node_of):
    """A message to an unknown member, which all of them may be."""
    others = {node_of[other] == node_of[rank] for other in members if other != rank}
    if len(others) > 1:
        return None
    return {node_of[rank]: Fraction(1)} if others != {False} else {"another": Fraction(1)}


def to_all_others(rank, members, node_of):
    found = {}
    for other in members:
        if other != rank:
            node = node_of[other]
            found[node] = found.get(node, 0) + Fraction(1, len(members) - 1)
    return found


def in_rings(rank, members, node_of):
    """Walk rings that visit every node once, in which its ranks take turns in each place."""
    by_node = {}
    for member in members:
        by_node.setdefault(node_of[member], []).append(member)
    rings = lcm(*map(len, by_node.values()))
    found = {}
    for turn in range(rings):
        ring = []
        for node in sorted(by_node):
            own = by_node[node]
            ring += [own[(turn + place) % len(own)] for place in range(len(own))]
        after = ring[(ring.index(rank) + 1) % len(ring)]
        found[node_of[after]] = found.get(node_of[after], 0) + Fraction(1, rings)
    return found


def counts(event):
    """Whether an event sends anything: no barrier, group of one, or received message."""
    received = event["op"] == "SendRecv" and event["partner"] is not None and not event["sends"]
    return event["op"] != "Barrier" and event["size"] != 1 and not received


def add(rows, key, event, share):
    """Add a share of an event's bytes to a row."""
    row = rows.setdefault(key, {"events": 0, "bytes": Fraction(), "rated": Fraction(), "ns": 0})
    row["events"] += 1
    if event["bytes"] is not None:
        row["bytes"] += event["bytes"] * share
        if event["ns"]:
            row["rated"] += event["bytes"] * share
            row["ns"] += event["ns"]


def network(events, groups, node_of):
    """(level, tag or None) -> sums, (source, target) -> sums, and sums of unknown level."""
    levels, pairs, unknown = {}, {}, {}
    for event in filter(counts, events):
        shares = receivers(event, groups, node_of)
        if shares is None:
            add(unknown, None, event, Fraction(1))
            continue
        own = node_of[event["rank"]]
        inside = shares.get(own, Fraction())
        for level, share in (("node", inside), ("network", 1 - inside)):
            for tag in (None, event["tag"]):
                if share:
                    add(levels, (level, tag), event, share)
        for target, share in shares.items():
            if target not in (own, "another"):
                add(pairs, (own, target), event, share)
    return levels, pairs, unknown.get(None, {"events": 0, "bytes": 0})
