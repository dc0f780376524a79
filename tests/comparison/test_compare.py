"""Test `fastcomm compare`: parts of the step, and conditions for CI."""

import dataclasses
import json
import math
import re
import shutil

import pyarrow.parquet as pq
import pytest
from builders.opened import open_run
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.cli.main import main
from fastcomm.comparison.analysis import compare
from fastcomm.comparison.command import Condition
from fastcomm.comparison.metrics_documents import saved_metrics
from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.metrics.computation import compute_metrics
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

JOB = Job.of(4, steps=2, layers=2, micro_batches=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Traces of a job, and of the same job on links a third slower."""
    folder = tmp_path_factory.mktemp("runs")
    write(JOB, folder / "before")
    write(dataclasses.replace(JOB, link_speed=30 * 10**9), folder / "after")
    return folder


@pytest.fixture(scope="module")
def metrics(runs):
    return [compute_metrics(open_run(runs / name)).to_dict() for name in ("before", "after")]


def call(*words):
    return CliRunner().invoke(main, ["compare", *map(str, words)])


def test_the_effects_of_all_parts_add_up_to_the_change_of_the_step(metrics):
    found = compare(*metrics)
    assert found.step.difference > 0
    total = sum(part.effect_ns for part in found.parts)
    assert total == pytest.approx(found.step.difference, rel=1e-9)
    sizes = [abs(part.effect_ns) for part in found.parts]
    assert sizes == sorted(sizes, reverse=True)


def test_a_slower_link_shows_as_bus_bandwidth_and_not_as_bytes(metrics):
    (part,) = (part for part in compare(*metrics).parts if part.name == "exposed_TP")
    reasons = {each.name: each.relative for each in part.reasons}
    assert reasons["bandwidth.TP.avg_bus_bw"] < -0.15
    assert "volume.TP.bytes_per_step_per_gpu" not in reasons
    assert part.effect_ns > 0


def test_an_option_without_effect_on_both_runs_is_warned_of_once(runs):
    result = call(runs / "before", runs / "after", "--dp", 2, "--tp", 2, "--order", "tp-dp")
    assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if "changed nothing" in line]
    assert [line.partition(" changed nothing: ")[0] for line in said] == [
        "warning: --tp 2 --dp 2",
        "warning: --order tp-dp",
    ]


def test_an_option_without_effect_names_the_run_if_the_other_is_kept(runs, metrics, tmp_path):
    kept = {**metrics[0], "warnings": ["--dp 4 changed nothing: as it was kept"]}
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    sizes = "--dp", 2, "--tp", 2
    for name, pair in (
        ("after", (tmp_path / "kept.json", runs / "after")),
        ("before", (runs / "before", tmp_path / "kept.json")),
    ):
        said = call(*pair, *sizes).stderr.splitlines()
        assert len(said) == 2
        assert any(
            line.startswith(f"warning: {name}: --tp 2 --dp 2 changed nothing: ")
            for line in said
        )


def test_a_run_compared_with_itself_has_no_change(metrics):
    found = compare(metrics[0], metrics[0])
    assert {each.difference for each in found.values} <= {0, None}
    assert {part.effect_ns for part in found.parts} == {0}
    assert not found.notes


def test_runs_of_different_size_are_compared_with_a_note(metrics):
    fewer = {**metrics[1], "ranks": [0, 1], "iterations_found_by": ["whole trace"]}
    notes = " ".join(compare(metrics[0], fewer).notes)
    assert "4 ranks, after 2" in notes
    assert "whole trace after" in notes


def test_jobs_of_different_size_are_noted_even_with_one_rank_of_each(metrics):
    before, after = ({**metrics[0], "ranks": [1], "world_size": size} for size in (8, 2))
    (note,) = (note for note in compare(before, after).notes if "job" in note)
    assert note.startswith("before is of a job of 8 ranks, after of one of 2")


def test_runs_on_different_gpus_are_noted(metrics):
    before, after = ({**metrics[0], "gpus": gpus} for gpus in (["A100"], ["A100", "H100"]))
    (note,) = compare(before, after).notes
    assert note.startswith("before ran on A100, after on A100 and H100")
    for unknown in ({**before, "gpus": []}, {k: v for k, v in before.items() if k != "gpus"}):
        assert not compare(unknown, after).notes


def groups(**sizes):
    return [{"tag": tag, "size": size} for tag, size in sizes.items()]


@pytest.mark.parametrize(
    ("before", "after", "layouts"),
    [
        (groups(TP=4, DP=2), groups(TP=2, DP=4), "DP 2, TP 4 before, DP 4, TP 2 after"),
        (groups(TP=4, DP=2), groups(TP=8), "DP 2, TP 4 before, TP 8 after"),
        (groups(TP=4, DP=2), groups(TP=4, DP=2), None),
        (groups(TP=4), groups(TP=4, DP=2), "TP 4 before, DP 2, TP 4 after"),
        # Groups that nothing names may be those of the other run's parallelism.
        (groups(TP=4, OTHER=2), groups(TP=4, DP=2), None),
        (groups(TP=4, OTHER=2), groups(TP=2, OTHER=4), "TP 4, OTHER 2 before, TP 2, OTHER 4"),
        (groups(TP=4), [], None),
    ],
)
def test_runs_of_another_layout_are_noted_where_their_groups_tell(
    metrics, before, after, layouts
):
    found = compare({**metrics[0], "groups": before}, {**metrics[0], "groups": after})
    assert [*found.differences] == [*found.notes]
    if layouts is None:
        assert not found.differences
    else:
        (note,) = found.differences
        assert f"another layout than after: {layouts}" in note


def test_what_makes_all_numbers_unlike_comes_before_them(metrics, tmp_path):
    fewer = {**metrics[1], "ranks": [0, 1], "world_size": 2, "iterations": [10]}
    for name, document in (("before", metrics[0]), ("after", fewer)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    both = [tmp_path / f"{name}.json" for name in ("before", "after")]
    lines = call(*both, "--html", tmp_path / "page.html").stdout.splitlines()
    assert lines[0].startswith("note: before is of a job of 4 ranks, after of one of 2")
    step = next(k for k, line in enumerate(lines) if line.startswith("A step takes"))
    assert all(line.startswith(("note: ", "  ")) for line in lines[:step])
    last = next(line for line in lines[step:] if line.startswith("note: "))
    assert last.startswith("note: before has 2 steps, after 1")
    assert sum("is of a job of" in line for line in lines) == 1
    document = json.loads(call(*both, "--json").stdout)
    assert [*document][:3] == ["schema_version", "differences", "step"]
    assert document["differences"] == document["notes"][: len(document["differences"])]
    page = (tmp_path / "page.html").read_text()
    assert page.index("is of a job of 4 ranks") < page.index("<h1>")
    assert page.count("is of a job of 4 ranks") == 1


def test_different_bytes_are_refused(metrics):
    with pytest.raises(ConfigError, match="both with the same bytes option"):
        compare(metrics[0], {**metrics[1], "bytes": "bus"})


def test_an_unknown_breakdown_has_no_parts(metrics):
    unknown = {**metrics[1], "breakdown": {"spec": {}, "exact": {"compute": None}}}
    assert compare(metrics[0], unknown).parts == ()


def comparison(before, after, name="iteration.mean_ns"):
    group, _, leaf = name.partition(".")
    kept = [{"iteration": {"mean_ns": 1.0}, group: {leaf: value}} for value in (before, after)]
    return compare(*kept)


@given(
    st.floats(1, 1e9),
    st.floats(1, 1e9),
    st.sampled_from(["<", ">", "<=", ">="]),
    st.integers(-50, 50),
)
def test_a_relative_condition_compares_the_change_with_the_value_before(
    before, after, sign, percent
):
    change = (after - before) / before
    wanted = {"<": change < percent / 100, ">": change > percent / 100}
    wanted |= {"<=": change <= percent / 100, ">=": change >= percent / 100}
    condition = Condition.parsed(f"iteration.mean_ns {sign} {percent:+d}%")
    if not math.isclose(change, percent / 100, rel_tol=1e-12):
        assert condition.holds(comparison(before, after)) == wanted[sign]


@pytest.mark.parametrize(
    ("text", "before", "after", "holds"),
    [
        ("iteration.mean_ns > +2ms", 1e6, 3.5e6, True),
        ("iteration.mean_ns>+3ms", 1e6, 3.5e6, False),
        ("iteration.mean_ns > 3ms", 1e6, 3.5e6, True),
        ("iteration.mean_ns < -1s", 3e9, 1e9, True),
        ("overlap.ratio < 50%", 0.9, 0.4, True),
        ("overlap.ratio < -0.2", 0.9, 0.4, True),
        ("overlap.ratio >= 4e-1", 0.9, 0.4, True),
    ],
)
def test_a_signed_number_is_a_change_and_an_unsigned_one_the_value_after(
    text, before, after, holds
):
    condition = Condition.parsed(text)
    assert condition.holds(comparison(before, after, condition.name)) is holds


@pytest.mark.parametrize(
    "text", ["", "step", "a = 3", "a > b", "a > +3 parsecs", "a > --3", "overlap.ratio > 3ms"]
)
def test_an_invalid_condition_is_an_error(text):
    with pytest.raises(ConfigError, match="condition"):
        Condition.parsed(text)


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        ("iteration.mean_ns > 3", "3 is 3 ns, and iteration.mean_ns is 80.3 ms; write a unit"),
        ("iteration.mean_ns >= +3", "is [+]3 ns, and .* as in [+]3ms$"),
        ("iteration.mean_ns > 3ns", None),
        ("iteration.mean_ns > 3ms", None),
        ("iteration.mean_ns > 0", None),
        ("iteration.mean_ns > 80e6", None),
        ("bandwidth.DP.events > 3", None),
    ],
)
def test_an_absurdly_small_time_without_a_unit_is_warned_of(text, doubt):
    condition = Condition.parsed(text)
    said = condition.doubt(comparison(8e7, 8.03e7, condition.name))
    assert (said is None) == (doubt is None)
    assert doubt is None or re.search(doubt, said)


def test_the_command_warns_of_a_condition_in_nanoseconds(metrics, tmp_path):
    kept = tmp_path / "baseline.json"
    kept.write_text(json.dumps(metrics[0]))
    done = call(kept, kept, "--fail-if", "iteration.mean_ns > 3")
    assert done.exit_code == 4
    assert "warning: --fail-if 'iteration.mean_ns > 3': 3 is 3 ns" in done.stderr


def test_a_condition_on_an_unknown_metric_is_an_error():
    with pytest.raises(ConfigError, match=r"is n/a before and 3 after"):
        Condition.parsed("a.b > +1%").holds(comparison(None, 3, "a.b"))
    with pytest.raises(ConfigError, match="cannot be judged"):
        Condition.parsed("a.b > +1%").holds(comparison(0, 3, "a.b"))


def test_an_unknown_metric_in_a_condition_suggests_similar_names(metrics):
    with pytest.raises(ConfigError, match=r"did you mean .*iteration\.mean_ns"):
        Condition.parsed("iteration.mean > +3%").holds(compare(*metrics))


def test_compare_takes_traces_and_saved_metrics_and_fails_if_a_condition_holds(
    runs, metrics, tmp_path
):
    kept = tmp_path / "baseline.json"
    kept.write_text(json.dumps(metrics[0]))
    words = (kept, runs / "after", "--output", tmp_path / "out")
    bad = call(*words, "--fail-if", "iteration.mean_ns > +3%", "--json")
    assert bad.exit_code == 4
    found = json.loads(bad.stdout)
    assert found["conditions_that_hold"] == ["iteration.mean_ns > +3%"]
    assert found["step"]["difference"] == pytest.approx(
        sum(part["effect_ns"] for part in found["parts"])
    )
    assert json.loads((tmp_path / "out/compare.json").read_text()) == found
    assert pq.read_table(tmp_path / "out/values.parquet").num_rows == len(found["values"])
    good = call(*words, "--fail-if", "iteration.mean_ns > +300%")
    assert good.exit_code == 0
    assert "ok   iteration.mean_ns > +300%" in good.stdout
    assert "bus bandwidth -" in good.stdout


def test_an_output_directory_can_be_the_baseline(runs, tmp_path):
    assert (
        CliRunner()
        .invoke(main, ["metrics", str(runs / "before"), "--output", str(tmp_path / "kept")])
        .exit_code
        == 0
    )
    same = call(tmp_path / "kept", runs / "before", "--fail-if", "iteration.mean_ns > +0.001%")
    assert same.exit_code == 0, same.output
    assert same.stdout.splitlines()[0] == "No difference."
    assert len(same.stdout.splitlines()) == 2  # and the condition
    full = call(tmp_path / "kept", runs / "before", "--json")
    assert json.loads(full.stdout)["step"]["difference"] == 0


def test_only_common_ranks_are_compared_with_one_note(runs, metrics, tmp_path):
    whole, partly = runs / "before", shutil.copytree(runs / "before", tmp_path / "partly")
    next(partly.glob("*rank1*")).unlink()
    done = call(whole, partly)
    lines = ["after: 3 of 4 ranks", "after: no trace of rank 1"]
    assert done.stdout.splitlines()[0].endswith(f" ({lines[0]})")
    assert done.stdout.splitlines()[1] == lines[1]
    assert "compared are the 3 ranks that both runs have (rank 1 only before)" in done.stdout
    assert "no trace here" not in done.stderr
    assert "totals are not comparable" not in done.stdout
    found = json.loads(call(whole, partly, "--json").stdout)
    assert {each["difference"] for each in found["values"]} <= {0, None}
    assert found["incomplete"] == lines
    # Metrics that were kept cannot be narrowed, and jobs of two sizes have no ranks in common.
    kept = tmp_path / "baseline.json"
    kept.write_text(json.dumps(metrics[0]))
    assert "before has 4 ranks, after 3: totals are not" in " ".join(
        call(kept, partly).stdout.split()
    )
    write(dataclasses.replace(JOB, ranks=8, dp=2 * JOB.dp), tmp_path / "larger")
    larger = " ".join(call(whole, tmp_path / "larger").stdout.split())
    assert "before has 4 ranks, after 8: totals are not comparable" in larger
    assert "that both runs have" not in larger


def test_invalid_saved_metrics_are_an_error_and_traces_are_recognized(tmp_path):
    (tmp_path / "metrics.json").write_text("[1")
    with pytest.raises(TraceFileError, match="no metrics of fastcomm"):
        saved_metrics(tmp_path)
    (tmp_path / "metrics.json").write_text('{"iteration": {}}')
    with pytest.raises(TraceFileError, match="it has no breakdown, bandwidth, volume, overlap"):
        saved_metrics(tmp_path / "metrics.json")
    trace = tmp_path / "rank0.json"
    trace.write_text('{"traceEvents": []}')
    assert saved_metrics(trace) is None
    assert saved_metrics(tmp_path / "absent") is None
    assert call(tmp_path / "absent", trace).exit_code == 2


def test_of_many_warnings_a_line_says_how_many_more_there_are(metrics, tmp_path):
    many = {**metrics[0], "warnings": [f"warning {k}" for k in range(11)]}
    for name, document in (("before", many), ("after", metrics[0])):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    printed = call(tmp_path / "before.json", tmp_path / "after.json").stderr.splitlines()
    assert [line for line in printed if line.startswith("warning: before: ")] == [
        *(f"warning: before: warning {k}" for k in range(8)),
        "warning: before: and 3 more, which `fastcomm metrics` prints",
    ]
