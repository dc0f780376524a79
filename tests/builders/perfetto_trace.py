"""Write small Perfetto traces, field by field."""

import struct
from dataclasses import dataclass, field

NEGATIVE = 1 << 64


def varint(value, least=1):
    """A number; `least` bytes at least, as some writers reserve room."""
    value %= NEGATIVE
    parts = bytearray()
    while value >= 128 or len(parts) + 1 < least:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def one(number, value):
    """A field, its wire type by the type of the value; a float has eight bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    content = value.encode() if isinstance(value, str) else bytes(value)
    return varint(number << 3 | 2) + varint(len(content)) + content


def message(*fields):
    """Fields as pairs of number and value, in this order; None is left out."""
    return b"".join(one(number, value) for number, value in fields if value is not None)


def annotation(name, value, iid=None):
    """A debug annotation; `iid` instead of the name."""
    start = [(1, iid)] if iid is not None else [(10, name)] if name is not None else []
    if isinstance(value, bool):
        return message(*start, (2, int(value)))
    if isinstance(value, dict):
        return message(*start, *((11, annotation(key, each)) for key, each in value.items()))
    if isinstance(value, list):
        return message(*start, *((12, annotation(None, each)) for each in value))
    kind = {int: 4, float: 5, str: 6}[type(value)]
    return message(*start, (kind, value))


@dataclass(kw_only=True)
class Writer:
    """Packets of one sequence; `parts` may be shared by several."""

    sequence: int = 1
    parts: list = field(default_factory=list)
    strange: bytes = b""  # put into every packet and payload

    def packet(self, *fields, time=None, flags=2, clock=None, cleared=None):
        self.parts.append(
            one(
                1,
                message((8, time), (10, self.sequence), (13, flags), (58, clock), (41, cleared))
                + self.strange
                + message(*fields),
            )
        )

    def text(self):
        return b"".join(self.parts)

    def start(self, *, real=True, time=10**18):
        clocks = [(1, message((1, 6), (2, time)))]
        clocks += [(1, message((1, 1), (2, time)))] * real
        self.packet((6, message(*clocks)), time=time, flags=None)

    def process(self, uuid, pid, name="python"):
        self.packet((60, message((1, uuid), (3, message((1, pid), (6, name))))))

    def thread(self, uuid, parent, pid, tid, name="thread"):
        owner = message((1, pid), (2, tid), (5, name))
        self.packet((60, message((1, uuid), (5, parent), (4, owner))))

    def track(self, uuid, name, parent=None):
        self.packet((60, message((1, uuid), (5, parent), (2, name))))

    def interned(self, flags=1, **kinds):
        """Texts by number, of `names`, `categories`, `args`, `queues` and `values`."""
        self.packet((12, interned(**kinds)), flags=flags)

    def begin(self, time, track, name, category=None, args=(), more=(), **packet):
        """A begin: name and category as numbers or as texts."""
        fields = [
            (9, 1),
            (11, track),
            (10 if isinstance(name, int) else 23, name),
            (3 if isinstance(category, int) else 22, category),
            *((4, annotation(key, value)) for key, value in dict(args).items()),
        ]
        self.packet((11, message(*fields) + self.strange), *more, time=time, **packet)

    def end(self, time, track, **packet):
        self.packet((11, message((9, 2), (11, track))), time=time, **packet)

    def stage(  # noqa: PLR0913 - a field each
        self, time, length, name, stage, queue, *, gpu=0, extra=None, event=1, waits=()
    ):
        """A stage; `waits` are ids of others, or bytes with some of them."""
        fields = [(1, event), (2, length), (11, gpu), (13, queue), (14, stage), (20, name)]
        fields += [(18, own) for own in waits]
        fields += [(6, message((1, k), (2, v))) for k, v in (extra or {}).items()]
        self.packet((53, message(*fields) + self.strange), time=time)


NUMBERS = {"categories": 1, "names": 2, "args": 3, "queues": 24, "values": 29}


def interned(**kinds):
    return message(
        *(
            (NUMBERS[kind], message((1, number), (2, text)))
            for kind, texts in kinds.items()
            for number, text in texts.items()
        )
    )


def a_rank(rank=0, world=2, gpu=0, tracks=0, process=77):
    """A trace of PyTorch: two steps of an operator, two kernels, a copy and a collective."""
    writer = Writer()
    writer.start()
    writer.process(tracks + 1, process)
    writer.thread(tracks + 2, tracks + 1, process, process + 1)
    writer.process(tracks + 3, gpu, f"GPU {gpu}")
    writer.thread(tracks + 4, tracks + 3, gpu, 7, "stream 7")
    writer.interned(
        categories={1: "user_annotation", 2: "cpu_op", 3: "cuda_runtime"},
        names={
            1: "ProfilerStep#1",
            2: "ProfilerStep#2",
            3: "record_param_comms",
            4: "cudaLaunchKernel",
            5: "gemm",
            6: "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            7: "cudaMemcpyAsync",
        },
        queues={1: "Kernel", 2: "Memcpy", 100: "[07] stream 7", 101: "[20] DP"},
    )
    comm = {
        "Collective name": "allreduce",
        "In msg nelems": 1024,
        "Out msg nelems": 1024,
        "Group size": world,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(range(world))),
        "Rank": rank,
        "Input Dims": [[[1024]], []],
        "Comms Id": -5,
    }
    base, slices, stages = 10**18 + 1000, [], []
    common = {"device id": str(gpu), "context id": "1"}
    for step in range(2):
        at = base + 1_000_000 * step
        number = 10 * step
        slices += [
            (at, at + 900_000, 1 + step, 1, {"Ev Idx": 0}),
            (at + 1000, at + 50_000, 3, 2, comm),
            (at + 2000, at + 3000, 4, 3, {"cbid": 211, "correlation": number + 1}),
            (at + 60_000, at + 61_000, 4, 3, {"cbid": 211, "correlation": number + 2}),
            (at + 62_000, at + 63_000, 7, 3, {"cbid": 41, "correlation": number + 3}),
        ]
        stages += [
            (at + 5000, 100_000, 6, 1, 101, {"stream id": "20", "correlation": number + 1}),
            (at + 70_000, 200_000, 5, 1, 100, {"stream id": "7", "correlation": number + 2}),
            (
                *(at + 300_000, 9000, None, 2, 100),
                {"stream id": "7", "correlation": number + 3, "bytes": "4096"},
            ),
        ]
    for begin, _, name, category, args in slices:
        writer.begin(begin, tracks + 2, name, category, args)
    for _, stop, *_ in slices:
        writer.end(stop, tracks + 2)
    for time, length, name, stage, queue, extra in stages:
        texts = {key: str(value) for key, value in (common | extra).items()}
        writer.stage(time, length, name, stage, queue, gpu=gpu, extra=texts)
    writer.packet((52, message((4, 1), (2, message((1, 0), (2, 5))))), time=base)
    return writer.text()
