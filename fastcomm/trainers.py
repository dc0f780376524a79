"""What trainers do with memory and the host, as data: one `Trainer` each.

The values come from the documentation and the source of the trainers. Only `host_factor` of
Megatron-DeepSpeed is fitted to measured runs (docs/isp-runs.md).
"""

import re
from dataclasses import dataclass

from fastcomm.checks import non_default, option_name
from fastcomm.errors import ConfigError
from fastcomm.hardware.clusters import load
from fastcomm.planning.options import SearchOptions


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
    host_factor: float = 1.0  # time of the host to launch a layer, over that of Megatron-Core
    unsupported: tuple[str, ...] = ()  # sizes that are always 1: "tp", "pp", "vp", "cp"


TRAINERS = {
    "megatron": Trainer(
        title="Megatron-Core", sharding=("zero1",), reduction="fp32", has_counts=True
    ),
    # Recipes of NVIDIA NeMo and Megatron Bridge reduce and accumulate gradients in bf16.
    "nemo": Trainer(
        title="NeMo with Megatron-Core", sharding=("zero1",), gradients="bf16", has_counts=True
    ),
    "nemo-fsdp": Trainer(
        title="NeMo with Megatron FSDP", sharding=("zero3",), unsupported=("pp", "vp")
    ),
    "fsdp": Trainer(
        title="PyTorch FSDP of 2023",
        sharding=("zero3", "zero2"),
        weight_bytes=0,
        has_torch_attention=True,
        selective_layers=0.5,
        unsupported=("tp", "pp", "vp", "cp"),
    ),
    "fsdp2": Trainer(
        title="PyTorch FSDP2, as in torchtitan",
        sharding=("zero3",),
        weight_bytes=0,
        logit_bytes=12,
        has_torch_attention=True,
        selective_layers=0.5,
        unsupported=("vp",),
    ),
    "deepspeed": Trainer(
        title="Megatron-DeepSpeed with ZeRO",
        sharding=("zero1", "zero2", "zero3"),
        gradients="bf16",
        transient=4,
        host_factor=1.55,
        unsupported=("vp", "cp"),
    ),
    "internevo": Trainer(
        title="InternEvo",
        sharding=("zero1", "zero3"),
        gradients="bf16",
        transient=16,  # an fp32 gradient and flat buffers (InternEvo's own table of memory)
    ),
}
DEFAULT = "megatron"
# Fields of the options that both searches take; the others are of InternEvo's alone.
_SHARED = {
    *("model", "vocab", "world_size", "seq_len", "global_batch", "cluster", "memory"),
    *("trainer", "precision", "fix"),
}


def trainer_of(options: SearchOptions) -> str:
    """Return the trainer whose strategies are searched.

    By default it is Megatron-Core on a named cluster with a measured GPU, and otherwise
    InternEvo, whose search takes lists of GPUs and lengths, and options of its own.

    Raises
    ------
    ConfigError
        If an option has no effect with the trainer.

    """
    own = sorted(set(non_default(options)) - _SHARED)
    lists = [
        name
        for name in ("world_size", "seq_len")
        if re.search("[,-]", str(getattr(options, name) or ""))
    ]
    if options.trainer is None:
        is_measured = options.cluster is not None and load(options.cluster).gpu
        is_plan = is_measured or options.fix or options.precision
        return DEFAULT if is_plan and not own and not lists else "internevo"
    if options.trainer != "internevo" and (own or lists):
        name = option_name((own + lists)[0])
        reason = "has no effect" if own else "takes one number"
        raise ConfigError(f"{name} {reason} with --trainer {options.trainer}")
    if options.trainer == "internevo" and (options.fix or options.precision):
        name = "--fix" if options.fix else "--precision"
        raise ConfigError(f"{name} has no effect with --trainer internevo")
    return options.trainer
