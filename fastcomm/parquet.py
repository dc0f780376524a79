"""Parquet files of which nothing is trusted: read once their own words say that they fit."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fastcomm import inputs, remote
from fastcomm.errors import TraceFileError

_CELL = 8  # bytes of most values in memory


def names(path: Path) -> list[str]:
    """The names of the columns; OSError or ArrowException where the file is none."""
    inputs.check(path)
    with _words_of(path), remote.named(path) as source:
        return list(pq.read_schema(source).names)


def read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Some columns, or all; raises as `names`, and TraceFileError where they cannot fit."""
    inputs.check(path)
    with _words_of(path), remote.named(path) as source, pq.ParquetFile(source) as file:
        found = file.schema_arrow.names
        if missing := [name for name in columns or () if name not in found]:
            raise TraceFileError(f"{path}: no column {', '.join(missing)}; found {found}")
        wanted = list(found if columns is None else columns)
        check(file.metadata, path.stat().st_size, path, wanted)
        table = file.read(columns=wanted)
    check_words(table)
    return table


def check(
    metadata: pq.FileMetaData,
    size: int,
    path: Path,
    columns: Sequence[str] | None = None,
    groups: Iterable[int] | None = None,
) -> None:
    """TraceFileError where columns of a file of `size` bytes would be a bomb in memory.

    A column of one value is as short for a billion rows as for ten. `groups`: the row groups
    that are to be read, where not all are.
    """
    places = range(metadata.num_row_groups) if groups is None else groups
    with _words_of(path):
        made = sum(_bytes_of(metadata.row_group(place), columns) for place in places)
    if made < 0:
        raise TraceFileError(f"{path}: damaged: a row group of less than no rows")
    inputs.Limits.of_environment().check(made, size, path)


def _bytes_of(group: pq.RowGroupMetaData, wanted: Sequence[str] | None) -> int:
    """About what columns of a row group take in memory; lists have more values than rows."""
    if group.num_rows < 0:
        return -1 << 62
    columns = [group.column(k) for k in range(group.num_columns)]
    return sum(
        max(_CELL * group.num_rows, _CELL * each.num_values, each.total_uncompressed_size)
        for each in columns
        if wanted is None or each.path_in_schema.partition(".")[0] in wanted
    )


def check_words(table: pa.Table) -> None:
    """ArrowInvalid where a code stands for no word: Arrow would look behind its memory."""
    for column in table.columns:
        for chunk in column.chunks if pa.types.is_dictionary(column.type) else ():
            chunk.dictionary.validate(full=True)
            if len(chunk) == chunk.null_count:
                continue
            ends = pc.min_max(chunk.indices)
            if ends["min"].as_py() < 0 or ends["max"].as_py() >= len(chunk.dictionary):
                raise pa.ArrowInvalid(f"a code {ends}, and {len(chunk.dictionary)} words")


@contextmanager
def _words_of(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path}: damaged: a name that is no UTF-8") from error
