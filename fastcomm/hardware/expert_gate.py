"""Places of a token's experts: NVLink domains or ranks, under a gate that limits groups.

A *group* is experts in a row, as many in each; a *place* is, too. A group-limited gate, as
DeepSeek-V3's, takes the groups with the best experts, and then the best experts of these.
Scores are independent with one distribution, so that only their order counts. DeepSeek-V3
ranks groups by the sum of their two best scores, which changes the means of its 256 experts by
less than 1 %.
"""

import math
from collections import defaultdict
from functools import cache


@cache
def places_of_token(
    experts: float, groups: float, top_groups: float, topk: int, places: int
) -> float:
    """Return the mean number of places with an expert of a token.

    Parameters
    ----------
    experts
        Experts of a layer.
    groups, top_groups
        Groups of experts, and those that a token goes to; more if these have too few experts.
    topk
        Experts of a token.
    places
        Equal parts of the experts.

    """
    size, room = experts / groups, experts / places
    limit = min(groups, max(top_groups, math.ceil(topk / size)))

    def hit_share(place: int) -> float:
        covered = _covered(place * room, (place + 1) * room, size)
        return 1 - _missed(size, groups, limit, topk, *covered)

    if size % room == 0 or room % size == 0:
        return places * hit_share(0)
    return sum(map(hit_share, range(places)))


def _covered(start: float, stop: float, size: float) -> tuple[int, tuple[float, ...]]:
    """Return how many groups of `size` lie in [start, stop), and its parts of other groups."""
    full, parts = 0, []
    for number in range(int(start // size), math.ceil(stop / size)):
        own = min(stop, (number + 1) * size) - max(start, number * size)
        if own > size * (1 - _ROUNDING):
            full += 1
        elif own > size * _ROUNDING:
            parts.append(round(own, 6))
    return full, tuple(sorted(parts))


_ROUNDING = 1e-9


@cache
def _missed(
    size: float, groups: float, limit: float, topk: int, full: int, parts: tuple[float, ...]
) -> float:
    """Return the probability that no expert of a token is in a place.

    Experts are drawn from best to worst. Until `limit` groups have one, each of the experts may
    be next; then only those of these groups.

    Parameters
    ----------
    size, groups, limit, topk
        Experts of a group, groups, groups and experts of a token.
    full, parts
        Groups inside of the place, and how many experts of other groups are in it.

    """
    # By groups with an expert, and whether each of the groups with a part has one.
    shares = {(0, (False,) * len(parts)): 1.0}
    for drawn in range(topk):
        following: defaultdict[tuple[int, tuple[bool, ...]], float] = defaultdict(float)
        for (used, has_expert), share in shares.items():
            near = sum(part for part, has in zip(parts, has_expert, strict=True) if has)
            eligible = (groups if used < limit else used) * size - drawn
            weight = share / eligible
            following[used, has_expert] += weight * max(0.0, used * size - drawn - near)
            if used >= limit:
                continue
            others = groups - full - len(parts) - (used - sum(has_expert))
            following[used + 1, has_expert] += weight * max(0.0, others) * size
            for at, part in enumerate(parts):
                if not has_expert[at]:
                    after = (*has_expert[:at], True, *has_expert[at + 1 :])
                    following[used + 1, after] += weight * (size - part)
        shares = dict(following)
    return sum(shares.values())
