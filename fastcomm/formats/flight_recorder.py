"""Read flight-recorder dumps of PyTorch: what each rank of a job called, and where it stands.

A dump is a pickle or JSON, maybe gzipped, one file a rank; the rank is in its name. No pickle
is executed: the opcodes that such dumps need are read into columns, and all others refused.
Times are ns of the host's clock.
"""

import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import lru_cache, reduce
from math import prod
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import numpy as np
import orjson

from fastcomm.errors import TraceFileError
from fastcomm.files import opened
from fastcomm.formats.stream import NOTHING, CutShortError, blocks, blocks_of
from fastcomm.trace.run_traces import MOST_RANKS
from fastcomm_kernels import pickles
from fastcomm_kernels.arrays import NONE, NULL, Ints
from fastcomm_kernels.grouping import kinds

MODEL = "2."  # what versions that are known begin with; 1.4 and none came before
_FIELDS = (
    *("record_id", "pg_id", "collective_seq_id", "p2p_seq_id", "op_id", "is_p2p", "retired"),
    *("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"),
    *("timeout_ms", "seq_id", "time_created_us"),
    *("state", "profiling_name", "process_group", "thread_id", "thread_name"),
    *("input_sizes", "output_sizes", "input_dtypes", "output_dtypes", "frames"),
)
_PLACE = {name: place for place, name in enumerate(_FIELDS)}
_NAMES = np.frombuffer("".join(_FIELDS).encode(), np.uint8)
_BOUNDS = np.cumsum([0, *map(len, _FIELDS)])
_LISTS = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
_MOST_BYTES = 1 << 31
_MOST_FRAMES = 40
_HEAD = 1024  # bytes that tell what a file is
_TRACE = re.compile(rb'"(?:traceEvents|schemaVersion|deviceProperties)"')
_LATEST = 1 << 62  # ns
_GZIP_TIME = slice(4, 8)
_SUFFIX = re.compile(r"\.(gz|pickle|pkl|json)$")
_MOST_DIGITS = 18
AUTOGRAD = 0  # thread of calls that PyTorch's backward pass makes, in turn with its caller
_AUTOGRAD_NAME = "pt_autograd"
_OLD_PICKLES = (b"(", b"}", b"]", b"c")  # first opcodes of protocols 0 and 1
_PAIR = ("name", "desc")  # of a process group
_RANK = re.compile(r"(?<!\d)(\d{1,7})$")


class NoDumpError(TraceFileError):
    """A file that is no dump of a flight recorder."""


class ForeignError(NoDumpError):
    """A file that has a rank in its name, as dumps have, and other content."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class DumpedGroup:
    """A process group as a dump states it; no ranks where it does not.

    Equal groups of a process are one object: lists of thousands of ranks, which each of as many
    dumps repeats, are neither compared nor hashed again.
    """

    name: str
    desc: str
    ranks: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process have one object, too."""
        return group_of, (self.name, self.desc, self.ranks)


_ALL_GROUPS: WeakValueDictionary[tuple[str, str, tuple[int, ...]], DumpedGroup] = (
    WeakValueDictionary()
)


def group_of(name: str, desc: str, ranks: tuple[int, ...] = ()) -> DumpedGroup:
    """Return the group of a name, a description and ranks: always the same object."""
    key = (name, desc, ranks)
    group = _ALL_GROUPS.get(key)
    if group is None:
        group = DumpedGroup(name=name, desc=desc, ranks=ranks)
        _ALL_GROUPS[key] = group
    return group


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What a rank called, as columns with a row a call, the oldest first.

    NULL stands for what the dump lacks. `shapes` and `types` are hashes of the arguments, equal
    on all ranks for equal arguments; `elements` counts those of input and output.
    """

    record: Ints
    group: Ints  # place in `groups` of the dump
    group_id: Ints  # number of the group in its process
    sequence: Ints
    message: Ints  # number among the messages of the group
    is_message: Ints
    retired: Ints
    created: Ints
    started: Ints
    completed: Ints
    timeout: Ints  # ms
    thread: Ints  # number of the thread that made the call; AUTOGRAD for those of autograd
    name: Ints  # place in `names`
    state: Ints  # place in `STATES`
    shapes: tuple[Ints, Ints]  # of input and output
    types: tuple[Ints, Ints]
    elements: tuple[Ints, Ints]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.record)

    @property
    def columns(self) -> list[Ints]:
        """All columns, of which `of_columns` makes the calls again."""
        values = (getattr(self, name) for name in _COLUMNS)
        return [one for c in values for one in (c if isinstance(c, tuple) else (c,))]

    @classmethod
    def of_columns(cls, columns: Sequence[Ints], names: tuple[str, ...]) -> "Calls":
        """Return the calls of the columns of all fields: the last six are pairs."""
        single, pairs = columns[:-6], columns[-6:]
        values = [*single, *zip(pairs[::2], pairs[1::2], strict=True)]
        fields: dict[str, Any] = dict(zip(_COLUMNS, values, strict=True))
        return cls(**fields, names=names)

    def take(self, rows: Ints) -> "Calls":
        """Return some of the calls, without those between."""
        return Calls.of_columns([column[rows] for column in self.columns], self.names)


_COLUMNS = tuple(column.name for column in fields_of(Calls) if column.name != "names")


STATES = ("scheduled", "started", "completed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """One dump of one rank."""

    rank: int
    path: Path
    version: str
    written: int  # second in which the file was written, or of a copy a later one
    calls: Calls
    groups: tuple[DumpedGroup, ...]  # of the calls
    config: tuple[DumpedGroup, ...]  # that the process knows
    status: Mapping[int, Mapping[str, int]]  # of groups by their number in the process
    has_time: bool = False  # whether the file has it inside; copies have another of their own
    has_stacks: bool = False  # so that it may have been written seconds after its state
    problems: tuple[str, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether the file is truncated: the last calls are not in it."""
        return bool(self.problems)


def arguments(path: Path, row: int) -> tuple[Any, ...]:
    """Return shapes of input and output, and types of both, of a call of a dump; reads it."""
    return tuple(_details(path)(row, name) for name in _LISTS)


def frames(path: Path, row: int) -> list[str]:
    """Return the stack of a call of a dump, the innermost frame first; reads it."""
    return _frames(_details(path)(row, "frames"))


def rank_of(path: Path) -> int | None:
    """Return the rank in the name of a dump: its last number, or None.

    Numbers that no job has are dates or times.
    """
    number = _RANK.search(_stem(path))
    return int(number[1]) if number and int(number[1]) < MOST_RANKS else None


def prefix_of(path: Path) -> str:
    """Return what the name of a dump has before its rank: equal for the dumps of a job."""
    return _RANK.sub("", _stem(path))


def is_trace(path: Path) -> bool:
    """Return whether a file is a trace of PyTorch's profiler, by its first bytes.

    Raises TraceFileError if it cannot be read.
    """
    with suppress(CutShortError):
        for block in blocks(path, _HEAD):
            return _TRACE.search(block) is not None
    return False


def _stem(path: Path) -> str:
    """Return the name of a file without the endings that dumps may have."""
    name = path.name
    while (shorter := _SUFFIX.sub("", name)) and shorter != name:
        name = shorter
    return name


def read(path: Path) -> Dump:
    """Read a dump.

    Raises
    ------
    NoDumpError
        If the file is no dump; ForeignError if only its name is that of one.
    TraceFileError
        If the file cannot be read, is empty or binary, is truncated before its first call, or
        is a pickle with opcodes that no dump has.

    """
    rank = rank_of(path)
    if rank is None:
        raise NoDumpError(f"{path}: no rank in the name")
    text, (written, has_time), is_cut = _content(path)
    source: dict[str, Any] = {
        "rank": rank,
        "path": path,
        "written": written,
        "has_time": has_time,
    }
    if text[:1] == b"\x80":
        return _of_pickle(text, is_cut=is_cut, **source)
    if text[:1] in (b"{", b"["):
        return _of_json(text, **source)
    if text[:1] in _OLD_PICKLES and text.rstrip()[-1:] == b".":
        raise TraceFileError(
            f"{path}: refused as a pickle: byte 0 is {text[0]:#04x}, and dumps are of protocol "
            "2 or later"
        )
    if not text.strip(NOTHING):
        why = "truncated before its first byte" if is_cut else "an empty file"
        raise TraceFileError(f"{path}: {why}, no dump of rank {rank}")
    if b"\0" in text[:_HEAD]:
        raise TraceFileError(f"{path}: neither a pickle nor JSON; it may be overwritten")
    raise ForeignError(f"{path}: neither a pickle nor JSON, no dump of rank {rank}")


def _content(path: Path) -> tuple[bytes, tuple[int, bool], bool]:
    """Return the decompressed bytes, when they were written, and whether they are cut.

    The time is that of gzip's header, then with True, else that of the file: of a copy, a
    later one.
    """
    try:
        with opened(path) as file:
            changed = int(os.fstat(file.fileno()).st_mtime)
            head = file.read(_GZIP_TIME.stop)
            file.seek(0)
            text, is_cut = _text_of(file, path)
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from error
    seconds = int.from_bytes(head[_GZIP_TIME], "little") if head[:2] == b"\x1f\x8b" else 0
    return text.removeprefix(BOM_UTF8), (seconds or changed, seconds > 0), is_cut


def _text_of(file: BinaryIO, path: Path) -> tuple[bytes, bool]:
    """Return the decompressed bytes of a file that is open, and whether they are cut."""
    parts: list[bytes] = []
    size = 0
    try:
        for block in blocks_of(file, path):
            if not parts and _TRACE.search(block[:_HEAD]):
                raise NoDumpError(f"{path}: a trace of a profiler")
            parts.append(block)
            size += len(block)
            if size > _MOST_BYTES:
                raise TraceFileError(f"{path}: more than {_MOST_BYTES} bytes")
    except CutShortError:
        return b"".join(parts), True
    return b"".join(parts), False


_ROOM: list[Ints] = []


def _room(size: int) -> list[Ints]:
    """Return arrays to scan a pickle into; those of the pickle before are used again."""
    if not _ROOM or len(_ROOM[0]) < size:
        _ROOM[:] = [
            *np.empty((4, size + size // 4), np.int64),
            *(np.empty((size + size // 4, columns), np.int64) for columns in (3, 2)),
        ]
    return _ROOM


class _Tree:
    """A scanned pickle; another one takes its place."""

    def __init__(self, path: Path, text: bytes) -> None:
        """Scan a pickle; `problem` says what ends it before its end."""
        self.content, self.text = text, np.frombuffer(text, np.uint8)
        room = _room(len(text) + pickles.SHARED)
        self.node, self.stack, self.marks, memo, self.value, self.links = room
        self.tree = (self.node, self.value, self.links)
        state = pickles.scan(self.text, self.tree, self.stack, self.marks, memo)
        self.problem, self.root, self.nodes = "", state[pickles.ROOT], state[pickles.NODES]
        status, offset = state[pickles.STATUS], state[pickles.OFFSET]
        if status in (pickles.FOREIGN, pickles.BROKEN):
            byte = f"byte {offset} is {text[offset]:#04x}"
            why = "an opcode that no dump needs" if status == pickles.FOREIGN else "misplaced"
            raise TraceFileError(f"{path}: refused as a pickle: {byte}, {why}")
        if status == pickles.CUT:
            self.problem = f"{path}: truncated behind byte {offset}"
            self.root = pickles.closed(
                *(self.tree, state[pickles.LINKS], self.stack),
                *(state[pickles.STACKED], self.marks, state[pickles.MARKS]),
            )

    def keep(self) -> None:
        """Copy what was scanned, so that it outlives the next scan."""
        self.node = self.node[: self.nodes].copy()
        self.value = self.value[: self.nodes].copy()
        self.links = self.links[: len(self.text)].copy()

    def plain(self, item: int, levels: int = 4) -> Any:
        """Return a node as a Python object, its containers to a number of levels."""
        kind = self.node.item(item)
        if kind == pickles.TEXT:
            return self._text(item)
        if kind == pickles.INTEGER:
            return self.value.item(item, 0)
        if kind in (pickles.TRUE, pickles.FALSE):
            return kind == pickles.TRUE
        if kind in (pickles.NOTHING, pickles.FLOAT) or levels == 0:
            return None
        items = [self.plain(at, levels - 1) for at in self.items(item)]
        if kind != pickles.DICT:
            return items
        pairs = zip(items[::2], items[1::2], strict=True)
        return {key: content for key, content in pairs if isinstance(key, str | int)}

    def items(self, item: int) -> list[int]:
        """Return the nodes of a container; of a dictionary, keys and contents in turn."""
        nodes: list[int] = []
        link = self.value.item(item, 0)
        while link != NONE and len(nodes) < len(self.text):
            nodes.append(self.links.item(link, 0))
            link = self.links.item(link, 1)
        return nodes

    def _text(self, item: int) -> str:
        begin, size = self.value.item(item, 0), self.value.item(item, 1)
        content = self.content[begin : begin + size]
        if size > _LONG:
            return _long_text(content, self.value.item(item, pickles.HASH))
        return _decoded(content)


_LONG = 4096  # bytes of a list of many ranks, which the dumps of all of them repeat
_MOST_LONG = 64
_LONG_TEXTS: dict[int, tuple[bytes, str]] = {}


def _decoded(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _long_text(content: bytes, of: int) -> str:
    """Return a long text by its bytes and their hash: of equal ones always the same object.

    Python hashes and compares it only once then.
    """
    before = _LONG_TEXTS.get(of)
    if before is not None and before[0] == content:
        return before[1]
    if len(_LONG_TEXTS) >= _MOST_LONG:
        _LONG_TEXTS.clear()
    text = _decoded(content)
    _LONG_TEXTS[of] = (content, text)
    return text


def _of_pickle(text: bytes, path: Path, *, is_cut: bool, **source: Any) -> Dump:
    tree = _Tree(path, text)
    top, rows = _top_and_rows(path, tree)
    if (tree.problem or is_cut) and not rows.size:
        raise TraceFileError(tree.problem or f"{path}: truncated before its first call")
    calls, groups = _calls_of_pickle(tree, rows)
    return Dump(
        path=path,
        version=str(tree.plain(top["version"], 0)) if "version" in top else "",
        calls=calls,
        groups=groups,
        config=_config(path, tree.plain(top["pg_config"])) if "pg_config" in top else (),
        status=_status(tree.plain(top["pg_status"])) if "pg_status" in top else {},
        has_stacks=_has_stacks(tree, rows),
        problems=tuple(filter(None, (tree.problem, f"{path}: truncated" if is_cut else ""))),
        **source,
    )


def _has_stacks(tree: _Tree, rows: Ints) -> bool:
    """Return whether the last call has frames, which PyTorch names before it writes a dump."""
    at = int(rows[_PLACE["frames"], -1]) if rows.size else NULL
    return at != NULL and int(tree.value[at, 0]) != NONE


def _top_and_rows(path: Path, tree: _Tree) -> tuple[dict[Any, int], Ints]:
    """Return the nodes of the outer dictionary by key, and columns with a row a call.

    Raises ForeignError for a pickle that is no dump.
    """
    if tree.root == NONE and tree.problem:
        raise TraceFileError(tree.problem)
    if tree.root == NONE or tree.node[tree.root] not in (pickles.DICT, pickles.LIST):
        raise ForeignError(f"{path}: no dictionary and no list of calls")
    items = tree.items(tree.root)
    top: dict[Any, int] = {}
    if tree.node[tree.root] == pickles.DICT:
        keys = (tree.plain(at, 0) for at in items[::2])
        top = dict(zip(keys, items[1::2], strict=True))
    if not top.keys() & {"entries", "pg_config", "version"} and not _lists_calls(tree, items):
        raise ForeignError(f"{path}: no dump of a flight recorder")
    chain = top.get("entries", tree.root if not top else None)
    if chain is None:
        return top, np.full((len(_FIELDS), 0), NULL)
    if tree.node[chain] != pickles.LIST:
        raise TraceFileError(f"{path}: its entries are no list")
    return top, _rows_of_pickle(path, tree, chain)


def _details(path: Path) -> Callable[[int, str], Any]:
    """Return what a dump has of a call, by row and field: two dumps at most are in memory."""
    state = path.stat()
    return _details_of(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _details_of(path: Path, _changed: int, _size: int) -> Callable[[int, str], Any]:
    text, _, _ = _content(path)
    if text[:1] != b"\x80":
        top = orjson.loads(text)
        every = top if isinstance(top, list) else top.get("entries", [])
        entries = [one for one in every if isinstance(one, dict)]
        return lambda row, name: entries[row].get(name)
    tree = _Tree(path, text)
    _, rows = _top_and_rows(path, tree)
    tree.keep()

    def value(row: int, name: str) -> Any:
        at = int(rows[_PLACE[name], row])
        return None if at == NULL else tree.plain(at, 2)

    return value


def _lists_calls(tree: _Tree, items: Sequence[int]) -> bool:
    """Return whether a list is that of the first release: dictionaries with `pg_id`."""
    if tree.node[tree.root] != pickles.LIST or not items:
        return bool(tree.node[tree.root] == pickles.LIST and not items)
    first = tree.plain(items[0], 1)
    return isinstance(first, dict) and "pg_id" in first


def _rows_of_pickle(path: Path, tree: _Tree, chain: int) -> Ints:
    rows = np.full((len(_FIELDS), pickles.length(tree.tree, chain)), NULL)
    place = tree.marks[: tree.nodes]  # which no one needs behind the scan
    place.fill(NONE)
    fields = (_NAMES, _BOUNDS, _PLACE["state"])
    count = pickles.rows(tree.text, tree.tree, chain, fields, place, rows)
    if count < 0:
        raise TraceFileError(f"{path}: call {~count} is no dictionary, or the calls repeat")
    return rows


def _calls_of_pickle(tree: _Tree, rows: Ints) -> tuple[Calls, tuple[DumpedGroup, ...]]:
    def content(name: str, read: Callable[[int], Any], absent: Any) -> tuple[list[Any], Ints]:
        """Return the distinct contents of a column of nodes, and the place of each row's."""
        place, first = kinds(hashes[_PLACE[name] - begin][None, :])
        nodes = rows[_PLACE[name], first].tolist()
        contents = [absent if at == NULL else read(at) for at in nodes]
        distinct = {one: k for k, one in enumerate(dict.fromkeys(contents))}
        numbers = np.array([distinct[one] for one in contents], np.int64)
        return [*distinct], numbers[place] if len(place) else place

    begin, sizes = _PLACE["state"], _PLACE["input_sizes"]
    hashes = np.empty((len(_FIELDS) - begin, rows.shape[1]), np.int64)
    pickles.hashes(tree.tree, rows[begin:], hashes)
    one, two, three, four = hashes[sizes - begin : sizes - begin + len(_LISTS)]
    elements = np.empty((2, rows.shape[1]), np.int64)
    pickles.elements(tree.tree, rows[sizes : sizes + 2], elements)
    names, name = content("profiling_name", lambda at: str(tree.plain(at, 0)), "")
    states, state = content("state", lambda at: str(tree.plain(at, 0)), "")
    pairs, group = content("process_group", lambda at: _pair(tree.plain(at, 1)), None)
    threads = (
        *content("thread_id", lambda at: str(tree.plain(at, 0)), ""),
        *content("thread_name", lambda at: str(tree.plain(at, 0)), ""),
    )
    return _calls(
        rows=rows, names=names, name=name, states=states, state=state, pairs=pairs, group=group,
        thread=_threads(*threads), shapes=(one, two), types=(three, four),
        elements=(elements[0], elements[1]),
    )  # fmt: skip


def _calls(
    rows: Ints,
    names: Sequence[str],
    name: Ints,
    states: Sequence[str],
    state: Ints,
    pairs: Sequence[tuple[str, str] | None],
    group: Ints,
    **more: Any,
) -> tuple[Calls, tuple[DumpedGroup, ...]]:
    """Return the calls of a dump, and their groups, from columns of `_FIELDS`."""

    def column(*keys: str) -> Ints:
        """Return the first of some columns that a row has."""
        values: Ints = rows[_PLACE[keys[0]]]
        for key in keys[1:]:
            values = np.where(values == NULL, rows[_PLACE[key]], values)
        return values

    def time(key: str) -> Ints:
        """Return times; what cannot be one, as 0 in JSON, is unknown."""
        values = rows[_PLACE[key]]
        return np.where((values <= 0) | (values > _LATEST), NULL, values)

    created = time("time_created_ns")
    micros = rows[_PLACE["time_created_us"]]
    is_micro = (created == NULL) & (micros > 0) & (micros < _LATEST // 1000)
    created = np.where(is_micro, np.where(is_micro, micros, 0) * 1000, created)
    number = column("pg_id")
    group, groups = _groups_of(pairs, group, number)
    places = np.array([STATES.index(one) if one in STATES else 0 for one in states], np.int64)
    calls = Calls(
        record=_from_zero(column("record_id")),
        group=group,
        group_id=number,
        sequence=column("collective_seq_id", "seq_id"),
        message=column("p2p_seq_id"),
        is_message=np.where(column("is_p2p") == 1, 1, 0),
        retired=np.where(column("retired") == 1, 1, 0),
        created=created,
        started=time("time_discovered_started_ns"),
        completed=time("time_discovered_completed_ns"),
        timeout=column("timeout_ms"),
        name=name,
        state=places[state] if len(state) else state,
        names=tuple(names),
        **more,
    )
    return calls, groups


def _threads(ids: Sequence[str], thread: Ints, names: Sequence[str], name: Ints) -> Ints:
    """Return the number of the thread of each call, NULL where the dump has none.

    `ids` and `names` are the distinct ones, `thread` and `name` the place of each call's.
    """
    numbers = [int(one[:_MOST_DIGITS]) if one.isdecimal() else NULL for one in ids]
    own = np.array([*numbers, NULL], np.int64)[thread]
    if any(one.startswith(_AUTOGRAD_NAME) for one in names):
        is_autograd = np.array([one.startswith(_AUTOGRAD_NAME) for one in names], bool)
        own = np.where(is_autograd[name], AUTOGRAD, own)
    return own


def _groups_of(
    pairs: Sequence[tuple[str, str] | None], group: Ints, number: Ints
) -> tuple[Ints, tuple[DumpedGroup, ...]]:
    """Return the groups of calls: by name and description, else by their number."""
    if None not in pairs:
        return group, tuple(group_of(one, two) for one, two in pairs if one)  # type: ignore[misc]
    keys = [
        pairs[at] or (str(own), "")
        for at, own in zip(group.tolist(), number.tolist(), strict=True)
    ]
    places = {key: k for k, key in enumerate(dict.fromkeys(keys))}
    own = np.array([places[key] for key in keys], np.int64)
    return own, tuple(group_of(name, desc) for name, desc in places)


def _from_zero(record: Ints) -> Ints:
    """Return the numbers of records; dumps of the first release have none."""
    return np.arange(len(record)) if (record == NULL).any() else record


def _pair(value: Any) -> tuple[str, str] | None:
    """Return name and description of a process group; None for another form."""
    if isinstance(value, list | tuple) and len(value) == len(_PAIR):
        return str(value[0]), str(value[1])
    return None


def _frames(value: Any) -> list[str]:
    """Return the lines of a stack, the innermost first."""
    if not isinstance(value, list):
        return []
    return [
        f"{frame.get('name', '?')} ({frame.get('filename', '?')}:{frame.get('line', '?')})"
        for frame in value[:_MOST_FRAMES]
        if isinstance(frame, dict)
    ]


def _config(path: Path, value: Any) -> tuple[DumpedGroup, ...]:
    """Return the groups that a process knows, of any release.

    Raises TraceFileError for a rank that no job has.
    """
    if not isinstance(value, dict):
        return ()
    groups = []
    for name, group in value.items():
        of = group if isinstance(group, dict) else {"ranks": group}
        title, desc, ranks = str(of.get("name", name)), str(of.get("desc", "")), of.get("ranks")
        try:
            if isinstance(ranks, str):
                groups.append(_group_of_text(title, desc, ranks))
            else:
                groups.append(group_of(title, desc, _ranks(ranks)))
        except ValueError as error:
            raise TraceFileError(f"{path}: group {title[:80]!r} {error}") from error
    return tuple(groups)


def _ranks(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        return ()
    ranks = tuple(one for one in value if isinstance(one, int) and one >= 0)
    if len(ranks) > MOST_RANKS or max(ranks, default=0) >= MOST_RANKS:
        raise ValueError(f"has a rank or a number of ranks beyond {MOST_RANKS}")
    return ranks


@lru_cache(maxsize=256)
def _group_of_text(name: str, desc: str, ranks: str) -> DumpedGroup:
    """Return a group with ranks as "[0, 1]", which the dumps of all of them repeat."""
    # More digits than any rank has count as one number beyond all, and are not converted.
    numbers = (int(one[:_MOST_DIGITS]) for one in re.findall(r"\d+", ranks))
    return group_of(name, desc, _ranks([*numbers]))


def _status(value: Any) -> dict[int, dict[str, int]]:
    """Return the last numbers of each group, by the group's number in its process."""
    status: dict[int, dict[str, int]] = {}
    for key, group in (value if isinstance(value, dict) else {}).items():
        if isinstance(group, dict) and str(key).lstrip("-").isdecimal():
            status[int(key)] = {
                str(name): int(number)
                for name, number in group.items()
                if re.fullmatch(r"-?\d{1,18}", str(number))
            }
    return status


def _of_json(text: bytes, path: Path, **source: Any) -> Dump:
    try:
        top = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        kind = ForeignError if _is_json_line(text) else TraceFileError
        raise kind(f"{path}: truncated or damaged JSON: {error}") from error
    entries = top if isinstance(top, list) else top.get("entries", [])
    is_dump = isinstance(top, dict) and ("pg_config" in top or "entries" in top)
    is_dump |= isinstance(top, list) and all(isinstance(one, dict) for one in top)
    if not is_dump or not isinstance(entries, list):
        raise ForeignError(f"{path}: JSON, and no dump of a flight recorder")
    is_filled = bool(entries)
    entries = [one for one in entries if isinstance(one, dict)]
    if is_filled and not entries:
        raise ForeignError(f"{path}: none of its entries is a call")
    if isinstance(top, list) and not all("pg_id" in one for one in entries):
        raise ForeignError(f"{path}: JSON, and no dump of a flight recorder")
    calls, groups = _calls_of_json(entries)
    top = top if isinstance(top, dict) else {}
    return Dump(
        path=path,
        version=str(top.get("version", "")),
        calls=calls,
        groups=groups,
        config=_config(path, top.get("pg_config")),
        status=_status(top.get("pg_status")),
        **source,
    )


def _is_json_line(text: bytes) -> bool:
    """Return whether the first line is a document by itself: that of a log, and no dump."""
    try:
        orjson.loads(text.partition(b"\n")[0])
    except orjson.JSONDecodeError:
        return False
    return True


def _calls_of_json(entries: Sequence[dict[str, Any]]) -> tuple[Calls, tuple[DumpedGroup, ...]]:
    rows = np.full((len(_FIELDS), len(entries)), NULL)
    for place, key in enumerate(_FIELDS[: _PLACE["state"]]):
        rows[place] = [_integer(one.get(key)) for one in entries]

    def content(key: str, form: Callable[[Any], Any]) -> tuple[list[Any], Ints]:
        contents = [form(one.get(key)) for one in entries]
        distinct = {one: k for k, one in enumerate(dict.fromkeys(contents))}
        return [*distinct], np.array([distinct[one] for one in contents], np.int64)

    def column_of(function: Callable[[bytes], int], key: str) -> Ints:
        """Return a function of each list; NULL where there is none."""
        contents = (one.get(key) for one in entries)
        values = (function(orjson.dumps(c)) if isinstance(c, list) else NULL for c in contents)
        return np.fromiter(values, np.int64, len(entries))

    def hashes(key: str) -> Ints:
        return column_of(_hash, key)

    def elements(key: str) -> Ints:
        return column_of(_elements, key)

    names, name = content("profiling_name", lambda one: one if isinstance(one, str) else "")
    states, state = content("state", str)
    pairs, group = content("process_group", _pair)
    threads = (*content("thread_id", str), *content("thread_name", str))
    return _calls(
        rows=rows, names=names, name=name, states=states, state=state, pairs=pairs, group=group,
        thread=_threads(*threads),
        shapes=(hashes("input_sizes"), hashes("output_sizes")),
        types=(hashes("input_dtypes"), hashes("output_dtypes")),
        elements=(elements("input_sizes"), elements("output_sizes")),
    )  # fmt: skip


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and NULL < value < -NULL else NULL


@lru_cache(maxsize=4096)
def _hash(text: bytes) -> int:
    """Return the hash that a scanned pickle has of a list as JSON."""
    return _hash_of(orjson.loads(text))


def _hash_of(value: Any) -> int:
    if isinstance(value, str):
        text = np.frombuffer(value.encode(), np.uint8)
        return int(pickles.hash_of_text(text, 0, len(text)))
    if isinstance(value, list):
        return int(reduce(pickles.mixed, map(_hash_of, value), pickles.HASH_BEGIN))
    return int(value) if isinstance(value, int) else 0


@lru_cache(maxsize=4096)
def _elements(text: bytes) -> int:
    """Return the number of elements of shapes as JSON."""
    shapes = (one for one in orjson.loads(text) if isinstance(one, list))
    count = sum(prod(at for at in one if isinstance(at, int)) for one in shapes)
    return count & pickles.COUNTED
