"""Search of the strategies of a trainer: every plan that it could run, ranked by throughput."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Self

from fastcomm.errors import ConfigError
from fastcomm.hardware.gpus import Gpu, gpu
from fastcomm.isp.space import divisors
from fastcomm.planning.constants import Constants
from fastcomm.planning.expected import equal_steps, expected_error
from fastcomm.planning.job import (
    ROUTING,
    Plan,
    has_even_layout,
    job_of,
    measured_cluster,
    strategy_values,
    variant,
    virtual_stages,
    with_values,
)
from fastcomm.planning.launch import (
    LaunchRefusal,
    launch_fastest,
    needs_environment,
    needs_newer,
)
from fastcomm.planning.options import PlanOptions
from fastcomm.planning.price import PlanPrice, price_plan, priced
from fastcomm.planning.result import PriceResult, note_on, strategy_text, summary
from fastcomm.planning.trainers import DEFAULT, TRAINERS, Trainer
from fastcomm.result import TableResult
from fastcomm.units import format_gib, format_s, plural

if TYPE_CHECKING:
    import pyarrow as pa

# Most plans of one search, which takes about a minute.
MOST = 300_000
_MICRO_BATCHES = (1, 2, 4, 8)
# Tokens of a sequence on a rank that context parallelism leaves, as in published runs.
_LEAST_TOKENS = 4096
_MOST_TENSOR = 16
_MOST_VIRTUAL = 12  # stages of a rank
_NODE = 8  # most GPUs of a node
# Share of a GPU's memory that a strategy may need: the rest is for fragmentation, and the error
# of the prediction.
_USABLE = 0.96


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan that fits, with its step time (s) and memory (bytes)."""

    plan: Plan
    step_s: float
    memory_bytes: float

    @property
    def layout(self) -> tuple[int, ...]:
        """Sizes of parallelism: plans that differ elsewhere are variants of one layout."""
        plan = self.plan
        return plan.tp, plan.pp, plan.cp, plan.ep


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanSearch(TableResult):
    """The plans of a search that fit, fastest first, and how many did not.

    `layouts` has the fastest plan of each layout.
    """

    job: Plan  # with the default strategy
    plans: tuple[RankedPlan, ...]
    candidates: int
    least_memory: float | None  # bytes of the smallest candidate; None without candidates
    constants: Constants
    note: str = ""
    top: int | None = 6  # most layouts of the JSON document
    launch: str | None = None  # arguments of a trainer for the fastest plan that has some
    refusals: tuple[LaunchRefusal, ...] = ()  # why faster plans have none
    refusal: str = ""  # without candidates: why most layouts are refused

    @cached_property
    def layouts(self) -> list[RankedPlan]:
        """The fastest plan of each layout, fastest first."""
        fastest: dict[tuple[int, ...], RankedPlan] = {}
        for row in self.plans:
            fastest.setdefault(row.layout, row)
        return list(fastest.values())

    @property
    def equal(self) -> int:
        """Number of layouts that may be as fast as the fastest, by the error to expect."""
        rows = self.layouts
        return sum(row.step_s <= equal_steps(row.plan, rows[0].step_s) for row in rows)

    def prices(self, top: int | None) -> list[PlanPrice]:
        """Return the prices of the `top` fastest layouts, term by term."""
        return [price_plan(row.plan, self.constants) for row in self.layouts[:top]]

    def explained(self, place: int) -> PriceResult:
        """Return the price of the fastest strategy of a layout; `place` counts from 0."""
        price = price_plan(self.layouts[place].plan, self.constants)
        return PriceResult(price=price, note=self.note, constants=self.constants)

    def launched(self, name: str) -> Self:
        """Return the result with the arguments of a trainer for the fastest plan that has some.

        Raises `ConfigError` if none has; `name` is "megatron" or "torchtitan".
        """
        arguments, refusals = launch_fastest(name, (row.plan for row in self.plans))
        return replace(self, launch=arguments, refusals=tuple(refusals))

    def passed_over(self) -> list[str]:
        """Return why `launch` is not that of the fastest plan, a sentence each."""
        return [
            f"{row.strategies} faster {plural(row.strategies, 'strategy')} cannot be "
            f"launched, first {strategy_text(row.plan)}: {row.reason}"
            for row in self.refusals
        ]

    def launch_needs(self) -> list[str]:
        """Return which newer trainer and which environment `launch` takes, a sentence each."""
        if not self.launch:
            return []
        chip, newer = gpu(self.job.gpu), needs_newer(self.launch)
        return [*filter(None, [newer]), *needs_environment(self.launch, chip)]

    def nearest(self) -> str:
        """Explain why no strategy fits, and what would help."""
        if self.least_memory is None:
            job = self.job
            text = (
                f"no strategy of {job.trainer_rules.title}: no layout divides {job.gpus} GPUs, "
                f"{job.global_batch} sequences and {job.model.name}; try another "
                "number of sequences or GPUs, or fix less"
            )
            return f"{text}; most are refused: {self.refusal}" if self.refusal else text
        need = format_gib(self.least_memory)
        return f"no strategy fits into memory: the smallest needs {need}"

    def contents(self) -> dict[str, Any]:
        """Return the JSON document."""
        job = self.job
        return {
            "trainer": job.trainer,
            "model": job.model.name,
            "gpu": gpu(job.gpu).name,
            "gpus": job.gpus,
            "global_batch_sequences": job.global_batch,
            "seq_len": job.seq_len,
            "precision": job.precision,
            "candidates": self.candidates,
            "feasible": len(self.plans),
            "least_memory_bytes": self.least_memory,
            "equal_layouts": self.equal,
            "layouts": [self._row(price) for price in self.prices(self.top)],
            "note": self.note,
            "launch": self.launch,
            "launch_needs": self.launch_needs(),
            "passed_over": self.passed_over(),
        }

    @staticmethod
    def _row(price: PlanPrice) -> dict[str, Any]:
        """Return a price as a JSON object."""
        name, share = bottleneck(price)
        return {
            **summary(price),
            "bottleneck": name,
            "bottleneck_share": share,
            "expected_error": asdict(expected_error(price)),
        }

    def to_arrow(self) -> "pa.Table":
        """Return all plans that fit as a table, one a row."""
        import pyarrow as pa

        sizes = ("tp", "pp", "vp", "cp", "ep", "etp", "dp", "micro_batch")
        names = (*sizes, "sharding", "recompute", "precision", "dispatch", "graphs")
        columns: dict[str, list[Any]] = {
            name: [getattr(row.plan, name) for row in self.plans] for name in names
        }
        tokens = self.job.global_batch * self.job.seq_len / self.job.gpus
        columns["step_ns"] = [row.step_s * 1e9 for row in self.plans]
        columns["tokens_per_s_per_gpu"] = [tokens / row.step_s for row in self.plans]
        columns["memory_bytes"] = [row.memory_bytes for row in self.plans]
        return pa.table(columns)

    def figures(self) -> dict[str, str]:
        """Return the key figures."""
        figures = {"strategies": str(len(self.plans))}
        if self.plans:
            figures["fastest step"] = format_s(self.plans[0].step_s)
        return figures


_USEFUL = ("GEMM", "attention", "experts", "output head")


def bottleneck(price: PlanPrice) -> tuple[str, float]:
    """Return the longest term besides products and attention, and its share of the step.

    Returns the longest of these if nothing else takes time.
    """
    total, *terms = price.time
    losses = [term for term in terms if term.name not in _USEFUL] or terms
    longest = max(losses, key=lambda term: term.value)
    return longest.name, longest.value / total.value


def search_plans(options: PlanOptions) -> PlanSearch:
    """Search the strategies of a trainer, as `fastcomm plan` does.

    Raises
    ------
    ConfigError
        If an option is missing or invalid.

    """
    cluster = measured_cluster(options)
    values = _fixed(options)
    trainer = TRAINERS.get(values.get("trainer", options.trainer), TRAINERS[DEFAULT])
    job = replace(
        job_of(options, cluster, usable=_USABLE),
        trainer=options.trainer,
        precision=_precision(options.precision, gpu(cluster.gpu), trainer),
        routing=options.routing or ROUTING[0],
    )
    base = with_values(job, values, "--fix")
    base.check_values()
    base.check_methods()
    result = rank(job, values, Constants())
    return replace(result, note=note_on(job, cluster, _fitted_note(job)))


def _fitted_note(job: Plan) -> str:
    """Return which plans have constants of their exchange of experts that were fitted."""
    if (fitted := job.exchange_costs) is None:
        return ""
    return fitted.note(fitted.families(job.gpu))


def _fixed(options: PlanOptions) -> dict[str, str]:
    """Return the values of `--fix`. Raises `ConfigError` if another option contradicts one."""
    values = strategy_values(options.fix or "", "--fix")
    if "dp" in values:
        raise ConfigError("--fix dp: it follows from the GPUs; fix tp, pp and cp")
    trainer = None if options.trainer == DEFAULT else options.trainer
    options_of = {
        "trainer": trainer,
        "precision": options.precision,
        "routing": options.routing,
    }
    for name, value in options_of.items():
        if value is not None and values.get(name, value) != value:
            raise ConfigError(f"--fix {name}: --{name} says {value}; drop one of them")
    return values


def _precision(text: str | None, chip: Gpu, trainer: Trainer) -> str:
    """Return the precision of a plan; "fp8" is the usual recipe of the GPU and trainer."""
    if text != "fp8":
        return text or "bf16"
    usual = ("mxfp8",) if chip.has_mx else ("fp8_cs", "fp8_titan")
    return next((name for name in usual if name in trainer.precisions), usual[0])


def candidates(job: Plan, fixed: Mapping[str, str]) -> Iterator[Plan]:
    """Yield every plan of a job that its trainer could run.

    Parameters
    ----------
    job
        Model, GPUs, batch and trainer.
    fixed
        Values of a strategy by field that all plans have, as `with_values` takes them.

    """
    base = with_values(job, fixed, "--fix")
    base.check_values()
    for layout in _layouts(base, fixed):
        if _is_valid(layout):
            yield from _methods(layout, fixed)


def _values(
    plan: Plan, name: str, fixed: Mapping[str, str], values: Iterable[Any]
) -> list[Any]:
    """Return the values to try of a field: its own if fixed, and 1 if the trainer lacks it."""
    if name in fixed:
        return [getattr(plan, name)]
    return [1] if name in plan.trainer_rules.unsupported else list(values)


def _layouts(base: Plan, fixed: Mapping[str, str]) -> Iterator[Plan]:
    """Yield plans with every size of tensor, pipeline, context and expert parallelism."""
    powers = [1 << n for n in range(20)]
    choices = {
        "tp": [n for n in powers if n <= min(base.domain, _MOST_TENSOR)],
        "pp": [n for n in divisors(base.gpus) if n <= base.model.layers],
        "cp": [n for n in powers if n == 1 or base.seq_len // n >= _LEAST_TOKENS],
    }
    sizes = {name: _values(base, name, fixed, n) for name, n in choices.items()}
    stages = {
        pp: _values(base, "vp", fixed, _virtual_stages(variant(base, pp=pp)))
        for pp in sizes["pp"]
    }
    for tp, pp, cp in product(*sizes.values()):
        if base.gpus % (tp * pp * cp) == 0:
            for vp in stages[pp]:
                yield from _spread(variant(base, tp=tp, pp=pp, cp=cp, vp=vp), fixed)


def _virtual_stages(plan: Plan) -> list[int]:
    """Return the virtual stages to try: also more, where Megatron-Core's layouts are even.

    Fewer than divide the layers would only lengthen the bubble.
    """
    counts = virtual_stages(plan)
    has_more = plan.pp > 1 and plan.trainer_rules.has_layouts
    more = range(max(counts) + 1, _MOST_VIRTUAL + 1) if has_more else ()
    return [*counts, *(n for n in more if has_even_layout(variant(plan, vp=n)))]


def _spread(plan: Plan, fixed: Mapping[str, str]) -> Iterator[Plan]:
    """Yield a plan with every way to spread its experts."""
    experts = plan.model.experts
    if experts is None:
        yield plan
        return
    ranks = plan.replica_ranks
    for etp in _values(plan, "etp", fixed, {1, plan.tp}):
        degrees = [n for n in divisors(experts.number) if ranks % (n * etp) == 0]
        for ep in _values(plan, "ep", fixed, degrees):
            sized = variant(plan, etp=etp, ep=ep)
            for dispatch in _values(plan, "dispatch", fixed, _dispatches(sized)):
                fused = _values(plan, "fused_experts", fixed, [_can_fuse(plan)])[0]
                yield variant(sized, dispatch=dispatch, fused_experts=bool(fused))


def _can_fuse(plan: Plan) -> bool:
    """Whether the trainer has fused experts, which are always faster."""
    return plan.precision == "mxfp8" and plan.trainer_rules.has_graphs


def _dispatches(plan: Plan) -> list[str]:
    """Return the ways to exchange tokens to try; one micro-batch hides another's exchange."""
    if plan.ep <= 1:
        return ["alltoall"]
    # Megatron-Core overlaps two micro-batches of a rank: a pipeline needs virtual stages.
    can_overlap = plan.trainer_rules.has_graphs and (plan.pp == 1 or plan.vp > 1)
    # HybridEP is made for NVLink domains of many nodes, and for graphs of a whole step.
    is_hybrid = plan.domain > _NODE or "full" in plan.graph_parts
    kinds = ["alltoall", "hybridep" if is_hybrid else "deepep"]
    able = [
        kind
        for kind in kinds
        if kind in plan.trainer_rules.dispatches
        and not variant(plan, dispatch=kind).dispatch_problem
    ]
    return [*able, *([f"{able[-1]} overlapped"] if can_overlap else [])]


def _methods(layout: Plan, fixed: Mapping[str, str]) -> Iterator[Plan]:
    """Yield a layout with every micro-batch, recompute and sharding."""
    whole = layout.dp * layout.cp
    sharding = list(layout.trainer_rules.sharding)
    if "zero3" in sharding and whole > layout.domain and whole % layout.domain == 0:
        sharding.append(f"hsdp{layout.domain}")
    if whole == 1:
        del sharding[1:]
    choices = {
        "micro_batch": _MICRO_BATCHES,
        "recompute": _recompute(layout),
        "sharding": sharding,
    }
    tried = {name: _values(layout, name, fixed, values) for name, values in choices.items()}
    graphs = _values(layout, "graphs", fixed, _graphs(layout))
    able = {recompute: _captured(layout, recompute, graphs) for recompute in tried["recompute"]}
    for micro, recompute, shards in product(*tried.values()):
        num, rest = divmod(layout.global_batch, layout.dp * micro)
        is_full = num >= layout.pp and (layout.vp == 1 or num % layout.pp == 0)
        # DeepSpeed's pipeline takes no sharded gradients.
        is_known = layout.trainer != "deepspeed" or layout.pp == 1 or shards == "zero1"
        if is_full and is_known and not rest:
            plan = variant(layout, micro_batch=micro, recompute=recompute, sharding=shards)
            graphed = able[recompute]
            yield from (variant(plan, graphs=parts) if parts else plan for parts in graphed)


def _captured(layout: Plan, recompute: str, graphs: Iterable[str]) -> list[str]:
    """Return the CUDA graphs that can hold layers with this recompute."""
    return [
        parts
        for parts in graphs
        if not (parts and variant(layout, recompute=recompute, graphs=parts).graph_problem)
    ]


def _graphs(layout: Plan) -> tuple[str, ...]:
    """Return the CUDA graphs to try: with experts, of the parts before token counts.

    Also that of a whole step, if HybridEP and fused experts keep token counts on the GPU.
    """
    if layout.model.experts is None or not layout.trainer_rules.has_graphs:
        return ("",)
    whole = layout.fused_experts and "hybridep" in layout.dispatch
    return ("", "attn+moe_router+moe_preprocess", *(("full",) if whole else ()))


def _recompute(layout: Plan) -> tuple[str, ...]:
    """Return the recompute modes to try: also a quarter and half of the layers of a stage."""
    rules = layout.trainer_rules
    # With FlashAttention, and without latent attention, selective recompute saves nothing.
    selective = ("selective",) if layout.model.latent or rules.selective_layers else ()
    if layout.model.experts and rules.has_graphs:
        latent = "mla_up_proj+" if layout.model.latent else ""
        # Published runs combine them, as that of DeepSeek-V3 on H100 (arXiv 2603.07685).
        selective = (*selective, f"{latent}moe_act", f"layernorm+{latent}moe_act")
    # Megatron-Core's exchanges under another micro-batch exclude recompute of whole layers.
    if "overlapped" in layout.dispatch:
        return ("none", *selective)
    # Each of the virtual stages of a rank recomputes equally many layers.
    chunk = layout.stage_layers / layout.vp
    counts = {round(chunk * share) * layout.vp for share in (0.25, 0.5) if rules.has_counts}
    partly = sorted(n for n in counts if 0 < n < layout.stage_layers)
    return ("none", *selective, *map(str, partly), "full")


def _is_valid(layout: Plan) -> bool:
    """Whether a trainer would run a layout with some micro-batch."""
    has_layouts = layout.trainer_rules.has_layouts
    is_filled = layout.last_layers >= 1 or (has_layouts and has_even_layout(layout))
    return is_filled and not _problem(layout)


def _problem(layout: Plan) -> str:
    """Return why no trainer would run a layout; empty if one would."""
    try:
        layout.check()
    except ConfigError as error:
        return str(error)
    return ""


def _usual_problem(job: Plan, fixed: Mapping[str, str]) -> str:
    """Return why most layouts of a job are refused; empty if none is."""
    problems = Counter(map(_problem, _layouts(with_values(job, fixed, "--fix"), fixed)))
    del problems[""]
    return problems.most_common(1)[0][0] if problems else ""


def rank(job: Plan, fixed: Mapping[str, str], constants: Constants) -> PlanSearch:
    """Return all plans of a job that fit into memory, fastest first.

    Raises
    ------
    ConfigError
        If a fixed value is invalid, or there are more than `MOST` candidates.

    """
    base, limit = with_values(job, fixed, "--fix"), job.memory_limit
    fitting: list[RankedPlan] = []
    least: float | None = None
    number = 0
    for plan in candidates(job, fixed):
        number += 1
        if number > MOST:
            raise ConfigError(
                f"more than {MOST} strategies: fix some sizes, as in --fix tp=8,pp=4"
            )
        step_s, memory = priced(plan, constants, limit)
        least = memory if least is None else min(least, memory)
        if step_s is not None:
            fitting.append(RankedPlan(plan=plan, step_s=step_s, memory_bytes=memory))
    fitting.sort(key=lambda row: row.step_s)
    return PlanSearch(
        job=base,
        plans=tuple(fitting),
        candidates=number,
        least_memory=least,
        constants=constants,
        refusal="" if number else _usual_problem(job, fixed),
    )
