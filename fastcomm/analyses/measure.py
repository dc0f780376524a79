"""Measure a run: every rank in a worker, then merge the partial results and finalize them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastcomm.analyses import preparation
from fastcomm.errors import ConfigError
from fastcomm.executors import Task
from fastcomm.executors.opened import OpenedRun
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


def compute_metrics(run: OpenedRun, options: MetricsOptions | None = None) -> Metrics:
    """Measure a run: METRIC 0 to 5 of the specification, and comparisons across ranks.

    Iterations are on the device's clock if every rank with device work has its launches
    recorded, and otherwise by the host's marks, on all ranks alike.

    Parameters
    ----------
    run
        The traces.
    options
        What is measured; by default all steps.

    Raises
    ------
    FastcommError
        If a rank cannot be read; of a run that goes on, if none can.

    """
    options = options or MetricsOptions()
    run.compile(preparation.compile_kernels)
    link = options.link_bandwidth
    question = _Question(
        byte_kind=options.bytes,
        link=run.link_bandwidth if link is None else float(link),
        only=None if options.steps is None else frozenset(options.steps),
        warnings=run.warnings,
        guessed_ranks=run.guessed_ranks,
        world_size=run.world_size,
        clock_alignment=options.clock_alignment,
        with_tables=options.with_tables,
        node_facts=_node_facts(run, options),
    )
    measured = _measured(run, question)
    measured = replace(measured, tokens_per_step=options.tokens_per_step)
    if not options.flops:
        return measured
    # Slow imports, and most runs are measured without FLOPs.
    from fastcomm.analyses.kernels import answered
    from fastcomm.kernels.totals import WorkQuestion

    work = WorkQuestion(by=("category",), steps=options.steps, flops=True, gpu=options.gpu)
    (kernels,) = answered(run, work)
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


def _measured(run: OpenedRun, question: "_Question") -> Metrics:
    """Measure a run, again by the host's marks if its ranks cannot all be on one clock."""
    result = run.gather(_task(question))
    if isinstance(result, Metrics):
        return result
    # A rank alone cannot know whether all others have launches: most often they do.
    second = run.gather(_task(replace(question, by_host=result)))
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
