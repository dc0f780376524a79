"""Damage of bytes, and of what a format is made of; the same numbers give the same damage."""

import gzip
import io
import json
import re
import sqlite3
import zipfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_BYTES = (
    b"",
    b"\0",
    b"\xff\xff\xff\xff",
    b'"',
    b"{",
    b"]",
    b"[" * 2000,
    b"-",
    b"9" * 400,
    b"\n",
)
_NUMBERS = (0, -1, 1 << 31, 1 << 53, (1 << 63) - 1, -(1 << 63), 1 << 64, 1e308, 0.5, 10**400)
_TEXTS = (
    "",
    "x" * 5000,
    "\x1b[31m",
    "\ud800",
    "-1",
    "nan",
    "0x7f",
    "../..",
    "[" * 3000,
    "1e999",
)
_WORDS = (None, True, False, *_NUMBERS, *_TEXTS, [], {}, [[]], [None] * 9)
_SCALAR = re.compile(rb"-?[0-9]+(\.[0-9]+)?|\"[^\"]*\"|true|false")
_WORD = re.compile(rb'"([A-Za-z_]+)"')
_MEMBER = re.compile(rb'("(?:ph|cat|name|ts|dur|args)"): (?:"[^"\\]*"|[0-9.]+)(?=,)')
_COUNT = re.compile(rb': "?([0-9]+)"?[,}]')


def mutated(path: Path, rng: Random) -> None:
    """Damage a file, or some of the files of a folder."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) or [path]
    for file in rng.sample(files, min(len(files), rng.choice([1, 1, 1, 2]))):
        for _ in range(rng.choice([1, 1, 2, 5])):
            _one(file, rng)


def _one(path: Path, rng: Random) -> None:
    structured = _structured(path)
    if structured is None or rng.random() < 0.4:
        path.write_bytes(changed_bytes(path.read_bytes(), rng))
        return
    # What an earlier damage has made unreadable is damaged as bytes.
    try:
        structured(path, rng)
    except Exception:
        path.write_bytes(changed_bytes(path.read_bytes(), rng))


def _structured(path: Path) -> Callable[[Path, Random], None] | None:
    kinds = {
        ".json": _json,
        ".gz": _gzip,
        ".sqlite": _sqlite,
        ".parquet": _parquet,
        ".arrow": _arrow,
        ".npz": _zip,
        ".zip": _zip,
        ".toml": _scalars,
        ".yaml": _scalars,
        ".csv": _scalars,
        ".log": _scalars,
        ".gml": _scalars,
    }
    return kinds.get(path.suffix)


def changed_bytes(data: bytes, rng: Random) -> bytes:  # noqa: PLR0911
    """One piece of damage anywhere."""
    at = rng.randrange(len(data) + 1)
    size = rng.choice([1, 1, 2, 4, 16, 300])
    other = rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0:
            return data[:at] + rng.randbytes(1) + data[at + 1 :]
        case 1:
            return data[:at] + data[at + size :]
        case 2:
            return data[:at] + rng.choice(_BYTES) + data[at:]
        case 3:
            return data[:at] + data[other : other + size] + data[at:]
        case 4:
            return data[:at] + rng.randbytes(size) + data[at + size :]
        case 5:
            return data[:at]
        case _:
            bits = bytearray(data[at : at + 4])
            for k in range(len(bits)):
                bits[k] ^= 1 << rng.randrange(8)
            return data[:at] + bytes(bits) + data[at + 4 :]


def _json(path: Path, rng: Random) -> None:
    path.write_bytes(_json_bytes(path.read_bytes(), rng))


def documents(path: Path, rng: Random) -> None:
    """Write valid JSON that is no single document of plain words, and sometimes damage it."""
    text = path.read_bytes()
    is_packed = path.suffix == ".gz"
    text = gzip.decompress(text) if is_packed else text
    for _ in range(rng.choice([1, 1, 2, 3])):
        text = _strange(text, rng)
    path.write_bytes(gzip.compress(text, 1) if is_packed else text)
    if rng.random() < 0.2:
        mutated(path, rng)


def unpacked(path: Path, rng: Random) -> None:
    """Damage the bytes in a gzip file, and sometimes the file."""
    text = gzip.decompress(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 5])):
        text = changed_bytes(text, rng)
    path.write_bytes(gzip.compress(text, 1))
    if rng.random() < 0.1:
        mutated(path, rng)


def _strange(text: bytes, rng: Random) -> bytes:
    """Another document behind, a value spelled with escapes, a key twice, a huge size."""
    match rng.randrange(4):
        case 0:
            other = rng.choice([text, text[: len(text) // 2], b"{}", b"[]", b"\xef\xbb\xbf{}"])
            return text + rng.choice([b"", b"\n", b"\0"]) + other
        case 1:
            word = rng.choice(list(_WORD.finditer(text)))
            at = rng.randrange(word.start(1), word.end(1))
            return text[:at] + b"\\u%04x" % text[at] + text[at + 1 :]
        case 2:
            member = rng.choice(list(_MEMBER.finditer(text)))
            value = json.dumps(rng.choice(["X", "i", "kernel", None, 7]))
            twice = b"%s: %s, " % (member[1], value.encode())
            at = rng.choice([member.start(), member.end()])
            return (
                text[:at] + (twice if at == member.start() else b", " + twice[:-2]) + text[at:]
            )
        case _:
            number = rng.choice(list(_COUNT.finditer(text)))
            size = str(rng.choice([2 * 10**18, (1 << 62) + 1, (1 << 63) - 1, 1 << 45]))
            return text[: number.start(1)] + size.encode() + text[number.end(1) :]


def _json_bytes(text: bytes, rng: Random) -> bytes:
    document = json.loads(text)
    places: list[tuple[Any, Any]] = []
    _collect(document, places)
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1:
            holder[key] = holder[rng.choice(list(_keys(holder)))]
        case 2 if isinstance(holder, list):
            holder[key:key] = [holder[key]] * rng.choice([1, 3, 50])
        case 3 if isinstance(holder, dict):
            holder[rng.choice(_TEXTS)] = holder.pop(key)
        case _:
            holder[key] = rng.choice(_WORDS)
    return json.dumps(document).encode()


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def _collect(node: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(node, dict | list):
        for key in _keys(node):
            places.append((node, key))
            _collect(node[key], places)


def _gzip(path: Path, rng: Random) -> None:
    text = gzip.decompress(path.read_bytes())
    with suppress(ValueError, IndexError):
        text = _json_bytes(text, rng)
    path.write_bytes(gzip.compress(changed_bytes(text, rng) if rng.random() < 0.3 else text, 1))


def _scalars(path: Path, rng: Random) -> None:
    """Another value where a number or a word stands."""
    text = path.read_bytes()
    found = rng.choice(list(_SCALAR.finditer(text)))
    value = rng.choice(
        [*map(str, _NUMBERS), *(json.dumps(each) for each in _TEXTS), "[]", "nan"]
    )
    path.write_bytes(text[: found.start()] + value.encode() + text[found.end() :])


def _sqlite(path: Path, rng: Random) -> None:
    with closing(sqlite3.connect(path)) as database:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        table = rng.choice([name for (name,) in database.execute(query)])
        columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
        column, value = rng.choice(columns), rng.choice(_SQL)
        where = rng.choice(["", " WHERE rowid = 1", " WHERE rowid % 7 = 3"])
        database.execute(
            rng.choice(
                [
                    f'UPDATE "{table}" SET "{column}" = {value}{where}',
                    f'UPDATE "{table}" SET "{column}" = {value}{where}',
                    f'DELETE FROM "{table}"{where}',
                    f'DROP TABLE "{table}"',
                    f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO odd',
                    f'ALTER TABLE "{table}" DROP COLUMN "{column}"',
                    f'ALTER TABLE "{table}" ADD COLUMN odd DEFAULT {value}',
                    f'INSERT INTO "{table}" SELECT * FROM "{table}"',
                ]
            )
        )
        database.commit()


_SQL = (
    *(
        "NULL",
        "0",
        "-1",
        "9223372036854775807",
        "-9223372036854775808",
        "1e300",
        "'text'",
        "''",
    ),
    *("x'ff00'", "x''", "CAST(x'ff' AS TEXT)", "zeroblob(100000)", "-rowid", "rowid << 50"),
)


def _table(table: pa.Table, rng: Random) -> pa.Table:
    place = rng.randrange(table.num_columns)
    name, rows = table.column_names[place], table.num_rows
    match rng.randrange(6):
        case 0:
            return table.drop_columns([name])
        case 1:
            return table.slice(0, rng.choice([0, 1, rows // 2]))
        case 2:
            return table.rename_columns(
                [each if k != place else "odd" for k, each in enumerate(table.column_names)]
            )
        case 3:
            return table.take(pa.array(np.array(rng.choices(range(rows), k=rows), np.int64)))
        case 4:
            column = pa.nulls(rows, table[name].type)
        case _:
            kind = rng.choice([pa.int64(), pa.float64(), pa.string(), pa.uint64(), pa.bool_()])
            value = rng.choice([0, 1, 2**62]) if kind != pa.bool_() else 1
            column = pa.array([value] * rows).cast(kind)
    return table.set_column(place, name, column)


def _sound(table: pa.Table) -> pa.Table:
    """The table; ArrowInvalid where working on it would end this process."""
    table.validate(full=True)
    return table


def _parquet(path: Path, rng: Random) -> None:
    table = _sound(pq.read_table(path))
    if rng.random() < 0.3:
        said = {
            key: _json_bytes(value, rng) if value[:1] == b"{" else changed_bytes(value, rng)
            for key, value in (table.schema.metadata or {b"fastcomm": b"{}"}).items()
        }
        table = table.replace_schema_metadata(said)
    else:
        table = _table(table, rng).replace_schema_metadata(table.schema.metadata)
    pq.write_table(table, path)


def _arrow(path: Path, rng: Random) -> None:
    with pa.ipc.open_stream(path.read_bytes()) as reader:
        table = _table(_sound(reader.read_all()), rng)
    codec = pa.ipc.IpcWriteOptions(compression=rng.choice([None, "zstd", "lz4"]))
    with pa.ipc.new_stream(path, table.schema, options=codec) as stream:
        stream.write_table(table)


def _zip(path: Path, rng: Random) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
        method = archive.infolist()[0].compress_type
    name = rng.choice(sorted(members))
    if name.endswith(".json"):
        members[name] = _json_bytes(members[name], rng)
    elif name.endswith(".parquet") and rng.random() < 0.6:
        buffer = io.BytesIO()
        pq.write_table(_table(_sound(pq.read_table(io.BytesIO(members[name]))), rng), buffer)
        members[name] = buffer.getvalue()
    else:
        members[name] = changed_bytes(members[name], rng)
    with zipfile.ZipFile(path, "w", method) as archive:
        for each, content in members.items():
            archive.writestr(zipfile.ZipInfo(each), content, method)
