"""What the time of an edge is spent on, by either rules."""

import re
from collections.abc import Callable, Sequence
from typing import Literal

import pyarrow as pa

from fastcomm.graph.graph import EDGE_KINDS

Rules = Literal["hta", "corrected"]

HTA_CLASSES = (
    "cpu_bound",
    "data_loading",
    "gpu_communication_bound",
    "gpu_compute_bound",
    "gpu_kernel_kernel_overhead",
    "gpu_kernel_launch_overhead",
)
CLASSES = (
    *HTA_CLASSES,
    "gpu_memory_bound",  # copies and memsets
    "host_gap",  # between operators
    "sync_wait",  # from the end of work to the return of the call that waited for it
    "unexplained",  # nothing in the trace says what was waited for
)

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
_HTA_COMM = re.compile(r"(^nccl.*)|(^hip)|(^hccl)|(.*ncclKernel.*)")
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


def classes(
    rules: Rules,
    kinds: Sequence[int],
    owners: pa.Table,
    targets: pa.Table,
    loads: Sequence[str],
) -> list[str]:
    """The class of each edge, from its kind, its owner and the event that it leads to."""
    of_owner = _hta_owner if rules == "hta" else _owner
    known: dict[tuple[object, ...], str] = {}
    found = []
    facts = [owners[name].to_pylist() for name in ("name", "kind", "stream", "is_device", "op")]
    to_device = targets["is_device"].to_pylist()
    for kind, on_device, *fact in zip(kinds, to_device, *facts, strict=True):
        key = (kind, on_device, *fact)
        if key not in known:
            said = _hta_edge if rules == "hta" else _edge
            known[key] = said(EDGE_KINDS[kind], bool(on_device), fact, of_owner, loads)
        found.append(known[key])
    return found


Fact = Sequence[object]
OfOwner = Callable[[Fact, Sequence[str]], str]


def _hta_edge(
    kind: str, _on_device: bool, owner: Fact, of_owner: OfOwner, loads: Sequence[str]
) -> str:
    if kind == "kernel_kernel":
        return "gpu_kernel_kernel_overhead"
    if kind == "launch":
        return "gpu_kernel_launch_overhead"
    return of_owner(owner, loads) if kind == "operator" else ""


def _hta_owner(owner: Fact, loads: Sequence[str]) -> str:
    name, _, stream, _, _ = owner
    short = short_name(str(name or ""))
    if stream is None or stream == -1:
        is_load = any(re.search(text, short) for text in loads)
        return "data_loading" if is_load else "cpu_bound"
    return "gpu_communication_bound" if _HTA_COMM.match(short) else "gpu_compute_bound"


def _edge(
    kind: str, on_device: bool, owner: Fact, of_owner: OfOwner, loads: Sequence[str]
) -> str:
    if kind == "operator" or (kind == "dependency" and owner[0] is not None):
        return of_owner(owner, loads)
    if kind == "join":
        return "gpu_communication_bound"
    if kind in ("sync", "inferred"):
        return "gpu_kernel_kernel_overhead" if on_device else "sync_wait"
    return {
        "dependency": "host_gap",
        "kernel_kernel": "gpu_kernel_kernel_overhead",
        "launch": "gpu_kernel_launch_overhead",
    }.get(kind, "unexplained")


def _owner(owner: Fact, loads: Sequence[str]) -> str:
    name, kind, _, is_device, op = owner
    if not is_device:
        is_load = any(re.search(text, str(name)) for text in loads)
        return "data_loading" if is_load else "cpu_bound"
    if op is not None:
        return "gpu_communication_bound"
    return "gpu_compute_bound" if kind == "kernel" else "gpu_memory_bound"
