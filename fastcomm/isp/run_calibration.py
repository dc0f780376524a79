"""Fit of the constants of fixed strategies to measured runs, with cross-validation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastcomm.errors import ConfigError
from fastcomm.hardware.curves import FloatArray
from fastcomm.isp.plan_constants import CALIBRATED, Constants
from fastcomm.isp.runs import TrainingRun, price_run

_FOLDS = 5
_WITHIN = {  # a constant outside would lose its meaning
    "network_share": (0.3, 0.95),
    "overlap_loss": (0.01, 1.0),
    "tp_exposed": (0.05, 1.0),
    "elementwise": (0.5, 4.0),
    "gemm_slowdown": (0.9, 1.5),
    "host_layer_s": (1e-5, 20e-3),
    "host_experts": (1.0, 15.0),
    "host_expert": (0.01, 1.0),
    "experts_slowdown": (0.8, 2.5),
    "straggling": (1e-4, 0.02),
    "step_s": (1e-4, 1.0),
}
# Weight of the squared distance to the shipped constants, in logarithms: a constant that no run
# tells stays. For few runs it is that for one, over the root of their number: a single run has
# too many explanations to move a constant far.
_PULL, _PULL_OF_ONE = 0.1, 0.6
_SCALE = 0.03  # error from which on a run counts linearly
_AT_BOUND = 0.005  # relative distance of a constant to the end of its range


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCalibration:
    """Constants that were fitted, and median absolute errors on runs that the fit saw or not.

    Runs of one source and model are held out together. With a single such group, `held_out` is
    None: nothing tells how far the constants carry.
    """

    constants: Constants
    start: Constants
    runs: int
    groups: int
    before: float
    fitted: float
    held_out: float | None

    def bounds_reached(self) -> dict[str, float]:
        """Return the constants that stopped at an end of their range, and that end."""
        return {
            name: end
            for name in CALIBRATED
            for end in _WITHIN[name]
            if abs(getattr(self.constants, name) / end - 1) < _AT_BOUND
            and getattr(self.constants, name) != getattr(self.start, name)
        }

    def changes(self) -> dict[str, tuple[float, float]]:
        """Return the fitted constants by name, before and after."""
        return {n: (getattr(self.start, n), getattr(self.constants, n)) for n in CALIBRATED}


def calibrate(runs: Sequence[TrainingRun], start: Constants) -> RunCalibration:
    """Fit the constants to the runs with a measured throughput.

    Raises
    ------
    ConfigError
        If no run has a usable measurement.

    """
    usable = [run for run in runs if run.is_usable]
    if not usable:
        raise ConfigError(
            "--calibrate-from: no run has tokens_per_s_per_gpu; fill the column in"
        )
    off = held_out_errors(usable, start)
    constants = _fit(usable, start)
    return RunCalibration(
        constants=constants,
        start=start,
        runs=len(usable),
        groups=len({run.group for run in usable}),
        before=_median([_error(run, start) for run in usable]),
        fitted=_median([_error(run, constants) for run in usable]),
        held_out=_median([error for _, error in off]) if off else None,
    )


def held_out_errors(
    runs: Sequence[TrainingRun], start: Constants
) -> list[tuple[TrainingRun, float]]:
    """Return the relative error of each measured run by constants that were fitted to others.

    Runs of one source and model are held out together; with a single such group the list is
    empty.
    """
    groups = sorted({run.group for run in runs})
    folds = min(_FOLDS, len(groups))
    off: list[tuple[TrainingRun, float]] = []
    for fold in range(folds if folds > 1 else 0):
        out = set(groups[fold::folds])
        fitted = _fit([run for run in runs if run.group not in out], start)
        off += [(run, _error(run, fitted)) for run in runs if run.group in out]
    return off


def _median(off: Sequence[float]) -> float:
    return float(np.median(np.abs(off)))


def _error(run: TrainingRun, constants: Constants) -> float:
    assert run.measured is not None  # only such runs are usable
    return price_run(run, constants).price.tokens_per_s_per_gpu / run.measured - 1


def _fit(runs: Sequence[TrainingRun], start: Constants) -> Constants:
    """Return the constants of least squared logarithms of errors.

    Outliers among runs count linearly, the distance to the start always squared.
    """
    from scipy.optimize import least_squares

    counts: dict[tuple[str, str], int] = {}
    for run in runs:
        counts[run.group] = counts.get(run.group, 0) + 1
    # A group counts with the root of its runs: repetitions tell less than other models.
    weights = np.array([counts[run.group] ** -0.25 for run in runs])
    low, high = np.log([_WITHIN[name] for name in CALIBRATED]).T
    first = np.clip(np.log([getattr(start, name) for name in CALIBRATED]), low, high)

    pull = max(_PULL, _PULL_OF_ONE / len(runs) ** 0.5)

    def residuals(logs: FloatArray) -> FloatArray:
        constants = _constants(start, logs)
        off = np.log1p([_error(run, constants) for run in runs])
        return np.concatenate([weights * off, pull * (logs - first)])

    def loss(squares: FloatArray) -> FloatArray:
        """Soft L1 for runs, squares for constants: values and two derivatives."""
        root = np.sqrt(1 + squares)
        rho = np.array([2 * (root - 1), 1 / root, -0.5 / root**3])
        tail = squares[len(runs) :]
        rho[:, len(runs) :] = [tail, np.ones_like(tail), np.zeros_like(tail)]
        return rho

    inside = np.clip(first, low + 1e-6, high - 1e-6)
    solution = least_squares(
        *(residuals, inside),
        bounds=(low, high),
        loss=loss,
        f_scale=_SCALE,
        diff_step=0.01,
        max_nfev=8,
    )
    return _constants(start, solution.x)


def _constants(start: Constants, logs: FloatArray) -> Constants:
    """Return the constants of logarithms, with four digits."""
    values = np.exp(logs)
    pairs = zip(CALIBRATED, values, strict=True)
    return replace(start, **{name: float(f"{value:.4g}") for name, value in pairs})
