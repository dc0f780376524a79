"""Compare two runs: metrics, kernels and operators, by their effect on the step."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fastcomm.comparison.cause_changes import cause_changes
from fastcomm.comparison.kernel_changes import kernel_changes
from fastcomm.comparison.metrics_documents import Object, metrics_document, scalars
from fastcomm.comparison.result import BreakdownChange, Comparison, Value
from fastcomm.comparison.unlike_runs import (
    differences_of_jobs,
    differences_of_measurements,
    differences_of_steps,
    missing_ranks,
    ranks_left_out,
)
from fastcomm.errors import ConfigError
from fastcomm.trace.parallelisms import TAGS

if TYPE_CHECKING:
    from fastcomm.device_work.result import Kernels
    from fastcomm.metrics.result import Metrics

# Less than this share of a value is no reason for anything.
_SAME = 1e-3


def compare(
    before: "Metrics | Object",
    after: "Metrics | Object",
    *,
    whole: tuple[Object, Object] | None = None,
    kernels: "Sequence[tuple[Kernels, Kernels]]" = (),
) -> Comparison:
    """Compare the metrics of two runs.

    Parameters
    ----------
    before, after
        Metrics of the runs: `Metrics`, or the dictionaries that their `to_dict` returns.
    whole
        Metrics of all ranks of both runs, if `before` and `after` are limited to common ranks.
    kernels
        Pairs of `Run.kernels()` before and after, one pair for each key that is compared.

    Returns
    -------
    Comparison
        The change of the step, of its parts, of every metric and of kernels. Times are ns.

    Raises
    ------
    ConfigError
        If an argument is no metrics, or the runs count different bytes.

    """
    before, after = metrics_document(before, "before"), metrics_document(after, "after")
    runs = {"before": before, "after": after}
    if whole is not None:
        runs = dict(zip(runs, whole, strict=True))
    if before.get("bytes") != after.get("bytes"):
        raise ConfigError(
            f"before counts {before.get('bytes')} bytes and after {after.get('bytes')}: "
            "measure both with the same bytes option"
        )
    old, new = dict(scalars(before)), dict(scalars(after))
    names = [*old, *(name for name in new if name not in old)]
    values = {
        name: Value(name=name, before=old.get(name), after=new.get(name)) for name in names
    }
    differences = (*differences_of_jobs(runs), *differences_of_measurements(before, after))
    return Comparison(
        step=values["iteration.mean_ns"],
        causes=cause_changes(before, after),
        parts=_parts(values),
        values=tuple(values.values()),
        notes=(
            *differences,
            *ranks_left_out(before, after, runs),
            *differences_of_steps(before, after),
        ),
        differences=differences,
        incomplete=tuple(line for item in runs.items() for line in missing_ranks(*item)),
        kernels=kernel_changes(kernels) if kernels else None,
    )


def _parts(values: Mapping[str, Value]) -> tuple[BreakdownChange, ...]:
    """Return the parts of the exact breakdown, the largest effect on the step first."""
    prefix = "breakdown.exact."
    step = values["iteration.mean_ns"]
    parts = []
    for name, share in values.items():
        if not name.startswith(prefix):
            continue
        times = (share.before, step.before), (share.after, step.after)
        if any(one is None for pair in times for one in pair):
            return ()
        was, is_ = (float(part or 0) * float(whole or 0) for part, whole in times)
        part = name.removeprefix(prefix)
        reasons = _reasons(part.removeprefix("exposed_"), values)
        parts.append(BreakdownChange(name=part, before_ns=was, after_ns=is_, reasons=reasons))
    return tuple(sorted(parts, key=lambda part: -abs(part.effect_ns)))


def _reasons(tag: str, values: Mapping[str, Value]) -> tuple[Value, ...]:
    """Return the changed metrics of a parallelism that may explain its exposed time."""
    if tag not in TAGS:
        return ()
    names = (
        f"volume.{tag}.bytes_per_step_per_gpu",
        f"bandwidth.{tag}.avg_bus_bw",
        f"overlap.by_tag.{tag}",
        f"bandwidth.{tag}.events",
    )
    candidates = [values[name] for name in names if name in values]
    changed = [value for value in candidates if abs(value.relative or 0) > _SAME]
    return tuple(sorted(changed, key=lambda value: -abs(value.relative or 0)))
