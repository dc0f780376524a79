"""Page of the strategies of a trainer: the fastest layouts, their time, and their memory."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from fastcomm.hardware.gpus import gpu
from fastcomm.isp.layer import Term
from fastcomm.isp.page import cloud, front_lead, speed_by_memory
from fastcomm.planning.expected import expected_error
from fastcomm.planning.price import PlanPrice
from fastcomm.planning.result import strategy_text
from fastcomm.planning.search import PlanSearch, bottleneck
from fastcomm.show import pages
from fastcomm.show.charts import BarChart, Part, row_bars, row_tips
from fastcomm.show.pages import (
    Fact,
    Figure,
    FigureView,
    Page,
    PageCell,
    PageTable,
    Section,
    figure,
    number,
    table,
)
from fastcomm.units import GIB, format_gib

_NS = 1e9
_POINTS = 1200
_DRAWN = 12  # layouts as bars
_RANKED = 50  # layouts in the table
_SPEED, _MEMORY = "plan.layouts.tokens_per_s_per_gpu", "plan.layouts.memory_bytes"
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
    headline: pages.Sentence = (result.nearest(),)
    if best is not None:
        headline = (
            f"{_layout(best)} is the fastest: ",
            pages.fact(_SPEED, best.tokens_per_s_per_gpu, pages.count),
            " tokens/s/GPU.",
        )
    return Page(
        title="Parallel strategies",
        source=f"{job.model.name} on {job.gpus} {gpu(job.gpu).name}, {job.global_batch} x "
        f"{job.seq_len} tokens a step, as {job.trainer_rules.title} trains",
        headline=headline,
        facts=(
            *_facts(best),
            pages.fact("plan.candidates", result.candidates, pages.count, label="candidates"),
            pages.fact("plan.feasible", len(result.plans), pages.count, label="fit in memory"),
        ),
        sections=(_ranking(result, prices), _front(result), _terms(best)) if best else (),
        warnings=(result.note,) if result.note else (),
    )


def _facts(best: PlanPrice | None) -> list[Fact]:
    """Return the numbers of the fastest strategy; n/a with a reason without one."""
    values: tuple[float | None, ...] = (None,) * 4
    if best is not None:
        step_ns = best.step_s * _NS
        values = best.tokens_per_s_per_gpu, step_ns, best.mfu, best.memory_bytes
    names = (
        (_SPEED, "tokens/s/GPU", pages.count),
        ("plan.layouts.step_ns", "step", pages.ns),
        ("plan.layouts.mfu", "MFU", pages.percent),
        (_MEMORY, "memory", format_gib),
    )
    return [
        pages.fact(key, value, form, label=label, why="no strategy fits")
        for (key, label, form), value in zip(names, values, strict=True)
    ]


def _ranking(result: PlanSearch, prices: Sequence[PlanPrice]) -> Section:
    """Return the section of the fastest layouts, with the time of each by kind."""
    expected = expected_error(prices[0])
    error = f"n/a, {expected.reason}"
    if expected.median is not None and expected.most is not None:
        error = (
            f"{pages.percent(expected.median)} (median of {expected.runs} published runs: "
            f"{expected.of}), in one of ten more than {pages.percent(expected.most)}"
        )
    drawn = figure(
        "layouts-chart",
        "Step of the fastest layouts, by what takes the time",
        "Stacked bars of seconds; the table has all numbers.",
        _stacked(prices[:_DRAWN]),
        "plan.layouts.step_ns",
    )
    more = len(result.layouts) - len(prices)
    note = f" The table leaves out {pages.many(more, 'slower layout')}." if more > 0 else ""
    return Section(
        name="ranking",
        title="Which layouts are the fastest?",
        lead=(
            f"Each is the fastest strategy of its layout. The error to expect of a prediction: "
            f"{error}.{note}",
        ),
        blocks=(drawn, _table(prices)),
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
    rows = [_layout(price) for price in prices]
    parts = []
    for name in sums[0]:
        values = [groups[name] for groups in sums]
        if any(values):
            tips = row_tips(rows, name, values, _seconds)
            look = _GROUPS[name][0] if name in _GROUPS else _OTHERS_LOOK
            parts.append(Part(name=name, look=look, values=values, tips=tips))
    return BarChart(rows=rows, title="seconds a step", parts=parts)


def _seconds(value: float) -> str:
    """Format seconds in a suitable unit."""
    return pages.ns(value * _NS)


def _layout(price: PlanPrice) -> str:
    """Return the sizes of a layout's parallelism: "tp 4, pp 8"."""
    plan = price.plan
    sizes = {"tp": plan.tp, "pp": plan.pp, "cp": plan.cp, "ep": plan.ep, "dp": plan.dp}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "dp 1"


def _table(prices: Sequence[PlanPrice]) -> PageTable:
    """Return the table of the fastest strategy of each layout."""
    has_experts = prices[0].plan.model.experts is not None
    heads: list[pages.Head] = [
        "layout",
        ("tokens/s/GPU", _SPEED, pages.count),
        ("MFU", "plan.layouts.mfu", pages.percent),
        ("memory", _MEMORY, format_gib),
        ("step", "plan.layouts.step_ns", pages.ns),
        ("virtual stages", "pages.virtual_stages", pages.count),
        *([("tensor of experts", "pages.expert_tensor", pages.count)] if has_experts else []),
        ("micro-batches", "pages.micro_batches", pages.count),
        ("sequences each", "pages.micro_batch_size", pages.count),
        *("sharding", "recompute", *(["dispatch"] if has_experts else []), "bottleneck"),
    ]
    rows = []
    for place, price in enumerate(prices):
        plan = price.plan
        name, share = bottleneck(price)
        row = (
            PageCell(text=f"{place + 1}. {_layout(price)}", sort=place),
            *(price.tokens_per_s_per_gpu, price.mfu, price.memory_bytes, price.step_s * _NS),
            *((plan.vp, plan.etp) if has_experts else (plan.vp,)),
            *(plan.micro_batches, plan.micro_batch, plan.sharding, plan.recompute),
            *([plan.dispatch] if has_experts else []),
            PageCell(text=f"{name} {pages.percent(share)}", sort=share),
        )
        rows.append(row)
    return table("layouts-table", "The fastest strategy of each layout", heads, rows)


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
    last = int(front[-1])
    line = replace(
        cloud("fastest for its memory", memory[front], speed[front]),
        tips=[
            f"{strategy_text(result.plans[k].plan)}: {pages.count(speed[k])} tokens/s/GPU, "
            f"{format_gib(memory[k])}"
            for k in front.tolist()
        ],
        look="open",
        has_line=True,
    )
    lines = (cloud("strategies", memory[picked], speed[picked]), line)
    drawn = figure(
        "front-chart",
        "Speed and memory of the strategies that fit",
        f"Scatter plot of strategies; a line connects the {len(front)} that are the fastest "
        "for their memory.",
        speed_by_memory(lines, (memory / GIB).tolist(), speed.tolist()),
        _SPEED,
        _MEMORY,
    )
    return Section(
        name="front",
        title="How does speed depend on memory?",
        lead=front_lead(
            float(memory[0]), float(memory[last]), float(speed[last]), (_MEMORY, _SPEED)
        ),
        blocks=(drawn,),
    )


def _terms(price: PlanPrice) -> Section:
    """Return the section on the terms of the time and the memory of the fastest strategy."""
    time, memory = price.time[1:], price.memory[1:]
    longest = max(time, key=lambda term: term.value)
    charts = {"Time": _term_bars(time, _seconds, "seconds a step")}
    charts["Memory"] = _term_bars(memory, format_gib, "GiB of the fullest rank", GIB)
    rows = [
        *_term_rows(time, _seconds, price.step_s),
        *_term_rows(memory, format_gib, price.memory_bytes),
    ]
    heads: list[pages.Head] = [
        "term",
        ("value", "pages.term", str),
        ("share", "pages.term_share", pages.percent),
        "how",
    ]
    drawn = Figure(
        name="terms-chart",
        title="Terms of the fastest strategy",
        alt="Bars of time, or of memory; the table has all numbers.",
        views=tuple(FigureView(label=label, chart=chart) for label, chart in charts.items()),
        terms=("pages.term",),
        choice="Of",
        table=table("terms-table", "Terms of the time and of the memory", heads, rows),
    )
    return Section(
        name="terms",
        title="Where do its time and memory go?",
        lead=(
            f"{longest.name} takes the most: {_seconds(longest.value)}. The strategy is "
            f"{strategy_text(price.plan).replace(',', ', ')}.",
        ),
        blocks=(drawn,),
    )


def _term_bars(
    terms: Sequence[Term], form: pages.Form, title: str, unit: float = 1
) -> BarChart:
    """Return a bar for each term."""
    names, values = [term.name for term in terms], [term.value for term in terms]
    return row_bars(names, values, form, title, unit)


def _term_rows(terms: Sequence[Term], form: pages.Form, total: float) -> list[Sequence[object]]:
    """Return the row of each term, with its share of `total`."""
    return [
        (
            term.name,
            number(term.value, form),
            number(share := term.value / total, pages.percent, share=share),
            term.text,
        )
        for term in terms
    ]
