"""Read the rings and trees of NCCL that a trial recorded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.readers.dpro.json_files import event_errors, read_json

_HOP = re.compile(r"(\d+)\[[0-9a-fA-F]+\] -> (\d+)\[[0-9a-fA-F]+\](?: \[(send|receive)\])?")
RING, TREE = "ring", "tree"
_TREE = re.compile(r"\[(\d+)\] ([-\d/]+)->(\d+)->(-?\d+)\|(-?\d+)->(\d+)->([-\d/]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Neighbors of a rank in the tree of a channel."""

    up: int | None  # None at the root
    down: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Rings and trees of NCCL."""

    ring: Mapping[int, Mapping[int, int]]  # receiver by channel and sender
    tree: Mapping[int, Mapping[int, Tree]]  # by channel and rank
    pid_of: Mapping[int, str]  # by rank
    algorithm: str = RING  # that communicates the tensors: RING or TREE

    @property
    def rank_of(self) -> dict[str, int]:
        """Rank by pid."""
        return {pid: rank for rank, pid in self.pid_of.items()}

    def receiver(self, pid: str, channel: int) -> str | None:
        """Return the process to which `pid` sends on a channel of a ring, or None."""
        if self.algorithm != RING:
            return None
        hop = self.ring.get(channel, {}).get(self.rank_of.get(pid, -1))
        return None if hop is None else self.pid_of.get(hop)


def read_topology(files: Mapping[str, Path], algorithm: str | None = None) -> Topology:
    """Read the topology of NCCL from the files of all ranks.

    Parameters
    ----------
    files
        ``nccl_rank_graph.json`` by pid.
    algorithm
        RING or TREE; by default the ring if there is one.

    Raises
    ------
    TraceFileError
        If a file has no channels, or the files contradict each other.
    ConfigError
        If no file has the algorithm.

    """
    ring: dict[int, dict[int, int]] = {}
    tree: dict[int, dict[int, Tree]] = {}
    pid_of: dict[int, str] = {}
    for pid, path in files.items():
        with event_errors(path):
            rings, trees = _read_channels(read_json(path), path)
            rank = _rank_of(rings, trees, path)
            if rank in pid_of:
                raise TraceFileError(
                    f"{path}: rank {rank} is also the rank of {pid_of[rank]}. Each directory "
                    "needs the file of its own rank"
                )
            pid_of[rank] = pid
            for channel, hops in rings.items():
                for sender, receiver, _ in _hops(hops, path):
                    _add_hop(ring.setdefault(int(channel), {}), sender, receiver, path)
            for number, own, neighbors in trees:
                tree.setdefault(number, {})[own] = neighbors
    chosen = algorithm or (RING if ring else TREE)
    if not (ring if chosen == RING else tree):
        raise ConfigError(
            f"{next(iter(files.values()))}: no rank has a {chosen}. Use --nccl-algorithm "
            f"{RING if ring else TREE}"
        )
    return Topology(ring=ring, tree=tree, pid_of=pid_of, algorithm=chosen)


def _read_channels(
    document: Any, path: Path
) -> tuple[dict[str, str], list[tuple[int, int, Tree]]]:
    """Return the text of the ring of each channel, and the trees; raise if there is neither."""
    rings = document.get("RealRing") if isinstance(document, dict) else None
    trees = _read_trees(document.get("Tree", {}), path) if isinstance(document, dict) else []
    if not isinstance(rings, dict) and not trees:
        raise TraceFileError(f"{path}: no RealRing, the rings that NCCL uses, and no Tree")
    return rings if isinstance(rings, dict) else {}, trees


def _rank_of(rings: Mapping[str, str], trees: list[tuple[int, int, Tree]], path: Path) -> int:
    """Return the rank of a file.

    This is the receiver of the first hop marked "receive", else the sender of the first hop; in
    files without rings the rank of the trees.
    """
    hops = [hop for channel in rings.values() for hop in _hops(channel, path)]
    if not hops and not trees:
        raise TraceFileError(f"{path}: RealRing has no hop")
    if not hops:
        return trees[0][1]
    return next((to for _, to, mark in hops if mark == "receive"), hops[0][0])


def _hops(text: str, path: Path) -> list[tuple[int, int, str | None]]:
    """Return sender, receiver and mark ("send" or "receive") of each hop of a ring."""
    matches = [_HOP.match(hop.strip()) for hop in str(text).split(",") if hop.strip()]
    if None in matches:
        raise TraceFileError(
            f"{path}: invalid ring {text!r}: expected 3[3000] -> 0[2000] [receive],..."
        )
    return [(int(hop[1]), int(hop[2]), hop[3]) for hop in matches if hop]


def _add_hop(ring: dict[int, int], sender: int, receiver: int, path: Path) -> None:
    """Add a hop to a ring; raise TraceFileError if the sender has another receiver."""
    if ring.setdefault(sender, receiver) != receiver:
        raise TraceFileError(
            f"{path}: rank {sender} sends to {receiver}, and to {ring[sender]} in another file"
        )


def _read_trees(trees: Any, path: Path) -> list[tuple[int, int, Tree]]:
    """Return channel, rank and neighbors of each tree."""
    places = []
    for text in trees.values() if isinstance(trees, dict) else ():
        for channel, down, rank, up, up_again, rank_again, down_again in _TREE.findall(
            str(text)
        ):
            if (down, rank, up) != (down_again, rank_again, up_again):
                raise TraceFileError(f"{path}: the halves of tree {channel} disagree: {text!r}")
            below = tuple(int(child) for child in down.split("/") if int(child) >= 0)
            place = Tree(up=int(up) if int(up) >= 0 else None, down=below)
            places.append((int(channel), int(rank), place))
    return places
