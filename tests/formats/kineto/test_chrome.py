"""Test `scan_file` against the JSON module of the standard library."""

import json
import random
from decimal import Decimal

import orjson
import pyarrow as pa
import pytest
from builders.chrome_files import SELECTION, agrees, found, scan, zipped
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st
from numba.core import config
from oracles.chrome import TwiceError, is_wanted, records, spelled

from fastcomm.errors import TraceFileError
from fastcomm.formats.kineto import chrome, envelope

INTERPRETED = bool(config.DISABLE_JIT)

# ------------------------------------------------------------------- made-up traces


class Raw(str):
    """A number as it is to stand in the text."""


class Pairs(list):
    """The members of an object, in an order of their own, a key maybe twice."""


def written(value, style, depth=0):
    """JSON text in one of the styles of profilers and tools."""
    comma, colon, indent, ascii_only = style
    gap = "\n" + indent * (depth + 1) if indent else ""
    end = "\n" + indent * depth if indent else ""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        keys = (json.dumps(key, ensure_ascii=ascii_only) for key, _ in value)
        values = (written(each, style, depth + 1) for _, each in value)
        parts = [f"{key}{colon}{each}" for key, each in zip(keys, values, strict=True)]
        return "{" + gap + (comma + gap).join(parts) + end + "}"
    if isinstance(value, list):
        parts = [written(each, style, depth + 1) for each in value]
        return "[" + gap + (comma + gap).join(parts) + end + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


STYLES = st.tuples(
    st.sampled_from([",", ", ", " ,", ",\n   "]),
    st.sampled_from([":", ": ", " : ", ":\t"]),
    st.sampled_from(["", "", " ", "    "]),
    st.booleans(),
)
TEXT = st.text(
    st.sampled_from('ab ,:{}[]"\\/\n\té€𝄞\ud834\udd1e') | st.characters(), max_size=9
)
NAMES = st.builds(
    "{}{}".format, st.sampled_from(["", "c10d::", "nccl:", "aten::", "x" * 70]), TEXT
)
WORDS = st.sampled_from(["Spans", "Traces", "", "é", 'a"b'])
COUNTS = st.sampled_from(
    [
        "0",
        "7",
        "-7",
        "68.0",
        "41506",
        "123456789",
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775808",
        "1e3",
        "4.740741",
        "0.5",
        "-0.5",
        "1E-7",
        "12345678901234567890123",
    ]
).map(Raw)
TIMES = st.sampled_from(
    [
        "0",
        "0.0",
        "1",
        "-5.5",
        "100.5",
        "4458676983543.183",
        "1712000000000123.456",
        "1682725898236567",
        "1e-05",
        "2.5E+3",
        "0.0004",
        "0.0005",
        "1682725898236567.0",
        "4611686018427387.5",
        "1e400",
        "99999999999999999999",
        "5e15",
    ]
).map(Raw)
SPANS = st.sampled_from(["0", "1", "41.407", "68.0", "1e-05", "15.6334", "-1", "0.0005"]).map(
    Raw
)
# A phase and categories in which a character is written as an escape.
SPELLED = [Raw(r'"\u0058"'), Raw(r'"k\u0065rnel"'), Raw(r'"cuda\u005Fruntime"')]
LEAVES = st.none() | st.booleans() | COUNTS | TEXT
OTHERS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(st.tuples(TEXT, inner), max_size=3, unique_by=lambda pair: pair[0]).map(
            Pairs
        )
    ),
    max_leaves=6,
)
ARG = st.one_of(
    st.tuples(st.sampled_from(["correlation", "stream", "Seq"]), COUNTS | COUNTS | OTHERS),
    st.tuples(st.sampled_from(["correlation", "Seq"]), st.integers(-9, 99).map(str)),
    st.tuples(st.sampled_from(["dtype", "Process Group Name"]), TEXT | TEXT | OTHERS),
    st.tuples(st.sampled_from(["grid", "External id", "Seq2", "name", "ts", "", "é"]), OTHERS),
    st.tuples(TEXT, OTHERS),
)


def absent(value):
    return st.just(None) | st.tuples(*value) if isinstance(value, tuple) else value


@st.composite
def events(draw):
    """An event: mostly of work, its members in any order, some missing, some strange."""
    if draw(st.integers(0, 30)) == 0:
        return Pairs(draw(st.lists(st.tuples(TEXT, OTHERS), max_size=2)))
    members = [
        ("ph", draw(st.sampled_from(["X"] * 8 + ["i", "M", "f", "XX", "", None, SPELLED[0]]))),
        ("name", draw(NAMES)),
        ("ts", draw(TIMES if draw(st.booleans()) else st.integers(0, 99).map(str).map(Raw))),
    ]
    if draw(st.integers(0, 9)):
        known = ["kernel", "cuda_runtime", "cpu_op", "python_function", "other", "kerne"]
        cat = st.sampled_from([*known, *known, *SPELLED[1:]])
        members.append(("cat", draw(cat)))
    if draw(st.integers(0, 9)):
        members.append(("dur", draw(SPANS)))
    if draw(st.integers(0, 4)):
        members.append(("args", Pairs(draw(st.lists(ARG, max_size=6)))))
    lane = COUNTS | WORDS | COUNTS | st.none()
    members += [(key, draw(lane)) for key in ("pid", "tid") if draw(st.integers(0, 4))]
    if not draw(st.integers(0, 5)):
        extra = draw(st.sampled_from(["ts", "dur", "pid", "args", "id", "bp", "s", "ph", "ph"]))
        strange = {"ts": TIMES, "dur": SPANS, "ph": st.sampled_from(["X", "X", "i", "ph"])}
        members.append((extra, draw(strange.get(extra, COUNTS))))
    return Pairs(draw(st.permutations(members)) if draw(st.booleans()) else members)


ENVELOPE = st.lists(
    st.tuples(
        st.sampled_from(["schemaVersion", "baseTimeNanoseconds", "INFO", "distributedInfo"]),
        st.integers(0, 1 << 40).map(str).map(Raw) | st.lists(TEXT, max_size=3) | OTHERS,
    ),
    max_size=3,
    unique_by=lambda pair: pair[0],
)


@st.composite
def traces(draw):
    """The text of a trace: an object with its events at any place, or a bare list."""
    listed = draw(st.lists(events(), max_size=8))
    style = draw(STYLES)
    if draw(st.integers(0, 5)) == 0:
        text = written(listed, style)
    else:
        before, after = draw(ENVELOPE), draw(ENVELOPE)
        after = [pair for pair in after if pair[0] not in dict(before)]
        text = written(Pairs([*before, ("traceEvents", listed), *after]), style)
    mark = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf", b" \n"]))
    return mark + text.encode(errors="surrogatepass") + draw(st.sampled_from([b"", b"\n"]))


def expected_of(text):
    """The records; of events of a strange spelling "spelled" if unwanted, else None."""
    try:
        kept = records(text)
    except TwiceError:  # which of two lengths counts is not defined
        reject()
    return [
        each if not is_spelled else "spelled" if each == "unwanted" else None
        for each, is_spelled in zip(kept, spelled(text), strict=True)
    ]


def is_utf8(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def without_quotes(envelope):
    """The envelope with a time and ranks as numbers, where some programs write text."""

    def number(key, value):
        named = key in ("baseTimeNanoseconds", "rank", "world_size", "pg_size")
        digits = str(value).removeprefix("-")
        whole = isinstance(value, str) and digits.isascii() and digits.isdigit()
        return int(value) if named and whole and len(digits) < 20 else value

    def hook(members):
        return {key: number(key, value) for key, value in members.items()}

    return json.loads(json.dumps(envelope), object_hook=hook)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(traces(), st.sampled_from([0, 1, 3]), st.sampled_from([None, None, 1, 7, 16, 64, 200]))
@example(b'{"baseTimeNanoseconds": "5", "rank": "-", "traceEvents": []}', 0, None)
def test_a_scan_finds_what_the_standard_library_finds(tmp_path, monkeypatch, text, gz, block):
    if INTERPRETED and block:
        block = max(block, 200)
    if not is_utf8(text):
        text = text.decode(errors="replace").encode()
    expected = expected_of(text)
    # Whether an unwanted event with a strange spelling is looked at so closely is no matter.
    least, most = (
        expected.count(None),
        len([each for each in expected if not each or each == "spelled"]),
    )
    data = zipped(text, gz) if gz else text
    try:
        scanned = scan(tmp_path, data, monkeypatch=monkeypatch, block=block)
    except TraceFileError as error:
        if "do not parse" not in str(error) or (most < 2 and most != len(expected)):
            raise
        return
    rows, offsets = found(scanned)
    wanted = [each for each in expected if isinstance(each, dict)]
    assert len(rows) == len(wanted)
    assert all(map(agrees, rows, wanted))
    refused = len(expected) - scanned.event_count
    assert least <= refused <= min(most, 1)
    assert refused < len(expected) or not refused
    assert all(text[offset : offset + 1] == b"{" for offset in offsets)
    assert offsets == sorted(offsets)
    try:
        around = orjson.loads(text.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError:  # it refuses half a surrogate pair and a number too large
        around = None
    if around is not None:
        expected = {} if isinstance(around, list) else around | {"traceEvents": []}
        assert scanned.envelope == without_quotes(expected)
        assert len(scanned.warnings) == refused
    pa.array(scanned.texts, pa.string())


def test_any_text_becomes_a_valid_arrow_string(tmp_path):
    names = [r"\ud834", r"\udd1e\ud834", r"\ud834\udd1e", r"\u0000", r"bad \x escape", "\x01"]
    event = '{{"ph": "X", "cat": "kernel", "name": "{}", "ts": 1, "dur": 1}}'
    text = '{"traceEvents": [' + ",".join(map(event.format, names)) + "]}"
    rows, _ = found(scanned := scan(tmp_path, text.encode()))
    assert [row["name"] for row in rows] == [
        "\ufffd", "\ufffd\ufffd", "𝄞", "\0", r"bad \x escape", "\x01"
    ]  # fmt: skip
    pa.array(scanned.texts, pa.string())


def test_a_name_that_is_not_utf8_is_read_with_replacement_characters(tmp_path):
    event = b'{"ph": "X", "cat": "kernel", "name": "a\xff\x80b", "ts": 1, "dur": 1}'
    text = b'{"traceEvents": [%s]}' % event
    rows, _ = found(scan(tmp_path, text))
    assert rows[0]["name"] == "a\ufffd\ufffdb"


# ------------------------------------------------------------------- blocks and sizes


def many(count, size=0):
    event = '{{"ph": "X", "cat": "kernel", "name": "k{}", "ts": {}, "dur": 1, "args": {}}}'
    args = '{{"pad": "{}", "Seq": {}}}'
    listed = [event.format(k % 7000, k, args.format("p" * size, k)) for k in range(count)]
    return ('{"traceEvents": [\n' + ",\n".join(listed) + "\n]}").encode()


def test_many_rows_and_many_names_are_kept(tmp_path):
    count = 300 if INTERPRETED else 20_000
    rows, _ = found(scan(tmp_path, many(count)))
    assert [row["start"] for row in rows] == [k * 1000 for k in range(count)]
    assert [row["Seq"] for row in rows] == list(range(count))
    assert rows[-1]["name"] == f"k{(count - 1) % 7000}"


def test_an_event_may_be_longer_than_a_block(tmp_path, monkeypatch):
    rows, _ = found(scan(tmp_path, many(3, 50_000), monkeypatch=monkeypatch, block=1 << 12))
    assert len(rows) == 3


def test_a_head_or_a_tail_may_be_longer_than_a_block(tmp_path, monkeypatch):
    listed = many(2)[1:-1]
    for text in (b'{"a": "%s", %s}', b'{"b": "x", %s, "a": "%s"}'):
        parts = (b"y" * 9000, listed) if text.startswith(b'{"a') else (listed, b"y" * 9000)
        for block in (1, 64, 4096):
            if INTERPRETED and block == 1:
                continue
            scanned = scan(tmp_path, text % parts, monkeypatch=monkeypatch, block=block)
            assert len(scanned.envelope["a"]) == 9000
            assert scanned.event_count == 2


def test_an_endless_event_is_an_error_with_its_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(chrome, "_EVENT_LIMIT", 1 << 16)
    text = many(2)[:-3] + b',\n{"ph": "X", "name": "' + b"x" * (1 << 22)
    with pytest.raises(TraceFileError, match=f"byte {text.rindex(b'{')} is longer than"):
        scan(tmp_path, text, monkeypatch=monkeypatch, block=1 << 12)


def test_a_long_string_is_scanned_once(tmp_path, monkeypatch):
    """What is looked at is a few times the text, however many blocks it comes in."""
    looked = []
    kernel = chrome.json_scan.scan

    def counting(text, n, *rest):
        looked.append(n)
        return kernel(text, n, *rest)

    monkeypatch.setattr(chrome.json_scan, "scan", counting)
    size = 1 << (16 if INTERPRETED else 22)
    text = many(2)[:-3] + b',\n{"ph": "X", "name": "' + b"x" * size
    with pytest.raises(TraceFileError, match="truncated"):
        scan(tmp_path, text, monkeypatch=monkeypatch, block=1 << 10)
    assert sum(looked) < 6 * size


LISTS = [b'{"ph"', b'{"ph":"i","a":[', b'{"ph":"i"},{"ph":"i","a":[']


@pytest.mark.parametrize("filler", [b"[", b"{", *LISTS, b"\0", b"]", b'"', b"\\", b"{ ", b","])
def test_garbage_takes_no_longer_than_its_size(tmp_path, filler):
    size = 1 << (11 if INTERPRETED else 22)
    text = b'{"traceEvents": [' + filler * (size // len(filler))
    with pytest.raises(TraceFileError):
        scan(tmp_path, text)


def test_garbage_before_the_events_is_searched_once(tmp_path, monkeypatch):
    monkeypatch.setattr(envelope, "LIMIT", 1 << 18)
    with pytest.raises(TraceFileError, match=r"no .traceEvents."):
        scan(
            tmp_path,
            b"{" + random.Random(1).randbytes(1 << 20),
            monkeypatch=monkeypatch,
            block=64,
        )
    with pytest.raises(TraceFileError, match="behind the events"):
        scan(tmp_path, many(2)[:-1] + b', "x": "' + b"y" * (1 << 20) + b'"}')


# ------------------------------------------------------------------- real files


def real(kineto):
    """A rank of each recording."""
    for folder in sorted(kineto.glob("*_*")) if not INTERPRETED else ():
        yield from sorted(folder.glob("*.json.gz"))[:1]
    yield kineto / "nccl_2rank_rank0.json.gz"


def test_real_files_are_read_as_the_standard_library_reads_them(kineto, tmp_path):
    import gzip

    for path in real(kineto):
        text = gzip.decompress(path.read_bytes())
        if b'"traceEvents"' not in text:
            continue
        if INTERPRETED:
            at = text.index(b"\n  },", 300_000)
            text = text[:at] + b"\n  }]}"
        rows, offsets = found(scan(tmp_path, text))
        wanted = [each for each in records(text) if isinstance(each, dict)]
        assert len(rows) == len(wanted)
        assert all(map(agrees, rows, wanted)), path
        for offset in offsets[:: max(1, len(offsets) // 50)]:
            event, _ = json.JSONDecoder(parse_float=Decimal).raw_decode(
                text[offset : offset + 20_000].decode(errors="replace")
            )
            assert is_wanted(event)
        assert SELECTION.row_args == ("correlation", "stream")


def test_a_number_may_have_more_digits_than_a_machine_word(tmp_path):
    text = (
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": 1, "id": '
        + "9" * 100
        + "}]}"
    )
    assert len(scan(tmp_path, text.encode()).columns["name"]) == 1


def test_the_end_of_the_events_is_found_behind_a_broken_one_in_any_block(tmp_path, monkeypatch):
    events = [
        '{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 1}',
        '{"ph": "X", "name": "b"c"}',
    ]
    text = f'{{"traceEvents": [{", ".join(events)}]  ,{" " * 90}"traceName": "x"}}'
    for block in range(1, 150, 7):
        scanned = scan(tmp_path, text.encode(), monkeypatch=monkeypatch, block=block)
        assert len(scanned.columns["name"]) == 1
        assert scanned.envelope["traceName"] == "x"
        assert "1 of 2 events do not parse" in scanned.warnings[0]
