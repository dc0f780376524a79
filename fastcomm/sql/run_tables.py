"""The tables behind the views of a run, each computed when a query first touches it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa

from fastcomm import preparation
from fastcomm.comparison.metrics_documents import metrics_document, scalars
from fastcomm.device_work.analysis import sum_kernels
from fastcomm.device_work.result import Kernels
from fastcomm.errors import TraceFileError
from fastcomm.executors.executor import (
    OpenedRun,
    annotate_errors,
    of_each,
    skipped_rank,
    unseen,
)
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.links import groups_by_label, pipeline_stages
from fastcomm.metrics.options import MetricsOptions
from fastcomm.metrics.result import Metrics
from fastcomm.ranks.group_tags import GroupTags, agreed, tagged_ops
from fastcomm.sql.events import EventScan
from fastcomm.sql.matched_collectives import matched_collectives
from fastcomm.sql.result import ViewRead
from fastcomm.sql.views import COLLECTIVES, EVENTS, KERNELS, RANKS, RunView
from fastcomm.trace.run_traces import SkippedRank, Source

_SHARES = 4  # ranks that each worker reads at once, at most


@dataclass(slots=True)
class ReadLog:
    """What a query has read so far of each view."""

    columns: dict[str, dict[str, None]] = field(default_factory=dict)
    ranks: dict[str, set[int]] = field(default_factory=dict)

    def note(self, view: str, columns: Sequence[str]) -> set[int]:
        """Note columns of a view, and return the set of its ranks, to be filled."""
        self.columns.setdefault(view, {}).update(dict.fromkeys(columns))
        return self.ranks.setdefault(view, set())

    def reads(self, run: OpenedRun) -> tuple[ViewRead, ...]:
        """Return what was read of each view."""
        return tuple(
            ViewRead(
                view=view,
                columns=tuple(columns),
                ranks=tuple(sorted(self.ranks[view])),
                of_ranks=len(run.sources),
            )
            for view, columns in self.columns.items()
        )


class RunTables:
    """The views of a run: results are computed once, events are read by each query.

    All methods are called in the thread that asked the query.
    """

    def __init__(self, run: OpenedRun) -> None:
        """Read nothing yet of `run`."""
        self.run = run
        self._unread: dict[str, SkippedRank] = {}  # by path: ranks whose events cannot be read

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics of all steps."""
        return compute_metrics(self.run, MetricsOptions(with_tables=False))

    @cached_property
    def kernels(self) -> Kernels:
        """The device work by name."""
        return sum_kernels(self.run)

    @cached_property
    def collectives(self) -> pa.Table:
        """The matched collectives."""
        return matched_collectives(self.run)

    @cached_property
    def group_tags(self) -> GroupTags:
        """The parallelisms on which ranks agree, where one alone would differ."""
        self.run.compile(preparation.compile_kernels)
        tables, skipped = self.run.gather(of_each(tagged_ops))
        self._unread.update((rank.path, rank) for rank in skipped)
        return agreed(pa.concat_tables(tables))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of what was computed so far."""
        own = (warning for result in self._results for warning in result.warnings)
        return tuple(dict.fromkeys((*self.run.warnings, *own)))

    @property
    def skipped(self) -> tuple[SkippedRank, ...]:
        """Ranks that could not be opened, or not be read by what was computed so far."""
        own = (rank for result in self._results for rank in result.skipped)
        return tuple(dict.fromkeys((*self.run.skipped, *own, *self._unread.values())))

    @property
    def _results(self) -> list[Metrics | Kernels]:
        """Results that were computed so far."""
        names = ("metrics", "kernels")
        return [self.__dict__[name] for name in names if name in self.__dict__]

    def table(self, view: RunView, columns: Sequence[str], log: ReadLog) -> pa.Table:
        """Return columns of a view whose rows are computed, and note what that takes."""
        ranks = log.note(view.name, columns)
        if view.is_listed(columns):
            return self._listed_ranks().select(columns)
        ranks.update(self.run.ranks)
        rows = self._ranks() if view is RANKS else self._computed(view)
        fields = [view.schema.field(name) for name in columns]
        values = [rows[field.name].cast(field.type) for field in fields]
        return pa.table(values, schema=pa.schema(fields))

    def _computed(self, view: RunView) -> pa.Table:
        """Return the rows of a view, with at least its columns."""
        if view is KERNELS:
            return self.kernels.to_arrow()
        if view is COLLECTIVES:
            return self.collectives
        if view.name == "metrics":
            return self._metric_values()
        tables = self.metrics.tables
        if view.name == "steps":
            return _renamed(tables["iterations"], {"iteration": "step"})
        if view.name == "findings":
            numbers = pa.array(range(1, tables["findings"].num_rows + 1), pa.int64())
            named = _renamed(tables["findings"], {"group": "group_name"})
            symptoms = pa.array([one.is_symptom for one in self.metrics.findings], pa.bool_())
            return named.append_column("number", numbers).append_column("is_symptom", symptoms)
        return tables["waits"]

    def _metric_values(self) -> pa.Table:
        """Return the numbers of the JSON document by their paths."""
        document = metrics_document(self.metrics, "sql")
        values = dict(scalars(document))
        return pa.table(
            {
                "name": pa.array(list(values), pa.string()),
                "value": pa.array(list(values.values()), pa.float64()),
            }
        )

    def _listed_ranks(self) -> pa.Table:
        """Return the ranks as the list of files has them."""
        sources = self.run.sources
        return pa.table(
            {
                "rank": pa.array([source.rank for source in sources], pa.int64()),
                "path": pa.array([str(source.path) for source in sources], pa.string()),
                "file_bytes": pa.array([source.size for source in sources], pa.int64()),
            }
        )

    def _ranks(self) -> pa.Table:
        """Return a row per rank with its times, waits and clock."""
        tables, rows = self.metrics.tables, self._listed_ranks()
        means = tables["heat"].group_by("rank").aggregate([(name, "mean") for name in _HEAT])
        waits = [
            {"rank": row.rank, "wait_caused_ns": row.caused_ns}
            | {name: getattr(row, name) for name in _OWN_WAITS}
            for row in self.metrics.across.by_rank
        ]
        parts = (
            _renamed(tables["ranks"], _STEP_NAMES),
            _renamed(means, {f"{name}_mean": name for name in _HEAT}),
            pa.Table.from_pylist(waits, schema=_WAITS),
            _by_rank("node", self._nodes()),
            _by_rank("stage", self._stages()),
            _renamed(tables["clocks"], _CLOCK_NAMES).select(["rank", *_CLOCK_NAMES.values()]),
        )
        for part in parts:
            rows = rows.join(part, "rank", join_type="left outer")
        return rows.sort_by("rank")

    def _nodes(self) -> dict[int, int]:
        """Return the node of each rank, without ranks of unknown nodes."""
        return {rank: own.node for own in self.metrics.network.nodes for rank in own.ranks}

    def _stages(self) -> dict[int, int]:
        """Return the pipeline stage of each rank in a pipeline."""
        tables = self.metrics.tables
        return pipeline_stages(groups_by_label(tables["groups"], tables["group_members"]))

    def read_events(self, sources: Sequence[Source], scan: EventScan, log: ReadLog) -> pa.Table:
        """Return the events of some ranks, as few at once as workers need; ranks are noted.

        Raises `FastcommError` if a rank cannot be read, unless the run goes on without.
        """
        ranks = log.note(EVENTS.name, scan.needed)
        if scan.has_tags:
            scan = replace(scan, group_tags=self.group_tags)
            ranks.update(self.run.ranks)
        tables, whole = [], []
        for source in sources:
            try:
                table = scan.stored(source)
            except TraceFileError as error:
                self._skip(source, error)
                continue
            if table is None:
                whole.append(source)
            else:
                tables.append(table)
                ranks.add(source.rank)
        if len(whole) > 1:
            tables += self._gathered(whole, scan)
        else:
            tables += [table for source in whole if (table := self._read(source, scan))]
        ranks.update(source.rank for source in whole if str(source.path) not in self._unread)
        return pa.concat_tables([scan.schema.empty_table(), *tables])

    def _read(self, source: Source, scan: EventScan) -> pa.Table | None:
        """Read the events of a rank here; None if it is skipped."""
        try:
            with annotate_errors(source):
                return scan.of_trace(source.read(scan.content))
        except TraceFileError as error:
            self._skip(source, error)
            return None

    def _gathered(self, sources: Sequence[Source], scan: EventScan) -> tuple[pa.Table, ...]:
        """Read the events of some ranks in the workers of the run."""
        part = replace(self.run, sources=tuple(sources), skipped=(), show_progress=unseen)
        tables, skipped = part.gather(of_each(scan.of_trace, scan.content))
        self._unread.update((rank.path, rank) for rank in skipped)
        return tables

    def _skip(self, source: Source, error: TraceFileError) -> None:
        """Note that a rank is skipped; raise the error unless the run goes on."""
        if not self.run.keep_going:
            raise error
        self._unread[str(source.path)] = skipped_rank(source, error)

    def batches(self, sources: Sequence[Source]) -> Iterator[Sequence[Source]]:
        """Yield the ranks to read at once: one, or as many as keep the workers busy."""
        workers = getattr(self.run.executor, "workers", None)
        size = 1 if workers == 1 else _SHARES * (workers or 16)
        for begin in range(0, len(sources), size):
            yield sources[begin : begin + size]


_HEAT = ("compute_ns", "exposed_ns", "idle_ns")
_STEP_NAMES = {
    "iterations": "steps",
    "mean_ns": "step_mean_ns",
    "p99_ns": "step_p99_ns",
    "max_ns": "step_max_ns",
}
_CLOCK_NAMES = {"offset_ns": "clock_offset_ns", "spread_ns": "clock_spread_ns"}
_OWN_WAITS = ("wait_ns", "transfer_ns", "last", "collectives")
_WAITS = pa.schema(
    [("rank", pa.int64())]
    + [(name, pa.float64()) for name in ("wait_ns", "transfer_ns", "wait_caused_ns")]
    + [(name, pa.int64()) for name in ("last", "collectives")]
)


def _by_rank(name: str, values: Mapping[int, int]) -> pa.Table:
    """Return a column with a value for some ranks."""
    columns = ("rank", [*values]), (name, [*values.values()])
    return pa.table({key: pa.array(own, pa.int64()) for key, own in columns})


def _renamed(table: pa.Table, names: Mapping[str, str]) -> pa.Table:
    return table.rename_columns([names.get(name, name) for name in table.column_names])
