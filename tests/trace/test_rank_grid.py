"""Test the grid of ranks against a brute-force oracle of coordinates."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.errors import ConfigError
from fastcomm.trace.rank_grid import ORDERS, Grid

MEGATRON, SWAPPED = ORDERS["megatron"], ORDERS["megatron-tp-pp-dp"]


def by_coordinates(order, sizes, free):
    """Groups over the dimensions `free`: walk all coordinates, the first name fastest."""
    names = order.split("-")
    groups = {}
    backwards = [range(sizes.get(name, 1)) for name in reversed(names)]
    for rank, places in enumerate(itertools.product(*backwards)):
        at = dict(zip(reversed(names), places, strict=True))
        key = tuple(at[name] for name in names if name not in free)
        groups.setdefault(key, []).append(rank)
    return sorted(tuple(group) for group in groups.values())


def groups(grid, dimensions):
    return [list(group) for group in grid.groups(dimensions)]


# -- the examples that were checked with Megatron's own function, world 16


def test_ranks_follow_the_default_order_of_megatron():
    grid = Grid.of(16, tp=2, pp=2)
    assert grid.dp == 4
    assert groups(grid, "tp")[0] == [0, 1]
    assert groups(grid, "dp")[0] == [0, 2, 4, 6]
    assert [8, 10, 12, 14] in groups(grid, "dp")
    assert groups(grid, "pp")[0] == [0, 8]


def test_ranks_follow_the_other_order_of_megatron():
    grid = Grid.of(16, tp=2, pp=2, order=SWAPPED)
    assert groups(grid, "dp")[0] == [0, 4, 8, 12]
    assert groups(grid, "pp")[0] == [0, 2]


def test_context_parallel_groups_follow_megatron():
    grid = Grid.of(16, tp=2, cp=2, dp=2, pp=2)
    assert groups(grid, "cp")[0] == [0, 2]
    assert groups(grid, "dp")[0] == [0, 4]
    assert groups(grid, "dp+cp")[0] == [0, 2, 4, 6]
    assert groups(grid, "pp")[0] == [0, 8]


def test_expert_groups_follow_megatron():
    grid = Grid.of(16, tp=2, pp=2, etp=1, ep=4)
    assert groups(grid, "ep")[0] == [0, 1, 2, 3]
    assert groups(grid, "edp")[0] == [0, 4]
    assert groups(grid, "pp")[0] == [0, 8]


# -- the other systems


def test_deepspeed_experts_are_blocks_and_their_replicas_stride():
    grid = Grid.of(16, pp=2, ep=4, order="deepspeed")
    assert groups(grid, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups(grid, "edp")[0] == [0, 4]
    assert groups(grid, "dp") == [list(range(8)), list(range(8, 16))]


def test_deepspeed_data_before_expert_swaps_the_two():
    grid = Grid.of(16, pp=2, ep=4, order="tp-dp-ep-pp")
    assert groups(grid, "ep")[0] == [0, 2, 4, 6]
    assert groups(grid, "edp")[0] == [0, 1]


def test_deepspeed_experts_with_tensor_parallel_stride_over_it():
    grid = Grid.of(16, tp=2, ep=4, order="deepspeed")
    assert groups(grid, "ep")[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups(grid, "edp")[0] == [0, 8]


def test_torchtitan_shards_inside_of_replicas():
    grid = Grid.of(16, tp=2, dp=8, dp_replicate=2, order="torchtitan")
    assert groups(grid, "dp_shard")[0] == [0, 2, 4, 6]
    assert groups(grid, "dp_replicate")[0] == [0, 8]
    assert groups(grid, "dp")[0] == list(range(0, 16, 2))
    assert grid.candidates([0, 2, 4, 6]) == grid.candidates([0, 8]) == ("DP",)


# -- candidates


def test_ranks_outside_of_the_job_are_no_group():
    grid = Grid.of(4, tp=2)
    assert grid.candidates((2, 3)) == ("TP",)
    assert grid.candidates((4, 5)) == grid.candidates((3, 4)) == grid.candidates((-2, -1)) == ()
    assert grid.candidates((2, 4)) == ()


def test_dense_dimensions_can_be_ambiguous():
    grid = Grid.of(16, tp=2, cp=2, pp=2)
    assert grid.candidates([1, 0]) == ("TP",)
    assert grid.candidates((0, 2)) == ("CP",)
    assert grid.candidates((0, 4)) == ("DP",)
    assert grid.candidates((0, 2, 4, 6)) == ("DP",)
    assert grid.candidates((0, 8)) == ("PP",)


@pytest.mark.parametrize("ranks", [(), (3,), (0, 3), (0, 1, 2), (-1, 0), (14, 16), range(16)])
def test_other_sets_of_ranks_have_no_tag(ranks):
    assert Grid.of(16, tp=2, cp=2, pp=2).candidates(ranks) == ()


def test_the_world_is_dp_only_where_gradients_cross_all_of_it():
    assert Grid.of(8).candidates(range(8)) == ("DP",)
    assert Grid.of(8, cp=2).candidates(range(8)) == ("DP",)
    assert Grid.of(8, tp=2).candidates(range(8)) == ()
    assert Grid.of(8, tp=8).candidates(range(8)) == ("TP",)


@pytest.mark.parametrize(
    ("words", "only"),
    [
        ({}, "DP"),
        ({"tp": 8}, "TP"),
        ({"cp": 8}, "CP"),
        ({"pp": 8}, "PP"),
        ({"tp": 2}, None),
        ({"ep": 8}, None),
        ({"tp": 8, "etp": 1}, None),
    ],
)
def test_a_grid_of_a_single_dimension_is_recognized(words, only):
    assert Grid.of(8, **words).only == only
    assert Grid.of(1).only is None


def test_equal_rank_sets_are_ambiguous():
    assert Grid.of(8, ep=8).candidates(range(8)) == ("DP", "EP")
    assert Grid.of(8, tp=4, ep=4).candidates(range(4)) == ("TP", "EP")
    assert Grid.of(4, cp=4).candidates(range(4)) == ("DP", "CP")


def test_tokens_cross_expert_tensor_and_expert_ranks():
    grid = Grid.of(16, tp=2, ep=4, pp=2)
    assert grid.etp == 2
    assert grid.candidates(range(8)) == ("EP",)
    assert grid.candidates((0, 2, 4, 6)) == ("DP", "EP")


def test_neighboring_stages_and_the_ends_of_a_pipeline_are_pp():
    grid = Grid.of(16, tp=2, pp=4)
    assert grid.candidates((0, 4)) == grid.candidates((4, 8)) == ("PP",)
    assert grid.candidates((1, 13)) == ("PP",)  # embeddings, and the wrap of virtual stages
    assert grid.candidates((0, 8)) == ()
    assert grid.candidates((1, 4)) == ()
    assert grid.candidates((2, 6)) == ("PP",)


def test_neighbors_on_a_ring_of_context_ranks_are_cp():
    grid = Grid.of(8, tp=2, cp=4)
    assert grid.candidates((0, 2)) == grid.candidates((0, 6)) == ("CP",)
    assert grid.candidates((0, 4)) == ()
    assert grid.candidates((6, 8)) == ()


def test_a_group_of_a_large_world_is_classified_quickly():
    grid = Grid.of(16384, tp=8, pp=16, ep=8, etp=1)
    queries = [tuple(range(8)), tuple(range(0, 1024, 8)), (0, 1024), tuple(range(5, 900))]
    assert [grid.candidates(query) for query in queries] == [("TP", "EP"), ("DP",), ("PP",), ()]
    begin = time.process_time()  # the tests of other files run beside it
    for _ in range(100):
        for query in queries:
            grid.candidates(query)
    assert (time.process_time() - begin) / 400 < 1e-3


# -- the constructor


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"world_size": 16, "tp": 3},
            r"cp \* pp = 3 .* does not divide the world size 16",
        ),
        (
            {"world_size": 16, "tp": 2, "dp": 4},
            r"times dp = 4, is 8: expected the world size 16",
        ),
        ({"tp": 2}, "neither dp nor the world size"),
        ({"world_size": 0}, "world size 0"),
        (
            {"world_size": 8, "ep": 3},
            r"etp \* ep = 1 \* 3 = 3 does not divide the 8 ranks",
        ),
        (
            {"world_size": 8, "tp": 2, "ep": 2, "etp": 8},
            r"etp \* ep = 8 \* 2 = 16 does not divide",
        ),
        ({"world_size": 8, "tp": 0}, "invalid tp 0: expected an integer"),
        ({"world_size": 8, "tp": True}, "invalid tp True"),
        ({"world_size": 8, "dp": -8}, "invalid dp -8"),
        ({"world_size": 8, "order": "tp-dpp-pp"}, "unknown dimension 'dpp'.*did you mean"),
        ({"world_size": 8, "order": ""}, "unknown dimension ''"),
        ({"world_size": 8, "order": "tp-dp-tp"}, "tp must occur only once"),
        ({"world_size": 8, "order": "dp_shard-dp-pp"}, "dp_shard must occur only once"),
        ({"world_size": 8, "pp": 2, "order": "tp-dp"}, "'tp-dp' does not have pp"),
        (
            {"world_size": 8, "dp_replicate": 3},
            "invalid dp_replicate 3: it does not divide dp = 8",
        ),
        (
            {"world_size": 8, "dp_replicate": 4, "ep": 4},
            "does not divide the 2 replicas of an expert",
        ),
        (
            {"world_size": 8, "tp": 2, "pp": 2, "ep": 2, "etp": 2, "order": SWAPPED},
            "put pp last",
        ),
    ],
)
def test_a_contradiction_names_the_sizes(words, message):
    with pytest.raises(ConfigError, match=message):
        Grid.of(**words)


def test_expert_tensor_size_is_one_if_the_dense_size_does_not_fit():
    grid = Grid.of(4, tp=4, ep=4)
    assert (grid.etp, grid.edp) == (1, 1)
    assert groups(grid, "ep") == [[0, 1, 2, 3]]


def test_sizes_determine_an_unrecorded_world_size():
    assert Grid.of(tp=2, dp=3, pp=2).world == 12


def test_without_experts_their_dimensions_are_the_dense_ones():
    grid = Grid.of(8, tp=2, cp=2)
    assert groups(grid, "ep") == [[rank] for rank in range(8)]
    assert groups(grid, "etp") == groups(grid, "tp")
    assert groups(grid, "edp") == groups(grid, "dp+cp")


def test_an_implausible_world_size_takes_no_time():
    assert Grid.of(10**15, tp=10**6).candidates((0, 1)) == ()


@pytest.mark.parametrize("dimensions", ["xp", "tp+ep", "", "cp+edp"])
def test_dimensions_that_do_not_cross_are_refused(dimensions):
    with pytest.raises(ConfigError, match="expected some of"):
        list(Grid.of(8, tp=2, ep=2).groups(dimensions))


# -- properties

SIZES = st.sampled_from([1, 2, 3, 4])
DENSE = st.fixed_dictionaries(dict.fromkeys(("tp", "cp", "dp", "pp"), SIZES))


@given(DENSE, st.permutations(["tp", "cp", "dp", "pp"]))
def test_dense_groups_are_those_of_the_coordinates(sizes, names):
    order = "-".join(names)
    grid = Grid.of(order=order, **sizes)
    for count in (1, 2, 3):
        for free in itertools.combinations(names, count):
            assert list(grid.groups("+".join(free))) == by_coordinates(order, sizes, free)


@given(
    st.fixed_dictionaries(dict.fromkeys(("etp", "ep", "edp", "pp"), SIZES)),
    st.sampled_from(["tp-ep-dp-pp", "ep-tp-dp-pp", "tp-dp-ep-pp"]),
)
def test_expert_groups_are_those_of_the_coordinates(sizes, order):
    dp = sizes["etp"] * sizes["ep"] * sizes["edp"]
    grid = Grid.of(dp=dp, order=order, **{name: sizes[name] for name in ("etp", "ep", "pp")})
    plain = {"tp": sizes["etp"], "ep": sizes["ep"], "dp": sizes["edp"], "pp": sizes["pp"]}
    for ours, theirs in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("pp", "pp")):
        if grid.has_experts:
            assert list(grid.groups(ours)) == by_coordinates(order, plain, [theirs])


WHOSE = {
    "tp": "TP", "cp": "CP", "dp": "DP", "pp": "PP", "dp+cp": "DP", "dp_shard": "DP",
    "ep": "EP", "etp+ep": "EP", "edp": "DP", "etp": "TP",
}  # fmt: skip


@given(
    DENSE, st.sampled_from([1, 2, 4]), st.sampled_from(["megatron", "deepspeed", "torchtitan"])
)
def test_groups_partition_the_world_and_know_their_dimension(sizes, ep, order):
    try:
        grid = Grid.of(ep=ep, order=order, **sizes)
    except ConfigError:
        assert order == "deepspeed" or (sizes["tp"] * sizes["cp"] * sizes["dp"]) % ep
        return
    for dimensions, tag in WHOSE.items():
        found = list(grid.groups(dimensions))
        assert sorted(itertools.chain(*found)) == list(range(grid.world))
        if len(found[0]) > 1 and (ep > 1 or dimensions != "etp+ep"):
            assert all(tag in grid.candidates(group) for group in found)


@given(DENSE, st.data())
def test_candidates_are_those_of_all_groups_that_the_oracle_lists(sizes, data):
    order = "tp-cp-dp-pp"
    grid = Grid.of(order=order, **sizes)
    world = range(grid.world)
    ranks = tuple(sorted(data.draw(st.sets(st.sampled_from(world), max_size=3))))
    wanted = set()
    for tag, free in (("TP", ["tp"]), ("CP", ["cp"]), ("DP", ["dp"]), ("DP", ["dp", "cp"])):
        if len(ranks) > 1 and ranks in by_coordinates(order, sizes, free):
            wanted.add(tag)
    for tag, name in (("PP", "pp"), ("CP", "cp")):
        for line in by_coordinates(order, sizes, [name]):
            ring = {
                tuple(sorted((a, b))) for a, b in zip(line, line[1:] + line[:1], strict=True)
            }
            if len(ranks) > 1 and ranks in ring | {line}:
                wanted.add(tag)
    assert set(grid.candidates(ranks)) == wanted
