"""A real trace, many times in a row: as large as a benchmark needs it."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.trace.trace import Trace


def tiled(trace: Trace, times: int) -> Trace:
    """The same trace `times` times, one after the other, with correlations of their own."""
    events, args = trace.events, trace.args
    start, stop = (events[name].to_numpy() for name in ("start", "stop"))
    span = int(stop.max() - start.min()) + 1
    known = events["correlation"]
    low = pc.min(pc.filter(known, pc.greater(known, 0))).as_py()
    largest = pc.max(known).as_py() - low + 1
    rounds = np.repeat(np.arange(times), len(start))

    def again(column, step=0):
        whole = pa.concat_arrays([column.combine_chunks()] * times)
        return pc.add(whole, pa.array(rounds * step)) if step else whole

    columns = {name: again(events[name]) for name in events.column_names}
    columns |= {name: again(events[name], span) for name in ("start", "stop")}
    columns["correlation"] = again(events["correlation"], largest)
    arguments = {name: again(args[name]) for name in args.column_names}
    arguments["position"] = again(args["position"], len(start))
    if "wait_correlation" in arguments:
        arguments["wait_correlation"] = again(args["wait_correlation"], largest)
    return replace(trace, events=pa.table(columns), args=pa.table(arguments))
