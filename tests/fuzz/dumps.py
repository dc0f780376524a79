"""Dumps of a hung job and what lies beside them, damaged, and pickles that mean harm."""

import gzip
import io
import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

from builders.hang_files import (
    RAS_TEXT,
    STACK,
    WATCHDOG,
    communicator,
    dump_of,
    groups_of,
    ras_json,
    write_dumps,
)
from rich.console import Console

from fastcomm.formats.flight_recorder import arguments, frames, read
from fastcomm.hang.analysis import diagnose_hang
from fastcomm.hang.page import page
from fastcomm.hang.tables import show
from fastcomm.show.pages import html
from fuzz.mutate import changed_bytes, mutated

WORLD = 8
_MARKER = "executed"
_SERVER = "PARTIAL DATA: 7/8 workers responded\n=== Rank {}: http://node0:1/handler ===\n"


def pickled(path: Path, steps: int = 4) -> None:
    """Write a dump as a pickle, maybe packed, with a stack."""
    dump = dump_of(0, WORLD, steps)
    for call in dump["entries"]:
        call["process_group"] = tuple(call["process_group"])
        call["frames"] = [{"name": "step", "filename": "train.py", "line": 7}]
    text = pickle.dumps(dump, 2)
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)


def as_json(path: Path) -> None:
    """Write a dump as JSON."""
    path.write_text(json.dumps(dump_of(0, WORLD, 4)))


def job(path: Path) -> None:
    """Write a hung job with everything that may lie beside its dumps."""
    write_dumps(path, WORLD, absent=5, without=[5])
    pickled(path / "rank_0.pickle")
    (path / "rank_5.log").write_text(WATCHDOG + "RuntimeError: Connection closed by peer\n")
    (path / "stack_3.txt").write_text(STACK)
    (path / "stacks_1.txt").write_text(_SERVER.format(2) + STACK + _SERVER.format(3) + STACK)
    (path / "launcher.log").write_text(
        "launch.py: rank 5 (local_rank 5) was killed by signal 9"
    )
    (path / "slurm.out").write_text(
        "srun: error: node[03-04]: tasks 5,7-8: Killed\n"
        "Out of memory: Killed process 1005 (x)\n"
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some may be killed.\n"
        "  rank      : 5 (local_rank: 5)\n  exitcode  : -9 (pid: 1005)\n"
        "failed (exitcode: -9) local_rank: 5 (pid: 1005) of binary: python\n"
    )
    (path / "pyspy_5.txt").write_text("Process 1005: python train.py\n")
    (path / "ras.txt").write_text(RAS_TEXT)
    parts = enumerate(groups_of(WORLD).values())
    parts_ = (communicator(f"0x{at}", ranks, 4, gone={5: "dead"}) for at, (_, ranks) in parts)
    (path / "ras.json").write_text(ras_json(*parts_))


def recorded(case: Path) -> Callable[[Path], object]:
    """Return what copies a recorded job without its truth."""
    ignored = shutil.ignore_patterns("truth.json")
    return lambda path: shutil.copytree(case, path, ignore=ignored)


def one_dump(path: Path) -> None:
    """Read a dump, its arguments and its stacks; nothing of it may run."""
    try:
        dump = read(path)
        for row in {0, len(dump.calls) - 1} if len(dump.calls) else ():
            arguments(path, row)
            frames(path, row)
    finally:
        _assert_nothing_ran(path)


def _assert_nothing_ran(path: Path) -> None:
    if (path.parent / _MARKER).exists():
        raise RuntimeError("a pickle was executed")


def hang(path: Path) -> None:
    """As `fastcomm hang`, as text, JSON and page."""
    try:
        result = diagnose_hang(path, keep_going=True)
    finally:
        _assert_nothing_ran(path)
    json.dumps(result.to_dict())
    show(result, Console(file=io.StringIO()))
    html(page(result, str(path)))


def harmed(path: Path, rng: Random) -> None:
    """Put opcodes that mean harm into one of the pickles, or damage a file."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) or [path]
    file = rng.choice(files)
    if rng.random() < 0.3:
        mutated(path, rng)
        return
    text = file.read_bytes()
    is_packed = text[:2] == b"\x1f\x8b"
    text = gzip.decompress(text) if is_packed else text
    for _ in range(rng.choice([1, 1, 2, 4])):
        text = _harmed(text, path.parent / _MARKER, rng)
    file.write_bytes(gzip.compress(text, 1) if is_packed else text)


def _harmed(text: bytes, marker: Path, rng: Random) -> bytes:
    """Put one piece in, take one out, or change bytes."""
    kind = rng.randrange(4)
    if kind == 0:
        return changed_bytes(text, rng)
    at = rng.choice([2, len(text) - 1, rng.randrange(len(text) + 1)])
    piece = rng.choice(_pieces(marker, rng))
    if kind == 1:  # a pickle that is this alone
        return b"\x80\x02" + piece + b"."
    return text[:at] + piece + text[at if kind == 2 else at + len(piece) :]


def _pieces(marker: Path, rng: Random) -> list[bytes]:
    """Return opcodes: calls, lengths without end, memos, depth, what belongs elsewhere."""
    command = f"touch {marker}".encode()
    argument = b"X" + struct.pack("<I", len(command)) + command
    many = rng.choice([10, 1000, 200_000])
    length = rng.choice([1 << 62, (1 << 63) - 1, 1 << 32, (1 << 64) - 1, 0])
    short = struct.pack("<I", rng.choice([(1 << 32) - 1, 1 << 31, 1 << 30, 0]))
    place = struct.pack("<I", rng.choice([0, 1, 256, (1 << 31) - 1, (1 << 32) - 1]))
    number = bytes([rng.randrange(256)])
    return [
        b"cos\nsystem\n(" + argument + b"tR",
        b"cposix\nsystem\n" + argument + b"\x85R",
        argument + b"\x93\x85R",
        b"(S'" + command + b"'\nios\nsystem\n",
        b"(cos\nsystem\n" + argument + b"o",
        b"\x82\x01",
        b"Pid\n",
        b"Q",
        b"b",
        b"\x81",
        *(
            opcode + struct.pack("<Q", length)
            for opcode in (b"\x8d", b"\x8e", b"\x95", b"\x96")
        ),
        *(opcode + short for opcode in (b"X", b"T", b"B", b"\x8b")),
        b"\x8a\xff" + rng.randbytes(255),
        b"\x8a\x00",
        b"r" + place,
        b"j" + place,
        b"q" + number,
        b"h" + number,
        b"}q\x00h\x00h\x00s",
        b"]q\x00h\x00a",
        b"]q\x00(h\x00h\x00h\x00e",
        b"]" * many,
        b"(" * many,
        b"}(" * many,
        b"](" * many + b"e" * many,
        b")" + b"\x85" * many,
        b"h\x01" * many,
        b"2" * many,
        b"0" * rng.choice([1, 1000]),
        *(rng.choice([b"u", b"e", b"s", b"a", b"t", b"l", b"d", b"."]) for _ in range(6)),
        b"G" + struct.pack(">d", rng.choice([float("nan"), float("inf"), -0.0])),
    ]
