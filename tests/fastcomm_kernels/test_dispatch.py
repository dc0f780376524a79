"""Test the dispatch kernels against definitions, also without the JIT."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import dispatch as oracle

from fastcomm.dispatch import schedules, traffic
from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.routing import layers_of_seed
from fastcomm.dispatch.traffic import LayerTokens, Traffic, bounds, sum_by_node
from fastcomm.hardware.clusters import Cost, GpuLinks
from fastcomm_kernels import dispatch
from fastcomm_kernels import permutations as fastcomm_kernels_permutations


def heaviest(load, pack, packs):
    return max(sum(load[i] for i in range(len(load)) if pack[i] == p) for p in range(packs))


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_swaps_fill_packs_as_before_and_no_single_swap_is_left(packs, room, data):
    numbers = st.lists(st.integers(0, 50), min_size=packs * room, max_size=packs * room)
    load = np.array(data.draw(numbers), float)
    order = np.argsort(-load, kind="stable")
    before = dispatch.packed(load, order, packs)
    after = dispatch.swapped(load, before, packs, 0.0, 20 * len(load))
    assert np.bincount(after, minlength=packs).tolist() == [room] * packs
    most = heaviest(load, after, packs)
    assert most <= heaviest(load, before, packs)
    weights = [sum(load[after == p]) for p in range(packs)]
    if weights.count(most) == 1:
        for i in np.flatnonzero(after == weights.index(most)):
            for k in range(len(load)):
                other = after.copy()
                other[i], other[k] = after[k], after[i]
                assert heaviest(load, other, packs) >= most * (1 - 1e-9)


@pytest.mark.parametrize(("swaps", "most"), [(0, 9), (1, 6), (9, 6)])
def test_swaps_end_at_their_bound(swaps, most):
    load, pack = np.array([5.0, 4, 1, 2]), np.array([0, 0, 1, 1])
    after = dispatch.swapped(load, pack, 2, 6.0, swaps)
    assert heaviest(load, after, 2) == most


@st.composite
def layers(draw):
    """A layer of any shape, experts anywhere, repeated ones included."""
    nodes, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    gpus, experts = nodes * width, draw(st.integers(1, 8))
    home = draw(st.lists(st.integers(0, gpus - 1), min_size=experts, max_size=experts))
    topk = draw(st.integers(1, 4))
    row = st.tuples(
        st.integers(0, gpus - 1),
        st.lists(st.integers(0, experts - 1), min_size=topk, max_size=topk),
    )
    rows = draw(st.lists(row, max_size=12))
    src = np.array([s for s, _ in rows], np.int16)
    expert = np.array([e for _, e in rows], np.int16).reshape(len(rows), topk)
    return LayerTokens(src, expert, np.array(home, np.int32), nodes, width)


def terms(demand="copies", **words):
    links = GpuLinks(inter_bytes_per_s=1e9, intra_bytes_per_s=4e9, **words)
    return schedules.Terms(token_bytes=100, combine_bytes=200, links=links, demand=demand)


@given(layers())
def test_one_pass_counts_what_the_definition_counts(layer):
    traffic = Traffic.of(layer)
    found = traffic.copies, traffic.unique, traffic.node_unique, traffic.leaving
    wanted = oracle.matrices(layer.src, layer.expert, layer.home, layer.nodes, layer.width)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.tolist() == theirs


@pytest.mark.parametrize("nodes", [9, 70])
def test_counting_many_nodes_agrees_with_counting_few(nodes):
    random = np.random.default_rng(nodes)
    src = random.integers(0, 3 * nodes, 40).astype(np.int16)
    expert = random.integers(0, 3 * nodes, (40, 3)).astype(np.int16)
    layer = LayerTokens(src, expert, np.arange(3 * nodes, dtype=np.int32), nodes, 3)
    wanted = oracle.matrices(src, expert, layer.home, nodes, 3)
    assert Traffic.of(layer).node_unique.tolist() == wanted[2]


@given(layers(), st.booleans())
def test_deepep_is_the_sum_over_tokens(layer, once):
    traffic = Traffic.of(layer)
    found = schedules.deepep_counts(traffic, traffic.unique if once else traffic.copies)
    gpus = layer.gpus
    wanted = oracle.deepep(layer.src, layer.expert, layer.home, gpus, layer.width, once=once)
    assert found.tolist() == wanted


@given(layers(), st.sampled_from(["copies", "unique"]))
def test_no_schedule_beats_the_bounds_of_its_class(layer, demand):
    traffic, told = Traffic.of(layer), terms(demand)
    for name, strategy in schedules.STRATEGIES.items():
        used = "copies" if strategy.copies_only else demand
        limits = bounds(traffic, told.links, told.token_bytes, used)
        timing = strategy.run(traffic, told)
        least = limits.of(strategy.bound)
        assert timing.seconds >= least * (1 - 1e-12), name
        assert timing.seconds >= limits.optimal_s * (1 - 1e-12), name
        assert least >= limits.multicast_s * (1 - 1e-12), name


@given(layers())
def test_sharing_nics_delivers_each_token_once_and_evenly(layer):
    traffic = Traffic.of(layer)
    pairs = traffic.remote_node_unique.reshape(layer.nodes, layer.width, -1).sum(axis=1)
    for likes in ((2, 1), (1, 2)):
        quota = schedules._quota(traffic)
        assert (quota.sum(axis=2) == pairs).all()
        loads = np.zeros((layer.gpus, 4), np.int64)
        dispatch.balanced_loads(layer.src, layer.expert, layer.home, quota, likes, loads)
        assert not quota.any()
        assert loads[:, 0].sum() == loads[:, 1].sum() == pairs.sum()
        assert loads[:, 2].sum() == loads[:, 3].sum()
        sent = loads[:, 0].reshape(-1, layer.width)
        assert (np.ptp(sent, axis=1) <= 1).all()
        # Each GPU gets what it needs, by its NIC or from a neighbor.
        needed = traffic.demand("unique").sum(axis=0)
        assert (loads[:, 1] + loads[:, 3] >= needed).all()


@given(layers())
def test_sending_once_per_node_never_moves_more_than_every_copy(layer):
    traffic = Traffic.of(layer)
    sums = traffic.copies.sum(), traffic.unique.sum(), traffic.node_unique.sum()
    assert sorted(sums, reverse=True) == list(sums)


@given(st.integers(0, 2**64 - 1), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_a_token_depends_only_on_its_number(key, topk, uniform, first):
    threshold = np.array([2**32, 2**31, 2**30, 0, 5], np.uint64)
    alias = np.array([0, 0, 1, 4, 2], np.int16)
    out = np.empty((6, topk), np.int16)
    with np.errstate(over="ignore"):
        dispatch.routed(first, np.uint64(key), threshold, alias, uniform, out)
    for number, row in enumerate(out.tolist()):
        assert row == oracle.routed(
            first + number, key, threshold.tolist(), alias.tolist(), topk, uniform=uniform
        )


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=5))
def test_repeated_experts_are_replaced_in_the_order_of_the_draws(rows):
    drawn = np.random.default_rng(1).integers(0, 6, 200)
    expert = np.array(rows, np.int16).reshape(len(rows), 3)
    used = dispatch.repair(expert, 6, drawn)
    wanted, taken = oracle.repaired(rows, drawn.tolist())
    assert expert.tolist() == wanted
    assert used == taken
    again = np.array(rows, np.int16).reshape(len(rows), 3)
    assert dispatch.repair(again, 6, drawn[: max(0, used - 1)]) == (-1 if used else 0)


def test_a_gate_takes_the_best_experts_of_the_best_groups():
    out = np.empty((200, 3), np.int16)
    weight = np.array([[1.0, 1, 1, 1, 1, 1, 0, 0]])
    law = np.zeros(200, np.int32)
    with np.errstate(over="ignore"):
        dispatch.raced(0, np.uint64(3), law, weight, (4, 2), out)
        again = np.empty((100, 3), np.int16)
        dispatch.raced(100, np.uint64(3), law[100:], weight, (4, 2), again)
    assert (out[100:] == again).all()
    for row in out.tolist():
        assert len(set(row)) == 3
        assert len({e // 2 for e in row}) <= 2
        assert max(row) < 6


@st.composite
def demands(draw):
    nodes, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = (nodes * width) ** 2
    most = draw(st.sampled_from([1, 3, 50]))
    cells = draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
    return np.array(cells, np.int64).reshape(nodes * width, -1), width


@given(demands(), st.sampled_from(schedules.DECOMPOSITIONS), st.sampled_from([0.0, 3.0]))
def test_fast_delivers_every_unit_once_and_uses_no_nic_twice(made, decomposition, start):
    demand, width = made
    intra = Cost(start_s=start, unit_s=0.5)
    found = schedules.schedule(demand, width, Cost(unit_s=1.0), intra, decomposition)
    arrived = oracle.delivered(found.balanced.tolist(), found.permutations, found.weights)
    block = schedules.blocked(demand, width)
    for (s, d, j), units in arrived.items():
        assert units == block[s, d, :, j].sum()
    assert sum(arrived.values()) == sum(
        block[s, d].sum() for s in range(len(block)) for d in range(len(block)) if s != d
    )
    remote = np.array([[s != d for d in range(len(block))] for s in range(len(block))])
    load = sum_by_node(np.where(np.kron(remote, np.ones((width, width))), demand, 0), width)
    assert found.total_s >= traffic.largest_sum(load) / width


@pytest.mark.parametrize(("start_s", "load"), [(0.0, 50), (3.0, 50), (1000.0, 100)])
def test_a_node_balances_its_nics_if_that_is_faster(start_s, load):
    demand = np.zeros((4, 4), np.int64)
    demand[0, 2:] = 50  # one of two GPUs sends all
    intra = Cost(start_s=start_s, unit_s=0.5)
    found = schedules.schedule(demand, 2, Cost(unit_s=1.0), intra)
    assert found.servers.tolist() == [[0, load], [0, 0]]


@given(demands(), st.booleans())
def test_stages_add_up_to_the_matrix(made, plain):
    matrix = schedules.pad(made[0])
    permutations, weights = schedules.split(matrix, 1 if plain else max(1, int(matrix.max())))
    size = len(matrix)
    total = np.zeros_like(matrix)
    for to, weight in zip(permutations, weights, strict=True):
        assert weight > 0
        total[np.arange(size), to] += weight
    assert (total == matrix).all()
    assert len(weights) <= size * size - 2 * size + 2
    if not matrix.any():
        assert len(weights) == 0


def test_a_matrix_of_unequal_sums_is_refused():
    uneven = np.array([[1, 0], [1, 0]])
    with pytest.raises(ValueError, match="pad the matrix first"):
        schedules.split(uneven, 1)
    assert len(fastcomm_kernels_permutations.stages(uneven, 1, 15)[1]) == 0


@given(st.lists(st.integers(0, 9), min_size=9, max_size=9))
def test_padding_reaches_the_largest_sum(cells):
    matrix = np.array(cells).reshape(3, 3)
    padded = schedules.pad(matrix)
    load = traffic.largest_sum(matrix)
    assert (padded >= matrix).all()
    assert padded.sum(axis=0).tolist() == padded.sum(axis=1).tolist() == [load] * 3


@pytest.mark.parametrize("rule", [0, 1, 2])
def test_a_token_takes_a_replica_of_its_expert(rule):
    start = np.array([0, 1, 4], np.int32)
    physical = np.array([5, 0, 2, 3], np.int32)
    node = np.array([1, 0, 0, 1], np.int32)
    src_node = np.array([0, 1, 2] * 40, np.int16)
    expert = np.tile(np.array([[0, 1]], np.int16), (120, 1))
    out = np.empty((120, 2), np.int32)
    with np.errstate(over="ignore"):
        tables = start, physical, node
        dispatch.replicated(0, np.uint64(9), src_node, expert, tables, rule, out)
    assert set(out[:, 0].tolist()) == {5}
    assert set(out[:, 1].tolist()) == {0, 2, 3}
    if rule == 1:
        assert out[:3, 1].tolist() == [0, 2, 3]
    if rule == 2:
        assert set(out[src_node == 0, 1].tolist()) == {0, 2}
        assert set(out[src_node == 1, 1].tolist()) == {3}
        assert set(out[src_node == 2, 1].tolist()) == {0, 2, 3}


def test_the_original_draws_its_remainder_and_repairs():
    recipe = Recipe.of(
        num_nodes=2, gpus_per_node=2, seq_len=7, batch_size=1, topk=3, num_layers=2, iter_num=1,
        law="seed", zipf_alpha=3.0,
    )  # fmt: skip
    first, second = layers_of_seed(recipe)
    assert np.sort(first[0]).tolist()[:4] != [0, 0, 0, 0]
    assert first[0] is second[0]
    assert all(len(set(row)) == 3 for row in first[1].tolist())


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(2, 1), (2, 2), (3, 2), (2, 3)]),
    st.sampled_from([(1, 1), (3, 2), (8, 4)]),
    st.sampled_from([0.0, 0.5]),
)
def test_a_pipeline_takes_as_long_as_by_its_definition(seed, shape, mixing, start_s):
    nodes, width = shape
    random = np.random.default_rng(seed)
    demand = random.integers(0, 12, [nodes * width] * 2) * random.integers(0, 2)
    demand[0, -1] += 9
    cost = (start_s, 0.3)
    block = schedules.blocked(demand, width)
    limit = -(-block.sum(axis=(2, 3)) // width) + random.integers(0, 3)
    near = random.random((nodes, width)) * random.integers(0, 2)
    start, entries, servers = fastcomm_kernels_permutations.rails(block, limit, near)
    stage = schedules.by_size(schedules.stages(servers))
    inter_s = 0.1 + stage[1] * 1.0
    own = np.stack([block[n, n] for n in range(nodes)])
    start_s, total_s = fastcomm_kernels_permutations.pipelined(
        (start, entries), stage, mixing, inter_s, own, cost
    )
    queues = oracle.balanced_queues(block.tolist(), limit.tolist(), near.tolist(), mixing[0])
    expected = oracle.pipeline_time(
        queues,
        [(row.tolist(), int(weight)) for row, weight in zip(*stage, strict=True)],
        own.tolist(),
        inter_s.tolist(),
        cost,
        mixing[1],
    )
    assert (start_s.tolist(), total_s) == (
        pytest.approx(expected[0]),
        pytest.approx(expected[1]),
    )
    # All that a GPU sends to a node after balancing is in its queue, up to the limit.
    sent = np.add.reduceat(np.append(entries[:, 2], 0), start[:-1])
    sent[start[:-1] == start[1:]] = 0
    for place, units in enumerate(sent.reshape(nodes, nodes, width)):
        for other, by_gpu in enumerate(units.tolist()):
            assert by_gpu == [
                len(queues[place, other, k]) * (place != other) for k in range(width)
            ]
            assert max(by_gpu) == servers[place, other] <= limit[place, other]


def random_demand(random, kind, nodes):
    gpus = nodes * 8
    if kind == "zipf":
        return np.minimum(random.zipf(2.0, (gpus, gpus)), 10**4) * 10
    if kind == "lognormal":
        return np.exp(random.normal(5, 1, (gpus, gpus))).astype(np.int64)
    demand = random.integers(0, 10_000, (gpus, gpus))
    if kind == "sparse":
        return demand * (random.random((gpus, gpus)) < 0.1)
    if kind == "hot":
        demand[:, random.integers(0, gpus)] *= 10
    return demand


def least_s(demand, inter, intra):
    """The time that NICs of nodes, and all links of GPUs and nodes, take at least."""
    nodes = len(demand) // 8
    between = demand.reshape(nodes, 8, nodes, 8).sum(axis=(1, 3))
    np.fill_diagonal(between, 0)
    ends = [demand.sum(axis=axis) for axis in (0, 1)]
    nics = max(between.sum(axis=0).max(), between.sum(axis=1).max()) / 8 * inter.unit_s
    most = max(max(end.max(), end.reshape(nodes, 8).sum(axis=1).max() / 8) for end in ends)
    return max(nics, most / (1 / inter.unit_s + 1 / intra.unit_s))


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["uniform", "zipf", "lognormal", "sparse", "hot"])
@pytest.mark.parametrize("nodes", [4, 8, 16])
@pytest.mark.parametrize("ratio", [2.5, 3.0, 8.0])
def test_fast_is_near_the_lower_bound_of_any_demand(kind, nodes, ratio):
    demand = random_demand(np.random.default_rng(nodes), kind, nodes)
    inter, intra = Cost(unit_s=1 / 50), Cost(unit_s=1 / 50 / ratio)
    found = schedules.schedule(demand, 8, inter, intra)
    np.fill_diagonal(demand, 0)
    bound = least_s(demand, inter, intra)
    published = schedules.published_schedule(demand, 8, inter, intra)
    assert bound <= found.total_s <= min(1.25 * bound, published.total_s)
    assert int(found.weights.sum()) == traffic.largest_sum(found.servers)


@pytest.mark.compiled
@pytest.mark.parametrize("ratio", [3.0, 8.0])
def test_fast_is_within_10_percent_of_the_bound_on_average(ratio):
    inter, intra = Cost(unit_s=1 / 50), Cost(unit_s=1 / 50 / ratio)
    over = []
    for nodes in (4, 6, 12):
        for kind in ("uniform", "zipf", "lognormal", "sparse", "hot"):
            demand = random_demand(np.random.default_rng(100 + nodes), kind, nodes)
            np.fill_diagonal(demand, 0)
            found = schedules.schedule(demand, 8, inter, intra)
            over.append(found.total_s / least_s(demand, inter, intra))
    assert np.mean(over) <= 1.1


@pytest.mark.parametrize("ratio", [2.5, 8.0])
def test_the_moves_of_a_pipeline_lead_from_the_demand_to_its_queues(ratio):
    demand = random_demand(np.random.default_rng(1), "hot", 4)
    found = schedules.schedule(demand, 8, Cost(unit_s=1 / 50), Cost(unit_s=1 / 50 / ratio))
    block = schedules.blocked(demand, 8)
    pairs = [(s, d) for s in range(4) for d in range(4) if s != d]
    for s, d in pairs:
        moved = found.moved[s * 4 + d]
        rows = block[s, d].sum(axis=1) - moved.sum(axis=1) + moved.sum(axis=0)
        assert found.balanced[s, d].sum(axis=1).tolist() == rows.tolist()
        assert found.balanced[s, d].sum(axis=0).tolist() == block[s, d].sum(axis=0).tolist()
    assert all((found.balanced[n, n] == block[n, n]).all() for n in range(4))
