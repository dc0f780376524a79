"""Test the formats of 2026: values that were computed from the files without fastcomm."""

import gzip
from collections import Counter

import pytest
from builders.commands import invoke
from builders.shared_data import needs, path_of

import fastcomm
from fastcomm.trace.schema import KINDS, OPS

DATA = path_of("formats_2026")
pytestmark = needs("formats_2026")


def work(name):
    """Per rank: sums of compute and communication (ns), and bytes of each operation."""
    run = fastcomm.open(DATA / name)
    result = []
    for rank in run.ranks:
        trace = run.read(rank)
        events = trace.events.select(["kind", "start", "stop"]).to_pylist()
        comm = trace.comm.to_pylist()
        own = {row["event"] for row in comm}
        compute = sum(
            row["stop"] - row["start"]
            for place, row in enumerate(events)
            if KINDS[row["kind"]] == "kernel" and place not in own
        )
        times = sum(row["stop"] - row["start"] for row in comm)
        sizes = Counter((OPS[row["op"]], row["payload_bytes"]) for row in comm)
        result.append((compute, times, sizes))
    return result


PLAIN = {
    ("AllReduce", 16_384): 3,
    ("AllGather", 16_384): 3,
    ("ReduceScatter", 16_384): 3,
    ("AllToAll", 8_192): 3,
    ("SendRecv", 8_192): 3,
}
PEER_COPIES = {("SendRecv", 1_048_576): 3}


def test_copies_between_devices_are_communication_by_their_kind():
    (first, second) = work("cuspy_plain/json")
    assert first[0] == 426_000
    assert second[0] == 441_000
    assert [first[1], second[1]] == [255_000 + 27_000, 225_000 + 27_000]
    for _, _, sizes in (first, second):
        assert sizes == PLAIN | PEER_COPIES


def test_the_names_of_copies_have_their_direction():
    trace = fastcomm.open(DATA / "cuspy_plain/json").read(0)
    names = Counter(trace.events["name"].to_pylist())
    assert (names["Memcpy PtoP"], names["Memcpy HtoD"], names["Memcpy"]) == (3, 3, 0)


@pytest.mark.parametrize("name", ["cuspy_graph", "cuspy_plugin"])
def test_nodes_of_graphs_that_are_no_work_count_as_none(name):
    for compute, found in zip((510_000, 525_000), work(f"{name}/json"), strict=True):
        assert found[0] == compute
    said = invoke("metrics", DATA / name / "json").output
    assert "not understood" not in said


@pytest.mark.parametrize("encoding", ["json", "pftrace"])
def test_nodes_of_graphs_wait_for_what_the_file_says(encoding):
    """Nodes 0 to 6: 1, 2, 6 after 0; 3 after 2; 4 after 3; 5 after 1 and 3, no work."""
    trace = fastcomm.open(DATA / "cuspy_graph" / encoding).read(0)
    position, after = (trace.args[name].to_pylist() for name in ("position", "after"))
    starts = trace.events["start"].to_pylist()
    nodes = sorted((start, row) for row, start in enumerate(starts) if after[row] is not None)
    number = {position[row]: place for place, (_, row) in enumerate(nodes)}
    found = {
        number[position[row]]: {number[int(own)] for own in after[row].split()}
        for _, row in nodes
    }
    # By start: node 0, 1, 2, 6, the callback 4, and 5.
    assert found == {0: set(), 1: {0}, 2: {0}, 3: {0}, 4: {2}, 5: {1, 2}}


@pytest.mark.parametrize("name", ["none", "all"])
def test_events_on_lanes_of_a_graph_are_on_their_streams(name):
    trace = fastcomm.open(DATA / "graph_kineto" / name).read(0)
    lanes = trace.lanes.to_pylist()
    streams = {lanes[lane]["thread"] for lane in trace.events["lane"].to_pylist()}
    assert {"26671", "26672", "26673", "26674"} <= streams


@pytest.mark.parametrize("name", ["raw", "none", "all", "tool"])
def test_graphs_have_the_sizes_of_their_annotations(name):
    sized = {("AllReduce", 8_388_608): 2, ("AllGather", 4_194_304): 2}
    unsized = {("AllReduce", None): 2, ("AllGather", None): 2}
    times = ((1_000_750, 580_000), (1_002_750, 560_000))
    for found, expected in zip(work(f"graph_kineto/{name}"), times, strict=True):
        assert found[:2] == expected
        assert found[2] == (unsized if name == "raw" else sized)


def test_the_profiler_plugin_of_nccl_tells_operations_and_sizes():
    for _, _, sizes in work("nccl_plugin"):
        # How many ranks gather and scatter is not recorded.
        assert sizes == {
            ("AllReduce", 2_097_152): 2,
            ("AllReduce", 16_384): 2,
            ("AllGather", None): 2,
            ("ReduceScatter", None): 2,
        }


_EAGER = {"AllReduce_Sum_f32_RING_LL [RING LL]": 3}
_ALL = {
    "AllReduce_Sum_bf16_RING_LL [RING LL]": 4,
    "AllGather_RING_LL [RING SIMPLE]": 2,
    "ReduceScatter_Sum_f32_RING_LL [TREE LL128]": 2,
}


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("nccl_plugin", _ALL), ("cuspy_plugin/json", _EAGER), ("cuspy_plugin/pftrace", _EAGER)],
)
def test_the_profiler_plugin_of_nccl_tells_what_it_chose(name, chosen):
    names = Counter(fastcomm.open(DATA / name).read(0).events["name"].to_pylist())
    found = {text: count for text, count in names.items() if text.endswith("]")}
    assert found == {f"ncclDevKernel_{text}": count for text, count in chosen.items()}


def test_metadata_make_a_kernel_of_torchcomms_communication():
    for compute, _, sizes in work("torchcomms"):
        assert compute == 200_000
        assert sizes.total() == 22
        assert sizes["AllToAll", None] == 2  # its sizes are on the device
        ops = Counter(dict.fromkeys(OPS, 0))
        for (op, _), count in sizes.items():
            ops[op] += count
        assert +ops == {
            "AllReduce": 4, "AllGather": 4, "ReduceScatter": 4, "AllToAll": 6, "Gather": 2,
            "SendRecv": 2,
        }  # fmt: skip


def test_messages_with_names_of_users_are_messages():
    for name in ("without", "with"):
        ops = Counter()
        for _, _, sizes in work(f"gloo_names/{name}"):
            for (op, _), count in sizes.items():
                ops[op] += count
        assert ops == {"AllReduce": 6, "AllGather": 6, "SendRecv": 6}
    said = invoke("kernels", DATA / "gloo_names" / "with", "--full-names").output
    assert "gloo:send pp fwd act 0->1" in said


@pytest.mark.parametrize("title", [None, "DDP grads", "FSDP::all_gather (0)", "allreduce tp"])
def test_names_of_users_change_no_parallelism(tmp_path, title):
    """Messages are between stages; of sums and gathers of all ranks nothing is known."""
    folder = DATA / "gloo_names" / ("without" if title is None else "with")
    for path in folder.iterdir():
        text = gzip.decompress(path.read_bytes()).decode()
        for name in ("grad sync (layers.0)", "FSDP::all_gather (layers.1)"):
            text = text.replace(name, title or name)
        (tmp_path / path.stem).write_text(text)
    metrics = fastcomm.open(tmp_path).metrics().to_dict()
    assert {(row["tag"], row["events"]) for row in metrics["groups"]} == {
        ("PP", 6), ("OTHER", 12),
    }  # fmt: skip
    assert "unknown parallelism" in invoke("metrics", tmp_path).output.split("compute")[0]
