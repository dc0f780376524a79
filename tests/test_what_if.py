"""Test what-ifs: a step replayed with edits."""

import json

import kineto_text as k
import numpy as np
import pytest
from click.testing import CliRunner
from critical_path_traces import documents
from hypothesis import given
from hypothesis import strategies as st

import fastcomm
from fastcomm.cli import main
from fastcomm.compat import hta
from fastcomm.critical_path.analysis import analyze
from fastcomm.critical_path.what_if import Replay, sweep
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph import edits
from fastcomm.graph.edits import Edit
from fastcomm.options import Window
from fastcomm.readers.assembly import TraceOptions
from fastcomm.readers.kineto import reader
from fastcomm.synthetic import Job, write

US = 1000
TP = {"Process_Group_Description": "TENSOR_MODEL_PARALLEL_GROUP"}
# The host launches three kernels and waits; the device is busy from 10 to 100 us.
EVENTS = [
    k.event("aten::mm", "cpu_op", 0, 8, pid=100, tid=1),
    k.launch(2, 1),
    k.launch(4, 2),
    k.launch(6, 3),
    k.kernel("gemm", 10, 40, device=0, correlation=1),
    k.all_reduce(52, 28, stream=7, device=0, correlation=2, **TP),
    k.kernel("relu", 82, 18, device=0, correlation=3),
    k.event("cudaDeviceSynchronize", "cuda_runtime", 8, 95, pid=100, tid=1),
]


def found_in(path):
    return analyze(reader.read(path, TraceOptions(whole=True)), Window(annotation=""))


@pytest.fixture
def step(tmp_path):
    return found_in(k.write(tmp_path / "rank0.json", EVENTS))


def scale(what, value):
    return Edit(action="scale", target=what, value=value)


@given(documents(), st.lists(st.sampled_from([0, 0.5, 0.9]), min_size=2, max_size=2))
def test_a_replay_is_exact_and_shorter_work_never_makes_it_longer(folder, document, factors):
    path = folder / "rank0.json"
    path.write_text(json.dumps(document))
    try:
        found = found_in(path)
    except FastcommError:
        return
    replay = Replay(found)
    answer = replay.run([])
    assert answer.replay_error_ns == 0
    assert answer.before_ns == answer.after_ns == found.wall_ns
    some = scale("name:aten|gemm|cuda", factors[0]), scale("name:e", factors[1])
    known = []
    for edit in some:
        try:
            replay.edited([edit])
        except ConfigError:
            continue
        known.append(edit)
    spans = [replay.span(known[:count]) for count in range(len(known) + 1)]
    assert spans == sorted(spans, reverse=True)
    after = found.what_if(*known).after
    assert sum(after.summary_ns().values()) == spans[-1]


@pytest.mark.parametrize(
    ("edit", "after"),
    [
        (scale("comm", 0.5), 89),
        (scale("comm:TP", 0), 75),
        (scale("op:AllReduce", 2), 131),
        (scale("tag:TP+stream:7", 0.5), 89),
        (scale("name:^gemm$", 0.5), 83),
        (scale("compute", 0.5), 74),
        (scale("host", 0), 101),
        (scale("thread:1", 0), 101),
        (Edit(action="set", target="name:gemm", value=100 * US), 163),
        (Edit(action="remove", target="launches"), 95),
        (Edit(action="remove", target="gaps"), 99),
        (Edit(action="remove", target="host-gaps"), 103),
        (Edit(action="fuse", target="compute", value=100 * US), 103),
        (edits.speed("compute", "2"), 74),
        (edits.speed("comm", "2"), 89),
    ],
)
def test_an_edit_gives_a_new_step_time(step, edit, after):
    answer = step.what_if(edit)
    assert (answer.before_ns, answer.after_ns) == (103 * US, after * US), str(edit)
    assert sum(answer.after.summary_ns().values()) == after * US
    assert answer.before.summary_ns()["gpu_compute_bound"] == 58 * US


def test_edits_compose_in_order(step):
    replay = Replay(step)
    halves = [scale("comm", 0.5), scale("comm", 0.5)]
    assert replay.span(halves) == replay.span([scale("comm", 0.25)])
    assert replay.span([*halves, Edit(action="set", target="comm", value=28 * US)]) == 103 * US
    assert (
        step.graph.weight
        == step.graph.time[step.graph.target] - step.graph.time[step.graph.source]
    ).all()


def test_short_adjacent_kernels_are_fused(tmp_path):
    events = [
        *(k.launch(10 * n, n + 1) for n in range(3)),
        *(k.kernel(f"k{n}", 10 * n + 5, 2, device=0, correlation=n + 1) for n in range(3)),
    ]
    found = found_in(k.write(tmp_path / "rank0.json", events))
    answer = found.what_if(Edit(action="fuse", target="compute", value=3 * US))
    # What is left is the host: the gaps between its calls.
    assert answer.before_ns == 27 * US
    assert answer.after_ns == 19 * US
    times = Replay(found).times(Replay(found).edited(answer.edits))[0]
    assert times.max() == 19 * US
    assert (np.diff(times[~found.graph.is_end]) >= -27 * US).all()


def test_a_sweep_has_one_row_per_value(step):
    found = sweep(Replay(step), scale("comm", 0), [0, 0.5, 1])
    assert found.span_ns == (75 * US, 89 * US, 103 * US)
    assert found.to_arrow().to_pylist()[1] == {
        "edit": "scale comm",
        "value": 0.5,
        "span_ns": 89 * US,
    }


def test_only_the_corrected_rules_can_be_replayed(tmp_path):
    path = k.write(tmp_path / "rank0.json", EVENTS)
    trace = reader.read(path, TraceOptions(whole=True))
    with pytest.raises(FastcommError, match="of the corrected rules, not of hta"):
        Replay(hta.find_path(trace, Window(annotation="")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "invalid condition 'nothing': expected comm"),
        ("comm:XX", "invalid value 'XX': expected one of DP"),
        ("op:Foo", "invalid value 'Foo': expected one of AllReduce"),
        ("name:(", "invalid regular expression"),
        ("stream:x", "invalid condition 'stream:x'"),
        ("name:nobody", "'name:nobody' matches no event of the step"),
    ],
)
def test_an_invalid_selection_is_an_error(step, text, said):
    with pytest.raises(ConfigError, match=said):
        step.what_if(scale(text, 1))


def test_edits_can_be_read_from_a_file(tmp_path, step):
    path = tmp_path / "edits.toml"
    path.write_text(
        '[[edit]]\nwhat = "comm"\nscale = 0.5\n[[edit]]\nremove = "gaps"\n'
        '[[edit]]\nwhat = "name:relu"\nset = "9us"\n[[edit]]\nhide = "TP"\n'
        '[[edit]]\nfuse_below = "1us"\n[[edit]]\ncompute_speedup = 1.5\n'
        "[[edit]]\ncomm_speedup = 2\n"
    )
    found = edits.read_edits(path)
    assert [str(edit) for edit in found] == [
        "scale comm = 0.5",
        "remove gaps",
        "set name:relu = 9 us",
        "scale comm:TP = 0",
        "fuse kernels below 1 us",
        "scale compute = 0.666667",
        "scale comm = 0.5",
    ]
    assert step.what_if(*found).after_ns < 103 * US


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "edits.toml"),
        ("[other]", r"found 'other', expected only tables such as"),
        ("[[edit]]\nscale = 1", "missing `what`, the events to change"),
        ("[[edit]]\nwhat = 'comm'\ncomm_speedup = 1", "expected scale or set with `what`"),
        ("[[edit]]\ncompute_speedup = 1\ncomm_speedup = 1", "expected exactly one action"),
        ("[[edit]]\ncompute_speedup = 0", "invalid speedup 0.0: expected a number from 1e-06"),
        ("[[edit]]\ncompute_speedup = 'fast'", "factor 'fast'"),
        ("[[edit]]\nset = '3'\nwhat = 'comm'", "duration '3'"),
        ("[[edit]]\nset = '1.2.3us'\nwhat = 'comm'", "duration '1.2.3us'"),
        ("[[edit]]\nremove = 'all'", "remove: invalid delays 'all': expected one of launches"),
    ],
)
def test_a_damaged_file_of_edits_is_an_error(tmp_path, text, said):
    path = tmp_path / "edits.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        edits.read_edits(path)


@pytest.mark.parametrize("value", [1e18, 1e-7, -1, float("nan"), float("inf")])
def test_a_factor_that_overflows_times_is_refused(value):
    with pytest.raises(ConfigError, match="expected a number from 1e-06 to 1000000"):
        scale("comm", value)


def test_factors_that_multiply_until_no_time_fits_are_refused(tmp_path):
    path = k.write(tmp_path / "rank0.json", EVENTS)
    done = invoke(path, *["--scale", "compute=1e6"] * 4, code=2)
    assert "the events become longer than 1000000000 s" in done.output


def invoke(*words, code=0):
    done = CliRunner().invoke(main, ["what-if", *map(str, words)])
    assert done.exit_code == code, done.output
    return done


def test_a_sweep_prints_only_its_table(tmp_path):
    path = k.write(tmp_path / "rank0.json", EVENTS)
    page = tmp_path / "page.html"
    text = invoke(path, "--annotation", "", "--scale", "comm=0:1:0.5", "--html", page).stdout
    assert text.startswith("rank 0: 103.0 us; 75.00 us with scale comm = 0\n")
    assert "before" not in text
    assert "of the step without edits" in text
    assert "before-after" not in page.read_text("utf-8")


def test_the_command_prints_both_steps(tmp_path):
    path = k.write(tmp_path / "rank0.json", EVENTS)
    words = [path, "--annotation", "", "--scale", "comm=0.5", "--scale", "compute=0:1:0.5"]
    text = invoke(*words).stdout
    assert "103.0 us before, 89.00 us after, 1.157 times as fast" in text
    assert "reproduces all measured times exactly" in text
    found = json.loads(invoke(*words, "--json", "--output", tmp_path / "out").stdout)
    assert found["after_ns"] == 89 * US
    assert found["sweeps"][0]["values"] == [0, 0.5, 1]
    assert found["sweeps"][0]["span_ns"] == sorted(found["sweeps"][0]["span_ns"])
    assert (tmp_path / "out" / "sweep.csv").read_text().startswith('"edit","value","span_ns"')
    assert json.loads((tmp_path / "out" / "what_if.json").read_text()) == found
    every = [
        "--set",
        "name:relu=1us",
        "--remove",
        "gaps",
        "--hide",
        "TP",
        "--compute-speedup",
        "2",
    ]
    every += ["--comm-speedup", "2", "--fuse-below", "1us"]
    (tmp_path / "e.toml").write_text('[[edit]]\nremove = "launches"\n')
    found = json.loads(
        invoke(*words[:3], *every, "--edits", tmp_path / "e.toml", "--json").stdout
    )
    assert len(found["edits"]) == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scale", "comm"], "expected WHAT=VALUE, as in comm:DP=0.5"),
        (["--scale", "comm=1:2"], "expected WHAT=FACTOR or WHAT=FROM:TO:STEP"),
        (["--scale", "comm=1:0:1"], "FROM:TO:STEP with 1 to 10000 values"),
        (["--scale", "comm=0:1:1e-9"], "FROM:TO:STEP with 1 to 10000 values"),
        (["--set", "comm=1"], "duration '1'"),
        (["--scale", "comm=1e18"], "'1e18': expected a number from 1e-06 to 1000000, or 0"),
        (["--scale", "comm=1e-7"], "factor '1e-7'"),
        (
            ["--scale", "comm=nan"],
            "factor 'nan': expected a number from 1e-06 to 1000000, or 0",
        ),
        (
            ["--compute-speedup", "inf"],
            "factor 'inf': expected a number from 1e-06 to 1000000, or 0",
        ),
        (
            ["--set", "comm=1e300s"],
            "duration '1e300s': expected a number and a unit (ns, us, ms or s), as in 10us",
        ),
        (["--fuse-below", "1e99s"], "as in 10us, at most 1000000s"),
        (["--scale", "comm=1:1e18:1e17"], "factor '1e18'"),
        (["--comm-speedup", "1e7"], "factor '1e7'"),
    ],
)
def test_invalid_arguments_are_errors_in_one_line(tmp_path, words, said):
    path = k.write(tmp_path / "rank0.json", EVENTS)
    assert said in invoke(path, *words, code=2).stderr


@pytest.mark.compiled
def test_an_edit_without_effect_leaves_the_path_as_it_is(tmp_path):
    write(Job.of(ranks=4), tmp_path)
    path = fastcomm.open(tmp_path).critical_path()
    for changes in ([], [scale("comm", 1.0)], [Edit(action="fuse", target="compute", value=1)]):
        found = path.what_if(*changes)
        assert found.after_ns == found.before_ns
        assert found.after.summary_ns() == path.summary_ns()
