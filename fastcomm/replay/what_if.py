"""What if: durations changed by name, tensor, link, device, rank or category, and replayed.

Of the changes that fit a node the most exact wins: long name, that without suffix, that
without rank as well; tensor, link, device, rank, category; DELAY_ALL_CMP or DELAY_ALL_COMM;
DELAY_ALL.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastcomm.errors import ConfigError
from fastcomm.graph.edits import DurationChange, read_changes
from fastcomm.readers.dpro.names import COMMUNICATION, COMPUTATION, long_name
from fastcomm.replay.replayer import Replayed, Replayer
from fastcomm.replay.result import Removed, ReplayPath
from fastcomm_kernels.arrays import Floats

_ALL = "DELAY_ALL"


def changed(made: Replayer, path: Path) -> Replayed:
    """Replay with the changes of a JSON file."""
    return made.run(durations(made, read_changes(path)))


def durations(made: Replayer, changes: Mapping[str, DurationChange]) -> Floats:
    """The durations with all changes; a key that fits no node is an error."""
    out = made.measured.avg.copy()
    used: set[str] = set()
    links = _links(made)
    for i in range(len(out)):
        for key in _keys(made, i, links.get(i, ())):
            change = changes.get(key)
            if change is not None:
                used.add(key)
                out[i] = change.applied(out[i])
                break
    if unused := [key for key in changes if key not in used and not key.startswith(_ALL)]:
        raise ConfigError(
            f"{unused[0]!r} fits no operation, or a more exact key goes before it; wanted a "
            "long name, tensor:, link:, device:, rank:, category:, or DELAY_ALL[_CMP|_COMM]"
        )
    return out


def _links(made: Replayer) -> dict[int, tuple[str, ...]]:
    """The links of each transfer: from which rank to which, or of which group and its kind."""
    found: dict[int, tuple[str, ...]] = {}
    pairs = zip(made.graph.source.tolist(), made.graph.target.tolist(), strict=True)
    for a, b in pairs:
        if made.names[a].sub_op == "SEND" and made.names[b].sub_op == "RECV":
            found[a] = found[b] = (f"link:{made.names[a].pid}->{made.names[b].pid}",)
    for i, name in enumerate(made.names):
        if name.op_cat == "Comm" and i not in found and name.op_name.count("-") > 1:
            group = name.op_name.rpartition("-")[0]
            found[i] = (f"link:{group}", f"link:{group.partition('-')[0]}")
    return found


def _keys(made: Replayer, i: int, links: tuple[str, ...]) -> tuple[str, ...]:
    """All keys that fit a node, the most exact first."""
    cat = made.categories[i]
    name = made.names[i]
    kind = ""
    if cat in COMPUTATION:
        kind = "DELAY_ALL_CMP"
    elif cat in COMMUNICATION:
        kind = "DELAY_ALL_COMM"
    tensors = tuple(f"tensor:{tensor}" for tensor in name.tensors)
    device = f"device:{made.devices[made.operations.device[i]]}"
    exact = (made.graph.nodes[i], long_name(name.pid, name.standard), name.standard)
    own = (*exact, *tensors, *links, device)
    return (*own, f"rank:{name.pid}", f"category:{cat}", kind, _ALL)


def bottlenecks(
    replayed: Replayed, path: ReplayPath, *, workers: int = 1, by_name: bool = False
) -> tuple[Removed, ...]:
    """Every node of the critical path that takes time, by what its absence would save.

    With `by_name` all nodes that have a long name, whatever their suffix, count as one.
    """
    on_path = [node for node in dict.fromkeys(path.nodes) if replayed.duration[node] > 0]
    names = replayed.replayer.graph.nodes
    alone = {names[node]: [node] for node in on_path}
    candidates = _by_name(replayed, on_path) if by_name else alone

    def without(name: str) -> Removed:
        duration = replayed.duration.copy()
        duration[candidates[name]] = 0.0
        other = replayed.replayer.run(duration)
        return Removed(node=name, saved_ns=replayed.mean_ns - other.mean_ns)

    # The kernels hold no lock: threads replay at the same time.
    with ThreadPoolExecutor(workers) as pool:
        saved = list(pool.map(without, candidates))
    return tuple(sorted(saved, key=lambda each: -each.saved_ns))


def _by_name(replayed: Replayed, nodes: Sequence[int]) -> dict[str, list[int]]:
    """All nodes of the same names as these, by name."""
    names = replayed.replayer.names
    wanted = {(names[node].pid, names[node].standard) for node in nodes}
    found: dict[str, list[int]] = {}
    for node, name in enumerate(names):
        if (name.pid, name.standard) in wanted:
            found.setdefault(long_name(name.pid, name.standard), []).append(node)
    return found
