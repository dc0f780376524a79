"""What trainers do with memory and the host, as data: one `Trainer` each.

The values come from the documentation and the source of the trainers. Only `host_factor` of
Megatron-DeepSpeed is fitted to measured runs (docs/plan-runs.md).
"""

from dataclasses import dataclass

DISPATCHES = ("alltoall", "deepep", "hybridep")
# Ranks of an exchange that DeepEP is tuned for; its `get_dispatch_config` refuses others.
DEEPEP_RANKS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
# GPUs of a node: in NVLink domains of more, of Megatron-Core's kernels only HybridEP exchanges
# tokens between nodes over NVLink (its `moe_flex_dispatcher_backend`).
NODE_GPUS = 8

# Recipes of Transformer Engine by which Megatron-Core trains, and converters of torchtitan.
_ENGINE = ("bf16", "fp16", "fp8_te", "fp8_cs", "fp8_tensor", "fp8_block", "mxfp8")
_CONVERTERS = ("bf16", "fp8_titan", "mxfp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Rules of a trainer, and the strategies that it supports.

    `sharding` are the methods that a search tries; the first is the usual one.
    """

    title: str
    sharding: tuple[str, ...]
    # Bytes of a weight beside its fp32 copy; PyTorch's FSDP casts that while it gathers it.
    weight_bytes: int = 2
    gradients: str = "fp32"  # width in which gradients are accumulated
    reduction: str = "bf16"  # width in which ranks reduce them
    # Bytes of a logit: fused losses hold it in bf16 and fp32, and write its gradient in place.
    # PyTorch's loss holds three copies in fp32.
    logit_bytes: int = 6
    # Bytes a parameter that the optimizer's step needs besides its states.
    transient: int = 0
    has_torch_attention: bool = False  # FlashAttention-2, and rings with uneven causal work
    # Share of the layers that selective recompute runs again; 0 is that of attention alone.
    selective_layers: float = 0.0
    has_counts: bool = False  # recompute of a number of layers of each stage
    has_layouts: bool = False  # pipelines whose stages do not divide the layers
    # CUDA graphs and recompute of parts of a layer, and exchanges under another micro-batch.
    has_graphs: bool = False
    precisions: tuple[str, ...] = ()  # that it can run; empty if its source tells none
    host_factor: float = 1.0  # time of the host to launch a layer, over that of Megatron-Core
    unsupported: tuple[str, ...] = ()  # sizes that are always 1: "tp", "pp", "vp", "cp"
    not_in_pipeline: tuple[str, ...] = ()  # shardings that no pipeline takes
    dispatches: tuple[str, ...] = DISPATCHES  # kernels that exchange tokens of experts


TRAINERS = {
    "megatron": Trainer(
        title="Megatron-Core",
        precisions=_ENGINE,
        sharding=("zero1",),
        reduction="fp32",
        has_counts=True,
        has_layouts=True,
        has_graphs=True,
    ),
    # Recipes of NVIDIA NeMo and Megatron Bridge reduce and accumulate gradients in bf16.
    "nemo": Trainer(
        title="NeMo with Megatron-Core",
        precisions=_ENGINE,
        sharding=("zero1",),
        gradients="bf16",
        has_counts=True,
        has_layouts=True,
        has_graphs=True,
    ),
    "nemo-fsdp": Trainer(
        title="NeMo with Megatron FSDP",
        sharding=("zero3",),
        precisions=_ENGINE,
        unsupported=("pp", "vp"),
    ),
    "fsdp": Trainer(
        title="PyTorch FSDP of 2023",
        sharding=("zero3", "zero2"),
        weight_bytes=0,
        has_torch_attention=True,
        selective_layers=0.5,
        unsupported=("tp", "pp", "vp", "cp"),
        dispatches=DISPATCHES[:1],
    ),
    "fsdp2": Trainer(
        title="PyTorch FSDP2, as in torchtitan",
        precisions=_CONVERTERS,
        sharding=("zero3",),
        weight_bytes=0,
        logit_bytes=12,
        has_torch_attention=True,
        selective_layers=0.5,
    ),
    "deepspeed": Trainer(
        title="Megatron-DeepSpeed with ZeRO",
        sharding=("zero1", "zero2", "zero3"),
        gradients="bf16",
        transient=4,
        host_factor=1.55,
        unsupported=("vp", "cp"),
        not_in_pipeline=("zero2", "zero3"),
        dispatches=DISPATCHES[:1],
    ),
}
DEFAULT = "megatron"
