"""Test what `dispatch place` says of a placement: moves, balance and drift."""

import json
import re

import pytest
from click.testing import CliRunner

from fastcomm.cli.main import main

WORDS = "--num-nodes 2 --gpus-per-node 2 --seq-len 200 --batch-size 1 --iter-num 1 --topk 2"


def run(*words, code=0):
    done = CliRunner().invoke(main, ["dispatch", *words])
    assert done.exit_code == code, done.output
    return done.output if code else done.stdout


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moves") / "w"
    run("generate", *WORDS.split(), "-o", str(folder))
    return str(folder)


def test_place_counts_and_bounds_moves(workload, tmp_path):
    first = json.loads(run("place", workload, "--json", "--expert-bytes", "1000"))
    assert first["moves"]["bytes"] == 1000 * sum(first["moves"]["by_layer"]) > 0
    assert first["moves"]["latency_ns"] > 0
    path = tmp_path / "before.json"
    path.write_text(json.dumps(first))
    again = json.loads(run("place", workload, "--before", str(path), "--json"))
    assert again["moves"]["by_layer"] == [0]
    assert again["imbalance"]["before"] == again["imbalance"]["after"]
    assert again["moves"]["bytes"] is None
    bound = json.loads(run("place", workload, "--max-moves", "5", "--json"))
    assert sum(bound["moves"]["by_layer"]) <= 5


def test_experts_of_one_node_move_over_its_own_links(tmp_path):
    one = WORDS.replace("--num-nodes 2 --gpus-per-node 2", "--num-nodes 1 --gpus-per-node 4")
    run("generate", *one.split(), "--num-layers", "3", "-o", str(tmp_path / "w"))
    load = tmp_path / "loads.csv"
    rows = [f"{at},{layer},{e},{1 + 9 * (e == at)}"
            for at in (3, 7, 6) for layer in range(3) for e in range(8)]  # fmt: skip
    load.write_text("\n".join(["step,layer,expert,tokens", *rows]))
    links = "--bw-intra", "1GB/s", "--bw-inter", "9GB/s", "--expert-bytes", "1000000000"
    words = "place", str(tmp_path / "w"), "--load", str(load), *links
    found, text = json.loads(run(*words, "--json")), run(*words)
    moves = found["moves"]
    assert moves["latency_ns"] == pytest.approx(1e9 * moves["most_to_a_gpu"])
    assert f"{sum(moves['by_layer'])} experts of all layers move" in text
    assert len(moves["by_layer"]) == 3
    assert sum(moves["by_layer"]) > max(moves["by_layer"])
    times = [row["move_ns"] for row in found["drift"] if row["moves"]]
    assert times
    assert all(time >= 1e9 for time in times)  # an expert and more


def load_table(path, steps):
    """A table of loads: in each step, the expert of its number is hot."""
    rows = ["step,layer,expert,tokens"]
    rows += [f"{at},0,{e},{1 + 9 * (e == at)}" for at in steps for e in range(8)]
    path.write_text("\n".join(rows))
    return str(path)


def test_place_prints_the_drift_of_several_steps(workload, tmp_path):
    path = load_table(tmp_path / "loads.csv", (3, 7, 6, 5))
    words = ["place", workload, "--load", path, "--expert-bytes", "1000"]
    text = run(*words)
    assert "pays after" in text
    assert "does not pay" in text
    steps = json.loads(run(*words, "--json"))["drift"]
    assert [step["step"] for step in steps] == [2, 3]
    page = tmp_path / "page.html"
    run(*words, "--html", str(page))
    assert "drift-table" in page.read_text()


def test_savings_are_of_the_placement_that_stays_and_not_of_the_one_that_is_printed(
    workload, tmp_path
):
    words = ["place", workload, "--load", load_table(tmp_path / "loads.csv", (3, 7, 6, 5))]
    free, few = (
        json.loads(run(*words, *more, "--json")) for more in ([], ["--max-moves", "4"])
    )
    assert few["after"] != free["after"]
    for one, other in zip(few["drift"], free["drift"], strict=True):
        assert one["moves"] <= min(4, other["moves"])
        share = [1 - row["imbalance_anew"] / row["imbalance_kept"] for row in (one, other)]
        assert one["saved_ns"] * share[1] == pytest.approx(other["saved_ns"] * share[0])


def test_two_steps_are_too_few_to_measure_drift(workload, tmp_path):
    path = load_table(tmp_path / "loads.csv", (3, 7))
    assert "Drift: n/a (a third step" in run("place", workload, "--load", path)


def test_the_balance_of_a_load_is_that_of_the_load(workload, tmp_path):
    path = load_table(tmp_path / "loads.csv", (2,))
    words = "place", workload, "--load", path, "--replicas", "1"
    text, found = run(*words), json.loads(run(*words, "--json"))
    # Experts 2 and 3 share a GPU of four: 11 of 17 tokens.
    assert found["imbalance"]["of"] == "load"
    assert found["imbalance"]["before"] == pytest.approx(11 / 17 * 4)
    assert found["imbalance"]["after"] == pytest.approx(11 / 17 * 4)
    assert "times the mean of the measured load" in text
    assert json.loads(run("place", workload, "--json"))["imbalance"]["of"] == "workload"
    page = tmp_path / "page.html"
    run(*words, "--html", str(page))
    assert "times: of the workload" not in page.read_text()
    assert "Placed anew, the dispatch is" in page.read_text()
    assert not re.search(r"\d us\b", page.read_text())
