"""Time the all-to-all of a workload's experts, with a user's options."""

from collections.abc import Sequence
from typing import Any

from fastcomm.checks import build, shows
from fastcomm.dispatch.cluster import DispatchCluster, bandwidth, hardware
from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.schedules import STRATEGIES, Terms
from fastcomm.dispatch.simulation import Simulation, simulate
from fastcomm.dispatch.workload import Workload
from fastcomm.options import DispatchOptions


def terms_for(recipe: Recipe, options: DispatchOptions) -> Terms:
    """Return the terms that a user's options describe for a workload."""
    links = DispatchCluster()
    inter, intra = links.inter_bytes_per_s, links.intra_bytes_per_s
    if options.cluster is not None:
        found = hardware(str(options.cluster), recipe.gpus_per_node)
        inter, intra = found.inter_bytes_per_s, found.intra_bytes_per_s
    size = options.token_bytes or recipe.token_bytes
    return Terms(
        token_bytes=size,
        combine_bytes=options.combine_bytes or size,
        cluster=DispatchCluster.of(
            inter_bytes_per_s=inter
            if options.bw_inter is None
            else bandwidth(options.bw_inter),
            intra_bytes_per_s=intra
            if options.bw_intra is None
            else bandwidth(options.bw_intra),
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
