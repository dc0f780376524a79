"""Write the page of `fastcomm isp`: ranking, speed against memory, rejected candidates."""

from collections.abc import Sequence

import numpy as np

from fastcomm.isp.internevo import ALGOS
from fastcomm.isp.internevo.result import HardwareChange, Record, SearchResult
from fastcomm.isp.internevo.search import SearchSweep
from fastcomm.isp.internevo.space import REASONS
from fastcomm.report import html
from fastcomm.report.html import (
    Block,
    Figure,
    FigureView,
    Page,
    PageCell,
    PageTable,
    Section,
    columns,
    number,
    text,
)
from fastcomm.report.html.charts import ChartLine, HeatChart, LineChart, linear, row_bars
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


def page(result: SearchResult | SearchSweep) -> Page:
    """Return the page of one search, or of a sweep of searches."""
    return _sweep(result) if isinstance(result, SearchSweep) else _search(result)


def _search(result: SearchResult) -> Page:
    """Return the page of one search, which may have no feasible strategy."""
    best = result.record(0) if result.feasible else None
    question = result.question
    why = "no strategy fits"
    sections = [_rejected(result)]
    if best is not None:
        sections = [_front(result), _ranking(result), *sections]
    if result.sensitivity:
        sections.append(_changes(result.sensitivity))
    tgs = None if best is None else best["tgs"]
    headline: html.Sentence = (
        (result.nearest(),)
        if best is None
        else (
            f"{best['algo_type'].upper()} trains {question.model.name} the fastest: ",
            html.fact("isp.tgs", tgs, html.whole),
            " tokens/s/GPU.",
        )
    )
    return Page(
        title="Parallel strategies",
        source=f"{question.model.name} on {result.cluster}, "
        f"{html.whole(question.seq_len)} tokens/sequence",
        headline=headline,
        facts=(
            html.fact("isp.tgs", tgs, html.whole, label="tokens/s/GPU", why=why),
            html.fact("isp.latency", _latency(best), html.ns, label="step", why=why),
            html.fact("isp.memory", _memory(best), format_gib, label="memory", why=why),
            html.fact("isp.candidates", result.candidates, html.whole, label="candidates"),
            html.fact("isp.feasible", result.feasible, html.whole, label="feasible"),
        ),
        sections=tuple(sections),
        warnings=result.notes,
    )


def _latency(record: Record | None) -> float | None:
    """Return the step time of a strategy in ns; None for None."""
    return None if record is None else record["total_latency"] * _NS


def _memory(record: Record | None) -> float | None:
    """Return the memory of a strategy in bytes per GPU; None for None."""
    return None if record is None else record["total_mm_cost"]


def _front(result: SearchResult) -> Section:
    """Return the section on speed against memory, with the Pareto front."""
    front = result.pareto()
    smallest = front[-1]
    return Section(
        name="front",
        title="How does speed depend on memory?",
        lead=(
            "The fastest strategy needs ",
            html.fact("isp.memory", front[0]["total_mm_cost"], format_gib),
            "; with ",
            html.fact("isp.memory", smallest["total_mm_cost"], format_gib),
            " the fastest reaches ",
            html.fact("isp.tgs", smallest["tgs"], html.whole),
            " tokens/s/GPU.",
        ),
        blocks=(
            Figure(
                name="front-chart",
                title="Speed and memory of the feasible strategies",
                alt=f"Scatter plot of strategies; a line connects the {len(front)} of the "
                "Pareto front.",
                views=(FigureView(label="All", chart=_scatter(result, front)),),
                terms=("isp.tgs", "isp.memory"),
                note=_sampled(result.feasible),
                table=_strategies("front-table", "Pareto front", front),
            ),
        ),
        pitfall="Times are predicted by formulas and a model of the cluster, not measured.",
    )


def _sampled(count: int) -> str:
    """Return the note on strategies that are not drawn, of `count`; empty where all are."""
    if count <= _POINTS:
        return ""
    return f"{html.whole(_POINTS)} of {html.whole(count)}, evenly spaced in the ranking."


def _scatter(result: SearchResult, front: Sequence[Record]) -> LineChart:
    """Return the chart of memory (GiB, across) and tokens/s/GPU (up) of strategies.

    A sample of the feasible ones are points, the Pareto front is a line.
    """
    picked = np.linspace(0, result.feasible - 1, min(result.feasible, _POINTS)).astype(np.int64)
    algo, tgs, memory = (
        np.asarray(result.columns[name])[picked] for name in ("algo", "tgs", "total_mm_cost")
    )
    clouds = [
        ChartLine(
            name=name.upper(),
            points=list(
                zip((memory[algo == at] / GIB).tolist(), tgs[algo == at].tolist(), strict=True)
            ),
            has_line=False,
        )
        for at, name in enumerate(ALGOS)
        if (algo == at).any()
    ]
    line = ChartLine(
        name="front",
        points=[(record["total_mm_cost"] / GIB, record["tgs"]) for record in front],
        tips=[
            f"{record['algo_type'].upper()}: {html.whole(record['tgs'])} tokens/s/GPU, "
            f"{format_gib(record['total_mm_cost'])}"
            for record in front
        ],
        look="open",
    )
    x, y = zip(*(point for cloud in (*clouds, line) for point in cloud.points), strict=True)
    return LineChart(
        lines=(*clouds, line),
        x=linear("memory, GiB", x, from_zero=False),
        y=linear("tokens/s/GPU", y),
        height=380,
    )


def _ranking(result: SearchResult) -> Section:
    """Return the section on the best strategy of each algorithm, and the fastest of all."""
    best = result.best_by_algo()
    drawn = row_bars(
        [name.upper() for name in best],
        [record["tgs"] for record in best.values()],
        [html.whole(record["tgs"]) for record in best.values()],
        "tokens/s/GPU",
    )
    shown = min(result.feasible, _RANKED)
    return Section(
        name="ranking",
        title="Which strategies are the fastest?",
        lead=(f"The fastest {shown} of {html.whole(result.feasible)} feasible strategies.",),
        blocks=(
            Figure(
                name="algos-chart",
                title="The best of each algorithm",
                alt="Bars of the best strategy of each algorithm.",
                views=(FigureView(label="All", chart=drawn),),
                terms=("isp.tgs",),
            ),
            _strategies("ranking-table", "The fastest", result.best(_RANKED)),
        ),
    )


def _strategies(name: str, caption: str, records: Sequence[Record]) -> PageTable:
    """Return a table of strategies in the order of `records`, numbered from 1.

    `name` is the table's id on the page. Sizes that no record has are left out.
    """
    numbers = [size for size in _NUMBERS if any(size[2] in record for record in records)]
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
    heads = [("tokens/s/GPU", "isp.tgs"), ("step", "isp.latency"), ("memory", "isp.memory")]
    heads += [(label, key) for label, key, _ in numbers]
    return PageTable(
        name=name, caption=caption, columns=columns("strategy", *heads), rows=tuple(rows)
    )


def _rejected(result: SearchResult) -> Section:
    """Return the section on the number of candidates that each rule rejected."""
    rejected = {reason: count for reason, count in result.rejected.items() if count}
    rows = tuple(
        (text(REASONS.get(reason, reason)), number(count, html.whole))
        for reason, count in rejected.items()
    )
    blocks: tuple[Block, ...] = ()
    if rows:
        heads = columns("reason", ("strategies", "isp.rejected"))
        blocks = (PageTable(name="rejected", caption="By reason", columns=heads, rows=rows),)
    return Section(
        name="rejected-section",
        title="Why were candidates rejected?",
        lead=(
            html.fact("isp.rejected", sum(rejected.values()), html.whole),
            " of ",
            html.fact("isp.candidates", result.candidates, html.whole),
            " candidates were rejected.",
        ),
        blocks=blocks,
    )


def _changes(changes: Sequence[HardwareChange]) -> Section:
    """Return the section on the best strategy after each change of the hardware."""
    rows = tuple(
        (
            text(change.name),
            number(change.best["tgs"] if change.best else None, html.whole, "no strategy fits"),
            number(change.gain, html.signed_percent, "no strategy fits"),
        )
        for change in changes
    )
    heads = columns("change", ("tokens/s/GPU", "isp.changed"), ("gain", "isp.changed"))
    table = PageTable(
        name="changes", caption="The best strategy after each change", columns=heads, rows=rows
    )
    lead = ("The search was repeated on clusters that differ in one thing.",)
    return Section(
        name="sensitivity",
        title="Which hardware change would help?",
        lead=lead,
        blocks=(table,),
    )


def _sweep(sweep: SearchSweep) -> Page:
    """Return the page of a sweep: the best strategy of every world size and length."""
    answered = sum(cell.best is not None for cell in sweep.cells)
    section = Section(
        name="sweep",
        title="How does it scale?",
        lead=("Each cell is the best strategy of one search.",),
        blocks=(_grid(sweep), _cells(sweep)),
    )
    return Page(
        title="Parallel strategies",
        source="a sweep",
        headline=(f"{answered} of {len(sweep.cells)} searches have a feasible strategy.",),
        facts=(),
        sections=(section,),
    )


def _grid(sweep: SearchSweep) -> Figure:
    """Return the heat map of tokens/s/GPU by sequence length (down) and GPUs (across)."""
    worlds = sorted({cell.world_size for cell in sweep.cells})
    lengths = sorted({cell.seq_len for cell in sweep.cells})
    rate = {(c.seq_len, c.world_size): c.best["tgs"] if c.best else None for c in sweep.cells}
    names = [html.whole(length) for length in lengths]
    grid = [[rate.get((length, world)) for world in worlds] for length in lengths]
    shown = HeatChart(
        grid=grid,
        rows=names,
        columns=[html.whole(world) for world in worlds],
        unit="tokens/s/GPU",
        tip="{column} GPUs, {row} tokens: {value}",
        x="GPUs",
        y="tokens/sequence",
    )
    return Figure(
        name="sweep-chart",
        title="Tokens/s/GPU of the best strategy",
        alt=f"Heat map of {len(lengths)} sequence lengths and {len(worlds)} world sizes.",
        views=(FigureView(label="All", chart=shown),),
        terms=("isp.tgs",),
    )


def _cells(sweep: SearchSweep) -> PageTable:
    """Return the table of the best strategy of each sequence length and number of GPUs."""
    rows = tuple(
        (
            PageCell(text=f"{html.whole(c.seq_len)} tokens", sort=c.seq_len),
            number(c.world_size, html.whole),
            number(c.best["tgs"] if c.best else None, html.whole, c.why),
            number(c.scaling, html.percent, c.why),
            number(c.feasible, html.whole),
        )
        for c in sweep.cells
    )
    heads = columns(
        "sequence",
        ("GPUs", "isp.gpus"),
        ("tokens/s/GPU", "isp.tgs"),
        ("scaling", "isp.scaling"),
        ("feasible", "isp.feasible"),
    )
    return PageTable(name="cells", caption="All searches", columns=heads, rows=rows)
