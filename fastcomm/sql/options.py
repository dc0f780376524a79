"""Limits of an SQL query: memory, threads and time."""

from dataclasses import dataclass

from fastcomm.checks import Range
from fastcomm.option_fields import QUERY, CheckedOptions, option_field
from fastcomm.units import Count, Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlOptions(CheckedOptions):
    """How much of the machine a query may use."""

    memory_limit: str | Count | None = option_field(
        "Maximum memory of a query, as in 4GiB. Default: a quarter of the machine.",
        group=QUERY,
        limits=Range(1 << 26, 1 << 50),
        metavar="BYTES",
        is_common=True,
    )
    threads: int | None = option_field(
        "Number of threads that execute a query. Default: the number of cores.",
        group=QUERY,
        limits=Range(1, 1024),
    )
    timeout: str | Duration | None = option_field(
        "Maximum time of a query, as in 30s. Default: none.",
        group=QUERY,
        is_common=True,
    )
