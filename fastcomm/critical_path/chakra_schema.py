"""The messages of a Chakra execution trace, made by protobuf's library from a description.

Numbers and names are those of MLCommons Chakra's schema (schema/protobuf/et_def.proto, 0.0.4),
of which only what is written here is described. Needs the extra `chakra`.
"""

from functools import cache
from typing import Any, NamedTuple

from fastcomm.errors import FastcommError

PACKAGE = "ChakraProtoMsg"
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7  # of NodeType
# CollectiveCommType by our names: those that ASTRA-sim simulates.
COLLECTIVES = {
    "AllReduce": 0,
    "AllGather": 2,
    "Broadcast": 5,
    "AllToAll": 6,
    "ReduceScatter": 7,
}

# Fields by message: name, number, type of descriptor.proto; a star: repeated.
_UINT64, _STRING, _MESSAGE, _INT32, _INT64, _BOOL, _ENUM = 4, 9, 11, 5, 3, 8, 14
_FIELDS: dict[str, list[tuple[str, int, int]]] = {
    "AttributeProto": [
        ("name", 1, _STRING),
        ("int32_val", 7, _INT32),
        ("int64_val", 9, _INT64),
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


class Messages(NamedTuple):
    """The classes of the messages."""

    Attribute: Any
    Metadata: Any
    Node: Any


@cache
def messages() -> Messages:
    """The classes; FastcommError where the extra is missing."""
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
            # A value is there even if it is false or 0: it is one of several.
            described.oneof_decl.add(name="value")
            for field in described.field:
                if field.name != "name":
                    field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return Messages(*(found[f"{PACKAGE}.{name}"] for name in _FIELDS))


def _describe(field: Any, name: str, number: int, kind: int) -> None:
    """One field: optional, or repeated with a star; messages are attributes."""
    field.name, field.number, field.type = name.removesuffix("*"), number, kind
    field.label = 3 if name.endswith("*") else 1
    if kind in (_MESSAGE, _ENUM):
        field.type_name = f".{PACKAGE}.{'AttributeProto' if kind == _MESSAGE else 'NodeType'}"
