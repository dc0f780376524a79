"""Test every known description, and the precedence of evidence."""

import pytest
from builders.growth import MOST, growth
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.rank_grid import Grid
from fastcomm.trace.schema import OPS, TAG_SOURCES
from fastcomm.trace.tags import (
    DESCRIPTIONS,
    MESH,
    Behavior,
    ProcessGroup,
    Tagged,
    TagRule,
    TagRules,
    tag_group,
    tag_of_description,
)

QUIET = Behavior()
MEGATRON = {
    "TP": "TENSOR_MODEL_PARALLEL_GROUP EXPERT_TENSOR_PARALLEL_GROUP TP_BOOTSTRAP_GROUP_MPI",
    "DP": "DATA_PARALLEL_GROUP DATA_PARALLEL_GROUP_GLOO DATA_PARALLEL_GROUP_WITH_CP"
    " DATA_PARALLEL_GROUP_WITH_CP_GLOO DATA_PARALLEL_GROUP_WITH_CP_AG"
    " DATA_PARALLEL_GROUP_WITH_GTP_REMAT DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT"
    " INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO"
    " INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"
    " HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0 EXPERT_DATA_PARALLEL_GROUP_GLOO"
    " HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L1"
    " EXPERT_DATA_PARALLEL_GROUP EXPERT_DATA_PARALLEL_GROUP_AG"
    " EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT GTP_WEIGHT_REMAT_GROUP"
    " EXPERT_GTP_WEIGHT_REMAT_GROUP WEIGHT_GRADIENT_COMM_GROUP",
    "PP": "PIPELINE_MODEL_PARALLEL_GROUP EMBEDDING_GROUP POSITION_EMBEDDING_GROUP",
    "CP": "CONTEXT_PARALLEL_GROUP HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0"
    " HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1 HYBRID_DP_CP_GROUP_4",
    "EP": "EXPERT_MODEL_PARALLEL_GROUP EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "OTHER": "MODEL_PARALLEL_GROUP CONTEXT_AND_MODEL_PARALLEL_GROUP NON_DP_GROUP"
    " TENSOR_AND_DATA_PARALLEL_GROUP"
    " TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP TENSOR_AND_CONTEXT_PARALLEL_GROUP"
    " EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
    " EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP"
    " INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
}
MESHES = {
    "DP": "dp dp_shard dp_replicate fsdp hsdp dp_shard_cp dp_replicate_dp_shard dp_cp"
    " dp_replicate_dp_shard_cp dp_shard_mod_ep efsdp dp_shard_in_ep dp_mod_ep dp_in_ep"
    " loss_mesh batch batch_cp outer_fsdp_dp dp_outer dp_inner expert_dp expt_dp ddp ddp_fsdp"
    " infer_dp ep_shard ep_replicate ep_replicate_ep_shard replicate shard replicas shards"
    " data_parallel outer_fsdp_dp_dp_cp dp_replicate_fsdp dp_sp",
    "TP": "tp etp infer_tp expt_tp tensor_parallel",
    "PP": "pp infer_pp pipeline_parallel",
    "CP": "cp sp context_parallel sequence_parallel",
    "EP": "ep expert_parallel",
    "OTHER": "dp_tp cp_tp pp_dp_shard_cp_tp ep_tp",
}
ROWS = [(text, tag) for tag, texts in MEGATRON.items() for text in texts.split()]
# Some name the dimension alone.
ROWS += [(text, "DP") for text in ("dp_shard_in_ep", "ep_replicate", "efsdp", "fsdp")]
ROWS += [("etp", "TP"), ("tp", "TP"), ("pp", "PP"), ("cp", "CP"), ("ep", "EP")]
ROWS += [(f"mesh_{text}", tag) for tag, texts in MESHES.items() for text in texts.split()]


def tagged(group=None, counts=None, *, iterations=1, **rules):
    behavior = Behavior(counts=counts or {}, iterations=iterations)
    return tag_group(group or ProcessGroup(), behavior, TagRules(**rules))


@pytest.mark.parametrize(("description", "tag"), ROWS)
def test_a_known_description_gives_its_tag(description, tag):
    assert tagged(ProcessGroup(description=description)) == Tagged(
        tag=tag, source="description"
    )


@pytest.mark.parametrize(
    "description",
    ["", "undefined", "0:split:3", "default_pg:split:1", "mesh_", "mesh_loss", "mesh_tpp", "TP",
     "mesh_dim_0", "mesh_dim_12", "MY_DATA_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_2",
     "mesh_tp_"],
)  # fmt: skip
def test_other_descriptions_give_no_tag(description):
    assert tag_of_description(description) is None
    assert tagged(ProcessGroup(description=description)) == Tagged(tag="OTHER", source="none")
    ranks = ProcessGroup(description=description, ranks=(0, 2))
    assert tagged(ranks, grid=Grid.of(4, tp=2)) == Tagged(tag="DP", source="ranks")


def test_an_ambiguous_description_is_resolved_by_all_to_alls():
    # NeMo Automodel shards the weights of experts over "ep_shard"; OLMo-core exchanges tokens.
    group = ProcessGroup(description="mesh_ep_shard")
    assert tagged(group, {"AllGather": 4, "ReduceScatter": 2}).tag == "DP"
    assert tagged(group, {"AllToAll": 4}) == Tagged(tag="EP", source="description")


@pytest.mark.parametrize("description", ["default_pg", "mesh_default"])
def test_the_world_is_dp_only_where_the_grid_says_so(description):
    world = ProcessGroup(description=description, ranks=(0, 1, 2, 3))
    other = Tagged(tag="OTHER", source="description")
    assert tagged(world) == other
    assert tagged(world, grid=Grid.of(4)) == Tagged(tag="DP", source="description")
    assert tagged(world, grid=Grid.of(4, cp=2)).tag == "DP"
    assert tagged(world, grid=Grid.of(4, tp=2)) == other
    assert tagged(world, {"AllReduce": 3}) == other


def test_names_of_the_tables_are_those_of_the_schema():
    assert {tag for _, tag in DESCRIPTIONS} | set(MESH.values()) <= set(TAGS)


def test_evidence_has_an_order_of_precedence():
    grid = Grid.of(4, tp=2)
    rule = TagRule(field="ranks", value=(1, 0), tag="EP")
    group = ProcessGroup(description="DATA_PARALLEL_GROUP", ranks=(0, 1))
    assert tagged(group, explicit=(rule,), grid=grid) == Tagged(tag="EP", source="explicit")
    assert tagged(group, grid=grid) == Tagged(tag="DP", source="description")
    assert tagged(ProcessGroup(ranks=(0, 1)), grid=grid) == Tagged(tag="TP", source="ranks")
    pair = ProcessGroup(ranks=(1, 2))
    assert tagged(pair, {"SendRecv": 1}, grid=grid) == Tagged(tag="OTHER", source="none")
    guessed = tagged(pair, {"SendRecv": 1}, grid=grid, guess=True)
    assert guessed == Tagged(tag="PP", source="heuristic")


GROUP = ProcessGroup(
    name="17", description="my_group", ranks=(4, 5), communicator=2**63 + 1, streams=(20,)
)


@pytest.mark.parametrize(
    ("field", "value", "hit"),
    [
        ("name", "17", True),
        ("name", "1", False),
        ("name", "1?", True),
        ("description", "my_*", True),
        ("description", "MY_*", False),
        ("ranks", (5, 4), True),
        ("ranks", (4, 5, 6), False),
        ("communicator", 2**63 + 1, True),
        ("communicator", 1, False),
        ("stream", 20, True),
        ("stream", 7, False),
    ],
)
def test_a_rule_matches_its_field(field, value, hit):
    rule = TagRule(field=field, value=value, tag="CP")
    assert tagged(GROUP, explicit=(rule,)).tag == ("CP" if hit else "OTHER")
    assert not rule.matches(ProcessGroup())


def test_the_first_rule_that_matches_wins():
    rules = (
        TagRule(field="name", value="[x]", tag="TP"),
        TagRule(field="name", value="*", tag="EP"),
    )
    assert tagged(ProcessGroup(name="[x]"), explicit=rules).tag == "TP"
    assert tagged(ProcessGroup(name="x"), explicit=rules).tag == "TP"
    assert tagged(ProcessGroup(name="y"), explicit=rules).tag == "EP"


ALL = tuple(range(8))


@pytest.mark.parametrize(
    ("words", "ranks", "counts", "tag", "candidates"),
    [
        ({"ep": 8}, ALL, {"AllToAll": 9, "Broadcast": 1}, "EP", ("DP", "EP")),
        ({"ep": 8}, ALL, {"AllReduce": 2, "Barrier": 1}, "DP", ("DP", "EP")),
        ({"ep": 8}, ALL, {"ReduceScatter": 2, "AllGather": 2}, "DP", ("DP", "EP")),
        ({"ep": 8}, ALL, {"AllReduce": 2, "AllToAll": 9}, "OTHER", ("DP", "EP")),
        ({"ep": 8}, ALL, {"AllGather": 2}, "OTHER", ("DP", "EP")),
        ({"ep": 8}, ALL, {"AllToAll": 0}, "OTHER", ("DP", "EP")),
        ({"cp": 8}, ALL, {"AllToAll": 9}, "CP", ("DP", "CP")),
        ({"cp": 8}, ALL, {"SendRecv": 9}, "CP", ("DP", "CP")),
        ({"cp": 8}, ALL, {"AllReduce": 9}, "DP", ("DP", "CP")),
        ({"cp": 4, "ep": 4}, ALL[:4], {"AllToAll": 9}, "EP", ("EP", "CP")),
        ({"cp": 4, "ep": 4}, ALL[:4], {"SendRecv": 9}, "CP", ("EP", "CP")),
        ({"tp": 4, "ep": 4}, ALL[:4], {"AllReduce": 99}, "TP", ("TP", "EP")),
        ({"tp": 4, "ep": 4}, ALL[:4], {"AllReduce": 9}, "OTHER", ("TP", "EP")),
        ({"tp": 4, "ep": 4}, ALL[:4], {"AllToAll": 99}, "EP", ("TP", "EP")),
    ],
)
def test_behavior_breaks_a_tie_or_leaves_it_open(words, ranks, counts, tag, candidates):
    found = tagged(ProcessGroup(ranks=ranks), counts, grid=Grid.of(8, **words))
    source = "none" if tag == "OTHER" else "heuristic"
    assert found == Tagged(tag=tag, source=source, candidates=candidates)


@pytest.mark.parametrize(
    ("group", "counts", "tag"),
    [
        (ProcessGroup(ranks=(0, 4)), {"SendRecv": 3}, "PP"),
        (ProcessGroup(size=2), {"SendRecv": 3}, "PP"),
        (ProcessGroup(size=3), {"SendRecv": 3}, "OTHER"),
        (ProcessGroup(), {"AllToAll": 3}, "EP"),
        (ProcessGroup(ranks=(0, 1, 2, 3)), {"AllReduce": 32}, "TP"),
        (ProcessGroup(ranks=(4, 5)), {"ReduceScatter": 32, "AllGather": 32}, "TP"),
        (
            ProcessGroup(ranks=(4, 5)),
            {"AllReduce": 31},
            "OTHER",
        ),  # fewer than 16 in each of two
        (ProcessGroup(ranks=(0, 4)), {"AllReduce": 99}, "OTHER"),
        (ProcessGroup(size=4), {"AllReduce": 99}, "OTHER"),
        (ProcessGroup(description="default_pg", ranks=(0, 1)), {"AllReduce": 1}, "DP"),
        (ProcessGroup(description="default_pg"), {"AllGather": 1}, "OTHER"),
        (ProcessGroup(), {}, "OTHER"),
    ],
)
def test_tags_are_guessed_only_on_request(group, counts, tag):
    assert tagged(group, counts, iterations=2).tag == "OTHER"
    found = tagged(group, counts, iterations=2, guess=True)
    assert found.tag == tag
    assert (found.source == "heuristic") == (tag != "OTHER")


def test_an_all_to_all_is_of_context_ranks_where_the_grid_has_no_experts():
    odd = ProcessGroup(ranks=(1, 2))
    assert tagged(odd, {"AllToAll": 1}, grid=Grid.of(8, tp=2, cp=2), guess=True).tag == "CP"


@given(
    st.builds(
        ProcessGroup,
        name=st.none() | st.text(max_size=8),
        description=st.none()
        | st.text(max_size=8)
        | st.sampled_from([text for text, _ in ROWS]),
        ranks=st.none() | st.lists(st.integers(-2, 20), max_size=8).map(tuple),
        size=st.none() | st.integers(0, 20),
    ),
    st.dictionaries(st.sampled_from(OPS), st.integers(0, 50)),
    st.booleans(),
    st.sampled_from([None, Grid.of(16, tp=2, pp=2), Grid.of(8, ep=8), Grid.of(8, cp=8)]),
)
def test_any_group_gets_a_tag_and_a_source_of_the_schema(group, counts, guess, grid):
    found = tagged(group, counts, guess=guess, grid=grid)
    assert found.tag in TAGS
    assert found.source in TAG_SOURCES
    assert found.source != "none" or found.tag == "OTHER"
    assert len(found.candidates) != 1
    assert set(found.candidates) <= set(TAGS)


def divided(words):
    """All ways to divide words into names of dimensions: the definition."""
    if not words:
        yield ()
    for size in range(len(words), 0, -1):
        if (name := "_".join(words[:size])) in MESH:
            for others in divided(words[size:]):
                yield (name, *others)


@given(st.lists(st.sampled_from([*MESH, "x", ""]), min_size=1, max_size=4))
def test_a_mesh_is_divided_into_the_longest_names(names):
    text = "_".join(names)
    first = next(divided(text.split("_")), None)
    tags = {MESH[name] for name in first or ()}
    if tags == {"DP", "CP"}:
        tags = {"DP"}
    expected = "OTHER" if len(tags) > 1 else min(tags, default=None)
    assert tag_of_description(f"mesh_{text}") == expected


@pytest.mark.parametrize("end", ["", "_x"])
def test_the_time_for_a_mesh_of_repeated_names_grows_with_its_length(end):
    def mesh(count):
        return "mesh_" + "_".join(["dp_shard"] * count) + end

    tag = tag_of_description.__wrapped__
    assert tag(mesh(30)) == (None if end else "DP")
    assert growth(tag, mesh, 10_000) < MOST
