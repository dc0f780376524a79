"""Test levels of the network of runs in files: hosts, stores, limits, what is printed."""

import json
import re

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.opened import open_run

from fastcomm.errors import ConfigError
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Traces of 16 ranks on two hosts of 8."""
    folder = tmp_path_factory.mktemp("network") / "job"
    write(Job.of(ranks=16, steps=2, layers=2, micro_batches=2), folder)
    return folder


def test_hosts_are_read_from_traces_and_stores_alike_by_any_number_of_workers(job, tmp_path):
    found = compute_metrics(open_run(job)).network
    assert [node.ranks for node in found.nodes] == [tuple(range(8)), tuple(range(8, 16))]
    assert found.undivided_events == 0
    assert [use.events > 0 for use in found.levels if use.tag is None] == [True, True]
    assert compute_metrics(open_run(job, workers=2)).network == found
    ingest(plan([job], tmp_path / "store"))
    assert compute_metrics(open_run(tmp_path / "store")).network == found
    for path in (tmp_path / "store").rglob("*.parquet"):
        assert b"node0000" not in path.read_bytes()


def test_levels_of_a_written_job_add_up_to_its_bus_bytes(job):
    metrics = compute_metrics(open_run(job), MetricsOptions(cluster="dgx-h100", bytes="bus"))
    found = metrics.network
    assert found.limits == {"node": 336e9, "network": 50e9}
    sent = sum(use.bytes_per_step_per_gpu for use in found.levels if use.tag is None)
    # Volume counts messages on both sides.
    volume = {tag: each.bytes_per_step_per_gpu for tag, each in metrics.volume.items()}
    assert sent == pytest.approx(sum(volume.values()) - volume["PP"] / 2)


def named(folder, names):
    """Traces of ranks whose files name these hosts."""
    for rank, name in enumerate(names):
        row = k.all_reduce(40, 20, Group_size=2, Process_Group_Ranks="[0, 1]")
        host = {} if name is None else {"host_name": name}
        k.write(
            folder / f"rank{rank}.json",
            [k.mark("ProfilerStep#0", 0, 100), row],
            rank=rank,
            world=2,
            **host,
        )
    return folder


@pytest.mark.parametrize(
    ("names", "by"),
    [
        (["a", "a"], "hosts"),
        (["a", "b"], "hosts"),
        (["localhost", "localhost"], None),
        (["LocalHost ", "a"], None),
        ([7, 7], None),
        (["", ""], None),
        ([None, None], None),
        (["\ud800", "\ud800"], None),
    ],
)
def test_names_that_tell_no_host_from_another_are_none(tmp_path, names, by):
    found = compute_metrics(open_run(named(tmp_path, names))).network
    assert found.nodes_by == by
    assert by is None or len(found.nodes) == len(set(names))


def test_a_truncated_trace_keeps_its_host(tmp_path):
    path = named(tmp_path, ["a", "b"]) / "rank1.json"
    path.write_text(path.read_text()[:-3])
    reading = invoke("metrics", tmp_path, "--allow-truncated", "--json")
    assert json.loads(reading.stdout)["network"]["nodes_by"] == "hosts"


def test_the_configuration_states_the_limits(tmp_path):
    named(tmp_path, ["a", "b"])
    config = tmp_path / "job.toml"
    config.write_text('[link]\nscale_up = "450GB/s"\nscale_out = "50GB/s"\n')
    done = invoke("metrics", tmp_path, "--config", config, "--json")
    assert json.loads(done.stdout)["network"]["limits"] == {"node": 450e9, "network": 50e9}
    done = invoke("metrics", tmp_path, "--config", config, "--cluster", "a800", "--json")
    assert json.loads(done.stdout)["network"]["limits"]["network"] != 50e9


def test_the_terminal_shows_levels_if_they_have_a_limit_or_with_all_tables(tmp_path):
    named(tmp_path, ["a", "b"])
    assert "between nodes" not in invoke("metrics", tmp_path).stdout
    shown = invoke("metrics", tmp_path, "--full").stdout
    assert re.search(r"between nodes +4\.00 kB +200 MB/s +n/a", shown)
    assert "inside nodes" not in shown
    named(tmp_path, ["a", "a"])
    assert "inside nodes" not in invoke("metrics", tmp_path).stdout
    shown = invoke("metrics", tmp_path, "--cluster", "dgx-h100").stdout
    assert re.search(r"inside nodes +4\.00 kB +200 MB/s +0\.1 %", shown)


def test_the_network_is_explained_only_where_ranks_communicate(tmp_path):
    named(tmp_path, ["a", "b"])
    assert "Network: bus bytes" in invoke("metrics", tmp_path, "--full").stdout
    alone = invoke("metrics", tmp_path / "rank0.json", "--full").stdout
    for rank in range(2):
        k.write(tmp_path / f"rank{rank}.json", [k.kernel("gemm", 0, 9)], rank=rank, world=2)
    silent = invoke("metrics", tmp_path, "--full").stdout
    for shown in (alone, silent):
        assert "Bandwidth includes the wait" in shown
        assert "Network:" not in shown
        assert "between nodes" not in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus_per_node": 0}, "invalid gpus_per_node 0"),
        ({"cluster": "dgx-x1"}, "cluster 'dgx-x1': no such file, and not one of a100"),
    ],
)
def test_options_of_nodes_are_checked(tmp_path, options, message):
    run = open_run(named(tmp_path, ["a", "b"]))
    with pytest.raises(ConfigError, match=re.escape(message)):
        compute_metrics(run, MetricsOptions(**options))
