"""Test files of a process with several devices, and files that merge the traces of ranks.

The truth is the command on files of one device each, which the tests cut out of the events.
"""

import gzip
import json

import pyarrow.compute as pc
import pytest
from builders import kineto_text as k
from builders.commands import invoke

import fastcomm
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

HOST = 100


def launched(device, ts, dur, correlation, **args):
    """A kernel of a device, and its launch."""
    kernel = k.kernel("gemm", ts, dur, correlation=correlation, device=device, **args)
    return [{**kernel, "pid": device}, k.launch(ts - 5, correlation)]


def job(*shares, steps=4, length=1000):
    """Steps of one process in which each device computes for a share, one after another."""
    events = []
    for step in range(steps):
        begin = step * length
        events.append(k.mark(f"ProfilerStep#{step}", begin, length))
        for device, share in enumerate(shares):
            correlation = max(10, len(shares)) * step + device + 1
            ts = begin + 10 + device
            events += launched(device, ts, share * length, correlation)
    return events


def of_device(events, device):
    """The events of one device, with what the host does for it."""
    works = [event for event in events if event["cat"] == "kernel"]
    own = {event["args"]["correlation"] for event in works if event["pid"] == device}
    return [
        event
        for event in events
        if event["args"].get("correlation", min(own)) in own and event["pid"] in (device, HOST)
    ]


def measured(*paths, command="metrics"):
    return json.loads(invoke(command, *paths, "--json").stdout)


def without(document, *names):
    return {name: value for name, value in document.items() if name not in names}


@pytest.fixture
def one(tmp_path):
    """A file of a process with three devices."""
    return k.write(tmp_path / "one.json", job(0.2, 0.3, 0.1), world=1)


@pytest.fixture
def each(tmp_path):
    """A folder with a file of each device."""
    folder = tmp_path / "each"
    folder.mkdir()
    for device in range(3):
        events = of_device(job(0.2, 0.3, 0.1), device)
        k.write(folder / f"rank{device}.json", events, rank=device, world=3)
    return folder


def test_each_device_of_a_process_is_a_rank(one, each):
    found, expected = measured(one), measured(each)
    assert found["ranks"] == [0, 1, 2]
    assert without(found, "warnings") == without(expected, "warnings")
    assert found["breakdown"]["exact"]["compute"] == pytest.approx(0.2)
    (said,) = [text for text in found["warnings"] if "guess" in text]
    assert "GPU 0 of process 100, GPU 1 of process 100, GPU 2 of process 100" in said


@pytest.mark.parametrize("command", ["kernels", "critical-path", "what-if"])
def test_all_commands_count_each_device(one, each, command):
    found, expected = (measured(path, command=command) for path in (one, each))
    assert "of process 100" in "".join(found["warnings"])
    # Places of events in the file differ.
    names = ("warnings", "path_of_trace", "path", "top_events")
    assert without(found, *names) == without(expected, *names)
    lengths = [(document.get("path") or {}).get("length_ns") for document in (found, expected)]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("name", ["one.json", "rank0.json"])
def test_a_device_that_is_hardly_used_is_no_rank(tmp_path, name):
    events = job(0.004, 0.5)
    folder = tmp_path / "files"
    folder.mkdir()
    path = k.write(folder / name, events, rank=0, world=1)
    alone = k.write(tmp_path / "rank0.json", of_device(events, 1), rank=0, world=1)
    found, expected = measured(path), measured(alone)
    assert found["ranks"] == [0]
    assert found["breakdown"] == expected["breakdown"]
    (said,) = [text for text in found["warnings"] if "the busiest device" in text]
    assert "GPU 0 of process 100: less than 1.0 % of the work" in said
    # Beside another file, too.
    path.unlink()
    k.write(folder / "rank0.json", events, rank=0, world=2)
    k.write(folder / "rank1.json", of_device(events, 1), rank=1, world=2)
    both = measured(folder)
    assert both["breakdown"]["exact"] == pytest.approx(expected["breakdown"]["exact"])


def test_each_of_many_devices_is_a_rank(tmp_path):
    found = measured(k.write(tmp_path / "one.json", job(*[0.004] * 120), world=1))
    assert found["ranks"] == [*range(120)]
    assert found["breakdown"]["exact"]["compute"] == pytest.approx(0.004)


def test_a_labeled_rank_is_one_whatever_its_work(tmp_path):
    events = []
    for rank, share in enumerate((0.5, 0.004)):
        for event in of_device(job(share), 0):
            args = {
                name: value + 100 * rank if name == "correlation" else value
                for name, value in event["args"].items()
            }
            events.append({**event, "pid": f"[TP0{rank}] {event['pid']}", "args": args})
    found = measured(k.write(tmp_path / "merged.json", events))
    assert found["ranks"] == [0, 1]
    assert found["breakdown"]["exact"]["compute"] == pytest.approx(0.252)


def test_copies_count_as_work_of_a_device(tmp_path):
    copies = [
        {
            **k.kernel("Memcpy PtoP (Device -> Device)", step * 1000 + 500, 300, device=1),
            "cat": "gpu_memcpy", "pid": 1,
        }
        for step in range(4)
    ]  # fmt: skip
    found = measured(k.write(tmp_path / "one.json", [*job(0.5, 0.004), *copies], world=1))
    assert found["ranks"] == [0, 1]


def test_among_other_files_times_of_a_process_with_several_devices_are_unknown(tmp_path):
    k.write(tmp_path / "rank0.json", job(0.2, 0.3), world=2)
    k.write(tmp_path / "rank1.json", job(0.2), rank=1, world=2)
    found = measured(tmp_path)
    assert found["breakdown"]["exact"]["compute"] == pytest.approx(0.2)  # of rank 1
    (said,) = [text for text in found["warnings"] if "the work of 2 devices" in text]
    assert "rank 0: " in said
    assert "n/a. Each is a rank of its own if you give fastcomm this file alone" in said
    kernels = measured(tmp_path, command="kernels")
    assert kernels["step_ns"] is None
    assert {row["share"] for row in kernels["rows"]} == {None}


def of_process(events, process, *, number=0, later=0):
    """The events of another process of the host, whose device has the same number."""
    changed = []
    for event in events:
        args = dict(event["args"])
        if "correlation" in args:
            args["correlation"] += number
        pid = process if event["pid"] == HOST else event["pid"]
        changed.append({**event, "pid": pid, "ts": event["ts"] + later, "args": args})
    return changed


@pytest.mark.parametrize(("number", "order"), [(500, "file"), (500, "time"), (0, "file")])
def test_devices_of_equal_numbers_are_told_by_the_processes_of_their_launches(
    tmp_path, number, order
):
    """Files of two hosts, joined by their events: correlations may be equal, too."""
    events = [*job(0.2), *of_process(job(0.4), 200, number=number, later=3)]
    if order == "time":
        events.sort(key=lambda event: event["ts"])
    found = measured(k.write(tmp_path / "merged.json", events, world=1))
    assert found["ranks"] == [0, 1]
    assert found["breakdown"]["exact"]["compute"] == pytest.approx(0.3)
    assert any("GPU 0 of process 100, GPU 0 of process 200" in w for w in found["warnings"])


@pytest.mark.parametrize("is_led", [False, True])
def test_each_process_has_the_device_events_at_the_edge_of_its_part(tmp_path, is_led):
    """Traces of two hosts behind each other: each call before its work, or all work first."""
    first = [
        event
        for step in range(4)
        for event in (
            k.mark(f"ProfilerStep#{step}", 1000 * step, 1000),
            *reversed(launched(0, 1000 * step + 10, 200, 10 * step + 1)),
            *reversed(launched(0, 1000 * step + 300, 300, 10 * step + 2)),
        )
    ]
    if is_led:
        first.sort(key=lambda event: event["pid"] == HOST)
    events = [*first, *of_process(first, 200, later=3)]
    found = measured(k.write(tmp_path / "merged.json", events, world=1))
    assert found["ranks"] == [0, 1]
    assert found["breakdown"]["exact"]["compute"] == pytest.approx(0.5)
    assert not any("left out" in warning for warning in found["warnings"])


def test_events_whose_process_nothing_tells_are_counted(tmp_path):
    """Work stands on both sides of the calls of each process, with equal numbers."""
    first = [
        event
        for step in range(300)
        for event in (
            k.mark(f"ProfilerStep#{step}", 1000 * step, 1000),
            *launched(0, 1000 * step + 10, 200, 10 * step + 1),
            *reversed(launched(0, 1000 * step + 300, 300, 10 * step + 2)),
        )
    ]
    head = [event for event in first if event["cat"] == "kernel"][:1]
    first = [*head, *(event for event in first if event is not head[0])]
    events = [*first, *of_process(first, 200, later=3)]
    found = measured(k.write(tmp_path / "merged.json", events, world=1))
    (warning,) = [text for text in found["warnings"] if "left out" in text]
    assert "which process launched " in warning
    assert " of 1200 events of the devices with number 0 is not recorded" in warning


def test_devices_that_nothing_tells_apart_are_unknown(tmp_path):
    """Equal numbers of devices and calls, and events in order of time."""
    events = [*job(0.2), *of_process(job(0.4), 200, later=3)]
    events.sort(key=lambda event: event["ts"])
    found = measured(k.write(tmp_path / "merged.json", events, world=1))
    assert found["breakdown"]["exact"]["compute"] is None
    said = "which process launched which work is not recorded"
    assert any(said in warning for warning in found["warnings"])


def in_turn(process, *, first):
    """The events of one of four processes that compute one after another in a step."""
    events = []
    for step in range(4):
        begin = 1000 * step
        kernel = k.kernel("gemm", begin + 10 + 200 * process, 200, correlation=first + step)
        events += [
            k.mark(f"ProfilerStep#{step}", begin, 1000),
            k.launch(begin + 5, first + step),
            {**kernel, "pid": 0},
        ]
    return events


@pytest.mark.parametrize("order", ["file", "time", "calls first", "work first"])
@pytest.mark.parametrize("is_numbered_anew", [True, False])
@pytest.mark.parametrize("is_of_one_number", [True, False])
def test_processes_that_compute_in_turn_are_never_one_rank(
    tmp_path, is_of_one_number, is_numbered_anew, order
):
    """None computes for more than 0.2 of a step: that is the value, or there is none."""
    events = []
    for process in range(4):
        own = in_turn(process, first=1 if is_numbered_anew else 10 * process + 1)
        events += own if is_of_one_number else of_process(own, HOST + process)
    if order == "time":
        events.sort(key=lambda event: event["ts"])
    elif order != "file":
        is_first = "cuda_runtime" if order == "calls first" else "kernel"
        events.sort(key=lambda event: event["cat"] != is_first)
    found = measured(k.write(tmp_path / "merged.json", events, world=1))
    share = found["breakdown"]["exact"]["compute"]
    is_told = not is_of_one_number and (order == "file" or not is_numbered_anew)
    assert share == (pytest.approx(0.2) if is_told else None)
    assert is_told or any("n/a" in warning for warning in found["warnings"])


def test_marks_of_other_processes_or_times_are_no_sign_of_several(tmp_path):
    """A number is used again later, and another process has the marks of the job."""
    steps = [k.mark(f"ProfilerStep#{step}", 1000 * step, 1000) for step in (0, 1, 2, 3)]
    again = [{**event, "ts": event["ts"] + 4000} for event in steps]
    of_others = [{**event, "pid": 300} for event in steps]
    events = [event for event in job(0.2) if event["cat"] != "user_annotation"]
    path = k.write(tmp_path / "one.json", [*steps, *again, *of_others, *events], world=1)
    assert measured(path)["breakdown"]["exact"]["compute"] is not None


LABELS = ("rank{}", "Rank {}", "[TP{:02d}]", "[TP{:02d}-PP00]", "[TP{0:02d}-EP{0:02d}]")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Traces of four ranks, a file each."""
    folder = tmp_path_factory.mktemp("ranks")
    write(Job.of(ranks=4, steps=2, layers=2), folder)
    return folder


def merged(ranks, path, change):
    """Write one file of all ranks, as tools do; `change` takes an event and its rank."""
    whole = {"traceEvents": []}
    for rank, file in enumerate(sorted(ranks.iterdir())):
        document = json.loads(gzip.decompress(file.read_bytes()))
        for event in document.pop("traceEvents"):
            args = event.get("args")
            if isinstance(args, dict) and "device" in args:
                args["device"] = 0  # each rank sees one
            change(event, rank)
            whole["traceEvents"].append(event)
        whole |= {key: value for key, value in document.items() if key not in whole}
    path.write_bytes(gzip.compress(json.dumps(whole).encode(), 1))
    return path


def moved(event, rank, *, with_calls):
    """Make numbers of processes differ between ranks, and maybe those of calls."""
    if isinstance(event["pid"], int):
        event["pid"] += 10**6 * rank
    args = event.get("args")
    if with_calls and isinstance(args, dict) and "correlation" in args:
        args["correlation"] += 10**8 * rank


@pytest.mark.parametrize("label", LABELS)
def test_a_file_of_labeled_ranks_has_their_numbers(ranks, tmp_path, label):
    def change(event, rank):
        event["pid"] = f"{label.format(3 - rank)} {event['pid']}"

    backwards = tmp_path / "backwards"
    backwards.mkdir()
    for rank, file in enumerate(sorted(ranks.iterdir())):
        (backwards / f"rank{3 - rank}.json.gz").write_bytes(
            gzip.compress(
                gzip.decompress(file.read_bytes()).replace(
                    b'"rank": %d' % rank, b'"rank": %d' % (3 - rank)
                )
            )
        )
    found = measured(merged(ranks, tmp_path / "all.json.gz", change))
    assert found["ranks"] == [0, 1, 2, 3]
    expected = measured(backwards)
    for name in ("iteration", "breakdown", "overlap"):
        assert found[name] == expected[name]
    assert "guess" not in "".join(found["warnings"])


@pytest.mark.parametrize("row", ["process_name", "process_labels"])
@pytest.mark.parametrize("text", ["rank {}", "python (global rank: {})", "Rank_{} train.py"])
def test_ranks_that_metadata_name_are_those_of_a_file(tmp_path, row, text):
    events = []
    for process, rank in ((71, 1), (72, 0)):  # rank 1 is the first
        label = {"name": text.format(rank), "labels": text.format(rank)}
        about = {"ph": "M", "name": row, "pid": process, "tid": 0, "ts": 0, "args": label}
        if rank:
            about = {"args": about.pop("args"), **about}
        events.append(about)
        events += [
            k.mark("ProfilerStep#1", 0, 1000) | {"pid": process},
            k.launch(10, process) | {"pid": process},
            k.kernel("gemm", 20, 100 + 500 * rank, device=process - 71, correlation=process)
            | {"pid": process - 71},
        ]
    path = k.write(tmp_path / "merged.json", events)
    found, run = measured(path), fastcomm.open(path)
    assert found["ranks"] == [0, 1]
    for rank in (0, 1):
        (time,) = run.read(rank).events.filter(pc.field("name") == "gemm").to_pylist()
        assert time["stop"] - time["start"] == 1000 * (100 + 500 * rank)
    assert "guess" not in "".join(found["warnings"])


@pytest.mark.parametrize("text", ["local rank {}", "python {}", "rank 1"])
def test_metadata_that_name_no_rank_for_each_process_decide_nothing(tmp_path, text):
    events = []
    for process in (71, 72):
        about = {"name": text.format(72 - process)}
        events += [
            {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": about},
            k.launch(10, process) | {"pid": process},
            k.kernel("gemm", 20, 100, device=process - 71, correlation=process)
            | {"pid": process - 71},
        ]
    found = measured(k.write(tmp_path / "merged.json", events))
    assert found["ranks"] == [0, 1]
    assert "the ranks are a guess" in "".join(found["warnings"])


@pytest.mark.parametrize("with_calls", [False, True])
def test_a_file_of_ranks_with_other_processes_is_measured_like_their_files(
    ranks, tmp_path, with_calls
):
    def change(event, rank):
        moved(event, rank, with_calls=with_calls)

    found = measured(merged(ranks, tmp_path / "all.json.gz", change))
    assert without(found, "warnings") == without(measured(ranks), "warnings")
    assert "the ranks are a guess" in found["warnings"][0]


@pytest.mark.parametrize(("shift", "steps"), [(0, 2), (1_000, 1)])
def test_without_a_known_process_only_marks_that_agree_are_told(ranks, tmp_path, shift, steps):
    """The marks of one rank are moved by `shift` us; steps take 30 ms."""

    def change(event, rank):
        moved(event, rank, with_calls=False)
        if rank == 2 and event["name"].startswith("ProfilerStep"):
            event["ts"] += shift

    path = merged(ranks, tmp_path / "all.json.gz", change)
    whole = json.loads(gzip.decompress(path.read_bytes()))
    # In the order of their times, the calls of all ranks are everywhere in the file.
    whole["traceEvents"].sort(key=lambda event: event.get("ts", 0))
    path.write_text(json.dumps(whole))
    path = path.rename(tmp_path / "all.json")
    found = measured(path)
    assert len(measured(path, command="info")["iterations"]) == steps
    said = "".join(found["warnings"])
    assert "which process launched the work of GPU 0 in lane 2000002, " in said
    assert "neither marks of steps, unless those of all processes agree, nor causes" in said
    if steps > 1:
        truth = measured(ranks, "--step-boundary", "host")["iteration"]["mean_ns"]
        assert found["iteration"]["mean_ns"] == pytest.approx(truth, rel=0.01)


def test_a_store_has_each_device(tmp_path):
    path = k.write(tmp_path / "one.json", job(0.2, 0.3), world=1)
    invoke("ingest", path, "-o", tmp_path / "store")
    for name in ("ranks", "breakdown", "iteration"):
        assert measured(tmp_path / "store")[name] == measured(path)[name]
