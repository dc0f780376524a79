"""Test that a job has equal metrics as Kineto traces and as Nsight Systems exports."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from hashlib import blake2b

import pyarrow as pa
import pytest
from builders.commands import quoted
from builders.opened import open_run
from builders.same import same
from builders.synthetic_truth import truth

from fastcomm.cli.main import main
from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import Variant
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.nsys.tables import NsysVariant
from fastcomm.synthetic.traces import write
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.rank_grid import Parallel
from fastcomm.trace.schema import OPS, PARTNERS, TAG_SOURCES
from fastcomm.trace.tags import TagRule

LINK = 50e9
SMALL = Job.of(8, steps=2, micro_batches=1, layers=1)  # tp 2, pp 2, dp 2, ep 2
SOME = (1, 4, 5, 7)  # the ranks of SMALL that share a group with rank 5, and rank 5
LINKED = MetricsOptions(link_bandwidth=f"{LINK}B/s")
# What the two formats have in common of an event.
COLUMNS = ("op", "start", "stop", "stream", "tag", "msg_bytes", "payload_bytes", "bus_bytes")
# Said by one format in other words than by the other.
# Names of devices and hosts are read from Kineto alone.
OWN_WORDS = ("iterations_found_by", "groups", "warnings", "idle_evidence", "gpus", "network")


def grid(job):
    sizes = {name: getattr(job, name) for name in ("tp", "pp", "dp", "ep")}
    return Config(parallel=Parallel(**sizes))


def opened(path, job=SMALL, clock="auto"):
    options = replace(grid(job), clock=clock)
    run = open_run(path, config=options)
    return run.only(SOME) if job is SMALL else run


def measured(path, job=SMALL, clock="auto"):
    return compute_metrics(opened(path, job, clock), LINKED)


def numbers(found, *, alike=True):
    """What is measured, without the words of a format: names of groups are such.

    Unless launches are recorded alike, the causes of idle time differ, and their sum counts;
    and what began before the capture has no sequence numbers.
    """
    said = {key: value for key, value in found.to_dict().items() if key not in OWN_WORDS}
    if not alike:
        said["idle"] = pytest.approx(sum(said["idle"].values()))
        assert said["idle"] == said["breakdown"]["exact"]["idle"]
        del said["idle"]
        said["matching"] = {**said["matching"], "by": sum(said["matching"]["by"].values())}
    said["links"] = [{**link, "group": None} for link in said["links"]]
    return said


@pytest.fixture(scope="module")
def kineto_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kineto")
    write(SMALL, folder, variant=Variant.UNDESCRIBED)
    return folder


@pytest.fixture(scope="module")
def through_kineto(kineto_run):
    """What is measured through Kineto by either clock."""
    return {clock: measured(kineto_run, clock=clock) for clock in ("host", "device")}


@pytest.fixture(scope="module")
def rank_5(kineto_run):
    return opened(kineto_run).read(5)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The job as a report of each rank."""
    folder = tmp_path_factory.mktemp("reports")
    write_nsys(SMALL, folder)
    return folder


SAME = {
    "sqlite": ({}, {}),
    "parquetdir": ({}, {"kind": "parquetdir"}),
    "arrowdir": ({}, {"kind": "arrowdir"}),
    "several ranks in a report": ({}, {"per_report": 4}),
    "all ranks in a report": ({}, {"per_report": 8, "kind": "parquetdir"}),
    "the other header": ({"payload": "blob-total"}, {"per_report": 8}),
    "JSON": ({"payload": "json"}, {"per_report": 8}),
    "JSON, ids as texts": (
        {"payload": "json-strings"},
        {"per_report": 8, "kind": "parquetdir"},
    ),
    "JSON, registered": ({"payload": "json-ids"}, {"per_report": 8}),
    "no schemas": ({"schema_rows": False}, {"per_report": 8}),
    "NCCL 2.28": ({"nccl": "2.28"}, {"per_report": 8}),
    "no domains": ({"domain_rows": False}, {"per_report": 8}),
    "UTC": ({"normalized": True}, {}),
    "registered names": ({"registered_names": True}, {"per_report": 8}),
    "messages alone": ({"groups": False}, {"per_report": 8}),
    "kernels of graphs": ({"graph": "node"}, {"per_report": 8}),
    "one device a process": ({"one_device": True}, {"per_report": 8}),
    "a late capture": ({"init": False}, {}),
    "a late capture under MPI": ({"init": False, "mpi_ranks": True}, {"per_report": 8}),
}


@pytest.mark.parametrize("name", SAME)
def test_a_job_measures_the_same_through_nsys_as_through_kineto(
    tmp_path, through_kineto, rank_5, name
):
    variant, options = SAME[name]
    write_nsys(SMALL, tmp_path, variant=NsysVariant(**variant), **options)
    # A late capture lacks the first launches: only by the host's marks is it the same run.
    clock = "host" if name.startswith("a late capture") else "device"
    run = opened(tmp_path, clock=clock)
    found = compute_metrics(run, LINKED)
    assert found.iteration_clock == clock
    alike = not name.startswith(("a late capture", "kernels of graphs"))
    assert numbers(found, alike=alike) == numbers(through_kineto[clock], alike=alike)
    assert found.warnings == ()
    one, other = run.read(5), rank_5
    # A process of two reports may call its device otherwise; nothing else differs.
    assert one.comm.select(COLUMNS).equals(other.comm.select(COLUMNS))
    groups = [trace.groups.take(trace.comm["group"]) for trace in (one, other)]
    assert groups[0].select(["ranks", "size"]).equals(groups[1].select(["ranks", "size"]))


@pytest.mark.parametrize("job", [Job.of(2), Job.of(16, steps=2, micro_batches=2, layers=1)])
def test_a_job_measures_through_nsys_what_it_was_built_to_show(tmp_path, job):
    write_nsys(job, tmp_path, per_report=8)
    wanted = truth(job, LINK)
    keys = ("ranks", "iterations", "breakdown", "windows", "bandwidth", "volume", "overlap")
    found = measured(tmp_path, job, clock="host").to_dict()
    same(found, {key: wanted[key] for key in keys})


def test_launches_of_another_thread_are_matched_by_order_with_a_warning(
    tmp_path, through_kineto
):
    write_nsys(SMALL, tmp_path, variant=NsysVariant(other_thread=True), per_report=8)
    found = measured(tmp_path)
    assert numbers(found, alike=False) == numbers(through_kineto["device"], alike=False)
    assert all("their sizes were matched by order" in text for text in found.warnings)
    assert found.warnings


def test_without_payloads_only_times_and_counts_are_known(tmp_path, through_kineto):
    write_nsys(SMALL, tmp_path, variant=NsysVariant(payload="none"))
    found, whole = measured(tmp_path), through_kineto["device"]
    assert found.iteration == whole.iteration
    assert found.breakdown.exact["compute"] == whole.breakdown.exact["compute"]
    assert found.overlap.average_overlap_ratio == whole.overlap.average_overlap_ratio
    assert found.volume["OTHER"].comm_bytes is None
    assert found.volume["OTHER"].comm_events == sum(
        each.comm_events for each in whole.volume.values()
    )
    assert found.bandwidth["OTHER"].avg_bw is None
    (warning,) = [text for text in found.warnings if "no payload" in text]
    output = quoted(tmp_path / "nsys_0.payload.sqlite")
    assert f"nsys export --type=sqlite --include-blobs=true --output={output} " in warning
    assert "Times, overlap, windows and counts are complete" in warning
    assert "7 more reports" in warning


@pytest.mark.parametrize("nccl", ["2.22", "2.24"])
def test_before_2_25_no_payload_has_a_communicator_and_streams_can_be_tagged(tmp_path, nccl):
    write_nsys(SMALL, tmp_path, variant=NsysVariant(nccl=nccl), per_report=8)
    found = measured(tmp_path)
    assert any("sizes but no communicator" in text for text in found.warnings)
    assert set(found.volume) == {"OTHER"}
    rule = TagRule(field="stream", value=20, tag="TP")
    options = Config(tags=(rule,))
    trace = open_run(tmp_path, config=options).read(0)
    tagged = {(row["stream"], TAGS[row["tag"]]) for row in trace.comm.to_pylist()}
    assert (20, "TP") in tagged
    assert {tag for stream, tag in tagged if stream != 20} == {"OTHER"}
    sizes = trace.comm.filter(pa.compute.equal(trace.comm["op"], OPS.index("AllReduce")))
    assert sizes["payload_bytes"].null_count == 0
    assert sizes["bus_bytes"].null_count == len(sizes)


def test_graphs_recorded_as_one_row_are_warned_of(tmp_path):
    write_nsys(SMALL, tmp_path, variant=NsysVariant(graph="graph"), per_report=4)
    found = measured(tmp_path)
    assert found.warnings
    for warning in found.warnings:
        assert "launches of CUDA graphs" in warning
        assert "% of the GPU's time" in warning
        assert "nsys profile --cuda-graph-trace=node" in warning


def test_a_late_capture_does_not_guess_members_of_communicators(tmp_path):
    write_nsys(SMALL, tmp_path, variant=NsysVariant(init=False), per_report=4)
    run = open_run(tmp_path)
    assert any("communicators were created before the capture began" in w for w in run.warnings)
    trace = run.read(0)
    assert set(trace.groups["ranks"].to_pylist()) == {None}
    assert set(trace.groups["size"].to_pylist()) == {None}
    by_op = {OPS[row["op"]]: row["bus_bytes"] for row in trace.comm.to_pylist()}
    assert by_op["AllReduce"] is by_op["AllGather"] is by_op["ReduceScatter"] is None
    assert by_op["SendRecv"] is not None  # crosses a link once, however many there are


def test_ids_above_2_to_the_63_are_exact(reports):
    run = opened(reports)
    names = [name for rank in run.ranks for name in run.read(rank).groups["name"].to_pylist()]
    high = [name for name in names if int(name, 16) >= 2**63]
    assert high
    rule = TagRule(field="communicator", value=int(high[0], 16), tag="CP")
    found = open_run(reports, config=Config(tags=(rule,)))
    groups = [group for rank in SOME for group in found.read(rank).groups.to_pylist()]
    tagged = [group["name"] for group in groups if group["tag"] == TAGS.index("CP")]
    assert set(tagged) == {high[0]}
    assert {group["tag_source"] for group in groups if group["name"] == high[0]} == {
        TAG_SOURCES.index("explicit")
    }


def test_a_split_communicator_has_its_ranks_from_all_reports(reports):
    trace = open_run(reports).read(5)
    ranks = {tuple(each) for each in trace.groups["ranks"].to_pylist()}
    wanted = {(4, 5), (5, 7), (1, 5)}  # TP, DP or EP, PP of rank 5: tp 2, dp 2, pp 2
    assert wanted <= ranks


def test_with_some_reports_members_are_unknown_but_sizes_are_known(tmp_path):
    write_nsys(SMALL, tmp_path, ranks=[2, 3])
    run = open_run(tmp_path)
    assert run.ranks == (2, 3)
    assert run.world_size == 8
    groups = {
        tuple(each["ranks"] or ()): each["size"] for each in run.read(2).groups.to_pylist()
    }
    assert groups[2, 3] == 2
    assert groups[()] == 2


def test_ranks_from_the_configuration_take_precedence(tmp_path):
    write_nsys(SMALL, tmp_path, per_report=4, variant=NsysVariant(init=False))
    guessed = open_run(tmp_path)
    assert guessed.ranks == tuple(range(8))
    assert any("the ranks are a guess" in text for text in guessed.warnings)
    (tmp_path / "ranks.toml").write_text(
        "[ranks]\n"
        + "".join(
            f'"nsys_{4 * report}.sqlite:{41_000 + 97 * (4 * report + place)}" = '
            f"{4 * report + 3 - place}\n"
            for report in range(2)
            for place in range(4)
        )
    )
    from fastcomm.formats import config

    options = config.read(tmp_path / "ranks.toml")
    run = open_run(tmp_path, config=options)
    assert run.ranks == tuple(range(8))
    assert not any("a guess" in text for text in run.warnings)
    assert run.read(0).comm["start"].equals(guessed.read(3).comm["start"])


def test_a_report_with_one_process_has_the_rank_in_its_name(tmp_path):
    write_nsys(SMALL, tmp_path, ranks=[6], variant=NsysVariant(init=False))
    assert open_run(tmp_path).ranks == (6,)


def test_the_reader_returns_no_environment_data(tmp_path, capsys):
    from click.testing import CliRunner

    variant = NsysVariant(payload="none")
    write_nsys(SMALL, tmp_path / "run", ranks=[0, 1], per_report=2, variant=variant)
    runner = CliRunner()
    arguments = ["metrics", str(tmp_path / "run"), "--output", str(tmp_path / "out")]
    printed = runner.invoke(main, arguments).output
    printed += runner.invoke(main, [*arguments[:2], "--json"]).output
    written = [file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert written
    for text in [printed.encode(), *written]:
        assert b"SECRET" not in text
    run = open_run(tmp_path / "run")
    trace = run.read(0, "all")
    everything = [trace.events, trace.lanes, trace.comm, trace.groups, repr(trace.meta)]
    assert "SECRET" not in json.dumps([str(each) for each in everything])
    assert not any("SECRET" in name for name in trace.events["name"].unique().to_pylist())


def test_the_default_stream_has_the_number_0(tmp_path):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0])
    before = {lane["thread"] for lane in open_run(path).read(0, "all").lanes.to_pylist()}
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = 0 WHERE streamId = 7")
    lanes = open_run(path).read(0, "all").lanes.to_pylist()
    assert {lane["thread"] for lane in lanes if lane["is_device"]} - before == {"0"}


@pytest.mark.parametrize("kind", ["sqlite", "parquetdir"])
def test_the_host_and_the_gpu_of_an_export_are_those_of_the_same_kineto_run(tmp_path, kind):
    job = Job.of(ranks=16, steps=1, micro_batches=1, layers=1)
    write_nsys(job, tmp_path / "nsys", per_report=8, kind=kind)
    write(job, tmp_path / "kineto")
    runs = [open_run(tmp_path / name).only((0, 1, 8, 9)) for name in ("nsys", "kineto")]
    metas = [[run.read(rank).meta for rank in run.ranks] for run in runs]
    assert {meta.gpu for meta in metas[0]} == {meta.gpu for meta in metas[1]}
    assert len({meta.host for meta in metas[0]}) == 2
    nodes, expected = (compute_metrics(run).network for run in runs)
    assert nodes.nodes_by == "hosts"
    assert nodes.nodes == expected.nodes


@pytest.mark.parametrize(
    ("hosts", "number"),
    [
        ([], 0),
        ([(1, "localhost")], 0),
        ([(None, "a")], 1),
        ([(1, "a"), (1, "a")], 1),
        ([(1, "a"), (1, "b")], 0),
        ([(2, "b"), (1, "a")], 1),
        ([(2, "b"), (3, "c")], 0),
    ],
)
def test_the_host_of_a_process_is_that_of_its_machine(tmp_path, hosts, number):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0])
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname'")
        rows = [(None if vid is None else vid << 48, name) for vid, name in hosts]
        insert = "INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (?, 'Running', 'Hostname', 4, ?)"
        database.executemany(insert, rows)
        database.commit()
    host = open_run(tmp_path).read(0).meta.host
    assert (host is not None) == (number == 1)
    assert host is None or host == blake2b(b"a", digest_size=8).hexdigest()


def test_reading_everything_includes_operators_and_waits(reports):
    run = open_run(reports)
    whole, lean = run.read(0, "all"), run.read(0)
    names = set(whole.events["name"].to_pylist())
    assert "aten::mm" in names
    assert not any(", op_id = " in name for name in names)
    assert "Context Sync" in names
    assert "aten::mm" not in lean.events["name"].to_pylist()
    said = ["event", *PARTNERS]
    assert whole.comm.drop_columns(said).equals(lean.comm.drop_columns(said))
    assert whole.is_whole
    assert whole.args["bytes"].null_count < whole.events.num_rows


def test_a_wait_refers_to_its_event_record(tmp_path):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0])
    with closing(sqlite3.connect(path)) as database:
        wanted = {
            row[0]: row[1:]
            for row in database.execute(
                "SELECT s.correlationId, e.streamId, e.correlationId "
                "FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION s "
                "JOIN CUPTI_ACTIVITY_KIND_CUDA_EVENT e USING (eventSyncId) "
                "WHERE s.syncType IN (1, 2)"
            )
        }
    trace = open_run(path).read(0, "all")
    assert trace.is_whole
    rows = zip(
        trace.events["correlation"].to_pylist(),
        trace.args["wait_stream"].to_pylist(),
        trace.args["wait_correlation"].to_pylist(),
        strict=True,
    )
    assert {key: (stream, call) for key, stream, call in rows if call is not None} == wanted
    assert wanted


def test_names_that_contradict_the_communicators_are_warned_of(tmp_path):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[5])
    path.rename(tmp_path / "nsys_3.sqlite")
    run = open_run(tmp_path)
    assert run.ranks == (5,)
    assert any("nsys_3.sqlite is rank 5 of the largest communicator" in w for w in run.warnings)


def test_the_export_command_for_sizes_is_printed_on_one_line(tmp_path):
    from click.testing import CliRunner

    folder = tmp_path / ("a folder with a long name " * 5).strip()
    write_nsys(SMALL, folder, ranks=[0], variant=NsysVariant(payload="none"))
    lines = CliRunner().invoke(main, ["metrics", str(folder)]).stdout.splitlines()
    (command,) = [line for line in lines if "nsys export" in line]
    assert command.startswith("    nsys export --type=sqlite")
    assert f"{folder}/nsys_0.payload.sqlite" in command


def test_clocks_of_reports_are_compared_by_their_collectives(tmp_path):
    from fastcomm.ingest.ingest import ingest, plan

    skew = 5_000_000
    write_nsys(
        SMALL, tmp_path / "run", per_report=2, variant=NsysVariant(clock_skew_ns={1: skew})
    )
    found = ingest(plan([tmp_path / "run"], tmp_path / "store", config=grid(SMALL)))
    notes = {entry.rank: entry.clock_note for entry in found.manifest.ranks}
    for rank, note in notes.items():
        assert note is not None
        # Ranks 2 and 3 are the second report. Stages only send messages to each other.
        assert note.applies is (rank in {2, 3})
        assert abs(note.offset_ns - (skew if rank in {2, 3} else 0)) <= 100_000
        assert note.reference == (0 if rank < 4 else 4)
