"""The page of `fastcomm isp`: the ranking, the front of time and memory, the rejected."""

from collections.abc import Sequence

import numpy as np

from fastcomm.isp import ALGOS
from fastcomm.isp.result import HardwareChange, Record, SearchResult
from fastcomm.isp.search import SearchSweep
from fastcomm.report import html
from fastcomm.report.html import (
    Block,
    Figure,
    FigureView,
    Page,
    PageCell,
    PageTable,
    Section,
    Spec,
    columns,
    number,
    text,
)
from fastcomm.report.html.drawing import (
    INK,
    QUIET_LEGEND,
    SYMBOLS,
    axis,
    bars,
    heat,
    height_of,
    rounded,
    series_color,
    spec,
)
from fastcomm.units import GIB, format_gib

_NS = 1e9
_POINTS = 1200
_RANKED = 100
_NUMBERS = (
    ("GPUs", "isp.gpus", "world_size"),
    ("pipeline", "isp.pp", "pp"),
    ("sequence", "isp.sp", "sp"),
    ("weights", "isp.wp", "p_para"),
    ("gradients", "isp.gp", "p_grads"),
    ("optimizer", "isp.zp", "p_os"),
    ("micro-batches", "isp.micro", "micro_num"),
)


def page(found: SearchResult | SearchSweep) -> Page:
    """Return the page of one search, or of a sweep of searches."""
    return _sweep(found) if isinstance(found, SearchSweep) else _search(found)


def _search(found: SearchResult) -> Page:
    """The answer to a question; there may be no strategy that fits."""
    best = found.record(0) if found.feasible else None
    question = found.question
    why = "nothing fits"
    sections = [_rejected(found)]
    if best is not None:
        sections = [_front(found), _ranking(found), *sections]
    if found.sensitivity:
        sections.append(_changes(found.sensitivity))
    tgs = None if best is None else best["tgs"]
    headline: html.Words = (
        (found.nearest(),)
        if best is None
        else (
            f"{best['algo_type'].upper()} trains {question.model.name} the fastest: ",
            html.fact("isp.tgs", tgs, html.whole),
            " tokens a GPU and second.",
        )
    )
    return Page(
        title="Parallel strategies",
        source=f"{question.model.name} on {found.cluster}, "
        f"{html.whole(question.seq_len)} tokens a sequence",
        headline=headline,
        facts=(
            html.fact("isp.tgs", tgs, html.whole, label="tokens/GPU/s", why=why),
            html.fact("isp.latency", _latency(best), html.ns, label="a step", why=why),
            html.fact("isp.memory", _memory(best), format_gib, label="memory", why=why),
            html.fact("isp.candidates", found.candidates, html.whole, label="candidates"),
            html.fact("isp.feasible", found.feasible, html.whole, label="feasible"),
        ),
        sections=tuple(sections),
        warnings=found.notes,
    )


def _latency(record: Record | None) -> float | None:
    return None if record is None else record["total_latency"] * _NS


def _memory(record: Record | None) -> float | None:
    return None if record is None else record["total_mm_cost"]


def _front(found: SearchResult) -> Section:
    front = found.pareto()
    least = front[-1]
    return Section(
        name="front",
        title="What does memory buy?",
        lead=(
            "The fastest strategy needs ",
            html.fact("isp.memory", front[0]["total_mm_cost"], format_gib),
            "; with ",
            html.fact("isp.memory", least["total_mm_cost"], format_gib),
            " the most is ",
            html.fact("isp.tgs", least["tgs"], html.whole),
            " tokens a GPU and second.",
        ),
        blocks=(
            Figure(
                name="front-chart",
                title="Speed and memory of the feasible strategies",
                alt=f"Scatter of strategies; the front of {len(front)} that no other beats in "
                "both is a line.",
                views=(FigureView(label="All", spec=_scatter(found, front)),),
                terms=("isp.tgs", "isp.memory"),
                note=_sampled(found.feasible),
                table=_strategies("front-table", "The front", front),
            ),
        ),
        pitfall="Closed formulas on a model of the cluster: nothing was run.",
    )


def _sampled(count: int) -> str:
    if count <= _POINTS:
        return ""
    return f"{html.whole(_POINTS)} of {html.whole(count)}, evenly over the ranking."


def _scatter(found: SearchResult, front: Sequence[Record]) -> Spec:
    picked = np.linspace(0, found.feasible - 1, min(found.feasible, _POINTS)).astype(np.int64)
    algo, tgs, memory = (
        np.asarray(found.columns[name])[picked] for name in ("algo", "tgs", "total_mm_cost")
    )
    clouds: list[Spec] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name.upper(),
            "x": [rounded(each / GIB) for each in memory[algo == place].tolist()],
            "y": [rounded(each) for each in tgs[algo == place].tolist()],
            "marker": {
                "symbol": f"{SYMBOLS[place]}-open",
                "size": 7,
                "color": series_color(place),
                "opacity": 0.75,
            },
            "hovertemplate": f"{name.upper()}: %{{y:.0f}} tokens/GPU/s, %{{x:.1f}} GiB"
            "<extra></extra>",
        }
        for place, name in enumerate(ALGOS)
        if (algo == place).any()
    ]
    line: Spec = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "front",
        "x": [rounded(each["total_mm_cost"] / GIB) for each in front],
        "y": [rounded(each["tgs"]) for each in front],
        "line": {"color": INK, "width": 1.5, "shape": "vh"},
        "marker": {"size": 4, "color": INK},
        "hoverinfo": "skip",
    }
    return spec(
        [*clouds, line],
        400,
        showlegend=True,
        legend=QUIET_LEGEND,
        xaxis=axis("memory, GiB"),
        yaxis=axis("tokens a GPU and second", rangemode="tozero"),
    )


def _ranking(found: SearchResult) -> Section:
    best = found.best_by_algo()
    drawn = bars(
        [name.upper() for name in best],
        [record["tgs"] for record in best.values()],
        [html.whole(record["tgs"]) for record in best.values()],
        "tokens a GPU and second",
    )
    shown = min(found.feasible, _RANKED)
    return Section(
        name="ranking",
        title="Which strategies are the fastest?",
        lead=(f"The first {shown} of {html.whole(found.feasible)} that fit.",),
        blocks=(
            Figure(
                name="algos-chart",
                title="The best of each algorithm",
                alt="Bars of the best strategy of each algorithm.",
                views=(FigureView(label="All", spec=drawn),),
                terms=("isp.tgs",),
            ),
            _strategies("ranking-table", "The fastest", found.best(_RANKED)),
        ),
    )


def _strategies(name: str, caption: str, records: Sequence[Record]) -> PageTable:
    """The strategies by place; a size that no record has is left out."""
    numbers = [each for each in _NUMBERS if any(each[2] in record for record in records)]
    rows = []
    for place, record in enumerate(records):
        cells: list[PageCell] = [
            PageCell(text=f"{place + 1}. {record['algo_type'].upper()}", sort=place),
            number(record["tgs"], html.whole),
            number(_latency(record), html.ns),
            number(_memory(record), format_gib),
        ]
        cells += [number(record.get(key), html.whole) for _, _, key in numbers]
        rows.append(tuple(cells))
    heads = [("TGS", "isp.tgs"), ("step", "isp.latency"), ("memory", "isp.memory")]
    heads += [(label, key) for label, key, _ in numbers]
    return PageTable(
        name=name, caption=caption, columns=columns("strategy", *heads), rows=tuple(rows)
    )


def _rejected(found: SearchResult) -> Section:
    fell = {reason: count for reason, count in found.rejected.items() if count}
    rows = tuple((text(reason), number(count, html.whole)) for reason, count in fell.items())
    blocks: tuple[Block, ...] = ()
    if rows:
        heads = columns("reason", ("strategies", "isp.rejected"))
        blocks = (PageTable(name="rejected", caption="By reason", columns=heads, rows=rows),)
    return Section(
        name="rejected-section",
        title="Why did others fall out?",
        lead=(
            html.fact("isp.rejected", sum(fell.values()), html.whole),
            " of ",
            html.fact("isp.candidates", found.candidates, html.whole),
            " candidates were rejected.",
        ),
        blocks=blocks,
    )


def _changes(changes: Sequence[HardwareChange]) -> Section:
    rows = tuple(
        (
            text(each.what),
            number(each.best["tgs"] if each.best else None, html.whole, "nothing fits"),
            number(each.gain, html.signed_percent, "nothing fits"),
        )
        for each in changes
    )
    heads = columns("if", ("TGS", "isp.changed"), ("gain", "isp.changed"))
    table = PageTable(name="changes", caption="The best, were it so", columns=heads, rows=rows)
    lead = ("The search was asked again for clusters that differ in one thing.",)
    return Section(name="sensitivity", title="What would help?", lead=lead, blocks=(table,))


def _sweep(found: SearchSweep) -> Page:
    """The best of every world size and sequence length."""
    answered = sum(cell.best is not None for cell in found.cells)
    section = Section(
        name="sweep",
        title="How does it scale?",
        lead=("A cell is the best strategy of one search.",),
        blocks=(_grid(found), _cells(found)),
    )
    return Page(
        title="Parallel strategies",
        source="a sweep",
        headline=(f"{answered} of {len(found.cells)} questions have a strategy that fits.",),
        facts=(),
        sections=(section,),
    )


def _grid(found: SearchSweep) -> Figure:
    worlds = sorted({cell.world_size for cell in found.cells})
    lengths = sorted({cell.seq_len for cell in found.cells})
    rate = {(c.seq_len, c.world_size): c.best["tgs"] if c.best else None for c in found.cells}
    names = [html.whole(length) for length in lengths]
    grid = [[rate.get((length, world)) for world in worlds] for length in lengths]
    drawn = heat(grid, names, "%{x} GPUs, %{y} tokens: %{z}", "TGS")
    drawn["x"] = [html.whole(world) for world in worlds]
    category = {"type": "category", "showgrid": False}
    shown = spec(
        [drawn],
        height_of(len(lengths), 220, 40),
        xaxis=axis("GPUs", **category),
        yaxis=axis("tokens a sequence", **category),
    )
    return Figure(
        name="sweep-chart",
        title="Tokens a GPU and second of the best strategy",
        alt=f"Heat map of {len(lengths)} sequence lengths and {len(worlds)} world sizes.",
        views=(FigureView(label="All", spec=shown),),
        terms=("isp.tgs",),
    )


def _cells(found: SearchSweep) -> PageTable:
    rows = tuple(
        (
            PageCell(text=f"{html.whole(c.seq_len)} tokens", sort=c.seq_len),
            number(c.world_size, html.whole),
            number(c.best["tgs"] if c.best else None, html.whole, c.why),
            number(c.scaling, html.percent, c.why),
            number(c.feasible, html.whole),
        )
        for c in found.cells
    )
    heads = columns(
        "sequence",
        ("GPUs", "isp.gpus"),
        ("TGS", "isp.tgs"),
        ("scaling", "isp.scaling"),
        ("feasible", "isp.feasible"),
    )
    return PageTable(name="cells", caption="All searches", columns=heads, rows=rows)
