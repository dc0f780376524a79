"""DeepEP's published bandwidths, and what the model says of the job that they are of.

The tables are those of DeepEP's documentation for H800 (NVLink about 160 GB/s, ConnectX-7
about 50 GB/s), 4096 tokens a GPU, hidden 7168, top 8 of 256 experts in at most 4 nodes, FP8
dispatch and BF16 combine. What they call RDMA bandwidth counts the sender's own node as well.
"""

from dataclasses import dataclass
from functools import cache

from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.schedules import Terms, deepep
from fastcomm.dispatch.traffic import Traffic
from fastcomm.dispatch.workload import Workload
from fastcomm.hardware.clusters import GpuLinks

FP8_BYTES = 7392  # 7168 of one byte, a 4-byte scale for each 128 of them
BF16_BYTES = 14336
TOKENS_A_GPU = 4096
# GB/s by GPUs: (dispatch, combine).
PUBLISHED = {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)}
# One share of each link reproduces all eight numbers.
CALIBRATED = GpuLinks(
    inter_bytes_per_s=50e9,
    intra_bytes_per_s=160e9,
    inter_efficiency=0.88,
    intra_efficiency=0.82,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modeled:
    """What the model says of one size of cluster."""

    gpus: int
    nodes_a_token: float  # own node included
    gpus_a_token: float
    bytes_per_s: float  # as the published tables count them
    published: tuple[int, int]


@cache
def _drawn(gpus: int, seed: int) -> tuple[Recipe, Traffic]:
    """Return the recipe and the traffic of the published job, which takes long to draw."""
    recipe = Recipe.of(
        num_nodes=gpus // 8,
        gpus_per_node=8,
        experts_per_gpu=256 // gpus,
        seq_len=TOKENS_A_GPU,
        batch_size=gpus,
        embed_size=7168,
        dtype="float8",
        topk=8,
        iter_num=1,
        law="gate",
        seed=seed,
    )
    (layer,) = Workload.of(recipe).layers()
    return recipe, Traffic.of(layer)


def modeled(gpus: int, links: GpuLinks = CALIBRATED, seed: int = 0) -> Modeled:
    """Run the published job on so many GPUs of eight a node."""
    recipe, traffic = _drawn(gpus, seed)
    terms = Terms(token_bytes=FP8_BYTES, combine_bytes=BF16_BYTES, links=links)
    gpus_a_token = traffic.unique.sum() / recipe.tokens
    nodes_a_token = traffic.node_unique.sum() / recipe.tokens
    counted = gpus_a_token if recipe.num_nodes == 1 else nodes_a_token
    return Modeled(
        gpus=gpus,
        nodes_a_token=float(nodes_a_token),
        gpus_a_token=float(gpus_a_token),
        bytes_per_s=float(TOKENS_A_GPU * counted * FP8_BYTES / deepep(traffic, terms).seconds),
        published=PUBLISHED[gpus],
    )
