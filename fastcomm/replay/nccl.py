"""NCCL's topology: who sends to whom in each channel, as every rank's file tells it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcomm.errors import TraceFileError
from fastcomm.replay.uniform import read_json

_HOP = re.compile(r"(\d+)\[[0-9a-fA-F]+\] -> (\d+)\[[0-9a-fA-F]+\](?: \[(send|receive)\])?")
_TREE = re.compile(r"\[(\d+)\] ([-\d/]+)->(\d+)->(-?\d+)\|(-?\d+)->(\d+)->([-\d/]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The place of a rank in the tree of a channel; up is None at the root."""

    up: int | None
    down: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Rings and trees; `ring[channel][sender]` is the receiver."""

    ring: Mapping[int, Mapping[int, int]]
    tree: Mapping[int, Mapping[int, Tree]]
    pid_of: Mapping[int, str]

    @property
    def rank_of(self) -> dict[str, int]:
        """The rank of each pid."""
        return {pid: rank for rank, pid in self.pid_of.items()}

    def receiver(self, pid: str, channel: int) -> str | None:
        """Who receives what `pid` sends on a channel."""
        hop = self.ring.get(channel, {}).get(self.rank_of.get(pid, -1))
        return None if hop is None else self.pid_of.get(hop)


def topology(files: Mapping[str, Path]) -> Topology:
    """Join the files of all ranks, by pid."""
    ring: dict[int, dict[int, int]] = {}
    tree: dict[int, dict[int, Tree]] = {}
    pid_of: dict[int, str] = {}
    for pid, path in files.items():
        said = read_json(path)
        if not isinstance(said, dict) or not isinstance(said.get("RealRing"), dict):
            raise TraceFileError(f"{path}: no RealRing: the rings that NCCL really uses")
        rank = _own_rank(said["RealRing"], path)
        if rank in pid_of:
            raise TraceFileError(f"{path}: rank {rank} is that of {pid_of[rank]} already")
        pid_of[rank] = pid
        for channel, hops in said["RealRing"].items():
            for sender, receiver, _ in _hops(hops, path):
                _agree(ring.setdefault(int(channel), {}), sender, receiver, path)
        for channel, own, place in _trees(said.get("Tree", {}), path):
            tree.setdefault(channel, {})[own] = place
    return Topology(ring=ring, tree=tree, pid_of=pid_of)


def _own_rank(rings: Mapping[str, str], path: Path) -> int:
    """The receiver of the first hop that is received, else the sender of the first hop."""
    hops = [hop for channel in rings.values() for hop in _hops(channel, path)]
    if not hops:
        raise TraceFileError(f"{path}: RealRing has no hop")
    return next((to for _, to, way in hops if way == "receive"), hops[0][0])


def _hops(text: str, path: Path) -> list[tuple[int, int, str | None]]:
    found = [_HOP.match(hop.strip()) for hop in text.split(",") if hop.strip()]
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
        for channel, down, rank, up, up_again, rank_again, down_again in _TREE.findall(text):
            if (down, rank, up) != (down_again, rank_again, up_again):
                raise TraceFileError(f"{path}: the halves of tree {channel} disagree: {text!r}")
            below = tuple(int(each) for each in down.split("/") if int(each) >= 0)
            place = Tree(up=int(up) if int(up) >= 0 else None, down=below)
            found.append((int(channel), int(rank), place))
    return found
