"""Find the critical path of a run, through all ranks if they can be joined, else of one.

Execution traces of Chakra and PyTorch have paths, too, by their recorded dependencies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from fastcomm import preparation
from fastcomm.checks import check_path
from fastcomm.critical_path.data_dependencies import operations
from fastcomm.critical_path.execution_graph import find_path
from fastcomm.critical_path.graph_edit import TIMES_BY_RANK
from fastcomm.critical_path.options import ExecutionTraceOptions, PathOptions
from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.rules import TraceEvents
from fastcomm.critical_path.search import JoinError, analyze, joined
from fastcomm.critical_path.window import WindowError
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.executors.executor import OpenedRun, Task, annotate_errors, by_rank, skipped_rank
from fastcomm.formats import execution_traces
from fastcomm.formats.execution_traces import ChakraTrace
from fastcomm.formats.opening import open_run
from fastcomm.formats.sources import rank_from_name
from fastcomm.options import Window
from fastcomm.ranks.group_tags import agreed, tagged_ops, with_tags
from fastcomm.trace.run_traces import (
    ParallelMap,
    SkippedRank,
    Source,
    expected_ranks,
    warnings_of_ranks,
)
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NONE, Ints


def trimmed(trace: Trace, critical: CriticalPath) -> tuple[Trace, CriticalPath]:
    """Return a trace and its path without the rows that no path through it needs.

    The remaining rows have new numbers. The ids of events stay.
    """
    graph, rows = critical.graph, trace.events.num_rows
    is_needed = np.zeros(rows + 1, np.bool_)  # one behind the last for -1, which is none
    for column in (graph.event, graph.owner, trace.comm["event"].to_numpy()):
        is_needed[column] = True
    rows_needed = np.flatnonzero(is_needed[:rows])
    number = np.full(rows + 1, NONE, np.int32)
    number[rows_needed] = np.arange(len(rows_needed), dtype=np.int32)
    small = _rows(trace, critical, rows_needed, number)
    return small, replace(critical, graph=graph.renumbered(number), events=TraceEvents(small))


def _rows(trace: Trace, critical: CriticalPath, rows: Ints, number: Ints) -> Trace:
    """Return the trace with only the events in `rows`.

    The events get the ids that the path has for them. `number` is the new row of each event of
    the trace.
    """
    at = pa.array(rows)
    comm = trace.comm
    event = pa.array(number[comm["event"].to_numpy()])
    ids = pa.array(critical.events.ids(rows.astype(np.int32)))
    args = pa.table({"position": ids})
    if trace.is_whole:
        others = [name for name in trace.arguments.column_names if name != "position"]
        args = trace.arguments.select(others).take(at).append_column("position", ids)
    return replace(
        trace,
        events=trace.events.take(at).combine_chunks(),
        comm=comm.set_column(comm.column_names.index("event"), "event", event),
        args=args.combine_chunks(),
    )


PathsByRank = dict[int, tuple[Trace, CriticalPath]]  # by rank


def critical_path(
    run: OpenedRun, options: PathOptions | None = None, *, alone: bool = False
) -> CriticalPath:
    """Find the critical path of a window through all ranks, or of one rank.

    Ranks are joined by their matched collectives and messages. If they cannot be joined, the
    path is that of the first rank, and its first note says why. The path is of one rank if
    `options` need one, or with `alone`: of `options.rank`, or else of the first rank.

    Parameters
    ----------
    run
        The traces.
    options
        Window and rank; by default the second step of all ranks.
    alone
        Whether to find the path of one rank.

    Raises
    ------
    FastcommError
        If there is no such window, or a rank cannot be read; of a run that goes on, only if
        `options.rank` names that rank, or no rank can be read.

    """
    options = options or PathOptions()
    run.compile(partial(preparation.compile_critical_path, options.compat))
    if alone or options.is_of_one_rank or len(run.ranks) == 1:
        path = _of_one_rank(run, options)
        path = replace(path, warnings=(*run.warnings, *path.warnings))
        return _with_data(path, options) if options.deps else path
    joint, skipped = through_ranks(run, options)
    if isinstance(joint, str):
        unread = {rank.rank for rank in skipped}
        source = next(rank for rank in run.sources if rank.rank not in unread)
        path = run.executor.call(partial(_of_source, source, options))
        note = f"this is the path of rank {source.rank} alone: ranks cannot be joined ({joint})"
        joint = replace(path, about=path.about.noting(note))
    warnings = (*run.warnings, *joint.warnings)
    return replace(joint, skipped=tuple(skipped), warnings=warnings)


def _of_one_rank(run: OpenedRun, options: PathOptions) -> CriticalPath:
    """Return the path of `options.rank`, or of the first rank that can be read."""
    may_skip = run.keep_going and options.rank is None
    sources = run.sources if options.rank is None else run.only((options.rank,)).sources
    unread: list[SkippedRank] = []
    for source in sources:
        try:
            path = run.executor.call(partial(_of_source, source, options))
        except WindowError:
            raise
        except FastcommError as error:
            if not may_skip:
                raise
            unread.append(skipped_rank(source, error))
        else:
            return replace(path, skipped=by_rank(unread, len(sources), run.skipped))
    raise FastcommError(f"no rank could be read: {unread[0].error}")


def _of_source(source: Source, options: PathOptions) -> CriticalPath:
    """Read one rank and return its critical path, by the rules of `options.compat`."""
    with annotate_errors(source):
        trace = source.read("all")
        path = _path_by_rules(trace, options)
    if path.path is None:
        raise WindowError(f"{trace.meta.path}: the graph has a cycle, and no critical path")
    if options.compat is None and not len(path.graph.time):
        if not len(analyze(trace, Window(annotation="")).graph.time):
            raise FastcommError(
                f"{trace.meta.path}: no event that a path could go through in any window: the "
                "trace has no kernels, copies, operators or calls"
            )
        raise WindowError(
            f"{trace.meta.path}: the window has no event that a path could go through; choose "
            "another with --step or --annotation"
        )
    return replace(path, warnings=tuple(warnings_of_ranks([trace.meta])))


def _path_by_rules(trace: Trace, options: PathOptions) -> CriticalPath:
    if options.compat is None:
        return analyze(trace, options)
    from fastcomm.compat import hta  # few users need it

    return hta.find_path(trace, options, zero_weight_launches=options.zero_weight_launches)


def _with_data(path: CriticalPath, options: PathOptions) -> CriticalPath:
    """Return a path of one rank with what could start earlier by its data dependencies."""
    from fastcomm.critical_path.data_dependencies import data_dependencies
    from fastcomm.formats import execution_traces

    trace = path.trace
    place = options.execution_trace or execution_traces.find_beside(trace)
    if place is None:
        raise ConfigError(
            f"--deps data: no torch_et_{trace.meta.rank}.json and no pytorch_et_"
            f"{trace.meta.rank}.json beside {trace.meta.path}; name it with --execution-trace"
        )
    operators = execution_traces.read_operators(Path(place))
    return replace(path, data=data_dependencies(trace, path, operators))


def through_ranks(
    run: OpenedRun, window: Window
) -> tuple[CriticalPath | str, Sequence[SkippedRank]]:
    """Return the path through all ranks, or the reason why not, and the skipped ranks."""
    of_rank = _RankWindow(window=window, world_size=run.world_size)
    task = Task(measure=of_rank.part, merge=together, finish=of_rank.join, content="all")
    try:
        return run.gather(task)
    except WindowError as error:
        return str(error), run.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankWindow:
    """The window whose path is searched on every rank."""

    window: Window
    world_size: int | None

    def part(self, trace: Trace) -> PathsByRank:
        """Return the trace of one rank, limited to the window, and its critical path."""
        return {trace.meta.rank: trimmed(trace, analyze(trace, self.window))}

    def join(
        self, parts: PathsByRank, skipped: Sequence[SkippedRank], _: ParallelMap
    ) -> tuple[CriticalPath | str, Sequence[SkippedRank]]:
        """Return the path through all ranks, or the reason why not, and the skipped ranks."""
        ordered = sorted(parts)
        traces = {rank: parts[rank][0] for rank in ordered}
        tags = agreed(pa.concat_tables([tagged_ops(trace) for trace in traces.values()]))
        traces = {rank: with_tags(trace, tags) for rank, trace in traces.items()}
        paths = {
            rank: replace(parts[rank][1], events=TraceEvents(trace))
            for rank, trace in traces.items()
        }
        try:
            expected = expected_ranks(ordered, self.world_size, skipped)
            path = joined(traces, self.window, paths, expected)
        except JoinError as error:
            return str(error), skipped
        if not path.across.clocks_agree:
            why = "clocks disagree: most collectives end on one rank before another arrives"
            return why, skipped
        warnings = warnings_of_ranks(trace.meta for trace in traces.values())
        return replace(path, warnings=tuple(warnings)), skipped


def together(parts: Sequence[PathsByRank]) -> PathsByRank:
    """Merge the paths of several ranks."""
    return {rank: part_of_rank for part in parts for rank, part_of_rank in part.items()}


def with_times_of(path: CriticalPath, file: Path) -> CriticalPath:
    """Return the path for the times in a Parquet or CSV file: see `CriticalPath.with_times`.

    Raises FastcommError, with the name of the file, if it cannot be read or does not fit.
    """
    from fastcomm.formats import tables

    present = tables.columns_of(file)
    names = [name for name in TIMES_BY_RANK.names if name in present]
    rows = list(tables.batches(file, names)) if names else []
    # A file without rows has no types.
    empty = pa.table({name: pa.array([], pa.int64()) for name in names})
    try:
        return path.with_times(pa.concat_tables(rows) if rows else empty)
    except FastcommError as error:
        raise FastcommError(f"{file}: {error}") from error


def draw(
    path: CriticalPath, target: Path, *, all_events: bool = False, all_edges: bool = False
) -> None:
    """Write a copy of the trace of a path of one rank, with the path drawn into it.

    Parameters
    ----------
    path
        The path.
    target
        The file to write.
    all_events
        Whether to keep events that are not on the path.
    all_edges
        Whether to keep all events, and to draw all edges.

    """
    from fastcomm.critical_path import overlay

    is_all = all_events or all_edges
    drawing = overlay.Drawing(only_critical=not is_all, all_edges=all_edges)
    overlay.write(path.trace, path, target, drawing)


def execution_trace_path(
    *paths: str | Path,
    rank: int | None = None,
    alone: bool = False,
    keep_going: bool = False,
) -> CriticalPath:
    """Find the critical path of execution traces by their recorded dependencies.

    Times are those of a replay: an operation starts when all that it depends on has ended.
    Ranks are joined by their collectives and messages.

    Parameters
    ----------
    *paths
        Chakra execution traces (`trace.0.et`, protobuf, or JSON), directories of them, or one
        execution trace of PyTorch (`torch_et_0.json`) beside the profiler's trace of the run,
        which has its times.
    rank
        The one rank whose path is searched; by default it goes through all ranks.
    alone
        Whether to take the first rank if there is no `rank`.
    keep_going
        Whether to leave out ranks that cannot be read, and list them in `skipped`.

    Raises
    ------
    FastcommError
        A path is no such trace, or one that cannot be read, or its dependencies have a cycle.

    """
    for path in paths:
        check_path(path, "execution_trace_path: path", 'execution_trace_path("traces/")')
    ExecutionTraceOptions(rank=rank, alone=alone, keep_going=keep_going)  # checks their types
    preparation.compile_critical_path()
    if len(paths) == 1 and execution_traces.is_of_torch(Path(paths[0])):
        trace = _of_pytorch(Path(paths[0]))
        if rank is not None and rank != trace.rank:
            raise ConfigError(
                f"rank {rank}: {paths[0]} is the execution trace of rank {trace.rank}"
            )
        return find_path([trace], {})
    file_of_rank = execution_traces.find_chakra(paths)
    if file_of_rank is None:
        raise ConfigError(f"{paths[0] if paths else 'paths'}: no execution trace")
    if alone or rank is not None:
        file_of_rank = _of_rank(file_of_rank, min(file_of_rank) if rank is None else rank)
    traces: list[ChakraTrace] = []
    skipped: list[SkippedRank] = []
    for number, path in file_of_rank.items():
        try:
            traces.append(execution_traces.read_chakra(path, number))
        except FastcommError as error:
            if not keep_going:
                raise
            skipped.append(SkippedRank(rank=number, path=str(path), error=str(error)))
    unread = by_rank(skipped, len(file_of_rank))
    groups = execution_traces.read_groups(traces[0].path.parent)
    return replace(find_path(traces, groups), skipped=unread)


def _of_rank(file_of_rank: Mapping[int, Path], rank: int) -> dict[int, Path]:
    """Return the file of one rank. Raises `ConfigError` if it has none."""
    if rank not in file_of_rank:
        ranks = ", ".join(map(str, file_of_rank))
        raise ConfigError(f"rank {rank}: not among the execution traces of ranks {ranks}")
    return {rank: file_of_rank[rank]}


def is_execution_trace(paths: Sequence[str | Path]) -> bool:
    """Return whether paths are execution traces, rather than traces of a profiler.

    Raises ConfigError if they are both, or the rank of a file is unknown.
    """
    if len(paths) == 1 and execution_traces.is_of_torch(Path(paths[0])):
        return True
    return execution_traces.find_chakra(paths) is not None


def _of_pytorch(path: Path) -> ChakraTrace:
    """Return the leaf operators of PyTorch's file, with times of the trace beside it."""
    rank = rank_from_name(path.name)
    try:
        run = open_run(path.parent)
        if rank is None and len(run.ranks) == 1:
            rank = run.ranks[0]
        if rank is None:
            raise ConfigError("its name has no rank, as in torch_et_0.json")
        trace = run.only((rank,)).sources[0].read("all")
    except FastcommError as error:
        raise ConfigError(
            f"{path}: an execution trace of PyTorch has no times, and no trace of its rank is "
            f"beside it ({error}). Try: fastcomm critical-path TRACE --deps data "
            f"--execution-trace {path}"
        ) from error
    nodes = operations(trace, execution_traces.read_operators(path))
    return ChakraTrace(path=path, rank=rank, nodes=nodes, is_host_run=trace.meta.is_host_run)
