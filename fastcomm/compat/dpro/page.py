"""Pages of `fastcomm dpro`: the operations of a trial, and a replayed step."""

from collections import Counter
from collections.abc import Sequence

from fastcomm.compat.dpro import tables
from fastcomm.compat.dpro.predictions import Removed
from fastcomm.compat.dpro.replayed import Replayed
from fastcomm.compat.dpro.result import Session, TrialStatistics
from fastcomm.compat.dpro.statistics import MS
from fastcomm.show import pages
from fastcomm.show.charts import ChartLine, HeatChart, LineChart, linear, row_bars, ticked
from fastcomm.show.pages import Figure, Page, Section, figure, table, unknown_section
from fastcomm.timeline import page as timeline_page
from fastcomm.timeline.timeline import Timeline
from fastcomm.units import counted

_MOST_RANKS = 96
_MOST_ROWS = 200
_MOST_BARS = 16
_MOST_LONGEST = 24  # operations, ranks
_MOST_OPERATIONS = 1000
_BARS = "Bars of time; the table has all numbers."


def page(session: Session, source: str, schedule: Timeline | str) -> Page:
    """Return the page of a replay.

    `source` names the trial; `schedule` is that of the step, or why there is none.
    """
    replayed, changed, removed = session.replayed, session.changed, session.removed
    facts = [
        pages.fact("dpro-replay.mean_step_ns", replayed.mean_ns, pages.ns, label="replayed"),
        pages.fact(
            "dpro-replay.measured_ns", session.measured.time_ns, pages.ns, label="measured"
        ),
        pages.fact("dpro-replay.error", session.error, pages.signed_percent, label="error"),
    ]
    if changed is not None:
        facts.append(
            pages.fact(
                "dpro-replay.what_if.mean_step_ns", changed.mean_ns, pages.ns, label="what if"
            )
        )
    sections = [_schedule(schedule), _ranks(session), _path(session)]
    if removed:
        sections.insert(2, _bottlenecks(session, removed))
    return Page(
        title="Replay",
        source=source,
        headline=(
            "A step replays in ",
            pages.fact("dpro-replay.mean_step_ns", replayed.mean_ns, pages.ns),
            ", ",
            pages.fact("dpro-replay.error", session.error, pages.signed_percent),
            " compared with the measured step.",
        ),
        facts=tuple(facts),
        sections=tuple(sections),
    )


def _schedule(schedule: Timeline | str) -> Section:
    """Return the section with the schedule of the replayed step."""
    title = "What does each rank do, and when?"
    if isinstance(schedule, str):
        return unknown_section(
            timeline_page.NAME, title, "The schedule is", "Schedule", schedule
        )
    block = timeline_page.block(schedule, "timeline-figure", "The replayed step")
    return Section(
        name=timeline_page.NAME,
        title=title,
        lead=(
            f"The schedule of {pages.many(len(schedule.ranks), 'rank')} as replayed: the upper "
            "lane is compute, the lower one communication.",
        ),
        blocks=(block,),
        pitfall="These are times of the replay, not of the trace.",
    )


def _ranks(session: Session) -> Section:
    """Return the section on the time of each rank."""
    count = len(session.replayed.by_pid())
    lead = [f"{pages.many(count, 'rank')} were replayed on their devices."]
    if session.edits:
        edits = ", ".join(edit.text for edit in session.edits)
        lead += [f"The what-if is with: {edits}.", str(session.interval)]
    return Section(
        name="ranks",
        title="How long does each rank take?",
        lead=tuple(lead),
        blocks=(_heat_map(session.replayed), pages.shown(tables.ranks(session))),
        pitfall="The replay starts an operation as soon as its dependencies and its device "
        "allow; measured gaps between operations are kept.",
    )


def _heat_map(replayed: Replayed) -> Figure:
    """Return the heat map of operation time by rank and category."""
    sums = replayed.by_category()
    totals = Counter[str]()
    for by_category in sums.values():
        totals.update(by_category)
    kinds = [kind for kind, _ in totals.most_common()]
    pids = [pid for pid in replayed.replayer.pids if pid in sums][:_MOST_RANKS]
    chart = HeatChart(
        grid=[[sums[pid].get(kind, 0.0) / MS for kind in kinds] for pid in pids],
        rows=[pid or "all" for pid in pids],
        columns=kinds,
        unit="ms",
        tip="{row}, {column}: {value}",
    )
    return figure(
        "replay-heat",
        "Time of each rank by kind of operation",
        f"Heat map of {len(pids)} ranks and {len(kinds)} kinds of operations.",
        chart,
        "dpro-replay.step_end_ns",
        chart_note=f"The first {_MOST_RANKS} ranks." if len(pids) == _MOST_RANKS else "",
    )


def _path(session: Session) -> Section:
    """Return the section on the operations of the critical path and their times."""
    return Section(
        name="path",
        title="Which operations determine the step time?",
        lead=(
            "The critical path of ",
            pages.fact("dpro-replay.critical_path_ns", session.path.length_ns, pages.ns),
            f" has {pages.many(len(session.path.nodes), 'operation')}.",
        ),
        blocks=(pages.shown(tables.path(session).top(_MOST_ROWS)),),
    )


def _bottlenecks(session: Session, removed: Sequence[Removed]) -> Section:
    """Return the section on the time saved by removing each operation of the path."""
    names = [removal.node for removal in removed[:_MOST_BARS]]
    times = [removal.saved_ns for removal in removed[:_MOST_BARS]]
    drawn = figure(
        "bottlenecks-chart",
        "Time saved per step without each operation",
        f"Bars of the {len(names)} operations whose removal saves the most time.",
        row_bars(names, times, pages.ns, "ms saved per step", MS, looks="TP"),
        "dpro-replay.bottlenecks.saved_ns",
        table=pages.shown(tables.bottlenecks(session)),
    )
    return Section(
        name="bottlenecks-section",
        title="Which operation would help the most?",
        lead=("The step was replayed without each operation of its critical path in turn.",),
        blocks=(drawn,),
    )


def operations_page(statistics: TrialStatistics, source: str) -> Page:
    """Return the page of the operations of a trial; `source` names it."""
    time = statistics.time
    ranks, operations = len(time.ranks), len(statistics.operations.names)
    return Page(
        title="Operations",
        source=source,
        headline=(
            f"A step of {counted(ranks, 'rank')} takes ",
            pages.fact("dpro-stats.iteration_time_ns", time.time_ns, pages.ns),
            " on average.",
        ),
        facts=(
            pages.fact("dpro-stats.iteration_time_ns", time.time_ns, pages.ns, label="step"),
            pages.fact("dpro-stats.ranks", ranks, pages.count, label="ranks"),
            pages.fact("dpro-stats.steps", len(time.steps), pages.count, label="steps"),
            pages.fact(
                "dpro-stats.categories.op_cnt", operations, pages.count, label="operations"
            ),
        ),
        sections=(
            _steps(statistics),
            _rank_steps(statistics),
            _categories(statistics),
            _operations(statistics),
        ),
    )


def _steps(statistics: TrialStatistics) -> Section:
    """Return the section with the time of each step."""
    title, steps = "Time of each step, mean over the ranks", statistics.time.steps
    labels = [str(step) for step in range(len(steps))]
    times = list(zip(labels, steps, strict=True))
    line = ChartLine(
        name="mean over the ranks",
        points=[(at, ns / MS) for at, ns in enumerate(steps)],
        tips=[f"step {label}: {pages.ns(ns)}" for label, ns in times],
    )
    drawn = figure(
        "steps-chart",
        title,
        f"Line of {len(steps)} steps from {pages.ns(min(steps))} to {pages.ns(max(steps))}.",
        LineChart(
            lines=(line,), x=ticked("step", labels), y=linear("ms", [ns / MS for ns in steps])
        ),
        "dpro-stats.step_time_ns",
        table=table(
            "steps-table",
            title,
            ["step", ("time", "dpro-stats.step_time_ns", pages.ns)],
            times[:_MOST_OPERATIONS],
        ),
    )
    slowest, most = max(times, key=lambda pair: pair[1])
    return Section(
        name="steps",
        title="Are the steps alike?",
        lead=(
            f"Step {statistics.time.opt_step} is closest to the average; step "
            f"{slowest} is the slowest: ",
            pages.fact("dpro-stats.step_time_ns", most, pages.ns),
            ".",
        ),
        blocks=(drawn,),
    )


def _rank_steps(statistics: TrialStatistics) -> Section:
    """Return the section with the mean step of each rank, and its parts."""
    ranks = statistics.time.ranks
    means = {pid: sum(rank.time) / len(rank.time) for pid, rank in ranks.items()}
    order = sorted(means, key=lambda pid: -means[pid])
    slowest, fastest = order[0], order[-1]
    slow = set(order[:_MOST_LONGEST])
    shown = [pid for pid in means if pid in slow]
    more = len(means) - len(shown)
    left_out = f"The {_MOST_LONGEST} slowest; {pages.many(more, 'faster rank')} left out."
    drawn = figure(
        "ranks-chart",
        "Mean step of each rank",
        _BARS,
        row_bars(shown, [means[pid] for pid in shown], pages.ns, "ms per step", MS),
        "pages.rank_step",
        chart_note=left_out if more else "",
        table=pages.shown(tables.rank_steps(statistics.time).top(_MOST_OPERATIONS)),
    )
    return Section(
        name="ranks",
        title="Are the ranks alike?",
        lead=(
            f"{slowest} has the longest step: ",
            pages.fact("pages.rank_step", means[slowest], pages.ns),
            "; the shortest takes ",
            pages.fact("pages.rank_step", means[fastest], pages.ns),
            ".",
        ),
        blocks=(drawn,),
        pitfall="Ranks wait for each other: a step that is longer on one rank may have begun "
        "earlier, and need not be slower work.",
    )


def _categories(statistics: TrialStatistics) -> Section:
    """Return the section with the time of each category."""
    shown = tables.categories(statistics.operations)
    names, _, _, sums, *_ = zip(*shown.rows, strict=True)
    drawn = figure(
        "categories-chart",
        "Time by category, of all ranks and steps",
        _BARS,
        row_bars(names, sums, pages.ns, "ms in all", MS),
        "dpro-stats.categories.time_ns",
        table=pages.shown(shown),
    )
    return Section(
        name="categories",
        title="What kinds of work are there?",
        lead=(
            f"{names[0]} takes the most: ",
            pages.fact("dpro-stats.categories.time_ns", sums[0], pages.ns),
            " in all.",
        ),
        blocks=(drawn,),
    )


def _operations(statistics: TrialStatistics) -> Section:
    """Return the section with the operations that take the most time."""
    operations = statistics.operations
    names, total = operations.names, operations.total.tolist()
    order = (-operations.total).argsort(kind="stable").tolist()
    bars, more = order[:_MOST_LONGEST], len(order) - _MOST_OPERATIONS
    drawn = figure(
        "operations-chart",
        "Operations with the most time, of all steps",
        _BARS,
        row_bars([names[k] for k in bars], [total[k] for k in bars], pages.ns, "ms in all", MS),
        "pages.operation_total",
        note=f"The table leaves out {pages.many(more, 'operation')}." if more > 0 else "",
        table=pages.shown(tables.operations_table(operations, order[:_MOST_OPERATIONS])),
    )
    return Section(
        name="operations",
        title="Which operations take the time?",
        lead=(
            f"{names[order[0]]}: ",
            pages.fact("pages.operation_total", total[order[0]], pages.ns),
            " in all.",
        ),
        blocks=(drawn,),
        pitfall="Operations on different streams overlap: their times may add up to more than "
        "the step.",
    )
