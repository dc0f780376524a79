"""The expert all-to-all of a model on a cluster: measured kernels beside simulated schedules.

A *layer* is a dispatch and a combine. A *step* is the forward and the backward pass of all
layers with experts, for the tokens of one micro-batch. Times are in seconds, sizes in bytes.
Bounds are those of links at the rates of data sheets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from fastcomm.dispatch.analysis import terms_for
from fastcomm.dispatch.options import DispatchOptions, ModelOptions, WorkloadOptions
from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.schedules import STRATEGIES, Strategy
from fastcomm.dispatch.simulation import NS, Simulation, simulate
from fastcomm.dispatch.traffic import Bounds, Traffic, bounds, busiest_proxy, largest_sum
from fastcomm.dispatch.workload import Workload
from fastcomm.errors import ConfigError
from fastcomm.hardware import clusters
from fastcomm.hardware.clusters import Cluster, GpuLinks, check_gpu
from fastcomm.hardware.expert_exchange import (
    FAMILIES,
    LIMITS,
    PHASES,
    CostKey,
    ExchangeCosts,
    ExchangeFamily,
    ExchangePhase,
    ExchangeShape,
    PhaseTime,
    Precision,
    Scope,
    check_sms,
    exchange_time,
    token_bytes,
)
from fastcomm.hardware.fitted_exchange import read_fitted
from fastcomm.models import Experts, Model
from fastcomm.models import load as load_model
from fastcomm.result import Result
from fastcomm.units import format_s
from fastcomm_kernels.arrays import Matrix

_CLUSTER = "dgx-h100"
_PASSES = 2  # the backward pass has a dispatch and a combine of gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPhase:
    """One phase of a layer by one kernel family."""

    seconds: float  # of the kernel
    notify_s: float  # wait for the counts of tokens, before it
    limit: str  # the busiest of `LIMITS`
    bound_s: float  # lower bound of all schedules for its bytes
    bytes_per_s: float  # as DeepEP counts: of a GPU, with copies that stay on its own node

    @property
    def total_s(self) -> float:
        """Seconds with the wait."""
        return self.seconds + self.notify_s

    def to_dict(self) -> dict[str, Any]:
        """Return the phase as a JSON object."""
        return {
            "latency_ns": self.seconds * NS,
            "notify_ns": self.notify_s * NS,
            "limit": self.limit,
            "optimal_ns": self.bound_s * NS,
            "bandwidth_bytes_per_s": self.bytes_per_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Predicted times of one kernel family."""

    family: str
    dispatch_precision: Precision
    measured_on: str  # GPU whose measurements the constants are fitted to
    extrapolated: str  # sizes outside of the measurements; empty if there are none
    is_calibrated: bool  # with constants of --exchange-costs
    layers: int  # with experts
    phases: Mapping[ExchangePhase, KernelPhase]

    @property
    def layer_s(self) -> float:
        """Seconds of dispatch and combine of one layer."""
        return sum(phase.total_s for phase in self.phases.values())

    @property
    def forward_s(self) -> float:
        """Seconds of the forward pass of all layers."""
        return self.layers * self.layer_s

    @property
    def step_s(self) -> float | None:
        """Seconds of both passes of all layers; None for kernels of inference."""
        return _PASSES * self.forward_s if FAMILIES[self.family].trains else None

    @property
    def times_optimal(self) -> float:
        """Time of a layer over the lower bound of its bytes."""
        bound = sum(phase.bound_s for phase in self.phases.values())
        return self.layer_s / bound if bound else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the family as a JSON object."""
        step = self.step_s
        return {
            "family": self.family,
            "dispatch_precision": self.dispatch_precision,
            "measured_on": self.measured_on,
            "extrapolated": self.extrapolated or None,
            "is_calibrated": self.is_calibrated,
            **{phase: self.phases[phase].to_dict() for phase in PHASES},
            "layer_ns": self.layer_s * NS,
            "forward_ns": self.forward_s * NS,
            "step_ns": None if step is None else step * NS,
            "times_optimal": self.times_optimal,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayer:
    """A layer of experts of a model, spread over the GPUs of a cluster."""

    model: str
    cluster: str
    gpu: str
    tokens_per_gpu: int
    ranks: int  # over which the experts are spread
    domains: int  # with NVLink between their ranks
    hidden: int
    topk: int
    experts: int
    layers: int  # with experts

    def to_dict(self) -> dict[str, Any]:
        """Return the layer as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelExchange(Result):
    """Kernel families and schedules for the expert all-to-all of a model."""

    has_long_tables: ClassVar[bool] = True  # a row a rank

    layer: ModelLayer
    kernels: tuple[KernelTime, ...]  # the fastest first
    unpriced: dict[str, str]  # families without constants or on another GPU, and the reason
    fullest: float  # tokens of the fullest rank over the mean
    bound_limit: str | None  # links that determine the lower bound; None if nothing is sent
    copies: Matrix  # GPU by GPU: (token, expert) pairs
    simulation: Simulation

    @property
    def fastest(self) -> KernelTime | None:
        """Fastest kernel family; None if none is priced."""
        return self.kernels[0] if self.kernels else None

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {
            "layer": self.layer.to_dict(),
            "kernels": [one.to_dict() for one in self.kernels],
            "unpriced": self.unpriced,
            "fullest_rank": self.fullest,
            "bound_limit": self.bound_limit,
            "rank_pair_tokens": self.copies.tolist(),
            "schedules": self.simulation.contents(),
        }

    def extrapolated(self) -> list[str]:
        """Return a line for each family whose shape lies outside of its measurements."""
        return [
            f"{one.family}: extrapolated ({one.extrapolated})"
            for one in self.kernels
            if one.extrapolated
        ]

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return a row per kernel family and phase, and one per schedule; times in ns."""
        rows = [
            {
                "family": one.family,
                "dispatch_precision": one.dispatch_precision,
                "measured_on": one.measured_on,
                "extrapolated": one.extrapolated or None,
                "phase": phase,
                **one.phases[phase].to_dict(),
                "layer_ns": one.layer_s * NS,
                "step_ns": None if one.step_s is None else one.step_s * NS,
            }
            for one in self.kernels
            for phase in PHASES
        ]
        kernels = pa.Table.from_pylist(rows)
        return {"dispatch": kernels, "schedules": self.simulation.to_arrow()}

    def figures(self) -> dict[str, str]:
        """Return the model, and the time of a layer of each kernel family, fastest first."""
        return {"model": self.layer.model} | {
            one.family: format_s(one.layer_s) for one in self.kernels
        }


def compare_kernels(
    options: ModelOptions,
    shape: WorkloadOptions,
    network: DispatchOptions,
    schedules: Sequence[str] = tuple(STRATEGIES),
    available: Mapping[str, Strategy] = STRATEGIES,
) -> ModelExchange:
    """Time the expert all-to-all of a model by kernel family, and simulate schedules for it.

    Parameters
    ----------
    options
        The model, its tokens, and the ranks that share its experts.
    shape
        How tokens are routed; the model and the cluster determine sizes.
    network
        The cluster, and what replaces its links.
    schedules
        Names of schedules, keys of `available`.
    available
        Schedules by name.

    Raises
    ------
    ConfigError
        If the model has no experts, they cannot be spread over the ranks, or an option is
        wrong.

    """
    name = network.cluster or _CLUSTER
    cluster, model = clusters.load(name), load_model(str(options.model))
    experts = _experts(model, options)
    layer = _layer(options, model, experts, cluster)
    check_sms(options.sms, cluster.gpu, "sms")
    fitted = _fitted(options, layer)
    workload = Workload.of(_recipe(layer, experts, shape))
    dispatched = options.dispatch_precision or "fp8"
    terms = terms_for(
        workload.recipe,
        replace(
            network,
            cluster=None,
            token_bytes=network.token_bytes or _size(layer, dispatched),
            combine_bytes=network.combine_bytes or _size(layer, "bf16"),
        ),
        clusters.rated_links(name, clusters.load_node(name)[1]),
    )
    tokens = next(workload.layers())
    traffic = Traffic.of(tokens)
    drawn = replace(workload, is_drawn=False, arrays=((tokens.src, tokens.expert),))
    exchange = _shape(layer, workload.recipe, options.sms)
    precision = options.dispatch_precision
    kernels, unpriced = _kernels(layer, exchange, traffic, (terms.links, precision), fitted)
    return ModelExchange(
        layer=layer,
        kernels=kernels,
        unpriced=unpriced,
        fullest=_fullest(traffic.copies),
        bound_limit=_bound_limit(bounds(traffic, terms.links, 1)),
        copies=traffic.copies,
        simulation=simulate(drawn, schedules, terms, available=available, lenient=True),
    )


def _fitted(options: ModelOptions, layer: ModelLayer) -> Mapping[CostKey, ExchangeCosts]:
    """Return fitted constants; ConfigError if the layer's GPU has none of them."""
    if options.exchange_costs is None:
        return {}
    fitted = read_fitted(Path(options.exchange_costs))
    fitted.families(layer.gpu)
    return fitted.costs


def _experts(model: Model, options: ModelOptions) -> Experts:
    """Return the experts of a model; ConfigError if they cannot be spread over the ranks."""
    experts, ranks = model.experts, options.ep
    if experts is None:
        raise ConfigError(f"model {model.name}: it has no experts, so nothing is dispatched")
    if ranks is None:
        raise ConfigError("--model needs --ep: the number of GPUs that share the experts")
    if experts.number % ranks:
        raise ConfigError(
            f"ep {ranks}: the {experts.number} experts of {model.name} cannot be spread evenly "
            f"over {ranks} ranks"
        )
    return experts


def _layer(
    options: ModelOptions, model: Model, experts: Experts, cluster: Cluster
) -> ModelLayer:
    """Return the layer; ConfigError if the ranks do not fill nodes of the cluster."""
    check_gpu(cluster, cluster.name)
    ranks = options.ep or 1
    if ranks > cluster.gpus_per_node and ranks % cluster.gpus_per_node:
        raise ConfigError(
            f"ep {ranks}: expected a multiple of the {cluster.gpus_per_node} GPUs that a node "
            f"of {cluster.name} has, or fewer"
        )
    return ModelLayer(
        model=model.name,
        cluster=cluster.name,
        gpu=cluster.gpu,
        tokens_per_gpu=options.tokens_per_gpu,
        ranks=ranks,
        domains=max(1, ranks // cluster.gpus_per_node),
        hidden=model.hidden,
        topk=experts.top_k,
        experts=experts.number,
        layers=model.layers - experts.dense_layers,
    )


def _recipe(layer: ModelLayer, experts: Experts, shape: WorkloadOptions) -> Recipe:
    """Return the recipe of one layer; its routing is that of `shape`, else of the model."""
    groups, top_groups = experts.gate(layer.domains)
    law = "uniform" if groups == 1 else "gate"
    sizes = {
        "num_nodes": layer.domains,
        "gpus_per_node": layer.ranks // layer.domains,
        "experts_per_gpu": layer.experts // layer.ranks,
        "seq_len": layer.tokens_per_gpu,
        "batch_size": layer.ranks,
        "embed_size": layer.hidden,
        "topk": layer.topk,
        "num_layers": 1,
        "iter_num": 1,
        "dtype": "bfloat16",
    }
    routing = shape.recipe_values()
    if "zipf_alpha" in routing:
        law = "zipf"
    values = {"law": law, **routing, **sizes}
    if values["law"] == "gate" and groups > 1 and "expert_groups" not in routing:
        values = {"expert_groups": groups, "top_groups": top_groups, **values}
    return Recipe.of(**values)


def _shape(layer: ModelLayer, recipe: Recipe, sms: int | None) -> ExchangeShape:
    """Return what is exchanged, with a rank's even share of tokens.

    A token is limited to some domains only if the routing of `recipe` limits it.
    """
    groups, top_groups = recipe.gate
    return ExchangeShape(
        tokens=layer.tokens_per_gpu,
        hidden=layer.hidden,
        topk=layer.topk,
        experts=layer.experts,
        ranks=layer.ranks,
        domain=layer.ranks // layer.domains,
        sms=sms,
        groups=groups,
        top_groups=top_groups,
    )


def _skewed(shape: ExchangeShape, kind: ExchangeFamily, traffic: Traffic) -> ExchangeShape:
    """Return the shape with the fullest rank and the busiest NIC of the traffic.

    Both are relative to the means of an even routing, which `shape` has.
    """
    if kind.copies:
        rows, received = float(shape.topk), traffic.copies
        leaving = float(largest_sum(traffic.remote("copies")))
    else:
        rows, received = float(shape.ranks_of_token()), traffic.unique
        leaving = busiest_proxy(traffic)
    far = float(shape.far_copies(copies=kind.copies))
    tokens = float(shape.tokens)
    return replace(
        shape,
        fullest=float(received.sum(axis=0).max()) / (tokens * rows),
        busiest_nic=leaving / (tokens * far) if far else 1.0,
    )


def _size(layer: ModelLayer, precision: Precision) -> int:
    return round(float(token_bytes(layer.hidden, precision)))


def _fullest(received: Matrix) -> float:
    """Return what the fullest rank receives over the mean; `received` is from and to ranks."""
    by_rank = received.sum(axis=0)
    return float(by_rank.max() / by_rank.mean()) if by_rank.any() else 1.0


def _bound_limit(limits: Bounds) -> str | None:
    """Return the links that determine the lower bound of all schedules, if any are used."""
    times = {
        "NICs of the busiest node": limits.multicast_s,
        "links of the busiest GPU": limits.gpu_s,
        "links of the busiest node": limits.joint_s,
    }
    return max(times, key=lambda name: times[name]) if any(times.values()) else None


def _kernels(
    layer: ModelLayer,
    shape: ExchangeShape,
    traffic: Traffic,
    terms: tuple[GpuLinks, Precision | None],
    fitted: Mapping[CostKey, ExchangeCosts],
) -> tuple[tuple[KernelTime, ...], dict[str, str]]:
    """Return the times of kernel families, the fastest first, and why others have none.

    `terms` are the links, and the precision of dispatch. `fitted` are constants in place of the
    shipped ones.
    """
    links, precision = terms
    if layer.ranks == 1:
        return (), {family: f"{family}: nothing is sent" for family in FAMILIES}
    token_s = bounds(traffic, links, 1).optimal_s
    scope: Scope = "inside" if layer.domains == 1 else "across"
    priced, unpriced = [], {}
    for family, kind in FAMILIES.items():
        own = _skewed(shape, kind, traffic)
        try:
            time = exchange_time(
                layer.gpu, family, own, nic=links.inter, precision=precision, fitted=fitted
            )
        except ConfigError as error:
            unpriced[family] = str(error)
            continue
        if reason := kind.unsupported(layer.gpu, precision):
            unpriced[family] = f"{family}: {reason}"
            continue
        counted = layer.tokens_per_gpu * counted_copies(kind, shape)
        sizes = _size(layer, precision or kind.precision), _size(layer, "bf16")
        priced.append(
            KernelTime(
                family=family,
                dispatch_precision=precision or kind.precision,
                measured_on=time.measured_on,
                extrapolated=time.extrapolated or "",
                is_calibrated=any(
                    (family, layer.gpu, scope, phase) in fitted for phase in PHASES
                ),
                layers=layer.layers,
                phases={
                    "dispatch": _phase(time.dispatch, sizes[0], token_s, counted),
                    "combine": _phase(time.combine, sizes[1], token_s, counted),
                },
            )
        )
    return tuple(sorted(priced, key=lambda one: one.layer_s)), unpriced


def _phase(time: PhaseTime, size: int, token_s: float, copies: float) -> KernelPhase:
    """Return a phase of tokens of `size` bytes.

    `token_s` is the lower bound for tokens of one byte, and `copies` are those that its
    bandwidth counts.
    """
    seconds = float(time.seconds)
    return KernelPhase(
        seconds=seconds,
        notify_s=float(time.notify_s),
        limit=LIMITS[int(np.argmax(time.limit_s))],
        bound_s=token_s * size,
        bytes_per_s=copies * size / seconds,
    )


def counted_copies(kind: ExchangeFamily, shape: ExchangeShape) -> float:
    """Return the copies of a token that DeepEP's bandwidths count, its own node's included.

    Those are one per node of the token's experts, one per rank inside a single node, and one
    per expert for kernels that send each of them a copy.
    """
    if kind.copies:
        return float(shape.topk)
    is_inside = float(shape.domains()) <= 1
    return float(shape.ranks_of_token() if is_inside else shape.domains_of_token())
