"""Search of InternEvo: four kinds of sequence parallelism, priced by closed formulas.

A `SearchProblem` has model, world sizes, global batch, memory and constraints.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from fastcomm.checks import IMBALANCE, PENALTY, RANKS, non_default
from fastcomm.errors import ConfigError
from fastcomm.isp.options import BatchOptions, QuantityTexts, SearchOptions
from fastcomm.models import Model, load
from fastcomm.units import parse_quantity

ALGOS = ("isp", "msp", "fsp", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRule:
    """Which micro-batches a search tries.

    A step has `least` to `most` tokens. `micro_bsz` and `micro_num` fix the size and the number
    of micro-batches.
    """

    least: int
    most: int
    micro_bsz: int | None = None
    micro_num: int | None = None

    @property
    def strict(self) -> bool:
        """Whether the global batch is a single number."""
        return self.least == self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProblem:
    """What a search has to solve, in either mode."""

    model: Model
    world_sizes: tuple[int, ...]
    seq_len: int
    batch: MicroBatchRule
    memory: float | None = None  # bytes; None is the memory of the cluster's GPU
    algos: tuple[str, ...] = ALGOS
    pp: tuple[int, ...] | None = None
    sp: tuple[int, ...] | None = None
    dtype_size: int = 2
    flash: bool = True
    # Cost of contention, as a share of the shorter of two overlapped parts.
    penalty: float = 0.2
    overlap_grad: bool = False
    grad_sync: str = "all_reduce"
    param_sync: str = "broadcast"
    # "layer": all GEMMs of a layer overlap its gathers; "per_op": each GEMM its own.
    overlap: str = "layer"
    interleave: tuple[int, ...] | None = None  # virtual stages of a rank; None is any
    ep: tuple[int, ...] | None = None  # ranks that share a layer's experts; None is any
    imbalance: float = 1.0  # tokens of the busiest rank over the mean
    # "copies": a token is sent to each of its experts; "nodes": once to each of their nodes.
    dispatch: str = "copies"
    overlap_experts: bool = False  # overlap expert all-to-alls with another micro-batch
    # What an MTP rank sends to the next stage: everything ("whole"), or a share ("scatter").
    p2p: str = "whole"
    any_schedule: bool = False  # allow fewer micro-batches than stages
    ulysses: bool = False  # DeepSpeed-Ulysses: weights unsharded, or sharded by all replicas

    def check(self) -> None:
        """Raise `ConfigError` if no strategy can satisfy the problem."""
        if not self.world_sizes:
            raise ConfigError("world size: expected at least one")
        PENALTY.check(self.penalty, "penalty")
        IMBALANCE.check(self.imbalance, "imbalance")
        if unknown := set(self.algos) - set(ALGOS):
            raise ConfigError(
                f"unknown algorithm {min(unknown)!r}: expected {', '.join(ALGOS)}, or dsp alone"
            )
        self._check_batch()
        self._check_shards()

    def _check_batch(self) -> None:
        """Raise `ConfigError` if the minimum global batch (tokens) is above the maximum.

        A strict batch must also be a multiple of the sequence length.
        """
        batch = self.batch
        if batch.least > batch.most:
            raise ConfigError(
                f"global batch: the minimum {batch.least} is above the maximum {batch.most}"
            )
        if batch.strict and batch.least % self.seq_len:
            lower = batch.least // self.seq_len * self.seq_len
            nearest = f"{lower} or {lower + self.seq_len}" if lower else str(self.seq_len)
            raise ConfigError(
                f"global batch {batch.least} is not a multiple of the sequence length "
                f"{self.seq_len}; try {nearest}"
            )

    def _check_shards(self) -> None:
        """Raise `ConfigError` if a degree does not divide what it shards in the model."""
        model = self.model
        for pp in self.pp or ():
            if pp > model.layers:
                raise ConfigError(
                    f"invalid pp {pp}: {model.name} has only {model.layers} layers"
                )
        if self.ep and not model.experts and set(self.ep) != {1}:
            raise ConfigError(f"invalid ep: {model.name} has no experts")
        experts = model.experts.number if model.experts else 1
        for name, degrees, total, unit in (
            ("sp", self.sp, model.heads, "heads"),
            ("ep", self.ep, experts, "experts"),
            ("interleave", self.interleave, model.layers, "layers"),
        ):
            for degree in degrees or ():
                if total % degree:
                    raise ConfigError(
                        f"invalid {name} {degree}: it must divide the {total} {unit} of "
                        f"{model.name}; the nearest smaller degree is "
                        f"{nearest_divisor(degree, {total})}"
                    )


def nearest_divisor(degree: int, totals: set[int]) -> int:
    """Return the largest number up to `degree` that divides one of `totals`."""
    return max(
        n for n in range(1, min(degree, max(totals)) + 1) if any(t % n == 0 for t in totals)
    )


# Tokens of a step without a limit, if the micro-batches are fixed.
_ANY = 1 << 60
_NODE = 8
_PAIR = 2


def world_sizes(text: str | float | tuple[int, ...], node: int = _NODE) -> tuple[int, ...]:
    """Parse world sizes such as "128", "64,128" or "64-256".

    A range has every multiple of `node` GPUs from its least to its most.

    Raises
    ------
    ConfigError
        If a part is not a number or a range, or a range has no whole node.

    """
    sizes: list[int] = []
    for part in _parts(text, "world size"):
        ends = [parse_quantity(end, "world size", RANKS.most) for end in part.split("-")]
        if len(ends) > _PAIR or ends[0] > ends[-1]:
            raise ConfigError(
                f"invalid world size {part!r}: expected numbers or ranges, as in 128 or 64-256"
            )
        if len(ends) == 1:
            sizes += ends
        elif not (nodes := list(range(-(-ends[0] // node) * node, ends[1] + 1, node))):
            raise ConfigError(
                f"invalid world size {part!r}: it has no multiple of {node}, the GPUs of a node"
            )
        else:
            sizes += nodes
    return tuple(dict.fromkeys(sizes))


def numbers(text: QuantityTexts, option: str) -> tuple[int, ...] | None:
    """Parse numbers such as "1,2,4" or "4Ki,64Ki"; None stays None."""
    if text is None:
        return None
    return tuple(dict.fromkeys(parse_quantity(part, option) for part in _parts(text, option)))


def _parts(text: str | float | tuple[int, ...], option: str) -> list[str]:
    if text == ():
        raise ConfigError(f"{option}: an empty list; leave it out to allow every value")
    return list(map(str, text)) if isinstance(text, tuple) else str(text).split(",")


def algorithms(text: str | None) -> tuple[str, ...]:
    """Parse algorithms such as "MSP,FSP"; None is all."""
    return tuple(part.strip().lower() for part in text.split(",")) if text else ALGOS


def micro_batch_rule(options: SearchOptions) -> MicroBatchRule:
    """Return the rule of the micro-batches that the options describe.

    Raises
    ------
    ConfigError
        If the options contradict each other.

    """
    _refuse_range(options.global_batch)
    tokens = options.global_batch
    total = None if tokens is None else parse_quantity(tokens, "global batch")
    least, most, bsz, num = (
        None if value is None else int(value)
        for value in (
            options.global_batch_min,
            options.global_batch_max,
            options.micro_bsz,
            options.micro_num,
        )
    )
    if total is None and least is None and most is None:
        return MicroBatchRule(least=1, most=_ANY, micro_bsz=bsz, micro_num=num)
    if total is not None and (least is not None or most is not None):
        raise ConfigError(
            "global batch and a range of it: expected one number or a range, not both; leave "
            "--global-batch or --global-batch-min and --global-batch-max out"
        )
    if total is None and most is None:
        raise ConfigError("--global-batch-min: a range needs a maximum; add --global-batch-max")
    return MicroBatchRule(
        least=total or least or 1, most=total or most or _ANY, micro_bsz=bsz, micro_num=num
    )


def _refuse_range(text: str | float | None) -> None:
    """Raise `ConfigError` if a global batch is a range or a list; say how to search a range."""
    least, separator, most = str(text).partition("-" if "-" in str(text) else ",")
    if least and separator:
        raise ConfigError(
            f"invalid global batch {text!r}: expected one number of tokens; for a range: "
            f"--global-batch-min {least} --global-batch-max {most}"
        )


_LEAST_MEMORY = 1 << 20  # bytes; a smaller number lacks its unit


def memory_limit(options: BatchOptions) -> int | None:
    """Return the memory of a GPU in bytes. Raises `ConfigError` for a number without unit."""
    if options.memory is None:
        return None
    size = int(options.memory)
    if size < _LEAST_MEMORY:
        raise ConfigError(
            f"invalid memory {options.memory!r}: {size} bytes; add a unit, as in 70GiB"
        )
    return size


# Fields of a problem that are options, unchanged.
_AS_GIVEN = (
    *("overlap_grad", "grad_sync", "param_sync", "dispatch", "overlap_experts", "p2p"),
    "any_schedule",
)


def problem_of(options: SearchOptions, *, seq_len: int | None = None) -> SearchProblem:
    """Return the problem that the options ask.

    With several sequence lengths, `seq_len` chooses one; by default the first is taken, and the
    problem is not checked.

    Raises
    ------
    ConfigError
        If an option is missing, or no strategy can satisfy the options.

    """
    model, world_size, length = options.model, options.world_size, options.seq_len
    if model is None or world_size is None or length is None or _lacks_batch(options):
        raise _missing(options)
    algos = algorithms(options.algorithms)
    ulysses = algos == ("dsp",)
    if "dsp" in algos and not ulysses:
        raise ConfigError("dsp cannot be compared with other algorithms: search it alone")
    # DeepSpeed-Ulysses overlaps nothing: both parts count in full.
    penalty = 1.0 if ulysses else options.penalty
    lengths = numbers(length, "sequence length") or ()
    loaded = _model(model, options)
    if options.p2p == "scatter" and "mtp" not in algos:
        raise ConfigError("--p2p scatter has no effect without mtp; add it to --algorithms")
    problem = SearchProblem(
        model=loaded,
        world_sizes=world_sizes(world_size),
        seq_len=seq_len or lengths[0],
        batch=micro_batch_rule(options),
        memory=memory_limit(options),
        algos=("isp",) if ulysses else algos,
        pp=numbers(options.pp_sizes, "pp"),
        sp=numbers(options.sp_sizes, "sp"),
        ep=numbers(options.ep_sizes, "ep"),
        interleave=numbers(options.interleave, "interleave"),
        dtype_size=options.dtype_size or 2,
        flash=options.flash is not False,
        penalty=0.2 if penalty is None else penalty,
        overlap=options.overlap_weights,
        imbalance=1.0 if options.imbalance is None else options.imbalance,
        ulysses=ulysses,
        **{name: getattr(options, name) for name in _AS_GIVEN},
    )
    if len(lengths) == 1 or seq_len:
        problem.check()
    _check_gpus(problem)
    return problem


def _check_gpus(problem: SearchProblem) -> None:
    """Raise `ConfigError` for a degree that does not divide the GPUs of any world size."""
    totals, unit = set(problem.world_sizes), "GPUs"
    for name, degrees in (("pp", problem.pp), ("sp", problem.sp), ("ep", problem.ep)):
        for degree in degrees or ():
            if all(total % degree for total in totals):
                raise ConfigError(
                    f"--{name}-sizes: {name} {degree} does not divide "
                    f"{' or '.join(map(str, sorted(totals)))} ({unit}); the nearest smaller "
                    f"degree is {nearest_divisor(degree, totals)}"
                )
        if name == "pp" and degrees:
            totals = {total // pp for total in totals for pp in degrees if total % pp == 0}
            unit = "GPUs of a stage"


_EXAMPLES = {"model": "llama3-8b", "world_size": "64", "seq_len": "8Ki"}


def _missing(options: SearchOptions) -> ConfigError:
    """Return the error that names all missing options, each with an example."""
    names = {name: text for name, text in _EXAMPLES.items() if getattr(options, name) is None}
    if _lacks_batch(options):
        names["global_batch"] = "4Mi"
    shown = {f"--{name.replace('_', '-')}": text for name, text in names.items()}
    example = " ".join(f"{name} {text}" for name, text in shown.items())
    batch = " (or --micro-bsz and --micro-num)" if "global_batch" in names else ""
    return ConfigError(f"missing {', '.join(shown)}{batch}; for example: {example}")


def _lacks_batch(options: SearchOptions) -> bool:
    """Whether nothing says how many tokens a step has."""
    ranges = options.global_batch, options.global_batch_min, options.global_batch_max
    micro = options.micro_bsz, options.micro_num
    return all(value is None for value in ranges) and None in micro


def _model(name: str | float | Path, options: SearchOptions) -> Model:
    """Return a model; raise `ConfigError` if options on experts are given, and it has none."""
    model = load(str(name))
    if options.vocab:
        model = replace(model, vocab=int(options.vocab))
    names = ("imbalance", "dispatch", "overlap_experts")
    own = [f"--{n.replace('_', '-')}" for n in non_default(options) if n in names]
    if own and not model.experts:
        raise ConfigError(f"{model.name} has no experts; leave {', '.join(own)} out")
    return model
