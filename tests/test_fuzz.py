"""Test cases of the fuzzer, and every case that failed once."""

import warnings
from random import Random

import pytest
from builders.fault_tools import in_time
from fuzz.mutate import mutated
from fuzz.seeds import SEEDS
from fuzz.worker import Cases, outcome

SOME = (2, 3)
COMPILED = 600  # seconds
FOUND = {
    "all_reduce.log": [1, 1000],
    "cluster.toml": [100107],
    "documents.json": [*range(4, 12)],
    "links.toml": [1795290635],
    "model.toml": [36],
    "path.zip": [1795290634, 1795290925],
    "rank_0.json": [1795901401, 1795901407],
    "scanned.json": [1795290950],
    "store": [24, 100114, 100137, 1795291512],
    "study.parquet": [22, 100050],
    "table.parquet": [51, 100132],
    "trial": [56, 1031, 100148],
    "uniform.json": [11, 13, 30, 45, 60, 61],
    "w.parquet": [67, 1795290546],
    "workload": [1795292769],
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return Cases(tmp_path_factory.mktemp("seeds"))


@pytest.mark.parametrize("name", SEEDS)
def test_a_changed_file_is_read_or_refused(cases, tmp_path, name):
    (tmp_path / "first").mkdir()
    with in_time(COMPILED):  # kernels compile here, and not within the time of a case
        outcome(name, cases.place(name, 0, tmp_path / "first"))
    for number in (0, *SOME, *FOUND.get(name, ())):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = cases.place(name, number, folder)
        with in_time(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind, said = outcome(name, path)
        assert kind in ("read", "refused"), f"{name} {number}: {said}"
        assert number or kind == "read", said


@pytest.mark.parametrize("name", ["rank0.json", "w.npz", "nsys_0.sqlite", "config.toml"])
def test_a_case_is_determined_by_its_number(cases, tmp_path, name):
    found = []
    for again in range(2):
        for number in (3, 4):
            folder = tmp_path / f"{again}-{number}"
            folder.mkdir()
            found.append(cases.place(name, number, folder).read_bytes())
    assert found[:2] == found[2:]


def test_damage_does_not_stop_at_files_that_are_damaged_already(tmp_path):
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"no database")
    for number in range(30):
        mutated(path, Random(number))
