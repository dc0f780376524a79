"""Tables of training runs, priced row by row: what was measured beside what is predicted.

A table is a CSV file with one run a row. Only `model`, `gpu`, `gpus`, `global_batch` and
`seq_len` are needed; a strategy that is empty or "unknown" is tried over its usual values, and
the fastest that fits counts.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from fastcomm import files
from fastcomm.checks import RANKS, invalid, shortened
from fastcomm.errors import ConfigError
from fastcomm.hardware.surfaces import gpu
from fastcomm.isp.model import VOCAB, Experts, Latent, Model
from fastcomm.isp.plan import RECIPES, UNKNOWN, Plan
from fastcomm.isp.plan_cost import Constants
from fastcomm.isp.plan_step import PlanPrice, price_plan
from fastcomm.isp.presets import PRESETS, checked
from fastcomm.units import GIB, parse_quantity

REQUIRED = ("model", "gpu", "gpus", "global_batch", "seq_len")
_LARGEST = 64 << 20  # bytes of a table
_MOST_ROWS = 100_000
_ROW = Mapping[str, str]
# Default bandwidth of an 8-GPU node, Gbit/s: data sheets of DGX systems, and of the clouds.
_NODE_GBPS = {"a100": 1600, "a100-40": 1600, "gb200": 3200}
_DOMAIN = {"gb200": 72, "gb300": 72}
_TRIED = {
    "micro_batch": ("1", "2", "4", "8"),
    "recompute": ("none", "selective", "full"),
    "sharding": ("zero1", "zero3"),
}


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

    @property
    def is_usable(self) -> bool:
        """Whether the run has a throughput that the source vouches for."""
        return self.measured is not None and self.quality in {"ok", "flops"}

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.plans[0].model.experts is not None


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
    def memory_error(self) -> float | None:
        """Relative error of the memory; None without a measurement."""
        measured = self.run.memory_gib
        return self.price.memory_bytes / 2**30 / measured - 1 if measured else None


def _table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header; ConfigError for one that is none."""
    text = files.text(path, _LARGEST).lstrip("\ufeff")
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        rows: list[dict[str, str]] = []
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(
                    f"{path}, line {reader.line_num}: expected {len(reader.fieldnames or ())} "
                    "fields, as the header has"
                )
            if len(rows) >= _MOST_ROWS:
                raise ConfigError(f"{path}: more than {_MOST_ROWS} rows")
            rows.append({key.strip(): value.strip() for key, value in row.items()})
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: no rows; expected a header and one run a line")
    return rows


def load_models(path: Path) -> dict[str, Model]:
    """Return the models of a table by name.

    Raises
    ------
    ConfigError
        If a column is missing or a number is invalid.

    """
    rows = _table(path)
    missing = {"name", "layers", "hidden", "heads", "ffn", "vocab"} - rows[0].keys()
    if missing:
        raise ConfigError(f"{path}: missing column {', '.join(sorted(missing))}")
    return {row["name"]: checked(_model(row, f"{path}: {row['name']}"), path) for row in rows}


def _model(row: _ROW, where: str) -> Model:
    def number(name: str, default: int = 0) -> int:
        text = row.get(name, "")
        return parse_quantity(text, f"{where}: {name}") if text not in {"", "0"} else default

    hidden, heads = number("hidden", 1), number("heads", 1)
    width = number("head_dim")
    latent = None
    if number("kv_lora"):
        names = ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v_dim")
        parts = ("q_rank", "kv_rank", "nope", "rope", "value")
        latent = Latent(**{p: number(n, 1) for p, n in zip(parts, names, strict=True)})
    experts = None
    if number("experts"):
        experts = Experts(
            number=number("experts"),
            top_k=number("topk", 1),
            ffn=number("expert_ffn", number("ffn", 1)),
            shared=number("shared_ffn"),
            dense_layers=number("dense_layers"),
        )
    window = row.get("sliding_window", "").partition(" ")[0]
    return Model(
        name=row["name"],
        hidden=hidden,
        heads=heads,
        kv_heads=number("kv_heads", heads),
        layers=number("layers", 1),
        ffn=number("ffn", 4 * hidden),
        vocab=number("vocab", VOCAB),
        mlp="swiglu" if row.get("mlp", "swiglu") in {"swiglu", "geglu", ""} else "gelu",
        head_dim=0 if latent or width * heads == hidden else width,
        latent=latent,
        experts=experts,
        tied=row.get("tied", "") in {"1", "true", "yes"},
        mtp_layers=number("mtp_layers"),
        window=int(window) if window.isdecimal() else 0,
    )


def load_runs(path: Path, models: Mapping[str, Model]) -> list[TrainingRun]:
    """Return the runs of a table; a model is one of `models` or a preset.

    Raises
    ------
    ConfigError
        If a column is missing, or a row is invalid; the message names its line.

    """
    rows = _table(path)
    if missing := [name for name in REQUIRED if name not in rows[0]]:
        raise ConfigError(
            f"{path}: missing column {', '.join(missing)}; needed are {', '.join(REQUIRED)}"
        )
    return [_run(row, models, f"{path}, row {k}", k) for k, row in enumerate(rows, 1)]


def _run(row: _ROW, models: Mapping[str, Model], where: str, place: int) -> TrainingRun:
    try:
        model = _named_model(row["model"], models)
        plans = _plans(row, model)
        measured = _positive(row, "tokens_per_s_per_gpu")
        memory_gib = _positive(row, "memory_gib")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    source = row.get("source", "") or "own"
    return TrainingRun(
        id=row.get("id", "") or str(place),
        source=source,
        group=(source, model.name),
        gpu=plans[0].gpu,
        precision=plans[0].precision,
        plans=plans,
        measured=measured,
        memory_gib=memory_gib,
        quality=row.get("quality", "") or "ok",
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
    if not 0 < value < float("inf"):
        raise invalid(name, text, "a number above 0")
    return value


def gpu_of(name: str, variant: str = "") -> str:
    """Return the name of the shipped GPU of a table's name and variant, such as "40 GB"."""
    name = name.lower()
    return "a100-40" if name == "a100" and variant.startswith("40 GB") else name


def base_plan(row: _ROW, model: Model) -> Plan:
    """Return the plan of a row with its job, and the defaults of a strategy."""
    variant, detail = row.get("gpu_variant", ""), row.get("recompute_detail", "")
    name = gpu_of(row["gpu"], variant)
    gpu(name)
    count = parse_quantity(row["gpus"], "gpus", RANKS.most)
    domain = _DOMAIN.get(name, 8)
    per_node = parse_quantity(row.get("gpus_per_node") or str(min(domain, 8)), "gpus_per_node")
    usual = _NODE_GBPS.get(name, 3200) * per_node / 8
    gbps = _positive(row, "node_gbps") or usual
    domain = domain if domain > per_node else per_node
    year = row.get("date", "")[:7]
    return Plan(
        model=model,
        gpu=name,
        gpus=count,
        global_batch=parse_quantity(row["global_batch"], "global_batch"),
        seq_len=parse_quantity(row["seq_len"], "seq_len"),
        node_bytes_per_s=gbps * 1e9 / 8 * domain / per_node,
        domain=domain,
        precision=(row.get("precision") or "bf16").lower(),
        overlap=row.get("overlap", "") != "no",
        dispatch=row.get("moe_dispatch") or "alltoall",
        year=_year(year),
        graphs=_graphs(detail),
        offloaded=int(_amount(detail, r"activations of (\d+) layers offloaded", 1) or 0),
        memory=_amount(variant, r"(\d+) GB", GIB),
        power_share=min(1.0, (_amount(variant, r"(\d+) W", 1) or _POWER) / _POWER),
    )


_POWER = 700.0  # W, usual limit of the GPUs that have variants
_PARTIAL_GRAPHS = 0.2  # share of launches in graphs of attention and routing


def _amount(text: str, pattern: str, unit: float) -> float | None:
    """Return the number of a pattern in a text, in the unit; None if there is none."""
    match = re.search(pattern, text)
    return float(match[1]) * unit if match else None


def _graphs(text: str) -> float:
    """Return the share of launches that CUDA graphs replace, by a text on the stack."""
    if "CUDA graphs" not in text:
        return 0.0
    return 1.0 if "full" in text or text.endswith("CUDA graphs") else _PARTIAL_GRAPHS


def _year(text: str) -> float:
    """Return the year of a date such as "2024-07"; 2025 if there is none."""
    year, _, month = text.partition("-")
    if not year.isdecimal() or not 2000 < int(year) < 2100:  # noqa: PLR2004 no year
        return 2025.0
    return int(year) + (int(month) - 0.5) / 12 if month.isdecimal() else int(year) + 0.5


def _plans(row: _ROW, model: Model) -> tuple[Plan, ...]:
    """Return all plans that a row may mean; at least one is valid."""
    base = base_plan(row, model)
    sizes = {}
    for name in ("tp", "pp", "cp", "ep", "etp"):
        text = row.get(name, "")
        sizes[name] = parse_quantity(text, name, RANKS.most) if text not in {"", UNKNOWN} else 1
    base = replace(base, **sizes)  # type: ignore[arg-type]
    values = [
        _values(row, name, base) for name in ("micro_batch", "vp", "recompute", "sharding")
    ]
    plans, problem = [], None
    for micro, virtual, recompute, sharding in product(*values):
        plan = replace(
            base,
            micro_batch=parse_quantity(micro, "micro_batch", RANKS.most),
            vp=parse_quantity(virtual, "vp", RANKS.most),
            recompute=recompute,
            sharding=sharding,
        )
        try:
            plan.check()
            plans.append(plan)
        except ConfigError as error:
            problem = error
    if problem and not plans:
        raise problem
    return tuple(plans)


def _values(row: _ROW, name: str, base: Plan) -> Sequence[str]:
    """Return the value of a column, or the values to try where it is empty or unknown."""
    text = row.get(name, "").lower()
    if text not in {"", UNKNOWN}:
        return (text,)
    if name == "vp":
        stage = base.model.layers // base.pp
        return ("1",) if base.pp == 1 else [str(n) for n in range(1, 13) if stage % n == 0]
    return _TRIED[name]


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


_BY: dict[str, Callable[[RunPrice], str]] = {
    "source": lambda row: row.run.source,
    "gpu": lambda row: row.run.gpu,
    "precision": lambda row: row.run.precision,
    "layers": lambda row: "experts" if row.run.has_experts else "dense",
    "all": lambda _row: "all",
}


def errors(rows: Iterable[RunPrice]) -> list[GroupError]:
    """Return the errors by source, GPU, precision, and dense or with experts."""
    usual = [
        row for row in rows if row.error is not None and row.run.quality in {"ok", "flops"}
    ]
    groups = []
    for by, key in _BY.items():
        for name in sorted({key(row) for row in usual}):
            own = [row for row in usual if key(row) == name]
            off = np.array([row.error for row in own], np.float64)
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
                )
            )
    return groups


def is_fp8(precision: str) -> bool:
    """Whether linear layers train in FP8."""
    return RECIPES[precision] != "bf16"
