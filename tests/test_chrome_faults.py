"""Damage costs what it hits, never in silence: the faults of profilers, cuts at every byte."""

import re

import pytest
from chrome_files import agrees, found, scan, zipped
from numba.core import config
from oracle_chrome import is_wanted, loads, record

from fastcomm.errors import TraceFileError

INTERPRETED = bool(config.DISABLE_JIT)

EVENTS = [
    """{
    "ph": "X", "cat": "cpu_op", "name": "c10d::allreduce_", "pid": 10, "tid": 11,
    "ts": 100.500, "dur": 30.250,
    "args": {
      "External id": 5, "dtype": "Float", "Seq": 3, "Input Dims": [[2, 3], []]
    }
  }""",
    """{
    "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0, "tid": 7,
    "ts": 140.001, "dur": 9.999,
    "args": {
      "stream": 7, "correlation": 41, "grid": [1, 1, 1], "Process Group Name": "0"
    }
  }""",
    """{
    "ph": "f", "id": 41, "pid": 0, "tid": 7, "ts": 140.001, "cat": "ac2g", "name": "ac2g"
  }""",
    """{
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 10, "tid": 11,
    "ts": 120.000, "dur": 2.000, "args": { "correlation": 41 }
  }""",
]
HEAD = """{
  "schemaVersion": 1,
  "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
  "traceEvents": [
  """
TAIL = """
  ],
  "INFO": ["line [1]"],
  "traceName": "x.json",
  "baseTimeNanoseconds": 1700000000000000000
}
"""
FILLER = '{"ph": "i", "name": "x"}'


def trace(*listed, head=HEAD, tail=TAIL, filler=0):
    return (head + ",\n  ".join([*listed, *[FILLER] * filler]) + tail).encode()


def expected_of(*listed):
    return [
        record(event) for event in loads(f"[{', '.join(listed)}]".encode()) if is_wanted(event)
    ]


def assert_rows(scanned, wanted):
    rows, _ = found(scanned)
    assert len(rows) == len(wanted)
    assert all(map(agrees, rows, wanted))


# ------------------------------------------------------------------- formats, 1.7


def test_the_undamaged_trace_is_read_without_a_warning(tmp_path):
    scanned = scan(tmp_path, trace(*EVENTS))
    assert_rows(scanned, expected_of(*EVENTS))
    assert scanned.warnings == ()
    assert scanned.envelope["baseTimeNanoseconds"] == 1700000000000000000
    assert scanned.envelope["distributedInfo"]["rank"] == 3


@pytest.mark.parametrize("value", ["", " ", "nan", "-inf", "Infinity"])
def test_a_value_that_is_missing_or_no_json_costs_nothing(tmp_path, value):
    event = EVENTS[1].replace(
        '"grid": [1, 1, 1]', f'"Process Group Description": {value}, "x": [{value or 1}]'
    )
    scanned = scan(tmp_path, trace(*EVENTS, event))
    assert_rows(scanned, expected_of(*EVENTS, EVENTS[1]))
    assert scanned.warnings == ()


@pytest.mark.parametrize(
    ("what", "broken"),
    [
        ("cudaLaunchKernel", 'f"{x}" in y'),
        ("cudaLaunchKernel", 'a"'),
        ("cudaLaunchKernel", '"'),
        ("cudaLaunchKernel", 'x", "y'),
        ("cudaLaunchKernel", "a\nb"),
        ('{ "correlation"', '{ "cmd": "sh -c "x y"", "correlation"'),
        ('{ "correlation"', '{ "cmd": ""x"", "correlation"'),
        ("2.000", "nan"),
        ("2.000", ""),
        ('"ph": "X", ', '"ph": "X" '),
        ('"dur"', '"dur'),
        ("41 }\n", "41 "),
        ("41 }", "41 "),
        ('"args": {', '"args": '),
        ("{ ", "["),
    ],
)
@pytest.mark.parametrize("unwanted", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_broken_event_is_left_out_with_its_offset(tmp_path, what, broken, unwanted, place):
    assert what in EVENTS[3]
    event = EVENTS[3].replace(what, broken, 1)
    event = event.replace("cuda_runtime", "other") if unwanted else event
    listed = [EVENTS[0], EVENTS[1], FILLER, FILLER]
    listed.insert({0: 0, 1: 2, 2: 4}[place], event)
    text = trace(*listed)
    start = text.index(event.encode())
    scanned = scan(tmp_path, text)
    rows, offsets = found(scanned)
    wanted = expected_of(EVENTS[0], EVENTS[1])
    whole = [row for row, offset in zip(rows, offsets, strict=True) if offset != start]
    assert len(whole) == 2
    assert all(map(agrees, whole, wanted))
    assert scanned.envelope["baseTimeNanoseconds"] == 1700000000000000000
    if len(rows) == 2 and not (unwanted and not scanned.warnings):
        assert re.search(rf"1 of 5 events do not parse .* at byte {start}", scanned.warnings[0])


def test_bytes_that_are_not_printable_cost_nothing(tmp_path):
    for k in [*range(1, 10), 11, 12, *range(14, 32), 0x7F, 0x80, 0xC0, 0xF5, 0xFF]:
        text = trace(EVENTS[1]).replace(b"ncclDev", b"nccl" + bytes([k]) + b"Dev")
        rows, _ = found(scanned := scan(tmp_path, text))
        assert rows[0]["name"] == b"nccl%cDevKernel_AllReduce".replace(
            b"%c", bytes([k])
        ).decode(errors="replace")
        assert scanned.warnings == ()


@pytest.mark.parametrize(
    ("what", "broken", "key"),
    [
        ('"line [1]"', '"line "x" [1]", "a"', "baseTimeNanoseconds"),
        ('"line [1]"', '"a: "b", {"c"}"', "baseTimeNanoseconds"),
        ('"rank": 3', '"rank": ', "baseTimeNanoseconds"),
        (
            '"rank": 3,',
            '"rank": , "pg_config": [{"pg_name": "0", "ranks": [0, 1]}],',
            "distributedInfo",
        ),
        ('"traceName": "x.json"', '"traceName": "\xff\ud800"', "distributedInfo"),
        ('"schemaVersion": 1', '"schemaVersion": nan', "distributedInfo"),
        ("1700000000000000000\n", "9" * 6000, "distributedInfo"),
    ],
)
def test_a_broken_envelope_is_read_key_by_key(tmp_path, what, broken, key):
    text = trace(*EVENTS).decode().replace(what, broken).encode("latin-1", "replace")
    scanned = scan(tmp_path, text)
    assert_rows(scanned, expected_of(*EVENTS))
    assert key in scanned.envelope
    if len(broken) < 6000:
        assert "no valid JSON" in scanned.warnings[0]


def test_a_huge_depth_is_no_crash(tmp_path):
    deep = "[" * 5000 + "]" * 5000
    event = EVENTS[1].replace("[1, 1, 1]", deep)
    assert_rows(scan(tmp_path, trace(*EVENTS, event)), expected_of(*EVENTS, EVENTS[1]))
    scanned = scan(tmp_path, trace(*EVENTS, head=HEAD.replace('"nccl"', deep)))
    assert_rows(scanned, expected_of(*EVENTS))


# ------------------------------------------------------------------- no such trace


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty; wanted a JSON trace"),
        (b" \n\t ", 'no "traceEvents"'),
        (b"{}", 'no "traceEvents": .* in its first 2 bytes'),
        (b'{"traceEvents": null}', 'no "traceEvents"'),
        (b'{"traceEvents": {}}', 'no "traceEvents"'),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), r"found binary data, expected { or \["),
        (b"null", "begins with 'null'"),
        (b'{"a": {"traceEvents": []}}', "not a key of the outer object"),
        (b'{"a": {"traceEvents": [], "b": 1}}', "not a key of the outer object"),
        (b'{"traceEvents": [], "traceEvents": []}', "two lists"),
        (b'{"traceEvents": [1, 2, 3]}', "1 of 1 events do not parse"),
        (b'["x"]', "1 of 1 events do not parse"),
        (b'{"traceEvents": [[], []]}', "do not parse"),
        (b"\x1f\x8b" + b"\xff" * 40, "the gzip data is corrupt before byte 42"),
        (zipped(trace(*EVENTS))[:-30] + bytes(30), "the gzip data is corrupt|truncated"),
        (
            zipped(trace(*EVENTS)) + b"\x1f\x8bgarbage" * 9,
            "the gzip data is corrupt before byte",
        ),
        (
            zipped(trace(*EVENTS)[:-9]) + b"garbage",
            r"the gzip data is corrupt from byte \d+ of the file on: 7 bytes",
        ),
        (zipped(b""), "empty"),
        (b"\x1f\x8b", "the compressed file is cut short, and"),
        (zipped(trace(*EVENTS))[:60], "the compressed file is cut short"),
    ],
)
def test_a_file_that_is_no_trace_is_an_error(tmp_path, data, says):
    with pytest.raises(TraceFileError, match=f"trace.json: .*(?:{says})"):
        scan(tmp_path, data)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    from chrome_files import SELECTION

    from fastcomm.readers.kineto.chrome import scan_file

    with pytest.raises(TraceFileError, match="No such file"):
        scan_file(tmp_path / "none.json", SELECTION)
    with pytest.raises(TraceFileError, match="directory"):
        scan_file(tmp_path, SELECTION)


def test_an_empty_list_is_a_trace(tmp_path):
    for text in (b'{"traceEvents": []}', b"[]", b'{"traceEvents":[],"a":1}'):
        scanned = scan(tmp_path, text)
        assert (scanned.seen, scanned.warnings, found(scanned)) == (0, (), ([], []))


def test_a_name_says_nothing_about_what_is_in_a_file(tmp_path):
    for name in ("trace.json.gz", "rank0.json.tmp", "x"):
        assert_rows(scan(tmp_path, trace(*EVENTS), name=name), expected_of(*EVENTS))
        assert_rows(scan(tmp_path, zipped(trace(*EVENTS)), name=name), expected_of(*EVENTS))


@pytest.mark.parametrize("tail", [TAIL, "]}", "]"])
@pytest.mark.parametrize("second", [None, "{}", "[]", '{"a": 1}\n', '{"traceEvents": ['])
@pytest.mark.parametrize("pack", [bytes, zipped])
def test_a_second_document_is_an_error_that_says_where_it_begins(tmp_path, tail, second, pack):
    head = "[" if tail == "]" else HEAD
    first = trace(*EVENTS, head=head, tail=tail)
    then = first if second is None else second.encode()
    for gap in (b"", b"\n", bytes(9)):
        at = len(first + gap)
        with pytest.raises(TraceFileError, match=f"a second document begins at byte {at} "):
            scan(tmp_path, pack(first) + pack(gap + then) if gap else pack(first) + pack(then))


@pytest.mark.parametrize(
    ("cut", "gap"),
    [
        *((None, gap) for gap in (b",", b"]\n", b"\n,\n", b"]];")),
        *((cut, gap) for cut in (-1, -2, -20) for gap in (b"", b"\n")),
    ],
)
@pytest.mark.parametrize("options", [{}, {"allow_truncated": True}])
def test_a_bare_list_behind_another_is_an_error_whatever_divides_them(
    tmp_path, gap, cut, options
):
    bare = trace(*EVENTS, head="[", tail="]")
    text = bare[:cut] + gap
    with pytest.raises(TraceFileError, match=f"a second document begins at byte {len(text)} "):
        scan(tmp_path, text + bare, **options)


def test_a_second_document_in_another_container_is_an_error(tmp_path):
    plain, packed = trace(*EVENTS), zipped(trace(*EVENTS))
    with pytest.raises(TraceFileError, match=f"begins at byte {len(packed)} of the file"):
        scan(tmp_path, packed + plain)
    with pytest.raises(TraceFileError, match=f"begins at byte {len(plain)} of the text"):
        scan(tmp_path, plain + packed)


def test_a_second_document_behind_a_damaged_one_is_an_error(tmp_path):
    first = trace(*EVENTS).replace(b'"schemaVersion": 1', b'"schemaVersion": nan')
    with pytest.raises(
        TraceFileError, match=r"two lists of traceEvents, the second at byte \d"
    ):
        scan(tmp_path, first + first)


def test_a_long_second_document_is_an_error(tmp_path, monkeypatch):
    from fastcomm.readers.kineto import stream

    monkeypatch.setattr(stream, "LIMIT", 1000)
    with pytest.raises(TraceFileError, match="a second document begins"):
        scan(tmp_path, trace(*EVENTS) + trace(*EVENTS * 9))


FIRST = b'{"distributedInfo": {"rank": 5, "world_size": 64}}'


@pytest.mark.parametrize("first", [FIRST, b"{}", b'{"a": 1}\n', b"\xef\xbb\xbf{} \0"])
@pytest.mark.parametrize("options", [{}, {"allow_truncated": True}])
def test_a_second_document_behind_one_without_events_is_an_error(tmp_path, first, options):
    for text in (trace(*EVENTS), trace(*EVENTS)[:-9], trace(*EVENTS)[: -len(TAIL)]):
        with pytest.raises(
            TraceFileError, match=f"a second document begins at byte {len(first)} "
        ):
            scan(tmp_path, first + text, **options)
    inner = b'{"schemaVersion": 1}{"x": ' + trace(*EVENTS) + b"}"
    with pytest.raises(TraceFileError, match="a second document begins at byte 20 "):
        scan(tmp_path, inner, **options)


@pytest.mark.parametrize("event", ["", EVENTS[0]])
def test_a_second_list_at_the_end_of_the_outer_object_is_an_error(tmp_path, event):
    text = trace(*EVENTS).rstrip()[:-1]
    second = f',"traceEvents": [{event}]}}'.encode()
    with pytest.raises(
        TraceFileError, match=f"two lists of traceEvents, the second at byte {len(text) + 1};"
    ):
        scan(tmp_path, text + second)


@pytest.mark.parametrize("options", [{}, {"allow_truncated": True}])
def test_a_cut_trace_before_a_whole_one_is_an_error_that_says_where(tmp_path, options):
    whole = trace(*EVENTS)
    key = whole.index(b'"traceEvents"')
    for n in range(len('{\n  "schemaVersion":'), len(whole.rstrip())):
        begin, second = n, n + key
        with pytest.raises(
            TraceFileError,
            match=rf"second document begins at byte {begin} |the second at byte {second};",
        ):
            scan(tmp_path, whole[:n] + whole, **options)


@pytest.mark.parametrize("garbage", [b"garbage\n", b"g", b"\0" * 9 + b"log: done" * 99])
def test_what_is_behind_the_gzip_data_of_a_whole_trace_is_counted(tmp_path, garbage):
    data = zipped(trace(*EVENTS), members=2)
    scanned = scan(tmp_path, data + garbage)
    assert_rows(scanned, expected_of(*EVENTS))
    (warning,) = scanned.warnings
    behind = garbage.lstrip(b"\0")
    at = len(data + garbage) - len(behind)
    assert f"{len(behind)} bytes behind the end of the gzip data, from byte {at} of" in warning
    assert not scanned.is_truncated


def test_what_is_behind_a_whole_trace_and_no_document_is_counted(tmp_path):
    text = trace(*EVENTS).rstrip()
    scanned = scan(tmp_path, text + b"\n log: done")
    assert_rows(scanned, expected_of(*EVENTS))
    (warning,) = scanned.warnings
    assert f"9 bytes behind the end of the trace, from byte {len(text) + 2} on" in warning
    assert not scanned.is_truncated


@pytest.mark.parametrize("tail", ["], }", "] 5}", '], "a": 1, {}'])
def test_only_what_is_cut_is_called_truncated(tmp_path, tail):
    for options in ({}, {"allow_truncated": True}):
        try:
            said = "".join(scan(tmp_path, trace(*EVENTS, tail=tail), **options).warnings)
        except TraceFileError as error:
            said = str(error)
        assert said
        assert "truncated: " not in said


def test_zeros_behind_a_file_are_no_damage(tmp_path):
    for data in (
        trace(*EVENTS) + bytes(900),
        zipped(trace(*EVENTS)) + bytes(900),
        zipped(trace(*EVENTS) + bytes(9)),
    ):
        scanned = scan(tmp_path, data)
        assert_rows(scanned, expected_of(*EVENTS))
        assert scanned.warnings == ()


# ------------------------------------------------------------------- cut short


def whole_before(text, n):
    """The events that end at or before byte `n`."""
    return [event for event in EVENTS if 0 <= text.find(event.encode()) <= n - len(event)]


@pytest.mark.parametrize("tail", [TAIL, "]}", "]"])
def test_a_file_cut_at_any_byte_is_an_error_that_says_where(tmp_path, tail):
    head = "[" if tail == "]" else HEAD
    text = trace(*EVENTS, head=head, tail=tail)
    begin = len(head)
    for n in range(begin, len(text.rstrip())):
        whole = whole_before(text, n)
        with pytest.raises(
            TraceFileError, match=rf"at byte {n} after {len(whole)} whole events"
        ):
            scan(tmp_path, text[:n])
        if n % (7 if INTERPRETED else 3) == 0:
            scanned = scan(tmp_path, text[:n], allow_truncated=True)
            assert_rows(scanned, expected_of(*whole))
            assert scanned.seen == len(whole)
            assert f"at byte {n} after {len(whole)} whole" in scanned.warnings[0]
            assert len(scanned.warnings) == 1
            if head is HEAD:
                assert scanned.envelope["distributedInfo"]["rank"] == 3
    for n in range(begin):
        with pytest.raises(TraceFileError):
            scan(tmp_path, text[:n])


def test_a_compressed_file_cut_at_any_byte_is_an_error(tmp_path):
    text = trace(*EVENTS)
    data = zipped(text, 2)
    for n in range(len(data)):
        with pytest.raises(TraceFileError, match=r"truncated|cut short|empty|no JSON trace"):
            scan(tmp_path, data[:n])
        try:
            scanned = scan(tmp_path, data[:n], allow_truncated=True)
        except TraceFileError:
            assert n < len(data) * 0.7
        else:
            assert len(scanned.warnings) == 1
            rows, _ = found(scanned)
            wanted = expected_of(*EVENTS)
            assert all(map(agrees, rows, wanted[: len(rows)]))


def test_a_log_of_a_cut_file_keeps_the_base_time(tmp_path):
    tail = TAIL.replace('"INFO": ["line [1]"],\n', "").replace('"traceName": "x.json",\n', "")
    text = trace(*EVENTS, tail=tail).rstrip()[:-1] + b', "INFO": ["a", "b'
    with pytest.raises(TraceFileError, match="behind the events, inside the envelope"):
        scan(tmp_path, text)
    scanned = scan(tmp_path, text, allow_truncated=True)
    assert scanned.envelope["baseTimeNanoseconds"] == 1700000000000000000


# ------------------------------------------------------------------- many broken ones


@pytest.mark.parametrize("count", [1, 2, 3, 4, 50])
def test_few_broken_events_among_thousands_are_a_warning_and_many_an_error(tmp_path, count):
    size = 300 if INTERPRETED else 3000
    listed = ['{"ph": "X", "name": "a"b"}' if k < count else FILLER for k in range(size)]
    if count > max(1, size // 1000):
        with pytest.raises(TraceFileError, match=rf"{count} of {size} events do not parse"):
            scan(tmp_path, trace(*listed))
    else:
        assert f"{count} of {size} events" in scan(tmp_path, trace(*listed)).warnings[0]


def test_events_go_on_behind_a_list_inside_of_a_broken_one(tmp_path):
    torn = '{"ph": "X" "args": {"x": [{"name": 1}], "y": [{"name": 3}], "z": 5}}'
    if not INTERPRETED:
        scanned = scan(tmp_path, trace(EVENTS[0], torn, *EVENTS[1:], filler=3000))
        assert_rows(scanned, expected_of(*EVENTS))
        assert "do not parse" in scanned.warnings[0]
    many = torn.replace('"z": 5', ", ".join(f'"z{k}": [{{"name": 3}}]' for k in range(30)))
    with pytest.raises(TraceFileError, match="do not parse"):
        scan(tmp_path, trace(EVENTS[0], many, *EVENTS[1:]))
