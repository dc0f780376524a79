"""Options of the search for stragglers."""

from dataclasses import dataclass
from pathlib import Path

from fastcomm.checks import FACTOR
from fastcomm.option_fields import LAYOUT, MEASUREMENT, option_field
from fastcomm.options import EditOptions, steps_field

# Slowdown from which on it is attributed to ranks, stages and types.
THRESHOLD = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerOptions(EditOptions):
    """What is asked of a job's table of operations; with edits, the job is replayed, too."""

    meta: str | Path | None = option_field(
        "Read the sizes of the job from a YAML file.",
        group=LAYOUT,
        path="file or URL",
        is_common=True,
    )
    steps: tuple[int, ...] | None = steps_field()
    threshold: float = option_field(
        "Minimum slowdown to attribute to a rank.",
        THRESHOLD,
        group=MEASUREMENT,
        limits=FACTOR,
        is_common=True,
    )
