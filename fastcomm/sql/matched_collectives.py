"""The collectives and messages of a run, matched across ranks, as a table."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm import preparation
from fastcomm.executors.executor import OpenedRun
from fastcomm.metrics.across_ranks import expected_members
from fastcomm.metrics.agreement import Agreement, gather_alike
from fastcomm.metrics.computation import material_of
from fastcomm.metrics.matched_communication import AlignedEvents, Share
from fastcomm.metrics.partial import Partial, with_steps
from fastcomm.ranks.arrivals import CommunicationEvents, MatchedEvents
from fastcomm.sql.views import COLLECTIVES
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run_traces import ParallelMap, SkippedRank
from fastcomm.trace.schema import OP, OPS
from fastcomm_kernels.arrays import NULL, Ints

_ORDER = [("first_arrival_ns", "ascending"), ("group_id", "ascending"), ("seq", "ascending")]


def matched_collectives(run: OpenedRun) -> pa.Table:
    """Match the communication of all ranks as `fastcomm metrics` does.

    Parameters
    ----------
    run
        Its ranks.

    Returns
    -------
    pyarrow.Table
        A row per collective or message, with the columns of `views.COLLECTIVES`, by arrival.

    Raises
    ------
    FastcommError
        If a rank cannot be read; of a run that goes on, if none can.

    """
    run.compile(preparation.compile_kernels)
    return gather_alike(run, Partial.of, _finished)


def _finished(
    whole: Partial, _: Sequence[SkippedRank], parallel_map: ParallelMap, __: Agreement
) -> pa.Table:
    """Return the matched collectives of all ranks, which have agreed."""
    material = material_of(with_steps(whole))
    aligned = AlignedEvents.of(
        material.batches,
        parallel_map,
        is_host_run=material.is_host_run,
        job=expected_members(material),
    )
    parts = parallel_map(partial(_share_rows, aligned), aligned.shares())
    table = pa.concat_tables([COLLECTIVES.schema.empty_table(), *parts])
    return _named(table, material.groups).sort_by(_ORDER)


def _share_rows(aligned: AlignedEvents, share: Share) -> pa.Table:
    """Return the collectives of a share of the communication; `group_name` is null."""
    events = CommunicationEvents.of(aligned.read(share))
    matched, _ = aligned.match(events)
    return _rows(events, matched)


def _rows(events: CommunicationEvents, matched: MatchedEvents) -> pa.Table:
    """Return a row per matched collective or message."""
    if not len(matched.size):
        return COLLECTIVES.schema.empty_table()
    one, last = matched.row[matched.first], matched.row[matched.last]
    late = np.minimum(matched.wait_caused, events.since_free(last))
    columns: dict[str, Any] = {
        "step": _with_nulls(events.step[one]),
        "op": np.array(OPS)[events.op[one]],
        "tag": np.array(TAGS)[events.tag[one]],
        "group_id": _with_nulls(events.group[one]),
        "group_size": _with_nulls(events.group_size[one]),
        "seq": _with_nulls(events.seq[one]),
        "members": _lists(matched, events.rank[matched.row]),
        "first_arrival_ns": matched.start[matched.first],
        "last_arrival_ns": matched.last_arrival,
        "skew_ns": matched.last_arrival - matched.start[matched.first],
        "transfer_ns": matched.transfer,
        "wait_ns": matched.total(matched.wait),
        "last_rank": events.rank[last],
        "wait_caused_ns": np.where(events.op[last] == OP["SendRecv"], 0, late),
        "arrivals_ns": _lists(matched, matched.start),
        "waits_ns": _lists(matched, matched.wait),
        "payload_bytes": _with_nulls(matched.largest(events.payload_bytes)),
        "bus_bytes": _with_nulls(matched.largest(events.bus_bytes)),
    }
    columns["group_name"] = pa.nulls(len(one), pa.string())
    schema = COLLECTIVES.schema
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _with_nulls(values: Ints) -> pa.Array:
    """Return numbers as a column in which NULL is null."""
    return pa.array(values, mask=values == NULL)


def _lists(matched: MatchedEvents, values: Ints) -> pa.Array:
    """Return the values of the members of each collective as lists."""
    edges = pa.array(matched.edges.astype(np.int32))
    return pa.ListArray.from_arrays(edges, pa.array(values, pa.int64()))


def _named(table: pa.Table, groups: pa.Table) -> pa.Table:
    """Return the table with the name of each group: its description, or else its name."""
    rows = groups.filter(groups["group"].is_valid()).select(["group", "description", "name"])
    name_of = {row["group"]: row["description"] or row["name"] for row in rows.to_pylist()}
    ids = list(name_of)
    place = pc.index_in(table["group_id"], pa.array(ids, pa.int64()))
    names = pa.array(list(name_of.values()), pa.string()).take(place.combine_chunks())
    number = table.column_names.index("group_name")
    return table.set_column(number, "group_name", names)
