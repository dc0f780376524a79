"""Test `fastcomm kernels` against its definitions, other tools, and hand-made traces."""

import csv
import gzip
import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import kineto_text as k
import pyarrow as pa
import pytest
from commands import invoke

import fastcomm
from fastcomm.analyses.changes import kernel_changes
from fastcomm.analyses.ingest import ingest, plan
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.kernels.attribution import DEVICE_KEYS
from fastcomm.kernels.result import Kernels
from fastcomm.kernels.totals import WorkQuestion, WorkTotals, merge
from fastcomm.store import rank_file
from fastcomm.synthetic import Job, write_nsys
from fastcomm.trace import schema
from fastcomm.trace.run import ReadRanks

HOST_RUN = Path(__file__).parent / "data" / "gloo_2x2"
KINETO = Path(__file__).parents[2] / "shared" / "data" / "kineto"
NEEDS_DATA = pytest.mark.skipif(not KINETO.is_dir(), reason="no shared traces on this machine")

# ------------------------------------------------------------------ against the definition


# ------------------------------------------------------------------ names and categories


# ------------------------------------------------------------------ hand-made traces


def python(name, ts, dur, tid=1):
    return k.event(f"nn.Module: {name}", "python_function", ts, dur, pid=100, tid=tid)


def op(name, ts, dur, tid=1, **args):
    return k.event(name, "cpu_op", ts, dur, pid=100, tid=tid, **args)


def rank_events(slow=0):
    """Two layers forward on thread 1, the second backward on thread 2; and a collective."""
    backward = "autograd::engine::evaluate_function: MmBackward0"
    return [
        k.mark("ProfilerStep#3", 0, 100),
        k.mark("forward", 1, 40),
        python("Model_0", 1, 40),
        python("Layer_0", 2, 10),
        python("Linear_0", 3, 8),
        op("aten::linear", 4, 6),
        op("aten::mm", 5, 4, Sequence_number=7),
        k.launch(6, 1),
        python("Layer_1", 20, 10),
        python("Linear_1", 21, 8),
        op("aten::mm", 22, 4, Sequence_number=8),
        k.launch(23, 2),
        k.mark("backward", 50, 40),
        op(backward, 60, 10, tid=2, Sequence_number=8, Fwd_thread_id=1),
        op("aten::mm", 61, 5, tid=2),
        k.launch(62, 3, tid=2),
        k.launch(80, 4),
        k.kernel("void gemm<1, 2>(int)", 10, 5, correlation=1),
        k.kernel("void gemm<2, 2>(int)", 25, 5, correlation=2),
        k.kernel("gemm_wgrad", 65, 10 + slow, correlation=3),
        k.all_reduce(85, 10, correlation=4, Process_Group_Ranks="[0, 1]"),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "traces").mkdir()
    for rank in range(3):
        events = rank_events(slow=2 * (rank == 2))
        k.write(folder / "traces" / f"rank{rank}.json", events, rank=rank, world=3)
    ingest(plan([folder / "traces"], folder / "store"))
    return folder


def totals(kernels):
    """The total of each name; operators have a row for each shape of their inputs."""
    result = Counter()
    for row in kernels.to_arrow().select(["name", "total_ns"]).to_pylist():
        result[row["name"]] += row["total_ns"]
    return result


EXPECTED = {
    "name": {"gemm<…>": 30, "gemm_wgrad": 32, "ncclDevKernel_AllReduce_Sum_f32_RING_LL": 30},
    "category": {"GEMM": 30, "convolution": 32, "communication": 30},
    "operator": {"aten::mm": 62, "(no operator)": 30},
    "module": {"Linear": 62, "(no module)": 30},
    "layer": {"Layer_0": 15, "Layer_1": 47, "(no layer)": 30},
    "annotation": {"forward": 30, "backward": 62},
    "stream": {"stream 7": 62, "stream 20": 30},
}


@pytest.mark.parametrize("where", ["traces", "store"])
@pytest.mark.parametrize("by", EXPECTED)
def test_work_belongs_to_what_launched_it(run, where, by):
    found = fastcomm.open(run / where).kernels(by=by)
    assert totals(found) == {name: us * 1000 for name, us in EXPECTED[by].items()}
    assert found.steps == 3
    assert found.step_ns == fastcomm.open(run / where).metrics().iteration.mean_ns


def test_full_names_tell_instances_of_modules_and_arguments_of_templates(run):
    found = fastcomm.open(run / "traces").kernels(by="module", full_names=True)
    assert totals(found) == {"Linear_0": 15000, "Linear_1": 47000, "(no module)": 30000}
    names = totals(fastcomm.open(run / "traces").kernels(full_names=True))
    assert {"void gemm<1, 2>(int)", "void gemm<2, 2>(int)"} < names.keys()


def test_the_slow_rank_is_named_with_its_cost(run):
    found = fastcomm.open(run / "traces").kernels()
    row = {row["name"]: row for row in found.to_arrow().to_pylist()}["gemm_wgrad"]
    assert (row["slowest_rank"], row["slowdown"], row["cost_ns"]) == (2, 1.2, 2000)
    assert "rank 2 is 20.0 % slower than its peers in convolution kernels" in found.headline
    alike = {row["name"]: row for row in found.to_arrow().to_pylist()}["gemm<…>"]
    assert (alike["slowest_rank"], alike["slowdown"]) == (None, 1.0)


def test_one_rank_one_step_and_a_match_count_alone(run):
    traces = fastcomm.open(run / "traces")
    assert totals(traces.kernels(rank=1, match="^void gemm")) == {"gemm<…>": 10000}
    assert totals(traces.kernels(by="operator", match="wgrad")) == {"aten::mm": 32000}
    assert totals(traces.kernels(by="operator", match="aten::mm")) == {"aten::mm": 62000}
    assert totals(traces.kernels(step=3)) == totals(traces.kernels())
    assert totals(traces.kernels(match="nothing")) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 9}, "no step 9; the run has 3"),
        ({"rank": 9}, "rank 9: not in the run"),
        ({"match": "("}, "match: invalid regular expression"),
        ({"match": "[[:alpha:]]"}, "match: invalid regular expression .*classes such as"),
        ({"match": "a" * 99 + "("}, r"'a{40}\.\.\.': missing"),
        ({"by": "nonsense"}, "expected one of name, category"),
    ],
)
def test_invalid_options_are_refused(run, options, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        fastcomm.open(run / "traces").kernels(**options)


def test_all_formats_agree_and_json_states_what_is_unknown(run):
    words = ("kernels", run / "traces", "-q")
    document = json.loads(invoke(*words, "--json").stdout)
    assert document == json.loads(invoke(*words, "--format", "json").stdout)
    rows = list(csv.DictReader(io.StringIO(invoke(*words, "--format", "csv").stdout)))
    assert [int(row["total_ns"]) for row in rows] == [r["total_ns"] for r in document["rows"]]
    assert {row["flops"] for row in document["rows"]} == {None}
    names = {"flops", "bytes", "tflops_per_s", "bytes_per_s"}
    assert document["unknown"].keys() == names | {"peak_share", "memory_share", "bound"}
    assert "record_shapes=True" in document["unknown"]["flops"]
    assert document["flops"]["executed_per_step"] is None
    markdown = invoke(*words, "--format", "markdown", "--top", "1").stdout.splitlines()
    assert markdown[0] == document["headline"]
    assert len(markdown) == 7
    assert markdown[-1].startswith("*2 more rows; ")
    text = invoke(*words).stdout
    assert text.startswith("Convolution kernels take")
    by_operator = json.loads(invoke(*words, "--json", "--by", "operator").stdout)
    assert {row["shapes"] for row in by_operator["rows"]} == {None}
    assert "shapes" in by_operator["unknown"]


def test_json_and_csv_have_all_rows_or_those_of_top(run):
    words = ("kernels", run / "traces", "-q")
    whole, two = (
        json.loads(invoke(*words, "--json", *more).stdout) for more in ((), ("--top", "2"))
    )
    assert two == {**whole, "rows": whole["rows"][:2]}
    assert len(whole["rows"]) > 2
    text = invoke(*words, "--format", "csv", "--top", "2").stdout
    assert [row["name"] for row in csv.DictReader(io.StringIO(text))] == [
        row["name"] for row in two["rows"]
    ]


def test_a_pattern_that_nothing_matches_is_named(run):
    done = invoke("kernels", run / "traces", "-q", "--match", "zzzz")
    assert done.stdout.startswith("No work whose name, or that of its row, matches zzzz.")


def test_names_of_a_trace_cannot_break_a_table(tmp_path):
    name = "a|b`[red]\x1b[31m=1+1"
    k.write(tmp_path / "rank0.json", [k.mark("ProfilerStep#0", 0, 9), k.kernel(name, 1, 2)])
    for format_ in ("table", "markdown", "csv"):
        text = invoke("kernels", tmp_path, "-q", "--format", format_).stdout
        assert "\x1b" not in text
    row = invoke("kernels", tmp_path, "-q", "--format", "markdown").stdout.splitlines()[-1]
    assert row.replace("\\|", "").count("|") == 12


def test_tables_are_written(run, tmp_path):
    invoke("kernels", run / "traces", "-q", "--output", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("kernels.json", "kernels.csv", "kernels.parquet"),
        *("kernels_by_rank.csv", "kernels_by_rank.parquet"),
    }


BACKWARD = "autograd::engine::evaluate_function: ReluBackward0"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_pass_belongs_to_its_own_module(tmp_path, reentrant):
    """Numbers of the recomputed pass, on thread 2, repeat those of thread 1."""
    backward = {"Sequence_number": 9, "Fwd_thread_id": 1}
    inner = {"Sequence_number": 7, "Fwd_thread_id": 2 if reentrant else 1}
    events = [
        k.mark("ProfilerStep#3", 0, 100),
        python("Conv_0", 1, 8),
        op("aten::conv2d", 2, 4, Sequence_number=7),
        k.launch(3, 1),
        python("ReLU_0", 10, 8),
        op("aten::relu", 11, 4, Sequence_number=8),
        op("aten::relu", 16, 1, Sequence_number=9),
        k.launch(12, 2),
        op(BACKWARD, 50, 30, tid=2, **backward),
        python("Linear_0", 52, 8, tid=2),
        op("aten::linear", 53, 4, tid=2, Sequence_number=7),
        op("aten::relu", 57, 1, tid=2, Sequence_number=8),
        k.launch(54, 3, tid=2),
        op(BACKWARD, 65, 6, tid=2, **inner),
        k.launch(66, 4, tid=2),
        k.launch(78, 5, tid=2),
        *(k.kernel("work", 10 * n, n, correlation=n) for n in range(1, 6)),
    ]
    if reentrant:  # numbers that only the recomputed pass has tell its thread
        events.append(op("aten::add", 59, 1, tid=2, Sequence_number=20))
        events.append(op(BACKWARD, 72, 5, tid=2, Sequence_number=20, Fwd_thread_id=2))
        events.append(k.launch(73, 6, tid=2))
        events.append(k.kernel("work", 90, 6, correlation=6))
    k.write(tmp_path / "rank0.json", events)
    found = totals(fastcomm.open(tmp_path).kernels(by="module"))
    recomputed, own = (3 + 4 + 6, 1) if reentrant else (3, 1 + 4)
    assert found == {
        "Conv": own * 1000,
        "ReLU": (2 + 5) * 1000,
        "Linear": recomputed * 1000,
    }


def test_work_without_a_range_is_noted(tmp_path):
    k.write(tmp_path / "rank0.json", [k.mark("ProfilerStep#0", 0, 9), k.kernel("a", 1, 2)])
    found = fastcomm.open(tmp_path).kernels(by="module")
    assert totals(found) == {"(no module)": 2000}
    assert "with_stack=True" in found.notes[0]
    note = f"*{found.notes[0]}*"
    shown = invoke("kernels", tmp_path, "--by", "module", "--format", "markdown", "-q").stdout
    assert shown.splitlines()[-1] == note.replace("|", "\\|")
    table = invoke("kernels", tmp_path, "--by", "module", "--format", "csv")
    assert f"note: {found.notes[0]}" in table.stderr


def test_work_of_nsight_systems_without_a_module_is_advised_to_use_nvtx(tmp_path):
    write_nsys(Job.of(ranks=1), tmp_path)
    (note,) = fastcomm.open(tmp_path).kernels(by="module").notes
    assert "NVTX" in note
    assert "torch" not in note


def test_a_rank_without_a_complete_step_does_not_count_among_others(run, tmp_path):
    for rank in range(2):
        k.write(tmp_path / f"rank{rank}.json", rank_events(), rank=rank, world=2)
    whole = fastcomm.open(tmp_path, ranks=[0]).kernels()
    text = (tmp_path / "rank1.json").read_text()
    (tmp_path / "rank1.json").write_text(text[: text.rindex('"name"')])
    found = fastcomm.open(tmp_path, allow_truncated=True).kernels()
    assert found.table.to_pylist() == whole.table.to_pylist()
    assert (found.read.ranks, found.read.expected, found.steps) == ((0,), 2, 1)
    assert "no step of rank 1 counts" in found.warnings
    text = invoke("kernels", tmp_path, "--workers", 2, "--allow-truncated").stdout
    assert "  1 of 2 ranks, 1 step." in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_different_numbers_of_steps_are_a_range(tmp_path):
    more = [
        k.mark("ProfilerStep#4", 100, 100),
        k.launch(105, 9),
        k.kernel("a", 110, 5, correlation=9),
    ]
    for rank in range(2):
        k.write(
            tmp_path / f"rank{rank}.json",
            [*rank_events(), *more[: 3 * rank]],
            rank=rank,
            world=2,
        )
    assert "  2 ranks, 1 to 2 steps each." in invoke("kernels", tmp_path).stdout


def test_a_run_without_device_work_says_so(tmp_path):
    k.write(tmp_path / "rank0.json", [k.mark("ProfilerStep#0", 0, 9)])
    assert invoke("kernels", tmp_path, "-q").stdout.startswith("No device work")


# ------------------------------------------------------------------ what is read of a store


def columns_read(monkeypatch, folder, by):
    """The columns, and the number of row groups, that are read of a store."""
    read = []
    original = rank_file._rows

    def rows(file, groups, columns):
        read.append((frozenset(columns), len(groups)))
        return original(file, groups, columns)

    monkeypatch.setattr(rank_file, "_rows", rows)
    fastcomm.open(folder).kernels(by=by)
    assert len(set(read)) == 1
    return read[0]


@pytest.mark.parametrize("by", EXPECTED)
def test_a_store_is_read_in_part(run, monkeypatch, by):
    columns, groups = columns_read(monkeypatch, run / "store", by)
    needed = {"start", "stop", "kind", "name", "lane", "op", "tag"}
    if by in DEVICE_KEYS:
        assert (columns, groups) == (needed, 1)
    else:
        assert columns == needed | {"event", "correlation", "sequence", "forward_thread"}
        assert groups == 3


# ------------------------------------------------------------------ host runs and real traces


def test_a_host_run_has_operators_and_communication():
    found = fastcomm.open(HOST_RUN).kernels()
    assert found.is_host_run
    assert found.by_category.keys() == {"communication", "host"}
    names = totals(found)
    assert "gloo:all_reduce" in names
    assert "aten::linear" in names
    assert "A run without a device" in invoke("kernels", HOST_RUN, "-q").stdout


@pytest.mark.compiled
@NEEDS_DATA
def test_kernels_by_operator_agree_with_tracelens():
    with (KINETO / "h100_qwen" / "tracelens_kernels.csv").open() as file:
        expected = Counter()
        for row in csv.DictReader(file):
            expected[row["parent_operator"]] += float(row["us_sum"])
    found = totals(fastcomm.open(KINETO / "h100_qwen").kernels(by="operator"))
    # TraceLens also counts work outside of the step, which these operators do not have.
    for name in ("aten::mul", "aten::_flash_attention_forward"):
        assert found[name] / 1000 == pytest.approx(expected[name])


@pytest.mark.compiled
@NEEDS_DATA
def test_kernels_of_a_whole_trace_are_those_of_nsys(tmp_path):
    folder = KINETO.parent / "nsys"
    report = tmp_path / "report.sqlite"
    report.write_bytes(gzip.decompress((folder / "mfu_2gpu.sqlite.gz").read_bytes()))
    run = fastcomm.open(report)
    whole = pa.table({"number": [0], "start": [-(2**61)], "stop": [2**61]}, schema.ITERATIONS)
    traces = [
        replace(run.read(rank), device_iterations=None, iterations=whole) for rank in run.ranks
    ]
    question = WorkQuestion(by=("name",), full_names=True)
    totals = merge([WorkTotals.of(trace, question) for trace in traces])
    kernels = Kernels(by="name", totals=totals, read=ReadRanks(ranks=run.ranks, expected=2))
    found = {row["name"]: row for row in kernels.to_arrow().to_pylist()}
    columns = {"Instances": "count", "Total Time (ns)": "total_ns", "Avg (ns)": "mean_ns"}
    columns |= {"Med (ns)": "median_ns", "Min (ns)": "min_ns", "Max (ns)": "max_ns"}
    text = (folder / "mfu_2gpu_oracle" / "cuda_gpu_kern_sum.csv.gz").read_bytes()
    rows = list(csv.DictReader(gzip.decompress(text).decode().strip().splitlines()))
    assert len(rows) == 27
    for row in rows:
        expected = {ours: float(row[theirs]) for theirs, ours in columns.items()}
        own = {name: found[row["Name"]][name] for name in expected}
        assert own == pytest.approx(expected, rel=5e-4)


@pytest.mark.compiled
@NEEDS_DATA
def test_the_slower_step_of_trace_diff_is_explained():
    before, after = (
        fastcomm.open(KINETO / "trace_diff" / f"{name}.json.gz") for name in ("control", "test")
    )
    keys = ("name", "operator", "annotation")
    changes = kernel_changes([(before.kernels(by=key), after.kernels(by=key)) for key in keys])
    new = {one.name: one.effect_ns for one in changes["operator"] if one.state == "new"}
    assert new["CompiledFunctionBackward"] > 25e6
    assert new["CompiledFunction"] > 15e6
    effects = [sum(one.effect_ns for one in own) for own in changes.values()]
    assert effects == pytest.approx([effects[0]] * 3)
    sizes = [abs(one.effect_ns) for one in changes["annotation"]]
    assert sizes == sorted(sizes, reverse=True)


# ------------------------------------------------------------------ compare


def test_compare_lists_changed_new_and_vanished_kernels(run, tmp_path):
    (tmp_path / "after").mkdir()
    for rank in range(3):
        events = [e for e in rank_events(slow=4) if "gemm<2" not in e["name"]]
        events.append(k.kernel("fill", 50, 3))
        k.write(tmp_path / "after" / f"rank{rank}.json", events, rank=rank, world=3)
    words = ("compare", run / "traces", tmp_path / "after", "-q")
    document = json.loads(invoke(*words, "--json").stdout)
    rows = {row["name"]: row for row in document["kernels"]["name"]}
    assert rows["fill"]["state"] == "new"
    assert rows["fill"]["effect_ns"] == 3000
    assert rows["gemm<…>"]["effect_ns"] == -5000
    assert (rows["gemm<…>"]["before_count"], rows["gemm<…>"]["after_count"]) == (2, 1)
    full = rows["gemm_wgrad"]
    assert full["effect_ns"] == pytest.approx(14000 - 32000 / 3)
    text = invoke(*words).stdout
    assert "new kernels: fill (+3.00 us)" in text
    without = json.loads(invoke(*words, "--json", "--no-kernels").stdout)
    assert without["kernels"] is None


def test_work_outside_of_annotations_is_neither_new_nor_vanished(tmp_path):
    k.write(tmp_path / "rank0.json", rank_events())
    before = fastcomm.open(tmp_path).kernels(by="annotation")
    k.write(tmp_path / "rank0.json", [*rank_events(), k.kernel("fill", 50, 3)])
    after = fastcomm.open(tmp_path).kernels(by="annotation")
    for pair, effect in (((before, after), 3000), ((after, before), -3000)):
        (change,) = (
            one for one in kernel_changes([pair])["annotation"] if one.name == "(no annotation)"
        )
        assert (change.state, change.effect_ns) == ("changed", effect)


def test_compare_of_saved_metrics_says_that_kernels_are_not_compared(run, tmp_path):
    invoke("metrics", run / "traces", "-q", "--output", tmp_path / "saved")
    (tmp_path / "after").mkdir()
    for rank in range(3):
        k.write(
            tmp_path / "after" / f"rank{rank}.json", rank_events(slow=4), rank=rank, world=3
        )
    text = invoke("compare", tmp_path / "saved", tmp_path / "after", "-q").stdout
    assert "kernels are not compared: BEFORE has saved metrics alone" in text.replace("\n", " ")


def test_compare_takes_pairs_of_kernels_with_equal_keys(run):
    traces = fastcomm.open(run / "traces")
    kernels = traces.kernels()
    same = fastcomm.compare(traces.metrics(), traces.metrics(), kernels=[(kernels, kernels)])
    assert {one.effect_ns for one in same.kernels["name"]} == {0}
    assert same.to_arrow()["kernels"].num_rows == 3
    with pytest.raises(FastcommError, match="by name before, and by stream after"):
        kernel_changes([(kernels, traces.kernels(by="stream"))])
