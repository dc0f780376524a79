"""Page section on a critical path: a strip of the step, and time by class, name and rank."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from fastcomm.critical_path import CriticalPath
from fastcomm.report import html
from fastcomm.report.html import Figure, FigureView, Section
from fastcomm.report.html.charts import Lane, LaneChart
from fastcomm.report.tables import critical_path as tables
from fastcomm.report.tables.critical_path import label
from fastcomm.trace.parallelisms import TAGS
from fastcomm_kernels.arrays import Floats

_MS = 1e6
_PIXELS = 1000  # pieces of a lane closer than 1/1000 of the step are drawn as one
_LOOK_ORDER = ("compute", *TAGS, "memcpy", "gap", "host")
_MOST_RANKS = 24
_MOST_NAMES = 40
_MOST_ROWS = 64  # of the table of ranks
_TAGGED = "gpu_communication_bound"
_LOOKS = {
    "gpu_compute_bound": "compute",
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
        blocks=(_strip(path), *map(html.shown, parts)),
        pitfall="Work that is not on the path can become faster without any effect on the "
        "step. Work on the path can save at most its time on the path. "
        + " ".join(_sentences(path)),
    )


def _sentences(path: CriticalPath) -> list[str]:
    """Return the notes on the path as sentences."""
    return [f"{note[0].upper()}{note[1:]}." for note in path.about.notes]


def _lead(path: CriticalPath) -> html.Sentence:
    """Return the sentence on the length of the path and the class with the most time."""
    sums = path.summary_ns()
    most = max(sums, key=lambda name: sums[name], default="")
    total = sum(sums.values()) or 1
    scope = "through all ranks" if path.is_joined else f"of rank {path.about.rank}"
    lead: html.Sentence = (
        f"The critical path {scope} takes ",
        html.fact("path.length_ns", path.length_ns, html.ns),
        f'. Its largest part is "{label(most, path)}" with ',
        html.fact("path.share", sums.get(most, 0) / total, html.percent),
        ".",
    )
    if not path.is_joined:
        return lead
    crossings = html.fact("path.crossings", path.crossings, html.whole)
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
        f"{label(name, path)} {html.percent(share)}" for name, share in _shares(path)[:4]
    )
    return Figure(
        name="path-strip",
        title="The path from the first event of the step to the last",
        alt=f"Strip of the step by kind of work: {spoken}.",
        views=tuple(views),
        terms=("path.time_ns", "path.length_ns"),
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
            total = html.ns(float((stop - start)[mask].sum()))
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
    return {"gap": "gap", "host": "host", "memcpy": "copy", "compute": "compute"}.get(
        look, f"{look} communication"
    )
