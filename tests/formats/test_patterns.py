"""Test names of communication kernels, and of kernels with similar names."""

import pytest

from fastcomm.formats.communication import PATTERNS, match_name

ANON = "void (anonymous namespace)::"
CUSTOM, SYMMETRIC = "custom all-reduce", "torch symmetric memory"
COMMUNICATION = [
    # NCCL, RCCL and what replaces them
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "NCCL", "AllReduce", None),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "NCCL", "ReduceScatter", None),
    ("ncclSymkDevKernel_AllGather_LLMC(ncclSymkArgs)", "NCCL", "AllGather", None),
    ("void ncclKernelAllReduceCtranDirect<float>(int*)", "NCCL", "AllReduce", None),
    ("ncclKernelAllGatherCtranStreamedRd(int*)", "NCCL", "AllGather", None),
    ("void ncclKernelSendRecvP2p<false>(int*)", "NCCL", "SendRecv", None),
    ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "NCCL", "AllReduce", None),
    ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "NCCL", "OTHER", None),
    ("ncclDevKernelDebug_Generic_1(x)", "NCCL", "OTHER", None),
    ("void rcclGenericKernel<1, false>(x)", "RCCL", "OTHER", None),
    ("mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*)", "RCCL", "OTHER", None),
    ("oneccl_allreduce_pcie", "oneCCL", "AllReduce", None),
    ("oneccl_reduce_scatter_large", "oneCCL", "ReduceScatter", None),
    ("hcom_allReduce__503_0_1", "HCCL", "AllReduce", None),
    ("hcom_alltoallv__210_3_1", "HCCL", "AllToAll", None),
    ("hcom_receive__210_3_1", "HCCL", "SendRecv", None),
    ("mscclpp::collective::allreducePacket", "MSCCL++", "AllReduce", None),
    ("void mscclpp::collective::alltoallvKernel<1>(x)", "MSCCL++", "AllToAll", None),
    ("mscclpp_something_new", "MSCCL++", "OTHER", None),
    # experts: dispatch and combine
    ("void deep_ep::intranode::dispatch<8, 768>(x)", "DeepEP", "AllToAll", "EP"),
    ("void deep_ep::internode_ll::combine<true>(x)", "DeepEP", "AllToAll", "EP"),
    ("void hybrid_ep::dispatch_kernel<hybrid_ep::A, 1>(x)", "DeepEP", "AllToAll", "EP"),
    ("void hybrid_ep::combine_kernel<hybrid_ep::A, 1>(x)", "DeepEP", "AllToAll", "EP"),
    ("hybrid_ep::device_sync_kernel(unsigned int*)", "DeepEP", "Barrier", "EP"),
    ("void mori::moe::EpDispatchIntraNodeKernel<bf16>(x)", "MORI", "AllToAll", "EP"),
    ("EpCombineIntraNodeKernel_bf16", "MORI", "AllToAll", "EP"),
    ("EpDispatchInterNodeV1KernelLowLatency_fp8", "MORI", "AllToAll", "EP"),
    ("_ZN4mori3moe25EpDispatchIntraNodeKernelIDF16bEEvx", "MORI", "AllToAll", "EP"),
    ("void x::moeA2ADispatchKernel<8, false>(int const*)", "TensorRT-LLM", "AllToAll", "EP"),
    ("moeA2ACombineKernel(x)", "TensorRT-LLM", "AllToAll", "EP"),
    ("void x::moeAllToAllKernel<true>(x)", "TensorRT-LLM", "AllToAll", "EP"),
    ("void a2a_dispatch_send_kernel<true, 8>(unsigned long)", "pplx", "AllToAll", "EP"),
    ("a2a_combine_recv_kernel(x)", "pplx", "AllToAll", "EP"),
    (ANON + "dispatchKernel<16u, true, false>(int*)", "pplx", "AllToAll", "EP"),
    ("void dispatchKernel<10u, true, true, pplx::NotFixed>(int*)", "pplx", "AllToAll", "EP"),
    ("void combineKernel<__nv_bfloat16, 8ul, false, true>(x)", "pplx", "AllToAll", "EP"),
    ("void combineKernel<float, (int)8, (bool)1, (bool)0>(x)", "pplx", "AllToAll", "EP"),
    ("_ZN12_GLOBAL__N_114dispatchKernelILj16ELb1ELb0EEEvPi", "pplx", "AllToAll", "EP"),
    # all-reduces of tensor parallel layers
    ("void vllm::cross_device_reduce_2stage<half>(x)", CUSTOM, "AllReduce", "TP"),
    ("void quickreduce::allreduce_prototype_twoshot<A>(x)", CUSTOM, "AllReduce", "TP"),
    ("void aiter::cross_device_reduce_1stage<x>(y)", CUSTOM, "AllReduce", "TP"),
    ("void aiter::reduce_scatter_cross_device_store<bf16>(x)", CUSTOM, "ReduceScatter", "TP"),
    ("void aiter::cross_device_all_gather<8>(x)", CUSTOM, "AllGather", "TP"),
    ("void flashinfer::x::oneshotAllreduceFusionKernel<8>(x)", CUSTOM, "AllReduce", "TP"),
    ("void flashinfer::x::twoshotAllreduceKernel<8>(x)", CUSTOM, "AllReduce", "TP"),
    ("void x::oneShotAllReduceKernel<half, 8>(x)", CUSTOM, "AllReduce", "TP"),
    ("lowPrecisionTwoShotAllReduceKernel(x)", CUSTOM, "AllReduce", "TP"),
    ("void x::lamport_style_one_shot_all_reduce_norm_kernel<x>", CUSTOM, "AllReduce", "TP"),
    ("void moefinalize_allreduce_fusion_kernel_oneshot<x>(y)", CUSTOM, "AllReduce", "TP"),
    ("c10d::intra_node_comm::hybridCubeMeshAllReduceKernel(x)", CUSTOM, "AllReduce", "TP"),
    (ANON + "multimem_all_reduce_kernel<half, 16>(x)", SYMMETRIC, "AllReduce", "TP"),
    (ANON + "two_shot_all_reduce_kernel_inplace<float>(x)", SYMMETRIC, "AllReduce", "TP"),
    # symmetric memory that several parallelisms use
    (ANON + "multimem_all_gather_kernel<16>(char*)", SYMMETRIC, "AllGather", None),
    ("_multimem_reduce_scatter_kernel", SYMMETRIC, "ReduceScatter", None),
    (ANON + "allToAllV_2d_offset(void*)", SYMMETRIC, "AllToAll", None),
    ("c10d::symmetric_memory::barrier_kernel(x)", SYMMETRIC, "Barrier", None),
    ("nvshmemi_transfer_rma_kernel", "NVSHMEM", "SendRecv", None),
    ("void barrier_on_stream_kernel_threadgroup<(x)1>(x)", "NVSHMEM", "Barrier", None),
    ("barrier_all_on_stream_kernel_warp()", "NVSHMEM", "Barrier", None),
    ("void sync_on_stream_kernel_threadgroup<(threadgroup_t)2>(x)", "NVSHMEM", "Barrier", None),
    ("void alltoall_on_stream_kernel<float>(x)", "NVSHMEM", "AllToAll", None),
    ("void broadcast_on_stream_kernel<float>(x)", "NVSHMEM", "Broadcast", None),
    ("void fcollect_on_stream_kernel<int>(x)", "NVSHMEM", "AllGather", None),
    ("void rdxn_on_stream_kernel<float, (rdxn_ops)6>(x)", "NVSHMEM", "AllReduce", None),
    ("rdxn_float_sum_on_stream_kernel(float*)", "NVSHMEM", "AllReduce", None),
    ("void reducescatter_on_stream_kernel<x>(y)", "NVSHMEM", "ReduceScatter", None),
    ("nvshmemi_signal_op_on_stream_kernel", "NVSHMEM", "OTHER", None),
]  # fmt: skip

COMPUTE = [
    "deep_ep::layout::get_dispatch_layout<256>(x)",
    "void hybrid_ep::scan<256>(x)",
    "moeA2APrepareDispatchKernel(int*, int*)",
    "moeA2ASanitizeExpertIdsKernel(int*)",
    "MoeA2AMappingKernel(int*)",
    "void vllm::moe::moe_align_block_size_kernel<int>(x)",
    "moe_dispatch_permute_kernel",
    "void dispatch_kernel<float>(x)",
    "void at::native::dispatch_something<float>(x)",
    "void combine_kernel<float>(x)",
    "dispatchKernel",
    "void dispatchKernel<float>(x)",
    "void dispatchKernel<float, 4, true>(x)",
    "void other::combineKernel<float, true, false>(x)",
    "myCombineKernel<true, true>(x)",
    "_Z14dispatchKernelIfEvPT_",
    "copy_on_stream_kernel",
    "my_barrier_on_stream",
    "flash_fwd_splitkv_combine_kernel",
    "void flash::flash_fwd_splitkv_combine_kernel<x>(y)",
    "void cutlass::Kernel<EpilogueDispatchPolicy>(x)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(x)",
    "void at::native::_scatter_gather_elementwise_kernel<128>(x)",
    "triton_red_fused_all_reduce_add_0",
    "void gemm<MyTraits<oneShotAllReduceKernel>>(x)",
    "local_device_load_rmsnorm",
    "barrier_kernel",
    "broadcast_kernel",
    "send_recv_layout",
    "oneccl_copy",
    "hcomAicpuInit",
]


@pytest.mark.parametrize(("kernel", "library", "op", "tag"), COMMUNICATION)
def test_communication_kernels_are_recognized(kernel, library, op, tag):
    found = match_name(kernel, PATTERNS)
    assert found is not None
    assert (found.library, found.op, found.tag) == (library, op, tag)


@pytest.mark.parametrize("kernel", COMPUTE)
def test_kernels_with_similar_names_are_compute(kernel):
    assert match_name(kernel, PATTERNS) is None


def test_fused_kernels_are_marked():
    fused = "void x::oneshotAllreduceFusionKernel<8>(y)"
    alone = "void x::twoshotAllreduceKernel<8>(y)"
    assert [match_name(each, PATTERNS).fused for each in (fused, alone)] == [True, False]
