"""Metrics of an NCCL Inspector log by definition, in exact fractions."""

import json
from fractions import Fraction

# Message bytes times this are the payload (n: ranks of the communicator).
PAYLOAD = {
    "AllGather": "n",
    "ReduceScatter": "n",
    "AllToAll": "n",
    "Gather": "n",
    "Scatter": "n",
}
FACTOR = {
    "AllReduce": lambda n: Fraction(2 * (n - 1), n),
    "AllGather": lambda n: Fraction(n - 1, n),
    "ReduceScatter": lambda n: Fraction(n - 1, n),
    "AllToAll": lambda n: Fraction(n - 1, n),
    "Gather": lambda n: Fraction(n - 1, n),
    "Scatter": lambda n: Fraction(n - 1, n),
    "Broadcast": lambda n: Fraction(int(n > 1)),
    "Reduce": lambda n: Fraction(int(n > 1)),
    "SendRecv": lambda n: Fraction(int(n > 1)),
}
OP = {"Send": "SendRecv", "Recv": "SendRecv", "AlltoAll": "AllToAll"}


def events(text):
    """The operations of a log, in the order of the lines."""
    found = []
    for line in text.splitlines():
        said = json.loads(line)
        kind = "coll" if "coll_perf" in said else "p2p"
        perf, n = said[f"{kind}_perf"], said["header"]["n_ranks"]
        op = OP.get(perf[kind], perf[kind])
        message = perf[f"{kind}_msg_size_bytes"]
        payload = message * (n if op in PAYLOAD else 1)
        found.append(
            {
                "op": op,
                "group": said["header"]["id"],
                "size": n,
                "seq": perf[f"{kind}_sn"],
                "duration": perf[f"{kind}_exec_time_us"] * 1000,
                "msg": message,
                "payload": payload,
                "bus": round(payload * FACTOR[op](n)),
            }
        )
    return found
