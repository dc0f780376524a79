"""Results of `fastcomm plan price` and `fastcomm plan evaluate`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from fastcomm.errors import ConfigError
from fastcomm.hardware.clusters import Cluster
from fastcomm.hardware.expert_exchange import PHASES
from fastcomm.hardware.gpus import gpu
from fastcomm.models import Model
from fastcomm.planning.constants import Constants
from fastcomm.planning.expected import ExpectedError, expected_error
from fastcomm.planning.experts import (
    exchange_kernels,
    fullest_range,
    fullest_share,
    host_times,
)
from fastcomm.planning.job import Plan, date_text, job_of, measured_cluster, with_strategy
from fastcomm.planning.measured_runs import (
    FailedRow,
    GroupError,
    RunCalibration,
    RunPrice,
    errors,
)
from fastcomm.planning.options import PriceOptions
from fastcomm.planning.price import PlanPrice, layer_times, price_plan, work_by_half
from fastcomm.result import TableResult
from fastcomm.units import format_gib, format_s, signed_percent


def unmeasured(plan: Plan) -> list[str]:
    """Return what of the hardware is not measured, a sentence each."""
    chip = gpu(plan.gpu)
    texts = [f"{chip.name} is not measured: {chip.derived}"] if chip.derived else []
    most = max(ranks for lines in chip.collectives.values() for ranks in lines)
    groups = (plan.tp, plan.cp, plan.ep * plan.etp, plan.dp * plan.cp)
    if min(max(groups), plan.domain) > most:
        texts.append(
            f"collectives of more than {most} GPUs of an NVLink domain are not measured: "
            f"bandwidth of {most}"
        )
    return texts


def plan_of(options: PriceOptions, models: Mapping[str, Model]) -> tuple[Plan, str]:
    """Return the plan that options describe, and a note on what is not measured.

    Raises
    ------
    ConfigError
        If an option is missing or invalid, or the cluster names no measured GPU.

    """
    cluster = measured_cluster(options)
    plan = with_strategy(job_of(options, cluster, models), options.strategy or "")
    return plan, note_on(plan, cluster, _fitted_note(plan))


def note_on(plan: Plan, cluster: Cluster, fitted: str) -> str:
    """Return what of a plan's hardware is not measured, each sentence once.

    `fitted` is the note on constants that were fitted, or empty.
    """
    texts = [text for text in unmeasured(plan) if text not in cluster.note]
    return "; ".join(filter(None, (*texts, fitted, cluster.note)))


def _fitted_note(plan: Plan) -> str:
    """Return whether the exchange of experts of a plan has constants that were fitted."""
    fitted = plan.exchange_costs
    if fitted is None:
        return ""
    family, scope = exchange_kernels(plan)
    is_fitted = any((family, plan.gpu, scope, phase) in fitted.costs for phase in PHASES)
    if is_fitted and plan.ep > 1:
        return fitted.note([family])
    reason = f"none are of {family} {scope} NVLink domains"
    if plan.ep <= 1:
        reason = "ranks exchange no tokens"
    return f"constants of {fitted.path} have no effect: {reason}"


def strategy_text(plan: Plan) -> str:
    """Return the strategy of a plan as `--strategy` takes it: all that is not the default."""
    sizes = ("tp", "pp", "vp", "cp", "ep", "etp", "dp")
    parts = [f"{name}={getattr(plan, name)}" for name in sizes if getattr(plan, name) > 1]
    usual = {field.name: field.default for field in fields(Plan)}
    for name in _METHODS:
        value = getattr(plan, name)
        if name in _ALWAYS or value != usual[name]:
            parts.append(_pair(name, date_text(value) if name == "year" else value))
    return ",".join(parts)


def _pair(name: str, value: object) -> str:
    """Return a field and its value as `--strategy` takes them, such as "fused-experts=yes"."""
    text = {"True": "yes", "False": "no"}.get(str(value), str(value))
    return f"{name.replace('_', '-')}={text.replace(' ', '+')}"


_ALWAYS = ("micro_batch", "sharding", "recompute", "precision")
_METHODS = (
    *(*_ALWAYS, "dispatch", "graphs", "routing", "moments", "gradients", "trainer"),
    *("fused_experts", "fp8_attention", "overlap", "year"),
)


def summary(price: PlanPrice) -> dict[str, Any]:
    """Return the strategy of a price, its time, throughput and memory, as a JSON object."""
    return {
        "strategy": strategy_text(price.plan),
        "step_ns": price.step_s * 1e9,
        "tokens_per_s_per_gpu": price.tokens_per_s_per_gpu,
        "mfu": price.mfu,
        "memory_bytes": price.memory_bytes,
    }


def _terms(price: PlanPrice) -> list[dict[str, Any]]:
    """Return the terms of time and memory as JSON objects."""
    return [
        {
            "name": term.name,
            "level": term.level,
            "time_ns": term.value * 1e9 if kind == "time" else None,
            "bytes": term.value if kind == "memory" else None,
            "description": term.text,
        }
        for kind in ("time", "memory")
        for term in getattr(price, kind)
    ]


def _calibration(fit: RunCalibration | None) -> dict[str, Any] | None:
    """Return a calibration as a JSON object."""
    if fit is None:
        return None
    return {
        "runs": fit.runs,
        "groups": fit.groups,
        "median_error_before": fit.before,
        "median_error": fit.fitted,
        "median_error_held_out": fit.held_out,
        "constants": [
            {
                "name": name,
                "before": before,
                "after": after,
                "is_at_bound": name in fit.bounds_reached(),
            }
            for name, (before, after) in fit.changes().items()
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHalf:
    """A half of a layer with experts: time of host and GPU, both passes, in s."""

    name: str
    host_s: float
    gpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortcut:
    """A change of a strategy, and the step time in s and the memory in bytes with it.

    `change` has the keys of `--strategy` that differ, `strategy` all of them.
    """

    name: str
    change: str
    strategy: str
    step_s: float
    memory_bytes: float


_LEAST_GAIN = 5e-4  # share of the step from which on a shortcut is one


def _shortcut(row: Shortcut) -> dict[str, Any]:
    """Return a shortcut as a JSON object."""
    return {
        "name": row.name,
        "change": row.change,
        "strategy": row.strategy,
        "step_ns": row.step_s * 1e9,
        "memory_bytes": row.memory_bytes,
    }


_HALVES = ("attention, router and preprocessing", "dispatch, experts and combine")


def layer_halves(price: PlanPrice, constants: Constants) -> list[LayerHalf]:
    """Return host and GPU of a layer with experts, side by side; empty for a dense model."""
    experts = price.plan.model.experts
    if experts is None:
        return []
    host = host_times(price.plan, constants, experts)
    work = work_by_half(layer_times(price.plan, constants))
    return [
        LayerHalf(name=name, host_s=a, gpu_s=b)
        for name, a, b in zip(_HALVES, host, work, strict=True)
    ]


def shortcuts(price: PlanPrice, constants: Constants) -> list[Shortcut]:
    """Return the step time of a run with experts if one switch were set otherwise.

    Only changes that the trainer could run, that fit if the run does, and that shorten the step
    by 0.05 % or more are returned, the largest first.
    """
    plan = price.plan
    if plan.model.experts is None:
        return []
    kind, *ways = plan.dispatch.split()
    changes: dict[str, dict[str, Any]] = {
        "CUDA graphs of attention and router": {"graphs": "attn+moe_router+moe_preprocess"},
        "CUDA graph of the whole step": {"graphs": "full"},
        "half as many experts a rank": {"ep": 2 * plan.ep},
        "DeepEP as dispatcher": {"dispatch": " ".join(["deepep", *ways])},
        "HybridEP as dispatcher": {"dispatch": " ".join(["hybridep", *ways])},
        "exchange under another micro-batch": {
            "dispatch": " ".join([kind, "overlapped", *(w for w in ways if w != "overlapped")])
        },
    }
    if plan.precision == "mxfp8":
        changes["fused experts"] = {"fused_experts": True}
    results = []
    for name, values in changes.items():
        changed = replace(plan, **values)
        try:
            changed.check()
        except ConfigError:
            continue
        other = price_plan(changed, constants)
        is_shorter = other.step_s <= (1 - _LEAST_GAIN) * price.step_s
        if is_shorter and other.fits >= price.fits:
            pairs = (_pair(key, value) for key, value in values.items())
            row = Shortcut(
                name=name,
                change=",".join(pairs),
                strategy=strategy_text(changed),
                step_s=other.step_s,
                memory_bytes=other.memory_bytes,
            )
            results.append(row)
    return sorted(results, key=lambda row: row.step_s)


@dataclass(frozen=True, kw_only=True, repr=False)
class PriceResult(TableResult):
    """The price of one strategy, with the error to expect."""

    price: PlanPrice
    note: str
    calibration: RunCalibration | None = None
    constants: Constants = field(default_factory=Constants)

    @cached_property
    def halves(self) -> list[LayerHalf]:
        """Host and GPU of a layer with experts."""
        return layer_halves(self.price, self.constants)

    @cached_property
    def what_ifs(self) -> list[Shortcut]:
        """Changes of one switch that shorten a step with experts."""
        return shortcuts(self.price, self.constants)

    @property
    def fullest(self) -> tuple[float, tuple[float, float] | None] | None:
        """Rows of the fullest rank of experts over the mean: assumed, and nine of ten times.

        None if all ranks have equally many rows; without a range where it is not measured.
        """
        plan = self.price.plan
        experts = plan.model.experts
        if experts is None or (share := fullest_share(plan, experts)) == 1:
            return None
        return share, fullest_range(plan, experts)

    @property
    def expected(self) -> ExpectedError:
        """Error to expect of the throughput."""
        return expected_error(self.price)

    def contents(self) -> dict[str, Any]:
        """Return the JSON document."""
        price = self.price
        return {
            "model": price.plan.model.name,
            "gpu": gpu(price.plan.gpu).name,
            "is_measured": not gpu(price.plan.gpu).derived,
            "gpus": price.plan.gpus,
            **summary(price),
            "fits": price.fits,
            "expected_error": asdict(self.expected),
            "terms": _terms(price),
            "fullest_rank": self._fullest(),
            "layer": [
                {"name": row.name, "host_ns": row.host_s * 1e9, "gpu_ns": row.gpu_s * 1e9}
                for row in self.halves
            ],
            "what_ifs": [_shortcut(row) for row in self.what_ifs],
            "note": self.note,
            "calibration": _calibration(self.calibration),
        }

    def _fullest(self) -> dict[str, float | None] | None:
        """Return `fullest` as a JSON object."""
        if self.fullest is None:
            return None
        share, limits = self.fullest
        low, high = limits or (None, None)
        return {"share": share, "low": low, "high": high}

    def to_arrow(self) -> pa.Table:
        """Return the terms of the price as a table, one a row."""
        return pa.Table.from_pylist(_terms(self.price))

    def figures(self) -> dict[str, str]:
        """Return the key figures."""
        price = self.price
        return {
            "step": format_s(price.step_s),
            "tokens/s/GPU": f"{price.tokens_per_s_per_gpu:.0f}",
            "memory": format_gib(price.memory_bytes),
        }


def _row(row: RunPrice) -> dict[str, Any]:
    """Return a run as a JSON object."""
    run, price = row.run, row.price
    return {
        "id": run.id,
        "source": run.source,
        "model": price.plan.model.name,
        "gpu": run.gpu,
        "is_measured": not gpu(run.gpu).derived,
        "gpus": price.plan.gpus,
        "precision": run.precision,
        "strategy": strategy_text(price.plan),
        "quality": run.quality,
        "measured_tokens_per_s_per_gpu": run.measured,
        "predicted_tokens_per_s_per_gpu": price.tokens_per_s_per_gpu,
        "error": row.error,
        "expected_error": asdict(expected_error(price)),
        "measured_memory_gib": run.memory_gib,
        "predicted_memory_gib": price.memory_bytes / 2**30,
        "fits": price.fits,
        "note": "; ".join(filter(None, (run.note, *unmeasured(price.plan)))),
        "terms": _terms(price),
    }


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation(TableResult):
    """Runs of a table beside what is predicted for them."""

    rows: tuple[RunPrice, ...]
    failed: tuple[FailedRow, ...] = ()
    calibration: RunCalibration | None = None
    top: int | None = None  # most rows of the JSON document; None is all

    @cached_property
    def groups(self) -> list[GroupError]:
        """Errors by source, GPU, precision and kind of model, then of all rows."""
        return errors(self.rows)

    def contents(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "rows": [_row(row) for row in self.shown(self.top)],
            "failed": [asdict(row) for row in self.failed],
            "summary": [asdict(group) for group in self.groups],
            "calibration": _calibration(self.calibration),
        }

    def to_arrow(self) -> pa.Table:
        """Return the runs, one a row, without their terms."""
        rows = []
        for row in self.rows:
            values = {name: value for name, value in _row(row).items() if name != "terms"}
            values["expected_error"] = values["expected_error"]["median"]
            rows.append(values)
        return pa.Table.from_pylist(rows)

    def figures(self) -> dict[str, str]:
        """Return the key figures."""
        figures = {"runs": str(len(self.rows))}
        if self.groups:
            figures["median error"] = f"{self.groups[-1].median:.1%}"
        return figures

    def shown(self, top: int | None) -> Sequence[RunPrice]:
        """Return all runs, or `top`: with measurements, those with the largest errors."""
        if top is None or not self.groups:
            return self.rows[:top]
        usual = [row for row in self.rows if row.run.is_usable]
        return sorted(usual, key=lambda row: -abs(row.error or 0.0))[:top]


def suspect(row: RunPrice) -> str:
    """Return the longest term beside GEMM whose change would explain the error."""
    total, *terms = row.price.time
    off = total.value * (1 + (row.error or 0.0)) - total.value  # measured minus predicted
    able = [term for term in terms if term.value > 0 and term.value + off >= 0]
    usual = [term for term in able if term.name != "GEMM"] or able
    if not usual:
        return "no single term explains the error"
    longest = max(usual, key=lambda term: term.value)
    change = signed_percent(off / longest.value, 0)
    return f"{longest.name} {format_s(longest.value)}, {change} to be exact"
