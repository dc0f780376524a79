"""Findings of a run's page: evidence, a small picture, what a fix saves, the next command."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastcomm.critical_path.candidates import Candidate
from fastcomm.idle import totals
from fastcomm.idle.causes import BY_CAUSE
from fastcomm.metrics.breakdown import RankMeans
from fastcomm.metrics.findings.finding import Finding
from fastcomm.metrics.findings.suggestions import Suggestions
from fastcomm.metrics.page import key_of, label
from fastcomm.metrics.result import Metrics
from fastcomm.show import pages
from fastcomm.show.charts import BarChart, Part, RowMarks, line_look, row_bars
from fastcomm.show.pages import Fact, PageFinding, Picture, Sentence
from fastcomm.timeline import page as timelines
from fastcomm.timeline.timeline import Timeline
from fastcomm.trace.run_traces import ranges
from fastcomm_kernels.arrays import Floats

MOST = 8
_MS = 1e6
_LARGEST = "the largest part"
_MOST_PEERS = 40  # marks of a picture
_LONG, _FEW = 60, 8  # characters of a list of ranks, and ranks of a longer one
# How values of the evidence are written, by their unit.
_FORMS: Mapping[str, Callable[[Any], str]] = {
    "ns": pages.ns,
    "bytes": pages.size,
    "bytes/s": pages.rate,
    "share": pages.percent,
}


def findings(
    suggestions: Suggestions,
    timeline: Timeline | None = None,
    answers: Sequence[Candidate | None] = (),
) -> tuple[PageFinding, ...]:
    """Return the findings of a run in the order in which the terminal prints them.

    With a timeline, each has a link to the moment that shows it. `answers` has for each what
    its fix saves, if that was replayed.
    """
    metrics = suggestions.metrics
    padded = [*answers, *(None for _ in metrics.findings[len(answers) :])]
    return tuple(
        _finding(finding, suggestions, timeline, answer)
        for finding, answer in zip(metrics.findings[:MOST], padded, strict=False)
    )


def _finding(
    finding: Finding,
    suggestions: Suggestions,
    timeline: Timeline | None,
    answer: Candidate | None,
) -> PageFinding:
    """Return a finding with its cost, its evidence, and the command to run next.

    The cost is in ns per step, and a share of the step. The command is empty if none is known.
    """
    command = suggestions.next(finding)
    return PageFinding(
        title=(finding.text.replace(ranges(finding.ranks), _short(finding.ranks)),),
        evidence=(
            pages.fact("metrics.findings.cost_ns", finding.cost_ns, pages.ns, label="per step"),
            pages.fact(
                "metrics.findings.share", finding.share, pages.percent, label="of the step"
            ),
            Fact(
                key="metrics.findings.confidence", text=finding.confidence, label="confidence"
            ),
            *_evidence(finding),
        ),
        command=command.line if command else "",
        then=command.purpose if command else "",
        cost_ns=finding.cost_ns,
        moment=timelines.link(timeline.moment(finding)) if timeline else "",
        picture=_picture(finding, suggestions.metrics),
        answer=_answer(finding, answer) if answer else (),
    )


def _short(ranks: Sequence[int]) -> str:
    """Return ranks as ranges, of many the first few and the number of the others."""
    text = ranges(ranks)
    if len(text) <= _LONG:
        return text
    return f"{ranges(ranks[:_FEW])} and {pages.count(len(ranks) - _FEW)} more"


def _evidence(finding: Finding) -> list[Fact]:
    """Return the numbers that support a finding, as far as they are known."""
    return [
        pages.fact("metrics.findings.evidence", fact.value, _FORMS[fact.unit], label=fact.label)
        for fact in finding.evidence
        if fact.unit is not None and fact.value is not None
    ]


def _answer(finding: Finding, answer: Candidate) -> Sentence:
    """Return what a fix saves in the step of the critical path, as it was replayed."""
    edit, fix = answer.edit.text, finding.fix.text if finding.fix else ""
    if answer.saved_ns <= 0:
        return (f"What if? {fix}: the replayed step is not shorter ({edit}).",)
    return (
        f"What if? {fix}: the replayed step is ",
        pages.fact("what-if.candidates.saved_ns", answer.saved_ns, pages.ns),
        " shorter, ",
        pages.fact("what-if.candidates.after_ns", answer.after_ns, pages.ns),
        f" ({edit}; {_trust(answer)}).",
    )


def _trust(answer: Candidate) -> str:
    """Return how far off a prediction may be, or why that is unknown."""
    width = answer.interval.width_ns
    return (
        f"error unknown: {answer.interval.reason}" if width is None else f"± {pages.ns(width)}"
    )


def _picture(finding: Finding, metrics: Metrics) -> Picture | None:
    """Return the picture of a finding; None if there is nothing to compare."""
    picture = finding.picture
    if picture is None:
        return None
    if picture.of == "step":
        return _step(metrics)
    if picture.of == "idle":
        return _causes(metrics)
    if picture.of == "rates":
        return _rates(finding, picture.rates)
    values = _values(metrics, picture.measure)
    return _beside(finding.ranks, values, picture.noun) if values else None


def _values(metrics: Metrics, measure: str) -> dict[int, float]:
    """Return a measure by rank, ns per step: the wait that it causes, or a part of its step."""
    if measure == "wait_caused":
        return {row.rank: row.caused_ns for row in metrics.across.by_rank}
    means = metrics.rank_means
    return _by_rank(means, means.ns[measure])


def _by_rank(means: RankMeans, values: Floats) -> dict[int, float]:
    """Return the known values by rank."""
    pairs = zip(means.ranks.tolist(), values.tolist(), strict=True)
    return {rank: value for rank, value in pairs if not np.isnan(value)}


def _beside(ranks: Sequence[int], values: Mapping[int, float], noun: str) -> Picture | None:
    """Return the ranks of a finding beside all others on one axis; values are in ns."""
    own = [rank for rank in ranks if rank in values][:_MOST_PEERS]
    others = sorted((rank for rank in values if rank not in ranks), key=lambda r: values[r])
    if not own or not others:
        return None
    places = np.linspace(0, len(others) - 1, min(len(others), _MOST_PEERS)).astype(np.int64)
    name = f"{'rank' if len(own) == 1 else 'ranks'} {_short(own)}"
    marks = [
        *(_mark("other ranks", "circle-open", "open", rank, values[rank], noun)
          for rank in (others[place] for place in places.tolist())),
        *(_mark(name, "diamond", "TP", rank, values[rank], noun) for rank in own),
    ]  # fmt: skip
    chart = BarChart(rows=("",), title=f"{noun}, ms per step", marks=marks)
    middle = pages.ns(values[others[len(others) // 2]])
    alt = f"{name} has {pages.ns(values[own[0]])} of {noun}, the median of the others {middle}."
    return Picture(chart=chart, alt=alt)


def _mark(name: str, symbol: str, look: str, rank: int, ns: float, noun: str) -> RowMarks:
    """Return the mark of one rank."""
    tip = f"rank {rank}: {pages.ns(ns)} of {noun}"
    return RowMarks(name=name, symbol=symbol, look=look, values=(ns / _MS,), tips=(tip,))


def _rates(finding: Finding, rates: Sequence[tuple[str, str]]) -> Picture | None:
    """Return bandwidths side by side; `rates` are their labels and keys of the evidence."""
    values = [finding.value(key) for _, key in rates]
    if None in values:
        return None
    names = tuple(name for name, _ in rates)
    chart = row_bars(names, values, pages.rate, "GB/s", 1e9, looks=("TP", "compute"))
    texts = [f"{name}: {pages.rate(value)}" for name, value in zip(names, values, strict=True)]
    alt = f"{'; '.join(texts)}."
    return Picture(chart=chart, alt=alt[0].upper() + alt[1:])


def _step(metrics: Metrics) -> Picture | None:
    """Return the mean step: compute, waiting, transfer, copies and idle time."""
    parts, mean = metrics.breakdown.parts, metrics.iteration.mean_ns
    if parts is None or not mean:
        return None
    exposed = (parts["exposed"] or 0.0) * mean
    wait, transfer = metrics.wait_and_transfer or (0.0, 0.0)
    rest = max(exposed - wait - transfer, 0.0)
    times = [
        ("compute", "compute", (parts["compute"] or 0.0) * mean),
        ("waiting for the last rank", "gap", wait),
        ("transfer", "TP", transfer),
        ("exposed, not divided", "mixed", rest),
        ("copies", "memcpy", (parts["memcpy"] or 0.0) * mean),
        ("idle", "idle", (parts["idle"] or 0.0) * mean),
    ]
    return _stack([part for part in times if part[2] > mean / 1000], "of the mean step")


def _causes(metrics: Metrics) -> Picture | None:
    """Return the idle time of the mean step by cause."""
    mean = metrics.iteration.mean_ns or 0.0
    shares = sorted(metrics.idle.items(), key=lambda pair: -(pair[1] or 0.0))
    times = [
        (BY_CAUSE[cause].text, line_look(place)[0], share * mean)
        for place, (cause, share) in enumerate(shares)
        if share
    ]
    return _stack(times, "of idle time") if times else None


def _stack(times: Sequence[tuple[str, str, float]], whole: str) -> Picture:
    """Return one stacked bar; `times` are name, look and ns, `whole` is what they make up."""
    total = sum(ns for _, _, ns in times) or 1.0
    parts = tuple(
        Part(
            name=name,
            look=look,
            values=(ns / _MS,),
            labels=(pages.ns(ns),),
            tips=(f"{name}: {pages.ns(ns)}, {pages.percent(ns / total)} {whole}",),
        )
        for name, look, ns in times
    )
    spoken = ", ".join(f"{name} {pages.ns(ns)}" for name, _, ns in times)
    chart = BarChart(rows=("",), title="ms per step", parts=parts, most=total / _MS)
    return Picture(chart=chart, alt=f"Parts {whole}: {spoken}.")


def facts(metrics: Metrics, why: str) -> tuple[Fact, ...]:
    """Return the six numbers at the head of the page; `why` explains unknown numbers."""
    return (_step_fact(metrics, why), _throughput(metrics, why), *_shares(metrics, why))


def _step_fact(metrics: Metrics, why: str) -> Fact:
    """Return the time of a step, with the number of ranks and steps behind it."""
    size = f"{pages.many(len(metrics.measured_ranks), 'rank')}"
    if metrics.expected_ranks > len(metrics.measured_ranks):
        size += f" of {metrics.expected_ranks}"
    steps = metrics.iterations
    count = "" if steps is None else f", {pages.many(steps, 'step')}"
    return pages.fact(
        "metrics.iteration.mean_ns", metrics.iteration.mean_ns, pages.ns,
        label=f"per step: {size}{count}", why=why,
    )  # fmt: skip


def _throughput(metrics: Metrics, why: str) -> Fact:
    """Return tokens per second, else the utilization of the FLOPs, else the overlap."""
    tokens = metrics.throughput.tokens_per_s
    if tokens is not None:
        per_gpu = metrics.throughput.tokens_per_s_per_gpu or 0.0
        beside = [f"tokens/s, {pages.count(per_gpu)} per GPU"]
        if metrics.flops.mfu is not None:
            beside.append(f"MFU {pages.percent(metrics.flops.mfu)}")
        return pages.fact(
            "metrics.throughput.tokens_per_s", tokens, pages.count, label=", ".join(beside)
        )
    if metrics.flops.mfu is not None:
        return pages.fact("metrics.flops.mfu", metrics.flops.mfu, pages.percent, label="MFU")
    return pages.fact(
        "metrics.overlap.average_overlap_ratio",
        metrics.overlap.average_overlap_ratio,
        pages.percent,
        label="of communication overlapped",
        why=why if metrics.volume else "no communication was recorded",
    )


def _shares(metrics: Metrics, why: str) -> tuple[Fact, ...]:
    """Return the largest share of the step, wait and transfer of communication, and idle."""
    mean = metrics.iteration.mean_ns
    exact = metrics.breakdown.exact
    parts = {name: share for name, share in exact.items() if share and name != "idle"}
    largest = max(parts, key=lambda name: parts[name], default="compute")
    whole = metrics.breakdown.parts or {}
    empty = whole.get("idle")
    is_idle = empty is not None and empty > parts.get(largest, 0.0)
    cause = totals.largest(metrics.idle) if None not in metrics.idle.values() else None
    labels = [
        "idle",
        *([_LARGEST] if is_idle else []),
        *([f"mostly {BY_CAUSE[cause].text}"] if cause else []),
    ]
    return (
        pages.fact(
            key_of(largest), exact.get(largest), pages.percent, why=why,
            label=label(largest) if is_idle else f"{label(largest)}, {_LARGEST}",
        ),
        *_exposed(metrics, whole, mean, why),
        pages.fact(key_of("idle"), empty, pages.percent, label=", ".join(labels), why=why),
    )  # fmt: skip


def _exposed(
    metrics: Metrics, whole: Mapping[str, float | None], mean: float | None, why: str
) -> tuple[Fact, ...]:
    """Return waiting and transfer of exposed communication if known, else it and copies."""
    parts = metrics.wait_and_transfer
    if parts is None or not mean:
        names = {"exposed": "exposed communication", "memcpy": "copies"}
        return tuple(
            pages.fact(key_of(name), whole.get(name), pages.percent, label=text, why=why)
            for name, text in names.items()
        )
    wait, transfer = (part / mean for part in parts)
    return (
        pages.fact(
            "pages.exposed_wait", wait, pages.percent, label="exposed: waits for the last rank"
        ),
        pages.fact(
            "pages.exposed_transfer", transfer, pages.percent, label="exposed: transfer"
        ),
    )
