"""Test the known answers of synthetic jobs against the oracle."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from builders.examples import fewer
from builders.synthetic_files import LINK, SMALL, VARIANTS, shapes, written
from builders.synthetic_truth import truth
from hypothesis import given
from oracles import kineto as oracle_kineto
from oracles import metrics as oracle_metrics

from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import Variant
from fastcomm.synthetic.traces import write

TAG_OF = {
    "TENSOR_MODEL_PARALLEL_GROUP": "TP",
    "DATA_PARALLEL_GROUP": "DP",
    "EXPERT_DATA_PARALLEL_GROUP": "DP",
    "PIPELINE_MODEL_PARALLEL_GROUP": "PP",
    "EXPERT_MODEL_PARALLEL_GROUP": "EP",
}


def nanoseconds(row, key):
    return round(row[key] * 1000)


def tag_by_description(event):
    return TAG_OF[event["description"]]


def tag_by_operation(event):
    """Enough where nothing has a description: tags follow from the ranks and the calls."""
    kinds = {"AllToAll": "EP", "SendRecv": "PP", "Broadcast": "TP"}
    stride = event["group_ranks"][1] - event["group_ranks"][0]
    return kinds.get(event["op"], "TP" if stride == 1 else "DP")


def assert_says(found, wanted, place=""):
    """`found` has all that `wanted` has; floats may differ in the last digits."""
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            assert_says(found.get(key), value, f"{place}.{key}")
        rest = {key: value for key, value in found.items() if key not in wanted}
        assert not any(rest.values()), f"{place}: more than expected: {rest}"
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), place
        for number, (one, two) in enumerate(zip(found, wanted, strict=True)):
            assert_says(one, two, f"{place}[{number}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12), place
    else:
        assert found == wanted, place


def compare(job, tag_of, **options):
    with TemporaryDirectory() as folder:
        paths = write(job, Path(folder), **options)
        traces = [oracle_kineto.read(path) for path in paths]
    found = oracle_metrics.metrics(traces, tag_of, LINK, "host")
    # By the host's marks, a job runs inside of them.
    inside = {"device_ns": 0, "share": 0.0, "comm_events": 0}
    said = {
        **truth(job, LINK, ranks=options.get("ranks")),
        "iteration_clock": "host",
        "outside": inside,
    }
    ours = {"by_rank", "longest_rank", "widest_window"}
    assert_says(found, {key: value for key, value in said.items() if key not in ours})


@pytest.mark.parametrize("variant", VARIANTS)
def test_truth_is_what_the_oracle_finds_in_every_variant(variant):
    tag_of = tag_by_operation if variant & Variant.UNDESCRIBED else tag_by_description
    compare(Job.of(8, **SMALL), tag_of, variant=variant, ranks=[0, 5])


@pytest.mark.parametrize(
    "job",
    [
        Job.of(1, **SMALL),
        Job.of(2, **SMALL),
        Job.of(8, steps=1, layers=3),
        Job.of(6, tp=1, pp=3, dp=2, ep=1, straggler=None, **SMALL),
        Job.of(16, tp=2, pp=2, dp=4, ep=2, straggler=3, **SMALL),
        Job.of(8, tp=2, pp=4, dp=1, ep=1, steps=1, layers=3, micro_batches=2),
    ],
    ids=lambda job: f"tp{job.tp}-pp{job.pp}-dp{job.dp}-ep{job.ep}",
)
def test_truth_is_what_the_oracle_finds_in_jobs_of_any_shape(job):
    compare(job, tag_by_description)


@given(shapes.filter(lambda job: job.ranks <= 12))
@fewer(4)
def test_truth_is_what_the_oracle_finds_in_any_job(job):
    ranks = {0, job.ranks // 2, job.ranks - 1}
    compare(job, tag_by_description, compress=False, ranks=ranks)


def test_filler_changes_no_metric():
    compare(Job.of(2, **SMALL), tag_by_description, compress=False, filler_bytes=1_500_000)


def test_a_walk_over_all_boundaries_finds_the_partition():
    """Independent of the oracle: every nanosecond between two boundaries has one class."""
    job = Job.of(8, **SMALL)
    rank = 6
    rows = written(job, rank)["traceEvents"]
    marks = [row for row in rows if row["name"].startswith("ProfilerStep")]
    marks = [row for row in marks if row["cat"] == "user_annotation"]
    found = defaultdict(int)
    live = [row for row in rows if row.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
    spans = []
    for row in live:
        start, stop = nanoseconds(row, "ts"), nanoseconds(row, "ts") + nanoseconds(row, "dur")
        described = row["args"].get("Process Group Description")
        kind = "compute" if row["cat"] == "kernel" else "memcpy"
        spans.append((start, stop, TAG_OF[described] if described else kind))
    edges = {edge for start, stop, _ in spans for edge in (start, stop)}
    for mark in marks:
        start = nanoseconds(mark, "ts")
        stop = start + nanoseconds(mark, "dur")
        inside = sorted({start, stop, *(edge for edge in edges if start < edge < stop)})
        for one, two in pairwise(inside):
            kinds = {kind for begin, end, kind in spans if begin <= one and two <= end}
            found[category(kinds)] += two - one
    wanted = {name: ns for name, ns in truth(job)["by_rank"][rank]["exact_ns"].items() if ns}
    assert dict(found) == wanted


def category(kinds):
    if "compute" in kinds:
        return "compute"
    tags = kinds - {"memcpy"}
    if tags:
        return f"exposed_{tags.pop()}" if len(tags) == 1 else "exposed_mixed"
    return "memcpy" if kinds else "idle"
