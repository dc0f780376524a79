"""Find the critical path of execution traces of Chakra or PyTorch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastcomm.analyses import preparation
from fastcomm.critical_path import CriticalPath
from fastcomm.critical_path.data import operations
from fastcomm.critical_path.execution_graph import find_path
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.executors import by_rank
from fastcomm.readers import chakra, execution_trace, rank_from_name
from fastcomm.readers.chakra import ChakraTrace
from fastcomm.readers.runs import open_run
from fastcomm.trace.run import SkippedRank


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
    preparation.compile_critical_path()
    if len(paths) == 1 and execution_trace.is_one(Path(paths[0])):
        return find_path([_of_pytorch(Path(paths[0]))], {})
    file_of_rank = chakra.find(paths)
    if file_of_rank is None:
        raise ConfigError(f"{paths[0] if paths else 'paths'}: no execution trace")
    if alone and rank is None:
        rank = min(file_of_rank)
    if rank is not None:
        if rank not in file_of_rank:
            ranks = ", ".join(map(str, file_of_rank))
            raise ConfigError(f"rank {rank}: not among the execution traces of ranks {ranks}")
        file_of_rank = {rank: file_of_rank[rank]}
    traces: list[ChakraTrace] = []
    skipped: list[SkippedRank] = []
    for number, path in file_of_rank.items():
        try:
            traces.append(chakra.read(path, number))
        except FastcommError as error:
            if not keep_going:
                raise
            skipped.append(SkippedRank(rank=number, path=str(path), error=str(error)))
    unread = by_rank(skipped, len(file_of_rank))
    groups = chakra.read_groups(traces[0].path.parent)
    return replace(find_path(traces, groups), skipped=unread)


def is_execution_trace(paths: Sequence[str | Path]) -> bool:
    """Return whether paths are execution traces, rather than traces of a profiler.

    Raises ConfigError if they are both, or the rank of a file is unknown.
    """
    if len(paths) == 1 and execution_trace.is_one(Path(paths[0])):
        return True
    return chakra.find(paths) is not None


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
    nodes = operations(trace, execution_trace.read(path))
    return ChakraTrace(path=path, rank=rank, nodes=nodes, is_host_run=trace.meta.is_host_run)
