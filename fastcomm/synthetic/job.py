"""A synthetic training job: number, layout, size and speed of its ranks.

Ranks are laid out as in Megatron, tensor parallelism first: ``tp + TP * (dp + DP * pp)``.
Expert parallelism takes blocks of neighbors from the data dimension. Times are int ns.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from fastcomm.errors import ConfigError

GAP = 900  # between two kernels of one stream

Fault = Literal["slow_gpu", "slow_link", "jittery_host", "imbalanced_stage", "hot_expert"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
# Default slowdown in percent by fault: a slow link has half its speed.
_SLOWDOWN = {"slow_link": 100, "hot_expert": 60}

# Maximum of tensor and of pipeline parallelism, by the largest number of ranks.
_WIDEST = {32: 2, 128: 4}
_DEEPEST = {7: 1, 64: 2, 512: 4}


def _largest(ranks: int, table: dict[int, int]) -> int:
    return next((limit for most, limit in table.items() if ranks <= most), 8)


def _power_of_two(number: int, limit: int) -> int:
    """Return the largest power of two that divides `number`, at most `limit`."""
    return max(1, min(number & -number, limit))


@dataclass(frozen=True, kw_only=True)
class Job:
    """All inputs of a synthetic job: equal jobs give equal bytes."""

    ranks: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1  # within dp
    steps: int = 4
    first_step: int = 10  # the number of the first step that is profiled
    micro_batches: int = 4
    layers: int = 4  # of one stage; every second one has experts
    hidden: int = 2048
    tokens: int = 2048  # of one micro-batch
    bucket: int = 10_000_000  # gradient elements that one layer hands to data parallelism
    layer_ns: int = 900_000  # compute of a layer's forward pass; the backward pass takes twice
    link_speed: int = 44 * 10**9  # bytes per second that a collective reaches
    latency_ns: int = 9_000  # of the smallest collective
    skew_ns: int = 20_000  # how far ranks drift apart between two collectives, at most
    straggler: int | None = None  # rank with the fault; None is no fault
    fault: Fault = "slow_gpu"
    slowdown: int = 15  # percent by which the fault makes its part longer or larger
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = self.tp, self.pp, self.dp
        if self.ranks != self.tp * self.pp * self.dp or min(sizes) < 1:
            raise ConfigError(
                f"invalid job of {self.ranks} ranks: expected tp * pp * dp, not "
                f"{self.tp} * {self.pp} * {self.dp}"
            )
        if self.ep < 1 or self.dp % self.ep:
            raise ConfigError(f"invalid ep {self.ep}: expected a divisor of dp {self.dp}")
        if self.straggler is not None and not 0 <= self.straggler < self.ranks:
            raise ConfigError(
                f"invalid straggler {self.straggler}: expected 0 to {self.ranks - 1}"
            )
        self._check_fault()
        self._check_sizes()

    def _check_fault(self) -> None:
        if self.fault not in FAULTS:
            raise ConfigError(
                f"invalid fault {self.fault!r}: expected one of {', '.join(FAULTS)}"
            )
        needs = {
            "slow_link": ("dp", self.dp),
            "imbalanced_stage": ("pp", self.pp),
            "hot_expert": ("ep", self.ep),
        }
        name, size = needs.get(self.fault, ("", 2))
        if self.straggler is not None and size == 1:
            raise ConfigError(f"fault {self.fault} needs {name} of 2 or more, not 1")
        if self.fault == "hot_expert" and self.layers == 1:
            raise ConfigError("fault hot_expert needs 2 layers or more, not 1")

    def _check_sizes(self) -> None:
        least = {
            "steps": 1,
            "micro_batches": 1,
            "layers": 1,
            "hidden": 1,
            "tokens": 8,
            "bucket": 1,
            "layer_ns": 300_000,
            "link_speed": 10**6,
            "latency_ns": 5_000,
            "first_step": 0,
            "skew_ns": 0,
            "slowdown": 0,
            "seed": 0,
        }
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ConfigError(
                    f"invalid {name} {getattr(self, name)}: expected {minimum} or more"
                )

    @classmethod
    def of(cls, ranks: int = 8, **changes: Any) -> Self:
        """Return a job of any size; values not in `changes` follow from the number of ranks."""
        tp = changes.get("tp") or _power_of_two(ranks, _largest(ranks, _WIDEST))
        pp = changes.get("pp") or _power_of_two(max(1, ranks // tp), _largest(ranks, _DEEPEST))
        dp = changes.get("dp") or max(1, ranks // (tp * pp))
        chosen = {
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "ep": _power_of_two(dp, min(8, max(2, dp // 2))),
            "micro_batches": max(4, 2 * pp),
            "straggler": ranks * 5 // 8 if ranks > 1 else None,
            "slowdown": _SLOWDOWN.get(changes.get("fault", ""), 15),
        }
        return cls(ranks=ranks, **{**chosen, **changes})

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return the coordinates (tp, dp, pp) of a rank."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    @property
    def expert_data(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.dp // self.ep
