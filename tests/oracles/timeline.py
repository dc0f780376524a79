"""What a timeline shows of a made-up run, by definition: slow, the standard library alone.

Times are int nanoseconds, -1 is unknown.
"""

import base64
import gzip
import json
import zlib
from decimal import ROUND_HALF_UP, Decimal
from itertools import count, pairwise

PARALLELISMS = {"DATA": "DP", "TENSOR": "TP", "PIPELINE": "PP", "EXPERT": "EP"}
WORK = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "copy"}


def _ns(microseconds):
    return int((Decimal(str(microseconds)) * 1000).to_integral_value(ROUND_HALF_UP))


def device_events(path):
    """The device work of a file: kind, start, duration, name, arguments."""
    document = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    base = int(document["baseTimeNanoseconds"])
    for event in document["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in WORK:
            continue
        args, kind = event["args"], WORK[event["cat"]]
        if "Collective name" in args:
            kind = PARALLELISMS[args["Process Group Description"].partition("_")[0]]
        start = base + _ns(event["ts"])
        yield kind, start, base + _ns(event["ts"] + event["dur"]) - start, event["name"], args


def _match(rank, args, order):
    """What is equal for all members of one collective or message, and for no other."""
    name = args["Collective name"]
    members = args["Process Group Ranks"]
    if name in ("send", "recv"):
        other = args["Dst Rank"] if name == "send" else args["Src Rank"]
        pair = (rank, other) if name == "send" else (other, rank)
        return pair, members, next(order.setdefault((rank, pair, members), count()))
    return name, members, args["Seq"]


def events_of_step(paths, spans):
    """All events of a step, as rows; `spans` has begin and stop by rank.

    A row is rank, kind, start, duration, name, wait, and the ranks of the collective.
    """
    zero = min(begin for begin, _ in spans.values())
    rows, matches, order = [], {}, {}
    for rank, path in enumerate(paths):
        begin, stop = spans[rank]
        for kind, start, duration, name, args in sorted(
            device_events(path), key=lambda event: event[1]
        ):
            if not begin <= start < stop:
                continue
            key = _match(rank, args, order) if kind not in ("compute", "copy") else None
            rows.append((rank, kind, start - zero, duration, name, key))
            if key is not None:
                matches.setdefault(key, []).append((start - zero, rank))
    return sorted((*row, *_waited(row[2], key, matches)) for *row, key in rows)


def _waited(start, key, matches):
    """How long a member waits, and the ranks of its collective; for a root only for that."""
    members = sorted(matches.get(key, ()))
    if len(members) < 2:
        return -1, ()
    until = members[-1][0]
    if key[0] == "broadcast":  # from the first member, in made-up jobs
        until = next(begin for begin, member in members if member == json.loads(key[1])[0])
    return max(until - start, 0), tuple(sorted(member for _, member in members))


def unpacked(packed):
    """The columns of packed data, as lists."""
    raw = zlib.decompress(base64.b64decode(packed["data"]), -15)
    rows, at, columns = packed["rows"], 0, {}
    for name, width, least, is_delta in packed["columns"]:
        values = []
        for row in range(rows):
            value = sum(raw[at + byte * rows + row] << 8 * byte for byte in range(width))
            values.append(value + least + (values[-1] if is_delta and values else 0))
        columns[name] = values
        at += width * rows
    assert at == len(raw)
    return columns


def busy_share(events, kind, begin, stop, *, above=()):
    """Share of a bin in which a kind runs and no kind of `above`."""
    inside = [
        (start, start + duration, own)
        for _, own, start, duration, *_ in events
        if start < stop and start + duration > begin
    ]
    edges = sorted(
        {begin, stop, *(min(max(t, begin), stop) for a, b, _ in inside for t in (a, b))}
    )
    total = 0
    for a, b in pairwise(edges):
        running = {own for low, high, own in inside if low <= a and b <= high}
        if kind in running and not running.intersection(above):
            total += b - a
    return total / (stop - begin)
