"""What the time of an edge is spent on."""

import re
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.graph.graph import EDGE_KINDS

CLASSES = (
    "cpu_bound",
    "data_loading",
    "gpu_communication_bound",
    "gpu_compute_bound",
    "gpu_kernel_kernel_overhead",
    "gpu_kernel_launch_overhead",
    "gpu_memory_bound",  # copies and memsets
    "host_gap",  # between operators
    "sync_wait",  # from the end of work to the return of the call that waited for it
    "unexplained",  # nothing in the trace says what was waited for
)

# What an event does itself; the rest is between events.
OWN = tuple(name for name in CLASSES if name.endswith("_bound") or name == "data_loading")

TYPES = {
    "operator": "critical_path_operator",
    "dependency": "critical_path_dependency",
    "launch": "critical_path_kernel_launch_delay",
    "kernel_kernel": "critical_path_kernel_kernel_delay",
    "sync": "critical_path_sync_dependency",
    "inferred": "critical_path_inferred_dependency",
    "unexplained": "critical_path_unexplained",
    "join": "critical_path_join",
}
_PLAIN = re.compile(r"(hip)?Mem(cpy|set)|dma")


def short_name(name: str) -> str:
    """A kernel's name as HTA shortens it: without templates, arguments and return type."""
    if _PLAIN.match(name) or not ("<" in name or "(" in name):
        return name
    kept: list[str] = []
    for letter in name.replace("->", ""):
        opening = {">": "<", ")": "("}.get(letter)
        if opening is None:
            kept.append(letter)
        else:
            while kept and kept.pop() != opening:
                pass
    return "".join(kept).rpartition(" ")[2]


def short_names(names: pa.ChunkedArray) -> pa.Array:
    """The same for a column, each name once."""
    encoded = names.combine_chunks().dictionary_encode()
    short = pa.array([short_name(name) for name in encoded.dictionary.to_pylist()], pa.string())
    return short.take(encoded.indices)


def classes(
    edge_class: Callable[[str, bool, "Fact", Sequence[str]], str],
    kinds: NDArray[np.int8],
    owners: pa.Table,
    targets: pa.Table,
    loads: Sequence[str],
) -> pa.Array:
    """Return the class of each edge, asking `edge_class` once for edges that are equal."""
    facts = [owners[name].combine_chunks() for name in FACTS]
    to_device = targets["is_device"].combine_chunks()
    # Equal edges are asked about once.
    number = kinds.astype(np.int64)
    for column in (to_device, *facts):
        encoded = column.dictionary_encode()
        code = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy()
        number = _numbered(number * (len(encoded.dictionary) + 1) + code)
    first = np.empty(int(number.max(initial=-1)) + 1, np.int64)
    first[number[::-1]] = np.arange(len(number))[::-1]
    found = [
        edge_class(
            EDGE_KINDS[kinds[k]],
            bool(to_device[k].as_py()),
            [column[k].as_py() for column in facts],
            loads,
        )
        for k in first.tolist()
    ]
    return pa.array(found, pa.string()).take(pa.array(number))


def _numbered(key: NDArray[np.int64]) -> NDArray[np.int64]:
    """Equal keys as equal numbers, without a gap, in order of their first appearance."""
    found: NDArray[np.int64] = pa.array(key).dictionary_encode().indices.to_numpy()
    return found.astype(np.int64)


# What is asked of the owner of an edge.
FACTS = ("name", "kind", "stream", "is_device", "op")
Fact = Sequence[object]


def corrected_class(kind: str, on_device: bool, owner: Fact, loads: Sequence[str]) -> str:
    """Return the class of an edge of the corrected rules: one of `CLASSES`."""
    if kind == "operator" or (kind == "dependency" and owner[0] is not None):
        return _owner_class(owner, loads)
    if kind == "join":
        return "gpu_communication_bound"
    if kind in ("sync", "inferred"):
        return "gpu_kernel_kernel_overhead" if on_device else "sync_wait"
    return {
        "dependency": "host_gap",
        "kernel_kernel": "gpu_kernel_kernel_overhead",
        "launch": "gpu_kernel_launch_overhead",
    }.get(kind, "unexplained")


def _owner_class(owner: Fact, loads: Sequence[str]) -> str:
    name, kind, _, is_device, op = owner
    if not is_device:
        is_load = any(re.search(text, str(name)) for text in loads)
        return "data_loading" if is_load else "cpu_bound"
    if op is not None:
        return "gpu_communication_bound"
    return "gpu_compute_bound" if kind == "kernel" else "gpu_memory_bound"
