"""Write a trace as a file, scan it, and translate the result to the oracle's terms."""

import gzip
import json
from decimal import Decimal

from oracles.chrome import DETAIL_NUMBERS, KEPT, KINDS, NUMBERS, TEXTS

from fastcomm.formats import stream
from fastcomm.formats.kineto import chrome
from fastcomm_kernels.arrays import NULL
from fastcomm_kernels.json_events import KEEP_ALL, KEEP_LONG, KEEP_NAMED, KEEP_NONE, TEXT_LANE

KEEP = {**dict.fromkeys(KEPT, KEEP_ALL), "cpu_op": KEEP_NAMED, "python_function": KEEP_LONG}
SELECTION = chrome.Selection(
    kinds={name.encode(): kind for name, kind in KINDS.items()},
    keep=[*(KEEP[name] for name in KINDS), KEEP_NONE],
    prefixes=(b"c10d::", b"nccl:"),
    row_args=NUMBERS,
    detail_args=DETAIL_NUMBERS,
    detail_texts=TEXTS,
)


def zipped(text, members=1):
    size = max(1, -(-len(text) // members))
    parts = [text[at : at + size] for at in range(0, len(text), size)] or [b""]
    return b"".join(gzip.compress(part, 1, mtime=0) for part in parts)


def scan(folder, text, *, monkeypatch=None, block=None, name="trace.json", **options):
    """Scan a text as a file, in blocks of so many bytes."""
    path = folder / name
    path.write_bytes(text)
    if block:
        monkeypatch.setattr(stream, "BLOCK", block)
    return chrome.scan_file(path, SELECTION, **options)


def found(scanned):
    """The kept events as the oracle's records, and their offsets."""
    columns = {name: column.tolist() for name, column in scanned.columns.items()}
    details = {name: column.tolist() for name, column in scanned.details.items()}
    rows = []
    for k in range(len(columns["start"])):
        row = {key: columns[key][k] for key in ("kind", "start", "stop")}
        row["name"] = scanned.texts[columns["name"][k]]
        for key in ("process", "thread"):
            value = columns[key][k]
            is_text = NULL < value <= TEXT_LANE
            row[key] = scanned.texts[TEXT_LANE - value] if is_text else _known(value)
        for key in NUMBERS:
            row[key] = _known(columns[key][k])
        detail = columns["detail"][k]
        for key in DETAIL_NUMBERS + TEXTS:
            value = None if detail < 0 else _known(details[key][detail])
            row[key] = scanned.texts[value] if key in TEXTS and value is not None else value
        rows.append(row)
    return rows, columns["offset"]


def agrees(row, expected):
    """Whether a row is an expected record; a text may stand for any other value."""
    return row.keys() == expected.keys() and all(
        row[key] == expected[key]
        or (
            key in TEXTS
            and isinstance(row[key], str)
            and not isinstance(expected[key], str)
            and json.loads(row[key], parse_float=Decimal) == expected[key]
        )
        for key in row
    )


def _known(value):
    return None if value == NULL else value
