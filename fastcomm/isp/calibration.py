"""Set up the cluster of a search: measured tables, and fits to traces or benchmarks."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastcomm.errors import ConfigError, FastcommError
from fastcomm.hardware.calibration import (
    AttentionTable,
    Calibration,
    ComputeResidual,
    ComputeTables,
    TimedAttention,
    TimedGemm,
    TimedMessage,
    calibrate,
    fit_attention,
    fit_gemm,
    messages_of_events,
    read_attention,
    read_gemm,
    read_measurements,
)
from fastcomm.hardware.clusters import Cluster, load
from fastcomm.isp.options import SearchOptions
from fastcomm.trace.schema import OPS
from fastcomm.units import enumeration

if TYPE_CHECKING:
    from fastcomm.formats.kineto.reader import ShapedCall
    from fastcomm.trace.run_traces import RunTraces

_HALF = ("c10::BFloat16", "c10::Half")
# Index of the first of two factors among the inputs of an operator.
_GEMMS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}


class _Attention(NamedTuple):
    """Positions of the inputs of an attention operator."""

    backward: bool
    query: int  # input with the queries
    causal: int  # input that says whether attention is causal
    sequence: int  # dimension of the sequence in a shape


_ATTENTION = {
    "aten::_flash_attention_forward": _Attention(False, 0, 8, 1),
    "aten::_flash_attention_backward": _Attention(True, 1, 11, 1),
    "aten::_scaled_dot_product_cudnn_attention": _Attention(False, 0, 6, 2),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Attention(True, 1, 14, 2),
    "flash_attn::_flash_attn_forward": _Attention(False, 0, 5, 1),
    "flash_attn::_flash_attn_backward": _Attention(True, 1, 11, 1),
}
NAMES = (*_GEMMS, *_ATTENTION)


class TimedWork(NamedTuple):
    """Timed GEMMs and attention calls, and the number of calls left out by reason."""

    gemms: list[TimedGemm]
    attention: list[TimedAttention]
    left_out: Counter[str]


def classify(calls: "list[ShapedCall]") -> TimedWork:
    """Return the GEMMs and attention calls in half precision, which the curves describe."""
    result = TimedWork([], [], Counter())
    for call in calls:
        work = gemm(call) if call.name in _GEMMS else attention(call)
        if isinstance(work, str):
            result.left_out[work] += 1
        elif isinstance(work, TimedGemm):
            result.gemms.append(work)
        else:
            result.attention.append(work)
    return result


def gemm(call: "ShapedCall") -> TimedGemm | str:
    """Return the GEMM or batched GEMM of a call, or the reason why it is not usable."""
    first = _GEMMS[call.name]
    if len(call.dims) < first + 2 or not call.types[first : first + 1]:
        return "no shapes"
    if call.types[first] not in _HALF:
        return f"GEMM of {call.types[first]}"
    a_dims, b_dims = call.dims[first : first + 2]
    if len(a_dims) < 2 or len(a_dims) != len(b_dims) or a_dims[-1] != b_dims[-2]:  # noqa: PLR2004
        return "shapes that do not multiply"
    flops = 2.0 * b_dims[-1]
    for size in a_dims:
        flops *= size
    return TimedGemm(flops, call.seconds) if flops else "empty GEMM"


def attention(call: "ShapedCall") -> TimedAttention | str:
    """Return the causal self-attention of a call, or the reason why it is not usable."""
    operator = _ATTENTION[call.name]
    if len(call.dims) < operator.query + 2 or len(call.types) <= operator.query:
        return "no shapes"
    query, key = call.dims[operator.query : operator.query + 2]
    if len(query) != 4 or len(key) != 4:  # noqa: PLR2004 batch, sequence, heads, width
        return "attention of packed sequences"
    if call.types[operator.query] not in _HALF:
        return f"attention of {call.types[operator.query]}"
    if query[operator.sequence] != key[operator.sequence]:
        return "attention between sequences of different lengths"
    if call.values[operator.causal : operator.causal + 1] != ("True",):
        return "attention that is not recorded as causal"
    heads = query[3 - operator.sequence]
    hidden = heads * query[3]
    return TimedAttention(
        operator.backward, query[0], query[operator.sequence], hidden, call.seconds
    )


# Ranks of a run measure the same links: a few are enough.
_RANKS = 8


def messages(run: "RunTraces", most_ranks: int = _RANKS) -> list[TimedMessage]:
    """Return the collectives of the first `most_ranks` ranks with their sizes and durations.

    Raises
    ------
    FastcommError
        If no collective has both a size and a group.

    """
    messages: list[TimedMessage] = []
    for rank in run.ranks[:most_ranks]:
        trace = run.read(rank)
        sizes = trace.groups["size"].to_pylist()
        comm = trace.comm.select(["op", "group", "payload_bytes", "start", "stop"]).to_pylist()
        messages += messages_of_events(
            (
                OPS[row["op"]],
                None if row["group"] is None else sizes[row["group"]],
                row["payload_bytes"],
                row["stop"] - row["start"],
            )
            for row in comm
        )
    if not messages:
        raise FastcommError(
            f"calibration: no collective of {len(run.ranks)} ranks has both a size and a group"
        )
    return messages


def work(run: "RunTraces", most_ranks: int = 1) -> TimedWork:
    """Return the measured GEMMs and attention of the first ranks of a run.

    Only Kineto traces whose operators have shapes contribute. One rank is enough: all ranks do
    the same work on equal GPUs.

    Parameters
    ----------
    run
        The traces.
    most_ranks
        Number of ranks to read.

    """
    # slow to import, rarely needed
    from fastcomm.formats.kineto.ranks import claims
    from fastcomm.formats.kineto.reader import calls

    shaped: list[ShapedCall] = []
    for source in run.sources[:most_ranks]:
        if claims(source.path):
            shaped += calls(source.path, NAMES)
    return classify(shaped)


_BENCHMARKS = (".txt", ".log", ".out", ".csv", ".parquet")
# Highest plausible rate over the peak: clocks are boosted, and times are rounded.
_MOST = 1.1
_LINKS_ONLY = "only links were fitted, GEMM and attention keep the curves of the cluster"


def calibrated(path: Path, cluster: Cluster) -> Calibration:
    """Fit the links, and where possible the arithmetic, of a cluster to measurements.

    Parameters
    ----------
    path
        Traces, output of `fastcomm metrics`, or output of nccl-tests.
    cluster
        Cluster whose data holds where nothing was measured.

    Returns
    -------
    Calibration
        The fitted cluster, and the deviation of the fit from the measurements.

    Raises
    ------
    ConfigError
        If the path does not exist, or nothing can be fitted to it.

    """
    if not path.exists():
        raise ConfigError(f"calibration: {path}: no such file or folder")
    if (path / "events.parquet").exists():
        return _links(path, cluster, waits=True)
    if path.suffix in _BENCHMARKS:
        return _links(path, cluster, waits=path.suffix == ".parquet")
    return _fit_to_traces(path, cluster)


def _links(path: Path, cluster: Cluster, *, waits: bool) -> Calibration:
    """Fit links alone, to a benchmark or to metrics."""
    links = calibrate(cluster, read_measurements(path), waits=waits)
    reason = f"{path.name} has no operator shapes: {_LINKS_ONLY}"
    return Calibration(
        cluster=links.cluster, residuals=links.residuals, skipped=(*links.skipped, reason)
    )


def _fit_to_traces(path: Path, cluster: Cluster) -> Calibration:
    """Fit links and curves to traces as far as possible; raise an error if neither is."""
    from fastcomm.formats.opening import open_run

    run = open_run(path)
    fitted, residuals, skipped = fit_work(work(run), cluster)
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


def fit_work(
    work: TimedWork, cluster: Cluster
) -> tuple[Cluster, tuple[ComputeResidual, ...], tuple[str, ...]]:
    """Fit the GEMM and attention curves of a cluster.

    Returns
    -------
    cluster : Cluster
        With the fitted curves.
    residuals : tuple of ComputeResidual
        Errors of the fitted curves.
    skipped : tuple of str
        One sentence for each thing that was not fitted.

    """
    possible = [call for call in work.gemms if call.flops < _MOST * cluster.peak * call.seconds]
    cluster, gemms = fit_gemm(cluster, possible)
    cluster, attention = fit_attention(cluster, work.attention)
    skipped = [f"{count} calls left out: {reason}" for reason, count in work.left_out.items()]
    if beyond := len(work.gemms) - len(possible):
        skipped.append(f"{beyond} calls left out: GEMM faster than the peak of {cluster.name}")
    if not gemms and not attention:
        skipped.append(
            f"no GEMM or attention in half precision has shapes: {_LINKS_ONLY}; record traces "
            "with record_shapes=True"
        )
    elif not gemms or len(attention) < 2:  # noqa: PLR2004 forward and backward
        missing = [] if gemms else ["GEMM"]
        missing += [] if len(attention) == 2 else ["attention"]  # noqa: PLR2004
        skipped.append(
            f"{enumeration(missing)} not fully measured: the curve of the cluster is used"
        )
    elif cluster.note:
        cluster = replace(cluster, note="")
    return cluster, (*gemms, *attention), tuple(skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Cluster and measurements that a search uses."""

    cluster: Cluster
    attention: AttentionTable | None = None
    calibration: Calibration | None = None
    tables: ComputeTables | None = None  # if both GEMM and attention were measured


def setting(options: SearchOptions, tables: ComputeTables | None = None) -> Setting:
    """Load the cluster and measured tables of the options, and calibrate the cluster.

    `tables` replace those that the options name.

    Raises
    ------
    FastcommError
        If a file is missing or invalid.

    """
    cluster = load(str(options.cluster or "a800"))
    gemm = options.gemm_table and read_gemm(Path(options.gemm_table))
    attention = options.attention_table and read_attention(Path(options.attention_table))
    if tables is None and gemm and attention:
        tables = ComputeTables(gemm, attention)
    if tables:
        gemm, attention = tables
    measured = calibrated(Path(options.calibrate), cluster) if options.calibrate else None
    cluster = measured.cluster if measured else cluster
    return Setting(
        cluster=replace(cluster, gemm=gemm or cluster.gemm, comm_model=options.comm_model),
        attention=attention or None,
        calibration=measured,
        tables=tables,
    )
