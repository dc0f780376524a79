"""Test the headline, and the order of findings."""

import json

import pytest
from builders import kineto_text as kt
from builders.commands import KINETO
from builders.job_traces import measured as measured_traces
from builders.job_traces import measured_job, trace
from builders.opened import open_run
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.findings.detection import SYMPTOMS
from fastcomm.metrics.findings.finding import confidence
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

SUBJECTS = {
    "Compute is": ("compute",),
    "Exposed communication is": ("exposed",),
    "Memory copies are": ("memcpy",),
    "Idle time is": ("idle",),
}


def measured(*words):
    """The JSON object of a run, and what the terminal prints of it."""
    words = ["metrics", *map(str, words)]
    shown, found = (
        CliRunner().invoke(main, [*words, *more], catch_exceptions=False).stdout
        for more in ([], ["--json"])
    )
    return json.loads(found), shown


def largest(exact):
    """The part of the step with the largest share; None where it is not known."""
    if None in exact.values():
        return None
    parts = dict.fromkeys(("compute", "exposed", "memcpy", "idle"), 0.0)
    for name, share in exact.items():
        parts[name.partition("_")[0]] += share
    return max(parts, key=lambda part: parts[part])


def subject(headline):
    """The part of the step that a headline is about."""
    starts = [parts for start, parts in SUBJECTS.items() if headline.startswith(start)]
    assert len(starts) <= 1
    return starts[0][0] if starts else None


def unwrapped(text):
    return " ".join(text.split())


def is_mostly_idle(finding):
    """Whether devices are idle for half of the step for a known cause: it counts as one."""
    cause = finding["evidence"].get("idle_cause", "unknown")
    return finding["kind"] == "idle" and finding["share"] >= 0.5 and cause != "unknown"


@pytest.mark.parametrize("name", KINETO)
def test_the_headline_of_a_real_trace_is_the_largest_part_of_its_step(real, name):
    found, shown = measured(real(name))
    assert subject(found["headline"]) == largest(found["breakdown"]["exact"])
    if subject(found["headline"]) is None:
        assert found["headline"].startswith("The largest part of the step is n/a: ")
    assert found["headline"] in unwrapped(shown)
    places = [unwrapped(shown).index(each["text"]) for each in found["findings"][:3]]
    assert places == sorted(places)
    is_symptom = [
        each["kind"] in SYMPTOMS and not is_mostly_idle(each) for each in found["findings"]
    ]
    assert is_symptom == sorted(is_symptom)
    assert all(each["share"] >= 0.005 for each in found["findings"])
    if not found["volume"] and subject(found["headline"]) is not None:
        of_device = " of the device" if found["host_communication"] else ""
        assert found["headline"].endswith(f"; no communication{of_device} was recorded.")


def test_the_mi300_trace_is_limited_by_exposed_communication(kineto):
    found, _ = measured(kineto / "mi300_resnet", "--step-boundary", "device")
    assert found["headline"].startswith(
        "Exposed communication is the largest part of the step: 62.4 % (11.8 ms of 18.8 ms)"
    )
    (finding,) = found["findings"]
    assert (finding["kind"], finding["ranks"]) == ("exposed_communication", [0])
    assert finding["cost_ns"] == pytest.approx(11.76e6, rel=1e-3)
    assert finding["confidence"] == "low"  # one rank


def test_the_b200_trace_is_mostly_idle(kineto):
    found, _ = measured(kineto / "b200_vllm", "--step-boundary", "host")
    assert found["headline"] == (
        "Idle time is the largest part of the step: 86.7 % (75.8 ms of 87.4 ms)."
    )
    (finding,) = found["findings"]
    assert (finding["kind"], finding["ranks"]) == ("idle", [0])
    assert finding["cost_ns"] == pytest.approx(75.82e6, rel=1e-3)


def test_the_dlrm_run_is_idle_and_step_times_show_no_slow_rank(kineto):
    found, shown = measured(kineto / "dlrm_8rank", "--step-boundary", "host")
    assert found["headline"].startswith(
        "Idle time is the largest part of the step: 56.3 % (9.02 ms of 16.0 ms)"
    )
    symptoms = [each for each in found["findings"] if each["kind"] in SYMPTOMS]
    assert [each["kind"] for each in symptoms] == ["idle", "exposed_communication"]
    assert [each["ranks"] for each in symptoms] == [list(range(8))] * 2
    costs = [each["cost_ns"] for each in symptoms]
    assert costs == pytest.approx([9.0185e6, 5.86125e6], rel=1e-3)
    assert {each["confidence"] for each in found["findings"]} <= {"low"}  # one step
    assert "slowest rank is" not in shown


def test_the_rank_that_the_others_of_dlrm_wait_for_is_a_finding_of_low_confidence(kineto):
    found, shown = measured(kineto / "dlrm_8rank")
    idle, first = found["findings"][:2]
    assert is_mostly_idle(idle)
    assert idle["evidence"]["idle_cause"] == "launch_bound"
    assert (first["kind"], first["ranks"]) == ("late_rank", [7])
    caused = sum(each["wait_caused_ns"] for each in found["waits"] if each["rank"] == 7)
    assert first["cost_ns"] == caused == pytest.approx(1.31e6, rel=0.01)
    assert first["confidence"] == "low"
    assert "Rank 7 is late: it is the last to arrive at 62.5 % of its collectives" in (
        unwrapped(shown)
    )
    raw, _ = measured(kineto / "dlrm_8rank", "--clock-alignment", "none")
    assert "late_rank" not in {each["kind"] for each in raw["findings"]}


def test_a_run_without_communication_says_so_and_that_compute_limits_it(kineto):
    found, shown = measured(kineto / "h100_qwen", "--step-boundary", "host")
    assert found["headline"] == (
        "Compute is the largest part of the step: 91.3 % (43.1 ms of 47.2 ms); no "
        "communication was recorded."
    )
    assert found["findings"] == []
    assert "Nothing stands out: compute limits the step (91.3 %)." in unwrapped(shown)


DISPATCH = "void deep_ep::intranode::dispatch<8, 768>(int4*, float*)"
COMBINE = "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)"


def device_work(path, *works):
    """A trace with one mark of 1 ms on the host, in which all device work is launched."""
    events = [kt.mark("ProfilerStep#3", 0, 1000)]
    for number, (make, start, length) in enumerate(works, 1):
        events.append(kt.launch(number, number))
        events.append(make(start, length, correlation=number))
    return kt.write(path, events)


def kernel(name):
    return lambda start, length, **args: kt.kernel(name, start, length, **args)


def copy(start, length, **args):
    return kt.event("Memcpy HtoD", "gpu_memcpy", start, length, stream=7, **args)


def test_deepep_kernels_are_exposed_communication_of_experts(tmp_path):
    path = device_work(
        tmp_path / "rank0.json",
        (kernel("gemm"), 10, 100),
        (kernel(DISPATCH), 110, 500),
        (kernel(COMBINE), 610, 300),
    )
    found, _ = measured(path)
    assert found["headline"].startswith("Exposed communication is the largest part of the step")
    assert found["headline"].endswith(", all of it EP.")
    (finding,) = found["findings"]
    assert (finding["kind"], finding["evidence"]["tag"]) == ("exposed_communication", "EP")
    assert finding["cost_ns"] == 800_000


def test_a_run_of_copies_is_limited_by_copies(tmp_path):
    path = device_work(
        tmp_path / "rank0.json",
        (kernel("gemm"), 0, 20),
        (copy, 20, 970),
        (kernel("x"), 990, 10),
    )
    found, shown = measured(path)
    assert found["headline"] == (
        "Memory copies are the largest part of the step: 97.0 % (970 us of 1.00 ms); no "
        "communication was recorded."
    )
    (finding,) = found["findings"]
    assert (finding["kind"], finding["ranks"], finding["cost_ns"]) == ("copies", [0], 970_000)
    assert "hides all" not in shown


def test_a_part_shorter_than_compute_is_a_symptom_from_30_percent_on(tmp_path):
    for copying, kinds in ((400, ["copies"]), (310, ["copies"]), (290, [])):
        path = device_work(
            tmp_path / f"rank0-{copying}.json",
            (kernel("gemm"), 0, 990 - copying),
            (copy, 990 - copying, copying),
            (kernel("x"), 990, 10),
        )
        found, shown = measured(path)
        assert found["headline"].startswith("Compute is the largest part")
        assert [each["kind"] for each in found["findings"]] == kinds
        assert ("Nothing stands out" in shown) == (not kinds)


def test_an_idle_run_is_limited_by_idle_time(tmp_path):
    path = device_work(
        tmp_path / "rank0.json",
        (kernel("gemm"), 0, 20),
        (copy, 500, 50),
        (kernel("x"), 990, 10),
    )
    found, _ = measured(path)
    assert subject(found["headline"]) == "idle"
    kinds = [(each["kind"], each["cost_ns"]) for each in found["findings"]]
    assert kinds == [("idle", 920_000), ("copies", 50_000)]


def test_exposed_communication_is_divided_into_waiting_and_transfer():
    found = measured_job(Job.of(steps=2, layers=2, link_speed=2 * 10**9))
    assert found.headline.startswith("Exposed communication is the largest part of the step")
    assert "of the step waits for the last rank, " in found.headline
    assert found.headline.endswith("% is transfer.") or "cannot be divided" in found.headline
    matched = {each.tag for each in found.across.waits}
    assert {"DP", "TP", "EP"} <= matched
    for tag, each in found.exposure.items():
        if tag in matched:
            assert each.wait_ns + each.transfer_ns == pytest.approx(each.exposed_ns)
            assert min(each.wait_ns, each.transfer_ns) >= 0
        else:
            assert each.wait_ns is each.transfer_ns is None
    assert [(each.kind, each.confidence) for each in found.findings] == [
        ("exposed_communication", "high")
    ]


def test_waiting_for_missing_ranks_is_not_known():
    job = Job.of(steps=2, layers=2, link_speed=2 * 10**9)
    traces = [trace(job, rank) for rank in range(job.ranks)]
    (whole,), (part,) = (
        measured_traces(traces, world_size=ranks).findings
        for ranks in (job.ranks, job.ranks + 1)
    )
    assert "missing ranks" not in whole.text
    assert "waiting for the missing ranks is not known" in part.text
    assert (whole.confidence, part.confidence) == ("high", "medium")


def test_a_cost_below_half_a_percent_of_the_step_is_no_finding():
    for speed, kinds in ((2 * 10**9, []), (44 * 10**9, ["straggler"])):
        found = measured_job(Job.of(steps=1, link_speed=speed))
        assert [each.kind for each in found.findings if not each.is_symptom] == kinds


def test_confidence_needs_several_steps_and_ranks():
    one, two = (measured_job(Job.of(steps=steps)).findings[0] for steps in (1, 2))
    assert (one.confidence, one.value("spread_ns")) == ("low", None)
    assert two.confidence == "high"
    assert 3 * two.value("spread_ns") < two.cost_ns
    assert (one.value("steps"), two.value("steps")) == (1, 2)


@pytest.mark.parametrize(
    ("spread", "ranks", "is_matched", "wanted"),
    [
        (33.0, 8, True, "high"),
        (34.0, 8, True, "medium"),
        (1.0, 8, False, "medium"),
        (100.0, 8, True, "low"),
        (1.0, 1, True, "low"),
        (None, 8, True, "low"),
    ],
)
def test_confidence_is_by_matching_and_by_the_spread_between_steps(
    spread, ranks, is_matched, wanted
):
    assert confidence(100.0, spread, ranks=ranks, is_matched=is_matched) == wanted


@pytest.mark.parametrize("how", ["missing", "skipped"])
def test_a_run_with_ranks_that_were_not_read_is_not_called_healthy(tmp_path, how):
    write(Job.of(8, steps=1, layers=2, straggler=None), tmp_path)
    last = next(tmp_path.glob("*rank7*"))
    last.unlink()
    if how == "skipped":
        last.write_bytes(b"no trace")
    found, shown = measured(tmp_path, *(["--keep-going"] if how == "skipped" else []))
    assert [each for each in found["findings"] if each["kind"] not in SYMPTOMS] == []
    assert "healthy" not in shown
    assert (
        "None of the 7 ranks that were read stands apart, and no link among them; 1 of 8 ranks "
        "was not read; compute limits the step"
    ) in unwrapped(shown)


def test_a_run_whose_ranks_compute_for_unequal_times_is_not_called_healthy(tmp_path):
    for rank in range(4):
        events = [kt.mark("ProfilerStep#0", 0, 1000), kt.kernel("gemm", 10, 600 + 50 * rank)]
        kt.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=4)
    found = compute_metrics(open_run(tmp_path))
    assert found.health.startswith("Ranks compute for unequal times: rank 3 100 us")
    assert "healthy" not in found.health
