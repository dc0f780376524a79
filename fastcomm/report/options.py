"""Options of the page of a run."""

from dataclasses import dataclass

from fastcomm.checks import WHOLE
from fastcomm.errors import ConfigError
from fastcomm.metrics.options import MetricsOptions
from fastcomm.option_fields import OUTPUT, option_field

_MOST_STEPS = 16  # more in a timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(MetricsOptions):
    """What the page of a run shows: its metrics, and by default data, path and timeline."""

    no_data: bool = option_field(
        "Do not write the tables.", False, group=OUTPUT, is_common=True
    )
    no_path: bool = option_field(
        "Do not search for the critical path.", False, group=OUTPUT, is_common=True
    )
    no_timeline: bool = option_field(
        "Do not draw the timeline, for which all traces are read again.",
        False,
        group=OUTPUT,
        is_common=True,
    )
    timeline_ranks: tuple[int, ...] | None = option_field(
        "Ranks with all events in the timeline. Default: all, of more than 96 the suspects.",
        group=OUTPUT,
        limits=WHOLE,
        not_with=("no_timeline",),
    )
    timeline_steps: tuple[int, ...] | None = option_field(
        "Further steps of the timeline, which has the slowest, the median and a third one.",
        group=OUTPUT,
        limits=WHOLE,
        not_with=("no_timeline",),
    )

    def __post_init__(self) -> None:
        """Check that there are tables, and not too many steps."""
        MetricsOptions.__post_init__(self)
        if not self.with_tables:
            raise ConfigError("with_tables: a page needs the tables; no_data writes no files")
        if len(self.timeline_steps or ()) > _MOST_STEPS:
            raise ConfigError(f"timeline_steps: at most {_MOST_STEPS} steps fit on a page")
