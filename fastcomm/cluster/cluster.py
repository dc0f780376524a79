"""A cluster: its GPU, its links, and what was measured of them. Bytes, seconds, FLOPs."""

from dataclasses import dataclass, field

from fastcomm.cluster.curves import AttentionCurve, GemmCurve, GemmTable

COMM_MODELS = ("call", "ring", "tree")
OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "p2p")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """One operation in one group size: the faster of two lines, seconds over bus bytes.

    Small messages have a protocol of their own: a shorter start and a lower bandwidth.
    """

    ranks: int
    alpha: float
    bus: float
    small_alpha: float
    small_bus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hardware, all that a strategy's time and memory depend on."""

    name: str
    gpus_per_node: int
    memory: float
    peak: float
    hbm: float
    bw_intra: float
    bw_node: float
    # What is left of a node's bandwidth in a group of up to so many ranks: divisors.
    contention: tuple[tuple[int, float], ...]
    alpha_intra: float
    alpha_inter: float
    # Each rank beyond `alpha_from` adds this to the start of a collective over nodes.
    alpha_rank: float
    alpha_from: int
    gemm: GemmCurve | GemmTable
    attention: AttentionCurve
    unfused: float
    fits: dict[str, tuple[LinkFit, ...]] = field(default_factory=dict)
    # A start a call, a step of a ring, or a level of a tree.
    comm_model: str = "call"
    # What of this was not measured.
    note: str = ""
