"""What fastcomm says about real PyTorch jobs with planted faults; `tests/jobs` records them.

FASTCOMM_JOBS names another folder of recordings, such as the new ones of `make jobs`.
"""

import gzip
import json
import os
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
from builders.commands import invoke
from builders.places import JOBS

from fastcomm.metrics.findings.detection import SYMPTOMS

RECORDED = Path(os.environ.get("FASTCOMM_JOBS", JOBS))
JOBS = sorted(path.name for path in RECORDED.glob("*") if path.is_dir())
pytestmark = pytest.mark.skipif(not JOBS, reason=f"no recorded jobs at {RECORDED}")
RANKS = [0, 1, 2, 3]
# Description and parallelism of the groups of each kind of job.
GROUPS = {
    "ddp": {("default_pg", "DP")},
    "fsdp": {("default_pg", "DP")},
    "tp_fsdp": {("mesh_dp", "DP"), ("mesh_tp", "TP")},
    "pp": {("default_pg", "PP")},
    "pp_dp": {("mesh_pp", "PP"), ("mesh_dp", "DP")},
    "ep": {("default_pg", "DP"), ("default_pg", "EP")},
}
# Finding and ranks of each fault that one rank or stage has.
CAUSES = {
    "straggler": ({"straggler"}, [2]),
    "sleep": ({"jittery_host"}, [2]),
    "loader": ({"jittery_host"}, [2]),
    "neighbor": ({"straggler", "jittery_host"}, [2]),
    "stage": ({"imbalanced_stage"}, None),
}
STAGE = {"pp": [2], "pp_dp": [2, 3]}
PLANTED = [job for job in JOBS if job.partition("-")[2] in CAUSES]


@cache
def truth(job):
    return json.loads((RECORDED / job / "truth.json").read_text())


@cache
def measured(job, part):
    return json.loads(invoke("metrics", RECORDED / job / part, "--json").stdout)


def causes(metrics):
    return [each for each in metrics["findings"] if each["kind"] not in SYMPTOMS]


def planted(job):
    """Kinds and ranks of the finding that a job's fault has to cause."""
    kinds, ranks = CAUSES[truth(job)["fault"]]
    return kinds, ranks or STAGE[truth(job)["kind"]]


def tolerance_ms(job):
    """30 % of the cost, or the spread between clean blocks, if that is more."""
    return max(0.3 * truth(job)["cost_ms"], truth(job)["clean_spread_ms"])


@pytest.mark.parametrize("part", ["clean", "faulty"])
@pytest.mark.parametrize("job", JOBS)
def test_the_parallelism_of_every_group_is_right_and_every_collective_is_matched(job, part):
    metrics = measured(job, part)
    assert metrics["ranks"] == RANKS
    groups = {(group["description"], group["tag"]) for group in metrics["groups"]}
    assert groups == GROUPS[truth(job)["kind"]]
    assert metrics["matching"]["share"] == 1
    assert metrics["matching"]["events"] == sum(group["events"] for group in metrics["groups"])


@pytest.mark.parametrize("job", PLANTED)
def test_the_first_finding_is_the_planted_cause_with_its_cost(job):
    kinds, ranks = planted(job)
    first = measured(job, "faulty")["findings"][0]
    assert first["kind"] in kinds
    assert first["ranks"] == ranks
    assert first["confidence"] in ("high", "medium")
    assert first["cost_ns"] / 1e6 == pytest.approx(truth(job)["cost_ms"], abs=tolerance_ms(job))


def test_garbage_collection_in_turns_blames_no_rank():
    first, *others = causes(measured("ddp-gc", "faulty"))
    assert (first["kind"], first["ranks"]) == ("pauses", RANKS)
    assert first["cost_ns"] / 1e6 == pytest.approx(
        truth("ddp-gc")["cost_ms"], abs=tolerance_ms("ddp-gc")
    )
    assert others == []


def test_uneven_experts_are_found_with_their_cost_or_not_for_sure():
    """A cost within the spread between blocks is no certain one, though tokens are counted."""
    for cause in causes(measured("ep-experts", "faulty")):
        if cause["confidence"] != "low":
            assert (cause["kind"], cause["ranks"]) == ("hot_expert", [2])
            assert cause["cost_ns"] / 1e6 == pytest.approx(
                truth("ep-experts")["cost_ms"], abs=tolerance_ms("ep-experts")
            )
            assert cause["cost_ns"] / 1e6 > truth("ep-experts")["clean_spread_ms"]


@pytest.mark.parametrize("job", JOBS)
def test_a_clean_run_has_no_finding_above_its_spread(job):
    for finding in measured(job, "clean")["findings"]:
        is_small = finding["cost_ns"] / 1e6 <= truth(job)["clean_spread_ms"]
        assert is_small or finding["confidence"] == "low", finding["text"]


@pytest.mark.parametrize("job", [*PLANTED, "ddp-gc"])
def test_a_comparison_names_the_same_cause(job, tmp_path):
    saved = [tmp_path / "clean.json", tmp_path / "faulty.json"]
    for path in saved:
        path.write_text(json.dumps(measured(job, path.stem)))
    first = json.loads(invoke("compare", *saved, "--json").stdout)["causes"][0]
    kinds, ranks = ({"pauses"}, RANKS) if job == "ddp-gc" else planted(job)
    assert first["kind"] in kinds
    assert first["ranks"] == ranks
    assert first["effect_ns"] > 0


def measured_shifted(job, part, folder, ahead_ms):
    """Measure a recorded job with the clocks of some ranks ahead: ms by rank."""
    for file in (RECORDED / job / part).iterdir():
        shutil.copy(file, folder)
    for rank, ms in ahead_ms.items():
        file = folder / f"rank{rank}.json.gz"
        text = re.sub(
            r'("baseTimeNanoseconds":)(\d+)',
            lambda match, ms=ms: f"{match[1]}{int(match[2]) + ms * 10**6}",
            gzip.decompress(file.read_bytes()).decode(),
        )
        file.write_bytes(gzip.compress(text.encode(), compresslevel=1))
    return json.loads(invoke("metrics", folder, "--json").stdout)


@pytest.mark.parametrize(
    ("job", "ahead_ms"),
    [
        *(("ddp-straggler", {3: 3000}), ("fsdp-straggler", {0: 5, 1: -300, 2: 123})),
        *(("tp_fsdp-straggler", {3: 3000}), ("tp_fsdp-straggler", {0: 5, 1: -300, 2: 123})),
        *(("pp-stage", {3: 3000}), ("pp-stage", {0: 5, 1: -300, 2: 123})),
        ("pp_dp-stage", {0: 5, 1: -300, 2: 123}),
    ],
)
def test_a_planted_clock_offset_is_within_the_reported_spread(job, ahead_ms, tmp_path):
    clocks = measured_shifted(job, "clean", tmp_path, ahead_ms)["clocks"]
    for row in clocks["offsets"]:
        true = ahead_ms.get(row["rank"], 0) - ahead_ms.get(row["reference"], 0)
        assert abs(row["offset_ns"] - true * 10**6) <= row["spread_ns"]


@pytest.mark.parametrize("job", JOBS)
def test_clocks_of_one_host_differ_by_no_more_than_the_reported_spread(job):
    for row in measured(job, "clean")["clocks"]["offsets"]:
        assert abs(row["offset_ns"]) <= row["spread_ns"]


@pytest.mark.parametrize("ahead_ms", [{2: 40, 3: 40}, {0: 5, 1: -300, 2: 123, 3: 400}])
@pytest.mark.parametrize(
    "job",
    [
        *("ddp-sleep", "fsdp-straggler", "tp_fsdp-straggler"),
        *("pp-stage", "pp_dp-stage", "ep-experts"),
    ],
)
def test_clocks_change_neither_groups_nor_matches_nor_the_first_cause(job, ahead_ms, tmp_path):
    found, known = measured_shifted(job, "faulty", tmp_path, ahead_ms), measured(job, "faulty")
    assert found["groups"] == known["groups"]
    assert found["matching"]["share"] == 1
    first, expected = causes(found)[0], causes(known)[0]
    assert (first["kind"], first["ranks"]) == (expected["kind"], expected["ranks"])
    new = {cause["kind"] for cause in causes(found)} - {
        cause["kind"] for cause in causes(known)
    }
    assert all(cause["confidence"] == "low" for cause in causes(found) if cause["kind"] in new)


def without_receives(source, target):
    """A recorded job of ranks 0 and 1 whose messages all go from rank 0 to rank 1."""
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((source / f"rank{rank}.json.gz").read_bytes()))
        if rank == 0:
            names = ("gloo:recv", "c10d::recv_")
            events = [e for e in trace["traceEvents"] if e.get("name") not in names]
            trace["traceEvents"] = events
        (target / f"rank{rank}.json").write_text(json.dumps(trace))
    return target


# The clean part of a job is that of every job of its kind.
CLEAN = list({job.partition("-")[0]: job for job in JOBS}.values())


@pytest.mark.parametrize(
    ("job", "part"), [*((job, "faulty") for job in JOBS), *((job, "clean") for job in CLEAN)]
)
def test_the_first_line_of_kernels_names_the_rank_that_computes_more(job, part):
    kind, fault = job.split("-")
    first = json.loads(invoke("kernels", RECORDED / job / part, "--json").stdout)["headline"]
    named = [int(rank) for rank in re.findall(r"operators of rank (\d+)", first)]
    if part == "faulty" and fault in {"straggler", "stage"}:
        assert len(named) == 1
        assert named[0] in STAGE.get(kind, [2])
    elif part == "faulty" and fault in {"experts", "neighbor"}:  # may be less than what counts
        assert named in ([], [2])
    else:
        assert not named


@pytest.mark.skipif("pp-stage" not in JOBS, reason="no recorded pipeline")
def test_clocks_are_unknown_where_messages_go_in_one_direction(tmp_path):
    folder = without_receives(RECORDED / "pp-stage" / "clean", tmp_path)
    metrics = json.loads(invoke("metrics", folder, "--json").stdout)
    assert metrics["clocks"]["times"] == "unknown"
    assert [row["offset_ns"] for row in metrics["clocks"]["offsets"]] == [None, None]
    assert metrics["matching"]["messages"] > 0
    assert metrics["waits"] == metrics["links"] == []
    assert any("clocks of ranks 0-1" in warning for warning in metrics["warnings"])
    raw = json.loads(invoke("metrics", folder, "--clock-alignment", "none", "--json").stdout)
    assert raw["clocks"]["times"] == "raw"
    assert raw["waits"] != []


@pytest.mark.parametrize("job", JOBS)
def test_the_critical_path_joins_all_ranks_and_is_mostly_on_the_slow_one(job):
    path = json.loads(invoke("critical-path", RECORDED / job / "faulty", "--json").stdout)
    assert [row["rank"] for row in path["ranks"]] == RANKS
    if truth(job)["fault"] == "straggler":
        longest = max(path["ranks"], key=lambda row: row["on_path_ns"])
        assert longest["rank"] in planted(job)[1]


@pytest.mark.skipif("ddp-link" not in JOBS, reason="a slow link needs root")
def test_a_collective_behind_another_one_makes_no_rank_the_cause_of_waits():
    """All are delayed by a slow link; who leaves a collective last enters the next one last."""
    metrics = measured("ddp-link", "faulty")
    most = max(row["wait_caused_ns"] for row in metrics["waits"])
    assert most < 0.15 * metrics["iteration"]["mean_ns"]
    assert all(cause["confidence"] == "low" for cause in causes(metrics))
