"""Test what is beyond any job: refused in one line, or read in linear time."""

import json
import time
from pathlib import Path

import pytest
from builders.commands import invoke
from builders.hang_files import dump_of

from fastcomm.errors import FastcommError
from fastcomm.hang.analysis import diagnose_hang

MANY = 100_000


def write(folder, ranks, name="nccl:all_reduce", group="0", count=1):
    """Write the dump of rank 0, which stands in one call of a group of some ranks."""
    call = dump_of(0, 1, 0, absent=1)["entries"][0] | {
        "profiling_name": name,
        "process_group": [group, "d"],
        "state": "scheduled",
        "retired": False,
        "is_p2p": "send" in name,
        "output_sizes": [[64 * count]],
    }
    config = {group: {"name": group, "desc": "d", "ranks": ranks}}
    document = {"version": "2.10", "pg_config": config, "entries": [call]}
    (folder / "rank_0.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize("ranks", ["[0, 4000000000000]", f"[0, {'9' * 5000}]", [0, 1 << 40]])
def test_a_rank_that_no_job_has_is_an_error_that_names_the_file(tmp_path, ranks):
    error = invoke("hang", write(tmp_path, ranks), code=1).stderr
    assert f"{tmp_path / 'rank_0.json'}: group '0' has a rank" in error
    assert error.count("\n") <= 3


def test_a_group_of_many_ranks_takes_linear_time(tmp_path):
    begin = time.process_time()
    hang = diagnose_hang(write(tmp_path, str([*range(MANY)])))
    assert len(hang.culprits) == len(hang.missing) == MANY - 1
    assert time.process_time() - begin < 20  # what is quadratic takes minutes


def test_an_all_gather_of_more_parts_than_any_job_has_ranks_tells_no_size(tmp_path):
    folder = write(tmp_path, [], "nccl:_all_gather_base", count=1 << 40)
    assert diagnose_hang(folder).world_size == 1


def test_the_launcher_names_no_rank_that_no_job_has(tmp_path):
    (write(tmp_path, "[0, 1]") / "launcher.log").write_text("rank 9999999 exited with code 1\n")
    assert diagnose_hang(tmp_path).world_size == 2


@pytest.mark.parametrize("ranks", ["[0, 1]", []])
def test_the_peer_of_a_message_outside_of_its_group_is_unknown(tmp_path, ranks):
    hang = diagnose_hang(write(tmp_path, ranks, "nccl:send 0->900000000"))
    assert (hang.kind, hang.culprits, hang.waiting) == ("p2p_unmatched", (), (0,))
    assert hang.confidence == "low"
    assert "Rank 0 waits in send" in hang.headline
    assert "nothing tells who holds it up" in hang.headline
    assert "ank -1" not in "".join((hang.headline, *hang.evidence))


def test_folders_too_deep_to_search_are_an_error_of_one_line(tmp_path):
    deep = [Path(f"{tmp_path}{k * '/d'}") for k in range(1, 1101)]
    for folder in deep:
        folder.mkdir()
    try:
        with pytest.raises(FastcommError, match=r"folders too deep|no dump") as caught:
            diagnose_hang(tmp_path)
        assert "\n" not in str(caught.value)
    finally:
        for folder in reversed(deep):
            folder.rmdir()


def test_no_path_at_all_is_said():
    with pytest.raises(FastcommError, match="no path: no dump"):
        diagnose_hang([])
