"""Read a store: a directory of Parquet files, one per rank."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm import files
from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.config import Config
from fastcomm.formats.sources import RankSources, add_rank, agreed_world
from fastcomm.formats.store import layout
from fastcomm.formats.store.files import (
    StoredFile,
    check_provenance,
    listed,
    over,
    reapplied,
    restored,
)
from fastcomm.formats.store.layout import Manifest, read_manifest
from fastcomm.trace import schema
from fastcomm.trace.parallelisms import TAG, TAGS
from fastcomm.trace.run_traces import WITH_HOST, Content, SkippedRank, Source, ranges
from fastcomm.trace.trace import Meta, Trace

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_NUMBERS = {
    "kind": schema.KIND,
    "op": schema.OP,
    "tag": TAG,
    "tag_source": {name: number for number, name in enumerate(schema.TAG_SOURCES)},
}
_META: dict[str, Any] = {
    "rank": int,
    "base": int,
    "world_size": int | None,
    "format": str,
    "found_by": str,
    "clock": str | None,
    **dict.fromkeys(("gpu", "host"), str | None),
    **dict.fromkeys(("is_truncated", "is_host_run"), bool),
}
_EVENTS = {name: layout.EVENT_NAMES.get(name, name) for name in schema.EVENTS.names}
_COMM = {
    name: layout.COMM_NAMES.get(name, name) for name in schema.COMM.names if name != "event"
}
_TEXT_COLUMNS = [field.name for field in layout.COLUMNS if pa.types.is_dictionary(field.type)]
_DAMAGE = (
    *(pa.ArrowException, OSError, KeyError, TypeError, ValueError, IndexError),
    *(AttributeError, OverflowError, RecursionError),
)
_TEXTS = {
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
}


def about(path: Path) -> dict[str, Any]:
    """Return the metadata of the file of a rank; TraceFileError if it is damaged."""
    with opened(path) as file:
        return _about(file, path)


def read(
    path: Path,
    options: TraceOptions,
    rank: int | None = None,
    provenance: dict[str, Any] | None = None,
    column_set: schema.ColumnSet | Literal["flops"] = "all",
) -> Trace:
    """Read one rank of a store.

    Tags and iterations are found again if the options differ from the stored ones. A file has
    the windows of iterations on both clocks; they are found again if the requested ones are
    missing.

    Parameters
    ----------
    path
        The file of the rank.
    options
        What to read; with `whole`, all events rather than device work.
    rank
        The rank that the store expects; None if unknown.
    provenance
        Source and options of the rank, as the manifest states them.
    column_set
        The columns that are enough. For metrics, device work is enough, too. "flops" are
        "launches" if the file has shapes of operators, else "kernels".

    Raises
    ------
    TraceFileError
        If the file is damaged, is of another rank or source, or lacks requested events.

    """
    from fastcomm import arrow_files

    with opened(path, with_operands=options.whole or column_set == "flops") as file:
        metadata = _about(file, path)
        if column_set == "flops":
            has_shapes = metadata["whole"] and schema.OPERANDS[0] in file.schema_arrow.names
            options = replace(options, whole=has_shapes)
            column_set = "launches" if has_shapes else "kernels"
        _check_contents(metadata, path, rank, is_whole=options.whole)
        stored = restored(metadata["reading"])
        check_provenance(metadata, provenance, path)
        effective = over(options, stored)
        clock = options.iterations.clock
        clock = stored.iterations.clock if clock == "auto" else clock
        is_missing = clock == "device" and metadata["device_steps"] is None
        is_changed = effective != stored or is_missing
        column_set = "all" if is_changed else column_set
        is_whole = options.whole and column_set != "metrics"
        # With other iterations, the causes of idle time are found again, from all events.
        sections = len(layout.SECTIONS) if is_whole or is_changed else 1
        groups = range(sum(metadata["row_groups"][:sections]))
        file_schema = file.schema_arrow
        columns = _columns(file_schema, metadata, column_set, is_whole=is_whole)
        _check_texts(file_schema, columns)
        arrow_files.check(file.metadata, path.stat().st_size, path, columns, groups)
        trace = _trace(_rows(file, groups, columns), metadata, path, column_set)
    if is_changed:
        effective = replace(effective, iterations=replace(effective.iterations, clock=clock))
        return reapplied(trace, effective, stored)
    return trace.on_host_clock() if clock == "host" else trace


_OF_TAGS = {"tag", "tag_source"}  # columns that options of reading change


def read_columns(
    file: StoredFile,
    options: TraceOptions,
    names: Sequence[str],
    kinds: Collection[str] | None = None,
) -> pa.Table | None:
    """Read some columns of the events of one rank of a store, in the order of the file.

    Parameters
    ----------
    file
        The file of the rank.
    options
        How the run is read.
    names
        Columns of `layout.COLUMNS` and `schema.ARGS`; those that the file lacks are left out.
    kinds
        Kinds of the events that are needed; other sections of the file are skipped. None: all.

    Returns
    -------
    pyarrow.Table or None
        None if the options find other parallelisms than the store has, and `names` has them.

    Raises
    ------
    TraceFileError
        If the file is damaged, is of another rank or source, or lacks events of the host.

    """
    from fastcomm import arrow_files

    path = file.path
    with opened(path, with_operands=True) as parquet:
        metadata = _about(parquet, path)
        _check_contents(metadata, path, file.rank, is_whole=True)
        check_provenance(metadata, file.provenance, path)
        stored = restored(metadata["reading"])
        if over(options, stored).tags != stored.tags and _OF_TAGS.intersection(names):
            return None
        file_schema = parquet.schema_arrow
        columns = [name for name in names if name in file_schema.names]
        _check_texts(file_schema, columns)
        groups = _groups_with(metadata["row_groups"], kinds)
        arrow_files.check(parquet.metadata, path.stat().st_size, path, columns, groups)
        rows = parquet.read_row_groups(groups, columns=columns)
        arrow_files.check_codes(rows)
        for column in rows.columns:
            if pa.types.is_dictionary(column.type):
                for chunk in column.chunks:
                    chunk.dictionary.validate(full=True)
        return rows


def _groups_with(counts: Sequence[int], kinds: Collection[str] | None) -> list[int]:
    """Return the row groups that may have events of some kinds.

    `counts` are the numbers of row groups of each section. The first section has communication
    of any kind, and is always read.
    """
    groups: list[int] = []
    begin = 0
    for count, own in zip(counts, layout.SECTIONS.values(), strict=True):
        if kinds is None or begin == 0 or set(kinds).intersection(own):
            groups += range(begin, begin + count)
        begin += count
    return groups


def _check_contents(
    metadata: dict[str, Any], path: Path, rank: int | None, *, is_whole: bool
) -> None:
    """Raise TraceFileError if a file is of another rank, or lacks requested events."""
    if rank is not None and metadata["meta"]["rank"] != rank:
        raise TraceFileError(
            f"{path}: the file says rank {metadata['meta']['rank']}, the store rank {rank}"
        )
    if is_whole and not metadata["whole"]:
        raise TraceFileError(
            f"{path}: holds only what metrics need; ingest the traces again for the rest"
        )


@contextmanager
def opened(path: Path, *, with_operands: bool = False) -> Iterator["pq.ParquetFile"]:
    """Open the file of a rank; any error while it is open becomes one with its path.

    With `with_operands`, the texts of operators' inputs can be read, too, if the file has any.
    """
    import pyarrow.parquet as pq  # slow import, and few runs are stores

    try:
        files.check(path)
        with (
            files.named(path) as source,
            pq.ParquetFile(
                source,
                read_dictionary=_text_columns(source) if with_operands else _TEXT_COLUMNS,
                page_checksum_verification=True,
                # Reading ahead pays if each read is a request over a network.
                pre_buffer=not files.is_local(path),
            ) as file,
        ):
            yield file
    except FileNotFoundError as error:
        raise TraceFileError(
            f"{path}: no such file, though the store has its rank; ingest its trace again"
        ) from error
    except FastcommError as error:
        if isinstance(error, TraceFileError):
            raise
        raise TraceFileError(f"{path}: {error}") from error
    except _DAMAGE as error:
        cause = f"{type(error).__name__}: {error}"
        raise TraceFileError(
            f"{path}: damaged, or no file of a store ({cause}); ingest its trace again"
        ) from error


def _text_columns(source: Any) -> list[str]:
    """Return the columns of texts that a file has; operands are only in some."""
    import pyarrow.parquet as pq

    present = pq.read_metadata(source).schema.names
    return _TEXT_COLUMNS + [name for name in schema.TEXT_ARGS if name in present]


def _check_texts(file_schema: pa.Schema, columns: Iterable[str]) -> None:
    """Raise TypeError for texts in place of numbers, which could expand enormously."""
    for name in columns:
        if file_schema.field(name).type in _TEXTS:
            raise TypeError(f"column {name} holds texts")


def _about(file: "pq.ParquetFile", path: Path) -> dict[str, Any]:
    """Return the metadata of a file after checking the types of its values."""
    text = (file.metadata.metadata or {})[layout.ABOUT]
    try:
        metadata: dict[str, Any] = orjson.loads(text)
    except orjson.JSONDecodeError:  # a source whose name is not UTF-8
        metadata = json.loads(text)
    layout.check_layout(metadata["layout"], path)
    layout.check_names(metadata, path)
    meta = metadata["meta"]
    for name, kind in _META.items():
        value = meta[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"{name} {str(value)[:40]!r}")
    for name in ("warnings", "missing_data", "unused"):
        if not all(isinstance(text, str) for text in meta[name]):
            raise TypeError(f"{name} are no texts")
    if not all(isinstance(text, str) for text in metadata["device_notes"]):
        raise TypeError("device_notes are no texts")
    return metadata


def _check_places(column: pa.ChunkedArray, count: int, name: str) -> None:
    """Raise IndexError for indices outside 0 to `count`, which later code relies on."""
    ends = pc.min_max(column)
    least, most = ends["min"].as_py(), ends["max"].as_py()
    if least is not None and not 0 <= least <= most < count:
        raise IndexError(f"{name} {least} to {most}, of {count}")


def _columns(
    file_schema: pa.Schema,
    metadata: dict[str, Any],
    column_set: schema.ColumnSet,
    *,
    is_whole: bool,
) -> list[str]:
    """Return the columns to read; those of partners only if the file may have any."""
    tables = schema.COLUMN_SETS[column_set]
    names = {_EVENTS[name] for name in tables["events"].names}
    names |= {_COMM[name] for name in tables["comm"].names if name != "event"}
    if is_whole or column_set == "all":
        names.add("event")  # without it, rows are of one section, in the order of events
    if not metadata["partners"]:
        names -= {*schema.PARTNERS, *schema.OF_ONE}
    if is_whole:
        names |= set(tables["args"].names) & set(file_schema.names)
    return sorted(names)


def _rows(file: "pq.ParquetFile", groups: range, columns: list[str]) -> pa.Table:
    """Return the rows of some row groups, sorted by event."""
    from fastcomm import arrow_files

    # Ranks are read in parallel; for a small rank, further threads cost more than they save.
    table = file.read_row_groups(
        list(groups), columns=columns, use_threads=file.metadata.num_rows > layout.ROW_GROUP
    )
    # Dictionaries are merged by code; if not, `_in_numbers` checks all columns but "name".
    names = table.schema.names if len(groups) > 1 else {"name"} & set(columns)
    arrow_files.check_codes(table.select(names))
    if len(groups) > 1:
        table = table.unify_dictionaries().combine_chunks()
    if "event" in columns:
        event = table["event"].to_numpy()
        if (event[1:] < event[:-1]).any():
            table = table.take(pa.array(np.argsort(event, kind="stable")))
    return table


@lru_cache(maxsize=64)
def _numbers(name: str, texts: tuple[str, ...]) -> pa.Array:
    """Return the numbers of `trace.schema` for texts of a column; KeyError for other texts."""
    return pa.array([_NUMBERS[name][text] for text in texts], pa.int8())


def _in_numbers(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column with the numbers of `trace.schema` for its texts.

    Raises KeyError or IndexError for texts and codes that the schema lacks.
    """
    if name not in _NUMBERS:
        return column
    numbers = [
        _numbers(name, tuple(chunk.dictionary.to_pylist())).take(chunk.indices)
        for chunk in column.chunks
    ]
    return pa.chunked_array(numbers, pa.int8())


def _trace(
    rows: pa.Table, metadata: dict[str, Any], path: Path, column_set: schema.ColumnSet
) -> Trace:
    """Assemble a trace from its rows and metadata."""
    small = layout.tables(metadata, with_lanes=column_set != "metrics")
    groups = small["groups"]
    _check_places(groups["tag"], len(TAGS), "tag")
    _check_places(groups["tag_source"], len(schema.TAG_SOURCES), "tag_source")
    _check_places(pc.list_flatten(groups["candidates"]), len(TAGS), "candidates")
    if "group_id" in rows.column_names:
        _check_places(rows["group_id"], groups.num_rows, "group")
    if "lane" in rows.column_names:
        _check_places(rows["lane"], small["lanes"].num_rows, "lane")
    meta: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in metadata["meta"].items()
    }
    args = [name for name in schema.ARGS.names if name in rows.schema.names]
    parts = {
        "lanes": None,
        **small,
        "comm": _communication(rows),
        "meta": Meta(**meta, path=str(path)),
        "events": _events(rows, schema.COLUMN_SETS[column_set]["events"]),
        "args": rows.select(args) if args else None,
    }
    is_all = column_set == "all"
    trace = Trace.of(**parts) if is_all else Trace.narrow(**parts, columns=column_set)
    columns = metadata["device_steps"]
    on_device = None if columns is None else pa.table(columns, schema.ITERATIONS)
    trace = trace.with_device_iterations(on_device, tuple(metadata["device_notes"]))
    if column_set != "metrics":
        return trace
    return replace(trace, stored_idle=layout.idle(trace, metadata))


def _events(rows: pa.Table, table_schema: pa.Schema) -> pa.Table:
    columns = [_in_numbers(name, rows[_EVENTS[name]]) for name in table_schema.names]
    return pa.Table.from_arrays(columns, schema=table_schema)


def _communication(rows: pa.Table) -> pa.Table:
    """Return the rows that communicate, with the columns of `schema.COMM` that were read."""
    event = pc.indices_nonzero(rows["op"].is_valid())
    present = set(rows.column_names)
    names = [name for name, column in _COMM.items() if column in present]
    table_schema = pa.schema([schema.COMM.field(name) for name in (*names, "event")])
    chosen = rows.select([_COMM[name] for name in names]).take(event)
    columns = map(_in_numbers, names, chosen.columns)
    return pa.Table.from_arrays([*columns, event.cast(pa.int32())], schema=table_schema)


def claims(path: Path) -> bool:
    """Return whether the path is a store, or the file of one rank of a store."""
    if path.is_dir():
        return (path / layout.MANIFEST).is_file()
    return layout.FILE_NAME.fullmatch(path.name) is not None


def is_damaged(_: Path) -> bool:
    """Return False: the manifest lists the files of a store, damaged or not."""
    return False


def find(paths: Sequence[Path], config: Config) -> RankSources:
    """Find the ranks that manifests list, and those of single files.

    Raises `TraceFileError` if a store is unfinished or empty, a file is missing or changed
    (unless the run goes on), or two files have one rank.
    """
    manifests = {path: read_manifest(path) for path in paths if path.is_dir()}
    world_sizes: dict[Path, int | None] = {}
    files: list[StoredFile] = []
    changed: list[SkippedRank] = []
    for folder, manifest in manifests.items():
        _refuse_unfinished(folder, manifest)
        world_sizes[folder] = manifest.world_size
        for file in listed(folder, manifest):
            files.append(file) if isinstance(file, StoredFile) else changed.append(file)
    for path in paths:
        if path not in manifests:
            meta = about(path)["meta"]
            world_sizes[path] = meta["world_size"]
            files.append(StoredFile(rank=meta["rank"], path=path, size=path.stat().st_size))
    if changed and not (config.keep_going and files):
        raise TraceFileError(changed[0].error)
    ranks: dict[int, Path] = {}
    for file in files:
        add_rank(ranks, file.rank, file.path)
    world = agreed_world(world_sizes, ranks)
    reading = config.reading(world, ranks)
    return RankSources(
        sources=tuple(
            _source(file, reading) for file in sorted(files, key=lambda file: file.rank)
        ),
        world_size=world,
        warnings=tuple(note for manifest in manifests.values() for note in _notes(manifest)),
        link_bandwidth=next(
            (m.link_bandwidth for m in manifests.values() if m.link_bandwidth), None
        ),
        skipped=(
            *(rank.skipped() for manifest in manifests.values() for rank in manifest.failed),
            *changed,
        ),
    )


def _source(file: StoredFile, options: TraceOptions) -> Source:
    """Return a stored rank as an input, whose function reads it when it is called."""
    return Source(
        rank=file.rank,
        path=file.path,
        size=file.size,
        reader=partial(_read, file, options),
        column_reader=partial(read_columns, file, options),
    )


def _read(file: StoredFile, options: TraceOptions, content: Content) -> Trace:
    return read(
        file.path,
        replace(options, whole=content in WITH_HOST),
        file.rank,
        file.provenance,
        "all" if content == "work" else content,
    )


def _refuse_unfinished(folder: Path, manifest: Manifest) -> None:
    """Raise TraceFileError for a store that is being written, or has no rank."""
    if not manifest.complete:
        done = sum((folder / layout.file_name(rank)).exists() for rank in manifest.expected)
        raise TraceFileError(
            f"{folder}: a store that is not whole: {done} of {len(manifest.expected)} ranks; "
            "the same `fastcomm ingest` again finishes it"
        )
    if not manifest.ranks:
        raise TraceFileError(f"{folder}: a store without a rank; ingest the traces again")


def _notes(manifest: Manifest) -> Iterator[str]:
    """Yield the warnings of a store, with the ranks that could not be stored."""
    yield from manifest.warnings
    if manifest.failed:
        numbers = sorted(failed.rank for failed in manifest.failed if failed.rank is not None)
        ranks = ranges(numbers) or "of unknown number"
        yield f"left out when the run was stored: rank {ranks}: {manifest.failed[0].error}"
