"""Test that the JSON of every command is valid, and that results have a short repr."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from builders import made_trials
from builders.commands import invoke, words_of
from builders.exchanges import EXCHANGES
from builders.opened import open_run
from builders.places import RECORDED, SCHEMAS
from jsonschema import Draft202012Validator

import fastcomm
from fastcomm.cli.main import COMMANDS, main
from fastcomm.compat.dpro import trial as dpro_inputs
from fastcomm.compat.dpro.result import TrialStatistics
from fastcomm.compat.dpro.statistics import statistics, step_time
from fastcomm.dispatch import simulation
from fastcomm.dispatch.options import PlaceOptions
from fastcomm.dispatch.placement_gain import place_experts
from fastcomm.dispatch.sweep import simulate_grid
from fastcomm.errors import FastcommError
from fastcomm.info.doctor import examine
from fastcomm.isp import problem, search
from fastcomm.isp.calibration import setting
from fastcomm.isp.options import SearchOptions
from fastcomm.result import SCHEMA_VERSION, Result, TableResult
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

SEARCH = "--world-size 16 --seq-len 8Ki --global-batch 1Mi"
JOB = "--model llama3-8b --gpus 16 --cluster h100 --global-batch 128"
EXPERTS = "--model deepseek-v3 --ep 8 --tokens-per-gpu 16 --schedules deepep"
SHAPE = "--num-nodes 2 --gpus-per-node 2 --seq-len 20 --batch-size 2 --topk 2"


def schema(name):
    return json.loads((SCHEMAS / f"{name}.json").read_text("utf-8"))


def objects(value):
    """Every schema of an object."""
    if isinstance(value, dict):
        if "properties" in value:
            yield value
        for inner in value.values():
            yield from objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A run, the same with a damaged rank, a table of operations, and a workload."""
    folder = tmp_path_factory.mktemp("results")
    for name in ("run", "damaged"):
        write(Job.of(ranks=4, steps=2, layers=1), folder / name)
    write(Job.of(ranks=2, tp=1, pp=1, dp=2, ep=2, steps=1, layers=2), folder / "experts")
    damaged = folder / "damaged" / "rank3.pt.trace.json.gz"
    damaged.write_bytes(damaged.read_bytes()[:999])
    invoke("demo", folder / "table", "--num-ranks", "8", "--format", "table")
    invoke("dispatch", "generate", *SHAPE.split(), "-o", folder / "workload")
    invoke("convert", folder / "run", folder / "uniform.json.gz")
    (folder / "exchanges.csv").write_text(EXCHANGES)
    made_trials.tensorflow1(folder / "trial")
    made = {path.name.partition(".")[0]: path for path in folder.iterdir()}
    return {**made, "hangs": RECORDED / "hangs"}


CALLS = [
    ("metrics", "metrics {run}", 0),
    ("info", "info {run} --all", 0),
    ("info", "info {damaged} --all --keep-going", 3),
    ("compare", "compare {run} {run}", 0),
    ("compare", "compare {run} {damaged} --keep-going", 3),
    ("compare", "compare {run} {run} --no-kernels", 0),
    ("kernels", "kernels {run}", 0),
    ("kernels", "kernels {run} --by operator --step 10", 0),
    ("kernels", "kernels {run} --by pass", 0),
    ("kernels", "kernels {damaged} --by stream --keep-going", 3),
    ("sql", "sql {run} from/**/ranks", 0),
    ("sql", "sql {damaged} select/**/count(rank)from/**/events --keep-going", 3),
    ("critical-path", "critical-path {run}", 0),
    ("critical-path", "critical-path {run} --compat hta", 0),
    ("critical-path", "critical-path {damaged} --keep-going", 3),
    ("what-if", "what-if {run} --scale comm=0.5:1:0.25", 0),
    ("what-if", "what-if {run}", 0),
    ("what-if", "what-if {run} --heal rank:1 --set link=100Gbit/s", 0),
    ("what-if", "what-if {damaged} --keep-going --remove launches", 3),
    ("what-if", "what-if {run} --bottleneck", 0),
    ("dpro-replay", "dpro replay {trial} --bottleneck --scale comm=0.5", 0),
    ("dpro-replay", "dpro replay {trial} --compat dpro --tensors 0", 0),
    ("dpro-stats", "dpro stats {uniform}", 0),
    ("dpro-stats", "dpro stats {trial}", 0),
    ("dpro-stats", "dpro stats {uniform} --compat dpro", 0),
    ("dpro-stats", "dpro stats {uniform} --against {uniform}", 0),
    ("stragglers", "stragglers {table}/table.parquet", 0),
    ("stragglers", "stragglers {table}/table.parquet --threshold 9", 0),
    ("stragglers", "stragglers {table}/table.parquet --heal rank:1", 0),
    ("plan", f"plan {JOB}", 0),
    ("plan", f"plan {JOB} --launch megatron", 0),
    ("plan", f"plan {JOB} --memory 1GiB", 1),
    ("plan-price", f"plan price {JOB} --strategy tp=2", 0),
    ("isp", f"isp --model llama3-8b --cluster h100 --sensitivity {SEARCH}", 0),
    ("isp", f"isp --model mixtral-8x7b --memory 160GiB --sensitivity {SEARCH}", 0),
    ("isp", f"isp --model 7B --compat isp-2025 {SEARCH}", 0),
    ("isp", f"isp --model 7B --calibrate {{run}} {SEARCH}", 0),
    ("isp", f"isp --model 7B --compat isp-2025 --calibrate {{run}} {SEARCH}", 0),
    ("isp", f"isp --model 7B --memory 1GiB {SEARCH}", 1),
    ("isp", f"isp --model 7B {SEARCH.replace('8Ki', '4Ki,8Ki')}", 0),
    ("dispatch-simulate", "dispatch simulate {workload}", 0),
    ("dispatch-simulate", "dispatch compare {workload}", 0),
    ("dispatch-compare", f"dispatch compare {EXPERTS}", 0),
    ("dispatch-run", "dispatch compare --from-run {experts}", 0),
    ("dispatch-place", "dispatch place {workload} --replicas 2", 0),
    ("dispatch-sweep", f"dispatch sweep {SHAPE} --over zipf_alpha=1.1,2", 0),
    ("dispatch-evaluate", "dispatch evaluate {exchanges}", 0),
    ("dispatch-evaluate", "dispatch evaluate {exchanges} --calibrate", 0),
    ("doctor", "doctor", 0),
    ("hang", "hang {hangs}/stuck_tpdp_queue_0", 5),
    ("hang", "hang {hangs}/finished_moe_0", 0),
    ("written", "demo {new}/demo --num-ranks 2", 0),
    ("written", "demo {new}/nsys --num-ranks 1 --format nsys", 0),
    ("written", "demo {new}/table --num-ranks 8 --format table", 0),
    ("written", "report {run} --html {new}/page.html --no-path --no-timeline", 0),
    ("written", "report {damaged} --html {new}/p.html --no-path --no-timeline --keep-going", 3),
    ("written", "ingest {run} -o {new}/store", 0),
    ("written", "ingest {damaged} -o {new}/store --keep-going", 3),
    ("written", "convert {run} {new}/all.json.gz", 0),
    ("written", "convert {damaged} {new}/all.json.gz --keep-going", 3),
    ("written", "convert {run} {new}/run.json.gz --to perfetto", 0),
    ("written", "convert {run} {new}/chakra --to chakra", 0),
]


def test_results_list_ranks_that_could_not_be_read(inputs, tmp_path):
    run = fastcomm.open(inputs["damaged"], keep_going=True)
    path = run.critical_path()
    kernels, report = run.kernels(), run.report(tmp_path / "a.html")
    for result in (run.metrics(), report, kernels, path, path.what_if()):
        assert len(result.skipped) == 1
        assert set(run.warnings) <= set(result.warnings)


@pytest.mark.parametrize(("name", "command", "code"), CALLS)
def test_the_json_of_a_command_is_valid(inputs, tmp_path, name, command, code):
    words = words_of(command, **inputs, new=tmp_path)
    found = json.loads(invoke(*words, "--json", code=code).stdout)
    assert next(iter(found.items())) == ("schema_version", SCHEMA_VERSION)
    assert found.get("failed", []) or code != 3 or name == "compare"
    Draft202012Validator(schema(name)).validate(found)
    if name == "written":
        assert found["paths"]
        assert all(Path(path).exists() for path in found["paths"])
        assert found["ranks"] in (1, 2, 3, 4, 8)


def test_every_command_with_json_has_a_schema():
    commands = {name: main.get_command(None, name) for name in COMMANDS}
    dispatch = commands["dispatch"].commands
    commands |= {f"dispatch-{name}": dispatch[name] for name in dispatch}
    dpro = commands["dpro"].commands
    commands |= {f"dpro-{name}": dpro[name] for name in ("stats", "replay")}
    commands |= {f"plan-{name}": inner for name, inner in commands["plan"].commands.items()}
    known = {
        name
        for name, command in commands.items()
        if any("--json" in option.opts for option in command.params)
    }
    # These print what they wrote; `dispatch compare --from-run` has a document of its own.
    known = known - {"demo", "report", "ingest", "convert"} | {"written", "dispatch-run"}
    # Pages show numbers that no JSON has.
    assert {path.stem for path in SCHEMAS.glob("*.json")} == known | {"pages"}


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.json")), ids=lambda path: path.stem)
def test_schemas_reject_unknown_keys(path):
    found = json.loads(path.read_text("utf-8"))
    Draft202012Validator.check_schema(found)
    for each in objects(found):
        # The rows of a sweep have a key for each of its axes, too.
        assert each["additionalProperties"] is False or path.stem == "dispatch-sweep"
        assert set(each.get("required", ())) <= set(each["properties"])


def statistics_of(run):
    trace = dpro_inputs.converted(open_run(run)).trace
    return TrialStatistics(operations=statistics(trace), time=step_time(trace))


def searched(seq_lens):
    words = {"model": "7B", "world_size": 16, "seq_len": "8Ki", "global_batch": "1Mi"}
    if not seq_lens:
        return fastcomm.search_strategies(**words)
    asked = SearchOptions(**words)
    return search.sweep(problem.problem_of(asked), setting(asked).cluster, seq_lens)


ASKED = {"model": "llama3-8b", "gpus": 16, "cluster": "h100", "global_batch": 64}


SEARCHES = {
    "plan": (fastcomm.plan, ASKED),
    "isp": (
        fastcomm.search_strategies,
        ASKED | {"cluster": "a800", "seq_len": "8Ki", "global_batch": "1Mi"},
    ),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_from_python_is_that_of_the_command(name):
    function, asked = SEARCHES[name]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    found = json.loads(invoke(name, *words, "--json").stdout)
    assert json.loads(json.dumps(function(**asked).to_dict())) == found
    with pytest.raises(FastcommError, match="gpus or world_size"):
        function(**asked, world_size=16)


def test_runs_are_compared_as_the_command_compares_them(inputs, tmp_path):
    """Where one run lacks ranks, those of both are compared; kernels are compared, too."""
    some = tmp_path / "some"
    shutil.copytree(inputs["run"], some)
    (some / "rank3.pt.trace.json.gz").unlink()
    command = json.loads(invoke("compare", inputs["run"], some, "--json").stdout)
    both = fastcomm.compare(fastcomm.open(inputs["run"]), fastcomm.open(some))
    assert json.loads(json.dumps(both.to_dict())) == command
    assert set(both.kernels) == {"name", "operator", "annotation"}


def test_a_run_of_one_table_of_operations_has_stragglers(inputs):
    table = inputs["table"] / "table.parquet"
    of_run = fastcomm.open(table).stragglers(heal="rank:1")
    assert of_run.to_dict() == fastcomm.find_stragglers(table, heal="rank:1").to_dict()
    with pytest.raises(FastcommError, match="For traces use `fastcomm metrics"):
        fastcomm.open(inputs["run"]).stragglers()


def placed(rule):
    workload = fastcomm.Workload.of(RECIPE)
    terms = simulation.terms_of(RECIPE)
    options = PlaceOptions(rule=rule, replicas=1.0)
    return place_experts(workload, ["deepep"], terms, options)


RECIPE = fastcomm.Recipe.of(num_nodes=2, gpus_per_node=2, topk=2, iter_num=1, seq_len=20)
RESULTS = {
    "metrics": lambda run, _: fastcomm.open(run).metrics(),
    "info": lambda run, _: fastcomm.open(run).info(),
    "path": lambda run, _: fastcomm.open(run).critical_path(rank=0),
    "all ranks": lambda run, _: fastcomm.open(run).critical_path(),
    "what-if": lambda run, _: fastcomm.open(run).critical_path().what_if(scale=["comm=0.5"]),
    "dpro replay": lambda run, _: fastcomm.replay_trial(run.parent / "trial"),
    "dpro stats": lambda run, _: statistics_of(run),
    "stragglers": lambda _, table: fastcomm.find_stragglers(table),
    "hang": lambda *_: fastcomm.diagnose_hang(RECORDED / "hangs" / "stuck_tpdp_queue_0"),
    "search": lambda *_: searched(()),
    "search sweep": lambda *_: searched((4096,)),
    "plan": lambda *_: fastcomm.plan(**ASKED),
    "dispatch": lambda *_: fastcomm.simulate_dispatch(fastcomm.Workload.of(RECIPE), ["deepep"]),
    "place": lambda *_: placed("local"),
    "dispatch sweep": lambda *_: simulate_grid(
        RECIPE, {"zipf_alpha": [1.1, 2.0]}, ["deepep"], simulation.terms_of
    ),
    "doctor": lambda *_: examine(),
}


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS)
def test_a_result_is_one_line_a_small_table_and_arrow(inputs, make):
    found = make(inputs["run"], inputs["table"] / "table.parquet")
    name = type(found).__name__
    assert repr(found).startswith(f"<{name}: ")
    assert "\n" not in repr(found)
    assert len(repr(found)) < 300
    assert found._repr_html_().startswith(f"<table><caption>{name}</caption><tr><th>")
    tables = found.to_arrow()
    for table in tables.values() if isinstance(tables, dict) else [tables]:
        assert isinstance(table, pa.Table)
    if isinstance(found, TableResult):
        assert pa.table(found) == tables


def test_a_trace_prints_as_one_line(inputs):
    trace = fastcomm.open(inputs["run"]).read(2)
    assert repr(trace) == f"<Trace: rank 2, {trace.events.num_rows} events, 2 iterations>"


@dataclass(frozen=True, repr=False)
class Named(Result):
    """A result with a name that somebody else chose."""

    name: str

    def contents(self):
        return {"name": self.name}

    def to_arrow(self):
        return pa.table({"name": [self.name]})

    def figures(self):
        return {"name": self.name}


def test_names_have_no_effect_where_a_result_is_shown():
    found = Named("<script>\n\x1b[31m")
    assert repr(found) == r"<Named: name <script>\n\x1b[31m>"
    shown = r"<tr><th>name</th><td>&lt;script&gt;\n\x1b[31m</td></tr>"
    assert found._repr_html_() == f"<table><caption>Named</caption>{shown}</table>"
    assert found.to_dict() == {"schema_version": SCHEMA_VERSION, "name": found.name}
