"""The questions that only many ranks together answer, answered from the merged tables."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from fastcomm.metrics import heat as heat_
from fastcomm.metrics import members, suspects
from fastcomm.metrics.findings import Finding, in_order
from fastcomm.metrics.heat import Grid, Heat
from fastcomm.metrics.links import Link
from fastcomm.metrics.outliers import Outlier, outliers
from fastcomm.metrics.skew import Matching, Skew, Wait
from fastcomm.metrics.suspects import Known
from fastcomm.trace.clocks import ClockOffset
from fastcomm.trace.schema import OP, TAG

ClockKind = Literal["aligned", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Across:
    """What is seen of ranks beside each other. Times in ns; `n a step` are means over steps."""

    clocks: ClockKind  # on which the times of ranks are compared
    offsets: tuple[ClockOffset, ...]  # of the ranks that collectives join
    matching: Matching
    skew: tuple[Skew, ...]
    waits: tuple[Wait, ...]  # by rank and tag
    links: tuple[Link, ...]
    heat: Heat
    outliers: tuple[Outlier, ...]
    findings: tuple[Finding, ...]  # the costliest first

    def to_dict(self) -> dict[str, Any]:
        """The keys of the JSON object."""
        return {key: value for key, value in asdict(self).items() if key != "clocks"}


def across(
    iterations: pa.Table, events: pa.Table, groups: pa.Table, clocks: ClockKind
) -> tuple[Across, dict[str, pa.Table]]:
    """The answers, and the tables behind them."""
    grid = Grid.of(iterations)
    stage = members.stages(members.by_label(groups))
    known = Known(grid=grid, stage=stage, received=_received(events, grid), waits={})
    found = Across(
        clocks=clocks,
        offsets=(),
        matching=Matching(events=0, matched=0, share=None, dropped=0, messages=0),
        skew=(),
        waits=(),
        links=(),
        heat=grid.heat(),
        outliers=outliers(grid, stage),
        findings=in_order(
            [
                *suspects.slow_ranks(known),
                *suspects.jittery_hosts(known),
                *suspects.imbalanced_stages(known),
            ]
        ),
    )
    return found, {"heat": heat_.table(grid)}


def _received(events: pa.Table, grid: Grid) -> dict[int, float]:
    """Bytes of each rank's all-to-alls of expert parallelism, a step."""
    tag, op = events["tag"].to_numpy(), events["op"].to_numpy()
    chosen = (tag == TAG["EP"]) & (op == OP["AllToAll"]) & events["bytes"].is_valid().to_numpy()
    rank = events["rank"].to_numpy()[chosen]
    count = events["bytes"].fill_null(0).to_numpy()[chosen]
    ranks, place = np.unique(rank, return_inverse=True)
    total = np.bincount(place, count, len(ranks))
    steps = max(1, len(grid.iterations))
    return dict(zip(ranks.tolist(), (total / steps).tolist(), strict=True))
