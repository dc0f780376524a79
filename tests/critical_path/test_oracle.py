"""Test the oracle against output of HolisticTraceAnalysis."""

from builders import golden_critical_path as golden
from oracles import critical_path as oracle


@golden.each_case()
def test_the_oracle_agrees_with_the_reference(case):
    graph, path, classes = oracle.analyze(
        golden.document(golden.trace_of(case)),
        case["annotation"],
        golden.instance_of(case),
        case["data_load_events"] or (),
        case["zero_weight_launch_edges"],
    )
    side = ("start", "end")
    clipped = [row.id for row in graph.clipped]
    nodes = [f"{id_} {side[end]} {ts}" for ts, id_, end in graph.nodes]
    edges = [
        f"{u} {v} {kind} {weight} {graph.attributed.get((u, v), '-')}"
        for (u, v), (kind, weight) in sorted(graph.edges.items())
    ]
    steps = [f"{graph.nodes[n][1]} {side[graph.nodes[n][2]]}" for n in path]
    assert len(graph.rows) == case["rows_after_trimming"]
    found = {"clipped": clipped, "nodes": nodes, "edges": edges, "path": steps}
    assert {key: golden.digest(lines) for key, lines in found.items()} == case["sha256"]
    assert classes == case["us_by_class"]
