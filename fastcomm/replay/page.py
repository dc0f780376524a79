"""Page of `fastcomm replay`: the replayed step compared with the measured step."""

from collections import Counter
from collections.abc import Sequence

from fastcomm.replay import tables
from fastcomm.replay.predictions import Removed
from fastcomm.replay.replayed import Replayed
from fastcomm.replay.result import Session
from fastcomm.show import pages
from fastcomm.show.charts import HeatChart, row_bars
from fastcomm.show.pages import Figure, Page, Section, figure, unknown_section
from fastcomm.timeline import page as timeline_page
from fastcomm.timeline.timeline import Timeline

_MS = 1e6
_MOST_RANKS = 96
_MOST_ROWS = 200
_MOST_BARS = 16


def page(session: Session, source: str, schedule: Timeline | str) -> Page:
    """Return the page of a replay.

    `source` names the trace or trial; `schedule` is that of the step, or why there is none.
    """
    replayed, changed, removed = session.replayed, session.changed, session.removed
    facts = [
        pages.fact("replay.mean_step_ns", replayed.mean_ns, pages.ns, label="replayed"),
        pages.fact("replay.measured_ns", session.measured.time_ns, pages.ns, label="measured"),
        pages.fact("replay.error", session.error, pages.signed_percent, label="error"),
    ]
    if changed is not None:
        facts.append(
            pages.fact(
                "replay.what_if.mean_step_ns", changed.mean_ns, pages.ns, label="what if"
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
            pages.fact("replay.mean_step_ns", replayed.mean_ns, pages.ns),
            ", ",
            pages.fact("replay.error", session.error, pages.signed_percent),
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
        grid=[[sums[pid].get(kind, 0.0) / _MS for kind in kinds] for pid in pids],
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
        "replay.step_end_ns",
        chart_note=f"The first {_MOST_RANKS} ranks." if len(pids) == _MOST_RANKS else "",
    )


def _path(session: Session) -> Section:
    """Return the section on the operations of the critical path and their times."""
    return Section(
        name="path",
        title="Which operations determine the step time?",
        lead=(
            "The critical path of ",
            pages.fact("replay.critical_path_ns", session.path.length_ns, pages.ns),
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
        row_bars(names, times, pages.ns, "ms saved per step", _MS, looks="TP"),
        "replay.bottlenecks.saved_ns",
        table=pages.shown(tables.bottlenecks(session)),
    )
    return Section(
        name="bottlenecks-section",
        title="Which operation would help the most?",
        lead=("The step was replayed without each operation of its critical path in turn.",),
        blocks=(drawn,),
    )
