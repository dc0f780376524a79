"""Test NCCL Inspector logs against definitions."""

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from builders.inspector_logs import NOW, PAIR, WORLD, job, record, write
from builders.opened import read_here
from builders.shared_data import shared
from hypothesis import given
from hypothesis import strategies as st
from oracles import inspector as oracle_inspector

from fastcomm.errors import TraceFileError
from fastcomm.formats import inspector
from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run_traces import RunTraces
from fastcomm.trace.schema import OPS

COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll")


def found(folder, **options):
    paths = sorted(Path(folder).iterdir())
    return inspector.find(paths, Config(**options))


def only_trace(path):
    (source,) = inspector.find([path], Config()).sources
    return source.read()


def metrics(folder, **words):
    every = found(folder)
    run = RunTraces(sources=every.sources, world_size=every.world_size, warnings=every.warnings)
    return compute_metrics(read_here(run), MetricsOptions(**words))


OPERATION = st.tuples(
    st.sampled_from((*COLLECTIVES, "Send", "Recv")),
    st.integers(0, 1 << 40),
    st.integers(0, 10**7),
    st.integers(1, 9),
    st.integers(0, 10**6),
)


@given(st.lists(OPERATION, min_size=1, max_size=12))
def test_metrics_of_a_log_agree_with_the_definitions(operations):
    lines = [
        record(coll, sn, size, us, n=n, comm=f"0x{n:x}", dumped=NOW + later)
        for sn, (coll, size, us, n, later) in enumerate(operations)
    ]
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "host-pid1.log", *lines)
        trace = only_trace(path)
        wanted = oracle_inspector.events(path.read_text())
    rows, groups = trace.comm.to_pylist(), trace.groups.to_pylist()
    seen = [
        {
            "op": OPS[row["op"]],
            "group": groups[row["group"]]["name"],
            "size": groups[row["group"]]["size"],
            "seq": row["seq"],
            "duration": row["stop"] - row["start"],
            "msg": row["msg_bytes"],
            "payload": row["payload_bytes"],
            "bus": row["bus_bytes"],
        }
        for row in rows
    ]
    assert sorted(seen, key=lambda row: row["seq"]) == wanted


def test_ranks_are_those_of_the_communicator_of_all_and_groups_are_joined(tmp_path):
    every = found(job(tmp_path))
    assert [source.rank for source in every.sources] == [0, 1, 2, 3]
    assert every.sources[0].path.name == "host-pid100.log"
    assert (every.world_size, every.warnings) == (4, ())
    groups = every.sources[3].read().groups.to_pylist()
    assert [group["ranks"] for group in groups] == [[0, 1, 2, 3], [1, 3]]
    assert [group["size"] for group in groups] == [4, 2]


def test_a_group_whose_members_have_no_log_here_has_a_size_and_no_ranks(tmp_path):
    folder = job(tmp_path)
    (folder / "host-pid97.log").unlink()  # rank 3
    every = found(folder)
    assert [source.rank for source in every.sources] == [0, 1, 2]
    groups = every.sources[1].read().groups.to_pylist()
    assert [group["ranks"] for group in groups] == [[0, 1, 2, 3], None]
    assert groups[1]["size"] == 2


def test_without_a_global_communicator_files_are_ranked_by_order(tmp_path):
    for pid in (7, 8):
        write(tmp_path / f"h-pid{pid}.log", record(comm=f"0x{pid}", n=8, rank=5))
    every = found(tmp_path)
    assert [source.rank for source in every.sources] == [0, 1]
    assert every.world_size is None
    assert "in the order of the files" in every.warnings[0]
    told = found(tmp_path, ranks={"h-pid7.log": 4, "h-pid8.log": 2})
    assert [source.rank for source in told.sources] == [2, 4]
    assert told.warnings == ()


def test_two_logs_of_one_rank_are_named(tmp_path):
    for pid in (7, 8):
        write(tmp_path / f"h-pid{pid}.log", record(rank=1))
    with pytest.raises(TraceFileError, match=r"two files of rank 1: .*pid7.log and .*pid8.log"):
        found(tmp_path)


def test_a_verbose_log_has_real_times(tmp_path):
    path = write(
        tmp_path / "a.log",
        record(sn=1, us=50, begun=NOW + 100),
        record(sn=0, us=40, begun=NOW),
    )
    trace = only_trace(path)
    assert trace.comm["start"].to_pylist() == [NOW * 1000, (NOW + 100) * 1000]
    assert trace.comm["stop"].to_pylist() == [(NOW + 40) * 1000, (NOW + 150) * 1000]
    assert trace.meta.missing_data == ("compute",)
    assert trace.meta.clock == "unix"


def test_a_log_without_times_keeps_its_durations_with_a_warning(tmp_path):
    path = write(tmp_path / "a.log", record(sn=0, us=50), record(sn=1, us=0))
    trace = only_trace(path)
    assert trace.meta.missing_data == ("compute", "times")
    assert trace.comm["stop"].to_pylist() == [NOW * 1000, (NOW + 1000) * 1000]
    assert trace.iterations.num_rows == 1


def test_data_missing_from_a_log_is_null_and_the_rest_is_correct(tmp_path):
    answer = metrics(job(tmp_path))
    said = answer.to_dict()
    assert said["iterations"] is None
    assert said["windows"] is None
    assert (said["iteration"]["mean_ns"], said["iteration"]["by_rank"]) == (None, [])
    assert set(said["breakdown"]["exact"].values()) == {None}
    assert set(said["breakdown"]["spec"].values()) == {None}
    assert said["overlap"] == {"average_overlap_ratio": None, "by_tag": {"OTHER": None}}
    volume, speed = said["volume"]["OTHER"], said["bandwidth"]["OTHER"]
    assert (volume["comm_events"], volume["comm_bytes"]) == (8, 4 * 3 * (1 << 20))
    assert volume["bytes_per_iteration"] is None
    assert speed["avg_bw"] == pytest.approx(1.5 * (1 << 20) / 100e-6)
    assert speed["avg_bus_bw"] == pytest.approx((1.5 + 1) / 2 * (1 << 20) / 100e-6)
    assert any("no times but durations" in warning for warning in said["warnings"])
    assert any("no compute kernels" in warning for warning in said["warnings"])
    assert answer.tables["events"]["iteration"].null_count == 8
    assert answer.tables["ranks"].num_rows == 0


def test_a_verbose_job_has_iterations_and_no_compute(tmp_path):
    said = metrics(job(tmp_path, begun=NOW)).to_dict()
    assert said["iterations"] == 1
    assert said["iteration"]["mean_ns"] == 100_000
    assert set(said["breakdown"]["exact"].values()) == {None}
    assert said["breakdown"]["spec"]["comm_OTHER"] == pytest.approx(2.0)
    assert said["overlap"]["by_tag"] == {"OTHER": None}
    assert said["volume"]["OTHER"]["bytes_per_step_per_gpu"] == 3 * (1 << 20)


def test_means_cover_ranks_with_data(tmp_path):
    write(tmp_path / "a.log", record(rank=0, n=2, begun=NOW))
    write(tmp_path / "b.log", record(rank=1, n=2))
    said = metrics(tmp_path).to_dict()
    assert (said["iterations"], said["iteration"]["mean_ns"]) == (1, 100_000)
    assert [each["rank"] for each in said["iteration"]["by_rank"]] == [0]
    assert said["volume"]["OTHER"]["comm_bytes"] == 2 << 20
    assert said["volume"]["OTHER"]["bytes_per_step_per_gpu"] == 1 << 20
    assert any(warning.startswith("1 of 2 ranks (1)") for warning in said["warnings"])


def test_the_report_explains_missing_numbers(tmp_path, capsys):
    from fastcomm.metrics.tables import show

    show(metrics(job(tmp_path)))
    printed = " ".join(capsys.readouterr().out.split())
    assert "4 ranks, n/a steps" in printed
    assert "is n/a: the input has no times but durations and no compute" in printed
    assert "No communication is exposed" not in printed
    assert "idle n/a n/a" in printed


def warnings(tmp_path, *records):
    return only_trace(write(tmp_path / "a.log", *records)).meta.warnings


def test_operations_omitted_by_newer_versions_make_volume_a_lower_bound(tmp_path):
    (note,) = [w for w in warnings(tmp_path, record(name="DP Group 0")) if "8192" in w]
    assert "lower bound" in note
    assert any("8192" in w for w in warnings(tmp_path, record("Send")))
    assert not any("8192" in w for w in warnings(tmp_path, record()))


def test_a_name_of_the_communicator_is_the_name_of_the_group(tmp_path):
    trace = only_trace(write(tmp_path / "a.log", record(name="DP Group 0")))
    assert trace.groups["name"].to_pylist() == ["DP Group 0"]


def test_an_unknown_version_is_read_and_named(tmp_path):
    assert any("v9.0" in w and "v4.3" in w for w in warnings(tmp_path, record(version="v9.0")))


def test_missing_sequence_numbers_are_counted(tmp_path):
    lines = [record(sn=sn) for sn in (3, 5, 9)]
    assert any(
        w.startswith("4 of 7 operations have no line") for w in warnings(tmp_path, *lines)
    )
    lines = [record(c, sn) for c in ("AllReduce", "AllGather") for sn in (1, 2)]
    assert not any("no line" in w for w in warnings(tmp_path, *lines))


def test_one_damaged_line_is_left_out_with_a_warning(tmp_path):
    path = write(tmp_path / "a.log", *[record(sn=sn) for sn in range(3)])
    lines = path.read_text().splitlines()
    lines[1] = lines[1][:-20] + "}"
    path.write_text("\n".join(lines) + "\n")
    trace = only_trace(path)
    assert trace.comm["seq"].to_pylist() == [0, 2]
    assert any("1 of 3 lines" in w and "line 2" in w for w in trace.meta.warnings)


def test_a_last_line_that_is_cut_short_is_left_out_with_a_warning(tmp_path):
    path = write(tmp_path / "a.log", record(sn=0), record(sn=1))
    path.write_text(path.read_text()[:-40])
    trace = only_trace(path)
    assert trace.comm.num_rows == 1
    assert any("line 2, the last one, is truncated" in w for w in trace.meta.warnings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("hello\nworld\n", r"a\.log:1: 2 of 2 lines are not complete records"),
        ('{"header": 1}\n' * 3, r"a\.log:1: 3 of 3 lines"),
    ],
)
def test_a_file_that_is_not_a_log_is_refused(tmp_path, text, message):
    path = tmp_path / "a.log"
    path.write_text(text)
    with pytest.raises(TraceFileError, match=message):
        inspector.find([path], Config()).sources[0].read()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("coll_exec_time_us", -1),
        ("coll_exec_time_us", None),
        ("coll_msg_size_bytes", "big"),
        ("coll_sn", True),
        ("coll", 7),
        ("coll_msg_size_bytes", 1 << 63),
    ],
)
def test_a_value_of_a_wrong_kind_damages_its_line(tmp_path, key, value):
    bad = record(sn=1)
    bad["coll_perf"][key] = value
    trace = only_trace(write(tmp_path / "a.log", record(), bad, record(sn=2)))
    assert trace.comm["seq"].to_pylist() == [0, 2]


def test_more_than_one_damaged_line_in_a_thousand_is_an_error(tmp_path):
    path = write(tmp_path / "a.log", *[record(sn=sn) for sn in range(10)])
    path.write_text("oops\noops\n" + path.read_text())
    with pytest.raises(TraceFileError, match=r"a\.log:1: 2 of 12 lines .* line 1, 2"):
        only_trace(path)


def test_lines_of_other_kinds_are_no_operations(tmp_path):
    other = record()
    other["proxy_perf"] = other.pop("coll_perf")
    assert only_trace(write(tmp_path / "a.log", other, record())).comm.num_rows == 1
    with pytest.raises(TraceFileError, match="no operation"):
        only_trace(write(tmp_path / "b.log", other))


def test_a_gzipped_log_reads_as_the_plain_one(tmp_path):
    plain = write(tmp_path / "a.log", record(), record(sn=1))
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert only_trace(packed).comm.equals(only_trace(plain).comm)
    packed.write_bytes(gzip.compress(plain.read_bytes())[:-12])
    with pytest.raises(TraceFileError, match="the compressed file is truncated"):
        only_trace(packed)


def test_only_logs_of_the_inspector_are_claimed(tmp_path):
    assert inspector.claims(write(tmp_path / "a.log", record()))
    assert inspector.claims(write(tmp_path / "a.jsonl", record()))
    (tmp_path / "b.log").write_text("2026-01-01 step 1 loss 3.2\n")
    (tmp_path / "c.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "d.log").write_text("")
    write(tmp_path / "e.json", record())
    assert not any(inspector.claims(tmp_path / name) for name in ("b.log", "c.jsonl", "d.log"))
    assert not inspector.claims(tmp_path / "e.json")


def test_tags_follow_the_configuration(tmp_path):
    from fastcomm.trace.rank_grid import Parallel

    every = found(job(tmp_path), parallel=Parallel(tp=2, dp=2))
    groups = every.sources[0].read().groups.to_pylist()
    assert TAGS[groups[1]["tag"]] == "DP"


def stats(coll=0, lost=0, version="v4.3", comm=WORLD, **more):
    """A line about a dump: `coll` lines follow, and `lost` operations were dropped so far."""
    counts = {"coll_records": coll, "coll_dropped_total": lost, "p2p_records": 0, **more}
    head = record(version=version, comm=comm)
    return {"header": head["header"], "metadata": head["metadata"], "dump_stats": counts}


def bare(**words):
    """A line that inherits its header."""
    return {"coll_perf": record(**words)["coll_perf"]}


def losses(tmp_path, *records):
    notes = warnings(tmp_path, *records)
    return [note.partition(" operations")[0] for note in notes if "have no line" in note]


@pytest.mark.parametrize("version", ["v4.1", "v4.2", "v4.3"])
def test_logs_of_2026_are_read_with_their_losses(version):
    every = found(shared(f"formats_2026/inspector/{version}"))
    assert (len(every.sources), every.world_size) == (2, 2)
    for source in every.sources:
        trace = source.read()
        rows = [(OPS[row["op"]], row["msg_bytes"]) for row in trace.comm.to_pylist()]
        assert sorted(rows) == [("AllGather", 32768)] * 6 + [("AllReduce", 1 << 20)] * 8
        assert sum("4 of 18 operations have no line" in note for note in trace.meta.warnings)
        assert not any("version" in note or "types" in note for note in trace.meta.warnings)


@pytest.mark.parametrize("version", ["v4.0", "v4.1", "v4.2", "v4.3"])
def test_a_known_version_is_no_warning(tmp_path, version):
    assert not any("version" in note for note in warnings(tmp_path, record(version=version)))


@pytest.mark.parametrize("version", ["v4.4", "v4.10", "none", "v5.0"])
def test_another_version_is_read_as_the_last_known_one(tmp_path, version):
    notes = warnings(tmp_path, record(version=version))
    assert [note for note in notes if f"{version} is unknown; read as v4.3" in note]


def test_losses_are_those_of_the_dumps_and_of_gaps(tmp_path):
    lines = [record(sn=1), record(sn=2)]
    assert losses(tmp_path, *lines) == []
    assert losses(tmp_path, stats(2), *lines) == []
    assert losses(tmp_path, stats(2, lost=3), *lines, stats(0, lost=5)) == ["5 of 7"]
    assert losses(tmp_path, stats(2, lost=1, p2p_dropped_total=2), *lines) == ["3 of 5"]
    assert losses(tmp_path, stats(1), record(sn=1), record(sn=4)) == ["2 of 4"]
    pair = [record(sn=sn, n=2, comm=PAIR) for sn in (1, 5)]
    assert losses(tmp_path, stats(2, lost=2), *lines, *pair) == ["5 of 9"]


def test_lines_inherit_header_and_metadata_of_the_dump(tmp_path):
    whole = [
        *(record(sn=1, version="v4.3"), record(sn=2, version="v4.3")),
        record(sn=1, n=2, comm=PAIR, version="v4.3"),
    ]
    plain = only_trace(write(tmp_path / "a.log", *whole))
    lines = [
        *(stats(2), bare(sn=1), bare(sn=2)),
        *(stats(1, comm=PAIR), bare(sn=1)),
    ]
    inherited = only_trace(write(tmp_path / "b.log", *lines))
    names = ("group", "seq", "op", "msg_bytes")
    rows = [
        sorted(zip(*(trace.comm[name].to_pylist() for name in names), strict=True))
        for trace in (plain, inherited)
    ]
    assert rows[0] == rows[1]
    assert inherited.groups["name"].to_pylist() == plain.groups["name"].to_pylist()


@pytest.mark.parametrize(
    ("lines", "dropped"),
    [
        ([bare(sn=9), stats(1), bare()], 1),
        ([stats(1), bare(), bare(sn=9)], 3),
        ([stats(2), bare(), record(sn=1), bare(sn=2), bare(sn=9)], 5),
        ([stats(1), "{broken", bare(sn=9)], 2),
    ],
)
def test_a_line_that_no_dump_announces_is_damage(tmp_path, lines, dropped):
    path = tmp_path / "a.log"
    fine = [record(sn=10 + n) for n in range(3)]
    texts = [line if isinstance(line, str) else json.dumps(line) for line in [*lines, *fine]]
    path.write_text("\n".join(texts) + "\n")
    log = inspector._Log(path=path)
    for number, text in enumerate(texts, 1):
        log.lines = number
        inspector._add(log, text.encode(), 0, is_whole=True)
    assert 9 not in [row[5] for row in log.rows]
    assert dropped in log.dropped


def test_algorithm_and_protocol_are_in_the_name_of_an_operation(tmp_path):
    lines = [record(sn=sn, version="v4.2") for sn in range(3)]
    lines[0]["coll_perf"] |= {"coll_algo": "RING", "coll_proto": "LL128"}
    lines[1]["coll_perf"] |= {"coll_algo": "NVLS_TREE", "coll_proto": "unknown"}
    trace = only_trace(write(tmp_path / "a.log", *lines))
    names = [row["name"] for row in trace.events.to_pylist()]
    assert names == ["AllReduce RING LL128", "AllReduce NVLS_TREE", "AllReduce"]
    assert {OPS[op] for op in trace.comm["op"].to_pylist()} == {"AllReduce"}
    assert not any("no line" in note for note in trace.meta.warnings)


def test_records_of_unknown_types_are_left_out_with_one_note(tmp_path):
    head = {key: record()[key] for key in ("header", "metadata")}
    other = [{**head, "net_perf": {}}, {**head, "proxy_trace": {}}, {**head, "ce_perf": 1}]
    notes = warnings(tmp_path, record(), *other)
    assert [note for note in notes if "unknown types" in note] == [
        "2 lines of unknown types (ce_perf, net_perf) were left out"
    ]


def test_operations_that_a_member_lacks_are_left_out_of_skew(tmp_path):
    for rank in range(4):
        lines = [
            record(sn=sn, rank=rank, begun=NOW + 10_000 * sn + late, us=1500 - late)
            for late in [500 * (rank == 3)]
            for sn in range(40)
            if rank < 2 or sn >= 25
        ]
        write(tmp_path / f"h-pid{rank}.log", *lines)
    data = metrics(tmp_path).to_dict()
    (skew,) = data["skew"]
    assert (skew["count"], skew["skew_mean_ns"]) == (15, 500_000)
    matching = data["matching"]
    assert (matching["incomplete"], matching["lacking_ranks"]) == (25, [2, 3])
    (warning,) = [text for text in data["warnings"] if "ranks 2-3 lack operations" in text]
    assert warning.startswith("25 of 40 collectives are not on all members")


def test_a_member_without_any_operation_of_its_group_is_none(tmp_path):
    for rank in range(3):
        lines = [record(sn=sn, rank=rank, n=4, begun=NOW + 10_000 * sn) for sn in range(4)]
        write(tmp_path / f"h-pid{rank}.log", *lines)
    matching = metrics(tmp_path).to_dict()["matching"]
    assert (matching["collectives"], matching["incomplete"]) == (4, 0)
