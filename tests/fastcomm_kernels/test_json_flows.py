"""Test the scan of flow events: the ends of arrows between events."""

import numpy as np
import pytest

from fastcomm_kernels import json_events, json_flows, json_scan, string_tables
from fastcomm_kernels._llvm import PADDING
from fastcomm_kernels.arrays import NULL

COLUMNS = json_events.ScanColumns(
    kinds={b"ac2g": 0, b"async": 1},
    keep=[json_events.KEEP_ALL, json_events.KEEP_ALL, json_events.KEEP_NONE],
    prefixes=[],
    numbers=[name.encode() for name in json_flows.COLUMNS],
    detail_numbers=[],
    detail_texts=[],
    flows=True,
)
BEGIN = b'{"ph": "s", "id": 7, "pid": 100, "tid": "a", "ts": 1.5, "cat": "ac2g", "name": "x"}'
END = b'{"cat": "async", "args": {"id": [1]},"tid": 3, "id": "0x7", "ts": 2,"bp":"e","ph": "f"}'


def scan(text):
    cells = np.zeros((50, COLUMNS.width()), np.int64)
    state = np.zeros(json_scan.STATE_SIZE, np.int64)
    state[json_scan.LAST] = 1
    strings = string_tables.no_strings(64, 1 << 10)
    block = np.frombuffer(text + bytes(PADDING), np.uint8).copy()
    json_scan.scan(block, len(text), state, COLUMNS.plan(), strings, cells)
    texts = [text.decode() for text in string_tables.texts_of(strings)]
    return state, cells[: state[json_scan.ROWS]], texts


def values(row, texts):
    """Kind, process, thread, time, id, phase and whether the end is inside, of a row."""
    kind, process, thread, start = row[
        [json_events.KIND, json_events.PROCESS, json_events.THREAD, json_events.START]
    ].tolist()
    number, phase, inside = row[json_events.ARGS :][:3].tolist()
    named = texts[json_events.TEXT_LANE - thread] if NULL < thread < 0 else thread
    return kind, process, named, start, texts[number], chr(phase), inside != NULL


def test_both_ends_of_an_arrow_become_rows():
    state, rows, texts = scan(BEGIN + b",\n" + END + b"]}")
    assert [values(row, texts) for row in rows] == [
        (0, 100, "a", 1500, "7", "s", False),
        (1, NULL, 3, 2000, "0x7", "f", True),
    ]
    assert state[json_scan.EVENTS] == 2
    assert state[json_scan.DROPPED] == 0
    assert rows[:, json_events.OFFSET].tolist() == [0, len(BEGIN) + 2]


def test_an_end_that_binds_otherwise_is_not_inside():
    _, rows, texts = scan(END.replace(b'"e"', b'"s"') + b"]}")
    assert not values(rows[0], texts)[-1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"ph": "s"', b'"ph": "X"'),
        (b'"ph": "s", ', b""),
        (b'"cat": "ac2g", ', b""),
        (b'"ac2g"', b'"fwdbwd"'),
        (b'"id": 7', b'"id": null'),
        (b'"ts": 1.5', b'"ts": "soon"'),
    ],
)
def test_other_events_are_no_rows(old, new):
    assert old in BEGIN
    state, rows, _ = scan(BEGIN.replace(old, new) + b"]}")
    assert not len(rows)
    assert state[json_scan.EVENTS] == 1
    assert state[json_scan.DROPPED] == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"ph"', b"{7"),
        (b'"name": "x"', b'"name\n'),
        (b'"id": 7', b'"id" 7'),
        (b'"cat": "ac2g"', b'"cat": "ac2g\n'),
        (b'"ts": 1.5,', b'"ts": 1.5'),
        (b'"tid": "a"', b'"tid": "a\n'),
    ],
)
def test_events_that_do_not_parse_are_counted(old, new):
    assert old in BEGIN
    state, rows, _ = scan(BEGIN.replace(old, new) + b",\n" + END + b"]}")
    assert state[json_scan.DROPPED] == 1
    assert len(rows) == 1
