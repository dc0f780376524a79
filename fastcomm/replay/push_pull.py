"""Edges of tensors that go through servers: pushed, summed, and pulled by every worker.

A server begins with the push that comes first and adds the others as they come; which that is,
the trace tells by the mean end of each worker's push.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fastcomm.replay.names import REQUESTS, Name, long_name
from fastcomm.replay.uniform import UniformTrace

Edge = tuple[str, str]

_NUMBER = re.compile(r"\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Who pushes what where, and what servers do, as the keys of a trace tell it.

    Both are by tensor and part: `pushed` the pairs (worker, server), the earliest push first,
    `done` the names of what a server does, in order.
    """

    pushed: Mapping[tuple[int, str], tuple[tuple[str, str], ...]]
    done: Mapping[tuple[int, str], tuple[str, ...]]

    @classmethod
    def of(cls, trace: UniformTrace) -> "Servers":
        """Collect them."""
        ends: dict[tuple[int, str], list[tuple[float, str, str]]] = {}
        done: dict[tuple[int, str], list[tuple[int, str]]] = {}
        size = len(trace.keys)
        totals = np.bincount(trace.key, trace.start - trace.start.min() + trace.dur, size)
        means = totals / np.maximum(np.bincount(trace.key, minlength=size), 1)
        for key, text in enumerate(trace.keys):
            name = Name.of(text)
            if name.sub_op == REQUESTS[0]:
                worker, server, part = (name.suffix or "").split("::")
                pair = (float(means[key]), worker, server)
                ends.setdefault((name.tensors[0], part), []).append(pair)
            elif name.sub_op in {"COPY_FIRST", "SUM", "COPY_MERGED"}:
                part = (name.suffix or "").rpartition("~PART")[2]
                done.setdefault((name.tensors[0], part), []).append((_place(name), text))
        return cls(
            pushed={
                key: tuple((worker, server) for _, worker, server in sorted(each))
                for key, each in ends.items()
            },
            done={key: tuple(text for _, text in sorted(each)) for key, each in done.items()},
        )

    @property
    def tensors(self) -> tuple[int, ...]:
        """All tensors that are pushed."""
        return tuple(sorted({tensor for tensor, _ in self.pushed}))

    def edges(
        self, pid: str, tensor: int, befores: Sequence[str], afters: Sequence[str]
    ) -> Iterator[Edge]:
        """What the worker of a rank does with a tensor between its backward op and updates."""
        found = _NUMBER.search(pid.partition(".")[0])
        own = f"worker_{int(found[0])}" if found else ""
        for (sent, part), pairs in self.pushed.items():
            for place, (worker, server) in enumerate(pairs if sent == tensor else ()):
                if worker != own:
                    continue
                chain = [_request(worker, server, tensor, part, each) for each in REQUESTS]
                yield from ((before, chain[0]) for before in befores)
                yield from pairwise(chain)
                yield from ((chain[-1], after) for after in afters)
                yield from self._served(self.done.get((tensor, part), ()), place, chain)

    def _served(self, done: Sequence[str], place: int, chain: Sequence[str]) -> Iterator[Edge]:
        """What a server does with it: the push feeds its place, the whole comes back."""
        if not done:
            return
        yield chain[0], done[min(place, len(done) - 1)]
        yield from pairwise(done)
        yield done[-1], chain[-1]


def _place(name: Name) -> int:
    """Where an operation stands among those of a server: copy, sums, copy."""
    if name.sub_op == "SUM":
        return 1 + int((name.suffix or "").split("::")[1])
    return 0 if name.sub_op == "COPY_FIRST" else 1 << 30


def _request(worker: str, server: str, tensor: int, part: str, sub_op: str) -> str:
    """The long name of one request or its answer; what an answer's link is the sender's."""
    ends = (worker, server) if sub_op.endswith("REQ") else (server, worker)
    link = "::".join(ends)
    return long_name(link, f"Comm.{tensor}.{sub_op}", f"{link}::{part}")
