"""Jobs written as lists of calls, and what a planted fault changes in the list of a rank.

A job is a mesh of `rows` x `columns` ranks, and the calls that each of its ranks makes in a
step. Nothing here needs PyTorch.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Operations that end on no member before all have called.
FOR_ALL = ("all_reduce", "all_gather", "all_to_all", "barrier")
_UNIT = 24  # elements: a size that every number of members up to 4, 6 and 8 divides


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call that the members of a group make; ranks of `root` and `peer` count in the group.

    Messages go to, or come from, the member `peer` places further.
    """

    name: str
    op: str
    group: str
    size: int = _UNIT
    dtype: str = "float32"
    root: int = 0
    peer: int = 0


def groups(workload: str, shape: tuple[int, int]) -> dict[str, list[list[int]]]:
    """Return the ranks of all groups of a job: of its mesh's dimensions, then of others."""
    rows, columns = shape
    world = [*range(rows * columns)]
    by_row = [world[row * columns : (row + 1) * columns] for row in range(rows)]
    by_column = [world[column::columns] for column in range(columns)]
    first, second = DIMENSIONS[workload]
    mesh = {first: by_column, second: by_row} if second else {first: [world]}
    half = len(world) // 2
    more = {"ep": [world[:half], world[half:]]} if workload == "sub" else {}
    return {"world": [world], **mesh, **more}


DIMENSIONS = {
    "sub": ("dp", "tp"),
    "moe": ("edp", "ep"),
    "pipeline": ("dp", "pp"),
    "ring": ("dp", ""),
    "ddp": ("dp", ""),
    "fsdp": ("dp", ""),
    "tpdp": ("dp", "tp"),
}


def calls(workload: str, shape: tuple[int, int], rank: int, seed: int) -> list[Call]:
    """Return the calls of a rank in a step; none for jobs that train a model."""
    if workload not in _PROGRAMS:
        return []
    sizes = random.Random(seed).sample(range(_UNIT, 40 * _UNIT, _UNIT), 8)
    return [*_PROGRAMS[workload](sizes, shape, rank)]


def _sub(sizes: Sequence[int], _shape: tuple[int, int], _rank: int) -> list[Call]:
    return [
        Call(name="tp_gather", op="all_gather", group="tp", size=sizes[0]),
        Call(name="tp_reduce", op="all_reduce", group="tp", size=sizes[1]),
        Call(name="ep_dispatch", op="all_to_all", group="ep", size=sizes[2]),
        Call(name="grad_reduce", op="all_reduce", group="dp", size=sizes[3]),
        Call(name="ep_gather", op="all_gather", group="ep", size=sizes[4]),
        Call(name="loss_reduce", op="all_reduce", group="world", size=1),
        Call(name="lr_broadcast", op="broadcast", group="world", size=8),
        Call(name="batch_scatter", op="scatter", group="tp", size=sizes[5]),
        Call(name="norm_gather", op="gather", group="dp", size=sizes[6]),
    ]


def _moe(sizes: Sequence[int], _shape: tuple[int, int], _rank: int) -> list[Call]:
    return [
        Call(name="counts", op="all_to_all", group="ep", dtype="int64"),
        Call(name="dispatch", op="all_to_all", group="ep", size=sizes[0]),
        Call(name="combine", op="all_to_all", group="ep", size=sizes[1]),
        Call(name="expert_grads", op="all_reduce", group="edp", size=sizes[2]),
        Call(name="dense_grads", op="all_reduce", group="world", size=sizes[3]),
        Call(name="loss_reduce", op="all_reduce", group="world", size=1),
    ]


def _pipeline(sizes: Sequence[int], shape: tuple[int, int], rank: int) -> list[Call]:
    stages = shape[1]
    stage = rank % stages
    forward = [
        Call(name="recv_forward", op="recv", group="pp", size=sizes[0], peer=-1),
        Call(name="send_forward", op="send", group="pp", size=sizes[0], peer=1),
    ]
    backward = [
        Call(name="recv_backward", op="recv", group="pp", size=sizes[0], peer=1),
        Call(name="send_backward", op="send", group="pp", size=sizes[0], peer=-1),
    ]
    messages = [call for call in (*forward, *backward) if 0 <= stage + call.peer < stages]
    return [
        *messages,
        Call(name="grad_reduce", op="all_reduce", group="dp", size=sizes[1]),
        Call(name="loss_reduce", op="all_reduce", group="world", size=1),
    ]


def _ring(sizes: Sequence[int], _shape: tuple[int, int], rank: int) -> list[Call]:
    send = Call(name="send", op="send", group="dp", size=sizes[0], peer=1)
    recv = Call(name="recv", op="recv", group="dp", size=sizes[0], peer=-1)
    first, second = (send, recv) if rank % 2 == 0 else (recv, send)
    return [
        first,
        second,
        Call(name="grad_reduce", op="all_reduce", group="dp", size=sizes[1]),
    ]


_PROGRAMS = {"sub": _sub, "moe": _moe, "pipeline": _pipeline, "ring": _ring}


def changed(
    own: Sequence[Call], fault: str, names: Sequence[str], **change: object
) -> list[Call]:
    """Return the calls of a step in which a fault is planted.

    `names` are those of the calls: one, or the two that are swapped.
    """
    calls = [*own]
    place = {call.name: at for at, call in enumerate(calls)}
    if fault == "skip":
        del calls[place[names[0]]]
    elif fault == "extra":
        calls.insert(place[names[0]], calls[place[names[0]]])
    elif fault == "swap":
        one, two = (place[name] for name in names)
        calls[one], calls[two] = calls[two], calls[one]
    elif fault == "change":
        at = place[names[0]]
        calls[at] = replace(calls[at], **change)  # type: ignore[arg-type]
    elif fault == "sends_first":
        calls.sort(key=lambda call: ("send", "recv").index(call.op) if call.peer else 2)
    return calls
