"""Test the verdicts on dumps of real jobs, and on made-up ones of many ranks."""

import json
import shutil

import pytest
from builders.commands import invoke
from builders.shared_data import needs, path_of

from fastcomm.formats.flight_recorder import rank_of
from fastcomm.hang.analysis import diagnose_hang

HANGS = path_of("hangs")
CASES = sorted(path.name for path in HANGS.glob("*") if path.is_dir())
pytestmark = needs("hangs")


@pytest.fixture
def case(tmp_path):
    def copy(name):
        """A case without its truth."""
        folder = shutil.copytree(
            HANGS / name, tmp_path / name, ignore=shutil.ignore_patterns("truth.json")
        )
        return folder, json.loads((HANGS / name / "truth.json").read_text())

    return copy


@pytest.mark.parametrize("name", CASES)
def test_kind_and_culprits_are_those_that_were_planted(case, name):
    folder, truth = case(name)
    hang = diagnose_hang(folder)
    accepted = [(each["kind"], each["culprits"]) for each in truth["accept"]]
    assert hang.hang == truth["hang"]
    assert (hang.kind, [*hang.culprits]) in accepted
    assert set(hang.missing) == set(truth["missing_dumps"])
    assert str(folder) in "".join(hang.evidence) or not hang.hang or hang.missing


def test_a_damaged_dump_is_an_error_or_left_out(case):
    folder, _ = case("running_fsdp_0")
    path = next(folder.glob("rank_1*"))
    path.write_bytes(b"\x80\x02}cos\nsystem\n")
    assert "refused as a pickle" in invoke("hang", folder, code=1).stderr
    done = invoke("hang", folder, "--keep-going", "--json", code=3)
    assert str(path) in json.loads(done.stdout)["failed"][0]


def test_the_exit_code_says_whether_there_is_a_hang(case):
    stuck, _ = case("stuck_tpdp_queue_0")
    document = json.loads(invoke("hang", stuck, "--json", code=5).stdout)
    assert document["culprits"] == [3]
    assert document["group"]["parallelism"] == "DP"
    assert 3 in document["group"]["ranks"]
    running, _ = case("running_fsdp_0")
    assert "No hang" in invoke("hang", running).stdout


@pytest.mark.parametrize("name", ["nccl_order_swap", "nccl_not_arrived", "skip_sub_0"])
def test_one_dump_that_is_absent_moves_no_blame(case, name):
    folder, truth = case(name)
    culprits = {rank for one in truth["accept"] for rank in one["culprits"]}
    innocent = max({rank_of(path) for path in folder.iterdir()} - culprits - {None})
    for path in folder.iterdir():
        if rank_of(path) == innocent:
            path.unlink()
    hang = diagnose_hang(folder)
    accepted = [(each["kind"], each["culprits"]) for each in truth["accept"]]
    assert (hang.kind, [*hang.culprits]) in accepted
    assert hang.missing == (innocent,)
