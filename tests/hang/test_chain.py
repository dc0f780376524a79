"""Test which links of the chain of waiting are shown, and what is said of others."""

import re

from builders.commands import invoke

from fastcomm.hang.analysis import diagnose_hang
from fastcomm.synthetic.hangs.dumps import DumpForm, write_dumps
from fastcomm.synthetic.hangs.faults import planted


def test_who_waits_for_the_culprit_comes_first_and_what_is_left_out_is_counted(tmp_path):
    planned = planted("not_arrived", 1022, 64)
    write_dumps(planned, tmp_path, DumpForm(), 1022)
    hang = diagnose_hang(tmp_path)
    assert hang.culprits == planned.culprits
    (culprit,) = hang.culprits
    are_direct = [culprit in link.waits_for for link in hang.links]
    assert are_direct == sorted(are_direct, reverse=True)
    assert are_direct[0]
    text = invoke("hang", tmp_path, code=5).stdout
    head = next(line for line in text.splitlines() if "stand in" in line)
    assert "and wait for" in head
    more = re.search(r"(\d+) more calls in which ranks stand", text)
    assert int(more[1]) == hang.calls - 12
    assert hang.calls > len(hang.links)


def test_a_chain_that_is_shown_whole_has_no_more_calls(tmp_path):
    write_dumps(planted("not_arrived", 0, 16), tmp_path, DumpForm(), 0)
    hang = diagnose_hang(tmp_path)
    assert hang.calls <= 12
    assert "more calls" not in invoke("hang", tmp_path, code=5).stdout
