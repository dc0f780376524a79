"""Process groups, collectives and kernels of a synthetic job, with their names in traces."""

import json
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from fastcomm.synthetic.job import Job

# By kind of group, in the order of creation after the world group, which is "0".
DESCRIPTIONS = {
    "dp": "DATA_PARALLEL_GROUP",
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "edp": "EXPERT_DATA_PARALLEL_GROUP",
}
TAGS = {"dp": "DP", "tp": "TP", "pp": "PP", "ep": "EP", "edp": "DP", "world": "OTHER"}


@dataclass(frozen=True, slots=True)
class SyntheticGroup:
    """A process group of which a rank is a member."""

    tag: str
    name: str
    description: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def groups(job: Job, rank: int) -> dict[str, SyntheticGroup]:
    """Return the process groups of a rank, by kind."""
    world = SyntheticGroup("OTHER", "0", "default_pg", tuple(range(job.ranks)))
    by_kind = {"world": world}
    next_name = 1
    for kind, description in DESCRIPTIONS.items():
        first, stride, size, index = _progression(job, rank, kind)
        members = tuple(range(first, first + stride * size, stride))
        by_kind[kind] = SyntheticGroup(TAGS[kind], str(next_name + index), description, members)
        next_name += job.ranks // size
    return by_kind


def group_count(job: Job) -> int:
    """Return the number of process groups of the job, with the world group."""
    sizes = (job.dp, job.tp, job.pp, job.ep, job.expert_data)
    return 1 + sum(job.ranks // size for size in sizes)


def _progression(job: Job, rank: int, kind: str) -> tuple[int, int, int, int]:
    """Return first rank, stride, size and number in its kind of a rank's group."""
    tp, dp, pp = job.place(rank)
    stage = pp * job.tp * job.dp
    block, place = divmod(dp, job.ep)
    if kind == "tp":
        return rank - tp, 1, job.tp, rank // job.tp
    if kind == "pp":
        return rank - stage, job.tp * job.dp, job.pp, rank - stage
    if kind == "dp":
        return stage + tp, job.tp, job.dp, pp * job.tp + tp
    if kind == "ep":
        number = (pp * job.expert_data + block) * job.tp + tp
        return stage + tp + job.tp * job.ep * block, job.tp, job.ep, number
    number = (pp * job.ep + place) * job.tp + tp
    return stage + tp + job.tp * place, job.tp * job.ep, job.expert_data, number


ROOT_PLACE = 0  # root of every rooted operation, as a place in its group
ELEMENT = {"BFloat16": 2, "Float": 4, "Long": 8}


@dataclass(frozen=True, slots=True)
class CallKind:
    """A kind of call, with the four names that a trace has for it."""

    op: str  # name in the tables of fastcomm
    collective: str  # "Collective name"
    host: str  # name of the operator
    annotation: str
    kernel: str
    turns: int  # bus bytes over payload are turns * (n - 1) / n; 0: all bytes once


# By name: op, collective, operator, annotation, kernel, turns.
_CALLS = {
    "AllReduce": ("AllReduce", "allreduce", "allreduce_", "all_reduce", "AllReduce_Sum", 2),
    "AllGather": (
        *("AllGather", "_allgather_base", "_allgather_base_", "_all_gather_base"),
        *("AllGather", 1),
    ),
    "ReduceScatter": (
        *("ReduceScatter", "_reduce_scatter_base", "_reduce_scatter_base_"),
        *("_reduce_scatter_base", "ReduceScatter_Sum", 1),
    ),
    "AllToAll": ("AllToAll", "all_to_allv", "alltoall_base_", "all_to_all", "SendRecv", 1),
    "Broadcast": ("Broadcast", "broadcast", "broadcast_", "broadcast", "Broadcast", 0),
    "Send": ("SendRecv", "send", "send", "send {src}->{dst}", "SendRecv", 0),
    "Recv": ("SendRecv", "recv", "recv_", "recv {dst}<-{src}", "SendRecv", 0),
}


def _call_kind(
    op: str, collective: str, host: str, annotation: str, kernel: str, turns: int
) -> CallKind:
    algorithm = "" if kernel == "SendRecv" else "_RING_LL"
    dtype = "_{dtype}" if kernel.endswith("_Sum") else ""
    name = f"ncclDevKernel_{kernel}{dtype}{algorithm}(ncclDevKernelArgsStorage<4096ul>)"
    return CallKind(op, collective, f"c10d::{host}", f"nccl:{annotation}", name, turns)


OPERATIONS = {name: _call_kind(*call) for name, call in _CALLS.items()}
_SHORT = {"BFloat16": "bf16", "Float": "f32", "Long": "u64"}


@dataclass(frozen=True, slots=True)
class SyntheticCall:
    """A collective or message as one of its members calls it; counts are elements."""

    operation: CallKind
    group: SyntheticGroup
    dtype: str
    sent: int
    received: int
    seq: int
    send_splits: tuple[int, ...] = ()  # in rows of the tensor, as in PyTorch
    receive_splits: tuple[int, ...] = ()
    peers: tuple[int, int] | None = None  # source and destination of a message, global ranks

    @property
    def payload(self) -> int:
        """Payload in bytes, S of nccl-tests."""
        return max(self.sent, self.received) * ELEMENT[self.dtype]

    @property
    def bus(self) -> int:
        """Bytes that an ideal algorithm sends over each link."""
        return bus_bytes(self.operation, self.payload, self.group.size)

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.operation.kernel.format(dtype=_SHORT[self.dtype])

    @property
    def annotation(self) -> str:
        """Name of the range around the launch."""
        src, dst = self.peers or (0, 0)
        return self.operation.annotation.format(src=src, dst=dst)


@lru_cache(maxsize=4096)
def bus_bytes(operation: CallKind, payload: int, size: int) -> int:
    """Return payload times the bus factor of an operation, rounded half to even."""
    if operation.turns == 0:
        return payload if size > 1 else 0
    return round(Fraction(payload * operation.turns * (size - 1), size))


def transfer_ns(job: Job, operation: CallKind, payload: int, size: int) -> int:
    """Return the duration of a collective or message after its last member has arrived, in ns.

    `payload` are its bytes, `size` is the number of ranks in the group.
    """
    return job.latency_ns + bus_bytes(operation, payload, size) * 10**9 // job.link_speed


RowNumbers = tuple[int, ...]


def splits(
    job: Job, group: SyntheticGroup, place: int, seq: int
) -> tuple[RowNumbers, RowNumbers]:
    """Return how many rows (tokens) a member sends to each member, and receives from each.

    Each has `job.ep` values, with the member itself. `place` is the member's index in the
    group, and `seq` the number of the AllToAll, which varies the sizes.
    """
    rows, limit = -(-job.tokens // job.ep), max(1, job.tokens // job.ep // 8)
    hot_rank = job.straggler if job.fault == "hot_expert" else None

    def pair(source: int, target: int) -> int:
        extra = rows * job.slowdown // 100 if group.ranks[target] == hot_rank else 0
        if source == target:
            return rows + extra
        unequal = (source * 7 + target * 13 + source * target * 5 + seq * 11) % (2 * limit + 1)
        return rows + extra + unequal - limit

    peers = range(job.ep)
    sent = tuple(pair(place, peer) for peer in peers)
    return sent, tuple(pair(peer, place) for peer in peers)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What runs on the device, and the operator that asked for it."""

    name: str
    host: str
    inputs: str  # kind of inputs in `shapes`; of a GEMM a direction and a weight
    grid: tuple[int, int, int] = (132, 1, 1)
    registers: int = 168


def _gemm(tile: str, inputs: str, host: str = "aten::mm") -> Kernel:
    return Kernel(f"nvjet_hsh_{tile}_v_bz_coopA_NTT", host, inputs)


def _grouped(name: str, inputs: str) -> Kernel:
    """Return the kernel of a grouped GEMM, which the experts of a rank share."""
    name = f"void cutlass::device_kernel<cutlass::gemm::GemmGroupedUniversal<{name}> >(Params)"
    return Kernel(name, "aten::_grouped_mm", inputs)


def _elementwise(functor: str, host: str) -> Kernel:
    """Return the kernel of an elementwise functor; `host` is the operator that launches it."""
    name = (
        f"void at::native::vectorized_elementwise_kernel<4, at::native::{functor}, "
        "std::array<char*, 3ul> >(int, at::native::"
        f"{functor}, std::array<char*, 3ul>)"
    )
    return Kernel(name, host, "rows", (4096, 1, 1), 32)


def _triton(name: str, host: str) -> Kernel:
    return Kernel(name, host, "rows", (2048, 1, 1), 40)


_BACK = "autograd::engine::evaluate_function: "
_NORM = "void transformer_engine::normalization::rmsnorm_{}_tuned_kernel<Kernel_traits>(Params)"
_FLASH = (
    "void cutlass::device_kernel<flash::FlashAttn{}Sm90<flash::CollectiveMainloop> >(Params)"
)

KERNELS = {
    "norm": Kernel(_NORM.format("fwd"), "_RMSNorm", "rows"),
    "norm_back": Kernel(_NORM.format("bwd"), _BACK + "_RMSNormBackward", "rows"),
    "qkv": _gemm("128x256_64x4_1x2_h", "forward qkv"),
    "rope": _triton("triton_poi_fused_rotary_embedding_0", "_RotaryEmbedding"),
    "flash": Kernel(_FLASH.format("Fwd"), "flash_attn::_flash_attn_forward", "attention"),
    "proj": _gemm("192x192_64x4_2x1_h", "forward proj"),
    "fc1": _gemm("256x128_64x4_2x1_h", "forward fc1"),
    "fc2": _gemm("128x192_64x5_1x2_h", "forward fc2"),
    "swiglu": _triton("triton_poi_fused_mul_silu_1", "_SwiGLU"),
    "proj_dgrad": _gemm("192x192_64x4_2x1_v", "dgrad proj"),
    "flash_back": Kernel(
        _FLASH.format("Bwd"), "flash_attn::_flash_attn_backward", "attention_back"
    ),
    "rope_back": _triton("triton_poi_fused_rotary_embedding_2", _BACK + "_RotaryEmbedding"),
    "qkv_dgrad": _gemm("128x256_64x4_1x2_v", "dgrad qkv"),
    "qkv_wgrad": _gemm("256x128_64x4_2x1_t", "wgrad attention"),
    "fc2_dgrad": _gemm("128x192_64x5_1x2_v", "dgrad fc2"),
    "fc1_dgrad": _gemm("256x128_64x4_2x1_v", "dgrad fc1"),
    "fc_wgrad": _gemm("256x192_64x4_2x1_t", "wgrad fc"),
    "router": _gemm("64x64_64x8_1x1_h", "linear router", "aten::linear"),
    "router_back": _gemm("64x64_64x8_1x1_v", "dgrad router"),
    "topk": Kernel("fused_topk_with_score_function_forward_kernel", "FusedTopk", "rows"),
    "permute": _triton("_permute_kernel", "moe::permute"),
    "unpermute": _triton("_unpermute_kernel", "moe::unpermute"),
    "shared": _gemm("128x128_64x6_1x1_h", "forward shared"),
    "shared_dgrad": _gemm("128x128_64x6_1x1_v", "dgrad shared"),
    "shared_wgrad": _gemm("128x128_64x6_1x1_t", "wgrad shared"),
    "experts1": _grouped("fc1", "forward experts1"),
    "experts2": _grouped("fc2", "forward experts2"),
    "experts_dgrad": _grouped("dgrad", "dgrad experts"),
    "experts_wgrad": _grouped("wgrad", "wgrad experts"),
    "logits": _gemm("256x256_64x3_2x1_h", "linear vocabulary", "aten::linear"),
    "embed": Kernel(
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long>()",
        "aten::embedding",
        "tokens",
    ),
    "embed_back": Kernel(
        "void at::native::(anonymous namespace)::compute_grad_weight<c10::BFloat16, long>()",
        "aten::embedding_dense_backward",
        "tokens",
    ),
    "arange": _elementwise("FillFunctor<long>", "aten::arange"),
    "empty": _elementwise("FillFunctor<float>", "aten::fill_"),
    "unscale": _elementwise("MulFunctor<float>", "aten::_foreach_mul_"),
    "adam": Kernel(
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float> >()",
        "aten::_fused_adamw_",
        "bucket",
        (320, 1, 1),
        64,
    ),
}


# Widths of a rank's layers, in heads of 128, with which the GEMMs of a default job reach 50 to
# 75 % of the peak.
_HEAD = 128
_WIDTHS = {"heads": 32, "key_heads": 4, "fc": 88, "shared": 48, "experts": 60, "vocabulary": 36}
_DEFAULT_NS, _DEFAULT_ROWS = 900_000, 2048
_EXPERTS = 2  # of a rank
_HALF, _LONG = "c10::BFloat16", "long int"


def widths(job: Job) -> dict[str, int]:
    """Return the widths of a rank's layers in heads; they grow with the time of a layer."""
    usual = _DEFAULT_NS * job.tokens * job.hidden / _DEFAULT_ROWS**2
    return {name: max(1, round(size * job.layer_ns / usual)) for name, size in _WIDTHS.items()}


def weights(job: Job) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the weights of a rank's layers, by their names.

    "attention", "fc" and "experts" are all weights of such a layer, whose gradients one kernel
    computes.
    """
    sizes = [size * _HEAD for size in widths(job).values()]
    heads, keys, fc, shared, experts, vocabulary = sizes
    return {
        "qkv": (job.hidden, heads + 2 * keys),
        "proj": (heads, job.hidden),
        "attention": (job.hidden, 2 * (heads + keys)),
        "fc1": (job.hidden, 2 * fc),
        "fc2": (fc, job.hidden),
        "fc": (job.hidden, 3 * fc),
        "shared": (job.hidden, shared),
        "experts1": (job.hidden, 2 * experts),
        "experts2": (experts, job.hidden),
        "experts": (job.hidden, 3 * experts),
        "router": (job.hidden, _EXPERTS * job.ep),
        "vocabulary": (job.hidden, vocabulary),
    }


def host_args(job: Job, kernel: Kernel, rank: int = 0) -> str:
    """Return the inputs of a kernel's operator on a rank, as the inside of a JSON object."""
    dims, types, values = _inputs(job, kernel, rank)
    strides = [[*size[1:], 1] for size in dims]
    concrete = values or [""] * len(dims)
    args = {"Concrete Inputs": concrete, "Input type": types, "Input Strides": strides}
    return json.dumps({**args, "Input Dims": dims})[1:-1]


_Inputs = tuple[list[list[int]], list[str], list[str]]  # shapes, types; values, or empty


def _inputs(job: Job, kernel: Kernel, rank: int) -> _Inputs:
    """Return the inputs of a kernel's operator on a rank."""
    rows, width, bucket = job.tokens, job.hidden, job.bucket
    direction, _, weight = kernel.inputs.partition(" ")
    if weight:
        is_grouped = kernel.host == "aten::_grouped_mm"
        if is_grouped and job.fault == "hot_expert" and job.straggler == rank:
            rows += rows * job.slowdown // 100
        return _product(rows, weights(job)[weight], direction, _EXPERTS if is_grouped else 0)
    if direction.startswith("attention"):
        return _attention(job, is_backward=direction.endswith("back"))
    dims, types = {
        "rows": ([[rows, width]], [_HALF]),
        "tokens": ([[rows, width], [rows]], [_HALF, _LONG]),
        "bucket": ([[bucket], [bucket], [bucket], []], ["float"] * 3 + ["Scalar"]),
    }[direction]
    return dims, types, []


def _product(rows: int, weight: tuple[int, int], direction: str, groups: int) -> _Inputs:
    """Return the inputs of a GEMM: a pass, or the gradient of its input or its weight."""
    k, n = weight
    of_weight = [groups] if groups else []
    dims = {
        "forward": [[rows, k], [*of_weight, k, n]],
        "dgrad": [[rows, n], [*of_weight, n, k]],
        "wgrad": [[k, rows], [rows, n]],
        "linear": [[rows, k], [n, k], []],
    }[direction]
    types = [_HALF, _HALF, *([""] if direction == "linear" else [])]
    return ([*dims, [groups]], [*types, "int"], []) if groups else (dims, types, [])


_LONGEST_SEQUENCE = 2048


def _attention(job: Job, *, is_backward: bool) -> _Inputs:
    """Return the inputs of causal attention, with fewer heads of keys than of queries."""
    sequences = -(-job.tokens // _LONGEST_SEQUENCE)
    length, size = job.tokens // sequences, widths(job)
    q = [sequences, length, size["heads"], _HEAD]
    k = [sequences, length, size["key_heads"], _HEAD]
    sums = [sequences, size["heads"], length]
    tensors = [q, q, k, k, q, sums, q, k, k] if is_backward else [q, k, k]
    types = ["float" if shape is sums else _HALF for shape in tensors]
    scalars = ["0.", f"{_HEAD**-0.5:.6f}", "True"]
    values = [*[""] * len(tensors), *scalars]
    return [*tensors, [], [], []], [*types, *["Scalar"] * 3], values
