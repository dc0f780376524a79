"""Test launches without correlation: by external id, as ROCm builds of 2024, or by arrows."""

import json
from time import process_time

import numpy as np
import pytest
from builders import kineto_text as k
from builders.commands import invoke

from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import categories, reader


def renamed(row, name):
    """The event with `correlation` as another arg, or without it."""
    args = {key: value for key, value in row["args"].items() if key != "correlation"}
    number = row["args"].get("correlation")
    if name is not None and number is not None:
        args[name] = number
    return {**row, "args": args}


def flow(row, number, **other):
    """An end of an arrow, at the begin of an event."""
    place = {key: row[key] for key in ("pid", "tid", "ts")}
    phase = {"ph": "f", "bp": "e"} if row["cat"] == "kernel" else {"ph": "s"}
    return {**phase, "cat": "ac2g", "name": "ac2g", "id": number, **place, **other}


def flows(rows, number=int, **other):
    for row in rows:
        if (correlation := row["args"].get("correlation")) is not None:
            yield flow(row, number(correlation), **other)


def job(name):
    """Four steps whose kernels begin in the middle of a step, after both launches of the step.

    Returns them with correlations, and with these under another name, or without.
    """
    rows = []
    for step in range(4):
        start, number = 10_000 * step, 7000 + 2 * step
        operator = k.event(
            "record_param_comms", "cpu_op", start + 200, 50, pid=100, tid=1,
            Collective_name="allreduce", dtype="Float", In_msg_nelems=1000,
            Out_msg_nelems=1000, External_id=step,
        )  # fmt: skip
        rows += [
            k.mark(f"ProfilerStep#{step}", start, 10_000),
            k.launch(start + 110, number),
            {**operator, "args": {**operator["args"], "External id": step}},
            k.launch(start + 210, number + 1),
            k.kernel("Cijk_gemm", start + 4000, 5000, correlation=number),
            k.kernel("ncclDevKernel_Generic", start + 9100, 800, 1, correlation=number + 1),
        ]
    return rows, [renamed(row, name) for row in rows]


def read(path, events, whole=False):
    k.write(path, events)
    return reader.read(path, TraceOptions(whole=whole))


@pytest.mark.parametrize("whole", [False, True])
def test_an_external_id_joins_calls_and_kernels_without_correlation(tmp_path, whole):
    with_correlation, without = job("External id")
    wanted = read(tmp_path / "rank0.json", with_correlation, whole)
    trace = read(tmp_path / "rank1.json", without, whole)
    assert trace.comm.drop_columns(["event"]).equals(wanted.comm.drop_columns(["event"]))
    assert trace.comm["payload_bytes"].to_pylist() == [4000] * 4
    assert trace.device_iterations.equals(wanted.device_iterations)
    assert trace.iterations.equals(wanted.iterations)
    assert trace.meta.warnings == wanted.meta.warnings
    work = [row for row in trace.events.to_pylist() if row["correlation"] is not None]
    assert sorted(row["correlation"] for row in work) == sorted(2 * [*range(7000, 7008)])


def test_an_external_id_joins_nothing_where_correlations_are(tmp_path):
    events = [
        *(k.mark("ProfilerStep#1", 0, 100), k.launch(1, 5), k.launch(2, 6)),
        {
            **k.kernel("gemm", 10, 5, correlation=5),
            "args": {"correlation": 5, "External id": 6},
        },
    ]
    trace = read(tmp_path / "rank0.json", events)
    assert [row["correlation"] for row in trace.events.to_pylist()] == [None, 5, 6, 5]


def test_launches_that_nothing_joins_are_said_to_be_recorded(tmp_path):
    path = k.write(tmp_path / "rank0.json", job(None)[1])
    data = json.loads(invoke("metrics", path, "--json").stdout)
    texts = " ".join(data["warnings"])
    assert data["iterations"] == 4
    assert "8 launches are recorded, but no correlation joins one with its device work" in texts
    assert "launches are recorded, but no correlation joins them with kernels" in texts
    assert "no launch of device work is recorded" not in texts
    assert "their launch is not recorded" not in texts


def test_without_calls_no_launch_is_recorded(tmp_path):
    rows = [row for row in job(None)[1] if row["cat"] != "cuda_runtime"]
    path = k.write(tmp_path / "rank0.json", rows)
    texts = " ".join(json.loads(invoke("metrics", path, "--json").stdout)["warnings"])
    assert "no launch of device work is recorded" in texts


@pytest.mark.parametrize("name", ["correlation", "External id"])
@pytest.mark.parametrize("number", [0, -1])
def test_numbers_that_stand_for_none_join_nothing(tmp_path, name, number):
    rows, _ = job(None)
    plain = [renamed(row, None) for row in rows]
    numbered = [
        {**row, "args": {**row["args"], name: number}}
        if row["cat"] in ("kernel", "cuda_runtime")
        else row
        for row in plain
    ]
    found, expected = (
        read(tmp_path / f"{n}.json", events) for n, events in enumerate((numbered, plain))
    )
    assert found.iterations.equals(expected.iterations)
    assert found.events["correlation"].null_count == found.events.num_rows


def drawn(rows, bare, ends, place):
    """The events without correlations, and the arrows before, behind or between them."""
    ends = list(ends)
    if place == "between":
        return [event for k, row in enumerate(bare) for event in (row, *ends[k : k + 1])]
    return [*ends, *bare] if place == "before" else [*bare, *ends]


def assert_joined(trace, expected):
    assert trace.comm.drop_columns(["event"]).equals(expected.comm.drop_columns(["event"]))
    assert trace.device_iterations.equals(expected.device_iterations)
    assert trace.iterations.equals(expected.iterations)
    assert trace.meta.warnings == expected.meta.warnings


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("place", ["before", "between", "behind"])
@pytest.mark.parametrize(
    ("number", "other"),
    [
        (int, {}),
        (hex, {"cat": "async_cpu_to_gpu"}),
        (str, {"bp": None}),
        (lambda number: number % 2, {}),
        (lambda number: {"global": hex(number)}, {"args": {"id": 1, "cat": "kernel"}}),
    ],
    ids=["numbers", "hexadecimal", "texts", "used-again", "global"],
)
def test_arrows_alone_join_calls_and_kernels(tmp_path, number, other, place, whole):
    rows, bare = job(None)
    expected = read(tmp_path / "rank0.json", rows, whole)
    events = drawn(rows, bare, flows(rows, number, **other), place)
    assert_joined(read(tmp_path / "rank1.json", events, whole), expected)


def test_arrows_join_lanes_that_have_names(tmp_path):
    def lanes(rows):
        names = ("pid", "tid")
        return [{**row, **{name: f"lane {row[name]}" for name in names}} for row in rows]

    rows, bare = job(None)
    expected = read(tmp_path / "rank0.json", lanes(rows))
    ends = [{**flow(rows[1], 5), "tid": "no lane"}, *lanes(flows(rows))]
    assert_joined(read(tmp_path / "rank1.json", [*ends, *lanes(bare)]), expected)


def test_an_arrow_without_an_enclosing_kernel_ends_at_the_next(tmp_path):
    rows, bare = job(None)
    expected = read(tmp_path / "rank0.json", rows)
    ends = [
        {**end, "bp": None, "ts": end["ts"] - (7 if end["ph"] == "f" else 0)}
        for end in flows(rows)
    ]
    assert_joined(read(tmp_path / "rank1.json", [*bare, *ends]), expected)


def test_ends_of_arrows_without_a_partner_change_nothing(tmp_path):
    rows, bare = job(None)
    expected = read(tmp_path / "rank0.json", rows)
    mark, call, _, _, gemm, _ = rows[:6]
    strange = [
        *(flow(call, 1), flow(gemm, 2), flow(mark, 3)),  # one end, and no call
        {**flow(gemm, 7000), "ts": 3999},  # before every kernel, and inside of none
        *({**flow(call, 7000), key: None} for key in ("ts", "ph", "cat", "id")),
        {**flow(call, 7000), "ph": "t"},
        {**flow(call, 7001), "cat": "fwdbwd"},
    ]
    events = [*strange, *bare, *flows(rows), *strange]
    assert_joined(read(tmp_path / "rank1.json", events), expected)


def test_an_id_of_several_processes_joins_nothing(tmp_path):
    rows, bare = job(None)
    unjoined = read(tmp_path / "rank0.json", bare)
    other = [{**row, "pid": 200} for row in rows if row["cat"] == "cuda_runtime"]
    trace = read(tmp_path / "rank1.json", [*bare, *flows(rows), *flows(other)])
    assert trace.meta.warnings == unjoined.meta.warnings


@pytest.mark.parametrize("name", ["correlation", "External id"])
def test_arrows_are_not_read_where_numbers_join(tmp_path, name, monkeypatch):
    monkeypatch.setattr(categories, "flow_events", lambda *_: pytest.fail("arrows are read"))
    rows, named = job("External id")
    events = rows if name == "correlation" else named
    assert len(read(tmp_path / "rank0.json", [*events, *flows(rows)]).iterations) == 4


@pytest.mark.parametrize("number", [0, None])
def test_arrows_join_what_external_ids_leave(tmp_path, number):
    """As of calls outside of operators, whose external id is none."""
    rows, named = job("External id")
    expected = read(tmp_path / "rank0.json", rows)
    bare = [
        {**row, "args": {**row["args"], "External id": number}} if place % 6 in (1, 4) else row
        for place, row in enumerate(named)
    ]
    assert read(tmp_path / "rank1.json", bare).device_iterations != expected.device_iterations
    assert_joined(read(tmp_path / "rank2.json", [*bare, *flows(rows)]), expected)


def test_numbers_of_launches_by_arrows_do_not_overflow(tmp_path):
    rows, bare = job(None)
    expected = read(tmp_path / "rank0.json", rows)
    bare[2]["args"]["correlation"] = (1 << 63) - 1  # of an operator
    assert_joined(read(tmp_path / "rank1.json", [*bare, *flows(rows)]), expected)


def queued(again, apart=1):
    """Four steps that are launched at once; kernels run later, four of each step.

    Correlations are used again after so many launches; 0: never. They are `apart` or more.
    """
    rows, count = [], 0
    for step in range(4):
        rows.append(k.mark(f"ProfilerStep#{step}", 100 * step, 100))
        for n in range(4):
            number = apart * (1 + (count % again if again else count))
            rows.append(k.launch(100 * step + 10 * n + 1, number, dur=5))
            at = 300 + 1000 * step + 200 * n
            rows.append(k.kernel("gemm", at, 150, correlation=number))
            count += 1
    return rows


@pytest.mark.parametrize("again", [1, 2, 4, 8])
@pytest.mark.parametrize("apart", [1, 1 << 50])
@pytest.mark.parametrize("whole", [False, True])
def test_correlations_that_are_used_again_join_launches_in_order(tmp_path, again, apart, whole):
    expected = read(tmp_path / "rank0.json", queued(0), whole)
    trace = read(tmp_path / "rank1.json", queued(again, apart), whole)
    assert_joined(trace, expected)


def test_arrows_whose_ids_are_used_again_join_launches_in_order(tmp_path):
    expected = read(tmp_path / "rank0.json", queued(0))
    rows = queued(4)
    bare = [renamed(row, None) for row in rows]
    assert_joined(read(tmp_path / "rank1.json", [*bare, *flows(rows)]), expected)


def test_calls_of_one_launch_keep_its_correlation(tmp_path):
    """A call inside of another, and calls on two threads, of one kernel."""
    rows = [
        *(k.launch(10, 5, dur=9), k.launch(12, 5, dur=3), k.launch(60, 5, tid=2)),
        *(k.launch(30, 6), k.launch(33, 6), k.launch(40, 7)),
        k.kernel("gemm", 80, 5, correlation=5),
        k.kernel("gemm", 90, 5, correlation=6),
        k.kernel("gemm", 95, 5, correlation=7),
    ]
    trace = read(tmp_path / "rank0.json", rows)
    assert sorted(trace.events["correlation"].to_pylist()) == [5, 5, 5, 5, 6, 6, 6, 7, 7]


def test_arrows_of_one_id_take_linear_time(tmp_path):
    def seconds(count):
        calls = [renamed(k.launch(3 * n, 1), None) for n in range(count)]
        kernels = [renamed(k.kernel("gemm", 3 * n + 1, 1), None) for n in range(count)]
        path = k.write(tmp_path / "rank0.json", [*calls, *kernels, *(
            flow(row, 1) for row in (*calls, *kernels)
        )])  # fmt: skip
        begun = process_time()
        trace = reader.read(path, TraceOptions())
        assert len(np.unique(trace.events["correlation"].to_numpy())) == count
        return process_time() - begun

    seconds(100)
    assert seconds(40_000) < 16 * seconds(10_000)
