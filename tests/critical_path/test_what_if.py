"""Test what-ifs: a step replayed with edits, and the language of edits."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from builders import kineto_text as k
from builders.critical_path_traces import documents
from builders.what_if_steps import EVENTS, PAIR, US, found_in, invoke, two_ranks
from hypothesis import given
from hypothesis import strategies as st

import fastcomm
from fastcomm.compat import hta
from fastcomm.critical_path.tables import show_what_if
from fastcomm.critical_path.what_if import Replay
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.graph.edits import parse_edits, validation
from fastcomm.options import EditOptions, Window
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write


@pytest.fixture
def step(tmp_path):
    return found_in(k.write(tmp_path / "rank0.json", EVENTS))


def edits(**options):
    return parse_edits(EditOptions(**options)).edits


def test_without_edits_the_first_line_names_what_saves_most(step, capsys):
    answer = step.what_if()
    show_what_if(answer)
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .endswith("103.0 us; overlap TP would save most, 28.0 us (27.2 %)")
    )


def test_each_rank_has_the_step_time_until_its_last_event(tmp_path):
    path = two_ranks(tmp_path, (30, 50), 30, (45, 20))
    answer = path.what_if(scale=["compute=0.5"])
    assert answer.by_rank().to_pylist() == [
        {"rank": 0, "before_ns": 135 * US, "after_ns": 87_500},
        {"rank": 1, "before_ns": 110 * US, "after_ns": 75 * US},
    ]
    assert answer.to_dict()["by_rank"] == answer.by_rank().to_pylist()
    same = path.what_if().by_rank()
    assert same["before_ns"] == same["after_ns"]


def test_bottlenecks_are_the_step_without_each_operation_of_the_path(tmp_path):
    path = two_ranks(tmp_path, (30, 50), 30, (45, 20))
    answer = path.what_if(bottleneck=True)
    saved = {one.edit.target: one.saved_ns for one in answer.bottlenecks}
    # The gemm of rank 0 then arrives last, and the relu of rank 1 ends last.
    assert saved['rank:1+name:"gemm"'] == 20 * US
    assert saved['rank:0+name:"relu"'] == 25 * US
    assert not {'rank:0+name:"gemm"', 'rank:1+name:"relu"'} & saved.keys()
    assert [*saved.values()] == sorted(saved.values(), reverse=True)
    for one in answer.bottlenecks:
        again = path.what_if(scale=[one.edit.text.removeprefix("scale ")])
        assert (again.after_ns, again.before_ns - again.after_ns) == (
            one.after_ns,
            one.saved_ns,
        )
    assert path.what_if().bottlenecks is None


@given(documents(), st.lists(st.sampled_from([0, 0.5, 0.9]), min_size=2, max_size=2))
def test_a_replay_is_exact_and_shorter_work_never_makes_it_longer(folder, document, factors):
    path = folder / "rank0.json"
    path.write_text(json.dumps(document))
    try:
        found = found_in(path)
    except FastcommError:
        return
    replay = Replay(found)
    answer = replay.step_after([])
    assert answer.replay_error_ns == 0
    assert answer.before_ns == answer.after_ns == found.wall_ns
    known = []
    for text in (f"name:/aten|gemm|cuda/={factors[0]}", f"name:/e/={factors[1]}"):
        try:
            replay.edited(edits(scale=[text]))
        except ConfigError:
            continue
        known.append(text)
    spans = [replay.span(edits(scale=known[:count])) for count in range(len(known) + 1)]
    assert spans == sorted(spans, reverse=True)
    after = found.predict(parse_edits(EditOptions(scale=known))).after
    assert sum(after.summary_ns().values()) == spans[-1]


@pytest.mark.parametrize(
    ("option", "text", "after"),
    [
        ("scale", "comm=0.5", 89),
        ("scale", "Comm:tp=0", 75),
        ("scale", "comm:tensor=0.5", 89),
        ("scale", "op:AllReduce=2", 131),
        ("scale", "op:all_reduce=2", 131),
        ("scale", "OP:allreduce+stream:7=0.5", 89),
        ("scale", "kernel:gemm=0.5", 83),
        ("scale", "kernel:/GEM/=0.5", 83),
        ("scale", 'kernel:"gemm"=0.5', 83),
        ("scale", "compute=0.5", 74),
        ("scale", "host=0", 101),
        ("scale", "thread:1=0", 101),
        ("set", "name:gemm=100us", 163),
        ("set", "name:gemm=+60us", 163),
        ("set", "name:gemm=-20us", 83),
        ("set", "name:gemm=-90us", 63),
        ("remove", "launches", 95),
        ("remove", "gaps", 99),
        ("remove", "host_gaps", 103),
        # The gap before the kernel and the call that launches it go with it.
        ("remove", "kernel:relu", 83),
        ("remove", "comm:TP", 73),
        ("overlap", "TP", 75),
        ("overlap", "comm:TP", 75),
    ],
)
def test_an_edit_gives_a_new_step_time(step, option, text, after):
    answer = step.what_if(**{option: [text]})
    assert (answer.before_ns, answer.after_ns) == (103 * US, after * US)
    assert sum(answer.after.summary_ns().values()) == after * US
    assert answer.before.summary_ns()["gpu_compute_bound"] == 58 * US
    assert answer.interval.bounds_ns is None  # one rank is not what was validated


def test_edits_compose_in_order(step):
    replay = Replay(step)
    halves = ["comm=0.5", "comm=0.5"]
    assert replay.span(edits(scale=halves)) == replay.span(edits(scale=["comm=0.25"]))
    texts = [str(edit) for edit in edits(scale=["comm=2"], set=["comm=9us"], remove=["gaps"])]
    assert texts == ["set comm=9us", "scale comm=2", "remove gaps"]
    assert (
        step.graph.weight
        == step.graph.time[step.graph.target] - step.graph.time[step.graph.source]
    ).all()


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({}, 135),  # rank 1 arrives at 60; 30 of transfer, and rank 0 has a relu of 45
        ({"scale": ["comm:TP=0.5"]}, 120),
        ({"scale": ["link:0-1=0.5"]}, 120),
        ({"scale": ["comm:TP+rank:0=0.5"]}, 120),
        ({"remove": ["wait:TP"]}, 115),  # rank 0: 40, 30 and 45; rank 1: 60, 30 and 20
        ({"remove": ["op:allreduce"]}, 85),  # rank 0: 40 and 45; rank 1: 60 and 20
        ({"overlap": ["TP"]}, 105),  # as removed, but rank 0 waits until 60
        ({"heal": ["rank:1"]}, 115),  # both: 40, 30 and 45
        ({"heal": ["rank:1"], "overlap": ["TP"]}, 85),
        ({"set": ["comm:TP=10us"]}, 115),
    ],
)
def test_an_edit_of_two_ranks_is_as_computed_by_hand(tmp_path, options, after):
    path = two_ranks(tmp_path, (30, 50), 30, (45, 20))
    answer = path.what_if(**options)
    assert (answer.before_ns, answer.after_ns) == (135 * US, after * US)
    assert answer.to_dict()["ranks"] == [0, 1]


def test_a_healed_rank_returns_from_synchronization_as_its_peers_do(tmp_path):
    """Work ends at 40 us; rank 1 learns of it 31 us later, launches, and all meet."""
    group = {"pg_name": "0", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0, 1]}
    for rank, returned in enumerate((42, 71)):
        begin = returned + 6
        events = [
            k.launch(2, 1),
            k.kernel("gemm", 10, 30, device=0, correlation=1),
            k.event("cudaDeviceSynchronize", "cuda_runtime", 4, returned - 4, pid=100, tid=1),
            k.launch(returned + 2, 2),
            k.all_reduce(begin, 97 - begin, 7, device=0, correlation=2, **PAIR),
        ]
        k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=2, groups=[group])
    answer = fastcomm.open(tmp_path).critical_path(annotation="").what_if(heal=["rank:1"])
    assert (answer.before_ns, answer.after_ns) == (95 * US, (95 - 29) * US)


def test_communication_is_hidden_as_far_as_there_is_compute(tmp_path):
    path = two_ranks(tmp_path, (10, 10), 50, (10, 20))
    # Rank 0 hides 20 of 50 us, rank 1 30; each goes on when its own rest is over.
    assert path.what_if(overlap=["TP"]).after_ns == (20 + 20 + 20) * US
    # Rank 0 without compute hides nothing: 20 until rank 1 arrives, and 50.
    assert path.what_if(overlap=["TP"], scale=["compute+rank:0=0"]).after_ns == 70 * US


def test_transfers_reach_a_bandwidth_and_waits_stay(tmp_path):
    # 4000 bytes on two ranks are 4000 bytes on the bus: with one size, all is bandwidth but
    # the latency, which is the shortest transfer, here the only one.
    path = two_ranks(tmp_path, (30, 50), 30, (45, 20))
    assert path.what_if(set=["link:TP=1GB/s"]).after_ns == 135 * US
    with pytest.raises(ConfigError, match="no collective or message has both"):
        path.what_if(heal=["link:0-5"])
    with pytest.raises(ConfigError, match="no other group has transfers of the same operation"):
        path.what_if(heal=["link:0-1"])


@pytest.mark.parametrize("options", [{"heal": ["rank:0"]}, {"set": ["link:TP=1GB/s"]},
                                     {"remove": ["wait:TP"]}])  # fmt: skip
def test_edits_that_compare_ranks_need_several(step, options):
    with pytest.raises(ConfigError, match="needs the traces of several ranks"):
        step.what_if(**options)


def test_an_interval_adds_the_errors_of_the_replay_and_of_its_edits(tmp_path):
    path = two_ranks(tmp_path, (30, 50), 30, (45, 20))
    table = validation()
    found = path.what_if(scale=["comm:TP=0.5"], heal=["rank:1"]).to_dict()
    share = table["scale comm"] + table["heal rank"]
    assert found["interval"] == {
        "low_ns": pytest.approx(found["after_ns"] * (1 - share)),
        "high_ns": pytest.approx(found["after_ns"] * (1 + share)),
        "replay_error_ns": 0,
        "edit_error": pytest.approx(share),
        "edit_error_of": "largest validated error of heal rank, scale comm",
    }
    unknown = path.what_if(remove=["op:AllReduce"]).to_dict()["interval"]
    assert (unknown["low_ns"], unknown["edit_error"]) == (None, None)
    assert unknown["edit_error_of"] == "no validated prediction of remove op"


def test_without_edits_candidates_are_tried(tmp_path):
    path = two_ranks(tmp_path, (30, 50), 30, (45, 20))
    found = {one.edit.text: one.saved_ns // US for one in path.what_if().candidates}
    assert found == {
        "overlap TP": 30,
        "remove wait:TP": 20,
        "heal rank:1": 20,
        'scale kernel:"gemm"=0.8': 10,
        'scale kernel:"relu"=0.8': 9,
        "scale comm:TP=0.5": 15,
        "remove launches": 10,
    }
    assert path.what_if(scale=["comm=1"]).candidates is None


def test_the_slow_rank_is_among_the_candidates_of_a_large_run(tmp_path):
    job = Job.of(64, straggler=37, steps=1, layers=1, micro_batches=4)
    write(job, tmp_path)
    candidates = fastcomm.open(tmp_path).critical_path().what_if().candidates
    healed = [one.edit.text for one in candidates if one.edit.text.startswith("heal rank")]
    assert healed[0] == "heal rank:37"


PIPELINE = Job.of(8, tp=1, pp=4, dp=2, steps=2, layers=2, straggler=5, fault="imbalanced_stage")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """Paths of a job whose stage 2 has more work than the others, and of the even job."""
    folder = tmp_path_factory.mktemp("pipelines")
    for name, job in (("uneven", PIPELINE), ("even", replace(PIPELINE, straggler=None))):
        write(job, folder / name)
    return {name: fastcomm.open(folder / name) for name in ("uneven", "even")}


def test_a_healed_stage_takes_the_step_of_the_even_job(pipelines):
    path = pipelines["uneven"].critical_path()
    even = pipelines["even"].critical_path().what_if(heal=["stage:0"])
    healed = path.what_if(heal=["stage:2"])
    assert healed.before_ns > 1.02 * even.before_ns
    assert healed.after_ns == pytest.approx(even.before_ns, rel=0.003)
    for other in ("stage:0", "stage:1", "stage:3"):
        after = path.what_if(heal=[other]).after_ns
        assert after == pytest.approx(healed.before_ns, rel=0.005)
    assert healed.to_dict()["interval"]["edit_error_of"] == (
        "no validated prediction of heal stage"
    )
    slower = path.what_if(scale=["stage:2+compute=2"]).after_ns
    assert slower > 1.5 * healed.before_ns


def test_the_finding_on_a_stage_has_its_what_if(pipelines):
    (finding,) = (
        one for one in pipelines["uneven"].metrics().findings if one.kind == "imbalanced_stage"
    )
    assert finding.fix.edit.heal == ("stage:2",)


def test_a_stage_that_no_ranks_have_is_refused(pipelines):
    path = pipelines["uneven"].critical_path()
    with pytest.raises(ConfigError, match=r"matches nothing: there is stage:0-3"):
        path.what_if(heal=["stage:7"])
    with pytest.raises(ConfigError, match="there is no other stage to compare"):
        path.what_if(heal=["stage:0-3"])
    with pytest.raises(ConfigError, match="expected rank:5, stage:2 or link:3-7"):
        path.what_if(heal=["stage:2+rank:5"])


def test_stages_are_unknown_without_messages_or_without_all_ranks(tmp_path, pipelines):
    path = two_ranks(tmp_path, (30, 50), 30, (45, 20))
    with pytest.raises(ConfigError, match="the stages of ranks are unknown"):
        path.what_if(heal=["stage:0"])
    some = replace(pipelines["uneven"].critical_path())
    fewer = replace(some, join=replace(some.across, expected_ranks=9))
    with pytest.raises(ConfigError, match="and the traces of all ranks"):
        fewer.what_if(heal=["stage:2"])


def test_a_stage_with_other_work_is_not_healed(tmp_path):
    write(Job.of(2, tp=1, pp=2, dp=1, steps=2, layers=1, straggler=None), tmp_path)
    assert fastcomm.open(tmp_path).critical_path().what_if(heal=["stage:1"]).after_ns > 0
    (last,) = tmp_path.glob("rank1.*")
    document = json.loads(gzip.decompress(last.read_bytes()))
    for event in document["traceEvents"]:
        if event.get("cat") == "kernel" and "nccl" not in event["name"]:
            event["name"] = f"own_{event['name']}"
    last.write_bytes(gzip.compress(json.dumps(document).encode()))
    path = fastcomm.open(tmp_path).critical_path()
    with pytest.raises(ConfigError, match=r"other stages have other work: 99\.8 % of"):
        path.what_if(heal=["stage:1"])


def test_candidates_select_kernels_of_long_names_by_words_of_their_own(tmp_path):
    start = "void at::native::vectorized_elementwise_kernel<4, "
    names = [
        f"{start}at::native::AddFunctor<float>, std::array<char*, 3>>",
        f"{start}at::native::MulFunctor<float>, std::array<char*, 3>>",
        f"{start}at::native::AddFunctor<double>, std::array<char*, 3>>",
        f"{start}at::native::AddFunctor<double>, std::array<char*, 2>>",
    ]
    events = [
        *(k.launch(10 * n, n + 1) for n in range(4)),
        *(k.kernel(names[n], 50 * n + 5, 48, device=0, correlation=n + 1) for n in range(4)),
    ]
    path = found_in(k.write(tmp_path / "rank0.json", events))
    tried = {one.edit.text: one.after_ns for one in path.what_if().candidates}
    kernels = [text for text in tried if "kernel:" in text]
    # Nothing but numbers differs in the last name, whose words others have too.
    assert sorted(kernels) == [
        f'scale kernel:"{names[3]}"=0.8',
        f'scale kernel:"{names[2]}"=0.8',
        "scale kernel:/AddFunctor.*float/=0.8",
        "scale kernel:/MulFunctor/=0.8",
    ]
    by_words = tried["scale kernel:/AddFunctor.*float/=0.8"]
    by_name = path.what_if(scale=[f'kernel:"{names[0]}"=0.8'])
    assert by_words == by_name.after_ns < by_name.before_ns


def test_short_adjacent_kernels_are_fused(tmp_path):
    events = [
        *(k.launch(10 * n, n + 1) for n in range(3)),
        *(k.kernel(f"k{n}", 10 * n + 5, 2, device=0, correlation=n + 1) for n in range(3)),
    ]
    found = found_in(k.write(tmp_path / "rank0.json", events))
    answer = found.what_if(fuse_below="3us")
    # What is left is the host: the gaps between its calls.
    assert answer.before_ns == 27 * US
    assert answer.after_ns == 19 * US
    times = Replay(found).times(Replay(found).edited(answer.edits))[0]
    assert times.max() == 19 * US
    assert (np.diff(times[~found.graph.is_end]) >= -27 * US).all()


def test_a_sweep_has_one_row_per_value(step):
    (found,) = step.what_if(scale=["comm=0:1:0.5"]).sweeps
    assert found.span_ns == (75 * US, 89 * US, 103 * US)
    assert found.to_arrow().to_pylist()[1] == {
        "edit": "scale comm",
        "value": 0.5,
        "span_ns": 89 * US,
    }
    (found,) = step.what_if(set=["kernel:gemm=20:40:20us"]).sweeps
    assert (found.labels, found.span_ns) == (("20us", "40us"), (83 * US, 103 * US))


def test_only_the_corrected_rules_can_be_replayed(tmp_path):
    path = k.write(tmp_path / "rank0.json", EVENTS)
    trace = reader.read(path, TraceOptions(whole=True))
    with pytest.raises(FastcommError, match="of the corrected rules, not of hta"):
        Replay(hta.find_path(trace, Window(annotation="")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", r"there is no 'nothing' here; there is comm:TP, .*compute, host, kernel:"),
        ("comm:XX", "'comm:XX' matches nothing: there is comm:TP"),
        ("comm:", "invalid target 'comm:': expected conditions such as comm"),
        ("op:Foo", r"'op:Foo' matches nothing: there is op:AllReduce"),
        ("name:/(/", "invalid regular expression"),
        ("kernel:gem", "there is .*; did you mean kernel:gemm"),
        ("stream:x", r"there is stream:7, 20|there is stream:7"),
        ("rank:3", "there is rank:0"),
        ("comm+host", "no work meets all of its conditions"),
        ("+", "invalid target"),
        ("link:0-1", "needs the traces of several ranks"),
    ],
)
def test_an_invalid_target_is_an_error_that_lists_what_there_is(step, text, said):
    with pytest.raises(ConfigError, match=said):
        step.what_if(scale=[f"{text}=1"])


def test_edits_can_be_read_from_a_file(tmp_path, step):
    path = tmp_path / "edits.toml"
    path.write_text(
        'scale = ["comm=0.5"]\nset = ["name:relu=9us"]\nremove = ["gaps"]\n'
        'overlap = ["TP"]\nfuse_below = "1us"\n'
    )
    found = edits(edits=str(path), scale=["compute=0.5"])
    assert [str(edit) for edit in found] == [
        "set name:relu=9us",
        "scale comm=0.5",
        "overlap TP",
        "remove gaps",
        "fuse kernels below 1.00 us",
        "scale compute=0.5",
    ]
    assert Replay(step).span(found) < 103 * US


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "edits.toml"),
        ("[other]", r"edits.toml: unknown option 'other'; .*Options: scale, set, heal"),
        ("scale = 1", "invalid scale 1: expected a list"),
        ("scale = ['comm=x']", "edits.toml: scale: invalid factor 'x'"),
        ("set = ['comm=3']", "duration '3'"),
        ("set = ['comm=1.2.3us']", "duration '1.2.3us'"),
        ("set = ['link:TP=3']", "invalid bandwidth '3'"),
        ("edits = 'other.toml'", "a file of edits names no other file"),
        ("fuse_below = '5'", "fuse_below: invalid|invalid fuse_below '5'"),
    ],
)
def test_a_damaged_file_of_edits_is_an_error(tmp_path, text, said):
    path = tmp_path / "edits.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        edits(edits=str(path))


@pytest.mark.parametrize("value", ["1e18", "1e-7", "-1", "nan", "inf"])
def test_a_factor_that_overflows_times_is_refused(value):
    with pytest.raises(ConfigError, match="expected a number from 1e-06 to 1000000"):
        edits(scale=[f"comm={value}"])


def test_factors_that_multiply_until_no_time_fits_are_refused(tmp_path):
    path = k.write(tmp_path / "rank0.json", EVENTS)
    done = invoke(path, *["--scale", "compute=1e6"] * 4, code=2)
    assert "the events become longer than 1000000000 s" in done.output
