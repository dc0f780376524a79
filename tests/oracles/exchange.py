"""Expert all-to-alls by definition: all draws of experts, and the formula of a phase."""

from itertools import combinations
from math import log2


def hit_share(total, own, draws):
    """Share of the draws of distinct numbers below `total` that have one below `own`."""
    all_draws = list(combinations(range(total), draws))
    return sum(min(draw) < own for draw in all_draws) / len(all_draws)


def distinct(experts, places, topk):
    """Mean number of places with an expert of a token; experts lie in blocks on the places."""
    block = experts // places
    draws = list(combinations(range(experts), topk))
    return sum(len({expert // block for expert in draw}) for draw in draws) / len(draws)


def phase_us(costs, work, copies, place, links):
    """Microseconds of a phase: start, busiest resource, filling of the pipeline."""
    (tokens, size, sms), (rows, far), (ranks, domain), (nvlink, nic) = (
        work,
        copies,
        place,
        links,
    )
    row = (rows + costs["far_rows"] * far) * (costs["row_ns"] + costs["row_byte_ns"] * size)
    copying = tokens * (costs["token_ns"] + costs["token_byte_ns"] * size + row) / sms / 1e3
    sending = tokens * rows * (1 - 1 / domain) * size / (nvlink * costs["nvlink_share"]) * 1e6
    leaving = tokens * far * size / (nic * costs["nic_share"]) * 1e6
    busiest = (copying**8 + sending**8 + leaving**8) ** (1 / 8)
    filling = busiest * costs["fill_us"] / (busiest + costs["fill_us"])
    start = (
        costs["start_us"] + costs["doubling_us"] * log2(ranks) + costs["pass_ns"] * size / 1e3
    )
    return start + busiest + filling


def gate_draws(experts, groups, top_groups, topk, *, best=1, orders):
    """Experts of a token by order of scores; groups count by their `best` scores."""
    size = experts // groups
    for order in orders:
        score = {expert: place for place, expert in enumerate(order)}
        ranked = sorted(
            range(groups),
            key=lambda group: sum(
                sorted(score[expert] for expert in range(group * size, (group + 1) * size))[
                    :best
                ]
            ),
        )
        inside = [e for e in order if e // size in ranked[:top_groups]]
        yield inside[:topk]


def mean_places(draws, experts, places):
    """Mean number of places with an expert of a token."""
    draws = list(draws)
    return sum(len({e * places // experts for e in draw}) for draw in draws) / len(draws)
