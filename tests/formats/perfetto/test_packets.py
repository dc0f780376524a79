"""Test the packets of Perfetto traces, read by kernels, against a decoder in plain Python."""

import gzip
import re
import struct

import pytest
from builders.perfetto_trace import Writer, a_rank, annotation, interned, message, one, varint
from builders.shared_data import needs, path_of
from hypothesis import given
from hypothesis import strategies as st
from oracles import perfetto as oracle

from fastcomm.errors import TraceFileError
from fastcomm.formats.kineto.chrome import Selection
from fastcomm.formats.perfetto import packets as reader
from fastcomm_kernels import perfetto_tables
from fastcomm_kernels.arrays import NULL
from fastcomm_kernels.json_events import KEEP_ALL, KEEP_NAMED, KEEP_NONE

KINDS = {"cpu_op": 0, "kernel": 1, "gpu_memcpy": 2, "user_annotation": 3, "cuda_runtime": 4}
OTHER = len(KINDS)
NUMBERS = ("correlation", "stream", "device", "bytes", "Seq")
TEXTS = ("Collective name", "Input Dims", "Comms Id")
SELECTION = Selection(
    kinds={name.encode(): kind for name, kind in KINDS.items()},
    keep=[KEEP_ALL] * (OTHER + 1),
    prefixes=(b"record_p",),
    row_args=NUMBERS[:4],
    detail_args=NUMBERS[4:],
    detail_texts=TEXTS,
)
ALIASES = dict(reader._ALIASES)
LIKE = {name.decode(): like.decode() for name, like in reader._ROCPROF.items()}
DATA = path_of("formats_2026")
WHOLE = re.compile(r"-?[0-9]{1,18}")


def read(tmp_path, data, selection=SELECTION, **options):
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(data)
    return reader.read_packets(path, selection, **options)


def decoded(packets):
    """The marks of a file, as the oracle has them."""
    found, k = [], 0
    for type_, time, place in zip(
        *(packets.marks[name].tolist() for name in ("type", "time", "place")), strict=True
    ):
        mark = {"type": type_, "time": time, "track": place}
        if type_ != perfetto_tables.END:
            row = {name: column[k].item() for name, column in packets.starts.items()}
            mark["name"] = None if row["name"] < 0 else packets.texts[row["name"]]
            mark["kind"] = row["kind"]
            mark["args"] = args_of(packets, row["arg_row"])
            k += 1
        if type_ == perfetto_tables.DEVICE:
            mark["kind"] = None if row["kind"] < 0 else packets.texts[row["kind"]]
        found.append(mark)
    assert k == len(packets.starts["name"])
    return found


def args_of(packets, row):
    detail = packets.detail[row]
    args = {name: packets.args[name][row].item() for name in NUMBERS[:4]}
    args["Seq"] = packets.details["Seq"][detail].item()
    args |= {name: packets.details[name][detail].item() for name in TEXTS}
    args = {name: value for name, value in args.items() if value != NULL}
    return {name: packets.texts[v] if name in TEXTS else v for name, v in args.items()}


def expected(data):
    """What must come out, by the oracle."""
    found = []
    for mark in oracle.events(data)[0]:
        kept = {
            "type": mark["type"],
            "time": mark["time"],
            "track": oracle.signed(mark["track"]),
        }
        if mark["type"] != 2:
            kept["name"] = mark["name"]
            kept["args"] = kept_args(mark["args"])
            category = LIKE.get(mark["category"], mark["category"])
            kept["kind"] = -1 if category is None else KINDS.get(category, OTHER)
        if mark["type"] == 5:
            kept["kind"] = mark["stage"]
            kept["name"] = mark["own_name"]
        found.append(kept)
    return found


def kept_args(args):
    kept = {}
    for key, value in args.items():
        name = ALIASES.get(key, key)
        if name in TEXTS:
            is_id = name == "Comms Id" and type(value) is int
            text = oracle.arg_text(value % (1 << 64) if is_id else value)
            kept[name] = None if value is None or text == "null" else text
        elif name in NUMBERS:
            kept[name] = number_of(value)
    return {name: value for name, value in kept.items() if value is not None}


def number_of(value):
    if isinstance(value, str):
        return int(value) if WHOLE.fullmatch(value) else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return None if value == NULL else oracle.signed(value % (1 << 64))


VALUES = st.recursive(
    st.one_of(
        st.integers(-(2**63), 2**63 - 1),
        st.booleans(),
        st.floats(allow_nan=False),
        st.sampled_from(["", "12", "-7", "123456789012", "1" * 18, "1" * 19, "x1", "null"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=6,
)
ARGS = st.dictionaries(st.sampled_from([*NUMBERS, *TEXTS, "device id", "else"]), VALUES)
KEYS = {1: "correlation", 2: "Input Dims", 3: "nothing"}
STRANGE = st.sampled_from(
    [
        b"",
        one(200, 7) + one(201, b"abc") + one(202, 2.5),
        varint(203 << 3 | 5) + struct.pack("<I", 9) + varint(204 << 3) + varint(5, least=10),
    ]
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["intern", "begin", "direct", "keyed", "end", "stage", "other"]),
        st.integers(0, 1),  # sequence
        st.integers(1, 3),  # name, category, stage
        st.one_of(st.integers(0, 100), st.just(10**18)),  # time
        st.integers(0, 2**64 - 1),  # track
        ARGS,
        st.booleans(),
    ),
    max_size=20,
)


@st.composite
def traces(draw):
    """Packets of two sequences in any order, with fields that nobody knows."""
    parts, strange = [], draw(STRANGE)
    writers = [Writer(sequence=n, parts=parts, strange=strange) for n in (1, 70)]
    for kind, sequence, number, time, track, args, flag in draw(STEPS):
        writer = writers[sequence]
        if kind == "intern":
            texts = {number: f"name {number} of {time}", 9: "record_param_comms"}
            categories = {number: [*KINDS, "strange"][time % 6]}
            writer.interned(
                flags=1 if flag else 2,
                names=texts,
                categories=categories,
                args=KEYS,
                queues={1: "Kernel", 2: "[07] stream 7"},
                values={5: str(time), 6: "text"},
            )
        elif kind == "begin":
            writer.begin(time, track, number, number, args)
        elif kind == "direct":
            more = ((12, interned(categories={3: "kernel"})),) * flag
            category = 3 if flag else "cpu_op"
            writer.begin(time, track, f"direct {number}", category, args, more=more)
        elif kind == "keyed":
            entry = (17, 5 + number % 2) if flag else (3, track)
            own = [(9, 1), (11, track), (4, message((1, number), entry))]
            writer.packet((11, message(*own)), time=time)
        elif kind == "end":
            writer.end(time, track)
        elif kind == "stage":
            extra = {name: str(value) for name, value in args.items()}
            writer.stage(time, number, number if flag else None, 1, 2, gpu=number, extra=extra)
        else:
            writer.packet((52, message((1, 2))), (11, message((9, 4), (11, 3))), time=time)
    return b"".join(parts)


@given(traces(), st.sampled_from([1, 7, 10**6]))
def test_marks_are_those_of_the_oracle_however_the_file_is_cut(tmp_path_factory, data, size):
    if not data:
        return
    path = tmp_path_factory.mktemp("packets") / "rank0.pftrace"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        patch.setattr(reader, "blocks", lambda _: iter(parts))
        packets = reader.read_packets(path, SELECTION)
    assert decoded(packets) == expected(data)


def test_a_made_up_rank_is_read_as_the_oracle_reads_it(tmp_path):
    data = a_rank()
    packets = read(tmp_path, data)
    assert decoded(packets) == expected(data)
    assert packets.epoch == 0
    comms = packets.details["Comms Id"]
    assert {packets.texts[code] for code in comms[comms != NULL]} == {str(2**64 - 5)}


RUNS = [f"cuspy_{run}/pftrace" for run in ("plain", "graph", "plugin", "ids")]


@needs("formats_2026")
@pytest.mark.parametrize("run", [*RUNS, "rocprofv3"])
def test_recorded_traces_are_read_as_the_oracle_reads_them(run):
    for path in sorted((DATA / run).iterdir()):
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        found = decoded(reader.read_packets(path, SELECTION))
        assert found == expected(data)
        assert len(found) > 30


def test_tracks_have_process_thread_parent_and_name(tmp_path):
    writer = Writer()
    writer.process(1, 5)
    writer.thread(2, 1, 5, 6, "worker")
    writer.track(2**64 - 1, "a track", parent=1)
    writer.packet((60, message((1, 4), (10, "static"), (99, 1))))
    writer.packet((60, b""))
    packets = read(tmp_path, writer.text())
    rows = [
        [None if value == NULL else value for value in row] for row in packets.tracks.tolist()
    ]
    texts = packets.texts
    assert [(*row[:4], row[4] is not None and texts[row[4]]) for row in rows] == [
        (1, None, 5, None, "python"),
        (2, 1, 5, 6, "worker"),
        (-1, 1, None, None, "a track"),
        (4, None, None, None, "static"),
        (0, None, None, None, False),
    ]


def test_the_selection_keeps_args_by_kind_and_name(tmp_path):
    keep = [KEEP_NAMED, KEEP_NONE, KEEP_ALL, KEEP_ALL, KEEP_ALL, KEEP_ALL]
    selection = Selection(**{**vars_of(SELECTION), "keep": keep})
    writer = Writer()
    for category in ("cpu_op", "kernel", "gpu_memcpy"):
        for name in ("record_param_comms", "aten::mm"):
            writer.begin(1, 2, name, category, {"stream": 3})
    packets = read(tmp_path, writer.text(), selection)
    assert (packets.starts["arg_row"] >= 0).tolist() == [True, False, False, False, True, True]
    assert packets.starts["is_selected"].tolist() == [True, False] * 3


def test_stages_have_their_id_and_the_ids_that_they_wait_for(tmp_path):
    writer, selection = Writer(), Selection(**vars_of(SELECTION), positions=True)
    packed = b"".join(map(varint, (7, 2**40)))
    for event, waits in ((7, ()), (2**40, (7,)), (3, (packed,)), (4, (9, packed, 2**63))):
        writer.stage(10, 5, None, 1, 2, event=event, waits=waits)
    packets = read(tmp_path, writer.text(), selection)
    assert packets.stages["event"].tolist() == [7, 2**40, 3, 4]
    found = [packets.order.get(code, ()) for code in packets.stages["waits"].tolist()]
    assert found == [(), (7,), (7, 2**40), (9, 7, 2**40, 2**63)]
    assert not read(tmp_path, writer.text()).order


def test_damaged_ids_are_an_error(tmp_path):
    writer, selection = Writer(), Selection(**vars_of(SELECTION), positions=True)
    writer.stage(1, 5, None, 1, 2)
    before = len(writer.text())
    writer.stage(10, 5, None, 1, 2, waits=(b"\x80",))
    place = r"event_wait_ids of a stage in the event at byte (\d+): a value that ends"
    with pytest.raises(TraceFileError, match=place) as caught:
        read(tmp_path, writer.text(), selection)
    assert before < int(re.search(place, str(caught.value))[1]) < len(writer.text())


def vars_of(selection):
    names = ("kinds", "keep", "prefixes", "row_args", "detail_args", "detail_texts")
    return {name: getattr(selection, name) for name in names}


def test_clocks_count_from_a_snapshot_and_up_by_difference(tmp_path):
    writer = Writer()
    clocks = [(6, 1000, 0, None), (64, 0, 1, None), (3, 400, 0, None), (65, 10, 0, 8)]
    snapshot = [
        (1, message((1, number), (2, time), (3, up), (4, unit)))
        for number, time, up, unit in clocks
    ]
    writer.packet((59, message((58, 64), (11, message((11, 9), (99, 1))), (98, 1))))
    writer.packet((6, message(*snapshot, (2, 1))), time=1000, clock=6)
    for time, clock in ((5, None), (500, 3), (7, None), (20, 65), (3, 77), (2000, 6), (1, 64)):
        own = [(9, 1), (23, "x")]
        writer.packet((11, message(*own)), time=time, clock=clock)
    writer.packet((6, message((1, message((1, 1), (2, 5))))), time=1)  # without the boot clock
    packets = read(tmp_path, writer.text())
    assert packets.marks["time"].tolist() == [1005, 1100, 1012, 1080, 3, 2000, 1013]
    assert set(packets.marks["place"].tolist()) == {9}
    assert decoded(packets) == expected(writer.text())
    assert packets.epoch is None


def test_a_real_clock_tells_the_epoch(tmp_path):
    writer = Writer()
    clocks = (message((1, number), (2, time)) for number, time in ((6, 50), (1, 10**18)))
    writer.packet((6, message(*((1, clock) for clock in clocks))))
    writer.begin(10**18 + 7, 1, "x", "cpu_op", clock=1)
    packets = read(tmp_path, writer.text())
    assert (packets.epoch, packets.marks["time"].tolist()) == (10**18 - 50, [57])


def test_a_packet_may_clear_what_was_interned_on_its_sequence(tmp_path):
    parts = []
    writers = [Writer(sequence=n, parts=parts) for n in (1, 2)]
    for writer in writers:
        writer.interned(names={1: "one"}, flags=2)
    writers[0].packet(flags=None, cleared=1)
    for writer in writers:
        writer.begin(1, 2, 1, "cpu_op")
    data = b"".join(parts)
    packets = read(tmp_path, data)
    assert [mark["name"] for mark in decoded(packets)] == [None, "one"]
    assert decoded(packets) == expected(data)


def test_values_may_be_interned_and_fields_unknown(tmp_path):
    strange = one(200, 7)
    writer = Writer()
    writer.interned(values={1: "12", 2: "ab"}, args={1: "stream"})
    for key in (*NUMBERS, *TEXTS):
        entries = [(4, message((10, key), (17, number)) + strange) for number in (1, 2, 3)]
        for entry in entries:
            writer.packet((11, message((9, 1), (23, "x"), entry)), time=1)
    nameless = [
        (4, message((3, 5))),
        (4, message((1, 1), (3, 5))),
        (4, message((1, 9), (3, 5))),
    ]
    writer.packet((11, message((9, 1), (23, "x"), *nameless)), time=1)
    extra = message((1, "stream"), (2, "4")) + strange, message((2, "5"))
    writer.packet((53, message(*((6, each) for each in extra))), time=1)
    texts = message((2, message((1, 8), (2, "eight")) + strange), (23, message((1, 2))))
    writer.packet((12, texts))
    clock = message((1, 6), (2, 5)) + strange
    writer.packet((6, message((1, clock))), time=1)
    writer.packet((60, message((1, 1), (3, message((1, 5)) + strange))))
    packets = read(tmp_path, writer.text())
    assert decoded(packets) == expected(writer.text())
    args = [mark["args"] for mark in decoded(packets)]
    assert args[:3] == [{"correlation": 12}, {}, {}]
    assert args[15:18] == [{"Collective name": "12"}, {"Collective name": "ab"}, {}]
    assert args[-2:] == [{"stream": 5}, {"stream": 4}]


@pytest.mark.parametrize("kind", ["names", "sequences", "clocks"])
def test_tables_grow(tmp_path, kind):
    parts = []
    names = {n: f"name {n}" for n in range(2100)} if kind == "names" else {7: "seven"}
    marks = 20 if kind == "names" else 200  # the oracle copies all names for each mark
    writer = Writer(parts=parts)
    writer.interned(names=names, args=dict.fromkeys(names, "stream"))
    for number in range(marks):
        own = Writer(sequence=number + 2, parts=parts) if kind == "sequences" else writer
        clocks = (message((1, n), (2, 3)) for n in (6, 200 + number * (kind == "clocks")))
        own.packet((6, message(*((1, clock) for clock in clocks))))
        own.begin(number, number, 7, None, {"correlation": number}, clock=200 + number)
        own.thread(1000 + number, 1, 1, number)
        own.thread(2000 + number, 1, 1, number)
    data = b"".join(parts)
    packets = read(tmp_path, data)
    assert decoded(packets) == expected(data)
    assert len(packets.tracks) == 2 * marks


def test_a_large_number_of_names_grows_the_texts(tmp_path):
    writer = Writer()
    for n in range(2100):
        writer.begin(n, 1, f"{n} " * 50, "cpu_op")
    packets = read(tmp_path, writer.text())
    assert [packets.texts[code] for code in packets.starts["name"]][::999] == [
        f"{n} " * 50 for n in range(0, 2100, 999)
    ]


def begin_with(*fields):
    return one(1, message((8, 1), (11, message((9, 1), *fields))))


GOOD = begin_with((23, "good"))
LONG = b"\xff" * 11
# Damage, and what the message says of it.
DAMAGE = {
    "field past its message": (one(1, b"\x5a\x7f\x48\x01"), "ends behind its message"),
    "group": (one(1, b"\x0b"), "no field of protobuf"),
    "field 0": (one(1, b"\x00\x01"), "no field of protobuf"),
    "tag of 40 bits": (one(1, b"\xff\xff\xff\xff\xff\x01\x01"), "no field of protobuf"),
    "long number": (one(1, b"\x40" + LONG), "a number of more than ten bytes"),
    "long tag": (one(1, LONG), "a number of more than ten bytes"),
    "long size": (one(1, b"\x5a" + LONG), "a number of more than ten bytes"),
    "cut number": (one(1, b"\x40\x80"), "ends behind its message"),
    "cut fixed64": (one(1, b"\x41\x01"), "ends behind its message"),
    "cut fixed32": (one(1, b"\x45\x01"), "ends behind its message"),
    "slice": (one(1, one(11, b"\x0b")), "no field of protobuf"),
    "arg": (begin_with((4, b"\x0b")), "no field of protobuf"),
    "behind args": (
        one(
            1,
            one(
                11,
                message(
                    (9, 1),
                    (4, b""),
                )
                + b"\x0b",
            ),
        ),
        "no field",
    ),
    "stage": (one(1, one(53, b"\x0b")), "no field of protobuf"),
    "extra data": (one(1, one(53, one(6, b"\x0b"))), "no field of protobuf"),
    "track": (one(1, one(60, b"\x0b")), "no field of protobuf"),
    "process": (one(1, one(60, one(3, b"\x0b"))), "no field of protobuf"),
    "interned": (one(1, one(12, b"\x0b")), "no field of protobuf"),
    "interned name": (one(1, one(12, one(2, b"\x0b"))), "no field of protobuf"),
    "snapshot": (one(1, one(6, b"\x0b")), "no field of protobuf"),
    "clock": (one(1, one(6, one(1, b"\x0b"))), "no field of protobuf"),
    "defaults": (one(1, one(59, b"\x0b")), "no field of protobuf"),
    "default track": (one(1, one(59, one(11, b"\x0b"))), "no field of protobuf"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_names_file_offset_and_kind_and_keeps_the_packets_before(tmp_path, name):
    damage, problem = DAMAGE[name]
    with pytest.raises(TraceFileError, match=problem) as caught:
        read(tmp_path, GOOD + damage + GOOD)
    message = str(caught.value)
    assert "rank0.pftrace: damaged: " in message
    assert f"in the packet at byte {len(GOOD)}, after 1 whole packets" in message
    offset = int(re.search(r"at byte (\d+), in", message)[1])
    assert len(GOOD) < offset < len(GOOD + damage)
    packets = read(tmp_path, GOOD + damage + GOOD, allow_truncated=True)
    assert packets.is_truncated
    assert len(packets.warnings) == 1
    assert [mark["name"] for mark in decoded(packets)] == ["good"]


@pytest.mark.parametrize("size", [1, 2, len(GOOD) - 1])
def test_a_file_that_ends_inside_a_packet_is_truncated(tmp_path, size):
    data = GOOD * 2 + GOOD[:size]
    place = f"ends at byte {len(data)}, inside the packet at byte {2 * len(GOOD)}"
    with pytest.raises(TraceFileError, match=f"truncated: the file {place}, after 2 whole"):
        read(tmp_path, data)
    assert len(decoded(read(tmp_path, data, allow_truncated=True))) == 2


def test_a_truncated_gzip_file_is_truncated(tmp_path):
    whole = gzip.compress(GOOD * 10_000)
    path = tmp_path / "rank0.pftrace.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceFileError, match="truncated: the decompressed file ends at byte"):
        reader.read_packets(path, SELECTION)
    path.write_bytes(whole[:15])
    with pytest.raises(TraceFileError, match=r"rank0\.pftrace\.gz: "):
        reader.read_packets(path, SELECTION)


def test_values_in_one_another_have_a_limit(tmp_path):
    value = []
    for _ in range(31):
        value = [value]
    data = begin_with((4, annotation("Input Dims", value)))
    assert decoded(read(tmp_path, data))[0]["args"]["Input Dims"] == "[" * 32 + "]" * 32
    data = begin_with((4, annotation("Input Dims", [[value]])))
    with pytest.raises(TraceFileError, match=r"at byte \d+: more than 32 values in one"):
        read(tmp_path, data)


@pytest.mark.parametrize("content", [b"\x62\x7f", b"\x0b", LONG, b"\x30"])
def test_a_damaged_value_is_an_error(tmp_path, content):
    data = begin_with((4, one(10, "Input Dims") + one(12, content)))
    before = begin_with((4, annotation("Input Dims", [1])))
    for prefix in (b"", before, before * 2):
        place = r"the value of 'Input Dims' in the event at byte (\d+): "
        with pytest.raises(TraceFileError, match=place) as caught:
            read(tmp_path, prefix + data)
        offset = int(re.search(place, str(caught.value))[1])
        assert len(prefix) < offset < len(prefix + data)


def test_a_compressed_file_without_text_names_the_byte(tmp_path):
    path = tmp_path / "rank0.pftrace.gz"
    path.write_bytes(gzip.compress(b"\x0a\x02\x40\x01" * 1000)[:14])
    with pytest.raises(TraceFileError, match="cut short at byte 14, and has no text"):
        reader.read_packets(path, SELECTION)


def test_other_files_are_named(tmp_path):
    for data, found in ((b"", "empty"), (b"{}", "begins with"), (b"PK\3\4", "ZIP archive")):
        with pytest.raises(TraceFileError, match=found):
            read(tmp_path, data)


def test_a_packet_longer_than_64_mib_is_an_error(tmp_path):
    data = GOOD + b"\x0a" + varint(1 << 28) + bytes(80 << 20)
    with pytest.raises(TraceFileError, match="longer than 64 MiB"):
        read(tmp_path, data)


def test_compressed_packets_are_an_error(tmp_path):
    data = GOOD + one(1, message((50, b"zlib")))
    with pytest.raises(TraceFileError, match="1 packets are compressed"):
        read(tmp_path, data)


def test_unknown_fields_of_a_trace_are_skipped(tmp_path):
    assert len(decoded(read(tmp_path, GOOD + one(7, b"abc") + one(9, 1) + GOOD))) == 2


@given(st.integers(-(2**63), 2**64 - 1), st.integers(1, 10))
def test_a_number_of_up_to_ten_bytes_is_itself(tmp_path_factory, value, least):
    track = varint(11 << 3, least=least % 3 + 1) + varint(value, least=least)
    data = one(1, one(11, message((9, 1)) + track))
    packets = read(tmp_path_factory.mktemp("number"), data)
    assert packets.marks["place"].tolist() == [oracle.signed(value % (1 << 64))]
