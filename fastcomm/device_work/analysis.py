"""Sum up the kernels of a run: each rank in a worker, then all ranks together."""

from collections.abc import Sequence
from functools import partial
from typing import get_args

from fastcomm import preparation
from fastcomm.device_work.options import KernelKey, KernelOptions
from fastcomm.device_work.result import Kernels
from fastcomm.device_work.totals import WorkQuestion, WorkTotals, merge
from fastcomm.errors import ConfigError
from fastcomm.executors.executor import OpenedRun, Task
from fastcomm.formats.opening import with_world
from fastcomm.trace.run_traces import (
    ParallelMap,
    ReadRanks,
    SkippedRank,
    agreed_size,
    expected_ranks,
    named_ranks,
    ranges,
    warnings_of_ranks,
)
from fastcomm.trace.trace import Trace


def compile_kernels() -> None:
    """Compile the kernels of this analysis and of reading, unless they are cached."""

    def summed(trace: Trace) -> None:
        WorkTotals.of(trace, WorkQuestion(by=get_args(KernelKey), flops=True))

    preparation.compile_kernels()
    preparation.compile_for("kernels", summed)


def sum_kernels(run: OpenedRun, options: KernelOptions | None = None) -> Kernels:
    """Sum up the device work of a run by the key of the options.

    Parameters
    ----------
    run
        Its ranks.
    options
        Key, rank, step and names; by default kernels by name.

    Raises
    ------
    ConfigError
        If the run does not have the rank or the step.
    FastcommError
        If a rank cannot be read; of a run that goes on, if none can.

    """
    options = options or KernelOptions()
    run.compile(compile_kernels)
    question = WorkQuestion(
        by=(options.by,),
        steps=None if options.step is None else (options.step,),
        match=options.match,
        full_names=options.full_names,
        flops=True,
        gpu=options.gpu,
    )
    ranks = run if options.rank is None else run.only((options.rank,))
    (result,) = answered(ranks, question)
    return result


def answered(run: OpenedRun, question: WorkQuestion) -> list[Kernels]:
    """Return the device work of a run by each key of a question; each rank is read once.

    Parameters
    ----------
    run
        Its ranks.
    question
        Keys, steps and names.

    Returns
    -------
    list of Kernels
        One per key, in the order of `question.by`.

    Raises
    ------
    FastcommError
        As of `sum_kernels`.

    """
    task = Task(
        measure=partial(WorkTotals.of, question=question),
        merge=merge,
        finish=partial(
            _finished,
            question=question,
            world_size=run.world_size,
            warnings=run.warnings,
            guessed_ranks=run.guessed_ranks,
        ),
        content=question.content,
    )
    return run.gather(task)


def _finished(
    totals: WorkTotals,
    skipped: Sequence[SkippedRank],
    _: ParallelMap,
    *,
    question: WorkQuestion,
    world_size: int | None,
    warnings: tuple[str, ...],
    guessed_ranks: tuple[int, ...],
) -> list[Kernels]:
    """Return the result of each key of a question from the merged ranks of a run.

    `world_size`, `warnings` and `guessed_ranks` are those of the run before it was read.
    Raises ConfigError if no rank has the step.
    """
    steps = question.steps
    if steps is not None and not any(rank.steps for rank in totals.ranks):
        present = sorted({rank.numbers or "no steps" for rank in totals.ranks})
        raise ConfigError(
            f"no step {ranges(sorted(steps))}; the run has {' or '.join(present)}"
        )
    ranks = tuple(rank.rank for rank in totals.counted)
    without_steps = [rank.rank for rank in totals.ranks if rank.rank not in ranks]
    world = agreed_size((rank.rank, rank.world_size) for rank in totals.ranks)
    warnings = (*with_world(warnings, guessed_ranks, world), *warnings_of_ranks(totals.ranks))
    if without_steps:
        warnings = (*warnings, f"no step of {named_ranks(without_steps)} counts")
    expected = expected_ranks(
        (*ranks, *without_steps), world if world_size is None else world_size, skipped
    )
    read = ReadRanks(ranks=ranks, expected=expected, skipped=tuple(skipped))
    return [
        Kernels(by=key, totals=totals, read=read, warnings=warnings, match=question.match)
        for key in question.by
    ]
