"""Runs without an accelerator: collectives of the host are communication, operators compute."""

import gzip
import json
import re
import shutil
from collections import Counter, defaultdict
from decimal import Decimal
from functools import cache

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.places import JOBS, RECORDED

import fastcomm
from fastcomm.formats.kineto import categories
from fastcomm.formats.kineto.chrome import scan_file
from fastcomm.formats.opening import open_run
from fastcomm.trace.schema import OPS

RUN = RECORDED / "gloo_2x2"
RANKS = range(4)
DDP = JOBS / "ddp-straggler" / "clean"
FUNCTIONAL = "_c10d_functional::wait_tensor"  # as DTensor calls


# ------------------------------------------------------------------ the definition, slowly


def events_of(path):
    """The complete events of a rank, with start and stop in ns."""
    packed = path.read_bytes()
    text = json.loads(gzip.decompress(packed), parse_float=Decimal)
    rows = [row for row in text["traceEvents"] if row.get("ph") == "X"]
    for row in rows:
        row["start"] = int(Decimal(row["ts"]) * 1000)
        row["stop"] = int((Decimal(row["ts"]) + Decimal(row["dur"])) * 1000)
    return rows


def merged(intervals):
    """The union of intervals, as disjoint ones."""
    union = []
    for start, stop in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1][1] = max(union[-1][1], stop)
        else:
            union.append([start, stop])
    return union


def without(intervals, others):
    """The parts of intervals outside of others."""
    parts = merged(intervals)
    for low, high in merged(others):
        parts = [
            part
            for start, stop in parts
            for part in ((start, min(stop, low)), (max(start, high), stop))
            if part[0] < part[1]
        ]
    return parts


def inside(intervals, start, stop):
    return sum(max(0, min(high, stop) - max(low, start)) for low, high in merged(intervals))


def waits(operators, ends):
    """When a thread waits: no operator computes on it while a collective ends."""
    bounds = sorted({time for row in operators for time in (row["start"], row["stop"])})
    for end in ends:
        before = [time for time in bounds if time < end]
        around = [row for row in operators if row["start"] < end <= row["stop"]]
        inner = min(around, key=lambda row: row["stop"] - row["start"], default=None)
        has_inner = inner and any(
            row["start"] >= inner["start"] and row["stop"] <= inner["stop"]
            for row in operators
            if row is not inner
        )
        calls = inner is None or (
            has_inner
            and (
                "::" not in inner["name"] or inner["name"].startswith(("autograd::", "fsdp::"))
            )
        )
        if before and calls:
            yield before[-1], end


MESSAGES = {"gloo:send": "c10d::send", "gloo:recv": "c10d::recv_"}


def begin(row, rows):
    """When a collective begins: a message with the operator that issues it."""
    if row["name"] not in MESSAGES:
        return row["start"]
    issues = [
        other["start"]
        for other in rows
        if other["name"] == MESSAGES[row["name"]]
        and other["start"] <= row["start"] <= other["stop"]
    ]
    return max(issues, default=row["start"])


def oracle(paths):
    """Shares of compute, exposed communication and idle time of all steps of all ranks."""
    totals = Counter()
    for path in paths:
        rows = events_of(path)
        gloo = [row for row in rows if row["name"].startswith("gloo:")]
        library = {row["tid"] for row in gloo if row["name"] not in MESSAGES}
        operators = defaultdict(list), defaultdict(list)
        for row in rows:
            if row["cat"] == "cpu_op" and row["tid"] not in library:
                is_collective = row["name"].startswith(("c10d::", "_c10d_functional::"))
                operators[is_collective][row["tid"]].append((row["start"], row["stop"]))
        ends = [row["stop"] for row in gloo]
        compute = [
            part
            for tid, own in operators[0].items()
            for part in without(
                own,
                [
                    *operators[1].get(tid, []),
                    *waits(
                        [row for row in rows if row["cat"] == "cpu_op" and row["tid"] == tid],
                        ends,
                    ),
                ],
            )
        ]
        communication = [(begin(row, rows), row["stop"]) for row in gloo]
        for step in (row for row in rows if row["name"].startswith("ProfilerStep#")):
            within = step["start"], step["stop"]
            busy = inside([*compute, *communication], *within)
            totals["compute"] += inside(compute, *within)
            totals["exposed"] += busy - inside(compute, *within)
            totals["idle"] += step["stop"] - step["start"] - busy
    whole = sum(totals.values())
    return {name: ns / whole for name, ns in totals.items()}


@cache
def printed(*words):
    return invoke(*words).stdout


@pytest.fixture
def metrics():
    return json.loads(printed("metrics", RUN, "--json"))


@pytest.fixture(scope="module")
def ingested(tmp_path_factory):
    """The store of the run, and what is said of it."""
    folder = tmp_path_factory.mktemp("store") / "store"
    return folder, invoke("ingest", RUN, "--output", folder).stderr


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A folder with the page of the run, and its tables in another one."""
    folder = tmp_path_factory.mktemp("report")
    invoke("report", RUN, "--html", folder / "page.html", "-o", folder / "tables")
    return folder


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        ("gloo_2x2", ()),
        ("gloo_4rank", ("--ranks", "1-2")),
        ("gloo_4rank_et", ("--ranks", "0,3")),
    ],
)
def test_compute_communication_and_idle_are_those_of_the_definition(real, run, ranks):
    whole = json.loads(printed("metrics", real(run), *ranks, "--json"))
    exact = whole["breakdown"]["exact"]
    paths = [path for path in real(run).iterdir() if "torch_et" not in path.name]
    expected = oracle(
        [path for path in paths if int(re.search(r"\d", path.name)[0]) in whole["ranks"]]
    )
    assert exact["compute"] == pytest.approx(expected["compute"], rel=1e-9)
    assert exact["idle"] == pytest.approx(expected["idle"], rel=1e-9)
    exposed = sum(share for name, share in exact.items() if name.startswith("exposed_"))
    assert exposed == pytest.approx(expected["exposed"], rel=1e-9)


def test_the_parallelism_of_every_group_is_that_of_the_job(metrics):
    """What `tests/data/record.py` does in each of two steps, on each of four ranks."""
    counts = {
        (group["description"], group["tag"]): group["events"] for group in metrics["groups"]
    }
    assert counts == {
        ("mesh_dp", "DP"): 4 * 2 * 4,
        ("mesh_tp", "TP"): 2 * 2 * 4,
        ("default_pg", "PP"): 2 * 2 * 4,  # messages in a ring
        ("default_pg", "EP"): 1 * 2 * 4,
        ("default_pg", "OTHER"): 1 * 2 * 4,  # a broadcast
    }


@pytest.mark.parametrize(("operator", "tag"), [("aten::mul", "DP"), (FUNCTIONAL, "OTHER")])
def test_collectives_of_sharded_tensors_are_not_taken_for_data_parallelism(
    tmp_path, operator, tag
):
    for path in sorted(DDP.glob("rank[01].json.gz")):
        text = json.loads(gzip.decompress(path.read_bytes()))
        events = text["traceEvents"]
        text["traceEvents"] = [e for e in events if "DataParallel" not in e["name"]]
        text["traceEvents"].append(
            next(e for e in events if e.get("cat") == "cpu_op") | {"name": operator}
        )
        (tmp_path / path.stem).write_text(json.dumps(text))
    assert list(fastcomm.open(tmp_path).metrics().to_dict()["volume"]) == [tag]


def test_all_collectives_and_messages_are_matched(metrics):
    matching = metrics["matching"]
    assert (matching["events"], matching["matched"], matching["share"]) == (80, 80, 1.0)
    steps, pairs = 2, 2
    assert matching["collectives"] == steps * (4 * pairs + 2 * pairs + 1 + 1)
    assert matching["messages"] == steps * 4


def test_sizes_are_dimensions_times_type():
    """Of one step of `tests/data/record.py`: float32, 8 samples of 32 values."""
    comm = fastcomm.open(RUN).read(0).comm
    ops = [OPS[op] for op in comm["op"].to_pylist()]
    payload = Counter(zip(ops, comm["payload_bytes"].to_pylist(), strict=True))
    activations, weights, bias = 8 * 32 * 4, 32 * 32 * 4, 32 * 4
    assert payload == {
        ("AllReduce", activations): 2,
        ("AllGather", 2 * activations): 2,
        ("SendRecv", 64 * 4): 4,
        ("AllToAll", 16 * 4): 2,
        ("AllReduce", weights): 4,
        ("AllReduce", bias): 4,
        ("Broadcast", 16 * 4): 2,
    }


@pytest.mark.parametrize(
    ("name", "elements_out", "elements_in", "size"),
    [
        ("all_gather", 8, 2, 4),
        ("all_gather", 8, 3, None),
        ("all_gather", 8, 0, None),
        ("reduce_scatter", 2, 8, 4),
        ("reduce_scatter", 3, 8, None),
        ("reduce_scatter", 0, 8, None),
    ],
)
def test_a_group_that_is_not_listed_has_the_size_that_tensors_imply(
    tmp_path, name, elements_out, elements_in, size
):
    operator = {"all_gather": "_allgather_base_"}.get(name, f"_{name}_base_")
    dims = [[elements_out], [elements_in]]
    types = ["float", "float"]
    events = [
        k.mark("ProfilerStep#0", 0, 100),
        k.event(f"c10d::{operator}", "cpu_op", 1, 2, Input_Dims=dims, Input_type=types),
        k.event(
            f"gloo:_{name}_base", "user_annotation", 9, 9, tid=9,
            Input_Dims=dims[1:], Input_type=types[1:],
        ),
    ]  # fmt: skip
    document = k.document(events, world=8)
    document["distributedInfo"]["backend"] = "gloo"
    (tmp_path / "rank0.json").write_text(json.dumps(document))
    groups = fastcomm.open(tmp_path).read(0).groups.to_pylist()
    assert [group["size"] for group in groups] == ([size] if size else [])


def test_the_page_of_the_terminal_says_that_it_is_a_run_of_the_host():
    output = " ".join(invoke("metrics", RUN).output.split())
    assert (
        "a run without an accelerator: compute is the time of operators on the host" in output
    )
    assert "not measured" not in output


def test_paths_and_what_ifs_of_a_run_without_a_device_name_no_device():
    for words in (("critical-path", RUN), ("what-if", RUN, "--scale", "comm:DP=0.5")):
        text = printed(*words)
        assert "\ncommunication " in text
        assert "device" not in text


def test_a_what_if_of_a_run_without_a_device_has_no_interval():
    """The errors of made-up jobs on devices say nothing about runs of the host."""
    text = invoke("what-if", RUN, "--scale", "comm:DP=0.5", "--json").stdout
    interval = json.loads(text)["interval"]
    assert interval["low_ns"] is interval["high_ns"] is None
    assert "not validated on runs of the host" in interval["edit_error_of"]


def test_compute_of_a_run_without_a_device_is_operators_that_enqueue_nothing():
    def saved(target):
        whole = json.loads(invoke("what-if", RUN, "--scale", f"{target}=0", "--json").stdout)
        return whole["before_ns"] - whole["after_ns"]

    assert 0 < saved("compute") <= saved("host")
    candidates = json.loads(invoke("what-if", RUN, "--json").stdout)["candidates"]
    assert any(one["edit"].startswith("scale name:") for one in candidates)


def test_sizes_without_shapes_are_unknown_and_the_setting_is_named(tmp_path):
    for path in RUN.glob("kineto_trace_*.json.gz"):
        document = json.loads(gzip.decompress(path.read_bytes()))
        for event in document["traceEvents"]:
            for name in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs"):
                event.get("args", {}).pop(name, None)
        (tmp_path / path.name).write_bytes(gzip.compress(json.dumps(document).encode()))
    warnings = json.loads(invoke("metrics", tmp_path, "--json").stdout)["warnings"]
    (note,) = (text for text in warnings if "have no known size" in text)
    assert "the trace has no shapes of their operators: record with record_shapes=True" in note
    assert "not understood" not in note


def test_a_rank_is_not_healed():
    done = invoke("what-if", RUN, "--heal", "rank:1", code=2)
    assert "ranks are not healed in runs of the host" in done.stderr


def test_a_store_has_the_same_metrics(metrics, ingested):
    stored = json.loads(invoke("metrics", ingested[0], "--json").stdout)
    for name in ("breakdown", "groups", "matching", "waits", "volume", "findings"):
        assert stored[name] == metrics[name]


def test_one_rank_alone_has_its_groups_by_the_order_of_its_threads(tmp_path):
    shutil.copy(RUN / "kineto_trace_3.json.gz", tmp_path)
    alone = json.loads(invoke("metrics", tmp_path, "--json").stdout)
    tags = {(group["description"], group["tag"]) for group in alone["groups"]}
    assert {("mesh_dp", "DP"), ("mesh_tp", "TP")} <= tags


@pytest.mark.parametrize("rank", [(), ("--rank", 2)])
def test_the_critical_path_covers_the_step(rank):
    path = json.loads(invoke("critical-path", RUN, *rank, "--json").stdout)
    assert path["path"]["coverage"] == pytest.approx(1)
    assert path["summary"]["gpu_communication_bound"] > 0
    assert path["summary"]["cpu_bound"] > 0


def test_a_rank_that_is_recorded_later_still_matches(tmp_path, metrics):
    """The trace of rank 1 lacks the first step: later collectives keep their partners."""
    for rank in RANKS:
        text = json.loads(gzip.decompress((RUN / f"kineto_trace_{rank}.json.gz").read_bytes()))
        if rank == 1:
            second = min(
                row["ts"] for row in text["traceEvents"] if row["name"] == "ProfilerStep#3"
            )
            text["traceEvents"] = [
                row
                for row in text["traceEvents"]
                if row.get("ph") == "M" or row["ts"] >= second
            ]
        with gzip.open(tmp_path / f"kineto_trace_{rank}.json.gz", "wt") as file:
            json.dump(text, file)
    late = json.loads(invoke("metrics", tmp_path, "--steps", 3, "--json").stdout)
    assert late["matching"]["share"] == 1


def test_passes_and_converted_traces_have_operators_and_collectives(tmp_path):
    kernels = json.loads(invoke("kernels", RUN, "--by", "pass", "--json").stdout)
    totals = {row["name"]: row["total_ns"] for row in kernels["rows"]}
    assert totals.keys() == {"forward", "backward", "update", "communication"}
    assert totals["update"] < totals["forward"] < totals["communication"]
    invoke("convert", RUN, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if "cat" in event} >= {"operator", "Comm"}


def test_a_rank_is_scanned_once_to_be_compared_and_once_to_be_read(monkeypatch):
    scans = Counter()

    def counted(path, selection, **options):
        scans[path.name] += 1
        return scan_file(path, selection, **options)

    monkeypatch.setattr(categories, "scan_file", counted)
    run = open_run(RUN)
    for rank in run.ranks:
        run.read(rank)
    assert set(scans.values()) == {2}


def with_groups_again(trace):
    """A trace whose mesh was made three times: its groups are there under other names."""
    info = trace["distributedInfo"]
    again = [
        {**group, "pg_name": f"{copy}{group['pg_name']}"}
        for copy in ("", "1", "2")
        for group in info["pg_config"]
        if copy == "" or group["pg_desc"].startswith("mesh_")
    ]
    return {**trace, "distributedInfo": {**info, "pg_config": again}}


def test_a_mesh_that_is_made_again_changes_no_group_and_no_match(tmp_path, metrics):
    for path in RUN.glob("kineto*"):
        trace = with_groups_again(json.loads(gzip.decompress(path.read_bytes())))
        (tmp_path / path.stem).write_text(json.dumps(trace))
    found = json.loads(invoke("metrics", tmp_path, "--json").stdout)
    assert found["matching"] == metrics["matching"]
    groups = (
        [(g["description"], g["tag"], g["events"]) for g in m["groups"]]
        for m in (found, metrics)
    )
    first, second = map(sorted, groups)
    assert first == second


@pytest.mark.parametrize(
    "command",
    [
        ["metrics", "--full"],
        ["critical-path"],
        ["critical-path", "--rank", "0"],
        ["what-if", "--scale", "host=0.5"],
        ["what-if"],
        ["info", "--all"],
        ["kernels"],
    ],
)
def test_texts_on_a_run_without_a_device_name_none(command):
    name, *options = command
    text = printed(name, RUN, *options).lower()
    text = text.replace("a run without a device", "").replace("--gpus-per-node", "")
    for word in ("device", "gpu", "launch", "between kernels"):
        assert word not in text, text


def test_the_page_of_a_run_without_a_device_defines_its_numbers_by_operators(report):
    page = (report / "page.html").read_text()
    body = page[page.index("<body") :]
    body = re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL)
    assert not re.search(
        r"compute kernel|step and GPU|on the device|communication kernel", body
    )


def test_ingest_says_that_a_run_has_no_device_and_report_takes_a_directory(
    ingested, report, tmp_path
):
    assert "a run without an accelerator" in ingested[1]
    assert (report / "tables" / "clocks.parquet").exists()
    assert not (report / "page-data").exists()
    refused = invoke("report", RUN, "-o", tmp_path / "tables", "--no-data", code=2)
    assert "--output has no effect with --no-data" in refused.stderr


def test_the_page_of_a_run_without_a_device_does_not_speak_of_devices(report):
    page = (report / "page.html").read_text()
    without_code = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", " ", without_code)
    assert "Why are ranks idle?" in text
    assert re.findall(r"(?i)device|gpu|kernel", text) == []
