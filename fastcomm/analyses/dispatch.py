"""Time the all-to-all of a workload's experts, with a user's options."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastcomm.checks import build, shows
from fastcomm.compat.dispatch import original_bandwidth
from fastcomm.dispatch import Recipe
from fastcomm.dispatch.schedules import STRATEGIES, Terms
from fastcomm.dispatch.simulation import Simulation, simulate
from fastcomm.dispatch.workload import Workload
from fastcomm.hardware import GpuLinks, load_links
from fastcomm.options import DispatchOptions
from fastcomm.units import parse_bandwidth


def terms_for(recipe: Recipe, options: DispatchOptions) -> Terms:
    """Return the terms that a user's options describe for a workload.

    Only for a workload of the original simulator a bandwidth without a unit counts GiB/s.
    """
    links = GpuLinks()
    if options.cluster is not None:
        links = load_links(options.cluster, recipe.gpus_per_node)
    parse = original_bandwidth if recipe.sampler == "seed" else parse_bandwidth
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
            inter_start_s=options.inter_start * 1e-6,
            intra_start_s=options.intra_start * 1e-6,
            incast=options.incast,
        ),
        demand=options.demand,
        decomposition=options.decomposition,
    )


@shows(DispatchOptions)
def simulate_dispatch(
    workload: Workload, strategies: Sequence[str] = tuple(STRATEGIES), **options: Any
) -> Simulation:
    """Time a workload under the schedules of these names, with `DispatchOptions`.

    Raises
    ------
    ConfigError
        If an option or a schedule is unknown, or an option is wrong.

    """
    chosen = build(DispatchOptions, options, "simulate_dispatch")
    return simulate(workload, strategies, terms_for(workload.recipe, chosen))
