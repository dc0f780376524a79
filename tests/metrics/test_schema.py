"""Test `fastcomm/schemas/metrics.json` against the output of `fastcomm metrics --json`."""

import copy
import json

import pytest
from builders.opened import open_run
from builders.places import SCHEMAS
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from fastcomm.cli.main import main
from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

SCHEMA = json.loads((SCHEMAS / "metrics.json").read_text("utf-8"))
VALID = Draft202012Validator(SCHEMA)
REAL = ["nccl_2rank_rank0.json.gz", "dlrm_8rank", "sampled_2of128", "gloo_4rank", "gloo_2x2"]

ALL_REDUCE = {
    "Collective name": "allreduce",
    "dtype": "Float",
    "In msg nelems": 1024,
    "Out msg nelems": 1024,
    "Group size": 2,
    "Process Group Name": "0",
    "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
}
# One step with an all-reduce of known size and group, one with a kernel of which nothing is
# known and that takes no time, and one without communication. Times are in us.
EVENTS = [
    ("user_annotation", "ProfilerStep#3", 0, 20, {}),
    ("user_annotation", "ProfilerStep#4", 20, 20, {}),
    ("user_annotation", "ProfilerStep#5", 40, 20, {}),
    ("kernel", "gemm", 2, 6, {}),
    ("kernel", "ncclDevKernel_AllReduce", 5, 5, ALL_REDUCE),
    ("gpu_memcpy", "Memcpy DtoD", 12, 1, {}),
    ("kernel", "ncclDevKernel_Generic", 25, 0, {}),
]
KEYS = ("cat", "name", "ts", "dur", "args")


def text(rank=0, events=EVENTS):
    """A trace of one of two ranks."""
    rows = [{"ph": "X", **dict(zip(KEYS, event, strict=True))} for event in events]
    info = {"backend": "nccl", "rank": rank, "world_size": 2}
    return json.dumps(
        {"baseTimeNanoseconds": 0, "distributedInfo": info, "traceEvents": rows}, indent=1
    )


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(text())
    return path


def measured(*paths, keep_going=False, **options):
    """What `--json` prints, read back."""
    run = open_run(*paths, config=Config(keep_going=keep_going))
    found = compute_metrics(run, MetricsOptions(**options))
    return json.loads(json.dumps(found.to_dict(), allow_nan=False))


def objects(schema):
    """Every schema of an object."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for inner in schema.values():
            yield from objects(inner)


# A finding has the keys of its kind.
EVIDENCE = SCHEMA["$defs"]["finding"]["properties"]["evidence"]


def test_the_schema_is_valid_and_rejects_unknown_keys():
    Draft202012Validator.check_schema(SCHEMA)
    for each in objects(SCHEMA):
        if "properties" in each:
            assert each["additionalProperties"] is False
            if each is not EVIDENCE:
                assert each["required"] == list(each["properties"])
        else:
            assert each["propertyNames"] == {"$ref": "#/$defs/tag"}


@pytest.mark.parametrize("name", REAL)
def test_a_real_run_is_valid(real, name):
    VALID.validate(measured(real(name)))
    VALID.validate(measured(real(name), link_bandwidth="400Gbit/s", bytes="bus"))


def test_the_json_of_a_synthetic_run_is_valid(tmp_path):
    write(Job.of(ranks=2, steps=1, layers=1), tmp_path)
    VALID.validate(measured(tmp_path, link_bandwidth="50GB/s"))


@pytest.mark.parametrize("kind", ["payload", "bus", "msg"])
@pytest.mark.parametrize("link", [None, "1GB/s", "8Gbit/s"])
def test_the_json_of_a_small_run_is_valid_with_any_options(tiny, kind, link):
    found = measured(tiny, bytes=kind, link_bandwidth=link)
    VALID.validate(found)
    assert found["bytes"] == kind
    assert found["link_bandwidth"] == (None if link is None else 1e9)


def test_unknown_values_are_null(tiny):
    found = measured(tiny)
    known, unknown = found["bandwidth"]["TP"], found["bandwidth"]["OTHER"]
    assert known["avg_bw"] == pytest.approx(4096 / 5e-6)
    assert known["avg_util"] is known["p95_util"] is known["avg_bus_util"] is None
    assert unknown["avg_bw"] is unknown["total_bytes"] is unknown["avg_bus_bw"] is None
    assert (unknown["events"], unknown["events_without_bytes"]) == (1, 1)
    assert found["volume"]["OTHER"]["bytes_per_iteration"] is None
    assert [each["group_size"] for each in found["collectives"]] == [2]


def test_a_skipped_rank_is_listed(tiny):
    cut = tiny.with_name("rank1.json")
    cut.write_text(text(rank=1)[:-4])
    found = measured(tiny.parent, keep_going=True)
    VALID.validate(found)
    assert [each["rank"] for each in found["failed"]] == [1]


def test_a_run_without_communication_or_time_is_valid(tmp_path):
    path = tmp_path / "rank0.json"
    path.write_text(text(events=[("user_annotation", "ProfilerStep#1", 5, 0, {})]))
    found = measured(path)
    VALID.validate(found)
    assert set(found["breakdown"]["spec"].values()) == {None}
    assert found["overlap"] == {"average_overlap_ratio": None, "by_tag": {}}


def test_the_command_prints_valid_json(tiny):
    done = CliRunner().invoke(main, ["metrics", str(tiny), "--json"])
    assert done.exit_code == 0
    VALID.validate(json.loads(done.stdout))


def test_missing_and_extra_keys_are_invalid(tiny):
    found = measured(tiny)
    for change in (
        lambda d: d.pop("overlap"),
        lambda d: d["bandwidth"]["TP"].pop("avg_bw"),
        lambda d: d.update(extra=1),
        lambda d: d["breakdown"]["exact"].update(exposed_XP=0.0),
        lambda d: d["volume"].update(XP=d["volume"]["TP"]),
        lambda d: d["iteration"].update(mean_ns=-1),
    ):
        other = copy.deepcopy(found)
        change(other)
        assert not VALID.is_valid(other)
