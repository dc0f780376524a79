"""The device work of a run, summed up by a key over all ranks: `Kernels`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.checks import shortened
from fastcomm.device_work.attribution import split_labels
from fastcomm.device_work.flops import SlowGemm, cost_columns, slow_gemms, step_flops
from fastcomm.device_work.names import (
    COMMUNICATION,
    COPY,
    GRAPH,
    OTHER,
    WAITING,
    KeySums,
    statistics,
)
from fastcomm.device_work.options import KernelKey
from fastcomm.device_work.totals import (
    QUEUE_COLUMNS,
    RankWork,
    WorkTotals,
    distribution,
    queue_columns,
)
from fastcomm.hardware.gpus import StepFlops
from fastcomm.result import TableResult
from fastcomm.trace.columns import Groups, block_starts, filled
from fastcomm.trace.run_traces import ReadRanks, SkippedRank
from fastcomm.units import counted, format_ns, format_signed_ns, percent
from fastcomm_kernels.arrays import Floats

_LEAST_SLOWDOWN = 1.03  # of a rank that the first sentence names
_OF_DEVICES = "the work of several devices is counted as one"
_LEAST_COST = 1e-3  # of the step
# On the host also by its total: ranks of healthy jobs that share cores differ by up to half.
_LEAST_HOST_EXCESS = 1.75
_LEAST_PEERS = 3  # ranks
# Categories as subjects of a sentence; others are "<category> kernels take".
_SUBJECTS = {
    "GEMM": "GEMMs take",
    COMMUNICATION: "communication takes",
    COPY: "copies take",
    GRAPH: "whole CUDA graphs take",
    OTHER: "kernels of unknown category take",
    "host": "operators take",
}
_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
COLUMNS = pa.schema(
    [
        ("name", _TEXT),
        ("category", _TEXT),  # that takes most of the time
        ("count", _INT),  # events of all ranks and steps
        ("total_ns", _INT),
        ("mean_ns", _FLOAT),
        ("median_ns", _FLOAT),
        ("p95_ns", _FLOAT),
        ("min_ns", _INT),
        ("max_ns", _INT),
        ("per_step_ns", _FLOAT),  # in the mean step of a rank; null without steps
        ("share", _FLOAT),  # of the step; null without steps
        ("flops", _FLOAT),  # this and the next: of the events of which they are known
        ("bytes", _FLOAT),
        ("flops_covered", _FLOAT),  # share of the time of these events; null without any
        ("tflops_per_s", _FLOAT),  # of these events
        ("peak_share", _FLOAT),  # of the peak
        ("bytes_per_s", _FLOAT),
        ("memory_share", _FLOAT),  # of the bandwidth of the memory
        ("bound", _TEXT),  # that it is near: "compute", "memory" or "neither"
        ("ranks", _INT),  # number of ranks that have it
        ("slowest_rank", _INT),  # null for communication, and without a peer
        ("slowdown", _FLOAT),  # its mean duration, divided by the median of its peers
        ("cost_ns", _FLOAT),  # by how much its steps are longer than those of its peers
    ]
)
OPERANDS = pa.schema([pa.field(name, pa.list_(_TEXT)) for name in ("shapes", "dtypes")])
_OF_PEAK = ("peak_share", "memory_share", "bound")
_OF_FLOPS = ("flops", "bytes", "tflops_per_s", "bytes_per_s", *_OF_PEAK)
BY_RANK = pa.schema(
    [("name", _TEXT), ("rank", _INT), ("count", _INT), ("total_ns", _INT), ("mean_ns", _FLOAT)]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """The rank that is slowest at work of which its peers have equally many events."""

    rank: int | None  # None: all are equally fast
    slowdown: float  # its mean duration, divided by the median of its peers
    excess_ns: float  # of all its events together


@dataclass(frozen=True, kw_only=True, repr=False)
class Kernels(TableResult):
    """Device work by a key; of host runs, operators and communication."""

    has_long_tables = True

    by: KernelKey
    totals: WorkTotals
    read: ReadRanks
    warnings: tuple[str, ...] = ()
    match: str | None = None  # regular expression that selected the work

    @property
    def ranks(self) -> tuple[RankWork, ...]:
        """Facts about each rank that counts."""
        return self.totals.counted

    @property
    def is_host_run(self) -> bool:
        """Whether operators of the host stand in for kernels: no rank has a device."""
        return all(rank.is_host_run for rank in self.ranks)

    @property
    def steps(self) -> int:
        """Number of steps that count, of all ranks together."""
        return sum(rank.steps for rank in self.ranks)

    @property
    def _has_steps(self) -> bool:
        """Whether there are steps, and none has the work of several devices."""
        return self.steps > 0 and not any(rank.has_devices for rank in self.ranks)

    @property
    def _steps_ns(self) -> int:
        """Duration of these steps together; 0 where several devices are counted as one."""
        return sum(rank.step_ns for rank in self.ranks) if self._has_steps else 0

    @property
    def step_ns(self) -> float | None:
        """Mean duration of these steps; None without any, or where devices are one rank."""
        total = self._steps_ns
        return total / self.steps if total else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the numbers leave out, a sentence each."""
        outside = sum(rank.outside for rank in self.ranks)
        notes = []
        if outside:
            notes.append(f"left out: {counted(outside, 'event')} outside of all steps")
        names = self.table["name"].to_pylist()
        if names == [f"(no {self.by})"]:
            is_nsys = all(rank.format == "nsys" for rank in self.ranks)
            advice = _WITH_NVTX if is_nsys else _RECORD[self.by]
            notes.append(f"the traces have no {self.by} around any launch; {advice}")
        return tuple(notes)

    @cached_property
    def flops(self) -> StepFlops:
        """FLOPs of the mean step of a rank."""
        flops = [_OF_DEVICES if rank.has_devices else rank.flops for rank in self.ranks]
        return step_flops(flops, self.steps, self._steps_ns)

    @property
    def findings(self) -> tuple[SlowGemm, ...]:
        """GEMMs that take much of the step and are far from their bound."""
        return slow_gemms(self.totals.problems, self._steps_ns)

    @property
    def unknown(self) -> dict[str, str]:
        """Columns that are null in every row, and why; none of a table without rows."""
        if not len(self.table):
            return {}
        texts = [rank.flops for rank in self.ranks if isinstance(rank.flops, str)]
        reason = texts[0] if texts else "no operator around a launch has a known cost"
        operands = OPERANDS.names if self.by == "operator" else ()
        names = [*_OF_FLOPS, *operands, *self._of_queues.names]
        names = [name for name in names if self.table[name].null_count == len(self.table)]
        gpu = self.flops.unknown.get("hfu", reason)
        reasons = {
            **dict.fromkeys(_OF_FLOPS, reason),
            **dict.fromkeys(_OF_PEAK, gpu),
            **dict.fromkeys(QUEUE_COLUMNS.names, "no launch of this work was recorded"),
        }
        return {name: reasons.get(name, reason) for name in names}

    @property
    def _has_roof(self) -> bool:
        """Whether the peaks of the GPU of every rank are known."""
        parts = [rank.flops for rank in self.ranks]
        return all(not isinstance(flops, str) and flops.gpu is not None for flops in parts)

    @cached_property
    def _statistics(self) -> pa.Table:
        """Numbers and durations by label, the longest total first."""
        sums = self._rows.group_by("name").aggregate(
            [("count", "sum"), ("total_ns", "sum"), ("min_ns", "min"), ("max_ns", "max")]
        )
        names, *values = (column.combine_chunks() for column in sums.columns)
        exact = KeySums(*map(filled, values))
        return statistics(exact, distribution(self.totals.durations[self.by], names), names)

    @cached_property
    def table(self) -> pa.Table:
        """A row per value of the key, the longest total first: COLUMNS."""
        table = self._statistics
        slow = [self._slow_ranks.get(name) for name in table["name"].to_pylist()]
        totals = table["total_ns"].to_pylist()
        columns = {
            **{name: table[name] for name in table.column_names},
            **cost_columns(self._rows, table, has_roof=self._has_roof),
            **split_labels(table["name"].to_pylist()),
            **queue_columns(self.totals.queues, table["name"].to_pylist()),
            "category": [self._categories[name] for name in table["name"].to_pylist()],
            "per_step_ns": [total / self.steps for total in totals]
            if self._has_steps
            else None,
            "share": [self.share(total) for total in totals],
            "ranks": [self._ranks_of[name] for name in table["name"].to_pylist()],
            "slowest_rank": [one and one.rank for one in slow],
            "slowdown": [one and one.slowdown for one in slow],
            "cost_ns": [one and self._cost_ns(one) for one in slow] if self.steps else None,
        }
        schema = pa.schema([*self._with_operands(COLUMNS), *self._of_queues])
        return pa.table(
            [_column(columns.get(field.name), field.type, table.num_rows) for field in schema],
            schema=schema,
        )

    @property
    def _of_queues(self) -> pa.Schema:
        """Columns of launches and queues: of streams."""
        return QUEUE_COLUMNS if self.by == "stream" else pa.schema([])

    def _with_operands(self, schema: pa.Schema) -> pa.Schema:
        return pa.schema([*schema, *(OPERANDS if self.by == "operator" else ())])

    def to_arrow(self) -> pa.Table:
        """Return a row per value of the key, the longest total first; times in ns."""
        return self.table

    @cached_property
    def by_category(self) -> dict[str, int]:
        """Total ns of each category, the longest first."""
        rows = self._rows.group_by("category").aggregate([("total_ns", "sum")])
        pairs = zip(rows["category"].to_pylist(), rows["total_ns_sum"].to_pylist(), strict=True)
        return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))

    @cached_property
    def running_ns(self) -> dict[str, int]:
        """Time in which at least one event of each category runs on a rank, of all ranks."""
        table = self.totals.running[self.by]
        sums = table.group_by("category").aggregate([("running_ns", "sum")])
        return dict(zip(*(column.to_pylist() for column in sums.columns), strict=True))

    def by_rank(self) -> pa.Table:
        """Return a row per value of the key and rank, in the order of the table, then by rank.

        Returns
        -------
        pyarrow.Table
            `name`, `rank`, `count`, `total_ns` and `mean_ns`; of operators also `shapes` and
            `dtypes`.

        """
        rows = self._of_ranks("name")
        labels = self._statistics["name"].to_pylist()
        order = {name: place for place, name in enumerate(labels)}
        place = np.array([order[name] for name in rows["name"].to_pylist()], np.int64)
        mean = pc.divide(rows["total_ns"].cast(_FLOAT), rows["count"].cast(_FLOAT))
        rows = rows.append_column("mean_ns", mean)
        rows = rows.take(pa.array(np.lexsort((rows["rank"].to_numpy(), place))))
        columns = {name: rows[name] for name in rows.column_names}
        columns |= split_labels(rows["name"].to_pylist())
        schema = self._with_operands(BY_RANK)
        arrays = [_column(columns[field.name], field.type, len(rows)) for field in schema]
        return pa.table(arrays, schema=schema)

    def ns_by_category(self) -> dict[str, Floats]:
        """Return the time of each category in the mean step of each rank of `ranks`, in ns."""
        place = {rank.rank: at for at, rank in enumerate(self.ranks)}
        ns = {name: np.zeros(len(place)) for name in self.by_category}
        for row in self._of_ranks("category").to_pylist():
            rank = row["rank"]
            ns[row["category"]][place[rank]] = row["total_ns"] / self._steps_of[rank]
        return ns

    def times_of_median(self) -> dict[str, Floats]:
        """Return the time of each category per rank, divided by the median of all ranks.

        Communication and whole graphs, which may wait for others, and categories that take no
        time on most ranks are left out.
        """
        ns = {n: own for n, own in self.ns_by_category().items() if n not in WAITING}
        return {name: own / np.median(own) for name, own in ns.items() if np.median(own) > 0}

    @property
    def _rows(self) -> pa.Table:
        return self.totals.rows[self.by]

    def _of_ranks(self, column: str) -> pa.Table:
        """Return the number and the sum of events by a column and rank."""
        sums = self._rows.group_by([column, "rank"]).aggregate(
            [("count", "sum"), ("total_ns", "sum")]
        )
        return sums.rename_columns([column, "rank", "count", "total_ns"])

    @cached_property
    def _steps_of(self) -> dict[int, int]:
        return {rank.rank: max(rank.steps, 1) for rank in self.ranks}

    @cached_property
    def _categories(self) -> dict[str, str]:
        """The category of each name that takes most of its time."""
        sums = self._rows.group_by(["name", "category"]).aggregate([("total_ns", "sum")])
        order = [("total_ns_sum", "ascending"), ("category", "descending")]
        sums = sums.sort_by(order)
        return dict(zip(sums["name"].to_pylist(), sums["category"].to_pylist(), strict=True))

    @cached_property
    def _ranks_of(self) -> dict[str, int]:
        names = self._of_ranks("name")["name"].value_counts()
        return {row["values"]: row["counts"] for row in names.to_pylist()}

    @cached_property
    def _slow_ranks(self) -> dict[str, SlowRank]:
        """The slowest rank of each name whose work waits for no other rank."""
        slow = _slow_ranks(self._of_ranks("name"), "name")
        return {
            name: rank for name, rank in slow.items() if self._categories[name] not in WAITING
        }

    def _cost_ns(self, slow: SlowRank) -> float:
        """Return by how much the steps of a slow rank are longer."""
        return slow.excess_ns / self._steps_of[slow.rank] if slow.rank is not None else 0.0

    def share(self, total_ns: int) -> float | None:
        """Return a total as share of the mean step; None without steps."""
        return None if self.step_ns is None else total_ns / self.steps / self.step_ns

    @property
    def headline(self) -> str:
        """What takes most of the step, and which rank is slow at it, in one sentence."""
        if not self.by_category:
            if self.match is not None:
                return (
                    f"No work whose name, or that of its row, matches {shortened(self.match)}."
                )
            return "No device work: the traces have no kernels that could be listed."
        label, total = next(iter(self.by_category.items()))
        subject = _SUBJECTS.get(label, f"{label} kernels take")
        if self.step_ns is None:
            return (
                f"{subject[0].upper()}{subject[1:]} the longest: {format_ns(total)} in total."
            )
        running = self.running_ns[label]
        took, summed = (format_ns(ns / self.steps) for ns in (running, total))
        several = f", the sum of all is {summed}, as several run at once"
        first = (
            f"{subject} {percent(running / self.steps / self.step_ns)} of the step ({took} of "
            f"{format_ns(self.step_ns)}{several if summed != took else ''})"
        )
        slow = self._slow_sentence()
        return f"{first[0].upper()}{first[1:]}{f'; {slow}' if slow else ''}."

    def _slow_sentence(self) -> str | None:
        """Return the sentence on the category at which a rank loses most to its peers."""
        if self.is_host_run:
            return self._busy_sentence()
        slow = _slow_ranks(self._of_ranks("category"), "category")
        costs = [
            (self._cost_ns(rank), category, rank)
            for category, rank in slow.items()
            if category not in WAITING and rank.slowdown >= _LEAST_SLOWDOWN
        ]
        cost, category, rank = max(costs, key=lambda item: item[0], default=(0.0, "", None))
        if rank is None or self.step_ns is None or cost < _LEAST_COST * self.step_ns:
            return None
        noun = {COPY: "copies", "host": "its operators"}.get(category, f"{category} kernels")
        return (
            f"rank {rank.rank} is {percent(rank.slowdown - 1)} slower than its peers in {noun} "
            f"({format_signed_ns(cost)} a step)"
        )

    def _busy_sentence(self) -> str | None:
        """Return the sentence on the rank of a host run whose operators take far longest."""
        if len(self.ranks) < _LEAST_PEERS:
            return None
        by_category = self.ns_by_category()
        own = [ns for name, ns in by_category.items() if name != COMMUNICATION]
        busy = np.sum(own, axis=0) if own else np.zeros(len(self.ranks))
        ns = zip((rank.rank for rank in self.ranks), busy.tolist(), strict=True)
        *others, (rank, most) = sorted(ns, key=lambda item: item[1])
        peers = float(np.median([total for _, total in others]))
        if most < _LEAST_HOST_EXCESS * peers:
            return None
        return (
            f"operators of rank {rank} take {format_ns(most - peers)} longer a step than those "
            "of its peers"
        )

    @property
    def skipped(self) -> tuple[SkippedRank, ...]:
        """Ranks that could not be read, and are left out."""
        return self.read.skipped

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {
            "by": self.by,
            "is_host_run": self.is_host_run,
            "headline": self.headline,
            "ranks": list(self.read.ranks),
            **self.read.to_dict(),
            "steps": self.steps,
            "step_ns": self.step_ns,
            "categories": [
                {
                    "name": name,
                    "total_ns": total,
                    "share": self.share(total),
                    "running_ns": self.running_ns[name],
                    "running_share": self.share(self.running_ns[name]),
                }
                for name, total in self.by_category.items()
            ],
            "rows": self.table.to_pylist(),
            "flops": self.flops.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
            "unknown": self.unknown,
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def figures(self) -> dict[str, str]:
        """Return the key, the number of rows, and the largest category."""
        top = next(iter(self.by_category), "n/a")
        return {
            "ranks": str(self.read),
            "rows": f"{self.table.num_rows} by {self.by}",
            "largest category": top,
        }


_WITH_NVTX = "Nsight Systems records only NVTX ranges: add some, and sum up by annotation"
_RECORD = {
    "operator": "record CPU activities with the PyTorch profiler",
    "module": "record them with torch.profiler.profile(with_stack=True)",
    "layer": "record them with torch.profiler.profile(with_stack=True)",
    "annotation": "add torch.profiler.record_function or NVTX ranges",
}


def _column(values: Any, type_: pa.DataType, rows: int) -> Any:
    return (
        pa.nulls(rows, type_) if values is None else pa.chunked_array([_array(values, type_)])
    )


def _array(values: Any, type_: pa.DataType) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks().cast(type_)
    return pa.array(values, type_)


def _slow_ranks(rows: pa.Table, column: str) -> dict[str, SlowRank]:
    """Return the slowest rank by value of a column, among ranks with equally many events.

    `rows` has the columns `rank`, `count` and `total_ns`. Values without such ranks are absent.
    """
    if not rows.num_rows:
        return {}
    encoded = rows[column].combine_chunks().dictionary_encode()
    names: Sequence[str] = encoded.dictionary.to_pylist()
    rank, count, total = (rows[name].to_numpy() for name in ("rank", "count", "total_ns"))
    place = encoded.indices.to_numpy().astype(np.int64)
    groups = Groups.of(place * (int(count.max()) + 1) + count)
    order = np.lexsort((-rank, total, groups.group))
    slow: dict[str, SlowRank] = {}
    for own in np.split(order, block_starts(groups.group[order])[1:]):
        if len(own) == 1:
            continue
        last, peers = own[-1], float(np.median(total[own[:-1]]))
        excess = float(total[last]) - peers
        name = names[place[last]]
        if peers > 0 and (name not in slow or excess > slow[name].excess_ns):
            slow[name] = SlowRank(
                rank=int(rank[last]) if excess else None,
                slowdown=float(total[last]) / peers,
                excess_ns=excess,
            )
    return slow
