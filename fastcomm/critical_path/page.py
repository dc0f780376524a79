"""The pages of `fastcomm critical-path` and `fastcomm what-if`, and a path as a section."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from fastcomm.critical_path import tables
from fastcomm.critical_path.candidates import Candidate
from fastcomm.critical_path.result import CriticalPath, WhatIf
from fastcomm.critical_path.tables import label
from fastcomm.errors import shell_joined, shell_quoted
from fastcomm.graph.edits import EditSweep
from fastcomm.show import pages
from fastcomm.show.charts import ChartLine, Lane, LaneChart, Level, LineChart, linear
from fastcomm.show.pages import Figure, FigureView, Page, PageFinding, Section, figure
from fastcomm.trace.parallelisms import TAGS
from fastcomm_kernels.arrays import Floats

_MS = 1e6
_PIXELS = 1000  # pieces of a lane closer than 1/1000 of the step are drawn as one
_LOOK_ORDER = ("compute", "graph", *TAGS, "memcpy", "gap", "host")
_MOST_RANKS = 24
_MOST_NAMES = 40
_MOST_ROWS = 64  # of the table of ranks
_TAGGED = "gpu_communication_bound"
_LOOKS = {
    "gpu_compute_bound": "compute",
    "gpu_graph_bound": "graph",
    _TAGGED: "OTHER",
    "gpu_memory_bound": "memcpy",
    "gpu_kernel_kernel_overhead": "gap",
    "gpu_kernel_launch_overhead": "host",
    "cpu_bound": "host",
    "data_loading": "host",
    "host_gap": "gap",
    "sync_wait": "gap",
    "": "gap",
    "unexplained": "gap",
}
_LEAST_SHARE = 0.0005  # of the path; smaller classes have no lane
_MOST = 3
_GAPS = "gpu_kernel_kernel_overhead"


def section(path: CriticalPath) -> Section:
    """Return the section on the critical path of a step."""
    parts = [tables.classes(path, by_tag=True), tables.names(path, _MOST_NAMES)]
    if path.across.collectives.num_rows:
        order = [("wait_caused_ns", "descending"), ("rank", "ascending")]
        parts.append(tables.ranks(path.by_rank().sort_by(order).slice(0, _MOST_ROWS)))
    return Section(
        name="path",
        title="What determines the time of a step?",
        lead=_lead(path),
        blocks=(_strip(path), *map(pages.shown, parts)),
        pitfall="Work that is not on the path can become faster without any effect on the "
        "step. Work on the path can save at most its time on the path. "
        + " ".join(_sentences(path)),
    )


def _sentences(path: CriticalPath) -> list[str]:
    """Return the notes on the path as sentences."""
    return [f"{note[0].upper()}{note[1:]}." for note in path.about.notes]


def _lead(path: CriticalPath) -> pages.Sentence:
    """Return the sentence on the length of the path and the class with the most time."""
    sums = path.summary_ns()
    most = max(sums, key=lambda name: sums[name], default="")
    total = sum(sums.values()) or 1
    scope = "through all ranks" if path.is_joined else f"of rank {path.about.rank}"
    lead: pages.Sentence = (
        f"The critical path {scope} takes ",
        pages.fact("critical-path.path.length_ns", path.length_ns, pages.ns),
        f'. Its largest part is "{label(most, path)}" with ',
        pages.fact("critical-path.summary", sums.get(most, 0) / total, pages.percent),
        ".",
    )
    if not path.is_joined:
        return lead
    crossings = pages.fact("critical-path.crossings", path.crossings, pages.count)
    return (*lead, " It goes from rank to rank ", crossings, " times.")


def _strip(path: CriticalPath) -> Figure:
    """Return the strip of the path over the step, with lanes by kind of work or by rank."""
    table = path.breakdown
    classes = [name for name, share in _shares(path) if share >= _LEAST_SHARE]
    own = np.array(table["bound_by"].to_pylist(), object)
    lanes = [(label(name, path), own == name) for name in classes]
    views = [FigureView(label="Kind of work", chart=_lanes(table, lanes))]
    if path.is_joined:
        ranks = table["rank"].to_numpy()
        on_path = path.by_rank().sort_by([("on_path_ns", "descending")])["rank"].to_pylist()
        chosen = sorted(on_path[:_MOST_RANKS])
        note = "" if len(on_path) <= _MOST_RANKS else f"The {_MOST_RANKS} ranks longest on it."
        by_rank = [(f"rank {rank}", ranks == rank) for rank in chosen]
        views.append(FigureView(label="Rank", chart=_lanes(table, by_rank), note=note))
    spoken = ", ".join(
        f"{label(name, path)} {pages.percent(share)}" for name, share in _shares(path)[:4]
    )
    return Figure(
        name="path-strip",
        title="The path from the first event of the step to the last",
        alt=f"Strip of the step by kind of work: {spoken}.",
        views=tuple(views),
        terms=("critical-path.summary_ns", "critical-path.path.length_ns"),
        choice="Lanes by",
        note="Communication has the color of its parallelism. Pieces closer than "
        f"1/{_PIXELS} of the step are drawn as one.",
    )


def _shares(path: CriticalPath) -> list[tuple[str, float]]:
    """Return the classes of time on the path and their shares (0 to 1), largest first."""
    sums = path.summary_ns()
    total = sum(sums.values()) or 1
    falling = sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))
    return [(name, ns / total) for name, ns in falling if ns > 0]


def _lanes(table: pa.Table, lanes: Sequence[tuple[str, np.ndarray]]) -> LaneChart:
    """Return the chart of lanes; each lane is a label and a mask of the rows of `table`."""
    start, stop = (
        table[name].to_numpy().astype(np.float64) for name in ("start_ns", "stop_ns")
    )
    begin = float(start.min()) if len(start) else 0.0
    length = float(stop.max()) - begin if len(stop) else 0.0
    looks = _look_of(table)
    drawn = []
    for look in _LOOK_ORDER:
        for row, (lane, own) in enumerate(lanes):
            if not (mask := own & (looks == look)).any():
                continue
            pieces = _merged(start, stop, mask, length / _PIXELS)
            total = pages.ns(float((stop - start)[mask].sum()))
            drawn.append(
                Lane(
                    row=row,
                    name=_look_label(look),
                    look=look,
                    pieces=[((a - begin) / _MS, (b - begin) / _MS) for a, b in pieces],
                    tip=f"{lane}, {_look_label(look)}: {total}",
                )
            )
    return LaneChart(
        rows=[lane for lane, _ in lanes],
        title="ms from the start of the step",
        lanes=drawn,
        most=length / _MS,
    )


def _look_of(table: pa.Table) -> np.ndarray:
    """Return the name of the color of each row: its tag if it communicates, else its kind."""
    tags = table["tag"].to_pylist()
    kinds = table["bound_by"].to_pylist()
    return np.array(
        [
            (tag or "OTHER") if kind == _TAGGED else _LOOKS.get(kind, "gap")
            for kind, tag in zip(kinds, tags, strict=True)
        ],
        object,
    )


def _merged(
    start: Floats, stop: Floats, own: np.ndarray, least: float
) -> list[tuple[float, float]]:
    """Return start and stop (ns) of the pieces of one lane.

    `own` is the mask of its rows; pieces closer than `least` ns are merged.
    """
    pieces: list[list[float]] = []
    for a, b in sorted(zip(start[own].tolist(), stop[own].tolist(), strict=True)):
        if b <= a:
            continue
        if pieces and a - pieces[-1][1] < least:
            pieces[-1][1] = max(pieces[-1][1], b)
        else:
            pieces.append([a, b])
    return [(a, b) for a, b in pieces]


def _look_label(look: str) -> str:
    """Return the text of a look in the legend: "TP communication", "copy"."""
    own = {"memcpy": "copy", "graph": "whole CUDA graph"}
    plain = ("gap", "host", "compute")
    return look if look in plain else own.get(look, f"{look} communication")


def page(path: CriticalPath, paths: Sequence[str], options: Sequence[str] = ()) -> Page:
    """Return the page of a critical path.

    Parameters
    ----------
    path
        The path.
    paths, options
        Command line arguments that name the run and the window; suggested commands repeat them.

    """
    sums = path.summary_ns()
    most = max(sums, key=lambda name: sums[name], default="")
    total = sum(sums.values()) or 1
    share = pages.fact("critical-path.summary", sums.get(most, 0) / total, pages.percent)
    covered = path.length_ns / path.wall_ns if path.wall_ns else 1.0
    facts = [
        pages.fact(
            "critical-path.path.length_ns", path.length_ns, pages.ns, label="critical path"
        ),
        pages.fact("critical-path.path.coverage", covered, pages.percent, label="covered"),
        pages.fact("pages.path_edges", len(path.valid_path.edges), pages.count, label="edges"),
    ]
    if path.is_joined:
        crossings = pages.fact(
            "critical-path.crossings", path.crossings, pages.count, label="crossings"
        )
        facts.append(crossings)
    return Page(
        title="Critical path",
        source=" ".join(paths),
        headline=(share, f" of the critical path is {label(most, path)}."),
        facts=tuple(facts),
        findings=_findings(path, shell_joined([*paths, *options])),
        sections=(section(path),),
    )


def _findings(path: CriticalPath, run: str) -> tuple[PageFinding, ...]:
    """Return the three largest parts of the path that a what-if can shorten, longest first.

    The parts are the communication of each parallelism, and the gaps between kernels.
    `run` has the command line arguments that name the run.
    """
    arguments = run if path.is_joined else f"{run} --rank {path.about.rank}"
    what_if = f"fastcomm what-if {arguments}"
    total = sum(path.summary_ns().values()) or 1
    parts = [
        (
            f"{tag} communication on the path takes ",
            ns,
            f"{what_if} --scale comm:{shell_quoted(tag)}=0.5",
            "how much shorter the step is if it takes half its time",
        )
        for tag, ns in path.by_tag_ns().items()
    ]
    if gaps := path.summary_ns().get(_GAPS, 0):
        title = f"Gaps between {'collectives' if path.about.is_host_run else 'kernels'} take "
        parts.append((title, gaps, f"{what_if} --remove gaps", "the step without them"))
    return tuple(
        PageFinding(
            title=(title, pages.fact("critical-path.summary_ns", ns, pages.ns)),
            evidence=(
                pages.fact(
                    "critical-path.summary", ns / total, pages.percent, label="of the path"
                ),
            ),
            command=command,
            then=then,
            cost_ns=ns,
        )
        for title, ns, command, then in sorted(parts, key=lambda part: -part[1])[:_MOST]
    )


def what_if(result: WhatIf, paths: Sequence[str]) -> Page:
    """Return the page of a what-if analysis: the step before and after edits, and sweeps."""
    change = pages.fact("what-if.speedup", result.speedup, pages.times, label="as fast")
    edits = ", ".join(map(str, result.edits))
    sections = [_before_after(result, edits)] if edits else []
    if result.sweeps:
        sections.append(_sweeps(result, result.sweeps))
    if result.candidates:
        sections.append(_candidates(result, result.candidates))
    if result.bottlenecks:
        sections.append(_bottlenecks(result, result.bottlenecks))
    sections.append(section(result.after))
    return Page(
        title="What if",
        source=" ".join(paths),
        headline=_headline(result, edits),
        facts=(
            *([change] if edits else []),
            pages.fact(
                "what-if.interval.replay_error_ns",
                result.replay_error_ns,
                pages.ns,
                label="replay error",
            ),
        ),
        sections=tuple(sections),
        warnings=result.before.about.notes,
    )


def _headline(result: WhatIf, edits: str) -> pages.Sentence:
    """Return the step time before and after `edits`, a text that is empty without edits."""
    before = pages.fact("what-if.before_ns", result.before_ns, pages.ns)
    if not edits:
        return ("The step takes ", before, " without edits.")
    after = pages.fact("what-if.after_ns", result.after_ns, pages.ns)
    return ("With ", edits, ", the step takes ", after, " instead of ", before, ".")


def _before_after(result: WhatIf, edits: str) -> Section:
    """Return the section on time on the path by class, before and after `edits` (a text)."""
    return Section(
        name="answer",
        title="What changes?",
        lead=(f"The step was replayed with: {edits}.", str(result.interval)),
        blocks=(
            pages.shown(tables.changes(result)),
            pages.shown(tables.step_by_rank(result).top(_MOST_ROWS)),
        ),
        pitfall="Each event starts as soon as its dependencies in the trace allow; in reality "
        "other dependencies may delay it. The path after the edits may be another one.",
    )


def _candidates(result: WhatIf, candidates: Sequence[Candidate]) -> Section:
    """Return the section of the edits that shorten the step most, each tried alone."""
    return Section(
        name="candidates",
        title="What would shorten the step?",
        lead=("Each edit was tried alone; what several save does not add up.",),
        blocks=(pages.shown(tables.candidates_table(candidates, result.before_ns)),),
    )


def _bottlenecks(result: WhatIf, removed: Sequence[Candidate]) -> Section:
    """Return the section on the time saved without each operation of the path."""
    return Section(
        name="bottlenecks-section",
        title="Which operation would help the most?",
        lead=("The step was replayed without each operation of its critical path in turn.",),
        blocks=(pages.shown(tables.bottlenecks(removed, result.before_ns)),),
    )


def _sweeps(result: WhatIf, sweeps: Sequence[EditSweep]) -> Section:
    """Return the section of the sweeps, with a chart of the step time for each."""
    return Section(
        name="sweeps",
        title="How does the step depend on it?",
        lead=("Each point is the step replayed with one value.",),
        blocks=tuple(
            _sweep(place, sweep, result.before_ns) for place, sweep in enumerate(sweeps)
        ),
    )


def _sweep(place: int, sweep: EditSweep, before_ns: int) -> Figure:
    """Return the chart and table of the step time over the values of one sweep.

    `place` numbers the charts of the page from 0; `before_ns` is the step time without edits.
    """
    table = tables.sweep_table(f"sweep-{place}-table", sweep, before_ns)
    spans = list(zip(sweep.labels, sweep.span_ns, strict=True))
    ends = " to ".join(f"{pages.ns(ns)} at {value}" for value, ns in (spans[0], spans[-1]))
    return figure(
        f"sweep-{place}",
        table.caption,
        f"Line from {ends}.",
        _line(sweep, before_ns),
        "what-if.sweeps.span_ns",
        table=pages.shown(table),
    )


def _line(sweep: EditSweep, before_ns: int) -> LineChart:
    """Return the step time by the value of an edit, with a dashed line at `before_ns`."""
    times = [span / _MS for span in sweep.span_ns]
    spans = zip(sweep.labels, sweep.span_ns, strict=True)
    line = ChartLine(
        name=sweep.name,
        points=list(zip(sweep.values, times, strict=True)),
        tips=[f"{value}: {pages.ns(ns)}" for value, ns in spans],
    )
    return LineChart(
        lines=(line,),
        x=linear(f"value of {sweep.name}", sweep.values, from_zero=False),
        y=linear("step, ms", [*times, before_ns / _MS], from_zero=False),
        level=Level(value=before_ns / _MS, label="today"),
    )
