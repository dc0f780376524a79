"""The other rank of an event that is one message, from the lists of all its messages."""

import numpy as np
import pyarrow as pa


def only_message(sends_to: pa.Array, receives_from: pa.Array) -> tuple[pa.Array, pa.Array]:
    """COMM's `peer` and `sends` of events with these lists; null unless it is one message."""
    lists, rows = (sends_to, receives_from), len(sends_to)
    if all(each.null_count == rows for each in lists):
        return pa.nulls(rows, pa.int32()), pa.nulls(rows, pa.bool_())
    counts = [each.value_lengths().fill_null(0).to_numpy() for each in lists]
    is_one = counts[0] + counts[1] == 1
    is_sent = counts[0] == 1
    # The lists lie one behind the other: an event's only peer is where its list ends.
    last = [np.cumsum(count) - 1 for count in counts]
    place = np.where(is_sent, last[0], last[1] + int(counts[0].sum()))
    peers = pa.concat_arrays([each.flatten() for each in lists])
    return (
        peers.take(pa.array(place, mask=~is_one)).cast(pa.int32()),
        pa.array(is_sent, mask=~is_one),
    )
