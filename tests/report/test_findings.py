"""Test what pages show of findings: pictures, what a fix saves, and the facts beside them."""

from dataclasses import replace

import pytest
from builders.html_page import parsed, tips
from builders.opened import open_run

from fastcomm.critical_path.candidates import Candidate
from fastcomm.errors import FastcommError
from fastcomm.graph.edits import Interval, parse_edits
from fastcomm.metrics.computation import compute
from fastcomm.metrics.findings.finding import Evidence, Fix, Sketch
from fastcomm.metrics.findings.suggestions import Suggestions
from fastcomm.metrics.options import MetricsOptions
from fastcomm.metrics.partial import Partial, merge
from fastcomm.options import EditOptions
from fastcomm.report import findings
from fastcomm.report.analysis import PageResults, results_for_page
from fastcomm.report.options import ReportOptions
from fastcomm.show import pages
from fastcomm.show.charts import THIN
from fastcomm.show.draw import draw
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.trace.run_traces import ranges


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write(Job.of(ranks=8, steps=2, layers=2, micro_batches=2), folder)
    return open_run(folder)


@pytest.fixture(scope="module")
def found(run):
    parts = [Partial.of(run.read(rank)) for rank in run.ranks]
    return compute(merge(parts), byte_kind="payload", link=50e9)


def test_a_finding_has_the_time_that_its_fix_saves(run, found):
    results = results_for_page(run, ReportOptions(link_bandwidth="50GB/s", no_timeline=True))
    answers = results.answers
    (shown, *_) = findings.findings(Suggestions(metrics=found, arguments=["x"]), None, answers)
    assert answers[0].edit.text == "heal rank:5"
    text = pages.plain(shown.answer)
    assert text.startswith("What if? With rank 5 as fast as its peers: the replayed step is ")
    assert pages.ns(answers[0].saved_ns) in text
    assert answers[0].saved_ns == pytest.approx(found.findings[0].cost_ns, rel=0.2)
    without = ReportOptions(no_timeline=True, no_path=True)
    results = results_for_page(run, without)
    assert results == PageResults(
        metrics=results.metrics, answers=(None,) * len(results.metrics.findings)
    )


RATES = (Evidence(key="bus_bw", value=1e10), Evidence(key="peers_bus_bw", value=2e10))


@pytest.mark.parametrize(
    ("picture", "alt"),
    [
        (Sketch(of="step"), "Parts of the mean step: compute"),
        (Sketch(of="idle"), "Parts of idle time: pipeline bubble"),
        (
            Sketch(of="rates", rates=(("this", "bus_bw"), ("its peers", "peers_bus_bw"))),
            "This: 10.0\u202fGB/s; its peers: 20.0\u202fGB/s.",
        ),
        (Sketch(of="ranks", measure="wait_caused", noun="wait caused"), "rank 5 has"),
        (Sketch(of="ranks", measure="idle", noun="idle time"), "rank 5 has"),
        (None, None),
    ],
)
def test_findings_have_their_pictures_and_fixes(found, picture, alt):
    (edit,) = parse_edits(EditOptions(remove=("launches",))).edits
    fix = Fix(edit=EditOptions(remove=("launches",)), text="Without launch delays")
    chosen = replace(found.findings[0], picture=picture, fix=fix, evidence=RATES)
    answer = Candidate(
        edit=edit, after_ns=9, saved_ns=0, interval=Interval.of(9, 0, [edit], None)
    )
    metrics = replace(found, findings=(chosen,))
    (shown,) = findings.findings(Suggestions(metrics=metrics, arguments=["x"]), None, [answer])
    assert pages.plain(shown.answer) == (
        "What if? Without launch delays: the replayed step is not shorter (remove launches)."
    )
    if picture is None:
        assert shown.picture is None
    else:
        assert shown.picture.alt.startswith(alt)
        assert tips(parsed(str(draw(shown.picture.chart, shown.picture.alt))))


def test_tokens_per_step_give_the_throughput(found):
    step = found.iteration.mean_ns
    flops = replace(found.flops, model_per_step=2e12, mfu=0.4)
    told = replace(found, tokens_per_step=1000, flops=flops)
    assert told.to_dict()["throughput"] == pytest.approx(
        {
            "tokens_per_step": 1000,
            "tokens_per_s": 1000 / (step / 1e9),
            "tokens_per_s_per_gpu": 1000 / (step / 1e9) / 8,
            "tflops_per_s_per_gpu": 2 / (step / 1e9),
        }
    )
    fact = findings.facts(told, "")[1]
    assert (fact.key, fact.label[-10:]) == (
        "metrics.throughput.tokens_per_s",
        f"MFU 40.0{THIN}%",
    )
    assert "tokens/s/GPU" in told.throughput.sentence
    assert findings.facts(replace(found, flops=flops), "")[1].label == "MFU"
    assert set(found.to_dict()["throughput"].values()) == {None}
    assert found.throughput.sentence == ""
    nothing = replace(told, iteration=replace(told.iteration, mean_ns=None))
    assert nothing.throughput.tokens_per_s is None


def test_a_step_has_at_least_one_token():
    with pytest.raises(FastcommError, match="tokens_per_step"):
        MetricsOptions(tokens_per_step=0)


def test_a_finding_on_many_ranks_names_a_few_of_them(found):
    ranks = tuple(range(0, 400, 2))
    text = f"Ranks {ranges(ranks)} are stragglers."
    many = replace(found.findings[0], ranks=ranks, text=text)
    metrics = replace(found, findings=(many,))
    (shown,) = findings.findings(Suggestions(metrics=metrics, arguments=["x"]))
    assert pages.plain(shown.title) == (
        "Ranks 0, 2, 4, 6, 8, 10, 12, 14 and 192 more are stragglers."
    )
