"""METRIC 5: how much of the communication hides behind computation."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.metrics.view import COMM, COMPUTE, MASKS, View, sets, tag_bit
from fastcomm.trace.schema import TAGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Share of merged communication under merged compute.

    The mean over all (iteration, rank) that communicate; null where none does.
    """

    average_overlap_ratio: float | None
    by_tag: dict[str, float | None]  # of the tags that communicate; null where unknown


_ACTIVE = {
    name: MASKS & bits != 0
    for name, bits in (("comm", COMM), *((tag, tag_bit(t)) for t, tag in enumerate(TAGS)))
}
_NAMES = [f"{name}_{what}_ns" for name in _ACTIVE for what in ("union", "overlapped")]
_SETS = sets(
    *(each for active in _ACTIVE.values() for each in (active, active & (MASKS & COMPUTE != 0)))
)


def columns(view: View) -> dict[str, pa.Array]:
    """One row an iteration: ns of communication, and of it under compute, in all and by tag."""
    covered = view.covered(_SETS)
    return {name: pa.array(row) for name, row in zip(_NAMES, covered, strict=True)}


def overlap(iterations: pa.Table, tags: Collection[str]) -> Overlap:
    """Means of the ratios over all (iteration, rank) that tell; `tags` have events."""
    is_known = iterations["comm_overlapped_ns"].is_valid()
    known = iterations.filter(is_known)
    unknown = tags if known.num_rows < iterations.num_rows else ()
    by_tag = {tag: _mean_ratio(known, tag) for tag in TAGS}
    return Overlap(
        average_overlap_ratio=_mean_ratio(known, "comm"),
        by_tag={
            tag: ratio for tag, ratio in by_tag.items() if ratio is not None or tag in unknown
        },
    )


def _mean_ratio(iterations: pa.Table, name: str) -> float | None:
    union, overlapped = (
        iterations[f"{name}_{what}_ns"].to_numpy() for what in ("union", "overlapped")
    )
    busy = union > 0
    return float(np.mean(overlapped[busy] / union[busy])) if busy.any() else None
