"""Time of one layer and one micro-batch: GEMM, attention, experts, communication.

Sizes are in bytes, times in seconds, bandwidths in bytes per second. `alpha` is a start-up
time. An `Array` has a value for each strategy of a grid, or has one row or one
column if it does not depend on the other; see `StrategyGrid`.
"""

from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.hardware.calibration import AttentionTable
from fastcomm.hardware.clusters import Cluster
from fastcomm.hardware.gpus import FloatArray, LinkFit, bus_factor
from fastcomm.isp.problem import SearchProblem
from fastcomm.isp.space import (
    FULL,
    NONE,
    ShardedElements,
    Stage,
    StrategyGrid,
    experts_of,
    layers_of,
)
from fastcomm.models import Experts, Layer

# By algorithm: what a rank sends, with checkpoints, and the activations that both ranks repeat.
_TWO_GPUS = {
    "mtp": (4.0, 6.0, 8),
    "msp": (4.0, 6.0, 4),
    "fsp": (5.0, 7.0, 0),
    "isp": (2.0, 3.0, 0),
}
Array = NDArray[Any]


def is_inside(cluster: Cluster, ranks: ArrayLike, stride: ArrayLike) -> NDArray[np.bool_]:
    """Return whether each group of ranks lies in one node.

    Parameters
    ----------
    cluster
        Has the number of GPUs of a node.
    ranks
        Number of ranks of each group.
    stride
        Distance between two consecutive ranks of a group.

    """
    n, room = np.asarray(ranks, np.float64), cluster.gpus_per_node
    return np.asarray((n <= room) & ((n - 1) * np.asarray(stride) <= room - 1))


def cluster_collective(
    cluster: Cluster,
    op: str,
    volume: ArrayLike,
    ranks: ArrayLike,
    stride: ArrayLike = 1,
    calls: ArrayLike = 1,
) -> FloatArray:
    """Return the seconds of collectives, from measured lines where the cluster has them.

    Parameters
    ----------
    cluster
        Its fitted lines count before its bandwidths.
    op
        "all_gather", "reduce_scatter", "all_reduce", "broadcast" or "all_to_all".
    volume
        Bytes of all calls together, as nccl-tests counts them.
    ranks
        Size of the group; 1 takes no time.
    stride
        Distance between two consecutive ranks of the group.
    calls
        Number of calls; each has a start-up time.

    """
    n = np.asarray(ranks, np.float64)
    inside = is_inside(cluster, n, stride)
    size, count = np.asarray(volume, np.float64), np.asarray(calls, np.float64)
    share = np.where(inside, 1.0, np.minimum(stride, cluster.gpus_per_node))
    if op == "all_to_all":
        transfer = _exchange(cluster, size, n, inside, share)
    else:
        transfer = bus_factor(op, n) * size * share / bandwidth(cluster, n, inside)
    time = count * start(cluster, n, inside) + transfer
    if fits := cluster.fits.get(op):
        once = _fitted(cluster, fits, bus_factor(op, n) * size * share / count, n, inside)
        time = np.where(np.isnan(once), time, once * count)
    return np.asarray(np.where(n > 1, time, 0.0))


def start(cluster: Cluster, ranks: FloatArray, inside: NDArray[np.bool_]) -> FloatArray:
    """Return the start-up time of a collective in s.

    Parameters
    ----------
    cluster
        Has the model of start-up times: by call, by ring or by tree.
    ranks
        Number of ranks of each group.
    inside
        Whether the group lies in one node.

    """
    if cluster.comm_model != "call":
        steps = ranks - 1 if cluster.comm_model == "ring" else np.log2(np.maximum(ranks, 1))
        return np.asarray(steps * np.where(inside, cluster.alpha_intra, cluster.alpha_inter))
    beyond = cluster.alpha_rank * np.maximum(0.0, ranks - cluster.alpha_from)
    return np.asarray(np.where(inside, cluster.alpha_intra, cluster.alpha_inter + beyond))


def bandwidth(cluster: Cluster, ranks: FloatArray, inside: NDArray[np.bool_]) -> FloatArray:
    """Return the bandwidth of a collective in bytes/s.

    It is that of a rank for groups in a node, else that of a node, with its contention.

    Parameters
    ----------
    cluster
        Has the bandwidths.
    ranks
        Number of ranks of each group.
    inside
        Whether the group lies in one node.

    """
    node = cluster.bw_node / _contention(cluster, ranks)
    return np.asarray(np.where(inside, cluster.bw_intra, node))


def _contention(cluster: Cluster, ranks: FloatArray) -> FloatArray:
    """Return the divisor of a node's bandwidth in groups of `ranks` ranks."""
    steps = np.array([most for most, _ in cluster.contention])
    divisors = np.array([divisor for _, divisor in cluster.contention])
    return divisors[np.minimum(np.searchsorted(steps, ranks), len(steps) - 1)]


def _exchange(
    cluster: Cluster,
    volume: FloatArray,
    ranks: FloatArray,
    inside: NDArray[np.bool_],
    share: FloatArray,
) -> FloatArray:
    """Return the seconds of an all-to-all; links in and between nodes work at once.

    `volume` is in bytes, and `share` is the number of groups that share the links of a
    node.
    """
    room = cluster.gpus_per_node
    piece = volume / np.maximum(ranks, 1)
    node = cluster.bw_node / _contention(cluster, ranks)
    inter = room * piece * np.maximum(ranks - room, 0) / node
    intra = piece * (np.minimum(ranks, room) - 1) / cluster.bw_intra
    return np.asarray(np.where(inside, intra, np.maximum(inter * share, intra)))


def by_node(cluster: Cluster, volume: ArrayLike, ranks: int, share: float) -> FloatArray:
    """Return the seconds of an all-to-all that sends part of its bytes to other nodes.

    Ranks are consecutive. The bytes that arrive in a node are forwarded to all of its ranks
    that need them.

    Parameters
    ----------
    cluster
        Has bandwidths and start-up times.
    volume
        Bytes of a rank.
    ranks
        Number of ranks of the group; inside a node it is a plain all-to-all.
    share
        Share of the bytes that goes to other nodes, 0 to 1.

    """
    n, size = np.asarray(ranks, np.float64), np.asarray(volume, np.float64)
    room = cluster.gpus_per_node
    if ranks <= room:
        return cluster_collective(cluster, "all_to_all", size, n)
    inter = room * share * size * (1 - room / n) * _contention(cluster, n) / cluster.bw_node
    intra = size * (room - 1) / room / cluster.bw_intra
    return np.asarray(start(cluster, n, is_inside(cluster, n, 1)) + np.maximum(inter, intra))


def _fitted(
    cluster: Cluster,
    fits: tuple[LinkFit, ...],
    moved: FloatArray,
    ranks: FloatArray,
    inside: NDArray[np.bool_],
) -> FloatArray:
    """Return the seconds for `moved` bus bytes by measured lines; NaN without measurements."""
    room = cluster.gpus_per_node
    near = [fit for fit in fits if fit.ranks <= room]
    far = [fit for fit in fits if fit.ranks > room]
    return np.where(inside, _lines(near, moved, ranks), _lines(far, moved, ranks))


def _lines(fits: list[LinkFit], moved: FloatArray, ranks: FloatArray) -> FloatArray:
    """Return the time of collectives by fits at several group sizes, in seconds.

    The parameters of the fits are interpolated linearly in the logarithm of the group size. NaN
    without fits.

    Parameters
    ----------
    fits
        Fits of one operation, by ascending group size.
    moved
        Bus bytes of each collective.
    ranks
        Ranks of the group of each collective.

    """
    if not fits:
        return np.full(np.broadcast(moved, ranks).shape, np.nan)
    at, sizes = np.log(np.maximum(ranks, 1)), np.log([fit.ranks for fit in fits])
    alpha, bus, small_alpha, small_bus = (
        np.interp(at, sizes, [getattr(fit, name) for fit in fits])
        for name in ("alpha", "bus", "small_alpha", "small_bus")
    )
    return np.asarray(np.minimum(alpha + moved / bus, small_alpha + moved / small_bus))


def two_gpus(algo: str) -> dict[str, float]:
    """Return what each of two ranks sends and saves per layer.

    `algo` is "mtp", "msp", "fsp" or "isp". `sent` and `sent_with_checkpoints` are in units of
    D b S h bytes, `kept` in units of D/2 b S h bytes, where D is the bytes of an element.
    """
    sent, with_checkpoints, repeated = _TWO_GPUS[algo]
    saved = repeated + (118 / 3 - repeated) / 2
    return {"sent": sent, "sent_with_checkpoints": with_checkpoints, "kept": saved}


@dataclass(frozen=True, slots=True)
class Correction:
    """Ratios of measured attention times to the formula, by sequence length and width."""

    lengths: Array  # logarithms of the measured sequence lengths
    widths: tuple[Array, ...]  # of each length, logarithms of batch x local hidden size
    ratios: tuple[Array, ...]  # of each length, (2, widths): forward and backward

    @classmethod
    def of(cls, table: AttentionTable, cluster: Cluster) -> "Correction":
        """Compare a measured table with the formula; entries of equal width are averaged."""
        measured: dict[int, dict[int, list[tuple[float, float]]]] = {}
        for (b, s, hidden), (forward, backward) in table.items():
            by_formula = cluster.attention
            ratio = (
                forward / float(by_formula.forward(b, s, hidden)),
                backward / float(by_formula.backward(b, s, hidden)),
            )
            measured.setdefault(s, {}).setdefault(b * hidden, []).append(ratio)
        lengths = sorted(measured)
        widths = [sorted(measured[length]) for length in lengths]
        ratios = [
            np.array([np.mean(measured[length][width], axis=0) for width in row]).T
            for length, row in zip(lengths, widths, strict=True)
        ]
        logs = tuple(np.log(row) for row in widths)
        return cls(np.log(lengths), logs, tuple(ratios))

    def at(self, seq: float, local: ArrayLike) -> tuple[Array, Array]:
        """Return measured over predicted times of attention, forward and backward.

        Ratios are interpolated by logarithms, and clamped outside the measured range.

        Parameters
        ----------
        seq
            Tokens of a sequence.
        local
            Batch size x local hidden size.

        """
        length, width = float(np.log(seq)), np.log(np.asarray(local, np.float64))
        above = int(np.clip(np.searchsorted(self.lengths, length), 0, len(self.lengths) - 1))
        below = max(above - 1, 0) if length < self.lengths[above] else above
        if below == above:
            return self._line(above, 0, width), self._line(above, 1, width)
        share = (length - self.lengths[below]) / (self.lengths[above] - self.lengths[below])
        ends = [[self._line(k, way, width) for way in (0, 1)] for k in (below, above)]
        forward, backward = (
            low + share * (high - low) for low, high in zip(*ends, strict=True)
        )
        return forward, backward

    def _line(self, place: int, way: int, width: Array) -> Array:
        """Interpolate the ratio of a pass, forward (0) or backward (1), at a length index.

        `width` is the logarithm of batch size x local hidden size.
        """
        return np.asarray(np.interp(width, self.widths[place], self.ratios[place][way]))


def copies(grid: StrategyGrid, problem: SearchProblem, experts: Experts) -> Array:
    """Return the copies of tokens that the busiest rank sends and computes per micro-batch.

    This is tokens times experts per token, times the imbalance that `problem` states.
    """
    tokens = 1.0 * grid.bsz * problem.seq_len / grid.sp
    return np.asarray(tokens * experts.top_k * problem.imbalance)


def expert_gemm(
    grid: StrategyGrid, problem: SearchProblem, cluster: Cluster, experts: Experts
) -> Array:
    """Return the forward time of one of the three grouped GEMMs of a rank's experts, in s.

    It is at least the time to read the weights.

    Parameters
    ----------
    grid, problem, cluster
        Strategies of one layout, the job, the hardware.
    experts
        Experts of a layer.

    """
    work = 2.0 * copies(grid, problem, experts) * problem.model.hidden * experts.ffn
    read = problem.dtype_size * _expert_weights(grid, problem, experts) / cluster.hbm
    return np.maximum(cluster.gemm.seconds(work), read)


def _expert_weights(grid: StrategyGrid, problem: SearchProblem, experts: Experts) -> float:
    """Return the elements of one matrix of all experts of a rank."""
    return experts.number / grid.ep * problem.model.hidden * experts.ffn


def _expert_exchange(
    grid: StrategyGrid, problem: SearchProblem, cluster: Cluster, experts: Experts
) -> Array:
    """Return the seconds of a layer's expert all-to-alls, forward and backward."""
    volume = problem.dtype_size * problem.model.hidden * copies(grid, problem, experts)
    calls = 4 + 2 * (grid.recompute == FULL).astype(np.float64)
    if problem.dispatch == "copies":
        return np.asarray(calls * cluster_collective(cluster, "all_to_all", volume, grid.ep))
    nodes = -(-grid.ep // cluster.gpus_per_node)
    once = by_node(cluster, volume, grid.ep, visited_nodes(experts, nodes) / experts.top_k)
    return np.asarray(calls * once)


def visited_nodes(experts: Experts, nodes: int) -> float:
    """Return the mean number of nodes that hold experts of a token, for uniform routing."""
    # Nodes of few experts cannot keep the limit: a token needs at least so many.
    least = -(-experts.top_k * nodes // experts.number)
    limit = min(nodes, max(least, experts.node_limit or nodes))
    number = experts.number * limit // nodes
    # Probability that a given node has none of the token's experts.
    missed = comb(number - number // limit, experts.top_k) / comb(number, experts.top_k)
    return limit * (1 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Time of a layer's attention in each pass, without recompute."""

    forward: Array
    backward: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Compute time of a layer, forward and backward, with recompute."""

    gemms: tuple[tuple[Array, int], ...]  # forward time of a GEMM, and number of such GEMMs
    linear: Array  # all GEMMs
    attention: Array
    attention_backward: Array  # without recompute
    elementwise: Array


def compute(
    grid: StrategyGrid,
    problem: SearchProblem,
    cluster: Cluster,
    layer: Layer,
    attention: Attention,
) -> Compute:
    """Return the compute time of a layer and micro-batch, without communication, in s.

    Parameters
    ----------
    grid, problem, cluster
        Strategies of one layout, the job, the hardware.
    layer
        Kind of layer.
    attention
        Time of its attention, see `attention_time`.

    Returns
    -------
    Compute
        Parts of the time; they include the recompute of each strategy.

    """
    tokens = 2.0 * grid.bsz * problem.seq_len / grid.sp
    gemms = [
        (cluster.gemm.seconds(tokens * elements), count) for elements, count in layer.matrices
    ]
    if layer.experts:
        gemms.append((expert_gemm(grid, problem, cluster, layer.experts), 3))
    recompute = (grid.recompute == FULL).astype(np.float64)
    forward = sum(time * count for time, count in gemms)
    repeats = recompute if problem.flash else (grid.recompute != NONE).astype(np.float64)
    elements = problem.dtype_size / 2 * grid.bsz * problem.seq_len * problem.model.hidden
    traffic = elements * grid.activations(problem, layer)
    return Compute(
        gemms=tuple(gemms),
        linear=(3 + recompute) * forward,
        attention=(1 + repeats) * attention.forward + attention.backward,
        attention_backward=attention.backward,
        elementwise=2 * (2.5 + recompute) * traffic / cluster.hbm,
    )


def head(grid: StrategyGrid, problem: SearchProblem, cluster: Cluster) -> Array:
    """Return the time of a micro-batch's logits, forward and backward, in s."""
    tokens = 2.0 * grid.bsz * problem.seq_len / grid.sp
    return np.asarray(3 * cluster.gemm.seconds(tokens * problem.model.embedding))


def attention_time(
    grid: StrategyGrid,
    problem: SearchProblem,
    cluster: Cluster,
    correction: Correction | None = None,
) -> Attention:
    """Return the time of a layer's attention, in seconds per candidate, forward and backward.

    Parameters
    ----------
    grid, problem
        Strategies; model, sequence length and whether attention is fused (`flash`).
    cluster
        Has the speed of attention and the memory bandwidth.
    correction
        Scales fused attention to measurements; None without any.

    """
    model, seq, sp = problem.model, float(problem.seq_len), grid.sp
    if not problem.flash:
        flops = 4.0 * grid.bsz * seq**2 * model.hidden * model.breadth / sp
        traffic = 12.0 * grid.bsz * model.heads * seq**2 / sp
        forward = flops / cluster.unfused + traffic / cluster.hbm
        return Attention(forward=forward, backward=2 * forward)
    local = model.hidden * model.breadth / sp
    forward = cluster.attention.forward(grid.bsz, seq, local)
    backward = cluster.attention.backward(grid.bsz, seq, local)
    if correction:
        forward_ratio, backward_ratio = correction.at(seq, grid.bsz * local)
        forward, backward = forward * forward_ratio, backward * backward_ratio
    return Attention(forward=forward, backward=backward)


def optimizer(grid: StrategyGrid, stage: Stage, cluster: Cluster) -> Array:
    """Return the time of the optimizer's step on a rank of `stage`, in s.

    It reads and writes fp32 states, and writes and clears weights: 30 bytes per state, 4 per
    weight, at the memory bandwidth of `cluster`.
    """
    states = stage.states(grid)
    weights = sum(piece.elements / piece.para for piece in stage.pieces) + stage.unsharded
    return np.asarray((30 * states + 4 * weights) / cluster.hbm)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Time of one kind of layer and one micro-batch, forward and backward."""

    work: Compute
    gathers: Array  # gathers and reductions of weights
    overlap: Array  # GEMMs and exposed gathers
    sequence: Array  # communication of activations
    exchange: Array | None  # all-to-alls of experts; None without experts
    exposed: Array | None  # exposed part of `exchange`
    seconds: Array  # total


def layer_cost(
    grid: StrategyGrid,
    problem: SearchProblem,
    cluster: Cluster,
    layer: Layer,
    attention: Attention,
) -> LayerCost:
    """Return the time of one kind of layer and micro-batch, and its parts, in s.

    Parameters
    ----------
    grid, problem, cluster
        Strategies of one layout, the job, the hardware.
    layer
        Kind of layer.
    attention
        Time of its attention, see `attention_time`.

    """
    work = compute(grid, problem, cluster, layer, attention)
    gathers, overlap = weights(grid, problem, cluster, layer, work)
    activations = sequence(grid, problem, cluster, layer)
    seconds = overlap + activations + work.attention + work.elementwise
    exchange = exposed = None
    if layer.experts:
        exchange = _expert_exchange(grid, problem, cluster, layer.experts)
        exposed = _exposed(problem, work, exchange)
        seconds = seconds + exposed
    times = {"gathers": gathers, "overlap": overlap, "sequence": activations}
    return LayerCost(work=work, exchange=exchange, exposed=exposed, seconds=seconds, **times)


def _exposed(problem: SearchProblem, work: Compute, exchange: Array) -> Array:
    """Return the part of expert all-to-alls that compute does not overlap."""
    if not problem.overlap_experts:
        return exchange
    compute_time = work.linear + work.attention + work.elementwise
    contention = problem.penalty * np.minimum(compute_time, exchange)
    return np.asarray(np.maximum(0.0, exchange - compute_time) + contention)


def weights(
    grid: StrategyGrid, problem: SearchProblem, cluster: Cluster, layer: Layer, work: Compute
) -> tuple[Array, Array]:
    """Return the time of weight communication of a layer, and of the GEMMs overlapped with it.

    Times are seconds per candidate of the grid. Of two overlapped parts the longer counts, plus
    `problem.penalty` of the shorter.

    Parameters
    ----------
    grid
        Candidate strategies.
    problem
        Model, overlap and penalty.
    cluster
        Bandwidths and startup times.
    layer
        Matrices of the layer, dense or with experts.
    work
        Times of its GEMMs.

    Returns
    -------
    gathers : ndarray
        Gathers and reductions of a layer's weights.
    overlap : ndarray
        GEMMs and the exposed part of the gathers.

    """
    d, k, tp = problem.dtype_size, problem.penalty, grid.tp
    volume = np.array([[d * elements / tp] for elements, _ in layer.matrices])
    times = _gathers(cluster, volume, layers_of(grid, 0.0))
    if layer.experts:
        routed = np.array([[d * _expert_weights(grid, problem, layer.experts)]])
        times = np.concatenate([times, _gathers(cluster, routed, experts_of(grid, 0.0))])
    counts = np.array([[count] for _, count in work.gemms])
    comm = (times * counts).sum(axis=0)
    if problem.overlap == "layer":
        both = np.maximum(work.linear, comm) + k * np.minimum(work.linear, comm)
        return comm, np.where(comm > 0, both, work.linear)
    passes = 3 + (grid.recompute == FULL)
    both = sum(
        count * (np.maximum(passes * time, gather) + k * np.minimum(passes * time, gather))
        for (time, count), gather in zip(work.gemms, times, strict=True)
    )
    return comm, np.where(comm > 0, both, work.linear)


def _gathers(cluster: Cluster, volume: Array, piece: ShardedElements) -> Array:
    """Return the seconds of two gathers and a reduction of each volume."""
    gather = cluster_collective(cluster, "all_gather", volume, piece.para, piece.stride)
    reduce = cluster_collective(cluster, "reduce_scatter", volume, piece.grads, piece.stride)
    return 2 * gather + reduce


def sequence(
    grid: StrategyGrid, problem: SearchProblem, cluster: Cluster, layer: Layer
) -> Array:
    """Return the time of a layer's communication of activations, both passes, in s.

    Its calls depend on the algorithm of `grid`, and full recompute repeats those of the forward
    pass.
    """
    model, recompute = problem.model, (grid.recompute == FULL).astype(np.float64)
    volume = 1.0 * problem.dtype_size * grid.bsz * problem.seq_len * model.hidden
    if grid.isp:
        # Keys and values are repeated if there are fewer heads of them than shards.
        group = max(model.kv_heads, min(grid.sp, model.heads)) / model.heads
        volume = volume * model.breadth
        once = cluster_collective(cluster, "all_to_all", volume / grid.sp, grid.sp)
        return np.asarray(once * (8 + 4 * recompute) * (2 + 2 * group) / 4)
    if grid.algo == "mtp":
        reduce_s = cluster_collective(cluster, "all_reduce", volume, grid.sp)
        return np.asarray(reduce_s * (4 + 2 * recompute))
    calls = (8 if grid.algo == "msp" else 10) + 4 * recompute
    # Routed experts take sharded tokens: only the calls around attention remain.
    calls = calls / 2 if layer.experts and not layer.experts.shared else calls
    return np.asarray(cluster_collective(cluster, "all_gather", volume, grid.sp) * calls)


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a sum: of the time of a step, or of the memory of a rank."""

    name: str
    value: float
    text: str  # how the value comes about
    level: int = 1  # 0 is the sum, 1 a part of it
