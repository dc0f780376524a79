"""Test truncated traces, and traces followed by other data."""

import pytest
from builders.chrome_files import agrees, found, scan, zipped
from builders.chrome_text import (
    EVENTS,
    HEAD,
    INTERPRETED,
    TAIL,
    assert_rows,
    expected_of,
    trace,
)

from fastcomm.errors import TraceFileError

FEW = EVENTS[1:3]  # enough to be cut at any byte


@pytest.mark.parametrize("tail", [TAIL, "]}", "]"])
@pytest.mark.parametrize("second", [None, "{}", "[]", '{"a": 1}\n', '{"traceEvents": ['])
@pytest.mark.parametrize("pack", [bytes, zipped])
def test_a_second_document_is_an_error_with_its_first_byte(tmp_path, tail, second, pack):
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
def test_a_second_bare_list_is_an_error_with_any_separator(tmp_path, gap, cut, options):
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


def test_a_second_document_after_a_damaged_one_is_an_error(tmp_path):
    first = trace(*EVENTS).replace(b'"schemaVersion": 1', b'"schemaVersion": nan')
    with pytest.raises(
        TraceFileError, match=r"two lists of traceEvents, the second at byte \d"
    ):
        scan(tmp_path, first + first)


def test_a_long_second_document_is_an_error(tmp_path, monkeypatch):
    from fastcomm.formats.kineto import envelope

    monkeypatch.setattr(envelope, "LIMIT", 1000)
    with pytest.raises(TraceFileError, match="a second document begins"):
        scan(tmp_path, trace(*EVENTS) + trace(*EVENTS * 9))


FIRST = b'{"distributedInfo": {"rank": 5, "world_size": 64}}'


@pytest.mark.parametrize("first", [FIRST, b"{}", b'{"a": 1}\n', b"\xef\xbb\xbf{} \0"])
@pytest.mark.parametrize("options", [{}, {"allow_truncated": True}])
def test_a_second_document_after_one_without_events_is_an_error(tmp_path, first, options):
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
def test_a_truncated_trace_before_a_complete_one_is_an_error_with_its_byte(tmp_path, options):
    whole = trace(*FEW)
    key = whole.index(b'"traceEvents"')
    for n in range(len('{\n  "schemaVersion":'), len(whole.rstrip())):
        begin, second = n, n + key
        with pytest.raises(
            TraceFileError,
            match=rf"second document begins at byte {begin} |the second at byte {second};",
        ):
            scan(tmp_path, whole[:n] + whole, **options)


@pytest.mark.parametrize("garbage", [b"garbage\n", b"g", b"\0" * 9 + b"log: done" * 99])
def test_bytes_after_the_gzip_data_of_a_complete_trace_are_counted(tmp_path, garbage):
    data = zipped(trace(*EVENTS), members=2)
    scanned = scan(tmp_path, data + garbage)
    assert_rows(scanned, expected_of(*EVENTS))
    (warning,) = scanned.warnings
    behind = garbage.lstrip(b"\0")
    at = len(data + garbage) - len(behind)
    assert f"{len(behind)} bytes behind the end of the gzip data, from byte {at} of" in warning
    assert not scanned.is_truncated


def test_other_bytes_after_a_complete_trace_are_counted(tmp_path):
    text = trace(*EVENTS).rstrip()
    scanned = scan(tmp_path, text + b"\n log: done")
    assert_rows(scanned, expected_of(*EVENTS))
    (warning,) = scanned.warnings
    assert f"9 bytes behind the end of the trace, from byte {len(text) + 2} on" in warning
    assert not scanned.is_truncated


@pytest.mark.parametrize("tail", ["], }", "] 5}", '], "a": 1, {}'])
def test_only_truncated_files_are_called_truncated(tmp_path, tail):
    for options in ({}, {"allow_truncated": True}):
        try:
            said = "".join(scan(tmp_path, trace(*EVENTS, tail=tail), **options).warnings)
        except TraceFileError as error:
            said = str(error)
        assert said
        assert "truncated: " not in said


def test_zeros_after_a_file_are_not_damage(tmp_path):
    for data in (
        trace(*EVENTS) + bytes(900),
        zipped(trace(*EVENTS)) + bytes(900),
        zipped(trace(*EVENTS) + bytes(9)),
    ):
        scanned = scan(tmp_path, data)
        assert_rows(scanned, expected_of(*EVENTS))
        assert scanned.warnings == ()


def whole_before(text, n):
    """The events that end at or before byte `n`."""
    return [event for event in FEW if 0 <= text.find(event.encode()) <= n - len(event)]


@pytest.mark.parametrize("tail", [TAIL, "]}", "]"])
def test_a_file_truncated_at_any_byte_is_an_error_with_this_byte(tmp_path, tail):
    head = "[" if tail == "]" else HEAD
    text = trace(*FEW, head=head, tail=tail)
    begin = len(head)
    first = len(text) - 2 if tail == "]}" else begin  # cut before, it is that with TAIL
    for n in range(first, len(text.rstrip())):
        whole = whole_before(text, n)
        with pytest.raises(
            TraceFileError, match=rf"at byte {n} after {len(whole)} whole events"
        ):
            scan(tmp_path, text[:n])
        if n % (7 if INTERPRETED else 3) == 0:
            scanned = scan(tmp_path, text[:n], allow_truncated=True)
            assert_rows(scanned, expected_of(*whole))
            assert scanned.event_count == len(whole)
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


def test_a_truncated_file_keeps_its_base_time(tmp_path):
    tail = TAIL.replace('"INFO": ["line [1]"],\n', "").replace('"traceName": "x.json",\n', "")
    text = trace(*EVENTS, tail=tail).rstrip()[:-1] + b', "INFO": ["a", "b'
    with pytest.raises(TraceFileError, match="behind the events, inside the envelope"):
        scan(tmp_path, text)
    scanned = scan(tmp_path, text, allow_truncated=True)
    assert scanned.envelope["baseTimeNanoseconds"] == 1700000000000000000


def test_lists_in_arguments_after_a_broken_event_are_not_a_second_document(tmp_path):
    broken = '{"ph": "X", "cat": "kernel", "name": "kernel", "ts": 1, "dur": }'
    nested = broken.replace('"dur": ', '"pid": 0, "tid": 7, "dur": 2, "args": {"": [[], [{}]]}')
    text = trace(broken, nested, head="[", tail="]")
    assert len(found(scan(tmp_path, text))[0]) == 1
