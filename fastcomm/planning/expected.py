"""Error of a throughput to expect: how far published runs are that no constant was fitted to.

Runs are classed by what makes errors differ. A class with too few runs has the error of the
next wider one. `docs/plan_runs.py` writes the numbers.
"""

from dataclasses import dataclass, replace

from fastcomm.hardware.gpus import gpu
from fastcomm.planning.job import RECIPES, Plan
from fastcomm.planning.price import PlanPrice

# By class: runs; median of absolute errors; and the factor, minus 1, within which nine of ten
# measurements lie of the prediction.
EXPECTED = {
    "dense": (260, 0.046, 0.121),
    "dense, 2024 on": (156, 0.041, 0.113),
    "dense, 2024 on, FP8": (101, 0.044, 0.116),
    "dense, 2024 on, FP8, measured GPU": (97, 0.045, 0.129),
    "dense, 2024 on, bf16": (55, 0.04, 0.11),
    "dense, 2024 on, bf16, measured GPU": (55, 0.04, 0.11),
    "dense, until 2023": (104, 0.052, 0.143),
    "dense, until 2023, bf16": (104, 0.052, 0.143),
    "dense, until 2023, bf16, measured GPU": (70, 0.054, 0.144),
    "dense, until 2023, bf16, scaled GPU": (34, 0.046, 0.09),
    "experts": (185, 0.071, 0.238),
    "experts, forced routing": (181, 0.073, 0.238),
    "experts, forced routing, 2026 on": (96, 0.074, 0.203),
    "experts, forced routing, 2026 on, FP8": (61, 0.056, 0.166),
    "experts, forced routing, 2026 on, FP8, measured GPU": (37, 0.048, 0.21),
    "experts, forced routing, 2026 on, FP8, scaled GPU": (24, 0.071, 0.24),
    "experts, forced routing, 2026 on, bf16": (35, 0.14, 0.203),
    "experts, forced routing, until 2025": (85, 0.071, 0.296),
    "experts, forced routing, until 2025, FP8": (26, 0.092, 0.754),
    "experts, forced routing, until 2025, FP8, measured GPU": (23, 0.106, 0.754),
    "experts, forced routing, until 2025, bf16": (59, 0.062, 0.296),
    "experts, forced routing, until 2025, bf16, measured GPU": (58, 0.061, 0.313),
}
# Factor, minus 1, within which nine of ten errors of two runs of one source and model agree.
RANKED = {
    "dense": 0.156,
    "experts": 0.295,
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
    year = _NEW_DENSE if plan.model.experts is None else _NEW_EXPERTS
    parts = [
        kind_of(plan),
        *([f"{plan.routing} routing"] if plan.model.experts else []),
        f"{year} on" if plan.year >= year else f"until {year - 1}",
        "bf16" if RECIPES[plan.precision] == "bf16" else "FP8",
        "scaled GPU" if gpu(plan.gpu).derived else "measured GPU",
    ]
    return [", ".join(parts[:n]) for n in range(len(parts), 0, -1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedError:
    """Error of a throughput to expect, as on published runs.

    `median` is that of absolute errors. Nine of ten measurements lie from `low` to `high`, in
    tokens/s/GPU: the prediction over and times 1 + `most`. All are None outside of what the
    runs cover; `reason` then says why. `of` is the class of runs, and `runs` their number.
    """

    median: float | None = None
    most: float | None = None
    low: float | None = None
    high: float | None = None
    of: str = ""
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
    for name, value in covered(price).items():
        low, high = COVERED[name]
        if not low <= value <= high:
            style = ".2f" if name == "mfu" else ".0f"
            shown = f"{value:{style}} {_COVERED_NAMES[name]}"
            return ExpectedError(
                reason=f"{shown}; published runs have {low:{style}} to {high:{style}}"
            )
    of = _class_of(price.plan)
    runs, median, most = EXPECTED[of]
    rate = price.tokens_per_s_per_gpu
    return ExpectedError(
        median=median,
        most=most,
        low=rate / (1 + most),
        high=rate * (1 + most),
        of=of,
        runs=runs,
    )


def _class_of(plan: Plan) -> str:
    """Return the narrowest class of a plan with runs.

    Natural routing has few runs: it has no narrower interval than forced routing, of which
    there are more.
    """
    of = next(name for name in classes_of(plan) if name in EXPECTED)
    if plan.routing == "natural" and plan.model.experts and "natural" not in of:
        forced = _class_of(replace(plan, routing="forced"))
        return max(of, forced, key=lambda name: EXPECTED[name][2])
    return of


def equal_steps(plan: Plan, fastest_s: float) -> float:
    """Return the step time in s up to which a plan may be as fast as the fastest of its job.

    Plans of one job share most of the error, so that it is that of a difference.
    """
    return fastest_s * (1 + RANKED[kind_of(plan)])
