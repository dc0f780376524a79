"""Recompute what the rule of steps changed, for the table of docs/metrics/iterations.md."""

from itertools import pairwise

import pytest
from builders.places import ROOT
from builders.shared_data import shared
from oracles import kineto as oracle_kineto
from oracles import metrics as oracle

from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

PAGE = ROOT / "docs/metrics/iterations.md"
CASES = "cases/02-step-loses-its-start/steps{}.json"
FILES = {
    "1 step: 6 ms of data loading, then a kernel of 4 ms": CASES.format(1),
    "2 such steps": CASES.format(2),
    "3 such steps": CASES.format(3),
    "10 such steps": CASES.format(10),
    "2 steps of 10 ms, a pause of 980 ms, 2 steps": "cases/14-gap-between-recorded-steps",
    "HolisticTraceAnalysis, `nccl_data`": "kineto/nccl_2rank_rank0.json.gz",
    "HolisticTraceAnalysis, `trace_diff`": "kineto/trace_diff",
    "HolisticTraceAnalysis, `sampled_rank-0` and `-1`": "kineto/sampled_2of128",
    "param, `dlrm_kineto`, 8 ranks": "kineto/dlrm_8rank",
    "TraceLens, `Qwen1.5-0.5B-Chat` (H100)": "kineto/h100_qwen",
    "TraceLens, `resnet_act_checkpoint` (MI300X)": "kineto/mi300_resnet",
}
DEMO = "`fastcomm demo`, 8 ranks"


def rows_of_page():
    """The numbers of each row of the table, by its trace."""
    part = PAGE.read_text().partition("## What the rule of steps changed")[2].partition("##")[0]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line[:1] == "|"]
    return {trace: tuple(numbers) for trace, *numbers in lines[2:]}


def windows_before(trace):
    """Steps by the former rule: from the first work launched in a mark to that of the next."""
    work = oracle.device_events(trace)
    marks = oracle_kineto.iterations(trace)
    steps = []
    for place, mark in enumerate(marks):
        until = min([mark["stop"], *(other["start"] for other in marks[place + 1 :])])
        own = [
            (start, stop)
            for start, stop, launch in work
            if launch is not None and mark["start"] <= launch < until
        ]
        if own:
            first, last = min(start for start, _ in own), max(stop for _, stop in own)
            steps.append((first, max(until, last), place))
    steps.sort()
    ends = []
    for (_, stop, place), (start, _, following) in pairwise(steps):
        ends.append(start if following == place + 1 else min(stop, start))
    ends += [stop for _, stop, _ in steps[-1:]]
    return [(start, end) for (start, _, _), end in zip(steps, ends, strict=True)]


def windows_now(trace):
    return [(step["start"], step["stop"]) for step in oracle.device_windows(trace)]


def idle(work, start, stop):
    """Time of a step in which no work runs; `work` is in order of time."""
    length, busy_until = stop - start, start
    for begin, end, _ in work:
        length -= max(min(end, stop) - max(begin, busy_until), 0)
        busy_until = max(busy_until, min(end, stop))
    return length


def means(traces, rule):
    """The mean length and idle time of all steps, in ms."""
    steps = []
    for trace in traces:
        work = sorted(oracle.device_events(trace), key=lambda event: event[:2])
        steps += [(stop - start, idle(work, start, stop)) for start, stop in rule(trace)]
    return [float(sum(column)) / len(steps) / 1e6 for column in zip(*steps, strict=True)]


def check(trace, paths):
    traces = [oracle_kineto.read(path) for path in paths]
    before, now = (means(traces, rule) for rule in (windows_before, windows_now))
    numbers = (before[0], now[0], before[1], now[1])
    assert rows_of_page()[trace] == tuple(f"{number:.3f}" for number in numbers)


def test_the_page_has_all_of_these_traces():
    assert rows_of_page().keys() == {*FILES, DEMO}


@pytest.mark.parametrize("trace", FILES)
def test_a_row_of_the_page_is_what_both_rules_give(trace):
    place = shared(FILES[trace])
    paths = sorted(place.glob("*.json*")) if place.is_dir() else [place]
    check(trace, [path for path in paths if path.name != "expected.json"])


def test_the_row_of_the_demo_is_what_both_rules_give(tmp_path):
    check(DEMO, write(Job.of(ranks=8, fault="slow_gpu"), tmp_path))
