"""Test `fastcomm kernels` against its definitions, other tools, and hand-made traces."""

import csv
import io
import json

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.kernel_events import op, python, rank_events, totals, write_run

import fastcomm
from fastcomm.device_work.attribution import DEVICE_KEYS
from fastcomm.errors import ConfigError
from fastcomm.formats.store import reader
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys

EXPECTED = {
    "name": {"gemm<…>": 30, "gemm_wgrad": 32, "ncclDevKernel_AllReduce_Sum_f32_RING_LL": 30},
    "category": {"GEMM": 30, "convolution": 32, "communication": 30},
    "operator": {"aten::mm": 62, "(no operator)": 30},
    "module": {"Linear": 62, "(no module)": 30},
    "layer": {"Layer_0": 15, "Layer_1": 47, "(no layer)": 30},
    "annotation": {"forward": 30, "backward": 62},
    "stream": {"stream 7": 62, "stream 20": 30},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("kernels"))


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


@pytest.mark.parametrize(("slow", "category"), [((3, 2), "GEMM"), ((2, 3), "convolution")])
def test_the_headline_names_the_category_at_which_a_rank_loses_most(tmp_path, slow, category):
    for rank in range(3):
        gemm, wgrad = slow if rank == 2 else (0, 0)
        events = [
            k.mark("ProfilerStep#3", 0, 100),
            k.kernel("gemm", 10, 30 + gemm),
            k.kernel("gemm_wgrad", 50, 30 + wgrad),
        ]
        k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=3)
    headline = fastcomm.open(tmp_path).kernels().headline
    said = f"rank 2 is 10.0 % slower than its peers in {category} kernels (+3.00 us a step)"
    assert said in headline


def test_one_rank_one_step_and_a_match_count_alone(run):
    traces = fastcomm.open(run / "traces")
    assert totals(traces.kernels(rank=1, match="^void gemm")) == {"gemm<…>": 10000}
    assert totals(traces.kernels(by="operator", match="wgrad")) == {"aten::mm": 32000}
    assert totals(traces.kernels(by="operator", match="aten::mm")) == {"aten::mm": 62000}
    assert totals(traces.kernels(step=3)) == totals(traces.kernels())
    nothing = traces.kernels(match="nothing")
    assert (totals(nothing), nothing.unknown) == ({}, {})


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


def columns_read(monkeypatch, folder, by):
    """The columns, and the number of row groups, that are read of a store."""
    read = []
    original = reader._rows

    def rows(file, groups, columns):
        read.append((frozenset(columns), len(groups)))
        return original(file, groups, columns)

    monkeypatch.setattr(reader, "_rows", rows)
    fastcomm.open(folder).kernels(by=by)
    assert len(set(read)) == 1
    return read[0]


@pytest.mark.parametrize("by", EXPECTED)
def test_a_store_is_read_in_part(run, monkeypatch, by):
    columns, groups = columns_read(monkeypatch, run / "store", by)
    needed = {"start", "stop", "kind", "name", "lane", "op", "group_id", "tag", "tag_source"}
    if by in DEVICE_KEYS:
        assert (columns, groups) == (needed, 1)
    else:
        assert columns == needed | {"event", "correlation", "sequence", "forward_thread"}
        assert groups == 3
