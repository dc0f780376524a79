"""METRIC 1: where an iteration's time goes, by the specification's formulas and exactly."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.view import COMM, COMPUTE, COPY, MASKS, View, sets, tag_bit
from fastcomm.trace.schema import TAGS
from fastcomm_kernels import segments

SPEC = ("compute", *(f"comm_{tag}" for tag in TAGS), "idle")
EXACT = ("compute", *(f"exposed_{tag}" for tag in TAGS), "exposed_mixed", "memcpy", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Fractions of the iteration time, summed over ranks and iterations before the division.

    `spec`: comm_X is the sum of the events' durations, compute all time without communication,
    idle what is left of the iteration: negative by how much communication overlaps itself.
    `exact`: a partition of the time. Compute hides communication, and both hide copies.
    """

    spec: dict[str, float | None]
    exact: dict[str, float | None]


def columns(view: View) -> dict[str, pa.Array]:
    """One row an iteration: ns of each category of both kinds."""
    comm = view.comm
    values = np.zeros(len(comm.start), np.int64)
    shape = (len(view.number), len(TAGS))
    lengths = segments.totals(comm.start, comm.stop, values, comm.iteration, comm.tag, shape)[1]
    spec = dict(zip((f"comm_{tag}" for tag in TAGS), lengths.T, strict=True))
    communicating, *parts = view.covered(_SETS)
    spec["compute"] = view.time - communicating
    spec["idle"] = view.time - spec["compute"] - lengths.sum(axis=1)
    return {
        **{f"spec_{name}_ns": pa.array(spec[name]) for name in SPEC},
        **{f"exact_{name}_ns": pa.array(part) for name, part in zip(EXACT, parts, strict=True)},
    }


def _exact() -> list[NDArray[np.bool_]]:
    """The masks of each category of `EXACT`: a partition of all masks."""
    computes, comm = MASKS & COMPUTE != 0, MASKS & COMM
    exposed = [~computes & (comm == tag_bit(tag)) for tag in range(len(TAGS))]
    mixed = ~computes & (comm != 0) & ~np.any(exposed, axis=0)
    return [computes, *exposed, mixed, MASKS == COPY, MASKS == 0]


# What communicates at all, and the partition.
_SETS = sets(MASKS & COMM != 0, *_exact())


def breakdown(iterations: pa.Table) -> Breakdown:
    """Quotients of the sums over all (iteration, rank) that tell."""

    def shares(prefix: str, names: tuple[str, ...]) -> dict[str, float | None]:
        known = iterations.filter(iterations[f"{prefix}_{names[0]}_ns"].is_valid())
        total = int(known["time_ns"].to_numpy().sum())
        sums = {n: int(known[f"{prefix}_{n}_ns"].to_numpy().sum()) for n in names}
        return {name: value / total if total else None for name, value in sums.items()}

    return Breakdown(spec=shares("spec", SPEC), exact=shares("exact", EXACT))
