"""Error of a throughput to expect: how far published runs are that no constant was fitted to.

Runs are classed by what makes errors differ. A class with too few runs, or whose own runs tell
less about others than those of the next wider one, has the error of that. `docs/plan_runs.py`
writes the numbers.
"""

from dataclasses import dataclass, replace

from fastcomm.hardware.gpus import gpu
from fastcomm.planning.experts import MEASURED_SHARE, is_measured_share
from fastcomm.planning.job import RECIPES, ROUTING, Plan
from fastcomm.planning.price import PlanPrice

# By class: runs; median of absolute errors; and the factor, minus 1, within which nine of ten
# measurements lie of the prediction.
EXPECTED = {
    "dense": (260, 0.046, 0.122),
    "dense, 2024 on": (55, 0.044, 0.116),
    "dense, 2024 on, FP8": (101, 0.04, 0.116),
    "dense, until 2023": (70, 0.057, 0.141),
    "dense, until 2023, bf16, scaled GPU": (34, 0.044, 0.084),
    "experts": (185, 0.068, 0.239),
    "experts, forced routing": (181, 0.069, 0.239),
    "experts, forced routing, 2026 on": (65, 0.091, 0.204),
    "experts, forced routing, 2026 on, graphs, measured GPU": (31, 0.049, 0.13),
    "experts, forced routing, until 2025": (85, 0.073, 0.298),
    "experts, forced routing, until 2025, no graphs": (75, 0.068, 0.312),
    "experts, forced routing, until 2025, no graphs, measured GPU": (72, 0.069, 0.312),
}
# Precisions whose runs the intervals of their classes hold too seldom: runs, and the
# factor, minus 1, within which nine of ten of them lie.
WIDER = {
    "dense, fp8_titan": (10, 0.323),
    "experts, fp8_cs": (12, 0.775),
}
# Factor, minus 1, within which nine of ten errors of two runs of one source and model agree.
RANKED = {
    "dense": 0.16,
    "experts": 0.296,
}
# Smallest and largest of what these runs have: beyond, no error is known.
COVERED = {
    "seq_len": (512, 1048576),
    "gpus": (4, 6144),
    "tokens_per_gpu": (1024, 1048576),
    "mfu": (0.09, 0.84),
}
# GPUs of these runs.
_RUN_GPUS = ("a100", "a100-40", "h100", "h200", "h800", "b200", "gb200", "b300", "gb300")
_COVERED_NAMES = {
    "seq_len": "tokens a sequence",
    "gpus": "GPUs",
    "tokens_per_gpu": "tokens a step and GPU",
    "mfu": "MFU",
}
# Years from which on a stack is newer than most constants of its kind of model.
_NEW_DENSE, _NEW_EXPERTS = 2024, 2026


def covered(price: PlanPrice) -> dict[str, float]:
    """Return the quantities of `COVERED` for a price."""
    plan = price.plan
    return {
        "seq_len": plan.seq_len,
        "gpus": plan.gpus,
        "tokens_per_gpu": plan.global_batch * plan.seq_len / plan.gpus,
        "mfu": price.mfu,
    }


def kind_of(plan: Plan) -> str:
    """Return the kind of a model: "experts" or "dense"."""
    return "dense" if plan.model.experts is None else "experts"


def classes_of(plan: Plan) -> list[str]:
    """Return the classes of a plan, the narrowest first: each adds a property to the next."""
    has_experts = plan.model.experts is not None
    year = _NEW_EXPERTS if has_experts else _NEW_DENSE
    date = f"{year} on" if plan.year >= year else f"until {year - 1}"
    precision = "bf16" if RECIPES[plan.precision] == "bf16" else "FP8"
    measured = "scaled GPU" if gpu(plan.gpu).derived else "measured GPU"
    if has_experts:
        # Errors differ with the host, which graphs remove, more than with the precision.
        graphs = "graphs" if plan.graphs else "no graphs"
        parts = ["experts", f"{plan.routing} routing", date, graphs, measured, precision]
    else:
        parts = ["dense", date, precision, measured]
    return [", ".join(parts[:n]) for n in range(len(parts), 0, -1)]


def precision_of(plan: Plan) -> str:
    """Return the kind of model and the precision of a plan, as in `WIDER`."""
    return f"{kind_of(plan)}, {plan.precision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedError:
    """Error of a throughput to expect, as on published runs.

    `median` is that of absolute errors. Nine of ten measurements lie from `low` to `high`, in
    tokens/s/GPU: the prediction over and times 1 + `most`. All are None outside of what the
    runs cover; `reason` then says why. `of` is the class of runs, and `runs` their number.
    `wider` is a class or precision whose interval is taken, as it is wider than that of `of`;
    else empty.
    """

    median: float | None = None
    most: float | None = None
    low: float | None = None
    high: float | None = None
    of: str = ""
    wider: str = ""
    runs: int = 0
    reason: str = ""

    def holds(self, measured: float) -> bool | None:
        """Return whether a measured throughput is in the interval; None without one."""
        if self.low is None or self.high is None:
            return None
        return self.low <= measured <= self.high


def expected_error(price: PlanPrice) -> ExpectedError:
    """Return the error to expect of a throughput, by the class of its plan."""
    if price.plan.gpu not in _RUN_GPUS:
        return ExpectedError(reason=f"no published run is on {gpu(price.plan.gpu).name}")
    if reason := _unmeasured_routing(price.plan):
        return ExpectedError(reason=reason)
    for name, value in covered(price).items():
        low, high = COVERED[name]
        if not low <= value <= high:
            style = ".2f" if name == "mfu" else ".0f"
            shown = f"{value:{style}} {_COVERED_NAMES[name]}"
            return ExpectedError(
                reason=f"{shown}; published runs have {low:{style}} to {high:{style}}"
            )
    of, wider = _own_class(price.plan), _wider_class(price.plan)
    runs, median, most = EXPECTED[of]
    most = (EXPECTED | WIDER)[wider][-1] if wider else most
    rate = price.tokens_per_s_per_gpu
    return ExpectedError(
        median=median,
        most=most,
        low=rate / (1 + most),
        high=rate * (1 + most),
        of=of,
        wider=wider,
        runs=runs,
    )


def _unmeasured_routing(plan: Plan) -> str:
    """Return why the fullest rank of experts is not measured; empty if it is."""
    experts = plan.model.experts
    if experts is None or is_measured_share(plan, experts):
        return ""
    ranks, own = MEASURED_SHARE
    return (
        f"natural routing to {plan.ep} ranks of {experts.number // plan.ep} experts; "
        f"published runs have {ranks} of {own}"
    )


def _own_class(plan: Plan) -> str:
    """Return the narrowest class of a plan that has an error of its own."""
    return next(name for name in classes_of(plan) if name in EXPECTED)


def _wider_class(plan: Plan) -> str:
    """Return the class whose interval a plan takes instead of its own; empty if its own.

    Natural routing has few runs: its interval is no narrower than that of forced routing, of
    which there are more. A precision in `WIDER` has an interval no narrower than that.
    """
    own = _own_class(plan)
    wider = {own: EXPECTED[own][2]}
    if plan.routing != ROUTING[0]:
        forced = _own_class(replace(plan, routing=ROUTING[0]))
        wider[forced] = EXPECTED[forced][2]
    if (name := precision_of(plan)) in WIDER:
        wider[name] = WIDER[name][1]
    widest = max(wider, key=lambda name: wider[name])
    return "" if widest == own else widest


def class_name(plan: Plan) -> str:
    """Return the class of a plan as errors are summed up: its own, and always its routing."""
    of, routing = _own_class(plan), f"{plan.routing} routing"
    return of if plan.model.experts is None or routing in of else f"{of}, {routing}"


def equal_steps(plan: Plan, fastest_s: float) -> float:
    """Return the step time in s up to which a plan may be as fast as the fastest of its job.

    Plans of one job share most of the error, so that it is that of a difference.
    """
    return fastest_s * (1 + RANKED[kind_of(plan)])
