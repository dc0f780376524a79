"""Test paths whose times are those of a table, such as a simulator's results."""

import itertools
import json

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from builders import kineto_text as k
from builders.critical_path_traces import documents
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import fastcomm
from fastcomm.cli.main import main
from fastcomm.compat import hta
from fastcomm.critical_path import saved
from fastcomm.critical_path.analysis import with_times_of
from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.search import analyze
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.graph.graph import EDGE_KIND
from fastcomm.options import Window
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

US = 1000
EVENTS = [
    k.event("aten::mm", "cpu_op", 0, 9, pid=100, tid=1),
    k.launch(2, 1),
    k.launch(4, 2),
    k.kernel("gemm", 10, 40, device=0, correlation=1),
    k.kernel("relu", 52, 28, device=0, correlation=2),
    k.event("cudaDeviceSynchronize", "cuda_runtime", 10, 83, pid=100, tid=1),
]
GEMM, RELU, SYNC = 3, 4, 5


def trace_of(path):
    return reader.read(path, TraceOptions(whole=True))


def found_in(path):
    return analyze(trace_of(path), Window(annotation=""))


@pytest.fixture
def path(tmp_path):
    return found_in(k.write(tmp_path / "rank0.json", EVENTS))


def changed(path, change):
    """The table of times after `change` of the dict of (start, duration) in ns by event."""
    table = path.times()
    keys = list(zip(table["rank"].to_pylist(), table["event"].to_pylist(), strict=True))
    starts, durations = (table[name].to_pylist() for name in ("start_ns", "duration_ns"))
    times = dict(zip(keys, map(list, zip(starts, durations, strict=True)), strict=True))
    change(times)
    rank, event = zip(*times, strict=True) if times else ((), ())
    start, duration = zip(*times.values(), strict=True) if times else ((), ())
    columns = {"rank": rank, "event": event, "start_ns": start, "duration_ns": duration}
    return pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})


def nodes(path):
    """Key and time of each node: rank, event, is_end, and whether a collective is complete."""
    graph = path.graph
    joins = {
        target
        for target, kind in zip(graph.target.tolist(), graph.kind.tolist(), strict=True)
        if kind == EDGE_KIND["join"]
    }
    ids = path.events.ids(graph.event).tolist()
    ranks = [path.ranks[place] for place in path.across.rank_of.tolist()]
    ends = graph.is_end.tolist()
    return [(ranks[n], ids[n], ends[n], n in joins) for n in range(len(ids))]


def edges(path):
    """Nodes of each edge, as keys."""
    keys, graph = nodes(path), path.graph
    return [
        (keys[source], keys[target])
        for source, target in zip(graph.source.tolist(), graph.target.tolist(), strict=True)
    ]


def check_path(before, after, table):
    """The definition: backward from the last node, each follows the last satisfied constraint.

    Constraints are those of the graph before that hold; a node without one follows the node
    before it.
    """
    time = {}
    for row in table.to_pylist():
        key = row["rank"], row["event"]
        time[*key, False, False] = row["start_ns"]
        time[*key, True, False] = row["start_ns"] + row["duration_ns"]
    constraints = edges(before)
    for key in nodes(before):
        if key[3]:
            time[key] = max(time[source] for source, target in constraints if target == key)
    keys = nodes(after)
    assert [time[key] for key in keys] == sorted(time.values())
    assert {key: after.graph.time[n] for n, key in enumerate(keys)} == time
    latest = {}
    for source, target in constraints:
        if time[source] <= time[target]:
            latest[target] = max(latest.get(target, time[source]), time[source])
    found = after.path
    on_path = [keys[n] for n in found.nodes.tolist()]
    assert time[on_path[-1]] == max(time.values())
    assert time[on_path[0]] == min(time.values())
    for source, target in itertools.pairwise(on_path):
        before_it = keys[keys.index(target) - 1]
        assert time[source] == latest.get(target, time[before_it])
    assert after.length_ns == after.wall_ns == max(time.values()) - min(time.values())


def test_the_measured_times_give_the_measured_path(path):
    again = path.with_times(path.times())
    assert again.event_ids == path.event_ids
    assert again.summary_ns() == path.summary_ns()
    assert again.times() == path.times()
    assert again.about.window == path.about.window


def test_a_longer_kernel_moves_the_path(path):
    def slower(times):
        times[0, GEMM][1] += 20 * US
        times[0, RELU][0] += 20 * US
        times[0, SYNC][1] += 20 * US

    table = changed(path, slower)
    after = path.with_times(table)
    assert after.wall_ns == path.wall_ns + 20 * US
    sums, old = after.summary_ns(), path.summary_ns()
    assert sums["gpu_compute_bound"] == old["gpu_compute_bound"] + 20 * US
    check_path(path, after, table)
    rows = after.events.describe(after.graph.event).to_pylist()
    (gemm,) = {(row["start"], row["stop"]) for row in rows if row["id"] == GEMM}
    assert gemm[1] - gemm[0] == 60 * US


def test_constraints_that_the_times_contradict_are_left_out_and_counted(path):
    def early(times):
        times[0, RELU][0] = times[0, GEMM][0]

    table = changed(path, early)
    after = path.with_times(table)
    relu, gemm_end = (0, RELU, False, False), (0, GEMM, True, False)
    late = [pair for pair in edges(path) if pair not in edges(after)]
    # The stream is the only constraint of the pair: no wait is guessed for work on it.
    assert late == [(gemm_end, relu)]
    assert "1 constraint ignored, which the times of the table contradict" in after.notes
    assert "times are those of a table of 6 events" in after.notes
    check_path(path, after, table)


def test_a_path_with_given_times_is_saved_and_edited(path, tmp_path):
    after = path.with_times(path.times())
    loaded = saved.load(after.save(str(tmp_path / "simulated")))
    assert CriticalPath.of(loaded).times() == after.times()
    assert after.edit().set_duration(GEMM, 0).recompute().wall_ns == path.wall_ns - 40 * US


@given(documents(), st.data())
def test_the_path_follows_the_last_satisfied_constraint(folder, document, data):
    file = folder / "rank0.json"
    file.write_text(json.dumps(document))
    try:
        found = found_in(file)
    except FastcommError:
        return
    again = found.with_times(found.times())
    assert again.path.nodes.tolist() == found.path.nodes.tolist()
    assert again.graph.kind.tolist() == found.graph.kind.tolist()

    def anything(times):
        for key in times:
            times[key] = [data.draw(st.integers(0, 50)), data.draw(st.integers(0, 20))]

    table = changed(found, anything)
    if len(table):
        check_path(found, found.with_times(table), table)


def test_several_ranks_wait_for_the_last_arrival_of_the_table(tmp_path):
    write(Job.of(2, steps=2, layers=1, micro_batches=1), tmp_path)
    joined = fastcomm.open(tmp_path).critical_path()
    assert joined.is_joined
    assert joined.with_times(joined.times()).event_ids == joined.event_ids

    def later(times):
        for (rank, _), own in times.items():
            own[0] += 10**6 * rank

    table = changed(joined, later)
    after = joined.with_times(table)
    check_path(joined, after, table)
    assert after.ranks == joined.ranks
    with pytest.raises(FastcommError, match="times: no column rank"):
        joined.with_times(table.drop_columns(["rank"]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda times: times.pop((0, GEMM)), r"1 event \(3 of rank 0\) not in the table"),
        (lambda times: times.update({(0, 99): [0, 0]}), r"\(99 of rank 0\) not in the graph"),
        (
            lambda times: [times.pop(key) for key in list(times)],
            r"6 events \(0 of rank 0, 1 of rank 0, .*, \.\.\.\) not in the table",
        ),
        (lambda times: times.update({(0, GEMM): [0, -1]}), "duration -1 is no time in ns"),
        (lambda times: times.update({(0, GEMM): [1 << 62, 0]}), "is no time in ns"),
        (lambda times: times.update({(0, GEMM): [None, 0]}), "1 nulls, none allowed"),
    ],
)
def test_a_table_that_does_not_fit_the_graph_is_an_error(path, change, said):
    with pytest.raises(FastcommError, match=said):
        path.with_times(changed(path, change))


def test_an_event_twice_in_the_table_is_an_error(path):
    table = path.times()
    with pytest.raises(ConfigError, match="more than once"):
        path.with_times(pa.concat_tables([table, table.slice(0, 1)]))


def test_graphs_by_the_rules_of_hta_are_refused(tmp_path):
    file = k.write(tmp_path / "rank0.json", EVENTS)
    found = hta.find_path(trace_of(file), Window(annotation=""))
    with pytest.raises(FastcommError, match="find the path without compat"):
        found.with_times(found.times())


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_the_command_reads_the_times_of_a_file(tmp_path, path, ending):
    def slower(times):
        times[0, SYNC][1] += 20 * US

    table, file = changed(path, slower), tmp_path / f"simulated.{ending}"
    writer = {"csv": pa_csv.write_csv, "parquet": pq.write_table}[ending]
    writer(table, file)
    command = ["critical-path", str(tmp_path / "rank0.json"), "--annotation", ""]
    command += ["--json", "--times", str(file)]
    said = CliRunner().invoke(main, command)
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["path"]["wall_ns"] == path.wall_ns + 20 * US


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("event,start_ns,duration_ns\n", "simulated.csv: times: 6 events"),
        ("event,start_ns\n1,2\n", "simulated.csv: times: no column duration_ns"),
        ("name\nx\n", "simulated.csv: times: no column event, start_ns, duration_ns"),
        ("event,start_ns,duration_ns\n1,early,3\n", "simulated.csv: times: "),
        ("event,start_ns,duration_ns\n1,2\n", "simulated.csv: not a readable Parquet or CSV"),
    ],
)
def test_a_damaged_file_of_times_is_named(tmp_path, path, text, said):
    file = tmp_path / "simulated.csv"
    file.write_text(text)
    command = ["critical-path", str(tmp_path / "rank0.json"), "--annotation", ""]
    result = CliRunner().invoke(main, [*command, "--times", str(file)])
    assert result.exit_code == 1
    assert said in result.stderr


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(folder, content):
    found = found_in(k.write(folder / "rank0.json", EVENTS))
    file = folder / "simulated.csv"
    file.write_bytes(content)
    with pytest.raises(FastcommError, match=r"simulated\.csv"):
        with_times_of(found, file)
