"""The files of a store, as data: what the writer and the reader agree on.

A store is a directory: `fastcomm.json`, the manifest; a Parquet file a rank, sufficient by
itself; and small tables of the whole run. A rank's file has a row an event. Its row groups come
in sections, each sorted by start, so that a reader takes no more than it needs.
"""

import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fastcomm.errors import TraceFileError
from fastcomm.trace.schema import ARGS, KINDS

# A reader knows its own numbers and those below.
LAYOUT = 1  # of a rank's file
MANIFEST_LAYOUT = 2  # of the manifest: 2 adds hashes of footers and tables
MANIFEST = "fastcomm.json"
TABLES = ("ranks", "groups", "iterations")  # of the whole run, each a Parquet file
ABOUT = b"fastcomm"  # the key of what a rank's file says of itself, as JSON

ROW_GROUP = 1 << 18  # rows
COMPRESSION = "zstd"
LEVEL = 3  # of zstd: level 1 is no faster, and its files are larger

# Sections in the order of the file, and the kinds of event in each. Communication is in the
# first, whatever its kind.
SECTIONS = {
    "device": ("kernel", "memcpy", "memset"),  # what metrics ask for
    "marks": ("annotation", "runtime"),  # what iterations are found by
    "rest": tuple(
        kind
        for kind in KINDS
        if kind not in ("kernel", "memcpy", "memset", "annotation", "runtime")
    ),
}

_WORDS = pa.dictionary(pa.int32(), pa.string())

# The columns of a rank's file. Words stand for the numbers of `trace.schema`, and lanes are
# joined, so that a query needs neither; no name is a reserved word of SQL.
COLUMNS = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),  # the same in all rows
        pa.field("event", pa.int32(), nullable=False),  # place among all events, by start
        pa.field("start", pa.int64(), nullable=False),  # ns, on the rank's own clock
        pa.field("stop", pa.int64(), nullable=False),  # ns
        pa.field("kind", _WORDS, nullable=False),  # of KINDS
        pa.field("name", _WORDS, nullable=False),
        pa.field("lane", pa.int32(), nullable=False),  # a host thread or a stream, from 0
        pa.field("process", _WORDS, nullable=False),  # host process, or device number
        pa.field("thread", _WORDS, nullable=False),  # host thread, or stream number
        pa.field("device", pa.int32()),  # local device; null on the host
        pa.field("is_device", pa.bool_(), nullable=False),
        pa.field("correlation", pa.int64()),  # joins a launch and its device work
        pa.field("text_offset", pa.int64()),  # of the event in its source, in bytes
        pa.field("op", _WORDS),  # of OPS; from here on null where there is no communication
        pa.field("stream", pa.int64()),
        pa.field("group_id", pa.int32()),  # place among the rank's groups, from 0
        pa.field("seq", pa.int64()),  # number of the collective in its group
        pa.field("tag", _WORDS),  # of TAGS
        pa.field("tag_source", _WORDS),  # of TAG_SOURCES
        pa.field("msg_bytes", pa.int64()),
        pa.field("payload_bytes", pa.int64()),
        pa.field("bus_bytes", pa.int64()),
        pa.field("root", pa.int32()),  # from here on global ranks
        pa.field("sends_to", pa.list_(pa.int32())),
        pa.field("receives_from", pa.list_(pa.int32())),
        pa.field("peer", pa.int32()),  # of an event that is one message
        pa.field("sends", pa.bool_()),  # whether it sends that message
    ]
)

# Where a column of the file has another name than in `trace.schema`.
EVENT_NAMES = {"offset": "text_offset"}
COMM_NAMES = {"group": "group_id"}

# Numbers that grow from row to row; the others repeat, and are written as a dictionary.
GROWING = (
    *("event", "start", "stop", "correlation", "text_offset", "seq"),
    *("position", "external_id", "sequence", "record_function", "wait_correlation"),
)
# Columns that metrics read and that zstd hardly makes smaller: to unpack a page takes zstd as
# long as all else that is done for it, Snappy next to nothing.
QUICK = (
    *("kind", "lane", "op", "stream", "group_id", "seq"),
    *("tag", "tag_source", "msg_bytes", "payload_bytes", "bus_bytes"),
    *("root", "sends_to", "receives_from", "peer", "sends"),
)
# What queries choose rows by.
CHOSEN_BY = ("rank", "start", "stop", "kind", "is_device", "op", "tag")


FILE_NAME = re.compile(r"rank-[0-9]{5,}\.parquet")


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05d}.parquet"


def table_name(name: str) -> str:
    """Return the file of a table of the whole run."""
    return f"{name}.parquet"


def stored_columns(args: pa.Schema | None) -> pa.Schema:
    """The columns of a file whose events have these columns of `ARGS`."""
    names = () if args is None else args.names
    return pa.schema([*COLUMNS, *(field for field in ARGS if field.name in names)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """By what a source is known again: a file whose three are the same has not changed."""

    size: int  # bytes
    mtime_ns: int
    sha256: str  # of the first and the last 64 KiB


def checked_layout(found: Any, where: str, known: int = LAYOUT) -> None:
    """TraceFileError where something was written in a layout that is not known here."""
    if not isinstance(found, int) or found < 1:
        raise TraceFileError(f"{where}: layout {found!r}, wanted a number from 1 to {known}")
    if found > known:
        raise TraceFileError(
            f"{where}: written in layout {found} by a newer fastcomm; this one reads layouts "
            f"up to {known}: update fastcomm, or ingest the traces again"
        )
