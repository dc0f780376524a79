"""Options of the metrics of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastcomm.checks import GPUS_PER_NODE, TOKENS
from fastcomm.option_fields import MEASUREMENT, READING, WORKLOAD, CheckedOptions, option_field
from fastcomm.options import cluster_field, gpu_field, steps_field
from fastcomm.units import Rate

ClockAlignment = Literal["collectives", "none"]
ByteKind = Literal["payload", "bus", "msg"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions(CheckedOptions):
    """What is measured of a run.

    Limits of traffic are the bandwidths of the cluster inside and between nodes, which are the
    hosts that the traces name, or with `gpus_per_node` so many ranks in order.
    """

    link_bandwidth: str | Rate | None = option_field(
        "Bandwidth of one GPU's link in one direction, as in 400Gbit/s or 50GB/s.",
        group=MEASUREMENT,
        is_common=True,
    )
    cluster: str | Path | None = cluster_field("none")
    gpus_per_node: int | None = option_field(
        "GPUs per node. Default: by the traces' host names.",
        group=WORKLOAD,
        limits=GPUS_PER_NODE,
    )
    bytes: ByteKind = option_field(
        "Bytes that bandwidth and volume count: as nccl-tests, on links, or per call.",
        "payload",
        group=MEASUREMENT,
    )
    steps: tuple[int, ...] | None = steps_field(may_be_empty=False)
    clock_alignment: ClockAlignment = option_field(
        "How clocks are aligned: by collectives, or not.", "collectives", group=READING
    )
    with_tables: bool = option_field(
        "Return the tables with a row per event or window, about 200 bytes an event.",
        True,
        group=None,
    )
    flops: bool = option_field(
        "Count the FLOPs of a step; reads all events of the traces once more.",
        False,
        group=MEASUREMENT,
    )
    gpu: str | None = gpu_field(needs=("flops",))
    tokens_per_step: int | None = option_field(
        "Tokens of a step of all ranks, for tokens per second.",
        group=MEASUREMENT,
        limits=TOKENS,
    )
