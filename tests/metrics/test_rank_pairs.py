"""Test the bytes of pairs of ranks against the splits that traces record."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner

import fastcomm
from fastcomm.cli.main import main
from fastcomm.metrics.rank_pairs import NO_EVENTS, NO_SPLITS, matrix
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

JOB = {"ranks": 8, "tp": 2, "pp": 1, "dp": 4, "ep": 4, "steps": 2, "layers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pairs") / "run"
    write(Job.of(**JOB, micro_batches=1), made)
    return made


def traces(folder):
    for path in sorted(folder.iterdir()):
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt") as file:
            yield path, json.load(file)


def exchanges(trace):
    """The arguments of the all-to-alls of a trace, by their kernels."""
    for event in trace["traceEvents"]:
        args = event.get("args", {})
        if event.get("cat") == "kernel" and "all_to_all" in args.get("Collective name", ""):
            yield args


def recorded(folder):
    """Bytes of each pair of ranks: the definition, on the text of the traces."""
    total = Counter()
    for _, trace in traces(folder):
        rank = trace["distributedInfo"]["rank"]
        for args in exchanges(trace):
            rows = json.loads(args["In split size"])
            row = args["In msg nelems"] * 2 // sum(rows)  # bf16
            for peer, count in zip(json.loads(args["Process Group Ranks"]), rows, strict=True):
                total[rank, peer] += count * row
    return total


def table_of(metrics):
    rows = metrics.tables["rank_pairs"].to_pylist()
    return {(row["source"], row["target"]): row["bytes"] for row in rows}


def test_pairs_have_the_splits_to_the_byte(folder):
    metrics = fastcomm.open(folder).metrics()
    expected = recorded(folder)
    assert len(expected) == 32
    assert table_of(metrics) == expected
    assert metrics.rank_pairs.events_without_splits == 0
    received = Counter()
    for (_, target), size in expected.items():
        received[target] += size
    fullest, most = received.most_common(1)[0]
    assert received[metrics.rank_pairs.fullest_rank] == most == received[fullest]
    mean = sum(received.values()) / len(received)
    assert metrics.rank_pairs.fullest_over_mean == pytest.approx(most / mean)
    assert metrics.rank_pairs.pairs[0].bytes == max(expected.values())
    assert metrics.rank_pairs.pairs[0].bytes_per_step == max(expected.values()) / 2


def test_pairs_of_a_rank_that_is_not_read_are_by_its_receivers(folder):
    metrics = fastcomm.open(folder, ranks=[0, 2]).metrics()
    expected = recorded(folder)
    found = table_of(metrics)
    assert found == {pair: expected[pair] for pair in found}
    # Of ranks 0 and 2 in the group 0, 2, 4, 6: all that they send, and get from 4 and 6.
    assert set(found) == {
        *((source, target) for source in (0, 2) for target in (0, 2, 4, 6)),
        *((source, target) for source in (4, 6) for target in (0, 2)),
    }


def test_a_store_has_the_same_pairs(folder, tmp_path):
    run = fastcomm.open(folder)
    words = ["ingest", str(folder), "-o", str(tmp_path / "store")]
    assert CliRunner().invoke(main, words).exit_code == 0
    stored = fastcomm.open(tmp_path / "store").metrics()
    assert table_of(stored) == table_of(run.metrics())


def changed(folder, target, change):
    """A copy of the run, with other arguments of its all-to-alls."""
    target.mkdir()
    for path, trace in traces(folder):
        for args in exchanges(trace):
            change(args)
        (target / path.name.removesuffix(".gz")).write_text(json.dumps(trace))
    return fastcomm.open(target).metrics()


def cut(args):
    args["In split size"] = args["In split size"].replace("]", ", ...]")


def short(args):
    args["In split size"] = "[1, 2]"


def odd(args):
    rows = json.loads(args["Out split size"])
    args["Out split size"] = json.dumps([rows[0] + 1, *rows[1:]])


def negative(args):
    rows = json.loads(args["In split size"])
    args["In split size"] = json.dumps([-rows[0], *rows[1:]])


def no_list(args):
    args["In split size"] = '{"a": 1}'


def nothing(args):
    args["In split size"] = "[0, 0, 0, 0]"


@pytest.mark.parametrize("change", [cut, short, odd, negative, no_list, nothing])
def test_splits_that_do_not_fit_are_in_no_pair(folder, tmp_path, change):
    metrics = changed(folder, tmp_path / "run", change)
    assert metrics.rank_pairs.unknown == NO_SPLITS
    assert metrics.rank_pairs.events_without_splits == metrics.rank_pairs.events > 0
    assert metrics.tables["rank_pairs"].num_rows == 0


def test_an_all_to_all_without_splits_is_even(folder, tmp_path):
    def even(args):
        args["In split size"] = args["Out split size"] = "[]"
        args["In msg nelems"] = args["Out msg nelems"] = 4096

    metrics = changed(folder, tmp_path / "run", even)
    sizes = set(table_of(metrics).values())
    assert len(sizes) == 1
    assert metrics.rank_pairs.fullest_over_mean == 1.0
    events = metrics.rank_pairs.events // 8
    assert sizes == {events * 4096 * 2 // 4}


def test_empty_all_to_alls_send_nothing(folder, tmp_path):
    def empty(args):
        args["In split size"] = args["Out split size"] = "[0, 0, 0, 0]"
        args["In msg nelems"] = args["Out msg nelems"] = 0

    metrics = changed(folder, tmp_path / "run", empty)
    assert set(table_of(metrics).values()) == {0}
    assert metrics.rank_pairs.fullest_over_mean is None


def test_a_run_without_all_to_alls_says_so(tmp_path):
    write(Job.of(ranks=2, steps=1, layers=1), tmp_path / "run")
    metrics = fastcomm.open(tmp_path / "run").metrics()
    assert metrics.rank_pairs.unknown == NO_EVENTS
    assert metrics.rank_pairs.to_dict()["pairs"] == []


def test_the_matrix_has_the_bytes_of_a_step(folder):
    metrics = fastcomm.open(folder).metrics()
    grid, ranks = matrix(metrics.tables["rank_pairs"])
    assert ranks == list(range(8))
    expected = recorded(folder)
    assert all(grid[pair] == size / 2 for pair, size in expected.items())
    assert np.count_nonzero(grid) == len(expected)
