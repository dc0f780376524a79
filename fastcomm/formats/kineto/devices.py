"""Find the ranks of a file whose process drives several devices, or that merges ranks' traces.

A rank is a device of a process that has kernels, and at least 1 % of the work of the busiest.
The work of the host is shared by the devices that its process drives. Tools that merge traces
put a label before the numbers of processes, such as "[TP01] 0", or change the numbers; devices
may have equal numbers then.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.formats.kineto.chrome import Scanned, Selection
from fastcomm.formats.sources import CHANGED, busy, is_for_others, unused
from fastcomm.formats.stream import BLOCK, blocks
from fastcomm.trace.iterations import COMMON_NAMES, PROFILER_STEP
from fastcomm.trace.schema import KIND, KINDS
from fastcomm_kernels.arrays import NULL, Flags, Ints
from fastcomm_kernels.json_events import TEXT_LANE

# Kinds of events on a device; waits are if they have one.
DEVICE_EVENTS = ("kernel", "memcpy", "memset", "gpu_annotation", "host_work", "host_node")
_COPIES = [KIND["memcpy"], KIND["memset"]]
_ON_DEVICE = np.isin(KINDS, DEVICE_EVENTS)  # by kind
_LABEL = re.compile(r"(?:\[[^\]]{1,80}\]|(?i:rank)[ _:=#-]?[0-9]{1,7}:?)(?= )")
# Rows of metadata that describe a process, and what names its rank in them.
_DESCRIBED = re.compile(rb'"process_(?:name|labels)"')
_RANK = re.compile(r"(?i)(?<!local[ _-])rank[ _:=#-]{0,2}([0-9]{1,7})(?![0-9.])")
_LONGEST_ROW = 4096  # bytes
_MOST_ROWS = 1 << 16
_DIGITS = re.compile(r"[0-9]{1,7}")
# A process launched a device's work if it began the calls of so many kernels before these.
_LAUNCHED = 0.9
_LEAST = 0.05  # share of a device's kernels that a process launched, if it has a device
_LEAST_UNCLEAR = 0.01  # share of kernels of unknown process, from which on times are unknown
_UNCLEAR = NULL + 1
_LEFT_OUT = (
    "which process launched {} of {} events of the devices with number {} is not recorded: "
    "they are left out, so that their time counts as idle"
)
_STEP = re.compile(f"{PROFILER_STEP}|{COMMON_NAMES}")
_SAME_STEP = 0.01  # of a step: marks of several processes this near to each other agree
_LARGEST = 1 << 31  # numbers of devices and processes of kernels are smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDevice:
    """A device with kernels, and the process that launched them."""

    process: str  # of its events; a number, or a label and a number
    number: int
    hosts: tuple[str, ...]  # processes of the host that launched its work; empty if unknown
    # Whether several processes launched work of one number, so that each has its own device,
    # as on several hosts; and whether all work is told apart then.
    is_shared: bool = False
    is_told: bool = True
    is_rank: bool = True  # whether it has so much work that it is one

    @property
    def is_merged(self) -> bool:
        """Whether a tool changed the process of its events: it is not the device's number."""
        return self.process != str(self.number)

    @property
    def label(self) -> str:
        """What a tool that merges traces put before its process; else empty."""
        return label_of(self.process)

    def __str__(self) -> str:
        """Return "GPU 2 of process 71"."""
        name = f"GPU {self.number}"
        if self.label:
            return f"{name} of {self.label}"
        if self.hosts:
            return f"{name} of process {', '.join(self.hosts)}"
        return f"{name} in lane {self.process}" if self.is_merged else name


def is_on_device(columns: Mapping[str, NDArray[Any]]) -> Flags:
    """Return which events are on a device: its work, and waits that name it."""
    is_wait = (columns["kind"] == KIND["sync"]) & (columns["device"] != NULL)
    flags: Flags = _ON_DEVICE[columns["kind"]] | is_wait
    return flags


def devices_of(scanned: Scanned) -> tuple[ProcessDevice, ...]:
    """Return the devices of a file that has several; empty for others.

    Those that are no ranks are the last ones.
    """
    columns = scanned.columns
    rows = np.flatnonzero(columns["kind"] == KIND["kernel"])
    process, number = columns["process"][rows], _numbers(columns)[rows]
    launcher = _launchers(scanned, rows)
    keys = np.stack([process, number, launcher])
    if not len(rows) or ((keys == keys[:, :1]).all() and launcher[0] != _UNCLEAR):
        return ()
    lanes, first_row, index = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    index = index.reshape(-1)
    chosen = _busy(scanned, rows, index, lanes)
    order = [*chosen[np.argsort(first_row[chosen])].tolist()]
    clear = np.flatnonzero(lanes[2] != _UNCLEAR).tolist()
    order += [n for n in clear if n not in order]
    hosts = _Hosts(scanned)
    if unclear := [n for n in chosen.tolist() if lanes[2, n] == _UNCLEAR]:
        name, own = _text(int(lanes[0, unclear[0]]), scanned.texts), int(lanes[1, unclear[0]])
        return tuple(
            ProcessDevice(process=name, number=own, hosts=(host,), is_told=False)
            for host, calls in hosts.calls.items()
            if len(calls)
        )
    if lanes.shape[1] < 2 or (np.abs(lanes[1]) >= _LARGEST).any():  # noqa: PLR2004
        return ()
    devices = []
    for n in order:
        name, own = _text(int(lanes[0, n]), scanned.texts), int(lanes[2, n])
        device = ProcessDevice(
            process=name,
            number=int(lanes[1, n]),
            hosts=hosts.of(name, rows[index == n])
            if own == NULL
            else (_text(own, scanned.texts),),
            is_shared=own != NULL,
            is_rank=n in chosen,
        )
        devices.append(device)
    first = {device.hosts: n for n, device in reversed([*enumerate(devices)])}

    def place(device: ProcessDevice) -> tuple[Any, ...]:
        return not device.is_rank, device.label, first[device.hosts], device.number

    return tuple(sorted(devices, key=place))


def _busy(scanned: Scanned, kernels: Ints, lane: Ints, lanes: Ints) -> Ints:
    """Return the lanes that are ranks, of those with one label or without.

    `lanes` are columns of process, device and launcher; `lane` is that of each of the rows of
    `kernels`. Copies count for lanes that their process and device tell.
    """
    columns = scanned.columns
    copies = np.flatnonzero(np.isin(columns["kind"], _COPIES))
    process, number = columns["process"][copies], _numbers(columns)[copies]
    rows, of = [kernels], [lane]
    for n in np.flatnonzero(lanes[2] == NULL).tolist():
        own = copies[(process == lanes[0, n]) & (number == lanes[1, n])]
        rows.append(own)
        of.append(np.full(len(own), n))
    every = np.concatenate(rows)
    duration = (columns["stop"] - columns["start"])[every].clip(0)
    labels = [label_of(_text(code, scanned.texts)) for code in lanes[0].tolist()]
    return busy(np.concatenate(of), duration, labels)


def _launchers(scanned: Scanned, rows: Ints) -> Ints:
    """Return the process that launched each of some device events, where that tells devices.

    It does if more processes launched kernels than there are devices, and several those of one
    number: traces of one process each that were merged, whose devices have equal numbers. There
    `_UNCLEAR` is an event whose process is not recorded; elsewhere it is NULL.
    """
    columns = scanned.columns
    nothing = np.full(len(rows), NULL)
    calls = np.flatnonzero((columns["kind"] == KIND["runtime"]) & (columns["correlation"] > 0))
    process = columns["process"][calls]
    if (process == process[:1]).all():  # without a sort: most files are of one process
        return nothing
    hosts = np.unique(process)
    device = _numbers(columns)
    kernels = np.flatnonzero(columns["kind"] == KIND["kernel"])
    lanes = np.unique(np.stack([columns["process"][kernels], device[kernels]]), axis=1)
    if len(hosts) <= lanes.shape[1] or any(label_of(_text(c, scanned.texts)) for c in lanes[0]):
        return nothing
    of_kernel, result = _launching(columns, kernels, calls, hosts), nothing
    for process, number in lanes.T.tolist():
        of_lane = of_kernel[
            (columns["process"][kernels] == process) & (device[kernels] == number)
        ]
        counts = np.array([(of_lane == host).sum() for host in [*hosts.tolist(), _UNCLEAR]])
        is_much = counts >= _LEAST * len(of_lane)
        if counts[-1] >= _LEAST_UNCLEAR * len(of_lane) or is_much[:-1].sum() > 1:
            own = (columns["process"][rows] == process) & (device[rows] == number)
            launcher = _launching(columns, rows[own], calls, hosts)
            result[own] = np.where(launcher == NULL, _UNCLEAR, launcher)
    return result


def _launching(
    columns: Mapping[str, NDArray[Any]], rows: Ints, calls: Ints, hosts: Ints
) -> Ints:
    """Return the process of `hosts` that launched each of some device events.

    It has a call of the same number that began before. NULL if none has; `_UNCLEAR` if several
    have, but where the event is in the part of the file with the events of only one of them.
    """
    offset, parts = columns["offset"], _parts(columns, hosts)
    likely, near = (np.zeros(len(rows), np.int64) for _ in range(2))  # number of processes
    of_likely, of_near = (np.full(len(rows), NULL) for _ in range(2))
    for host in hosts.tolist():
        is_likely = _have_calls(columns, calls[columns["process"][calls] == host], rows)
        begin, end = parts[host]
        is_near = is_likely & (offset[rows] >= begin) & (offset[rows] < end)
        likely += is_likely
        near += is_near
        of_likely[is_likely], of_near[is_near] = host, host
    one_of_several = np.where(near == 1, of_near, _UNCLEAR)
    return np.where(likely > 1, one_of_several, of_likely)


def _parts(columns: Mapping[str, NDArray[Any]], hosts: Ints) -> dict[int, tuple[int, int]]:
    """Return where the part of the file with the events of each process begins and ends.

    Parts behind each other reach to the next one, so that device events behind the last call of
    a process are of its part; or from the one before, where device events stand before calls.
    They reach nowhere if one has no device events then: a file may have all calls first.
    """
    offset = columns["offset"]
    own = [offset[columns["process"] == host] for host in hosts.tolist()]
    begins, ends = (np.array([edge(part) for part in own]) for edge in (np.min, np.max))
    order = np.argsort(begins)
    is_apart = (begins[order[1:]] > ends[order[:-1]]).all()
    on_device = np.sort(offset[is_on_device(columns)])
    is_led, is_followed = (on_device < begins.min()).any(), (on_device > ends.max()).any()
    ends += 1
    if is_apart and is_led != is_followed:
        wide_begins, wide_ends = begins.copy(), ends.copy()
        if is_followed:
            wide_ends[order] = np.append(begins[order[1:]], np.iinfo(np.int64).max)
        else:
            wide_begins[order] = np.append(0, ends[order[:-1]])
        first, behind = (np.searchsorted(on_device, edge) for edge in (wide_begins, wide_ends))
        if (behind > first).all():
            begins, ends = wide_begins, wide_ends
    edges = zip(begins.tolist(), ends.tolist(), strict=True)
    return dict(zip(hosts.tolist(), edges, strict=True))


def _have_calls(columns: Mapping[str, NDArray[Any]], calls: Ints, rows: Ints) -> Flags:
    """Return which device events have a call of their number that began before them.

    `calls` are the rows of at least one call, `rows` the rows of the events.
    """
    correlation, start = columns["correlation"], columns["start"]
    order = calls[np.argsort(correlation[calls], kind="stable")]
    place = np.searchsorted(correlation[order], correlation[rows])
    call = order[np.minimum(place, len(order) - 1)]
    flags: Flags = (correlation[call] == correlation[rows]) & (start[call] <= start[rows])
    return flags


def ranks_of(
    devices: Sequence[ProcessDevice], path: Path
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the rank of each device that is one, and warnings.

    Labels in which one number differs, such as "[TP01-PP00]", state ranks, and metadata of the
    file `path` that describe processes as "rank 3"; others are numbered in order.
    """
    others = _unused(devices)
    devices = [device for device in devices if device.is_rank]
    names = ", ".join(map(str, devices))
    ranks = _stated_ranks([device.label for device in devices])
    ranks = ranks or _described_ranks(devices, _descriptions(path))
    if ranks:
        text = f"ranks {', '.join(map(str, ranks))} of a job are in one file: {names}"
    else:
        ranks = tuple(range(len(devices)))
        text = (
            f"the ranks are a guess: the file has the work of {len(devices)} devices, and each "
            f"is a rank, numbered in this order: {names}"
        )
    unknown = [str(device) for device in devices if not device.hosts]
    lacking = (
        f"which process launched the work of {', '.join(unknown)} is not recorded, so that "
        "nothing of the host is known: neither marks of steps, unless those of all processes "
        "agree, nor causes of idle time"
    )
    return ranks, (text, lacking, *others) if unknown else (text, *others)


def _unused(devices: Sequence[ProcessDevice]) -> tuple[str, ...]:
    """Return the warning about devices that are no ranks; empty without one."""
    return unused([str(device) for device in devices if not device.is_rank])


def _stated_ranks(labels: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers that differ between labels; empty if there are none, or several."""
    digits = [tuple(map(int, _DIGITS.findall(label))) for label in labels]
    columns = {column for column in zip(*digits, strict=False) if len(set(column)) > 1}
    is_one = len({*map(len, digits)}) == 1 and len(columns) == 1
    ranks = columns.pop() if is_one else ()
    return ranks if len(set(ranks)) == len(labels) else ()


def _described_ranks(
    devices: Sequence[ProcessDevice], described: Mapping[str, set[int]]
) -> tuple[int, ...]:
    """Return the rank of each device, as its process tells; empty if one is unclear."""
    ranks = list[int]()
    for device in devices:
        own = set[int]()
        for process in (*device.hosts, device.process):
            own |= described.get(process, set()) | _ranks_in(process)
        if len(own) != 1:
            return ()
        ranks += own
    return tuple(ranks) if len(set(ranks)) == len(ranks) else ()


def _ranks_in(text: object) -> set[int]:
    """Return the rank that a text names, if it does."""
    match = _RANK.search(text) if isinstance(text, str) else None
    return {int(match[1])} if match else set()


def _descriptions(path: Path) -> dict[str, set[int]]:
    """Return the ranks that metadata of a file name, by process.

    What cannot be read names none: reading a rank of the file reports the error.
    """
    ranks: dict[str, set[int]] = {}
    with suppress(TraceFileError):
        for row in islice(_described_rows(path), _MOST_ROWS):
            args = row.get("args")
            for value in args.values() if isinstance(args, dict) else ():
                if own := _ranks_in(value):
                    ranks.setdefault(str(row.get("pid")), set()).update(own)
    return ranks


def _described_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of metadata that describe processes; empty ones are not whole."""
    before = b""
    for block in blocks(path, BLOCK):
        text = before + block
        for match in _DESCRIBED.finditer(text, len(before) // 2):
            yield _row_around(text, match.start())
        before = text[-2 * _LONGEST_ROW :]


def _row_around(text: bytes, at: int) -> dict[str, Any]:
    """Return the row of metadata around a position of a text; empty if it is not whole."""
    begin = at
    for _ in range(3):
        begin = text.rfind(b"{", max(0, at - _LONGEST_ROW), begin)
        if begin < 0:
            break
        part = text[begin : begin + _LONGEST_ROW].decode(errors="replace")
        try:
            row = json.JSONDecoder().raw_decode(part)[0]
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and row.get("ph") == "M":
            return row
    return {}


def part_of(scanned: Scanned, device: ProcessDevice) -> Scanned:
    """Return the events of a device and of its process, but no launches for other devices."""
    columns, warnings = scanned.columns, scanned.warnings
    on_device = is_on_device(columns)
    processes = np.unique(columns["process"])
    names = {code: _text(code, scanned.texts) for code in processes.tolist()}
    hosts = [code for code, name in names.items() if name in device.hosts]
    own = [code for code, name in names.items() if name == device.process]
    is_own = on_device & np.isin(columns["process"], own)
    is_own &= _numbers(columns) == device.number
    if device.is_shared:
        rows = np.flatnonzero(is_own)
        launchers = _launchers(scanned, rows)
        names_of = np.array([names.get(code, "") for code in launchers.tolist()])
        is_own[rows] = np.isin(names_of, device.hosts)
        if unclear := int((launchers == _UNCLEAR).sum()):
            warnings = (*warnings, _LEFT_OUT.format(unclear, len(rows), device.number))
    is_shared = ~on_device & np.isin(columns["process"], hosts)
    if not device.hosts:
        is_shared |= _common_marks(scanned)
    same_host = np.isin(columns["process"], [*own, *_siblings(names, device)])
    is_shared &= ~is_for_others(columns, is_own, on_device & ~is_own & same_host)
    selected = is_own | is_shared
    return replace(
        scanned,
        columns={name: column[selected] for name, column in columns.items()},
        warnings=warnings,
        envelope={
            key: value for key, value in scanned.envelope.items() if key != "distributedInfo"
        },
    )


def _common_marks(scanned: Scanned) -> Flags:
    """Return which events are the marks of one process, if those of all agree; else none.

    They are the steps of each then, whichever launched the work of a device.
    """
    columns = scanned.columns
    is_mark = np.zeros(len(columns["kind"]), np.bool_)
    rows = np.flatnonzero(columns["kind"] == KIND["annotation"])
    rows = rows[scanned.are_named(rows, _STEP.match)]
    processes = np.unique(columns["process"][columns["kind"] == KIND["runtime"]]).tolist()
    marks = [rows[columns["process"][rows] == process] for process in processes]
    if not marks or not len(marks[0]) or len({*map(len, marks)}) > 1:
        return is_mark
    start, stop, name = (columns[key][np.stack(marks)] for key in ("start", "stop", "name"))
    near = _SAME_STEP * (stop - start)[0]
    agree = (np.ptp(start, axis=0) <= near) & (np.ptp(stop, axis=0) <= near)
    is_mark[marks[0]] = agree.all() and not np.ptp(name, axis=0).any()
    return is_mark


def of_one_rank(scanned: Scanned) -> tuple[Scanned, tuple[ProcessDevice, ...], tuple[str, ...]]:
    """Return the events of the only device that is a rank, and a note about others.

    If several are, return all events and these devices instead.
    """
    every = devices_of(scanned)
    devices = tuple(device for device in every if device.is_rank)
    if len(devices) != 1 or not devices[0].is_told:
        return scanned, devices, ()
    (device,) = devices
    names = (_text(code, scanned.texts) for code in np.unique(scanned.columns["process"]))
    device = replace(device, hosts=device.hosts or tuple(names))
    notes = _unused(every)
    return part_of(scanned, device), (), notes


def _siblings(names: Mapping[int, str], device: ProcessDevice) -> list[int]:
    """Return the processes of events that have the label of a device, or none either."""
    return [code for code, name in names.items() if label_of(name) == device.label]


def label_of(process: str) -> str:
    """Return what a tool that merges traces put before the number of a process; else ""."""
    match = _LABEL.match(process)
    return match[0] if match else ""


def _numbers(columns: Mapping[str, NDArray[Any]]) -> Ints:
    """Return the device of each event; the number of its process if it names none."""
    device = columns["device"]
    return np.where(device == NULL, columns["process"], device)


def _text(code: int, texts: Sequence[str]) -> str:
    """Return a process as text."""
    return "" if code == NULL else texts[TEXT_LANE - code] if code <= TEXT_LANE else str(code)


class _Hosts:
    """The processes of the host, and their calls of a device's runtime."""

    def __init__(self, scanned: Scanned) -> None:
        """Collect the calls of each process."""
        self.columns = columns = scanned.columns
        rows = np.flatnonzero(~is_on_device(columns))
        is_call = columns["kind"][rows] == KIND["runtime"]
        is_call &= columns["correlation"][rows] != NULL
        process = columns["process"][rows]
        self.calls = {
            _text(code, scanned.texts): rows[is_call & (process == code)]
            for code in np.unique(process).tolist()
        }

    def of(self, process: str, kernels: Ints) -> tuple[str, ...]:
        """Return the processes that launched the kernels of a device; empty if unknown."""
        if label := label_of(process):
            return tuple(name for name in self.calls if label_of(name) == label)
        if len(self.calls) < 2:  # noqa: PLR2004
            return tuple(self.calls)
        likely = [name for name in self.calls if self._launched(name, kernels) >= _LAUNCHED]
        if len(likely) > 1:  # ranks with equal numbers of calls, one behind the other
            likely = [name for name in likely if self._is_beside(name, kernels)]
        return tuple(likely) if len(likely) == 1 else ()

    def _is_beside(self, name: str, kernels: Ints) -> bool:
        """Whether the calls of a process and kernels are in one part of the file."""
        calls, own = (self.columns["offset"][rows] for rows in (self.calls[name], kernels))
        return bool(calls.min() <= own.max() and own.min() <= calls.max())

    def _launched(self, name: str, kernels: Ints) -> float:
        """Return the share of kernels whose calls a process began before them."""
        calls = self.calls[name]
        if not len(calls):
            return 0.0
        return float(_have_calls(self.columns, calls, kernels).mean())


Scan = Callable[..., tuple[Scanned, Any]]
_last: dict[tuple[Any, ...], tuple[tuple[Scanned, Any], int]] = {}


def peek(
    path: Path, selection: Selection, *, scan: Scan, **options: Any
) -> tuple[ProcessDevice, ...]:
    """Return the devices of a file that has several, as `devices_of`; empty for others.

    The file is scanned, and `scan_again` returns the result for each of its ranks. Empty if the
    file cannot be read: reading a rank of it reports the error. Raises `TraceFileError` if the
    file changes meanwhile.
    """
    _last.clear()
    key = _key(path, selection, options)
    try:
        result = scan(path, selection, **options)
    except TraceFileError:
        return ()
    if key != _key(path, selection, options):
        raise TraceFileError(f"{path}: {CHANGED}")
    devices = devices_of(result[0])
    if not all(device.is_told for device in devices):
        devices = ()  # reading the file reports it
    _last[key] = result, max(1, sum(device.is_rank for device in devices))
    return devices


def scan_again(
    path: Path, selection: Selection, *, scan: Scan, **options: Any
) -> tuple[Scanned, Any]:
    """Return what `peek` scanned, once per rank; else scan. Columns must not be written."""
    key = _key(path, selection, options) if _last else ()
    result, uses = _last.pop(key, (None, 0))
    if result is None:
        _last.clear()
        return scan(path, selection, **options)
    if uses > 1:
        _last[key] = result, uses - 1
    return result


def _key(path: Path, selection: Selection, options: Mapping[str, Any]) -> tuple[Any, ...]:
    try:
        status = path.stat()
    except OSError:  # reading the file reports the error
        return path, object()
    state = status.st_size, status.st_mtime_ns, getattr(status, "st_ino", 0), os.getpid()
    return path, state, id(selection), tuple(sorted(options.items()))
