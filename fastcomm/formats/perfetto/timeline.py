"""Turn the packets of a Perfetto trace into the columns that the Kineto reader works on.

A row of `Scanned` is a whole slice or stage. Kinds and names become those of PyTorch's JSON, so
that the traces of both encodings of a run are equal.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm.formats.kineto.chrome import Scanned, Selection
from fastcomm.formats.perfetto.packets import (
    AGENTS,
    HOST_FUNCTION,
    RANK_START,
    RANK_STRIDE,
    TIMES,
    Packets,
)
from fastcomm_kernels import json_events, perfetto_tables, slices
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints
from fastcomm_kernels.json_events import TEXT_LANE

# Stages of device work, and their categories in PyTorch's JSON.
STAGES = {
    "Kernel": b"kernel",
    "Memcpy": b"gpu_memcpy",
    "Memset": b"gpu_memset",
    "Annotation": b"gpu_user_annotation",
    "EventRecord": b"graph_event_node",
    "HostNode": b"graph_host_node",
}
_ANNOTATION = "Annotation"
_NO_PROCESS = (1 << 31) - 1  # as PyTorch writes -1, the process of overhead
_GPU = re.compile(r"GPU ([0-9]{1,6})")
_LANE = re.compile(r"\[([0-9]{1,18})\]")
# Tracks of rocprofv3.
_THREAD = re.compile(r"THREAD [0-9]+ \(([0-9]{1,18})\)")
_QUEUE = re.compile(r"COMPUTE AGENT \[([0-9]{1,6})\].*(?:QUEUE|STREAM) \[([0-9]{1,18})\]")
_COPIES = re.compile(r"COPY to AGENT \[([0-9]{1,6})\] THREAD \[([0-9]{1,18})\]")
_PEER_COPY = "Memcpy PtoP (rocprofv3: {})"
# The args that stages leave out where they are 0; bytes only copies and memsets have.
_ZERO = ("correlation", "stream", "device", "bytes")
_FAR = 1 << 62  # ns: times are less


class _Track(NamedTuple):
    """Where the events of a track are: the process and thread of the JSON, and its category.

    The category is that of slices without one.
    """

    process: int = NULL
    thread: int = NULL
    category: bytes = b""
    device: int = NULL


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceTimeline:
    """The events of a trace, and what only reading them tells."""

    scanned: Scanned
    is_from_torch: bool  # whether device work is in stages, which end early where they overlap
    open_slices: int  # without an end, or with an impossible time
    unnamed: int  # whole events without a name, or whose name is not in the file
    waits: tuple[tuple[int, int], ...]  # rows of stages that wait, and of what they wait for


def timeline(packets: Packets, selection: Selection) -> SliceTimeline:
    """Return the whole slices and stages that a selection keeps, in the order of the file."""
    builder = _TimelineBuilder(packets, selection)
    return builder.build()


class _TimelineBuilder:
    """Builds the rows of one file."""

    def __init__(self, packets: Packets, selection: Selection) -> None:
        """Prepare to build the rows of `packets` that `selection` keeps."""
        self.packets = packets
        self.selection = selection
        self.texts = list(packets.texts)
        self.unknown = len(selection.keep) - 1
        type_, self.starts = packets.marks["type"], packets.starts
        is_start = type_ != perfetto_tables.END
        self.is_stage = type_[is_start] == perfetto_tables.DEVICE
        self.start, self.place = (packets.marks[name][is_start] for name in ("time", "place"))
        self.stop = self._stops(is_start)
        self._use_given_times()

    def build(self) -> SliceTimeline:
        """Select and translate."""
        start, stop = self.start, self.stop
        kind, is_whole = self._kinds(), (start > -_FAR) & (stop >= start) & (stop < _FAR)
        rows = np.flatnonzero(is_whole & self._keeps(kind))
        columns, packets = self._columns(rows, kind[rows]), self.packets
        further = (RANK_START, RANK_STRIDE, HOST_FUNCTION)
        scanned = Scanned(
            columns=columns,
            details={k: v for k, v in packets.details.items() if k not in further},
            texts=self.texts,
            envelope={} if packets.epoch is None else {"baseTimeNanoseconds": packets.epoch},
            event_count=int(np.count_nonzero(is_whole)),
            warnings=packets.warnings,
            is_truncated=packets.is_truncated,
        )
        return SliceTimeline(
            scanned=scanned,
            is_from_torch=bool(self.is_stage.any()),
            open_slices=len(is_whole) - scanned.event_count,
            unnamed=int(np.count_nonzero(is_whole & self._lack_names())),
            waits=tuple(self._waits(rows)),
        )

    def _lack_names(self) -> Flags:
        """Return which slices lack a name, and which stages also that of their kind."""
        starts = self.starts
        flags: Flags = (starts["name"] < 0) & (~self.is_stage | (starts["kind"] < 0))
        return flags

    def _waits(self, rows: Ints) -> Iterator[tuple[int, int]]:
        """Yield the places among `rows` of stages that wait, and of what they wait for."""
        packets, own = self.packets, np.flatnonzero(self.is_stage[rows])
        if not packets.order:
            return
        at = self._places_of_stages(rows[own])
        event, waits = (packets.stages[name][at].tolist() for name in ("event", "waits"))
        place = dict(zip(event, own.tolist(), strict=True))
        for stage, code in zip(own.tolist(), waits, strict=True):
            for source in packets.order.get(code, ()):
                if place.get(source, stage) != stage:
                    yield stage, place[source]

    def _places_of_stages(self, rows: Ints) -> Ints:
        """Return the places of some stages among all, from their places among the starts."""
        return np.searchsorted(np.flatnonzero(self.is_stage), rows)

    def _stops(self, is_start: Flags) -> Ints:
        """Return when each start ends; NULL for slices without an end."""
        marks = self.packets.marks
        stop = np.full(len(self.start), NULL, np.int64)
        stop[self.is_stage] = self.start[self.is_stage] + self.packets.stages["length"]
        is_slice = marks["type"] != perfetto_tables.DEVICE
        begins = is_start[is_slice]
        ends = _paired(begins, marks["place"][is_slice], marks["time"][is_slice])
        stop[~self.is_stage] = ends[begins]
        return stop

    def _kinds(self) -> NDArray[np.int8]:
        """Return the kind of each start by its category, or that of its track or stage."""
        kinds, kind = self.selection.kinds, self.starts["kind"]
        by_stage = np.array(
            [kinds.get(STAGES.get(text, b""), self.unknown) for text in self.texts]
            + [self.unknown]
        )
        kind = np.where(self.is_stage, by_stage[np.where(self.is_stage, kind, NONE)], kind)
        rows = np.flatnonzero(kind < 0)
        if len(rows):
            tracks, place = self._tracks(rows)
            by_track = [kinds.get(track.category, self.unknown) for track in tracks]
            kind[rows] = np.array(by_track)[place]
        return kind.astype(np.int8)

    def _keeps(self, kind: NDArray[np.int8]) -> Flags:
        """Return which starts the selection keeps."""
        keep = np.array(self.selection.keep)[kind]
        is_long = keep == json_events.KEEP_LONG
        by_name = (keep == json_events.KEEP_NAMED) | is_long
        is_long &= self.stop - self.start >= json_events.LONG
        by_name &= self.starts["is_selected"]
        is_kept: Flags = (keep == json_events.KEEP_ALL) | by_name | is_long
        return is_kept

    def _columns(self, rows: Ints, kind: NDArray[np.int8]) -> dict[str, NDArray[Any]]:
        """Return the columns of `Scanned` for some starts of these kinds."""
        packets, starts = self.packets, self.starts
        arg_row = starts["arg_row"][rows]
        tracks, place = self._tracks(rows)
        columns: dict[str, NDArray[Any]] = {
            "kind": kind,
            "name": starts["name"][rows],
            "process": np.array([track.process for track in tracks], np.int64)[place],
            "thread": np.array([track.thread for track in tracks], np.int64)[place],
            "start": self.start[rows],
            "stop": self.stop[rows],
            "offset": starts["offset"][rows],
            "detail": packets.detail[arg_row],
            **{name: packets.args[name][arg_row] for name in self.selection.row_args},
        }
        if self.selection.positions:
            columns["position"] = rows
        self._fill_stages(columns, rows, np.flatnonzero(self.is_stage[rows]))
        self._fill_tracks(columns, tracks, place)
        self._name_peer_copies(columns, arg_row)
        columns["name"] = self._named(columns["name"])
        return columns

    def _fill_stages(self, columns: dict[str, NDArray[Any]], rows: Ints, own: Ints) -> None:
        """Fill in what the JSON has of stages: lanes, names, and numbers left out as 0.

        `own` are the places of stages among `rows`.
        """
        starts, packets = self.starts, self.packets
        at = self._places_of_stages(rows[own])
        lanes = [
            int(match[1]) if (match := _LANE.match(text)) else TEXT_LANE - code
            for code, text in enumerate(self.texts)
        ]
        queue = packets.stages["queue"][at]
        lane = np.array([*lanes, NULL], np.int64)[np.where(queue == NULL, -1, queue)]
        gpu = self.place[rows[own]]
        columns["process"][own] = np.where(gpu > -_FAR, gpu, NULL)
        columns["thread"][own] = lane
        stage = starts["kind"][rows[own]]
        is_unnamed = columns["name"][own] < 0
        columns["name"][own[is_unnamed]] = self._stage_names(
            stage[is_unnamed], starts["arg_row"][rows[own[is_unnamed]]]
        )
        is_work = ~self._has_text(stage, _ANNOTATION)
        moves_bytes = self._has_text(stage, "Memcpy") | self._has_text(stage, "Memset")
        for name in _ZERO:
            zero = own[moves_bytes if name == "bytes" else is_work]
            columns[name][zero[columns[name][zero] == NULL]] = 0
        # The JSON has neither stream nor device of an annotation among its args.
        for name in self.selection.row_args:
            columns[name][own[~is_work]] = NULL
        columns["detail"][own[~is_work]] = NONE

    def _has_text(self, codes: NDArray[np.int32], text: str) -> Flags:
        """Return which codes are those of a text."""
        is_equal = np.array([other == text for other in self.packets.texts] + [False])
        result: Flags = is_equal[codes]
        return result

    def _stage_names(
        self, stage: NDArray[np.int32], arg_row: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Return the names of stages without one: that of the stage, and of a host function."""
        packets = self.packets
        names = stage.copy()
        function = packets.details[HOST_FUNCTION][packets.detail[arg_row]]
        for code in np.unique(function[function >= 0]).tolist():
            names[(function == code) & (stage >= 0)] = len(self.texts)
            self.texts.append(f"HostNode: {self.texts[code]}")
        return names

    def _fill_tracks(
        self, columns: dict[str, NDArray[Any]], tracks: list[_Track], place: Ints
    ) -> None:
        """Fill in the device of events whose track states it."""
        device = np.array([track.device for track in tracks], np.int64)[place]
        is_unknown = (columns["device"] == NULL) & (device != NULL)
        columns["device"] = np.where(is_unknown, device, columns["device"])

    def _use_given_times(self) -> None:
        """Use the times that rocprofv3 states: those of slices are moved where they overlap."""
        begin, end = (self.packets.args[name][self.starts["arg_row"]] for name in TIMES)
        is_given = (begin != NULL) & (end >= begin) & (self.stop != NULL)
        self.start, self.stop = (
            np.where(is_given, begin, self.start),
            np.where(is_given, end, self.stop),
        )

    def _name_peer_copies(
        self, columns: dict[str, NDArray[Any]], arg_row: NDArray[np.int32]
    ) -> None:
        """Name rocprofv3's copies between GPUs as such: they are communication."""
        source, target = (self.packets.args[name][arg_row] for name in AGENTS)
        gpus = [
            int(match[1])
            for label in self._labels()
            if (match := _QUEUE.match(label) or _COPIES.match(label)) and "GPU" in label
        ]
        is_peer = np.isin(source, gpus) & np.isin(target, gpus) & (source != target)
        columns["device"] = np.where(target != NULL, target, columns["device"])
        from_gpu = np.isin(source, gpus) & ~np.isin(target, gpus)
        columns["device"] = np.where(from_gpu, source, columns["device"])
        columns["process"] = np.where(target != NULL, columns["device"], columns["process"])
        for code in np.unique(columns["name"][is_peer]).tolist():
            columns["name"][is_peer & (columns["name"] == code)] = len(self.texts)
            self.texts.append(_PEER_COPY.format(self.texts[code]))

    def _labels(self) -> list[str]:
        """Return the names of all tracks."""
        codes = self.packets.tracks[:, perfetto_tables.LABEL]
        return [self.packets.texts[code] for code in codes[codes != NULL].tolist()]

    def _named(self, name: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return names with that of events without one."""
        if (name < 0).any():
            self.texts.append("")
            name = np.where(name < 0, len(self.texts) - 1, name).astype(np.int32)
        return name

    def _tracks(self, rows: Ints) -> tuple[list[_Track], NDArray[np.int64]]:
        """Return the tracks of some rows, and for each row the place of its own."""
        ids = self.packets.tracks[:, perfetto_tables.UUID]
        described_ids = np.unique(ids)
        place = self.place[rows]
        # Most events are on few tracks; those without a description are added.
        at = np.minimum(np.searchsorted(described_ids, place), max(len(described_ids) - 1, 0))
        is_known = (
            described_ids[at] == place if len(described_ids) else np.zeros(len(place), np.bool_)
        )
        every = np.union1d(described_ids, place[~is_known])
        described = {int(row[perfetto_tables.UUID]): row for row in self.packets.tracks}
        tracks = [self._track(number, described) for number in every.tolist()]
        return tracks, np.searchsorted(every, place)

    def _track(self, number: int, described: dict[int, Ints]) -> _Track:
        """Return where the events of a track are; `described` has its row, if any."""
        if number not in described:
            return _Track(thread=number % _FAR)
        _, parent, pid, tid, label = described[number].tolist()
        tid = tid if tid > -_FAR else NULL
        process = ""
        if (owner := described.get(parent)) is not None:
            pid = int(owner[perfetto_tables.PID]) if pid == NULL else pid
            process = self._label(int(owner[perfetto_tables.LABEL]))
        pid = pid if pid > -_FAR else NULL
        if pid == _NO_PROCESS:
            return _Track(-1, tid, b"overhead")
        if match := _GPU.fullmatch(process):
            return _Track(int(match[1]), tid, b"cuda_sync")
        if tid == NULL and label != NULL:
            return self._named_track(pid, label)
        return _Track(pid, tid)

    def _named_track(self, pid: int, label: int) -> _Track:
        """Return where the events of a track with a name, and without a thread, are."""
        text = self._label(label)
        if match := _QUEUE.match(text):
            return _Track(int(match[1]), int(match[2]), device=int(match[1]))
        if match := _COPIES.match(text):
            return _Track(int(match[1]), TEXT_LANE - label, device=int(match[1]))
        match = _THREAD.match(text)
        return _Track(pid, int(match[1]) if match else TEXT_LANE - label)

    def _label(self, code: int) -> str:
        """Return the name of a track; "" without one."""
        return "" if code == NULL else self.packets.texts[code]


def _paired(begins: Flags, track: Ints, time: Ints) -> Ints:
    """Return when each begin ends; NULL for ends, and for begins without one."""
    stop = np.full(len(begins), NULL, np.int64)
    done = np.zeros(len(begins), np.bool_)
    if not slices.stops_by_number(begins, track, time, stop, done):
        return stop
    rows = np.flatnonzero(~done)
    order = rows[np.argsort(track[rows], kind="stable")]
    if not slices.is_in_order(track, time, order):
        # Ends before begins at equal times.
        order = rows[np.lexsort((begins[rows], time[rows], track[rows]))]
    slices.stops_by_nesting(begins, track, time, order, stop)
    return stop
