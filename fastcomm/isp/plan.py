"""A training job with a fixed strategy, as `fastcomm isp price` and `evaluate` take it.

A batch counts sequences, sizes of parallelism count ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from fastcomm.checks import RANKS
from fastcomm.errors import ConfigError
from fastcomm.isp.model import Model
from fastcomm.units import parse_quantity

RECOMPUTE = ("none", "selective", "partial", "full")
# Recipe of FP8 by the names of trainers; a GPU has surfaces of GEMM for some of them.
RECIPES = {
    "bf16": "bf16",
    "fp16": "bf16",
    "fp8_te": "fp8_tensor",
    "fp8_cs": "fp8_tensor",
    "fp8_titan": "fp8_tensor",
    "fp8_tensor": "fp8_tensor",
    "fp8_token": "fp8_token",
    "fp8_block": "fp8_block",
    "mxfp8": "fp8_block",
}
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A model, its GPUs and batch, and the whole strategy.

    `sharding` is "ddp", "zero1", "zero2", "zero3", or "hsdpN" for `zero3` over N ranks that
    others replicate. `etp` divides an expert. `year` is that of the stack.
    """

    model: Model
    gpu: str
    gpus: int
    global_batch: int
    seq_len: int
    node_bytes_per_s: float  # of one NVLink domain to all others, one direction
    domain: int  # GPUs of an NVLink domain
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    micro_batch: int = 1
    sharding: str = "zero1"
    recompute: str = "none"
    precision: str = "bf16"
    overlap: bool = True
    dispatch: str = "alltoall"  # "deepep", "hybridep"; with "overlapped"
    year: float = 2025.0
    graphs: float = 0.0  # share of launches that CUDA graphs replace
    offloaded: int = 0  # layers whose activations are moved to the host
    memory: float | None = None  # of a GPU; None is that of the GPU's file
    power_share: float = 1.0  # of the GPU's usual power limit, by which compute is slower

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return max(1, self.global_batch // (self.dp * self.micro_batch))

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank, before tensor parallelism divides them."""
        return self.micro_batch * self.seq_len / self.cp

    @property
    def shards(self) -> tuple[int, int, int]:
        """Numbers of shards of parameters, gradients and optimizer states (dense weights)."""
        whole = self.dp * self.cp
        if self.sharding.startswith("hsdp"):
            return (min(int(self.sharding[4:]), whole),) * 3
        divided = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[self.sharding]
        parameters, gradients, states = (whole if divided >= n else 1 for n in (3, 2, 1))
        return parameters, gradients, states

    @property
    def is_fsdp(self) -> bool:
        """Whether weights are gathered layer by layer."""
        return self.shards[0] > 1

    def check(self) -> None:
        """Raise `ConfigError` if the sizes contradict each other or the model."""
        for name in ("gpus", "tp", "pp", "vp", "cp", "ep", "etp", "micro_batch", "domain"):
            RANKS.check(getattr(self, name), name)
        ranks = self.tp * self.pp * self.cp
        if self.gpus % ranks:
            raise ConfigError(
                f"tp x pp x cp is {ranks}, which does not divide {self.gpus} GPUs"
            )
        if self.global_batch < self.dp * self.micro_batch:
            raise ConfigError(
                f"global batch {self.global_batch}: fewer sequences than dp x micro-batch, "
                f"{self.dp} x {self.micro_batch}"
            )
        if self.pp * self.vp > self.model.layers + 2:
            raise ConfigError(
                f"pp x vp is {self.pp * self.vp}: more stages than the {self.model.layers} "
                f"layers of {self.model.name}"
            )
        self._check_experts()
        if self.precision not in RECIPES:
            raise ConfigError(
                f"invalid precision {self.precision!r}: expected one of {', '.join(RECIPES)}"
            )
        if self.recompute not in RECOMPUTE:
            raise ConfigError(
                f"invalid recompute {self.recompute!r}: expected one of {', '.join(RECOMPUTE)}"
            )
        self._check_sharding()

    def _check_experts(self) -> None:
        """Raise `ConfigError` unless `ep` divides the experts."""
        experts = self.model.experts
        if self.ep > 1 and not experts:
            raise ConfigError(f"ep {self.ep}: {self.model.name} has no experts")
        if experts and experts.number % self.ep:
            raise ConfigError(f"ep {self.ep} does not divide the {experts.number} experts")

    def _check_sharding(self) -> None:
        """Raise `ConfigError` for an unknown sharding."""
        is_plain = self.sharding in {"ddp", "zero1", "zero2", "zero3"}
        group = self.sharding.removeprefix("hsdp")
        if not is_plain and not (
            self.sharding.startswith("hsdp") and group.isdecimal() and 0 < int(group) < 1 << 31
        ):
            raise ConfigError(
                f"invalid sharding {self.sharding!r}: expected ddp, zero1, zero2, zero3, or "
                "hsdp and a number of ranks, as in hsdp8"
            )


_SIZES = ("tp", "pp", "vp", "cp", "ep", "etp", "micro_batch")
_TEXTS = ("sharding", "recompute", "precision", "dispatch")


def with_strategy(plan: Plan, text: str) -> Plan:
    """Return the plan with the strategy of a text, "tp=8,pp=16,sharding=zero1".

    `dp` may be given and is compared with that of the plan. The result is checked.

    Raises
    ------
    ConfigError
        If a key is unknown or a value is invalid.

    """
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = part.partition("=")
        name = key.strip().replace("-", "_")
        if not separator or name not in (*_SIZES, *_TEXTS, "dp", "overlap"):
            keys = ", ".join((*_SIZES, *_TEXTS, "overlap", "dp")).replace("_", "-")
            raise ConfigError(f"--strategy: invalid {part!r}: expected KEY=VALUE with {keys}")
        values[name] = value.strip().lower()
    replicas = values.pop("dp", None)
    result = with_values(plan, values, "--strategy")
    result.check()
    if replicas is not None and parse_quantity(replicas, "--strategy: dp") != result.dp:
        raise ConfigError(
            f"--strategy: dp {replicas} contradicts gpus / (tp x pp x cp), which is {result.dp}"
        )
    return result


def with_values(plan: Plan, values: Mapping[str, str], where: str) -> Plan:
    """Return the plan with some fields replaced.

    Parameters
    ----------
    plan
        The plan.
    values
        Texts of the new values by field, such as ``{"tp": "8"}``; other names are ignored.
    where
        Beginning of the message of an error.

    Raises
    ------
    ConfigError
        A text is not a valid number.

    """
    changes: dict[str, object] = {}
    names = {option.name for option in fields(Plan)}
    for name, value in values.items():
        if name in _SIZES:
            changes[name] = parse_quantity(value, f"{where}: {name}", RANKS.most)
        elif name == "overlap":
            changes[name] = value not in {"no", "false", "0"}
        elif name in names:
            changes[name] = value
    return replace(plan, **changes)  # type: ignore[arg-type]
