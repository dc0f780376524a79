"""Test the verdicts on made-up jobs, and that these hang as planted."""

import gzip
import json
from collections import Counter

import pytest
from builders.commands import invoke

from fastcomm.hang.analysis import diagnose_hang
from fastcomm.synthetic.hangs.dumps import DumpForm, drawn_form, write_dumps
from fastcomm.synthetic.hangs.faults import HANG_FAULTS, HEALTHY, MESSAGE_FAULTS, planted
from fastcomm.synthetic.hangs.play import NEVER, HungPlay
from fastcomm.synthetic.hangs.program import HungLayout, StepProgram

LARGE = 256  # ranks, at most


def verdict(folder, fault, seed, most_ranks):
    """The planted hang, and what fastcomm makes of its dumps."""
    hang = planted(fault, seed, most_ranks)
    write_dumps(hang, folder / f"{fault}-{seed}", drawn_form(seed), seed)
    return hang, diagnose_hang(folder / f"{fault}-{seed}")


@pytest.mark.parametrize("fault", [*HANG_FAULTS, *MESSAGE_FAULTS, *HEALTHY])
def test_kind_and_culprits_are_those_that_were_planted(tmp_path, fault):
    planned, hang = verdict(tmp_path, fault, 0, 16)
    assert (hang.kind, hang.culprits) in planned.accept
    assert hang.hang == (fault not in HEALTHY)
    assert hang.missing == planned.missing


def test_messages_are_matched_in_their_order(tmp_path):
    # Rank 3 leaves out a send: its neighbor's send is another than the one it waits for.
    planned, hang = verdict(tmp_path, "p2p_unmatched", 1, 16)
    assert planned.culprits == (3,)
    assert (hang.kind, hang.culprits) in planned.accept


def test_a_call_that_the_ring_of_all_members_may_have_overwritten_is_not_stalled(tmp_path):
    # The oldest call in the dumps of two ranks is open: what they stand in came before it.
    planned, hang = verdict(tmp_path, "missing_rank", 1007, LARGE)
    assert (hang.kind, hang.culprits) in planned.accept


def test_messages_that_short_rings_cannot_count_are_no_quiet_job(tmp_path):
    planned, hang = verdict(tmp_path, "p2p_unmatched", 1004, LARGE)
    assert (hang.kind, hang.culprits) in planned.accept
    assert hang.confidence == "low"


@pytest.mark.parametrize("seed", [131, 150, 163])
def test_a_rhythm_that_all_ranks_of_a_circle_leave_does_not_tell_who_is_odd(tmp_path, seed):
    # Micro-batches repeat within a step, so that both sides of the message leave that rhythm.
    planned, hang = verdict(tmp_path, "p2p_extra", seed, 16)
    assert (hang.kind, hang.culprits) in planned.accept
    assert hang.confidence == "low"


def test_sides_that_both_receive_beside_a_message_that_is_done_wait_for_each_other(tmp_path):
    # The other message of the batch is done: it does not tell who left the order.
    planned, hang = verdict(tmp_path, "p2p_extra", 195, 16)
    assert (hang.kind, hang.culprits, hang.confidence) == ("p2p_order", (2, 10), "low")
    assert (hang.kind, hang.culprits) in planned.accept


def test_a_root_that_nobody_was_before_is_blamed_with_low_confidence(tmp_path):
    # The ring is shorter than a step: no dump shows who was root of the gather before.
    planned, hang = verdict(tmp_path, "mismatch_root", 7002, 64)
    assert hang.kind == "mismatch_root"
    assert (hang.kind, hang.culprits) in planned.accept or hang.confidence == "low"
    planned, hang = verdict(tmp_path, "mismatch_root", 7003, 64)
    assert (hang.kind, hang.culprits) in planned.accept
    assert hang.confidence == "high"


@pytest.mark.soak
def test_large_hangs_are_explained_and_no_healthy_job_is_blamed(tmp_path):
    wrong = Counter()
    faults = (*HANG_FAULTS, *MESSAGE_FAULTS)
    for fault in faults:
        for seed in range(15):
            planned, hang = verdict(tmp_path, fault, 1000 + seed, LARGE)
            wrong["hang"] += (hang.kind, hang.culprits) not in planned.accept
    for fault in HEALTHY:
        for seed in range(34):
            wrong["healthy"] += verdict(tmp_path, fault, 1000 + seed, LARGE)[1].hang
    assert wrong["hang"] <= 0.05 * 15 * len(faults)
    assert wrong["healthy"] == 0


def test_a_job_without_a_fault_ends():
    for batched in (True, False):
        layout = HungLayout(tp=2, dp=2, pp=4, ep=2)
        program = StepProgram(layout=layout, is_batched=batched, overlaps=True, gathers=True)
        step = {rank: program.turns(rank) for rank in range(layout.world)}
        for ahead in (True, False):
            turns = HungPlay(steps=[step, step], runs_ahead=ahead).played
            assert all(len(own) == 2 * len(step[rank]) for rank, own in turns.items())
            assert all(turn.ended < NEVER for own in turns.values() for turn in own)


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="nonsense: expected one of missing_rank"):
        planted("nonsense", 0)


def test_dumps_of_one_rank_lack_the_ranks_of_a_group_that_others_state(tmp_path):
    hang = planted("not_arrived", 2, 16)
    folder = tmp_path / "dumps"
    paths = write_dumps(hang, folder, DumpForm(is_json=True, name="rank_{}.gz"))
    for path in paths[::2]:  # an older release states no groups
        document = json.loads(gzip.decompress(path.read_bytes()))
        del document["pg_config"]
        path.write_bytes(gzip.compress(json.dumps(document).encode()))
    found = diagnose_hang(folder)
    assert (found.kind, found.culprits) == ("not_arrived", hang.culprits)
    assert len({link.group for link in found.links}) == len(found.links)


def test_a_second_set_of_dumps_under_the_same_names_is_read_anew(tmp_path):
    for seed in (1, 4):
        hang = planted("mismatch_dtype", seed, 16)
        folder = tmp_path / "dumps"
        for path in folder.glob("*"):
            path.unlink()
        write_dumps(hang, folder, DumpForm(), seed)
        document = json.loads(invoke("hang", folder, "--json", code=5).stdout)
        assert document["culprits"] == [*hang.culprits]
        assert any("Half" in line for line in document["evidence"])
