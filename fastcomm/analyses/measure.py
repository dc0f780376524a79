"""Measure a run: every rank in a worker, then merge the partial results and finalize them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastcomm.analyses.workers import executor_of
from fastcomm.errors import ConfigError
from fastcomm.executors import Executor, Progress, Task
from fastcomm.hardware import load_node
from fastcomm.metrics import Partial, RankNote, merge, spill, without_device_clock
from fastcomm.metrics.computation import compute
from fastcomm.metrics.findings.finding import findings_table, in_order
from fastcomm.metrics.findings.slow_gemms import slow_gemms
from fastcomm.metrics.nodes import NetworkLevel, NodeFacts
from fastcomm.metrics.result import Metrics
from fastcomm.options import ByteKind, ClockAlignment, MetricsOptions
from fastcomm.readers.runs import with_world
from fastcomm.trace.run import RunTraces, SkippedRank, Spread, agreed_size, ranges


def compute_metrics(
    run: RunTraces,
    options: MetricsOptions | None = None,
    *,
    workers: int | Executor = 1,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> Metrics:
    """Measure a run: METRIC 0 to 5 of the specification, and comparisons across ranks.

    Iterations are on the device's clock if every rank with device work has its launches
    recorded, and otherwise by the host's marks, on all ranks alike.

    Parameters
    ----------
    run
        The traces.
    options
        What is measured; by default all steps.
    workers
        Number of processes of this machine, or an executor.
    keep_going
        Whether to leave out ranks that cannot be read, and list them in `skipped`.
    progress
        Called with the source of each finished rank, also of one that was skipped.

    Raises
    ------
    FastcommError
        If a rank cannot be read; with `keep_going`, if none can.

    """
    options = options or MetricsOptions()
    link = options.link_bytes_per_s
    question = _Question(
        byte_kind=options.bytes,
        link=link if link is not None else run.link_bandwidth,
        only=None if options.steps is None else frozenset(options.steps),
        warnings=run.warnings,
        guessed_ranks=run.guessed_ranks,
        world_size=run.world_size,
        clock_alignment=options.clock_alignment,
        with_tables=options.with_tables,
        node_facts=_node_facts(run, options),
    )
    executor = executor_of(workers)
    measured = _measured(run, question, executor, keep_going=keep_going, progress=progress)
    measured = replace(measured, tokens_per_step=options.tokens_per_step)
    if not options.flops:
        return measured
    # Slow imports, and most runs are measured without FLOPs.
    from fastcomm.analyses.kernels import answered
    from fastcomm.kernels.totals import WorkQuestion

    work = WorkQuestion(by=("category",), steps=options.steps, flops=True, gpu=options.gpu)
    (kernels,) = answered(run, work, workers=executor, keep_going=keep_going)
    gemms = slow_gemms(kernels.findings, kernels.read.ranks, kernels.step_ns or 0.0)
    findings = in_order([*measured.findings, *gemms])
    tables = {**measured.tables, "findings": findings_table(findings)}
    return replace(measured, flops=kernels.flops, findings=findings, tables=tables)


def _node_facts(run: RunTraces, options: MetricsOptions) -> NodeFacts:
    """Return what options, cluster and configuration state about nodes."""
    if options.cluster is None:
        limits: dict[NetworkLevel, float | None] = {
            "node": run.scale_up,
            "network": run.scale_out,
        }
        return NodeFacts(gpus_per_node=options.gpus_per_node, limits=limits)
    gpus, links = load_node(options.cluster)
    return NodeFacts(
        gpus_per_node=options.gpus_per_node,
        cluster_gpus=gpus,
        limits={"node": links.intra, "network": links.inter},
    )


def _measured(
    run: RunTraces,
    question: "_Question",
    executor: Executor,
    *,
    keep_going: bool,
    progress: Progress | None,
) -> Metrics:
    """Measure a run, again by the host's marks if its ranks cannot all be on one clock."""
    result = executor.gather(run, _task(question), keep_going=keep_going, progress=progress)
    if isinstance(result, Metrics):
        return result
    # A rank alone cannot know whether all others have launches: most often they do.
    again = _task(replace(question, by_host=result))
    second = executor.gather(run, again, keep_going=keep_going, progress=progress)
    assert isinstance(second, Metrics)
    return second


def _task(question: "_Question") -> Task[Partial, "Metrics | tuple[int, ...]"]:
    return Task(
        measure=partial(
            Partial.of,
            byte_kind=question.byte_kind,
            only=question.only,
            by_host=bool(question.by_host),
        ),
        merge=merge,
        finish=question.answer,
        spill=spill,
        content="metrics",
        takes_many=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Options and facts of a run that metrics need besides the partial results of its ranks.

    `by_host` are the ranks that force all iterations to be by marks on the host.
    """

    byte_kind: ByteKind
    link: float | None
    only: frozenset[int] | None
    warnings: tuple[str, ...]
    guessed_ranks: tuple[int, ...]
    world_size: int | None
    clock_alignment: ClockAlignment
    with_tables: bool
    node_facts: NodeFacts
    by_host: tuple[int, ...] = ()

    def answer(
        self, whole: Partial, skipped: Sequence[SkippedRank], spread: Spread
    ) -> Metrics | tuple[int, ...]:
        """Return the metrics from the merged partial result of all ranks.

        If iterations of ranks are on different clocks, all are taken on the host clock.
        """
        if apart := without_device_clock(whole.notes):
            return apart
        if self.only is not None:
            self._check_steps(whole)
        return compute(
            whole,
            byte_kind=self.byte_kind,
            link=self.link,
            warnings=self._warnings(whole.notes),
            world_size=self.world_size,
            skipped=sorted(skipped, key=lambda skipped: skipped.path),
            clock_alignment=self.clock_alignment,
            spread=spread,
            with_tables=self.with_tables,
            node_facts=self.node_facts,
        )

    def _check_steps(self, whole: Partial) -> None:
        """Raise `ConfigError` if steps were chosen that no rank has, or none."""
        present = whole.iterations["iteration"].unique().to_pylist()
        missing = (self.only or frozenset()).difference(present)
        if missing or not present:
            numbers = sorted({note.steps or "no steps" for note in whole.notes})
            raise ConfigError(
                f"no step {ranges(sorted(missing))}; the run has {' or '.join(numbers)}"
            )

    def _warnings(self, notes: Sequence[RankNote]) -> tuple[str, ...]:
        """Return the warnings of the run, with the world size that its ranks state."""
        # A file that is alone says its rank with its world.
        ranks = (
            [note.rank for note in notes]
            if len(self.guessed_ranks) == 1
            else self.guessed_ranks
        )
        world = agreed_size((note.rank, note.world_size) for note in notes)
        warnings = with_world(self.warnings, ranks, world)
        if not self.by_host:
            return warnings
        return (
            *warnings,
            "the iterations of all ranks are by the host's marks, because rank "
            f"{ranges(self.by_host)} cannot be on the device's clock",
        )
