"""Fit the constants of expert all-to-alls, and write how far off they are.

`python docs/exchange_accuracy.py FOLDER` reads tables of measurements, such as
`deepep_h100.parquet`, that lie outside of the repository. It writes the constants to
`fastcomm/hardware/expert_exchange.toml` and the errors to `docs/exchange-accuracy.md`. A fifth
of the shapes is held out: errors are of these, and no constant has seen them. `--check` writes
nothing, and prints the errors of the shipped constants on all rows of FOLDER.
"""

import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from fastcomm.hardware import expert_exchange
from fastcomm.hardware.exchange_calibration import (
    ExchangeGroup,
    MeasuredExchange,
    exchange_groups,
    fit_costs,
    measured_seconds,
    read_exchanges,
)
from fastcomm.hardware.expert_exchange import (
    FAMILIES,
    PHASES,
    ExchangeCosts,
    ExchangePhase,
    ExchangeShape,
    FloatArray,
    MeasuredRange,
    Scope,
    ShapeValue,
)
from fastcomm.hardware.gpus import gpu as sheet
from fastcomm.hardware.gpus import gpus

PAGE = Path(__file__).with_name("exchange-accuracy.md")
COSTS = Path(__file__).parents[1] / "fastcomm" / "hardware" / "expert_exchange.toml"
NIC = 50e9  # bytes/s of a GPU, in all tables
_CONGESTED = 8  # nodes from which on the fabric of DeepEP's tables is congested
Key = tuple[str, str, Scope]  # family, GPU, scope

# Megatron Core, arXiv 2603.07685, table 7: us by ranks; bf16, 4096 tokens, top 8 of 256.
_RANKS = (8, 16, 32, 64)
_TABLE = {
    ("hybridep", "gb200"): ((391, 353), (578, 527), (612, 646), (675, 744)),
    ("nccl", "gb200"): ((735, 741), (743, 765), (769, 758), (930, 827)),
    ("hybridep", "h100"): ((661, 624), (1485, 1688), (3064, 3088), (4626, 4398)),
    ("nccl", "h100"): ((1265, 1277), (5774, 5628), (8059, 7815), (9164, 8727)),
}


# Starts that nobody published: DeepEP V1's, and those of NCCL's all-to-all of small messages.
_STARTS = {
    ("deepep-v2", "h100"): 26.0,
    ("deepep-v2", "b200"): 33.0,
    ("hybridep", "h100"): 26.0,
    ("hybridep", "gb200"): 33.0,
    ("nccl", "h100"): 8.0,
    ("nccl", "gb200"): 11.0,
}


class Fit(NamedTuple):
    """Constants of one phase: where fitting begins, and what is fitted."""

    first: ExchangeCosts
    names: tuple[str, ...]


def _fit(*names: str, **values: float) -> Fit:
    return Fit(ExchangeCosts(**{"start_us": 10.0, **values}), ("start_us", *names))


_INSIDE = {"fill_us": 20, "row_ns": 60, "row_byte_ns": 0.03, "nvlink_share": 0.7, "pass_ns": 1}
_ACROSS = {
    "doubling_us": 4,
    "fill_us": 40,
    "row_byte_ns": 0.05,
    "far_rows": 1,
    "nic_share": 0.9,
}
_SMALL = {"wave_us": 2, "row_byte_ns": 0.01, "nvlink_share": 0.7}
_RACK = {"doubling_us": 0.3, "token_ns": 10, "token_byte_ns": 1e-3, "nvlink_share": 0.7}
FITS: dict[tuple[str, Scope, ExchangePhase], Fit] = {
    ("deepep", "inside", "dispatch"): _fit(*_INSIDE, "token_ns", **_INSIDE, token_ns=200),
    ("deepep", "inside", "combine"): _fit(
        *_INSIDE, "token_byte_ns", **_INSIDE, token_byte_ns=0.03
    ),
    ("deepep", "across", "dispatch"): _fit(*_ACROSS, **_ACROSS),
    ("deepep", "across", "combine"): _fit(*_ACROSS, **_ACROSS),
    ("deepep-ll", "inside", "dispatch"): _fit(*_SMALL, "token_ns", **_SMALL, token_ns=1000),
    ("deepep-ll", "inside", "combine"): _fit(*_SMALL, "pass_ns", **_SMALL, pass_ns=0.1),
    ("deepep-ll", "across", "dispatch"): _fit(
        "doubling_us", "nic_share", doubling_us=2, nic_share=0.9
    ),
    ("deepep-ll", "across", "combine"): _fit(
        "doubling_us", "nic_share", doubling_us=2, nic_share=0.9
    ),
    ("trtllm", "inside", "dispatch"): _fit(*_RACK, **_RACK),
    ("trtllm", "inside", "combine"): _fit(*_RACK, **_RACK),
}


def is_held_out(row: MeasuredExchange) -> bool:
    """Whether a shape is held out: a fifth, by the hash of its sizes."""
    shape = (row.nodes, row.ranks, row.hidden, row.topk, row.experts, row.tokens)
    return hashlib.sha256(str(shape).encode()).digest()[0] < 51  # noqa: PLR2004 a fifth of 256


def is_congested(row: MeasuredExchange) -> bool:
    """Whether a row is of a congested fabric, which no model of kernels predicts."""
    return row.family == "deepep" and (row.nodes or 1) >= _CONGESTED


def table_rows() -> dict[str, list[MeasuredExchange]]:
    """The rows of table 7 by GPU."""
    rows: dict[str, list[MeasuredExchange]] = {}
    for (family, gpu), times in _TABLE.items():
        for ranks, pair in zip(_RANKS, times, strict=True):
            row = MeasuredExchange(
                family=family,
                gpu=gpu,
                precision="bf16",
                tokens=4096,
                hidden=7168,
                topk=8,
                experts=256,
                ranks=ranks,
                groups=(8, 4),  # as DeepSeek-V3
                nodes=1 if gpu == "gb200" else math.ceil(ranks / 8),
                sms=None,
                seconds={phase: us * 1e-6 for phase, us in zip(PHASES, pair, strict=True)},
                notify_s={},
            )
            rows.setdefault(gpu, []).append(row)
    return rows


def groups_of(
    rows: Sequence[MeasuredExchange], gpu: str
) -> Iterator[tuple[Key, list[ExchangeGroup]]]:
    """The groups of rows that share constants."""
    own: dict[Key, list[ExchangeGroup]] = {}
    for group in exchange_groups(rows, gpu, max(_RANKS) if gpu == "gb200" else 8, NIC):
        own.setdefault((group.family, group.gpu, group.scope), []).append(group)
    yield from own.items()


def fit_all(folder: Path) -> dict[tuple[Key, ExchangePhase], ExchangeCosts]:
    """The constants of all families, by GPU, scope and phase."""
    costs: dict[tuple[Key, ExchangePhase], ExchangeCosts] = {}
    for gpu, rows in measured(folder).items():
        shown = [row for row in rows if not is_held_out(row) and not is_congested(row)]
        for key, groups in groups_of(shown, gpu):
            for phase in PHASES:
                costs[key, phase] = _measured_costs(key, phase, groups, shown, costs)
    for key, groups, rows in _published_groups(folder):
        for phase in PHASES:
            fit = _published_fit(key, phase, costs)
            costs[key, phase] = _fitted(fit, phase, groups, rows)
    return costs


def _measured_costs(
    key: Key,
    phase: ExchangePhase,
    groups: list[ExchangeGroup],
    rows: list[MeasuredExchange],
    costs: dict[tuple[Key, ExchangePhase], ExchangeCosts],
) -> ExchangeCosts:
    """Constants of measured shapes, with those of the wait before data move."""
    family, gpu, scope = key
    fit = FITS[family, scope, phase]
    first = fit.first
    if family == "deepep-ll" and scope == "inside":
        first = replace(first, expert_sms=sheet(gpu).sms)
    if family == "deepep" and scope == "across":
        # A rank forwards inside its node as fast as it sends there.
        share = costs[(family, gpu, "inside"), phase].nvlink_share
        first = replace(first, nvlink_share=share)
    own = _fitted(Fit(first, fit.names), phase, groups, rows)
    return _with_notify(own, phase, groups, rows)


def _fitted(
    fit: Fit, phase: ExchangePhase, groups: list[ExchangeGroup], rows: list[MeasuredExchange]
) -> ExchangeCosts:
    parts = [(group, measured_seconds(rows, group, phase)) for group in groups]
    return fit_costs(parts, phase, fit.first, fit.names)


def _with_notify(
    costs: ExchangeCosts,
    phase: ExchangePhase,
    groups: list[ExchangeGroup],
    rows: list[MeasuredExchange],
) -> ExchangeCosts:
    """Constants with those of the wait, by least relative errors; 0 if unmeasured."""
    design, target = [], []
    for group in groups:
        waits = np.array([rows[place].notify_s.get(phase, math.nan) for place in group.places])
        busiest = group.time(replace(costs, notify_share=1.0), phase).notify_s * 1e6
        ranks = np.log2(np.asarray(group.shape.ranks, float))
        tokens = np.asarray(group.shape.tokens, float) / 1e3
        columns = [np.ones_like(waits), ranks, tokens, busiest]
        if group.family == "trtllm":
            columns[3] = np.zeros_like(waits)
        else:
            columns[2] = np.zeros_like(waits)
        design.append(np.column_stack(columns))
        target.append(waits * 1e6)
    matrix, waits = np.concatenate(design), np.concatenate(target)
    shown = np.isfinite(waits)
    if not shown.any():
        return costs
    factors = nnls(matrix[shown] / waits[shown, None], np.ones(int(shown.sum())))[0]
    return replace(costs, **dict(zip(_NOTIFY, factors.tolist(), strict=True)))


_NOTIFY = ("notify_us", "notify_doubling_us", "notify_token_ns", "notify_share")


def measured(folder: Path) -> dict[str, list[MeasuredExchange]]:
    """The measured rows of a folder by GPU."""
    rows: dict[str, list[MeasuredExchange]] = {}
    for gpu in gpus():
        for kind in ("deepep", "alltoall"):
            if (path := folder / f"{kind}_{gpu}.parquet").exists():
                rows.setdefault(gpu, []).extend(read_exchanges(path))
    return rows


def _published_groups(
    folder: Path,
) -> Iterator[tuple[Key, list[ExchangeGroup], list[MeasuredExchange]]]:
    """The groups of published rows that have constants of their own, and the rows."""
    published = read_exchanges(folder / "deepep_published.csv")
    own = [row for row in published if row.family != "deepep"]
    for gpu, rows in (("h100", own), *table_rows().items()):
        for key, groups in groups_of(rows, gpu):
            yield key, groups, rows


def _published_fit(
    key: Key, phase: ExchangePhase, costs: dict[tuple[Key, ExchangePhase], ExchangeCosts]
) -> Fit:
    """Few points fix few constants; the others are those of the nearest measured kernels."""
    family, gpu, scope = key
    if family == "deepep-ll":
        names = ("nvlink_share",) if scope == "inside" else ("start_us", "doubling_us")
        return Fit(costs[(family, "h100", scope), phase], names)
    start = ExchangeCosts(start_us=_STARTS[family, gpu])
    if family == "hybridep" and scope == "across":
        # Its NICs reach less with few domains: a hop does not overlap the other one wholly.
        first = replace(start, fill_us=100.0, nic_share=0.9)
        return Fit(first, ("fill_us", "nic_share"))
    if scope == "across":
        return Fit(replace(start, nic_share=0.9), ("nic_share",))
    if family == "deepep-v2":
        first = replace(start, row_byte_ns=0.02, nvlink_share=0.7)
        return Fit(first, ("row_byte_ns", "nvlink_share"))
    return Fit(replace(start, nvlink_share=0.7), ("nvlink_share",))


_COSTS_HEAD = """\
# Constants of expert all-to-alls by family, GPU, inside one NVLink domain or across several,
# and phase, with the least and the most of the measured shapes; `ExchangeCosts` of
# expert_exchange.py explains them. Written by docs/exchange_accuracy.py, which fits them to
# four fifths of the shapes that NVIDIA AIConfigurator measured
# (github.com/ai-dynamo/aiconfigurator, commit 095f58a, systems/data; Apache-2.0, Copyright
# NVIDIA CORPORATION & AFFILIATES), to what DeepEP publishes (github.com/deepseek-ai/DeepEP,
# commit dd758ca; MIT, Copyright DeepSeek), and, for HybridEP and NCCL, to table 7 of arXiv
# 2603.07685. The tables are not part of fastcomm.
"""


def ranges_of(folder: Path) -> dict[Key, MeasuredRange]:
    """The measured shapes by the constants that predict them."""
    shapes: dict[Key, list[ExchangeShape]] = {}
    for gpu, rows in measured(folder).items():
        for key, groups in groups_of(rows, gpu):
            shapes.setdefault(key, []).extend(group.shape for group in groups)
    for key, groups, _ in _published_groups(folder):
        shapes.setdefault(key, []).extend(group.shape for group in groups)
    return {key: _range(own, FAMILIES[key[0]].sms) for key, own in shapes.items()}


def _range(shapes: Sequence[ExchangeShape], sms: int | None) -> MeasuredRange:
    """The least and the most of shapes; `sms` is the default of their family."""

    def ends(columns: Sequence[ShapeValue]) -> tuple[int, int]:
        values = np.concatenate([np.ravel(column) for column in columns])
        return int(values.min()), int(values.max())

    return MeasuredRange(
        ranks=ends([shape.ranks for shape in shapes]),
        domains=ends([shape.domains() for shape in shapes]),
        tokens=ends([shape.tokens for shape in shapes]),
        sms=None
        if sms is None
        else ends([sms if shape.sms is None else shape.sms for shape in shapes]),
    )


def costs_text(
    costs: dict[tuple[Key, ExchangePhase], ExchangeCosts], ranges: dict[Key, MeasuredRange]
) -> str:
    """The text of the file of constants."""
    parts = [_COSTS_HEAD]
    order = list(FAMILIES)
    for (family, gpu, scope), phase in sorted(
        costs, key=lambda key: (order.index(key[0][0]), *key[0][1:], PHASES.index(key[1]))
    ):
        constants = costs[(family, gpu, scope), phase]
        if phase == PHASES[0]:
            parts.append(f"\n[{family}.{gpu}.{scope}.measured]\n")
            for name, ends in asdict(ranges[family, gpu, scope]).items():
                if ends is not None:
                    parts.append(f"{name} = {list(ends)}\n")
        parts.append(f"\n[{family}.{gpu}.{scope}.{phase}]\n")
        for field in fields(constants):
            value = getattr(constants, field.name)
            # What a fit drives to nothing is nothing.
            if value != field.default and (value > _LEAST or field.name == "start_us"):
                parts.append(
                    f"{field.name} = {float(f'{value:.4g}') if value > _LEAST else 0.0}\n"
                )
    return "".join(parts)


_LEAST = 1e-4


class Errors(NamedTuple):
    """Relative errors of one phase of some rows, and which of them were held out."""

    title: tuple[str, ...]  # GPU, family, nodes
    phase: ExchangePhase
    errors: FloatArray
    held_out: FloatArray


def errors(folder: Path) -> Iterator[Errors]:
    """The errors of shipped constants on measured shapes."""
    for gpu, rows in measured(folder).items():
        for (family, name, scope), groups in groups_of(rows, gpu):
            for group in groups:
                yield from _errors(rows, group, (family, name, scope))


def shipped_of(key: Key, phase: ExchangePhase) -> ExchangeCosts:
    """The shipped constants of a phase, or those of the GPU that stands in for it."""
    family, gpu, scope = key
    source = expert_exchange.measured_gpu(family, gpu, scope)
    return expert_exchange.shipped_costs()[family, str(source), scope, phase]


def _errors(rows: list[MeasuredExchange], group: ExchangeGroup, key: Key) -> Iterator[Errors]:
    family, gpu, _ = key
    domains = group.shape.domains()
    for phase in PHASES:
        off = (
            group.predicted(shipped_of(key, phase), phase).seconds
            / measured_seconds(rows, group, phase)
            - 1
        )
        held = np.array([is_held_out(rows[place]) for place in group.places])
        for count in np.unique(domains):
            own = (domains == count) & np.isfinite(off)
            if own.any():
                title = gpu.upper(), FAMILIES[family].title, group.precision, f"{count:.0f}"
                yield Errors(title, phase, off[own], held[own])


def report(folder: Path, *, all_rows: bool = False) -> str:
    """The table of median absolute errors of held-out shapes, or of all."""
    lines = [
        "| GPU | kernels | precision | domains | phase | error | 90 % below | bias | shapes |",
        "| --- | --- | --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for title, phase, off, held in errors(folder):
        own = off if all_rows else off[held]
        if len(own):
            median, most = np.median(np.abs(own)), np.percentile(np.abs(own), 90)
            cells = (
                *title,
                phase,
                *(f"{each * 100:.1f} %" for each in (median, most, np.median(own))),
            )
            lines.append("| " + " | ".join((*cells, str(len(own)))) + " |")
    return "\n".join(lines)


def published(folder: Path) -> str:
    """The table of published bandwidths and times, and what the constants predict."""
    rows = read_exchanges(folder / "deepep_published.csv")
    lines = [
        "| GPU | kernels | ranks, domains | SMs | phase | published | predicted | error |",
        "| --- | --- | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for gpu, own in (("h800", rows), *table_rows().items()):
        for key, groups in groups_of(own, gpu):
            for group in groups:
                lines += _published_lines(own, group, key)
    return "\n".join(lines)


def _published_lines(
    rows: list[MeasuredExchange], group: ExchangeGroup, key: Key
) -> Iterator[str]:
    family, gpu, _ = key
    for phase in PHASES:
        times = group.predicted(shipped_of(key, phase), phase).seconds
        for place, predicted in zip(group.places, times, strict=True):
            row = rows[place]
            if (seconds := row.seconds.get(phase)) is None:
                continue
            counted = row.counted_bytes
            pair = (
                [f"{each * 1e6:.0f} us" for each in (seconds, predicted)]
                if counted is None
                else [f"{counted / each / 1e9:.0f} GB/s" for each in (seconds, predicted)]
            )
            ranks = f"{row.ranks}, {row.nodes}"
            cells = gpu.upper(), FAMILIES[family].title, ranks, str(row.sms or "n/a"), phase
            yield (
                "| "
                + " | ".join((*cells, *pair, f"{(predicted / seconds - 1) * 100:+.1f} %"))
                + " |"
            )


_HEAD = """\
# Measured expert all-to-alls: how far off

How far are predicted times of dispatch and combine from measured ones? This page is for readers
who judge `fastcomm dispatch evaluate` and the exchange in `fastcomm plan`.
`docs/exchange_accuracy.py` fits the constants of `fastcomm/hardware/expert_exchange.toml` to
four fifths of the shapes that NVIDIA AIConfigurator measured (Apache-2.0; not part of
fastcomm), and writes this page: errors on the other fifth.

A phase has its start, and the time of its busiest resource: SMs that copy rows, NVLink, or the
NIC. Each family has at most ten constants of one phase, for 100 to 2000 measurements: start,
time of the first token, SM-time of a token, a row and a byte, shares of the bandwidths that are
reached. Eight nodes of DeepEP V1 are of a congested fabric, by the description of the table: no
constant is fitted to them.

H200, H800, B300 and GB300 have the constants of H100, B200 and GB200, with their own links.
"""


def page(folder: Path) -> str:
    """The whole page."""
    return f"{_HEAD}\n{report(folder)}\n\n{_PUBLISHED}\n{published(folder)}\n"


_PUBLISHED = """\
## Published numbers

What DeepEP publishes, and table 7 of arXiv 2603.07685 (HybridEP, NCCL). DeepEP V1's normal
kernels on H800 are predicted from H100; few constants of the others are fitted to these rows.
SMs that nobody names are the family's default. A higher time is a lower bandwidth.

One time is more than 10 % off: NCCL's dispatch on 64 GB200 takes 12 % longer than its combine,
which sends as many bytes over the same NVLink; up to 32 ranks both take as long. No link
or start of a message explains a step between 32 and 64 ranks, and there is no second source, so
no constant is fitted to it. HybridEP on H100 gets 35 to 40 GB/s from a NIC on two nodes, and
48 GB/s on eight: the hop over NVLink (0.6 ms on one node) overlaps that over the NIC in part.
"""

if __name__ == "__main__":
    where = Path(sys.argv[-1])
    if "--check" in sys.argv:
        sys.stdout.write(report(where, all_rows=True) + "\n")
    else:
        COSTS.write_text(costs_text(fit_all(where), ranges_of(where)), "utf-8")
        for cached in ("_shipped", "shipped_costs", "shipped_ranges"):
            getattr(expert_exchange, cached).cache_clear()
        PAGE.write_text(page(where), "utf-8")
