"""Constants of prices: what no data sheet and no kernel tells."""

from dataclasses import dataclass

CALIBRATED = (
    *("network_share", "overlap_loss", "tp_exposed", "elementwise", "gemm_slowdown"),
    *("host_layer_s", "host_experts", "host_expert"),
    *("exchange_slowdown", "straggling", "step_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What no data sheet and no kernel tells; `CALIBRATED` names those that are fitted.

    Each has one meaning. The values of `CALIBRATED` are fitted to published runs, see
    docs/plan-runs.md; the start of collectives between nodes is an assumption.
    """

    # Share of the bandwidth between nodes that collectives reach.
    network_share: float = 0.77
    # Start of a collective between nodes, and what each further node adds, s.
    network_start_s: float = 40e-6
    network_node_s: float = 2e-6
    # Share of the shorter of two overlapped parts that is lost.
    overlap_loss: float = 0.21
    # Share of tensor parallel communication that no GEMM overlaps.
    tp_exposed: float = 0.49
    # Bytes that element-wise kernels move over those that fused ones would.
    elementwise: float = 1.1
    # Time of a GEMM of a training step over that of the kernel alone.
    gemm_slowdown: float = 1.115
    # Time of the host to launch a layer's kernels, both passes, s.
    host_layer_s: float = 1.45e-3
    # Time of the host for a layer with experts over that of a usual one, and what each expert
    # of a rank adds.
    host_experts: float = 4.04
    host_expert: float = 0.21
    # Time of the host with 1F1B overlap of the exchange on Grace: Hy3 on GB300, bf16, without
    # graphs and with them (12.2 and 8.5 ms a layer).
    host_overlap: float = 1.4
    # Time of the host on Grace before Transformer Engine launched a Linear in fewer calls (its
    # pull request 2146): 100 us, where PyTorch takes 37 (its issue 2053).
    host_grace: float = 2.7
    # Share of the host's time for attention that the GPU waits even if it has more work: graphs
    # of attention alone saved 2.1 ms of 41 and 6.8 of 46 (DeepSeek-V3, GB200, 8192 tokens).
    host_gaps: float = 0.7
    # Time of the host with padded experts, over that with counts: Qwen3-30B on B200, 16 experts
    # of a rank (4.7 and 8.8 ms).
    host_padded: float = 0.4
    # Time of a GEMM on Blackwell in a step, beside `gemm_slowdown`: dense runs.
    blackwell_slowdown: float = 1.07
    # Time of a GEMM in MXFP8 as Transformer Engine runs it, over one with blocks of scales:
    # pairs in MXFP8 and in FP8 with current scaling of Llama 8B (1.19 to 1.27), Qwen3-30B
    # (1.07) and DeepSeek-V3 (1.36), on GB200, B200 and GB300.
    mxfp8_slowdown: float = 1.2
    # Rows of an expert at which a grouped GEMM takes twice as long a row: fused layers of
    # experts of NVIDIA AIConfigurator.
    expert_rows: float = 200
    # Share of the bandwidth of large copies that permutations reach, and TorchScript's
    # activations: cuDNN's norms, and Liger's SwiGLU against Megatron's.
    copy_share: float = 0.87
    activation_share: float = 0.47
    # Time of an exchange of experts in a step, over that of the kernels alone: ranks do not
    # begin together, and other kernels take SMs.
    exchange_slowdown: float = 1.32
    # Exposed share of an exchange under another micro-batch, inside an NVLink domain: Hy3 on
    # GB300 (9.75 and 8.20 ms).
    exchange_exposed: float = 0.33
    # The same between nodes: mean of Qwen3-235B with DeepEP (13.1 and 11.7 ms a layer), and of
    # Qwen3-30B with NCCL (13.4 and 10.2 ms) and HybridEP (8.0 and 6.8 ms), on H100.
    exchange_exposed_nodes: float = 0.63
    # Share of the step that is lost to the slowest node, for each doubling of their number.
    straggling: float = 0.0027
    # Host time of a step besides its layers: data, optimizer, logging, s.
    step_s: float = 38e-3
