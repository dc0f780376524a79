"""Reproduce the original strategy search exactly: its formulas, candidates and order.

A block has the candidates of one pipeline size, sequence-parallel size and algorithm: its
micro-batches are rows, its shards are columns. Most candidates are rejected by their columns
alone, which is fast.

Candidates are priced block by block: arrays have micro-batches as rows, shards as columns.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm import files
from fastcomm.checks import DTYPE_BYTES, PENALTY, non_default, option_name
from fastcomm.errors import ConfigError, FastcommError, python_names
from fastcomm.hardware.calibration import AttentionTable, ComputeTables, read_tables
from fastcomm.hardware.clusters import Cluster, load
from fastcomm.isp import problem as problems
from fastcomm.isp.calibration import Setting, setting
from fastcomm.isp.layer import Array
from fastcomm.isp.options import SearchOptions
from fastcomm.isp.price import Costs
from fastcomm.isp.problem import ALGOS, SearchProblem
from fastcomm.isp.result import FeasibleCells, Fields, Records, SearchResult
from fastcomm.isp.space import IntArray
from fastcomm.option_fields import build, shows
from fastcomm.units import parse_quantity

SpaceColumns = dict[str, NDArray[np.float64]]
ORIGINAL_ALGOS = ("isp", "msp", "fsp")
VARIANTS = ("isp-2025", "isp-2024")
_SMALL = (0.25, 1.3)  # billions of parameters of models that the first version does not have
_KEYS = (
    *("world_size_max", "world_size_min", "global_bsz", "global_bsz_min", "global_bsz_max"),
    *("sequence_length", "model_size", "vocab_size", "dtype_size", "use_fa"),
    *("fixed_micro_num", "fixed_micro_bsz", "mem_threshold", "wp_penalty_coefficient"),
    *("debug", "overlap_wdp", "use_fixed_micro_bsz", "use_strict_bsz"),
)
_QUANTITIES = (
    "world_size_max",
    "world_size_min",
    "sequence_length",
    "vocab_size",
    "mem_threshold",
)
_RANGES = {"dtype_size": DTYPE_BYTES, "wp_penalty_coefficient": PENALTY}
# The README of the original has other names for some keys.
_ALIASES = {
    "max_world_size": "world_size_max",
    "min_world_size": "world_size_min",
    "seq_len": "sequence_length",
}
_TYPES = {
    **dict.fromkeys(("flash", "overlap_wdp", "strict_batch"), bool),
    "model": str,
    "dtype_size": int,
}
_INTRA = 150 * 2**30  # bytes/s inside a node
_NODE = 100 * 2**30  # bytes/s of a node
_RANKS = 8  # per node
_BUCKET = 2**29  # elements of a gradient bucket
_FACTOR = {"gather": 1.0, "reduce": 2.0}
_VOCAB = 103168
# More candidates than any world size has, so that ties are broken by world size first.
_WORLD = 1 << 40
_NO_TABLES = "no measured tables: times of GEMMs and attention are by formulas"
_REASONS = ("candidates", "divisibility", "memory", "table")
_WITHOUT_EFFECT = (
    *("interleave", "ep_sizes", "any_schedule", "overlap_grad"),
    *("grad_sync", "param_sync", "overlap_weights", "comm_model", "imbalance", "dispatch"),
    *("overlap_experts", "p2p"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalRules:
    """Version of the original, and its options."""

    variant: str = "isp-2025"  # one of VARIANTS
    overlap_wdp: bool = False  # overlap the reduction of gradients
    # Try all divisors of the batch; else micro-batches up to its root.
    strict_batch: bool = True

    @property
    def first(self) -> bool:
        """Whether the variant is the first version, of January 2024."""
        return self.variant == "isp-2024"


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalBlock:
    """Candidates of one pipeline size, sequence-parallel size and algorithm, rows x columns."""

    world: int
    pp: int
    sp: int
    algo: str  # one of ORIGINAL_ALGOS
    # rows
    bsz: IntArray  # sequences of a micro-batch
    num: IntArray  # micro-batches
    ck: IntArray  # 1 with recompute, else 0
    # columns
    wp: IntArray  # weight shards
    zp: IntArray  # optimizer shards
    order: (
        IntArray  # rows x columns: number of the candidate in the original, which breaks ties
    )

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.world // self.pp // self.sp


def check(problem: SearchProblem, rules: OriginalRules) -> None:
    """Raise ConfigError for a problem that the original cannot answer."""
    billions = problem.model.billions
    if not billions or (rules.first and billions in _SMALL):
        raise ConfigError(f"model {problem.model.name}: the original searches InternLM sizes")
    if problem.model.layers % 2:
        raise ConfigError(
            f"model {problem.model.name}: the original needs an even number of layers"
        )
    if problem.pp or problem.sp:
        raise ConfigError(
            "--pp-sizes, --sp-sizes: no effect with --compat, as the original searches all of "
            "them; leave them out"
        )
    fixed = problem.batch.micro_bsz is not None
    if fixed != (problem.batch.micro_num is not None):
        raise ConfigError("the original fixes micro_bsz and micro_num together or not at all")
    if rules.strict_batch and not problem.batch.strict:
        raise ConfigError("with strict_batch, the batch is one number, not a range")


def degrees(world: int, most: int) -> list[int]:
    """Return the sizes that the original tries, up to `most`: 1, 2, 4, 6, 8, 16, 24, ..."""
    return [n for n in (1, 2, 4, 6, 8, *range(16, world + 1, 8)) if n <= min(world, most)]


def blocks(
    problem: SearchProblem, rules: OriginalRules, world: int, rejected: dict[str, int]
) -> Iterator[OriginalBlock]:
    """Yield the blocks of valid candidates of a world size.

    Parameters
    ----------
    problem
        What to search for.
    rules
        Version of the original.
    world
        Number of GPUs.
    rejected
        Counts all candidates as "candidates", and invalid ones as "divisibility".

    """
    base = 0
    pp = 1
    while pp <= min(world, problem.model.layers):
        for sp in degrees(world, problem.model.heads):
            pairs = _pairs(problem, rules, world, pp, sp)
            offset = 0
            shards = []
            for algo in ORIGINAL_ALGOS:
                wp, zp = _shards(world, pp, sp, algo)
                shards.append((algo, wp, zp, offset))
                offset += 2 * len(wp)
            for algo, wp, zp, at in shards if pairs else ():
                if algo not in problem.algos:
                    continue
                rejected["candidates"] += 2 * len(pairs) * len(wp)
                is_valid = _is_valid(problem, rules, (world, pp, sp, algo), wp, zp)
                rejected["divisibility"] += 2 * len(pairs) * int((~is_valid).sum())
                places = np.flatnonzero(is_valid)
                if len(places):
                    yield _block(
                        (world, pp, sp, algo), pairs, wp, zp, places, (base + at, offset)
                    )
            base += offset * len(pairs)
        pp *= 2


def _block(
    key: tuple[int, int, int, str],
    pairs: list[tuple[int, int]],
    wp: IntArray,
    zp: IntArray,
    places: IntArray,
    order: tuple[int, int],
) -> OriginalBlock:
    """Return a block of candidates; `order` is the number of its first one, and the stride."""
    bsz, num = np.repeat(np.array(pairs, np.int64), 2, axis=0).T
    ck = np.tile(np.array([0, 1], np.int64), len(pairs))
    row = np.repeat(np.arange(len(pairs)), 2) * order[1] + ck * len(wp) + order[0]
    return OriginalBlock(
        world=key[0],
        pp=key[1],
        sp=key[2],
        algo=key[3],
        bsz=bsz[:, None],
        num=num[:, None],
        ck=ck[:, None],
        wp=wp[places],
        zp=zp[places],
        order=row[:, None] + places,
    )


def _shards(world: int, pp: int, sp: int, algo: str) -> tuple[IntArray, IntArray]:
    """Return all pairs of weight shards and optimizer shards, in the original's order."""
    if algo != "isp":
        zp = np.arange(1, world // pp // sp + 1, dtype=np.int64)
        return np.ones_like(zp), zp
    parts = [
        (wp, np.arange(1, world // pp // wp + 1, dtype=np.int64))
        for wp in degrees(world, world)
    ]
    return (
        np.concatenate([np.full(len(zp), wp, np.int64) for wp, zp in parts]),
        np.concatenate([zp for _, zp in parts]),
    )


def _pairs(
    problem: SearchProblem, rules: OriginalRules, world: int, pp: int, sp: int
) -> list[tuple[int, int]]:
    """Return all pairs of sequences per micro-batch and number of micro-batches."""
    model, batch = problem.model, problem.batch
    if model.hidden % sp or model.heads % sp:
        return []
    if batch.micro_bsz is not None and batch.micro_num is not None:
        return [(batch.micro_bsz, batch.micro_num)]
    if pp * sp > world or world % (pp * sp):
        return []
    dp = world // pp // sp
    if rules.strict_batch:
        if batch.most % (dp * problem.seq_len):
            return []
        sequences = batch.most // (dp * problem.seq_len)
        return [(b, sequences // b) for b in range(1, sequences // pp + 1) if not sequences % b]
    least, most = (tokens // dp // problem.seq_len for tokens in (batch.least, batch.most))
    sides = range(1, isqrt(most) + 1)
    return [(b, m) for b in sides for m in sides if b * m >= least and m >= pp]


def _is_valid(
    problem: SearchProblem,
    rules: OriginalRules,
    key: tuple[int, int, int, str],
    wp: IntArray,
    zp: IntArray,
) -> NDArray[np.bool_]:
    """Return which columns the divisibility rules of the original allow."""
    world, pp, sp, algo = key
    dp = world // pp // sp
    if not dp or world % pp or world % sp or world % dp:
        return np.zeros(len(wp), np.bool_)
    if algo == "isp":
        wdp = np.maximum(world // pp // wp, 1)
        is_valid = (world // pp // wp > 0) & (zp <= wdp) & (wdp % zp == 0) & (world % wp == 0)
        is_valid &= (
            (world % (pp * wdp) == 0) & (world % (pp * zp) == 0) & (world % (wp * zp) == 0)
        )
    else:
        is_valid = (zp <= dp) & (dp % zp == 0) & (world % (sp * zp) == 0)
    if rules.first:
        cut = zp * wp * pp * (1 if algo == "isp" else sp)
        is_valid &= cut >= problem.model.billions / 1.5
    return np.asarray(is_valid)


def _checked(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings by their usual names; raise ConfigError for invalid ones."""
    settings = {_ALIASES.get(key, key): value for key, value in config.items()}
    # The original has further settings in a nested "config".
    if isinstance(settings.get("config"), dict):
        nested = settings.pop("config")
        settings |= {_ALIASES.get(key, key): value for key, value in nested.items()}
    if unknown := settings.keys() - set(_KEYS):
        raise ConfigError(
            f"{where}: unknown key {min(unknown)!r}: expected one of {', '.join(_KEYS)}"
        )
    for key, value in settings.items():
        if value is None:
            continue
        if key in _QUANTITIES:
            parse_quantity(value, f"{where}: {key}")
        elif key in _RANGES:
            _RANGES[key].check(value, f"{where}: {key}")
    return settings


def of_config(config: Mapping[str, Any], where: str = "configuration") -> SearchOptions:
    """Convert a configuration with the original's keys to options of a search.

    Raises ConfigError, which begins with `where`, for unknown keys and invalid values.
    """
    settings = _checked(config, where)
    values: dict[str, Any] = {}
    least, most = (settings.get(f"world_size_{end}") for end in ("min", "max"))
    if least is not None or most is not None:
        low, high = least or most, most or least
        values["world_size"] = f"{low}-{high}" if low != high else f"{low}"
    strict = settings.get("use_strict_bsz", settings.get("global_bsz_min") is None)
    batches = ("global_bsz",) if strict else ("global_bsz_min", "global_bsz_max")
    names = {
        **{key: key.replace("global_bsz", "global_batch") for key in batches},
        "sequence_length": "seq_len",
        "model_size": "model",
        "vocab_size": "vocab",
        "dtype_size": "dtype_size",
        "use_fa": "flash",
        "mem_threshold": "memory",
        "wp_penalty_coefficient": "penalty",
        "overlap_wdp": "overlap_wdp",
        "use_strict_bsz": "strict_batch",
    }
    values |= {
        name: settings[key] for key, name in names.items() if settings.get(key) is not None
    }
    if settings.get("use_fixed_micro_bsz"):
        if settings.get("use_strict_bsz"):
            raise ConfigError(f"{where}: use_strict_bsz excludes use_fixed_micro_bsz")
        values = {key: value for key, value in values.items() if "batch" not in key}
        values |= {key: settings.get(f"fixed_{key}") for key in ("micro_bsz", "micro_num")}
    for key, kind in _TYPES.items():
        if key in values:
            values[key] = kind(values[key])
    return build(SearchOptions, values, where)


def config_file(path: Path) -> SearchOptions:
    """Read the options of a search from a JSON file with the original's keys.

    Raises ConfigError for other keys, and invalid values.
    """
    config = files.json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return of_config(config, str(path))


def compat_tables(options: SearchOptions) -> ComputeTables | None:
    """Read the tables of the cluster's GPU; None without the option.

    The original has tables of two GPUs, and takes those of A800 for every other GPU; without
    its rules, that is an error.

    Raises
    ------
    FastcommError
        If a table is missing or invalid.

    """
    if not options.compat_tables:
        return None
    folder, name = Path(str(options.compat_tables)), load(str(options.cluster or "a800")).name
    gpu = "910b" if "910b" in name.lower() else "a800"
    if options.compat is None and gpu not in name.lower():
        gpu = re.split(r"[^a-z0-9]", name.lower())[0]
    for path in (folder / f"linear_{gpu}.csv", folder / f"fa_{gpu}.csv"):
        if not path.exists():
            raise FastcommError(
                f"--compat-tables: {path}: no such file, as {name} needs it; "
                "leave the option out, or pass the --cluster of the tables"
            )
    return read_tables(folder, gpu)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OriginalResult(SearchResult):
    """Result of the original search, with fields in seconds under the original's names."""

    def json_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of a strategy as they are."""
        return dict(fields)


def _collective_s(
    volume: ArrayLike, n: ArrayLike, stride: ArrayLike, kind: str = "gather"
) -> Array:
    """Return the seconds of a collective of `volume` bytes in a group of n ranks.

    `stride` is the distance of its ranks; `kind` is gather, reduce or alltoall.
    """
    n, stride = np.maximum(np.asarray(n, np.float64), 1), np.asarray(stride, np.float64)
    inside = (n <= _RANKS) & ((n - 1) * stride <= _RANKS - 1)
    slow = np.array([1, 1.1, 1.2, 1.3, 1.4, 1.5])[np.searchsorted([16, 32, 64, 256, 512], n)]
    bandwidth = np.where(inside, _INTRA, _NODE / slow)
    share = np.where(inside, 1, np.minimum(stride, _RANKS))
    if kind == "alltoall":
        beyond = 8 / n * (n - 8 / n)
        portion = np.where(n <= _RANKS, (n - 1) / n, beyond)
    else:
        portion = _FACTOR[kind] * (n - 1) / n
    return np.asarray(np.where(n > 1, portion * volume * share / bandwidth, 0.0))


def memory(block: OriginalBlock, problem: SearchProblem) -> Costs:
    """Return the bytes of a rank by category, with the original's names.

    `total_mm_cost` is the peak. Values have the shape of the block, or broadcast to it.
    """
    model, d, pp = problem.model, problem.dtype_size, block.pp
    weights, states = _elements(block, problem)
    os, p_g = d * max(1, 4 // d) * 3 * states, 2.0 * d * weights
    activations = _activations(block, problem)
    activation = sum(activations.values(), np.float64(0))
    pool = 4.0 * d * (4 * model.hidden**2 + 3 * model.hidden * model.ffn)
    pool = pool if block.algo == "isp" else 0.0
    head = model.hidden // model.heads
    rotary = 2.0 * d * (model.layers // pp) * problem.seq_len * head // 2
    piece = 1.0 * d * (problem.seq_len // block.sp) * block.bsz * model.hidden
    buffer = piece if pp > 1 else 0.0
    total = p_g + os + activation + pool + rotary + buffer
    return {
        "total_mm_cost": np.maximum(total, p_g + os * 5 / 3),
        "os_mm_cost": os,
        "p_g_mm_cost": p_g,
        "mem_pool_mm": pool,
        "rotary_emb_sincos_cache_mm": rotary,
        "pp_p2p_buffer": buffer,
        "activation": activation,
        **activations,
    }


def _elements(block: OriginalBlock, problem: SearchProblem) -> tuple[Array, Array]:
    """Return the numbers of elements of weights and of optimizer states on a rank."""
    model = problem.model
    head = (2 if block.pp == 1 else 1) * model.embedding / block.sp
    stage = model.layers // block.pp * model.layer_parameters
    if block.algo != "isp":
        weights = stage / block.sp + head + 0 * block.zp
        return weights, weights / block.zp
    halves = 1 if block.dp <= 1 else 2
    return stage / block.wp + head, stage / (block.wp * block.zp) + head / halves


def _activations(block: OriginalBlock, problem: SearchProblem) -> Costs:
    """Return the bytes of activations by category, with the original's names."""
    model, d, pp, sp = problem.model, problem.dtype_size, block.pp, block.sp
    seq, h, layers = problem.seq_len, model.hidden, model.layers
    b, full = block.bsz, block.ck > 0
    unit = (d // 2) * b * seq * h
    saved = (4 + 106 / 3 / sp) if block.algo == "msp" else 118 / 3 / sp
    scores = 0 if problem.flash else 5 * model.heads * seq / h / sp
    one = d * b * seq * h // sp
    peak = 2.0 * d * seq * b * h + 2.0 * d * seq * b * h / sp + d * h * model.vocab / sp
    return {
        "blocks_activation": np.where(full, 0.0, layers * unit * (saved + scores)),
        "norm_activation": 4.0 * b * seq * h // sp,
        "head_input_activation": 0.0 * one if block.algo == "msp" else 1.0 * one,
        "head_output_activation": 1.0 * (d * b * seq * model.vocab // sp),
        "block_output_activation": np.where(full, layers // pp * pp * one, 0.0),
        "backward_mem_peak": peak,
    }


def attention_seconds(block: OriginalBlock, problem: SearchProblem, cluster: Cluster) -> Array:
    """Return the seconds of a layer's attention by its formula, one value per row of `block`.

    They include the forward and backward pass, and the second forward pass of recompute.
    """
    local = problem.model.hidden // block.sp
    forward = cluster.attention.forward(block.bsz, problem.seq_len, local)
    backward = cluster.attention.backward(block.bsz, problem.seq_len, local)
    return np.asarray((1 + block.ck) * forward + backward)


def measured_attention(
    block: OriginalBlock, problem: SearchProblem, table: AttentionTable
) -> tuple[Array, NDArray[np.bool_]]:
    """Return the measured seconds of a layer's attention, and which rows the table has.

    Both have a row per micro-batch of `block`. The seconds include the backward pass, and the
    second forward pass of recompute; NaN where the table has none.
    """
    local = problem.model.hidden // block.sp
    keys = [(int(b), problem.seq_len, local) for b in block.bsz[:, 0]]
    seconds = [table.get(key, (np.nan, np.nan)) for key in keys]
    forward, backward = np.array(seconds, np.float64).T[:, :, None]
    return np.asarray((1 + block.ck) * forward + backward), np.isfinite(forward)


def times(
    block: OriginalBlock,
    problem: SearchProblem,
    rules: OriginalRules,
    cluster: Cluster,
    comp_attn: Array,
) -> Costs:
    """Return the seconds of a step and its parts, and tokens/s/GPU, with the original's names.

    Parameters
    ----------
    block
        The candidates.
    problem
        Model, batch and data type.
    rules
        Version of the original.
    cluster
        Its GEMM model.
    comp_attn
        Seconds of a layer's attention, one value per row.

    Returns
    -------
    dict of ndarray
        `tgs` is tokens/s/GPU, `g_bsz` the tokens of a batch; all others are seconds.

    """
    pp, m, layers = block.pp, block.num, problem.model.layers
    costs = _layer(block, problem, cluster)
    layer = costs["overlap_latency"] + costs["sp_comm_cost"] + comp_attn
    one = (layers if pp == 1 else -(-layers // pp)) * layer
    wdp, zp_cost = _synchronize(block, problem, rules)
    piece = problem.dtype_size * (problem.seq_len // block.sp) * block.bsz
    p2p = _p2p(block, piece * float(problem.model.hidden))
    p2p = p2p * (2 * np.minimum(pp, m) + m - 1)
    pipe = p2p + (pp - 1) * one if pp > 1 else 0.0 * one
    total = m * one + pipe + wdp + zp_cost
    tokens = block.bsz * m * problem.seq_len * block.dp
    return {
        "tgs": tokens / (block.world * total),
        "total_latency": total,
        "fwd_bwd_cost": one,
        "all_fwd_bwd_cost": m * one,
        **costs,
        "comp_attn": comp_attn,
        "pp_comm_cost": pipe,
        "zp_comm_cost": zp_cost,
        "wdp_comm_cost": wdp,
        "g_bsz": tokens,
    }


def _layer(block: OriginalBlock, problem: SearchProblem, cluster: Cluster) -> Costs:
    """Return the seconds of a layer's GEMMs and communication, without attention."""
    model, d, sp, wp = problem.model, problem.dtype_size, block.sp, block.wp
    seq, h, b, ck = problem.seq_len, model.hidden, block.bsz, block.ck
    linear = sum(
        cluster.gemm.seconds(d * b * float(seq) * h * out / sp)
        for out in (3 * h, h, model.ffn, model.ffn, model.ffn)
    )
    comp_wp = (3 + ck) * linear
    if block.algo == "isp":
        comm_wp = 3 * _collective_s(d * (4.0 * h * h + 3.0 * h * model.ffn), wp, 1)
        sp_comm = _collective_s(d * b * (seq / sp) * h, sp, 1, "alltoall") * (8 + 4 * ck)
    else:
        comm_wp = np.zeros(1)
        calls = (8 if block.algo == "msp" else 10) + 4 * ck
        sp_comm = _collective_s(d * b * float(seq) * h, sp, 1) * calls
    both = np.maximum(comp_wp, comm_wp) + problem.penalty * np.minimum(comp_wp, comm_wp)
    return {
        "overlap_latency": np.where(wp > 1, both, comp_wp),
        "comp_wp": comp_wp,
        "wp_comm_cost": comm_wp,
        "sp_comm_cost": sp_comm,
    }


def _p2p(block: OriginalBlock, volume: Array) -> Array:
    """Return the seconds of a message between pipeline stages of `volume` bytes."""
    stride = block.world / block.pp
    inside = block.pp <= _RANKS and (block.pp - 1) * stride <= _RANKS - 1
    return volume / _INTRA if inside else volume * min(stride, _RANKS) / _NODE


def _synchronize(
    block: OriginalBlock, problem: SearchProblem, rules: OriginalRules
) -> tuple[Array, Array]:
    """Return the seconds to reduce the gradients, and to broadcast the parameters."""
    model, d = problem.model, problem.dtype_size
    sp, wp, zp, dp = block.sp, block.wp, block.zp, block.dp
    head = (2 if block.pp == 1 else 1) * model.embedding / sp
    stage = model.layers // block.pp * model.layer_parameters
    if block.algo != "isp":
        elements = stage / sp + head
        wdp = _collective_s(d * elements, dp, sp, "reduce")
        wdp = 0 * wdp if rules.first and rules.overlap_wdp else wdp
        return wdp, zp * _collective_s(d * elements / zp, zp, sp)
    cut = stage / wp
    blocks, heads = (
        (cut % _BUCKET, head % _BUCKET) if rules.overlap_wdp else (cut, np.float64(head))
    )
    reduced = _collective_s(d * blocks, block.world // block.pp // wp, wp, "reduce")
    wdp = reduced + _collective_s(d * heads, dp, sp, "reduce")
    wdp = 0 * wdp if rules.first and rules.overlap_wdp else wdp
    sent = (1 if rules.first else 2) * _collective_s(d * head, dp, sp)
    return wdp, np.maximum(zp * _collective_s(d * cut / zp, zp, wp), sent)


def search(
    problem: SearchProblem,
    rules: OriginalRules,
    cluster: Cluster,
    tables: ComputeTables | None = None,
) -> SearchResult:
    """Price every strategy of the original's space by its formulas, and keep those that fit.

    Parameters
    ----------
    problem
        What to search for.
    rules
        Version of the original.
    cluster
        Memory and models of GEMM and attention.
    tables
        Measured tables instead of formulas, if any.

    Raises
    ------
    ConfigError
        If the original cannot answer the problem.

    """
    problem.check()
    check(problem, rules)
    counted = dict.fromkeys(_REASONS, 0)
    if tables:
        cluster = replace(cluster, gemm=tables.gemm)
    parts: list[FeasibleCells] = []
    least = np.inf
    for place, world in enumerate(sorted(problem.world_sizes, reverse=True)):
        for block in blocks(problem, rules, world, counted):
            part, needed = _priced(
                block, problem, rules, cluster, tables, counted, place * _WORLD
            )
            least = min(least, needed)
            if part:
                parts.append(part)
    return OriginalResult(
        problem=problem,
        cluster=cluster.name,
        mode=rules.variant,
        candidates=counted.pop("candidates"),
        rejected=counted,
        least_memory=float(least) if np.isfinite(least) else None,
        columns=Records.of(parts),
        notes=() if tables else (_NO_TABLES,),
    )


def answer(problem: SearchProblem, rules: OriginalRules, using: Setting) -> SearchResult:
    """Search with hardware settings as the original does.

    Raises ConfigError for an algorithm that the original lacks.
    """
    algos = ORIGINAL_ALGOS if problem.algos == ALGOS else problem.algos
    if "mtp" in algos:
        raise ConfigError("mtp: the original searches isp, msp and fsp")
    return search(replace(problem, algos=algos), rules, using.cluster, using.tables)


def rules_of(options: SearchOptions) -> OriginalRules:
    """Return the rules of the options; by default those of 2025.

    Raises ConfigError for an option that the original does not have, and for several lengths.
    """
    if ignored := [name for name in _WITHOUT_EFFECT if name in non_default(options)]:
        names = ", ".join(map(option_name, ignored))
        raise ConfigError(f"{names}: no effect with --compat; leave it out")
    if len(problems.numbers(options.seq_len, "sequence length") or ()) > 1:
        raise ConfigError("--compat takes one --seq-len")
    return OriginalRules(
        variant=options.compat or "isp-2025",
        overlap_wdp=options.overlap_wdp,
        strict_batch=options.strict_batch,
    )


@shows(SearchOptions)
@python_names()
def search_strategies(**options: Any) -> SearchResult:
    """Search by the original's rules.

    Keywords are the fields of `SearchOptions`. Raises ConfigError for other keywords, and for
    problems that the original cannot answer.
    """
    checked = build(SearchOptions, options, "search_strategies")
    return answer(
        problems.problem_of(checked),
        rules_of(checked),
        setting(checked, compat_tables(checked)),
    )


def _priced(
    block: OriginalBlock,
    problem: SearchProblem,
    rules: OriginalRules,
    cluster: Cluster,
    tables: ComputeTables | None,
    counted: dict[str, int],
    shift: int,
) -> tuple[FeasibleCells | None, float]:
    """Price a block: return the cells that fit, if any, and the least memory in bytes.

    Rejected cells are counted by reason in `counted`; `shift` is added to the order of cells.
    """
    shape = (len(block.bsz), len(block.zp))
    used = memory(block, problem)
    total = np.broadcast_to(used["total_mm_cost"], shape)
    limit = cluster.memory if problem.memory is None else problem.memory
    fits = total <= limit
    counted["memory"] += int((~fits).sum())
    if tables:
        attention, is_measured = measured_attention(block, problem, tables.attention)
        counted["table"] += int((fits & ~is_measured).sum())
        fits = fits & is_measured
    else:
        attention = attention_seconds(block, problem, cluster)
    if not fits.any():
        return None, float(total.min())
    costs = times(block, problem, rules, cluster, attention)
    parameters = _parameters(block, problem, shift)
    cells = FeasibleCells.of(shape, fits, {**parameters, **costs, **used})
    return cells, float(total.min())


def _parameters(block: OriginalBlock, problem: SearchProblem, shift: int) -> Fields:
    """Return the parameters of the candidates of a block, with the original's names."""
    model = problem.model
    return {
        "order": block.order + shift,
        "algo": np.int64(ALGOS.index(block.algo)),
        "pp": block.pp,
        "sp": block.sp,
        "wp_size": block.wp,
        "zp_size": block.zp,
        "seq_len": problem.seq_len,
        "micro_bsz": block.bsz,
        "micro_num": block.num,
        "activation_ckpt": block.ck,
        "world_size": block.world,
        "modelsize": (model.parameters - 2 * (model.embedding - _VOCAB * model.hidden)) / 1e9,
    }
