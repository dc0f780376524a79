"""Options of ``fastcomm isp``: a table of them by group."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from fastcomm.checks import RANKS, option_name
from fastcomm.cli.commands import option, options_of
from fastcomm.cli.results import top_option
from fastcomm.option_fields import COMPAT, OUTPUT, option_field
from fastcomm.planning_options import SearchOptions
from fastcomm.units import parse_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """What is printed of a search."""

    top: int = 6
    explain: int | None = option_field(
        "Break down the step time of strategy N of the ranking.",
        group=OUTPUT,
        limits=RANKS,
        is_common=True,
        not_with=("trainer_args",),
    )
    sensitivity: bool = option_field(
        "Show what faster links or more memory would change.",
        False,
        group=OUTPUT,
        not_with=("--compat", "explain", "trainer_args"),
    )
    trainer_args: Literal["megatron", "internevo"] | None = option_field(
        "Print the best strategy of InternEvo's search as arguments of megatron or internevo.",
        group=OUTPUT,
        metavar="NAME",
    )
    launch: Literal["megatron", "torchtitan"] | None = option_field(
        "Print the best strategy as arguments that megatron or torchtitan accepts.",
        group=OUTPUT,
        metavar="NAME",
        is_common=True,
        not_with=("explain", "trainer_args"),
    )


_ORIGINAL = ("compat_tables", "strict_batch", "overlap_wdp")
ISP_OPTIONS: list[Callable[[Any], Any]] = [
    *options_of(SearchOptions, without=_ORIGINAL),
    option(
        "--compat-config",
        "config_path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        group=COMPAT,
        help="JSON file with the keys of the original simulator; options override it.",
    ),
    *options_of(SearchOptions, *_ORIGINAL),
    top_option(ShowOptions().top, not_with=("--explain", "--trainer-args", "--launch")),
    *options_of(ShowOptions),
]

_DECIMAL = re.compile(r"([0-9.]+)\s*([kKmMgGtT])(?:[bB]|bytes)?")
_TOKENS = ("seq_len", "global_batch", "global_batch_min", "global_batch_max")


def decimal_units(options: SearchOptions) -> Iterator[str]:
    """Yield a warning for each decimal unit: "8k" tokens are 8000, and 8Ki is usual."""
    for name in _TOKENS:
        for part in map(str.strip, str(getattr(options, name)).split(",")):
            if not (match := _DECIMAL.fullmatch(part)):
                continue
            binary = f"{match[1]}{match[2].upper()}i"
            tokens = parse_quantity(part, name.replace("_", " "))
            yield (
                f"{option_name(name)} {part} is {tokens} tokens; {binary} is "
                f"{float(match[1]) * parse_quantity(f'1{match[2]}i', name):.0f}"
            )
