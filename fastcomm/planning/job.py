"""A training job with a fixed strategy, as `fastcomm plan price` and `evaluate` take it.

A batch counts sequences, sizes of parallelism count ranks.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

from fastcomm.checks import RANKS, invalid, invalid_value, option_name
from fastcomm.errors import ConfigError
from fastcomm.hardware.clusters import Cluster, shipped
from fastcomm.hardware.clusters import load as load_cluster
from fastcomm.hardware.expert_exchange import FAMILIES
from fastcomm.hardware.fitted_exchange import FittedCosts, read_fitted
from fastcomm.hardware.gpus import gpu
from fastcomm.isp.problem import memory_limit
from fastcomm.models import Model
from fastcomm.models import load as load_model
from fastcomm.planning.options import JobOptions
from fastcomm.planning.trainers import (
    DEEPEP_RANKS,
    DEFAULT,
    DISPATCHES,
    NODE_GPUS,
    TRAINERS,
    Trainer,
)
from fastcomm.units import parse_quantity

# Also all but the products of query, key, value and attention's output, as MaxText can.
_ALL_BUT_ATTENTION = "all_but_qkv_out"
RECOMPUTE = ("none", "selective", "partial", "full", _ALL_BUT_ATTENTION)
# Parts of a layer that Megatron-Core recomputes alone, joined by "+"; `moe` is the whole layer
# of experts, `mlp` that of layers without experts.
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
# What CUDA graphs replace: all launches of a step, or those of parts of a layer, joined by "+".
GRAPHS = ("full", "attn", "mlp", "moe_router", "moe_preprocess")
ROUTING = ("forced", "natural")
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
_WAYS = ("overlapped", "capacity")  # with another micro-batch; padded, without dropless sizes
GRADIENTS = {"bf16": 2, "fp32": 4}  # bytes of an accumulated gradient
MOMENTS = {"fp32": 8, "bf16": 4}  # bytes of the optimizer's two moments of a parameter
_BF16_GRADIENTS = 2023.9  # year of the stack
_YEARS = (2000, 2100)
_UNEVEN = 1.1  # longest virtual stage of a layout, over the mean
# Whether parameters, gradients and optimizer states are divided.
_DIVIDED = {
    "zero3": (True, True, True),
    "zero2": (False, True, True),
    "zero1": (False, False, True),
}
_UNDIVIDED = (False, False, False)
YEAR = 2026.5  # of a stack, if none is given
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model, its GPUs and batch, and the whole strategy.

    `sharding` is "ddp", "zero1", "zero2", "zero3", or "hsdpN" for `zero3` over N ranks that
    others replicate. `recompute` is one of `RECOMPUTE`, some of `MODULES` joined by "+", or the
    number of layers of a pipeline stage that are recomputed. `etp` divides an expert. `year` is
    that of the stack.
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
    trainer: str = DEFAULT
    overlap: bool = True
    dispatch: str = "alltoall"  # "deepep", "hybridep"; with "overlapped", "capacity"
    gradients: str = ""  # of `GRADIENTS`; empty is that of the year
    moments: str = "fp32"  # of `MOMENTS`
    year: float = YEAR
    graphs: str = ""  # some of `GRAPHS`, joined by "+"
    routing: str = ROUTING[0]  # of tokens: "forced" to equal shares, or as a router decides
    fused_experts: bool = False  # expert GEMMs, activation and quantization in one kernel
    fp8_attention: bool = False
    offloaded: int = 0  # layers whose activations are moved to the host
    memory: float | None = None  # of a GPU; None is that of the GPU's file
    exchange_costs: FittedCosts | None = None  # in place of those that come with fastcomm
    power_share: float = 1.0  # of the GPU's usual power limit, by which compute is slower

    @classmethod
    def on(cls, cluster: Cluster, **values: Any) -> Self:
        """Return a plan on the measured GPUs of a cluster; `values` are the other fields."""
        node = {"domain": cluster.gpus_per_node, "node_bytes_per_s": cluster.bw_node}
        return cls(**{"gpu": cluster.gpu, "memory": cluster.memory, **node, **values})

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step; `check` refuses one that is not full."""
        return -(-self.global_batch // (self.dp * self.micro_batch))

    @property
    def memory_limit(self) -> float:
        """Memory of a GPU in bytes."""
        return self.memory or gpu(self.gpu).memory

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank, before tensor parallelism divides them."""
        return self.micro_batch * self.seq_len / self.cp

    @property
    def shards(self) -> tuple[int, int, int]:
        """Numbers of shards of parameters, gradients and optimizer states (dense weights)."""
        whole = self.dp * self.cp
        if self.is_hybrid:
            return (min(int(self.sharding[4:]), whole),) * 3
        para, grads, states = _DIVIDED.get(self.sharding, _UNDIVIDED)
        return whole if para else 1, whole if grads else 1, whole if states else 1

    @property
    def is_hybrid(self) -> bool:
        """Whether weights are sharded in groups of ranks that hold copies of each other."""
        return self.sharding.startswith("hsdp")

    @property
    def replica_ranks(self) -> int:
        """Number of ranks of a pipeline stage, among which `ep` divides experts."""
        return self.dp * self.cp * self.tp

    @property
    def expert_replicas(self) -> int:
        """Number of ranks of a pipeline stage that hold the same experts."""
        return max(1, self.replica_ranks // (self.ep * self.etp))

    @property
    def recomputed(self) -> float:
        """Share of the layers whose whole forward pass runs again in the backward pass.

        Selective recompute of FSDP trainers is that of every second layer, or of every second
        GEMM.
        """
        if self.recompute == "none":
            return 0.0
        if self.recompute.isdecimal():
            return min(1.0, int(self.recompute) / self.stage_layers)
        shares = {
            "full": 1.0,
            _ALL_BUT_ATTENTION: 1.0,
            "partial": 0.5,
            "selective": self.trainer_rules.selective_layers,
        }
        return shares.get(self.recompute, 0.0)

    @property
    def modules(self) -> frozenset[str]:
        """Parts of each layer that `recompute` names, of `MODULES`."""
        return _modules(self.recompute)

    @property
    def keeps_attention(self) -> bool:
        """Whether recompute leaves out the products of attention: their outputs are kept."""
        return self.recompute == _ALL_BUT_ATTENTION

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's states of a parameter: its fp32 copy and two moments."""
        return 4 + MOMENTS[self.moments]

    @property
    def is_dualpipe(self) -> bool:
        """Whether the dispatch names the schedule of DeepSeek's own trainer."""
        return any(way.startswith("(") for way in self.dispatch.split()[1:])

    @property
    def has_fp8_dispatch(self) -> bool:
        """Whether tokens are sent to experts in FP8, as DeepSeek's own trainer does.

        Megatron-Core passes bf16 to DeepEP, whatever the recipe (its issue 3578).
        """
        is_block = self.precision == "fp8_block" and not self.is_mx
        return is_block and self.is_dualpipe and "deepep" in self.dispatch

    @property
    def has_few_queues(self) -> bool:
        """Whether overlapped kernels of two kinds take contradictory settings of the GPU.

        Before Blackwell, tensor and context parallelism overlap with
        CUDA_DEVICE_MAX_CONNECTIONS=1, and the exchange of another micro-batch with 32.
        """
        is_old = not gpu(self.gpu).has_mx
        return is_old and "overlapped" in self.dispatch and (self.tp > 1 or self.cp > 1)

    @property
    def is_mx(self) -> bool:
        """Whether GEMMs are in MXFP8, by which Blackwell also emulates blocks of scales."""
        emulated = self.precision == "fp8_block" and gpu(self.gpu).has_mx
        return emulated or self.precision == "mxfp8"

    @property
    def graph_parts(self) -> frozenset[str]:
        """What CUDA graphs replace, of `GRAPHS`."""
        return _joined(self.graphs)

    @property
    def is_padded(self) -> bool:
        """Whether experts get equally many rows: tokens above a capacity are dropped."""
        return "capacity" in self.dispatch

    @property
    def stage_layers(self) -> int:
        """Number of layers of the fullest rank, all its virtual stages together."""
        return max(self.rank_layers)

    @property
    def rank_layers(self) -> tuple[int, int]:
        """Number of layers of the fullest rank but the last, and of the last one.

        All virtual stages of a rank together. The last one, which has the output head, gets
        what others leave: full ranks, or full virtual stages where `stage_units` says so.
        """
        rules = self.trainer_rules
        return _rank_layers(self.model, self.pp, self.vp, has_layouts=rules.has_layouts)

    @property
    def last_layers(self) -> int:
        """Number of layers that full stages leave for the last one, without those of MTP."""
        layers = self.model.layers
        return layers - (self.pp - 1) * -(-layers // self.pp)

    @property
    def trainer_rules(self) -> Trainer:
        """What the trainer does with memory and the host."""
        return TRAINERS[self.trainer]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated gradient: stacks before 2024 take fp32."""
        usual = "fp32" if self.year < _BF16_GRADIENTS else self.trainer_rules.gradients
        return GRADIENTS[self.gradients or usual]

    @property
    def reduced_bytes(self) -> int:
        """Bytes of a gradient between ranks; stacks before 2024 take bf16."""
        usual = "bf16" if self.year < _BF16_GRADIENTS else self.trainer_rules.reduction
        return GRADIENTS[self.gradients or usual]

    @property
    def is_fsdp(self) -> bool:
        """Whether weights are gathered layer by layer."""
        return self.shards[0] > 1

    def check(self) -> None:
        """Raise `ConfigError` if no trainer could run the plan; memory is not checked."""
        self.check_values()
        self._check_batch()
        self._check_shape()
        self.check_methods()
        self._check_graphs()
        self._check_recompute()
        self._check_experts()
        self._check_sharding()

    def check_methods(self) -> None:
        """Raise `ConfigError` for what the model or the trainer lacks in every layout."""
        self._check_switches()
        self._check_exchange()
        self._check_trainer()

    def check_values(self) -> None:
        """Raise `ConfigError` if the plan has no price: for invalid values, or no whole dp."""
        for name in ("gpus", "tp", "pp", "vp", "cp", "ep", "etp", "micro_batch", "domain"):
            RANKS.check(getattr(self, name), name)
        self._check_texts()
        ranks = self.tp * self.pp * self.cp
        if self.gpus % ranks:
            raise ConfigError(
                f"tp x pp x cp is {ranks}, which does not divide {self.gpus} GPUs"
            )

    def _check_texts(self) -> None:
        """Raise `ConfigError` for an unknown method, or a precision that the GPU lacks."""
        names = {
            "precision": RECIPES,
            "recompute": RECOMPUTE,
            "gradients": ("", *GRADIENTS),
            "trainer": TRAINERS,
            "routing": ROUTING,
            "moments": MOMENTS,
        }
        kind, *more = self.dispatch.split() or [""]
        if kind not in DISPATCHES or any(m not in _WAYS and m[0] != "(" for m in more):
            shown = self.dispatch.replace(" ", "+")
            ways = ", ".join(f"+{way}" for way in _WAYS)
            raise invalid_value("dispatch", shown, f"one of {', '.join(DISPATCHES)}; {ways}")
        for name, values in names.items():
            if name == "recompute" and self._is_partial_recompute():
                continue
            if getattr(self, name) not in values:
                expected = f"one of {', '.join(filter(None, values))}"
                raise invalid_value(name, getattr(self, name), expected)
        if unknown := self.graph_parts - set(GRAPHS):
            expected = f"some of {', '.join(GRAPHS)}, joined by +"
            raise invalid_value("graphs", min(unknown), expected)
        chip, recipe = gpu(self.gpu), RECIPES[self.precision]
        if recipe != "bf16" and "fp8" not in chip.peaks:
            raise ConfigError(f"precision {self.precision}: {chip.name} has no FP8")
        if self.precision == "mxfp8" and not chip.has_mx:
            raise ConfigError(
                f"precision mxfp8: {chip.name} has no MX formats; take fp8_cs or fp8_block"
            )

    def _check_switches(self) -> None:
        """Raise `ConfigError` for a switch without what it takes."""
        is_fp8 = RECIPES[self.precision] != "bf16"
        graphs, is_latent = self.graph_parts, self.model.latent is not None
        experts, rules = self.model.experts, self.trainer_rules
        router, has_mlp = "moe_router", experts is None or experts.dense_layers > 0
        is_overlapped = "overlapped" in self.dispatch
        needs = (
            ("fused-experts", self.fused_experts, "precision mxfp8", self.precision == "mxfp8"),
            ("fused-experts", self.fused_experts, "Megatron-Core", rules.has_graphs),
            ("graphs", bool(graphs), "a trainer with CUDA graphs", rules.has_graphs),
            ("overlapped dispatch", is_overlapped, "Megatron-Core", rules.has_graphs),
            ("graph of moe_router", router in graphs, "experts", experts is not None),
            ("graph of mlp", "mlp" in graphs, "layers without experts", has_mlp),
            ("fp8-attention", self.fp8_attention, "a precision in FP8", is_fp8),
            ("mla_up_proj", "mla_up_proj" in self.modules, "latent attention", is_latent),
            ("moe_preprocess", "moe_preprocess" in graphs, router, router in graphs),
        )
        for name, is_on, other, is_there in needs:
            if is_on and not is_there:
                raise ConfigError(f"{name} takes {other}")

    @property
    def graph_problem(self) -> str:
        """Why Megatron-Core captures no such graphs; empty if it does.

        Its `TransformerConfig` excludes graphs and recompute of whole layers, and graphs of the
        router and recompute of the layer of experts. A graph of a step cannot wait for token
        counts on the host: rows are padded, or HybridEP keeps the counts on the GPU.
        """
        graphs = self.graph_parts
        if graphs and self.recomputed:
            return "exclude recompute of whole layers"
        if "moe_router" in graphs and "moe" in self.modules:
            return "of moe_router exclude recompute of moe"
        has_counts = not self.is_padded and "hybridep" not in self.dispatch
        if "full" in graphs and self.model.experts and has_counts:
            return "of a whole step take hybridep or capacity: token counts stop the host"
        return ""

    @property
    def dispatch_problem(self) -> str:
        """Why the dispatcher does not run on the GPU, or for so many ranks; empty if it does.

        DeepEP and HybridEP are for Hopper and newer. DeepEP has kernels for some numbers of
        ranks, and Megatron-Core pads no experts to a capacity with it.
        """
        kind = self.dispatch.split()[0]
        family = FAMILIES["nccl" if kind == DISPATCHES[0] else kind]
        if reason := family.unsupported(self.gpu, "bf16"):
            return f"{family.title} {reason}"
        if kind != "deepep":
            return ""
        if self.is_padded:
            return "DeepEP pads no experts to a capacity; take alltoall or hybridep"
        ranks = self.ep * self.etp
        if ranks not in DEEPEP_RANKS:
            sizes = ", ".join(map(str, DEEPEP_RANKS[1:]))
            return f"{ranks} ranks; DeepEP takes one of {sizes}"
        if ranks > NODE_GPUS and self.domain > NODE_GPUS:
            return f"{ranks} ranks in an NVLink domain of many nodes; take hybridep"
        return ""

    def _check_graphs(self) -> None:
        """Raise `ConfigError` for CUDA graphs that cannot be captured."""
        if problem := self.graph_problem:
            raise ConfigError(f"graphs {self.graphs}: CUDA graphs {problem}")

    def _check_recompute(self) -> None:
        """Raise `ConfigError` for a number of layers that virtual stages do not divide.

        Megatron-Core recomputes equally many layers of each virtual stage.
        """
        if not (self.trainer_rules.has_counts and self.recompute.isdecimal()):
            return
        if int(self.recompute) % self.vp:
            raise ConfigError(
                f"recompute {self.recompute}: equally many layers of each of the {self.vp} "
                f"virtual stages of a rank; take a multiple of {self.vp}"
            )

    def _is_partial_recompute(self) -> bool:
        """Whether `recompute` is a number of layers, or names parts of a layer."""
        parts = self.recompute.split("+")
        is_number = re.fullmatch(r"[1-9]\d{0,3}", self.recompute) is not None
        return is_number or set(parts) <= set(MODULES)

    def _check_batch(self) -> None:
        """Raise `ConfigError` unless dp x micro-batch divides the batch."""
        at_once = f"dp x micro-batch, {self.dp} x {self.micro_batch}"
        if self.global_batch < self.dp * self.micro_batch:
            raise ConfigError(
                f"global batch {self.global_batch}: fewer sequences than {at_once}"
            )
        if self.global_batch % (self.dp * self.micro_batch):
            raise ConfigError(
                f"global batch: {self.global_batch} sequences are no multiple of {at_once}"
            )
        self._check_divides("cp", self.seq_len, f"{self.seq_len} tokens")

    def _check_divides(self, name: str, total: int, text: str) -> None:
        """Raise `ConfigError` unless a size divides a total, which the text describes."""
        size = getattr(self, name)
        if total % size:
            raise ConfigError(f"{name} {size} does not divide {text}")

    def _check_shape(self) -> None:
        """Raise `ConfigError` unless the parallelism divides the model."""
        model, tp = self.model, self.tp
        self._check_divides("tp", model.heads, f"the heads of {model.name}, {model.heads}")
        if model.experts is None or model.experts.dense_layers:
            width = f"the width of the MLP of {model.name}, {model.ffn}"
            self._check_divides("tp", model.ffn, width)
        if model.kv_heads % tp and tp % model.kv_heads:
            raise ConfigError(
                f"tp {tp} neither divides the {model.kv_heads} key and value heads of "
                f"{model.name}, nor is it a multiple of them"
            )
        if self.vp > 1 and self.pp == 1:
            raise ConfigError(f"vp {self.vp} takes a pipeline: pp is 1")
        if self.pp * self.vp > model.layers + 2:
            raise ConfigError(
                f"pp x vp is {self.pp * self.vp}: more stages than the {model.layers} "
                f"layers of {model.name}"
            )

    def _check_experts(self) -> None:
        """Raise `ConfigError` unless `ep` and `etp` divide the experts and their ranks."""
        experts, more = self.model.experts, self.dispatch.split()[1:]
        if not experts:
            return
        self._check_divides("ep", experts.number, f"the {experts.number} experts")
        self._check_divides("etp", experts.ffn, f"the width of an expert, {experts.ffn}")
        if self.replica_ranks % (self.ep * self.etp):
            raise ConfigError(
                f"ep x etp is {self.ep * self.etp}, which does not divide dp x cp x tp, "
                f"{self.replica_ranks}: the ranks of a pipeline stage"
            )
        if "overlapped" in more and self.pp > 1 and self.vp == 1 and not self.is_dualpipe:
            raise ConfigError(
                f"dispatch {self.dispatch} takes virtual stages in a pipeline: vp is 1"
            )
        if "overlapped" in more and self.ep == 1:
            raise ConfigError(
                f"dispatch {self.dispatch} takes ep above 1: nothing is exchanged"
            )
        if "overlapped" in more and (self.recomputed or "moe" in self.modules):
            raise ConfigError(
                f"dispatch {self.dispatch} excludes recompute of whole layers or of moe"
            )

    def _check_exchange(self) -> None:
        """Raise `ConfigError` for experts or a dispatcher that the model or trainer lacks."""
        if not self.model.experts:
            usual = {"ep": 1, "etp": 1, "dispatch": DISPATCHES[0], "routing": ROUTING[0]}
            for name, default in usual.items():
                if (value := getattr(self, name)) != default:
                    raise ConfigError(f"{name} {value}: {self.model.name} has no experts")
        kind = self.dispatch.split()[0]
        if kind not in self.trainer_rules.dispatches:
            raise ConfigError(f"dispatch {kind}: {self.trainer_rules.title} has none")
        if problem := self.dispatch_problem:
            raise ConfigError(f"dispatch {self.dispatch}: {problem}")

    def _check_trainer(self) -> None:
        """Raise `ConfigError` for parallelism or sharding that the trainer lacks."""
        rules = self.trainer_rules
        if rules.precisions and self.precision not in rules.precisions:
            raise ConfigError(
                f"precision {self.precision}: no recipe of {rules.title}; take one of "
                f"{', '.join(rules.precisions)}"
            )
        for name in rules.unsupported:
            if (size := getattr(self, name)) > 1:
                raise ConfigError(f"{name} {size}: {rules.title} has only {name} 1")
        if self.pp > 1 and self.sharding in rules.not_in_pipeline:
            raise ConfigError(
                f"sharding {self.sharding}: {rules.title} has none in a pipeline; "
                f"pp is {self.pp}"
            )

    def _check_sharding(self) -> None:
        """Raise `ConfigError` for an unknown sharding, or groups of unequal size."""
        if self.sharding in {"ddp", "zero1", "zero2", "zero3"}:
            return
        group = self.sharding.removeprefix("hsdp")
        if not (self.is_hybrid and group.isdecimal() and 0 < int(group) < 1 << 31):
            raise ConfigError(
                f"invalid sharding {self.sharding!r}: expected ddp, zero1, zero2, zero3, or "
                "hsdp and a number of ranks, as in hsdp8"
            )
        if (self.dp * self.cp) % int(group):
            raise ConfigError(
                f"sharding {self.sharding}: {group} does not divide dp x cp, "
                f"{self.dp * self.cp}"
            )


@lru_cache(maxsize=1 << 8)
def _joined(text: str) -> frozenset[str]:
    """Return the names that "+" joins."""
    return frozenset(filter(None, text.split("+")))


@lru_cache(maxsize=1 << 8)
def _modules(recompute: str) -> frozenset[str]:
    """Return the parts of a layer that are recomputed."""
    return _joined(recompute) & frozenset(MODULES)


def variant(plan: Plan, **changes: Any) -> Plan:
    """Return a plan with other values of some fields.

    Faster than `dataclasses.replace`, which also refuses names of no field.
    """
    result = object.__new__(Plan)
    vars(result).update(vars(plan), **changes)
    return result


def virtual_stages(plan: Plan) -> tuple[int, ...]:
    """Return the virtual stages that a rank can have: embedding and head may be layers."""
    if plan.pp == 1:
        return (1,)
    counts = [plan.model.layers + plan.model.mtp_layers + more for more in range(3)]
    return tuple(
        n for n in range(1, 13) if n == 1 or any(c % (plan.pp * n) == 0 for c in counts)
    )


@lru_cache(maxsize=1 << 12)
def stage_units(model: Model, pp: int, vp: int) -> tuple[str, ...]:
    """Return the units of each virtual stage, so that the slowest rank is as fast as possible.

    As Megatron-Core's layout of a pipeline has them: the embedding is E, a layer t, one that
    predicts a further token m, and the loss L. Units are spread evenly, or stages are full of
    layers but for the last one, as in NVIDIA's recipes of DeepSeek-V3.
    """
    layouts = (_even_units(model, pp * vp), _full_stages(model, pp * vp))
    return min(filter(None, layouts), key=lambda stages: _slowest_rank(model, pp, stages))


def _full_stages(model: Model, parts: int) -> tuple[str, ...]:
    """Return equally many layers of each virtual stage but the last; empty if it had none."""
    most = -(-model.layers // parts)
    rest = model.layers - most * (parts - 1)
    if rest < 1:
        return ()
    ends = "t" * rest + "m" * model.mtp_layers + "L"
    return ("E" + "t" * most, *("t" * most,) * (parts - 2), ends)


def _even_units(model: Model, parts: int) -> tuple[str, ...]:
    """Return as equally many units of each virtual stage as possible."""
    units = "E" + "t" * model.layers + "m" * model.mtp_layers + "L"
    return tuple(units[start:end] for start, end in pairwise(_even_cuts(len(units), parts)))


def _even_cuts(count: int, parts: int) -> list[int]:
    """Return the edges of parts that have as equally many units as possible."""
    return [count * place // parts for place in range(parts + 1)]


def _slowest_rank(model: Model, pp: int, stages: tuple[str, ...]) -> float:
    """Return the parameters that a token uses on the slowest rank, in layers.

    Each unit m and L has the logits of the whole vocabulary.
    """
    layer = (model.active - model.embedding * (1 if model.tied else 2)) / model.layers
    head = model.embedding / layer
    weights = {"E": 0.0, "t": 1.0, "m": 1.0, "L": head * (1 + model.mtp_layers)}
    loads = [sum(weights[unit] for unit in units) for units in stages]
    return max(_sums_of_ranks(loads, pp))


def _sums_of_ranks(values: Sequence[_Number], pp: int) -> list[_Number]:
    """Return the sum of each rank over its virtual stages, whose values are in order."""
    return [sum(values[rank::pp]) for rank in range(pp)]


def has_even_layout(plan: Plan) -> bool:
    """Whether a layout by units spreads layers evenly over ranks and their virtual stages.

    No rank has more layers than the fullest one must have. The longest virtual stage, for which
    others wait, is at most a tenth above the mean.
    """
    layers, parts = plan.model.layers + plan.model.mtp_layers, plan.pp * plan.vp
    counts = _even_layers(layers, parts)
    most = max(_sums_of_ranks(counts, plan.pp))
    return most <= -(-layers // plan.pp) and max(counts) <= _UNEVEN * layers / parts


def _even_layers(layers: int, parts: int) -> list[int]:
    """Return the number of layers of each virtual stage by `_even_units`."""
    # The first unit is the embedding, and the last one the loss.
    cuts = [min(max(cut - 1, 0), layers) for cut in _even_cuts(layers + 2, parts)]
    return [stop - start for start, stop in pairwise(cuts)]


@lru_cache(maxsize=1 << 12)
def _rank_layers(model: Model, pp: int, vp: int, *, has_layouts: bool) -> tuple[int, int]:
    """Return `Plan.rank_layers`."""
    count = model.layers + model.mtp_layers
    most = -(-count // pp)
    if pp > 1 and has_layouts and split_of(model, pp, vp) == "units":
        stages = stage_units(model, pp, vp)
        if stages == _full_stages(model, pp * vp):
            counts = [units.count("t") + units.count("m") for units in stages]
            *others, last = _sums_of_ranks(counts, pp)
            return max(others), last
    return most, max(0, count - (pp - 1) * most)


def split_of(model: Model, pp: int, vp: int) -> str:
    """Return how Megatron-Core splits layers into stages.

    "even", "loss" or "ends" (the loss, or also the embedding, count as layers), "last" (fewer
    layers of the last stage), or "units", by `stage_units`.
    """
    parts, layers = pp * vp, model.layers
    if layers % parts == 0:
        return "even"
    if not model.mtp_layers:
        for count, name in enumerate(("loss", "ends"), 1):
            if (layers + count) % parts == 0:
                return name
        if vp == 1 and layers > (pp - 1) * -(-layers // pp):
            return "last"
    return "units"


_SIZES = ("tp", "pp", "vp", "cp", "ep", "etp", "micro_batch")
_TEXTS = (
    *("sharding", "recompute", "precision", "dispatch", "gradients", "trainer", "graphs"),
    *("routing", "moments"),
)
_SWITCHES = ("overlap", "fused_experts", "fp8_attention")
_KEYS = (*_SIZES, *_TEXTS, *_SWITCHES, "year", "dp")


def with_strategy(plan: Plan, text: str) -> Plan:
    """Return the plan with the strategy of a text, "tp=8,pp=16,sharding=zero1".

    `dp` may be given and is compared with that of the plan. The result is checked.

    Raises
    ------
    ConfigError
        If a key is unknown or repeated, a value is invalid, or no trainer could run the plan.

    """
    values = strategy_values(text, "--strategy")
    replicas = values.pop("dp", None)
    result = with_values(plan, values, "--strategy")
    result.check()
    if replicas is not None and parse_quantity(replicas, "--strategy: dp") != result.dp:
        raise ConfigError(
            f"--strategy: dp {replicas} contradicts gpus / (tp x pp x cp), which is {result.dp}"
        )
    return result


def strategy_values(text: str, where: str) -> dict[str, str]:
    """Return the values of "tp=8,pp=4" by field; `where` begins the message of an error.

    Raises
    ------
    ConfigError
        If a key is unknown or given twice.

    """
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = part.partition("=")
        name = key.strip().replace("-", "_")
        if not separator or name not in _KEYS:
            keys = ", ".join(_KEYS).replace("_", "-")
            raise ConfigError(f"{where}: invalid {part!r}: expected KEY=VALUE with {keys}")
        if name in values:
            raise ConfigError(f"{where}: {key.strip()} is given twice")
        values[name] = value.strip().lower()
    return values


def with_values(plan: Plan, values: Mapping[str, str], where: str) -> Plan:
    """Return the plan with some fields replaced; other names in `values` are ignored.

    `values` has texts by field, such as ``{"tp": "8"}``, and `where` begins the message of the
    `ConfigError` that an invalid one raises.
    """
    changes: dict[str, object] = {}
    for name, value in values.items():
        if name in _SIZES:
            changes[name] = parse_quantity(value, f"{where}: {name}", RANKS.most)
        elif name in _SWITCHES:
            changes[name] = parse_switch(value, f"{where}: {name}")
        elif name == "year":
            changes[name] = parse_date(value, f"{where}: year")
        elif name == "dispatch":
            changes[name] = value.replace("+", " ")
        else:
            changes[name] = value
    return replace(plan, **changes)  # type: ignore[arg-type]


def parse_switch(text: str, where: str) -> bool:
    """Return whether a switch of a strategy is on; `where` begins the message of an error."""
    answers = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if text not in answers:
        raise invalid_value(where, text, "yes or no")
    return answers[text]


def parse_date(text: str, where: str) -> float:
    """Return the year of a date, "2024" or "2024-07"; the middle of the year or month."""
    match = re.fullmatch(r"(\d{4})(?:-(0[1-9]|1[0-2])(?:-\d\d)?)?", text.strip())
    if not match or not _YEARS[0] < int(match[1]) < _YEARS[1]:
        raise invalid_value(where, text, "a year or a month, as in 2024 or 2024-07")
    return int(match[1]) + ((int(match[2]) - 0.5) / 12 if match[2] else 0.5)


def date_text(year: float) -> str:
    """Return a year as `parse_date` takes it: of a stack, to the month."""
    whole, part = divmod(year, 1)
    return f"{whole:.0f}" if part == 0.5 else f"{whole:.0f}-{int(part * 12) + 1:02}"  # noqa: PLR2004


_SEQ_LEN = 8192
_MOST_SEQUENCES = 1 << 20  # of a step; more are probably tokens
_EXAMPLES = {"model": "llama3-70b", "world_size": "256", "global_batch": "512"}


def measured_cluster(options: JobOptions) -> Cluster:
    """Return the cluster of the options. Raises `ConfigError` if its GPU is not measured."""
    cluster = load_cluster(options.cluster or "dgx-h100")
    if not cluster.gpu:
        names = ", ".join(name for name in shipped() if load_cluster(name).gpu)
        raise ConfigError(
            f"--cluster {options.cluster}: no measured GPU; take {names}, or add the key gpu "
            "to your file"
        )
    return cluster


def job_of(
    options: JobOptions,
    cluster: Cluster,
    models: Mapping[str, Model] | None = None,
    usable: float = 1.0,
) -> Plan:
    """Return the job that options describe, with the default strategy.

    Parameters
    ----------
    options
        Model, GPUs and batch.
    cluster
        The cluster that they name.
    models
        Models by name, besides the presets.
    usable
        Share of a GPU's memory that a strategy may need, if the options have no limit.

    Raises
    ------
    ConfigError
        If an option is missing or invalid.

    """
    missing = {name: text for name, text in _EXAMPLES.items() if getattr(options, name) is None}
    if missing:
        shown = {option_name(name): text for name, text in missing.items()}
        example = " ".join(f"{name} {text}" for name, text in shown.items())
        raise ConfigError(f"missing {', '.join(shown)}; for example: {example}")
    name, batch = str(options.model), parse_quantity(str(options.global_batch), "global batch")
    if batch > _MOST_SEQUENCES:
        expected = f"at most {_MOST_SEQUENCES} sequences; tokens are not counted"
        raise invalid("global batch", repr(str(options.global_batch)), expected)
    model = (models or {}).get(name) or load_model(name)
    return Plan.on(
        cluster,
        model=model if options.vocab is None else replace(model, vocab=int(options.vocab)),
        gpus=parse_quantity(str(options.world_size), "world size", RANKS.most),
        global_batch=batch,
        seq_len=int(options.seq_len or _SEQ_LEN),
        memory=memory_limit(options) or usable * cluster.memory,
        exchange_costs=_exchange_costs(options, model, cluster),
    )


def _exchange_costs(options: JobOptions, model: Model, cluster: Cluster) -> FittedCosts | None:
    """Return the constants that options name; ConfigError if no plan of the model has them."""
    if options.exchange_costs is None:
        return None
    if model.experts is None:
        raise ConfigError(f"--exchange-costs has no effect: {model.name} has no experts")
    fitted = read_fitted(Path(options.exchange_costs))
    fitted.families(cluster.gpu)
    return fitted
