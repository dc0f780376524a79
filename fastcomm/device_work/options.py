"""Options of sums of device work."""

from dataclasses import dataclass
from typing import Literal

from fastcomm.checks import RANK, WHOLE
from fastcomm.option_fields import MEASUREMENT, WINDOW, CheckedOptions, option_field
from fastcomm.options import gpu_field

KernelKey = Literal[
    "name", "category", "operator", "module", "annotation", "stream", "layer", "pass"
]
# Keys of kernels without names.
_WITHOUT_NAMES = ("by category", "by operator", "by stream", "by layer", "by pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions(CheckedOptions):
    """Which device work is summed up, and by what."""

    by: KernelKey = option_field(
        "What a row is: name, category, operator, module, annotation, stream, layer, pass.",
        "name",
        group=MEASUREMENT,
        metavar="KEY",
        is_common=True,
    )
    match: str | None = option_field(
        "Count only work of which the kernel's name, or that of the row, matches. "
        "Syntax of Python.",
        group=MEASUREMENT,
        is_regex=True,
        is_common=True,
    )
    full_names: bool = option_field(
        "Keep names as recorded: template arguments, parameters, numbers.",
        False,
        group=MEASUREMENT,
        is_common=True,
        not_with=_WITHOUT_NAMES,
    )
    rank: int | None = option_field(
        "Analyze this rank alone. Default: all ranks.",
        group=WINDOW,
        limits=RANK,
        is_common=True,
    )
    step: int | None = option_field(
        "Number of the step. Default: all steps.",
        group=WINDOW,
        limits=WHOLE,
        is_common=True,
    )
    gpu: str | None = gpu_field()
