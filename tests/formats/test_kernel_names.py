"""Test what names of kernels tell, against a list of names and against invented ones."""

import csv
import re
import time
from dataclasses import dataclass

import pytest
from builders.shared_data import needs, path_of
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.formats.communication import PATTERNS, Pattern, match_name
from fastcomm.formats.kernel_names import recognize
from fastcomm.formats.symbols import LIMIT, parse

LIST = path_of("kernel_names/kernels.csv")
listed = needs("kernel_names")


def scored(counts_as):
    """The rows of the list that count as communication, or as compute."""
    rows = list(csv.DictReader(LIST.read_text().splitlines()))
    return [row for row in rows if (row["scored"], row["counts_as"]) == ("yes", counts_as)]


@listed
def test_every_listed_name_of_communication_is_recognized():
    rows = scored("communication")
    assert len(rows) > 200
    assert [row["name"] for row in rows if recognize(row["name"]) is None] == []


@listed
def test_no_listed_name_of_compute_or_of_local_work_counts_as_communication():
    rows = scored("compute")
    assert len(rows) > 100
    assert [row["name"] for row in rows if recognize(row["name"])] == []


@listed
def test_the_operation_of_98_percent_of_the_listed_names_is_right():
    rows = [row for row in scored("communication") if row["operation"]]
    wrong = [row["name"] for row in rows if recognize(row["name"]).op != row["operation"]]
    assert len(wrong) <= 0.02 * len(rows), wrong


COMMUNICATION = {
    # mangled
    "_Z39ncclDevKernel_AllReduce_Sum_f16_RING_LL24ncclDevKernelArgsStorageILm4EE": "AllReduce",
    "_Z22ncclDevKernel_SendRecv24ncclDevKernelArgsStorageILm4096EE.kd": "SendRecv",
    "_ZN7deep_ep7elastic12barrier_implILb1ELi4EEEvPvii": "Barrier",
    "_ZN16_GLOBAL__N__1_x_34two_shot_all_reduce_kernel_inplaceIfLi4EEEvPPT_": "AllReduce",
    "_ZTS22Allreduce_small_kernelIfLi8EE": "AllReduce",
    "typeinfo name for Allreduce_small_kernel<float, 8>": "AllReduce",
    # the first flag leaves the gathering out
    "void (anonymous namespace)::two_shot_all_reduce_kernel<x<true>, 4, true, false>(y)": (
        "ReduceScatter"
    ),
    "void (anonymous namespace)::two_shot_all_reduce_kernel<x<true>, 4, false, true>(y)": (
        "AllReduce"
    ),
    "_ZN12_GLOBAL__N_126two_shot_all_reduce_kernelIN1x1yELi4ELb1ELb0EEEvPT_": "ReduceScatter",
    "_ZN12_GLOBAL__N_126two_shot_all_reduce_kernelIN1x1yELi4ELb0ELb0EEEvPT_": "AllReduce",
    # relatives of known libraries
    "mcclAllReduceKernel<RING, float>(P)": "AllReduce",
    "mcclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(mcclWorkElem)": "SendRecv",
    "cnclReduceScatterRing(int*)": "ReduceScatter",
    "mooncake::enqueueTaskKernel(c10d::OpType, unsigned long, long, int, void*)": "OTHER",
    "void magi_attn_comm::grpcoll::intranode::group_cast_kernel<1, 8>(int4*)": "AllToAll",
    "void magi_attn_comm::grpcoll::internode::group_reduce_kernel<1, 8>(int4*)": "AllToAll",
    "void magi_attn_comm::grpcoll::intranode::notify_group_cast_kernel<8>(int*)": "AllToAll",
    "void sglang::custom_all_gather_kernel<float>(P)": "AllGather",
    "_fused_ar_rmsnorm_two_shot_kernel": "AllReduce",
    "one_shot_ar_kernel(ArPeers, float*, long, int, int, unsigned int, int)": "AllReduce",
    "fused_allreduce_add_rmsnorm_kernel": "AllReduce",
    "xla::gpu::CollectivePermuteKernel(int*)": "SendRecv",
    "void all_reduce::kernel<config>(globals)": "AllReduce",
    "void uccl::intranode::dispatch<8>(int4*)": "AllToAll",
    "void uccl::internode::cached_notify<true>(int)": "OTHER",
    "void deep_ep::legacy::internode_ll::combine<true>(void*)": "AllToAll",
    "void deep_ep::elastic::pp_recv_impl<4>(int)": "SendRecv",
    "deep_ep::internode_ll::clean_low_latency_buffer(int*)": "Barrier",
    "nccl_ep_jit_ht_dispatch_kernel": "AllToAll",
    "StagingReshardKernel_Ring(x)": "SendRecv",
    "ncclKernelPutSignal(int*)": "SendRecv",
    "ctran::alltoallp::ncclKernelAllToAllPInitWait(int*)": "AllToAll",
    "void meta::comms::ddaReduceScatterIpc<float, 8>(x)": "ReduceScatter",
    "comms::prims::ring_allgather_kernel(x)": "AllGather",
    "void flashinfer::comm::pcie_ipc::ipc_rsag_push_param_kernel<float>(x)": "AllReduce",
    "void flashinfer::comm::pcie_ipc::all_gather::ipc_push_kernel<float>(x)": "AllGather",
    "void flashinfer::mixed_comm::fused_allreduce_allgather_kernel<8>(x)": "OTHER",
    "bytedance::flux::CudaIpcBarrierAllRingModeKernel(int**)": "Barrier",
    "void bytedance::flux::dis_scatter_forward_flatten_kernel<x>(y)": "AllToAll",
    "mori_shmem_barrier_all_block": "Barrier",
    "EpCombineSyncBarrier_bf16": "Barrier",
    "aiv_reduce_scatter_910b_smalldata_float": "ReduceScatter",
    "MoeDistributeDispatchV2": "AllToAll",
    "sycl_allgatherv_large<float>::Kernel_copy_to_remote_ranks": "AllGather",
    "sycl_reduce_scatter_large<float>::Kernel_GlobalSync": "ReduceScatter",
    "allgatherv_kernel_small(x)": "AllGather",
    "void aiter::ag_gfx1250_naive<8>(x)": "AllGather",
    "c10d::nccl_extension::lsa_get_kernel(x)": "SendRecv",
    "stream_executor::gpu::(anonymous namespace)::RaggedAllToAllKernelImpl(x)": "AllToAll",
    "void push_pull_halos_1d_kernel<float>(x)": "SendRecv",
    "persistent_all_gather": "AllGather",
    "kernel_inter_node_p2p_for_same_local_rank": "SendRecv",
    "void mscclpp::collective::allreduceRsAgZeroCopy<8, (mscclpp::ReduceOp)0, float>(x)": (
        "AllReduce"
    ),
    "void mscclpp::collective::allgatherNvlsZeroCopy<float>(x)": "AllGather",
    "void mscclpp::collective::allreduceNvlsWithCopy2<float>(x)": "AllReduce",
    "void mscclpp::collective::alltoallvFullmesh<float>(x)": "AllToAll",
    "void cutlass::distributed::kernel::full_barrier_kernel<8, unsigned int>(x)": "Barrier",
    "_ZN7cutlass11distributed6kernel19full_barrier_kernelILi8EjEEvPT0_": "Barrier",
    "void rocshmem::internode_ll::dispatch<true, 3, 10, 7168>(void*)": "AllToAll",
    # of no known library
    "void HybridAlltoAllKernel<float>(ncclWindow_st*, unsigned long)": "AllToAll",
    "void simpleAllReduceKernel<float>(ncclWindow_st*, unsigned long)": "AllReduce",
    "naive_hybrid_reduce_scatter(x)": "ReduceScatter",
    "void acme::collectives::AllToAllV<4>(x)": "AllToAll",
    "void acme::ep::dispatch<4>(x)": "AllToAll",
    "acme::comm::barrier_kernel(x)": "Barrier",
    "void ring_all_reduce_kernel<float>(x)": "AllReduce",
    "allreduce7<float>(x)": "AllReduce",
    "void allreduceAllToAll<float>(x)": "AllReduce",
    "all_to_all_chunked": "AllToAll",
    # words before a collective, and of how it is done
    "consumer_all_reduce_kernel": "AllReduce",
    "my_all2all_kernel_v2": "AllToAll",
    "reduce_scatter_persistent_bf16": "ReduceScatter",
    "p2p_copy_kernel": "SendRecv",
    "p2p_bandwidth_test": "SendRecv",
    # steps of a collective that the namespace names, and waits for peers
    "void sgl_kernel::allreduce::one_shot_push_kernel<float>(void*)": "AllReduce",
    "void mine::all_gather::ring_step_kernel<float>(void*)": "AllGather",
    "Notify_Wait": "OTHER",
    "ibgda_poll_cq": "OTHER",
    # annotations of the host
    "gloo:all_reduce": "AllReduce",
    "gloo:something_new": "OTHER",
}

ALONE = [
    "void mooncake::reduceKernel<float>(float*, float const*, unsigned long, unsigned long)",
    "kernel_ring_reduce_tma",  # of what the peers have sent
    "fused_reduce_rmsnorm_kernel",
    "void block::reduce::kernel<float>(float*)",
    "mcclDevResetChecksum(int*)",
    # what torch.compile makes, whatever its operators
    "triton_red_fused_all_reduce_add_0",
    "triton_poi_fused_all_to_all_single_1",
    "triton_for_fused_ncclKernel_AllReduce_2",
    # helpers of libraries that communicate
    "deep_ep::legacy::internode_ll::query_mask_buffer(int*)",
    "void deep_ep::elastic::dispatch_copy_epilogue_impl<1>(x)",
    "void uccl::internode_ll::clean_low_latency_buffer<256>(int*)",
    "nccl_ep_jit_local_permute_reduce_kernel",
    "void ctran::alltoallvdedup::ncclKernelAllToAllvDedupPrepareReset(x)",
    "EpCombineAll_bf16",
    "EpDispatchLowLatencyAsyncSendCopyMultiBlock_bf16",
    "void bytedance::flux::dis_scatter_forward_build_index_flatten_kernel<x>(y)",
    "flashinfer::trtllm_alltoall::moe_prepare::computeCumsumDevice(int*)",
    "ReduceScatterMediumKernel_local_all_sum<float>",
    "sycl_allreduce_large<float>::Kernel_load_input_to_temp_buffer",
    "void nvshmemi_init_array_kernel<long>(x)",
    "c10d::checkForNaN(x)",
    # names in template arguments and parameters
    "void run<ncclDevKernel_AllReduce, deep_ep::intranode::dispatch<8>>(nccl::all_reduce)",
    "_Z3runIN7deep_ep9intranode8dispatchEEvT_",
    "_ZN4mine3runI22ncclDevKernel_SendRecvEEvN4uccl8dispatchE",
    "void cutlass::device_kernel<cutlass::distributed::kernel::Wrapper<x>>(y)",
    "void cutlass::distributed::kernel::gemm_kernel<x>(y)",
    "void (anonymous namespace)::oneRankReduce<FuncPreMulSum<float> >(void*)",
    "notify_dispatch_counters_reset",
    # names that only begin like a collective or a message
    "reduce_scatter_matrix_rows",
    "allreduce_grads",
    "all_gather_loss_kernel",
    "tree_reduce_scatter_add",
    "tile_all_reduce",
    "custom_allreduce_quant_scale",
    "p2p_force_kernel(float4*)",  # from particle to particle
    "p2p_interaction_nbody_kernel",
    "p2p_distance_matrix",
    # words that have two meanings
    "void simpleBlockAllReduceKernel<float>(x)",
    "void hybrid_softmax_all_reduce_kernel<float>(x)",
    "void zeroCopyKernel<float>(x)",
    "void at::native::all_gather_like<float>(x)",
    "void block_all_reduce_sum_f32_kernel<256>(x)",
    "void all_reduce_sum_f16x8_pack_kernel<128>(x)",
    "void AllToAllTransposeKernel<float, 32>(x)",
    "void small_reduce_kernel<float>(x)",
    "void tree_barrier_option_kernel<float>(x)",
    "void combine<float>(x)",
    "MatmulAllReduce",
    "gemm_one_shot_all_reduce_kernel",
    "",
    "<>",
    "_Z",
    "::",
]


@pytest.mark.parametrize(("name", "op"), COMMUNICATION.items())
def test_rules_reach_beyond_the_names_they_were_made_from(name, op):
    assert recognize(name).op == op


@pytest.mark.parametrize("name", ALONE)
def test_work_on_one_device_is_compute(name):
    assert recognize(name) is None


def test_patterns_of_the_user_come_first():
    pattern = Pattern(regex="^triton_.*all_reduce", library="mine", op="Broadcast")
    rules = (pattern, *PATTERNS)
    assert match_name("triton_red_fused_all_reduce_0", rules).op == "Broadcast"
    assert match_name("ncclDevKernel_AllReduce", rules).op == "AllReduce"


@pytest.mark.parametrize(
    ("name", "scopes", "function"),
    [
        ("void a::b<c::d<e>, (f)1>::g<h>(i::j<k>)", ("a", "b"), "g"),
        ("std::enable_if<(a::b)1, void>::type c::d<e>(f)", ("c",), "d"),
        ("unsigned int a::b(int)", ("a",), "b"),
        ("(anonymous namespace)::a(int)", (), "a"),
        ("a::(anonymous namespace)::b", ("a",), "b"),
        ("a_0d1d2", (), "a_0d1d2"),
        ("_ZL1aPf", (), "a"),
        ("_Z1aILi3EEvi.kd", (), "a"),
        ("_ZN1a12_GLOBAL__N_11bEv", ("a",), "b"),
        ("_ZNSt1aE", (), "a"),
        ("_ZN1aIN1b1cIiEELN1d1eE12EE1fIiEEvv", ("a",), "f"),
        ("_ZN1aILS0_15EL1b2EE1cEv", ("a",), "c"),
        ("_ZN1aIZN1b1cEvEUlvE_ZN1d1eEvEUlvE12_E1fEv", ("a",), "f"),
        ("_ZN1aIJLb1EiEE1bE", ("a",), "b"),
    ],
)
def test_names_are_taken_apart(name, scopes, function):
    symbol = parse(name)
    assert (symbol.scopes, symbol.function) == (scopes, function)


IDENTIFIERS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,11}", fullmatch=True).filter(
    lambda name: not name.startswith("_GLOBAL__N_")
)


@dataclass(frozen=True)
class Argument:
    """A template argument, as both kinds of names spell it."""

    plain: str
    mangled: str
    flag: bool | None = None


def nested(path, arguments):
    """A class with template arguments, as an argument."""
    plain = "::".join(path) + f"<{', '.join(each.plain for each in arguments)}>"
    inner = "".join(f"{len(part)}{part}" for part in path)
    return Argument(plain, f"N{inner}I{''.join(each.mangled for each in arguments)}EE")


PATHS = st.lists(IDENTIFIERS, min_size=1, max_size=3)
LEAVES = st.one_of(
    st.booleans().map(lambda flag: Argument(str(flag).lower(), f"Lb{flag:d}E", flag)),
    st.integers(-999, 999).map(lambda n: Argument(str(n), f"Li{'n' * (n < 0)}{abs(n)}E")),
    st.sampled_from(
        [Argument("float", "f"), Argument("int*", "Pi"), Argument("__half", "6__half")]
    ),
    st.tuples(PATHS.filter(lambda path: len(path) > 1), st.integers(0, 99)).map(
        lambda both: Argument(
            f"({'::'.join(both[0])}){both[1]}",
            f"LN{''.join(f'{len(part)}{part}' for part in both[0])}E{both[1]}E",
        )
    ),
)
ARGUMENTS = st.recursive(
    LEAVES, lambda each: st.builds(nested, PATHS, st.lists(each, min_size=1, max_size=3))
)


@given(PATHS, st.lists(ARGUMENTS, min_size=1, max_size=4))
def test_both_kinds_of_names_denote_the_same_function_and_flags(path, arguments):
    kernel = nested(path, arguments)
    flags = [each.flag for each in arguments if each.flag is not None]
    for name in (f"void {kernel.plain}(a::b<true>*)", f"_Z{kernel.mangled}vPN1a1bILb1EEE"):
        symbol = parse(name)
        assert (*symbol.scopes, symbol.function) == tuple(path)
        assert [flag for flag in symbol.flags() if flag is not None] == flags


HOSTILE = [
    *("<", "(", "a<", "a(", "a::", "a<b>::", "a ", "void ", "(anonymous namespace)::", "all_"),
    *("A", "Aa", "aA", "_", "all_reduce", "AllToAll", "all to ", "\x00", "é"),
    *("_ZN", "_ZN1aI", "_Z1a" + "I", "N", "1a", "L", "LN1a", "E", "S_", "Ul", "IJ", "0", "9"),
]
STARTS = ("", "void ", "a<", "_Z", "_ZN", "_ZN1aI", "_ZN26two_shot_all_reduce_kernelI")


@pytest.mark.parametrize("start", STARTS)
def test_long_names_without_end_cost_little_time(start):
    def seconds(name):
        begin = time.perf_counter()
        recognize(name)
        return time.perf_counter() - begin

    for part in HOSTILE:
        name = start + part * (1_000_000 // len(part))
        assert min(seconds(name) for _ in range(3)) < 0.05, part
        assert recognize(name) == recognize(name[: LIMIT + 1])


@given(st.text("_ZNLEISKTDUlvbi019abc<>(),: ", max_size=60))
def test_no_name_is_too_strange(name):
    for text in (name, f"_Z{name}", f"_ZN1a{name}", f"dispatchKernel{name}"):
        parse(text).flags()
        recognize(text)


def test_long_numbers_of_generated_names_tell_nothing():
    for name in (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL_123456",
        "my_all2all_kernel_20260101",
    ):
        assert recognize(name) == recognize(re.sub("[0-9]{4,}", "9876", name)) is not None
    assert recognize("gemm_123456") is None
    # The number of a mangled name is the length of what follows.
    assert recognize(f"_ZN7deep_ep9intranode1200{'x' * 1200}8dispatchEv") is not None


@pytest.mark.parametrize(
    ("name", "op"),
    [
        (
            "void flashinfer::trtllm_alltoall::moeCommKernel(FusedMoeCommKernelParam)",
            "AllToAll",
        ),
        ("void flashinfer::comm::moe_alltoall::dispatchKernel<8>(X)", "AllToAll"),
        ("_dispatch_kernel_intranode_ep", "AllToAll"),
        ("ncclep_ht_dispatch_kernel", "AllToAll"),
        ("_ring_attention_p2p_send_recv_kernel", "SendRecv"),
        ("rccl_main_kernel_AllReduce_Sum_bf16", "AllReduce"),
        (
            "void tensorrt_llm::lowprecision_allreduce::lowPrecisionTwoShotKernel<8>(X)",
            "AllReduce",
        ),
        ("void allspark::AllReduceRMSNormKernel<4>(X)", "AllReduce"),
        ("void fastertransformer::customAllReduceKernel<float, 8>(X)", "AllReduce"),
        ("void pplx::combineKernel<512, 8>(int)", "AllToAll"),
        ("oneccl::sycl::allreduce_scaleout_kernel<float>", "AllReduce"),
        ("ncclxRmaPutKernel(int)", "SendRecv"),
        ("nvshmemi_broadcastmem_on_stream_kernel", "Broadcast"),
        ("alltoallmem_on_stream_kernel", "AllToAll"),
        ("fcollectmem_on_stream_kernel", "AllGather"),
    ],
)
def test_kernels_of_neighbors_are_recognized_by_their_words(name, op):
    assert recognize(name).op == op


@pytest.mark.parametrize(
    "name",
    [
        "void deep_ep::internode::get_dispatch_layout<2>(long)",
        "_combine_kernel",
        "ucc_reduce_multi_kernel_float_sum",
        "void vllm::all_gather_cp_local_kv<float>(X)",
        "kernel_cutlass_dense_gemm_tensorptr_0",
        "cudnn_generated_oss_sdpa_sm100_flash_bprop_reduce_kernel",
    ],
)
def test_kernels_of_one_device_are_compute(name):
    assert recognize(name) is None
