"""Whether the files of a store are what was written, to the byte: for `fastcomm doctor`."""

from collections.abc import Iterator
from pathlib import Path

from fastcomm import parquet
from fastcomm.errors import TraceFileError
from fastcomm.store import reader
from fastcomm.store.files import StoredFile, footer_sha256, listed, table_file
from fastcomm.store.layout import Entry, Manifest, TableFile, table_name
from fastcomm.trace.run import SkippedRank


def faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with a store, without a path: a line a file. Reads all of it."""
    if not manifest.complete:
        yield "not whole: run the same `fastcomm ingest` again"
        return
    for entry, file in zip(manifest.ranks, listed(folder, manifest), strict=True):
        if fault := _fault(entry, file):
            yield f"rank {entry.rank}: {fault}"
    for table in manifest.tables or ():
        if not _is_whole(folder, table):
            yield f"{table_name(table.name)}: missing, or not what was written; ingest again"


def _is_whole(folder: Path, table: TableFile) -> bool:
    try:
        return table_file(folder, table.name) == table
    except OSError:
        return False


def _fault(entry: Entry, file: StoredFile | SkippedRank) -> str:
    if isinstance(file, SkippedRank):
        return "its file has another size than the manifest says"
    try:
        if entry.footer not in (None, footer_sha256(file.path)):
            return "its file has another footer than the manifest says"
        _read_pages(file)
    except (OSError, TraceFileError):
        return "its file is missing or damaged"
    return ""


def _read_pages(file: StoredFile) -> None:
    """Read every page, which has a checksum; TraceFileError where one is wrong."""
    with reader.opened(file.path) as pages:
        parquet.check(pages.metadata, file.size, file.path)
        for group in range(pages.metadata.num_row_groups):
            pages.read_row_group(group)
