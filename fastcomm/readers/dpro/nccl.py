"""NCCL's topology: who sends to whom in each channel, as every rank's file tells it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.readers.dpro.uniform import read_json, whole

_HOP = re.compile(r"(\d+)\[[0-9a-fA-F]+\] -> (\d+)\[[0-9a-fA-F]+\](?: \[(send|receive)\])?")
RING, TREE = "ring", "tree"
_TREE = re.compile(r"\[(\d+)\] ([-\d/]+)->(\d+)->(-?\d+)\|(-?\d+)->(\d+)->([-\d/]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The place of a rank in the tree of a channel; up is None at the root."""

    up: int | None
    down: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Rings and trees; `ring[channel][sender]` is the receiver.

    `algorithm`, ring or tree, is what the tensors go by.
    """

    ring: Mapping[int, Mapping[int, int]]
    tree: Mapping[int, Mapping[int, Tree]]
    pid_of: Mapping[int, str]
    algorithm: str = RING

    @property
    def rank_of(self) -> dict[str, int]:
        """The rank of each pid."""
        return {pid: rank for rank, pid in self.pid_of.items()}

    def receiver(self, pid: str, channel: int) -> str | None:
        """Who receives what `pid` sends on a channel; None in a tree: it sends to many."""
        if self.algorithm != RING:
            return None
        hop = self.ring.get(channel, {}).get(self.rank_of.get(pid, -1))
        return None if hop is None else self.pid_of.get(hop)


def topology(files: Mapping[str, Path], algorithm: str | None = None) -> Topology:
    """Join the files of all ranks, by pid; by default for the ring, where there is one."""
    ring: dict[int, dict[int, int]] = {}
    tree: dict[int, dict[int, Tree]] = {}
    pid_of: dict[int, str] = {}
    for pid, path in files.items():
        with whole(path):
            rings, trees = _said(read_json(path), path)
            rank = _own_rank(rings, trees, path)
            if rank in pid_of:
                raise TraceFileError(f"{path}: rank {rank} is that of {pid_of[rank]} already")
            pid_of[rank] = pid
            for channel, hops in rings.items():
                for sender, receiver, _ in _hops(hops, path):
                    _agree(ring.setdefault(int(channel), {}), sender, receiver, path)
            for number, own, place in trees:
                tree.setdefault(number, {})[own] = place
    chosen = algorithm or (RING if ring else TREE)
    if not (ring if chosen == RING else tree):
        raise ConfigError(
            f"{next(iter(files.values()))}: no {chosen} there, nor in other ranks; wanted "
            f"--algorithm {RING if ring else TREE}"
        )
    return Topology(ring=ring, tree=tree, pid_of=pid_of, algorithm=chosen)


def _said(said: Any, path: Path) -> tuple[dict[str, str], list[tuple[int, int, Tree]]]:
    """Rings as text by channel, and trees; one of the two has to be there."""
    rings = said.get("RealRing") if isinstance(said, dict) else None
    trees = _trees(said.get("Tree", {}), path) if isinstance(said, dict) else []
    if not isinstance(rings, dict) and not trees:
        raise TraceFileError(
            f"{path}: no RealRing, the rings that NCCL really uses, and no Tree"
        )
    return rings if isinstance(rings, dict) else {}, trees


def _own_rank(rings: Mapping[str, str], trees: list[tuple[int, int, Tree]], path: Path) -> int:
    """The receiver of the first hop that is received, else the sender of the first hop.

    Where no ring has a hop, it is the rank that the trees are told of.
    """
    hops = [hop for channel in rings.values() for hop in _hops(channel, path)]
    if not hops and not trees:
        raise TraceFileError(f"{path}: RealRing has no hop")
    if not hops:
        return trees[0][1]
    return next((to for _, to, way in hops if way == "receive"), hops[0][0])


def _hops(text: str, path: Path) -> list[tuple[int, int, str | None]]:
    found = [_HOP.match(hop.strip()) for hop in str(text).split(",") if hop.strip()]
    if None in found:
        raise TraceFileError(f"{path}: ring {text!r}: wanted 3[3000] -> 0[2000] [receive],...")
    return [(int(hop[1]), int(hop[2]), hop[3]) for hop in found if hop]


def _agree(ring: dict[int, int], sender: int, receiver: int, path: Path) -> None:
    if ring.setdefault(sender, receiver) != receiver:
        raise TraceFileError(
            f"{path}: rank {sender} sends to {receiver}, and to {ring[sender]} in another file"
        )


def _trees(said: Any, path: Path) -> list[tuple[int, int, Tree]]:
    """Channel, rank and place of each tree; all digits of a channel are read."""
    found = []
    for text in said.values() if isinstance(said, dict) else ():
        for channel, down, rank, up, up_again, rank_again, down_again in _TREE.findall(
            str(text)
        ):
            if (down, rank, up) != (down_again, rank_again, up_again):
                raise TraceFileError(f"{path}: the halves of tree {channel} disagree: {text!r}")
            below = tuple(int(each) for each in down.split("/") if int(each) >= 0)
            place = Tree(up=int(up) if int(up) >= 0 else None, down=below)
            found.append((int(channel), int(rank), place))
    return found
