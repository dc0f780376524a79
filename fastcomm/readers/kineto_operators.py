"""Operators of the host whose arguments show what a communication kernel moves, as data.

With `record_shapes=True` a trace lists the dimensions and types of an operator's arguments in
the order of its schema; texts and numbers have their places, too.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What an operator does, and which of its arguments are the tensors of one rank.

    `given` is the place of what the rank gives, `got` of what it gets; None: no argument shows
    it. Both are None where the sizes are known on the device alone.
    """

    op: str  # of OPS
    given: int | None
    got: int | None = None


_IN_PLACE = Operator(op="AllReduce", given=0, got=0)
_OUT_FOURTH = Operator(op="AllReduce", given=0, got=3)
_ON_DEVICE = Operator(op="AllToAll", given=None)
# `int fa, Tensor inp, Tensor! out` and more.
_CUSTOM = Operator(op="AllReduce", given=1, got=2)

OPERATORS = {
    # The output first, then the input.
    "c10d::alltoall_base_": Operator(op="AllToAll", given=1, got=0),
    "c10d::_allgather_base_": Operator(op="AllGather", given=1, got=0),
    "c10d::_reduce_scatter_base_": Operator(op="ReduceScatter", given=1, got=0),
    # Symmetric memory of PyTorch.
    "symm_mem::multimem_all_reduce_": _IN_PLACE,
    "symm_mem::multimem_one_shot_all_reduce": _IN_PLACE,
    "symm_mem::multimem_one_shot_all_reduce_out": _OUT_FOURTH,
    "symm_mem::multimem_one_shot_reduce_out": Operator(op="Reduce", given=0),
    "symm_mem::multimem_all_gather_out": Operator(op="AllGather", given=0, got=2),
    "symm_mem::one_shot_all_reduce": _IN_PLACE,
    "symm_mem::one_shot_all_reduce_out": _OUT_FOURTH,
    # The first argument is a buffer that may be larger.
    "symm_mem::one_shot_all_reduce_copy": Operator(op="AllReduce", given=1, got=1),
    "symm_mem::one_shot_all_reduce_copy_out": Operator(op="AllReduce", given=1, got=4),
    "symm_mem::two_shot_all_reduce_": _IN_PLACE,
    "symm_mem::two_shot_all_reduce_out": _OUT_FOURTH,
    "symm_mem::reduce_scatter_out": Operator(op="ReduceScatter", given=0, got=3),
    "symm_mem::nvshmem_broadcast": Operator(op="Broadcast", given=0, got=0),
    "symm_mem::nvshmem_all_to_all": Operator(op="AllToAll", given=0, got=1),
    "symm_mem::all_to_all_vdev": _ON_DEVICE,
    "symm_mem::all_to_all_vdev_2d": _ON_DEVICE,
    "symm_mem::all_to_all_vdev_2d_offset": _ON_DEVICE,
    # Custom all-reduces of vLLM, SGLang and AITER.
    "_C_custom_ar::all_reduce": _CUSTOM,
    "_C_custom_ar::qr_all_reduce": _CUSTOM,
    "sgl_kernel::all_reduce": _CUSTOM,
    "sgl_kernel::qr_all_reduce": _CUSTOM,
    # vLLM's own operators, around whatever carries them out.
    "vllm::all_reduce": _IN_PLACE,
    "vllm::all_gather": Operator(op="AllGather", given=0),
    "vllm::reduce_scatter": Operator(op="ReduceScatter", given=0),
}

# Beginnings of the names above but c10d's, eight bytes at most, for the scanner.
PREFIXES = tuple(
    sorted({name.encode()[:8] for name in OPERATORS if not name.startswith("c10d::")})
)
