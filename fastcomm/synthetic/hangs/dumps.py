"""Write what the ranks of a made-up job called as dumps of PyTorch's flight recorder.

Keys, order and states are those of format 2.10 (PyTorch 2.9 to 2.15) for NCCL: a batch has an
entry a message, always `scheduled`, and one that closes it. Start times need timing.
"""

import gzip
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import orjson

from fastcomm.synthetic.hangs.faults import PlantedHang
from fastcomm.synthetic.hangs.play import PlayedCall, PlayedTurn

_SECOND = 1_000_000_000
_TIMEOUT_MS = 600_000
_NAMES = (
    "rank_{}.pickle.gz",
    "comm_lib_trace_rank_{}.gz",
    "nccl_trace_rank_{}.gz",
    "_dump_{}.gz",
)
_FILES = {"forward": "model/layers.py", "backward": "model/layers.py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpHabits:
    """How a job's dumps are written; `ring` is the number of entries of a recorder."""

    ring: int = 2_000
    is_json: bool = False
    name: str = _NAMES[0]
    skew_ns: int = 3_000_000  # of the hosts' clocks and of the moments of the dumps


def drawn_habits(seed: int) -> DumpHabits:
    """Return habits that are drawn from a seed."""
    random = Random(f"habits {seed}")
    return DumpHabits(
        ring=random.choice((150, 300, 2_000)),
        is_json=random.choice((True, False, False)),
        name=random.choice(_NAMES),
    )


def write_dumps(
    hang: PlantedHang, folder: Path, habits: DumpHabits, seed: int = 0
) -> list[Path]:
    """Write the dumps of all ranks but those that left none, and stacks; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    random = Random(f"dumps {seed}")
    paths = []
    for rank, turns in hang.turns.items():
        skew = random.randint(-habits.skew_ns, habits.skew_ns)
        moment = hang.moment + random.randint(0, habits.skew_ns)
        if rank in hang.missing:
            continue
        dump = _dump(hang, rank, turns, moment, skew, habits)
        path = folder / habits.name.format(rank)
        if habits.is_json:
            path = path.with_name(path.name.replace(".pickle", "").replace(".gz", ".json.gz"))
        _write(path, dump, (moment + skew) // _SECOND + 1, is_json=habits.is_json)
        paths.append(path)
    for rank, name in hang.stacks.items():
        path = folder / f"stack_{rank}.txt"
        path.write_text(_stack(name), "utf-8")
        paths.append(path)
    return paths


def _write(path: Path, dump: dict[str, Any], second: int, *, is_json: bool) -> None:
    """Write a dump with the second of its moment in gzip's header."""
    text = orjson.dumps(dump, option=orjson.OPT_SORT_KEYS) if is_json else pickle.dumps(dump, 2)
    path.write_bytes(gzip.compress(text, 1, mtime=second))


def _dump(
    hang: PlantedHang,
    rank: int,
    turns: Sequence[PlayedTurn],
    moment: int,
    skew: int,
    habits: DumpHabits,
) -> dict[str, Any]:
    """Return the dump of a rank at a moment of the common clock."""
    groups = {own[rank].name: own[rank] for own in hang.layout.groups.values() if rank in own}
    numbers = {name: number for number, name in enumerate(groups)}
    entries = [*_entries(turns, numbers, hang, moment, skew, habits)]
    for record, entry in enumerate(entries):
        entry["record_id"] = record
    document: dict[str, Any] = {
        "version": "2.10",
        "pg_config": {
            name: {
                "name": name,
                "desc": group.desc,
                "ranks": f"[{', '.join(map(str, group.ranks))}]",
            }
            for name, group in groups.items()
        },
        "comm_lib_version": "2.27.5",
        "pg_status": {str(number): _status(entries, number) for number in numbers.values()},
        "entries": entries[-habits.ring :],
    }
    if habits.is_json:
        document["nccl_comm_state"] = {}
    return document


def _status(entries: Sequence[dict[str, Any]], number: int) -> dict[str, int]:
    own = [entry for entry in entries if entry["pg_id"] == number and not entry["is_p2p"]]
    states = {
        "enqueued": ("scheduled", "started", "completed"),
        "started": ("started", "completed"),
        "completed": ("completed",),
    }
    return {
        f"last_{name}_collective": max(
            (entry["collective_seq_id"] for entry in own if entry["state"] in among), default=-1
        )
        for name, among in states.items()
    }


def _entries(
    turns: Sequence[PlayedTurn],
    numbers: dict[str, int],
    hang: PlantedHang,
    moment: int,
    skew: int,
    habits: DumpHabits,
) -> Iterator[dict[str, Any]]:
    """Yield the entries of the turns that are called until a moment, the oldest first."""
    ops: dict[str, int] = {}
    sequence = dict.fromkeys(numbers, 0)
    for turn in turns:
        if turn.calls[0].created > moment:
            return
        for played in turn.calls:
            name = played.call.group.name
            ops[name] = ops.get(name, 0) + 1
            sequence[name] += not played.call.is_message
            entry = _entry(played, numbers, hang, habits)
            entry["collective_seq_id"] = sequence[name]
            entry["p2p_seq_id"] = turn.batch
            entry["op_id"] = ops[name]
            is_open = turn.turn.is_batch
            _add_times(entry, played, hang, moment, skew, habits, is_scheduled=is_open)
            yield entry
        if turn.turn.is_batch:
            closing = {
                **entry, "profiling_name": "nccl:coalesced",
                "input_sizes": [], "input_dtypes": [], "output_sizes": [], "output_dtypes": [],
            }  # fmt: skip
            begun = max(call.begun for call in turn.calls)
            whole = PlayedCall(
                rank=played.rank, call=played.call, number=0,
                created=played.created, begun=begun, ended=turn.ended,
            )  # fmt: skip
            _add_times(closing, whole, hang, moment, skew, habits, is_scheduled=False)
            yield closing


def _add_times(
    entry: dict[str, Any],
    played: PlayedCall,
    hang: PlantedHang,
    moment: int,
    skew: int,
    habits: DumpHabits,
    *,
    is_scheduled: bool,
) -> None:
    """Add state and times as a recorder has them at a moment."""
    unknown = 0 if habits.is_json else None
    begun = played.begun <= moment and hang.has_timing and not is_scheduled
    ended = played.ended <= moment and not is_scheduled
    entry["state"] = "completed" if ended else "started" if begun else "scheduled"
    entry["time_created_ns"] = played.created + skew
    entry["time_discovered_started_ns"] = played.begun + skew if begun else unknown
    entry["time_discovered_completed_ns"] = played.ended + skew if ended else unknown
    entry["retired"] = ended
    if ended and hang.has_timing:
        entry["duration_ms"] = (played.ended - played.begun) / 1e6


def _entry(
    played: PlayedCall, numbers: dict[str, int], hang: PlantedHang, habits: DumpHabits
) -> dict[str, Any]:
    """Return what a recorder notes of a call, but for numbers, state and times."""
    call = played.call
    name = call.op
    if call.is_message:
        sign = "->" if call.op == "send" else "<-"
        one, two = (call.group.ranks.index(rank) for rank in (played.rank, call.peer))
        name = f"{call.op} {one}{sign}{two}"
    entry: dict[str, Any] = {
        "pg_id": numbers[call.group.name],
        "process_group": [call.group.name, call.group.desc]
        if habits.is_json
        else (call.group.name, call.group.desc),
        "thread_name": "pt_main_thread",
        "thread_id": "139000428969984",
        "profiling_name": f"nccl:{name}",
        "input_sizes": [list(shape) for shape in call.inputs],
        "input_dtypes": [call.dtype] * len(call.inputs),
        "output_sizes": [list(shape) for shape in call.outputs],
        "output_dtypes": [call.dtype] * len(call.outputs),
        "timeout_ms": _TIMEOUT_MS,
        "is_p2p": call.is_message,
    }
    if not habits.is_json:
        entry["frames"] = _frames(call.place)
    return entry


def _frames(place: str) -> list[dict[str, Any]]:
    return [
        {"name": "wrapper", "filename": "torch/distributed/c10d_logger.py", "line": 83},
        {"name": place, "filename": _FILES.get(place, "train.py"), "line": 100 + len(place)},
        {"name": "train", "filename": "train.py", "line": 410},
        {"name": "<module>", "filename": "pretrain.py", "line": 91},
    ]


def _stack(name: str) -> str:
    """Return a stack as Python's faulthandler writes it."""
    file = (
        "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
        if name == "new_group"
        else "train.py"
    )
    return (
        "Thread 0x00007f8a1b2c3d4e (most recent call first):\n"
        f'  File "{file}", line 120 in {name}\n'
        '  File "train.py", line 410 in train\n'
        '  File "pretrain.py", line 91 in <module>\n'
    )
