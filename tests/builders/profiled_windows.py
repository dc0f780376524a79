"""Profiled windows of made-up jobs, as `fastcomm.torch` leaves them."""

from dataclasses import replace

from builders.opened import open_run

from fastcomm.metrics import partial_files
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.watch.windows import ProfiledWindow

JOB = replace(Job.of(ranks=4, steps=4, layers=2, micro_batches=2), straggler=None)


def write_window(job, folder, *, ranks=None):
    """Write the partial results of ranks of a job, by default all; return the window."""
    traces = folder.parent.parent / f"traces of {folder.parent.name} {folder.name}"
    write(job, traces)
    window = ProfiledWindow.of(folder)
    for source in open_run(traces).sources:
        if ranks is None or source.rank in ranks:
            partials = partial_files.RankPartials.of(source.read("metrics"))
            partial_files.write(partials, window.place_of(source.rank))
    return window
