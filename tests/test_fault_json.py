"""Test unusual JSON traces: nested, huge, duplicate, negative, empty."""

import json
from time import process_time

import pyarrow.parquet as pq
import pytest
from builders import kineto_text as k
from builders.fault_files import BASE, beside
from builders.fault_tools import STEP, refused, run
from builders.opened import open_run

from fastcomm.formats.kineto import chrome
from fastcomm.metrics.computation import compute_metrics


@pytest.fixture
def folder(tmp_path):
    return beside(tmp_path)


DEEP = "[" * 1_000_000 + "]" * 1_000_000


def with_text(folder, old, new, text=BASE):
    assert old in text
    path = folder / "rank0.json"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"stream": 7', '"stream": 7, "x": ' + DEEP),
        ('"schemaVersion": 1', '"schemaVersion": 1, "x": ' + DEEP),
        ('"pg_config": []', '"pg_config": ' + DEEP),
        ('"pg_config": []', '"pg_config": ' + "[" * 100_000),
        ('"[0, 1]"', '"' + "[" * 100_000 + '"'),
        ('"traceEvents": [', '"x": ' + DEEP + ', "traceEvents": ['),
    ],
)
def test_json_nested_a_million_deep_is_skipped_or_refused(folder, old, new):
    path = with_text(folder, old, new)
    for command in ("metrics", "info", "critical-path"):
        code, said = run(command, path)
        assert code == 0 or str(path) in said


def test_other_documents_nested_a_million_deep_are_refused(folder):
    (folder / "trace.json").write_text(DEEP)
    assert "trace.json: " in refused("kernels", folder / "trace.json")
    run("ingest", folder / "good.json", "-o", folder / "store")
    (folder / "store" / "fastcomm.json").write_text(DEEP)
    assert "fastcomm.json: damaged" in refused("metrics", folder / "store")


LONG = "9" * 1000


@pytest.mark.parametrize(
    ("old", "new", "warned"),
    [
        ('"ts": 5', '"ts": ' + LONG, "1 of 4 events do not parse"),
        ('"dur": 30', '"dur": ' + LONG, "1 of 4 events do not parse"),
        ('"dur": 30', '"dur": 30.' + LONG, ""),
        ('"dur": 30', '"dur": 1e' + LONG, "1 of 4 events do not parse"),
        ('"In msg nelems": 1000', '"In msg nelems": ' + LONG, ""),
        ('"baseTimeNanoseconds": 0', f'"baseTimeNanoseconds": {LONG}', "absolute time"),
        ('"baseTimeNanoseconds": 0', f'"baseTimeNanoseconds": {1 << 63}', "absolute time"),
        ('"baseTimeNanoseconds": 0', f'"baseTimeNanoseconds": -{1 << 63}', "absolute time"),
    ],
)
def test_numbers_of_a_thousand_digits_drop_their_event_or_are_unknown(folder, old, new, warned):
    code, said = run("info", with_text(folder, old, new))
    assert code == 0, said
    assert warned in " ".join(said.split())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"rank": 0', '"rank": ' + LONG, "found a rank of more than 4194304"),
        ('"world_size": 1', f'"world_size": {10**15}', "a world size of more than 4194304"),
    ],
)
def test_implausible_ranks_are_refused(folder, old, new, message):
    assert message in refused("metrics", with_text(folder, old, new))


def test_a_name_of_megabytes_is_read_up_to_a_limit(folder, monkeypatch):
    path = with_text(folder, "gemm", "g" * 3_000_000)
    assert run("metrics", path)[0] == 0
    monkeypatch.setattr(chrome, "_EVENT_LIMIT", 1 << 20)
    assert "is longer than 1 MiB" in refused("metrics", path)


def test_a_name_that_is_not_utf8_is_read(folder):
    path = folder / "rank0.json"
    path.write_bytes(BASE.replace("gemm", "g\udcff\udcfem").encode(errors="surrogateescape"))
    assert run("metrics", path)[0] == 0
    path.write_text(BASE.replace("gemm", r"\ud800\udc00\ud800"))
    assert run("critical-path", path)[0] == 0


def test_an_event_with_a_negative_duration_is_dropped_with_a_warning(folder):
    code, said = run("info", with_text(folder, '"dur": 30', '"dur": -30'))
    assert code == 0
    assert "1 of 4 events do not parse" in " ".join(said.split())


def test_times_of_a_clock_that_jumps_are_read_unchanged(folder):
    events = [*STEP, k.kernel("early", -5e12, 3), k.kernel("late", 9e15, 3)]
    path = folder / "rank0.json"
    path.write_text(json.dumps(k.document(events)))
    code, said = run("metrics", path, "--json")
    assert code == 0, said
    assert json.loads(said)["iterations"] == 1


@pytest.mark.parametrize("events", [[], [{"ph": "M", "name": "process_name", "pid": 0}]])
def test_a_trace_without_events_is_refused(folder, events):
    path = folder / "rank0.json"
    path.write_text(json.dumps(k.document(events)))
    assert "rank0.json: no device work, launch or annotation" in refused("metrics", path)


def of_streams(path, events, streams):
    """A trace of a step of kernels, one behind the other, on so many streams in turn."""
    kernel = (
        ',{"ph": "X", "cat": "kernel", "name": "g", "pid": 0, "tid": %d, "ts": %d, "dur": 1, '
        '"args": {"stream": %d, "device": 0, "correlation": %d}}'
    )
    rows = (kernel % (k % streams, 2 * k, k % streams, k) for k in range(events))
    head, tail = json.dumps(k.document([k.mark("ProfilerStep#0", 0, 2 * events)])).split("}]")
    path.write_text("".join([head, "}", *rows, "]", tail]))
    return path


def test_as_many_streams_as_events_take_no_longer_than_one(folder):
    """A million of them take 2.3 times as long as one, as do ten million."""
    took, found = {}, {}
    for events, streams in ((1_000, 1), (100_000, 1), (100_000, 100_000)):
        path = of_streams(folder / "rank0.json", events, streams)
        begun = process_time()
        found[streams] = compute_metrics(open_run(path)).to_dict()["breakdown"]
        took[events, streams] = process_time() - begun
    assert found[1] == found[100_000]
    assert took[100_000, 100_000] < 6 * took[100_000, 1]


def test_ids_above_2_to_the_53_are_distinguished(folder):
    near = [(1 << 53) + 1, (1 << 53) + 2, (1 << 62) + 1, (1 << 62) + 2]
    events = [STEP[0], *(k.launch(n + 1, each) for n, each in enumerate(near))]
    events += [
        k.kernel("g", 20 + 5 * n, 2, stream=each, correlation=each)
        for n, each in enumerate(near)
    ]
    path = folder / "rank0.json"
    path.write_text(json.dumps(k.document(events)))
    run("ingest", path, "-o", folder / "store")
    stored = pq.read_table(folder / "store" / "rank-00000.parquet").to_pylist()
    assert sorted(row["correlation"] for row in stored if row["name"] == "g") == sorted(near)
    assert {row["thread"] for row in stored if row["name"] == "g"} == set(map(str, near))


def test_a_duplicate_key_has_its_last_value(folder):
    code, said = run("info", with_text(folder, '"dur": 30', '"dur": 7, "dur": 30'))
    assert code == 0, said
    assert "two lists of traceEvents, the second at byte 151;" in refused(
        "metrics", with_text(folder, '"traceEvents"', '"traceEvents": [], "traceEvents"')
    )
