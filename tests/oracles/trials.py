"""Rules of trials by definition: slow and obvious, without fastcomm."""


def mxnet(ops, graph):
    """Operations of an MXNet trace; `ops` are (raw, name, start, stop) by start.

    Of an operation that is not in the graph the rules look at the one of the graph before it.
    """
    inside = [i for i, op in enumerate(ops) if op[1] in graph]
    names = [ops[i][1] for i in inside]
    turn = next(
        i for i in range(1, len(names)) if names[i][:2] == "BW" and names[i - 1][:2] == "FW"
    )
    again = next(i for i in range(turn, len(names)) if names[i][:2] == "FW")
    last_forward, last_backward = names[turn - 1], names[again - 1]
    found = [(ops[i][1], ops[i][2], ops[i][3]) for i in inside]
    for here, there in zip(inside, [*inside[1:], len(ops)], strict=True):
        between = ops[here + 1 : there]
        if ops[here][1] == last_forward and between and there < len(ops):
            if ops[there][1] != last_forward:
                stop = max(op[3] for op in between)
                found.append(("OUTPUT0", between[0][2], stop))
        elif ops[here][1] == last_backward:
            updates = [i for i, op in enumerate(between) if "update" in op[0].lower()]
            if updates:
                sums = [op for op in between[: updates[0]] if op[0] in ("dot", "add_n")]
                first = between[updates[0]]
                span = (sums[0][2], max(op[3] for op in sums)) if sums else (first[2], first[2])
                found.append(("UPDATE_CAL", *span))
            for number, i in enumerate(updates):
                found.append((f"UPDATE_{number}", between[i][2], between[i][3]))
    ends = [stop for name, _, stop in found if name[:7] == "UPDATE_" and name != "UPDATE_CAL"]
    found = [each for each in found if not ends or each[1] < max(ends)]
    return joined(sorted(found, key=lambda each: each[1]))


def joined(events):
    """Consecutive (name, start, stop) of one name as one."""
    out = []
    for name, start, stop in events:
        if out and out[-1][0] == name:
            out[-1] = (name, out[-1][1], max(stop, out[-1][2]))
        else:
            out.append((name, start, stop))
    return out


def feasible(shift, bounds):
    """Whether shifts of clocks keep every bound of a sender's over a receiver's."""
    return all(shift[s] - shift[r] <= most + 1e-6 for (s, r), most in bounds.items())


def reached(edges):
    """Of each node all nodes that it comes after, by walking until nothing is new."""
    nodes = {end for edge in edges for end in edge}
    before = {node: {node} for node in nodes}
    while True:
        grown = False
        for a, b in edges:
            if not before[a] <= before[b]:
                before[b] |= before[a]
                grown = True
        if not grown:
            return before
