"""Options of watching a directory of profiled windows."""

from dataclasses import dataclass

from fastcomm.checks import Range
from fastcomm.option_fields import READING, CheckedOptions, option_field

_LONGEST = 1e7  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions(CheckedOptions):
    """When a window counts as arrived, and when watching ends."""

    once: bool = option_field(
        "Report the windows that are there, and end.",
        False,
        group=READING,
        is_common=True,
    )
    idle: float | None = option_field(
        "End when no window has arrived for this long. Default: never.",
        group=READING,
        limits=Range(0, _LONGEST),
        metavar="SECONDS",
        is_common=True,
        not_with=("once",),
    )
    patience: float = option_field(
        "Maximum time to wait for the other ranks of a window.",
        120,
        group=READING,
        limits=Range(0, _LONGEST),
        metavar="SECONDS",
        not_with=("once",),
    )
