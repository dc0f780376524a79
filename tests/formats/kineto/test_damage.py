"""Test that a damaged trace gives equal events, or an error or warning with the byte."""

import gzip
import json
import random
import re

import orjson
import pytest
from builders import kineto_text as k
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.formats.kineto.categories import CATEGORIES, METRICS
from fastcomm.formats.kineto.chrome import scan_file
from fastcomm.trace.schema import KIND

MANY = 2000
KEPT = {"kernel", "memcpy", "memset", "runtime", "annotation"}
IF_LONG = {"cpu_op", "python"}  # of at least 20 us


def events_of(document):
    """The kept events of a document that is valid: name, kind, start, stop."""
    rows = document if isinstance(document, list) else document.get("traceEvents", [])
    found = []
    for row in rows:
        if (
            not isinstance(row, dict)
            or row.get("ph") != "X"
            or not isinstance(row.get("cat"), str)
        ):
            continue
        kind = CATEGORIES.get(row["cat"].encode(errors="replace"))
        names = {number: name for name, number in KIND.items()}
        name = row.get("name", "")
        named = isinstance(name, str) and re.match("record_p|c10d::|nccl:|gloo:", name)
        if kind is None or names[kind] not in KEPT | IF_LONG:
            continue
        if names[kind] in IF_LONG and not named and not is_long(row.get("dur", 0)):
            continue
        found.append(
            (name if isinstance(name, str) else "", kind, row.get("ts"), row.get("dur", 0))
        )
    return found


def is_long(dur):
    """Whether a length in us is kept; one that is no number is damage, and not left out."""
    return not isinstance(dur, int | float) or ns(dur) >= 20_000


def scanned(path, **options):
    found = scan_file(path, METRICS, **options)
    columns = found.columns
    rows = zip(columns["name"], columns["kind"], columns["start"], columns["stop"], strict=True)
    return found, [
        (found.texts[name], int(kind), int(a), int(b))
        for name, kind, a, b in rows
        if kind < len(KIND)  # others are of no known category
    ]


def ns(value):
    return round(float(value) * 1000)


def agrees(path, text):
    """Whether what is read of a text that JSON accepts is all of it, or its loss is said."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        document = None
    try:
        found, rows = scanned(path)
    except TraceFileError as error:
        if str(path) not in str(error):
            raise AssertionError(f"no address: {error}") from error
        return
    if found.warnings:
        assert all("byte" in warning or "JSON" in warning for warning in found.warnings)
        return
    if document is None or not isinstance(document, dict | list):
        return
    wanted = events_of(document)
    assert len(rows) == len(wanted), "events are missing, and nobody says so"
    for (name, kind, start, stop), (name_, kind_, ts, dur) in zip(rows, wanted, strict=True):
        assert kind == kind_
        assert name == name_ or "�" in name
        if isinstance(ts, int | float) and isinstance(dur, int | float) and abs(ts) < 1e9:
            assert abs(start - ns(ts)) <= 1
            assert abs(stop - ns(ts) - ns(dur)) <= 2


SMALL = [
    k.mark("ProfilerStep#0", 0, 100),
    k.launch(1.5, 7),
    k.kernel("void gemm<float, {x}>(int[4])", 10.25, 5.125, correlation=7, grid=[1, 2, 3]),
    k.event(
        "aten::mm", "cpu_op", 1, 2, pid=100, tid=1, Input_Dims=[[2, 3], []], Note='a "b" \\ c'
    ),
    k.all_reduce(20.001, 4, Process_Group_Ranks="[0, 1]"),
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 3},
]


def text_of(indent=None, **words):
    return json.dumps(k.document(SMALL, **words), indent=indent).encode()


@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_truncated_anywhere_is_an_error_with_byte_and_complete_events(tmp_path, indent):
    text = text_of(indent)
    path = tmp_path / "rank0.json"
    begins = text.index(b'"traceEvents"')
    for end in range(len(text) - 1):
        path.write_bytes(text[:end])
        with pytest.raises(TraceFileError) as error:
            scanned(path)
        if end > begins + len('"traceEvents": ['):
            assert f"at byte {end}" in str(error.value)
            whole = int(re.search(r"after (\d+) whole events", str(error.value))[1])
            found, _ = scanned(path, allow_truncated=True)
            assert found.event_count == whole
            assert any("truncated" in warning for warning in found.warnings)


def test_a_truncated_compressed_file_is_an_error(tmp_path):
    packed = gzip.compress(text_of())
    path = tmp_path / "rank0.json.gz"
    for end in range(len(packed)):
        path.write_bytes(packed[:end])
        with pytest.raises(TraceFileError, match=r"truncated|cut short|empty|no JSON trace"):
            scanned(path)


def test_a_wrong_byte_in_a_compressed_file_is_an_error_or_harmless(tmp_path):
    packed = gzip.compress(text_of())
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(packed)
    _, whole = scanned(path)
    for place in range(len(packed)):
        path.write_bytes(packed[:place] + bytes([packed[place] ^ 0x55]) + packed[place + 1 :])
        try:
            _, rows = scanned(path)
        except TraceFileError:
            continue
        assert rows == whole


@given(st.data())
def test_a_flipped_deleted_or_inserted_byte_is_never_silent(tmp_path_factory, data):
    text = bytearray(text_of(data.draw(st.sampled_from([None, 1]))))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        change = data.draw(st.sampled_from(["flip", "delete", "insert"]))
        byte = data.draw(st.one_of(st.sampled_from(b'"{}[],:\\ \n0x'), st.integers(0, 255)))
        if change == "flip":
            text[place] = byte
        elif change == "delete":
            del text[place]
        else:
            text.insert(place, byte)
    path = tmp_path_factory.mktemp("flip") / "rank0.json"
    path.write_bytes(bytes(text))
    agrees(path, bytes(text))


@pytest.mark.parametrize(
    "name",
    [
        "dlrm_8rank/worker0_step_12.1694128201545.pt.trace.json.gz",
        "sampled_2of128/rank-0.json.gz",
        "gloo_4rank/rank0.pt.trace.json.gz",
        "gloo_2x2/kineto_trace_0.json.gz",
    ],
)
def test_a_mutated_real_trace_is_never_silent(real, tmp_path, name):
    whole = gzip.decompress(real(name).read_bytes())
    path = tmp_path / "rank0.json"
    path.write_bytes(whole)
    agrees(path, whole)
    rng = random.Random(7)
    for _ in range(25):
        text = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(text))
            match rng.randrange(4):
                case 0:
                    text[place] = rng.choice(b'"{}[],:\\ \n0e')
                case 1:
                    del text[place : place + rng.choice([1, 1, 10, 5000])]
                case 2:
                    text[place:place] = rng.choice(
                        [b'"', b"{", b"]", b"}", b"\\", b"\0", b"\xff"]
                    )
                case _:
                    text[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(text))
        agrees(path, bytes(text))


def lines(*rows):
    """A document as Kineto lays it out, of events that are text already."""
    head = '{\n  "schemaVersion": 1,\n  "distributedInfo": {"rank": 0},\n  "traceEvents": [\n'
    return head + ",\n".join(f"  {row}" for row in rows) + '\n  ],\n  "traceName": "x"\n}\n'


def row(name="gemm", ts=1, args="{}", cat="kernel"):
    return (
        f'{{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": 0, "tid": 7,\n'
        f'    "ts": {ts}, "dur": 1.000,\n    "args": {args}\n  }}'
    )


def read_text(tmp_path, text, **options):
    path = tmp_path / "rank0.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return scanned(path, **options)


def names(rows):
    return [name for name, *_ in rows]


@pytest.mark.parametrize(
    "args",
    [
        '{"Process Group Description": , "stream": 7}',
        '{"Process Group Description":   , "stream": 7}',
        '{"stream": 7, "Process Group Description": }',
        '{"Concrete Inputs": [nan, inf, -inf], "stream": 7}',
    ],
)
def test_missing_values_and_bare_words_in_args_are_read(tmp_path, args):
    found, rows = read_text(tmp_path, lines(row("a"), row("b", args=args), row("c")))
    assert names(rows) == ["a", "b", "c"]
    assert found.columns["stream"][1] == 7
    assert found.warnings == ()


@pytest.mark.parametrize(
    "broken",
    [
        row('operator"" _x'),
        row("b", args='{"Name": "he said /"hi/" loudly"}'),
        row("b", args='{"Name": "no end}'),
        row("b", args='{"a": [{"b": 1}]}, "fault" 1'),
        '{\n    "ph": "M", "name": "process_labels", "args": {"labels": "GPU "0""}\n  }',
        row("b", ts="1x2"),
        row("b", ts='"soon"'),
        row("b", args='{"a": [1, 2}'),
    ],
)
def test_an_event_that_does_not_parse_is_dropped_with_its_byte_and_no_other_is(
    tmp_path, broken
):
    text = lines(row("a"), broken, *[row(f"c{n}") for n in range(MANY)])
    found, rows = read_text(tmp_path, text)
    assert names(rows) == ["a", *[f"c{n}" for n in range(MANY)]]
    (warning,) = found.warnings
    assert f"at byte {text.index(broken)}" in warning
    assert f"1 of {MANY + 2} events" in warning


def test_a_false_end_of_the_events_is_an_error(tmp_path):
    text = lines(row("a"), row("b", args='{"a": [{"b": 1}], "fault" 1}'), row("c"))
    with pytest.raises(TraceFileError, match=r"do not parse.*at byte \d+"):
        read_text(tmp_path, text)


def test_the_last_event_may_be_the_broken_one(tmp_path):
    found, rows = read_text(tmp_path, lines(row("a"), row("b"), row('c"d')))
    assert names(rows) == ["a", "b"]
    assert "1 of 3 events" in found.warnings[0]


def test_more_than_one_in_a_thousand_is_an_error(tmp_path):
    text = lines(row("a"), row('x"y'), row("b"), row('x"y'), row("c"))
    with pytest.raises(TraceFileError, match=r"2 of 5 events do not parse.*byte \d+, \d+"):
        read_text(tmp_path, text)


def test_quotes_in_log_lines_and_empty_values_are_tolerated(tmp_path):
    text = lines(row("a")).replace('"rank": 0', '"rank": , "world_size": 4')
    text = text.replace(
        '"traceName": "x"', '"INFO": ["say "x" now"],\n  "baseTimeNanoseconds": 5000'
    )
    found, rows = read_text(tmp_path, text)
    assert names(rows) == ["a"]
    assert found.envelope["baseTimeNanoseconds"] == 5000
    assert found.envelope["distributedInfo"]["world_size"] == 4
    assert "not valid JSON" in found.warnings[0]


def test_bytes_that_do_not_print_and_are_no_utf8_are_read(tmp_path):
    text = (
        lines(row("a"), row("x\x01y"), row("c")).encode().replace(b"x\x01y", b"x\x01\xff\xfey")
    )
    _, rows = read_text(tmp_path, text)
    assert names(rows)[::2] == ["a", "c"]
    assert names(rows)[1].startswith("x\x01�")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"{}", 'no "traceEvents"'),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "no JSON trace: found binary data"),
        (b'{"traceEvents": [], "traceEvents": []}', "two lists"),
        (b'{"a": {"traceEvents": []}}', "not a key of the outer object"),
        (gzip.compress(b"x" * 10_000, mtime=0)[:20], "empty|no JSON trace|cut short"),
        (b'{"traceEvents": [' + b"[" * (100 * MANY), "truncated|do not parse"),
        (b'{"traceEvents": [{"name": "' + b"x" * (1000 * MANY), "truncated"),
    ],
)
def test_a_file_that_is_not_a_trace_is_an_error_that_describes_it(tmp_path, content, message):
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(FastcommError, match=message) as error:
        scanned(path)
    assert str(path) in str(error.value)


def test_several_members_of_a_gzip_file_are_one_text(tmp_path):
    text = text_of()
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(text[:200]) + gzip.compress(text[200:]) + bytes(16))
    plain = tmp_path / "plain.json"
    plain.write_bytes(text)
    assert scanned(path)[1] == scanned(plain)[1]
