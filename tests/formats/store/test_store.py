"""Test that a store preserves its traces."""

import gzip
import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import kineto_text as k
from builders.examples import in_gate
from builders.made_traces import DEVICE, traces
from builders.opened import open_run
from builders.stored_runs import STEP, WHOLE, measured, plain, stored, write_run
from hypothesis import given

from docs import pages
from fastcomm.errors import SchemaError, TraceFileError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.communication import Pattern
from fastcomm.formats.config import Config
from fastcomm.formats.kineto import reader
from fastcomm.formats.store import files, layout
from fastcomm.formats.store import reader as store_reader
from fastcomm.formats.store.layout import COLUMNS, LAYOUT, MANIFEST
from fastcomm.info.info import info
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.partial import Partial
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.nsys.tables import NsysVariant
from fastcomm.synthetic.traces import write
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.rank_grid import Parallel
from fastcomm.trace.schema import ARGS, KINDS
from fastcomm.trace.tags import TagRule, TagRules

TABLES = ("events", "lanes", "comm", "groups", "iterations")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def ingested(real, tmp_path_factory):
    """Return a function that ingests a real trace once."""
    return cache(lambda name: ingest(plan([real(name)], tmp_path_factory.mktemp("real") / "s")))


def same_tables(found, wanted):
    for name in TABLES:
        assert plain(getattr(found, name)) == plain(getattr(wanted, name)), name
    assert found.is_whole == wanted.is_whole
    if wanted.is_whole:
        assert sorted(found.args.column_names) == sorted(wanted.args.column_names)
        names = found.args.column_names
        assert plain(found.args) == plain(wanted.args.select(names))


def check_whole(trace, path):
    found = store_reader.read(path, replace(WHOLE, whole=trace.is_whole))
    if trace.is_whole:
        same_tables(found, trace)
    assert found.meta == replace(trace.meta, path=str(path))
    assert list(path.parent.iterdir()) == [path]


def check_device_work_and_the_rows_of_its_communication(trace, path):
    found = store_reader.read(path, TraceOptions())
    kept = np.isin(trace.events["kind"].to_numpy(), DEVICE)
    kept[trace.comm["event"].to_numpy()] = True
    assert plain(found.events) == plain(trace.events.filter(pa.array(kept)))
    assert plain(found.comm.drop("event")) == plain(trace.comm.drop("event"))
    of_comm = found.events.take(found.comm["event"])
    assert plain(of_comm) == plain(trace.events.take(trace.comm["event"]))
    assert not found.is_whole


def check_codes_are_strings_in_the_file(trace, path):
    rows = pq.read_table(path).sort_by("event")
    assert rows.column_names[: len(COLUMNS)] == COLUMNS.names
    assert set(rows.column_names[len(COLUMNS) :]) <= set(ARGS.names)
    assert rows["start"].to_pylist() == trace.events["start"].to_pylist()
    lanes = trace.lanes.to_pylist()
    threads = [lanes[lane]["thread"] for lane in trace.events["lane"].to_pylist()]
    assert rows["thread"].to_pylist() == threads
    assert rows["op"].null_count == rows.num_rows - trace.comm.num_rows


@in_gate(10)
@given(trace=traces())
def test_a_stored_trace_is_restored_unchanged_and_has_the_same_bytes(trace, tmp_path_factory):
    path = stored(trace, tmp_path_factory.mktemp("store") / "rank-00000.parquet")
    check_whole(trace, path)
    check_device_work_and_the_rows_of_its_communication(trace, path)
    check_codes_are_strings_in_the_file(trace, path)
    assert stored(trace, path.with_name("rank-1.parquet")).read_bytes() == path.read_bytes()


def test_row_groups_come_in_sections_however_small_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "ROW_GROUP", 2)
    events = [k.mark("ProfilerStep#0", 0, 100), k.launch(1, 1), k.launch(2, 2), k.launch(3, 3)]
    events += [k.kernel(f"gemm{n}", 10 * n, 5) for n in range(5)]
    events += [k.event("aten::mm", "cpu_op", 4, 5, pid=100, tid=1)]
    source = k.write(tmp_path / "rank0.json", events)
    trace = reader.read(source, WHOLE)
    path = stored(trace, tmp_path / "rank-00000.parquet")
    assert store_reader.about(path)["row_groups"] == [3, 2, 1]
    same_tables(store_reader.read(path, WHOLE), trace)
    assert store_reader.read(path, TraceOptions()).events.num_rows == 5


def test_two_communication_rows_of_one_event_are_refused(tmp_path):
    trace = reader.read(k.write(tmp_path / "rank0.json", STEP), WHOLE)
    twice = pa.concat_tables([trace.comm, trace.comm])
    with pytest.raises(SchemaError, match="two rows of one event"):
        stored(replace(trace, comm=twice), tmp_path / "x.parquet")
    late = trace.comm.set_column(1, "start", pa.array([0]))
    with pytest.raises(SchemaError, match="differ from those of its events"):
        stored(replace(trace, comm=late), tmp_path / "x.parquet")
    assert not (tmp_path / "x.parquet").exists()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parallel": Parallel(tp=2)},
        {"parallel": Parallel(dp=4)},
        {"tags": (TagRule(field="ranks", value=(0, 1), tag="CP"),)},
        {"guess_tags": True},
        {"iterations": r"epoch (\d+)"},
        {"clock": "device"},
        {"clock": "host"},
    ],
    ids=str,
)
def test_options_apply_to_a_store_as_to_its_traces(run, options):
    assert measured(run / "store", **options) == measured(run / "traces", **options)


def test_a_communicator_is_known_by_its_number_in_a_store_too(tmp_path):
    write_nsys(Job.of(ranks=2, steps=2, layers=1), tmp_path / "reports")
    ingest(plan([tmp_path / "reports"], tmp_path / "store"))
    assert measured(tmp_path / "store") == measured(tmp_path / "reports")
    name = open_run(tmp_path / "store").read(0, "all").groups["name"][0].as_py()
    rule = TagRule(field="communicator", value=int(name, 16), tag="CP")
    found = measured(tmp_path / "store", tags=(rule,))
    assert found == measured(tmp_path / "reports", tags=(rule,))
    assert "CP" in found["volume"]


def test_a_stream_is_known_by_its_number_in_a_store_too(tmp_path):
    bare = NsysVariant(payload="none")
    write_nsys(Job.of(ranks=2, steps=2, layers=1), tmp_path / "reports", variant=bare)
    ingest(plan([tmp_path / "reports"], tmp_path / "store"))
    names = open_run(tmp_path / "store").read(0, "all").groups["name"].to_pylist()
    rule = TagRule(field="stream", value=int(names[0].removeprefix("stream ")), tag="CP")
    found = measured(tmp_path / "store", tags=(rule,))
    assert found == measured(tmp_path / "reports", tags=(rule,))


def test_options_of_the_ingest_apply_to_the_store(run):
    stated = {"parallel": Parallel(tp=2), "iterations": "epoch .*"}
    ingest(plan([run / "traces"], run / "tp", config=Config(**stated)))
    found = measured(run / "tp")
    assert found == measured(run / "traces", **stated)
    assert set(found["volume"]) == {"TP"}
    later = measured(run / "tp", parallel=Parallel(pp=2))
    assert set(later["volume"]) == {"DP"}
    assert later["iteration"] == found["iteration"]


def test_the_clock_of_the_ingest_applies_to_the_store(tmp_path):
    traces, store = tmp_path / "traces", tmp_path / "store"
    write(Job.of(ranks=2, steps=2, layers=1), traces)
    ingest(plan([traces], store, config=Config(clock="host")))
    found = measured(store)
    assert found == measured(store, clock="host") == measured(traces, clock="host")
    assert found != measured(store, clock="device") == measured(traces, clock="device")


def test_outdated_warnings_are_removed(tmp_path):
    (tmp_path / "traces").mkdir()
    events = [k.mark("round one", 0, 50), k.mark("round two", 50, 50), k.all_reduce(20, 10)]
    k.write(tmp_path / "traces" / "rank0.json", events)
    ingest(plan([tmp_path / "traces"], tmp_path / "store"))
    trace = open_run(tmp_path / "store").read(0, "all")
    assert any("no iteration marks" in note for note in trace.meta.warnings)
    options = Config(iterations="round")
    trace = open_run(tmp_path / "store", config=options).read(0, "all")
    assert trace.meta.warnings == ()
    assert trace.iterations.num_rows == 2


def test_kernel_patterns_apply_only_at_ingest(run):
    patterns = (Pattern(regex="gemm", library="user", op="AllReduce"),)
    options = Config(kernels=patterns)
    opened = open_run(run / "store", config=options)
    with pytest.raises(TraceFileError, match=r"rank-00000.*gemm.*ingest the traces again"):
        opened.read(0)
    ingest(plan([run / "traces"], run / "own", config=options))
    opened = open_run(run / "own", config=options)
    assert opened.read(0).comm.num_rows == 2


@pytest.mark.parametrize("options", [WHOLE, TraceOptions(whole=True, patterns=(
    Pattern(regex="x", library="y"),), iterations=IterationRule(ranges=((1, 2, 3),)),
    tags=TagRules(explicit=(TagRule(field="ranks", value=(0, 1), tag="TP"),),
                  grid=Parallel(tp=2).grid(8), guess=True))])  # fmt: skip
def test_options_are_restored_from_json(options):
    text = json.dumps(files.as_json(options))
    assert files.restored(json.loads(text)) == options
    assert files.over(options, options) == options
    assert files.over(TraceOptions(), options) == options


def test_metrics_of_a_synthetic_job_equal_those_of_its_store(tmp_path):
    write(Job.of(ranks=4, steps=2, layers=1), tmp_path / "traces")
    ingest(plan([tmp_path / "traces"], tmp_path / "store"))
    assert measured(tmp_path / "store") == measured(tmp_path / "traces")


@pytest.mark.usefixtures("kineto")
def test_real_traces_are_a_tenth_of_their_text_and_no_larger_than_gzipped(ingested):
    for source in ("nccl_2rank_rank0.json.gz", "dlrm_8rank", "gloo_4rank", "sampled_2of128"):
        for entry in ingested(source).manifest.ranks:
            with gzip.open(entry.source) as file:
                text = len(file.read())
            assert 10 * entry.size <= text, entry.source
            assert entry.size <= entry.fingerprint.size, entry.source


@pytest.mark.parametrize(
    "name", ["nccl_2rank_rank0.json.gz", "dlrm_8rank", "sampled_2of128", "gloo_2x2"]
)
def test_real_traces_are_restored_unchanged(real, ingested, name):
    traces = open_run(real(name))
    kept = open_run(ingested(name).folder)
    assert kept.ranks == traces.ranks
    for rank in kept.ranks:
        whole = traces.read(rank, "all")
        same_tables(kept.read(rank, "all"), whole)
        assert Partial.of(kept.read(rank)).events.equals(Partial.of(whole).events)


PAGE = pages.DOCS / "store.md"


def test_the_page_shows_the_results_of_its_queries():
    text = PAGE.read_text("utf-8")
    assert len(re.findall("^```sql$", text, re.MULTILINE)) == 3
    with pages.demo_folder() as folder:
        assert pages.update(text, folder) == text, "make pages"


def test_the_page_lists_every_column_and_key(run):
    text = PAGE.read_text("utf-8")
    assert f"| `layout` | layout of the store, {LAYOUT};" in text
    known = set(re.findall(r"`([^`\n]+)`", text))
    for path in (run / "store").glob("*.parquet"):
        assert set(pq.read_schema(path).names) <= known, path
    assert {*ARGS.names, *KINDS} <= known
    manifest = json.loads((run / "store" / MANIFEST).read_text())
    one = manifest["ranks"][0]
    keys = {*manifest, *one, *one["fingerprint"], *one["clock_note"], *manifest["reading"]}
    told = info(open_run(run / "store")).to_dict()
    keys |= {*told, *told["details"][0], *told["groups"][0], *told["iterations"][0]}
    assert keys <= known
