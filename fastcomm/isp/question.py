"""The question of a search: model, world size, batch and memory limit."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcomm import inputs
from fastcomm.errors import ConfigError
from fastcomm.isp.model import Model
from fastcomm.isp.presets import load
from fastcomm.ranges import DTYPE_BYTES, IMBALANCE, PENALTY, RANKS, Range
from fastcomm.units import parse_quantity

ALGOS = ("isp", "msp", "fsp", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRule:
    """The rule that says which micro-batches are tried.

    `least` to `most` tokens a step; `micro_bsz` and `micro_num` leave only one value each.
    """

    least: int
    most: int
    micro_bsz: int | None = None
    micro_num: int | None = None

    @property
    def strict(self) -> bool:
        """Whether the batch is one number."""
        return self.least == self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A search, in both modes; `Question.check` says what can never be answered."""

    model: Model
    world_sizes: tuple[int, ...]
    seq_len: int
    batch: MicroBatchRule
    # None is the GPU's.
    memory: float | None = None
    algos: tuple[str, ...] = ALGOS
    pp: tuple[int, ...] | None = None
    sp: tuple[int, ...] | None = None
    dtype_size: int = 2
    flash: bool = True
    # What contention takes: share of the shorter of two overlapped parts.
    penalty: float = 0.2
    overlap_grad: bool = False
    grad_sync: str = "all_reduce"
    param_sync: str = "broadcast"
    # "per_op": each product overlaps its own weights alone.
    overlap: str = "layer"
    # Virtual stages of a rank, interleaved; None is all that divide a stage's layers.
    interleave: tuple[int, ...] | None = None
    # Ranks that share a layer's experts; None is all that divide both.
    ep: tuple[int, ...] | None = None
    # Tokens of the fullest rank's experts over their mean.
    imbalance: float = 1.0
    # "copies": a token goes to each of its experts; "nodes": once to each of their nodes.
    dispatch: str = "copies"
    # Hide the experts' all-to-alls behind another micro-batch's arithmetic.
    overlap_experts: bool = False
    # What an MTP rank sends to the next stage: all of it ("whole"), or its share ("scatter").
    p2p: str = "whole"
    any_schedule: bool = False
    # DeepSpeed-Ulysses: weights whole or cut by all replicas.
    ulysses: bool = False

    def check(self) -> None:
        """Raise `ConfigError` for what no strategy can satisfy."""
        if not self.world_sizes:
            raise ConfigError("world size: none is left, wanted at least one")
        PENALTY.check(self.penalty, "penalty")
        IMBALANCE.check(self.imbalance, "imbalance")
        if unknown := set(self.algos) - set(ALGOS):
            raise ConfigError(
                f"algorithm {min(unknown)!r}: known are {', '.join(ALGOS)} (and dsp)"
            )
        self._check_batch()
        self._check_shards()

    def _check_batch(self) -> None:
        batch = self.batch
        if batch.least > batch.most:
            raise ConfigError(
                f"global batch: the least, {batch.least}, is above the most, {batch.most}"
            )
        if batch.strict and batch.least % self.seq_len:
            lower = batch.least // self.seq_len * self.seq_len
            nearest = f"{lower} or {lower + self.seq_len}" if lower else str(self.seq_len)
            raise ConfigError(
                f"global batch {batch.least}: no multiple of the sequence length "
                f"{self.seq_len}; the nearest are {nearest}"
            )

    def _check_shards(self) -> None:
        model = self.model
        for pp in self.pp or ():
            if pp > model.layers:
                raise ConfigError(
                    f"pp {pp}: {model.name} has {model.layers} layers, its most stages"
                )
        if self.ep and not model.experts and set(self.ep) != {1}:
            raise ConfigError(f"ep: {model.name} has no experts to spread")
        experts = model.experts.number if model.experts else 1
        for name, asked, whole, what in (
            ("sp", self.sp, model.heads, "heads"),
            ("ep", self.ep, experts, "experts"),
            ("interleave", self.interleave, model.layers, "layers"),
        ):
            for each in asked or ():
                if whole % each:
                    near = max(n for n in range(1, min(each, whole) + 1) if whole % n == 0)
                    raise ConfigError(
                        f"{name} {each}: {model.name} has {whole} {what}, which it has to "
                        f"divide; the nearest below is {near}"
                    )


KEYS = (
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
# The README of the original calls some by other words.
_ALIASES = {
    "max_world_size": "world_size_max",
    "min_world_size": "world_size_min",
    "seq_len": "sequence_length",
}


def read(path: Path) -> dict[str, Any]:
    """The mapping of a JSON file."""
    said = inputs.json(path)
    if not isinstance(said, dict):
        raise ConfigError(f"{path}: found {type(said).__name__}, wanted an object")
    return checked(said, str(path))


def checked(said: Mapping[str, Any], where: str = "configuration") -> dict[str, Any]:
    """The same by its usual names; `ConfigError` for a key that nobody knows."""
    found = {_ALIASES.get(key, key): value for key, value in said.items()}
    # The original keeps further settings of its own beside these in "config".
    if isinstance(found.get("config"), dict):
        found |= {_ALIASES.get(key, key): value for key, value in found.pop("config").items()}
    if unknown := found.keys() - set(KEYS):
        raise ConfigError(f"{where}: unknown key {min(unknown)!r}, known are {', '.join(KEYS)}")
    for key, value in found.items():
        if value is None:
            continue
        if key in _QUANTITIES:
            parse_quantity(value, f"{where}: {key}")
        elif key in _RANGES:
            _RANGES[key].check(value, f"{where}: {key}")
    return found


# A batch that anything fits: the micro-batches are given.
_ANY = 1 << 60
_NODE = 8
_PAIR = 2


def world_sizes(text: str | int, node: int = _NODE) -> tuple[int, ...]:
    """The sizes of "128", "64,128" or "64-256": every whole node from least to most."""
    found: list[int] = []
    for part in str(text).split(","):
        ends = [parse_quantity(end, "world size", RANKS.most) for end in part.split("-")]
        if len(ends) > _PAIR or ends[0] > ends[-1]:
            raise ConfigError(f"world size: found {part!r}, wanted as in 128 or 64-256")
        if len(ends) == 1:
            found += ends
        elif not (whole := list(range(-(-ends[0] // node) * node, ends[1] + 1, node))):
            raise ConfigError(f"world size: no whole node of {node} GPUs lies in {part!r}")
        else:
            found += whole
    return tuple(dict.fromkeys(found))


def numbers(text: str | None, what: str) -> tuple[int, ...] | None:
    """The numbers of "1,2,4" or "4Ki,64Ki"; None for nothing said."""
    if text is None:
        return None
    return tuple(dict.fromkeys(parse_quantity(part, what) for part in str(text).split(",")))


def algorithms(text: str | None) -> tuple[str, ...]:
    """The algorithms of "MSP,FSP"; all where nothing is said."""
    return tuple(part.strip().lower() for part in text.split(",")) if text else ALGOS


def batch(words: Mapping[str, Any]) -> MicroBatchRule:
    """The rule of the batch: one number, a range, or a given pair."""
    whole, least, most, bsz, num = (
        None if words.get(key) is None else parse_quantity(words[key], key.replace("_", " "))
        for key in (
            *("global_batch", "global_batch_min", "global_batch_max"),
            *("micro_bsz", "micro_num"),
        )
    )
    if whole is None and least is None and most is None:
        if bsz is None or num is None:
            raise ConfigError(
                "global batch: say its tokens, as in 4Mi, or both micro_bsz and micro_num"
            )
        return MicroBatchRule(least=1, most=_ANY, micro_bsz=bsz, micro_num=num)
    if whole is not None and (least is not None or most is not None):
        raise ConfigError("global batch: one number or a range, not both")
    if whole is None and most is None:
        raise ConfigError("global batch: a range needs a most")
    return MicroBatchRule(
        least=whole or least or 1, most=whole or most or _ANY, micro_bsz=bsz, micro_num=num
    )


def asked(words: Mapping[str, Any], *, seq_len: int | None = None) -> Question:
    """The question that the words ask; `ConfigError` names a word that is wrong."""
    for key in ("model", "world_size", "seq_len"):
        if words.get(key) is None:
            raise ConfigError(f"{key.replace('_', ' ')}: not said")
    algos = algorithms(words.get("compare"))
    ulysses = algos == ("dsp",)
    if "dsp" in algos and not ulysses:
        raise ConfigError("dsp is isp with weights whole or fully sharded: ask for it alone")
    limit = words.get("memory")
    plain: dict[str, Any] = {name: numbers(words.get(name), name) for name in _DEGREES}
    plain |= {name: words[name] for name in _AS_SAID if words.get(name) is not None}
    lengths = numbers(words["seq_len"], "sequence length") or ()
    question = Question(
        model=_model(words),
        world_sizes=world_sizes(words["world_size"]),
        seq_len=seq_len or lengths[0],
        batch=batch(words),
        memory=None if limit is None else parse_quantity(limit, "memory"),
        algos=("isp",) if ulysses else algos,
        # DeepSpeed-Ulysses overlaps nothing: both parts count whole.
        penalty=1.0 if ulysses else _number(words, "penalty", PENALTY, 0.2),
        imbalance=_number(words, "imbalance", IMBALANCE, 1.0),
        ulysses=ulysses,
        dtype_size=int(_number(words, "dtype_size", DTYPE_BYTES, 2)),
        **plain,
    )
    if len(lengths) == 1 or seq_len:
        question.check()
    return question


def _number(words: Mapping[str, Any], key: str, within: Range, usual: float) -> float:
    """Return the number under `key`, or the usual one; ConfigError if it is out of range."""
    value: float = usual if words.get(key) is None else words[key]
    within.check(value, key.replace("_", " "))
    return value


_DEGREES = ("pp", "sp", "ep", "interleave")
# Words that a question takes as they are.
_AS_SAID = (
    *("flash", "any_schedule", "overlap_grad", "overlap_experts", "overlap"),
    *("grad_sync", "param_sync", "dispatch", "p2p"),
)


def _model(words: Mapping[str, Any]) -> Model:
    from dataclasses import replace

    model = load(words["model"])
    vocab = words.get("vocab")
    return replace(model, vocab=parse_quantity(vocab, "vocabulary")) if vocab else model


def of_config(said: Mapping[str, Any], where: str = "configuration") -> dict[str, Any]:
    """The words of a mapping with the original's keys."""
    said = checked(said, where)
    words: dict[str, Any] = {}
    least, most = (said.get(f"world_size_{end}") for end in ("min", "max"))
    if least is not None or most is not None:
        low, high = least or most, most or least
        words["world_size"] = f"{low}-{high}" if low != high else f"{low}"
    strict = said.get("use_strict_bsz", said.get("global_bsz_min") is None)
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
        "debug": "debug",
    }
    words |= {name: said[key] for key, name in names.items() if said.get(key) is not None}
    if said.get("use_fixed_micro_bsz"):
        if said.get("use_strict_bsz"):
            raise ConfigError(f"{where}: use_strict_bsz excludes use_fixed_micro_bsz")
        words = {key: value for key, value in words.items() if "batch" not in key}
        words |= {
            "micro_bsz": said.get("fixed_micro_bsz"),
            "micro_num": said.get("fixed_micro_num"),
        }
    for key in ("flash", "overlap_wdp", "strict_batch", "debug"):
        if key in words:
            words[key] = bool(words[key])
    return words


def config_file(path: Path) -> dict[str, Any]:
    """The words of a JSON file with the original's keys."""
    return of_config(read(path), str(path))
