"""Test which collectives all members of their group have, by the definition."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.ranks.arrivals import CommunicationEvents, Completeness, match_collectives
from fastcomm.trace.schema import OP

# Group, number and rank of each event.
EVENTS = st.sets(
    st.tuples(st.sampled_from([7, -3, 1 << 60]), st.integers(0, 4), st.integers(0, 3)),
    min_size=1,
)


@given(EVENTS)
def test_a_collective_is_complete_if_every_rank_with_events_of_its_group_has_it(keys):
    group, seq, rank = (
        np.array(column, np.int64) for column in zip(*sorted(keys), strict=True)
    )
    count = len(rank)
    events = CommunicationEvents.of(
        pa.table(
            {
                "rank": rank,
                "group": group,
                "seq": seq,
                "group_size": np.full(count, 4),
                "tag": np.zeros(count, np.int8),
                "op": np.full(count, OP["AllReduce"], np.int8),
                "start_ns": seq * 1000,
                "duration_ns": np.full(count, 10),
            }
        )
    )
    rows = events.collectives
    matches = match_collectives(events, rows)
    result = Completeness.of(events, rows, matches)

    members = {g: {r for g_, _, r in keys if g_ == g} for g, _, _ in keys}
    having = {}
    for g, s, r in keys:
        having.setdefault((g, s), set()).add(r)
    having = {key: ranks for key, ranks in having.items() if len(ranks) > 1}
    lacking = {r for (g, _), ranks in having.items() for r in members[g] - ranks}
    numbers = dict(
        zip(matches.instance.tolist(), zip(group[rows], seq[rows], strict=True), strict=True)
    )
    for number, key in numbers.items():
        if number >= 0:
            assert result.is_complete[number] == (having[key] == members[key[0]])
    assert len(result.is_complete) == len(having)
    assert result.ranks == lacking
