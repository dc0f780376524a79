"""Test tags of a whole rank: events without groups, data parallelism, useless rules."""

import json

import pytest
from builders import kineto_text as k
from builders.commands import invoke as fastcomm
from builders.opened import open_run

from fastcomm.formats.communication import Pattern
from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute_metrics
from fastcomm.trace.rank_grid import Parallel
from fastcomm.trace.tags import TagRule

GEMM = "ampere_sgemm_128x64_tn"
BACKWARD = "void at::native::layer_norm_grad_input_backward_kernel<float>(x)"
FUSED = "void vllm::cross_device_reduce_2stage<half, 8>(x)"
DISPATCH = "void deep_ep::intranode::dispatch<8, 768>(int4*)"
REDUCE = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)"
GATHER = "ncclKernel_AllGather_RING_LL(ncclDevComm*)"
EXCHANGE = "ncclKernel_SendRecv(ncclDevComm*)"
WORLD = {"Process_Group_Name": "0", "Process_Group_Description": "default_pg"}


def kernels(*names, stream=20, **said):
    """Kernels one behind the other, after one that computes."""
    device = [(GEMM, 7, {}), *((name, stream, said) for name in names)]
    return [
        k.kernel(name, 10 * place + 10, 5, on, **args)
        for place, (name, on, args) in enumerate(device)
    ]


@pytest.fixture
def run(tmp_path):
    """Write a trace for each rank, and measure."""

    def measure(*events, ranks=1, world=None, **options):
        marks = [k.mark("ProfilerStep#0", 0, 5000)]
        for rank in range(ranks):
            document = k.document([*marks, *events], rank=rank, world=world or ranks)
            if world is None:
                del document["distributedInfo"]
            (tmp_path / f"rank{rank}.json").write_text(json.dumps(document))
        parallel = Parallel(**options.pop("parallel", {}))
        config = Config(parallel=parallel, **options)
        return compute_metrics(open_run(tmp_path, config=config)).to_dict()

    return measure


def tags(found):
    return {(row["description"], row["tag"], row["tag_source"]) for row in found["groups"]}


def unused(found):
    return [each for each in found["warnings"] if "changed nothing" in each]


@pytest.mark.parametrize("name", ["dp", "tp", "cp", "pp"])
def test_in_a_one_dimensional_grid_all_communication_has_its_tag(run, name):
    events = [
        *kernels(REDUCE, EXCHANGE, "ncclDevKernel_Generic_1(x)"),
        *kernels(REDUCE, **WORLD),
    ]
    found = run(*events, ranks=2, parallel={name: 2})
    assert {row["tag"] for row in found["groups"]} == {name.upper()}
    assert {row["tag_source"] for row in found["groups"]} == {"ranks"}
    assert sum(row["events"] for row in found["groups"]) == 8
    assert not unused(found)


def test_the_world_is_as_large_as_there_are_ranks_where_nothing_else_says_it(run):
    found = run(*kernels(REDUCE), ranks=4, parallel={"tp": 1})
    assert tags(found) == {(None, "DP", "ranks")}
    assert not [each for each in found["warnings"] if "how many ranks" in each]


def test_a_world_size_derived_from_options_is_reported(run):
    found = run(*kernels(REDUCE), parallel={"cp": 2})
    assert tags(found) == {(None, "CP", "ranks")}
    (said,) = [each for each in found["warnings"] if "how many ranks" in each]
    assert "--cp 2 is taken for 2 ranks" in said


def test_a_one_dimensional_grid_does_not_override_names_and_experts(run):
    tensor = {"Process_Group_Name": "1", "Process_Group_Description": "mesh_tp"}
    events = [*kernels(REDUCE, **tensor), *kernels(DISPATCH, FUSED, stream=9)]
    found = run(*events, ranks=2, parallel={"dp": 2})
    assert tags(found) == {
        ("mesh_tp", "TP", "description"),
        (None, "EP", "heuristic"),
        (None, "DP", "ranks"),
    }


def test_a_rule_by_stream_tags_events_that_have_no_group(run):
    rule = TagRule(field="stream", value=14, tag="PP")
    found = run(*kernels(EXCHANGE, stream=14), *kernels(EXCHANGE, stream=15), tags=(rule,))
    assert tags(found) == {(None, "PP", "explicit"), (None, "OTHER", "none")}
    assert not unused(found)


def test_a_guess_tags_each_operation_without_a_group(run):
    exchange = "ncclSymkDevKernel_AllToAll(x)"
    found = run(*kernels(exchange, REDUCE), guess_tags=True)
    assert tags(found) == {(None, "EP", "heuristic"), (None, "DP", "heuristic")}
    assert {row["tag"] for row in run(*kernels(exchange, REDUCE))["groups"]} == {"OTHER"}


@pytest.mark.parametrize("said", [{}, WORLD])
@pytest.mark.parametrize("names", [[REDUCE], [GATHER, REDUCE], [REDUCE, BACKWARD] * 20])
def test_a_plain_run_is_data_parallel_by_heuristic(run, names, said):
    assert tags(run(*kernels(*names, **said))) == {
        (said.get("Process_Group_Description"), "DP", "heuristic")
    }


OTHERS = {
    "an exchange": kernels(REDUCE, EXCHANGE),
    "a kernel of tensor parallel layers": kernels(REDUCE, FUSED),
    "two streams, and so two groups": [*kernels(REDUCE), *kernels(REDUCE, stream=21)],
    "a group with another name": [
        *kernels(REDUCE, **WORLD),
        *kernels(REDUCE, Process_Group_Description="mine", Process_Group_Name="3"),
    ],
    "nothing but communication": [k.kernel(REDUCE, 10, 5)],
    "a serving engine": kernels(REDUCE, "void vllm::reshape_and_cache_flash_kernel<half>(x)"),
    "layers in every step, and no sign of training": kernels(*[REDUCE] * 40),
    "as many equal sums as layers have": [
        *kernels(BACKWARD),
        *(k.all_reduce(20 + 10 * at, 5, Group_size=8, **WORLD) for at in range(40)),
    ],
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_run_that_may_have_more_than_data_parallelism_is_not_guessed(run, what):
    found = run(*OTHERS[what])
    assert "DP" not in {row["tag"] for row in found["groups"]}


def test_a_world_without_a_description_is_data_parallel_only_in_training(run):
    said = {
        "Process_Group_Description": "undefined",
        "Process_Group_Name": "3",
        "Group_size": 2,
    }
    events = [*kernels(REDUCE, **said)]
    assert tags(run(*events, ranks=2, world=2)) == {("undefined", "OTHER", "none")}
    found = run(*events, *kernels(BACKWARD, stream=7), ranks=2, world=2)
    assert tags(found) == {("undefined", "DP", "heuristic")}


def test_annotations_of_ddp_or_fsdp_resolve_equal_all_reduces(run):
    mark = k.mark("DistributedDataParallel.forward", 5, 10)
    found = run(mark, *OTHERS["as many equal sums as layers have"])
    assert tags(found) == {("default_pg", "DP", "heuristic")}


@pytest.mark.parametrize("call", ["c10d::allreduce_", "record_param_comms"])
@pytest.mark.parametrize("title", ["FSDP::sums", "DDP sums", "Optimizer.step", "backward"])
def test_names_of_calls_by_the_user_are_no_sign_of_training(run, call, title):
    events = OTHERS["as many equal sums as layers have"]
    if not title.startswith(("FSDP", "DDP")):
        events = OTHERS["layers in every step, and no sign of training"]
    issued = k.event(call, "cpu_op", 4, 20, pid=100, tid=1)
    named = run(issued, k.mark(title, 5, 10), *events)
    assert {row["tag"] for row in named["groups"]} == {"OTHER"}


def test_sizes_that_contradict_described_groups_are_named_in_a_warning(run):
    said = {"Process_Group_Description": "TENSOR_MODEL_PARALLEL_GROUP"}
    said["Process_Group_Ranks"] = "[0, 1]"
    events = kernels(REDUCE, **said)
    found = run(*events, ranks=4, world=4, parallel={"tp": 4})
    assert {row["tag"] for row in found["groups"]} == {"TP"}
    (warning,) = unused(found)
    assert "the traces describe TP groups of 2 ranks, not 4, and decide" in warning
    assert not unused(run(*events, ranks=4, world=4, parallel={})), "no sizes, no warning"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tags": (TagRule(field="stream", value=3, tag="DP"),)},
         "[[tags]] stream = 3 changed nothing: no group has all its communication on this "
         "stream; communication is on streams 20"),
        ({"tags": (TagRule(field="name", value="x", tag="DP"),)},
         "[[tags]] name = 'x' changed nothing: the traces do not say the name of any group; "
         "use stream = N: communication is on streams 20"),
        ({"tags": (TagRule(field="ranks", value=(0, 1), tag="DP"),)},
         "[[tags]] ranks = [0, 1] changed nothing: the traces do not say the ranks"),
        ({"tags": (TagRule(field="stream", value=20, tag="DP"),
                   TagRule(field="stream", value=20, tag="TP"))},
         "[[tags]] stream = 20 changed nothing: an earlier rule decides"),
        ({"parallel": {"dp": 2, "tp": 2}},
         "--tp 2 --dp 2 changed nothing: the traces do not say which ranks form a process"),
        ({"guess_tags": True}, "--guess-tags changed nothing: the traffic fits several"),
    ],
)  # fmt: skip
def test_options_without_effect_are_warned_of_with_the_reason(run, options, reason):
    found = run(*kernels(*[EXCHANGE] * 2), ranks=2, **options)
    assert [each[: len(reason)] for each in unused(found)] == [reason]


def test_a_rule_that_matches_on_one_rank_has_an_effect(tmp_path):
    for rank in range(2):
        said = {"Process_Group_Name": str(rank), "Process_Group_Description": f"mine_{rank}"}
        events = [k.mark("ProfilerStep#0", 0, 900), *kernels(REDUCE, **said)]
        k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=2)
    config = tmp_path / "rules.toml"
    config.write_text('[[tags]]\ndescription = "mine_1"\ntag = "DP"\n')
    found = json.loads(fastcomm("metrics", tmp_path, "--config", config, "--json").stdout)
    assert tags(found) == {("mine_0", "OTHER", "none"), ("mine_1", "DP", "explicit")}
    assert not unused(found)
    config.write_text('[[tags]]\ndescription = "mine_2"\ntag = "DP"\n')
    found = json.loads(fastcomm("metrics", tmp_path, "--config", config, "--json").stdout)
    (said,) = unused(found)
    assert said.endswith("no group has this description; the traces have mine_0")


def test_sizes_without_effect_on_described_groups_are_warned_of(run):
    said = {"Process_Group_Description": "mesh_dp", "Process_Group_Name": "1"}
    (warning,) = unused(run(*kernels(REDUCE, **said), ranks=2, parallel={"dp": 2}))
    assert warning.startswith("--dp 2 changed nothing: the framework describes every")


def test_kernels_of_experts_are_listed_with_how_that_is_known(tmp_path):
    names = [
        DISPATCH,
        "void deep_ep::intranode::combine<8>(x)",
        "hybrid_ep::dispatch_kernel(x)",
    ]
    events = [k.mark("ProfilerStep#0", 0, 900), *kernels(*names)]
    k.write(tmp_path / "rank0.json", events)
    found = json.loads(fastcomm("metrics", tmp_path, "--json").stdout)
    (group,) = found["groups"]
    assert (group["tag"], group["tag_source"], group["events"]) == ("EP", "heuristic", 3)
    assert (group["description"], group["size"], group["on_ranks"]) == (None, None, 1)
    (said,) = [each for each in found["warnings"] if "by their name" in each]
    assert said.startswith("DeepEP kernels are EP by their name alone")
    printed = fastcomm("metrics", tmp_path).stdout
    assert "guessed" in printed
    assert "DeepEP kernels are EP by their name" in printed
    page = tmp_path / "page.html"
    fastcomm("metrics", tmp_path, "--html", page)
    assert "heuristic" in page.read_text()
    assert "DeepEP kernels are EP by their name" in page.read_text()


def test_a_guess_has_nothing_to_add_to_plain_data_parallelism(run):
    found = run(*kernels(REDUCE), guess_tags=True)
    assert tags(found) == {(None, "DP", "heuristic")}
    (said,) = unused(found)
    assert said.endswith("every process group has its parallelism already")


def test_rules_of_the_user_override_expert_kernels(run):
    rule = TagRule(field="stream", value=20, tag="OTHER")
    assert tags(run(*kernels(DISPATCH), tags=(rule,))) == {(None, "OTHER", "explicit")}


def test_a_store_tags_as_its_traces_do(tmp_path):
    events = [k.mark("ProfilerStep#0", 0, 900), *kernels(REDUCE), *kernels(DISPATCH, stream=9)]
    for rank in range(2):
        k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=2)
    store = tmp_path / "store"
    rule = tmp_path / "rule.toml"
    rule.write_text('[[tags]]\nstream = 3\ntag = "PP"\n')
    fastcomm("ingest", *sorted(tmp_path.glob("rank*.json")), "-o", store)
    for words in ([], ["--dp", "2"], ["--guess-tags"], ["--config", rule]):
        raw, stored = (
            json.loads(fastcomm("metrics", *paths, *words, "--json").stdout)
            for paths in (sorted(tmp_path.glob("rank*.json")), [store])
        )
        assert stored["groups"] == raw["groups"]
        assert stored["warnings"] == raw["warnings"]


@pytest.mark.parametrize(
    ("name", "sizes", "wanted"),
    [
        ("dlrm_8rank", {"dp": 8}, {(None, "DP", "ranks")}),
        ("dlrm_8rank", {"cp": 8}, {(None, "CP", "ranks")}),
        ("dlrm_8rank", {}, {(None, "OTHER", "none")}),
        ("mi300_resnet", {}, {("default_pg", "DP", "heuristic"), (None, "DP", "heuristic")}),
        ("nccl_2rank_rank0.json.gz", {}, {("default_pg", "DP", "heuristic")}),
        ("b200_vllm", {}, {("undefined", "OTHER", "none"), (None, "TP", "heuristic")}),
        ("b200_vllm", {"tp": 8}, {("undefined", "TP", "ranks"), (None, "TP", "ranks")}),
    ],
)
def test_real_traces_have_their_known_tags(kineto, name, sizes, wanted):
    options = Config(parallel=Parallel(**sizes))
    found = compute_metrics(open_run(kineto / name, config=options).only([0]))
    assert tags(found.to_dict()) == wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--dp", "2"], {("DP", "ranks")}),
        (["--cp", "2"], {("CP", "ranks")}),
        (["--guess-tags"], {("EP", "heuristic"), ("OTHER", "none")}),
        ([], {("OTHER", "none")}),
    ],
)
def test_a_report_without_payloads_is_tagged_by_options(nsys, options, wanted):
    words = ["metrics", nsys / "mfu_2gpu.sqlite", *options, "--json"]
    found = json.loads(fastcomm(*words).stdout)
    assert {(row["tag"], row["tag_source"]) for row in found["groups"]} == wanted
    assert not unused(found)


def pattern(regex):
    return Pattern(regex=regex, library="user", op="AllReduce")


def test_a_kernel_pattern_without_effect_is_explained(run):
    first, later = pattern("^ampere_"), pattern("sgemm")
    found = run(*kernels(REDUCE), kernels=(first, later, pattern("nosuchkernel.*")))
    assert unused(found) == [
        "[[kernels]] pattern = 'sgemm' changed nothing: an earlier pattern decides for the "
        "same kernels; put it first",
        "[[kernels]] pattern = 'nosuchkernel.*' changed nothing: no kernel has such a name",
    ]
    found = run(k.event("Memcpy HtoD", "gpu_memcpy", 10, 5), kernels=(first,))
    assert unused(found) == [
        "[[kernels]] pattern = '^ampere_' changed nothing: there are no kernels"
    ]


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({}, "no sizes are given; pass --dp, --tp, --pp, --ep and --cp with it"),
        ({"tp": 4}, "the groups of these sizes are the same in any order"),
        ({"tp": 2, "dp": 2}, "the traces do not say which ranks form a process group"),
    ],
)
def test_an_order_without_effect_is_explained(run, parallel, reason):
    found = run(*kernels(REDUCE), ranks=4, parallel={"order": "dp-tp", **parallel})
    (said,) = (each for each in unused(found) if each.startswith("--order dp-tp"))
    assert said.startswith(f"--order dp-tp changed nothing: {reason}")


def test_an_order_that_may_have_an_effect_is_not_warned_of(run):
    members = {"Process_Group_Name": "1", "Process_Group_Ranks": "[0, 1]", "Group_size": 2}
    for order, tag in (("tp-dp", "TP"), ("dp-tp", "DP")):
        found = run(
            *kernels(REDUCE, **members), world=4, parallel={"order": order, "tp": 2, "dp": 2}
        )
        assert tags(found) == {(None, tag, "ranks")}
        assert not unused(found)
