"""Rows of a Kineto file as text, and the rows of one rank of a synthetic job."""

import json
import re
from collections.abc import Iterator, Sequence
from enum import Flag, auto

from fastcomm.synthetic.catalog import KERNELS, ROOT_PLACE, SyntheticCall, host_args
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.pipeline import BASE_NS, COMPUTE, SYNC_NS
from fastcomm.synthetic.play import HOST_RANGES, HostRange, PlannedWork, RankStep

LISTED = 30  # most items of a list in an argument; PyTorch drops further ones


class Variant(Flag):
    """Differences of a file from what PyTorch writes today."""

    TODAY = 0
    BASE_LAST = auto()  # the base time comes after the events
    COMPACT = auto()  # rewritten by a tool: no line breaks, no trailing zeros
    HOST_METADATA = auto()  # only host rows have the arguments of collectives
    UNDESCRIBED = auto()  # process groups have no description


def compact(text: str) -> str:
    """Return a JSON text on one line."""
    text = re.sub(r"(?<=[{\[])\s*\n\s*", "", text)
    text = re.sub(r"\s*\n\s*(?=[,}\]])", "", text)
    text = re.sub(r"\s*\n\s*| {2,}", " ", text)
    return re.sub(r'("(?:ts|dur)": \d+\.\d+?)0+(?=\D)', r"\1", text)


def lane(process: int | str, thread: int | str) -> str:
    """Return the keys `pid` and `tid` of a row."""
    return f'"pid": {json.dumps(process)},\n    "tid": {json.dumps(thread)}'


def microseconds(ns: int) -> str:
    """Return nanoseconds as microseconds with three decimals."""
    digits = f"{ns:04d}"
    return f"{digits[:-3]}.{digits[-3:]}"


def complete(cat: str, name: str, where: str, start: int, ns: int, args: str) -> str:
    """Return the JSON text of an event with a duration.

    Parameters
    ----------
    cat, name
        Its category and name.
    where
        Text of its process and thread, from `lane`.
    start, ns
        Start since the epoch, and duration, ns.
    args
        Text inside the object of its arguments.

    """
    return f"""
  {{
    "ph": "X",
    "cat": "{cat}",
    "name": "{name}",
    {where},
    "ts": {microseconds(start - BASE_NS)},
    "dur": {microseconds(ns)}
    ,
    "args": {{
      {args}
    }}
  }},"""


def flow(phase: str, correlation: int, where: str, moment: int) -> str:
    """Return one end of the arrow from a launch to its kernel; `phase` is "s" or "f"."""
    ends = ',\n    "bp": "e"' if phase == "f" else ""
    return f"""
  {{
    "ph": "{phase}",
    "id": {correlation},
    {where},
    "ts": {microseconds(moment - BASE_NS)},
    "cat": "ac2g",
    "name": "ac2g"{ends}
    
  }},"""  # noqa: W293


def label(kind: str, where: str, moment: int, value: str | int) -> str:
    """Return a row that names or orders a process or a thread."""
    key = {"sort_index": "sort_index", "labels": "labels"}.get(kind.partition("_")[2], "name")
    return f"""
  {{
    "ph": "M",
    "name": "{kind}",
    "ts": {microseconds(moment - BASE_NS)},
    {where},
    "args": {{
      "{key}": {json.dumps(value)}
    }}
  }},"""


def instant(name: str, where: str, moment: int) -> str:
    """Return a row without a duration."""
    return f"""
  {{
    "ph": "i",
    
    "s": "g",
    "name": "{name}",
    {where},
    "ts": {microseconds(moment - BASE_NS)}
    
  }},"""  # noqa: W293


def listed(items: Sequence[int]) -> str:
    """Return a list as PyTorch writes it inside a string."""
    cut = ", ..." if len(items) > LISTED else ""
    return "[" + ", ".join(map(str, items[:LISTED])) + cut + "]"


def metadata(call: SyntheticCall, variant: Variant) -> str:
    """Return the arguments of a collective without its sequence number, as JSON text."""
    group = call.group
    description = "undefined" if variant & Variant.UNDESCRIBED else group.description
    args: dict[str, object] = {
        "Collective name": call.operation.collective,
        "In msg nelems": call.sent,
        "Out msg nelems": call.received,
        "Group size": group.size,
        "dtype": call.dtype,
        "In split size": listed(call.send_splits),
        "Out split size": listed(call.receive_splits),
        "Process Group Name": group.name,
        "Process Group Description": description,
        "Process Group Ranks": listed(group.ranks),
    }
    if call.peers:
        # Each side only names the other side.
        sends = call.operation.collective == "send"
        args["Dst Rank" if sends else "Src Rank"] = call.peers[sends]
    return json.dumps(args)[1:-1]


DEVICES = 8  # of one machine

_COPIES = {
    # kind: device row, operator, runtime call, number of the call in CUPTI
    "memcpy": ("Memcpy HtoD (Pinned -> Device)", "aten::copy_", "cudaMemcpyAsync", 41),
    "memset": ("Memset (Device)", "aten::zero_", "cudaMemsetAsync", 51),
}


class RankText:
    """Writes the rows of one rank, step after step."""

    def __init__(self, job: Job, rank: int, variant: Variant) -> None:
        """Choose the device, the process id and the host threads of a rank."""
        self.job, self.rank, self.variant = job, rank, variant
        self.device = rank % DEVICES
        self.process = 41_000 + 97 * self.device
        main, backward = self.process, self.process + 61
        self.lanes = {False: lane(main, main), True: lane(main, backward)}
        self.inputs = {name: host_args(job, kernel, rank) for name, kernel in KERNELS.items()}
        self.call_args: dict[object, str] = {}  # written arguments of collectives
        self.external, self.correlation = 0, 1_000

    def step(self, step: RankStep) -> Iterator[str]:
        """Yield the rows of a step."""
        yield self._mark(f"ProfilerStep#{step.number}", step.start, step.ns)
        rows_of = {"compute": self._compute, "comm": self._collective}
        for work in step.works:
            yield rows_of.get(work.kind, self._copy)(work)
        for one in step.host:
            yield self._host(one)
        yield self._around(step)

    def _around(self, step: RankStep) -> str:
        """Return the rows that belong to no single launch."""
        adam = [work.launch for work in step.works if work.name == "adam"]
        ns = adam[-1] - adam[0] + 5_000
        text = self._mark("Optimizer.step#AdamW.step", adam[0] - 500, ns)
        compute = [work for work in step.works if work.stream == COMPUTE]
        first, last = compute[0].start, max(work.stop for work in step.works)
        ns = max(work.stop for work in compute) - first
        text += self._annotation(
            f"ProfilerStep#{step.number}", COMPUTE, first, ns, self._next()
        )
        begin = step.works[-1].launch + 20_000
        self.correlation += 1
        args = f'"cbid": 165, "correlation": {self.correlation}'
        where = self.lanes[False]
        name = "cudaDeviceSynchronize"
        return text + complete("cuda_runtime", name, where, begin, last + SYNC_NS - begin, args)

    def _host(self, of: HostRange) -> str:
        """Return the rows of what the host does besides launching."""
        name, where = HOST_RANGES[of.kind], self.lanes[of.backward]
        if of.kind != "read":
            return self._mark(name, of.start, of.stop - of.start)
        text = complete("cpu_op", name, where, of.start, of.stop - of.start, self._ids())
        self.correlation += 1
        args = f'"cbid": 131, "correlation": {self.correlation}'
        start, ns = of.start + 200, of.stop - of.start - 400
        return text + complete("cuda_runtime", "cudaStreamSynchronize", where, start, ns, args)

    def _next(self) -> int:
        self.external += 1
        return self.external

    def _mark(self, name: str, start: int, ns: int, *, backward: bool = False) -> str:
        return complete("user_annotation", name, self.lanes[backward], start, ns, self._ids())

    def _annotation(self, name: str, stream: int, start: int, ns: int, external: int) -> str:
        """Return the row of a range on the device, which begins just before its first work."""
        where, args = lane(self.device, stream), f'"External id": {external}'
        return complete("gpu_user_annotation", name, where, start - 1, ns + 2, args)

    def _operator(
        self, name: str, work: PlannedWork, after: int, ns: int, more: str = ""
    ) -> str:
        """Return the row of an operator, which begins `after` ns after the launch of work."""
        where = self.lanes[work.backward]
        return complete("cpu_op", name, where, work.launch + after, ns, self._ids(more))

    def _ids(self, more: str = "") -> str:
        """Return the arguments that every host row has."""
        external = self._next()
        between = f"{more}, " if more else ""
        args = f'"External id": {external},"Record function id": 0, {between}'
        return f'{args}"Ev Idx": {external - 1}'

    def _launch(self, call: str, number: int, work: PlannedWork, after: int, ns: int) -> str:
        """Return the row of a runtime call (CUPTI's `number`), and the arrow to the device.

        The call begins `after` ns after the operator that makes it.
        """
        start = work.launch + after
        self.correlation += 1
        where = self.lanes[work.backward]
        args = (
            f'"External id": {self.external},      "cbid": {number}, '
            f'"correlation": {self.correlation}'
        )
        return complete("cuda_runtime", call, where, start, ns, args) + flow(
            "s", self.correlation, where, start
        )

    def _compute(self, work: PlannedWork) -> str:
        """Return the rows of a compute kernel: operator, launch, and kernel."""
        kernel = KERNELS[work.name]
        host = self._operator(kernel.host, work, 0, 3_600, self.inputs[work.name])
        runtime = self._launch("cudaLaunchKernel", 211, work, 1_000, 2_200)
        return host + runtime + self._kernel(kernel.name, work, kernel.grid, kernel.registers)

    def _kernel(
        self,
        name: str,
        work: PlannedWork,
        grid: tuple[int, int, int],
        registers: int,
        call_args: str = "",
    ) -> str:
        """Return the row of a kernel, and the flow arrow from its launch.

        `call_args` are further arguments as JSON text that begins with a comma.
        """
        where = f'"pid": {self.device},\n    "tid": {work.stream}'
        args = (
            f'"External id": {self.external},      "queued": 0, "device": {self.device}, '
            f'"context": 1,      "stream": {work.stream}, "correlation": {self.correlation}, '
            f'     "registers per thread": {registers},      "shared memory": 0,      '
            f'"blocks per SM": {grid[0] / 132:f},      "warps per SM": {grid[0] / 33:f},      '
            f'"grid": [{grid[0]}, {grid[1]}, {grid[2]}],      "block": [128, 1, 1],      '
            f'"est. achieved occupancy %": 0{call_args}'
        )
        row = complete("kernel", name, where, work.start, work.ns, args)
        return row + flow("f", self.correlation, where, work.start)

    def _copy(self, work: PlannedWork) -> str:
        """Return the rows of a copy or memset: operator, launch, and work."""
        name, host, call, number = _COPIES[work.kind]
        text = self._operator(host, work, 0, 3_600)
        text += self._launch(call, number, work, 1_000, 2_200)
        size = self.job.tokens * 8 if work.kind == "memcpy" else 4
        where = lane(self.device, work.stream)
        args = (
            f'"External id": {self.external},      "device": {self.device}, "context": 1,      '
            f'"stream": {work.stream}, "correlation": {self.correlation},      '
            f'"bytes": {size}, "memory bandwidth (GB/s)": {size / max(work.ns, 1)}'
        )
        text += complete(f"gpu_{work.kind}", name, where, work.start, work.ns, args)
        return text + flow("f", self.correlation, where, work.start)

    def _call_args(self, call: SyntheticCall) -> str:
        """Return the metadata of a collective as JSON text; cached except for its number."""
        splits = (call.send_splits, call.receive_splits)
        key = (call.operation.collective, call.group.name, call.peers, call.sent, splits)
        if key not in self.call_args:
            self.call_args[key] = metadata(call, self.variant)
        return f'{self.call_args[key]}, "Seq": {call.seq}'

    def _collective(self, work: PlannedWork) -> str:
        """Return the rows of a collective on the host and the device."""
        call, start = work.call, work.launch + 1_300
        assert call is not None
        call_args = self._call_args(call)
        asynchronous = (
            f'{call_args}, "Is asynchronized op": true, "Rank": {_rank(call, self.rank)}'
        )
        text = self._operator(call.operation.host, work, 0, 7_600)
        text += self._mark(call.annotation, start, 5_500, backward=work.backward)
        text += self._operator("record_param_comms", work, 700, 6_500, asynchronous)
        text += self._launch("cudaLaunchKernelExC", 430, work, 2_600, 3_200)
        on_kernel = "" if self.variant & Variant.HOST_METADATA else f", {call_args}"
        text += self._kernel(work.name, work, (24, 1, 1), 96, on_kernel)
        name, stream = call.annotation, work.stream
        return text + self._annotation(name, stream, work.start, work.ns, self.external)


def _rank(call: SyntheticCall, own: int) -> int:
    """Return the place in the group that the host row has: root, peer or own place."""
    if call.operation.op == "Broadcast":
        return ROOT_PLACE
    if call.peers is None:
        return call.group.ranks.index(own)
    source, target = call.peers
    return call.group.ranks.index(target if own == source else source)
