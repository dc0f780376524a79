"""Write a large report of one process for benchmarks: millions of kernels and ranges.

Three levels of ranges: steps, layers, operators. Every 50th kernel is an all-reduce. Rows are
in random order, and are created by column.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastcomm.synthetic.nsys import payloads
from fastcomm.synthetic.nsys.process_rows import DOMAIN, PUSH_POP
from fastcomm.synthetic.nsys.tables import (
    NsysVariant,
    ReportTables,
    columns,
    create,
    new_database,
)

PERIOD_NS = 10_000  # from one launch to the next
LAYER, STEP = 50, 20_000  # kernels of a layer, of a step
DELAY_NS = 150_000  # from a launch to its kernel
EPOCH_NS = 1_790_000_000 * 10**9
PROCESS = 41_000
COMMUNICATOR = 0x8F3C_0000_0000_0001
ALL_REDUCE = 64 << 20  # bytes of the first; each further one has a KiB more
_PID = 1 << 48 | PROCESS << 24
_TID = _PID | PROCESS
_BLOCK = 200_000

_Ints = NDArray[np.int64]


def write_nsys_big(path: Path, kernels: int = 2_000_000, seed: int = 0) -> Path:
    """Write a report with `kernels` kernels, each with a launch and an operator's range."""
    random = np.random.default_rng(seed)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    with new_database(unfinished) as database:
        names = _small_tables(database)
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"):
            database.execute(create(table))
        for block in _blocks(random.permutation(kernels)):
            _kernels(database, block, names)
            _launches(database, block, names)
            _operators(database, block)
        _collectives(database, random.permutation(kernels // LAYER), names)
        _ranges(database, random.permutation(-(-kernels // LAYER)), LAYER, "layer", kernels)
        _ranges(database, random.permutation(-(-kernels // STEP)), STEP, "iteration", kernels)
    unfinished.replace(path)
    return path


def _blocks(order: _Ints) -> Iterator[_Ints]:
    for first in range(0, len(order), _BLOCK):
        yield order[first : first + _BLOCK]


def _is_collective(numbers: _Ints) -> NDArray[np.bool_]:
    return np.equal(numbers % LAYER, LAYER - 1)


def _insert(
    database: sqlite3.Connection,
    table: str,
    varying: dict[str, Sequence[object]],
    constant: dict[str, int | str],
) -> None:
    """Insert rows from columns; constant columns are part of the statement."""
    fixed = {name: repr(value) for name, value in constant.items()}
    names = [*varying, *fixed]
    quoted = ", ".join(f'"{name}"' for name in names)
    marks = ", ".join([*("?" * len(varying)), *fixed.values()])
    statement = f'INSERT INTO "{table}" ({quoted}) VALUES ({marks})'
    database.executemany(statement, zip(*varying.values(), strict=True))


def _kernels(database: sqlite3.Connection, block: _Ints, names: dict[str, int]) -> None:
    """Insert kernels with the numbers in `block`; `names` has the id of each string."""
    collective = _is_collective(block)
    start = block * PERIOD_NS + DELAY_NS
    # A collective overlaps the kernels after it.
    stop = start + np.where(collective, 6 * PERIOD_NS, PERIOD_NS - 1_000 - block % 512)
    compute = np.asarray([names[f"kernel_{number}"] for number in range(40)], dtype=np.int64)
    name = np.where(collective, names["ncclDevKernel_AllReduce"], compute[block % 40])
    _insert(
        database,
        "CUPTI_ACTIVITY_KIND_KERNEL",
        {
            "start": start.tolist(),
            "end": stop.tolist(),
            "streamId": np.where(collective, 20, 7).tolist(),
            "correlationId": (block + 1_000).tolist(),
            "demangledName": name.tolist(),
            "shortName": name.tolist(),
            "gridId": (block + 1).tolist(),
        },
        _kernel_constants(),
    )


def _kernel_constants() -> dict[str, int | str]:
    """Return a value for every other column that may not be null."""
    place: dict[str, int | str] = {"deviceId": 0, "contextId": 1, "globalPid": _PID}
    varying = {"start", "end", "streamId", "demangledName", "shortName", "gridId"}
    for column in columns("CUPTI_ACTIVITY_KIND_KERNEL"):
        if not column.nullable and column.name not in {*varying, *place}:
            place[column.name] = "[]" if column.kind == "s" else 1
    return place


def _launches(database: sqlite3.Connection, block: _Ints, names: dict[str, int]) -> None:
    """Insert the launches of numbered kernels; `names` has the id of each string."""
    call = [names["cudaLaunchKernel_v7000"], names["cudaLaunchKernelExC_v11060"]]
    start = block * PERIOD_NS + 1_500
    _insert(
        database,
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        {
            "start": start.tolist(),
            "end": (start + 2_200).tolist(),
            "correlationId": (block + 1_000).tolist(),
            "nameId": np.where(_is_collective(block), call[1], call[0]).tolist(),
        },
        {"eventClass": 0, "globalTid": _TID, "returnValue": 0},
    )


def _operators(database: sqlite3.Connection, block: _Ints) -> None:
    """Insert the NVTX range of an operator around the launch of each kernel of a block.

    `block` has the numbers of the kernels in the export.
    """
    start = block * PERIOD_NS + 500
    kinds = [f"aten::op_{number}, op_id = " for number in range(40)]
    numbers = block.tolist()
    _insert(
        database,
        "NVTX_EVENTS",
        {
            "start": start.tolist(),
            "end": (start + 6_000).tolist(),
            "text": [f"{kinds[number % 40]}{number}" for number in numbers],
        },
        {"eventType": PUSH_POP, "globalTid": _TID, "domainId": 0},
    )


def _collectives(database: sqlite3.Connection, order: _Ints, names: dict[str, int]) -> None:
    """Insert the NCCL range of numbered collectives; `names` has the id of each string."""
    layout = payloads.layout("ncclAllReduce", "2.27")
    assert layout is not None
    start = (order * LAYER + LAYER - 1) * PERIOD_NS + 1_000
    sizes = (ALL_REDUCE + order * 1_024).tolist()
    values = [
        {payloads.COMM: COMMUNICATOR, payloads.SIZE: size, payloads.REDUCTION: 0}
        for size in sizes
    ]
    _insert(
        database,
        "NVTX_EVENTS",
        {
            "start": start.tolist(),
            "end": (start + 4_000).tolist(),
            "binaryData": [payloads.blob(layout, 1, value, total=False) for value in values],
        },
        {
            "eventType": PUSH_POP,
            "globalTid": _TID,
            "domainId": 1,
            "textId": names["ncclAllReduce"],
        },
    )


def _ranges(
    database: sqlite3.Connection, order: _Ints, size: int, name: str, kernels: int
) -> None:
    """Insert ranges that each enclose `size` operators."""
    stop = np.minimum((order + 1) * size, kernels) * PERIOD_NS
    _insert(
        database,
        "NVTX_EVENTS",
        {
            "start": (order * size * PERIOD_NS).tolist(),
            "end": stop.tolist(),
            "text": [f"{name} {number}" for number in order.tolist()],
        },
        {"eventType": PUSH_POP, "globalTid": _TID, "domainId": 0},
    )


def _small_tables(database: sqlite3.Connection) -> dict[str, int]:
    """Write names, domain, payload schema and clock, and return the ids of the names."""
    tables = ReportTables()
    texts = [f"kernel_{number}" for number in range(40)]
    texts += ["cudaLaunchKernel_v7000", "cudaLaunchKernelExC_v11060", "ncclAllReduce"]
    texts.append("ncclDevKernel_AllReduce")
    names = {text: tables.string(text) for text in texts}
    tables.add(
        "NVTX_EVENTS", start=10, eventType=DOMAIN, text="NCCL", globalTid=_TID, domainId=1
    )
    payloads.add_schemas(tables, NsysVariant(), 1, {"ncclAllReduce"})
    tables.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=EPOCH_NS)
    for key, value in (("SCHEMA_VERSION", "3.28.1"), ("PARAM_INCLUDE_BLOBS", "true")):
        tables.add("META_DATA_EXPORT", name=f"EXPORT_{key}", value=value)
    for table, rows in tables.rows.items():
        database.execute(create(table))
        for row in rows:
            marks = ", ".join("?" * len(row))
            quoted = ", ".join(f'"{name}"' for name in row)
            statement = f'INSERT INTO "{table}" ({quoted}) VALUES ({marks})'
            database.execute(statement, list(row.values()))
    return names
