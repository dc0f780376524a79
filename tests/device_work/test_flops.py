"""Test FLOPs and bytes of operators against definitions, other tools, and hostile inputs."""

import csv
import gzip
import json
from collections import Counter

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.shared_data import needs, path_of
from oracles import flops as oracle

import fastcomm
from fastcomm.errors import ConfigError
from fastcomm.hardware.gpus import gpu, roof_of
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.synthetic.catalog import weights, widths
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

KINETO = path_of("kineto")
BF16, FP32 = "c10::BFloat16", "float"
H100 = [{"name": "NVIDIA H100 80GB HBM3"}]


# ------------------------------------------------------------------ hand-made traces


def op(name, ts, dur, shapes=None, types=None, values=None, tid=1, **args):
    event = k.event(name, "cpu_op", ts, dur, pid=100, tid=tid, **args)
    if shapes is not None:
        event["args"]["Input Dims"] = shapes
        event["args"]["Input type"] = types or [BF16 if shape else "Scalar" for shape in shapes]
        event["args"]["Concrete Inputs"] = values or [""] * len(shapes)
    return event


M, N, K = 4096, 1024, 1024
GEMM = 2 * M * N * K


def rank_events():
    """A linear layer in a step of 100 us, recomputed and with its gradient on thread 2."""
    backward = "autograd::engine::evaluate_function: MmBackward0"
    return [
        k.mark("ProfilerStep#3", 0, 100),
        op("aten::linear", 4, 8, [[M, K], [N, K], []], Sequence_number=7, Fwd_thread_id=0),
        op("aten::mm", 5, 5, [[M, K], [K, N]]),
        k.launch(6, 1),
        k.launch(8, 2),
        op(backward, 40, 30, tid=2, Sequence_number=8, Fwd_thread_id=1),
        op("aten::linear", 42, 8, [[M, K], [N, K], []], tid=2, Sequence_number=9),
        op("aten::mm", 43, 5, [[M, K], [K, N]], tid=2),
        k.launch(44, 3, tid=2),
        op("MmBackward0", 55, 10, tid=2, Sequence_number=8, Fwd_thread_id=1),
        op("aten::mm", 56, 5, [[K, M], [M, N]], tid=2),
        k.launch(57, 4, tid=2),
        op("aten::relu", 80, 5, [[M, N]]),
        k.launch(81, 5),
        k.kernel("nvjet_gemm", 10, 24, correlation=1),
        k.kernel("memset_like", 34, 2, correlation=2),
        k.kernel("nvjet_gemm", 50, 20, correlation=3),
        k.kernel("nvjet_gemm", 70, 16, correlation=4),
        k.kernel("elementwise_kernel", 90, 4, correlation=5),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flops")
    (folder / "traces").mkdir()
    for rank in range(2):
        path = folder / "traces" / f"rank{rank}.json"
        k.write(path, rank_events(), rank=rank, world=2, deviceProperties=H100)
    ingest(plan([folder / "traces"], folder / "store"))
    return folder


@pytest.mark.parametrize("where", ["traces", "store"])
def test_kernels_have_the_flops_of_their_operators(run, where):
    found = fastcomm.open(run / where).kernels()
    rows = {row["name"]: row for row in found.to_arrow().to_pylist()}
    gemm = rows["nvjet_gemm"]
    assert gemm["flops"] == 2 * 3 * GEMM
    assert gemm["tflops_per_s"] == pytest.approx(3 * GEMM / 60e-6 / 1e12)
    assert gemm["peak_share"] == pytest.approx(gemm["tflops_per_s"] / 989)
    assert gemm["bound"] == "compute"
    # What an operator launches beside its GEMM has none of its FLOPs.
    assert rows["memset_like"]["flops"] is None
    relu = rows["elementwise_kernel"]
    assert (relu["flops"], relu["bytes"]) == (2 * M * N, 2 * 2 * 2 * M * N)
    assert relu["bound"] == "memory"
    assert found.unknown == {}


@pytest.mark.parametrize("where", ["traces", "store"])
def test_operators_have_a_row_for_each_shape(run, where):
    found = fastcomm.open(run / where).kernels(by="operator")
    rows = [row for row in found.to_arrow().to_pylist() if row["name"] == "aten::mm"]
    assert [(row["shapes"], row["count"], row["flops"]) for row in rows] == [
        ([f"[{M}, {K}]", f"[{K}, {N}]"], 6, 4 * GEMM),
        ([f"[{K}, {M}]", f"[{M}, {N}]"], 2, 2 * GEMM),
    ]
    assert rows[0]["dtypes"] == [BF16, BF16]
    # All work of an operator counts as its time.
    assert rows[0]["tflops_per_s"] == pytest.approx(2 * GEMM / 46e-6 / 1e12)
    assert found.by_rank().num_rows == 2 * found.to_arrow().num_rows


@pytest.mark.parametrize("where", ["traces", "store"])
def test_a_step_has_flops_with_and_without_recomputation(run, where):
    found = fastcomm.open(run / where).metrics(flops=True).flops
    kernels = fastcomm.open(run / where).kernels()
    assert found == kernels.flops
    assert found.executed_per_step == pytest.approx(3 * GEMM)
    assert found.model_per_step == pytest.approx(2 * GEMM)
    assert found.hfu == pytest.approx(3 * GEMM / 989e12 / (kernels.step_ns * 1e-9))
    assert found.mfu == pytest.approx(found.hfu * 2 / 3)
    assert (found.gpu, found.covered, found.unknown) == ("H100-SXM", 1.0, {})
    assert found.shares["gemm"] == pytest.approx(60 / 66)


def gemm_events(us, dtype=BF16):
    """A step of 200 us with one GEMM, which takes some of it."""
    return [
        k.mark("ProfilerStep#3", 0, 200),
        op("aten::mm", 5, 5, [[M, K], [K, N]], [dtype, dtype]),
        k.launch(6, 1),
        k.kernel("nvjet_gemm", 10, us, correlation=1),
        k.kernel("elementwise_kernel", 180, 20),
    ]


def slow_gemms(folder, us, dtype=BF16, device=H100):
    """The slow GEMMs of two ranks, as `kernels` and as `metrics` find them."""
    for rank in range(2):
        events = gemm_events(us, dtype)
        k.write(
            folder / f"rank{rank}.json", events, rank=rank, world=2, deviceProperties=device
        )
    run = fastcomm.open(folder)
    metrics = run.metrics(flops=True)
    found = [one for one in metrics.findings if one.kind == "slow_gemm"]
    assert [row["kind"] for row in metrics.tables["findings"].to_pylist()] == [
        one.kind for one in metrics.findings
    ]
    assert len(found) == len(run.kernels().findings)
    return found, run.kernels().findings


def test_gemms_that_others_run_much_faster_are_findings(tmp_path):
    (cause,), (gemm,) = slow_gemms(tmp_path, 60)
    measured = 1e9 * float(gpu("h100").matmul("bf16", M, N, K))
    step = fastcomm.open(tmp_path).kernels().step_ns
    assert cause.cost_ns == pytest.approx(60_000 - measured)
    assert cause.share == pytest.approx(cause.cost_ns / step)
    assert cause.ranks == (0, 1)
    assert cause.confidence == "medium"
    assert gemm.plausible == pytest.approx(GEMM / 989e12 / measured * 1e9)
    assert cause.text == (
        "GEMMs of 4096x1024x1024 (bf16) reach 14.5 % of peak: 30.0 % of the step; others on "
        "such GPUs reach 53.1 %, which saves up to 21.8 %."
    )
    printed = invoke("kernels", tmp_path, "-q").stdout.replace("\n  ", " ")
    assert cause.text in printed
    assert cause.text in invoke("metrics", tmp_path, "-q", "--flops").stdout.replace(
        "\n    ", " "
    )
    document = json.loads(invoke("metrics", tmp_path, "-q", "--flops", "--json").stdout)
    assert fastcomm.open(tmp_path).metrics(flops=True).health is None
    assert document["findings"][0]["evidence"]["problem"] == "4096x1024x1024"


def test_gemms_without_measurements_are_compared_with_large_ones(tmp_path):
    (cause,), (gemm,) = slow_gemms(tmp_path, 60, "c10::Float8_e4m3fn")
    moved = M * K + K * N + 2 * M * N  # of one byte, and products of two
    assert cause.cost_ns == pytest.approx(60_000 - moved / 2.9e12 * 1e9 / 0.6)
    assert gemm.bound == "memory"
    assert (cause.confidence, gemm.plausible, gemm.is_measured) == ("low", 0.6, False)
    assert "large GEMMs often reach 60.0 %" in cause.text


@pytest.mark.parametrize(
    ("us", "dtype", "device"),
    [(24, BF16, H100), (5, BF16, H100), (60, BF16, [{"name": "Abacus 7"}]), (60, FP32, H100)],
    ids=["as fast as others", "short", "unknown GPU", "unknown peak"],
)
def test_other_gemms_are_no_findings(us, dtype, device, tmp_path):
    assert slow_gemms(tmp_path, us, dtype, device) == ([], ())


def test_metrics_count_flops_only_on_request(run):
    whole = json.loads(invoke("metrics", run / "traces", "-q", "--json").stdout)["flops"]
    assert whole["hfu"] is None
    assert "--flops" in whole["unknown"]["hfu"]
    words = ("metrics", run / "traces", "-q", "--flops")
    assert json.loads(invoke(*words, "--json").stdout)["flops"]["mfu"] > 0
    assert "TFLOP per step and rank; HFU" in invoke(*words).stdout


def test_the_user_may_name_the_gpu(run):
    kernels = fastcomm.open(run / "traces").kernels(gpu="a100")
    assert kernels.flops.gpu == "A100-SXM4-80GB"
    assert kernels.flops.hfu == pytest.approx(3 * GEMM / 312e12 / (kernels.step_ns * 1e-9))
    with pytest.raises(ConfigError, match="unknown GPU 'abacus'"):
        fastcomm.open(run / "traces").kernels(gpu="abacus")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", None),
        ("AMD Instinct MI300X", None),
        (None, None),
    ],
)
def test_the_name_of_a_device_tells_its_peaks(device, name):
    roof = roof_of(device)
    assert (roof and roof.gpu) == name


def flops_of(tmp_path, events, devices=H100):
    k.write(tmp_path / "rank0.json", events, deviceProperties=devices)
    return fastcomm.open(tmp_path).kernels()


def test_shares_of_an_unknown_gpu_are_unknown(tmp_path):
    found = flops_of(tmp_path, rank_events(), [{"name": "Abacus 7"}])
    assert found.flops.executed_per_step == pytest.approx(3 * GEMM)
    assert (found.flops.hfu, found.flops.mfu) == (None, None)
    assert found.flops.unknown["hfu"] == "the peak of the GPU Abacus 7 is not known: pass --gpu"
    assert found.unknown.keys() == {"peak_share", "memory_share", "bound"}


def test_a_compiled_backward_pass_hides_recomputation(tmp_path):
    name = "autograd::engine::evaluate_function: CompiledFunctionBackward"
    events = [e for e in rank_events() if e["name"] != "aten::linear"]
    for event in events:
        event["name"] = name if event["name"].startswith("autograd::") else event["name"]
    found = flops_of(tmp_path, events).flops
    assert found.mfu is None
    assert "compiled" in found.unknown["mfu"]
    assert found.hfu > 0


def test_flops_of_unknown_gemms_leave_the_step_unknown(tmp_path):
    extra = [k.launch(90, 9), k.kernel("own_gemm", 91, 8, correlation=9)]
    found = flops_of(tmp_path, [*rank_events(), *extra]).flops
    assert (found.executed_per_step, found.hfu) == (None, None)
    assert found.covered == pytest.approx(60 / 68)
    assert "11.8 % of the time of GEMM" in found.unknown["hfu"]
    assert found.unknown["hfu"].endswith("mostly those without an operator around their launch")


@pytest.mark.parametrize(
    ("name", "shapes", "reason"),
    [
        ("vllm::moe_forward", [[M, K], [M, 8]], ": no formula for this operator"),
        ("aten::mm", [[], []], "; 1 operator: the shape of an input is not recorded"),
    ],
)
def test_unknown_flops_name_the_operator_with_most_of_the_time(name, shapes, reason, tmp_path):
    events = [op(name, 89, 4, shapes, [BF16, BF16]), k.launch(90, 9)]
    extra = [*events, k.kernel("own_gemm", 91, 8, correlation=9)]
    found = flops_of(tmp_path, [*rank_events(), *extra]).flops
    assert found.unknown["hfu"].endswith(f"unknown, mostly those of {name}{reason}")


def test_an_outer_operator_does_not_count_twice(tmp_path):
    shapes = [[M, K], [K, N]]
    events = [
        k.mark("ProfilerStep#3", 0, 100),
        op("aten::matmul", 2, 20, shapes),
        k.launch(3, 1),
        op("aten::mm", 5, 5, shapes),
        k.launch(6, 2),
        k.kernel("gemm", 10, 8, correlation=1),
        k.kernel("gemm", 20, 8, correlation=2),
    ]
    found = flops_of(tmp_path, events)
    (row,) = found.to_arrow().to_pylist()
    assert row["flops"] == GEMM
    assert row["flops_covered"] == 0.5


@pytest.mark.parametrize("damage", ["[[", [[1, 2], [3]], "x" * 70000, [[-1, 2], [2, 3]], 7])
def test_damaged_shapes_leave_flops_unknown(tmp_path, damage):
    events = rank_events()
    for event in events:
        if "Input Dims" in event["args"]:
            event["args"]["Input Dims"] = damage
    k.write(tmp_path / "rank0.json", events, deviceProperties=H100)
    for by in ("name", "operator"):
        found = fastcomm.open(tmp_path).kernels(by=by)
        assert found.flops.executed_per_step is None
        assert {row["flops"] for row in found.to_arrow().to_pylist()} == {None}
    assert invoke("kernels", tmp_path, "-q", "--by", "operator").exit_code == 0


# ------------------------------------------------------------------ the made-up job


def made_up_flops(job):
    """Mean FLOPs of a step and rank: forward passes, and twice as much for gradients."""
    product = {name: 2 * job.tokens * k * n for name, (k, n) in weights(job).items()}
    attention = 2 * job.tokens**2 * 128 * widths(job)["heads"]  # causal: half
    of_layer = 3 * (product["qkv"] + product["proj"]) + 3.5 * attention  # with QK once more
    dense = 3 * (product["fc1"] + product["fc2"])
    experts = 3 * (product["experts1"] + product["experts2"] + product["shared"])
    experts += 2 * product["router"]
    layers = job.layers * of_layer + job.layers // 2 * (dense + experts)
    return job.micro_batches * (layers + product["vocabulary"] / job.pp)


def test_the_made_up_job_has_the_flops_of_its_layers(tmp_path):
    job = Job.of(4, pp=2, steps=1, micro_batches=2, layers=2, tokens=64, hidden=256)
    write(job, tmp_path)
    found = fastcomm.open(tmp_path).metrics(flops=True).flops
    assert found.executed_per_step == made_up_flops(job)
    assert found.unknown == {}
    rows = fastcomm.open(tmp_path).kernels(by="operator").to_arrow().to_pylist()
    assert {row["name"] for row in rows if row["category"] in ("GEMM", "attention")} == {
        row["name"] for row in rows if row["peak_share"] is not None
    }


@pytest.mark.parametrize("fault", ["slow_gpu", "launch_bound", "hot_expert"])
def test_gemms_of_the_made_up_job_reach_a_plausible_share_of_the_peak(fault, tmp_path):
    job = Job.of(8, fault=fault, steps=1)
    write(job, tmp_path, ranks=(5,))
    kernels = fastcomm.open(tmp_path).kernels(by="operator")
    large = [
        row for row in kernels.to_arrow().to_pylist() if row["flops"] and row["share"] > 0.005
    ]
    assert all(0.15 < row["peak_share"] < 0.8 for row in large)
    assert sum(row["name"] != "aten::linear" for row in large) > 10
    assert kernels.findings == ()


# ------------------------------------------------------------------ real traces


@needs("kineto")
def test_flops_of_a_real_trace_are_those_of_the_definition():
    path = KINETO / "h100_qwen" / "Qwen1.5-0.5B-Chat.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()))
    expected = oracle.of_trace(document)
    found = Counter()
    for row in fastcomm.open(path).kernels(by="operator").to_arrow().to_pylist():
        if row["name"] in oracle.PRODUCTS and row["flops"]:
            found[row["name"], f"[{', '.join(row['shapes'])}]"] += row["flops"]
    assert found == pytest.approx(expected)


@needs("kineto")
def test_flops_and_rates_agree_with_tracelens():
    path = KINETO / "h100_qwen"
    ours = {}
    for row in fastcomm.open(path).kernels(by="operator").to_arrow().to_pylist():
        if row["flops"]:
            ours[row["name"], f"[{', '.join(row['shapes'])}]"] = row
    close = total = 0.0
    with (path / "tracelens_operators.csv").open() as file:
        for row in csv.DictReader(file):
            flops = float(row["gflops"]) * 1e9 * int(row["count"])
            total += flops
            name = row["operator"]
            own = ours.get((name, row["shape"])) or next(
                one for key, one in ours.items() if key[0] == "aten::_flash_attention_forward"
            )
            if own["flops"] == pytest.approx(flops, rel=0.01):
                close += flops
                rate = flops / float(row["kernel_us_sum"]) / 1e6
                assert own["tflops_per_s"] == pytest.approx(rate, rel=0.01)
    assert close / total == 1.0


@pytest.mark.parametrize(("columns", "shown"), [(1024, "4096x1024"), (10_240, "4096x1024…")])
def test_the_terminal_shows_the_first_60_letters_of_shapes(tmp_path, columns, shown):
    shapes = [[4096, 1024]] * 5 + [[4096, columns]]
    events = [op("aten::cat", 0, 9, shapes), k.launch(1, 1), k.kernel("c", 9, 9, correlation=1)]
    k.write(tmp_path / "rank0.json", events)
    text = invoke("kernels", tmp_path, "-q", "--by", "operator", "--wide").stdout
    assert f"aten::cat{5 * ' 4096x1024'} {shown} " in text
