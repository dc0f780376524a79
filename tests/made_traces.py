"""Traces of any content that the schemas allow, made by hypothesis."""

import pyarrow as pa
from hypothesis import strategies as st

from fastcomm.trace import schema
from fastcomm.trace.trace import Meta, Trace

TIMES = st.integers(-(2**62), 2**62)
SIZES = st.none() | st.integers(0, 2**45)  # 30 of them are what a rank may move
SOME = st.none() | st.integers(-(2**63) + 1, 2**63 - 1)  # all but NULL
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
DEVICE = [schema.KIND[kind] for kind in ("kernel", "memcpy", "memset", "host_work")]


@st.composite
def traces(draw):
    """A trace with or without args: ties and nulls, communication of any kind of event."""
    rows = draw(st.integers(1, 30))
    # Few different starts, so that many are the same.
    few = st.sampled_from(draw(st.lists(TIMES, min_size=1, max_size=9)))
    starts = sorted(draw(st.lists(few, min_size=rows, max_size=rows)))
    stops = [start + draw(st.integers(0, 2**40)) for start in starts]
    lanes = draw(st.integers(1, 4))
    groups = draw(st.integers(0, 3))
    comm_rows = sorted(draw(st.sets(st.integers(0, rows - 1))))

    def column(values, count=rows):
        return draw(st.lists(values, min_size=count, max_size=count))

    kind = column(st.integers(0, len(schema.KINDS) - 1))
    names = draw(st.lists(WORDS, min_size=1, max_size=5, unique=True))
    events = {
        "start": starts,
        "stop": stops,
        "kind": kind,
        "name": pa.array(column(st.sampled_from(names)), pa.string()).dictionary_encode(),
        "lane": column(st.integers(0, lanes - 1)),
        "correlation": column(SOME),
        "offset": column(SOME),
    }
    comm = {
        "start": [starts[row] for row in comm_rows],
        "stop": [stops[row] for row in comm_rows],
        "op": column(st.integers(0, len(schema.OPS) - 1), len(comm_rows)),
        "tag": column(st.integers(0, len(schema.TAGS) - 1), len(comm_rows)),
        "tag_source": column(st.integers(0, len(schema.TAG_SOURCES) - 1), len(comm_rows)),
        "group": column(
            st.none() | st.integers(0, groups - 1) if groups else st.none(), len(comm_rows)
        ),
        "event": comm_rows,
        **{name: column(SOME, len(comm_rows)) for name in ("stream", "seq")},
        **{
            name: column(SIZES, len(comm_rows))
            for name in ("msg_bytes", "payload_bytes", "bus_bytes")
        },
        "root": column(st.none() | st.integers(0, 9), len(comm_rows)),
        **{
            name: column(st.none() | st.lists(st.integers(0, 9), max_size=3), len(comm_rows))
            for name in ("sends_to", "receives_from")
        },
    }
    some_args = st.lists(st.sampled_from(schema.ARGS.names), min_size=1, unique=True)
    args = draw(st.none() | some_args)
    return Trace.of(
        events=table(events, schema.EVENTS),
        comm=table(comm, schema.COMM),
        lanes=table(
            {
                "process": column(WORDS, lanes),
                "thread": column(WORDS, lanes),
                "device": column(st.none() | st.integers(0, 7), lanes),
                "is_device": column(st.booleans(), lanes),
            },
            schema.LANES,
        ),
        groups=table(
            {
                "name": column(st.none() | WORDS, groups),
                "description": column(st.none() | WORDS, groups),
                "ranks": column(st.none() | st.lists(st.integers(0, 9), max_size=3), groups),
                "size": column(st.none() | st.integers(1, 9), groups),
                "tag": column(st.integers(0, len(schema.TAGS) - 1), groups),
                "tag_source": column(st.integers(0, len(schema.TAG_SOURCES) - 1), groups),
                "candidates": column(st.just([]) | st.just([0, 3]), groups),
            },
            schema.GROUPS,
        ),
        iterations=table(
            {"number": [5], "start": [starts[0]], "stop": [max(stops)]}, schema.ITERATIONS
        ),
        meta=Meta(
            rank=draw(st.integers(0, 99_999)),
            world_size=draw(st.none() | st.just(100_000)),
            format="made",
            path="nowhere",
            clock=draw(st.none() | st.just("unix")),
            found_by="hand",
            warnings=tuple(draw(st.lists(WORDS, max_size=2))),
            lacks=draw(st.just(()) | st.just(("bytes",))),
        ),
        args=None
        if args is None
        else pa.table({name: pa.array(column(SOME), pa.int64()) for name in args}),
    )


def table(columns, wanted):
    """The columns as the schema has them."""
    return pa.table(
        {
            name: column
            if isinstance(column, pa.Array)
            else pa.array(column, wanted.field(name).type)
            for name, column in columns.items()
        }
    )
