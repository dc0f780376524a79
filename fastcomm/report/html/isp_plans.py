"""Page of the strategies of a trainer: the fastest layouts, their time, and their memory."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from fastcomm.hardware.gpu import gpu
from fastcomm.isp import Term
from fastcomm.isp.evaluation import expected_error, strategy_text
from fastcomm.isp.plan_search import PlanSearch, bottleneck
from fastcomm.isp.plan_step import PlanPrice
from fastcomm.report import html
from fastcomm.report.html import (
    Fact,
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
from fastcomm.report.html.charts import (
    BarChart,
    ChartLine,
    LineChart,
    Part,
    linear,
    row_bars,
)
from fastcomm.units import GIB, format_gib

_NS = 1e9
_POINTS = 1200
_DRAWN = 12  # layouts as bars
_RANKED = 50  # layouts in the table
# Groups of terms of the step time, with the look of each.
_GROUPS = {
    "compute": (
        "compute",
        ("GEMM", "attention", "element-wise", "experts", "recompute", "output head"),
    ),
    "tensor parallelism": ("TP", ("tensor parallelism",)),
    "context parallelism": ("CP", ("context parallelism",)),
    "expert parallelism": ("EP", ("expert exchange",)),
    "pipeline": ("PP", ("uneven stages", "pipeline bubble", "between stages")),
    "gradients and weights": ("DP", ("gradient reduction", "parameter sync", "weight gathers")),
}
_OTHERS, _OTHERS_LOOK = "host, optimizer, others", "host"


def page(result: PlanSearch) -> Page:
    """Return the page of a search, which may have found no strategy that fits."""
    job, prices = result.job, result.prices(_RANKED)
    best = prices[0] if prices else None
    why = "no strategy fits"
    headline: html.Sentence = (result.nearest(),)
    if best is not None:
        headline = (
            f"{_layout(best)} is the fastest: ",
            html.fact("isp.tgs", best.tokens_per_s_per_gpu, html.whole),
            " tokens/s/GPU.",
        )
    return Page(
        title="Parallel strategies",
        source=f"{job.model.name} on {job.gpus} {gpu(job.gpu).name}, {job.global_batch} x "
        f"{job.seq_len} tokens a step, as {job.habits.title} trains",
        headline=headline,
        facts=(
            _fact("isp.tgs", best, lambda price: price.tokens_per_s_per_gpu, html.whole, why),
            _fact("isp.latency", best, lambda price: price.step_s * _NS, html.ns, why),
            _fact("isp.mfu", best, lambda price: price.mfu, html.percent, why),
            _fact("isp.memory", best, lambda price: price.memory_bytes, format_gib, why),
            html.fact("isp.candidates", result.candidates, html.whole, label="candidates"),
            html.fact("isp.feasible", len(result.plans), html.whole, label="fit in memory"),
        ),
        sections=() if best is None else _sections(result, prices),
        warnings=(result.note,) if result.note else (),
    )


_LABELS = {
    "isp.tgs": "tokens/s/GPU",
    "isp.latency": "step",
    "isp.mfu": "MFU",
    "isp.memory": "memory",
}


def _fact(
    key: str,
    best: PlanPrice | None,
    value: Callable[[PlanPrice], float],
    form: Callable[[float], str],
    why: str,
) -> Fact:
    """Return a number of the fastest strategy; n/a with `why` without one."""
    shown = None if best is None else value(best)
    return html.fact(key, shown, form, label=_LABELS[key], why=why)


def _sections(result: PlanSearch, prices: Sequence[PlanPrice]) -> tuple[Section, ...]:
    """Return the sections of a search that found strategies; `prices` are of layouts."""
    return (_ranking(result, prices), _front(result), _terms(prices[0]))


def _ranking(result: PlanSearch, prices: Sequence[PlanPrice]) -> Section:
    """Return the section of the fastest layouts, with the time of each by kind."""
    expected = expected_error(prices[0])
    error = f"n/a, {expected.reason}"
    if expected.median is not None and expected.most is not None:
        error = (
            f"{html.percent(expected.median)} (median on published runs), in one of ten more "
            f"than {html.percent(expected.most)}"
        )
    figure = Figure(
        name="layouts-chart",
        title="Step of the fastest layouts, by what takes the time",
        alt="Stacked bars of seconds; the table has all numbers.",
        views=(FigureView(label="All", chart=_stacked(prices[:_DRAWN])),),
        terms=("isp.latency",),
    )
    more = len(result.layouts) - len(prices)
    note = f" The table leaves out {html.many(more, 'slower layout')}." if more > 0 else ""
    return Section(
        name="ranking",
        title="Which layouts are the fastest?",
        lead=(
            f"Each is the fastest strategy of its layout. The error to expect of a prediction: "
            f"{error}.{note}",
        ),
        blocks=(figure, _table(prices)),
        pitfall="Layouts closer than the error to expect may be in another order on a real "
        "cluster. Times are predicted, not measured.",
    )


def _group(term: Term) -> str:
    """Return the kind of time of a term."""
    return next((name for name, (_, terms) in _GROUPS.items() if term.name in terms), _OTHERS)


def _stacked(prices: Sequence[PlanPrice]) -> BarChart:
    """Return the step of each layout as a stacked bar, in seconds."""
    sums = []
    for price in prices:
        groups = dict.fromkeys([*_GROUPS, _OTHERS], 0.0)
        for term in price.time[1:]:
            groups[_group(term)] += term.value
        sums.append(groups)
    names = [name for name in sums[0] if any(groups[name] for groups in sums)]
    rows = [_layout(price) for price in prices]
    return BarChart(
        rows=rows,
        title="seconds a step",
        parts=tuple(
            Part(
                name=name,
                look=_GROUPS[name][0] if name in _GROUPS else _OTHERS_LOOK,
                values=[groups[name] for groups in sums],
                tips=[
                    f"{row}, {name}: {html.ns(groups[name] * _NS)}"
                    for row, groups in zip(rows, sums, strict=True)
                ],
            )
            for name in names
        ),
    )


def _layout(price: PlanPrice) -> str:
    """Return the sizes of a layout's parallelism: "tp 4, pp 8"."""
    plan = price.plan
    sizes = {"tp": plan.tp, "pp": plan.pp, "cp": plan.cp, "ep": plan.ep, "dp": plan.dp}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "dp 1"


def _table(prices: Sequence[PlanPrice]) -> PageTable:
    """Return the table of the fastest strategy of each layout."""
    experts = prices[0].plan.model.experts is not None
    heads: list[str | tuple[str, str]] = [
        "layout",
        ("tokens/s/GPU", "isp.tgs"),
        ("MFU", "isp.mfu"),
        ("memory", "isp.memory"),
        ("step", "isp.latency"),
        ("virtual stages", "isp.virtual"),
        *([("tensor of experts", "isp.etp")] if experts else []),
        ("micro-batches", "isp.micro"),
        ("sequences each", "isp.micro_size"),
        "sharding",
        "recompute",
        "bottleneck",
    ]
    rows = []
    for place, price in enumerate(prices):
        plan = price.plan
        name, share = bottleneck(price)
        cells = [
            PageCell(text=f"{place + 1}. {_layout(price)}", sort=place),
            number(price.tokens_per_s_per_gpu, html.whole),
            number(price.mfu, html.percent),
            number(price.memory_bytes, format_gib),
            number(price.step_s * _NS, html.ns),
            number(plan.vp, html.whole),
            *([number(plan.etp, html.whole)] if experts else []),
            number(plan.micro_batches, html.whole),
            number(plan.micro_batch, html.whole),
            text(plan.sharding),
            text(plan.recompute),
            PageCell(text=f"{name} {html.percent(share)}", sort=share),
        ]
        rows.append(tuple(cells))
    return PageTable(
        name="layouts-table",
        caption="The fastest strategy of each layout",
        columns=columns(*heads),
        rows=tuple(rows),
    )


def _front(result: PlanSearch) -> Section:
    """Return the section on speed against memory."""
    job = result.job
    tokens = job.global_batch * job.seq_len / job.gpus
    speed = np.array([tokens / row.step_s for row in result.plans])
    memory = np.array([row.memory_bytes for row in result.plans])
    # Plans are sorted by speed: on the front is what needs less than all before it.
    least = np.fromiter(accumulate(memory.tolist(), min), np.float64, len(memory))
    front = np.flatnonzero(np.append(True, memory[1:] < least[:-1]))
    picked = np.linspace(0, len(speed) - 1, min(len(speed), _POINTS)).astype(np.int64)
    cloud = ChartLine(
        name="strategies",
        points=list(zip((memory[picked] / GIB).tolist(), speed[picked].tolist(), strict=True)),
        has_line=False,
    )
    line = ChartLine(
        name="fastest for its memory",
        points=list(zip((memory[front] / GIB).tolist(), speed[front].tolist(), strict=True)),
        tips=[
            f"{strategy_text(result.plans[k].plan)}: {html.whole(speed[k])} tokens/s/GPU, "
            f"{format_gib(memory[k])}"
            for k in front.tolist()
        ],
        look="open",
    )
    last = int(front[-1])
    return Section(
        name="front",
        title="How does speed depend on memory?",
        lead=(
            "The fastest strategy needs ",
            html.fact("isp.memory", float(memory[0]), format_gib),
            "; with ",
            html.fact("isp.memory", float(memory[last]), format_gib),
            " the fastest reaches ",
            html.fact("isp.tgs", float(speed[last]), html.whole),
            " tokens/s/GPU.",
        ),
        blocks=(
            Figure(
                name="front-chart",
                title="Speed and memory of the strategies that fit",
                alt=f"Scatter plot of strategies; a line connects the {len(front)} that are "
                "the fastest for their memory.",
                views=(
                    FigureView(
                        label="All",
                        chart=LineChart(
                            lines=(cloud, line),
                            x=linear("memory, GiB", (memory / GIB).tolist(), from_zero=False),
                            y=linear("tokens/s/GPU", speed.tolist()),
                            height=380,
                        ),
                    ),
                ),
                terms=("isp.tgs", "isp.memory"),
            ),
        ),
    )


def _terms(price: PlanPrice) -> Section:
    """Return the section on the terms of the time and the memory of the fastest strategy."""
    time, memory = price.time[1:], price.memory[1:]
    longest = max(time, key=lambda term: term.value)
    charts = (
        (
            "Time",
            row_bars(
                [term.name for term in time],
                [term.value for term in time],
                [html.ns(term.value * _NS) for term in time],
                "seconds a step",
            ),
        ),
        (
            "Memory",
            row_bars(
                [term.name for term in memory],
                [term.value / GIB for term in memory],
                [format_gib(term.value) for term in memory],
                "GiB of the fullest rank",
            ),
        ),
    )
    rows = [
        *((term, html.ns(term.value * _NS), term.value / price.step_s) for term in time),
        *((term, format_gib(term.value), term.value / price.memory_bytes) for term in memory),
    ]
    figure = Figure(
        name="terms-chart",
        title="Terms of the fastest strategy",
        alt="Bars of time, or of memory; the table has all numbers.",
        views=tuple(FigureView(label=label, chart=chart) for label, chart in charts),
        terms=("isp.term",),
        choice="Of",
        table=PageTable(
            name="terms-table",
            caption="Terms of the time and of the memory",
            columns=columns("term", ("value", "isp.term"), ("share", "isp.share"), "how"),
            rows=tuple(
                (
                    text(term.name),
                    PageCell(text=shown, sort=term.value),
                    number(share, html.percent, share=share),
                    text(term.text),
                )
                for term, shown, share in rows
            ),
        ),
    )
    return Section(
        name="terms",
        title="Where do its time and memory go?",
        lead=(
            f"{longest.name} takes the most: {html.ns(longest.value * _NS)}. The strategy is "
            f"{strategy_text(price.plan).replace(',', ', ')}.",
        ),
        blocks=(figure,),
    )
