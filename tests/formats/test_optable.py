"""Test tables of operations: the published one, and others with a mapping."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.opened import open_run, read_here
from builders.operation_tables import MAPPING, ROWS, table, write
from builders.shared_data import path_of, shared

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.formats import operation_table, sources
from fastcomm.formats.config import Config
from fastcomm.formats.tables import STRAGGLER, preset_of, table_mapping
from fastcomm.metrics.computation import compute_metrics
from fastcomm.synthetic.job import TableJob, write_table
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run_traces import RunTraces
from fastcomm.trace.schema import KINDS, OPS

FOLDER = path_of("replay/straggler")


def found(path, mapping=MAPPING, **changes):
    said = {key: value for key, value in {**mapping, **changes}.items() if value is not None}
    config = Config(table=table_mapping(said, "c.toml"))
    return operation_table.find([path], config)


def metrics(every):
    traces = RunTraces(sources=every.sources, world_size=every.world_size)
    return compute_metrics(read_here(traces))


@pytest.mark.parametrize(
    ("value", "rows", "message"),
    [
        (float("nan"), [1], r"column duration: found nan in row 1 of a rank's rows"),
        (-2.0, [0, 1], r"column duration: found -2.0 in row 0, 1 of a rank's rows"),
        (float("inf"), [1], r"inf is not a valid time in this unit \(1000 ns\), in row 1 of"),
        (0.0, [0, 1, 2], "all durations of a rank \\(its rows 0 to 2\\) are 0"),
    ],
)
def test_invalid_durations_are_refused_with_their_rows(tmp_path, value, rows, message):
    durations = [1.0, 1.0, 1.0]
    for row in rows:
        durations[row] = value
    said = {"gpu": [0] * 3, "what": ["gemm"] * 3, "begin": [1.0, 2, 3], "duration": durations}
    pq.write_table(pa.table(said), tmp_path / "t.parquet")
    mapping = {"rank": "gpu", "kind": "what", "start": "begin", "duration": "duration"}
    mapping |= {"unit": "us", "kinds": {"gemm": "compute"}}
    with pytest.raises(TraceFileError, match=message):
        found(tmp_path / "t.parquet", mapping).sources[0].read()


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.csv.gz"])
def test_a_table_reads_alike_in_every_form(tmp_path, name):
    every = found(write(tmp_path / name, table()))
    assert [source.rank for source in every.sources] == [0, 1, 2]
    trace = every.sources[0].read()
    events = trace.events.to_pylist()
    assert [(row["name"], row["start"], row["stop"]) for row in events] == [
        ("gemm_a", 0, 40_000),
        ("reduce", 30_000, 60_000),
        ("h2d", 60_000, 70_000),
        ("gather", 100_000, 110_000),
    ]
    assert [KINDS[row["kind"]] for row in events] == ["kernel", "kernel", "memcpy", "kernel"]
    rows = trace.comm.to_pylist()
    assert [(OPS[row["op"]], row["stream"], row["msg_bytes"]) for row in rows] == [
        ("AllReduce", 2, 3000),
        ("AllGather", 2, 10),
    ]
    assert [(row["payload_bytes"], row["bus_bytes"]) for row in rows] == [
        (3000, 3000),
        (20, 10),
    ]
    groups = {group["name"]: group["ranks"] for group in trace.groups.to_pylist()}
    assert groups == {"world": [0, 1], "pair": [0, 1]}
    assert TAGS[rows[0]["tag"]] == "DP"
    assert trace.iterations.to_pylist() == [
        {"number": 7, "start": 0, "stop": 70_000},
        {"number": 8, "start": 100_000, "stop": 110_000},
    ]
    assert (trace.meta.missing_data, trace.meta.found_by) == ((), "column step")


def test_a_duration_in_place_of_an_end_is_added_in_its_own_type(tmp_path):
    start = np.array([1.1, 2.2], np.float32)
    took = np.array([0.3, 0.7], np.float32)
    content = pa.table({"r": [0, 0], "t": start, "d": took, "k": ["gemm", "gemm"]})
    mapping = {"rank": "r", "start": "t", "duration": "d", "kind": "k", "unit": "s"}
    every = found(
        write(tmp_path / "t.parquet", content), {**mapping, "kinds": {"gemm": "compute"}}
    )
    trace = every.sources[0].read()
    ends = [round(float(end) * 1e9) for end in (start + took)]
    assert trace.events["stop"].to_pylist() == ends
    assert any("32-bit floats: up to 238 ns apart" in w for w in trace.meta.warnings)
    assert trace.meta.missing_data == ("bytes",)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_are_in_the_configured_unit(tmp_path, unit):
    every = found(write(tmp_path / "t.parquet", table()), unit=unit)
    scale = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]
    assert every.sources[1].read().events["start"].to_pylist() == [5 * scale, 30 * scale]


def test_columns_of_timestamps_need_no_unit(tmp_path):
    content = table()
    for name in ("begin", "end"):
        column = content[name].cast(pa.timestamp("us"))
        content = content.set_column(content.column_names.index(name), name, column)
    trace = found(write(tmp_path / "t.parquet", content)).sources[1].read()
    assert trace.events["start"].to_pylist() == [5_000, 30_000]


def test_restarting_times_are_placed_one_after_another(tmp_path):
    rows = [
        {
            "gpu": gpu,
            "begin": begin,
            "end": begin + 10,
            "what": "gemm",
            "step": step,
            "stream": 1,
        }
        for gpu, step, begin in [(0, 3, 0), (1, 3, 5), (0, 9, 1), (1, 9, 4)]
    ]
    every = found(write(tmp_path / "t.parquet", table(rows)), restarts=True)
    spans = [source.read().iterations.to_pylist() for source in every.sources]
    assert spans[0] == [
        {"number": 3, "start": 0, "stop": 10_000},
        {"number": 9, "start": 15_000, "stop": 25_000},
    ]
    assert [row["start"] for row in spans[1]] == [5_000, 18_000]
    assert any("one after another" in w for w in every.sources[0].read().meta.warnings)


def test_a_table_without_compute_kinds_has_unknown_compute(tmp_path):
    every = found(write(tmp_path / "t.parquet", table()), kinds={"gather": "AllGather"})
    trace = every.sources[1].read()
    assert trace.meta.missing_data == ("compute",)
    assert any("1 rows are neither" in w and "'reduce'" in w for w in trace.meta.warnings)
    said = metrics(sources.RankSources(sources=every.sources[:2])).to_dict()
    assert set(said["breakdown"]["exact"].values()) == {None}
    assert said["overlap"]["by_tag"] == {"OTHER": None}
    assert said["iteration"]["mean_ns"] is not None


def test_missing_sizes_are_null_not_zero(tmp_path):
    every = found(write(tmp_path / "t.parquet", table()), bytes=None)
    assert every.sources[0].read().meta.missing_data == ("bytes",)
    said = metrics(every).to_dict()
    assert said["volume"]["DP"]["comm_bytes"] is None
    assert said["bandwidth"]["DP"]["avg_bw"] is None
    assert any("no sizes" in warning for warning in said["warnings"])


def test_a_missing_column_is_named_with_the_present_ones(tmp_path):
    path = write(tmp_path / "t.parquet", table())
    with pytest.raises(
        ConfigError,
        match=r"t\.parquet: \[table\] stream = 'queue': no such column; the table has gpu,",
    ):
        found(path, stream="queue")
    kinds = {"gather": {"op": "AllGather", "same": ["stage"]}}
    with pytest.raises(ConfigError, match="same = 'stage': no such column"):
        found(path, kinds=kinds)


def test_a_table_without_a_mapping_is_an_error_that_asks_for_one(tmp_path):
    path = write(tmp_path / "t.csv", table())
    assert not operation_table.claims(path)
    with pytest.raises(
        ConfigError, match=r"columns gpu, begin, .* is unknown. State it in a \[t"
    ):
        operation_table.find([path], Config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": None}, r"c\.toml: \[table\]: missing key rank: the name of a column"),
        ({"rank": 3}, r"\[table\]: invalid rank 3: expected the name of a column"),
        ({"duration": "took"}, "found both of stop and duration, expected one"),
        ({"stop": None}, "found neither of stop and duration"),
        ({"unit": "min"}, r"invalid unit 'min': expected one of s, ms, us, ns"),
        ({"kinds": {}}, r"invalid kinds {}: expected a table"),
        ({"kinds": {"a": "AllRedux"}}, r"invalid a 'AllRedux': .*mean 'AllReduce'"),
        ({"kinds": {"a": 3}}, r"invalid a 3: expected one of compute"),
        ({"kinds": {"a": {"tag": "DP"}}}, r"a: missing key op, one of AllReduce"),
        ({"kinds": {"a": {"op": "Reduce", "same": "x"}}}, r"invalid same 'x': expected a list"),
        ({"kinds": {"a": {"op": "Reduce", "tags": "DP"}}}, r"unknown key 'tags'"),
        ({"restarts": "yes"}, "invalid restarts 'yes': expected true or false"),
        ({"restarts": True, "iteration": None}, "restarts needs the key iteration"),
        ({"ranks": "gpu"}, r"unknown key 'ranks': .*did you mean 'rank'"),
    ],
)
def test_a_wrong_mapping_is_refused(changes, message):
    said = {key: value for key, value in {**MAPPING, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        table_mapping(said, "c.toml")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("begin", [None] * 7, "column begin: 4 nulls, expected none"),
        ("begin", ["a"] * 7, "column begin: found string, expected numbers"),
        ("begin", [float("nan")] * 7, "column begin: .* is not a valid time"),
        ("begin", [1e300] * 7, "column begin: .* is not a valid time"),
        ("end", [-5] * 7, "stops at -5000 ns before it starts"),
        ("gpu", [-1] * 7, "column gpu: found -1, expected ranks from 0"),
        ("gpu", [None] * 7, "column gpu: found None, expected ranks from 0"),
        ("step", [None] * 7, "column step: 4 nulls, expected none"),
    ],
)
def test_a_column_of_wrong_values_is_refused(tmp_path, name, values, message):
    content = table()
    kind = pa.int64() if values[0] is None else None
    column = pa.array(values, kind)
    content = content.set_column(content.column_names.index(name), name, column)
    path = write(tmp_path / "t.parquet", content)
    with pytest.raises(TraceFileError, match=message):
        found(path).sources[0].read()


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.csv.gz"])
@pytest.mark.parametrize("content", [b"", b"PAR1 nothing", b"\x1f\x8b\x08 cut"])
def test_a_file_that_is_not_a_table_is_refused(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert not operation_table.claims(path)
    with pytest.raises((TraceFileError, ConfigError), match=name):
        found(path)


def test_a_table_without_rows_is_refused(tmp_path):
    path = write(tmp_path / "t.parquet", table().slice(0, 0))
    with pytest.raises(TraceFileError, match="the table has no rows"):
        found(path)


def test_one_rank_in_two_tables_is_refused(tmp_path):
    content = table([{**row, "gpu": row["gpu"] or 8} for row in ROWS])
    paths = [write(tmp_path / name, content) for name in ("a.parquet", "b.parquet")]
    with pytest.raises(
        TraceFileError, match=r"two files of rank 1: .*a\.parquet and .*b\.parq"
    ):
        operation_table.find(paths, Config(table=table_mapping(MAPPING, "c.toml")))


@pytest.fixture(scope="module")
def straggler():
    return shared("replay/straggler/trace-ST.parquet")


def test_the_published_table_is_known_by_its_columns(straggler):
    assert operation_table.claims(straggler)
    assert preset_of(pq.read_schema(straggler).names) is STRAGGLER
    every = operation_table.find([straggler], Config())
    assert [source.rank for source in every.sources] == list(range(8))


def test_published_step_times_are_reproduced(straggler):
    every = operation_table.find([straggler], Config())
    published = json.loads((FOLDER / "result-ST.json").read_text())["step_t_base"]
    spans = {}
    for source in every.sources:
        for row in source.read().iterations.to_pylist():
            low, high = spans.get(row["number"], (row["start"], row["stop"]))
            spans[row["number"]] = min(low, row["start"]), max(high, row["stop"])
    assert {str(number) for number in spans} == set(published)
    for number, (low, high) in spans.items():
        assert high - low == pytest.approx(published[str(number)] * 1e9, abs=1)


def test_the_published_table_has_groups_by_its_coordinates(straggler):
    trace = operation_table.find([straggler], Config()).sources[3].read()
    groups = {group["name"]: group for group in trace.groups.to_pylist()}
    assert groups["DP stage=1"]["ranks"] == [2, 3]
    assert groups["PP dp_rank=1"]["ranks"] == [1, 3, 5, 7]
    rows = pq.read_table(straggler, filters=[("rank", "==", 3)]).to_pylist()
    sums = {"DP": 0, "TP": 0, "PP": 0}
    kinds = {"params": "DP", "grads": "DP", "layernorm": "TP", "embedding": "PP"}
    for row in rows:
        first, _, last = row["optype"].partition("-")
        tag = "PP" if last in {"send", "recv"} else kinds.get(first)
        if tag:
            sums[tag] += 1
    tags = [TAGS[tag] for tag in trace.comm["tag"].to_pylist()]
    assert {tag: tags.count(tag) for tag in sums} == sums
    assert trace.meta.missing_data == ("bytes",)


def test_the_table_of_the_demo_is_known_by_its_columns(tmp_path):
    write_table(TableJob(dp=2, pp=2, micro_batches=2, steps=3), tmp_path)
    found = compute_metrics(open_run(tmp_path / "table.parquet"))
    assert found.iterations == 3
    assert set(found.volume) == {"DP", "PP", "TP", "OTHER"}


def test_a_job_without_a_fault_has_no_imbalanced_stage(tmp_path):
    write_table(TableJob.of(8, 0.0), tmp_path)
    found = compute_metrics(open_run(tmp_path / "table.parquet"))
    assert [finding.kind for finding in found.findings] == ["exposed_communication"]
