"""Read execution traces: those of Chakra, and those of PyTorch's host beside profiler traces.

A file of Chakra is one rank: a header and nodes, each after its length, or a JSON object with
a list of nodes. The format is MLCommons' `et_def.proto`, of ASTRA-sim and PyTorch's converter.

PyTorch's files have operators, and the storages that these read and write. Two schemas exist:
1.1 (`inputs.values`, `attrs`, `ctrl_deps`) and 1.0 (`inputs`, `rf_id`, `parent`). A tensor is
``[id, storage id, offset, elements, element size, device]``; views share its storage.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from fastcomm import files, regexes
from fastcomm.errors import ConfigError, FastcommError, TraceFileError
from fastcomm.files import place
from fastcomm.formats.sources import rank_from_name
from fastcomm.formats.stream import CutShortError, blocks, document
from fastcomm.trace.trace import Trace
from fastcomm.units import counted

PACKAGE = "ChakraProtoMsg"
# Types of nodes.
METADATA, LOAD, STORE, COMPUTE, SEND, RECEIVE, COLLECTIVE = range(1, 8)
# Types of collectives, by fastcomm's names.
COLLECTIVES = {
    "AllReduce": 0, "Reduce": 1, "AllGather": 2, "Gather": 3, "Scatter": 4, "Broadcast": 5,
    "AllToAll": 6, "ReduceScatter": 7, "Barrier": 9,
}  # fmt: skip
_BLOCK = 8  # reduce-scatter of blocks
_OPS = {**{number: name for name, number in COLLECTIVES.items()}, _BLOCK: "ReduceScatter"}
SUFFIXES = (".et", ".et.gz")
REMEDY = (
    "execution traces of Chakra, which critical-path and what-if read; other commands need the "
    "profiler's traces"
)
GROUPS_FILE = "trace.groups.json"
_NAME = re.compile(r"\.(\d{1,9})\.(?:et|json)(?:\.gz)?$")
_US = 1000  # ns
_MOST_US = 1 << 45  # about a year
_MOST_ID = 1 << 62
_SEVEN_BITS = 0x7F
# Beginnings of JSON files of Chakra and of PyTorch.
_GRAPH = rb'\s*\{\s*"workload_graph"'
_SCHEMA = rb'\s*\{\s*"schema"\s*:\s*"\d+\.\d+\.\d+[^"]*"\s*,\s*"pid"'
_NAMES = ("torch_et_{rank}.json", "pytorch_et_{rank}.json")
_TENSOR = 6  # items of a tensor
Storage = tuple[int, str]  # id and device
# Fields by message: name (with a star if repeated), number, type of descriptor.proto.
_UINT64, _STRING, _MESSAGE, _INT32, _INT64, _BOOL, _ENUM, _UINT32 = 4, 9, 11, 5, 3, 8, 14, 13
_FIELDS: dict[str, list[tuple[str, int, int]]] = {
    "AttributeProto": [
        ("name", 1, _STRING),
        ("int32_val", 7, _INT32),
        ("int64_val", 9, _INT64),
        ("uint32_val", 11, _UINT32),
        ("uint64_val", 13, _UINT64),
        ("bool_val", 27, _BOOL),
        ("string_val", 29, _STRING),
    ],
    "GlobalMetadata": [("version", 1, _STRING), ("attr*", 2, _MESSAGE)],
    "Node": [
        ("id", 1, _UINT64),
        ("name", 2, _STRING),
        ("type", 3, _ENUM),
        ("ctrl_deps*", 4, _UINT64),
        ("data_deps*", 5, _UINT64),
        ("start_time_micros", 6, _UINT64),
        ("duration_micros", 7, _UINT64),
        ("attr*", 10, _MESSAGE),
    ],
}
_NODE_TYPES = (
    *("INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE"),
    *("COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE"),
)


class ChakraMessages(NamedTuple):
    """Classes of the protobuf messages."""

    Attribute: Any
    Metadata: Any
    Node: Any


@cache
def messages() -> ChakraMessages:
    """Return the classes of the messages; raise FastcommError if protobuf is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise FastcommError(
            "Chakra traces need protobuf: pip install 'fastcomm[chakra]'"
        ) from error
    file = descriptor_pb2.FileDescriptorProto(
        name="fastcomm_chakra.proto", package=PACKAGE, syntax="proto3"
    )
    types = file.enum_type.add(name="NodeType")
    for number, name in enumerate(_NODE_TYPES):
        types.value.add(name=name, number=number)
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for name, number, kind in fields:
            _describe(described.field.add(), name, number, kind)
        if message == "AttributeProto":
            # One of several values: with a oneof, false and 0 are written, too.
            described.oneof_decl.add(name="value")
            for value in described.field:
                if value.name != "name":
                    value.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = message_factory.GetMessageClassesForFiles([file.name], pool)
    return ChakraMessages(*(classes[f"{PACKAGE}.{name}"] for name in _FIELDS))


def _describe(field_: Any, name: str, number: int, kind: int) -> None:
    """Describe one field, which is repeated if its name ends with a star."""
    field_.name, field_.number, field_.type = name.removesuffix("*"), number, kind
    field_.label = 3 if name.endswith("*") else 1
    if kind in (_MESSAGE, _ENUM):
        field_.type_name = f".{PACKAGE}.{'AttributeProto' if kind == _MESSAGE else 'NodeType'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraNode:
    """One operation of a rank. Times are ns."""

    id: int
    name: str
    kind: int  # type of the node
    before: tuple[int, ...]  # ids of the nodes that have to end first
    begun: tuple[int, ...] = ()  # ids of the nodes that have to start first
    start: int = 0
    duration: int = 0
    is_host: bool = False
    thread: int = 0
    callers: int = 0  # control dependencies that name the caller, and do not count
    # of communication; None where unknown
    op: str | None = None
    size: int | None = None
    group: str = ""
    source: int | None = None
    target: int | None = None
    tag: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraTrace:
    """The execution trace of one rank."""

    path: Path
    rank: int
    nodes: Sequence[ChakraNode] = field(repr=False)
    is_host_run: bool = False  # whether the host communicates, without a device


def find_chakra(paths: Sequence[str | Path]) -> dict[int, Path] | None:
    """Return the execution traces among some paths by rank, or None if there is none.

    A directory has those that end in ``.et`` or ``.et.gz``. Of JSON files, only files that are
    named themselves count.

    Raises
    ------
    ConfigError
        Two files have one rank, a rank is unknown, or other traces are among the paths.

    """
    named: list[Path] = []
    others: list[str | Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            inside = sorted(entry for entry in path.iterdir() if _has_suffix(entry))
        else:
            inside = [path] if _has_suffix(path) or _is_json(path, _GRAPH) else []
        named += inside
        others += [] if inside else [name]
    if not named:
        return None
    if others:
        raise ConfigError(
            f"{others[0]}: not a Chakra execution trace, as {named[0]} is; name only those"
        )
    ranks: dict[int, Path] = {}
    for path in named:
        rank = _rank(path, is_alone=len(named) == 1)
        if rank in ranks:
            raise ConfigError(f"{ranks[rank]} and {path}: two traces of rank {rank}")
        ranks[rank] = path
    return dict(sorted(ranks.items()))


def _has_suffix(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def _is_json(path: Path, begin: bytes) -> bool:
    """Return whether a path is a JSON file that begins with `begin`, a regular expression."""
    if not path.is_file() or not path.name.endswith((".json", ".json.gz")):
        return False
    return re.match(begin, next(blocks(path, 1 << 12), b"")) is not None


def _rank(path: Path, *, is_alone: bool) -> int:
    if named := _NAME.search(path.name):
        return int(named[1])
    rank = rank_from_name(path.name)
    if rank is None and not is_alone:
        raise ConfigError(f"{path}: its name has no rank, as in trace.0.et")
    return rank or 0


def read_chakra(path: Path, rank: int) -> ChakraTrace:
    """Read the execution trace of a rank.

    Raises
    ------
    TraceFileError
        The file is damaged, or no execution trace.

    """
    try:
        data = document(path)
        is_json = data.lstrip()[:1] == b"{"
        nodes = list(_of_json(data) if is_json else _of_messages(data))
    except CutShortError as error:
        raise TraceFileError(f"{path}: truncated: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TraceFileError(
            f"{path}: not a Chakra execution trace, or a damaged one: {error}"
        ) from error
    ids = {node.id for node in nodes}
    if len(ids) < len(nodes):
        raise TraceFileError(f"{path}: {len(nodes) - len(ids)} nodes have the id of another")
    if not any(node.kind > METADATA for node in nodes):
        raise TraceFileError(f"{path}: no operation among {counted(len(nodes), 'node')}")
    return ChakraTrace(path=path, rank=rank, nodes=nodes)


def _of_messages(data: bytes) -> Iterator[ChakraNode]:
    """Yield the nodes of a protobuf file; ValueError at the offset of the first damage."""
    classes, at, is_header = messages(), 0, True
    from google.protobuf.message import DecodeError

    while at < len(data):
        begin = at
        size, at = _varint(data, at)
        if at + size > len(data):
            raise ValueError(f"offset {begin}: a message of {size} bytes ends behind the file")
        message = (classes.Metadata if is_header else classes.Node)()
        try:
            message.ParseFromString(data[at : at + size])
        except DecodeError as error:
            raise ValueError(f"offset {begin}: {error}") from error
        if not is_header:
            yield _of_message(message)
        at, is_header = at + size, False
    if is_header:
        raise ValueError("the file is empty")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset behind it."""
    value = shift = 0
    for offset in range(at, min(at + 5, len(data))):
        value |= (data[offset] & _SEVEN_BITS) << shift
        if data[offset] <= _SEVEN_BITS:
            return value, offset + 1
        shift += 7
    raise ValueError(f"offset {at}: no length of a message")


def _of_message(message: Any) -> ChakraNode:
    values = {
        entry.name: getattr(entry, entry.WhichOneof("value") or "name")
        for entry in message.attr
    }
    return _node(
        {
            "id": message.id,
            "name": message.name,
            "type": message.type,
            "ctrldeps": list(message.ctrl_deps),
            "datadeps": list(message.data_deps),
            "start": message.start_time_micros,
            "runtime": message.duration_micros,
        },
        {name.replace("_", ""): value for name, value in values.items()},
    )


def _of_json(data: bytes) -> Iterator[ChakraNode]:
    """Yield the nodes of a JSON graph, whose keys are written in several ways."""
    for node in orjson.loads(data)["workload_graph"]:
        keys = {key.lower().replace("_", ""): value for key, value in node.items()}
        yield _node({**keys, "type": keys["nodetype"]}, keys)


def _node(fields: Mapping[str, Any], attributes: Mapping[str, Any]) -> ChakraNode:
    """Return a node of its fields and attributes; ValueError for one out of range."""
    id_, kind = _number(fields["id"], _MOST_ID), _number(fields["type"], COLLECTIVE)
    is_host = bool(attributes.get("iscpuop", False))
    before, control = _ids(fields.get("datadeps")), _ids(fields.get("ctrldeps"))
    # PyTorch's converter keeps the caller as control dependency, which no simulator waits for.
    is_recorded = not attributes.keys().isdisjoint(("rfid", "opschema", "tid"))
    before += () if is_recorded else control
    op = None
    if kind in (SEND, RECEIVE):
        op = "SendRecv"
    elif kind == COLLECTIVE and not is_host:
        op = _OPS.get(attributes.get("commtype", -1))
    size, source, target = (
        None if attributes.get(key) is None else _number(attributes[key], _MOST_ID)
        for key in ("commsize", "commsrc", "commdst")
    )
    return ChakraNode(
        id=id_,
        name=str(fields["name"]),
        kind=kind,
        before=tuple(dict.fromkeys(before)),
        callers=len(control) if is_recorded else 0,
        start=_US * _number(fields.get("start", 0), _MOST_US),
        duration=_US * _number(fields.get("runtime", 0), _MOST_US),
        is_host=is_host,
        thread=_number(attributes.get("tid", 0), _MOST_ID),
        op=op,
        group=str(attributes.get("pgname", "")),
        tag=_number(attributes.get("commtag", 0), _MOST_ID),
        size=size,
        source=source,
        target=target,
    )


def _number(value: Any, most: int) -> int:
    """Return a whole number from 0 to `most`; raise ValueError for another value."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is no whole number from 0 to {most}")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(_number(entry, _MOST_ID) for entry in value or ())


def read_groups(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group from ``trace.groups.json``; nothing without that file.

    Raises `TraceFileError` if the file has something else.
    """
    path = folder / GROUPS_FILE
    if not path.is_file():
        return {}
    groups = files.json(path)
    if not isinstance(groups, dict) or not all(map(_is_ranks, groups.values())):
        raise TraceFileError(f'{path}: expected groups and their ranks, as in {{"1": [0, 1]}}')
    return {name: tuple(ranks) for name, ranks in groups.items()}


def _is_ranks(value: Any) -> bool:
    return isinstance(value, list) and all(type(rank) is int and rank >= 0 for rank in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperator:
    """One node of an execution trace."""

    id: int
    parent: int
    name: str
    order: int  # number of the call, which Kineto names `Record function id`
    thread: int
    reads: frozenset[Storage]
    writes: frozenset[Storage]


def find_beside(trace: Trace) -> Path | None:
    """Return the execution trace in the folder of a trace, or None."""
    folder = place(trace.meta.path).parent
    for name in _NAMES:
        for suffix in ("", ".gz"):
            path = folder / f"{name.format(rank=trace.meta.rank)}{suffix}"
            if path.is_file():
                return path
    return None


def is_of_torch(path: Path) -> bool:
    """Return whether a file begins like an execution trace of PyTorch."""
    return _is_json(path, _SCHEMA)


def read_operators(path: Path) -> list[TracedOperator]:
    """Read the operators of an execution trace, in the order of their calls.

    Raises `TraceFileError` if the file is not an execution trace, or is truncated.
    """
    try:
        operators = [_operator(node) for node in orjson.loads(document(path))["nodes"]]
    except (ValueError, KeyError, TypeError, AttributeError, CutShortError) as error:
        raise TraceFileError(
            f"{path}: not an execution trace of PyTorch, or a truncated one ({error!r}); "
            "expected a JSON object with a list of nodes"
        ) from error
    return sorted(operators, key=lambda operator: (operator.order, operator.id))


def _operator(node: Mapping[str, Any]) -> TracedOperator:
    """Return the operator of a JSON node, with the storages it reads and writes."""
    attributes = {entry["name"]: entry["value"] for entry in node.get("attrs", ())} or node
    sides = [node["inputs"], node["outputs"]]
    inputs, outputs = (side["values"] if isinstance(side, dict) else side for side in sides)
    name, schema = str(node["name"]), str(attributes.get("op_schema", ""))
    reads = frozenset(_storages(inputs))
    fresh = frozenset(_storages(outputs)) - reads
    return TracedOperator(
        id=int(node["id"]),
        parent=int(node.get("ctrl_deps", node.get("parent", 0)) or 0),
        name=name,
        order=int(attributes["rf_id"]),
        thread=int(attributes.get("tid", 0)),
        reads=reads,
        writes=fresh | _written(name, schema, inputs),
    )


def _storages(values: Any) -> Iterator[Storage]:
    """Yield the storages of all tensors in a value, including lists of tensors."""
    if not isinstance(values, list):
        return
    if (
        len(values) == _TENSOR
        and isinstance(values[-1], str)
        and all(type(number) is int for number in values[:5])
    ):
        yield values[1], values[-1]
        return
    for value in values:
        yield from _storages(value)


def _written(name: str, schema: str, inputs: list[Any]) -> frozenset[Storage]:
    """Return the storages that an operator writes: its schema marks the inputs with ``!``."""
    is_written = [bool(regexes.search(r"\([^()]*!\)", text)) for text in _arguments(schema)]
    if not schema:
        is_written = [name.endswith("_")]
    return frozenset(
        storage for value in compress(inputs, is_written) for storage in _storages(value)
    )


def _arguments(schema: str) -> list[str]:
    """Split the schema of an operator, as in "aten::add(Tensor a, *, Scalar b) -> Tensor".

    Returns the arguments with their types, in order, without the star: ["Tensor a", "Scalar
    b"].
    """
    depth, parts = 0, [""]
    for letter in schema.partition("(")[2].rpartition(" -> ")[0].strip().removesuffix(")"):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in map(str.strip, parts) if part != "*"]
