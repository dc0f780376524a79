"""Reproduce the schedules of the original dispatch simulator exactly, with its defects."""

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
    assigned_stages,
    busiest,
    deepep_counts,
    end_loads,
    pad,
)
from fastcomm.dispatch.traffic import Traffic, largest_sum, sum_by_node
from fastcomm.units import parse_bandwidth
from fastcomm_kernels.arrays import Matrix


def original_bandwidth(value: object, where: str = "") -> float:
    """Parse a bandwidth into bytes/s; a number without a unit counts GiB/s.

    Raises ConfigError, which begins with `where`, for anything else.
    """
    text = str(value).strip()
    is_bare = text[-1:].isdecimal() or text.endswith(".")
    return parse_bandwidth(f"{text}GiB/s" if is_bare else text, where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Size of a token and bandwidths in the original's units, without efficiencies."""

    token_kb: float  # KiB
    inter_kb_per_s: float  # between nodes
    intra_kb_per_s: float  # inside a node

    @classmethod
    def of(cls, terms: Terms) -> Self:
        """Convert the terms of a simulation."""
        return cls(
            token_kb=terms.token_bytes / 1024,
            inter_kb_per_s=terms.links.inter_bytes_per_s / 1024,
            intra_kb_per_s=terms.links.intra_bytes_per_s / 1024,
        )

    def inter_s(self, count: float) -> float:
        """Return the time of `count` tokens on a NIC, in s."""
        return (count * self.token_kb) / self.inter_kb_per_s

    def intra_s(self, count: float) -> float:
        """Return the time of `count` tokens inside a node, in s."""
        return (count * self.token_kb) / self.intra_kb_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalDeepEP:
    """Result of the original's DeepEP for one layer."""

    counts: Matrix  # tokens, GPU x (inter_tx, inter_rx, intra_tx, intra_rx)
    inter_s: float
    intra_s: float
    inter_kb: float

    @property
    def total_s(self) -> float:
        """Time of the slower kind of link, as both kinds transfer at the same time."""
        return max(self.inter_s, self.intra_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalFast:
    """Result of the original's FAST for one layer, with intermediate results in tokens."""

    remote: Matrix  # traffic between nodes, GPU x GPU
    raw_send: Matrix  # tokens that each GPU sends
    servers: Matrix  # tokens per GPU between nodes, node x node
    padded: Matrix  # `servers` with equal sums of rows and columns
    permutations: NDArray[np.int64]  # destination, stage x node
    weights: Matrix  # tokens of each stage
    remaining: Matrix  # padding before the last stage with traffic, node x node
    last: int  # last stage with traffic
    last_max: int  # its largest cell without padding
    max_balance: int
    balance_s: float
    inter_s: float
    redist_s: float
    inter_kb: float

    @property
    def total_s(self) -> float:
        """Sum of the three phases, added in the order of the original."""
        return (self.balance_s + self.inter_s) + self.redist_s


def deepep(traffic: Traffic, links: Links) -> OriginalDeepEP:
    """Time one layer by the original simulator's DeepEP.

    It forwards every copy of a token, even several to the same GPU.

    `traffic` has the tokens of a layer, `links` the seconds per token of each kind of link.
    """
    counts = deepep_counts(traffic, traffic.copies)
    return OriginalDeepEP(
        counts=counts,
        inter_s=links.inter_s(int(counts[:, :2].max(initial=0))),
        intra_s=links.intra_s(int(counts[:, 2:].max(initial=0))),
        inter_kb=int(counts[:, 0].sum()) * links.token_kb,
    )


def fast(traffic: Traffic, links: Links) -> OriginalFast:
    """Time one layer by the original simulator's FAST.

    It rounds the traffic between two nodes down to whole tokens per GPU, and redistributes half
    of the last stage.

    `traffic` has the tokens of a layer, `links` the seconds per token of each kind of link.
    Raises NoAnswerError for layers on which the original fails.
    """
    remote, width = np.where(traffic.own_node, 0, traffic.copies), traffic.width
    raw = traffic.copies.sum(axis=1)
    servers = sum_by_node(remote, width) // width
    balance = np.abs(raw.reshape(-1, width) - servers.sum(axis=1)[:, None]).max(initial=0)
    load = largest_sum(servers)
    padded = pad(servers)
    permutations, weights = assigned_stages(padded)
    if not len(weights):
        raise NoAnswerError(
            "fast-compat: in this layer no node sends a whole token per GPU to another one, "
            "and the original fails with an IndexError. Use `fast`"
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
    """Find the last stage that sends more than padding.

    `permutations` (targets) and `weights` (tokens) have a row per stage, and `padding` the
    tokens of padding from each node to each node.

    Returns the index of the stage, the most tokens that a node sends in it without padding, and
    the padding in it and the stages before.
    """
    remaining, rows = padding.copy(), np.arange(len(padding))
    last = 0
    for stage in range(len(weights) - 1, -1, -1):
        if np.any(weights[stage] > remaining[rows, permutations[stage]]):
            last = stage
            break
        remaining[rows, permutations[stage]] -= weights[stage]
    traffic = weights[last] - remaining[rows, permutations[last]]
    return last, max(0, int(traffic.max())), remaining


def _deepep_timing(traffic: Traffic, terms: Terms) -> Timing:
    """Simulate a layer with the original's DeepEP."""
    result = deepep(traffic, Links.of(terms))
    unit = np.repeat([1 / terms.links.inter_bytes_per_s, 1 / terms.links.intra_bytes_per_s], 2)
    return Timing(
        seconds=result.total_s,
        phases={"inter": result.inter_s, "intra": result.intra_s},
        inter_tokens=int(result.counts[:, 0].sum()),
        loads=result.counts,
        bottleneck=busiest(result.counts, result.counts * unit),
    )


def _fast_timing(traffic: Traffic, terms: Terms) -> Timing:
    """Simulate a layer with the original's FAST; raise NoAnswerError if it fails."""
    result = fast(traffic, Links.of(terms))
    ends = end_loads(result.remote, np.where(traffic.own_node, traffic.demand("copies"), 0))
    even = np.repeat(
        np.stack([result.servers.sum(axis=1), result.servers.sum(axis=0)], 1), traffic.width, 0
    )
    loads = np.concatenate([even, ends[:, 2:]], axis=1)
    return Timing(
        seconds=result.total_s,
        phases={name: getattr(result, f"{name}_s") for name in ("balance", "inter", "redist")},
        inter_tokens=int(result.remote.sum()),
        loads=loads,
        bottleneck=busiest(loads[:, :2], loads[:, :2].astype(np.float64)),
    )


STRATEGIES = {
    "deepep-compat": Strategy(run=_deepep_timing, bound="proxy", copies_only=True),
    "fast-compat": Strategy(run=_fast_timing, bound="relayed", copies_only=True),
    **schedules.STRATEGIES,
}
