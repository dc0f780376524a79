"""Test what traces of a profiler beside the dumps add: what a culprit did last."""

import gzip
import re

import pytest
from builders.hang_files import write_dumps

from fastcomm.hang.analysis import diagnose_hang
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.traces import write


def traced(folder, form):
    """A hang of rank 2 of four, with the traces of all ranks beside the dumps."""
    job = Job.of(ranks=4, steps=1, layers=1)
    write(job, folder) if form == "kineto" else write_nsys(job, folder)
    write_dumps(folder / "dumps", 4, absent=2)
    return folder


@pytest.mark.parametrize("form", ["kineto", "nsys"])
def test_the_trace_of_the_culprit_says_what_it_did_last(tmp_path, form):
    hang = diagnose_hang(traced(tmp_path, form))
    assert (hang.kind, hang.culprits) == ("not_arrived", (2,))
    (line,) = [line for line in hang.evidence if "the trace of rank" in line]
    assert re.search(r"the trace of rank 2 ends .* after the last call in its dump", line)
    assert "the last on its host is " in line
    assert "its last communication is AllReduce" in line
    assert f"({tmp_path}" in line


def test_a_trace_that_cannot_be_read_is_named(tmp_path):
    path = traced(tmp_path, "kineto") / "rank2.pt.trace.json.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:5000]))
    hang = diagnose_hang(tmp_path)
    assert hang.culprits == (2,)
    (line,) = [line for line in hang.evidence if "the trace of rank 2" in line]
    assert "rank2.pt.trace.json.gz" in line
    assert "not read" in line


def test_traces_of_other_ranks_are_no_evidence(tmp_path):
    (traced(tmp_path, "kineto") / "rank2.pt.trace.json.gz").unlink()
    assert "trace of rank" not in "\n".join(diagnose_hang(tmp_path).evidence)
