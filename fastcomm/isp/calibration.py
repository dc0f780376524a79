"""What a search is answered with: a cluster, its measured tables, its fit to a run."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastcomm.errors import ConfigError, FastcommError
from fastcomm.hardware import Cluster, load
from fastcomm.hardware.calibration import (
    Attended,
    Calibration,
    ComputeResidual,
    Product,
    calibrate,
    fit_attention,
    fit_products,
)
from fastcomm.hardware.measurements import (
    AttentionTable,
    ComputeTables,
    TimedMessage,
    of_events,
    read_attention,
    read_gemm,
    read_measurements,
    read_tables,
)
from fastcomm.options import SearchOptions
from fastcomm.trace.schema import OPS

if TYPE_CHECKING:
    from fastcomm.readers.kineto.shapes import ShapedCall
    from fastcomm.trace.run import RunTraces

_HALF = ("c10::BFloat16", "c10::Half")
# Where an operator has its two factors.
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}


class _Attention(NamedTuple):
    backward: bool
    # Where the queries are, and whether it is causal; the place of the sequence in a shape.
    query: int
    causal: int
    sequence: int


_ATTENTION = {
    "aten::_flash_attention_forward": _Attention(False, 0, 8, 1),
    "aten::_flash_attention_backward": _Attention(True, 1, 11, 1),
    "aten::_scaled_dot_product_cudnn_attention": _Attention(False, 0, 6, 2),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Attention(True, 1, 14, 2),
    "flash_attn::_flash_attn_forward": _Attention(False, 0, 5, 1),
    "flash_attn::_flash_attn_backward": _Attention(True, 1, 11, 1),
}
NAMES = (*_PRODUCTS, *_ATTENTION)


class Timed(NamedTuple):
    """Timed work, and the number of calls that were left out by reason."""

    products: list[Product]
    attention: list[Attended]
    left_out: Counter[str]


def timed(calls: "list[ShapedCall]") -> Timed:
    """Return the work of calls in half precision, which curves describe."""
    found = Timed([], [], Counter())
    for call in calls:
        work = product(call) if call.name in _PRODUCTS else attention(call)
        if isinstance(work, str):
            found.left_out[work] += 1
        elif isinstance(work, Product):
            found.products.append(work)
        else:
            found.attention.append(work)
    return found


def product(call: "ShapedCall") -> Product | str:
    """Return the product of two matrices, or of a batch of them, or why it is none."""
    first = _PRODUCTS[call.name]
    if len(call.dims) < first + 2 or not call.types[first : first + 1]:
        return "no shapes"
    if call.types[first] not in _HALF:
        return f"products of {call.types[first]}"
    left, right = call.dims[first : first + 2]
    if len(left) < 2 or len(left) != len(right) or left[-1] != right[-2]:  # noqa: PLR2004
        return "shapes that are no product"
    flops = 2.0 * right[-1]
    for each in left:
        flops *= each
    return Product(flops, call.seconds) if flops else "products of nothing"


def attention(call: "ShapedCall") -> Attended | str:
    """Return the causal attention of whole sequences with themselves, or why it is none."""
    how = _ATTENTION[call.name]
    if len(call.dims) < how.query + 2 or len(call.types) <= how.query:
        return "no shapes"
    query, key = call.dims[how.query : how.query + 2]
    if len(query) != 4 or len(key) != 4:  # noqa: PLR2004 batch, sequence, heads, width
        return "attention of packed sequences"
    if call.types[how.query] not in _HALF:
        return f"attention of {call.types[how.query]}"
    if query[how.sequence] != key[how.sequence]:
        return "attention of two lengths"
    if call.values[how.causal : how.causal + 1] != ("True",):
        return "attention that is not causal, or does not say so"
    heads = query[3 - how.sequence]
    hidden = heads * query[3]
    return Attended(how.backward, query[0], query[how.sequence], hidden, call.seconds)


# A few ranks tell what the links do; a thousand say it again.
_RANKS = 8


def messages(run: "RunTraces", most_ranks: int = _RANKS) -> list[TimedMessage]:
    """Collectives of the first ranks: operation, group size, payload, duration."""
    found: list[TimedMessage] = []
    for rank in run.ranks[:most_ranks]:
        trace = run.read(rank)
        sizes = trace.groups["size"].to_pylist()
        comm = trace.comm.select(["op", "group", "payload_bytes", "start", "stop"]).to_pylist()
        found += of_events(
            (
                OPS[row["op"]],
                None if row["group"] is None else sizes[row["group"]],
                row["payload_bytes"],
                row["stop"] - row["start"],
            )
            for row in comm
        )
    if not found:
        raise FastcommError(
            f"{len(run.ranks)} ranks: no collective has both a size and a group to calibrate by"
        )
    return found


def work(run: "RunTraces", most_ranks: int = 1) -> Timed:
    """Products and attention of the first ranks, where their traces have shapes.

    Ranks do the same work on equal GPUs: one tells all.
    """
    # Few searches read traces, and what reads them takes long to load.
    from fastcomm.readers.kineto import reader
    from fastcomm.readers.kineto.shapes import calls

    found: list[ShapedCall] = []
    for source in run.sources[:most_ranks]:
        if reader.claims(source.path):
            found += calls(source.path, NAMES)
    return timed(found)


def spread(messages: list[TimedMessage]) -> dict[str, int]:
    """Return the number of sizes of each operation."""
    return {
        op: len(np.unique([m.volume for m in messages if m.op == op]))
        for op in sorted({m.op for m in messages})
    }


_BENCHMARKS = (".txt", ".log", ".out", ".csv", ".parquet")
# Of the peak: clocks are boosted, and times are rounded.
_MOST = 1.1
_LINKS_ONLY = "links only: GEMM and attention keep the cluster's curves"


def calibrated(path: Path, cluster: Cluster) -> Calibration:
    """Fit a cluster to traces, to what `fastcomm metrics` wrote, or to a benchmark of links."""
    if not path.exists():
        raise ConfigError(f"calibration: {path}: there is no such file or folder")
    if (path / "events.parquet").exists():
        return _links(path, cluster, waits=True)
    if path.suffix in _BENCHMARKS:
        return _links(path, cluster, waits=path.suffix == ".parquet")
    return _of_run(path, cluster)


def _links(path: Path, cluster: Cluster, *, waits: bool) -> Calibration:
    found = calibrate(cluster, read_measurements(path), waits=waits)
    why = f"{path.name} has no shapes of operators; {_LINKS_ONLY}"
    return Calibration(
        cluster=found.cluster, residuals=found.residuals, skipped=(*found.skipped, why)
    )


def _of_run(path: Path, cluster: Cluster) -> Calibration:
    """Fit links and curves, as far as the traces tell; an error if they tell neither."""
    from fastcomm.readers.runs import open_run

    run = open_run(path)
    fitted, residuals, skipped = of_work(work(run), cluster)
    try:
        links = calibrate(fitted, messages(run), waits=True)
    except FastcommError as error:
        if not residuals:
            raise
        return Calibration(cluster=fitted, compute=residuals, skipped=(*skipped, str(error)))
    return Calibration(
        cluster=links.cluster,
        residuals=links.residuals,
        compute=residuals,
        skipped=(*links.skipped, *skipped),
    )


def of_work(
    found: Timed, cluster: Cluster
) -> tuple[Cluster, tuple[ComputeResidual, ...], tuple[str, ...]]:
    """Curves through timed work; what was left out, in words."""
    possible = [
        work for work in found.products if work.flops < _MOST * cluster.peak * work.seconds
    ]
    cluster, products = fit_products(cluster, possible)
    cluster, attention = fit_attention(cluster, found.attention)
    skipped = [f"{count} calls left out: {why}" for why, count in found.left_out.items()]
    if beyond := len(found.products) - len(possible):
        skipped.append(f"{beyond} calls left out: products beyond the peak of {cluster.name}")
    if not products and not attention:
        why = "no product or attention of half precision says its shapes (record_shapes=True)"
        skipped.append(f"{why}; {_LINKS_ONLY}")
    elif not products or len(attention) < 2:  # noqa: PLR2004 there and back
        missing = [] if products else ["GEMM"]
        missing += [] if len(attention) == 2 else ["attention"]  # noqa: PLR2004
        skipped.append(f"not measured: {', '.join(missing)} keeps the cluster's curve")
    elif cluster.note:
        cluster = replace(cluster, note="")
    return cluster, (*products, *attention), tuple(skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The cluster that a search is priced for, and the measurements in use."""

    cluster: Cluster
    attention: AttentionTable | None = None
    calibration: Calibration | None = None
    tables: ComputeTables | None = None  # where both products and attention were measured


def setting(options: SearchOptions) -> Setting:
    """Return cluster, measured tables and mode, as the options say."""
    cluster = load(str(options.cluster or "a800"))
    gemm = options.gemm_table and read_gemm(Path(options.gemm_table))
    attention = options.attention_table and read_attention(Path(options.attention_table))
    gpu = "910b" if "910b" in cluster.name.lower() else "a800"
    found = read_tables(Path(options.compat_tables), gpu) if options.compat_tables else None
    if found is None and gemm and attention:
        found = ComputeTables(gemm, attention)
    if found:
        gemm, attention = found
    measured = calibrated(Path(options.calibrate), cluster) if options.calibrate else None
    cluster = measured.cluster if measured else cluster
    return Setting(
        cluster=replace(cluster, gemm=gemm or cluster.gemm, comm_model=options.comm_model),
        attention=attention or None,
        calibration=measured,
        tables=found,
    )
