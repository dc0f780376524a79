"""Both encodings of one run of PyTorch: reading the protobuf beside reading the JSON."""

import gzip
import json

import pytest
from builders.perfetto_trace import Writer
from timing import best

from fastcomm.formats.kineto import categories
from fastcomm.formats.kineto.categories import METRICS
from fastcomm.formats.perfetto import reader
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

ROUNDS = 9
STAGES = {"kernel": 1, "gpu_memcpy": 2, "gpu_memset": 3, "gpu_user_annotation": 4}
DEVICE = {"device": "device id", "stream": "stream id"}


class Numbers(dict):
    """A number for each text, from 1 on."""

    def __missing__(self, text):
        self[text] = len(self) + 1
        return self[text]

    def texts(self):
        return {number: text for text, number in self.items()}


def as_perfetto(document):
    """The trace as PyTorch writes it: all begins, then all ends, then stages."""
    base = document.get("baseTimeNanoseconds", 0)
    names, kinds, tracks, lanes = Numbers(), Numbers(), Numbers(), Numbers()
    slices, stages = [], []
    for event in document["traceEvents"]:
        if event.get("ph") != "X":
            continue
        start, length = base + round(event["ts"] * 1000), round(event["dur"] * 1000)
        if stage := STAGES.get(event["cat"]):
            extra = {DEVICE.get(key, key): str(v) for key, v in event["args"].items()}
            lane = 100 + lanes[event["tid"]]
            stages.append((start, length, names[event["name"]], stage, lane, extra))
        else:
            track = tracks[event["pid"], event["tid"]]
            category, args = kinds[event["cat"]], event.get("args", {})
            args = {key: args[key] for key in sorted(args) if args[key] is not None}
            slices.append((start, start + length, track, names[event["name"]], category, args))
    queues = {1: "Kernel", 2: "Memcpy", 3: "Memset", 4: "Annotation"}
    queues |= {100 + number: f"[{tid}] stream {tid}" for tid, number in lanes.items()}
    writer = Writer()
    writer.start(time=base)
    for track, number in tracks.items():
        pid, tid = (key if isinstance(key, int) else number for key in track)
        writer.thread(number, None, pid, tid)
    writer.interned(names=names.texts(), categories=kinds.texts(), queues=queues)
    for start, _, track, name, category, args in slices:
        writer.begin(start, track, name, category, args)
    for _, stop, track, *_ in slices:
        writer.end(stop, track)
    for start, length, name, stage, lane, extra in stages:
        writer.stage(start, length, name, stage, lane, extra=extra)
    return writer.text()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A rank of 20 MB of JSON, and the same as protobuf; both gzipped, as PyTorch does."""
    folder = tmp_path_factory.mktemp("perfetto")
    job = Job.of(ranks=8, steps=6)
    (plain,) = write(job, folder, ranks=[0], filler_bytes=20_000_000, compress=False)
    text = plain.read_bytes()
    encoded = {"json": text, "pftrace": as_perfetto(json.loads(text))}
    found = {kind: folder / f"rank0.{kind}.gz" for kind in encoded}
    for kind, path in found.items():
        path.write_bytes(gzip.compress(encoded[kind], 5))
    return found


def test_perfetto_rank(quotient, paths):
    runs = (
        lambda: categories.scan(paths["json"], METRICS),
        lambda: reader.scan(paths["pftrace"], METRICS),
    )
    (scanned, _), (own, _) = (run() for run in runs)  # compiles
    assert len(own.columns["start"]) == len(scanned.columns["start"])
    quotient("perfetto_rank", lambda: best(*runs, rounds=ROUNDS))
