"""The events of a Perfetto trace by its definition: slow, with an object for each."""

import json
import struct
from collections import defaultdict

STAGES = {
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Annotation": "gpu_user_annotation",
    "EventRecord": "graph_event_node",
    "HostNode": "graph_host_node",
}


def number_at(data, i):
    value = shift = 0
    while True:
        part = data[i]
        value |= (part & 127) << shift
        shift += 7
        i += 1
        if part < 128:
            return value % (1 << 64), i


def fields(data):
    """Number and value of each field, in order."""
    i, found = 0, []
    while i < len(data):
        tag, i = number_at(data, i)
        match tag & 7:
            case 0:
                value, i = number_at(data, i)
            case 1:
                value, i = data[i : i + 8], i + 8
            case 5:
                value, i = data[i : i + 4], i + 4
            case 2:
                size, i = number_at(data, i)
                value, i = data[i : i + size], i + size
        found.append((tag >> 3, value))
    return found


def last(data, number, default=None):
    """The last value of a field."""
    values = [value for key, value in fields(data) if key == number]
    return values[-1] if values else default


def signed(value):
    return value - (value >> 63 << 64)


def text(value):
    return None if value is None else value.decode(errors="replace")


def value_of(data, values):
    """The value of a debug annotation; numbers of interned texts are in `values`."""
    result, items, entries = [], [], {}
    for number, value in fields(data):
        match number:
            case 2:
                result = bool(value)
            case 3:
                result = value
            case 4:
                result = signed(value)
            case 5:
                result = struct.unpack("<d", value)[0]
            case 6:
                result = text(value)
            case 17:
                result = values.get(value)
            case 11:
                entries[text(last(value, 10))] = value_of(value, values)
            case 12:
                items.append(value_of(value, values))
    return entries or items or result


def arg_text(value):
    """An arg as text, as PyTorch's JSON has it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class Clocks:
    def __init__(self):
        self.known = {}  # by scope and number: unit, shift, whether incremental, last time

    def snapshot(self, data, sequence):
        clocks = [value for number, value in fields(data) if number == 1]
        boot = [last(clock, 2, 0) for clock in clocks if last(clock, 1) == 6]
        if not boot:
            return
        for clock in clocks:
            number, unit = last(clock, 1), max(last(clock, 4, 1), 1)
            shift = boot[-1] - last(clock, 2, 0) * unit
            self.known[self.key(number, sequence)] = [
                *(unit, shift, last(clock, 3, 0), boot[-1]),
            ]

    def key(self, number, sequence):
        return (sequence if 64 <= number < 128 else 0), number

    def time(self, number, sequence, value):
        key = self.key(number, sequence)
        if number == 6 or key not in self.known:
            return value
        clock = self.known[key]
        unit, shift, is_incremental, before = clock
        if not is_incremental:
            return value * unit + shift
        clock[3] = before + value * unit
        return clock[3]


def events(data):
    """Marks of a trace in the order of the file, and its tracks by number.

    A mark is a dictionary: type, time, track or GPU, name, category or stage, args.
    """
    clocks, tracks, marks = Clocks(), {}, []
    interned, defaults = defaultdict(lambda: defaultdict(dict)), defaultdict(lambda: (6, 0))
    for number, packet in fields(data):
        if number != 1:
            continue
        sequence = last(packet, 10, 0)
        if last(packet, 13, 0) & 1 or last(packet, 41, 0):
            interned[sequence] = defaultdict(dict)
        own = last(packet, 59, b"")
        clock, track = defaults[sequence]
        defaults[sequence] = last(own, 58, clock), last(last(own, 11, b""), 11, track)
        if (snapshot := last(packet, 6)) is not None:
            clocks.snapshot(snapshot, sequence)
        texts = interned[sequence]
        for kind, entry in fields(last(packet, 12, b"")):
            if kind in (1, 2, 3, 24, 29):
                texts[kind][last(entry, 1, 0)] = text(last(entry, 2, b""))
        if (track := last(packet, 60)) is not None:
            tracks[last(track, 1, 0)] = track
        clock, track = defaults[sequence]
        time = clocks.time(last(packet, 58, clock), sequence, last(packet, 8, 0))
        if (event := last(packet, 11)) is not None and last(event, 9) in (1, 2):
            marks.append(slice_mark(event, time, track, texts))
        if (stage := last(packet, 53)) is not None:
            marks.append(stage_mark(stage, time, texts))
    return marks, tracks


def slice_mark(event, time, track, texts):
    mark = {"type": last(event, 9), "time": time, "track": last(event, 11, track)}
    if mark["type"] == 2:
        return mark
    name = last(event, 23)
    mark["name"] = texts[2].get(last(event, 10)) if name is None else text(name)
    category = last(event, 22)
    mark["category"] = texts[1].get(last(event, 3)) if category is None else text(category)
    mark["args"] = {}
    for number, own in fields(event):
        if number == 4:
            key = text(last(own, 10)) or texts[3].get(last(own, 1))
            mark["args"][key] = value_of(own, texts[29])
    return mark


def stage_mark(stage, time, texts):
    kind = texts[24].get(last(stage, 14))
    extra = [value for number, value in fields(stage) if number == 6]
    args = {text(last(each, 1, b"")): text(last(each, 2, b"")) for each in extra}
    host = f": {args['host fn']}" if "host fn" in args else ""
    name = texts[2].get(last(stage, 20))
    return {
        "type": 5,
        "time": time,
        "stop": time + last(stage, 2, 0),
        "track": last(stage, 11, 0),
        "queue": texts[24].get(last(stage, 13)),
        "stage": kind,
        "category": STAGES.get(kind),
        "own_name": name,
        "name": (kind or "") + host if name is None else name,
        "args": args,
    }


def slices(data):
    """The whole slices and stages of a trace of PyTorch, whose slices nest on each track."""
    marks, tracks = events(data)
    found = [mark for mark in marks if mark["type"] == 5]
    i = 0
    while i < len(marks):
        runs = []
        for type_ in (1, 2):
            run = []
            while i < len(marks) and marks[i]["type"] == type_:
                run.append(marks[i])
                i += 1
            runs.append(run)
        assert len(runs[0]) == len(runs[1])
        found += [begin | {"stop": end["time"]} for begin, end in zip(*runs, strict=True)]
        while i < len(marks) and marks[i]["type"] == 5:
            i += 1
    return found, tracks
