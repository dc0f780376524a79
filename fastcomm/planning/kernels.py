"""Times of single kernels and collectives of a plan, in seconds: cached, for searches."""

from functools import lru_cache

from fastcomm.hardware.gpus import bus_factor, gpu
from fastcomm.planning.constants import Constants
from fastcomm.planning.job import RECIPES, Plan

ELEMENT = 2  # bytes of an activation and of a weight


@lru_cache(maxsize=1 << 16)
def matmul(name: str, recipe: str, m: float, n: float, k: float) -> float:
    """Return the time in s of a product of m x k and k x n matrices on a GPU of this name."""
    return float(gpu(name).matmul(recipe, m, n, k))


@lru_cache(maxsize=1 << 14)
def flash(name: str, kernel: str, width: int, seq: float, heads: float, kv: float) -> float:
    """Return the forward time in s of causal attention; sizes are those of `Gpu.flash`."""
    return float(gpu(name).flash(kernel, width, seq, heads, kv))


@lru_cache(maxsize=1 << 16)
def inside(name: str, op: str, size: float, ranks: int) -> float:
    """Return the time in s of a collective inside an NVLink domain."""
    return float(gpu(name).inside(op, size, ranks))


@lru_cache(maxsize=1 << 12)
def _sent_share(op: str, ranks: int) -> float:
    """Return the share of its payload that each rank of a collective sends."""
    return float(bus_factor(op, ranks))


def plan_collective(
    plan: Plan, constants: Constants, op: str, size: float, ranks: int, stride: int = 1
) -> float:
    """Return the time of a collective in s; 0 for one rank or no bytes.

    Inside an NVLink domain it is measured. Between domains it is the longer of the parts
    inside and outside; the groups of a domain share its links to others.

    Parameters
    ----------
    plan, constants
        Cluster, and fitted constants.
    op
        Such as "all_gather".
    size
        Payload in bytes, as in nccl-tests.
    ranks
        Number of ranks of the group.
    stride
        Distance between two consecutive ranks of the group.

    """
    if ranks <= 1 or size <= 0:
        return 0.0
    room = plan.domain
    if (ranks - 1) * stride < room:
        return inside(plan.gpu, op, size, ranks)
    own = max(1, room // stride)  # ranks of a group in a domain
    domains = -(-ranks // own)
    rate = plan.node_bytes_per_s * constants.network_share
    if op == "all_to_all":
        outside = size / ranks * (ranks - own) * room / rate
    else:
        outside = _sent_share(op, ranks) * size * min(stride, room) / rate
    start = constants.network_start_s + constants.network_node_s * (domains - 1)
    return start + max(outside, inside(plan.gpu, op, size, own))


def recipe_of(plan: Plan) -> str:
    """Return the recipe of linear layers: that of the precision, or bf16 if there is none."""
    recipe = RECIPES[plan.precision]
    return recipe if recipe in gpu(plan.gpu).gemm else "bf16"


def gemm_factor(plan: Plan, constants: Constants) -> float:
    """Return the time of a GEMM of a training step, over that of the kernel alone."""
    chip = gpu(plan.gpu)
    factor = constants.gemm_slowdown / plan.power_share
    if chip.has_mx:
        factor *= constants.blackwell_slowdown
    return factor / chip.gemm_speed.get("bf16" if recipe_of(plan) == "bf16" else "fp8", 1.0)
