"""Time the all-to-all of a workload's experts, with a user's options."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fastcomm.checks import check_type, invalid_value, non_default
from fastcomm.compat.dispatch import STRATEGIES as COMPAT
from fastcomm.compat.dispatch import original_bandwidth
from fastcomm.dispatch.options import DispatchOptions
from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.schedules import STRATEGIES, Terms
from fastcomm.dispatch.simulation import NS, Simulation, simulate
from fastcomm.dispatch.workload import Workload
from fastcomm.errors import ConfigError, python_names
from fastcomm.hardware.clusters import GpuLinks, load_links, rated_links
from fastcomm.option_fields import build, shows
from fastcomm.units import parse_bandwidth
from fastcomm_kernels import _jit

_LOG = logging.getLogger("fastcomm")
_COMPILED = "workload", "placement", *COMPAT  # parts with kernels of their own


def terms_for(recipe: Recipe, options: DispatchOptions, links: GpuLinks | None = None) -> Terms:
    """Return the terms that a user's options describe for a workload.

    Options replace the bandwidths of `links`. Only for a workload of the original simulator a
    bandwidth without a unit counts GiB/s.
    """
    links = links or GpuLinks()
    if options.cluster is not None:
        links = load_links(options.cluster, recipe.gpus_per_node)
        links = rated_links(options.cluster, links)
    parse = original_bandwidth if recipe.law == "seed" else parse_bandwidth
    bandwidths = {
        f"{kind}_bytes_per_s": parse(bandwidth, f"bw_{kind}")
        for kind, bandwidth in (("inter", options.bw_inter), ("intra", options.bw_intra))
        if bandwidth is not None
    }
    size = options.token_bytes or recipe.token_bytes
    return Terms(
        token_bytes=size,
        combine_bytes=options.combine_bytes or size,
        links=replace(
            links,
            **bandwidths,
            inter_efficiency=options.inter_efficiency,
            intra_efficiency=options.intra_efficiency,
            inter_start_s=float(options.inter_start) / NS,
            intra_start_s=float(options.intra_start) / NS,
            incast=options.incast,
        ),
        demand=options.demand,
        decomposition=options.decomposition,
    )


@shows(DispatchOptions)
@python_names()
def simulate_dispatch(
    workload: Workload, strategies: Iterable[str] = tuple(STRATEGIES), **options: Any
) -> Simulation:
    """Simulate the all-to-all of experts under several schedules.

    Parameters
    ----------
    workload
        Tokens and their experts, as `fastcomm.open_workload` returns them.
    strategies
        Names of schedules, as in ["deepep", "fast"]; by default all.
    **options
        Fields of `DispatchOptions`, passed by name.

    Returns
    -------
    Simulation
        Times of each schedule in seconds (`to_dict` and `to_arrow`: ns), bytes, loads and
        bottlenecks.

    Raises
    ------
    ConfigError
        If an option or a schedule is unknown, or an option is wrong.

    """
    example = 'a workload, as in simulate_dispatch(open_workload("traffic/"))'
    check_type(workload, Workload, "simulate_dispatch: workload", example)
    if isinstance(strategies, str) or not isinstance(strategies, Iterable):
        raise invalid_value(
            "simulate_dispatch: strategies", strategies, 'a list, as in ["deepep", "fast"]'
        )
    chosen, names = build(DispatchOptions, options, "simulate_dispatch"), tuple(strategies)
    for option, schedule in (("incast", "direct"), ("decomposition", "fast")):
        if option in non_default(chosen) and schedule not in names:
            raise ConfigError(f"simulate_dispatch: {option} needs the strategy {schedule!r}")
    return simulate(workload, names, terms_for(workload.recipe, chosen))


@contextmanager
def compiling(names: Iterable[str]) -> Iterator[None]:
    """Say once on stderr that a first run compiles kernels, which takes most of a minute.

    `names` are the schedules, and other parts, whose kernels the block runs.
    """
    parts = [f"dispatch-{name}" for name in names if name in _COMPILED]
    new = [part for part in parts if not _jit.is_compiled(part)]
    if new:
        _LOG.info("fastcomm: compiling its kernels for this machine (the first run only)")
    yield
    for part in new:
        _jit.mark_compiled(part)
