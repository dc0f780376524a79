"""What `make hangs` plants can hang, and its check fails where a verdict is wrong.

The jobs themselves need PyTorch, and are recorded by `make hangs` alone.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders.places import RECORDED, TESTS
from builders.processes import is_alive, pids_in

FOLDER = TESTS / "jobs" / "hangs"
WAIT_S = 60
# Records with ranks that sleep, in the place of those that need PyTorch.
MAIN = """
import os, pathlib, sys, time, types
from unittest.mock import MagicMock
sys.modules |= {{"torch": MagicMock(), "torch.distributed": MagicMock()}}
worker = sys.modules["worker"] = types.ModuleType("worker")
def run(plan, rank, *arguments):
    pathlib.Path({folder!r}, f"{{plan.name}}-{{rank}}").write_text(str(os.getpid()))
    time.sleep(600)
worker.run, worker.State = run, MagicMock()
worker.State.FIELDS = ()
import record
record.Launcher.dump = lambda launcher: time.sleep(600)
record.main()
"""


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """Import the scripts as they import one another, and forget them again."""
    names = ("check", "plans", "programs")
    monkeypatch.syspath_prepend(FOLDER)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


def test_every_kind_that_gloo_can_show_is_planted():
    import plans

    kinds = {plan.accept[0][0] for plan in plans.plans(0)}
    assert kinds == {
        *("none", "missing_rank", "not_arrived", "order", "mismatch_op", "mismatch_size"),
        *("mismatch_dtype", "mismatch_root", "p2p_unmatched", "p2p_order", "group_creation"),
    }


@pytest.mark.parametrize("seed", range(5))
def test_a_right_answer_names_ranks_of_the_job(seed):
    import plans

    for plan in plans.plans(seed):
        ranks = {rank for _, own in plan.accept for rank in own}
        assert ranks <= {*range(plan.world)}, plan.name
        assert 4 <= plan.world <= 8, plan.name
        assert plan.moment != "still" or plan.step < plan.steps, plan.name


@pytest.mark.parametrize("seed", range(5))
def test_a_changed_list_differs_from_that_of_the_other_ranks(seed):
    import plans
    import programs

    for plan in plans.plans(seed):
        rank = plan.culprits[0] if plan.culprits else 0
        own = programs.calls(plan.workload, plan.shape, rank, plan.seed)
        if plan.calls and own:
            assert programs.changed(own, plan.fault, plan.calls, **plan.change) != own, (
                plan.name
            )


@pytest.mark.parametrize("seed", range(5))
def test_calls_are_swapped_only_where_the_ranks_then_wait_for_each_other(seed):
    import plans
    import programs

    for plan in plans.plans(seed):
        if plan.fault != "swap":
            continue
        own = programs.calls(plan.workload, plan.shape, plan.culprits[0], plan.seed)
        groups = programs.groups(plan.workload, plan.shape)
        first, second = (
            {*part}
            for name in plan.calls
            for call in own
            for part in groups[call.group]
            if call.name == name and plan.culprits[0] in part
        )
        assert len(first & second) > 1, plan.name


@pytest.fixture
def recordings(tmp_path):
    """A folder as `make hangs` makes it, of hangs that are recorded already."""
    for case in ("stuck_tpdp_queue_0", "finished_moe_0"):
        shutil.copytree(RECORDED / "hangs" / case, tmp_path / case / "dumps")
        (tmp_path / case / "dumps" / "truth.json").rename(tmp_path / case / "truth.json")
    return tmp_path


def checked(folder, monkeypatch):
    import check

    monkeypatch.setattr(sys, "argv", ["check.py", str(folder)])
    with pytest.raises(SystemExit) as end:
        check.main()
    return end.value.code


def test_the_check_counts_right_verdicts(recordings, monkeypatch, capsys):
    assert not checked(recordings, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert "| all hangs | 1 | 1 |" in lines
    assert lines[-1] == "100.0% of 1 hangs right; blamed without a hang: none"


@pytest.mark.parametrize("case", ["stuck_tpdp_queue_0", "finished_moe_0"])
def test_the_check_fails_on_a_wrong_verdict(recordings, monkeypatch, capsys, case):
    path = recordings / case / "truth.json"
    truth = json.loads(path.read_text())
    accept = [{"kind": "order", "culprits": [0]}]
    path.write_text(json.dumps({**truth, "kind": "order", "hang": True, "accept": accept}))
    assert checked(recordings, monkeypatch)
    assert f"wrong: {recordings / case}" in capsys.readouterr().out


def test_the_check_fails_where_a_job_without_a_hang_is_blamed(recordings, monkeypatch, capsys):
    path = recordings / "stuck_tpdp_queue_0" / "truth.json"
    truth = json.loads(path.read_text())
    accept = [{"kind": "none", "culprits": []}]
    path.write_text(json.dumps({**truth, "kind": "none", "hang": False, "accept": accept}))
    assert checked(recordings, monkeypatch)
    assert "blamed without a hang: ['stuck_tpdp_queue_0']" in capsys.readouterr().out


def test_the_table_counts_what_another_analyzer_blames(recordings, monkeypatch, capsys):
    result = {"as_written": {"error": "KeyError: 0"}, "with_members": {"culprits": [3]}}
    results = {"stuck_tpdp_queue_0": result, "finished_moe_0": result}
    (recordings / "analyzer.json").write_text(json.dumps(results))
    assert not checked(recordings, monkeypatch)
    out = capsys.readouterr().out
    assert "| all hangs | 1 | 1 | 0 | 1 |" in out
    assert "| no hang: blamed | 1 | 0 | 0 | 1 |" in out
    assert "fails on 2 of 2 jobs" in out


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_terminated_recording_ends_the_ranks_of_its_jobs(tmp_path):
    folder = tmp_path / "pids"
    folder.mkdir()
    words = [tmp_path / "out", "stuck-sub-0", "stuck-moe-0", "--seeds", "1"]
    with subprocess.Popen(
        [sys.executable, "-c", MAIN.format(folder=str(folder)), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
    ) as recording:
        until = time.monotonic() + WAIT_S
        while len(pids := pids_in(folder)) < 8 and time.monotonic() < until:
            time.sleep(0.05)
        recording.send_signal(signal.SIGTERM)
        assert recording.wait(WAIT_S) == 128 + signal.SIGTERM
    assert len(pids) >= 8
    while any(map(is_alive, pids_in(folder))) and time.monotonic() < until:
        time.sleep(0.05)  # a killed process takes a while to end
    assert not [pid for pid in pids_in(folder) if is_alive(pid)]
