"""Constants of the price of a plan that no data sheet and no kernel tells."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What no data sheet and no kernel tells; `CALIBRATED` names those that are fitted.

    Each has one meaning. The values of `CALIBRATED` are fitted to published runs, see
    docs/isp-runs.md; the start of collectives between nodes is an assumption.
    """

    # Share of the bandwidth between nodes that collectives reach.
    network_share: float = 0.95
    # Start of a collective between nodes, and what each further node adds, s.
    network_start_s: float = 40e-6
    network_node_s: float = 2e-6
    # Share of the shorter of two overlapped parts that is lost.
    overlap_loss: float = 0.27
    # Share of tensor parallel communication that no GEMM overlaps.
    tp_exposed: float = 0.69
    # Bytes that element-wise kernels move over those that fused ones would.
    elementwise: float = 1.2
    # Time of a GEMM of a training step over that of the kernel alone.
    gemm_slowdown: float = 1.1
    # Time of the host to launch a layer's kernels, both passes, s.
    host_layer_s: float = 1.5e-3
    # Time of the host for a layer with experts over that of a usual one, and what each expert
    # of a rank adds.
    host_experts: float = 4
    host_expert: float = 0.3
    # Time of experts' routing, permutation and synchronization over the layer's own.
    experts_slowdown: float = 2.1
    # Share of the step that is lost to the slowest node, for each doubling of their number.
    straggling: float = 0.003
    # Host time of a step besides its layers: data, optimizer, logging, s.
    step_s: float = 34e-3


CALIBRATED = (
    *("network_share", "overlap_loss", "tp_exposed", "elementwise", "gemm_slowdown"),
    *("host_layer_s", "host_experts", "host_expert", "experts_slowdown"),
    *("straggling", "step_s"),
)
