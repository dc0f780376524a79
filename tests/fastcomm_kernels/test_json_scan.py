"""Test the JSON scanner: rows of events, broken events, block boundaries."""

import numpy as np
import pytest

from fastcomm_kernels import json_events, json_scan, string_tables
from fastcomm_kernels._llvm import PADDING

NULL = json_events.NULL


def padded(text):
    return np.frombuffer(text + bytes(PADDING), np.uint8).copy()


WANTED = json_events.ScanColumns(
    kinds={b"kernel": 0, b"cpu_op": 1},
    keep=[json_events.KEEP_ALL, json_events.KEEP_NAMED, json_events.KEEP_NONE],
    prefixes=[b"c10d::", b"x"],
    numbers=[b"stream"],
    detail_numbers=[b"Seq"],
    detail_texts=[b"dtype"],
)


def state_at(at, last):
    state = np.zeros(json_scan.STATE_SIZE, np.int64)
    state[json_scan.AT], state[json_scan.LAST] = at, last
    return state


def scan(text, *, at=0, last=True, rows=50, strings=None, lost=False):
    cells = np.zeros((rows, WANTED.width()), np.int64)
    state = state_at(at, last)
    state[json_scan.SEARCHING] = lost
    strings = strings or string_tables.no_strings(64, 1 << 10)
    why = json_scan.scan(padded(text), len(text), state, WANTED.plan(), strings, cells)
    return why, state, cells[: state[json_scan.ROWS]], string_tables.texts_of(strings)


EVENT = b'{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2}'


def test_an_event_becomes_a_row():
    args = b', "args": {"stream": 7, "Seq": 3, "dtype": "Float"}}'
    why, state, rows, texts = scan(EVENT[:-1] + args + b"]}")
    assert why == json_scan.DONE
    assert rows[0, : json_events.ARGS + 3].tolist() == [
        0,
        1,
        0,
        7,
        1500,
        3500,
        0,
        1,
        0,
        7,
        3,
        0,
    ]
    assert texts == [b"Float", b"gemm"]
    assert state[json_scan.EVENTS] == 1


def test_missing_keys_of_an_event_are_null():
    why, _, rows, _ = scan(b'{"cat": "kernel", "ph": "X", "ts": 1, "dur": 0}]}')
    assert why == json_scan.DONE
    assert rows[0, : json_events.ARGS + 1].tolist() == [
        0,
        0,
        NULL,
        NULL,
        1000,
        1000,
        0,
        NULL,
        0,
        NULL,
    ]


def test_events_are_selected_by_name_in_any_order_of_keys():
    parts = [b'"ph": "X"', b'"cat": "cpu_op"', b'"name": "%s"', b'"ts": 1, "dur": 1']
    for order in (parts, parts[::-1], parts[2:] + parts[:2]):
        event = b"{" + b", ".join(order) + b"}"
        names = [b"c10d::x", b"c10d:", b"x", b"aten::x", b""]
        _, state, _, texts = scan(b", ".join(event % name for name in names) + b"]}")
        assert texts == [b"c10d::x", b"x"]
        assert state[json_scan.EVENTS] == len(names)


def test_a_block_may_end_anywhere():
    text = EVENT + b",\n" + EVENT + b"\n], "
    ends = [text.index(b"\n") - 1, len(text)]
    for n in range(len(text)):
        why, state, rows, _ = scan(text[:n], last=False)
        assert why == json_scan.MORE
        assert state[json_scan.DROPPED] == 0
        # An event counts once what follows it says that it is whole.
        assert state[json_scan.EVENTS] == sum(n > end for end in (ends[0], len(EVENT) * 2 + 3))
        assert len(rows) == state[json_scan.EVENTS]


def test_a_block_may_end_anywhere_after_a_broken_event():
    text = EVENT + b",\n" + EVENT + b",\n{7}\n]     } "
    for n in range(text.rindex(b"7") + 1, len(text)):
        why, state, rows, _ = scan(text[:n], last=False)
        assert (why, state[json_scan.DROPPED]) == (json_scan.MORE, 1)
        why, _, _, _ = scan(text, at=state[json_scan.AT], lost=True)
        assert why == json_scan.DONE
    assert len(rows) == 2


def test_full_buffers_are_reported():
    why, state, rows, _ = scan((EVENT + b",") * 3 + b"]}", rows=2)
    assert (why, len(rows)) == (json_scan.ROWS_FULL, 2)
    assert state[json_scan.AT] == 2 * len(EVENT) + 2
    why, state, rows, _ = scan(EVENT + b"]}", strings=string_tables.no_strings(4, 2))
    assert (why, len(rows), state[json_scan.AT]) == (json_scan.STRINGS_FULL, 0, 0)


@pytest.mark.parametrize(
    "broken",
    [
        EVENT.replace(b'"gemm"', b'"ge"mm"'),
        EVENT.replace(b'"ts": 1.5', b'"ts": nan'),
        EVENT.replace(b'"ts": 1.5, ', b""),
        EVENT.replace(b'"dur": 2', b'"dur": -2'),
        EVENT.replace(b', "dur": 2', b""),
        EVENT.replace(b'"X"', b'"\\u0058"'),
        EVENT.replace(b'"kernel"', b'"\\u006bernel"'),
        EVENT.replace(b'"ts": 1.5', b'"ts": 5e15'),
        EVENT.replace(b'"dur": 2', b'"dur": 1e300'),
        EVENT.replace(b'"tid": 7', b'"tid" 7'),
        EVENT.replace(b'"tid": 7', b"tid: 7"),
        EVENT.replace(b'"tid": 7', b'"tid": 7 7'),
        EVENT.replace(b'"tid": 7', b'"tid": "7\n"'),
        EVENT.replace(b'"tid": 7', b'"t\nd": 7'),
        EVENT.replace(b'"tid": 7', b'"x\n": 7'),
        EVENT.replace(b'"gemm"', b'"gemm\n"'),
        EVENT.replace(b'"tid": 7', b'"args": {"x" 7}'),
        EVENT.replace(b'"tid": 7', b'"args": {"x\n": 7}'),
        EVENT.replace(b'"tid": 7', b'"args": {7: 7}'),
        EVENT.replace(b'"tid": 7', b'"args": {"dtype": "\n"}'),
        EVENT.replace(b'"tid": 7', b'"args": {"x": [1, }'),
        EVENT[:-1],
        EVENT[1:],
        EVENT + b"}",
        EVENT.replace(b"kernel", b"other")[:-1],
        EVENT.replace(b"X", b"i").replace(b'"tid": 7', b'"args": {"x": 1'),
        b"5",
        b'"x"',
        b"[1]",
        b"nan",
        b"]",
    ],
)
def test_a_broken_event_loses_no_other_event(broken):
    good = EVENT.replace(b"gemm", b"good%d")
    text = b",\n".join([good % 1, broken, good % 2, good % 3]) + b'\n], "x": 1}'
    why, state, rows, texts = scan(text)
    assert why == json_scan.DONE
    assert state[json_scan.DROPPED] >= 1
    assert state[json_scan.DROPS] >= len(good)
    assert state[json_scan.DROPS] <= text.index(b"good2")
    found = [texts[code] for code in rows[:, json_events.NAME]]
    assert [name for name in found if name.startswith(b"good")] == [
        b"good1",
        b"good2",
        b"good3",
    ]


def test_missing_or_extra_commas_lose_no_event():
    why, state, rows, _ = scan(b",," + EVENT + EVENT + b" , ,\n" + EVENT + b",]}")
    assert (why, len(rows), state[json_scan.DROPPED]) == (json_scan.DONE, 3, 0)


@pytest.mark.parametrize("inner", [b'{"name": 1}, {"name": 2}', b'{"of": 2}'])
def test_a_list_inside_of_a_broken_event_does_not_end_the_events(inner):
    broken = EVENT[:-1] + b'" "args": {"x": [%b]}}' % inner
    why, state, rows, _ = scan(EVENT + b", " + broken + b", " + EVENT + b"]}")
    assert (why, len(rows)) == (json_scan.DONE, 2)
    assert state[json_scan.DROPPED] > 0


@pytest.mark.parametrize(
    ("behind", "ends"),
    [
        (b"]}", True),
        (b"] }\n", True),
        (b'], "x": 1}', True),
        (b'] "x": 1}', True),
        (b"]", True),
        (b"]}}, ", False),
        (b"]},", False),
        (b"],[", False),
        (b"] 5", False),
        (b"] {", True),
        (b"]\n[", True),
    ],
)
def test_the_text_after_a_bracket_determines_whether_the_events_end(behind, ends):
    why, _, rows, _ = scan(EVENT + behind)
    assert (why == json_scan.DONE, len(rows)) == (ends, 1)


def test_numeric_thread_ids_are_not_strings():
    huge = EVENT.replace(b'"tid": 7', b'"tid": -4611686018427387905')
    word = EVENT.replace(b'"tid": 7', b'"tid": "Spans"')
    null = EVENT.replace(b'"tid": 7', b'"tid": null')
    negative = EVENT.replace(b'"tid": 7', b'"tid": -7')
    _, _, rows, texts = scan(b",".join([huge, word, null, negative]) + b"]}")
    found = rows[:, json_events.THREAD].tolist()
    assert found[0] == found[2] == NULL
    assert texts[json_events.TEXT_LANE - found[1]] == b"Spans"
    assert found[3] == -7


def test_numbers_in_quotes_are_numbers():
    texts = b'"ts": "1.5004", "dur": "2", "tid": "7"', b'"ts": 1.5, "dur": 2, "tid": 7'
    _, state, rows, _ = scan(
        b",".join(EVENT.replace(b'"tid": 7, "ts": 1.5, "dur": 2', text) for text in texts)
        + b"]}"
    )
    assert rows[0, : json_events.OFFSET].tolist() == rows[1, : json_events.OFFSET].tolist()
    assert state[json_scan.DROPPED] == 0


@pytest.mark.parametrize(
    "value", [b'""', b'" "', b'"1.5x"', b'"x"', b'"1', b"null", b'"1.5" 2']
)
@pytest.mark.parametrize("key", [b"ts", b"dur"])
def test_other_texts_are_no_times(key, value):
    broken = EVENT.replace(b'"%s": ' % key, b'"%s": %s, "x": ' % (key, value))
    _, state, rows, _ = scan(broken + b", " + EVENT + b"]}")
    assert (len(rows), state[json_scan.DROPPED]) == (1, 1)


@pytest.mark.parametrize("text", [b"007", b"1.5", b"1e3", b"-7", b"12345678", b"7 ", b""])
def test_a_thread_whose_name_is_not_a_plain_number_is_a_text(text):
    _, _, rows, texts = scan(EVENT.replace(b'"tid": 7', b'"tid": "%s"' % text) + b"]}")
    assert texts[json_events.TEXT_LANE - rows[0, json_events.THREAD]] == text


def test_the_last_of_two_values_counts():
    event = EVENT[:-1] + (
        b', "ts": 2, "args": {"stream": 1, "Seq": 1, "dtype": "a"}, "name": "second", "args":'
        b' {"Seq": 1, "Seq": null, "dtype": "b"}}'
    )
    _, _, rows, texts = scan(event + b"]}")
    columns = [json_events.START, json_events.STOP, json_events.ARGS, json_events.ARGS + 1]
    assert rows[0, columns].tolist() == [2000, 4000, NULL, NULL]
    assert texts[rows[0, json_events.NAME]] == b"second"
    assert texts[rows[0, json_events.ARGS + 2]] == b"b"
    _, _, rows, _ = scan(event[:-1] + b', "args": null}]}')
    assert rows[0, json_events.DETAIL] == NULL


@pytest.mark.parametrize(
    ("first", "last", "is_kept"),
    [("i", '"X"', True), ("X", '"i"', False), ("XX", '"X"', True), ("X", "7", False)],
)
@pytest.mark.parametrize("filler", [0, 50, 56, 57, 58, 59, 60, 61, 62, 63, 64, 200])
def test_the_last_of_two_phases_counts(first, last, is_kept, filler):
    event = EVENT.replace(b'"X"', b'"%s"' % first.encode())
    event = event[:-1] + b', "x": "%s", "ph": %s}' % (b"y" * filler, last.encode())
    _, state, rows, _ = scan(event + b", " + EVENT + b"]}")
    assert (len(rows), state[json_scan.EVENTS], state[json_scan.DROPPED]) == (1 + is_kept, 2, 0)


def test_text_that_resembles_a_second_phase_is_ignored():
    event = EVENT.replace(b'"X"', b'"i"')[:-1] + b', "x": "ph", "args": {"ph": "X"}}'
    _, state, rows, _ = scan(event + b", " + EVENT + b"]}")
    assert (len(rows), state[json_scan.EVENTS], state[json_scan.DROPPED]) == (1, 2, 0)


def test_a_missing_or_null_text_is_null():
    for value in (b"null", b"", b" "):
        event = EVENT[:-1] + b', "args": {"dtype": %s, "Seq": 1}}' % value
        _, _, rows, _ = scan(event + b"]}")
        assert rows[0, json_events.ARGS + 1 : json_events.ARGS + 3].tolist() == [1, NULL]


def test_a_scan_gives_up_where_most_is_broken():
    why, state, _, _ = scan(b'{"ph"' * 1100)
    assert why == json_scan.HOPELESS
    assert state[json_scan.DROPPED] == 1001


def test_an_empty_prefix_keeps_every_name():
    plan = WANTED._replace(prefixes=[b""]).plan()
    text, state = padded(EVENT.replace(b"kernel", b"cpu_op") + b"]}"), state_at(0, 1)
    cells = np.zeros((2, WANTED.width()), np.int64)
    json_scan.scan(text, len(text) - PADDING, state, plan, string_tables.no_strings(), cells)
    assert state[json_scan.ROWS] == 1


def test_a_prefix_of_more_than_eight_bytes_is_refused():
    with pytest.raises(OverflowError):
        WANTED._replace(prefixes=[b"123456789"]).plan()


@pytest.mark.parametrize(
    "key",
    [
        b"a\\u0020b",
        b"a\\u0031",
        b"dt\\u0079pe",
        b"\\u0064type",
        b"x" * 70 + b"\\u0041",
        b"t\\u0073",
    ],
)
def test_events_with_escaped_letters_in_keys_are_dropped(key):
    for event in (EVENT[:-1] + b', "args": {"%s": 1}}' % key, EVENT[:-1] + b', "%s": 1}' % key):
        _, state, rows, _ = scan(event + b", " + EVENT + b"]}")
        assert (len(rows), state[json_scan.DROPPED]) == (1, 1)


@pytest.mark.parametrize(
    "key", [b"\\u4e2d", b"\\u00e9", b"a\\nb", b"a\\\\u0041", b"\\u003c", b"\\u007f", b"\\"]
)
def test_other_escapes_in_keys_are_harmless(key):
    key = b'k\\"' if key == b"\\" else key
    for event in (EVENT[:-1] + b', "args": {"%s": 1}}' % key, EVENT[:-1] + b', "%s": 1}' % key):
        _, state, rows, _ = scan(event + b", " + EVENT + b"]}")
        assert (len(rows), state[json_scan.DROPPED]) == (2, 0)
