"""Configuration and candidates of the original strategy search, in its order.

A block has the candidates of one pipeline size, sequence-parallel size and algorithm: its
micro-batches are rows, its shards are columns. Most candidates are rejected by their columns
alone, which is fast.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm import files
from fastcomm.checks import DTYPE_BYTES, PENALTY
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.hardware import load
from fastcomm.hardware.measurements import ComputeTables, read_tables
from fastcomm.isp.internevo import Question
from fastcomm.isp.internevo.block import IntArray
from fastcomm.option_fields import build
from fastcomm.planning_options import SearchOptions
from fastcomm.units import parse_quantity

SpaceColumns = dict[str, NDArray[np.float64]]

ORIGINAL_ALGOS = ("isp", "msp", "fsp")
VARIANTS = ("isp-2025", "isp-2024")
_SMALL = (0.25, 1.3)  # billions of parameters of models that the first version does not have


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


def check(question: Question, rules: OriginalRules) -> None:
    """Raise ConfigError for a question that the original cannot answer."""
    billions = question.model.billions
    if not billions or (rules.first and billions in _SMALL):
        raise ConfigError(f"model {question.model.name}: the original searches InternLM sizes")
    if question.model.layers % 2:
        raise ConfigError(
            f"model {question.model.name}: the original needs an even number of layers"
        )
    if question.pp or question.sp:
        raise ConfigError(
            "--pp-sizes, --sp-sizes: no effect with --compat, as the original searches all of "
            "them; leave them out"
        )
    fixed = question.batch.micro_bsz is not None
    if fixed != (question.batch.micro_num is not None):
        raise ConfigError("the original fixes micro_bsz and micro_num together or not at all")
    if rules.strict_batch and not question.batch.strict:
        raise ConfigError("with strict_batch, the batch is one number, not a range")


def degrees(world: int, most: int) -> list[int]:
    """Return the sizes that the original tries, up to `most`: 1, 2, 4, 6, 8, 16, 24, ..."""
    return [n for n in (1, 2, 4, 6, 8, *range(16, world + 1, 8)) if n <= min(world, most)]


def blocks(
    question: Question, rules: OriginalRules, world: int, rejected: dict[str, int]
) -> Iterator[OriginalBlock]:
    """Yield the blocks of valid candidates of a world size.

    Parameters
    ----------
    question
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
    while pp <= min(world, question.model.layers):
        for sp in degrees(world, question.model.heads):
            pairs = _pairs(question, rules, world, pp, sp)
            offset = 0
            shards = []
            for algo in ORIGINAL_ALGOS:
                wp, zp = _shards(world, pp, sp, algo)
                shards.append((algo, wp, zp, offset))
                offset += 2 * len(wp)
            for algo, wp, zp, at in shards if pairs else ():
                if algo not in question.algos:
                    continue
                rejected["candidates"] += 2 * len(pairs) * len(wp)
                is_valid = _is_valid(question, rules, (world, pp, sp, algo), wp, zp)
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
    question: Question, rules: OriginalRules, world: int, pp: int, sp: int
) -> list[tuple[int, int]]:
    """Return all pairs of sequences per micro-batch and number of micro-batches."""
    model, batch = question.model, question.batch
    if model.hidden % sp or model.heads % sp:
        return []
    if batch.micro_bsz is not None and batch.micro_num is not None:
        return [(batch.micro_bsz, batch.micro_num)]
    if pp * sp > world or world % (pp * sp):
        return []
    dp = world // pp // sp
    if rules.strict_batch:
        if batch.most % (dp * question.seq_len):
            return []
        sequences = batch.most // (dp * question.seq_len)
        return [(b, sequences // b) for b in range(1, sequences // pp + 1) if not sequences % b]
    least, most = (tokens // dp // question.seq_len for tokens in (batch.least, batch.most))
    sides = range(1, isqrt(most) + 1)
    return [(b, m) for b in sides for m in sides if b * m >= least and m >= pp]


def _is_valid(
    question: Question,
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
        is_valid &= cut >= question.model.billions / 1.5
    return np.asarray(is_valid)


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


_TYPES = {
    **dict.fromkeys(("flash", "overlap_wdp", "strict_batch"), bool),
    "model": str,
    "dtype_size": int,
}


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
