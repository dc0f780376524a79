"""The host's rows of one process: NVTX ranges, calls of NCCL with payloads, calls of CUDA.

Times come in as those of the job and go out as those of the file.
"""

from dataclasses import dataclass

from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import DEVICES
from fastcomm.synthetic.nsys import payloads
from fastcomm.synthetic.nsys.operations import Operation
from fastcomm.synthetic.nsys.tables import Tables
from fastcomm.synthetic.nsys.variant import NsysVariant

MARK, THREAD, PUSH_POP, START_END, DOMAIN = 34, 39, 59, 60, 75
FIRST_CORRELATION = 2_610_000  # the same in every process
_MACHINE = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When the file's time is 0, and what the file says of when that was."""

    origin: int
    start: int  # of the capture
    utc: int  # the same, as the machine believed

    def __call__(self, moment: int) -> int:
        """A time of the job as the file has it."""
        return moment - self.origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A call of CUDA, and whom to look for at the other end."""

    correlation: int
    start: int
    stop: int
    thread: int


class Host:
    """One process: its ids, and the rows of its threads."""

    def __init__(
        self,
        job: Job,
        rank: int,
        place: int,
        variant: NsysVariant,
        tables: Tables,
        clock: Clock,
    ) -> None:
        self.job, self.rank, self.variant = job, rank, variant
        self.tables, self.clock = tables, clock
        # As in Kineto's files, but that no two processes of a report are called the same.
        self.process = 41_000 + 97 * (rank % DEVICES if place < DEVICES else place)
        self.device = 0 if variant.one_device else rank % DEVICES
        self.global_pid = _MACHINE | self.process << 24
        self.domain = 1 + rank % 3  # of NCCL; other libraries were faster
        self.called: set[str] = set()
        self.correlation, self.operator = FIRST_CORRELATION, 990_000

    def thread(self, number: int) -> int:
        """The id of a thread: 0 the main one, 61 that of the backward pass."""
        return self.global_pid | self.process + number

    def range(self, thread: int, text: str, start: int, stop: int | None) -> None:
        """A range of the application, in the default domain; open without an end."""
        name: dict[str, object] = {"text": text}
        if self.variant.registered_names:
            name = {"textId": self.tables.string(text)}
        end = None if stop is None else self.clock(stop)
        self.event(PUSH_POP, thread, start, end=end, domainId=0, **name)

    def operator_range(self, thread: int, name: str, start: int, stop: int) -> None:
        """A range of PyTorch, whose number makes its name unique."""
        self.operator += 1
        self.range(thread, f"{name}, op_id = {self.operator}", start, stop)

    def library(self, thread: int, name: str, start: int, stop: int) -> None:
        """A range of another library, in the domain that was made first."""
        identity = self.tables.string(name)
        end = self.clock(stop)
        self.event(PUSH_POP, thread, start, end=end, textId=identity, domainId=1)

    def nccl(
        self,
        thread: int,
        name: str,
        start: int,
        stop: int,
        values: dict[str, int] | None = None,
    ) -> None:
        """A range of NCCL, with its payload if the export has any."""
        more = self._payload(name, values) if values else {}
        more |= {"end": self.clock(stop), "textId": self.tables.string(name)}
        self.event(PUSH_POP, thread, start, domainId=self.domain, **more)

    def _payload(self, name: str, values: dict[str, int]) -> dict[str, object]:
        variant = self.variant
        layout = payloads.layout(name, variant.nccl)
        if layout is None:
            return {}
        self.called.add(name)
        if variant.has_blobs:
            total = variant.payload == "blob-total"
            return {"binaryData": payloads.blob(layout, self.domain, values, total=total)}
        if not variant.has_json:
            return {}
        text = payloads.text(layout, values, strings=variant.payload == "json-strings")
        if variant.payload == "json-ids":
            return {"jsonTextId": self.tables.string(text)}
        return {"jsonText": text}

    def group(
        self, thread: int, operations: list[Operation], start: int, end: int, depth: int
    ) -> None:
        """GroupStart, the operations, and the inner GroupEnd of a nested group: up to `end`."""
        names = ["ncclGroupStart"] * depth
        calls: list[tuple[str, dict[str, int] | None]] = [(name, None) for name in names]
        calls += [(operation.name, operation.values) for operation in operations]
        calls += [("ncclGroupEnd", None)] * (depth - 1)
        each = max(1, (end - start) // len(calls))
        for number, (name, values) in enumerate(calls):
            begin = start + number * each
            self.nccl(thread, name, begin, begin + max(0, each - 8), values)

    def cuda(self, thread: int, name: str, start: int, ns: int) -> Launch:
        """A call of the CUDA runtime."""
        self.correlation += 1
        self.tables.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=self.clock(start),
            end=self.clock(start + ns),
            eventClass=0,
            globalTid=thread,
            correlationId=self.correlation,
            nameId=self.tables.string(name),
            returnValue=0,
        )
        return Launch(correlation=self.correlation, start=start, stop=start + ns, thread=thread)

    def event(self, kind: int, thread: int, start: int, **more: object) -> None:
        """A row of NVTX of any type."""
        begin = self.clock(start)
        self.tables.add("NVTX_EVENTS", start=begin, eventType=kind, globalTid=thread, **more)
