"""FLOPs of the steps of a run: executed, of the model, and near which bound; slow GEMMs.

FLOPs are float64: those of a long run exceed 64-bit integers, and are exact up to 2**53.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.checks import shortened
from fastcomm.device_work.attribution import Work, absent_name
from fastcomm.device_work.costs import WorkCosts
from fastcomm.device_work.formulas import MATRIX, RULES
from fastcomm.device_work.names import COPY, WAITING
from fastcomm.hardware.gpus import Roof, StepFlops
from fastcomm.units import counted, percent
from fastcomm_kernels.arrays import Floats, Ints

# Sums of the work of a row: FLOPs and bytes, time of the work of which they are known, and
# time at the peak and at the memory's bandwidth.
COSTS = (
    *("flops", "flops_ns", "peak_ns", "peak_of_ns", "bytes", "bytes_ns", "memory_ns"),
    "matrix_ns",  # time of GEMMs, attention and convolutions
)
PROBLEMS = pa.schema(
    [
        *[("problem", pa.string()), ("precision", pa.string())],  # "4096x1024x512", "bf16"
        ("count", pa.int64()),
        *[(name, pa.float64()) for name in ("total_ns", "peak_ns", "memory_ns")],
        ("measured_ns", pa.float64()),  # of such GEMMs on this GPU elsewhere; NaN: not measured
    ]
)
# Above this share of the time of GEMMs, attention and convolutions, unknown FLOPs count.
_MOST_UNKNOWN = 0.05
_MOST_WITHOUT_PEAK = 0.01  # of the FLOPs
_MOST_PROBLEMS = 1 << 12  # of a rank: the longest
NEAR = 0.2  # share of a bound from which on work is near it
# GEMMs are a finding if they take this share of the step, and so many times as long as others
# on this GPU, or else as at a share of their bound that large ones reach. Measured times of
# GEMMs differ by 5 % from what is expected (the median), clocks of GPUs by up to 20 %: a fix of
# a smaller factor need not exist.
_LEAST_SHARE, _LEAST_FACTOR, _USUALLY_REACHED = 0.03, 1.5, 0.6
_SINGLE = re.compile(r"(\d+)x(\d+)x(\d+)")
_MOST_FINDINGS = 3
NO_PEAK = "the peak of the GPU {gpu} is not known: pass --gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFlops:
    """FLOPs of the steps of one rank; times in ns."""

    gpu: str | None  # whose peaks count, as fastcomm names it
    device: str | None  # name in the trace
    executed: float  # of GEMMs, attention and convolutions
    model: float | None  # without recomputation
    model_reason: str | None
    at_peak_ns: float  # time of the executed FLOPs at the peak
    without_peak: float  # executed FLOPs in a precision of unknown peak
    matrix_ns: int  # time of kernels of GEMMs, attention and convolutions
    covered_ns: int  # of these, of which FLOPs are known
    compute_ns: int
    kinds_ns: dict[str, int]
    memory_bound_ns: int
    reasons: dict[str, int] = field(default_factory=dict)
    uncovered_ns: dict[str, int] = field(default_factory=dict)  # by operator; if it is much

    @classmethod
    def of(cls, work: Work, costs: WorkCosts, chosen: Ints, duration: Ints) -> Self:
        """Sum up the costs of the chosen rows of work, which take `duration` ns each."""
        code, labels = work.categories
        category = code[chosen]
        sums = [int(duration[category == place].sum()) for place in range(len(labels))]
        time = dict(zip(labels, sums, strict=True))
        is_matrix = np.isin(category, [labels.index(label) for label in MATRIX])
        share = costs.share[chosen]
        operator = costs.operator[chosen]
        inside = operator >= 0
        # Operators whose work is not in the steps do not count, or count in part.
        part = np.bincount(
            operator[inside], weights=share[inside], minlength=len(costs.operators.row)
        )
        part = np.where(costs.operators.is_matrix, part, 0.0)
        flops = costs.operators.column("flops") * part
        at_peak = costs.peak_ns * part
        model = costs.model_flops
        covered, whole = (
            int(duration[flags].sum()) for flags in (is_matrix & inside, is_matrix)
        )
        return cls(
            gpu=None if costs.roof is None else costs.roof.gpu,
            device=work.trace.meta.gpu,
            executed=float(flops.sum()),
            model=None if isinstance(model, str) else float((model * part).sum()),
            model_reason=model if isinstance(model, str) else None,
            at_peak_ns=float(np.nansum(at_peak)),
            without_peak=float(flops[np.isnan(at_peak)].sum()),
            matrix_ns=whole,
            covered_ns=covered,
            compute_ns=sum(time.values()) - sum(time[label] for label in (*WAITING, COPY)),
            kinds_ns={label: time[label] for label in MATRIX},
            memory_bound_ns=int(
                duration[costs.is_memory_bound[chosen] & (category != labels.index(COPY))].sum()
            ),
            reasons=costs.operators.reasons,
            uncovered_ns=_by_operator(work, chosen, duration * (is_matrix & ~inside))
            if covered < (1 - _MOST_UNKNOWN) * whole
            else {},
        )


def _by_operator(work: Work, chosen: Ints, ns: Ints) -> dict[str, int]:
    """Return the time of chosen rows of work by operator, without operators that take none."""
    code, labels = work.labels("operator", full_names=True)
    total = np.zeros(len(labels), np.int64)
    np.add.at(total, code[chosen], ns)
    return {labels[place]: int(total[place]) for place in np.flatnonzero(total).tolist()}


def problems(costs: WorkCosts, chosen: Ints, duration: Ints) -> pa.Table:
    """Return the time of the chosen work of GEMMs by their size: PROBLEMS, the longest."""
    operators, operator = costs.operators, costs.operator[chosen]
    inside = operator >= 0
    spent = np.bincount(
        operator[inside], weights=duration[inside], minlength=len(operators.row)
    )
    rows: dict[tuple[str, str], Floats] = {}
    measured: dict[tuple[str, str], float] = {}
    columns = operators.cost, spent, costs.peak_ns, costs.memory_ns
    for place, total, peak, memory in zip(*(c.tolist() for c in columns), strict=True):
        one = operators.costs[place]
        if one.problem and total:
            key = one.problem, one.precision
            if key not in rows:
                rows[key] = np.zeros(5)
                measured[key] = _measured_ns(costs.roof, *key)
            rows[key] += 1, total, peak, memory, measured[key]
    longest = sorted(rows.items(), key=lambda item: (-item[1][1], item[0]))[:_MOST_PROBLEMS]
    table = [[*key, int(values[0]), *values[1:].tolist()] for key, values in longest]
    records = [dict(zip(PROBLEMS.names, values, strict=True)) for values in table]
    return pa.Table.from_pylist(records, schema=PROBLEMS)


def _measured_ns(roof: Roof | None, problem: str, precision: str) -> float:
    """Return the measured time of a GEMM on a GPU in ns; NaN if it is unknown."""
    match = _SINGLE.fullmatch(problem)
    if roof is None or match is None:
        return math.nan
    m, n, k = map(int, match.groups())
    ns = roof.measured_gemm_ns((m, n, k), precision)
    return math.nan if ns is None else ns


def merged_problems(tables: Sequence[pa.Table]) -> pa.Table:
    """Add up the GEMMs of several ranks by their size."""
    whole = pa.concat_tables(tables)
    keys, names = PROBLEMS.names[:2], PROBLEMS.names[2:]
    sums = whole.group_by(keys, use_threads=False).aggregate([(name, "sum") for name in names])
    table = sums.rename_columns(PROBLEMS.names).cast(PROBLEMS)
    return table.sort_by([("total_ns", "descending"), ("problem", "ascending")])


def step_flops(ranks: Sequence[RankFlops | str], steps: int, step_ns: int) -> StepFlops:
    """Return the FLOPs of the mean step of a rank.

    Parameters
    ----------
    ranks
        The FLOPs of each rank; a text says why those of a rank are unknown.
    steps
        Number of steps of all ranks together.
    step_ns
        Duration of all these steps.

    """
    numbers = [rank for rank in ranks if not isinstance(rank, str)]
    if reason := next((rank for rank in ranks if isinstance(rank, str)), None):
        return StepFlops.without(reason)
    if not numbers:
        return StepFlops.without("no rank has device work")
    executed, matrix = sum(rank.executed for rank in numbers), sum(r.matrix_ns for r in numbers)
    covered = sum(rank.covered_ns for rank in numbers) / matrix if matrix else None
    gpus = {rank.gpu for rank in numbers}
    unknown = _why_unknown(numbers, steps, executed, covered)
    values = {"executed_per_step": executed / max(steps, 1)}
    peak_share = sum(rank.at_peak_ns for rank in numbers) / max(step_ns, 1)
    values["hfu"] = peak_share
    if "mfu" not in unknown:
        model = sum(rank.model or 0.0 for rank in numbers)
        values["model_per_step"] = model / max(steps, 1)
        values["mfu"] = peak_share * model / executed if executed else 0.0
    return StepFlops(
        **{name: value for name, value in values.items() if name not in unknown},
        gpu=gpus.pop() if len(gpus) == 1 else None,
        covered=covered,
        shares=_time_shares(numbers),
        unknown=unknown,
    )


def _why_unknown(
    ranks: Sequence[RankFlops], steps: int, executed: float, covered: float | None
) -> dict[str, str]:
    """Return why values of the step are unknown, by their names."""
    names = ("executed_per_step", "hfu", "mfu")
    unknown: dict[str, str] = {}
    without_peak = sum(rank.without_peak for rank in ranks)
    if any(rank.gpu is None for rank in ranks):
        device = next(rank.device for rank in ranks if rank.gpu is None)
        unknown = dict.fromkeys(("hfu", "mfu"), NO_PEAK.format(gpu=device or "n/a"))
    elif executed and without_peak > _MOST_WITHOUT_PEAK * executed:
        reason = (
            f"{percent(without_peak / executed)} of the FLOPs have a precision whose peak is "
            "not known: whether fp32 runs on tensor cores is not recorded"
        )
        unknown = dict.fromkeys(("hfu", "mfu"), reason)
    for rank in ranks:
        if rank.model_reason:
            unknown["mfu"] = rank.model_reason
    if covered is not None and covered < 1 - _MOST_UNKNOWN:
        unknown = dict.fromkeys(names, _uncovered(ranks, covered))
    if not steps:
        unknown = dict.fromkeys(names, "no steps")
    if "mfu" in unknown:
        unknown["model_per_step"] = unknown["mfu"]
    return unknown


def _uncovered(ranks: Sequence[RankFlops], covered: float) -> str:
    """Return the reason for unknown FLOPs: the operator with most of it, and its reason.

    That is the most frequent one of operators with a formula; others have none.
    """
    reasons: Counter[str] = Counter()
    uncovered: Counter[str] = Counter()
    for rank in ranks:
        reasons.update(rank.reasons)
        uncovered.update(rank.uncovered_ns)
    ((largest, _),) = uncovered.most_common(1)
    detail = f"those of {shortened(largest)}: no formula for this operator"
    if largest in RULES and reasons:
        why, count = reasons.most_common(1)[0]
        detail = f"those of {shortened(largest)}; {counted(count, 'operator')}: {why}"
    elif largest == absent_name("operator"):
        detail = "those without an operator around their launch"
    return (
        f"the FLOPs of {percent(1 - covered)} of the time of GEMM, attention and convolution "
        f"kernels are unknown, mostly {detail}"
    )


def _time_shares(ranks: Sequence[RankFlops]) -> dict[str, float | None]:
    """Return shares of the time of compute kernels."""
    compute = sum(rank.compute_ns for rank in ranks)
    if not compute:
        return {}
    shares: dict[str, float | None] = {
        label.lower(): sum(rank.kinds_ns[label] for rank in ranks) / compute for label in MATRIX
    }
    memory = sum(rank.memory_bound_ns for rank in ranks) / compute
    has_roof = all(rank.gpu is not None for rank in ranks)
    return {**shares, "memory_bound": memory if has_roof else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGemm:
    """GEMMs of one size that take longer than others on such a GPU, or than large ones."""

    problem: str
    precision: str
    count: int
    total_ns: float
    share: float  # of the step
    reached: float  # of the bound
    bound: str  # "compute" or "memory"
    plausible: float  # share of the bound that they could reach
    is_measured: bool  # whether this share was measured on such a GPU
    cost_share: float  # of the step, which it would save

    @property
    def text(self) -> str:
        """Return the finding as a sentence without its period."""
        limit = "peak" if self.bound == "compute" else "the memory bandwidth"
        others = "others on such GPUs" if self.is_measured else "large GEMMs often"
        return (
            f"GEMMs of {self.problem} ({self.precision}) reach {percent(self.reached)} of "
            f"{limit}: {percent(self.share)} of the step; {others} reach "
            f"{percent(self.plausible)}, which saves up to {percent(self.cost_share)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"kind": "slow_gemm", "text": self.text, **asdict(self)}


def slow_gemms(table: pa.Table, step_ns: int) -> tuple[SlowGemm, ...]:
    """Return the GEMMs that take much of the steps and longer than they need to.

    They take at least `_LEAST_SHARE` of the steps, and `_LEAST_FACTOR` times as long as GEMMs
    of this size that were measured on such a GPU; where none were, as at `_USUALLY_REACHED` of
    the bound. At most `_MOST_FINDINGS`, the most lost time first. GEMMs without a known peak
    are left out.

    Parameters
    ----------
    table
        GEMMs of all ranks by problem and precision, as `merged_problems` returns them.
    step_ns
        Time of the steps, summed over all ranks; with 0 the result is empty.

    """
    slow = []
    for row in table.to_pylist() if step_ns else ():
        total, at_bound = row["total_ns"], max(row["peak_ns"], row["memory_ns"])
        if math.isnan(at_bound) or total < _LEAST_SHARE * step_ns:
            continue
        is_measured = not math.isnan(row["measured_ns"])
        needed = row["measured_ns"] if is_measured else at_bound / _USUALLY_REACHED
        if total < _LEAST_FACTOR * max(needed, at_bound):
            continue
        slow.append(
            SlowGemm(
                **{name: row[name] for name in ("problem", "precision", "count")},
                total_ns=total,
                share=total / step_ns,
                reached=at_bound / total,
                bound="compute" if row["peak_ns"] >= row["memory_ns"] else "memory",
                plausible=at_bound / max(needed, at_bound),
                is_measured=is_measured,
                cost_share=(total - max(needed, at_bound)) / step_ns,
            )
        )
    return tuple(sorted(slow, key=lambda one: -one.cost_share)[:_MOST_FINDINGS])


def row_costs(
    costs: WorkCosts, rows: Ints, duration: Ints, *, of_operators: bool
) -> dict[str, Floats]:
    """Return what is summed up for rows of work, by the names of COSTS; 0 where unknown.

    With `of_operators`, time of which FLOPs are known is that of all work of an operator, and
    else that of its main kernels.
    """
    operator, share, operators = costs.operator[rows], costs.share[rows], costs.operators
    is_known = (operator >= 0) & (of_operators | (share > 0))
    has_peak = is_known & ~np.isnan(np.append(costs.peak_ns, np.nan)[operator])
    is_matrix = is_known & np.append(operators.is_matrix, False)[operator]
    times = {
        **dict.fromkeys(("flops_ns", "bytes_ns"), is_known),
        "peak_of_ns": has_peak,
        "matrix_ns": is_matrix,
    }
    of_operator = {name: operators.column(name) for name in ("flops", "bytes")}
    of_operator |= {"peak_ns": costs.peak_ns, "memory_ns": costs.memory_ns}
    values = {
        name: np.nan_to_num(np.append(column, np.nan)[operator] * share)
        for name, column in of_operator.items()
    }
    return {**values, **{name: np.where(flags, duration, 0.0) for name, flags in times.items()}}


def cost_columns(rows: pa.Table, table: pa.Table, *, has_roof: bool) -> dict[str, pa.Array]:
    """Return the columns of FLOPs and bytes; null where no event has a known cost.

    Parameters
    ----------
    rows
        Sums of each rank, with the columns `name` and COSTS.
    table
        The rows of the result, with `name` and `total_ns`.
    has_roof
        Whether the peaks of all GPUs are known.

    """
    sums = rows.group_by("name").aggregate([(name, "sum") for name in COSTS])
    place = pc.index_in(table["name"].combine_chunks(), sums["name"].combine_chunks())
    own = {name: sums[f"{name}_sum"].take(place).to_numpy() for name in COSTS}
    is_known = own["flops_ns"] > 0

    def ratio(above: str, below: str, scale: float = 1.0) -> Floats:
        unknown = np.full(len(is_known), np.nan)
        np.divide(own[above] * scale, own[below], out=unknown, where=own[below] > 0)
        return unknown

    peak, memory = ratio("peak_ns", "peak_of_ns"), ratio("memory_ns", "bytes_ns")
    memory = memory if has_roof else np.full(len(memory), np.nan)
    columns = {
        "flops": np.where(is_known, np.rint(own["flops"]), np.nan),
        "bytes": np.where(is_known, np.rint(own["bytes"]), np.nan),
        "flops_covered": np.where(
            is_known, own["flops_ns"] / np.maximum(table["total_ns"].to_numpy(), 1), np.nan
        ),
        "tflops_per_s": ratio("flops", "flops_ns", 1e-3),
        "peak_share": peak,
        "bytes_per_s": ratio("bytes", "bytes_ns", 1e9),
        "memory_share": memory,
    }
    columns_ = peak, memory, own["matrix_ns"] > 0
    bounds = [_bound(*row) for row in zip(*(c.tolist() for c in columns_), strict=True)]
    return {
        **{name: pa.array(values, from_pandas=True) for name, values in columns.items()},
        "bound": pa.array(bounds, pa.string()),
    }


def _bound(peak: float, memory: float, is_matrix: bool) -> str | None:
    """Return the bound that work is near, by its shares of both; None if they are unknown."""
    if math.isnan(memory):
        return None
    if not math.isnan(peak) and peak > memory:
        return "compute" if peak >= NEAR else "neither"
    if memory >= NEAR:
        return "memory"
    return None if is_matrix and math.isnan(peak) else "neither"
