"""Predicted beside measured training runs: writes `docs/plan-runs.md`.

It also writes the error to expect and the range of these runs into
`fastcomm/planning/expected.py`. The runs lie outside of the repository:
`python docs/plan_runs.py FOLDER` reads `runs.csv` and `models.csv` there, and vTrain's table in
`isp` beside it.
"""

import csv
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from fastcomm.hardware.gpus import FloatArray, gpu
from fastcomm.models import Model, load_models
from fastcomm.planning.constants import CALIBRATED, Constants
from fastcomm.planning.expected import EXPECTED as SHIPPED
from fastcomm.planning.expected import WIDER as SHIPPED_WIDER
from fastcomm.planning.expected import classes_of, covered, precision_of
from fastcomm.planning.job import Plan
from fastcomm.planning.measured_runs import (
    GroupError,
    RunPrice,
    RunTable,
    TrainingRun,
    errors,
    held_out_errors,
    load_runs,
    price_run,
)
from fastcomm.planning.price import price_plan
from fastcomm.planning.result import suspect
from fastcomm.planning.trainers import TRAINERS

PAGE = Path(__file__).with_name("plan-runs.md")
EXPECTED = Path(__file__).parents[1] / "fastcomm" / "planning" / "expected.py"
# Values before any fit, from what such systems usually reach: where cross-validation begins.
NEUTRAL = Constants(
    network_share=0.8,
    overlap_loss=0.2,
    tp_exposed=0.7,
    elementwise=1.5,
    gemm_slowdown=1.05,
    host_layer_s=0.9e-3,
    host_experts=6,
    host_expert=0.2,
    exchange_slowdown=1.1,
    straggling=0.001,
    step_s=20e-3,
)
FACTOR = TRAINERS["deepspeed"].host_factor
# Value of a constant without which its term would be absent, and where the constant comes from.
TERMS: dict[str, tuple[float, str]] = {
    "host_overlap": (1, "host with 1F1B overlap on Grace: Hy3, GB300 (n142, n143)"),
    "host_gaps": (
        0,
        "launches of attention without graphs: DeepSeek-V3 (n173, n174)",
    ),
    "host_padded": (1, "host of padded experts: Qwen3-30B, B200 (r337, r291)"),
    "blackwell_slowdown": (1, "GEMM of a step on Blackwell: dense runs"),
    "host_grace": (1, "host on Grace until 2025-10: Transformer Engine's issue 2053; no row"),
    "mxfp8_slowdown": (
        1,
        "GEMM in MXFP8: Llama 8B (r296, r297, r305, r306), Qwen3 (r327, r328)",
    ),
    "expert_rows": (0, "rows an expert at which a GEMM takes twice as long a row: kernels"),
    "copy_share": (1, "bandwidth of permutations: cuDNN's norms"),
    "activation_share": (1, "bandwidth of activations: Liger-Kernel, pull request 1326"),
    "exchange_exposed": (1, "exchange under another micro-batch: Hy3, GB300 (n139, n138)"),
    "exchange_exposed_nodes": (1, "the same between nodes: H100 (n105 to n108, n121, n122)"),
}
# Why the predictions of some rows are far off, as far as the sources tell.
WHY = {
    "r317": "the same layout took half as long three months later, with tokens dropped (r344)",
    "r276": "no recipe has this layout: it may have run in CUDA graphs",
    "r239": "no recipe has this layout: the dispatcher between nodes is a guess",
    "r292": "the next container ran this layout 1.8 times as fast (r276)",
    "r326": "experts over 64 ranks of 32, which Megatron refuses",
    "r336": "dropping tokens saved nothing here (r309), and half of the time of r337",
    "n124": "host of 16 local experts in bf16: 16 ms a layer, 9.6 in n125",
    "r291": "host of 16 local experts: 8.8 ms a layer, of 32 it takes 21 ms",
    "r311": "host of 16 local experts: 9.2 ms a layer, of 32 it takes 21 ms",
    "r074": "float8 of 2024 on a small model: attention in an older kernel",
    "r075": "float8 of 2024 on a small model: attention in an older kernel",
    "n122": "the exchange between nodes is less overlapped than inside of one",
    "n173": "another version of the trainer: 41.1 ms a layer with the same settings (n179)",
    "r343": "the exchange between nodes",
    **dict.fromkeys(
        ("n188", "n230", "n231", "n232", "n233", "n234"),
        "tensor parallelism inside experts between nodes: the exchange",
    ),
    **dict.fromkeys(("n107", "n110", "n111"), "NCCL between nodes: the exchange"),
    **dict.fromkeys(("n263", "n267"), "context parallelism between nodes"),
    **dict.fromkeys(("n125",), "host of 16 local experts in bf16: 9.6 ms a layer"),
    **dict.fromkeys(
        ("r241", "r257", "r272", "r310"),
        "small kernels of biases and clamps, expert by expert, beside the bytes they move",
    ),
    **dict.fromkeys(("r421", "r500"), "the release before took 1.3 times as long (r418, r497)"),
}
_HEAD = """\
# Strategy search: how far off

How far are predictions of `fastcomm plan`, `plan price` and `plan evaluate` from measured runs?
This page is for readers who plan a cluster by them. `docs/plan_runs.py` compares {number}
published runs, whose tables are not part of fastcomm, with predictions in tokens/s/GPU. Runs
that their sources call unclear, traced, tests or regressions do not count. One row (r326)
divides experts over 64 ranks where a pipeline stage has 32, and six of 2025 (r422 to r424, r501
to r503) have CUDA graphs, of a step as far as their source tells, though token counts stop the
host. Megatron refuses both today: they are priced all the same.

GPUs marked "not measured" are priced by kernels of a similar one.

Rules without a constant, such as which attention kernel a year has, were chosen with all of
these runs in view. So the errors on runs held out are those of the constants, not of the rules.
"""
_GROUPS = """\
## All runs

Median and 90th percentile of absolute errors, and the median error (above 0 is too fast). In
`in interval` is the share of the runs that lie in the interval that `plan` prints, in `memory`
the median absolute error of the memory, where the source has it, and in `no fit` are runs that
ran, but were predicted not to fit."""
_MEMORY = """\
One source states the memory in use on the device, of Hy3 on GB300. What HybridEP, more groups
of NCCL and fragmentation take comes from n142 and n143; no other row is used. Of the 33 GB that
recompute of the gated unit saves between n136 and n135, 9 are predicted: n136 is the one row
whose experts are neither fused nor from CuTe DSL, and that recomputes nothing. What its kernels
save is not known."""
_CLASSES = """\
## Classes of runs

Mean absolute error by class, and the most that it may be. Natural routing has four runs, from
which the share of the fullest rank comes: its error is not one of unseen runs."""
_EXPERTS = """\
Of runs with experts, by GPU, precision, routing and software:"""
_PAIRS = """\
Pairs of runs that differ in one switch, the second over the first in tokens/s/GPU. Overlap with
another micro-batch gains less on H100 than predicted, since the runs without it are priced too
slow: the host of a layer of experts is. So the search favors overlap there.
"""
# Two runs, and the switch by which the second one differs.
PAIRS = (
    ("n121", "n122", "overlap, DeepEP between nodes, H100"),
    ("n107", "n108", "overlap, NCCL between nodes, H100"),
    ("n105", "n106", "overlap, HybridEP between nodes, H100"),
    ("n139", "n138", "overlap, GB300"),
    ("n142", "n143", "graphs of parts, GB300"),
    ("n143", "n138", "graph of a whole step, GB300"),
    ("n173", "n174", "graphs of attention, GB200"),
    ("n136", "n135", "recompute of moe_act, GB300"),
    ("n138", "n151", "fused experts in MXFP8, GB300"),
    ("r291", "r337", "padded experts, B200"),
)
_WORST = """\
The ten runs with experts that are furthest off:"""
_ORDER = """\
Over groups of at least five runs of one source and model, the mean rank correlation (Spearman)
of predicted and measured throughput is {plain_order:.2f} for dense models and
{plain_experts:.2f} for experts. Runs of one group are often about equally fast: over the pairs
that differ by more than 5 %, it is {order:.2f} and {experts:.2f}.
{fits} of {runs} runs are predicted to fit. No source says which strategies ran out of memory.

Of 1440 iterations of Megatron-DeepSpeed on 1 to 8 A100 of one node (vTrain), times are off by
{0:.1f} % on average, and the strategy predicted to be the fastest takes
{1:.1f} % longer than the fastest measured one, on average over {groups} jobs.
One constant of the trainer was fitted to them: its host takes 1.55 times as long to launch a
layer. Without it the numbers are {2:.1f} % and {3:.1f} %. Fitted without each of the
{models} models in turn, it is {factors}; on the model left out, the numbers are {4:.1f} % and
{5:.1f} %."""
_LEFT_OUT = """\
With one constant at its start, the others as fitted, the mean absolute error of all runs is:"""
_TERMS = """\
These come from measured kernels, or from pairs of runs that differ in one switch, which the
last column names. In `without` is the mean absolute error of runs with experts if the term is
absent; it is {error} with all of them."""
_HELD_OUT = """\
## Runs that the constants have not seen

Five times, the constants are fitted to four fifths of the pairs of source and model, and judged
on the others. These are the errors to expect of your own runs; each prediction carries those of
its narrowest class in the table. Measurements lie within the factor of `interval`, nine
of ten of those of a source and model on which it does not depend: each is left out in turn, so
that the interval is wider where few of them tell it. `inside` is the share of all runs that
lie in it by the shipped constants, and `left out` that of runs of sources and models left out.
Where even the largest error of the others is too small, the interval is that of the largest.
A precision of {few} runs or more of which the intervals of their classes hold fewer than 88 %
has the interval of nine of ten of its own errors, if that is wider:
{wider}.

A class stands in the table if it has {least} runs, and if its interval tells more about sources
and models left out than that of the next wider class: by the interval score, which adds half of
the width, and ten times the distance of what lies outside. Its interval is that of the runs
without a narrower class in the table, if they are {least} or more.

Errors of two runs of one source and model differ by at most {dense} (dense) and {experts}
(experts), nine of ten times. `plan` calls layouts that are closer than that equally fast: two
layouts of one job share most of the error, so that it is that of their difference."""
_CONSTANTS = """\
## Constants

These hold for all trainers and GPUs: none has constants of its own but Megatron-DeepSpeed.
They are fitted to all runs; everything else comes from data sheets and measured kernels.
Fitted constants started from the value on the left; `--calibrate-from` fits them to your own
runs."""
_MEANING = {
    "network_share": "share of the bandwidth between nodes that collectives reach",
    "overlap_loss": "share of the shorter of two overlapped parts that is lost",
    "tp_exposed": "share of tensor-parallel communication that nothing overlaps",
    "elementwise": "bytes moved by element-wise kernels, over fused ones",
    "gemm_slowdown": "time of a GEMM in a step, over the kernel alone",
    "host_layer_s": "time of the host to launch a layer, both passes, in s",
    "host_experts": "that of a layer with experts, over a usual one",
    "host_expert": "what each expert of a rank adds to that",
    "exchange_slowdown": "time of an exchange of experts in a step, over the kernels alone",
    "straggling": "share of the step lost to the slowest node, a doubling of nodes",
    "step_s": "time of the host outside of layers, in s",
}


def _table(head: Sequence[str], rows: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def load(folder: Path) -> RunTable:
    """The runs in a folder, and those of it that cannot be priced."""
    return load_runs(folder / "runs.csv", load_models(folder / "models.csv"))


def groups(runs: Iterable[TrainingRun]) -> str:
    """The table of errors by source, GPU, precision and kind of model."""
    rows = [
        [
            _name(group),
            str(group.runs),
            f"{group.median * 100:.1f} %",
            f"{group.most * 100:.0f} %",
            f"{group.bias * 100:+.1f} %",
            "n/a" if group.coverage is None else f"{group.coverage * 100:.0f} %",
            "n/a" if group.memory is None else f"{group.memory * 100:.0f} %",
            str(group.do_not_fit),
        ]
        for group in errors(price_run(run, Constants()) for run in runs)
    ]
    return _table(
        ["", "runs", "median", "90 % below", "bias", "in interval", "memory", "no fit"], rows
    )


def _name(group: GroupError) -> str:
    """The name of a group; a GPU without measurements is marked."""
    if group.by in {"all", "layers", "class"}:
        return group.name
    mark = " (not measured)" if group.by == "gpu" and gpu(group.name).derived else ""
    return f"{group.by} {group.name}{mark}"


Errors = list[tuple[TrainingRun, float]]
LEAST = 20  # runs of a class that has an error of its own
_INSIDE = 0.9


_BAND = (0.88, 0.95)


def in_band(runs: Iterable[TrainingRun]) -> str:
    """The sentence on how often intervals hold, in the groups of `groups` with enough runs."""
    own = [
        (_name(group), group.coverage)
        for group in errors(price_run(run, Constants()) for run in runs)
        if group.runs >= LEAST and group.coverage is not None
    ]
    low, high = _BAND
    shown = {name: f"{name} ({share * 100:.0f} %)" for name, share in own}
    below = [shown[name] for name, share in own if round(share, 2) < low]
    above = [shown[name] for name, share in own if round(share, 2) > high]
    inside = len(own) - len(below) - len(above)
    text = (
        f"Of {len(own)} groups of {LEAST} runs or more, the interval holds for {low * 100:.0f} "
        f"to {high * 100:.0f} % of the runs in {inside}."
    )
    text += f" It holds for fewer in {', '.join(below)}." if below else " In none for fewer."
    text += f" It is wider than it need be in {', '.join(above)}." if above else ""
    return fill(text, 96)


Groups = list[FloatArray]  # logarithms of the errors of the runs of each source and model


def expected(off: Errors) -> dict[str, tuple[int, float, float]]:
    """Runs, median error and interval by class, of errors on groups that no fit has seen.

    A class has an interval of its own if it has enough runs, and if its interval tells more
    about sources and models left out than that of the next wider class. It is that of the runs
    without a narrower class, if they are enough.
    """
    classes = by_class(off)
    names: list[str] = []
    for name in sorted(classes, key=lambda name: (name.count(","), name)):
        wider = next((n for n in _wider_names(name) if n in names), None)
        is_apart = wider is None or tells_more(classes[name], classes[wider])
        if is_apart and _size(classes[name]) >= LEAST:
            names.append(name)
    return {name: _interval(own) for name, own in sorted(judged(off, names).items())}


def judged(off: Errors, names: Sequence[str]) -> "dict[str, Grouped]":
    """Errors that give each class of the table its interval, by source and model."""
    whole, apart = by_class(off), by_class(off, names)
    return {
        name: apart[name] if _size(apart.get(name, {})) >= LEAST else whole[name]
        for name in names
    }


_FEW = 10  # runs of a precision whose interval may be wider than that of its class
_HOLDS = 0.88  # least share of the runs of a class that an interval holds


def wider(off: Errors, classes: dict[str, tuple[int, float, float]]) -> dict[str, Any]:
    """Runs and interval of precisions that the intervals of classes hold too seldom.

    It holds nine of ten of the errors of their runs, both held out and by shipped constants.
    """
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for run, error in off:
        price = price_run(run, Constants())
        names = classes_of(price.price.plan)
        most = next(classes[name][2] for name in names if name in classes)
        sizes = (abs(float(np.log1p(value))) for value in (error, price.error or 0.0, most))
        groups.setdefault(precision_of(price.price.plan), []).append((*sizes,))
    result = {}
    for name, own in sorted(groups.items()):
        unseen, shipped, most = np.array(own).T
        if len(own) >= _FEW and np.mean(unseen <= most) < _HOLDS:
            place = int(np.ceil(_INSIDE * len(own))) - 1
            size = np.expm1(max(np.sort(unseen)[place], np.sort(shipped)[place]))
            result[name] = (len(own), float(np.ceil(size * 1000) / 1000))
    return result


def _size(groups: "Grouped") -> int:
    """Number of runs of a class."""
    return sum(map(len, groups.values()))


def _interval(own: "Grouped") -> tuple[int, float, float]:
    """Runs, median error and interval of a class."""
    groups = [*own.values()]
    errors = np.expm1(np.concatenate(groups))
    most = float(np.expm1(limit(groups, level(groups))))
    return len(errors), round(float(np.median(np.abs(errors))), 3), round(most, 3)


def _wider_names(name: str) -> list[str]:
    """Names of the classes that contain one, the narrowest first."""
    parts = name.split(", ")
    return [", ".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]


Grouped = dict[tuple[str, str], FloatArray]  # errors of runs, as in `Groups`, by group


def by_class(off: Errors, names: Sequence[str] = ()) -> dict[str, Grouped]:
    """Errors by class, and in a class by source and model.

    A run counts in all of its classes, with `names` only in the narrowest of these.
    """
    classes: dict[str, dict[tuple[str, str], list[float]]] = {}
    for run, error in off:
        own = classes_of(price_run(run, Constants()).price.plan)
        for name in [name for name in own if name in names][:1] if names else own:
            classes.setdefault(name, {}).setdefault(run.group, []).append(
                float(np.log1p(error))
            )
    return {
        name: {group: np.array(own) for group, own in groups.items()}
        for name, groups in classes.items()
    }


def tells_more(own: Grouped, wider: Grouped) -> bool:
    """Whether the interval of a class scores better on its runs left out than a wider one's."""
    return interval_score(own, own) < interval_score(own, wider)


def interval_score(groups: Grouped, others: Grouped) -> float:
    """Mean score of the intervals that other groups give; less is better.

    An interval counts with its half width, and an error outside of it with ten times its
    distance: for intervals of nine of ten, that is the score of Gneiting and Raftery (2007,
    section 6.2). Infinite if nothing is left without a group.
    """
    scores = []
    for group, own in groups.items():
        rest = [values for name, values in others.items() if name != group]
        if not rest:
            return float("inf")
        most = limit(rest, level(rest))
        scores.append(most + np.maximum(0, np.abs(own) - most) / (1 - _INSIDE))
    return float(np.mean(np.concatenate(scores)))


def limit(groups: Groups, share: float) -> float:
    """Absolute error that a share of further runs has at most, if runs are exchangeable."""
    sizes = np.sort(np.abs(np.concatenate(groups)))
    return float(sizes[min(len(sizes), int(np.ceil(share * (len(sizes) + 1)))) - 1])


def left_out_inside(groups: Groups, share: float) -> float:
    """Share of runs in the interval that the other sources and models give."""
    inside = [
        np.abs(own) <= limit(groups[:n] + groups[n + 1 :], share)
        for n, own in enumerate(groups)
    ]
    return float(np.mean(np.concatenate(inside)))


def level(groups: Groups) -> float:
    """Smallest share of runs whose interval holds nine of ten runs of groups left out.

    Runs of one source and model err alike, so that an interval of nine of ten runs holds fewer
    of another source or model. Without other groups, it is nine of ten.
    """
    shares = np.linspace(_INSIDE, 1, 41)
    if len(groups) == 1:
        return float(shares[0])
    able = (share for share in shares if left_out_inside(groups, share) >= _INSIDE)
    return float(next(able, shares[-1]))


def ranked(off: Errors) -> dict[str, float]:
    """Difference of errors of two runs of one source and model, 90th percentile, by kind."""
    groups: dict[tuple[str, str], list[tuple[TrainingRun, float]]] = {}
    for run, error in off:
        groups.setdefault(run.group, []).append((run, float(np.log1p(error))))
    result = {}
    for kind in ("dense", "experts"):
        # Each group counts once, with the percentile of its pairs.
        most = [
            np.percentile([abs(x - y) for (_, x), (_, y) in combinations(own, 2)], 90)
            for own in groups.values()
            if len(own) >= _LEAST_GROUP and own[0][0].has_experts == (kind == "experts")
        ]
        result[kind] = round(float(np.expm1(np.median(most))), 3)
    return result


def held_out(classes: dict[str, tuple[int, float, float]]) -> str:
    """The table of errors on groups that the fit has not seen."""
    rows = [
        [name, str(runs), f"{median * 100:.1f} %", f"{1 + most:.2f}"]
        for name, (runs, median, most) in classes.items()
    ]
    return _table(["class", "runs", "median", "interval"], rows)


def coverage(off: Errors) -> str:
    """The table of the shares of runs in the interval of their class: of all, and left out."""
    shipped = [(run, price_run(run, Constants()).error or 0.0) for run, _ in off]
    all_of, rows = judged(shipped, [*SHIPPED]), []
    for name, grouped in sorted(judged(off, [*SHIPPED]).items()):
        groups, most = [*grouped.values()], np.log1p(SHIPPED[name][2])
        inside = np.mean(np.abs(np.concatenate([*all_of[name].values()])) <= most)
        out = left_out_inside(groups, level(groups)) if len(groups) > 1 else None
        shares = f"{inside:.0%}", "n/a" if out is None else f"{out:.0%}"
        shown = (share.replace("%", " %") for share in shares)
        rows.append([name, str(len(groups)), *shown])
    return _table(["class", "sources and models", "inside", "left out"], rows)


def _is_dense(row: RunPrice) -> bool:
    return not row.run.has_experts


def _is_routed(routing: str) -> Callable[[RunPrice], bool]:
    """A class of runs with experts, by how tokens are routed."""
    return lambda row: row.run.has_experts and row.price.plan.routing == routing


LONG = 32768
# Classes of runs, and the mean absolute error that each may have.
CLASSES: dict[str, tuple[Callable[[RunPrice], bool], float]] = {
    "dense": (_is_dense, 0.065),
    "experts, forced routing": (_is_routed("forced"), 0.12),
    "experts, natural routing": (_is_routed("natural"), 0.25),
    "A100": (lambda row: row.run.gpu in {"a100", "a100-40"}, 0.08),
    "H100": (lambda row: row.run.gpu == "h100", 0.10),
    "B200": (lambda row: row.run.gpu == "b200", 0.15),
    "GB200": (lambda row: row.run.gpu == "gb200", 0.10),
    "GB300 and B300": (lambda row: row.run.gpu in {"b300", "gb300"}, 0.13),
    "FSDP": (lambda row: row.price.plan.is_fsdp, 0.10),
    "sequences of 32K and more": (lambda row: row.price.plan.seq_len >= LONG, 0.15),
    "all": (lambda _row: True, 0.09),
}


def by_switches(rows: Sequence[RunPrice]) -> str:
    """The table of errors of runs with experts by GPU, precision, routing and software."""
    groups: dict[tuple[str, ...], list[RunPrice]] = {}
    for row in rows:
        plan = row.price.plan
        if row.run.has_experts:
            fused = "fused experts" if plan.fused_experts else "experts apart"
            graphs = "no graphs" if not plan.graphs else "graphs"
            if plan.graphs == "full":
                graphs = "step in a graph"
            software = f"{int(plan.year)}, {fused}, {graphs}"
            key = (gpu(plan.gpu).name, row.run.precision, plan.routing, software)
            groups.setdefault(key, []).append(row)
    lines = []
    for key, own in sorted(groups.items()):
        bias = float(np.median([row.error for row in own if row.error is not None]))
        lines.append([*key, str(len(own)), _share(mean_error(own)), f"{bias * 100:+.1f} %"])
    head = ["GPU", "precision", "routing", "software", "runs", "mean error", "bias"]
    return _table(head, lines)


def pairs(rows: Sequence[RunPrice]) -> str:
    """The table of measured and predicted gains of pairs of runs that differ in one switch."""
    by_id = {row.run.id: row for row in rows}
    lines = []
    for first, second, switch in PAIRS:
        if {first, second} <= set(by_id):
            one, other = by_id[first], by_id[second]
            measured = (other.run.measured or 0.0) / (one.run.measured or 1.0)
            own = other.price.tokens_per_s_per_gpu / one.price.tokens_per_s_per_gpu
            lines.append([f"{first}, {second}", switch, f"{measured:.2f}", f"{own:.2f}"])
    return _table(["runs", "switch", "measured", "predicted"], lines)


def worst(rows: Sequence[RunPrice]) -> str:
    """The table of the ten runs with experts that are furthest off, and why."""
    own = [row for row in rows if row.run.has_experts]
    own.sort(key=lambda row: -abs(row.error or 0.0))
    lines = []
    for row in own[:10]:
        plan = row.price.plan
        names = row.run.id, plan.model.name, f"{plan.gpus} {gpu(plan.gpu).name}"
        text = WHY.get(row.run.id, f"not known; {suspect(row)}")
        lines.append([*names, f"{(row.error or 0.0) * 100:+.0f} %", text])
    return _table(["run", "model", "GPUs", "error", "why, as far as known"], lines)


def _share(value: float) -> str:
    return f"{value * 100:.1f} %"


def vouched(runs: Iterable[TrainingRun], constants: Constants | None = None) -> list[RunPrice]:
    """The prices of measured runs whose throughput the source vouches for."""
    shipped = constants or Constants()
    return [price_run(run, shipped) for run in runs if run.is_usable]


def mean_error(rows: Iterable[RunPrice]) -> float:
    """Mean absolute error of the throughput."""
    return float(np.mean([abs(row.error or 0.0) for row in rows]))


def classes(rows: Sequence[RunPrice]) -> str:
    """The table of mean errors by class."""
    lines = []
    for name, (belongs, bar) in CLASSES.items():
        own = [row for row in rows if belongs(row)]
        bias = np.mean([row.error for row in own if row.error is not None])
        shares = f"{mean_error(own):.1%}", f"{bias:+.1%}", f"{bar:.1%}"
        lines.append([name, str(len(own)), *(share.replace("%", " %") for share in shares)])
    return _table(["class", "runs", "mean error", "bias", "bar"], lines)


_LEAST_GROUP = 5


def order(rows: Iterable[RunPrice], equal: float = 1.05) -> float:
    """Mean rank correlation of groups of a source and model, over pairs that differ.

    It is Spearman's coefficient, whose covariance and variances are sums over pairs, without
    the pairs whose throughput differs by at most the factor `equal`; with 1 of all pairs.
    """
    from scipy.stats import rankdata  # slow to import

    groups: dict[tuple[str, str], list[RunPrice]] = {}
    for row in rows:
        groups.setdefault(row.run.group, []).append(row)
    found = []
    for own in groups.values():
        measured = np.array([row.run.measured for row in own], np.float64)
        ranks = rankdata(measured)
        mine = rankdata([row.price.tokens_per_s_per_gpu for row in own])
        pairs = np.array(
            [
                (ranks[i] - ranks[j], mine[i] - mine[j])
                for i, j in combinations(range(len(own)), 2)
                if max(measured[i] / measured[j], measured[j] / measured[i]) > equal
            ]
        ).reshape(-1, 2)
        if len(own) >= _LEAST_GROUP and len(pairs):
            x, y = pairs.T
            found.append((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))
    return float(np.mean(found))


def left_out(runs: Sequence[TrainingRun]) -> str:
    """The table of mean errors with one constant at its start."""
    pairs = [("none", Constants())] + [
        (f"`{name}`", replace(Constants(), **{name: getattr(NEUTRAL, name)}))
        for name in CALIBRATED
    ]
    rows = [[name, f"{mean_error(vouched(runs, fit)) * 100:.1f} %"] for name, fit in pairs]
    return _table(["constant at its start", "mean error"], rows)


_IN_USE = re.compile(r"(\d+) GB in use on the device")


def memory_in_use(folder: Path, runs: Iterable[TrainingRun]) -> str:
    """The table of memory that a source states as in use on the device, and of predictions."""
    with (folder / "runs.csv").open(encoding="utf-8-sig", newline="") as file:
        comments = {row["id"]: row["comment"] for row in csv.DictReader(file)}
    rows = []
    for run in runs:
        match = _IN_USE.search(comments.get(run.id, ""))
        if match:
            price = price_run(run, Constants()).price
            stated, own = int(match[1]), price.memory_bytes / 1e9
            graphs = price.plan.graphs.replace("+", ", ") or "none"
            text = price.plan.precision, price.plan.recompute, graphs
            shares = str(stated), f"{own:.0f}", f"{(own / stated - 1) * 100:+.1f} %"
            rows.append([run.id, *text, *shares])
    head = ["run", "precision", "recompute", "graphs", "stated, GB", "predicted, GB", "error"]
    return _table(head, rows)


Jobs = dict[tuple[int, ...], list[tuple[float, float]]]


def node_jobs(path: Path, factor: float = FACTOR) -> Jobs:
    """Predicted and measured times of vTrain's iterations in s, by job.

    A job is a model (its hidden size, heads and layers come first), a length, a batch and a
    number of GPUs. `factor` takes the place of the host's factor of Megatron-DeepSpeed.
    """
    constants = replace(Constants(), host_layer_s=Constants().host_layer_s * factor / FACTOR)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [list(row.values()) for row in csv.DictReader(file)]
    jobs: Jobs = {}
    for row in rows:
        gpus, batch, micro, hidden, heads, layers, seq_len, tp, _dp, pp = map(int, row[:10])
        gpt = Model(
            name="gpt",
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            layers=layers,
            ffn=4 * hidden,
            vocab=51200,
            mlp="gelu",
            tied=True,
        )
        plan = Plan(
            model=gpt,
            gpu="a100",
            gpus=gpus,
            global_batch=batch,
            seq_len=seq_len,
            node_bytes_per_s=100e9,
            domain=8,
            tp=tp,
            pp=pp,
            micro_batch=micro,
            sharding="ddp",
            recompute="full",
            precision="fp16",
            trainer="deepspeed",
            overlap=False,
            year=2022.0,
        )
        pair = price_plan(plan, constants).step_s, float(row[10]) / 1e3
        jobs.setdefault((hidden, heads, layers, seq_len, gpus, batch), []).append(pair)
    return jobs


def single_node(jobs: Jobs) -> tuple[float, float, int]:
    """Mean error of the times, mean regret of the fastest, and number of jobs.

    The regret is the measured time of the predicted fastest over that of the fastest, minus 1.
    """
    off = [abs(mine / measured - 1) for pairs in jobs.values() for mine, measured in pairs]
    regret = [min(pairs)[1] / min(t for _, t in pairs) - 1 for pairs in jobs.values()]
    return float(np.mean(off)), float(np.mean(regret)), len(jobs)


def factor_held_out(path: Path) -> tuple[list[float], float, float]:
    """Factors fitted without one model, then mean error and regret on the jobs of each."""
    grid = {float(factor): node_jobs(path, factor) for factor in np.arange(1, 2.01, 0.05)}
    factors, judged = [], Jobs()
    for model in sorted({key[:3] for key in grid[1.0]}):

        def error(factor: float, out: tuple[int, ...] = model) -> float:
            return single_node({k: v for k, v in grid[factor].items() if k[:3] != out})[0]

        factors.append(min(grid, key=error))
        judged |= {k: v for k, v in grid[factors[-1]].items() if k[:3] == model}
    return factors, *single_node(judged)[:2]


def constants() -> str:
    """The table of the fitted constants."""
    rows = [
        [f"`{name}`", f"{getattr(NEUTRAL, name):g}", f"{getattr(Constants(), name):g}", meaning]
        for name, meaning in _MEANING.items()
    ]
    return _table(["constant", "before", "fitted", "meaning"], rows)


def terms(runs: Sequence[TrainingRun]) -> str:
    """The table of the constants of single terms, and the errors without each."""
    own = [run for run in runs if run.has_experts]
    rows = []
    for name, (absent, origin) in TERMS.items():
        without = mean_error(vouched(own, replace(Constants(), **{name: absent})))
        value = f"{getattr(Constants(), name):g}"
        rows.append([f"`{name}`", value, _share(without), origin])
    return _table(["constant", "value", "without", "what, and its origin"], rows)


def write_expected(runs: Iterable[TrainingRun], off: Errors) -> None:
    """Write the errors to expect, and the range of the runs."""
    classes = "".join(
        f'    "{name}": ({number}, {median:g}, {most:g}),\n'
        for name, (number, median, most) in expected(off).items()
    )
    few = wider(off, expected(off))
    apart = "".join(f'    "{name}": ({n}, {most:g}),\n' for name, (n, most) in few.items())
    pairs = "".join(f'    "{kind}": {most:g},\n' for kind, most in ranked(off).items())
    usual = [covered(price_run(run, Constants()).price) for run in runs if run.is_usable]
    ranges = ""
    for name in usual[0]:
        scale = 100 if name == "mfu" else 1
        values = [row[name] * scale for row in usual]
        low, high = np.floor(min(values)) / scale, np.ceil(max(values)) / scale
        ranges += f'    "{name}": ({low:g}, {high:.10g}),\n'
    text = EXPECTED.read_text("utf-8")
    blocks = {"EXPECTED": classes, "WIDER": apart, "RANKED": pairs, "COVERED": ranges}
    for name, lines in blocks.items():
        block = re.compile(rf"^{name} = {{\n.*?^}}\n", re.M | re.S)
        text = block.sub(lambda _, n=name, body=lines: f"{n} = {{\n{body}}}\n", text)
    EXPECTED.write_text(text, "utf-8")
    SHIPPED.clear()
    SHIPPED.update(expected(off))
    SHIPPED_WIDER.clear()
    SHIPPED_WIDER.update(few)


def page(folder: Path) -> str:
    """The whole page; writes the error to expect, too."""
    runs = load(folder).runs
    off = held_out_errors([run for run in runs if run.is_usable], NEUTRAL)
    write_expected(runs, off)
    rows = vouched(runs)
    routed = [row for row in rows if row.run.has_experts]
    dense = [row for row in rows if not row.run.has_experts]
    iterations = folder.parent / "isp" / "vtrain_single.csv"
    single, regret, jobs = single_node(node_jobs(iterations))
    plain, plain_regret, _ = single_node(node_jobs(iterations, 1.0))
    factors, *judged = factor_held_out(iterations)
    text = _ORDER.format(
        *(100 * share for share in (single, regret, plain, plain_regret, *judged)),
        order=order(dense),
        experts=order(routed),
        plain_order=order(dense, equal=1.0),
        plain_experts=order(routed, equal=1.0),
        fits=sum(row.price.fits for row in rows),
        runs=len(rows),
        groups=jobs,
        models=len(factors),
        factors=" or ".join(f"{factor:.2f}" for factor in sorted(set(factors))),
    )
    shares = {kind: _share(most) for kind, most in ranked(off).items()}
    experts = mean_error(routed)
    parts = [_HEAD.format(number=len(runs)), _GROUPS, groups(runs), in_band(runs)]
    parts += [_MEMORY, memory_in_use(folder, runs), _CLASSES, classes(rows)]
    parts += [_EXPERTS, by_switches(rows), _PAIRS, pairs(rows), _WORST, worst(rows), text]
    names = [f"{name} ({1 + most:.2f})" for name, (_, most) in SHIPPED_WIDER.items()]
    own = {"few": _FEW, "wider": ", ".join(names) or "none does"}
    parts += [_HELD_OUT.format(least=LEAST, **own, **shares)]
    parts += [held_out(SHIPPED), coverage(off)]
    parts += [_CONSTANTS, constants(), _LEFT_OUT, left_out(runs)]
    parts += [_TERMS.format(error=_share(experts)), terms(runs)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1])), "utf-8")
