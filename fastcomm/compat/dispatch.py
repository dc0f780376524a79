"""The schedules of the original dispatch simulator, reproduced exactly, with its defects."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.dispatch import schedules
from fastcomm.dispatch.schedules import (
    NoAnswerError,
    Strategy,
    Terms,
    Timing,
    busiest,
    deepep_counts,
    end_loads,
)
from fastcomm.dispatch.traffic import (
    Matrix,
    Traffic,
    assigned_stages,
    largest_sum,
    pad,
    sum_by_node,
)
from fastcomm.units import parse_bandwidth


def original_bandwidth(value: object, where: str = "") -> float:
    """Return the bytes per second of a bandwidth; a number without a unit counts GiB/s."""
    text = str(value).strip()
    is_bare = text[-1:].isdecimal() or text.endswith(".")
    return parse_bandwidth(f"{text}GiB/s" if is_bare else text, where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """A token and the bandwidths in the original's units; it knows no efficiencies."""

    token_kb: float
    inter_kb_per_s: float
    intra_kb_per_s: float

    @classmethod
    def of(cls, terms: Terms) -> Self:
        """Convert the terms of a simulation."""
        return cls(
            token_kb=terms.token_bytes / 1024,
            inter_kb_per_s=terms.links.inter_bytes_per_s / 1024,
            intra_kb_per_s=terms.links.intra_bytes_per_s / 1024,
        )

    def inter_s(self, count: float) -> float:
        """Return the time of `count` tokens on a NIC."""
        return (count * self.token_kb) / self.inter_kb_per_s

    def intra_s(self, count: float) -> float:
        """Return the time of `count` tokens inside a node."""
        return (count * self.token_kb) / self.intra_kb_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalDeepEP:
    """The original's DeepEP on one layer: four counts a GPU, in tokens."""

    counts: Matrix  # GPU by (inter_tx, inter_rx, intra_tx, intra_rx)
    inter_s: float
    intra_s: float
    inter_kb: float

    @property
    def total_s(self) -> float:
        """Time of the slower kind of link: both work at the same time."""
        return max(self.inter_s, self.intra_s)

    @property
    def max_inter(self) -> int:
        """The largest count of a NIC."""
        return int(self.counts[:, :2].max(initial=0))

    @property
    def max_intra(self) -> int:
        """The largest count inside a node."""
        return int(self.counts[:, 2:].max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalFast:
    """The original's FAST on one layer, with its intermediate results."""

    remote: Matrix
    raw_send: Matrix
    servers: Matrix
    padded: Matrix
    permutations: NDArray[np.int64]  # stage by node: where the node sends
    weights: Matrix
    remaining: Matrix  # padding left when the last stage with traffic is found
    last: int
    last_max: int
    max_balance: int
    balance_s: float
    inter_s: float
    redist_s: float
    inter_kb: float

    @property
    def total_s(self) -> float:
        """Sum of the three phases, added from the left."""
        return (self.balance_s + self.inter_s) + self.redist_s

    @property
    def max_load(self) -> int:
        """The largest row or column sum of the server matrix."""
        return largest_sum(self.servers)


def deepep(traffic: Traffic, links: Links) -> OriginalDeepEP:
    """Run the original's DeepEP: it forwards every copy, two to one GPU as well."""
    counts = deepep_counts(traffic, traffic.copies)
    return OriginalDeepEP(
        counts=counts,
        inter_s=links.inter_s(int(counts[:, :2].max(initial=0))),
        intra_s=links.intra_s(int(counts[:, 2:].max(initial=0))),
        inter_kb=int(counts[:, 0].sum()) * links.token_kb,
    )


def fast(traffic: Traffic, links: Links) -> OriginalFast:
    """Run the original's FAST: it floors each block, and half of the last stage moves on."""
    remote, width = np.where(traffic.own_node, 0, traffic.copies), traffic.width
    raw = traffic.copies.sum(axis=1)
    servers = sum_by_node(remote, width) // width
    balance = np.abs(raw.reshape(-1, width) - servers.sum(axis=1)[:, None]).max(initial=0)
    load = largest_sum(servers)
    padded = pad(servers)
    permutations, weights = assigned_stages(padded)
    if not len(weights):
        raise NoAnswerError(
            "fast-compat: no node sends another a whole token a GPU, and on such a layer the "
            "original ends in an IndexError; `fast` has an answer"
        )
    last, last_max, remaining = _last_stage(permutations, weights, padded - servers)
    return OriginalFast(
        remote=remote,
        raw_send=raw,
        servers=servers,
        padded=padded,
        permutations=permutations,
        weights=weights,
        remaining=remaining,
        last=last,
        last_max=last_max,
        max_balance=int(balance),
        balance_s=links.intra_s(int(balance)),
        inter_s=links.inter_s(load),
        redist_s=links.intra_s(last_max / 2),
        inter_kb=int(remote.sum()) * links.token_kb,
    )


def _last_stage(
    permutations: NDArray[np.int64], weights: Matrix, padding: Matrix
) -> tuple[int, int, Matrix]:
    """Return the last stage with more than padding, its largest cell, the padding left."""
    remaining, rows = padding.copy(), np.arange(len(padding))
    last = 0
    for stage in range(len(weights) - 1, -1, -1):
        if np.any(weights[stage] > remaining[rows, permutations[stage]]):
            last = stage
            break
        remaining[rows, permutations[stage]] -= weights[stage]
    real = weights[last] - remaining[rows, permutations[last]]
    return last, max(0, int(real.max())), remaining


def _deepep_timing(traffic: Traffic, terms: Terms) -> Timing:
    """Time a layer by the original's DeepEP."""
    found = deepep(traffic, Links.of(terms))
    unit = np.repeat([1 / terms.links.inter_bytes_per_s, 1 / terms.links.intra_bytes_per_s], 2)
    return Timing(
        seconds=found.total_s,
        phases={"inter": found.inter_s, "intra": found.intra_s},
        inter_tokens=int(found.counts[:, 0].sum()),
        loads=found.counts,
        bottleneck=busiest(found.counts, found.counts * unit),
    )


def _fast_timing(traffic: Traffic, terms: Terms) -> Timing:
    """Time a layer by the original's FAST; NoAnswerError where it fails."""
    found = fast(traffic, Links.of(terms))
    ends = end_loads(found.remote, np.where(traffic.own_node, traffic.demand("copies"), 0))
    even = np.repeat(
        np.stack([found.servers.sum(axis=1), found.servers.sum(axis=0)], 1), traffic.width, 0
    )
    loads = np.concatenate([even, ends[:, 2:]], axis=1)
    return Timing(
        seconds=found.total_s,
        phases={
            "balance": found.balance_s,
            "inter": found.inter_s,
            "redist": found.redist_s,
        },
        inter_tokens=int(found.remote.sum()),
        loads=loads,
        bottleneck=busiest(loads[:, :2], loads[:, :2].astype(np.float64)),
    )


STRATEGIES = {
    "deepep-compat": Strategy(run=_deepep_timing, bound="proxy", copies_only=True),
    "fast-compat": Strategy(run=_fast_timing, bound="relayed", copies_only=True),
    **schedules.STRATEGIES,
}
