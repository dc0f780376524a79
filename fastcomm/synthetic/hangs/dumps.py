"""Write what the ranks of a made-up job called as dumps of PyTorch's flight recorder.

Keys, order and states are those of format 2.10 (PyTorch 2.9 to 2.15) for NCCL: a batch has an
entry a message, always `scheduled`, and one that closes it. Start times need timing.
"""

import gzip
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import orjson

from fastcomm.synthetic.hangs.faults import PlantedHang
from fastcomm.synthetic.hangs.play import PlayedCall

_SECOND = 1_000_000_000
_TIMEOUT_MS = 600_000
_THREAD = 139_000_428_969_984
_NAMES = (
    "rank_{}.pickle.gz",
    "comm_lib_trace_rank_{}.gz",
    "nccl_trace_rank_{}.gz",
    "_dump_{}.gz",
)
_CLOSING = {
    "profiling_name": "nccl:coalesced",
    **dict.fromkeys(("input_sizes", "input_dtypes", "output_sizes", "output_dtypes"), ()),
}
_FILES = {"forward": "model/layers.py", "backward": "model/layers.py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpForm:
    """How the dumps of a job are written; `ring` is the number of entries of a recorder."""

    ring: int = 2_000
    is_json: bool = False
    name: str = _NAMES[0]
    has_threads: bool = True  # whether entries tell their threads, as those since 2.8 do
    skew_ns: int = 3_000_000  # of the hosts' clocks and of the moments of the dumps


def drawn_form(seed: int) -> DumpForm:
    """Return a form that is drawn from a seed."""
    random = Random(f"form {seed}")
    return DumpForm(
        ring=random.choice((150, 300, 2_000)),
        is_json=random.choice((True, False, False)),
        name=random.choice(_NAMES),
    )


def write_dumps(hang: PlantedHang, folder: Path, form: DumpForm, seed: int = 0) -> list[Path]:
    """Write the dumps of all ranks but those that left none, and stacks; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    random = Random(f"dumps {seed}")
    paths = []
    for rank in hang.turns:
        skew = random.randint(-form.skew_ns, form.skew_ns)
        moment = hang.moment + random.randint(0, form.skew_ns)
        if rank not in hang.missing:
            recorder = _Recorder(hang, form, rank, moment, skew)
            paths.append(recorder.write(folder))
    for rank, name in hang.stacks.items():
        path = folder / f"stack_{rank}.txt"
        path.write_text(_stack(name), "utf-8")
        os.utime(path, ns=(hang.moment, hang.moment))
        paths.append(path)
    return paths


def recorded(hang: PlantedHang, form: DumpForm, rank: int) -> dict[str, Any]:
    """Return the content of the dump of a rank, as its recorder has it at the hang's moment."""
    return _Recorder(hang, form, rank, hang.moment, 0).dump()


@dataclass(frozen=True, slots=True)
class _Recorder:
    """The recorder of a rank at a moment of the common clock; its host's is ahead by `skew`."""

    hang: PlantedHang
    form: DumpForm
    rank: int
    moment: int
    skew: int

    def write(self, folder: Path) -> Path:
        """Write the dump with the second of its moment in gzip's header."""
        name, dump = self.form.name.format(self.rank), self.dump()
        if self.form.is_json:
            name = name.replace(".pickle", "").replace(".gz", ".json.gz")
            text = orjson.dumps(dump, option=orjson.OPT_SORT_KEYS)
        else:
            text = pickle.dumps(dump, 2)
        path = folder / name
        second = (self.moment + self.skew) // _SECOND
        path.write_bytes(gzip.compress(text, 1, mtime=second))
        return path

    def dump(self) -> dict[str, Any]:
        """Return the content of the dump."""
        groups = self.hang.layout.groups.values()
        own = {
            group[self.rank].name: group[self.rank] for group in groups if self.rank in group
        }
        numbers = {name: number for number, name in enumerate(own)}
        entries = [*self._entries(numbers)]
        for record, entry in enumerate(entries):
            entry["record_id"] = record
        document: dict[str, Any] = {
            "version": "2.10",
            "pg_config": {
                name: {"name": name, "desc": group.desc, "ranks": str([*group.ranks])}
                for name, group in own.items()
            },
            "comm_lib_version": "2.27.5",
            "pg_status": {str(number): _status(entries, number) for number in numbers.values()},
            "entries": entries[-self.form.ring :],
        }
        return {**document, "nccl_comm_state": {}} if self.form.is_json else document

    def _entries(self, numbers: dict[str, int]) -> Iterator[dict[str, Any]]:
        """Yield the entries of the turns that are called until the moment, the oldest first."""
        ops = dict.fromkeys(numbers, 0)
        sequence = dict.fromkeys(numbers, 0)
        for turn in self.hang.turns[self.rank]:
            if turn.calls[0].created > self.moment:
                return
            for played in turn.calls:
                name = played.call.group.name
                ops[name] += 1
                sequence[name] += not played.call.is_message
                entry = {
                    **self._call(played, numbers),
                    "collective_seq_id": sequence[name],
                    "p2p_seq_id": turn.batch,
                    "op_id": ops[name],
                }
                yield {**entry, **self._times(played, is_member=turn.turn.is_batch)}
            if turn.turn.is_batch:
                last = replace(
                    played, begun=max(call.begun for call in turn.calls), ended=turn.ended
                )
                yield {**entry, **_CLOSING, **self._times(last, is_member=False)}

    def _times(self, played: PlayedCall, *, is_member: bool) -> dict[str, Any]:
        """Return state and times as a recorder has them; a batch's members have none."""
        unknown = 0 if self.form.is_json else None
        begun = played.begun <= self.moment and self.hang.has_timing and not is_member
        ended = played.ended <= self.moment and not is_member
        if played.call.library == "gloo":  # it knows no more than that a call is over
            begun, is_over, ended = False, ended, False
        else:
            is_over = ended
        times = {
            "state": "completed" if ended else "started" if begun else "scheduled",
            "time_created_ns": played.created + self.skew,
            "time_discovered_started_ns": played.begun + self.skew if begun else unknown,
            "time_discovered_completed_ns": played.ended + self.skew if ended else unknown,
            "retired": is_over,
        }
        has_length = ended and self.hang.has_timing
        length = {"duration_ms": (played.ended - played.begun) / 1e6}
        return {**times, **length} if has_length else times

    def _call(self, played: PlayedCall, numbers: dict[str, int]) -> dict[str, Any]:
        """Return what a recorder notes of a call, but for counters, state and times."""
        call = played.call
        name = call.op
        if call.is_message:
            sign = "->" if call.op == "send" else "<-"
            one, two = (call.group.ranks.index(rank) for rank in (played.rank, call.peer))
            name = f"{call.op} {one}{sign}{two}"
        entry: dict[str, Any] = {
            "pg_id": numbers[call.group.name],
            "process_group": (call.group.name, call.group.desc),
            "thread_name": "pt_main_thread",
            "thread_id": str(_THREAD + call.thread),
            "profiling_name": f"{call.library}:{name}",
            "input_sizes": [list(sizes) for sizes in call.inputs],
            "input_dtypes": [call.dtype] * len(call.inputs),
            "output_sizes": [list(sizes) for sizes in call.outputs],
            "output_dtypes": [call.dtype] * len(call.outputs),
            "timeout_ms": _TIMEOUT_MS,
            "is_p2p": call.is_message,
        }
        if not self.form.has_threads:
            del entry["thread_name"], entry["thread_id"]
        return entry if self.form.is_json else {**entry, "frames": _frames(call.place)}


def _status(entries: Sequence[dict[str, Any]], number: int) -> dict[str, int]:
    """Return the last numbers of a group's collectives, as far as they are."""
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


@lru_cache(maxsize=64)
def _frames(place: str) -> list[dict[str, Any]]:
    """Return a stack: always the same frames, which a pickle then refers to."""
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
