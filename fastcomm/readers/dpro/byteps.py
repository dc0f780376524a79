"""BytePS: what workers push to servers and pull from them, and what servers do in between.

Read are `comm_timeline.json` and `server_timeline.json` of a trial: begins and ends by process,
"worker_0 -> server_1" with `<tensor>.PUSH` and `.PULL`, and "server_1_t0" with
`<tensor>.COPY_FIRST`, `.SUM` and `.COPY_MERGED`. A tensor sent in parts has `~PART<i>` behind
its name. Of each link the operations count from the 10th on: a step each, and one push before
the first, which sets the tensor up.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro.horovod import rows
from fastcomm.readers.dpro.names import SERVER
from fastcomm.readers.dpro.uniform import Event, ns

COMM, SERVERS = "comm_timeline.json", "server_timeline.json"
FIRST, STEPS = 10, 10
_LINK = re.compile(r"((worker|server)_\d+) *-> *((?:worker|server)_\d+)")
_THREAD = re.compile(r"(server_\d+)_t(\d+)")
_DONE = re.compile(r"(.+?)(?:~PART(\d+))?\.([A-Z_]+)")
# By how much a link may have more or fewer of an operation than most have.
_SPREAD = {"PUSH": 2, "PULL": 1}


def events(
    folder: Path, ids: Mapping[str, int], first: int = FIRST, steps: int = STEPS
) -> list[Event]:
    """Pushes, pulls and operations of servers in the window of steps; `ids` is by tensor name.

    A trace of fewer steps counts from its begin.
    """
    comm = list(_read(folder / COMM, ids))
    most = Counter(_counts(comm, "PULL").values())
    usual = most.most_common(1)[0][0] if most else 0
    begin = first if usual >= first + steps else 0
    path = folder / SERVERS
    server = list(_read(path, ids)) if path.exists() else []
    return [*_window(comm, begin, steps), *_window(_numbered(server), begin, steps)]


def _read(path: Path, ids: Mapping[str, int]) -> Iterator[Event]:
    """All operations of known tensors, in the order of their ends."""
    process: dict[Any, str] = {}
    open_: dict[Any, list[tuple[str, int]]] = {}
    for row in rows(path):
        pid = row.get("pid")
        if row.get("ph") == "M" and row.get("name") == "process_name":
            process[pid] = str((row.get("args") or {}).get("name", ""))
        elif row.get("ph") == "B":
            open_.setdefault(pid, []).append((str(row["name"]), ns(row["ts"])))
        elif row.get("ph") == "E" and open_.get(pid):
            name, start = open_[pid].pop()
            if event := _event(process.get(pid, ""), name, ids, path):
                yield replace(event, start=start, dur=ns(row["ts"]) - start)


def _event(process: str, text: str, ids: Mapping[str, int], path: Path) -> Event | None:
    """One operation without its times; None of a tensor that is no gradient."""
    done = _DONE.fullmatch(text)
    link, thread = _LINK.fullmatch(process), _THREAD.fullmatch(process)
    sub_op = done[3] if done else ""
    if link and sub_op in _SPREAD:
        sub_op += "_REQ" if link[2] == "worker" else "_RES"
        pid, suffix = f"{link[1]}::{link[3]}", f"{link[1]}::{link[3]}::"
    elif thread and sub_op in SERVER:
        pid, suffix = process, f"server_t{thread[2]}::~PART"
    else:
        raise TraceFileError(
            f"{path}: {text!r} of process {process!r}: wanted <tensor>.PUSH or .PULL of "
            '"worker_0 -> server_1", or an operation of "server_1_t0": ' + ", ".join(SERVER)
        )
    tensor = str(ids.get(done[1], done[1].rpartition(".")[2])) if done else ""
    if not tensor.isdecimal() or not done:
        return None
    return Event(
        name=f"Comm.{tensor}.{sub_op}",
        pid=pid,
        start=0,
        dur=0,
        lane=pid,
        cat="Comm" if link else "ServerOp",
        suffix=suffix + (done[2] or "0"),
    )


def _numbered(events_: list[Event]) -> list[Event]:
    """Sums of one tensor by their place behind the copy that begins them."""
    found, sums = [], Counter[tuple[str, str]]()
    for each in events_:
        key = each.name.rpartition(".")[0], (each.suffix or "").rpartition("~")[2]
        if each.name.endswith(".COPY_FIRST"):
            sums[key] = 0
        if each.name.endswith(".SUM"):
            thread, _, part = (each.suffix or "").partition("::")
            found.append(replace(each, suffix=f"{thread}::{sums[key]}::{part}"))
            sums[key] += 1
        else:
            found.append(each)
    return found


def _key(event: Event) -> tuple[str, str, str | None]:
    return event.pid, event.name, event.suffix


def _counts(events_: list[Event], kind: str) -> Counter[tuple[str, str, str | None]]:
    """How often each link did each operation of a kind."""
    return Counter(_key(each) for each in events_ if f".{kind}_" in each.name)


def _window(events_: list[Event], first: int, steps: int) -> Iterator[Event]:
    """The operations of `steps` steps, numbered; links that are far from most do not count."""
    odd = set()
    for kind, spread in _SPREAD.items():
        counts = _counts(events_, kind)
        usual = Counter(counts.values()).most_common(1)
        odd |= {key for key, n in counts.items() if abs(n - usual[0][0]) > spread}
    seen: Counter[tuple[str, str, str | None]] = Counter()
    for each in events_:
        key = _key(each)
        step = seen[key] - first - int(".PUSH_" in each.name)
        seen[key] += 1
        if key not in odd and 0 <= step < steps:
            yield replace(each, step=step)
