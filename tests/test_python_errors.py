"""Wrong arguments of the Python API: the error says what was passed, and what is valid."""

from types import SimpleNamespace

import pytest

import fastcomm as fc
from fastcomm import intervals
from fastcomm.compat import hta, isp
from fastcomm.errors import ConfigError, FastcommError, python_names
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

NAN, INF = float("nan"), float("inf")
RECIPE = fc.Recipe.of(num_nodes=2, gpus_per_node=2, topk=2, iter_num=1, seq_len=20)
WORKLOAD = fc.Workload.of(RECIPE)
SEARCH = {"model": "7B", "world_size": 8, "seq_len": 4096, "global_batch": 1 << 20}
PLAN = {"model": "llama3-8b", "gpus": 64, "cluster": "h100", "global_batch": 256}


@pytest.fixture(scope="module")
def use(tmp_path_factory):
    """One object of each public type."""
    folder = tmp_path_factory.mktemp("run")
    write(Job.of(ranks=4), folder)
    run = fc.open(folder)
    metrics = run.metrics()
    return SimpleNamespace(
        folder=folder,
        run=run,
        metrics=metrics,
        path=run.critical_path(rank=0),
        joined=run.critical_path(),
        comparison=fc.compare(metrics, metrics),
        search=fc.search_strategies(**SEARCH),
    )


PATH = "expected a path, as in "
METRICS = r"expected a run or its metrics, as in compare\(open"
PAIR = r"pass two arrays, starts and stops, as in \(\[0, 20\], \[10, 30\]\)"
WORKERS = "expected a number from 1 to 4096"
SCHEDULES = r'expected a list, as in \["deepep", "fast"\]'
ARGUMENTS = [
    (lambda u: fc.open(), r'open: no path; pass the traces of a run, as in open\("traces/"\)'),
    (lambda u: fc.open(""), f"open: invalid path '': {PATH}"),
    (lambda u: fc.open([]), rf"open: invalid path \[\]: {PATH}"),
    (lambda u: fc.open([u.folder]), PATH + r'open\("traces/"\) or open\("rank0.json"'),
    (lambda u: fc.open(5), f"open: invalid path 5: {PATH}"),
    (lambda u: fc.open(None), f"open: invalid path None: {PATH}"),
    (lambda u: fc.open(b"run"), f"open: invalid path b'run': {PATH}"),
    (lambda u: fc.open(u.folder, workers=0), f"invalid workers 0: {WORKERS}"),
    (lambda u: fc.open(u.folder, workers=-1), f"invalid workers -1: {WORKERS}"),
    (lambda u: fc.open(u.folder, workers=10**9), f"invalid workers 1000000000: {WORKERS}"),
    (lambda u: fc.open(u.folder, workers=2.5), f"invalid workers 2.5: {WORKERS}"),
    (lambda u: fc.open(u.folder, workers=NAN), f"invalid workers nan: {WORKERS}"),
    (lambda u: fc.open(u.folder, workers="4"), f"invalid workers '4': {WORKERS}"),
    (lambda u: fc.open(u.folder, workers=True), f"invalid workers True: {WORKERS}"),
    (lambda u: fc.open(u.folder, workers=None), f"invalid workers None: {WORKERS}"),
    (lambda u: fc.open(u.folder, rank=[0]), "unknown option 'rank'; did you mean 'ranks'"),
    (lambda u: fc.open(u.folder, ranks=[9]), "^rank 9: not in the run; its ranks: 0-3$"),
    (lambda u: fc.open(u.folder, ranks=[]), "ranks: an empty list; the run has ranks 0-3"),
    (lambda u: fc.open(u.folder, ranks=5), "^rank 5: not in the run; its ranks: 0-3$"),
    (lambda u: fc.open(u.folder, ranks="0-3"), "invalid ranks '0-3': expected a list"),
    (lambda u: fc.open(u.folder, ranks=[NAN]), "invalid ranks nan: expected a whole number"),
    (lambda u: fc.open(u.folder, tp=0), "invalid tp 0: expected a number from 1"),
    (lambda u: fc.open(u.folder, tp=3), "tp \\* cp \\* pp = 3 .* does not divide"),
    (lambda u: fc.open(u.folder, tp="2"), "invalid tp '2': expected a whole number"),
    (lambda u: fc.open(u.folder, order="xx"), "order 'xx': unknown dimension 'xx'"),
    (lambda u: fc.open(u.folder, config=""), f"invalid config '': {PATH}config="),
    (lambda u: fc.open(u.folder, config=5), "invalid config 5: expected a text or a path"),
    (lambda u: fc.open(u.folder, config="no.toml"), "no.toml: No such file"),
    (lambda u: fc.open(u.folder, iteration_regex=""), "an empty text would match every"),
    (lambda u: fc.open(u.folder, step_boundary="gpu"), "expected one of auto, device, host"),
    (lambda u: fc.open(u.folder, keep_going="yes"), "invalid keep_going 'yes': expected True"),
    (lambda u: u.run.read(9), "^rank 9: not in the run; its ranks: 0-3$"),
    (lambda u: u.run.read(-1), "^rank -1: not in the run; its ranks: 0-3$"),
    (lambda u: u.run.read("3"), "read: invalid rank '3': expected the number of a rank"),
    (lambda u: u.run.read(NAN), "read: invalid rank nan: expected the number of a rank"),
    (lambda u: u.run.read(True), "read: invalid rank True: expected the number of a rank"),
    (lambda u: u.run.info(all_ranks="yes"), "info: invalid all_ranks 'yes': expected True"),
    (lambda u: u.run.metrics(steps=1.5), "invalid steps 1.5: expected a list"),
    (lambda u: u.run.metrics(steps=[NAN]), "invalid steps nan: expected a whole number"),
    (lambda u: u.run.metrics(steps=[-1]), "invalid steps -1: expected a number from 0"),
    (lambda u: u.run.metrics(link_bandwidth=400), 'no unit; .* as in "400Gbit/s"'),
    (lambda u: u.run.metrics(link_bandwidth=NAN), 'no unit; .* as in "400Gbit/s"'),
    (lambda u: u.run.metrics(link_bandwidth=""), 'invalid bandwidth .* as in "400Gbit/s"'),
    (lambda u: u.run.metrics(bytes=5), "invalid bytes 5: expected one of payload, bus, msg"),
    (lambda u: u.run.metrics(clock_alignment="x"), "expected one of collectives, none"),
    (lambda u: u.run.metrics(gpu="h100"), "^gpu needs flops$"),
    (lambda u: u.run.metrics(with_tables=1), "invalid with_tables 1: expected True or False"),
    (lambda u: u.run.critical_path(rank=9), "^rank 9: not in the run; its ranks: 0-3$"),
    (lambda u: u.run.critical_path(rank="3"), "invalid rank '3': expected a whole number"),
    (lambda u: u.run.critical_path(step=NAN), "invalid step nan: expected a whole number"),
    (lambda u: u.run.critical_path(annotation=5), "invalid annotation 5: expected a text"),
    (lambda u: u.run.critical_path(instance=0), "instance needs annotation"),
    (lambda u: u.run.critical_path(data_load_events=1), " 1: expected a list"),
    (lambda u: u.run.critical_path(data_load_events=["("]), "invalid regular expression '\\('"),
    (lambda u: u.run.report(5), f"report: invalid path 5: {PATH}report"),
    (lambda u: u.run.report(""), f"report: invalid path '': {PATH}report"),
    (lambda u: u.run.report(None), f"report: invalid path None: {PATH}report"),
    (lambda u: u.run.report("x.html", no_path=5), "invalid no_path 5: expected True or False"),
    (lambda u: u.path.top(by="rank"), "top: invalid by 'rank': expected one of event, name"),
    (lambda u: u.path.top(count=-1), r"invalid count -1: expected .*, as in top\(count=5\)"),
    (lambda u: u.path.top(count="3"), "top: invalid count '3': expected a whole number"),
    (lambda u: u.path.top(count=NAN), "top: invalid count nan: expected a whole number"),
    (lambda u: u.path.with_times(5), "with_times: invalid times 5: expected an Arrow table"),
    (lambda u: u.path.save(5), f"save: invalid out_dir 5: {PATH}save"),
    (lambda u: u.path.save(""), f"save: invalid out_dir '': {PATH}save"),
    (lambda u: u.path.what_if(scale=2), "invalid scale 2: expected a list"),
    (lambda u: u.path.what_if(hide=["DP"]), "what_if: unknown option 'hide'; "),
    (
        lambda u: u.path.what_if(scale=["compute"]),
        "invalid edit 'compute': expected WHAT=VALUE",
    ),
    (
        lambda u: u.joined.what_if(scale=["comm:CP=2"]),
        "'comm:CP' matches nothing: there is comm",
    ),
    (lambda u: u.path.what_if(scale=["compute=nan"]), "scale: invalid factor 'nan'"),
    (lambda u: u.path.what_if(set=["compute=10"]), "set: invalid duration '10'"),
    (lambda u: fc.compare(1, 2), f"compare: invalid before 1: {METRICS}"),
    (lambda u: fc.compare(u.run, u.run, kernels=3), "compare: invalid kernels 3: expected"),
    (lambda u: fc.compare({}, {}), f"compare: invalid before {{}}: {METRICS}"),
    (lambda u: fc.compare(u.metrics, u.metrics, bytes="bus"), "compare: bytes: no effect on"),
    (lambda u: fc.compare(u.run, u.metrics, steps=[1]), "compare: steps: no effect on metrics"),
    (lambda u: fc.compare(u.run, u.run, step=[1]), "compare: unknown option 'step'; did you"),
    (lambda u: fc.compare([], []), rf"compare: invalid before \[\]: {METRICS}"),
    (lambda u: fc.compare("a.json", "b.json"), f"invalid before 'a.json': {METRICS}"),
    (lambda u: fc.compare(u.metrics, None), f"compare: invalid after None: {METRICS}"),
    (lambda u: fc.compare(u.path, u.path), f"invalid before <CriticalPath: .*: {METRICS}"),
    (lambda u: fc.compare(u.metrics, u.run.metrics(bytes="bus")), "before counts payload"),
    (lambda u: u.comparison.value(5), 'value: invalid name 5: expected a name such as "iter'),
    (lambda u: u.comparison.value(""), "'' is no metric of either run; expected a name"),
    (lambda u: u.comparison.value("iteration.mean"), "did you mean iteration.mean_ns"),
    (lambda u: u.search.record(10**9), "record: invalid place 1000000000: expected a place"),
    (lambda u: u.search.record(-1), "record: invalid place -1: expected a place from 0"),
    (lambda u: u.search.record("x"), "record: invalid place 'x': expected a place from 0"),
    (lambda u: u.search.record(NAN), "record: invalid place nan: expected a place from 0"),
    (lambda u: fc.search_strategies(**SEARCH, pp_sizes=[]), "^missing value of pp_sizes$"),
    (lambda u: fc.plan(**PLAN, seq_len=0), "invalid seq_len '0'"),
    (lambda u: fc.plan(**PLAN, vocab=0), "invalid vocab '0': expected a"),
    (lambda u: fc.search_strategies(**SEARCH, memory=NAN), "invalid memory 'nan': expected"),
    (lambda u: fc.search_strategies(**SEARCH, cluster="x"), "cluster 'x': .* not one of a100"),
    (lambda u: fc.search_strategies(**SEARCH, algorithms="x"), "unknown algorithm 'x'"),
    (lambda u: fc.search_strategies(), "missing .*model"),
    (lambda u: fc.search_strategies(model=5), "invalid model 5: expected a text or a path"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, "deepep"), f"strategies 'deepep': {SCHEDULES}"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, 5), f"strategies 5: {SCHEDULES}"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, None), f"strategies None: {SCHEDULES}"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, []), "missing strategy: expected one or more"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, ["x"]), "unknown strategy x: expected deepep"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, [5]), "unknown strategy 5: expected deepep"),
    (lambda u: fc.simulate_dispatch(5), "invalid workload 5: expected a workload, as in sim"),
    (lambda u: fc.simulate_dispatch(RECIPE), r"invalid workload Recipe\(.*: expected a workl"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, bw_inter=5), 'no unit; .* as in "400Gbit/s"'),
    (lambda u: fc.simulate_dispatch(WORKLOAD, incast=NAN), "invalid incast nan: expected"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, token_bytes=-1), "invalid token_bytes -1"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, token_bytes=0), "invalid token_bytes 0"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, combine_bytes=0), "invalid combine_bytes 0"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, inter_start=-1), "invalid inter_start -1: "),
    (lambda u: fc.simulate_dispatch(WORKLOAD, intra_start=2.0), r"a unit \(ns, us, ms or s\)"),
    (
        lambda u: fc.open(u.folder, step_boundary="device").critical_path(),
        "critical_path: step_boundary 'device' has no effect",
    ),
    (lambda u: fc.simulate_dispatch(WORKLOAD, cluster="x"), "cluster 'x': no such file"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, links=5), "unknown option 'links'"),
    (lambda u: fc.open_workload(5), f"open_workload: invalid path 5: {PATH}open_workload"),
    (lambda u: fc.open_workload(""), f"open_workload: invalid path '': {PATH}"),
    (lambda u: fc.open_workload([]), rf"open_workload: invalid path \[\]: {PATH}"),
    (lambda u: fc.open_workload("x", {}), "open_workload: invalid options {}: expected"),
    (lambda u: fc.Workload.of(5), "Workload.of: invalid recipe 5: expected a recipe, as in"),
    (lambda u: fc.Recipe.of(num_nodes="x"), "invalid num_nodes 'x': expected a whole number"),
    (lambda u: fc.Recipe.of(num_nodes=0), "invalid num_nodes 0: expected a number from 1"),
    (lambda u: fc.Recipe.of(zipf_alpha=NAN), "invalid zipf_alpha nan: expected a number"),
    (lambda u: fc.Recipe.of(law="gate", zipf_alpha=2), "zipf_alpha has no effect with law"),
    (
        lambda u: fc.Recipe.of(law="uniform", shuffle=True),
        "shuffle has no effect with law unif",
    ),
    (lambda u: u.run.metrics(steps=[]), "missing value of steps"),
    (lambda u: fc.Recipe.of(nodes=1), "recipe: unknown option 'nodes'"),
    (lambda u: fc.open(u.folder, u.folder).stragglers(), "stragglers: several files"),
    (lambda u: fc.evaluate_exchanges(5), f"evaluate_exchanges: invalid path 5: {PATH}"),
    (lambda u: fc.evaluate_exchanges("x", 5), "invalid cluster 5: expected"),
    (lambda u: fc.evaluate_exchanges("x", calibrate=5), "invalid calibrate 5: expected"),
    (lambda u: fc.find_stragglers(5), f"find_stragglers: invalid table 5: {PATH}"),
    (lambda u: fc.find_stragglers(""), f"find_stragglers: invalid table '': {PATH}"),
    (lambda u: fc.find_stragglers("x", threshold=NAN), "invalid threshold nan: expected"),
    (lambda u: fc.find_stragglers("x", steps="x"), "invalid steps 'x': expected a list"),
    (lambda u: fc.replay_trial(5), f"replay_trial: invalid path 5: {PATH}replay_trial"),
    (lambda u: fc.replay_trial(""), f"replay_trial: invalid path '': {PATH}"),
    (lambda u: fc.replay_trial("x", repeat=0), "invalid repeat 0: expected a number from 1"),
    (lambda u: fc.replay_trial("x", hosts=1), "invalid hosts 1: expected a number from 2"),
    (lambda u: fc.replay_trial("x", host_clocks="x"), "invalid host_clocks 'x': expected one"),
    (lambda u: fc.replay_trial("x", tensors=[]), "missing value of tensors"),
    (
        lambda u: fc.compare(u.metrics, u.metrics, kernels=[3]),
        r"invalid kernels \[3\]: exp",
    ),
    (lambda u: u.run.kernels(by="layer", full_names=True), "full_names has no effect with by"),
    (lambda u: u.run.report("x.html", with_tables=False), "with_tables: a page needs the tab"),
    (lambda u: fc.open(u.folder, tp=2).stragglers(), "stragglers: tp: no effect on a table"),
    (lambda u: fc.simulate_dispatch(WORKLOAD, ["fast"], incast=0.1), "incast needs the s"),
    (lambda u: fc.search_strategies(**SEARCH, strict_batch=True), "strict_batch: use fastcomm"),
    (lambda u: isp.search_strategies(**SEARCH, p2p="scatter"), "p2p: no effect with compat"),
    (lambda u: fc.search_strategies(**SEARCH, fix="tp=2"), "unknown option 'fix'"),
    (lambda u: fc.execution_trace_path(5), f"invalid path 5: {PATH}execution_trace_path"),
    (lambda u: fc.execution_trace_path("x", alone="yes"), "invalid alone 'yes': expected True"),
    (lambda u: fc.execution_trace_path("x", rank="0"), "invalid rank '0': expected a whole"),
    (lambda u: fc.execution_trace_path("x", rank=False), "invalid rank False: expected a who"),
    (lambda u: hta.restore_cpgraph(5), f"invalid zip_filename 5: {PATH}restore_cpgraph"),
    (lambda u: hta.get_queue_length_summary(u.run, 0), "invalid ranks 0: expected a list"),
    (lambda u: hta.get_queue_length_summary(5), "invalid run 5: expected a run, as in"),
    (
        lambda u: hta.get_idle_time_breakdown(u.run, consecutive_kernel_delay="x"),
        "invalid consecutive_kernel_delay 'x'",
    ),
    (
        lambda u: hta.critical_path_analysis(u.run, 0, "x", zero_weight_launches="x"),
        "invalid zero_weight_launches 'x': expected True or False",
    ),
    (
        lambda u: hta.overlay_critical_path_analysis(u.run, 1, u.path, u.folder / "drawn"),
        "a path of rank 0 cannot be drawn into the trace of rank 1",
    ),
    (
        lambda u: hta.overlay_critical_path_analysis(u.run, 1, u.joined, u.folder / "drawn"),
        "a path of ranks 0-3 cannot be drawn into the trace of rank 1",
    ),
    (lambda u: fc.replay_trial("x", compat="x"), "invalid compat 'x': expected one of dpro"),
]
OTHERS = [
    (lambda u: fc.open("a" * 5000), r"^a{40}\.\.\.: File name too long$"),
    (lambda u: fc.open("nowhere"), "nowhere: no such file or directory"),
    (lambda u: fc.open(u.folder, iteration_regex="("), "iteration_regex: invalid regular expr"),
    (lambda u: u.run.metrics(steps=[99]), "99"),
    (lambda u: u.run.critical_path(step=99), "no step 99; the trace has"),
    (lambda u: u.run.critical_path(annotation="x?"), "no event's name contains 'x\\?'"),
    (lambda u: u.run.report("."), "is a directory; name a file, as in report.html"),
    (lambda u: u.run.report(min(u.folder.iterdir())), "not written, this command reads"),
    (lambda u: u.run.report(u.folder), "is a directory. Name a file, such as report.html"),
    (lambda u: fc.open_workload("nowhere"), "nowhere: no workload; expected a folder"),
    (lambda u: fc.find_stragglers("nowhere"), "nowhere: no such file or directory"),
    (lambda u: fc.replay_trial("nowhere"), "nowhere: no <host>/<gpu>/trace.json.gz"),
    (lambda u: intervals.union(5), f"intervals: invalid set 5: {PAIR}"),
    (lambda u: intervals.union([[0, 1]]), PAIR),
    (lambda u: intervals.length(5), f"intervals: invalid set 5: {PAIR}"),
    (lambda u: intervals.difference(([0], [1]), None), f"invalid set None: {PAIR}"),
    (lambda u: intervals.intersection(([0, 5], [1]), ([], [])), "arrays of one length"),
    (lambda u: intervals.union(([0.5], [1.5])), "times of type float64; pass int64"),
    (lambda u: intervals.union(([NAN], [1])), "times of type float64; pass int64"),
]


@pytest.mark.parametrize(("call", "message"), ARGUMENTS)
def test_a_wrong_argument_is_an_error_that_says_what_is_valid(use, call, message):
    with pytest.raises(ConfigError, match=message) as error:
        call(use)
    assert "--" not in str(error.value)


@pytest.mark.parametrize(("call", "message"), OTHERS)
def test_what_cannot_be_read_is_an_error_that_says_why(use, call, message):
    with pytest.raises(FastcommError, match=message) as error:
        call(use)
    assert "--" not in str(error.value)


def test_one_item_is_a_list_of_one(use):
    assert fc.open(use.folder, ranks=2).ranks == (2,)
    assert use.path.what_if(scale="compute=0.5").to_dict() == (
        use.path.what_if(scale=["compute=0.5"]).to_dict()
    )


def test_options_without_their_names_are_no_arguments(use):
    with pytest.raises(TypeError, match=r"pass options by name, as in metrics\(link_bandwi"):
        use.run.metrics("400Gbit/s")


def test_errors_name_the_arguments_of_python(use, tmp_path):
    whole = min(use.folder.iterdir()).read_bytes()
    (tmp_path / "rank0.pt.trace.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FastcommError, match=r"Pass allow_truncated to read"):
        fc.open(tmp_path).metrics()
    with pytest.raises(FastcommError, match=r"Pass allow_truncated to read"):
        fc.open(tmp_path).read(0)


def test_options_of_other_tools_are_no_arguments():
    command = "nsys export --type=sqlite; without --include-blobs: --ranks"
    with pytest.raises(FastcommError) as error, python_names():
        raise FastcommError(command)
    assert str(error.value) == "nsys export --type=sqlite; without --include-blobs: ranks"
