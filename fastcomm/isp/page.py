"""Write the page of `fastcomm isp`: ranking, speed against memory, rejected candidates."""

from collections.abc import Sequence

import numpy as np

from fastcomm.isp.problem import ALGOS
from fastcomm.isp.result import HardwareChange, Record, SearchResult
from fastcomm.isp.search import SearchSweep
from fastcomm.isp.space import REASONS
from fastcomm.show import pages
from fastcomm.show.charts import ChartLine, HeatChart, LineChart, linear, row_bars
from fastcomm.show.pages import Figure, Page, PageCell, PageTable, Section, figure, table
from fastcomm.units import GIB, format_gib

_NS = 1e9
_POINTS = 1200
_RANKED = 100
_SPEED, _MEMORY = "isp.best.tokens_per_s_per_gpu", "isp.best.total_mm_cost_bytes"
_NUMBERS = (
    ("GPUs", "world_size"),
    ("pipeline", "pp"),
    ("sequence", "sp"),
    ("weights", "p_para"),
    ("gradients", "p_grads"),
    ("optimizer", "p_os"),
    ("micro-batches", "micro_num"),
)


def page(result: SearchResult | SearchSweep) -> Page:
    """Return the page of one search, or of a sweep of searches."""
    return _sweep(result) if isinstance(result, SearchSweep) else _search(result)


def _search(result: SearchResult) -> Page:
    """Return the page of one search, which may have no feasible strategy."""
    best = result.record(0) if result.feasible else None
    problem = result.problem
    why = "no strategy fits"
    sections = [_rejected(result)]
    tgs = latency = memory = None
    headline: pages.Sentence = (result.nearest(),)
    if best is not None:
        sections = [_front(result), _ranking(result), *sections]
        tgs, memory, latency = best["tgs"], best["total_mm_cost"], best["total_latency"] * _NS
        headline = (
            f"{best['algo_type'].upper()} trains {problem.model.name} the fastest: ",
            pages.fact(_SPEED, tgs, pages.count),
            " tokens/s/GPU.",
        )
    if result.sensitivity:
        sections.append(_changes(result.sensitivity))
    return Page(
        title="Parallel strategies",
        source=f"{problem.model.name} on {result.cluster}, "
        f"{pages.count(problem.seq_len)} tokens/sequence",
        headline=headline,
        facts=(
            pages.fact(_SPEED, tgs, pages.count, label="tokens/s/GPU", why=why),
            pages.fact("isp.best.total_latency_ns", latency, pages.ns, label="step", why=why),
            pages.fact(_MEMORY, memory, format_gib, label="memory", why=why),
            pages.fact("isp.candidates", result.candidates, pages.count, label="candidates"),
            pages.fact("isp.feasible", result.feasible, pages.count, label="feasible"),
        ),
        sections=tuple(sections),
        warnings=result.notes,
    )


def _front(result: SearchResult) -> Section:
    """Return the section on speed against memory, with the Pareto front."""
    front = result.pareto()
    smallest, count = front[-1], result.feasible
    sampled = f"{pages.count(_POINTS)} of {pages.count(count)}, evenly spaced in the ranking."
    drawn = figure(
        "front-chart",
        "Speed and memory of the feasible strategies",
        f"Scatter plot of strategies; a line connects the {len(front)} of the Pareto front.",
        _scatter(result, front),
        _SPEED,
        _MEMORY,
        note=sampled if count > _POINTS else "",
        table=_strategies("front-table", "Pareto front", front),
    )
    return Section(
        name="front",
        title="How does speed depend on memory?",
        lead=front_lead(front[0]["total_mm_cost"], smallest["total_mm_cost"], smallest["tgs"]),
        blocks=(drawn,),
        pitfall="Times are predicted by formulas and a model of the cluster, not measured.",
    )


def front_lead(
    most: float, least: float, tgs: float, keys: tuple[str, str] = (_MEMORY, _SPEED)
) -> pages.Sentence:
    """Return the sentence on the ends of the front.

    `most` and `least` are bytes that the fastest strategy and the smallest one need, `tgs` is
    the speed of the smallest in tokens/s/GPU; `keys` are those of memory and speed.
    """
    memory, speed = keys
    return (
        "The fastest strategy needs ",
        pages.fact(memory, most, format_gib),
        "; with ",
        pages.fact(memory, least, format_gib),
        " the fastest reaches ",
        pages.fact(speed, tgs, pages.count),
        " tokens/s/GPU.",
    )


def _scatter(result: SearchResult, front: Sequence[Record]) -> LineChart:
    """Return the chart of memory (GiB, across) and tokens/s/GPU (up) of strategies.

    A sample of the feasible ones are points, the Pareto front is a line.
    """
    picked = np.linspace(0, result.feasible - 1, min(result.feasible, _POINTS)).astype(np.int64)
    algo, tgs, memory = (
        np.asarray(result.columns[name])[picked] for name in ("algo", "tgs", "total_mm_cost")
    )
    clouds = [
        cloud(name.upper(), memory[algo == at], tgs[algo == at])
        for at, name in enumerate(ALGOS)
        if (algo == at).any()
    ]
    line = ChartLine(
        name="front",
        points=[(record["total_mm_cost"] / GIB, record["tgs"]) for record in front],
        tips=[
            f"{record['algo_type'].upper()}: {pages.count(record['tgs'])} tokens/s/GPU, "
            f"{format_gib(record['total_mm_cost'])}"
            for record in front
        ],
        look="open",
    )
    lines = [*clouds, line]
    return speed_by_memory(lines, *zip(*(p for one in lines for p in one.points), strict=True))


def cloud(name: str, memory: np.ndarray, tgs: np.ndarray) -> ChartLine:
    """Return strategies as points, from their bytes and tokens/s/GPU."""
    points = list(zip((memory / GIB).tolist(), tgs.tolist(), strict=True))
    return ChartLine(name=name, points=points, has_line=False)


def speed_by_memory(
    lines: Sequence[ChartLine], memory: Sequence[float], tgs: Sequence[float]
) -> LineChart:
    """Return a chart of memory (GiB, across) and tokens/s/GPU (up); axes cover the values."""
    return LineChart(
        lines=lines,
        x=linear("memory, GiB", memory, from_zero=False),
        y=linear("tokens/s/GPU", tgs),
        height=380,
    )


def _ranking(result: SearchResult) -> Section:
    """Return the section on the best strategy of each algorithm, and the fastest of all."""
    best = result.best_by_algo()
    names, tgs = [name.upper() for name in best], [record["tgs"] for record in best.values()]
    shown = min(result.feasible, _RANKED)
    return Section(
        name="ranking",
        title="Which strategies are the fastest?",
        lead=(f"The fastest {shown} of {pages.count(result.feasible)} feasible strategies.",),
        blocks=(
            figure(
                "algos-chart",
                "The best of each algorithm",
                "Bars of the best strategy of each algorithm.",
                row_bars(names, tgs, pages.count, "tokens/s/GPU"),
                _SPEED,
            ),
            _strategies("ranking-table", "The fastest", result.best(_RANKED)),
        ),
    )


def _strategies(name: str, caption: str, records: Sequence[Record]) -> PageTable:
    """Return a table of strategies in the order of `records`, numbered from 1.

    `name` is the table's id on the page. Sizes that no record has are left out.
    """
    sizes = [size for size in _NUMBERS if any(size[1] in record for record in records)]
    heads: list[pages.Head] = [
        "strategy",
        ("tokens/s/GPU", _SPEED, pages.count),
        ("step", "isp.best.total_latency_ns", pages.ns),
        ("memory", _MEMORY, format_gib),
        *((label, f"isp.best.{field}", pages.count) for label, field in sizes),
    ]
    rows = [
        (
            PageCell(text=f"{place + 1}. {record['algo_type'].upper()}", sort=place),
            *(record["tgs"], record["total_latency"] * _NS, record["total_mm_cost"]),
            *(record.get(field) for _, field in sizes),
        )
        for place, record in enumerate(records)
    ]
    return table(name, caption, heads, rows)


def _rejected(result: SearchResult) -> Section:
    """Return the section on the number of candidates that each rule rejected."""
    rejected = {
        REASONS.get(reason, reason): count for reason, count in result.rejected.items() if count
    }
    heads: list[pages.Head] = ["reason", ("strategies", "isp.rejected", pages.count)]
    return Section(
        name="rejected-section",
        title="Why were candidates rejected?",
        lead=(
            pages.fact("isp.rejected", sum(rejected.values()), pages.count),
            " of ",
            pages.fact("isp.candidates", result.candidates, pages.count),
            " candidates were rejected.",
        ),
        blocks=(table("rejected", "By reason", heads, rejected.items()),) if rejected else (),
    )


def _changes(changes: Sequence[HardwareChange]) -> Section:
    """Return the section on the best strategy after each change of the hardware."""
    why = "no strategy fits"
    heads: list[pages.Head] = [
        "change",
        ("tokens/s/GPU", _SPEED, pages.count, why),
        ("gain", "isp.sensitivity.gain", pages.signed_percent, why),
    ]
    rows = [
        (change.name, change.best["tgs"] if change.best else None, change.gain)
        for change in changes
    ]
    return Section(
        name="sensitivity",
        title="Which hardware change would help?",
        lead=("The search was repeated on clusters that differ in one thing.",),
        blocks=(table("changes", "The best strategy after each change", heads, rows),),
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
    shown = HeatChart(
        grid=[[rate.get((length, world)) for world in worlds] for length in lengths],
        rows=[pages.count(length) for length in lengths],
        columns=[pages.count(world) for world in worlds],
        unit="tokens/s/GPU",
        tip="{column} GPUs, {row} tokens: {value}",
        x="GPUs",
        y="tokens/sequence",
    )
    return figure(
        "sweep-chart",
        "Tokens/s/GPU of the best strategy",
        f"Heat map of {len(lengths)} sequence lengths and {len(worlds)} world sizes.",
        shown,
        _SPEED,
    )


def _cells(sweep: SearchSweep) -> PageTable:
    """Return the table of the best strategy of each sequence length and number of GPUs."""
    heads: list[pages.Head] = [
        "sequence",
        ("GPUs", "isp.cells.world_size", pages.count),
        ("tokens/s/GPU", _SPEED, pages.count),
        ("scaling", "isp.cells.scaling", pages.percent),
        ("feasible", "isp.cells.feasible", pages.count),
    ]
    rows = [
        (
            PageCell(text=f"{pages.count(cell.seq_len)} tokens", sort=cell.seq_len),
            cell.world_size,
            pages.number(cell.best["tgs"] if cell.best else None, pages.count, cell.why),
            pages.number(cell.scaling, pages.percent, cell.why),
            cell.feasible,
        )
        for cell in sweep.cells
    ]
    return table("cells", "All searches", heads, rows)
