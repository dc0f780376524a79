"""Test the synthetic job: real formats, a possible schedule, and known answers."""

import gzip
import json
from collections import defaultdict

import pytest
from builders.examples import fewer
from builders.synthetic_files import LINK, SMALL, VARIANTS, shapes, written
from builders.synthetic_truth import truth
from hypothesis import given

from fastcomm.errors import ConfigError
from fastcomm.synthetic import pipeline
from fastcomm.synthetic.catalog import groups
from fastcomm.synthetic.job import GAP, Job
from fastcomm.synthetic.kineto import Variant
from fastcomm.synthetic.pipeline import START_NS
from fastcomm.synthetic.play import steps
from fastcomm.synthetic.traces import FIRST_ID, text, write


def load(path):
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 7, 8, 16, 64, 96, 512, 1024, 4096])
def test_any_number_of_ranks_is_a_valid_job(ranks):
    job = Job.of(ranks)
    assert job.tp * job.pp * job.dp == ranks
    assert job.dp % job.ep == 0


def test_a_job_without_ranks_is_an_error():
    with pytest.raises(ConfigError, match="0 ranks"):
        Job.of(0)


def test_eight_ranks_have_every_kind_of_parallelism():
    job = Job.of()
    assert (job.tp, job.pp, job.dp, job.ep, job.straggler) == (2, 2, 2, 2, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3, "dp": 1, "pp": 1}, "expected tp \\* pp \\* dp"),
        ({"tp": -2, "pp": -4, "dp": 1}, "expected tp \\* pp \\* dp"),
        ({"ep": 4}, "expected a divisor of dp 2"),
        ({"straggler": 8}, "expected 0 to 7"),
        ({"steps": 0}, "invalid steps 0: expected 1 or more"),
        ({"layer_ns": 10}, "invalid layer_ns 10: expected"),
    ],
)
def test_an_impossible_job_is_an_error_with_the_reason(changes, message):
    with pytest.raises(ConfigError, match=message):
        Job.of(8, **changes)


@given(shapes)
def test_all_members_of_a_group_agree_on_it(job):
    found = [groups(job, rank) for rank in range(job.ranks)]
    names = {}
    for rank, mine in enumerate(found):
        for kind, group in mine.items():
            assert rank in group.ranks
            assert all(found[member][kind] == group for member in group.ranks)
            assert names.setdefault(group.name, (kind, group.ranks)) == (kind, group.ranks)
    assert sorted(map(int, names)) == list(range(len(names)))


def test_groups_are_those_of_megatron():
    job = Job.of(16, tp=2, pp=2, dp=4, ep=2)
    first = groups(job, 0)
    assert {kind: group.ranks for kind, group in first.items() if kind != "world"} == {
        "tp": (0, 1),
        "dp": (0, 2, 4, 6),
        "ep": (0, 2),
        "edp": (0, 4),
        "pp": (0, 8),
    }
    assert groups(job, 15)["ep"].ranks == (13, 15)
    assert groups(job, 15)["edp"].ranks == (11, 15)


def calls_by_identity(job):
    """(what all members agree on) -> [(rank, work)]."""
    found = defaultdict(list)
    for rank in range(job.ranks):
        for step in steps(job, rank):
            for work in step.works:
                if work.call:
                    call = work.call
                    what = call.peers or call.operation.collective
                    found[call.group.name, what, call.seq].append((rank, work))
    return found


@given(shapes)
def test_members_of_a_collective_end_together_and_none_begins_after_all_were_there(job):
    for members in calls_by_identity(job).values():
        call = members[0][1].call
        assert tuple(rank for rank, _ in members) == tuple(
            sorted(call.peers or call.group.ranks)
        )
        assert len({work.stop for _, work in members}) == 1
        assert min(work.ns for _, work in members) >= job.latency_ns
        if call.operation.op == "AllToAll":
            assert sum(work.call.sent for _, work in members) == sum(
                work.call.received for _, work in members
            )
        elif call.operation.op != "SendRecv":
            assert len({(work.call.sent, work.call.received) for _, work in members}) == 1


@given(shapes)
def test_work_starts_inside_the_mark_as_soon_as_launch_stream_and_inputs_allow(job):
    most = START_NS + pipeline.added(job, "kernel_gaps", GAP)
    for rank in {0, job.ranks // 2, job.ranks - 1}:
        end = 0
        for step in steps(job, rank):
            assert step.start >= end
            end = step.stop
            launches = [work.launch for work in step.works]
            assert step.start <= launches[0]
            assert launches == sorted(launches)
            free = {}
            for work in step.works:
                inputs = [free[stream] for stream in work.waits if stream in free]
                causes = [work.launch, free.get(work.stream, 0), *inputs]
                assert 0 < work.start - max(causes) <= most
                assert step.start < work.start <= work.stop < step.stop
                free[work.stream] = work.stop


@pytest.mark.parametrize("event", ["compute", "comm:TP"])
def test_a_factor_scales_its_events_and_no_others(event):
    """The shortest of each collective has no wait."""
    plain, scaled = (
        Job.of(skew_ns=0, straggler=None, steps=1, factors=factors)
        for factors in ((), ((event, 1.5),))
    )
    tag = event.partition(":")[2]
    for one, two in zip(transfers(plain), transfers(scaled), strict=True):
        assert two[1] == pytest.approx(one[1] * (1.5 if one[0] == tag else 1), abs=1)
    kernels = [
        [work.ns for step in steps(job, 3) for work in step.works if work.kind == "compute"]
        for job in (plain, scaled)
    ]
    factor = 1.5 if event == "compute" else 1
    assert kernels[1] == [pytest.approx(ns * factor, abs=1) for ns in kernels[0]]


def transfers(job):
    """Tag and shortest duration of each collective."""
    found = calls_by_identity(job)
    return [
        (works[0][1].call.group.tag, min(work.ns for _, work in works))
        for _, works in sorted(found.items(), key=lambda item: str(item[0]))
    ]


@pytest.mark.parametrize("factors", [(("TP", 2.0),), (("compute", 0.0),)])
def test_an_impossible_factor_is_an_error(factors):
    with pytest.raises(ConfigError, match="invalid factor"):
        Job.of(factors=factors)


@pytest.fixture(scope="module")
def known():
    """The known answers of the demo."""
    return truth(Job.of(), LINK)


def test_peers_wait_for_the_straggler(known):
    """Its TP peer waits in TP, its expert peers in EP, and it waits for nobody."""
    exposed = {row["rank"]: row["exact_ns"] for row in known["by_rank"]}
    assert exposed[5]["exposed_TP"] < 0.9 * exposed[4]["exposed_TP"]
    assert max(exposed, key=lambda rank: exposed[rank]["exposed_TP"]) == 4
    # The expert peers of its stage wait longest; theirs of the other stage get its lateness on.
    by_experts = sorted(exposed, key=lambda rank: exposed[rank]["exposed_EP"])
    assert set(by_experts[-2:]) == {6, 7}
    assert set(by_experts[-4:]) == {2, 3, 6, 7}
    assert known["longest_rank"] == 5


def test_the_truth_of_a_single_rank_is_plain_arithmetic():
    job = Job.of(1, steps=1, layers=1, micro_batches=3, skew_ns=0, layer_ns=1_000_000)
    said = truth(job)
    # A layer takes 1 ms forward and 2 ms backward; 0.03 ms before, 1.16 ms after them; 18 us of
    # compute, which begins one launch after the copy of the tokens.
    compute = 3 * (1_000_000 + 2_000_000) + 30_000 + 1_160_000 + 18_000
    assert said["by_rank"][0]["exact_ns"]["compute"] == compute
    assert said["by_rank"][0]["exact_ns"]["memcpy"] == 3_800 + 1
    assert said["windows"] == []
    assert said["bandwidth"] == said["volume"] == {}
    assert said["overlap"] == {"average_overlap_ratio": None, "by_tag": {}}


def test_volume_follows_from_the_sizes_of_the_job(known):
    job, volume = Job.of(), known["volume"]
    stages, slots = job.pp - 1, 2 * job.micro_batches
    message = job.tokens * job.hidden * 2 // job.tp
    # Each message counts on both sides, in every pipeline.
    assert volume["PP"]["bytes_per_iteration"] == stages * slots * message * 2 * job.tp * job.dp
    buckets = job.layers * job.bucket * (2 + 4) + 4
    assert volume["DP"]["bytes_per_step_per_gpu"] == buckets


@given(shapes)
@fewer(2)
def test_the_known_answers_add_up(job):
    said = truth(job, LINK)
    assert sum(said["breakdown"]["exact"].values()) == pytest.approx(1)
    assert sum(said["breakdown"]["spec"].values()) == pytest.approx(1)
    for row in said["by_rank"]:
        assert sum(row["exact_ns"].values()) == sum(row["iteration_ns"])
    for tag, ratio in said["overlap"]["by_tag"].items():
        assert 0 <= ratio <= 1
        assert said["volume"][tag]["comm_bytes"] == said["bandwidth"][tag]["total_bytes"]


def test_the_demo_has_every_part_of_a_step(known):
    exact, hidden = known["breakdown"]["exact"], known["overlap"]["by_tag"]
    exposed = {name: share for name, share in exact.items() if name.startswith("exposed_")}
    # Stages wait in receives for their first input, and between passes.
    assert sorted(exposed, key=exposed.get)[-2:] == ["exposed_TP", "exposed_PP"]
    assert exposed["exposed_mixed"] > 0
    assert exact["memcpy"] > 0
    assert exact["idle"] > 0.05
    assert hidden["DP"] > hidden["EP"] > hidden["TP"] > 0
    assert 60e6 < known["iteration"]["mean_ns"] < 120e6
    assert any(window["mean_ns"] < 0 for window in known["windows"])
    assert 1000 < sum(len(step.works) for step in steps(Job.of(), 0)) < 3000


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_strict_json_with_the_same_rows(variant):
    job = Job.of(8, **SMALL)
    plain, other = written(job, 3), written(job, 3, variant)
    times = [
        [(row["name"], row["ts"]) for row in file["traceEvents"]] for file in (plain, other)
    ]
    assert times[0] == times[1]
    assert other["baseTimeNanoseconds"] % 7_889_238_000_000_000 == 0
    whole = b"".join(text(job, 3, "name", variant, 0))
    after = whole.index(b"baseTimeNanoseconds") > whole.index(b"traceEvents")
    assert after == bool(variant & Variant.BASE_LAST)
    assert (b"\n" in whole.strip()) != bool(variant & Variant.COMPACT)
    described = b"TENSOR_MODEL_PARALLEL_GROUP" in whole
    assert described != bool(variant & Variant.UNDESCRIBED)
    kernels = [row for row in other["traceEvents"] if row.get("cat") == "kernel"]
    told = any("Collective name" in row["args"] for row in kernels)
    assert told != bool(variant & Variant.HOST_METADATA)


def test_rows_of_a_trace_refer_to_each_other_consistently():
    rows = written(Job.of(8, **SMALL), 0)["traceEvents"]
    device = [row for row in rows if row.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
    runtime = {
        row["args"]["correlation"]: row for row in rows if row.get("cat") == "cuda_runtime"
    }
    hosts = {row["args"]["External id"]: row for row in rows if row.get("cat") == "cpu_op"}
    assert len({row["args"]["correlation"] for row in device}) == len(device)
    for row in device:
        launch, host = runtime[row["args"]["correlation"]], hosts[row["args"]["External id"]]
        assert launch["ts"] < row["ts"]
        assert host["ts"] <= launch["ts"]
        assert launch["ts"] + launch["dur"] <= host["ts"] + host["dur"]
        assert (launch["pid"], launch["tid"]) == (host["pid"], host["tid"])
    assert sum(row["ph"] == "s" for row in rows) == sum(row["ph"] == "f" for row in rows)
    assert {0, 0.001} <= {row["dur"] for row in device}


def test_long_lists_are_cut_in_arguments_and_whole_in_the_configuration():
    job = Job.of(64, tp=1, pp=1, dp=64, ep=1, **SMALL)
    whole = written(job, 5)
    said = next(
        row["args"]["Process Group Ranks"]
        for row in whole["traceEvents"]
        if row["name"].startswith("ncclDevKernel") and row.get("cat") == "kernel"
    )
    assert said.endswith("28, 29, ...]")
    assert max(len(group["ranks"]) for group in whole["distributedInfo"]["pg_config"]) == 64


def test_files_are_written_whole_and_alike_by_any_number_of_workers(tmp_path):
    job = Job.of(4, **SMALL)
    one = write(job, tmp_path / "one")
    two = write(job, tmp_path / "two", workers=2)
    assert [path.name for path in one] == [f"rank{rank}.pt.trace.json.gz" for rank in range(4)]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [p.name for p in one]
    (plain,) = write(job, tmp_path, ranks=[2], compress=False)
    assert load(plain) == {**load(one[2]), "traceName": plain.name}
    assert load(plain)["distributedInfo"]["rank"] == 2


def test_an_unfinished_file_is_removed(tmp_path, monkeypatch):
    def broken(*_):
        yield b"{"
        raise KeyboardInterrupt

    monkeypatch.setattr("fastcomm.synthetic.traces.text", broken)
    with pytest.raises(KeyboardInterrupt):
        write(Job.of(1), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variant", [Variant.TODAY, Variant.COMPACT])
def test_filler_enlarges_the_file_and_changes_no_other_row(variant):
    job = Job.of(1, **SMALL)
    raw = b"".join(text(job, 0, "name", variant, 3_000_000))
    assert 3_000_000 <= len(raw) < 4_000_000
    rows = json.loads(raw)["traceEvents"]
    names = ("External id", "Python id")
    added = [
        row
        for row in rows
        if any(row.get("args", {}).get(name, 0) >= FIRST_ID for name in names)
    ]
    assert len(added) > 3_000
    assert {row["cat"] for row in added} == {"cpu_op", "python_function"}
    numbers = {id(row) for row in added}
    kept = [row for row in rows if id(row) not in numbers]
    assert kept == written(job, 0, variant)["traceEvents"]
    assert len({row["args"]["Ev Idx"] for row in added}) == len(added)
    marks = [row for row in rows if row["name"].startswith("ProfilerStep#")]
    first, last = marks[0]["ts"], max(row["ts"] + row["dur"] for row in marks)
    stamps = [row["ts"] for row in added]
    assert stamps == sorted(stamps)
    assert first <= stamps[0] <= stamps[-1] < last
