"""Options of the search of plans, and of the price of one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastcomm.isp.options import BatchOptions, CountText
from fastcomm.option_fields import BATCH, SPACE, STRATEGY, WORKLOAD, option_field
from fastcomm.options import cluster_field, exchange_costs_field
from fastcomm.planning.trainers import DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions(BatchOptions):
    """The model, the GPUs, the cluster, and the sequences of a step.

    `model`, `world_size` (GPUs) and `global_batch` (sequences) are required.
    """

    world_size: CountText = option_field(
        "Number of GPUs.",
        group=BATCH,
        spellings=("--world-size", "--gpus"),
        metavar="N",
        is_common=True,
        may_be_empty=False,
    )
    seq_len: CountText = option_field(
        "Sequence length in tokens. Default: 8192.",
        group=WORKLOAD,
        metavar="N",
        is_common=True,
        may_be_empty=False,
    )
    global_batch: CountText = option_field(
        "Global batch of a step. Counts sequences.",
        group=BATCH,
        metavar="N",
        is_common=True,
        may_be_empty=False,
    )
    cluster: str | Path | None = cluster_field("dgx-h100", may_be_empty=False)
    exchange_costs: str | Path | None = exchange_costs_field()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(JobOptions):
    """What is asked of a search of plans: the job, the trainer, and what all plans have."""

    trainer: Literal["megatron", "nemo", "nemo-fsdp", "fsdp", "fsdp2", "deepspeed"] = (
        option_field(
            "Trainer: megatron, nemo, nemo-fsdp, fsdp, fsdp2, deepspeed.",
            DEFAULT,
            group=SPACE,
            metavar="NAME",
            is_common=True,
        )
    )
    precision: str | None = option_field(
        "Precision of linear layers: fp8, or a recipe such as fp8_block. Default: bf16.",
        group=SPACE,
        metavar="NAME",
        is_common=True,
        may_be_empty=False,
    )
    routing: Literal["forced", "natural"] | None = option_field(
        "Routing of tokens to experts: forced (to equal shares), natural. Default: forced.",
        group=SPACE,
        metavar="NAME",
    )
    fix: str | None = option_field(
        "Values of all strategies, as in tp=8,pp=4: keys of --strategy of plan price.",
        group=SPACE,
        metavar="LIST",
        is_common=True,
        may_be_empty=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceOptions(JobOptions):
    """What is asked of one strategy: the job, and the strategy."""

    strategy: str | None = option_field(
        "Sizes and methods, as in tp=8,pp=4,vp=2,sharding=zero1,recompute=full.",
        group=STRATEGY,
        metavar="LIST",
        is_common=True,
    )
