"""Predicted times of measured expert all-to-alls, and how far off they are.

A row of a table has a shape, and times that somebody measured. Its prediction has the constants
of its kernels on its GPU, or constants fitted to the table.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.checks import check_path
from fastcomm.dispatch.options import ExchangeOptions
from fastcomm.errors import ConfigError, python_names
from fastcomm.hardware.clusters import Cluster, check_gpu, load
from fastcomm.hardware.exchange_calibration import (
    FEWEST,
    ExchangeGroup,
    MeasuredExchange,
    MeasuredParts,
    alternate_rows,
    calibrated_costs,
    exchange_groups,
    measured_rows,
    measured_seconds,
    read_exchanges,
    relative_errors,
    rows_by_tokens,
)
from fastcomm.hardware.expert_exchange import (
    FAMILIES,
    LIMITS,
    PHASES,
    ExchangeCosts,
    ExchangePhase,
    Scope,
    check_sms,
    extrapolations,
    measured_gpu,
    shipped_costs,
)
from fastcomm.hardware.gpus import FloatArray
from fastcomm.models import PRESETS
from fastcomm.result import TableResult
from fastcomm.units import counted, percent

NS = 1e9  # nanoseconds per second
_RATES = ("predicted_bandwidth_bytes_per_s", "measured_bandwidth_bytes_per_s")
_SHARES = ("nvlink_share", "nic_share")
# Constants that a table can move. The rest are counts, and constants of waits.
_FITTED = (
    *("start_us", "doubling_us", "pass_ns", "fill_us", "wave_us"),
    *("token_ns", "token_byte_ns", "row_ns", "row_byte_ns", *_SHARES),
)
_LEAST_SHARE = 0.1  # of a shipped share: kernels on the links of the cluster reach more
_OTHER_UNIT = 50  # times as long, or as short, as predicted: no machine is that different


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePrediction:
    """Times of one phase of a row, in seconds; None is unknown."""

    predicted_s: float
    notify_s: float
    limit: str  # the busiest of `LIMITS`
    measured_s: float | None
    measured_notify_s: float | None

    @property
    def error(self) -> float | None:
        """Predicted over measured time, minus 1."""
        return None if self.measured_s is None else self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePrediction:
    """A row of a table, and its predicted phases."""

    row: MeasuredExchange
    gpu: str
    measured_on: str  # GPU whose constants were used
    domains: int
    extrapolated: str  # sizes outside of the measurements; empty if there are none
    phases: Mapping[ExchangePhase, PhasePrediction]

    def to_dict(self) -> dict[str, Any]:
        """Return the row of the JSON document."""
        row = self.row
        names = ("hidden", "topk", "experts", "tokens", "sms")
        values = {
            "family": row.family,
            "gpu": self.gpu,
            "measured_on": self.measured_on,
            "nodes": self.domains,
            "ranks": row.ranks,
            "expert_groups": row.groups[0],
            "groups": row.groups[1],
            **{name: getattr(row, name) for name in names},
            "dispatch_precision": row.precision,
            "extrapolated": self.extrapolated or None,
        }
        for phase in PHASES:
            one = self.phases.get(phase)
            values |= {
                f"predicted_{phase}_ns": one and one.predicted_s * NS,
                f"measured_{phase}_ns": one and _ns(one.measured_s),
                f"predicted_{phase}_notify_ns": one and one.notify_s * NS,
                f"measured_{phase}_notify_ns": one and _ns(one.measured_notify_s),
                f"{phase}_limit": one and one.limit,
            }
        return values | self._rates()

    def _rates(self) -> dict[str, float | None]:
        """Return the bandwidths of a row that has one as published; its only phase has it."""
        counted = self.row.counted_bytes
        own = next(iter(self.phases.values()), None)
        rates: dict[str, float | None] = dict.fromkeys(_RATES)
        if counted is not None and own is not None:
            times = own.predicted_s, own.measured_s
            for name, seconds in zip(_RATES, times, strict=True):
                rates[name] = counted / seconds if seconds else None
        return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeError:
    """Errors of one phase of the rows of a GPU, family and number of nodes."""

    gpu: str
    family: str
    nodes: int
    phase: ExchangePhase
    rows: int
    median_error: float  # absolute, relative to the measured time
    p90_error: float
    median_bias: float  # above 0: predictions are longer


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """A constant of a kernel family, as shipped and as fitted to a table."""

    gpu: str
    family: str
    scope: str
    phase: ExchangePhase
    constant: str
    shipped: float
    fitted: float
    column: str  # of the table, whose times it is fitted to

    @property
    def warning(self) -> str | None:
        """Why no machine has such a constant; None if one may."""
        if self.constant not in _SHARES:
            return None
        check = f"check {self.column}, and the bandwidths of --cluster"
        if self.fitted > 1:
            return f"above 1, more than the bandwidth of the links: {check}"
        if self.fitted < _LEAST_SHARE * self.shipped:
            return f"less than {percent(_LEAST_SHARE)} of that of the shipped kernels: {check}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the row of the JSON document."""
        return asdict(self) | {"warning": self.warning}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeErrors:
    """Errors of one phase of the rows with some ranks, top-k and hidden size."""

    gpu: str
    family: str
    phase: ExchangePhase
    ranks: int
    topk: int
    hidden: int
    rows: int
    median_error: float  # absolute, relative to the measured time
    median_bias: float  # above 0: predictions are longer


def _is_larger(error: float, other: float) -> bool:
    """Whether an error is above another one as they are printed."""
    return error > other and percent(error) != percent(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutError:
    """Errors of the shipped constants, and of fitted ones, on rows that no fit has seen.

    These are every other row, between the rows of the fit, and rows of more tokens than the
    median, beyond the rows of the fit; None where too few rows have either.
    """

    gpu: str
    family: str
    scope: str
    phase: ExchangePhase
    rows: int  # held out
    shipped_error: float  # median of the size, relative to the measured time
    fitted_error: float
    beyond_rows: int | None = None
    beyond_shipped_error: float | None = None
    beyond_fitted_error: float | None = None

    @property
    def is_worse(self) -> bool:
        """Whether fitted constants predict the rows worse that lie between fitted ones."""
        return _is_larger(self.fitted_error, self.shipped_error)

    @property
    def is_worse_beyond(self) -> bool:
        """Whether the fitted constants predict rows of more tokens worse."""
        return _is_larger(self.beyond_errors[1], self.beyond_errors[0])

    @property
    def beyond_errors(self) -> tuple[float, float]:
        """`beyond_shipped_error` and `beyond_fitted_error`; NaN where they are None."""
        both = self.beyond_shipped_error, self.beyond_fitted_error
        first, second = (math.nan if error is None else error for error in both)
        return first, second


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExchangeEvaluation(TableResult):
    """Rows of a table of measured expert all-to-alls beside what is predicted for them."""

    cluster: str
    rows: tuple[ExchangePrediction, ...]
    calibration: tuple[FittedConstant, ...] | None = None
    held_out: tuple[HeldOutError, ...] = ()  # of a calibration, where rows suffice

    @property
    def errors(self) -> list[ExchangeError]:
        """Errors by GPU, family, number of nodes, and phase."""
        own: dict[tuple[str, str, int, ExchangePhase], list[float]] = {}
        for row in self.rows:
            for phase, one in row.phases.items():
                if one.error is not None:
                    key = row.gpu, row.row.family, row.domains, phase
                    own.setdefault(key, []).append(one.error)
        return [_error(*key, np.array(values)) for key, values in own.items()]

    @property
    def worst(self) -> ShapeErrors | None:
        """The ranks, top-k and hidden size with the largest median error.

        None if too few rows have any.
        """
        own: dict[tuple[str, str, ExchangePhase, int, int, int], list[float]] = {}
        for row in self.rows:
            sizes = row.row.ranks, row.row.topk, row.row.hidden
            for phase, one in row.phases.items():
                if one.error is not None:
                    own.setdefault((row.gpu, row.row.family, phase, *sizes), []).append(
                        one.error
                    )
        groups = [
            _group_error(key, np.array(values))
            for key, values in own.items()
            if len(values) >= FEWEST
        ]
        return max(groups, key=lambda one: one.median_error, default=None)

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        fitted = self.calibration
        return {
            "cluster": self.cluster,
            "rows": [row.to_dict() for row in self.rows],
            "errors": [asdict(error) for error in self.errors],
            "worst": self.worst and asdict(self.worst),
            "calibration": None if fitted is None else [one.to_dict() for one in fitted],
            "held_out": None if fitted is None else [asdict(one) for one in self.held_out],
        }

    @property
    def extrapolated(self) -> dict[str, int]:
        """Number of rows by family and what lies outside of its measurements."""
        texts = [f"{one.row.family}: {one.extrapolated}" for one in self.rows]
        return dict(Counter(text for text in texts if not text.endswith(": ")))

    def to_arrow(self) -> pa.Table:
        """Return the rows; times in ns."""
        return pa.Table.from_pylist([row.to_dict() for row in self.rows])

    def figures(self) -> dict[str, str]:
        """Return the number of rows, and the median error of each phase."""
        figures = {"rows": str(len(self.rows))}
        for phase in PHASES:
            errors = [row.phases[phase].error for row in self.rows if phase in row.phases]
            if off := [abs(error) for error in errors if error is not None]:
                figures[f"median error of {phase}"] = percent(float(np.median(off)))
        return figures


def _error(
    gpu: str, family: str, nodes: int, phase: ExchangePhase, off: FloatArray
) -> ExchangeError:
    """Return the summary of relative errors."""
    return ExchangeError(
        gpu=gpu,
        family=family,
        nodes=nodes,
        phase=phase,
        p90_error=float(np.percentile(np.abs(off), 90)),
        **_medians(off),
    )


def _group_error(
    key: tuple[str, str, ExchangePhase, int, int, int], off: FloatArray
) -> ShapeErrors:
    """Return the summary of relative errors."""
    gpu, family, phase, ranks, topk, hidden = key
    return ShapeErrors(
        gpu=gpu,
        family=family,
        phase=phase,
        ranks=ranks,
        topk=topk,
        hidden=hidden,
        **_medians(off),
    )


def _medians(off: FloatArray) -> dict[str, Any]:
    """Return the number of relative errors, their median, and that of their size."""
    return {
        "rows": len(off),
        "median_error": float(np.median(np.abs(off))),
        "median_bias": float(np.median(off)),
    }


def _ns(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * NS


@python_names()
def evaluate_exchanges(
    path: str | Path, cluster: str | Path = "dgx-h100", *, calibrate: bool = False
) -> ExchangeEvaluation:
    """Predict the rows of a table of measured expert all-to-alls.

    Parameters
    ----------
    path
        Parquet or CSV, see `fastcomm.hardware.exchange_calibration.read_exchanges`.
    cluster
        A shipped cluster or a TOML file; its GPU is that of rows that name none.
    calibrate
        Whether the constants are fitted to the table first.

    Raises
    ------
    ConfigError
        If the table or the cluster is invalid, kernels of a row have no constants, or times
        are in other units.

    """
    check_path(path, "evaluate_exchanges: path", 'evaluate_exchanges("deepep.parquet")')
    options = ExchangeOptions(cluster=cluster, calibrate=calibrate)
    cluster = options.cluster or cluster
    hardware, rows = load(cluster), read_exchanges(Path(path), _gates())
    check_gpu(hardware, cluster)
    groups = _groups(rows, hardware)
    measured = _measured(groups, rows)
    _check_units(measured, rows, path)
    fitted = {key: _fit(key, parts) for key, parts in measured.items()} if calibrate else {}
    predictions: dict[int, ExchangePrediction] = {}
    for group in groups:
        predictions |= _predictions(group, rows, fitted)
    return ExchangeEvaluation(
        cluster=hardware.name,
        rows=tuple(predictions[place] for place in range(len(rows))),
        calibration=tuple(_changes(fitted, measured, rows)) if calibrate else None,
        held_out=tuple(_held_out(measured)) if calibrate else (),
    )


def _gates() -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return the gates of shipped models with groups, by hidden size, experts and top-k."""
    return {
        (model.hidden, one.number, one.top_k): one.gate(one.groups)
        for model in PRESETS.values()
        if (one := model.experts) is not None and one.groups
    }


def _groups(rows: Sequence[MeasuredExchange], hardware: Cluster) -> list[ExchangeGroup]:
    """Return the groups of rows; raise ConfigError for one without constants."""
    gpus = hardware.gpus_per_node
    for number, row in enumerate(rows, 1):
        _check_row(row, f"row {number}", hardware)
    groups = exchange_groups(rows, hardware.gpu, gpus, hardware.bw_node / gpus)
    for group in groups:
        if reason := FAMILIES[group.family].unsupported(group.gpu, group.precision):
            raise ConfigError(f"{group.family}: {reason} (row {group.places[0] + 1})")
        if measured_gpu(group.family, group.gpu, group.scope) is None:
            raise ConfigError(
                f"{group.family}: no constants {group.scope} NVLink domains (row "
                f"{group.places[0] + 1}); kernels were not measured there"
            )
    return groups


def _check_row(row: MeasuredExchange, where: str, hardware: Cluster) -> None:
    """Raise ConfigError for ranks or SMs that the cluster does not have; `where` begins it."""
    room, ranks = hardware.gpus_per_node, row.ranks
    is_uneven = row.nodes is None and ranks > room and ranks % room
    if is_uneven or (row.nodes is not None and ranks > row.nodes * room):
        nodes = "" if row.nodes is None else f" on {counted(row.nodes, 'node')}"
        raise ConfigError(
            f"{where}: {ranks} ranks{nodes}; a node of {hardware.name} has {room} GPUs"
        )
    if ranks == 1:
        raise ConfigError(f"{where}: 1 rank exchanges nothing")
    if row.experts < ranks:
        raise ConfigError(f"{where}: {row.experts} experts are fewer than the {ranks} ranks")
    check_sms(row.sms, row.gpu or hardware.gpu, where)


_Key = tuple[str, str, Scope, ExchangePhase]  # GPU, family, scope, phase


def _shipped(gpu: str, family: str, scope: Scope, phase: ExchangePhase) -> ExchangeCosts:
    source = measured_gpu(family, gpu, scope)
    return shipped_costs()[family, str(source), scope, phase]


def _measured(
    groups: Iterable[ExchangeGroup], rows: Sequence[MeasuredExchange]
) -> dict[_Key, MeasuredParts]:
    """Return the measured times of the phases that have some."""
    parts: dict[_Key, list[tuple[ExchangeGroup, FloatArray]]] = {}
    for group in groups:
        for phase in PHASES:
            seconds = measured_seconds(rows, group, phase)
            if np.isfinite(seconds).any():
                key = group.gpu, group.family, group.scope, phase
                parts.setdefault(key, []).append((group, seconds))
    return {key: tuple(own) for key, own in parts.items()}


def _check_units(
    measured: Mapping[_Key, MeasuredParts], rows: Sequence[MeasuredExchange], path: str | Path
) -> None:
    """Raise ConfigError if measured times are of another order than predicted ones."""
    for key, parts in measured.items():
        gpu, family, _, phase = key
        off = relative_errors(parts, phase, _shipped(*key))
        ratio = 1 / float(np.median(off + 1))
        if not 1 / _OTHER_UNIT < ratio < _OTHER_UNIT:
            column = _column(parts, phase, rows)
            unit = "GB/s" if column.endswith("GBps") else "us"
            raise ConfigError(
                f"{path}: column {column}: times of {family} {phase} on {gpu} are {ratio:.3g} "
                f"times the predicted ones (the median); expected {unit}"
            )


def _column(
    parts: MeasuredParts, phase: ExchangePhase, rows: Sequence[MeasuredExchange]
) -> str:
    """Return the name of the column that has the measured times."""
    group, seconds = parts[0]
    row = rows[group.places[int(np.flatnonzero(np.isfinite(seconds))[0])]]
    return row.columns.get(phase, f"{phase}_us")


def _fit(key: _Key, parts: MeasuredParts) -> ExchangeCosts:
    """Return the constants fitted to measured times."""
    costs = _shipped(*key)
    names = [name for name in _FITTED if 0 < getattr(costs, name) < math.inf]
    return calibrated_costs(parts, key[-1], costs, names)


def _held_out(measured: Mapping[_Key, MeasuredParts]) -> Iterable[HeldOutError]:
    """Yield the errors of constants on rows that they are not fitted to."""
    for key, parts in measured.items():
        rows, shipped, fitted = _errors_beside(key, *alternate_rows(parts))
        if rows is None or shipped is None or fitted is None:
            continue
        beyond = _errors_beside(key, *rows_by_tokens(parts))
        yield HeldOutError(
            gpu=key[0],
            family=key[1],
            scope=key[2],
            phase=key[3],
            rows=rows,
            shipped_error=shipped,
            fitted_error=fitted,
            beyond_rows=beyond[0],
            beyond_shipped_error=beyond[1],
            beyond_fitted_error=beyond[2],
        )


def _errors_beside(
    key: _Key, fitting: MeasuredParts, rest: MeasuredParts
) -> tuple[int, float, float] | tuple[None, None, None]:
    """Return the rows of `rest`, and the median errors there, shipped and fitted."""
    if measured_rows(rest) < FEWEST or not measured_rows(fitting):
        return None, None, None
    shipped, fitted = (
        float(np.median(np.abs(relative_errors(rest, key[-1], costs))))
        for costs in (_shipped(*key), _fit(key, fitting))
    )
    return measured_rows(rest), shipped, fitted


def _changes(
    fitted: Mapping[_Key, ExchangeCosts],
    measured: Mapping[_Key, MeasuredParts],
    rows: Sequence[MeasuredExchange],
) -> Iterable[FittedConstant]:
    """Yield the constants that were fitted."""
    for key, costs in fitted.items():
        gpu, family, scope, phase = key
        shipped = _shipped(*key)
        for name in _FITTED:
            before, after = getattr(shipped, name), getattr(costs, name)
            if 0 < before < math.inf:
                yield FittedConstant(
                    gpu=gpu,
                    family=family,
                    scope=scope,
                    phase=phase,
                    constant=name,
                    shipped=before,
                    fitted=after,
                    column=_column(measured[key], phase, rows),
                )


def _predictions(
    group: ExchangeGroup,
    rows: Sequence[MeasuredExchange],
    fitted: Mapping[_Key, ExchangeCosts],
) -> dict[int, ExchangePrediction]:
    """Return the predictions of a group by place in the table."""
    domains = group.shape.domains()
    one_way: list[dict[ExchangePhase, PhasePrediction]] = [{} for _ in group.places]
    for phase in PHASES:
        costs = fitted.get((group.gpu, group.family, group.scope, phase))
        own = costs or _shipped(group.gpu, group.family, group.scope, phase)
        time = group.predicted(own, phase)
        busiest = np.argmax(time.limit_s, axis=-1)
        for at, place in enumerate(group.places):
            row = rows[place]
            if row.seconds and phase not in row.seconds:
                continue  # a row of the other phase
            if row.notify_s and not row.seconds and phase not in row.notify_s:
                continue
            one_way[at][phase] = PhasePrediction(
                predicted_s=float(time.seconds[at]),
                notify_s=float(time.notify_s[at]),
                limit=LIMITS[busiest[at]],
                measured_s=row.seconds.get(phase),
                measured_notify_s=row.notify_s.get(phase),
            )
    source = str(measured_gpu(group.family, group.gpu, group.scope))
    outside = extrapolations(group.gpu, group.family, group.scope, source, group.shape)
    return {
        place: ExchangePrediction(
            row=rows[place],
            gpu=group.gpu,
            measured_on=source,
            domains=int(domains[at]),
            extrapolated=outside[at],
            phases=phases,
        )
        for at, (place, phases) in enumerate(zip(group.places, one_way, strict=True))
    }
