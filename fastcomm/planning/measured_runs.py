"""Tables of training runs, priced row by row; fit of the constants of prices to them.

A table is a CSV file with one run a row. Only `model`, `gpu`, `gpus`, `global_batch` and
`seq_len` are needed; a strategy that is empty or "unknown" is tried over its usual values, and
the fastest that fits counts.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fastcomm.checks import RANKS, Range, invalid, invalid_value, shortened
from fastcomm.errors import ConfigError
from fastcomm.hardware.clusters import load_node
from fastcomm.hardware.gpus import FloatArray, gpu
from fastcomm.models import PRESETS, Model, read_table
from fastcomm.planning.constants import CALIBRATED, Constants
from fastcomm.planning.expected import class_name, expected_error
from fastcomm.planning.job import (
    MODULES,
    UNKNOWN,
    YEAR,
    Plan,
    parse_date,
    parse_switch,
    virtual_stages,
)
from fastcomm.planning.price import PlanPrice, price_plan
from fastcomm.planning.trainers import DEFAULT
from fastcomm.units import GIB, parse_quantity

REQUIRED = ("model", "gpu", "gpus", "global_batch", "seq_len")
_ROW = Mapping[str, str]
_MOST = 1 << 50  # sequences, tokens
_LEAST = 1e-6  # of measured quantities
_NODE = 8  # GPUs of a usual node; an NVLink domain of more has many nodes
_TRAY = 4  # GPUs of each of these
_TRIED = {
    "micro_batch": ("1", "2", "4", "8"),
    "recompute": ("none", "selective", "full"),
    "sharding": ("zero1", "zero3"),
}
_DEEPEP, _HYBRIDEP = 2025.25, 2025.8  # years from which on trainers had them
_SHARES = (0.25, 0.75)  # of the layers, to try if recompute of some does not say of how many
_DETAIL = "recompute_detail"
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
_WATTS, _GIGABYTES = Range(50, 5000), Range(8, 2048)
_VARIANT = {"memory": (r"(\d+)\s*Gi?B\b", _GIGABYTES), "power": (r"(\d+)\s*W\b", _WATTS)}
# Trainers by source of published runs, and of its rows with other sharding.
_SOURCES = {
    "llm-foundry": "fsdp",
    "torchtitan": "fsdp2",
    "automodel": "fsdp2",
    "megatron-bridge": "nemo",
    "dgxc-benchmarking": "nemo",
    "deepseek-v3-report": "nemo",
    "megatron-bridge-cards": "nemo",
    "megatron-bridge-skills": "nemo",
    "mcore-moe-paper": "nemo",
    "gpu-tpu-pedia": "nemo",
    "nemo-docs": "nemo",
}
_SHARDED = {"": "fsdp2", "nemo": "nemo-fsdp", "megatron": "nemo-fsdp"}
_FUSED_EXPERTS = 2026.4  # year from which on graphs of a whole step imply fused experts
_FOLDS = 5
_WITHIN = {  # a constant outside would lose its meaning
    "network_share": (0.3, 0.95),
    "overlap_loss": (0.01, 1.0),
    "tp_exposed": (0.05, 1.0),
    "elementwise": (0.5, 4.0),
    "gemm_slowdown": (0.9, 1.5),
    "host_layer_s": (1e-5, 20e-3),
    "host_experts": (1.0, 15.0),
    "host_expert": (0.01, 1.0),
    "exchange_slowdown": (0.8, 3.0),
    "straggling": (1e-4, 0.02),
    "step_s": (1e-4, 1.0),
}
# Weight of the squared distance to the shipped constants, in logarithms: a constant that no run
# tells stays. For few runs it is that for one, over the root of their number: a single run has
# too many explanations to move a constant far.
_PULL, _PULL_OF_ONE = 0.1, 0.6
_SCALE = 0.03  # error from which on a run counts linearly
_AT_BOUND = 0.005  # relative distance of a constant to the end of its range


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A row of a table: the plans that it may mean, and what was measured."""

    id: str
    source: str
    group: tuple[str, str]  # source and model: what cross-validation holds out together
    gpu: str
    precision: str
    plans: tuple[Plan, ...]
    measured: float | None  # tokens/s/GPU
    memory_gib: float | None
    quality: str = "ok"
    note: str = ""  # rule that the strategy breaks, though it ran

    @property
    def is_usable(self) -> bool:
        """Whether the run has a throughput that the source vouches for."""
        return self.measured is not None and self.quality in {"ok", "flops"}

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.plans[0].model.experts is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """A row of a table that cannot be priced: the line where it ends, its id, and why."""

    line: int
    id: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    """The runs of a table, and its rows that cannot be priced."""

    runs: tuple[TrainingRun, ...]
    failed: tuple[FailedRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrice:
    """A run and the price of its fastest plan that fits, or of the smallest if none fits."""

    run: TrainingRun
    price: PlanPrice

    @property
    def error(self) -> float | None:
        """Relative error of the throughput; None without a measurement."""
        measured = self.run.measured
        return self.price.tokens_per_s_per_gpu / measured - 1 if measured else None

    @property
    def is_expected(self) -> bool | None:
        """Whether the throughput is in the interval to expect; None if either is unknown."""
        measured = self.run.measured
        return expected_error(self.price).holds(measured) if measured else None

    @property
    def memory_error(self) -> float | None:
        """Relative error of the memory; None without a measurement."""
        measured = self.run.memory_gib
        return self.price.memory_bytes / 2**30 / measured - 1 if measured else None


def load_runs(path: Path, models: Mapping[str, Model]) -> RunTable:
    """Return the runs of a table, and the rows that cannot be priced.

    Parameters
    ----------
    path
        A CSV file with a header.
    models
        Shapes by name; other models are presets.

    Raises
    ------
    ConfigError
        If it is no such table, or a needed column is missing.

    """
    runs: list[TrainingRun] = []
    failed: list[FailedRow] = []
    lines: dict[str, int] = {}
    for place, row in enumerate(read_table(path, REQUIRED), 1):
        name = row.values.get("id", "")
        try:
            if row.problem:
                raise ConfigError(row.problem)
            if name in lines:
                raise ConfigError(f"id {shortened(name)} is that of line {lines[name]}")
            runs.append(_run(row.values, models, name or str(place)))
        except ConfigError as error:
            failed.append(FailedRow(line=row.line, id=name, error=str(error)))
        if name:
            lines.setdefault(name, row.line)
    return RunTable(runs=tuple(runs), failed=tuple(failed))


def _run(row: _ROW, models: Mapping[str, Model], name: str) -> TrainingRun:
    model = _named_model(row["model"], models)
    measured = _positive(row, "tokens_per_s_per_gpu")
    plans, note = _plans(row, model, ran=measured is not None)
    source = row.get("source", "") or "own"
    return TrainingRun(
        id=name,
        source=source,
        group=(source, model.name),
        gpu=plans[0].gpu,
        precision=plans[0].precision,
        plans=plans,
        measured=measured,
        memory_gib=_positive(row, "memory_gib"),
        quality=row.get("quality", "") or "ok",
        note=note,
    )


def _named_model(name: str, models: Mapping[str, Model]) -> Model:
    """Return a model of a table or a preset; a name in a table of runs opens no file."""
    model = models.get(name) or PRESETS.get(name.lower())
    if model is None:
        names = ", ".join([*models, *PRESETS])
        raise ConfigError(
            f"unknown model {shortened(name)}: expected one of {names}; --models "
            "takes a table of others"
        )
    return model


def _positive(row: _ROW, name: str) -> float | None:
    """Return the number of a column; None where it is empty."""
    text = row.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not _LEAST <= value <= _MOST:
        raise invalid(name, shortened(text), f"a number above 0, {_LEAST:g} to {_MOST:.0e}")
    return value


def _whole(row: _ROW, name: str, default: str = "", most: float = RANKS.most) -> int:
    """Return the whole number of a column; "8,192" has a separator of thousands."""
    text = row.get(name, "") or default
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return parse_quantity(text, name, most)


def gpu_of(name: str, memory: float | None = None) -> str:
    """Return the shipped GPU of a name, and of the memory of its variant in bytes."""
    name = name.lower()
    return "a100-40" if name == "a100" and memory == 40 * GIB else name


def _variant(text: str) -> tuple[float | None, float | None]:
    """Return memory (bytes) and power limit (W) of a variant such as "96 GB, 500 W"."""
    numbers: list[float | None] = []
    for name, (pattern, valid) in _VARIANT.items():
        number = _amount(text, pattern)
        if number is not None:
            valid.check(number, f"gpu_variant: {name}")
        numbers.append(number)
    memory, power = numbers
    if text and memory is None and power is None:
        raise invalid_value("gpu_variant", text, 'memory or power, as in "96 GB, 500 W"')
    return memory and memory * GIB, power


def base_plan(row: _ROW, model: Model) -> Plan:
    """Return the plan of a row with its job, and the defaults of a strategy."""
    detail = row.get(_DETAIL, "")
    memory, power = _variant(row.get("gpu_variant", ""))
    name = gpu_of(row["gpu"], memory)
    usual = gpu(name).watts
    domain, node_bytes_per_s = _network(row, name)
    overlap, date = row.get("overlap", "").lower(), row.get("date", "").partition(",")[0]
    if "w/o MTP" in row.get("comment", ""):
        model = replace(model, mtp_layers=0)
    return Plan(
        model=model,
        gpu=name,
        gpus=_whole(row, "gpus"),
        global_batch=_whole(row, "global_batch", most=_MOST),
        seq_len=_whole(row, "seq_len", most=_MOST),
        node_bytes_per_s=node_bytes_per_s,
        domain=domain,
        precision=(row.get("precision") or "bf16").lower(),
        overlap=overlap in {"", UNKNOWN} or parse_switch(overlap, "overlap"),
        gradients=row.get("gradients", "").lower(),
        trainer=_trainer(row),
        year=parse_date(date, "date") if date else YEAR,
        graphs=row.get("graphs", "").lower() or _graphs(detail),
        **_switches(row),
        offloaded=int(_amount(detail, r"activations of (\d+) layers offloaded") or 0),
        memory=memory,
        power_share=min(1.0, (power or usual) / usual),
    )


def _network(row: _ROW, name: str) -> tuple[int, float]:
    """Return the GPUs of an NVLink domain, and its bandwidth to others in bytes per second.

    A domain is a node, but in racks such as NVL72 it has many nodes: a number above that of a
    tray is the size of another rack, as NVL36. The links are by default the ones of the
    cluster of the GPU's name.
    """
    usual, links = load_node(name)
    own = _NODE if usual <= _NODE else _TRAY
    per_node = _whole(row, "gpus_per_node", str(own))
    domain = usual if usual > _NODE and per_node <= _TRAY else per_node
    if gbps := _positive(row, "node_gbps"):
        return domain, gbps * 1e9 / 8 * domain / per_node
    return domain, links.inter_bytes_per_s * domain


def _trainer(row: _ROW) -> str:
    """Return the trainer of a row: its column, or what its source and sharding tell."""
    if own := row.get("trainer", "").lower():
        return own
    usual = _SOURCES.get(row.get("source", ""), "")
    if row.get("sharding", "").lower().startswith(("zero3", "hsdp")):
        return _SHARDED.get(usual, usual)
    return usual or DEFAULT


def _amount(text: str, pattern: str) -> float | None:
    """Return the number of a pattern in a text; None if there is none."""
    match = re.search(pattern, text)
    return float(match[1]) if match else None


def _graphs(text: str) -> str:
    """Return the parts that CUDA graphs replace, by a text such as "CUDA graphs: attn,mlp"."""
    _, mark, parts = text.partition("CUDA graphs")
    names = re.split(r"[,\s]+", parts.lstrip(": ").strip()) if mark else []
    return "full" if mark and (not names[0] or "full" in names[0]) else "+".join(names)


def _recomputed(row: _ROW) -> str:
    """Return the column `recompute`, or the parts of a layer that its detail names."""
    text, detail = row.get("recompute", "").lower(), row.get(_DETAIL, "")
    names = re.split(r"[,\s]+", detail.partition("CUDA graphs")[0].strip())
    parts = [name for name in names if name in MODULES]
    if text == "partial" and re.search(r"query.*key.*value.*output", detail):
        return "all_but_qkv_out"
    return "+".join(parts) if parts and text == "selective" else text


def _switches(row: _ROW) -> dict[str, Any]:
    """Return how tokens are routed and what is fused, by columns or by the comment."""
    comment = row.get("comment", "")
    switches: dict[str, Any] = {
        "routing": "natural" if "natural routing" in comment else "forced",
        "fused_experts": "fused grouped expert products with" in comment,
        "fp8_attention": "attention in FP8" in comment,
        "moments": "bf16" if "moments in bf16" in comment else "fp32",
    }
    for name in ("routing", "moments"):
        if own := row.get(name, "").lower():
            switches[name] = own
    for name in ("fused_experts", "fp8_attention"):
        if own := row.get(name, "").lower():
            switches[name] = parse_switch(own, name)
    return switches


def _plans(row: _ROW, model: Model, *, ran: bool) -> tuple[tuple[Plan, ...], str]:
    """Return all valid plans that a row may mean; raise the first problem if there is none.

    A run that was measured `ran` all the same: its plans are returned with the problem.
    """
    sizes = {name: _whole(row, name, "1") for name in ("tp", "pp", "cp", "ep", "etp")}
    base = replace(base_plan(row, model), **sizes)  # type: ignore[arg-type]
    names = ("micro_batch", "vp", "recompute", "sharding", "moe_dispatch")
    plans: list[Plan] = []
    odd: list[Plan] = []
    problems: list[ConfigError] = []
    tried = product(*(_values(row, name, base) for name in names))
    for micro, virtual, recompute, sharding, dispatch in tried:
        plan = replace(
            base,
            micro_batch=_whole({"micro_batch": micro}, "micro_batch"),
            vp=_whole({"vp": virtual}, "vp"),
            recompute=recompute,
            sharding=sharding,
            dispatch=dispatch,
        )
        if not row.get("fused_experts", "").strip() and _implies_fusion(plan):
            plan = replace(plan, fused_experts=True)
        try:
            plan.check_values()
            odd.append(plan)
            plan.check()
            plans.append(plan)
        except ConfigError as error:
            problems.append(error)
    if plans:
        return tuple(plans), ""
    if ran and odd:
        return tuple(odd), f"measured, although {problems[0]}"
    raise problems[0]


def _implies_fusion(plan: Plan) -> bool:
    """Whether a step that is one CUDA graph must have fused experts, which need no counts."""
    is_dropless = plan.model.experts is not None and not plan.is_padded
    is_whole = plan.precision == "mxfp8" and "full" in plan.graph_parts
    return is_dropless and is_whole and plan.year >= _FUSED_EXPERTS


def _values(row: _ROW, name: str, base: Plan) -> Sequence[str]:
    """Return the value of a column, or the values to try where it is empty or unknown."""
    text = _recomputed(row) if name == "recompute" else row.get(name, "").lower()
    if name == "moe_dispatch":
        text = text.replace("+", " ")
    if name == "moe_dispatch" and "tokendrop" in row.get("comment", ""):
        text += " capacity"
    if name == "recompute" and text == "partial" and "share not stated" in row[_DETAIL]:
        layers = -(-base.model.layers // base.pp)
        return (text, *(str(max(1, round(share * layers))) for share in _SHARES))
    if text not in {"", UNKNOWN}:
        return (text,)
    if name == "vp":
        return [str(number) for number in virtual_stages(base)]
    if name == "moe_dispatch":
        return _dispatches(base)
    return _TRIED[name]


def _dispatches(base: Plan) -> list[str]:
    """Return the dispatches of experts to try: those that trainers of the year had."""
    begins = {"alltoall": 0.0, "deepep": _DEEPEP, "hybridep": _HYBRIDEP}
    has_experts = base.model.experts is not None and base.ep > 1
    return [n for n, year in begins.items() if year <= base.year and (has_experts or not year)]


def price_run(run: TrainingRun, constants: Constants) -> RunPrice:
    """Return the price of the fastest plan of a run that fits, or of the smallest."""
    prices = [price_plan(plan, constants) for plan in run.plans]
    fitting = [price for price in prices if price.fits]
    if fitting:
        best = max(fitting, key=lambda price: price.tokens_per_s_per_gpu)
    else:
        best = min(prices, key=lambda price: price.memory_bytes)
    return RunPrice(run=run, price=best)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupError:
    """Errors of the throughput of some runs: number, medians, and the 90th percentile."""

    by: str
    name: str
    runs: int
    median: float  # of the absolute error
    bias: float  # median of the signed error
    most: float  # 90th percentile of the absolute error
    memory: float | None  # median absolute error of the memory; None if none was measured
    do_not_fit: int
    # Share of the runs in the interval to expect; None if no run has one.
    coverage: float | None


_BY: dict[str, Callable[[RunPrice], str]] = {
    "source": lambda row: row.run.source,
    "gpu": lambda row: row.run.gpu,
    "precision": lambda row: row.run.precision,
    "layers": lambda row: "experts" if row.run.has_experts else "dense",
    "class": lambda row: class_name(row.price.plan),
    "all": lambda _row: "all",
}


def errors(rows: Iterable[RunPrice]) -> list[GroupError]:
    """Return the errors by source, GPU, precision, dense or with experts, and class."""
    usual = [row for row in rows if row.run.is_usable]
    groups = []
    for by, key in _BY.items():
        for name in sorted({key(row) for row in usual}):
            own = [row for row in usual if key(row) == name]
            off = np.array([row.error for row in own], np.float64)
            inside = [row.is_expected for row in own if row.is_expected is not None]
            fill = [row.memory_error for row in own if row.memory_error is not None]
            groups.append(
                GroupError(
                    by=by,
                    name=name,
                    runs=len(own),
                    median=float(np.median(np.abs(off))),
                    bias=float(np.median(off)),
                    most=float(np.percentile(np.abs(off), 90)),
                    memory=float(np.median(np.abs(fill))) if fill else None,
                    do_not_fit=sum(not row.price.fits for row in own),
                    coverage=sum(inside) / len(inside) if inside else None,
                )
            )
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCalibration:
    """Constants that were fitted, and median absolute errors on runs that the fit saw or not.

    Runs of one source and model are held out together. With a single such group, `held_out` is
    None: nothing tells how far the constants carry.
    """

    constants: Constants
    start: Constants
    runs: int
    groups: int
    before: float
    fitted: float
    held_out: float | None

    def bounds_reached(self) -> dict[str, float]:
        """Return the constants that stopped at an end of their range, and that end."""
        return {
            name: end
            for name in CALIBRATED
            for end in _WITHIN[name]
            if abs(getattr(self.constants, name) / end - 1) < _AT_BOUND
            and getattr(self.constants, name) != getattr(self.start, name)
        }

    def changes(self) -> dict[str, tuple[float, float]]:
        """Return the fitted constants by name, before and after."""
        return {n: (getattr(self.start, n), getattr(self.constants, n)) for n in CALIBRATED}


def calibrate(runs: Sequence[TrainingRun], start: Constants) -> RunCalibration:
    """Fit the constants to the runs with a measured throughput.

    Raises
    ------
    ConfigError
        If no run has a usable measurement.

    """
    usable = [run for run in runs if run.is_usable]
    if not usable:
        raise ConfigError(
            "--calibrate-from: no run has tokens_per_s_per_gpu; fill the column in"
        )
    off = held_out_errors(usable, start)
    constants = _fit(usable, start)
    return RunCalibration(
        constants=constants,
        start=start,
        runs=len(usable),
        groups=len({run.group for run in usable}),
        before=_median([_error(run, start) for run in usable]),
        fitted=_median([_error(run, constants) for run in usable]),
        held_out=_median([error for _, error in off]) if off else None,
    )


def held_out_errors(
    runs: Sequence[TrainingRun], start: Constants
) -> list[tuple[TrainingRun, float]]:
    """Return the relative error of each measured run by constants that were fitted to others.

    Runs of one source and model are held out together; with a single such group the list is
    empty.
    """
    groups = sorted({run.group for run in runs})
    folds = min(_FOLDS, len(groups))
    off: list[tuple[TrainingRun, float]] = []
    for fold in range(folds if folds > 1 else 0):
        out = set(groups[fold::folds])
        fitted = _fit([run for run in runs if run.group not in out], start)
        off += [(run, _error(run, fitted)) for run in runs if run.group in out]
    return off


def _median(off: Sequence[float]) -> float:
    return float(np.median(np.abs(off)))


def _error(run: TrainingRun, constants: Constants) -> float:
    assert run.measured is not None  # only such runs are usable
    return price_run(run, constants).price.tokens_per_s_per_gpu / run.measured - 1


def _fit(runs: Sequence[TrainingRun], start: Constants) -> Constants:
    """Return the constants of least squared logarithms of errors.

    Outliers among runs count linearly, the distance to the start always squared.
    """
    from scipy.optimize import least_squares

    counts: dict[tuple[str, str], int] = {}
    for run in runs:
        counts[run.group] = counts.get(run.group, 0) + 1
    # A group counts with the root of its runs: repetitions tell less than other models.
    weights = np.array([counts[run.group] ** -0.25 for run in runs])
    low, high = np.log([_WITHIN[name] for name in CALIBRATED]).T
    first = np.clip(np.log([getattr(start, name) for name in CALIBRATED]), low, high)

    pull = max(_PULL, _PULL_OF_ONE / len(runs) ** 0.5)

    def residuals(logs: FloatArray) -> FloatArray:
        constants = _constants(start, logs)
        off = np.log1p([_error(run, constants) for run in runs])
        return np.concatenate([weights * off, pull * (logs - first)])

    def loss(squares: FloatArray) -> FloatArray:
        """Soft L1 for runs, squares for constants: values and two derivatives."""
        root = np.sqrt(1 + squares)
        rho = np.array([2 * (root - 1), 1 / root, -0.5 / root**3])
        tail = squares[len(runs) :]
        rho[:, len(runs) :] = [tail, np.ones_like(tail), np.zeros_like(tail)]
        return rho

    inside = np.clip(first, low + 1e-6, high - 1e-6)
    solution = least_squares(
        *(residuals, inside),
        bounds=(low, high),
        loss=loss,
        f_scale=_SCALE,
        # A step of 1 % of each constant: by themselves, steps are shares of the logarithm, and
        # none where a constant is 1.
        diff_step=0.01 / np.abs(np.where(inside, inside, 1.0)),
        max_nfev=8,
    )
    return _constants(start, solution.x)


def _constants(start: Constants, logs: FloatArray) -> Constants:
    """Return the constants of logarithms, with four digits."""
    values = np.exp(logs)
    pairs = zip(CALIBRATED, values, strict=True)
    return replace(start, **{name: float(f"{value:.4g}") for name, value in pairs})
