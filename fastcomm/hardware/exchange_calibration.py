"""Read tables of measured expert all-to-alls, and fit the constants of their kernels.

Tables have the columns of DeepEP's benchmark or of TensorRT-LLM's all-to-all, as NVIDIA
AIConfigurator collects them, or those of published bandwidths; `docs/dispatch.md` has the list.
Times are in seconds, sizes in bytes; NaN is unknown in arrays.
"""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fastcomm import files
from fastcomm.checks import Range
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.hardware.expert_exchange import (
    FAMILIES,
    PHASES,
    ExchangeCopies,
    ExchangeCosts,
    ExchangePhase,
    ExchangeShape,
    PhaseTime,
    Precision,
    Scope,
    domain_floor,
    exchange_copies,
    phase_time,
    token_bytes,
)
from fastcomm.hardware.gpus import FloatArray, gpu

_LARGEST = 1 << 26  # bytes of a text
_MODES = {"normal": "deepep", "low_latency": "deepep-ll"}
_KERNELS = {"two_sided": "trtllm"}  # of TensorRT-LLM's table
_PUBLISHED = {
    ("V1", "normal"): "deepep",
    ("V1", "low_latency"): "deepep-ll",
    ("V2", "normal"): "deepep-v2",
}
_ARCHITECTURES = {"H800": "h800", "SM90": "h100", "SM100": "b200"}
_EXPERTS = 256  # of a published row that does not say it: DeepSeek-V3's
_MOST_NODES = 4  # that a token of DeepEP's benchmark goes to
_NODE_RANKS = 8  # at most, of a node; a larger domain is a rack of several
_SHAPE = ("tokens", "hidden", "topk", "ranks")
_OTHERS = ("experts", "nodes", "sms", "expert_groups", "groups")
_COUNTS = {
    "tokens": Range(1, 1 << 32),
    "hidden": Range(1, 1 << 24),
    "topk": Range(1, 1 << 12),
    "experts": Range(1, 1 << 20),
    "ranks": Range(1, 1 << 20),
    "nodes": Range(1, 1 << 20),
    "expert_groups": Range(1, 1 << 20),
    "groups": Range(1, 1 << 20),
    "sms": Range(0, 1 << 12),
}
_TIMES = Range(0, 1e12)  # us, and GB/s
_OTHER_UNITS = re.compile(r"(dispatch|combine|latency)(_notify)?_(ns|ms|s)")
_SCALE = 0.05  # relative error from which on a measurement counts less
_LEAST, _MOST = 1e-9, 1e6  # of a fitted constant
_ROOM = 1e-6  # of a constant's logarithm between its first value and a bound
_ROUNDING = 1e-9  # of an error
FEWEST = 3  # rows held out whose error tells something
# Shares of the measurements that scaled constants count as, while single ones are fitted, and
# how much a fit lowers the error of rows held out to be taken.
_TRUSTS, _GAIN = (0.3, 0.01, 0.0003), 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredExchange:
    """One row of a table: a shape, and what was measured of it."""

    family: str
    gpu: str | None  # shipped GPU that the row names
    precision: Precision  # of dispatch
    tokens: int  # of a rank
    hidden: int
    topk: int
    experts: int
    ranks: int
    nodes: int | None  # None if the table does not say it
    sms: int | None
    seconds: Mapping[ExchangePhase, float]  # of the phases that were measured
    notify_s: Mapping[ExchangePhase, float]
    # Groups of experts, and those that a token goes to; (1, 1) is no limit.
    groups: tuple[int, int] = (1, 1)
    columns: Mapping[ExchangePhase, str] = field(default_factory=dict)  # of `seconds`
    # Bytes over which a bandwidth is published; None if the row has none.
    counted_bytes: float | None = None

    def domain(self, ranks_per_domain: int) -> int:
        """Return the ranks of an NVLink domain, at most the `ranks_per_domain` of a cluster."""
        own = self.ranks if self.nodes is None else math.ceil(self.ranks / self.nodes)
        return min(own, ranks_per_domain)

    def shape(self, domain: int) -> ExchangeShape:
        """Return what is exchanged, with NVLink between `domain` ranks."""
        return ExchangeShape(
            **{name: getattr(self, name) for name in (*_SHAPE, "experts", "sms")},
            domain=domain,
            groups=self.groups[0],
            top_groups=self.groups[1],
        )


Gates = Mapping[tuple[int, int, int], tuple[int, int]]


def read_exchanges(path: Path, gates: Gates = MappingProxyType({})) -> list[MeasuredExchange]:
    """Read a table of measured expert all-to-alls.

    Parameters
    ----------
    path
        A Parquet file, or a CSV file.
    gates
        Groups of experts, and how many a token uses, by hidden size, experts and top-k:
        for rows without such columns, of kernels that are measured with a model's gate.

    Returns
    -------
    list of MeasuredExchange
        A row per row of the table.

    Raises
    ------
    ConfigError
        If the file cannot be read, has no rows, or a column is missing or has an invalid value.

    """
    rows = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    if not rows:
        raise ConfigError(f"{path}: no rows")
    for name in rows[0]:
        if match := _OTHER_UNITS.fullmatch(name):
            start = name.removesuffix(match[3])
            raise ConfigError(f"{path}: column {name}: expected times in us, as {start}us")
    return [_row(row, f"{path}, row {number}", gates) for number, row in enumerate(rows, 1)]


def _parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa

    from fastcomm import arrow_files  # slow to import, rarely needed

    try:
        rows: list[dict[str, Any]] = arrow_files.read(path).to_pylist()
    except (pa.ArrowException, OSError, FastcommError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return rows


def _csv(path: Path) -> list[dict[str, Any]]:
    try:
        text = files.text(path, most=_LARGEST)
        lines = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except csv.Error as error:
        raise ConfigError(f"{path}: {error}") from error
    header = lines[0] if lines else []
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise ConfigError(f"{path}: column {twice[0]} is there twice")
    for number, line in enumerate(lines[1:], 1):
        if len(line) != len(header):
            raise ConfigError(
                f"{path}, row {number}: {len(line)} values for {len(header)} columns"
            )
    return [dict(zip(header, line, strict=True)) for line in lines[1:]]


def _row(row: Mapping[str, Any], where: str, gates: Gates) -> MeasuredExchange:
    """Return a checked row; `where` begins its errors."""
    family, gpu = _family(row, where)
    counts = {name: _count(row, name, where) for name in (*_SHAPE, *_OTHERS)}
    if missing := [name for name in _SHAPE if counts[name] is None]:
        raise ConfigError(f"{where}: no {', '.join(missing)}")
    precision = row.get("dtype") or FAMILIES[family].precision
    if precision not in ("bf16", "fp8"):
        raise ConfigError(f"{where}: invalid dtype {precision!r}: expected bf16 or fp8")
    if "version" in row:
        precision = FAMILIES[family].precision  # `dtype` is that of the row's phase
    shape = {**counts, "experts": counts["experts"] or _EXPERTS, "sms": counts["sms"] or None}
    columns = shape.pop("expert_groups"), shape.pop("groups")
    ranks, nodes = shape["ranks"] or 1, shape["nodes"] or 1
    if ranks % nodes:
        raise ConfigError(f"{where}: {ranks} ranks cannot be spread evenly over {nodes} nodes")
    if (counts["topk"] or 0) > (shape["experts"] or 0):
        raise ConfigError(f"{where}: topk is {shape['topk']} of {shape['experts']} experts")
    hidden, experts, topk = (shape[name] or 0 for name in ("hidden", "experts", "topk"))
    model = gates.get((hidden, experts, topk))
    one = MeasuredExchange(
        groups=_gate(family, columns, nodes, model),
        family=family,
        gpu=gpu,
        precision=cast("Precision", precision),
        seconds=(seconds := _seconds(row, where, "{}_us")),
        columns={phase: _column(row, phase) for phase in seconds},
        notify_s=_seconds(row, where, "{}_notify_us"),
        **cast("dict[str, Any]", shape),
    )
    return _published(one, row, where) if "bandwidth_GBps" in row else one


def _gate(
    family: str,
    columns: tuple[int | None, int | None],
    nodes: int,
    model: tuple[int, int] | None,
) -> tuple[int, int]:
    """Return the groups of experts, and how many a token uses; (1, 1) is no limit.

    Parameters
    ----------
    family, nodes
        Kernels and nodes of the row.
    columns
        Both numbers, as the row has them; None is the default.
    model
        Both numbers of the model that has the row's shape.

    """
    kind = FAMILIES[family].gate
    if columns == (None, None) and kind != "nodes":
        return model or (1, 1) if kind == "model" else (1, 1)
    groups = columns[0] or (model[0] if model and kind != "nodes" else nodes)
    return groups, min(groups, columns[1] or _MOST_NODES)


def _published(one: MeasuredExchange, row: Mapping[str, Any], where: str) -> MeasuredExchange:
    """Return a row with the bytes that its published bandwidth counts, and their time.

    Of a row that has both, the time is as published, and the bytes follow from it.
    """
    rate, phase = _time(row, "bandwidth_GBps", where), row.get("phase")
    if rate is None or phase not in PHASES:
        return one
    if seconds := one.seconds.get(phase):
        return replace(one, counted_bytes=rate * 1e9 * seconds)
    shape = one.shape(one.domain(one.ranks))
    copies = shape.ranks_of_token() if row.get("link") == "NVLink" else shape.domains_of_token()
    if FAMILIES[one.family].copies:
        copies = np.asarray(one.topk, np.float64)
    size = token_bytes(one.hidden, one.precision if phase == "dispatch" else "bf16")
    counted = float(one.tokens * copies * size)
    return replace(
        one,
        counted_bytes=counted,
        seconds={phase: counted / (rate * 1e9)},
        columns={phase: "bandwidth_GBps"},
    )


def _family(row: Mapping[str, Any], where: str) -> tuple[str, str | None]:
    """Return the family of a row's kernels, and the GPU that it names."""
    if "version" in row:
        family = _PUBLISHED.get((str(row["version"]), str(row.get("kernel"))))
        gpu = _ARCHITECTURES.get(str(row.get("arch")))
        if family and gpu:
            return family, gpu
    elif "family" in row and row["family"] in FAMILIES:
        return str(row["family"]), None
    elif "mode" in row and row["mode"] in _MODES:
        return _MODES[row["mode"]], None
    elif "kernel" in row and row["kernel"] in _KERNELS:
        return _KERNELS[row["kernel"]], None
    raise ConfigError(
        f"{where}: unknown kernels; expected a column family ({', '.join(FAMILIES)}), mode "
        f"({', '.join(_MODES)}), kernel ({', '.join(_KERNELS)}), or version, arch and kernel"
    )


def _count(row: Mapping[str, Any], name: str, where: str) -> int | None:
    """Return a whole number of a row; None if it has none."""
    value = _number(row, name, where)
    if value is None:
        return None
    _COUNTS[name].check(value, f"{where}: {name}")
    if value != int(value):
        raise ConfigError(f"{where}: invalid {name} {value}: expected a whole number")
    return int(value)


def _number(row: Mapping[str, Any], name: str, where: str) -> float | None:
    """Return a number of a row; None if the row has no such column or value."""
    value = row.get(name)
    if value is None or value == "":
        return None
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {name}: {error}") from error


def _time(row: Mapping[str, Any], name: str, where: str) -> float | None:
    """Return a time or a rate of a row; None for no value, and for a wait of 0."""
    value = _number(row, name, where)
    if value is None or math.isnan(value):
        return None
    _TIMES.check(value, f"{where}: {name}")
    if not value and "notify" not in name:
        raise ConfigError(f"{where}: invalid {name} 0: expected a number above 0, or nothing")
    return value or None


def _seconds(row: Mapping[str, Any], where: str, name: str) -> dict[ExchangePhase, float]:
    """Return the seconds of a row by phase, from columns of `name` with the phase."""
    seconds = {}
    for phase in PHASES:
        column = _column(row, phase) if name == "{}_us" else name.format(phase)
        us = _time(row, column, where)
        if us is not None:
            seconds[phase] = us * 1e-6
    if row.get("phase") == "prepare" and "notify" in name:
        us = _time(row, "latency_us", where)
        return {} if us is None else {"dispatch": us * 1e-6}
    return seconds


def _column(row: Mapping[str, Any], phase: ExchangePhase) -> str:
    """Return the name of the column with the time of a phase."""
    return "latency_us" if row.get("phase") == phase else f"{phase}_us"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeGroup:
    """Rows of a table with one GPU, family, scope and precision."""

    gpu: str
    family: str
    scope: Scope
    precision: Precision
    shape: ExchangeShape  # arrays, an element per row
    places: tuple[int, ...]  # of its rows in the table
    bandwidths: tuple[float, float]  # of NVLink and NIC

    def time(
        self, costs: ExchangeCosts, phase: ExchangePhase, copies: ExchangeCopies | None = None
    ) -> PhaseTime:
        """Return the times of one phase with some constants; `copies` as `phase_time`."""
        size = self._size(phase)
        return phase_time(costs, self.family, self.shape, size, self.bandwidths, copies)

    def predicted(self, costs: ExchangeCosts, phase: ExchangePhase) -> PhaseTime:
        """Return the times of one phase, at least as long as its work inside domains."""
        time = self.time(costs, phase)
        if self.scope == "inside":
            return time
        size = self._size(phase)
        return domain_floor(time, self.gpu, self.family, phase, self.shape, size)

    def _size(self, phase: ExchangePhase) -> FloatArray:
        """Return the bytes of a token."""
        precision = self.precision if phase == "dispatch" else "bf16"
        return token_bytes(self.shape.hidden, precision)


def exchange_groups(
    rows: Sequence[MeasuredExchange], name: str, domain: int, nic: float
) -> list[ExchangeGroup]:
    """Return the rows of a table in groups.

    Parameters
    ----------
    rows
        Rows of a table.
    name
        Shipped GPU of the rows that name none.
    domain
        The most ranks with NVLink between them.
    nic
        NIC bandwidth of a GPU, bytes/s.

    """
    places: dict[tuple[str, str, bool, Precision, bool], list[int]] = {}
    for place, row in enumerate(rows):
        key = row.gpu or name, row.family, row.ranks > _domain(row, domain), row.precision
        places.setdefault((*key, row.sms is None), []).append(place)
    return [
        ExchangeGroup(
            gpu=own,
            family=family,
            scope="across" if is_across else "inside",
            precision=precision,
            shape=_stacked(
                [rows[place].shape(_domain(rows[place], domain)) for place in group]
            ),
            places=tuple(group),
            bandwidths=(gpu(own).nvlink, nic),
        )
        for (own, family, is_across, precision, _), group in places.items()
    ]


def _domain(row: MeasuredExchange, ranks_per_domain: int) -> int:
    """Return the ranks of an NVLink domain; nodes of a rack with NVLink are of one domain."""
    if ranks_per_domain > _NODE_RANKS:
        return min(row.ranks, ranks_per_domain)
    return row.domain(ranks_per_domain)


def _stacked(shapes: Sequence[ExchangeShape]) -> ExchangeShape:
    """Return one shape with the values of several as arrays."""
    columns: dict[str, Any] = {}
    for one in fields(ExchangeShape):
        values = [getattr(shape, one.name) for shape in shapes]
        columns[one.name] = None if values[0] is None else np.array(values, np.float64)
    return ExchangeShape(**columns)


MeasuredParts = Sequence[tuple[ExchangeGroup, FloatArray]]  # and the seconds of each row


def fit_costs(
    parts: MeasuredParts,
    phase: ExchangePhase,
    costs: ExchangeCosts,
    names: Sequence[str],
    trust: float = 0.0,
) -> ExchangeCosts:
    """Return constants with those called `names` fitted to measured times.

    Relative errors count, and large ones less than their squares. A share of a bandwidth
    becomes at most 1.

    Parameters
    ----------
    parts
        Groups of one family and scope, and the measured seconds of their rows; NaN is unknown.
    phase
        The phase that was measured.
    costs
        Constants to begin with.
    names
        Constants to fit; they remain positive.
    trust
        How many measurements `costs` count as.

    """
    from scipy.optimize import least_squares  # slow to import

    measured = [
        (group, seconds, exchange_copies(group.family, group.shape)) for group, seconds in parts
    ]
    first = np.log([max(getattr(costs, name), _LEAST) for name in names])

    def of(logs: FloatArray) -> ExchangeCosts:
        return replace(costs, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def errors(logs: FloatArray) -> FloatArray:
        ratios = [
            group.time(of(logs), phase, copies).seconds / seconds
            for group, seconds, copies in measured
        ]
        off = np.log(np.concatenate(ratios))
        return np.concatenate([off[np.isfinite(off)], math.sqrt(trust) * (logs - first)])

    most = [0.0 if name.endswith("_share") else math.log(_MOST) for name in names]
    bounds = math.log(_LEAST / 10), np.maximum(most, first + _ROOM)
    fit = least_squares(errors, first, bounds=bounds, loss="soft_l1", f_scale=_SCALE)
    return of(fit.x)


def scaled_costs(costs: ExchangeCosts, factor: float) -> ExchangeCosts:
    """Return the constants of a machine on which data move for `factor` times as long."""
    names = [one.name for one in fields(costs) if not one.name.startswith("notify")]
    slower = {
        name: getattr(costs, name) * factor for name in names if name.endswith(("_us", "_ns"))
    }
    shares = {name: getattr(costs, name) / factor for name in names if name.endswith("_share")}
    return replace(costs, **slower, **shares)


def calibrated_costs(
    parts: MeasuredParts, phase: ExchangePhase, costs: ExchangeCosts, names: Sequence[str]
) -> ExchangeCosts:
    """Return constants fitted to measured times as far as these determine them.

    All constants are scaled by the median of measured over predicted times. Single ones then
    move from there only if that predicts rows better that they are not fitted to, both between
    and beyond the others, and no number of domains of the table worse. Parameters are those of
    `fit_costs`.
    """
    start = _scaled(parts, phase, costs)
    folds = [
        fold for fold in _folds(parts) if all(measured_rows(half) >= FEWEST for half in fold)
    ]
    if not folds:
        return start

    def held_out(trust: float) -> float:
        errors = []
        for shown, rest in folds:
            one = _scaled(shown, phase, costs)
            if trust < math.inf:
                one = fit_costs(shown, phase, one, names, trust * measured_rows(shown))
            errors.append(np.mean(np.abs(np.log1p(relative_errors(rest, phase, one)))))
        return float(np.mean(errors))

    errors = {trust: held_out(trust) for trust in (*_TRUSTS, math.inf)}
    most = _GAIN * errors[math.inf]
    for trust in sorted(_TRUSTS, key=errors.__getitem__):
        if errors[trust] < most:
            one = fit_costs(parts, phase, start, names, trust * measured_rows(parts))
            if _is_no_worse(parts, phase, one, start):
                return one
    return start


def _scaled(parts: MeasuredParts, phase: ExchangePhase, costs: ExchangeCosts) -> ExchangeCosts:
    """Return the constants scaled by the median of measured over predicted times."""
    ratios = [seconds / group.time(costs, phase).seconds for group, seconds in parts]
    return scaled_costs(costs, float(np.nanmedian(np.concatenate(ratios))))


def _folds(parts: MeasuredParts) -> list[tuple[MeasuredParts, MeasuredParts]]:
    """Return pairs of rows to fit and to predict: every other row, and few or many tokens."""
    pairs = alternate_rows(parts), rows_by_tokens(parts)
    return [fold for one, other in pairs for fold in ((one, other), (other, one))]


def alternate_rows(parts: MeasuredParts) -> tuple[MeasuredParts, MeasuredParts]:
    """Return every other measured row, and the rest; other rows are unknown in both."""
    places = [np.cumsum(np.isfinite(seconds)) % 2 == 1 for _, seconds in parts]
    return _divided(parts, places)


def rows_by_tokens(parts: MeasuredParts) -> tuple[MeasuredParts, MeasuredParts]:
    """Return the rows with at most the median of tokens, and those with more."""
    tokens = [
        np.broadcast_to(np.asarray(group.shape.tokens, np.float64), seconds.shape)
        for group, seconds in parts
    ]
    own = [one[np.isfinite(part[1])] for one, part in zip(tokens, parts, strict=True)]
    median = np.median(np.concatenate(own))
    return _divided(parts, [one <= median for one in tokens])


def _divided(
    parts: MeasuredParts, places: Sequence[NDArray[np.bool_]]
) -> tuple[MeasuredParts, MeasuredParts]:
    """Return the rows at `places`, and the others; what is not in a half is unknown there."""
    one, other = [], []
    for (group, seconds), inside in zip(parts, places, strict=True):
        one.append((group, np.where(inside, seconds, np.nan)))
        other.append((group, np.where(inside, np.nan, seconds)))
    return one, other


def measured_rows(parts: MeasuredParts) -> int:
    """Return the number of measured rows."""
    return sum(int(np.isfinite(seconds).sum()) for _, seconds in parts)


def relative_errors(
    parts: MeasuredParts, phase: ExchangePhase, costs: ExchangeCosts
) -> FloatArray:
    """Return predicted over measured times minus 1, of the rows that have both."""
    every = np.concatenate(
        [group.predicted(costs, phase).seconds / seconds - 1 for group, seconds in parts]
    )
    return np.asarray(every[np.isfinite(every)])


def _is_no_worse(
    parts: MeasuredParts, phase: ExchangePhase, costs: ExchangeCosts, other: ExchangeCosts
) -> bool:
    """Whether no number of domains has a larger error, median or nine of ten, than `other`."""
    domains = np.concatenate(
        [
            np.broadcast_to(group.shape.domains(), seconds.shape)[np.isfinite(seconds)]
            for group, seconds in parts
        ]
    )
    off, reference = (np.abs(relative_errors(parts, phase, one)) for one in (costs, other))
    return all(
        np.percentile(off[domains == count], share)
        <= np.percentile(reference[domains == count], share) + _ROUNDING
        for count in np.unique(domains)
        for share in (50, 90)
    )


def measured_seconds(
    rows: Sequence[MeasuredExchange], group: ExchangeGroup, phase: ExchangePhase
) -> FloatArray:
    """Return the measured seconds of a group's rows; NaN is unknown."""
    return np.array([rows[place].seconds.get(phase, math.nan) for place in group.places])
