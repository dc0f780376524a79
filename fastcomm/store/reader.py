"""Read a store: a directory of Parquet files, one a rank."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm import inputs, remote
from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.options import StepClock
from fastcomm.readers.assembly import TraceOptions
from fastcomm.readers.formats import OpenOptions, RankSources, agreed_world
from fastcomm.store import layout, rules
from fastcomm.store.files import StoredFile, check_provenance, listed
from fastcomm.store.layout import Manifest, read_manifest
from fastcomm.store.rules import reapplied
from fastcomm.trace import schema
from fastcomm.trace.run import SkippedRank, Source, ranges
from fastcomm.trace.trace import Meta, Trace

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_NUMBERS = {
    "kind": schema.KIND,
    "op": schema.OP,
    "tag": schema.TAG,
    "tag_source": {name: number for number, name in enumerate(schema.TAG_SOURCES)},
}
_META = {
    "rank": int,
    "format": str,
    "found_by": str,
    "base": int,
    "world_size": int | None,
    "clock": str | None,
}
_EVENTS = {name: layout.EVENT_NAMES.get(name, name) for name in schema.EVENTS.names}
_COMM = {
    name: layout.COMM_NAMES.get(name, name) for name in schema.COMM.names if name != "event"
}
_SMALL = {"lanes": schema.LANES, "groups": schema.GROUPS, "iterations": schema.ITERATIONS}
_WORDS = [field.name for field in layout.COLUMNS if pa.types.is_dictionary(field.type)]
_DAMAGE = (
    *(pa.ArrowException, OSError, KeyError, TypeError, ValueError, IndexError),
    *(AttributeError, OverflowError, RecursionError),
)
_TEXTS = {
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
}


def claims(path: Path) -> bool:
    """Whether the path is a store, or one rank's file of a store."""
    if path.is_dir():
        return (path / layout.MANIFEST).is_file()
    return layout.FILE_NAME.fullmatch(path.name) is not None


def is_damaged(_: Path) -> bool:
    """Return False: the manifest lists the files of a store, damaged or not."""
    return False


def find(paths: Sequence[Path], options: OpenOptions) -> RankSources:
    """The ranks that the manifests list, and those of single files."""
    manifests = {path: read_manifest(path) for path in paths if path.is_dir()}
    said: dict[Path, int | None] = {}
    files: list[StoredFile] = []
    changed: list[SkippedRank] = []
    for folder, manifest in manifests.items():
        _refuse_unfinished(folder, manifest)
        said[folder] = manifest.world_size
        for each in listed(folder, manifest):
            files.append(each) if isinstance(each, StoredFile) else changed.append(each)
    for path in paths:
        if path not in manifests:
            meta = about(path)["meta"]
            said[path] = meta["world_size"]
            files.append(StoredFile(rank=meta["rank"], path=path, size=path.stat().st_size))
    if changed and not (options.keep_going and files):
        raise TraceFileError(changed[0].error)
    ranks = _one_each(files)
    world = agreed_world(said, {rank: each.path for rank, each in ranks.items()})
    reading = options.reading(world, ranks)
    return RankSources(
        sources=tuple(_source(each, reading) for _, each in sorted(ranks.items())),
        world_size=world,
        warnings=tuple(note for each in manifests.values() for note in _notes(each)),
        link_bandwidth=next(
            (each.link_bandwidth for each in manifests.values() if each.link_bandwidth), None
        ),
        skipped=(
            *(left.skipped() for each in manifests.values() for left in each.failed),
            *changed,
        ),
    )


def _source(file: StoredFile, options: TraceOptions) -> Source:
    reading = partial(read, file.path, options, file.rank, provenance=file.provenance)
    return Source(
        rank=file.rank,
        path=file.path,
        size=file.size,
        read=reading,
        read_narrow=partial(reading, is_narrow=True),
    )


def _one_each(files: list[StoredFile]) -> dict[int, StoredFile]:
    ranks: dict[int, StoredFile] = {}
    for file in files:
        if (other := ranks.setdefault(file.rank, file)) is not file:
            raise TraceFileError(f"two files of rank {file.rank}: {other.path} and {file.path}")
    return ranks


def _refuse_unfinished(folder: Path, manifest: Manifest) -> None:
    if not manifest.complete:
        done = sum((folder / layout.file_name(rank)).exists() for rank in manifest.expected)
        raise TraceFileError(
            f"{folder}: a store that is not whole: {done} of {len(manifest.expected)} ranks; "
            "the same `fastcomm ingest` again finishes it"
        )
    if not manifest.ranks:
        raise TraceFileError(f"{folder}: a store without a rank; ingest the traces again")


def _notes(manifest: Manifest) -> Iterator[str]:
    yield from manifest.warnings
    if manifest.failed:
        numbers = sorted(left.rank for left in manifest.failed if left.rank is not None)
        ranks = ranges(numbers) or "of unknown number"
        yield f"left out when the run was stored: rank {ranks}: {manifest.failed[0].error}"


def about(path: Path) -> dict[str, Any]:
    """What a rank's file says of itself."""
    with opened(path) as file:
        return _about(file, path)


def read(
    path: Path,
    options: TraceOptions,
    rank: int | None = None,
    *,
    is_narrow: bool = False,
    provenance: dict[str, Any] | None = None,
) -> Trace:
    """Read one rank: its device work, or every event where `options.whole` asks for it.

    Tags and iterations are determined again where the options differ from those at the time
    of storing. A file has the windows of iterations on both clocks; they are determined again
    where it lacks those that are asked for. `is_narrow`: what metrics ask for is enough.
    `provenance`: what the manifest says that the rank was read from, and how.
    TraceFileError where the file is damaged or lacks what is asked for.
    """
    from fastcomm import parquet

    with opened(path) as file:
        said = _about(file, path)
        if rank is not None and said["meta"]["rank"] != rank:
            raise TraceFileError(
                f"{path}: the file says rank {said['meta']['rank']}, the store rank {rank}"
            )
        if options.whole and not said["whole"]:
            raise TraceFileError(
                f"{path}: holds only what metrics need; ingest the traces again for the rest"
            )
        stored = rules.restored(said["reading"])
        check_provenance(said, provenance, path)
        wanted = rules.over(options, stored)
        clock = _clock(said, options.iterations.clock, stored.iterations.clock)
        anew = wanted != stored or not _has_windows(said, clock, stored.iterations.clock)
        is_narrow = is_narrow and not anew
        is_whole = options.whole and not is_narrow
        sections = len(layout.SECTIONS) if is_whole else 2 if anew else 1
        groups = range(sum(said["row_groups"][:sections]))
        found = file.schema_arrow
        columns = _columns(found, said, is_narrow=is_narrow, is_whole=is_whole)
        _check_texts(found, columns)
        parquet.check(file.metadata, path.stat().st_size, path, columns, groups)
        trace = _trace(_rows(file, groups, columns), said, path, is_narrow=is_narrow)
    if anew:
        wanted = replace(wanted, iterations=replace(wanted.iterations, clock=clock))
        return reapplied(trace, wanted, stored)
    return trace.on_host_clock() if clock == "host" else trace


def _clock(said: Mapping[str, Any], asked: StepClock, stored: StepClock) -> StepClock:
    """Return the clock to read iterations by: the one that is asked for, else the stored one.

    Before stores had device windows, "host" was what was stored unless something else was
    asked for.
    """
    if asked != "auto":
        return asked
    return stored if "device_iterations" in said or stored == "device" else "auto"


def _has_windows(said: Mapping[str, Any], clock: StepClock, stored: StepClock) -> bool:
    """Return whether the file has the windows of iterations that the clock needs."""
    if "device_iterations" not in said and stored == "device":
        return False  # its only windows are on the device's clock
    return clock != "device" or said.get("device_iterations") is not None


@contextmanager
def opened(path: Path) -> Iterator["pq.ParquetFile"]:
    """The file; whatever is wrong with it while it is open is an error with its path."""
    import pyarrow.parquet as pq  # every run asks this module first, and few are stores

    try:
        inputs.check(path)
        with (
            remote.named(path) as source,
            pq.ParquetFile(
                source,
                read_dictionary=_WORDS,
                page_checksum_verification=True,
                # Ahead of time, in other threads: worth it where a read is a request.
                pre_buffer=not remote.is_local(path),
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
        found = f"{type(error).__name__}: {error}"
        raise TraceFileError(
            f"{path}: damaged, or no file of a store ({found}); ingest its trace again"
        ) from error


def _check_texts(found: pa.Schema, columns: Iterable[str]) -> None:
    """TypeError for texts in place of numbers: one word a million times would be many."""
    for name in columns:
        if found.field(name).type in _TEXTS:
            raise TypeError(f"column {name} holds texts")


def _about(file: "pq.ParquetFile", path: Path) -> dict[str, Any]:
    text = (file.metadata.metadata or {})[layout.ABOUT]
    try:
        said: dict[str, Any] = orjson.loads(text)
    except orjson.JSONDecodeError:  # the name of a source that is not UTF-8
        said = json.loads(text)
    layout.checked_layout(said["layout"], str(path))
    meta = said["meta"]
    for name, kind in _META.items():
        if not isinstance(meta[name], kind) or isinstance(meta[name], bool):
            raise TypeError(f"{name} {str(meta[name])[:40]!r}")
    for name in ("warnings", "lacks", "unused"):
        # Stores of older releases do not say what had no effect.
        if not all(isinstance(each, str) for each in meta.get(name, ())):
            raise TypeError(f"{name} are no texts")
    if not all(isinstance(each, str) for each in said.get("device_notes", ())):
        raise TypeError("device_notes are no texts")
    if not isinstance(meta.get("is_truncated", False), bool):
        raise TypeError(f"is_truncated {str(meta['is_truncated'])[:40]!r}")
    return said


def _check_places(column: pa.ChunkedArray, count: int, name: str) -> None:
    """IndexError where a number is no place among so many: what computes with it trusts it."""
    ends = pc.min_max(column)
    least, most = ends["min"].as_py(), ends["max"].as_py()
    if least is not None and not 0 <= least <= most < count:
        raise IndexError(f"{name} {least} to {most}, of {count}")


def _columns(
    found: pa.Schema, said: dict[str, Any], *, is_narrow: bool, is_whole: bool
) -> list[str]:
    """The columns that are needed; those of partners unless the file has or says none."""
    tables = schema.NARROW if is_narrow else schema.ALL
    names = {_EVENTS[name] for name in tables["events"].names}
    names |= {_COMM[name] for name in tables["comm"].names if name != "event"}
    if not is_narrow:
        names.add("event")  # without it, rows are of one section, and in their order
    present, of_one = set(found.names), set(schema.OF_ONE)
    if said.get("partners") is False or not present.issuperset(schema.PARTNERS):
        names -= {*schema.PARTNERS, *of_one}
    elif not present.issuperset(of_one):  # stored before there were these
        names = names - of_one | set(schema.PARTNERS)
    if is_whole:
        names |= set(schema.ARGS.names) & present
    return sorted(names)


def _rows(file: "pq.ParquetFile", groups: range, columns: list[str]) -> pa.Table:
    """Their rows by place among all events."""
    from fastcomm import parquet

    # Ranks are read side by side; for a small one, handing columns to threads costs more.
    table = file.read_row_groups(
        list(groups), columns=columns, use_threads=file.metadata.num_rows > layout.ROW_GROUP
    )
    # Words are joined by their codes; where they are not, `_in_numbers` looks at all but these.
    names = table.schema.names if len(groups) > 1 else {"name"} & set(columns)
    parquet.check_words(table.select(names))
    if len(groups) > 1:
        table = table.unify_dictionaries().combine_chunks()
    if "event" in columns:
        event = table["event"].to_numpy()
        if (event[1:] < event[:-1]).any():
            table = table.take(pa.array(np.argsort(event, kind="stable")))
    return table


@lru_cache(maxsize=64)
def _numbers(name: str, words: tuple[str, ...]) -> pa.Array:
    """What `trace.schema` has for words of a column; KeyError where it has none."""
    return pa.array([_NUMBERS[name][word] for word in words], pa.int8())


def _in_numbers(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as `trace.schema` has it; KeyError or IndexError where a word is none of it."""
    if name not in _NUMBERS:
        return column
    numbers = [
        _numbers(name, tuple(chunk.dictionary.to_pylist())).take(chunk.indices)
        for chunk in column.chunks
    ]
    return pa.chunked_array(numbers, pa.int8())


_BEFORE_DEVICE_CLOCK = (
    "stored without windows on the device's clock: iterations are by the host's marks; ingest "
    "the traces again, or pass --step-boundary device"
)


def _trace(rows: pa.Table, said: dict[str, Any], path: Path, *, is_narrow: bool) -> Trace:
    small = {
        name: pa.table(said[name], wanted)
        for name, wanted in _SMALL.items()
        if name != "lanes" or not is_narrow
    }
    _check_places(rows["group_id"], small["groups"].num_rows, "group")
    meta: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in said["meta"].items()
    }
    found = {
        "comm": _communication(rows),
        "groups": small["groups"],
        "iterations": small["iterations"],
        "meta": Meta(**meta, path=str(path)),
    }
    if is_narrow:
        trace = Trace.narrow(events=_events(rows, schema.NARROW["events"]), **found)
        return _with_device_iterations(trace, said)
    _check_places(rows["lane"], small["lanes"].num_rows, "lane")
    args = [name for name in schema.ARGS.names if name in rows.schema.names]
    trace = Trace.of(
        events=_events(rows, schema.EVENTS),
        lanes=small["lanes"],
        args=rows.select(args) if args else None,
        **found,
    )
    return _with_device_iterations(trace, said)


def _with_device_iterations(trace: Trace, said: Mapping[str, Any]) -> Trace:
    columns = said.get("device_iterations")
    table = None if columns is None else pa.table(columns, schema.ITERATIONS)
    notes = tuple(said.get("device_notes", (_BEFORE_DEVICE_CLOCK,)))
    return trace.with_device_iterations(table, notes)


def _events(rows: pa.Table, wanted: pa.Schema) -> pa.Table:
    columns = [_in_numbers(name, rows[_EVENTS[name]]) for name in wanted.names]
    return pa.Table.from_arrays(columns, schema=wanted)


def _communication(rows: pa.Table) -> pa.Table:
    """The rows that communicate, with what was read of the columns of `schema.COMM`."""
    event = pc.indices_nonzero(rows["op"].is_valid())
    found = set(rows.column_names)
    names = [name for name, column in _COMM.items() if column in found]
    wanted = pa.schema([schema.COMM.field(name) for name in (*names, "event")])
    chosen = rows.select([_COMM[name] for name in names]).take(event)
    columns = map(_in_numbers, names, chosen.columns)
    return pa.Table.from_arrays([*columns, event.cast(pa.int32())], schema=wanted)
