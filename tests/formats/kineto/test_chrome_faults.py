"""Test that faults of profilers lose only the damaged events, with a warning."""

import re

import pytest
from builders.chrome_files import agrees, found, scan, zipped
from builders.chrome_text import (
    EVENTS,
    FILLER,
    HEAD,
    INTERPRETED,
    assert_rows,
    expected_of,
    trace,
)

from fastcomm.errors import TraceFileError


def test_the_undamaged_trace_is_read_without_a_warning(tmp_path):
    scanned = scan(tmp_path, trace(*EVENTS))
    assert_rows(scanned, expected_of(*EVENTS))
    assert scanned.warnings == ()
    assert scanned.envelope["baseTimeNanoseconds"] == 1700000000000000000
    assert scanned.envelope["distributedInfo"]["rank"] == 3


@pytest.mark.parametrize("value", ["", " ", "nan", "-inf", "Infinity"])
def test_missing_and_invalid_values_lose_no_event(tmp_path, value):
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


def test_unprintable_bytes_lose_no_event(tmp_path):
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
def test_damaged_text_around_the_events_is_read_key_by_key(tmp_path, what, broken, key):
    text = trace(*EVENTS).decode().replace(what, broken).encode("latin-1", "replace")
    scanned = scan(tmp_path, text)
    assert_rows(scanned, expected_of(*EVENTS))
    assert key in scanned.envelope
    if len(broken) < 6000:
        assert "not valid JSON" in scanned.warnings[0]


@pytest.mark.parametrize("depth", [1000, 5000])
def test_deep_nesting_does_not_crash(tmp_path, depth):
    deep = "[" * depth + "]" * depth
    event = EVENTS[1].replace("[1, 1, 1]", deep)
    assert_rows(scan(tmp_path, trace(*EVENTS, event)), expected_of(*EVENTS, EVENTS[1]))
    scanned = scan(tmp_path, trace(*EVENTS, head=HEAD.replace('"nccl"', deep)))
    assert_rows(scanned, expected_of(*EVENTS))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty; expected a JSON trace"),
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
def test_a_file_that_is_not_a_trace_is_an_error(tmp_path, data, says):
    with pytest.raises(TraceFileError, match=f"trace.json: .*(?:{says})"):
        scan(tmp_path, data)


def test_a_missing_file_is_an_error(tmp_path):
    from builders.chrome_files import SELECTION

    from fastcomm.formats.kineto.chrome import scan_file

    with pytest.raises(TraceFileError, match="No such file"):
        scan_file(tmp_path / "none.json", SELECTION)
    with pytest.raises(TraceFileError, match="directory"):
        scan_file(tmp_path, SELECTION)


def test_an_empty_list_is_a_trace(tmp_path):
    for text in (b'{"traceEvents": []}', b"[]", b'{"traceEvents":[],"a":1}'):
        scanned = scan(tmp_path, text)
        assert (scanned.event_count, scanned.warnings, found(scanned)) == (0, (), ([], []))


def test_compression_is_detected_by_content_not_by_name(tmp_path):
    for name in ("trace.json.gz", "rank0.json.tmp", "x"):
        assert_rows(scan(tmp_path, trace(*EVENTS), name=name), expected_of(*EVENTS))
        assert_rows(scan(tmp_path, zipped(trace(*EVENTS)), name=name), expected_of(*EVENTS))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 50])
def test_few_broken_events_among_thousands_are_a_warning_and_many_an_error(tmp_path, count):
    size = 300 if INTERPRETED else 3000
    listed = ['{"ph": "X", "name": "a"b"}' if k < count else FILLER for k in range(size)]
    if count > max(1, size // 1000):
        with pytest.raises(TraceFileError, match=rf"{count} of {size} events do not parse"):
            scan(tmp_path, trace(*listed))
    else:
        assert f"{count} of {size} events" in scan(tmp_path, trace(*listed)).warnings[0]


def test_events_continue_after_a_list_inside_a_broken_event(tmp_path):
    torn = '{"ph": "X" "args": {"x": [{"name": 1}], "y": [{"name": 3}], "z": 5}}'
    if not INTERPRETED:
        scanned = scan(tmp_path, trace(EVENTS[0], torn, *EVENTS[1:], filler=3000))
        assert_rows(scanned, expected_of(*EVENTS))
        assert "do not parse" in scanned.warnings[0]
    many = torn.replace('"z": 5', ", ".join(f'"z{k}": [{{"name": 3}}]' for k in range(30)))
    with pytest.raises(TraceFileError, match="do not parse"):
        scan(tmp_path, trace(EVENTS[0], many, *EVENTS[1:]))
